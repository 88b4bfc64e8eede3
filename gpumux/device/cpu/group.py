"""Steps of jobs with equal Programs as one step of a fused Program, in one executor.

A group of jobs is a job of the device's like any other: its state is the jobs' states stacked, slot by slot, its first
Program is the fused one. Each member's own Program is loaded beside it, on that member's part of the state and on the
member's own data segment, so that a member whose partners have no step goes on by itself. A launch of the fused Program
names each member's slot; its batches are copied from there before the first operator, and the results go back there
after the last one.

`gpumux/fuse/equal.py` makes fused Programs.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple, TypeAlias

import msgpack
import torch

from gpumux.device.cpu.program import LoadedProgram
from gpumux.device.run.operands import over
from gpumux.device.run.schema import DTYPES
from gpumux.errors import ProgramError
from gpumux.program.ir import ITEM_BYTES, Program, ScalarRef, slot_layout
from gpumux.program.validate import state_slots

Number: TypeAlias = "float | int | ScalarRef"


class StepFusion(NamedTuple):
    """How the numbers of a fused step are made of its jobs' host scalars. `scalars`: for each host scalar of the fused
    Program, the job and its scalar. `tables`: for each input of the fused Program after the batch, [rows, jobs], what
    each job's number is: a scalar of its own step, or the same number at each step."""

    jobs: int
    scalars: tuple[tuple[int, int], ...]
    tables: tuple[tuple[tuple[Number, ...], ...], ...]

    def packed(self) -> bytes:
        """As bytes, which a daemon passes on unread. The inverse is `unpack_fusion`."""
        tables = [
            [[[n.index] if isinstance(n, ScalarRef) else n for n in row] for row in table] for table in self.tables
        ]
        made: bytes = msgpack.packb([self.jobs, self.scalars, tables])
        return made


def unpack_fusion(data: bytes) -> StepFusion:
    """Raises ProgramError for what is none."""
    try:
        jobs, scalars, tables = msgpack.unpackb(data)
        made = tuple(tuple(tuple(_number(n) for n in row) for row in table) for table in tables)
        return StepFusion(int(jobs), tuple((int(job), int(index)) for job, index in scalars), made)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProgramError(f"a description of a fused step that is none: {error}"[:200], _REPORT) from error


def _number(packed: Any) -> Number:
    if isinstance(packed, list):
        (index,) = packed
        return ScalarRef(int(index))
    return packed if isinstance(packed, int) else float(packed)


_REPORT = "this is a bug in the daemon: report it"


class SlotPart(NamedTuple):
    """Bytes that a job and its group both have: offsets in the job's slot and in the group's."""

    alone: int
    fused: int
    nbytes: int


