"""Operators one at a time through Python: the first steps of a program, and operators that graphs can't express.

This is slower than a graph (graph.py), and can do more: compare what an operator returned with what the Program
declares, time it, and record which operator runs in case the process dies.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache
from time import perf_counter
from typing import Any

import torch

from gpumux.device.run.operands import Context, Frame
from gpumux.device.run.randomness import standing_in
from gpumux.device.run.schema import DTYPES, evaluate, takes_generator
from gpumux.errors import JobFailed, ProgramError
from gpumux.program import onednn_lstm
from gpumux.program.check import overload
from gpumux.program.ir import Op, Out, Program, View

# ---- Time that a thread's work takes on a core of its own: elapsed time less the time it waited for a core.
#
# Low jobs' processes give way to others (low_nice), so elapsed time can be far above what an operator takes. Linux
# counts how long a thread waits for a core, in /proc/thread-self/schedstat (proc_pid_schedstat(5)). Without that count,
# elapsed time is used. The waits of torch's own threads are not subtracted.


_STATISTICS = "/proc/thread-self/schedstat"


class Stopwatch:
    """Measures work of the thread that starts it."""

    __slots__ = ("_began", "_waited")

    def __init__(self) -> None:
        self._waited = self._began = 0.0

    def start(self) -> None:
        self._waited = waited()
        self._began = perf_counter()

    def stop(self) -> float:
        """Seconds since `start`, less those that the thread waited for a core."""
        seconds = perf_counter() - self._began
        return max(0.0, seconds - (waited() - self._waited))


def waited() -> float:
    """Seconds that this thread has waited for a core since it began; 0.0 if the kernel does not count them."""
    if not _counted():
        return 0.0
    file = os.open(_STATISTICS, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _queued(file)
    finally:
        os.close(file)


class CoreWaits:
    """`waited` with a file that stays open, which is faster. For use in the thread that makes it."""

    def __init__(self) -> None:
        self._file = os.open(_STATISTICS, os.O_RDONLY | os.O_CLOEXEC) if _counted() else -1

    def seconds(self) -> float:
        return _queued(self._file) if self._file >= 0 else 0.0

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)


def _queued(file: int) -> float:
    return 1e-9 * int(os.pread(file, 128, 0).split()[1])


@cache
def _counted() -> bool:
    """Whether the kernel counts a thread's waits."""
    try:
        with open(_STATISTICS, "rb") as file:
            return len(file.read().split()) == 3
    except OSError:
        return False


# ---- Running operators


def first_lines(error: BaseException, limit: int = 400) -> str:
    """torch's message without its C++ stack, at most `limit` characters."""
    text = str(error).split("\nException raised from", 1)[0].strip()
    text = re.sub(
        r"(?s)^The following operation failed in the TorchScript interpreter\.\n.*?\nRuntimeError: ", "", text
    )
    return text[:limit] or type(error).__name__


def lacks_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or "allocate memory" in first_lines(error)


def failed(error: BaseException, where: str) -> JobFailed:
    text = first_lines(error)
    if lacks_memory(error):
        remedy = "use a smaller batch: it takes more memory than a job of this size may (docs/security.md)"
        return JobFailed(f"{where} failed: {text}", remedy)
    return JobFailed(f"{where} failed: {text}", "check what the step computes on this batch")


class Interpreter:
    """Runs ranges of a program's operators. `progress(i)` is called before operator i runs."""

    def __init__(self, context: Context, progress: Callable[[int], None]) -> None:
        self.context = context
        self._progress = progress
        program = context.program
        self._calls: list[Any] = [overload(op.target) for op in program.ops]
        self._for_training = [onednn_lstm.for_training(op) for op in program.ops]
        self._owners: dict[int, int] = {}  # while verifying: storage by address of its memory
        self._dies: list[list[int]] = [[] for _ in program.ops]
        for storage, last in context.liveness.last.items():
            if last < len(program.ops):
                self._dies[last].append(storage)

    def run(
        self, frame: Frame, start: int, stop: int, *, verify: bool = False, watch: Stopwatch | None = None
    ) -> list[float]:
        """Run operators start..stop-1. Returns the seconds of each, if there is a watch. `verify`: compare every output
        with its declaration. Raises JobFailed when an operator fails, ProgramError when an output is not as
        declared."""
        ops, context = self.context.program.ops, self.context
        seconds: list[float] = []
        if verify:  # collectives make and free memory between two runs
            self._owners = self._held(frame)
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
                frame.failed_at = None if lacks_memory(error) else index
                raise failed(error, f"operator {index} ({op.target})") from error
            self._keep(frame, op, index, returned, verify)
            # Free what is not used again before the next operator allocates.
            del args, kwargs, returned
            for storage in self._dies[index]:
                self._drop(frame, storage, verify)
        return seconds

    def _held(self, frame: Frame) -> dict[int, int]:
        views = zip(self.context.program.views, frame.slot.views, strict=True)
        held = [(v.storage, t) for v, t in views if t is not None]
        held += [(storage, t) for storage, t in enumerate(frame.temps) if t is not None]
        return {t.untyped_storage().data_ptr(): storage for storage, t in held if t.numel()}

    def _drop(self, frame: Frame, storage: int, verify: bool) -> None:
        temp = frame.temps[storage]
        if verify and temp is not None:
            self._owners.pop(temp.untyped_storage().data_ptr(), None)
        frame.temps[storage] = None

    def _call(self, frame: Frame, index: int, op: Op, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if self._for_training[index]:
            with torch.enable_grad():
                return self._calls[index](*args, **kwargs)
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
    """The tensors that an operator returned, each with the index of its declared view.

    `_collect` is not a nested function: its closure would be a reference cycle, and hold the tensors until the cyclic
    garbage collector runs, which it does not do between steps."""
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
    """The strides that matter: not those of dimensions of one element or of empty tensors."""
    return () if 0 in size else tuple(s for n, s in zip(size, stride, strict=True) if n > 1)


def _verify(context: Context, owners: dict[int, int], index: int, view: View, tensor: torch.Tensor) -> None:
    """Raise ProgramError if an output is not as declared. Views of temporaries are made by offset and stride, so an
    output in another layout would be misread without an error."""
    target = context.program.ops[index].target
    remedy = "capture the step with the torch version and thread count of the daemon"
    if target in onednn_lstm.TARGETS:
        remedy = f"oneDNN lays out an LSTM by the processor: capture on one like the daemon's, or {onednn_lstm.REMEDY}"

    def wrong(what: str, declared: object, real: object) -> ProgramError:
        return ProgramError(
            f"operator {index} ({target}) returned {what} {real} where the program declares {declared}", remedy
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
