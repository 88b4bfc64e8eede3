"""The results of steps that may still be on their way: the future of each, and a job's unanswered steps."""

from __future__ import annotations

import copy
import math
import numbers
import operator
import re
from collections import deque, namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy
import torch

from gpumux.capture.batch.containers import flatten, unflatten
from gpumux.capture.batch.effects import write_back
from gpumux.capture.source import fold, folded
from gpumux.capture.step import Choice
from gpumux.client.remote import Remote, RemoteProgram
from gpumux.errors import BadBatch, BadValue, GpumuxError, JobClosed, JobFailed, NoGraph, UnknownJob, from_code
from gpumux.notebook import facts_table
from gpumux.types import GroupPlace, StepTimes
from gpumux.wire import messages as m
from gpumux.wire.messages import SnapshotSaved, SnapshotWanted

# What a value is compared and computed with. Code that compares with anything else (None, a string, a sentinel) means
# the object, and does not wait.
_VALUES: Final = (
    int, float, complex, torch.Tensor, numpy.ndarray, numpy.generic, list, tuple, dict, set, frozenset,
)  # fmt: skip


# The methods of named tuples, which begin with an underscore so as to differ from the names of fields.
_OF_NAMED_TUPLES: Final = frozenset(("_asdict", "_replace", "_fields"))


