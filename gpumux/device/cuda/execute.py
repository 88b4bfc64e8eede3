"""A Program's operators called one by one through torch: in its first steps, and inside captures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from gpumux.device import inductor
from gpumux.device.cuda import operators
from gpumux.device.cuda.compute import Compute
from gpumux.device.cuda.operands import CudaOperands
from gpumux.device.cuda.operators import form_temporary_bytes, window
from gpumux.device.run.interpreter import failed, names, outputs
from gpumux.device.run.operands import Liveness
from gpumux.errors import JobFailed, ProgramError
from gpumux.program.cut import Unit, units
from gpumux.program.ir import Op, Program, View, aligned

_FAILURES = (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError, MemoryError)


@dataclass(slots=True)
class CudaFrame:
    """One step in progress. `temps`: by storage, the tensor made there, until its last use. `drawn`: by random slot,
    the numbers that a later operator uses again."""

    temps: list[torch.Tensor | None]
    drawn: dict[int, torch.Tensor] = field(default_factory=dict)

    def copy(self) -> CudaFrame:
        return CudaFrame([*self.temps], dict(self.drawn))


class OperatorRunner:
    """Runs ranges of a program's operators. `streams`: the generators of random streams, by the view of their state.
    The constructor raises ProgramError for what the device can't run."""

    def __init__(
        self, program: Program, operands: CudaOperands, compute: Compute, streams: Mapping[int, Any] | None = None
    ) -> None:
        self.program = program
        self._operands, self._compute = operands, compute
        self._streams = dict(streams or {})
        for index, op in enumerate(program.ops):
            operators.refuse_uncapturable(index, op)
        self._calls = [operators.call(index, op, compute.supports) for index, op in enumerate(program.ops)]
        self._takes_device = [operators.takes_device(op) for op in program.ops]
        self._kept = operators.kept_draws(program)
        self.unsized = operators.unsized(program)
        self._live = Liveness.of(program)
        self._dies: list[list[int]] = [[] for _ in program.ops]
        for storage, last in self._live.last.items():
            if last < len(program.ops):
                self._dies[last].append(storage)

    def frame(self) -> CudaFrame:
        return CudaFrame([None] * len(self.program.storages))

    def run(self, frame: CudaFrame, start: int, stop: int, between: Callable[[], None] | None = None) -> None:
        """Run operators start..stop-1, and copy the results out if these are the last. `between` is called before each.
        Raises JobFailed when an operator fails, ProgramError when its output can't be as declared."""
        for index in range(start, stop):
            if between is not None:
                between()
            op = self.program.ops[index]
            try:
                arguments, keywords = self._arguments(frame, index, op)
                returned = self._call(frame, index, op, arguments, keywords)
            except torch.OutOfMemoryError as error:
                raise JobFailed(
                    f"the GPU's memory is used up at operator {index} ({op.target})",
                    "use smaller batches, or wait for other jobs to end",
                ) from error
            except _FAILURES as error:
                raise failed(error, f"operator {index} ({op.target})") from error
            self._keep(frame, index, op, returned, [*arguments, *keywords.values()])
            del arguments, keywords, returned  # before the next operator makes its own
            for storage in self._dies[index]:
                frame.temps[storage] = None
        if stop == len(self.program.ops):
            self._copy_out_results(frame)

    def _copy_out_results(self, frame: CudaFrame) -> None:
        """Copy the results to where they leave the GPU from."""
        for target, view in zip(self._operands.results, self.program.results, strict=True):
            target.copy_(self._tensor(frame, view))

    def compile_next(self) -> bool:
        """Compile some of the program; whether any of it is left."""
        return False

    def live_at(self, bound: int) -> list[int]:
        """Temporary storages that are in use between operators `bound` - 1 and `bound`."""
        live = self._live
        return [storage for storage, born in live.born.items() if born < bound <= live.last[storage]]

    def outgoing_memory(self, before: CudaFrame, start: int, stop: int) -> CudaFrame | None:
        """Memory for the temporaries that operators start..stop-1, which begin with `before`, leave to later ones. None
        if its size is not known before they have run."""
        for index in range(start, stop):
            slot = self.program.ops[index].random
            if slot is not None and slot in self._kept and slot not in before.drawn:
                return None
        after = CudaFrame([None] * len(before.temps), dict(before.drawn))
        for storage in self.live_at(stop):
            made = before.temps[storage]
            if made is None:
                if storage in self.unsized:
                    return None
                base = self._compute.allocate(self.program.storages[storage].nbytes)
                made = operators.window(base, self._live.birth[storage])
            after.temps[storage] = made
        return after

    def copy_outgoing(self, frame: CudaFrame, after: CudaFrame) -> None:
        """Copy the temporaries that a piece leaves to later ones to the memory of `after`."""
        for storage, (here, there) in enumerate(zip(frame.temps, after.temps, strict=True)):
            if here is not None and there is not None and here is not there:
                nbytes = self.program.storages[storage].nbytes
                if storage in self.unsized:
                    nbytes = here.untyped_storage().nbytes()
                whole_bytes(there, nbytes).copy_(whole_bytes(here, nbytes))
        for slot, there in after.drawn.items():
            if frame.drawn[slot] is not there:
                there.copy_(frame.drawn[slot])

    def transient_bytes(self) -> int:
        """The most bytes that temporaries hold at an operator whose form makes temporaries of its own (operators.py);
        0 if there is none."""
        made = {index: form_temporary_bytes(self.program, op) for index, op in enumerate(self.program.ops)}
        changes = [0] * (len(self.program.ops) + 2)
        for storage, born in self._live.born.items():
            nbytes = aligned(self.program.storages[storage].nbytes)
            changes[born] += nbytes
            changes[self._live.last[storage] + 1] -= nbytes
        held = accumulate(changes)
        return max([live + made[index] for index, live in zip(made, held, strict=False) if made[index]], default=0)

    def _arguments(self, frame: CudaFrame, index: int, op: Op) -> tuple[list[Any], dict[str, Any]]:
        def tensor(view: int) -> torch.Tensor:
            return self._tensor(frame, view)

        numbers, device = self._operands.numbers, self._compute.device
        arguments = [operators.evaluate(arg, tensor, numbers, device) for arg in op.args]
        keywords = {name: operators.evaluate(arg, tensor, numbers, device) for name, arg in op.kwargs}
        if self._takes_device[index]:
            keywords["device"] = device
        return arguments, keywords

    def generators(self, start: int, stop: int) -> list[Any]:
        """The generators of the random streams that operators start..stop-1 draw from, each once."""
        found = dict.fromkeys(op.stream for op in self.program.ops[start:stop] if op.stream is not None)
        return [self._streams[view] for view in found]

    def _call(self, frame: CudaFrame, index: int, op: Op, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        if op.stream is None:
            return self._drawn(frame, index, op, arguments, keywords)
        with self._compute.drawing_from(self._streams[op.stream]):
            return self._drawn(frame, index, op, arguments, keywords)

    def _drawn(self, frame: CudaFrame, index: int, op: Op, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        if op.random is None or op.random not in self._kept:
            return self._calls[index](*arguments, **keywords)
        drawn = frame.drawn.get(op.random)
        if drawn is None:
            returned = self._calls[index](*arguments, **keywords)
            mask: torch.Tensor = returned[1] if isinstance(returned, tuple) else returned
            frame.drawn[op.random] = mask.clone()
            return returned
        return operators.repeat_draw(op, arguments, drawn)

    def _tensor(self, frame: CudaFrame, index: int) -> torch.Tensor:
        made = self._operands.views[index]
        if made is not None:
            return made
        view = self.program.views[index]
        base = frame.temps[view.storage]
        assert base is not None, "used before it is made: the Program was checked for this"
        return base if view == self._live.birth[view.storage] else operators.window(base, view)

    def _keep(self, frame: CudaFrame, index: int, op: Op, returned: Any, arguments: list[Any]) -> None:
        born = [
            (view, made)
            for view, made in outputs(op, returned)
            if self._live.born.get(self.program.views[view].storage) == index
        ]
        if not born:
            return
        memory = frozenset(_memory(arguments))
        for view_index, made in born:
            view = self.program.views[view_index]
            storage = view.storage
            if storage in self.unsized:
                frame.temps[storage] = made
                continue
            try:
                tensor = operators.conforming(made, view, self.program.storages[storage].nbytes, memory)
            except ProgramError as error:
                raise ProgramError(f"operator {index} ({op.target}): {error.message}", error.remedy) from error
            if frame.temps[storage] is None:
                frame.temps[storage] = tensor
            elif tensor is not made or _start(tensor) != _start(frame.temps[storage]):
                raise ProgramError(
                    f"operator {index} ({op.target}) returned tensors that share memory otherwise than declared",
                    "write the step without it, or use --device cpu",
                )


def whole_bytes(tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
    """The first bytes of the storage a tensor lies on."""
    made = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return made.set_(tensor.untyped_storage(), 0, (nbytes,), (1,))


def _memory(arguments: Any) -> list[int]:
    if isinstance(arguments, torch.Tensor):
        return [arguments.untyped_storage().data_ptr()] if arguments.numel() else []
    if isinstance(arguments, list):
        return [start for item in arguments for start in _memory(item)]
    return []


def _start(tensor: torch.Tensor | None) -> int:
    return tensor.untyped_storage().data_ptr() if tensor is not None else 0


# ---- Compiled programs: units instead of operators (program/cut.py, device/inductor.py).


class CompiledRunner(OperatorRunner):
    """Runs ranges of whole units. Call `compile_next` until it returns False. The constructor raises ProgramError for
    what the device can't run or compile."""

    def __init__(
        self, program: Program, operands: CudaOperands, compute: Compute, streams: Mapping[int, Any] | None = None
    ) -> None:
        super().__init__(program, operands, compute, streams)
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

    def run(self, frame: CudaFrame, start: int, stop: int, between: Callable[[], None] | None = None) -> None:
        """As OperatorRunner.run. A unit runs as a whole once `between` was called for each of its operators, so
        all its time counts as its last operator's."""
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
                self._copy_out_results(frame)
        if start == stop == len(self.program.ops):
            self._copy_out_results(frame)

    def _run(self, frame: CudaFrame, unit: Unit) -> None:
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
