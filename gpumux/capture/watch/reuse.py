"""Traces that later submits of equal code take over: a job submitted again, the models of a sweep or of an array.

A trace depends on the step's code and on what the code can read. So both are described once the trace is made, and a
later step whose description is equal has the same trace. What is described: the step's functions, with their closures,
defaults and globals; modules, optimizers and other objects, attribute by attribute; the classes of all of them; and
what is watched besides (`fingerprint.py`: torch's modes, hooks, flags). Tensors are described by their places in the
job's state. Where something can't be described, as a file, an object of C or a tensor of no model, the step is traced.
"""

from __future__ import annotations

import contextvars
import dataclasses
import decimal
import hashlib
import logging
import re
import sys
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from operator import is_
from typing import Any, NamedTuple

import numpy
import torch
import torch.backends.opt_einsum
import torch.linalg
import torch.nn.functional
import torch.nn.utils

from gpumux.capture.fetching import without_fetching
from gpumux.capture.source import Executed
from gpumux.capture.state import PLAIN, StateTable, has_memory
from gpumux.capture.structure import Structure
from gpumux.capture.symbols import Number, may_be_constant
from gpumux.capture.watch.fingerprint import Change, Fingerprint
from gpumux.capture.watch.walk import OF_OPTIMIZERS, Origin, holds_attributes_alone, of_class, of_code, of_module
from gpumux.capture.watch.watches import kind_of

MOST_VALUES = 200_000  # of one description, about 5 us each
MOST_OPERATORS = 20_000  # in all kept traces, about 2 kB each
MOST_BYTES = 1 << 20  # of a trace's constants, and of an array that is described
MOST_STEPS = 64  # kinds of code and batch
MOST_ALIKE = 4  # descriptions of steps with the same code and batch
# Objects that are described as themselves: another one is never equal, and they live as long as the process.
_THEMSELVES = (
    type, types.ModuleType, types.CodeType, types.MethodDescriptorType, types.WrapperDescriptorType,
    types.GetSetDescriptorType, types.MemberDescriptorType, types.ClassMethodDescriptorType, Enum, torch.layout,
    torch.memory_format, torch._ops.OpOverload, torch._ops.OpOverloadPacket, logging.Logger, property, classmethod,
    staticmethod, types.EllipsisType, types.NotImplementedType, types.UnionType, types.GenericAlias, dataclasses.Field,
)  # fmt: skip
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
# The namespaces of torch in which scripts replace functions, besides those of the optimizers.
_OF_TORCH = (torch, torch.Tensor, torch.nn.functional, torch.nn.utils, torch.autograd, torch.linalg)
# Code that has one of these names may read any attribute; code that has one of the others, or a function of that name,
# may read more than Python objects.
_COMPUTED = frozenset(
    ("getattr", "hasattr", "vars", "dir", "__dict__", "__getattribute__", "attrgetter", "eval", "exec", "locals",
     "__match_args__", "format", "format_map", "vformat", "__getstate__", "__reduce__", "__reduce_ex__", "dumps",
     "getmembers", "getattr_static")
)  # fmt: skip
_WORLD = frozenset(
    ("open", "read_text", "read_bytes", "fromfile", "load", "loadtxt", "genfromtxt", "readline", "readlines", "memmap",
     "exists", "isfile", "isdir", "is_file", "is_dir", "listdir", "scandir", "iterdir", "glob", "getcwd", "cwd", "stat",
     "environ", "getenv", "time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns",
     "process_time", "now", "utcnow", "today", "localtime", "gmtime", "strftime", "input", "urandom", "uuid4", "uuid1",
     "id", "hash", "__import__", "import_module", "globals", "getpid", "cpu_count", "gethostname", "get_ident",
     "current_thread", "_getframe", "currentframe", "getLogger", "get_num_threads", "initial_seed")
)  # fmt: skip
_CONTAINERS = (dict, list, tuple, set, frozenset, deque, numpy.ndarray)


class NotComparable(Exception):
    """Something can't be described. Never raised to users."""


