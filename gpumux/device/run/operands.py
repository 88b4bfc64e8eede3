"""Where a Program's tensors lie: state, constants, a step's slot of shared memory, temporaries.

Views of everything that outlives a step are made once, when a program is loaded (of inputs and results: once for each
slot), so that running a piece makes none. An input is used where the client put it, without a copy, unless the program
writes to it or takes indices from it: a client that changes shared indices must not move a running kernel's accesses.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from gpumux.device.run.randomness import RandomStreams, Replays
from gpumux.device.run.schema import DTYPES, views_made, views_read, views_written
from gpumux.errors import ProgramError
from gpumux.program.indices import IndexCheck, index_checks
from gpumux.program.ir import Program, View, aligned, slot_layout


def allocate(nbytes: int) -> torch.Tensor:
    """Zeroed bytes on a 64-byte boundary. Raises RuntimeError when there is no memory."""
    return torch.zeros(nbytes, dtype=torch.uint8)


def allocate_state(sizes: Sequence[int]) -> list[torch.Tensor]:
    """Zeroed buffers of these many bytes, each on a 64-byte boundary. Raises OSError when there is no memory.

    They lie in one mapping, whose pages the kernel clears when they are first written. An optimizer's state, which no
    client sends, so costs its page faults in the step that makes it, and not while the job is loaded."""
    starts = [0, *accumulate(map(aligned, sizes))]
    if starts[-1] == 0:
        return [torch.empty(0, dtype=torch.uint8) for _ in sizes]
    memory = mmap.mmap(-1, starts[-1], mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return [over(memory, start, nbytes) for start, nbytes in zip(starts, sizes, strict=False)]


def over(memory: mmap.mmap, offset: int, nbytes: int) -> torch.Tensor:
    """Bytes of mapped memory as a tensor, without a copy. The tensor keeps the mapping."""
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=offset)


def bound(buffer: torch.Tensor, nbytes: int) -> torch.Tensor:
    """The buffer that a state slot of `nbytes` is bound to. Raises ProgramError where it is smaller."""
    if buffer.numel() < nbytes:
        raise ProgramError(
            f"a state buffer has {buffer.numel()} bytes where the program needs {nbytes}",
            "bind each state slot to a buffer of its size",
        )
    return buffer


def window(base: torch.Tensor, view: View) -> torch.Tensor:
    """`view` of the storage of `base`, whatever the dtype of `base`."""
    made = torch.empty(0, dtype=DTYPES[view.dtype])
    return made.set_(base.untyped_storage(), view.offset, view.size, view.stride)


@dataclass(slots=True)
class SlotOperands:
    """The tensors of steps in one slot. `views`: by the Program's views; None for views of temporaries."""

    views: list[torch.Tensor | None]
    copies: list[tuple[torch.Tensor, torch.Tensor]]  # (private copy, its source in the slot)
    results: list[torch.Tensor]
    pieces: dict[int, tuple[object, ...]] = field(default_factory=dict)  # arguments, by graph (cpu/program.py)


class Operands:
    """All operands of one loaded program. `buffers` are the job's, by the program's state slot."""

    def __init__(self, program: Program, buffers: Sequence[torch.Tensor], data: mmap.mmap, slots: int) -> None:
        self.program = program
        self.slots = slots
        self._data = data
        self._layout = slot_layout(program)
        self._bases: dict[int, torch.Tensor] = {}  # by storage: state, constants, private inputs
        self._made: dict[int, SlotOperands] = {}
        written = {program.views[v].storage for op in program.ops for v in views_written(op)}
        self._checks = index_checks(program, written)
        self.private_inputs = {
            storage
            for storage, entry in enumerate(program.storages)
            if entry.kind == "input" and (storage in written or storage in self._checks.storages)
        }
        for storage, entry in enumerate(program.storages):
            if entry.kind == "state":
                self._bases[storage] = bound(buffers[entry.slot], entry.nbytes)
            elif entry.kind == "const":
                self._bases[storage] = self._const(program.consts[entry.slot], entry.nbytes)
            elif entry.kind == "input" and storage in self.private_inputs:
                self._bases[storage] = allocate(entry.nbytes)

    @property
    def checks(self) -> tuple[IndexCheck, ...]:
        return self._checks.checks

    def base(self, storage: int) -> torch.Tensor:
        """The bytes of a storage that outlives a step."""
        return self._bases[storage]

    def state(self, slot: int) -> torch.Tensor:
        """The buffer that a state slot is bound to. Raises ProgramError for a slot that the program does not have."""
        for storage, entry in enumerate(self.program.storages):
            if entry.kind == "state" and entry.slot == slot:
                return self._bases[storage]
        raise ProgramError(f"no state slot {slot}", "name slots that the program has")

    def slot(self, slot: int) -> SlotOperands:
        """Operands of steps in `slot`. Raises ProgramError for a slot that the segment does not have."""
        found = self._made.get(slot)
        if found is None:
            found = self._made[slot] = self._make(slot)
        return found

    def begin(self, operands: SlotOperands) -> None:
        """Copy inputs that need a private copy and check indices, before a step's first operator. Raises JobFailed."""
        for private, shared in operands.copies:
            private.copy_(shared)
        for check in self._checks.checks:
            tensor = operands.views[check.view]
            assert tensor is not None
            check.run(tensor)

    def finish(self, operands: SlotOperands, sources: Sequence[torch.Tensor]) -> None:
        """Copy results, contiguous, to the slot, after a step's last operator."""
        for target, source in zip(operands.results, sources, strict=True):
            target.copy_(source)

    def _const(self, data: bytes, nbytes: int) -> torch.Tensor:
        base = allocate(nbytes)
        if nbytes:
            base.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return base

    def _make(self, slot: int) -> SlotOperands:
        if not 0 <= slot < self.slots:
            raise ProgramError(f"step in slot {slot} of {self.slots}", "send steps in slots the daemon gave")
        program, start = self.program, slot * self._layout.nbytes
        bases = dict(self._bases)
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for position, index in enumerate(program.inputs):
            storage = program.views[index].storage
            shared = over(self._data, start + self._layout.inputs[position], program.storages[storage].nbytes)
            if storage in self.private_inputs:
                copies.append((bases[storage], shared))
            else:
                bases[storage] = shared
        views = [window(bases[v.storage], v) if v.storage in bases else None for v in program.views]
        results = []
        for position, index in enumerate(program.results):
            view = program.views[index]
            dtype = DTYPES[view.dtype]
            flat = torch.empty(view.size, dtype=dtype)
            if flat.numel():
                raw = over(self._data, start + self._layout.results[position], flat.numel() * dtype.itemsize)
                flat = raw.view(dtype).view(view.size)
            results.append(flat)
        return SlotOperands(views, copies, results)


