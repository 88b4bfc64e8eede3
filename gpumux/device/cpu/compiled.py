"""A program that is to be compiled, in an executor: units instead of operators (device/units.py, device/inductor.py)."""

from __future__ import annotations

from typing import Any

import torch

from gpumux.device import inductor
from gpumux.device.cpu.frame import Context, Frame
from gpumux.device.cpu.interp import Interpreter, failed, names
from gpumux.device.cpu.operands import window
from gpumux.device.cpu.stopwatch import Stopwatch
from gpumux.device.units import Unit, units
from gpumux.program.ir import View

_CPU = torch.device("cpu")


class CompiledProgram:
    """All units of a program, compiled. Raises ProgramError when one can't be."""

    def __init__(self, context: Context, interpreter: Interpreter) -> None:
        self._context, self._interpreter = context, interpreter
        program, live = context.program, context.liveness
        inductor.find_compiler("cpu")
        self._compiled: dict[int, inductor.Compiled] = {}  # by their first operator
        found: list[Unit] = []
        for unit in units(program, inductor.uncompilable(program, live)):
            made = inductor.compile_unit(program, live, unit, _CPU, lambda _: True) if unit.compiled else None
            found.append(unit._replace(compiled=made is not None))
            if made is not None:
                self._compiled[unit.start] = made
        self.units = tuple(found)
        count = len(program.scalars)
        self._numbers = tuple(torch.zeros(count, dtype=d) for d in (torch.float64, torch.int64, torch.float32))
        self._step = -1  # whose numbers those are

    @property
    def left(self) -> dict[str, str]:
        """Operators that run as they are."""
        ops = self._context.program.ops
        return {op.target: "not compiled" for u in self.units if not u.compiled for op in ops[u.start : u.stop]}

    def run(self, frame: Frame, start: int, stop: int, *, watch: Stopwatch | None = None) -> list[float]:
        """Run the units between two of their boundaries. Seconds of each operator, if there is a watch: a unit's are put
        down to its first.
        Raises JobFailed."""
        seconds: list[float] = []
        for unit in self.units:
            if not start <= unit.start < stop:
                continue
            if not unit.compiled:
                seconds += self._interpreter.run(frame, unit.start, unit.stop, watch=watch)
                continue
            if watch is None:
                self._run(frame, unit)
                continue
            watch.start()
            self._run(frame, unit)
            seconds += [watch.stop(), *[0.0] * (unit.stop - unit.start - 1)]
        return seconds

    def _run(self, frame: Frame, unit: Unit) -> None:
        context, compiled = self._context, self._compiled[unit.start]
        program, live = context.program, context.liveness
        arguments = frame.slot.pieces.get(~unit.start)  # graphs' keys are not negative
        if arguments is None:
            found = tuple(self._tensor(frame, view) for view in compiled.bases)
            arguments = frame.slot.pieces[~unit.start] = (*found, *(self._numbers if compiled.numbers else ()))
        if compiled.numbers and frame.step != self._step:
            self._fill(frame)
        temps: list[Any] = [frame.temps[storage] for storage in compiled.live_in]
        try:
            made = inductor.run(compiled, program, live, [*arguments, *temps], lambda call, given: call(*given))  # type: ignore[list-item]
        except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError, MemoryError) as error:
            where = f"one of operators {unit.start} to {unit.stop - 1} ({names(program, unit.start, unit.stop)})"
            raise failed(error, where) from error
        for storage, tensor in zip(compiled.live_out, made, strict=True):
            frame.temps[storage] = tensor
        for storage in compiled.live_in:
            if live.last[storage] < unit.stop:
                frame.temps[storage] = None

    def _tensor(self, frame: Frame, view: View) -> torch.Tensor:
        for index, known in enumerate(self._context.program.views):
            made = frame.slot.views[index]
            if known.storage == view.storage and made is not None:
                return made if known == view else window(made, view)
        raise AssertionError("a unit's argument lies on no storage of the program's")

    def _fill(self, frame: Frame) -> None:
        self._step = frame.step
        for place, value in enumerate(frame.scalars):
            self._numbers[0][place] = self._numbers[2][place] = float(value)
            self._numbers[1][place] = value if isinstance(value, int) else 0