@dataclass(frozen=True, slots=True, eq=False)
class Description:
    """What the description of a step says, as a digest, and the objects that have to be the same ones."""

    said: bytes
    objects: tuple[Any, ...]

    def equals(self, other: Description) -> bool:
        return (
            self.said == other.said
            and len(self.objects) == len(other.objects)
            and all(map(is_, self.objects, other.objects))
        )


class _Describer:
    def __init__(self, fingerprint: Fingerprint, table: StateTable) -> None:
        self._table = table
        self._names = fingerprint.names
        self._computed = not _COMPUTED.isdisjoint(self._names)
        self._said: list[str] = []
        self._numbers: dict[int, int] = {}  # id -> number of an object, in the order in which they are met
        self._alive: list[Any] = []  # so that no id is used twice
        self._pending: deque[Any] = deque()
        self._objects: list[Any] = []
        self._classes: set[type] = set()
        self._modules: set[int] = set()

    def describe(self, roots: Iterable[Any], fingerprint: Fingerprint) -> Description:
        defaults = [getattr(optimizer, "defaults", None) for optimizer in self._table.optimizers]
        for root in roots:
            self._value(root)
        for watch in fingerprint.watches:
            self._say("watch", watch.label)
            # The numbers of an optimizer are numbers of each step (symbols.py), those in its defaults are never read.
            kinds = any(watch.home is space for space in defaults if space is not None)
            for value in watch.read() if not watch.addresses else ():
                if kinds and type(value) in (int, float):
                    self._say("number")
                elif kinds and type(value) is tuple and all(type(each) in (int, float) for each in value):  # betas
                    self._say("numbers", len(value))
                else:
                    self._value(value)
        for name in sorted(filter(sys.modules.__contains__, self._names)):  # those that an `import` in the code names
            self._value(sys.modules[name])
        while self._pending:
            self._content(self._pending.popleft())
        optimizers = {type(optimizer).__module__: None for optimizer in self._table.optimizers}
        for space in (*_OF_TORCH, *(sys.modules[name] for name in optimizers if name in sys.modules)):
            self._objects += [value for value in vars(space).values() if isinstance(value, _FUNCTIONS)]
        context, einsum = decimal.getcontext(), torch.backends.opt_einsum
        self._say(context.prec, context.rounding, getattr(einsum, "enabled", None), getattr(einsum, "strategy", None))
        self._say(torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled())
        said = "\n".join(self._said).encode(errors="surrogatepass")
        return Description(hashlib.blake2b(said, digest_size=32).digest(), tuple(self._objects))

    def _say(self, *words: object) -> None:
        if len(self._said) > MOST_VALUES:
            raise NotComparable
        self._said.append(repr(words))

    def _value(self, value: Any) -> None:
        kind = type(value)
        if kind in PLAIN or isinstance(value, numpy.generic):
            self._said.append(f"{kind.__name__} {value!r}")
        elif isinstance(value, torch.Tensor):
            self._tensor(value)
        elif kind is tuple or kind is torch.Size:
            self._say(kind.__name__, len(value))
            for item in value:
                self._value(item)
        elif isinstance(value, _THEMSELVES) or _is_function_of_library(value):
            self._itself(value)
        elif isinstance(value, contextvars.ContextVar):
            self._itself(value)
            self._value(value.get(None))
        elif self._first(value):
            self._pending.append(value)
            self._say("object")
            self._class(kind)

    def _itself(self, value: Any) -> None:
        self._say("itself")
        self._objects.append(value)
        if isinstance(value, type):
            self._class(value)
        elif isinstance(value, types.ModuleType):
            self._module(value)
        elif isinstance(value, logging.Logger):
            self._say(value.getEffectiveLevel(), value.disabled, value.manager.disable)
        elif isinstance(value, Enum):
            if self._first(value):
                self._pending.append(value)
        elif getattr(value, "__name__", None) in (_WORLD if self._computed else _WORLD | _COMPUTED):
            raise NotComparable  # called by another name than its own, which the code would have

    def _module(self, module: types.ModuleType) -> None:
        """What the code names in a module of a library. The globals of the user's modules are watched."""
        if id(module) in self._modules or of_module(module) is not Origin.LIBRARY:
            return
        self._modules.add(id(module))
        space = vars(module)
        for name in sorted(filter(space.__contains__, self._names)):
            value = space[name]
            if value is sys.modules:
                raise NotComparable
            self._say(name)
            if type(value) in (*PLAIN, list, dict, tuple) or isinstance(value, (types.ModuleType, type, *_FUNCTIONS)):
                self._value(value)
            else:
                self._objects.append(value)

    def _first(self, value: Any) -> bool:
        """Whether an object is met for the first time. Otherwise its number is said."""
        known = self._numbers.get(id(value))
        if known is not None:
            self._say("again", known)
            return False
        self._numbers[id(value)] = len(self._numbers)
        self._alive.append(value)
        return True

    def _class(self, cls: type) -> None:
        self._objects.append(cls)
        for base in cls.__mro__:
            if base not in self._classes and base is not object:
                self._classes.add(base)
                entries = list(vars(base).values())
                self._objects += entries  # a method or a constant of the class may have been replaced
                if self._computed and of_class(base) is not Origin.LIBRARY:  # those that are named are watched
                    self._values(entry for entry in entries if isinstance(entry, _CONTAINERS))

    def _tensor(self, tensor: torch.Tensor) -> None:
        place = self._table.place(tensor) if has_memory(tensor) else None
        if place is None:
            raise NotComparable
        if not self._first(tensor):  # code may compare tensors by `is`
            return
        self._say("tensor", place, tensor.requires_grad, tensor.device, tensor.is_leaf, tensor.is_inference())
        self._objects.append(type(tensor))
        for key, value in vars(tensor).items():
            self._say(key)
            self._value(value)

    def _content(self, value: Any) -> None:
        kind = type(value)
        if isinstance(value, types.FunctionType):
            cells = [_content_of(cell) for cell in value.__closure__ or ()]
            self._say(value.__name__, value.__qualname__, value.__doc__)
            self._values((value.__code__, value.__defaults__, value.__kwdefaults__, *cells))
            self._entries(value.__dict__)
        elif isinstance(value, types.MethodType):
            self._values((value.__func__, value.__self__))
        elif kind is partial:
            self._values((value.func, value.args, value.keywords))
        elif kind is weakref.ref:
            self._value(value())
        elif kind is re.Pattern:
            self._say(value.pattern, value.flags)
        elif isinstance(value, dict):
            if isinstance(value, defaultdict):
                self._value(vars(defaultdict)["default_factory"].__get__(value))
            self._entries(dict((OrderedDict if isinstance(value, OrderedDict) else dict).items(value)))
            self._entries(_attributes_of(value))
        elif isinstance(value, (list, deque, tuple)):
            self._values(kind_of(value).__iter__(value))
            self._entries(_attributes_of(value))
        elif kind in (set, frozenset):
            if not all(type(item) in PLAIN or isinstance(item, type) for item in value):
                raise NotComparable
            self._values(value)  # in the order in which the code would see them
        elif kind is numpy.ndarray and not value.dtype.hasobject and value.nbytes <= MOST_BYTES:
            self._say(value.dtype, value.shape, value.strides, hashlib.blake2b(value.tobytes()).digest())
        elif isinstance(value, Enum):
            self._entries(vars(value))
        elif kind.__module__ == "typing":  # of an annotation, never changed
            self._objects.append(value)
        elif holds_attributes_alone(kind):
            self._attributes(value)
        else:
            raise NotComparable

    def _attributes(self, value: Any) -> None:
        space = object.__getattribute__(value, "__dict__")
        if isinstance(value, torch.optim.Optimizer):
            if of_class(type(value)) is not Origin.LIBRARY:
                raise NotComparable
            space = {key: item for key, item in space.items() if key not in OF_OPTIMIZERS}
        elif not (isinstance(value, torch.nn.Module) or self._computed or of_class(type(value)) is Origin.LIBRARY):
            space = {key: item for key, item in space.items() if key in self._names}
        self._entries(space)

    def _entries(self, space: Mapping[Any, Any]) -> None:
        self._say(len(space))
        for key, value in space.items():
            self._value(key)
            self._value(value)

    def _values(self, values: Iterable[Any]) -> None:
        for value in values:
            self._value(value)
        self._say("end")


