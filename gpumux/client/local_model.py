"""The local model and optimizers as a copy of a job's state: fetched when they are read, pushed when the script says
so, and fetched once more when the job ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch

from gpumux.capture.fetching import FetchingState, fetch_arguments, without_fetching, without_modes
from gpumux.capture.local_state import dictionaries, install, load_local
from gpumux.capture.outside.tensors import Outside
from gpumux.capture.source import user_line
from gpumux.capture.staleness import StalenessHooks, of_job
from gpumux.capture.state import ALL, Part, Place, StateTable
from gpumux.capture.step import Choice, StepProgram
from gpumux.capture.structure import State, Structure, from_local, without_steps
from gpumux.client.future import Pending, StepFuture, skipped_in, wait_answered
from gpumux.client.recovery import Recovery
from gpumux.client.remote import Remote
from gpumux.client.snapshots import SnapshotMetadata
from gpumux.errors import AdmissionRefused, ConfigError, GpumuxError, LocalWrite, StaleGradient, StaleState
from gpumux.waves.steps import Waves
from gpumux.wording import counted

log = logging.getLogger("gpumux.client")

LOCK_S: Final = 60.0  # how long a read waits for another thread's verb
ROOM_S, ROOM_PAUSE_S = 10.0, 0.2  # at the end of a job: for how long, and how often, a daemon without room is asked
OFTEN: Final = 3  # consecutive steps, each followed by a read, after which a warning is logged


class LocalModel:
    """Keeps the local tensors up to date with the state in the daemon.

    `staleness` knows which local tensors
    are older than the daemon's, and calls `fetch` when one of them is read. `unsynced` counts the steps whose results
    are not in the local objects.

    owner: the job. Local tensors that are stale hold the StalenessHooks, and through them this object and the job: a
    job without other references lives until its tensors are up to date or dropped.
    """

    def __init__(
        self, owner: object, *, name: str, table: StateTable, remote: Remote, pending: Pending, recovery: Recovery,
        load: Callable[[str, torch.Tensor], None] = lambda name, tensor: None, waves: Waves | None = None,
    ) -> None:  # fmt: skip
        self._owner = owner
        self._name = name
        self._table = table
        self._remote = remote
        self._waves = waves
        self._pending = pending
        self._recovery = recovery
        self._structures: dict[Structure, Structure] = {}
        structure, host = from_local(table)
        self._state = State(self.intern(structure), host, frozenset(i for i, _ in structure.kept))
        self._undecided: tuple[State, StepFuture] | None = None  # the newest step, and the state before it
        self.unsynced = 0
        self._unread = 0  # steps since the last read
        self._consecutive_reads = 0  # consecutive steps that were each followed by a read
        self._logged_read = 0  # the level of the most important message about a read
        self._cleared: dict[tuple[int, frozenset[int]], Structure] = {}  # a structure without some gradients
        self._unkept: dict[int, Place] = {}  # gradients that the script set and that the job need not keep
        self.staleness = StalenessHooks(of_job(name), table, self)
        self.outside = Outside(table, self.staleness, load)

    def intern(self, structure: Structure) -> Structure:
        """The one object for all equal structures, so that they can be compared by identity."""
        return self._structures.setdefault(structure, structure)

    @property
    def state(self) -> State:
        """The host side of the job's state after the newest submitted step. Waits for that step if a GradScaler may
        have left an optimizer's step out in it."""
        if self._undecided is not None:
            before, future = self._undecided
            wait_answered(future)
            self._undecided = None
            skipped = skipped_in(future)
            if skipped:
                found = without_steps(before, self._state, skipped)
                self._state = State(self.intern(found.structure), found.host, found.keep)
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        self._state, self._undecided = state, None

    def structure(self) -> Structure:
        """The structure of the newest state (`staleness.Source`)."""
        return self.state.structure

    def advance(self, choice: Choice, future: StepFuture) -> None:
        """Apply the host side of a step that was submitted: counters, and the hyperparameters and flags it changed."""
        before, self._state = self._state, choice.after(self._state.keep)
        choice.apply(self._table)
        self._unread += 1
        changed = self._state.structure is not before.structure or self._state.host != before.host
        self.staleness.replaced(choice.program.replaces, before.structure, self._state.structure)
        if choice.program.writes or changed or choice.program.remade & self.staleness.gradients.set_by_script:
            self._fall_behind(choice.program, before.structure)
        if self._meets_outside:
            self.outside.stepped(bool(choice.program.replaces.model))
        if choice.program.undecided:
            self._undecided = before, future

    @property
    def _meets_outside(self) -> bool:
        """Whether steps met tensors of no model, or views of the model's memory that variables hold."""
        return bool(self._table.only_read or self._table.written or self.outside.views)

    def follow_outside(self) -> None:
        """Find what the script changed of tensors of no model, and send it. Raises CaptureError."""
        if not self._meets_outside:
            return
        self.outside.follow()
        if self.outside.changed:
            changed = set(self.outside.changed)
            if self._waves is not None:
                changed |= {self._table.replica(b) for b in changed}
            wanted = [b for b in self._remote.resident() if b in changed]
            with without_modes():
                self._recovery.persist(lambda: self._remote.push(wanted))
            self.outside.changed.clear()

    # ---- verbs

    def sync(self) -> None:
        """Job.sync()."""
        with self._recovery.lock:
            with without_modes():
                self.staleness.fetch_from_others()
                self.take_gradients()
            self._bring(ALL)

    def state_dict(self) -> dict[str, Any]:
        """Job.state_dict()."""
        with self._recovery.lock, without_modes():
            self.staleness.check_writes(bytes_too=True)
            with self.staleness.suspended():
                found: dict[str, Any] = self._recovery.persist(
                    lambda: dictionaries(self._table, self.state, self._pull)
                )
                if self._waves is not None and self._waves.step:
                    waves = self._waves
                    found["waves"] = self._recovery.persist(lambda: waves.other(self._of_lane, self._remote.pull))
            return found

    def _of_lane(self, state: State, lane: int) -> dict[str, Any]:
        """The dictionaries of one of two replicas."""
        assert self._waves is not None
        found: dict[str, Any] = dictionaries(
            self._table, state, partial(self._waves.pull, self._remote.pull, lane=lane)
        )
        return found

    def load_state(self, state: dict[str, Any] | None = None) -> None:
        """Job.load_state()."""
        waves = self._waves
        saved = state.get("waves") if waves is not None and isinstance(state, dict) else None
        if waves is None or state is None or not isinstance(saved, dict):
            self._load(None if state is None else partial(load_local, self._table, state))
            if waves is not None:
                waves.loaded()
            return
        self._load_waves(
            waves, saved["step"], partial(load_local, self._table, saved["other"]),
            partial(load_local, self._table, state), saved["gradients"],
        )  # fmt: skip

    def go_on(self, kept: SnapshotMetadata) -> None:
        """Load what a kept job of two waves has besides the replica that the job was submitted with."""
        if self._waves is not None and kept.waves is not None:
            self._load_waves(
                self._waves, int(kept.waves["step"]), partial(kept.put_back, self._table, other=True),
                partial(kept.put_back, self._table), kept.gradients_between_waves(),
            )  # fmt: skip

    def _load_waves(
        self, waves: Waves, step: int, put_other: Callable[[], None], put_newest: Callable[[], None],
        gradients: dict[str, torch.Tensor],
    ) -> None:  # fmt: skip
        """Load the state of two waves that have run so many steps: the replica of the newest step, the other one, and
        the newest step's gradients. `put_other`, `put_newest`: write a replica into the local model."""
        with self._recovery.lock:
            self._load(put_other)
            other = self.state
            self._load(put_newest, (step + 1) % 2, again=True)
            waves.loaded(other, self.state, step)
            self._push_gradients_between(gradients)

    def _push_gradients_between(self, gradients: dict[str, torch.Tensor]) -> None:
        """Push the gradients of the newest step to the other wave. Raises ConfigError for those of another step."""
        buffers = self._table.gradients_between_waves
        wrong = [
            n for n, b in buffers.items() if n not in gradients or gradients[n].nbytes != self._table.buffers[b].nbytes
        ]
        if wrong:
            raise ConfigError(
                f"the state to load has no gradient of {wrong[0]} that fits",
                "load what state_dict() gave for this step",
            )
        for name, buffer in buffers.items():
            self._table.buffers[buffer].home = [(gradients[name].contiguous().untyped_storage(), 0)]
        try:
            self._recovery.persist(lambda: self._remote.push(list(buffers.values())))
        finally:
            for buffer in buffers.values():
                self._table.buffers[buffer].home = []

    def _load(self, put: Callable[[], None] | None, lane: int | None = None, *, again: bool = False) -> None:
        """Push the local state to the daemon, after `put` has written it. Of two waves, to both replicas, or that of a
        `lane`. `again`: other state was pushed just before."""
        with self._recovery.lock, without_modes():
            self._recovery.ensure_open()
            self._keep_local(ALL)
            self.staleness.fetch_from_others()
            behind = self.staleness.stale
            with self._replaced_states(behind), self.staleness.written_entries():
                if Part.MODEL in behind:
                    self.staleness.gradients.accumulated()
                self._bring(behind)
            changes = self.staleness.gradient_changes()
            self.staleness.gradients.detach(frozenset(i for i, value in changes.items() if value is None))
            lost = self.staleness.gradients.lost()
            with self.staleness.suspended(writes=True):
                if put is not None:
                    put()
                self._table.refresh()
                structure, host = from_local(self._table, lost)
            keep = self.state.keep | frozenset(i for i, _ in structure.kept)
            before, self.state = self.state, State(self.intern(structure), host, keep)
            self.staleness.loaded(before.structure, self.state.structure)
            resident = set(self._remote.resident())
            if self._recovery.recorder is not None and not again:
                self._recovery.recorder.log.begin_anew()
            wanted = [b for b in resident if self._table.buffers[b].local]
            wanted = wanted if self._waves is None else self._waves.pushed(wanted, lane)
            self._recovery.persist(lambda: self._remote.push(wanted))
            self.staleness.fetched(ALL, adopted=True)
            self.unsynced = 0

    # ---- what is stale

    @contextmanager
    def _replaced_states(self, parts: frozenset[Part]) -> Iterator[None]:
        """Protect dictionaries that the script put in the place of stale optimizer state (`load_state_dict`) from
        fetches inside the block."""
        replaced = [
            (o, o.state) for o in self._table.optimizers
            if Part.OPTIMIZER in parts and not isinstance(o.state, FetchingState)
        ]  # fmt: skip
        for optimizer, _ in replaced:
            optimizer.state = {}
        try:
            yield
        finally:
            for optimizer, its in replaced:
                optimizer.state = its

    def _fall_behind(self, program: StepProgram, before: Structure) -> None:
        """A step has changed the state in the daemon. `before`: the structure in front of the step."""
        self.staleness.gradients.stepped(before, program.remade, program.replaces.written)
        self.staleness.newer()
        self.unsynced += 1
        self._unkept.clear()

    def fetch(self, parts: frozenset[Part]) -> None:
        """Fetch parts of the state for a read of local tensors (`staleness.Source`). Raises StaleState if they can't be
        fetched."""
        hooks = self.staleness
        if not self._recovery.lock.acquire(timeout=LOCK_S):
            hooks.refuse(f"another thread was amid a verb of the job for {LOCK_S:g} s, and the local model was read")
        try:
            parts &= hooks.stale
            if Part.OPTIMIZER in parts:
                hooks.check_states()
            if parts:
                try:
                    with without_modes():
                        self._log_read(parts)
                        self._bring(parts)
                except GpumuxError as error:
                    hooks.refuse(f"the local model was read, and could not be fetched ({error.message}),", error)
        finally:
            self._recovery.lock.release()

    def _bring(self, parts: frozenset[Part]) -> None:
        if not parts:
            return
        with without_modes():
            self._recovery.persist(lambda: self._install(parts))
            self.staleness.fetched(parts)
        if not self.staleness.stale:
            self.unsynced = 0

    def _install(self, parts: frozenset[Part]) -> None:
        self._keep_local(parts)
        wanted = None if parts == ALL else self.state.structure.buffers(self._table, parts)
        if wanted is None and self._table.only_read:
            wanted = set(self._of_replica()) - self.outside.buffers()
        mine = self.staleness.gradients.written() if Part.GRADIENTS in parts else set()
        mine |= self.outside.buffers()
        if Part.GRADIENTS not in self.staleness.stale | parts:  # backward() may have added to the local gradients
            mine |= self.state.structure.buffers(self._table, {Part.GRADIENTS})
        install(self._table, self.state, partial(self._pull, wanted=wanted), parts, mine)

    def _pull(self, write: Callable[[int, torch.Tensor], None], wanted: Collection[int] | None = None) -> None:
        """`Remote.pull`; of two waves, of the replica that the newest step changed."""
        if self._waves is None:
            self._remote.pull(write, wanted)
        else:
            self._waves.pull(self._remote.pull, write, wanted)

    def _of_replica(self) -> list[int]:
        """The job buffers that are fetched; of two waves, those of one replica."""
        return self._remote.resident() if self._waves is None else self._table.first_wave

    def _keep_local(self, parts: frozenset[Part]) -> None:
        """Keep what recovery needs of the local model, because it is about to be overwritten."""
        if Part.MODEL in parts and self._recovery.recorder is not None:
            self._recovery.recorder.keep_local()

    def _log_read(self, parts: frozenset[Part]) -> None:
        """Log the first read of the local model, and the one that shows that every step is followed by a read."""
        self._consecutive_reads = self._consecutive_reads + 1 if self._unread == 1 else 0
        self._unread = 0
        often = self._consecutive_reads >= OFTEN
        level = logging.WARNING if often else logging.INFO
        if level <= self._logged_read:
            return
        self._logged_read = level
        buffers = self.state.structure.buffers(self._table, parts) & set(self._remote.resident())
        mb = sum(self._table.buffers[b].nbytes for b in buffers) / 1e6
        log.log(
            level,
            "job %r: %s reads the local model%s, which copies %.1f MB from the daemon each time after a step%s",
            self._name, user_line(), " after every step" if often else "", mb,
            ": return what it looks at from the step, or read less often" if often else "",
        )  # fmt: skip

    # ---- gradients that the script changed

    def take_gradients(self) -> None:
        """Take over the gradients that the script cleared, zeroed or set. Raises LocalWrite for a gradient that lies in
        other memory of the job, and StaleGradient for one that has no values."""
        gradients = self.staleness.gradients
        changes = self.staleness.gradient_changes()
        if not changes:
            return
        fetch_arguments(changes.values())
        state = self.state
        before = dict(state.structure.gradients)
        places = {i: self._own_place(i, value, before.get(i)) for i, value in changes.items() if value is not None}
        cleared = frozenset(changes) - frozenset(places)
        shared = gradients.overlapping(i for i, place in places.items() if place is None)
        if shared is not None:
            raise self._shared(shared, "another's")
        # The script's tensor lies elsewhere than the gradient it replaces, and the script may still hold that one.
        gradients.detach(cleared.union(i for i, place in places.items() if place is None))
        if not places:
            key = (id(state.structure), cleared)
            structure = self._cleared.get(key)
            if structure is None:
                structure = self._cleared[key] = self.intern(state.structure.without_gradients(cleared))
            state.structure = structure
            gradients.changes_taken()
            return
        structure = state.structure.without_gradients(changes)
        kept, dropped, written = dict(structure.kept), dict(structure.dropped), []
        taken = structure.buffers(self._table, {Part.OPTIMIZER, Part.GRADIENTS})
        in_daemon = dict(state.structure.kept).keys()  # also those kept only because others share their memory
        with without_modes():
            for i, own in places.items():
                value = changes[i]
                assert value is not None
                place = own or self._place_for(i, value, taken)
                if i in state.keep or (own is not None and i in in_daemon):
                    kept[i] = place
                    written.append(place.buffer)
                else:
                    dropped[i] = self._unkept[i] = place
            state.structure = self.intern(
                Structure(
                    structure.optimizers,
                    tuple(sorted(kept.items(), key=_first)),
                    tuple(sorted(dropped.items(), key=_first)),
                )
            )
            self._push_gradients(written)
        gradients.changes_taken()

    def _own_place(self, index: int, value: torch.Tensor, before: Place | None) -> Place | None:
        """The place of a gradient that the script set, if the job already has one for it. `before`: the place of the
        gradient that it replaces. Raises LocalWrite if the memory is that of other state of the job."""
        table, name = self._table, self._table.param_names[index]
        if value.layout is not torch.strided:
            raise LocalWrite(f"the gradient that {name} was given is {value.layout}", f"{name}.grad = value.to_dense()")
        if value.is_conj() or value.is_neg():
            raise LocalWrite(
                f"the gradient that {name} was given is conjugated or negated by a flag, not in its memory",
                f"{name}.grad = value.resolve_conj().resolve_neg()",
            )
        with without_fetching():
            place = table.place(value)
            if place is None and before is not None and table.local(before) is value:
                table.restore(before, value)
        if place is None or place == before:
            return place
        if place.buffer not in self.state.structure.buffers(self._table, ALL):
            return None  # the job has no state in that memory any more
        raise self._shared(index, self._table.buffers[place.buffer].name)

    def _shared(self, index: int, owner: str) -> LocalWrite:
        name = self._table.param_names[index]
        return LocalWrite(
            f"the gradient that {name} was given shares memory with {owner}, and a plain loop's steps would add to both"
            " at once",
            f"give it a copy: {name}.grad = value.clone()",
        )

    def _place_for(self, index: int, value: torch.Tensor, taken: Collection[int]) -> Place:
        """A place for a gradient that the script set: the tensor's own memory, or a copy if other tensors may lie in
        that. `taken`: buffers in which other state lies."""
        table = self._table
        name = f"grad.{table.param_names[index]}"
        with without_fetching(), torch.no_grad():
            path, layout = ("grad", index), (value.dtype, tuple(value.shape), value.stride())
            local = table.placeholder(path, name, *layout)
            own, exclusive = table.place(local), local.untyped_storage().nbytes() == local.nbytes
            if own is None or own.buffer in taken or not exclusive:  # the rest may be newer in the daemon
                local = table.fresh(path, name, *layout)
            if index in self.state.keep and table.takes(local, value):
                table.adopt(path, name, value)
                self.staleness.gradients.adopted(index)
                local = value
            else:
                local.copy_(value.detach())
                self.staleness.gradients.copied(index, value)
            place = table.place(local)
        assert place is not None
        table.buffers[place.buffer].filled = True
        return place

    def _push_gradients(self, buffers: list[int]) -> None:
        resident = set(self._remote.resident())
        wanted = sorted(resident.intersection(buffers))  # the others are pushed with the first Program that uses them
        self._recovery.persist(lambda: self._remote.push(wanted))

    def keep_gradients(self, keep: frozenset[int]) -> None:
        """From now on keep these gradients in the daemon, because a step reads them."""
        state = self.state
        state.keep = keep
        mine = {i: place for i, place in self._unkept.items() if i in keep}
        if mine:
            kept = {**dict(state.structure.kept), **mine}
            dropped = tuple((i, place) for i, place in state.structure.dropped if i not in mine)
            state.structure = self.intern(
                Structure(state.structure.optimizers, tuple(sorted(kept.items(), key=_first)), dropped)
            )
            self._push_gradients([place.buffer for place in mine.values()])

    # ---- the end

    def fetch_at_close(self, limit: float | None) -> bool:
        """Fetch the trained state if the local objects are stale. `limit`: seconds to wait without progress, None for
        no limit. A failure is logged, so that the job can be closed all the same. Returns whether nothing is missing
        then."""
        if not self.unsynced or not self.staleness.stale:
            return True
        steps = self.unsynced
        try:
            self._recovery.come_back(limit)
            if self._remote.ended is not None:
                raise self._remote.end_error()
            if self._recovery.session.dead is not None:
                raise self._recovery.session.dead
            self._finish_steps(limit)
            self._remote.give_up_s = limit
            started = time.monotonic()
            parts = self.staleness.stale
            with without_modes(), self._replaced_states(parts):
                try:
                    if Part.MODEL in parts:
                        self.staleness.gradients.accumulated()
                except StaleGradient as error:
                    log.warning("job %r ends, and a gradient is not the plain loop's: %s", self._name, error.message)
                room_s = ROOM_S if limit is None else min(limit, ROOM_S)
                if limit is None:
                    self._recovery.persist(lambda: self._install_in_time(parts, room_s))
                else:
                    self._install_in_time(parts, room_s)
                self.staleness.fetched(parts)
            self.unsynced = 0
            log.info(
                "job %r ends: what its last %s trained is in the local model (%.1f s)",
                self._name, counted(steps, "step"), time.monotonic() - started,
            )  # fmt: skip
        except GpumuxError as error:
            log.warning(
                "job %r ends, and what its last %s trained could not be brought back: %s. The local model is as it was"
                " before",
                self._name,
                counted(steps, "step"),
                error.message,
            )
            return False
        finally:
            self._remote.give_up_s = None
        return True

    def _install_in_time(self, parts: frozenset[Part], room_s: float) -> None:
        """`_install`, and again for a while if the daemon has no room for the copy (descriptors, shared memory): once
        the job is closed, the script can't ask again."""
        until = time.monotonic() + room_s
        while True:
            try:
                return self._install(parts)
            except AdmissionRefused as error:
                if time.monotonic() >= until:
                    raise
                log.info("job %r ends, and waits for its state: %s", self._name, error.message)
            time.sleep(ROOM_PAUSE_S)

    def _finish_steps(self, limit: float | None) -> None:
        """Wait for the unanswered steps. Raises StaleState when no step is answered within `limit` seconds."""
        pending = self._pending
        while len(pending):
            before = len(pending)
            if not self._recovery.wait(lambda: len(pending) < before, limit):  # noqa: B023
                raise StaleState(f"no step ended within {limit:g} s", "")


def _first(item: tuple[int, Any]) -> int:
    return item[0]
