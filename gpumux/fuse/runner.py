"""Runs a Program in this process, with the CPU device's own interpreter and graphs."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
from torch import _C

from gpumux.device.cpu.loaded import LoadedProgram
from gpumux.device.cpu.operands import SlotOperands
from gpumux.program.ir import ALIGN, Program, slot_layout

_ONE_PIECE_S = 1e6  # nobody waits between pieces here
_PYTHON_S = 2.5e-6  # what calling an operator from Python costs more; only for the profile
_HEAP_BYTES = 31 << 20


class Runner:
    """One Program on `buffers` (bytes, by state slot). Not for several threads at once."""

    def __init__(self, program: Program, buffers: Sequence[torch.Tensor]) -> None:
        _keep_freed_memory()
        layout = slot_layout(program)
        memory = mmap.mmap(-1, max(layout.nbytes, ALIGN))
        self.program = program
        self.loaded = LoadedProgram(program, buffers, memory, 1, _ONE_PIECE_S, _PYTHON_S, _ignore)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        self._inputs = []
        for at, index in zip(layout.inputs, program.inputs, strict=True):
            view = program.views[index]
            base = torch.empty(0, dtype=getattr(torch, view.dtype))
            offset = at // base.element_size() + view.offset
            self._inputs.append(base.set_(whole.untyped_storage(), offset, view.size, view.stride))
        self._step = 0

    @property
    def inputs(self) -> list[torch.Tensor]:
        """Where a step's batch is put before `run`."""
        return self._inputs

    def run(self, scalars: Sequence[float | int]) -> list[torch.Tensor]:
        """One step; its results, in memory of their own. Raises JobFailed, ProgramError."""
        loaded = self.loaded
        with torch.no_grad(), graphs_as_written():
            for piece in range(len(loaded.bounds) - 1):
                loaded.run(self._step, loaded.newest, piece, 0, scalars if piece == 0 else None)
            loaded.recut()
        self._step += 1
        operands: SlotOperands = loaded.operands.slot(0)
        return [r.clone() for r in operands.results]


@cache
def _keep_freed_memory() -> None:
    """Temporaries of many models are large, and glibc gives large blocks back to the kernel, so that each step takes them
    anew, page by page (hundreds of faults a step): unless a larger one was freed before (mallopt(3), M_MMAP_THRESHOLD and
    M_TRIM_THRESHOLD, which follow). Another allocator does not mind."""
    torch.empty(_HEAP_BYTES, dtype=torch.uint8)


@contextmanager
def graphs_as_written() -> Iterator[None]:
    """The graph executor neither fuses nor folds while this is active; afterwards it does what it did."""
    before = _C._get_graph_executor_optimize()
    _C._set_graph_executor_optimize(False)
    try:
        yield
    finally:
        _C._set_graph_executor_optimize(before)


def _ignore(index: int) -> None:
    """Nobody watches how far a step is."""
