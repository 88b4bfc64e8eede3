"""The job's state: the buffers in the daemon, and the local storages that each of them is a copy of.

Parameters and buffers of the models, the optimizers' state, and gradients that outlive a step each lie on a buffer.
Storages that overlap in memory (one flat buffer with views, tied weights) are one buffer. Buffers are only added, never
removed: a Program binds to them by number.
"""

from __future__ import annotations

import ctypes
import itertools
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from operator import is_
from typing import Any, Protocol

import numpy
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakTensorKeyDictionary

from gpumux.capture.gpu.devices import Twins, elsewhere
from gpumux.capture.source import user_line
from gpumux.errors import CaptureError, StaleState

# ---- placeholders for tensors that a step left in an attribute, a variable or a container without returning them
#
# The values are in the daemon. A placeholder describes the tensor; reading its values raises StaleState, which names
# the place and the remedy. Leaving the value from before the step in the place would give wrong results silently.


_TENSOR: Any = torch.Tensor
# Functions that only describe a tensor: none needs its values.
DESCRIBES = frozenset(
    (
        *(
            getattr(_TENSOR, name).__get__
            for name in (
                "device", "dtype", "is_cpu", "is_cuda", "is_meta", "is_mps", "is_nested", "is_quantized", "is_sparse",
                "is_xpu", "itemsize", "layout", "nbytes", "ndim", "requires_grad", "shape",
            )
        ),
        *(
            getattr(_TENSOR, name)
            for name in (
                "__hash__", "__len__", "dim", "element_size", "get_device", "is_complex", "is_conj", "is_contiguous",
                "is_floating_point", "is_inference", "is_neg", "is_signed", "ndimension", "nelement", "numel", "size",
                "stride",
            )
        ),
        torch.is_complex, torch.is_floating_point, torch.numel, torch.is_signed,
    )
)  # fmt: skip


