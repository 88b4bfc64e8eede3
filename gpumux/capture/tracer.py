"""One trace of a step: prepare the job's state, run the user's function over fake tensors, and collect the results."""

from __future__ import annotations

import inspect
import logging
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy
import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor

from gpumux.capture import source
from gpumux.capture.batch.arrays import BatchArray, arrays_as_tensors, tensor_over
from gpumux.capture.batch.containers import flatten, unflatten
from gpumux.capture.batch.effects import LeftOnBatch, WrittenInput, left_on_batch, puts_into_objects, written_inputs
from gpumux.capture.gpu.autocast import autocast_of_a_gpu, refuse_around
from gpumux.capture.gpu.devices import names_of_devices
from gpumux.capture.gpu.loss_scaling import Scaling
from gpumux.capture.gpu.operators import as_on_a_gpu
from gpumux.capture.outside.met import Met, TraceOver
from gpumux.capture.outside.tensors import Outside
from gpumux.capture.patches import RngTape, patched
from gpumux.capture.recorder import Recorder, TraceRecord
from gpumux.capture.side_effects import (
    LeftNumbers,
    LeftValue,
    SideEffects,
    alike,
    changes_variables,
    left_by_another_call,
    of_numbers,
    replay_of,
)
from gpumux.capture.source import Executed, Layers, Observer
from gpumux.capture.state import Place, Reading, StateTable
from gpumux.capture.structure import ConstLeaf, Counters, DeviceLeaf, HostLeaf, Structure, freeze_state, thaw, unusable
from gpumux.capture.swapping import here, swapped
from gpumux.capture.symbols import Expr, Number, ScalarGuard, Scope, hyper_name, hyperparameters, is_number, is_symbol
from gpumux.capture.values import functions
from gpumux.capture.values.caches import Caches
from gpumux.capture.values.constants import constant_value
from gpumux.capture.values.held import HeldValues, ReadValue, ReadValues, counted, fill, open_counters
from gpumux.capture.watch.fingerprint import Change, Fingerprint
from gpumux.capture.watch.lifting import Lift, Moves, moved, symbol
from gpumux.errors import CaptureError, DataDependent, GpumuxError, NotRepeatable, UnknownTensor, raised_in_step
from gpumux.program.ir import ITEM_BYTES

# ---- refusals of batches, and of what a trace did


def refuse_odd_tensors(tensors: Sequence[Any]) -> None:
    """Raises CaptureError for tensors that are not plain strided memory, which shared memory can't hold. Other values
    are ignored."""
    for i, tensor in enumerate(t for t in tensors if isinstance(t, torch.Tensor)):
        what, remedy = _odd(tensor)
        if what:
            raise CaptureError(f"tensor {i} of the batch is {what}", remedy)


def _odd(tensor: torch.Tensor) -> tuple[str, str]:
    if tensor.is_nested:
        return "a nested tensor", "pass it padded, with its lengths or a mask"
    if tensor.layout is not torch.strided:
        return f"laid out as {tensor.layout}", "pass .to_dense()"
    if tensor.is_quantized:
        return "quantized", "pass .dequantize() or .int_repr()"
    if tensor.is_meta:
        return "on the meta device and has no values", "pass a real tensor"
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in ITEM_BYTES:
        return f"of type {dtype}", f"convert it to one of {', '.join(ITEM_BYTES)}"
    return "", ""


def refuse_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> None:
    """Raises CaptureError about the batch if `error` shows that the step can't be called with these arguments."""
    if not isinstance(error, TypeError):
        return
    try:
        inspect.signature(fn).bind(*args, **kwargs)
    except TypeError:
        raise CaptureError(
            f"the step ({source.definition(fn)}) can't be called with this batch: {error}",
            "give one value for each of its arguments, in example= and at every call",
        ) from error
    except ValueError:
        return  # the function has no signature


log = logging.getLogger("gpumux.client")

_OF_CAPTURE = ("fake", "meta", "tensor subclass", "storage", "torch._subclasses", "torch.fx", "symbolic", "tracing")


def _error_of_step(error: Exception, record: TraceRecord, warns: bool) -> CaptureError:
    """What the script gets for an exception that the step let out while it was captured. The plain loop raises the same
    exception there, if it is not one of fake tensors', so the script may catch it by its kind. `warns`: whether a
    difference to the plain loop is logged; a trace with symbols for numbers is followed by one without them."""
    where = source.traceback_line(error)
    if "data is not allocated" in str(error):
        return DataDependent(
            f"{where} calls a function of torch that reads the values of a tensor",
            "make a tensor of tensors by torch.stack, not torch.tensor; keep the computation in tensors of a fixed"
            " shape, or do it outside the step and pass in what it gives",
        )
    if BatchArray.__name__ in str(error):
        return DataDependent(
            f"{where} gives a numpy array of the batch to a function that takes arrays alone",
            "begin the step with torch.from_numpy(array), called by this name, and compute with the tensor",
        )
    subclass = re.search(r"Creating a new Tensor subclass (\w+)", str(error))
    if subclass is not None:
        return CaptureError(
            f"{where} uses a tensor of the class {subclass[1]}, a subclass of torch.Tensor, which a variable holds",
            "have the variable hold a plain tensor (x.as_subclass(torch.Tensor)), give it to the step as an argument,"
            " or make it in the step: torch.randn(...)",
        )
    message = f"the step raised {type(error).__name__} while it was captured, at {where}"
    told = f"{type(error).__module__} {error}".lower()
    if isinstance(error, NotImplementedError) or any(word in told for word in _OF_CAPTURE):
        return CaptureError(
            f"{message}: {error}",
            "run the step once without gpumux to see whether it works; a step may not read tensor values in Python",
        )
    writes = any(record.storages[s].kind == "state" for op in record.ops for s in op.writes)
    draws = any(op.random is not None for op in record.ops)
    done = " and ".join(["changed state (as batch norm counts batches)"] * writes + ["drew random numbers"] * draws)
    remedy = "run the step once without gpumux to see whether it works"
    if done:
        remedy = f"the job is as before the call, where the plain step first {done}; {remedy}"
        if warns:
            log.warning("%s: the job is as before the call, where the plain step first %s", message, done)
    return raised_in_step(error, message, remedy)