# ---- A step in progress: the tensors that its pieces pass to each other.


@dataclass(slots=True)
class Frame:
    """One step in progress. `temps`: by storage, the tensor made there, until its last use."""

    slot: SlotOperands
    slot_index: int
    scalars: Sequence[float | int]
    temps: list[torch.Tensor | None]
    step: int
    cut: int
    next_piece: int = 0
    met: int = 0  # the newest piece whose collectives have ended
    generator: torch.Tensor | None = None  # its state after the newest piece, while the other wave's step may draw
    failed_at: int | None = None  # the operator that failed on its values, or the last of those of which one did


@dataclass(frozen=True, slots=True)
class Liveness:
    """For each temporary storage: `birth`, the view it is made with; `born`, the operator that makes it (none if a
    collective does); `last`, the last operator that uses it (the number of operators if it holds a result), where a
    collective counts as the operator that it stands before. `exchanged`: by operator, the storages that only the
    collectives before it use from there on."""

    birth: dict[int, View]
    born: dict[int, int]
    last: dict[int, int]
    exchanged: dict[int, tuple[int, ...]]

    @staticmethod
    def of(program: Program) -> Liveness:
        birth: dict[int, View] = {}
        born: dict[int, int] = {}
        last: dict[int, int] = {}
        touched: dict[int, set[int]] = {one.op: set() for one in program.collectives}  # some touch state only
        received: dict[int, list[View]] = {}
        for one in program.collectives:
            views = [*one.views, *(view for _, view in (*one.sends, *one.receives))]
            for view in [program.views[v] for v in views]:
                if program.storages[view.storage].kind == "temp":
                    touched[one.op].add(view.storage)
            for _, v in one.receives:
                received.setdefault(one.op, []).append(program.views[v])
        for index, op in enumerate(program.ops):
            for view in received.get(index, ()):
                birth.setdefault(view.storage, view)
            last.update(dict.fromkeys(touched.get(index, ()), index))
            for v in (*views_read(op), *views_made(op)):
                view = program.views[v]
                if program.storages[view.storage].kind != "temp":
                    continue
                if view.storage not in birth:
                    birth[view.storage], born[view.storage] = view, index
                last[view.storage] = index
                touched.get(index, set()).discard(view.storage)
        for v in program.results:
            if program.views[v].storage in birth:
                last[program.views[v].storage] = len(program.ops)
        over = {op: tuple(s for s in storages if last[s] == op) for op, storages in touched.items()}
        return Liveness(birth, born, last, over)


class Context:
    """What the interpreter and graphs need of a program."""

    def __init__(self, program: Program, operands: Operands, replays: Replays, streams: RandomStreams) -> None:
        self.program = program
        self.operands = operands
        self.replays = replays
        self.streams = streams
        self.liveness = Liveness.of(program)

    def tensor(self, frame: Frame, index: int) -> torch.Tensor:
        """The tensor of a view, on a temporary storage or another."""
        made = frame.slot.views[index]
        if made is not None:
            return made
        view = self.program.views[index]
        base = frame.temps[view.storage]
        assert base is not None, "used before it is made: the Program was checked for this"
        return base if view == self.liveness.birth[view.storage] else window(base, view)

    def results(self, frame: Frame) -> Sequence[torch.Tensor]:
        """The tensors a step's results are copied from, once its last operator has run."""
        return [self.tensor(frame, view) for view in self.program.results]