def _attributes_of(value: Any) -> Mapping[Any, Any]:
    """The attributes of an object of a container's class, read without the class's `__getattr__`."""
    cls = type(value)
    if any(vars(c).get("__slots__") for c in cls.__mro__):
        raise NotComparable
    return object.__getattribute__(value, "__dict__") if any("__dict__" in vars(c) for c in cls.__mro__) else {}


def _content_of(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable without a value
        return "no value"


def _is_function_of_library(value: Any) -> bool:
    if isinstance(value, types.BuiltinFunctionType):
        return isinstance(value.__self__, (types.ModuleType, type)) or value.__self__ is None
    return (
        isinstance(value, types.FunctionType)
        and not value.__closure__
        and of_code(value.__code__, value.__globals__) is Origin.LIBRARY
    )


def described(fn: Any, fingerprint: Fingerprint, table: StateTable) -> Description | None:
    """The description of a step and of all that its code can read. None if it can't be described."""
    modes = torch._C._len_torch_function_stack() or torch._C._autograd._top_saved_tensors_default_hooks(False)
    if modes or not _WORLD.isdisjoint(fingerprint.names):
        return None
    try:
        with without_fetching():
            return _Describer(fingerprint, table).describe([fn, *table.models, *table.optimizers], fingerprint)
    except (NotComparable, KeyError, AttributeError, TypeError, ValueError, RuntimeError):
        return None  # the others: of odd classes of the user, and of a dictionary that another thread changes


# ---- the kept traces


@dataclass(frozen=True, slots=True)
class Held:
    """What a trace began with, besides what is described: the buffers of the job, and the structure of its state."""

    buffers: tuple[tuple[str, int], ...]
    parameters: tuple[str, ...]
    entry: Structure


def held(table: StateTable, entry: Structure) -> Held:
    return Held(tuple([(one.name, one.nbytes) for one in table.buffers]), tuple(table.param_names), entry)


@dataclass(frozen=True, slots=True)
class KeptTrace:
    """`numbers`: the optimizers' hyperparameters at the trace. `confirmed`: whether another trace was the same."""

    began: Held
    numbers: Mapping[str, Number]
    trace: Any  # a RawTrace
    confirmed: bool


@dataclass(frozen=True, slots=True)
class KeptFirst:
    """The first call of a step that filled in variables, as a model of transformers does in its configuration.
    `description`: of the step before it. `filled`: the constants and their places (Fingerprint.constants_since)."""

    description: Description
    filled: Sequence[tuple[int, int, Any]]
    trace: KeptTrace


@dataclass(slots=True)
class KeptCase:
    """The traces of steps with one description. `executed`: the code that was known to run in them. `firsts`: first
    calls that led to this description."""

    executed: Executed
    description: Description
    traces: list[KeptTrace] = field(default_factory=list)
    firsts: list[KeptFirst] = field(default_factory=list)

    def of(self, began: Held, holds: Callable[[KeptTrace], bool]) -> Any:
        """A trace that began so and that holds for the numbers of the step, None if there is none."""
        return next((one.trace for one in self.traces if one.began == began and holds(one)), None)

    @property
    def operators(self) -> int:
        return sum(len(one.trace.record.ops) for one in [*self.traces, *(first.trace for first in self.firsts)])


class FirstCall(NamedTuple):
    """A call of a step whose trace changed variables for good."""

    trace: KeptTrace
    changes: Sequence[Change]


def _kept_first(fn: Any, fingerprint: Fingerprint, table: StateTable, first: FirstCall) -> KeptFirst | None:
    """The first call with its description, for which what it changed is put back for a moment. None if it changed more
    than constants, or can't be described. `fingerprint`: of the step after it."""
    for change in reversed(first.changes):
        change.restore()
    try:
        before, description = fingerprint.read(), described(fn, fingerprint, table)
    finally:
        for change in first.changes:
            change.again()
    filled = fingerprint.constants_since(before)
    return KeptFirst(description, filled, first.trace) if description is not None and filled else None


class KeptTraces:
    """The kept traces of a process. Those used least recently make room."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cases: OrderedDict[Hashable, list[KeptCase]] = OrderedDict()

    def executed(self, fn: Any, key: Hashable) -> Executed:
        """The code that ran in the kept traces of steps with this code and batch."""
        with self._lock:
            cases = list(self._cases.get((_code(fn), key), ()))
        return {i: found for case in cases for i, found in case.executed.items()}

    def find(
        self, fn: Any, key: Hashable, fingerprint: Fingerprint, table: StateTable
    ) -> tuple[KeptCase | None, KeptFirst | None]:
        """The traces of steps equal to this one; or, with a first call of a step equal to this one, those of the steps
        after it. `key`: the description of the batch. `fingerprint`: made with the code that ran in them, if that could
        be."""
        at = (_code(fn), key)
        with self._lock:
            cases = list(self._cases.get(at, ()))
        now = described(fn, fingerprint, table) if cases else None
        if now is None:
            return None, None
        for case in cases:
            if fingerprint.lacks(case.executed):
                continue
            first = next((one for one in case.firsts if now.equals(one.description)), None)
            if first is not None or now.equals(case.description):
                with self._lock:
                    if at in self._cases:
                        self._cases.move_to_end(at)
                return case, first
        return None, None

    def add(
        self, fn: Any, key: Hashable, fingerprint: Fingerprint, table: StateTable, traces: Sequence[KeptTrace],
        first: FirstCall | None = None,
    ) -> None:  # fmt: skip
        """Keep the traces of a step. `first`: its first call, if that changed variables."""
        description = described(fn, fingerprint, table)
        if description is None:
            return
        at, kept = (_code(fn), key), None if first is None else _kept_first(fn, fingerprint, table, first)
        with self._lock:
            cases = self._cases.setdefault(at, [])
            self._cases.move_to_end(at)
            case = next((one for one in cases if one.description.equals(description)), None)
            if case is None:
                case = KeptCase(fingerprint.executed, description)
                cases.append(case)
                del cases[:-MOST_ALIKE]
            case.traces += traces
            if kept is not None:
                case.firsts.append(kept)
                del case.firsts[:-MOST_ALIKE]
            while len(self._cases) > MOST_STEPS or self._operators() > MOST_OPERATORS:
                self._cases.popitem(last=False)

    def _operators(self) -> int:
        return sum(one.operators for cases in self._cases.values() for one in cases)

    def clear(self) -> None:
        self._cases.clear()


def _code(fn: Any) -> types.CodeType | type:
    code = getattr(fn, "__code__", None)
    return code if isinstance(code, types.CodeType) else type(fn)


kept_traces = KeptTraces()


def key_of(batch: Hashable, numbers: Sequence[tuple[int, Any]]) -> Hashable:
    """The key of a step's batch. `numbers`: (position, value) of those in it."""
    return batch, tuple([(i, repr(value)) for i, value in numbers])


def may_be_kept(trace: Any, changed: Set[str] = frozenset()) -> bool:
    """Whether a trace names no object of its job, but buffers, parameters and numbers by their places. `changed`: what
    it may have changed."""
    alone = not (
        trace.flags or trace.replaced or trace.moved_data or trace.left or trace.further or trace.on_batch
        or trace.replays or not trace.moved.keys() <= changed or trace.read_values or trace.ranks is not None
    )  # fmt: skip
    constants = sum(one.nbytes for one in trace.record.storages if one.kind == "const")
    return alone and len(trace.record.ops) <= MOST_OPERATORS and constants <= MOST_BYTES


def same_numbers(now: Mapping[str, Number], then: Mapping[str, Number]) -> bool:
    """Whether the hyperparameters that may be written into a Program are the same."""
    return {k: repr(v) for k, v in now.items() if may_be_constant(k)} == {
        k: repr(v) for k, v in then.items() if may_be_constant(k)
    }
