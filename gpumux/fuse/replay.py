"""Steps that ran in a group of jobs, run again with the same bits (docs/fusion.md, "Equal jobs of separate processes").

A recovered job runs again what it did after its newest snapshot. A step that ran in a group did so by a fused Program
over the stacked state of all of the group's jobs, which are not there any more, or run again something else. But an
operator's result for one job of a group does not depend on what the others hold (tests/fuse/test_places.py). So the
step runs again in a group of as many, at its job's place, whose other places hold copies of the job itself.

The daemon knows nothing of it: the group is one more job of the client's, with the fused Program as its own Program,
and with the job's own one shifted to its part of the stacked state. It is open while such steps run again. What the
daemon ran is known by the fused Program's content hash; the client makes that Program itself.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch

from gpumux.capture.lower import LoweredRank
from gpumux.capture.state import byte_view
from gpumux.client.remote import Remote, RemoteProgram, size_of
from gpumux.client.session import Session, Waits
from gpumux.device.run.schema import DTYPES
from gpumux.errors import GpumuxError, NotFusible, from_code
from gpumux.fuse.equal import FusedJobs, make_jobs
from gpumux.program.codec import content_hash, encode
from gpumux.program.ir import ITEM_BYTES, Program, aligned
from gpumux.program.validate import state_slots
from gpumux.types import GroupPlace, JobSpec
from gpumux.wire import messages as m

if TYPE_CHECKING:
    from gpumux.capture.state import StateTable

Scalars = Sequence["float | int | bool"]


@dataclass(frozen=True, slots=True)
class _Buffer:
    """A buffer of the stacked state. It has no tensors here."""

    nbytes: int
    local: tuple[()] = ()
    filled: bool = False


class _Buffers:
    """What `Remote` asks a StateTable for."""

    home = torch.device("cpu")

    def __init__(self, sizes: Sequence[int]) -> None:
        self.buffers = [_Buffer(nbytes) for nbytes in sizes]


class GroupReplay:
    """Runs steps of one job again that ran in groups. `remote`: the job's, at the daemon where it is recovered; `spec`:
    the job's. Each method raises what the daemon refuses with, or how it ended."""

    def __init__(self, remote: Remote, spec: JobSpec) -> None:
        self._remote = remote
        self._spec = spec
        self._made: dict[tuple[int, int], FusedJobs] = {}
        self._open: _OpenGroup | None = None  # holds the newest state of the buffers of its Program

    def enter(self, number: int, group: GroupPlace) -> None:
        """Have the next steps run as those of the job's Program `number` did in this group. Raises NotFusible if this
        client does not make the fused Program that the daemon ran, AdmissionRefused if there is no room for the group,
        and ProgramError if the daemon refuses a Program of it: the job's own buffers hold its state then.
        Idempotent."""
        if self._open is None or not self._open.fits(number, group):
            self.leave()
            self._open = self._enter(number, group)

    def run(self, fused: bool, scalars: Scalars, batch: Sequence[torch.Tensor]) -> None:
        """Run a step again: as part of a fused one, or by its own Program on its part of the stacked state."""
        assert self._open is not None, "enter a group before"
        self._open.run(fused, scalars, batch)

    def leave(self) -> None:
        """Have the job's own buffers hold its state again. Idempotent."""
        group, self._open = self._open, None
        if group is None:
            return
        _, binding = self._remote.bound(group.number)
        data = group.state()
        self._remote.put(binding, data)
        group.close()

    def _enter(self, number: int, group: GroupPlace) -> _OpenGroup:
        program, binding = self._remote.bound(number)
        made = self._made.get((number, group.models))
        if made is None:
            made = self._made[number, group.models] = make_jobs(program, group.models).made
        if content_hash(encode(made.fused.program)) != group.program:
            raise NotFusible(
                "the daemon ran another fused Program than this client makes", "use one gpumux and torch on both sides"
            )
        opened = _OpenGroup(self._remote.session, self._spec, number=number, made=made, group=group)
        try:
            held: dict[int, torch.Tensor] = {}
            self._remote.pull(lambda buffer, data: held.update({buffer: data.clone()}), binding)
            opened.fill([held[buffer] for buffer in binding])
        except BaseException:
            opened.close()
            raise
        return opened