class GroupLayout:
    """Where the batch, numbers and results of each job of a group lie. `program`: each job's own; `fused`: the fused
    one. A job is named by its place in the group, from 0. Raises ProgramError for Programs that don't belong together.
    """

    def __init__(self, program: Program, fused: Program, fusion: StepFusion) -> None:
        self.fusion = fusion
        self._tables = len(program.inputs)  # the first of the inputs that are tables
        self._scalars = len(program.scalars)
        alone, whole = slot_layout(program), slot_layout(fused)
        batch = [program.storages[program.views[index].storage].nbytes for index in program.inputs]
        results = [_nbytes(program, index) for index in program.results]
        tables = fused.inputs[self._tables :]
        # Where a step's generator comes with its batch and goes back with its results: their places among both, if an
        # operator draws. The fused Program has one more line of state then, of the jobs' generators.
        self.generator: tuple[int, list[int]] | None = None
        sizes, generator = state_slots(fused), program.generator
        if generator is not None and len(sizes) > len(state_slots(program)):
            given = program.inputs.index(generator)
            self.generator = given, [place for place, index in enumerate(program.results) if index == generator]
            sizes = sizes[:-1] if sizes[-1] == fusion.jobs * batch[given] else ()
        fits = (
            fusion.jobs > 0
            and len(sizes) == len(state_slots(program))
            and [fused.storages[fused.views[i].storage].nbytes for i in fused.inputs[: self._tables]]
            == [fusion.jobs * nbytes for nbytes in batch]
            and [_nbytes(fused, index) for index in fused.results] == [fusion.jobs * nbytes for nbytes in results]
            and [fused.views[i].size for i in tables] == [(len(rows), fusion.jobs) for rows in fusion.tables]
            and all(len(row) == fusion.jobs for rows in fusion.tables for row in rows)
            and len(fusion.scalars) == len(fused.scalars)
            and all(0 <= job < fusion.jobs and self._has(index) for job, index in fusion.scalars)
            and all(self._has(n.index) for t in fusion.tables for row in t for n in row if isinstance(n, ScalarRef))
        )
        if not fits:
            raise ProgramError("a fused Program that is not made of the jobs' own", _REPORT)
        self._inputs = list(zip(alone.inputs, whole.inputs, batch, strict=False))
        self._results = list(zip(alone.results, whole.results, results, strict=True))

    def _has(self, scalar: int) -> bool:
        return 0 <= scalar < self._scalars

    def input_places(self, job: int) -> list[SlotPart]:
        """Where each tensor of the job's batch lies."""
        return [SlotPart(alone, fused + job * nbytes, nbytes) for alone, fused, nbytes in self._inputs]

    def result_places(self, job: int) -> list[SlotPart]:
        """Where each of the job's results lies."""
        return [SlotPart(alone, fused + job * nbytes, nbytes) for alone, fused, nbytes in self._results]

    def fill_tables(self, inputs: Sequence[torch.Tensor], values: Sequence[Sequence[float | int]]) -> None:
        """Write the numbers that differ between jobs. `inputs`: the fused step's; `values`: each job's host scalars."""
        for target, table in zip(inputs[self._tables :], self.fusion.tables, strict=True):
            rows = [
                [values[job][n.index] if isinstance(n, ScalarRef) else n for job, n in enumerate(row)] for row in table
            ]
            target.copy_(torch.tensor(rows, dtype=torch.float64))

    def scalars(self, values: Sequence[Sequence[float | int]]) -> list[float | int]:
        """The fused step's host scalars, for those of each job's step."""
        return [values[job][index] for job, index in self.fusion.scalars]


def _nbytes(program: Program, index: int) -> int:
    view = program.views[index]
    return prod(view.size) * ITEM_BYTES[view.dtype]


