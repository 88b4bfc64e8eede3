"""A program that is to be compiled, on the GPU: units instead of operators (device/units.py, device/inductor.py)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gpumux.device import inductor
from gpumux.device.cpu.interp import failed, names
from gpumux.device.cuda.compute import Compute
from gpumux.device.cuda.execute import Frame, Runner
from gpumux.device.cuda.operands import Operands
from gpumux.device.cuda.retarget import window
from gpumux.device.units import Unit, units
from gpumux.errors import JobFailed
from gpumux.program.ir import Program, View


class CompiledRunner(Runner):
    """Runs ranges of whole units. `compile_next` has to be called until it says that nothing is left. Raises
    ProgramError, when made, for what the device can't run or compile."""

    def __init__(self, program: Program, operands: Operands, compute: Compute) -> None:
        super().__init__(program, operands, compute)
        inductor.find_compiler(compute.device.type)
        self.units: tuple[Unit, ...] = units(program, inductor.uncompilable(program, self._live))
        self._compiled: dict[int, tuple[inductor.Compiled, list[torch.Tensor]]] = {}  # by their first operator
        self._left = [index for index, unit in enumerate(self.units) if unit.compiled]

    def compile_next(self) -> bool:
        """Compile one unit; whether any are left. Raises ProgramError."""
        if self._left:
            index = self._left.pop(0)
            unit = self.units[index]
            made = inductor.compile_unit(self.program, self._live, unit, self._compute.device, self._compute.supports)
            if made is None:
                changed = unit._replace(compiled=False)
                self.units = (*self.units[:index], changed, *self.units[index + 1 :])
            else:
                self._compiled[unit.start] = (made, [self._argument(view) for view in made.bases])
        return bool(self._left)

    def run(self, frame: Frame, start: int, stop: int, between: Callable[[], None] | None = None) -> None:
        """Between operators of one unit nothing runs, so `between` sees all of a unit's time at its last operator."""
        for unit in self.units:
            if not start <= unit.start < stop:
                continue
            if not unit.compiled:
                super().run(frame, unit.start, unit.stop, between)
                continue
            for _ in range(unit.start, unit.stop):
                if between is not None:
                    between()
            self._run(frame, unit)
            if unit.stop == len(self.program.ops):
                self._bring_out(frame)
        if start == stop == len(self.program.ops):
            self._bring_out(frame)

    def _run(self, frame: Frame, unit: Unit) -> None:
        compiled, bases = self._compiled[unit.start]
        numbers = self._operands.number_vectors if compiled.numbers else ()
        temps = []
        for storage in compiled.live_in:
            temp = frame.temps[storage]
            assert temp is not None, "used before it is made: the Program was checked for this"
            temps.append(temp)
        try:
            made = inductor.run(compiled, self.program, self._live, [*bases, *numbers, *temps], self._compute.kernels)
        except torch.OutOfMemoryError as error:
            raise JobFailed(
                f"the GPU's memory is used up at operators {unit.start} to {unit.stop - 1}",
                "use smaller batches, or wait for other jobs to end",
            ) from error
        except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError) as error:
            where = f"one of operators {unit.start} to {unit.stop - 1} ({names(self.program, unit.start, unit.stop)})"
            raise failed(error, where) from error
        for storage, tensor in zip(compiled.live_out, made, strict=True):
            frame.temps[storage] = tensor
        for storage in compiled.live_in:
            if self._live.last[storage] < unit.stop:
                frame.temps[storage] = None

    def _argument(self, view: View) -> torch.Tensor:
        for known, made in zip(self.program.views, self._operands.views, strict=True):
            if known.storage != view.storage or made is None:
                continue
            if known == view:
                return made
            if self.program.storages[view.storage].kind != "input":  # those share a block, each at its place
                return window(made, view)
        return self._operands.input_view(view)