class StepFuture:
    """The result of one step, returned at once by `job.step`, and usable as that result: whatever needs the value waits
    for it. Waiting receives messages in the calling thread.

    `loss, accuracy = job.step(x, y)` unpacks; `out["loss"]`, `out.logits`, `loss.detach()`, `float(loss)`,
    `f"{loss:.3f}"`, `if loss < best`, `total += loss`, `torch.stack(losses)`, `print({"loss": loss})`,
    `copy.deepcopy(losses)`, `torch.save(...)` and `numpy.asarray(loss)` do what they do with the value. `in` and
    `remove` of a list compare values as well. Only the identity of a future counts in sets and dicts, as that of a
    tensor. To isinstance it is what the step returns: a tensor (a `TensorFuture`), a number, a tuple, a dict."""

    def __init__(self, wait: Callable[[Callable[[], bool], float | None, int], bool], step: int) -> None:
        self._wait = wait
        self._step = step
        self._done = False
        self._value: Any = None
        self._error: GpumuxError | None = None
        self._told = False  # whether the error was raised
        self._times: StepTimes | None = None
        self._generator: torch.Tensor | None = None  # its state after the step, if the step draws from it
        self._skipped: frozenset[int] = frozenset()  # optimizers whose steps were left out
        self._undone_at: int | None = None  # the operator that failed, if the step was undone
        self._counted = False  # whether the job goes on as if the step had been run, though it is not answered

    def _finish(self, value: Any, times: StepTimes, generator: torch.Tensor | None = None) -> None:
        self._value, self._times, self._generator, self._done = value, times, generator, True

    def _fail(self, error: GpumuxError) -> None:
        if not self._done:
            self._error, self._done = error, True

    def _answered(self) -> bool:
        return self._done

    def done(self) -> bool:
        """Whether the step was answered. Does not wait."""
        if not self._done:
            self._wait(self._answered, 0.0, self._step)
        return self._done

    def result(self, timeout: float | None = None) -> Any:
        """What the step returned, with tensors on the device of the local model. Waits at most `timeout` seconds, then
        raises TimeoutError. Raises JobFailed, JobClosed or DaemonGone when the step could not be answered."""
        try:  # not `folded`, which every step would pay for
            if not self._done and not self._wait(self._answered, timeout, self._step):
                raise TimeoutError(f"the step was not answered within {timeout} s")
            if self._error is not None:
                self._told = True
                raise self._error.with_traceback(None)  # not with the lines at which it was raised before
        except GpumuxError as error:
            fold(error)
            raise
        return self._value

    @property
    def times(self) -> StepTimes:
        """Queue, device and total seconds of the step. Waits for the step; raises what `result` raises."""
        self.result()
        assert self._times is not None
        return self._times

    def __repr__(self) -> str:
        """The value's, for which it waits as printing a tensor waits for the device."""
        try:
            return repr(self.result())
        except GpumuxError as error:
            return f"<StepFuture failed: {error.message}>"

    def __dir__(self) -> list[str]:
        """The future's own names and, once the step is answered, the value's: completing a name does not wait."""
        found = set(dir(type(self)))  # object.__dir__ asks for __class__, which waits for the value
        if self._done and self._error is None:
            found.update(name for name in dir(self._value) if not name.startswith("_"))
        return sorted(found)

    def _repr_html_(self) -> str:
        """What a notebook shows: the value, and where the step's time went. It waits, as `repr` does."""
        facts = {"result": repr(self)}
        if self._times is not None:
            for name, seconds in (("queued", self._times.queue_s), ("device", self._times.device_s)):
                facts[name] = f"{seconds * 1e3:.3f} ms"
            facts["submitted to answered"] = f"{self._times.total_s * 1e3:.3f} ms"
        return facts_table(f"gpumux step {self._step}", facts)

    # ---- in the place of the value

    def item(self) -> Any:
        """The number that the step returned."""
        value = self.result()
        return value.item() if hasattr(value, "item") else value

    def backward(self, *_: Any, **__: Any) -> None:
        """Raises NoGraph, without waiting."""
        raise NoGraph(
            "a step's result has no 'backward': the graph of its loss was in the step, and the result is the value",
            "call loss.backward(), and optimizer.step(), inside the step",
        )

    def __getattr__(self, name: str) -> Any:
        """The attribute of the value. Names that begin with an underscore are not asked of it: they belong to protocols
        (of displaying, numpy), which would wait unasked."""
        if name.startswith("_") and name not in _OF_NAMED_TUPLES:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        value = self.result()
        try:
            return getattr(value, name)
        except AttributeError:
            raise AttributeError(
                f"the step returns a {type(value).__name__}, which has no attribute {name!r}", name=name, obj=self
            ) from None

    def __copy__(self) -> Any:
        return copy.copy(self.result())

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.result(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A file gets the value."""
        return _itself, (self.result(),)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.result())

    def __len__(self) -> int:
        return len(self.result())

    if TYPE_CHECKING:

        def __getitem__(self, index: Any) -> Any: ...

    def __contains__(self, item: Any) -> bool:
        return item in self.result()

    def __bool__(self) -> bool:
        return bool(self.result())

    def __float__(self) -> float:
        return float(self.result())

    def __int__(self) -> int:
        return int(self.result())

    def __complex__(self) -> complex:
        return complex(self.result())

    def __index__(self) -> int:
        return operator.index(self.result())

    def __round__(self, digits: int | None = None) -> Any:
        return round(self.item(), digits)

    def __neg__(self) -> Any:
        return -self.result()

    def __abs__(self) -> Any:
        return abs(self.result())

    def __invert__(self) -> Any:
        return ~self.result()

    def __str__(self) -> str:
        return str(self.result())

    def __format__(self, spec: str) -> str:
        return format(self.result(), spec)

    # By identity, as for a tensor.
    __hash__ = object.__hash__

    def _compare(self, by: Callable[[Any, Any], Any], other: Any) -> Any:
        """The comparison `by` of the value with `other`; of single numbers it is True or False, and no tensor."""
        if isinstance(other, StepFuture):
            other = other.result()
        elif not isinstance(other, _VALUES):
            return NotImplemented
        found = by(self.result(), other)
        one = isinstance(found, (torch.Tensor, numpy.ndarray, numpy.generic)) and math.prod(found.shape) == 1
        return bool(found) if one else found

    def __eq__(self, other: object) -> Any:
        return self._compare(operator.eq, other)

    def __ne__(self, other: object) -> Any:
        return self._compare(operator.ne, other)

    def __lt__(self, other: Any) -> Any:
        return self._compare(operator.lt, other)

    def __le__(self, other: Any) -> Any:
        return self._compare(operator.le, other)

    def __gt__(self, other: Any) -> Any:
        return self._compare(operator.gt, other)

    def __ge__(self, other: Any) -> Any:
        return self._compare(operator.ge, other)

    def _computed(self, by: Callable[..., Any], other: Any, *, first: bool) -> Any:
        """The operation `by` on the value and `other`. `first`: the value is the left operand."""
        if isinstance(other, StepFuture):
            other = other.result()
        elif not isinstance(other, _VALUES):
            return NotImplemented
        return by(self.result(), other) if first else by(other, self.result())

    def _changed(self, by: Callable[..., Any], other: Any) -> Any:
        """`value += other` and the like: into the tensor that the step returned, as in the plain loop."""
        if isinstance(other, StepFuture):
            other = other.result()
        if not (isinstance(self.result(), torch.Tensor) and isinstance(other, _VALUES)):
            return NotImplemented  # then the operation makes a new value
        by(self._value, other)
        return self

    # ---- for numpy and torch

    __array_priority__ = 1000  # a tensor's: a numpy number on the left leaves the operation to the future

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        value = self.result()
        value = value.numpy() if isinstance(value, torch.Tensor) else value
        return numpy.array(value, dtype=dtype) if copy else numpy.asarray(value, dtype=dtype)

    @classmethod
    @folded
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = with_results((args, kwargs or {}))
        return func(*args, **kwargs)


for _name in (
    "item", "backward", "__getattr__", "__copy__", "__deepcopy__", "__iter__", "__len__", "__contains__", "__bool__",
    "__float__", "__int__", "__complex__", "__index__", "__round__", "__neg__", "__abs__", "__invert__", "__str__",
    "__format__", "__array__", "_compare", "_computed", "_changed",
):  # fmt: skip
    setattr(StepFuture, _name, folded(getattr(StepFuture, _name)))


def _operator(by: Callable[..., Any], *, first: bool) -> Callable[[StepFuture, Any], Any]:
    return lambda self, other: self._computed(by, other, first=first)


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor"):
    _by = getattr(operator, _name)
    setattr(StepFuture, f"__{_name.rstrip('_')}__", _operator(_by, first=True))
    setattr(StepFuture, f"__r{_name.rstrip('_')}__", _operator(_by, first=False))


def _in_place(by: Callable[..., Any]) -> Callable[[StepFuture, Any], Any]:
    return lambda self, other: self._changed(by, other)


for _name in ("iadd", "isub", "imul", "itruediv"):
    setattr(StepFuture, f"__{_name}__", _in_place(getattr(operator, _name)))


def _itself(value: Any) -> Any:
    return value


class ContainerFuture(StepFuture):
    """The result of a step that returns neither a single tensor nor a single number. Code that asks isinstance waits
    for it, and it is of the value's class: a tuple, a dict, a dataclass."""

    @property  # type: ignore[misc]
    def __class__(self) -> type[Any]:
        return type(self.result())

    @property
    def item(self) -> Any:
        """That of the value: tuples and dicts have none."""
        return self.__getattr__("item")

    # Not of StepFuture, because torch takes a tensor's subclass that has it for a sequence (`torch.tensor([loss])`).
    def __getitem__(self, index: Any) -> Any:
        return self.result()[index]


class SequenceFuture(ContainerFuture):
    """The result of a step that returns a tuple or a list, and a sequence to `match`, which asks no isinstance."""


class MappingFuture(ContainerFuture):
    """The result of a step that returns a dictionary, and a mapping to `match`."""


Sequence.register(SequenceFuture)
Mapping.register(MappingFuture)


class NumberFuture(StepFuture):
    """The result of a step that returns a single Python number, and a number to code that asks isinstance: loggers
    do."""


numbers.Number.register(NumberFuture)


class TensorFuture(torch.Tensor, StepFuture):  # type: ignore[misc]  # the tensor's methods are meant
    """The result of a step that returns a single tensor, and a tensor itself: to code that asks isinstance or
    torch.is_tensor, and to functions of torch that read Python values (`torch.tensor(losses)`,
    `torch.as_tensor(loss)`). It has the value's shape and type, and no memory: whatever torch does with it waits for
    the value and takes that in its place."""

    @staticmethod
    def __new__(
        cls: type[TensorFuture], wait: Callable[[Callable[[], bool], float | None, int], bool], step: int,
        like: torch.Tensor, device: torch.device,
    ) -> TensorFuture:  # fmt: skip
        made: TensorFuture = torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=device)
        return made

    def __init__(
        self, wait: Callable[[Callable[[], bool], float | None, int], bool], step: int, like: torch.Tensor,
        device: torch.device,
    ) -> None:  # fmt: skip
        StepFuture.__init__(self, wait, step)

    __torch_function__ = StepFuture.__torch_function__
    __repr__ = StepFuture.__repr__  # type: ignore[assignment]
    __deepcopy__ = StepFuture.__deepcopy__
    __dir__ = StepFuture.__dir__
    backward = StepFuture.backward

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.result().__reduce_ex__(protocol)

    # Where torch asks no __torch_function__.
    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = with_results((args, kwargs or {}))
        return func(*args, **kwargs)


