"""Operators one at a time through Python: the first steps of a program, and what graphs can't say.

It is the slow way (about 2.5 us an operator more than a graph), and the careful one: it can compare
what an operator really returned with what the Program declares, time it, and say which operator is
running when the process dies.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from gpumux.device.cpu.frame import Context, Frame
from gpumux.device.cpu.randomness import standing_in
from gpumux.device.cpu.schema import DTYPES, evaluate, overload, takes_generator
from gpumux.device.cpu.stopwatch import Stopwatch
from gpumux.errors import JobFailed, ProgramError
from gpumux.program.ir import Op, Out, Program, View


def first_lines(error: BaseException, limit: int = 400) -> str:
    """torch's message without its C++ stack, at most `limit` characters."""
    text = str(error).split("\nException raised from", 1)[0].strip()
    text = re.sub(
        r"(?s)^The following operation failed in the TorchScript interpreter\.\n.*?\nRuntimeError: ", "", text
    )
    return text[:limit] or type(error).__name__


def failed(error: BaseException, where: str) -> JobFailed:
    return JobFailed(f"{where} failed: {first_lines(error)}", "check what the step computes on this batch")


class Interpreter:
    """Runs ranges of a program's operators. `progress(i)` is told the operator about to run."""

    def __init__(self, context: Context, progress: Callable[[int], None]) -> None:
        self.context = context
        self._progress = progress
        program = context.program
        self._calls: list[Any] = [overload(op.target) for op in program.ops]
        self._owners: dict[int, int] = {}  # while verifying: storage by address of its memory
        self._dies: list[list[int]] = [[] for _ in program.ops]
        for storage, last in context.liveness.last.items():
            if last < len(program.ops):
                self._dies[last].append(storage)

    def run(
        self, frame: Frame, start: int, stop: int, *, verify: bool = False, watch: Stopwatch | None = None
    ) -> list[float]:
        """Run operators start..stop-1; their seconds, if there is a watch. With `verify`, compare every output with
        its declaration. Raises JobFailed when an operator does, ProgramError when one is not as declared."""
        ops, context = self.context.program.ops, self.context
        seconds: list[float] = []
        if verify and start == 0:
            self._owners = self._persistent(frame)
        for index in range(start, stop):
            op = ops[index]

            def tensor(view: int, frame: Frame = frame) -> torch.Tensor:
                return context.tensor(frame, view)

            try:
                args = [evaluate(arg, tensor, frame.scalars) for arg in op.args]
                kwargs = {name: evaluate(arg, tensor, frame.scalars) for name, arg in op.kwargs}
                self._progress(index)
                if watch is None:
                    returned = self._call(frame, index, op, args, kwargs)
                else:
                    watch.start()
                    returned = self._call(frame, index, op, args, kwargs)
                    seconds.append(watch.stop())
            except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError, MemoryError) as error:
                raise failed(error, f"operator {index} ({op.target})") from error
            self._keep(frame, op, index, returned, verify)
            # Before the next operator makes its own: what dies here must be free by then.
            del args, kwargs, returned
            for storage in self._dies[index]:
                self._drop(frame, storage, verify)
        return seconds

    def _persistent(self, frame: Frame) -> dict[int, int]:
        views = zip(self.context.program.views, frame.slot.views, strict=True)
        return {t.untyped_storage().data_ptr(): v.storage for v, t in views if t is not None and t.numel()}

    def _drop(self, frame: Frame, storage: int, verify: bool) -> None:
        temp = frame.temps[storage]
        if verify and temp is not None:
            self._owners.pop(temp.untyped_storage().data_ptr(), None)
        frame.temps[storage] = None

    def _call(self, frame: Frame, index: int, op: Op, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if op.random is None:
            return self._calls[index](*args, **kwargs)
        call, generator = self._calls[index], torch.default_generator
        with ExitStack() as stack:
            if op.stream is not None:
                generator = self.context.streams.of(self.context.tensor(frame, op.stream))
            if op.random in self.context.replays.slots:
                stack.enter_context(self.context.replays.drawing(op.random, generator))
            if op.stream is not None and not takes_generator(op.target):
                stack.enter_context(standing_in(generator))
            elif op.stream is not None:
                kwargs["generator"] = generator
            return call(*args, **kwargs)

    def _keep(self, frame: Frame, op: Op, index: int, returned: Any, verify: bool) -> None:
        born = self.context.liveness.born
        for view_index, tensor in outputs(op, returned):
            view = self.context.program.views[view_index]
            if verify:
                _verify(self.context, self._owners, index, view, tensor)
                self._owners[tensor.untyped_storage().data_ptr()] = view.storage
            if born.get(view.storage) == index and frame.temps[view.storage] is None:
                frame.temps[view.storage] = tensor


def outputs(op: Op, returned: Any) -> list[tuple[int, torch.Tensor]]:
    """What the operator returned, by the view that each tensor is declared to be.

    Not by a nested function that calls itself: its closure would be a cycle, and hold the tensors until the cyclic
    collector runs, which it does not do between steps."""
    values: Sequence[Any] = returned if isinstance(returned, tuple) else (returned,)
    pairs: list[tuple[int, torch.Tensor]] = []
    for out, value in zip(op.outs, values, strict=False):
        _collect(out, value, pairs)
    return pairs


def _collect(out: Out, value: Any, pairs: list[tuple[int, torch.Tensor]]) -> None:
    if isinstance(out, tuple):
        for inner, item in zip(out, value, strict=True):
            _collect(inner, item, pairs)
    elif out is not None:
        pairs.append((out, value))


def _canonical_stride(size: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Strides that are never used (of dimensions of one element, of empty tensors) say nothing."""
    return () if 0 in size else tuple(s for n, s in zip(size, stride, strict=True) if n > 1)


def _verify(context: Context, owners: dict[int, int], index: int, view: View, tensor: torch.Tensor) -> None:
    """Views on temporaries are made by offset and stride, so an operator that lays its output out
    otherwise than declared would be read wrongly without a word. Raises ProgramError."""
    target = context.program.ops[index].target

    def wrong(what: str, declared: object, real: object) -> ProgramError:
        return ProgramError(
            f"operator {index} ({target}) returned {what} {real} where the program declares {declared}",
            "capture the step with the torch version and thread count of the daemon",
        )

    if not isinstance(tensor, torch.Tensor):
        raise wrong("a", "tensor", type(tensor).__name__)
    if tensor.dtype != DTYPES[view.dtype]:
        raise wrong("dtype", view.dtype, tensor.dtype)
    if tuple(tensor.size()) != view.size:
        raise wrong("size", view.size, tuple(tensor.size()))
    real = _canonical_stride(view.size, tensor.stride())
    if real != _canonical_stride(view.size, view.stride):
        raise wrong("stride", view.stride, tensor.stride())
    if tensor.numel() and tensor.storage_offset() != view.offset:
        raise wrong("storage offset", view.offset, tensor.storage_offset())
    nbytes = context.program.storages[view.storage].nbytes
    if tensor.untyped_storage().nbytes() < nbytes:
        raise wrong("storage bytes", nbytes, tensor.untyped_storage().nbytes())
    if not tensor.numel():
        return
    shares = owners.get(tensor.untyped_storage().data_ptr())
    if shares is not None and shares != view.storage:
        raise wrong("the memory of storage", view.storage, shares)
    if shares is None and context.liveness.born.get(view.storage) != index:
        raise wrong("memory", f"of storage {view.storage}", "of its own")


def names(program: Program, start: int, stop: int) -> str:
    """The distinct operators of a range, for messages."""
    distinct = list(dict.fromkeys(op.target for op in program.ops[start:stop]))
    more = f" and {len(distinct) - 6} more" if len(distinct) > 6 else ""
    return ", ".join(distinct[:6]) + more