def refuse_draws(fn: Any, before: list[tuple[str, Any]], after: list[tuple[str, Any]]) -> None:
    """Raises NotRepeatable if the step drew random numbers from Python's generators. The daemon does not draw them
    again, so a rarely taken branch could become part of the Program even though two traces agree."""
    for (name, old), (_, new) in zip(before, after, strict=True):
        if old != new:
            raise NotRepeatable(
                f"the step ({source.definition(fn)}) draws random numbers from Python's {name}",
                "draw with torch (torch.rand), or outside the step and pass the number in as a tensor",
            )


def refuse_outputs(observer: Observer) -> None:
    """Raises CaptureError if the step wrote to a file or moved a progress bar, which later steps would not do."""
    if observer.outputs:
        what, line = observer.outputs[0]
        raise CaptureError(
            f"{line} {what} inside the step",
            "do it outside, with what the step returns: gpumux runs a step's Python only when it captures it",
        )


# ---- torch's log messages about errors of fake operators, which it also raises


_LOGGER = logging.getLogger("torch._subclasses.fake_tensor")
_SAID = ("failed while attempting to run meta for", "fake tensor raised TypeError")


class _RepeatedError(logging.Filter):
    """Drops these messages of one thread; another thread may be compiling something."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        return record.thread != self._thread or not str(record.msg).startswith(_SAID)


@contextmanager
def suppress_fake_tensor_logs() -> Iterator[None]:
    """Inside, torch does not log errors of fake operators, because gpumux raises or handles them."""
    dropped = _RepeatedError()
    _LOGGER.addFilter(dropped)
    try:
        yield
    finally:
        _LOGGER.removeFilter(dropped)


# ---- `p.data = ...` in a traced step
#
# A fake tensor has no memory that the local tensor could get. So the recorder notes where a tensor of the job lies from
# there on, the local one stays as it is, and the end of the step copies the values to the tensor's place in the job.


_DATA: Any = torch._C.TensorBase.data
_OF_STORAGE = ("resize_", "fill_", "copy_", "__setitem__")
_REMEDY = (
    "write into the one it has, under torch.no_grad(): p.copy_(new), p.sub_(lr * p.grad); or give it a copy of its"
    " own: p.data = other.clone()"
)


@contextmanager
def refuse_new_memory(rec: Recorder, table: StateTable, fn: Callable[..., Any]) -> Iterator[None]:
    """Inside, for the length of a trace, a parameter or buffer whose `.data` is set to a value that the step made lies
    there in the trace. Giving a tensor of the script any other memory, or swapping it with another, raises
    CaptureError. The local tensors stay as they are."""
    tracing = threading.get_ident()
    counters = {id(tensor) for _, tensor in table.counters}

    def of_the_script(tensor: Any) -> bool:
        if not isinstance(tensor, torch.Tensor) or isinstance(tensor, FakeTensor):
            return False
        return id(tensor) in counters or not rec.is_host(tensor)

    def set_data(self: torch.Tensor, value: Any) -> None:
        if threading.get_ident() == tracing and isinstance(value, torch.Tensor) and of_the_script(self):
            number = rec.is_host(self)
            if number and value.untyped_storage()._cdata == self.untyped_storage()._cdata:
                return  # `counter.data += 1`
            if not number and table.lookup(self) is not None and moves(self, value):
                return
            raise CaptureError(f"{source.user_line()} sets .data of {_name(self, table, fn)} to other memory", _REMEDY)
        _DATA.__set__(self, value)

    def moves(tensor: torch.Tensor, value: torch.Tensor) -> bool:
        if isinstance(value, FakeTensor) or rec.is_moved(value):
            to = rec.to_fake(value)
        elif table.lookup(value) is not None:
            to = rec.home(value)
        else:
            return False
        if _window(to) == _window(rec.home(tensor)):  # its own memory, from `.data` or a move to its own device
            rec.move(tensor, None)
            return True
        alike = (to.shape, to.stride(), to.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
        made = rec.record.storages[rec.record.views[rec.view_of(to)].storage].kind in ("temp", "const")
        mine = any(tensor is one for _, one in [*table.tensors, *table.only_read])
        if mine and alike and made:
            rec.move(tensor, to)
            return True
        return False

    plain_swap: Callable[[Any, Any], None] = torch.utils.swap_tensors

    def swap(one: Any, other: Any) -> None:
        for tensor in (one, other):
            if one is not other and of_the_script(tensor):
                raise CaptureError(
                    f"{source.user_line()} swaps {_name(tensor, table, fn)} with another tensor", _REMEDY
                )
        plain_swap(one, other)

    def of_storage(name: str) -> Callable[..., Any]:
        plain = getattr(torch.UntypedStorage, name)

        def method(self: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == tracing and (owner := _owner(self, table)) is not None:
                raise CaptureError(
                    f"{source.user_line()} changes the storage of {owner} past torch's operators", _REMEDY
                )
            return plain(self, *args, **kwargs)

        return method

    swaps: list[tuple[Any, str, Any]] = [(torch.UntypedStorage, name, of_storage(name)) for name in _OF_STORAGE]
    swaps += [
        (torch.Tensor, "data", property(_DATA.__get__, set_data)),
        (torch.utils, "swap_tensors", here(plain_swap, swap)),
    ]
    with swapped(swaps):
        yield


def _owner(storage: torch.UntypedStorage, table: StateTable) -> str | None:
    """The name of the job's buffer on a storage, None if it is no state of the job."""
    address = storage._cdata if table.twins is None else table.twins.real(storage._cdata)
    owners = (buffer.name for buffer in table.buffers for home, _ in buffer.home if home._cdata == address)
    return next(owners, None)