def future_for(
    choice: Choice, program: RemoteProgram, wait: Callable[[Callable[[], bool], float | None, int], bool], step: int
) -> StepFuture:
    """The future of a step that runs this choice as this Program."""
    leaf = choice.program.leaf
    if leaf is None:
        container = choice.program.lowered.result_spec.type
        if container is namedtuple or issubclass(container, Sequence):
            return SequenceFuture(wait, step)
        return MappingFuture(wait, step) if issubclass(container, Mapping) else ContainerFuture(wait, step)
    kind, what = leaf
    if kind == "tensor":
        return TensorFuture(wait, step, program.slots[0].results[what], program.home)
    number = kind == "host" or isinstance(what, numbers.Number)
    return NumberFuture(wait, step) if number else ContainerFuture(wait, step)


def with_results(values: Any) -> Any:
    """A pytree with the results of the futures in it. Waits for them."""
    leaves, spec = flatten(values)
    if not any(isinstance(leaf, StepFuture) for leaf in leaves):
        return values
    return unflatten([leaf.result() if isinstance(leaf, StepFuture) else leaf for leaf in leaves], spec)


def wait_answered(future: StepFuture) -> None:
    """Wait until the step is answered, with a result or an error. Raises what Recovery.wait raises."""
    future._wait(future._answered, None, future._step)