class _Member:
    """A member of a group in its executor."""

    def __init__(
        self, program: LoadedProgram, data: mmap.mmap, inputs: list[SlotPart], results: list[SlotPart]
    ) -> None:
        self.scalars = len(program.program.scalars)
        self._slots, self._nbytes = program.operands.slots, slot_layout(program.program).nbytes
        self._data, self._inputs, self._results = data, inputs, results
        self._made: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}

    def slot(self, slot: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Bytes of its batch and of its results in a slot of its own segment."""
        if not 0 <= slot < self._slots:
            raise ProgramError(f"step in slot {slot} of {self._slots}", "send steps in slots the daemon gave")
        found = self._made.get(slot)
        if found is None:
            start = slot * self._nbytes
            inputs, results = (
                [over(self._data, start + part.alone, part.nbytes) for part in parts]
                for parts in (self._inputs, self._results)
            )
            found = self._made[slot] = inputs, results
        return found


class GroupSteps:
    """The steps of a fused Program in its executor. `data`: its data segment, of one slot. A step may begin once all
    members have joined."""

    def __init__(self, fused: LoadedProgram, data: mmap.mmap, fusion: StepFusion) -> None:
        self._fused, self._data, self._fusion = fused, data, fusion
        self._members: dict[int, _Member] = {}
        self._layout: GroupLayout | None = None
        self._batches: list[list[torch.Tensor]] = []
        self._results: list[list[torch.Tensor]] = []
        self._inputs: list[torch.Tensor] = []
        self._streams: list[torch.Tensor] = []  # the generators, by place, if a step draws
        self._running: list[tuple[_Member, int]] = []

    def join(self, place: int, program: LoadedProgram, data: mmap.mmap) -> None:
        """A member's own Program is loaded, on its part of the state. `data`: the member's segment. Raises
        ProgramError for a place that is taken or that there is not, and for a Program that is not what was fused."""
        if place in self._members or not 0 <= place < self._fusion.jobs:
            raise ProgramError(f"place {place} in a group of {self._fusion.jobs} is taken, or is none", _REPORT)
        fused = self._fused.program
        layout = GroupLayout(program.program, fused, self._fusion)
        if self._layout is None:
            at = slot_layout(fused)
            for start, index in zip(at.inputs, fused.inputs, strict=True):
                view = fused.views[index]
                raw = over(self._data, start, fused.storages[view.storage].nbytes)
                self._inputs.append(raw.view(DTYPES[view.dtype]).as_strided(view.size, view.stride, view.offset))
            jobs = range(self._fusion.jobs)
            self._batches = [self._parts(layout.input_places(job)) for job in jobs]
            self._results = [self._parts(layout.result_places(job)) for job in jobs]
            if layout.generator is not None:
                self._streams = list(self._fused.operands.state(len(state_slots(fused)) - 1).chunk(self._fusion.jobs))
            self._layout = layout
        self._members[place] = _Member(program, data, layout.input_places(place), layout.result_places(place))

    def _parts(self, places: list[SlotPart]) -> list[torch.Tensor]:
        return [over(self._data, place.fused, place.nbytes) for place in places]

    def begin(self, given: Sequence[float | int]) -> list[float | int]:
        """Copy the batches in, and return the fused step's host scalars. `given`: for each member, in order of their
        places, its slot and the host scalars of its step. Raises ProgramError."""
        layout = self._layout
        if layout is None or len(self._members) < self._fusion.jobs:
            raise ProgramError(f"{len(self._members)} of {self._fusion.jobs} jobs are in the group", _REPORT)
        self._running, values, at = [], [], 0
        for place in range(self._fusion.jobs):
            member = self._members[place]
            numbers = given[at : at + 1 + member.scalars]
            at += 1 + member.scalars
            if len(numbers) != 1 + member.scalars or not isinstance(numbers[0], int):
                raise ProgramError(f"a fused step without the numbers of its job {place}", _REPORT)
            values.append(numbers[1:])
            self._running.append((member, numbers[0]))
            batch, _ = member.slot(numbers[0])
            for target, source in zip(self._batches[place], batch, strict=True):
                target.copy_(source)
            if layout.generator is not None:
                self._streams[place].copy_(self._batches[place][layout.generator[0]])
        if at != len(given):
            raise ProgramError(f"{len(given)} numbers of a fused step that takes {at}", _REPORT)
        layout.fill_tables(self._inputs, values)
        return layout.scalars(values)

    def end(self) -> None:
        """Copy the results of the step that has ended to its members."""
        for place, (member, slot) in enumerate(self._running):
            _, results = member.slot(slot)
            for target, source in zip(results, self._results[place], strict=True):
                target.copy_(source)
            if self._layout is not None and self._layout.generator is not None:
                for result in self._layout.generator[1]:
                    results[result].copy_(self._streams[place])
        self._running = []


def part_of(buffer: torch.Tensor, offset: int, nbytes: int) -> torch.Tensor:
    """Bytes of a buffer as a buffer with a storage of its own: views of a Program on it begin where it begins. It keeps
    the memory. Raises ProgramError for bytes that the buffer does not have."""
    if not 0 <= offset <= offset + nbytes <= buffer.numel():
        raise ProgramError(f"{nbytes} bytes from {offset} on of a buffer of {buffer.numel()}", _REPORT)
    storage = buffer.untyped_storage()[offset : offset + nbytes]
    return torch.empty(0, dtype=torch.uint8).set_(storage)