def _window(tensor: torch.Tensor) -> Any:
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype


def _name(tensor: torch.Tensor, table: StateTable, fn: Callable[..., Any]) -> str:
    for name, known in table.tensors:
        if known is tensor:
            return name
    place = table.lookup(tensor)
    return source.name_of(tensor, fn) if place is None else table.buffers[place[0]].name


# ---- the result of a trace


@dataclass(frozen=True, slots=True)
class DeviceExit:
    """A tensor that the step leaves behind: its view, and its path in the state."""

    view: int
    path: tuple[Any, ...]


@dataclass(frozen=True, slots=True, eq=False)
class HostExit:
    """A number that the step leaves in an optimizer's state."""

    expr: Expr
    dtype: torch.dtype | None


@dataclass(frozen=True, slots=True)
class TensorResult:
    """A tensor that the step returns."""

    view: int


@dataclass(frozen=True, slots=True, eq=False)
class HostResult:
    """A number that the step returns."""

    expr: Expr


@dataclass(frozen=True, slots=True)
class ValueCheck:
    """A further result of a step, which must be true. `wrong` says what is wrong if it is not."""

    wrong: str


@dataclass(frozen=True, slots=True)
class SkippedStep:
    """A further result of a step: whether the step of this optimizer was left out (gpu/loss_scaling.py)."""

    optimizer: int


class AfterBackward(NamedTuple):
    """The end of a step's last backward pass: how many operators ran until then, and the view of each parameter's
    gradient, by the parameter's index."""

    operators: int
    gradients: dict[int, int]


@dataclass(slots=True)
class RawTrace:
    """A trace before lowering: the record of its operators, and how the step ends."""

    record: TraceRecord
    guards: tuple[ScalarGuard, ...]
    results: list[Any]  # TensorResult, HostResult or a constant, in pytree order
    result_spec: pytree.TreeSpec
    optimizers: tuple[Any, ...]  # frozen trees with DeviceExit, HostExit and ConstLeaf leaves
    gradients: dict[int, int]  # parameter -> view of its gradient after the step
    groups: list[tuple[int, int, str, int | None, Expr]]  # hyperparameters that the step changes
    flags: list[Change]  # training and requires_grad flags that the step changes
    entry: Structure
    replaced: list[tuple[Place, int]] = field(default_factory=list)  # buffers, and the views that replace them
    moved_data: list[tuple[Place, int]] = field(default_factory=list)  # tensors whose .data was set, and to which view
    executed: Executed = field(default_factory=dict)  # the Python code that ran
    left: list[Callable[[], object]] = field(default_factory=list)  # each marks a place where the step leaves a tensor
    # What the last results are, which the step does not return.
    further: list[ValueCheck | WrittenInput | SkippedStep] = field(default_factory=list)
    on_batch: list[LeftOnBatch] = field(default_factory=list)
    replays: list[LeftNumbers] = field(default_factory=list)  # places in which the step leaves numbers
    homes: set[int] = field(default_factory=set)  # ids of the objects with the places of `left` and `replays`
    moved: dict[str, str] = field(default_factory=dict)  # variables in which the step leaves constants, and these
    ranks: Any = None  # what a RankSplitter (microbatch/split.py) made of the step
    places: frozenset[int] = frozenset()  # which slices are at places that change (values/places.py)
    after_backward: AfterBackward | None = None  # None: no gradient was computed
    read_values: dict[int, ReadValue] = field(default_factory=dict)  # of the job's buffers, by which Python decided
    lowered: dict[Any, Any] = field(init=False, default_factory=dict)  # what lower() made of it; no copy has it

    def written(self) -> set[int]:
        """The job's buffers that the step writes."""
        storages = frozenset[int]().union(*(op.writes for op in self.record.ops))
        found = {buffer for buffer, storage in self.record.state_storage.items() if storage in storages}
        return found | {place.buffer for place, _ in [*self.replaced, *self.moved_data]}


# ---- the tracer


_capturing = threading.RLock()  # one trace at a time, because it replaces functions of modules


class TraceAgain(Exception):
    """The first trace, `trace`, changed Python variables (a lazily filled configuration). They keep their new values,
    and another trace must not change them again. `made`: views of constants that it left as well, and copies that are
    in their places now. `numbers`: of a trace that another step's first call made (numbers_of). Never raised to
    users."""

    def __init__(
        self, changes: list[Change], trace: RawTrace, made: Sequence[tuple[int, torch.Tensor]] = (),
        numbers: Mapping[int, Number] | None = None,
    ) -> None:  # fmt: skip
        super().__init__("traced once more")
        self.changes = changes
        self.trace = trace
        self.made = made
        self.numbers = numbers