def is_answered(future: StepFuture) -> bool:
    """Whether the step was answered, by the messages received so far."""
    return future._answered()


def undone_or_counted(future: StepFuture) -> tuple[GpumuxError, int] | None:
    """The error of a step that was undone, and the operator that failed. None: the step counts, answered or not."""
    if future._undone_at is None:
        future._counted = True
        return None
    assert future._error is not None
    return future._error, future._undone_at


def generator_after(future: StepFuture) -> torch.Tensor | None:
    """The generator's state after the step, if the step draws from it and was answered without an error."""
    return future._generator


def skipped_in(future: StepFuture) -> frozenset[int]:
    """The optimizers whose steps a GradScaler left out in an answered step."""
    return future._skipped


# ---- a job's unanswered steps, and the handling of the daemon's messages about them
#
# Messages are handled in the thread that receives them. A message may be handled twice (if an interrupt comes right
# after a handler), so all handling is idempotent.


class _Step:
    __slots__ = ("captured", "future", "grouped", "host", "program", "slot", "written")

    def __init__(
        self, future: StepFuture, program: int, slot: int, *, choice: Choice,
        grouped: Callable[[GroupPlace], None] | None,
    ) -> None:  # fmt: skip
        self.captured = choice.program
        self.future = future
        self.program = program
        self.slot = slot
        self.grouped = grouped
        self.host = choice.values[sum(choice.program.lowered.counts) :]
        self.written = [(choice.tensors[position], index) for index, position in choice.program.written]


class _Rerun:
    """A step that was answered before, and runs again for its effect on the state."""

    __slots__ = ("program", "slot")

    def __init__(self, program: int, slot: int) -> None:
        self.program = program
        self.slot = slot


_UNDONE = frozenset((BadBatch.code, BadValue.code))  # of the daemon's failures, those of steps that were undone
_OPERATOR = re.compile(r"operator (\d+) \(")  # how the error of an operator begins (device/run/interpreter.py)


