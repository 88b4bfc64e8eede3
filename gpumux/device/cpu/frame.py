"""One step in progress on a loaded program: what its pieces pass to each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gpumux.device.cpu.operands import Operands, SlotOperands, window
from gpumux.device.cpu.randomness import Replays, Streams
from gpumux.device.cpu.schema import views_made, views_read
from gpumux.program.ir import Program, View


@dataclass(slots=True)
class Frame:
    """`temps` holds, by storage, the tensor born there, until its last use."""

    slot: SlotOperands
    slot_index: int
    scalars: Sequence[float | int]
    temps: list[torch.Tensor | None]
    step: int
    cut: int
    next_piece: int = 0


@dataclass(frozen=True, slots=True)
class Liveness:
    """Of each temporary storage: the view it is born with, the operator that makes it, and the last
    operator that uses it (the number of operators for those that hold a result)."""

    birth: dict[int, View]
    born: dict[int, int]
    last: dict[int, int]

    @staticmethod
    def of(program: Program) -> Liveness:
        birth: dict[int, View] = {}
        born: dict[int, int] = {}
        last: dict[int, int] = {}
        for index, op in enumerate(program.ops):
            for v in (*views_read(op), *views_made(op)):
                view = program.views[v]
                if program.storages[view.storage].kind != "temp":
                    continue
                if view.storage not in birth:
                    birth[view.storage], born[view.storage] = view, index
                last[view.storage] = index
        for v in program.results:
            if program.views[v].storage in birth:
                last[program.views[v].storage] = len(program.ops)
        return Liveness(birth, born, last)


class Context:
    """What every way of running a program's operators needs to know about it."""

    def __init__(self, program: Program, operands: Operands, replays: Replays, streams: Streams) -> None:
        self.program = program
        self.operands = operands
        self.replays = replays
        self.streams = streams
        self.liveness = Liveness.of(program)

    def tensor(self, frame: Frame, index: int) -> torch.Tensor:
        """The tensor of a view, on whatever storage it lies."""
        made = frame.slot.views[index]
        if made is not None:
            return made
        view = self.program.views[index]
        base = frame.temps[view.storage]
        assert base is not None, "used before it is made: the Program was checked for this"
        return base if view == self.liveness.birth[view.storage] else window(base, view)