class Unreturned(torch.Tensor):
    """A placeholder. `_place`: the name that the user knows it by. Copies and pickles are placeholders, too."""

    _place: str

    @staticmethod
    def at(
        place: str, size: Any, stride: Any, dtype: torch.dtype, device: torch.device, requires_grad: bool
    ) -> Unreturned:
        made: Unreturned = torch.Tensor._make_wrapper_subclass(
            Unreturned, size, strides=stride, dtype=dtype, device=device, requires_grad=requires_grad
        )
        made._place = place
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in DESCRIBES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise _unreturned((args, kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise _unreturned((args, kwargs))

    def __deepcopy__(self, memo: Any) -> Any:
        return Unreturned.at(*self._like())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Unreturned.at, self._like()

    def _like(self) -> tuple[Any, ...]:
        size, stride = tuple(self.shape), tuple(self.stride())
        return self._place, size, stride, self.dtype, self.device, self.requires_grad

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"<{self._place} as a step left it, size {tuple(self.shape)}: not returned>"


UNRETURNED = (FakeTensor, Unreturned)  # left in Python places by traces and by steps


def left_at(value: Any) -> str | None:
    """The name of the place in which a step left this placeholder; None for any other value."""
    return value._place if type(value) is Unreturned else None


def _unreturned(given: Any) -> StaleState:
    """The error for a read, of a step that is traced or between two steps."""
    place = next((one._place for one in _found(given)), "this tensor")
    if torch._C._len_torch_dispatch_stack():
        return StaleState(
            f"{user_line()} reads {place}, which an earlier step set, and its values are not here",
            f"make it before you submit, and let steps write into it: {place}.copy_(value.detach()); or return it from"
            " the step, and give it to the next one as an argument",
        )
    return StaleState(
        f"{place} was set by a step that ran in the daemon, and its values are not here",
        f"return it from the step (return loss, {place}) and take it from the result; a value that steps go on from"
        " belongs in a buffer of the model (register_buffer), or is made before you submit",
    )


def _found(value: Any) -> Iterator[Unreturned]:
    if isinstance(value, Unreturned):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _found(item)
    elif isinstance(value, dict):
        yield from _found(list(value.values()))


def unreturned(place: str, value: Any, home: torch.device | None, number: Callable[[Any], bool]) -> Any:
    """`value` with a trace's tensors and numbers replaced by placeholders. `home`: the device of the job's tensors."""
    if isinstance(value, FakeTensor):
        like = (tuple(value.shape), tuple(value.stride()), value.dtype, home or value.device, value.requires_grad)
        return Unreturned.at(place, *like)
    if number(value):
        own = value if isinstance(value, torch.Tensor) else torch.empty((), dtype=torch.float64)
        return Unreturned.at(place, tuple(own.shape), own.stride(), own.dtype, torch.device("cpu"), False)
    if isinstance(value, dict):
        return _alike(value, {k: unreturned(f"{place}[{k!r}]", v, home, number) for k, v in value.items()})
    if isinstance(value, (tuple, list)):
        return _alike(value, [unreturned(f"{place}[{i}]", v, home, number) for i, v in enumerate(value)])
    return value


def _alike(old: Any, new: Any) -> Any:
    make: Callable[..., Any] = type(old)
    return make(*new) if hasattr(old, "_fields") else make(new) if make in (list, tuple, dict) else new


# ---- readings of watched values, and their comparison
#
# A reading holds the objects it saw, so that no address is reused while it is compared. Unchanged readings compare by
# identity, in C (watch/fingerprint.py); only those that differ are compared in detail.


SCALARS = (bool, int, float, str, bytes, complex, torch.dtype, torch.device, numpy.generic)
NUMBERS = frozenset((int, float, numpy.float64))  # those that may be symbols, by their exact types
PLAIN = frozenset({type(None), *SCALARS} - {numpy.generic})  # exact types
Reading = tuple[Any, ...]
Identity = Callable[[torch.Tensor], Any]


class _Absent:
    def __repr__(self) -> str:
        return "nothing"


# What one of two waves leaves for the other: "gradient", the parameter's number, and dtype, size and strides.
Left = tuple[str, int, str, tuple[int, ...], tuple[int, ...]]
ABSENT = _Absent()  # the reading of a name that does not exist


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in memory of its own, as strides say, unlike a step's future and other subclasses that only
    stand for values."""
    plain: bool = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return plain and tensor.layout is torch.strided and not isinstance(tensor, UNRETURNED)


def layout(tensor: torch.Tensor) -> Any:
    """The properties of a tensor outside the job's state that a step can depend on; it can't compute with the
    values."""
    return (type(tensor), tensor.dtype, tensor.shape, tensor.stride(), tensor.device, tensor.requires_grad)


@dataclass(slots=True)
class Watch:
    """`present()` gives the present values; `names` label them; `restore(old)` puts a reading back. `present` is called
    at every step: best it is a function of C, which gives an iterator.

    flag: training and requires_grad flags, which a step may leave changed.
    parts: what to compare by identity instead of calling `present`, as long as all of it is the same: iterables
        that show the present content. None: `present` itself gives the same objects while nothing changes.
    content: `present` makes its values anew each time; they are compared by equality.
    sized: something of which only the length is compared, as long as it is the same, instead of calling `present`.
    addresses: `present` tells which objects there are, by themselves or by their ids; an equal step has others.
    buffers: a module's own buffers, where a tensor that a step replaces is meant to stand.
    put: sets the value at a position of the reading; None where the reading shows no variables. `home`: the object
        that holds them; `at`: the positions that are variables.
    """

    label: str
    present: Callable[[], Iterable[Any]]
    names: Callable[[int], str]
    restore: Callable[[Reading], None]
    flag: bool = False
    parts: tuple[Iterable[Any], ...] | None = None
    content: bool = False
    sized: Any = None
    addresses: bool = False
    buffers: bool = False
    put: Callable[[int, Any], None] | None = None
    home: Any = None
    at: slice = field(default_factory=partial(slice, None))

    def numbers(self, reading: Reading) -> Iterator[tuple[int, str]]:
        """(position, name) of the variables that hold a Python number in this reading."""
        if self.put is not None:
            for i in range(len(reading))[self.at]:
                if type(reading[i]) in NUMBERS:
                    yield i, self.names(i)

    def read(self) -> Reading:
        return tuple(self.present())

    def same(self, old: Reading, new: Reading, identity: Identity) -> bool:
        if len(old) != len(new):
            return False
        if all(map(is_, old, new)):
            return True
        return all(equal(a, b, identity) for a, b in zip(old, new, strict=True))

    def differences(self, old: Reading, new: Reading, identity: Identity) -> list[tuple[str, Any, Any]]:
        """(name, old value, new value) of what changed."""
        if len(old) != len(new):
            return [(f"len({self.label})", len(old), len(new))]
        pairs = enumerate(zip(old, new, strict=True))
        found = [(self.names(i), a, b) for i, (a, b) in pairs if not equal(a, b, identity)]
        return found[:1] if found and found[0][0] == found[-1][0] else found


def equal(a: Any, b: Any, identity: Identity) -> bool:
    """Whether a step can't tell two values apart. `identity` identifies a tensor of the job, or gives the layout of
    another. A tensor that a trace or a step left behind equals anything (side_effects.py)."""
    if a is b:
        return True
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        if isinstance(a, UNRETURNED) or isinstance(b, UNRETURNED):
            return all(isinstance(x, (torch.Tensor, int, float)) or x is None or x is ABSENT for x in (a, b))
        if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
            return False
        return bool(identity(a) == identity(b))
    if type(a) is not type(b):
        return False
    if isinstance(a, SCALARS):
        return repr(a) == repr(b)  # tells 0.0 from -0.0, and nan is nan
    if isinstance(a, tuple):
        return len(a) == len(b) and all(equal(x, y, identity) for x, y in zip(a, b, strict=True))
    if type(a) in (slice, range):
        return all(equal(x, y, identity) for x, y in ((a.start, b.start), (a.stop, b.stop), (a.step, b.step)))
    if type(a) is frozenset:
        return PLAIN.issuperset(map(type, a)) and list(map(repr, a)) == list(map(repr, b))  # in the same order
    return isinstance(a, types.MethodType) and a.__func__ is b.__func__ and a.__self__ is b.__self__


# ---- optimizers that hand everything on to another one (Accelerate's)


def wrapped_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    """The optimizer whose groups and state a wrapper shows as its own; None for an optimizer with its own."""
    inner = vars(optimizer).get("optimizer")
    if not isinstance(inner, torch.optim.Optimizer) or "state" in vars(optimizer):
        return None
    return inner if optimizer.state is inner.state and optimizer.param_groups is inner.param_groups else None


def whole_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer itself, or the one inside of its wrappers."""
    while (inner := wrapped_optimizer(optimizer)) is not None:
        optimizer = inner
    return optimizer


# ---- the job's buffers


class Part(Enum):
    """A part of the state that can be fetched alone. `MODEL`: parameters and buffers."""

    MODEL = 0
    OPTIMIZER = 1
    GRADIENTS = 2


ALL = frozenset(Part)


@dataclass(slots=True)
class Buffer:
    """A buffer of the job. `home`: (storage, start byte) of its local storages, which it keeps alive and which sync()
    writes to. `filled`: whether the local bytes are state, so that the daemon's buffer must start as a copy."""

    name: str
    nbytes: int
    filled: bool = True
    home: list[tuple[torch.UntypedStorage, int]] = field(default_factory=list)
    replica_of: Buffer | None = None  # whose local bytes it begins as a copy of

    @property
    def local(self) -> list[tuple[torch.UntypedStorage, int]]:
        """The local storages with the bytes that its daemon's buffer begins with."""
        return self.home if self.replica_of is None else self.replica_of.home


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies in a buffer. `offset`, in elements, is from the buffer's start."""

    buffer: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def _between_processes(storage: torch.UntypedStorage) -> bool:
    """Whether other processes may write to it. A file mapped for reading (torch.load(mmap=True)) is private."""
    return storage.is_shared() and storage.filename is None


def byte_view(storage: torch.UntypedStorage) -> torch.Tensor:
    """A flat uint8 tensor over a local storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


def raw_bytes(flat: torch.Tensor) -> memoryview:
    """The bytes of a flat uint8 tensor on the CPU, which must live as long as they are used. Not by Tensor.numpy(),
    which marks its storage for ever as one that another library may write (resizable() is False)."""
    return memoryview((ctypes.c_char * flat.numel()).from_address(flat.data_ptr())).cast("B")


def share_bytes(one: torch.Tensor, start: int, other: torch.Tensor, other_start: int) -> bool:
    """Whether two tensors share memory, whose storages begin at these bytes of one buffer."""
    a, b = _span(one, start), _span(other, other_start)
    return max(a[0], b[0]) < min(a[1], b[1])


def _span(tensor: torch.Tensor, start: int) -> tuple[int, int]:
    first = start + int(tensor.storage_offset()) * tensor.element_size()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (last + 1) * tensor.element_size() if tensor.numel() else first


class Remembered(Protocol):
    """Values that were read when a step was captured, with which later ones are compared (Fingerprint)."""

    def replace(self, tensor: torch.Tensor, stand_in: torch.Tensor) -> None: ...


class Followed(list[torch.Tensor]):
    """Tensors of no model that a captured step met. A tensor that another one replaces is replaced here as well."""

    __hash__ = object.__hash__  # type: ignore[assignment]


def _extent(tensor: torch.Tensor) -> Any:
    """What must stay while a tensor gets other memory."""
    return tensor.shape, tensor.stride(), tensor.storage_offset()


def _memory(tensor: torch.Tensor) -> tuple[int, Any]:
    return tensor.untyped_storage()._cdata, _extent(tensor)


class StateTable:
    """The buffers of a job, and the local tensors that lie on them."""

    def __init__(
        self, models: Sequence[torch.nn.Module], optimizers: Sequence[Any], device: str = "cpu", runs_on: str = "cpu"
    ) -> None:
        """`device`: where steps are traced; `runs_on`: where the daemon runs them. The local tensors lie on `device`,
        or all on one GPU (`home`), and are replaced by twins while a step is traced. Raises CaptureError."""
        self.models = list(models)
        self.optimizers = list(optimizers)
        self.buffers: list[Buffer] = []
        self.params: list[torch.Tensor] = []  # all tensors that may have a gradient, each once
        self.param_names: list[str] = []
        self.tensors: list[tuple[str, torch.Tensor]] = []  # parameters and buffers, each once
        # Tensors of no model, which steps met by a Python variable: those that steps only read, and those that they
        # write, which are in `tensors` as well (outside.py).
        self.only_read: list[tuple[str, torch.Tensor]] = []
        self.written: list[tuple[str, torch.Tensor]] = []
        self.counters: list[tuple[str, torch.Tensor]] = []  # of those, the ones that are numbers of each step
        self.holders_outside: dict[tuple[int, Any], tuple[Any, Any, torch.Tensor]] = {}  # (owner, key, tensor)
        self.followed: weakref.WeakSet[Followed] = weakref.WeakSet()
        self._where: dict[int, tuple[int, int, int]] = {}  # storage -> (buffer, its bytes, start byte)
        self._index: dict[int, int] = {}  # id(param) -> index
        self._at_path: dict[tuple[Any, ...], torch.Tensor] = {}
        self._paths: dict[int, set[tuple[Any, ...]]] = {}  # buffer -> keys of `_at_path`
        self._place_of: dict[tuple[Any, ...], Place] = {}  # key of `_at_path` -> place of its tensor when it was set
        self._at: dict[Place, torch.Tensor] = {}
        self.recordings: weakref.WeakSet[Remembered] = weakref.WeakSet()
        self._stand_ins: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # what stands in recordings -> its place
        self._device = device
        self.runs_on = runs_on
        self.home: torch.device | None = None  # device of the local tensors; None while there are none
        self.tf32 = False  # whether a GPU rounds float32 to TF32 in a Program of the job
        self.twins: Twins | None = None
        self._replicas: dict[int, int] = {}  # of a job with two waves: buffer of the first -> that of the second
        self._of_waves: dict[Left, int] = {}  # buffers in which one wave leaves something for the other, by what it is
        self._slots = [
            (owner, name, tensor)
            for model in self.models
            for module in model.modules()
            for owner in (module._parameters, module._buffers)
            for name, tensor in owner.items()
            if tensor is not None  # a buffer that a step makes is met as a tensor of no model
        ]
        self._collect()
        self._merge([t for _, t in self.tensors], [n for n, _ in self.tensors])
        self._known = {id(t): _memory(t) for _, t in self.tensors}

    def _collect(self) -> None:
        seen: set[int] = set()
        for i, model in enumerate(self.models):
            prefix = f"model{i}." if len(self.models) > 1 else ""
            for name, p in model.named_parameters():
                self._take(prefix + name, p, seen, True)
            for name, b in model.named_buffers():
                self._take(prefix + name, b, seen, False)
        for i, optimizer in enumerate(self.optimizers):
            for j, group in enumerate(optimizer.param_groups):
                for k, p in enumerate(group["params"]):
                    self._take(f"optimizer{i}.group{j}.param{k}", p, seen, True)

    def _take(self, name: str, tensor: torch.Tensor, seen: set[int], param: bool) -> None:
        if id(tensor) in seen:
            return
        seen.add(id(tensor))
        self._check(name, tensor)
        self.tensors.append((name, tensor))
        if param:
            self._add_param(name, tensor)

    def _check(self, name: str, tensor: torch.Tensor) -> None:
        """Raises CaptureError for a tensor that can't be state of the job."""
        if isinstance(tensor, (torch.nn.parameter.UninitializedParameter, torch.nn.parameter.UninitializedBuffer)):
            raise CaptureError(
                f"{name} has no shape yet (a lazy module)", "run the model once on a batch before you submit"
            )
        apart = elsewhere(tensor.device)
        if (tensor.device.type != self._device and not apart) or tensor.layout != torch.strided:
            raise CaptureError(
                f"{name} is a {tensor.layout} tensor on {tensor.device}, and steps are traced on the {self._device}",
                f"move the model there first: model.to({self._device!r})",
            )
        if self.home is not None and tensor.device != self.home:
            raise CaptureError(
                f"{name} lies on {tensor.device}, and {[*self.tensors, *self.only_read][0][0]} on {self.home}",
                f"move all of it to one device before you make the optimizer: model.to({str(self.home)!r})",
            )
        self.home = tensor.device
        if apart and self.twins is None:
            self.twins = Twins()
        if tensor.device.type == "cpu" and _between_processes(tensor.untyped_storage()):
            raise CaptureError(
                f"{name} lies in memory that processes share (share_memory_(), or sent by torch.multiprocessing), and a"
                " job's state is its own: what the others write would be lost",
                "submit a copy of the model that is not shared: copy.deepcopy(model)",
            )
        if tensor.is_conj() or tensor.is_neg():
            raise CaptureError(
                f"{name} is conjugated or negated by a flag, not in its memory",
                "store tensor.resolve_conj().resolve_neg() in its place",
            )

    def _add_param(self, name: str, tensor: torch.Tensor) -> None:
        self._index[id(tensor)] = len(self.params)
        self.params.append(tensor)
        self.param_names.append(name)

    # ---- tensors of no model

    def add_outside(self, name: str, tensor: torch.Tensor) -> None:
        """Enter a tensor of no model, which steps read. Raises CaptureError."""
        self._check(name, tensor)
        if self.lookup(tensor) is None and (over := self._over_state(tensor)):
            raise CaptureError(
                f"{name} lies in the memory of {over} without torch's knowledge (by way of numpy or DLPack), and the"
                " daemon's copies of the two would be apart",
                f"let the step use {over} itself, or a view of it that torch made",
            )
        taken = {known for known, _ in [*self.tensors, *self.only_read]}
        name = next(one for i in itertools.count() if (one := name if i == 0 else f"{name} ({i})") not in taken)
        self._merge([tensor], [name])
        self.only_read.append((name, tensor))
        self._known[id(tensor)] = _memory(tensor)

    def make_state(self, buffers: Collection[int]) -> list[tuple[str, torch.Tensor]]:
        """Make the tensors that lie on these buffers, and that steps only read so far, part of the job's state. Returns
        them."""
        chosen: list[tuple[str, torch.Tensor]] = []
        rest: list[tuple[str, torch.Tensor]] = []
        for one in self.only_read:
            found = self.lookup(one[1])
            (chosen if found is not None and found[0] in buffers else rest).append(one)
        self.only_read = rest
        self.tensors += chosen
        self.written += chosen
        return chosen

    def make_parameters(self, tensors: Sequence[torch.Tensor]) -> None:
        """Make tensors of no model, or buffers, parameters, because they get gradients."""
        buffers = {found[0] for t in tensors if (found := self.lookup(t)) is not None}
        self.make_state(buffers)
        for name, tensor in self.tensors:
            if any(tensor is one for one in tensors) and id(tensor) not in self._index:
                self._add_param(name, tensor)

    def rebind(self, old: torch.Tensor, new: torch.Tensor) -> bool:
        """Let `new`, which a variable holds in the place of `old`, take over its buffer. False if it does not fit."""
        alike = (type(old), old.shape, old.dtype, old.stride(), old.storage_offset(), old.requires_grad)
        if alike != (type(new), new.shape, new.dtype, new.stride(), new.storage_offset(), new.requires_grad):
            return False
        place = self.place(old)
        if place is None or old.requires_grad or new.device != old.device:
            return False
        if self.lookup(new) is not None:
            if self.place(new) != place or id(new) in self._known:
                return False
            self._at.pop(place, None)  # another object over the same memory: x = x.detach()
        elif self._over_state(new) or not self._move(old.untyped_storage()._cdata, new.untyped_storage()):
            return False
        self._known.pop(id(old), None)
        self._gone(old, place)
        for found in (self.tensors, self.only_read, self.written):
            found[:] = [(name, new if tensor is old else tensor) for name, tensor in found]
        self._replace_followed({id(old): new})
        self._known[id(new)] = _memory(new)
        return True

    def moved(self, tensor: torch.Tensor) -> bool:
        """Follow a tensor whose `.data` was set to memory of its own. False if that does not fit, if it is another
        tensor's of the job, or if the tensor has another shape or other strides."""
        before, known = self._known[id(tensor)]
        now = tensor.untyped_storage()
        if known != _extent(tensor):
            return False
        if before != now._cdata:
            taken = self.lookup(tensor) is not None or self._over_state(tensor)
            if taken or not (before in self._where and self._move(before, now)):
                return False
        self._known[id(tensor)] = _memory(tensor)
        return True

    def lay(self, tensor: torch.Tensor, place: Place) -> None:
        """Note where a tensor lay that a step was captured with, and that lies outside the job's memory now."""
        self._gone(tensor, place)

    def _gone(self, tensor: torch.Tensor, place: Place) -> None:
        """A tensor is no longer the one of this place, which recordings know as it: the script may bind it to another
        variable, whose place it then has."""
        with torch.utils._python_dispatch._disable_current_modes():
            stand_in = torch.empty(0, requires_grad=tensor.requires_grad)
        self._stand_ins[stand_in] = place
        for recording in self.recordings:
            recording.replace(tensor, stand_in)

    def _over_state(self, tensor: torch.Tensor) -> str:
        """The name of a tensor of the job's state in whose memory this one lies by another storage, "" for none: the
        daemon's copies would share none. Storages that torch made itself lie in memory of their own."""
        storage = tensor.untyped_storage()
        if not storage.nbytes() or storage.resizable():
            return ""
        start = storage.data_ptr()
        end = start + storage.nbytes()
        for name, other in self.tensors:
            one = other.untyped_storage()
            if one._cdata != storage._cdata and one.device == storage.device:
                first = one.data_ptr()
                if first < end and start < first + one.nbytes():
                    return name
        return ""

    def _merge(self, tensors: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        """Give each group of overlapping storages one buffer."""
        storages: dict[int, tuple[torch.UntypedStorage, str]] = {}
        for t, name in zip(tensors, names, strict=True):
            s = t.untyped_storage()
            if s._cdata not in self._where and s.nbytes() > 0:
                storages.setdefault(s._cdata, (s, name))
            elif s.nbytes() == 0 and s._cdata not in self._where:
                self._where[s._cdata] = (self._add(name, 0, s, 0), 0, 0)
        spans = sorted(
            (s.data_ptr(), s.data_ptr() + s.nbytes(), order) for order, (s, _) in enumerate(storages.values())
        )
        groups: list[tuple[int, int, list[int]]] = []
        for start, end, order in spans:
            if groups and start < groups[-1][1]:
                last = groups[-1]
                groups[-1] = (last[0], max(last[1], end), [*last[2], order])
            else:
                groups.append((start, end, [order]))
        items = list(storages.values())
        for start, end, orders in sorted(groups, key=lambda g: min(g[2])):  # keep the model's order
            first, name = items[min(orders)]
            index = self._add(name, end - start)
            for order in orders:
                s = items[order][0]
                self.buffers[index].home.append((s, s.data_ptr() - start))
                self._where[s._cdata] = (index, end - start, s.data_ptr() - start)
            del first

    @property
    def gpu(self) -> bool:
        """Whether a GPU holds the local model or runs the steps."""
        return "cuda" in (self.runs_on, self.home.type if self.home is not None else "")

    def _add(self, name: str, nbytes: int, storage: torch.UntypedStorage | None = None, start: int = 0) -> int:
        self.buffers.append(Buffer(name, nbytes, True, [(storage, start)] if storage is not None else []))
        return len(self.buffers) - 1

    # ---- two waves -----------------------------------------------------------------------------------

    def replica(self, buffer: int) -> int:
        """The buffer that the second of two waves has in the place of one of the first. It begins as a copy of the same
        local bytes. Both waves share a buffer of `between_waves`."""
        if buffer in self._of_waves.values():
            return buffer
        found = self._replicas.get(buffer)
        if found is None:
            of = self.buffers[buffer]
            found = self._replicas[buffer] = len(self.buffers)
            self.buffers.append(Buffer(f"{of.name} (second wave)", of.nbytes, of.filled, replica_of=of))
        return found

    @property
    def left_between_waves(self) -> frozenset[Left]:
        """What one wave leaves for the other, in buffers of `between_waves`."""
        return frozenset(self._of_waves)

    def between_waves(self, key: Left, name: str, nbytes: int) -> int:
        """The buffer in which one wave leaves something for the other. It has no local bytes. Equal keys have one."""
        found = self._of_waves.get(key)
        if found is None:
            found = self._of_waves[key] = self._add(name, nbytes)
            self.buffers[found].filled = False
        return found

    @property
    def gradients_between_waves(self) -> dict[str, int]:
        """The buffers in which one wave leaves its gradients for the other, by the parameter's name."""
        return {self.param_names[key[1]]: buffer for key, buffer in self._of_waves.items()}

    @property
    def first_wave(self) -> list[int]:
        """The buffers that are the first wave's, or those of a job without waves."""
        others = {*self._replicas.values(), *self._of_waves.values()}
        return [b for b in range(len(self.buffers)) if b not in others]

    # ---- look-up -------------------------------------------------------------------------------------

    def lookup(self, tensor: torch.Tensor) -> tuple[int, int, int] | None:
        """(buffer, bytes of the buffer, start byte of the tensor's storage in it), None for a tensor outside the
        job."""
        storage = tensor.untyped_storage()._cdata
        return self._where.get(storage if self.twins is None else self.twins.real(storage))

    def place(self, tensor: torch.Tensor) -> Place | None:
        found = self.lookup(tensor)
        if found is None:
            return None
        offset = found[2] // tensor.element_size() + int(tensor.storage_offset())
        return Place(found[0], tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), offset)

    def identity(self, tensor: torch.Tensor) -> Any:
        """A value that is equal for tensors that a step can't tell apart. For a parameter, its index; for another
        tensor of the job, its place; for others their layout, because a step can't compute with their values."""
        index = self._index.get(id(tensor))
        if index is not None:
            return ("parameter", index)
        former = self._stand_ins.get(tensor) if self._stand_ins else None
        place = former or self.place(tensor)
        if place is None:
            return layout(tensor)
        # A step may set `.data` of the job's own tensor, or bind its variable anew, which another one over the same
        # memory would not follow.
        return place, tensor.requires_grad, former is not None or id(tensor) in self._known

    def param_index(self, tensor: Any) -> int | None:
        return self._index.get(id(tensor))

    def adopt(self, path: tuple[Any, ...], name: str, tensor: torch.Tensor) -> Place:
        """Make a local tensor (of an optimizer's state, or a gradient) part of the job's state. A new tensor of the
        same layout at a known path (after load_state_dict) takes over the buffer of the old one."""
        key = (path, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))
        if self.lookup(tensor) is None:
            old = self._at_path.get(key)
            if old is not None and tensor.storage_offset() == old.storage_offset() and self._take_over(old, tensor):
                pass
            else:
                self._merge([tensor], [name])
        self._at_path[key] = tensor
        place = self.place(tensor)
        assert place is not None
        self._at[place] = tensor
        self._paths.setdefault(place.buffer, set()).add(key)
        self._place_of[key] = place
        return place

    def _take_over(self, old: torch.Tensor, new: torch.Tensor) -> bool:
        return self._move(old.untyped_storage()._cdata, new.untyped_storage())

    def _move(self, before: int, after: torch.UntypedStorage) -> bool:
        if before not in self._where:
            return False  # another storage has taken over its buffer
        buffer, nbytes, start = self._where[before]
        if len(self.buffers[buffer].home) != 1 or after.nbytes() != self.buffers[buffer].home[0][0].nbytes():
            return False
        del self._where[before]
        self._where[after._cdata] = (buffer, nbytes, start)
        self.buffers[buffer].home = [(after, start)]
        self._at = {place: t for place, t in self._at.items() if place.buffer != buffer}
        return True

    def renew(self, buffers: Collection[int], *, keep: bool) -> set[int]:
        """Give these buffers other local memory; the script keeps the old one. `keep`: copy the bytes to it. Returns
        the `_cdata` of the storages in which the buffers lay."""
        gone: set[int] = set()
        with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
            for index in buffers:
                buffer = self.buffers[index]
                at_path = {key: self.place(self._at_path[key]) for key in self._paths[index]}
                new = torch.UntypedStorage(buffer.nbytes, device=self.home)
                for storage, start in buffer.home:
                    if keep:
                        byte_view(new)[start : start + storage.nbytes()] = byte_view(storage)
                    del self._where[storage._cdata]
                    gone.add(storage._cdata)
                buffer.home = [(new, 0)]
                self._where[new._cdata] = (index, buffer.nbytes, 0)
                self._at = {place: t for place, t in self._at.items() if place.buffer != index}
                for key, place in at_path.items():
                    if place is not None and place.buffer == index:  # no other tensor was set there since
                        self._at_path[key] = self.local(place)
        return gone

    def restore(self, place: Place, tensor: torch.Tensor) -> None:
        """Make a new local tensor for this place, because `tensor` got other memory (`.data` was set)."""
        self._at.pop(place, None)
        for key in self._paths[place.buffer]:
            if self._at_path[key] is tensor:
                self._at_path[key] = self.local(place)

    def forsake(self, tensors: Iterable[torch.Tensor]) -> None:
        """Make new local tensors, over the same memory, for the places of these, of which the script may hold some."""
        given = {id(tensor) for tensor in tensors}
        for place, tensor in [one for one in self._at.items() if id(one[1]) in given]:
            self.restore(place, tensor)

    def placeholder(
        self, path: tuple[Any, ...], name: str, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int]
    ) -> torch.Tensor:
        """The local tensor for state that a step makes (momentum, gradients): the same tensor for each call with one
        path and layout. Its memory is not written until sync()."""
        key = (path, dtype, tuple(size), tuple(stride))
        found = self._at_path.get(key)
        if found is not None and self.lookup(found) is None:
            if self._at.get(self._place_of[key]) is not found:  # another tensor has taken over its buffer
                return self.fresh(path, name, dtype, size, stride)
            self.restore(self._place_of[key], found)
            found = self._at_path[key]
        return found if found is not None else self.fresh(path, name, dtype, size, stride)

    def takes(self, local: torch.Tensor, value: torch.Tensor) -> bool:
        """Whether `value`, a tensor outside the job, has memory of its own that can replace that of `local`."""
        own = value.untyped_storage().nbytes() == value.nbytes == local.nbytes and value.storage_offset() == 0
        return own and self.twins is None and value.device == local.device and self.lookup(value) is None

    def fresh(
        self, path: tuple[Any, ...], name: str, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int]
    ) -> torch.Tensor:
        """A new `placeholder` in memory of its own, also if the path has one."""
        with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
            found = torch.empty_strided(tuple(size), tuple(stride), dtype=dtype, device=self.home)
        self._at_path.pop(
            (path, dtype, tuple(size), tuple(stride)), None
        )  # or the new tensor would take over its buffer
        self.buffers[self.adopt(path, name, found).buffer].filled = False
        return found

    def local(self, place: Place) -> torch.Tensor:
        """The adopted local tensor at a place, or a view of the buffer's first local storage."""
        found = self._at.get(place)
        if found is None:
            storage, start = self.buffers[place.buffer].home[0]
            with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
                base = torch.empty(0, dtype=place.dtype, device=storage.device)
                offset = place.offset - start // base.element_size()
                found = base.set_(storage, offset, place.size, place.stride)
            self._at[place] = found
        return found

    def traced(self, place: Place) -> torch.Tensor:
        """The tensor that a trace finds at a place: `local`, or its twin on the tracing device."""
        found = self.local(place)
        return found if self.twins is None else self.twins.of(found)

    @contextmanager
    def on_tracing_device(self) -> Iterator[None]:
        """Inside, for the length of a trace, the local tensors lie on the tracing device."""
        with (
            nullcontext()
            if self.twins is None
            else self.twins.in_place_of([t for _, t in [*self.tensors, *self.only_read]])
        ):
            yield

    def refresh(self) -> None:
        """Update the table for module buffers that were replaced and tensors whose `.data` was set: the new storages
        take over the buffers. Raises CaptureError if a layout changed or a parameter is another object."""
        for i, (owner, name, old) in enumerate(self._slots):
            new = owner.get(name)
            if new is old:
                continue
            if new is None or isinstance(old, torch.nn.Parameter) or self._follow(old, new) is None:
                raise CaptureError(
                    f"{name} is another parameter, or of another shape, than the job was submitted with",
                    "close the job and submit the step again",
                )
            self._slots[i] = (owner, name, new)
            self.tensors = [(n, new if t is old else t) for n, t in self.tensors]
            self.counters = [(n, new if t is old else t) for n, t in self.counters]
        for name, tensor in self.tensors:
            if tensor.device != self.home:
                raise CaptureError(
                    f"{name} lies on {tensor.device} and lay on {self.home} when the job was submitted",
                    f"move the model back (model.to({str(self.home)!r})), or close the job and submit the step again",
                )
            if self._follow(tensor, tensor) is None:
                raise CaptureError(
                    f"{name} has another shape, other strides, or memory of another size or of another tensor than when"
                    " the job was submitted",
                    "close the job and submit the step again",
                )

    def _follow(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor | None:
        """Let the storage of `new` replace that of `old`. Returns `new`, or None if it does not fit."""
        if new is old:
            return new if self.moved(new) else None
        before = self._known.get(id(old), (-1, None))[0]  # a tied one may have followed by its other name
        alike = (old.shape, old.dtype, old.stride()) == (new.shape, new.dtype, new.stride())
        if self.lookup(new) is None and not (
            alike and before in self._where and self._move(before, new.untyped_storage())
        ):
            return None
        self._known.pop(id(old), None)
        self._known[id(new)] = _memory(new)
        return new

    def replace_tensors(self, buffers: Collection[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Put new tensors, in new memory, in the place of the models' tensors that lie on these buffers. The script
        keeps the old ones. Returns (old, new)."""
        found = []
        for _, old in self.tensors:
            place = self.place(old)
            if place is None or place.buffer not in buffers:
                continue
            with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
                buffer = self.buffers[place.buffer]
                memory = torch.UntypedStorage(buffer.nbytes, device=self.home)
                for storage, start in buffer.home:
                    byte_view(memory)[start : start + storage.nbytes()] = byte_view(storage)
                new = torch.empty(0, dtype=old.dtype, device=self.home)
                new.set_(memory, place.offset, place.size, place.stride).requires_grad_(old.requires_grad)
            found.append((old, new, place, memory))
        for old, new, place, memory in found:
            for storage, _ in self.buffers[place.buffer].home:
                self._where.pop(storage._cdata, None)
            self.buffers[place.buffer].home = [(memory, 0)]
            self._where[memory._cdata] = (place.buffer, memory.nbytes(), 0)
            self._at = {p: t for p, t in self._at.items() if p.buffer != place.buffer}
            self._known.pop(id(old), None)
            self._known[id(new)] = _memory(new)
            self._gone(old, place)
        news = {id(old): new for old, new, _, _ in found}
        for i, (owner, name, tensor) in enumerate(self._slots):
            if id(tensor) in news:
                self._slots[i] = (owner, name, news[id(tensor)])
                holder: dict[str, Any] = owner
                holder[name] = news[id(tensor)]
        for key, (space, name, tensor) in list(self.holders_outside.items()):
            if id(tensor) in news:
                space[name] = news[id(tensor)]
                self.holders_outside[key] = (space, name, news[id(tensor)])
        self.written = [(name, news.get(id(tensor), tensor)) for name, tensor in self.written]
        self.tensors = [(name, news.get(id(tensor), tensor)) for name, tensor in self.tensors]
        self._replace_followed(news)
        return [(old, new) for old, new, _, _ in found]

    def _replace_followed(self, news: Mapping[int, torch.Tensor]) -> None:
        for tensors in self.followed:
            tensors[:] = [news.get(id(tensor), tensor) for tensor in tensors]

    def holders(self, place: Place) -> int:
        """The number of module attributes that hold the tensor at this place."""
        return sum(self.place(tensor) == place for _, _, tensor in self._slots)

    def of_models(self, buffer: int) -> bool:
        """Whether what lies on a buffer is the models' alone, and not also a tensor that steps met by a variable."""
        others = [t for _, t in [*self.written, *self.only_read]]
        places = [self.lookup(t) for t in others]
        if any(found is not None and found[0] == buffer for found in places):
            return False
        return any((found := self.lookup(t)) is not None and found[0] == buffer for _, t in self.tensors)

    def replaced(self) -> bool:
        """Whether a model holds other parameters or buffers than when the job was submitted."""
        return any(owner.get(name) is not tensor for owner, name, tensor in self._slots)
