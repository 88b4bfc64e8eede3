"""What a job's daemon was told, in a form that can be told again: Programs by number, state and batches by copy.

A user may write to a batch's tensors as soon as step() returns, so a copy it must be. Memory for batches is used again
from step to step: fresh pages would cost more than the copy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gpumux.client.remote import RemoteProgram, lay
from gpumux.client.replay import Entry, ReplayLog

_OVERHEAD = 512  # bytes of an entry beside its tensors, about


@dataclass(frozen=True, slots=True)
class Loaded:
    program: int


@dataclass(frozen=True, slots=True)
class Pushed:
    """Job buffers, and their bytes, each on 64 of them."""

    buffers: tuple[int, ...]
    data: torch.Tensor


@dataclass(frozen=True, slots=True)
class Ran:
    """A step: its Program, host scalars and batch."""

    program: int
    scalars: list[float | int | bool]
    batch: list[torch.Tensor]


class Told:
    """Writes a job's log; the witness of its Remote."""

    def __init__(self, max_bytes: int, max_entries: int) -> None:
        self.log = ReplayLog(max_bytes, max_entries, self._dropped)
        self._spare: defaultdict[int, list[list[torch.Tensor]]] = defaultdict(list)  # batches, by Program
        self._nbytes: dict[int, int] = {}  # of a batch, by Program

    def loaded(self, number: int) -> None:
        self.log.add(Entry(-1, _OVERHEAD, Loaded(number)))

    def pushed(self, buffers: Sequence[int], data: torch.Tensor) -> None:
        self.log.add(Entry(-1, _OVERHEAD + data.nbytes, Pushed(tuple(buffers), data)))

    def step(
        self, step: int, program: RemoteProgram, scalars: list[float | int | bool], batch: Sequence[torch.Tensor]
    ) -> Entry:
        spare = self._spare[program.number]
        copies = spare.pop() if spare else self._fresh(program)
        for copy, source in zip(copies, batch, strict=True):
            lay(copy, source.detach())
        entry = Entry(step, self._nbytes[program.number], Ran(program.number, scalars, copies))
        self.log.add(entry)
        return entry

    def _fresh(self, program: RemoteProgram) -> list[torch.Tensor]:
        views = [program.program.views[v] for v in program.program.inputs]
        made = [torch.empty_strided(v.size, v.stride, dtype=getattr(torch, v.dtype)) for v in views]
        self._nbytes[program.number] = _OVERHEAD + sum(t.untyped_storage().nbytes() for t in made)
        return made

    def _dropped(self, entry: Entry) -> None:
        if isinstance(entry.what, Ran):
            self._spare[entry.what.program].append(entry.what.batch)