class _OpenGroup:
    """One group, as a job at the daemon."""

    def __init__(self, session: Session, spec: JobSpec, *, number: int, made: FusedJobs, group: GroupPlace) -> None:
        self.number = number
        self._most = spec.max_inflight
        self._group, self._made, self._session = group, made, session
        self._job = uuid.uuid4().hex
        self._sizes = state_slots(made.program)
        table = _Buffers(state_slots(made.fused.program))  # stacked, and the generators if a step draws
        self._table = cast("StateTable", table)
        self._remote = Remote(session, self._job, self._table, Waits(self._job, False))
        self._busy: dict[int, tuple[RemoteProgram, int]] = {}  # steps under way: their Programs and slots
        self._steps = 0
        self._failed: m.StepFailed | None = None
        whole = tuple(range(len(table.buffers)))
        own = whole[: len(self._sizes)]
        session.register(self._job, self._hear)
        named = JobSpec(spec.name, weight=spec.weight, max_inflight=spec.max_inflight)
        try:
            session.open_job(self._job, named, None)
            self._fused = self._load(LoweredRank(made.fused.program, whole))
            self._own = self._load(LoweredRank(_shifted(made.program, group.place, made.jobs), own))
        except BaseException:
            self.close()
            raise

    def fits(self, number: int, group: GroupPlace) -> bool:
        """Whether a step that ran so can run here."""
        return (number, *group[:2], group.program) == (self.number, *self._group[:2], self._group.program)

    def _load(self, lowered: LoweredRank) -> RemoteProgram:
        return self._remote.programs[self._remote.add(lowered)]

    def fill(self, state: Sequence[torch.Tensor]) -> None:
        """Copy the job's state (bytes, by state slot) to every place."""
        self._put_everywhere(range(len(state)), state)

    def _put_everywhere(self, lines: Sequence[int], parts: Sequence[torch.Tensor]) -> None:
        """Copy these bytes to every place of these lines of the stacked state. A transfer comes after the steps before
        it."""
        data = torch.zeros(size_of(self._table, lines), dtype=torch.uint8)
        at = 0
        for part in parts:
            whole = part.repeat(self._made.jobs)
            data[at : at + whole.numel()].copy_(whole)
            at += aligned(whole.numel())
        self._remote.put(lines, data)

    def state(self) -> torch.Tensor:
        """The job's state, each slot's bytes aligned to 64."""
        data = torch.zeros(sum(map(aligned, self._sizes)), dtype=torch.uint8)
        starts = [sum(map(aligned, self._sizes[:slot])) for slot in range(len(self._sizes))]
        place = self._group.place

        def take(slot: int, held: torch.Tensor) -> None:
            nbytes = self._sizes[slot]
            data[starts[slot] : starts[slot] + nbytes].copy_(held[place * nbytes : (place + 1) * nbytes])

        self._remote.pull(take, range(len(self._sizes)))
        return data

    def run(self, fused: bool, scalars: Scalars, batch: Sequence[torch.Tensor]) -> None:
        """Run a step, of all places or of the job's alone."""
        program = self._fused if fused else self._own
        tensors, numbers = self._everywhere(scalars, batch) if fused else (list(batch), list(scalars))
        if fused and self._made.layout.generator is not None:  # its state came with the step
            self._put_everywhere([len(self._sizes)], [batch[self._made.layout.generator[0]]])
        self._wait(lambda: bool(program.free) and len(self._busy) < self._most)
        slot = program.free.pop()
        frames = program.fill(slot, tensors)
        self._steps += 1
        self._busy[self._steps] = program, slot
        self._remote.post_step(self._steps, program.number, slot, numbers, frames)

    def _everywhere(self, scalars: Scalars, batch: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[Any]]:
        """The inputs and host scalars of the fused step whose jobs all have this batch and these host scalars."""
        program, jobs = self._made.fused.program, self._made.jobs
        inputs = []
        for number, index in enumerate(program.inputs):
            view = program.views[index]
            if number < len(batch):
                raw = byte_view(batch[number].untyped_storage()).repeat(jobs)
            else:
                raw = torch.empty(program.storages[view.storage].nbytes, dtype=torch.uint8)
            inputs.append(raw.view(DTYPES[view.dtype]).as_strided(view.size, view.stride, view.offset))
        values = [list(scalars)] * jobs
        self._made.layout.fill_tables(inputs, values)
        return inputs, self._made.layout.scalars(values)

    def _wait(self, done: Callable[[], bool]) -> None:
        """Wait until `done()`. Raises how the job, or a step of it, ended otherwise."""
        self._session.wait(lambda: done() or self._remote.ended is not None or self._failed is not None)
        if self._remote.ended is not None:
            raise self._remote.end_error()
        if self._failed is not None:
            raise from_code(self._failed.code, self._failed.message, self._failed.remedy)

    def _hear(self, message: Any, frames: Sequence[Any]) -> None:
        """Handle the session's messages for the group's job."""
        if isinstance(message, m.StepDone):
            program, slot = self._busy.pop(message.step)
            program.free.add(slot)
        elif isinstance(message, m.StepFailed):
            self._failed = message
        elif isinstance(message, m.TransferDone):
            self._remote.on_transfer(message, frames)
        elif isinstance(message, m.JobEnded):
            self._remote.ended = message

    def close(self) -> None:
        """Close the job, which has no step under way."""
        self._session.unregister(self._job)
        with suppress(GpumuxError):  # the daemon is gone, and the job with it
            self._session.post(m.CloseJob(0, self._job, True))
        self._remote.release()


def _shifted(program: Program, place: int, jobs: int) -> Program:
    """The Program over the part of stacked state that is at `place`."""
    storages = tuple(
        replace(storage, nbytes=storage.nbytes * jobs) if storage.kind == "state" else storage
        for storage in program.storages
    )
    views = []
    for view in program.views:
        storage = program.storages[view.storage]
        first = place * storage.nbytes // ITEM_BYTES[view.dtype] if storage.kind == "state" else 0
        views.append(replace(view, offset=view.offset + first))
    return replace(program, storages=storages, views=tuple(views))