class Pending:
    """The unanswered steps of one job. `news` holds the daemon's messages about snapshots."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self.steps: dict[int, _Step | _Rerun] = {}  # by number
        self.held: dict[int, _Step] = {}  # unanswered when the daemon or the job ended, and not submitted again yet
        self._survives: frozenset[str] = frozenset()
        self._no_answer: frozenset[str] = frozenset()
        self.news: deque[SnapshotSaved | SnapshotWanted] = deque()
        self.wrong: deque[StepFuture] = deque()  # of steps in which a check failed
        self.newest = -1  # number of the newest answered step

    def __len__(self) -> int:
        return len(self.steps)

    def may_come_back(self, ends: frozenset[str]) -> None:
        """Keep steps unanswered if the job ends with one of these codes, because it may be recovered then. A refusal
        because there is no such job answers no step either: the message with the job's end is under way, or here
        already."""
        self._survives = ends
        self._no_answer = ends | {UnknownJob.code, JobClosed.code} if ends else ends

    def add(
        self,
        step: int,
        future: StepFuture,
        program: int,
        slot: int,
        choice: Choice,
        grouped: Callable[[GroupPlace], None] | None = None,
    ) -> None:
        """Add a step that is about to be sent. `grouped`: called if it runs in a group of jobs."""
        self.steps[step] = _Step(future, program, slot, choice=choice, grouped=grouped)

    def forget(self, step: int) -> None:
        """Drop a step that was never sent."""
        self.steps.pop(step, None)

    def hold(self) -> None:
        """Hold all unanswered steps until they are sent again: they will get no answer before. Idempotent."""
        self.held |= {number: step for number, step in self.steps.items() if isinstance(step, _Step)}
        self.steps.clear()

    def again(self, step: int, program: int, slot: int) -> None:
        """Note that a step is sent again."""
        held = self.held.pop(step, None)
        if held is not None:
            held.slot = slot
        self.steps[step] = held or _Rerun(program, slot)

    def on_message(self, message: Any, frames: Sequence[Any]) -> None:
        """Handle the session's messages for this job."""
        if type(message) is m.StepDone or type(message) is m.GroupStepDone:
            step = self.steps.get(message.step)
            if step is None:
                return
            program = self._remote.programs[step.program]
            if type(step) is _Step:
                tensors = program.take(step.slot, frames)
                if type(message) is m.GroupStepDone and step.grouped is not None:
                    step.grouped(GroupPlace(message.models, message.place, message.fused, message.program))
                times = StepTimes(message.queue_s, message.device_s, message.total_s)
                if step.written:
                    write_back(step.written, tensors)
                drew = program.program.generator is not None
                generator = tensors[-1] if drew else None
                if step.captured.skips:
                    step.future._skipped = step.captured.skipped(tensors)
                if step.captured.checks and (wrong := step.captured.wrong(tensors)) is not None:
                    self._refute(step.future, message.step, wrong, generator)
                else:
                    step.future._finish(step.captured.value(tensors, step.host), times, generator)
                program.device_s = message.device_s
            program.free.add(step.slot)
            self.newest = max(self.newest, message.step)
            del self.steps[message.step]
        elif type(message) is m.StepFailed:
            step = self.steps.get(message.step)
            if step is None or message.code in self._no_answer:
                return
            del self.steps[message.step]
            self._remote.programs[step.program].free.add(step.slot)
            if type(step) is _Step:
                self._fail_step(step, message)
        elif isinstance(message, m.TransferDone):
            self._remote.on_transfer(message, frames)
        elif isinstance(message, m.JobEnded):
            self._remote.ended = message
            if message.code not in self._survives:
                self.fail(self._remote.end_error())
        elif isinstance(message, (SnapshotSaved, SnapshotWanted)):
            self.news.append(message)

    def _fail_step(self, step: _Step, message: m.StepFailed) -> None:
        """Answer a step that failed, by the user's line where its operator is known."""
        text, found = message.message, _OPERATOR.match(message.message)
        if found is not None:
            lines = step.captured.lowered.lines if step.captured.ranked is None else ()
            where = "".join(lines[int(found[1]) :][:1])
            text = f"{where}: {text}" if where else text
        if message.code in _UNDONE:
            step.future._undone_at = int(found[1]) if found is not None else 0
            if step.future._counted:  # its client was interrupted while it waited to learn of this
                self._remote.ended = m.JobEnded(self._remote.job, JobFailed.code, text, message.remedy)
        step.future._fail(from_code(message.code, text, message.remedy))

    def _refute(self, future: StepFuture, step: int, wrong: str, generator: torch.Tensor | None) -> None:
        """Answer a step in which a check failed."""
        future._generator = generator
        future._fail(
            BadValue(
                f"{wrong} (step {step}; the state is what the step made of it)",
                "look at the values that reach it; state from before the step is in your last checkpoint",
            )
        )
        self.wrong.append(future)

    def raise_wrong(self) -> None:
        """Raises the error of a step in which a check failed, if its future has not raised it."""
        while self.wrong:
            future = self.wrong.popleft()
            if not future._told:
                future.result()

    def fail(self, error: GpumuxError) -> None:
        """Answer all remaining steps with an error."""
        self.hold()
        for number in list(self.held):
            self.held.pop(number).future._fail(error)