class FilledIn(TraceOver):
    """A trace left constants that were not there before, and changed variables that may say that they are there. Later
    traces must do the same as this one, `again`."""

    def __init__(self, again: TraceAgain, undo: Sequence[Callable[[], None]]) -> None:
        super().__init__(_nothing, undo, changes=again.changes)
        self.again = again


_NOTHING_LIFTED = Lift()
_LEAF = pytree.tree_structure(False)


class Tracer:
    """Traces the steps of one job; those for a GPU with the operators that torch runs there
    (capture/gpu/operators.py). `begun` is called when a trace begins. `replicas`: the job has its state
    twice (waves)."""

    def __init__(
        self, table: StateTable, allowed: Callable[[str], bool], device: str = "cpu", *,
        begun: Callable[[], None] = lambda: None, replicas: bool = False,
    ) -> None:  # fmt: skip
        self.table = table
        self.outside: Outside | None = None  # None: tensors of no model are refused
        self.held = HeldValues(table, replicas=replicas)
        self._fixed_places: set[str] = set()  # lines where a slice is a view, at whatever place (values/places.py)
        self._begun = begun
        self._record = TraceRecord()  # of the present trace, or the last one
        self._backward: AfterBackward | None = None  # the newest backward pass in it
        self._by_device = table.runs_on == "cuda"
        self._allowed = allowed
        self._device = device
        self._restorers: list[tuple[Callable[[], None], Callable[[], None]]] = []  # as of SideEffects.restorers
        self.plain: tuple[str, ...] = ()  # as of Scope
        self.splits = False  # whether the step is being split into parts of the batch, and the split proven
        self.warned = False  # of objects of the batch that a step changes
        self._caches = Caches()
        self._unknown: torch.Tensor | None = None  # of another trace, which the newest trace met
        self._left: list[LeftValue] = []  # of the traces whose tensors still lie in variables
        self._keys: list[list[frozenset[Any]]] = []  # of the optimizers' groups, during a trace

    @property
    def doing(self) -> str:
        """What it is at, for a line of progress."""
        done = len(self._record.ops)
        if self.splits:
            return f"proving in float64 that parts of the batch make up the whole step, {done} operators"
        return f"tracing the step, {done} operators so far"

    def allows(self, raw: RawTrace) -> bool:
        """Whether all operators of a trace of another job may be used in this one."""
        return all(self._allowed(op.target) for op in raw.record.ops if op.collective is None)

    def trace(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], entry: Structure,
        host_values: Sequence[Number], fingerprint: Fingerprint, may_change: bool = False, by_device: bool = True,
        lift: Lift = _NOTHING_LIFTED,
    ) -> RawTrace:  # fmt: skip
        """Run `fn(*args, **kwargs)` once over fake tensors, from the structure `entry`. Restores the local state.
        Raises CaptureError or a subclass, Moves, and with `may_change` TraceAgain."""
        self._begun()
        with _capturing, self.table.on_tracing_device(), suppress_fake_tensor_logs():
            scope = Scope(source.user_line, self.plain)
            plain = fingerprint.read()
            with fingerprint.replaced(partial(symbol, scope)) if lift.symbols else nullcontext():
                run = partial(
                    self._trace, fn, args, kwargs, entry, host_values, fingerprint, may_change,
                    by_device and self._by_device, lift,
                )  # fmt: skip
                try:
                    raw, again = run(scope)
                except UnknownTensor:
                    unknown, self._unknown = self._unknown, None
                    if unknown is None or not self._caches.found(unknown):
                        raise
                    raw, again = run(scope)
            if again:
                raise TraceAgain([change for change in fingerprint.changes(plain) if not change.flag], raw)
            return raw

    def _trace(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], entry: Structure,
        host_values: Sequence[Number], fingerprint: Fingerprint, may_change: bool, by_device: bool, lift: Lift,
        scope: Scope,
    ) -> tuple[RawTrace, bool]:  # fmt: skip
        """The trace, and whether the step changed variables, which keep their new values."""
        tape = RngTape()

        def unknown(tensor: torch.Tensor) -> Exception:
            self._unknown = tensor
            return left_by_another_call(self._left, tensor, self.table, fn)

        before = fingerprint.read()
        met = Met(self.table, self.outside, fn=fn, fingerprint=fingerprint, before=before)
        read = ReadValues(self.held, gpu=self.table.gpu)

        observer = Observer()
        layers = Layers(self.table.models)
        rec = Recorder(
            scope, tape, lookup=met.lookup, unknown=unknown, refused=met.refuse,
            allowed=self._allowed, observer=observer, device=self._device, layers=layers, gpu=self.table.gpu,
            constant=constant_value, after_backward=lambda: self._note_gradients(rec),
            state_value=None if self.outside is None else read.value,
            places=(lift.places, self._fixed_places, lambda line: TraceOver(partial(self._fixed_places.add, line))),
        )  # fmt: skip
        scaling = Scaling(
            self.table.gpu, lambda optimizer, skip: rec.skips.append((optimizer, rec.view_of(rec.to_fake(skip)))),
            rec.is_host,
        )  # fmt: skip
        self._record, self._backward = rec.record, None
        counters = open_counters(self.table, rec)
        refuse_around(self.table.gpu)
        leaves, spec = flatten((args, kwargs), hiding=True)
        left = SideEffects(fingerprint, rec.is_number, lambda tensor: any(tensor is t for _, t in self.table.tensors))
        position = 0
        fakes: list[Any] = []
        same: dict[int, torch.Tensor] = {}  # a tensor that is given twice is one tensor in the step
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                fake = rec.input(leaf, position).requires_grad_(leaf.requires_grad)
                fakes.append(same.setdefault(id(leaf), fake))
                position += 1
            elif isinstance(leaf, numpy.ndarray):
                array = rec.input(tensor_over(leaf), position)
                fakes.append(BatchArray(same.setdefault(id(leaf), array)))
                position += 1
            else:
                fakes.append(lift.leaf(i, leaf, scope))
        fake_args, fake_kwargs = unflatten(fakes, spec)
        noted = functions.noted()
        with self._stage(rec, entry, host_values) as groups:
            torch.clear_autocast_cache()  # it may hold real casts, and would keep fake ones
            drawn = fingerprint.random_states()
            try:
                with (
                    patched(scope, tape, scaling, rec.conjugates, gpu=self.table.gpu, constant=rec.constant),
                    autocast_of_a_gpu(self.table.gpu, self.table.home),
                    names_of_devices(self.table.gpu, self.table.home, rec.device),
                    as_on_a_gpu(tape, self.table.gpu, by_device),
                    refuse_new_memory(rec, self.table, fn),
                    arrays_as_tensors(),
                    rec,
                    observer,
                ):
                    out = fn(*fake_args, **fake_kwargs)
                tape.finish()
                if functions.noted() != noted:
                    raise TraceOver(_nothing)
                on_batch = left_on_batch(leaves, fakes, rec)
                if not self.warned and puts_into_objects(fakes, (fake_args, fake_kwargs)):
                    self.warned = True
                    log.warning(
                        "%s puts something into an object of its batch: the script's own object stays as it is. Return"
                        " what the script is to have",
                        getattr(fn, "__qualname__", "the step"),
                    )
                left.take_computed(rec.computed)
                refuse_draws(fn, drawn, fingerprint.random_states())
                refuse_outputs(observer)
                left.refuse_other_optimizers()
                self._refuse_met(met, fingerprint, observer.found)
                self._refuse_unwatched(left, fingerprint, observer.found)
                rebound = left.rebound(partial(self._whole, met))
                replaced = left.replaced_buffers()
                replays = self._new_keys(rec) + self._tensors_in_groups(rec, groups)
                moves_all = moved(fingerprint.changes(before), scope)
                replays += left.replays(scope)
                switches = fingerprint.switched(before, lift.switches)
                replays += [LeftNumbers(switch.put, (switch.new,), _LEAF) for switch in switches]
                for switch in switches:
                    switch.put(switch.old)
                changes = fingerprint.changes(before)
                raw = self._finish(rec, scope, entry, out, groups)
                raw.moved = moves_all
                pairs = [*replaced, *((old, new) for _, old, new in rebound)]
                raw.replays = replays + counted(self.table, rec, counters, pairs)
                self._refuse_replaced_in_part(replaced)
                raw.replaced = self._replaced(rec, pairs)
                raw.moved_data = self._moved_data(rec, {place for place, _ in raw.replaced})
                raw.executed, raw.on_batch = observer.found, on_batch
                taken = {
                    new.untyped_storage()._cdata for new in [*(new for _, new in replaced), *(r.new for r in rebound)]
                }
                constants = left.constants(partial(self._known, rec, taken, left, read))
                left.refuse_buffers()
                self._caches.empty(lambda tensor: rec.constant(tensor) is not None)
                raw.read_values = read.found
                self._restorers += left.restorers()
            except TraceOver as over:
                if not over.undo:
                    left.restore()
                    _undo(fingerprint, before)
                raise
            except BaseException as error:
                left.restore()
                _undo(fingerprint, before)
                if isinstance(error, Exception):
                    self._refuse_met(met, fingerprint, observer.found, error)
                if isinstance(error, DataDependent) and rec.value_read is not None:
                    over_counters = met.counted(rec.record, rec.value_read, self.held.counter)
                    if over_counters is not None:
                        raise over_counters from error
                if isinstance(error, GpumuxError) or not isinstance(error, Exception):
                    raise
                refuse_call(fn, args, kwargs, error)
                raise _error_of_step(error, rec.record, warns=not lift.symbols) from error
            finally:
                torch.clear_autocast_cache()
        moves = lift.moves(changes)
        copied = {id(c) for c in changes if not c.flag and alike(c.old, c.new)}
        stuck = [c for c in changes if not c.flag and c.name not in lift.expected and id(c) not in copied]
        if stuck and not moves and any(one.first for one in constants):  # what changed may say that they are there
            made = [(rec.view_of(one.fake), one.put()) for one in constants]
            raise FilledIn(TraceAgain(changes, raw, made), [one.restore for one in constants])
        if stuck and may_change and not moves:
            for switch in switches:
                switch.put(switch.new)
            for numbers in replays:  # what the step keeps beside it: [count, value computed for that count]
                numbers.run(iter([expr.value for expr in numbers.exprs]))
            return raw, True
        for change in changes:
            change.restore()
        if moves:
            raise Moves(moves)
        if stuck:
            raise changes_variables(stuck)
        raw.flags = [c for c in changes if id(c) not in copied]
        self._left += left.present()
        raw.left = [*(one.put for one in constants), *left.left(self.table.home)]
        raw.homes = left.homes | {id(switch.home) for switch in switches}
        fingerprint.leaves.update(left.names())
        return raw, False

    def _refuse_met(
        self, met: Met, fingerprint: Fingerprint, executed: Executed, error: Exception | None = None
    ) -> None:
        """Raises the error for the tensors that a trace met and that the job can't have, or TraceOver. `error`: that
        the trace ended with."""
        if met.trained():
            raise met.over() from error
        if met.adopted and self.table.twins is not None:
            raise TraceOver(_nothing)  # they had no twins on the tracing device
        refused = met.error()
        if refused is not None and fingerprint.lacks(executed):
            raise TraceOver(lambda: fingerprint.extend(executed))  # variables of code that was not known may hold them
        if refused is not None:
            raise refused from error

    def _refuse_unwatched(self, left: SideEffects, fingerprint: Fingerprint, executed: Executed) -> None:
        """Raises TraceOver, with the values from before the trace put back, if it changed attributes or globals that
        only code has which it showed first. Raises NotRepeatable if it deleted some, or changed some that nothing
        watches."""
        left.refuse_deleted()
        found = left.unwatched()
        if found and fingerprint.lacks(executed):
            raise TraceOver(lambda: fingerprint.extend(executed))
        counted = [change for change in found if type(change.old) in (bool, int, float)]  # others are filled once
        if counted and fingerprint.computes_names:
            raise changes_variables(counted)

    def _whole(self, met: Met, old: torch.Tensor, places: list[tuple[str, Any, Any]]) -> bool:
        return self.outside is not None and self.outside.whole(old, places, met.names(old))

    def _place(self, tensor: torch.Tensor) -> Place:
        place = self.table.place(tensor)
        assert place is not None, "it was adopted"
        return place

    def _known(
        self, rec: Recorder, taken: set[int], left: SideEffects, read: ReadValues, fake: FakeTensor
    ) -> torch.Tensor | None:
        """The value of a tensor that the step makes from constants, and for a buffer also from state that no step
        writes, where a GPU does not make it otherwise. `taken`: the memory of tensors that become state."""
        if self.outside is None or self.table.gpu or fake.untyped_storage()._cdata in taken:
            return None
        view, buffer = rec.view_of(fake), left.buffer_made_of(fake)
        if buffer is None:
            return constant_value(rec.record, view)
        error = DataDependent(
            f"the step makes {buffer} of values that steps write", "compute it in each step, without keeping it"
        )
        return read.value(rec.record, view, error)

    def settle(self, raw: RawTrace, outside: Outside) -> None:
        """Note what a captured step reads and writes. Raises CaptureError, or TraceOver if tensors become numbers of
        each step."""
        written = raw.written()
        counters = self.held.note(raw.record.state_storage.keys(), written, raw.read_values)
        if counters:
            raise TraceOver(lambda: outside.count(counters), counts=True) from next(
                one.error for buffer, one in raw.read_values.items() if buffer in written
            )
        outside.written_by(written)

    def tidy(self) -> None:
        """Remove the fake tensors that traces left in the user's attributes and variables."""
        for put, _ in reversed(self._restorers):
            put()
        self._restorers.clear()
        self._left.clear()

    @contextmanager
    def put_away(self) -> Iterator[None]:
        """Inside, the user's attributes and variables hold what they held before the traces whose fake tensors are in
        them."""
        for put, _ in reversed(self._restorers):
            put()
        try:
            yield
        finally:
            for _, again in self._restorers:
                again()

    # ---- before the step ---------------------------------------------------------------------------

    @contextmanager
    def _stage(self, rec: Recorder, entry: Structure, host_values: Sequence[Number]) -> Iterator[list[Any]]:
        """Inside, gradients, optimizer state and hyperparameters are the fake ones of `entry`."""
        table = self.table
        grads = [p.grad for p in table.params]
        states = [o.state for o in table.optimizers]
        saved = [[dict(g) for g in o.param_groups] for o in table.optimizers]
        self._keys = [[frozenset(g) for g in o.param_groups] for o in table.optimizers]
        keep: list[Any] = []
        try:
            present = dict(entry.gradients)
            for i, p in enumerate(table.params):
                p.grad = table.traced(present[i]) if i in present else None
            for o, frozen in zip(table.optimizers, entry.optimizers, strict=True):
                o.state = self._open_state(rec, frozen, host_values, keep)
            yield self._open_groups(rec, keep)
        finally:
            for p, grad in zip(table.params, grads, strict=True):
                p.grad = grad
            for o, state, groups in zip(table.optimizers, states, saved, strict=True):
                o.state = state
                for group, old in zip(o.param_groups, groups, strict=False):
                    for key in [k for k in group if k not in old]:
                        del group[key]
                    group.update(old)

    def _host(self, rec: Recorder, expr: Expr, dtype: torch.dtype | None, keep: list[Any]) -> Any:
        if dtype is None:
            return rec.scope.symbol(expr)
        tensor = torch.tensor(expr.value, dtype=dtype)
        rec.host[tensor.untyped_storage()._cdata] = expr
        keep.append(tensor)
        return tensor

    def _open_state(self, rec: Recorder, frozen: Any, values: Sequence[Number], keep: list[Any]) -> Any:
        def make(leaf: Any) -> Any:
            if isinstance(leaf, DeviceLeaf):
                return self.table.traced(leaf.place)
            if isinstance(leaf, HostLeaf):
                return self._host(rec, rec.scope.var(f"s{leaf.var}", values[leaf.var]), leaf.dtype, keep)
            return leaf.value

        state: Any = defaultdict(dict)
        for (kind, key), tree in frozen:
            state[self.table.params[key] if kind == "p" else key] = thaw(tree, make)
        return state

    def _open_groups(self, rec: Recorder, keep: list[Any]) -> list[Any]:
        """Replace every hyperparameter by a symbol. Returns the symbols, to find at the end which of them changed."""
        put: list[Any] = []
        for i, j, key, k, value in list(hyperparameters(self.table.optimizers)):
            dtype = value.dtype if isinstance(value, torch.Tensor) else None
            number = value.item() if isinstance(value, torch.Tensor) else value
            expr = rec.scope.var(hyper_name(i, j, key, k), number)
            symbol = self._host(rec, expr, dtype, keep)
            group = self.table.optimizers[i].param_groups[j]
            if k is None:
                group[key] = symbol
            else:
                items = list(group[key])
                items[k] = symbol
                group[key] = tuple(items) if isinstance(group[key], tuple) else items
            put.append((i, j, key, k, expr, symbol))
        return put

    # ---- after the step ----------------------------------------------------------------------------

    def _finish(self, rec: Recorder, scope: Scope, entry: Structure, out: Any, groups: list[Any]) -> RawTrace:
        rec.places.refuse()
        written = written_inputs(rec.record)
        if rec.builder.in_backward:
            self._note_gradients(rec)
        leaves, spec = flatten(out)
        results: list[Any] = []
        with torch.no_grad():
            for leaf in leaves:
                results.append(self._result(rec, leaf))
            rec.places.returned()
            results += [TensorResult(view) for view, _ in rec.checks]
            results += [TensorResult(rec.record.inputs[position]) for position in written]
            further: list[ValueCheck | WrittenInput | SkippedStep] = [ValueCheck(wrong) for _, wrong in rec.checks]
            further += [WrittenInput(position) for position in written]
            results += [TensorResult(view) for _, view in rec.skips]
            further += [SkippedStep(self._number(optimizer)) for optimizer, _ in rec.skips]
            if len({id(optimizer) for optimizer, _ in rec.skips}) < len(rec.skips):
                raise CaptureError(
                    "the step steps one optimizer twice under a GradScaler",
                    "give each of the two updates a step of its own: job.add(...)",
                )
            counters = Counters(self.table)
            optimizers = tuple(
                freeze_state(o.state, self.table, lambda v, p: self._exit(rec, v, p, counters), i)
                for i, o in enumerate(self.table.optimizers)
            )
            gradients = {
                i: rec.view_of(rec.to_fake(p.grad)) for i, p in enumerate(self.table.params) if p.grad is not None
            }
            changed = [
                (i, j, key, k, new)
                for i, j, key, k, old, put in groups
                if (value := self._in_group(i, j, key, k)) is not put
                and not isinstance(value, torch.Tensor)
                and (new := rec.scope.lift(value)) is not old
            ]
        return RawTrace(
            rec.record, tuple(scope.guards.values()), results, spec, optimizers, gradients, changed, [], entry,
            further=further, after_backward=self._backward, places=frozenset(rec.places.found),
        )  # fmt: skip

    def _note_gradients(self, rec: Recorder) -> None:
        """Note where the gradients lie after a backward pass."""
        found = {i: rec.view_of(rec.to_fake(p.grad)) for i, p in enumerate(self.table.params) if p.grad is not None}
        self._backward = AfterBackward(len(rec.record.ops), found)

    def _number(self, optimizer: torch.optim.Optimizer) -> int:
        found = next((i for i, one in enumerate(self.table.optimizers) if one is optimizer), None)
        if found is None:
            raise CaptureError(
                f"the step steps an optimizer ({type(optimizer).__name__}) under a GradScaler that was not given",
                "pass it in optimizer=, alone or in a list with the others",
            )
        return found

    def _refuse_replaced_in_part(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Raises CaptureError if modules that share a buffer hold different ones after the step. `pairs`: (old, new) of
        each attribute that the step replaced."""
        names = {id(tensor): name for name, tensor in [*self.table.tensors, *self.table.counters]}
        for old, new in pairs:
            place = self.table.place(old)
            if place is None:
                raise CaptureError(
                    "the step replaces a buffer of a module that was not given", "pass the module in model="
                )
            if self.table.holders(place) != sum(a is old and b is new for a, b in pairs):
                raise CaptureError(
                    f"the step replaces the buffer {names.get(id(old), '')} in one place, and modules hold it in"
                    " several",
                    "replace it in all of them, or give each a copy of its own: .clone()",
                )

    def _replaced(self, rec: Recorder, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> list[tuple[Place, int]]:
        """The place of each tensor that the step replaced, and the view that comes there."""
        counted = {id(tensor) for _, tensor in self.table.counters}
        news = {self._place(old): new for old, new in pairs if id(old) not in counted}
        return [(place, rec.view_of(rec.to_fake(new))) for place, new in news.items()]

    def _moved_data(self, rec: Recorder, replaced: Set[Place]) -> list[tuple[Place, int]]:
        """The place of each tensor whose `.data` the step set and that is still there at its end, and the view that
        comes there."""
        found = []
        for tensor, to in rec.moved:
            place = self.table.place(tensor)
            assert place is not None, "only tensors of the job are moved"
            tensors = [*self.table.tensors, *self.table.only_read]
            names = [name for name, other in tensors if self.table.place(other) == place]
            if len(names) > 1:
                raise CaptureError(
                    f"the step sets .data of one of {' and '.join(names)}, which share memory",
                    "write into it in place under torch.no_grad(): p.copy_(new)",
                )
            if place not in replaced:
                found.append((place, rec.view_of(to)))
        return found

    def _new_keys(self, rec: Recorder) -> list[LeftNumbers]:
        """What the step puts into groups of optimizers under keys that they did not have (timm's optimizers count their
        steps there). Takes it away again. Raises CaptureError for what is no number or other constant, and for a group
        that it adds."""
        found = []
        for i, (optimizer, known) in enumerate(zip(self.table.optimizers, self._keys, strict=True)):
            for j, (group, keys) in enumerate(zip(optimizer.param_groups, known, strict=False)):
                fresh = [key for key in group if key not in keys]
                tensors = [key for key in fresh if _is_scalar(rec, group[key])]
                refused = sorted(str(key) for key in fresh if key not in tensors and not of_numbers(group[key], 1))
                if refused or len(optimizer.param_groups) != len(known):
                    raise CaptureError(
                        f"the step adds {', '.join(refused) or 'a group'} to optimizer {i}'s param_groups[{j}]",
                        "put it there before you submit",
                    )
                for key in fresh:
                    value = group.pop(key)
                    if key in tensors:
                        put = partial(_put_tensor, None, value.dtype, optimizer, j, key)
                        found.append(LeftNumbers(put, (rec.host[value.untyped_storage()._cdata],), _LEAF))
                    else:
                        found.append(replay_of(partial(_fill_group, optimizer, j, key), value, rec.scope))
        return found

    def _in_group(self, i: int, j: int, key: str, k: int | None) -> Any:
        value = self.table.optimizers[i].param_groups[j][key]
        return value if k is None else value[k]

    def _tensors_in_groups(self, rec: Recorder, groups: list[Any]) -> list[LeftNumbers]:
        """What the step leaves in tensors that are hyperparameters (timm's Lamb counts in one). Raises CaptureError for
        one that the daemon computes."""
        found = []
        for i, j, key, k, old, held in groups:
            value = self._in_group(i, j, key, k)
            if not isinstance(value, torch.Tensor):
                continue
            if not _is_scalar(rec, value):
                raise CaptureError(
                    f"the step puts what the daemon computes into {key!r} of optimizer {i}'s param_groups[{j}]",
                    "keep it in the optimizer's state, or in a buffer of a module",
                )
            new = rec.host[value.untyped_storage()._cdata]
            if value is held and new is old:
                continue
            place = partial(_fill_held, k) if value is held else partial(_put_tensor, k, value.dtype)
            found.append(LeftNumbers(partial(place, self.table.optimizers[i], j, key), (new,), _LEAF))
        return found

    def _result(self, rec: Recorder, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return TensorResult(rec.view_of(rec.to_fake(leaf)))
        if is_symbol(leaf):
            return HostResult(rec.scope.lift(leaf))
        if leaf is None or isinstance(leaf, (bool, int, float, complex, str, bytes)):
            return leaf
        kind = type(leaf).__name__
        cache = "; a model of transformers leaves its cache away with use_cache=False" if "Cache" in kind else ""
        raise CaptureError(
            f"the step returns a {kind}",
            f"return tensors, numbers, strings and lists, tuples, dicts or dataclasses of them{cache}",
        )

    def _exit(self, rec: Recorder, value: Any, path: tuple[Any, ...], counters: Counters) -> Any:
        if isinstance(value, torch.Tensor):
            if _is_scalar(rec, value):
                counters.check(value, path)
                return HostExit(rec.host[value.untyped_storage()._cdata], value.dtype)
            return DeviceExit(rec.view_of(rec.to_fake(value)), path)
        if is_symbol(value) or is_number(value):
            return HostExit(rec.scope.lift(value), None)
        if value is None or isinstance(value, (bool, str)):
            return ConstLeaf(value)
        raise unusable(path, value, self.table)


def _is_scalar(rec: Recorder, value: Any) -> bool:
    """Whether a value is a tracked tensor without dimensions, as which a number is kept for the next step."""
    return isinstance(value, torch.Tensor) and not value.dim() and rec.is_host(value)


def _nothing() -> None:
    return None


def _put_tensor(item: int | None, dtype: torch.dtype, optimizer: Any, group: int, key: str, value: Number) -> None:
    _fill_group(optimizer, group, key, torch.tensor(value, dtype=dtype), item)


def _fill_held(item: int | None, optimizer: Any, group: int, key: str, value: Number) -> None:
    held = optimizer.param_groups[group][key]
    fill(held if item is None else held[item], value)


def _fill_group(optimizer: Any, group: int, key: str, value: Any, item: int | None = None) -> None:
    held = optimizer.param_groups[group]  # looked up each time, as load_state_dict makes new groups
    held[key] = value if item is None else type(held[key])(value if n == item else x for n, x in enumerate(held[key]))


def _undo(fingerprint: Fingerprint, before: list[Reading]) -> None:
    """Restore Python values after a failed trace, as far as they can still be read."""
    try:
        for change in fingerprint.changes(before):
            change.restore()
    except NotRepeatable:
        return
