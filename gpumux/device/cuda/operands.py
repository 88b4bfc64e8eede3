"""Where a Program's tensors lie on the GPU, and how batches get there and results get back.

A captured piece reads and writes fixed addresses. So a program has one block for its batch and the step's numbers, and
one for its results. Both are laid out as a slot of its shared memory is, so that one copy moves each. The batch of the
next step is copied in while the last step runs: on the copy stream, to one of two stages, from which the step copies it
to the block.

    slot of shared memory --copy stream--> stage 0 or 1 --job's stream--> block --pieces--> results --> slot

Indices in the batch are first copied to private host memory and range-checked there: the client could still change the
shared ones, and no kernel may read out of its bounds.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import numpy
import torch

from gpumux.device.cuda.compute import Compute
from gpumux.device.cuda.driver import Driver
from gpumux.device.cuda.operators import NumberTable, window
from gpumux.device.run.operands import bound
from gpumux.device.run.schema import DTYPES, views_written
from gpumux.errors import JobFailed, ProgramError
from gpumux.program.indices import index_checks
from gpumux.program.ir import Program, View, aligned, slot_layout

STAGES = 2


class PinnedSegment:
    """A data segment mapped into this process and page-locked, so that the GPU copies from it without staging."""

    def __init__(self, driver: Driver, fd: int, nbytes: int) -> None:
        self._driver = driver
        self._map = mmap.mmap(fd, nbytes) if nbytes else None
        self.nbytes = nbytes
        self.address = 0
        if self._map is not None:
            self._bytes = (ctypes.c_char * nbytes).from_buffer(self._map)
            self.address = ctypes.addressof(self._bytes)
            driver.register(self.address, nbytes)

    def close(self) -> None:
        """Unlock and unmap it. No copy of it may be under way."""
        if self._map is not None:
            self._driver.unregister(self.address)
        self.abandon()

    def abandon(self) -> None:
        """Unmap it without calls to the driver, which fail on a lost GPU."""
        if self._map is not None:
            del self._bytes
            self._map.close()
            self._map = None


class CudaOperands:
    """All operands of one loaded program. `buffers`: the job's, by the program's state slot. `copies`: for each stream
    that pieces run on, the stream that batches come in on; for other streams that is the stream itself. A copy waits
    for the step that last used its stage, whatever stream that step ran on."""

    def __init__(
        self, program: Program, buffers: Sequence[torch.Tensor], data: PinnedSegment, slots: int, *,
        driver: Driver, compute: Compute, copies: Mapping[int, int],
    ) -> None:  # fmt: skip
        self.program, self.slots = program, slots
        self._driver, self._compute, self._copies, self._data = driver, compute, copies, data
        self.copied_on: set[int] = set()  # streams
        self._layout = slot_layout(program)
        self._in_bytes = sum(aligned(program.storages[program.views[v].storage].nbytes) for v in program.inputs)
        self._number_bytes = aligned(NumberTable.BYTES * len(program.scalars))
        if data.nbytes < slots * self._layout.nbytes:
            raise ProgramError(
                f"a data segment of {data.nbytes} bytes is too small for {slots} slots", "make it larger"
            )
        written = {program.views[v].storage for op in program.ops for v in views_written(op)}
        found = index_checks(program, written)
        self._checks = found.checks
        positions = {program.views[v].storage: i for i, v in enumerate(program.inputs)}
        self._private_inputs = sorted(positions[storage] for storage in found.storages)
        self.views: list[torch.Tensor | None] = []  # by the Program's views; None for views of temporaries
        self.results: list[torch.Tensor] = []  # the last piece writes them
        self._stages: tuple[_Stage, ...] = ()
        self._next = 0
        self._allocate(buffers)

    @property
    def held_bytes(self) -> int:
        """Device memory this program holds beside the job's buffers and its pieces' pool."""
        return sum(block.numel() for block in self._blocks)

    def copy_inputs(self, slot: int, values: Sequence[float | int], stream: int) -> None:
        """Copy a step's batch and numbers to the block that its pieces read, before what runs on `stream` from now on.
        Raises ProgramError; JobFailed for an index out of range."""
        if not 0 <= slot < self.slots:
            raise ProgramError(f"step in slot {slot} of {self.slots}", "send steps in slots the daemon gave")
        if len(values) != len(self.program.scalars):
            raise ProgramError(
                f"{len(values)} scalars where the program takes {len(self.program.scalars)}", "send one each"
            )
        if not self._in_bytes + self._number_bytes:
            return
        driver, stage = self._driver, self._stages[self._next]
        private = self._private(slot, values)
        copies = self._copies.get(stream, stream)
        self.copied_on.add(copies)
        driver.wait(copies, stage.taken)
        base = self._data.address + slot * self._layout.nbytes
        if self._in_bytes:
            driver.copy_in(stage.block.data_ptr(), base, self._in_bytes, copies)
        for part in self._private_parts:
            driver.copy_in(stage.block.data_ptr() + part.offset, private + part.at, part.nbytes, copies)
        driver.record(stage.filled, copies)
        driver.wait(stream, stage.filled)
        driver.copy_within(self._block.data_ptr(), stage.block.data_ptr(), self._block.numel(), stream)
        driver.record(stage.taken, stream)
        self._next = (self._next + 1) % STAGES

    def copy_results(self, slot: int, stream: int) -> None:
        """Copy the results to the slot, after the stream's work so far."""
        nbytes = self._results_block.numel() if self.results else 0
        if nbytes:
            at = self._data.address + slot * self._layout.nbytes + self._layout.results[0]
            self._driver.copy_out(at, self._results_block.data_ptr(), nbytes, stream)

    def input_view(self, view: View) -> torch.Tensor:
        """A view, other than the Program's own, of a batch tensor's storage."""
        place = next(i for i, v in enumerate(self.program.inputs) if self.program.views[v].storage == view.storage)
        at = self._layout.inputs[place] // DTYPES[view.dtype].itemsize + view.offset
        return _typed(self._block, view.dtype).as_strided(view.size, view.stride, at)

    def close(self) -> None:
        """Give everything back. Nothing of the program may be running."""
        for stage in self._stages:
            self._driver.destroy_event(stage.filled)
            self._driver.destroy_event(stage.taken)
        if self._host is not None:
            self._driver.unpin(self._host)
        self._blocks.clear()
        self._stages = ()
        self.views.clear()
        self.results.clear()
        self._data.close()

    def abandon(self) -> None:
        """Close what is not memory of the GPU, which is lost."""
        self._data.abandon()

    # ---- making them

    def _allocate(self, buffers: Sequence[torch.Tensor]) -> None:
        program, compute, driver = self.program, self._compute, self._driver
        block_bytes = self._in_bytes + self._number_bytes
        result_bytes = self._layout.nbytes - self._in_bytes if program.results else 0
        self._blocks = [compute.allocate(n) for n in (block_bytes, result_bytes, *([block_bytes] * STAGES))]
        self._block, self._results_block, *stages = self._blocks
        bases: dict[int, torch.Tensor] = {}
        for storage, entry in enumerate(program.storages):
            if entry.kind == "state":
                bases[storage] = bound(buffers[entry.slot], entry.nbytes)
            elif entry.kind == "const":
                bases[storage] = self._const(program.consts[entry.slot], entry.nbytes)
        inputs: dict[int, tuple[torch.Tensor, int]] = {}  # by storage: the block, and where in it
        for position, index in enumerate(program.inputs):
            inputs[program.views[index].storage] = (self._block, self._layout.inputs[position])
        for view in program.views:
            if view.storage in inputs:
                block, offset = inputs[view.storage]
                at = offset // DTYPES[view.dtype].itemsize + view.offset
                self.views.append(_typed(block, view.dtype).as_strided(view.size, view.stride, at))
            elif view.storage in bases:
                self.views.append(window(bases[view.storage], view))
            else:
                self.views.append(None)
        table = NumberTable(self._block[self._in_bytes :], program)
        self.numbers, self.number_vectors = table.numbers, table.vectors
        for position, index in enumerate(program.results):
            view = program.views[index]
            dtype = DTYPES[view.dtype]
            start = self._layout.results[position] - self._in_bytes
            flat = self._results_block[start : start + prod(view.size) * dtype.itemsize]
            self.results.append(flat.view(dtype).view(view.size))
        self._stages = tuple(_Stage(block, driver.event(timed=False), driver.event(timed=False)) for block in stages)
        self._pin_private()

    def _const(self, data: bytes, nbytes: int) -> torch.Tensor:
        base = self._compute.allocate(nbytes)
        if nbytes:
            base.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self._blocks.append(base)
        return base

    def _pin_private(self) -> None:
        """Allocate private host memory for each slot: index inputs, then the step's numbers. It is used again when its
        slot is, which is after its step was answered."""
        program, at = self.program, 0
        self._index_parts: dict[int, _Part] = {}  # by position
        for position in self._private_inputs:
            nbytes = program.storages[program.views[program.inputs[position]].storage].nbytes
            if nbytes:
                self._index_parts[position] = _Part(self._layout.inputs[position], at, nbytes)
                at += aligned(nbytes)
        self._private_parts = [*self._index_parts.values()]
        self._numbers_at = at
        if program.scalars:
            nbytes = NumberTable.BYTES * len(program.scalars)
            self._private_parts.append(_Part(self._in_bytes, at, nbytes))
            at += aligned(nbytes)
        self._private_bytes = at
        self._host = self._driver.pin(at * self.slots) if at else None

    def _private(self, slot: int, values: Sequence[float | int]) -> int:
        """Fill a slot's private memory and check its indices. Returns its address."""
        if self._host is None:
            return 0
        start = slot * self._private_bytes
        address = self._host.address + start
        shared = self._data.address + slot * self._layout.nbytes
        for part in self._index_parts.values():
            ctypes.memmove(address + part.at, shared + part.offset, part.nbytes)
        memory = self._host.view()[start : start + self._private_bytes]
        self._check(memory)
        try:
            NumberTable.write(memory[self._numbers_at :], values, self.program.scalars)
        except (OverflowError, ValueError, TypeError) as error:
            raise JobFailed(f"a host scalar is no number of 64 bits: {error}", "send numbers of 64 bits") from error
        return address

    def _check(self, memory: memoryview) -> None:
        for check in self._checks:
            part, view = self._index_parts.get(check.position), self.program.views[check.view]
            if part is None or 0 in view.size:
                continue
            flat = torch.from_numpy(numpy.frombuffer(memory[part.at : part.at + part.nbytes], numpy.uint8))
            check.run(flat.view(DTYPES[view.dtype]).as_strided(view.size, view.stride, view.offset))


class _Part(NamedTuple):
    """Bytes of a slot's private memory: their offset in the block, and in the private memory."""

    offset: int
    at: int
    nbytes: int


class _Stage:
    """Memory for a batch. Events: `filled` when a batch was copied in, `taken` when a step has copied it out."""

    def __init__(self, block: torch.Tensor, filled: int, taken: int) -> None:
        self.block, self.filled, self.taken = block, filled, taken


def _typed(part: torch.Tensor, dtype: str) -> torch.Tensor:
    """The whole storage of `part`, as a tensor of `dtype`."""
    storage, kind = part.untyped_storage(), DTYPES[dtype]
    whole = torch.empty(0, dtype=kind, device=part.device)
    return whole.set_(storage, 0, (storage.nbytes() // kind.itemsize,), (1,))
