"""The part of a Job that keeps the local models and optimizers a copy of the job's state: fetched when they are read,
pushed when the script says so, and brought home when the job ends."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch

from gpumux.capture.fetching import FetchingState, fetch_arguments, plainly
from gpumux.capture.local_state import dictionaries, install, load_local
from gpumux.capture.source import user_line
from gpumux.capture.staleness import StaleGuard
from gpumux.capture.state import ALL, Part, Place, StateTable
from gpumux.capture.step import Made, State
from gpumux.capture.structure import Structure, from_local
from gpumux.client.alone import alone
from gpumux.client.pending import Pending
from gpumux.client.remote import Remote
from gpumux.client.session import Session
from gpumux.errors import GpumuxError, LocalWrite, StaleGradient, StaleState

T = TypeVar("T")
log = logging.getLogger("gpumux.client")

LOCK_S = 60.0  # how long a read waits for another thread's verb
LEAVE_S = 30.0  # how long a job that ends out of order waits for a step to end, or for its state
OFTEN = 3  # steps in a row, each with a read behind it, after which that is said


class Cached:
    _closed: bool
    _guard: StaleGuard
    _lock: threading.RLock
    _pending: Pending
    _remote: Remote
    _session: Session
    _state: State
    _table: StateTable
    name: str

    _intern: Callable[[Structure], Structure]
    _persist: Callable[[Callable[[], Any]], Any]
    _wait: Callable[[Callable[[], bool], float | None], bool]

    def _start_caching(self) -> None:
        self._unsynced = 0  # steps whose state is not here
        self._read_behind = 0  # steps in a row that a read came behind
        self._said = False
        self._without: dict[tuple[int, frozenset[int]], Structure] = {}
        self._values: dict[int, Place] = {}  # gradients that the script gave and that the job need not keep

    # ---- verbs

    def sync(self) -> None:
        """Bring the trained state back into the local models and optimizers, whatever was done to them meanwhile. Waits
        for the steps submitted so far. What reads the local model fetches what it needs by itself; this brings all of
        it."""
        with self._lock:
            with alone():
                self._take_gradients()
            self._bring(ALL)

    def state_dict(self) -> dict[str, Any]:
        """The trained state as {"model": ..., "optimizer": ...} of CPU tensors (lists of them when
        several were submitted), leaving the local ones alone. Waits for the steps submitted so far."""
        with self._lock, alone():
            self._guard.check_writes(bytes_too=True)
            with self._guard.quiet():
                found: dict[str, Any] = self._persist(lambda: dictionaries(self._table, self._state, self._remote.pull))
            return found

    def load_state(self, state: dict[str, Any] | None = None) -> None:
        """Push the local models' and optimizers' state to the daemon; with `state` (as state_dict()
        gives it) load that into them first."""
        with self._lock, alone():
            self._persist(nothing)
            behind = self._guard.stale
            with self._replaced_states(behind):
                if Part.MODEL in behind:
                    self._guard.gradients.accumulated()
                self._bring(behind)
            self._guard.gradient_changes()
            lost = self._guard.gradients.lost()
            with self._guard.quiet(writes=True):
                if state is not None:
                    load_local(self._table, state)
                self._table.refresh()
                structure, host = from_local(self._table, lost)
            keep = self._state.keep | frozenset(i for i, _ in structure.kept)
            self._state = State(self._intern(structure), host, keep)
            resident = set(self._remote.resident())
            self._persist(lambda: self._remote.push([b for b in resident if self._table.buffers[b].home]))
            self._guard.fetched(ALL, adopted=True)
            self._unsynced = 0

    # ---- what is behind

    @contextmanager
    def _replaced_states(self, parts: frozenset[Part]) -> Iterator[None]:
        """What the script put in the place of optimizers' states that are behind (`load_state_dict`) stays as it is,
        whatever is fetched meanwhile."""
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

    def _newer(self, made: Made, before: Structure) -> None:
        """A step has changed the state in the daemon, from `before` on."""
        self._guard.gradients.stepped(before, made.remade, made.replaces.written)
        self._guard.newer()
        self._unsynced += 1
        self._values.clear()

    def _fetch(self, parts: frozenset[Part]) -> None:
        """A read asks for parts of the state. Raises StaleState where they can't be had."""
        guard = self._guard
        if not self._lock.acquire(timeout=LOCK_S):
            guard.refuse(f"another thread was amid a verb of the job for {LOCK_S:g} s, and the local model was read")
        try:
            parts &= guard.stale
            if Part.OPTIMIZER in parts:
                guard.check_states()
            if parts:
                try:
                    with alone():
                        self._say_read(parts)
                        self._bring(parts)
                except GpumuxError as error:
                    guard.refuse(f"the local model was read, and could not be fetched ({error.message}),", error)
        finally:
            self._lock.release()

    def _bring(self, parts: frozenset[Part]) -> None:
        if not parts:
            return
        with alone():
            self._persist(lambda: self._install(parts))
            self._guard.fetched(parts)
        if not self._guard.stale:
            self._unsynced = 0

    def _install(self, parts: frozenset[Part]) -> None:
        wanted = None if parts == ALL else self._state.structure.buffers(self._table, parts)
        mine = self._guard.gradients.written() if Part.GRADIENTS in parts else set()
        if (
            Part.GRADIENTS not in self._guard.stale | parts
        ):  # what lies in a gradient's memory is newer here, if backward() added
            mine |= self._state.structure.buffers(self._table, {Part.GRADIENTS})
        install(self._table, self._state, partial(self._remote.pull, wanted=wanted), parts, mine)

    def _say_read(self, parts: frozenset[Part]) -> None:
        """Once a job, and again when it turns out that every step is followed by a read."""
        self._read_behind = self._read_behind + 1 if self._unread == 1 else 0
        self._unread = 0
        often = self._read_behind == OFTEN
        if self._said and not often:
            return
        self._said = True
        buffers = self._state.structure.buffers(self._table, parts) & set(self._remote.resident())
        mb = sum(self._table.buffers[b].nbytes for b in buffers) / 1e6
        log.log(
            logging.WARNING if often else logging.INFO,
            "job %r: %s reads the local model%s, which copies %.1f MB from the daemon each time after a step%s",
            self.name, user_line(), " after every step" if often else "", mb,
            ": return what it looks at from the step, or read less often" if often else "",
        )  # fmt: skip

    _unread = 0  # steps since the last read

    # ---- gradients that the script changed

    def _take_gradients(self) -> None:
        """Go on from the gradients that the script left: cleared, zeroed, or of its own values. Raises LocalWrite for a
        gradient that lies in other memory of the job, and StaleGradient for one that has no values."""
        gradients = self._guard.gradients
        changes = self._guard.gradient_changes()
        if not changes:
            return
        fetch_arguments(changes.values())
        state = self._state
        before = dict(state.structure.gradients)
        homes = {i: self._home_of(i, value, before.get(i)) for i, value in changes.items() if value is not None}
        cleared = frozenset(changes) - frozenset(homes)
        shared = gradients.overlapping(i for i, home in homes.items() if home is None)
        if shared is not None:
            raise self._shared(shared, "another's")
        # What the script gave lies elsewhere than the gradient it replaces, which the script may still hold.
        gradients.part(cleared.union(i for i, home in homes.items() if home is None))
        if not homes:
            key = (id(state.structure), cleared)
            structure = self._without.get(key)
            if structure is None:
                structure = self._without[key] = self._intern(state.structure.without_gradients(cleared))
            state.structure = structure
            gradients.told()
            return
        structure = state.structure.without_gradients(changes)
        kept, dropped, written = dict(structure.kept), dict(structure.dropped), []
        taken = structure.buffers(self._table, {Part.OPTIMIZER, Part.GRADIENTS})
        in_daemon = dict(state.structure.kept).keys()  # some of them for what shares their memory
        with alone():
            for i, home in homes.items():
                value = changes[i]
                assert value is not None
                place = home or self._settle_in(i, value, taken)
                if i in state.keep or (home is not None and i in in_daemon):
                    kept[i] = place
                    written.append(place.buffer)
                else:
                    dropped[i] = self._values[i] = place
            state.structure = self._intern(
                Structure(
                    structure.optimizers,
                    tuple(sorted(kept.items(), key=_first)),
                    tuple(sorted(dropped.items(), key=_first)),
                )
            )
            self._push_gradients(written)
        gradients.told()

    def _home_of(self, index: int, value: torch.Tensor, before: Place | None) -> Place | None:
        """Where a gradient of the script's lies already, if that is its own place: the one `before`. Raises LocalWrite
        where it is another's."""
        table, name = self._table, self._table.param_names[index]
        if value.layout is not torch.strided:
            raise LocalWrite(f"the gradient that {name} was given is {value.layout}", f"{name}.grad = value.to_dense()")
        if value.is_conj() or value.is_neg():
            raise LocalWrite(
                f"the gradient that {name} was given is conjugated or negated by a flag, not in its memory",
                f"{name}.grad = value.resolve_conj().resolve_neg()",
            )
        with plainly():
            place = table.place(value)
            if place is None and before is not None and table.local(before) is value:
                table.restore(before, value)
        if place is None or place == before:
            return place
        if place.buffer not in self._state.structure.buffers(self._table, ALL):
            return None  # nothing of the job lies there now
        raise self._shared(index, self._table.buffers[place.buffer].name)

    def _shared(self, index: int, owner: str) -> LocalWrite:
        name = self._table.param_names[index]
        return LocalWrite(
            f"the gradient that {name} was given shares memory with {owner}, and a plain loop's steps would add to both"
            " at once",
            f"give it a copy: {name}.grad = value.clone()",
        )

    def _settle_in(self, index: int, value: torch.Tensor, taken: Collection[int]) -> Place:
        """A place for a gradient of the script's: its own memory, which steps go on to add to; or, where others may lie
        in that, a copy. `taken`: buffers in which other state lies."""
        table = self._table
        name = f"grad.{table.param_names[index]}"
        with plainly(), torch.no_grad():
            path, layout = ("grad", index), (value.dtype, tuple(value.shape), value.stride())
            local = table.placeholder(path, name, *layout)
            home, alone = table.place(local), local.untyped_storage().nbytes() == local.nbytes
            if home is None or home.buffer in taken or not alone:  # more lies there, which may be newer in the daemon
                local = table.fresh(path, name, *layout)
            if index in self._state.keep and table.takes(local, value):
                table.adopt(path, name, value)
                self._guard.gradients.adopted(index)
                local = value
            else:
                local.copy_(value.detach())
                self._guard.gradients.copied(index, value)
            place = table.place(local)
        assert place is not None
        table.buffers[place.buffer].filled = True
        return place

    def _push_gradients(self, buffers: list[int]) -> None:
        resident = set(self._remote.resident())
        wanted = sorted(resident.intersection(buffers))  # any other goes with the Program that brings it along
        self._persist(lambda: self._remote.push(wanted))

    def _keep_gradients(self, keep: frozenset[int]) -> None:
        """A step turns out to read these gradients; those of the script's own are kept from now on."""
        state = self._state
        state.keep = keep
        mine = {i: place for i, place in self._values.items() if i in keep}
        if mine:
            kept = {**dict(state.structure.kept), **mine}
            dropped = tuple((i, place) for i, place in state.structure.dropped if i not in mine)
            state.structure = self._intern(
                Structure(state.structure.optimizers, tuple(sorted(kept.items(), key=_first)), dropped)
            )
            self._push_gradients([place.buffer for place in mine.values()])

    # ---- the end

    def _come_home(self, limit: float | None) -> None:
        """The trained state into the local objects, if they are behind. `limit`: how many seconds without progress to
        wait. What keeps it from coming is logged: the job ends all the same."""
        if not self._unsynced or not self._guard.stale:
            return
        steps = self._unsynced
        try:
            if self._remote.ended is not None:
                raise self._remote.end_error()
            if self._session.dead is not None:
                raise self._session.dead
            self._finish_steps(limit)
            self._remote.give_up_s = limit
            started = time.monotonic()
            parts = self._guard.stale
            with alone(), self._replaced_states(parts):
                try:
                    if Part.MODEL in parts:
                        self._guard.gradients.accumulated()
                except StaleGradient as error:
                    log.warning("job %r ends, and a gradient is not the plain loop's: %s", self.name, error.message)
                if limit is None:
                    self._persist(lambda: self._install(parts))
                else:
                    self._install(parts)
                self._guard.fetched(parts)
            self._unsynced = 0
            log.info(
                "job %r ends: what its last %d steps trained is in the local model (%.1f s)",
                self.name, steps, time.monotonic() - started,
            )  # fmt: skip
        except GpumuxError as error:
            log.warning(
                "job %r ends, and what its last %d steps trained could not be brought back: %s. The local model is as it was "
                "before them", self.name, steps, error.message,
            )  # fmt: skip
        finally:
            self._remote.give_up_s = None

    def _finish_steps(self, limit: float | None) -> None:
        """Wait for the steps that are under way, for as long as they go on. Raises StaleState when they don't."""
        pending = self._pending
        while len(pending):
            before = len(pending)
            if not self._wait(lambda: len(pending) < before, limit):  # noqa: B023
                raise StaleState(f"no step ended within {limit:g} s", "")


class JobSource:
    """What a job's guard fetches from. While local tensors are behind they hold the guard, and so the job: one that is
    dropped lives on until they are up to date, or gone as well."""

    def __init__(self, job: Cached) -> None:
        self._job = job

    def structure(self) -> Structure:
        return self._job._state.structure

    def fetch(self, parts: frozenset[Part]) -> None:
        self._job._fetch(parts)


def _first(item: tuple[int, Any]) -> int:
    return item[0]


def nothing() -> None:
    """For what only wants to know whether the job is there."""
