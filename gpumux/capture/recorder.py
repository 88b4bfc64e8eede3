"""Records every operator that a step runs, over fake tensors, as raw operators on storages and views.

The recorder sits below autograd: it gets exactly the aten operators that the plain loop runs, those of backward and the
optimizer included. The user's own parameters and buffers stay in place. When one reaches an operator, it is looked up
*by its storage* and replaced by a fake twin, so it does not matter by which reference the step found it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode

from gpumux.capture.gpu.operators import as_they_are
from gpumux.capture.patches import RngTape
from gpumux.capture.source import (
    Layers,
    Observer,
    instead_of,
    origin,
    user_line,
    value_read,
    values_checked,
)
from gpumux.capture.state import share_bytes
from gpumux.capture.symbols import Expr, Scope, is_lifted, is_symbol, of_python
from gpumux.capture.values.asserted import AssertedValues
from gpumux.capture.values.conjugates import Conjugates
from gpumux.capture.values.gradients import bag_backward, refuse_by_values
from gpumux.capture.values.host import HostTensors
from gpumux.capture.values.places import Places
from gpumux.capture.values.selected import Selected
from gpumux.capture.values.shapes import KnownShapes
from gpumux.errors import CaptureError, DataDependent, UnsupportedOperator
from gpumux.program.check import SIZED_BY_NUMBERS, fake_call
from gpumux.program.fake import FakeOperators
from gpumux.program.ir import Arg, CollectiveKind, Complex, Label, Out, ScalarRef, Tag, TensorRef, View
from gpumux.program.operators import NUMBERS_ON_GPU

# ---- operator schemas, prepared once for each operator


# Operators that change an argument although their schema does not say so: positions of the arguments they write.
HIDDEN_WRITES: dict[str, tuple[int, ...]] = {
    "aten.native_batch_norm.default": (3, 4),
    "aten.cudnn_batch_norm.default": (3, 4),
    "aten.miopen_batch_norm.default": (3, 4),
}


@dataclass(frozen=True, slots=True)
class OperatorParam:
    name: str
    kwarg_only: bool
    default: Any
    has_default: bool
    writes: bool
    is_tensor: bool
    takes_scalar: bool  # a host scalar may stand here (Scalar, float, or a list of Scalars)


@dataclass(frozen=True, slots=True)
class RecordedSchema:
    target: str
    params: tuple[OperatorParam, ...]
    mutable: bool
    random: bool
    hidden_writes: tuple[int, ...]


_cache: dict[Any, RecordedSchema] = {}
_SCALAR_TYPES = {"number", "Scalar", "float", "List[number]", "List[Scalar]", "Optional[number]", "Optional[Scalar]",
                 "Optional[float]", "List[float]"}  # fmt: skip


def schema_of(func: torch._ops.OpOverload) -> RecordedSchema:
    found = _cache.get(func)
    if found is None:
        target = str(func)
        params = tuple(
            OperatorParam(
                a.name, a.kwarg_only, a.default_value if a.has_default_value() else None, a.has_default_value(),
                a.alias_info is not None and a.alias_info.is_write, str(a.type) in ("Tensor", "Optional[Tensor]"),
                str(a.type) in _SCALAR_TYPES,
            )
            for a in func._schema.arguments
        )  # fmt: skip
        found = RecordedSchema(
            target, params, func._schema.is_mutable, torch.Tag.nondeterministic_seeded in func.tags,
            HIDDEN_WRITES.get(target, ()),
        )  # fmt: skip
        _cache[func] = found
    return found


def bind(schema: RecordedSchema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[OperatorParam, Any]]:
    """(parameter, value) for all arguments of a call, positional ones first, in the order of the schema."""
    bound: list[tuple[OperatorParam, Any]] = []
    for i, param in enumerate(schema.params):
        if i < len(args):
            bound.append((param, args[i]))
        elif param.name in kwargs:
            bound.append((param, kwargs[param.name]))
        elif not param.kwarg_only and any(p.name in kwargs and not p.kwarg_only for p in schema.params[i + 1 :]):
            bound.append((param, param.default))
    return bound


def functional_overload(func: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """For an `out=` overload with one output: the overload that makes a new result from the same inputs, and from a
    type, layout and device where there are no tensors among those (torch.eye)."""
    outs = [a for a in func._schema.arguments if a.kwarg_only and a.alias_info is not None and a.alias_info.is_write]
    if len(outs) != 1 or outs[0].name != "out" or len(func._schema.returns) != 1:
        return None
    wanted = [(a.name, str(a.type)) for a in func._schema.arguments if a.name != "out"]
    for name in func.overloadpacket.overloads():
        other: torch._ops.OpOverload = getattr(func.overloadpacket, name)
        if other._schema.is_mutable or torch.Tag.nondeterministic_seeded in other.tags:
            continue
        if [(a.name, str(a.type)) for a in other._schema.arguments if a.name not in _OF_NEW_TENSORS] == wanted:
            return other
    return None


_OF_NEW_TENSORS = ("dtype", "layout", "device", "pin_memory")


def scalar_overload(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch._ops.OpOverload | None:
    """For a call with a number in place of a tensor (`mul.Tensor(x, 2.0)`): the overload that takes the number, which
    computes the same but for `mul_` in a half type (Recorder._rounds_number)."""
    packet = func.overloadpacket
    forms = {"Tensor": "Scalar", "default": "Scalar", "Tensor_mode": "Scalar_mode", "self": "ScalarOther"}
    wanted = forms.get(func._overloadname) if isinstance(args[0], torch.Tensor) else None
    if wanted is None or wanted not in packet.overloads():
        return None
    other: torch._ops.OpOverload = getattr(packet, wanted)
    names = [a.name for a in func._schema.arguments]
    if [a.name for a in other._schema.arguments] != names:
        return None
    return other


# ---- the record of a trace: storages, views and operators, as plain data
#
# Tensors are identified by their storages. Holding the tensors would raise their reference counts, and autograd would
# copy gradients that it otherwise takes over without a copy.


# Operators that change a tensor in place into another view of its storage: nothing runs on the device.
_INPLACE_VIEWS = frozenset(
    ("t_", "transpose_", "swapaxes_", "swapdims_", "unsqueeze_", "squeeze_", "detach_", "as_strided_")
)


@dataclass(slots=True)
class RawStorage:
    """`key` is the job buffer (state), the batch position (input) or the bytes (const)."""

    kind: str
    nbytes: int
    key: Any = None
    dtype: str = ""  # of the tensor that it was made for (temp)


class RawCollective(NamedTuple):
    """What ranks of a job exchange at one point of a step; see program/ir.py's Collective, of which it has the fields
    that are known before lowering."""

    kind: CollectiveKind
    sequence: int
    members: tuple[int, ...]
    views: tuple[int, ...] = ()
    scale: float = 1.0
    sends: tuple[tuple[int, int], ...] = ()
    receives: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True)
class RawOp:
    target: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    outs: tuple[Out, ...]
    reads: frozenset[int]  # storages
    writes: frozenset[int]  # storages changed in place or made
    random: int | None
    where: str
    label: Label | None = None  # its layer
    by_optimizer: bool = False  # whether code of torch.optim runs it, inside an optimizer's step()
    collective: RawCollective | None = None  # what it is instead of an operator
    in_backward: bool = False  # whether a backward pass runs it
    tail: bool = False  # whether it is one of those that a step of a wave runs last (waves/trace.py)


@dataclass(slots=True)
class TraceRecord:
    storages: list[RawStorage] = field(default_factory=list)
    views: list[View] = field(default_factory=list)
    ops: list[RawOp] = field(default_factory=list)
    scalars: list[Expr] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)  # view of each batch tensor
    state_storage: dict[int, int] = field(default_factory=dict)  # job buffer -> storage


@dataclass(frozen=True, slots=True)
class RankResult:
    """A tensor that a step split over ranks returns. `views`: of the ranks that return it, in the order of the parts of
    the batch. A value with `dim` is put together of the ranks' parts along it, one with None is the first rank's."""

    ranks: tuple[int, ...]
    views: tuple[int, ...]
    dim: int | None = None


@dataclass(frozen=True, slots=True)
class RankTraces:
    """A step split over ranks (burst/split.py). `record`: storages and views of all ranks; a rank has what its
    operators make. `ops`: by rank. `held`: by rank, the storages of the whole trace that the rank has whole at the end.
    `homes`: the ranks of each buffer of the job, by its number. `made_of`: what its splitter made it of, to split the
    step over other ranks."""

    record: TraceRecord
    ops: list[list[RawOp]]
    held: list[frozenset[int]]
    results: list[RankResult]
    homes: dict[int, tuple[int, ...]]
    made_of: Any = None


class TraceBuilder:
    """Numbers storages, views and host scalars in the order in which they occur, and writes operators to the record."""

    def __init__(
        self, scope: Scope, tape: RngTape, allowed: Callable[[str], bool], device: torch.device, *, gpu: bool = False
    ) -> None:
        self._gpu = gpu
        self.record = TraceRecord()
        self._scope = scope
        self._tape = tape
        self._allowed = allowed
        self._device = device
        self._storage_ids: dict[int, int] = {}
        self._view_ids: dict[View, int] = {}
        self._scalar_ids: dict[int, int] = {}
        self.label: Label | None = None  # of the operator that is being recorded
        self.in_backward = False  # the same
        self._keep: list[Any] = []  # storages, so that their addresses are not reused

    def keep(self, tensor: torch.Tensor) -> None:
        """Keep the tensor's storage alive, so that its address identifies it for the whole trace."""
        self._keep.append(tensor.untyped_storage())

    def storage_id(self, storage: torch.UntypedStorage) -> int | None:
        return self._storage_ids.get(storage._cdata)

    def add_storage(self, storage: torch.UntypedStorage, kind: str, key: Any = None, dtype: str = "") -> int:
        index = len(self.record.storages)
        self.record.storages.append(RawStorage(kind, storage.nbytes(), key, dtype))
        self._storage_ids[storage._cdata] = index
        self._keep.append(storage)
        return index

    def view_of(self, fake: torch.Tensor) -> int:
        """The view index of a fake tensor whose storage is known."""
        storage = self.storage_id(fake.untyped_storage())
        if storage is None:
            raise CaptureError(
                f"{user_line()}: a tensor came from nowhere", "report this as a bug with the step's code"
            )
        view = View(
            storage, str(fake.dtype).removeprefix("torch."), tuple(fake.shape), tuple(fake.stride()),
            int(fake.storage_offset()),
        )  # fmt: skip
        index = self._view_ids.get(view)
        if index is None:
            index = len(self.record.views)
            self.record.views.append(view)
            self._view_ids[view] = index
        return index

    # ---- writing an operator ---------------------------------------------------------------------

    def write(
        self, func: Any, schema: RecordedSchema, args: Any, kwargs: Any, fargs: Any, fkwargs: Any, out: Any
    ) -> None:
        outs = _returns(func, out)
        made = tensors_in(outs)
        if any(o.layout is not torch.strided for o in made):
            raise UnsupportedOperator(
                f"{user_line()} makes a sparse tensor ({schema.target})",
                "keep it dense: torch.nn.Embedding(..., sparse=False) has dense gradients, which SGD or Adam takes",
            )
        if torch.Tag.inplace_view in func.tags and func.overloadpacket.__name__ in _INPLACE_VIEWS:
            if not isinstance(args[0], FakeTensor):
                raise CaptureError(
                    f"{user_line()} changes the shape of the model's own tensor ({schema.target})",
                    "make a view of it instead",
                )
            self._guard_all(args, kwargs)
            return  # only the view changes; nothing runs on the device
        fresh = [o for o in made if self.storage_id(o.untyped_storage()) is None]
        if not fresh and not schema.mutable and self._pure_view(made):
            self._guard_all(args, kwargs)
            return
        symbols = bind(schema, args, kwargs)
        if any(p.is_tensor and (isinstance(v, (int, float, complex)) or is_symbol(v)) for p, v in symbols):
            func, schema = self._scalar_form(func, args, kwargs)
            symbols = bind(schema, args, kwargs)
        if not self._allowed(schema.target):
            raise UnsupportedOperator(
                f"{user_line()} uses the operator {schema.target}, which is not on the allow-list",
                instead_of(
                    schema.target,
                    "write the step without it, or ask the daemon's operator to add it (allow_ops in its"
                    " configuration)",
                ),
            )
        reads: set[int] = set()
        writes: set[int] = set()
        positional: list[Arg] = []
        keywords: list[tuple[str, Arg]] = []
        fakes = bind(schema, fargs, fkwargs)
        for i, ((param, symbol), (_, fake)) in enumerate(zip(symbols, fakes, strict=True)):
            touched = {self._known(t) for t in tensors_in(fake)}
            reads |= touched
            if param.writes or i in schema.hidden_writes:
                writes |= touched
            takes_scalar = param.takes_scalar and schema.target not in SIZED_BY_NUMBERS
            value = self._arg(symbol, fake, takes_scalar, schema.target)
            if not param.kwarg_only:
                positional.append(value)
            elif isinstance(value, ScalarRef) or not self._is_default(param.name, fake, param.default):
                keywords.append((param.name, value))  # a number that equals the default now may differ later
        for o in fresh:
            writes.add(self.add_storage(o.untyped_storage(), "temp", None, str(o.dtype).removeprefix("torch.")))
        slot = (
            self._tape.draw((schema.target, repr(positional[1:]), _shapes(made)))
            if schema.random and self._draws(schema, fargs)
            else None
        )
        where, by_optimizer = origin()
        self.record.ops.append(
            RawOp(
                schema.target, tuple(positional), tuple(sorted(keywords)), tuple(placed(o, self.view_of) for o in outs),
                frozenset(reads), frozenset(writes), slot, where, self.label, by_optimizer,
                in_backward=self.in_backward,
            )
        )  # fmt: skip

    def _guard_all(self, args: Any, kwargs: Any) -> None:
        """Keep the numbers of a call of which only a view remains."""
        for leaf in leaves((args, kwargs)):
            if is_symbol(leaf):
                self._scope.guard(self._scope.lift(leaf))

    @staticmethod
    def _draws(schema: RecordedSchema, args: tuple[Any, ...]) -> bool:
        """Whether this call draws random numbers. Fused attention draws only forward, with a dropout probability;
        cuDNN's recurrent layers only with a dropout state, which they never get."""
        if schema.target.endswith("_backward.default") or schema.target == "aten._cudnn_rnn.default":
            return False
        if "dot_product" in schema.target:
            names = [p.name for p in schema.params]
            at = names.index("dropout_p") if "dropout_p" in names else -1
            return 0 <= at < len(args) and args[at] > 0
        return True

    def _known(self, fake: torch.Tensor) -> int:
        found = self.storage_id(fake.untyped_storage())
        assert found is not None, "every argument's storage was met before"
        return found

    def _pure_view(self, outs: Sequence[torch.Tensor]) -> bool:
        """Whether all outputs are views of known storages that as_strided can make."""
        for o in outs:
            storage = self.record.storages[self._known(o)]
            if storage.kind == "temp" and storage.dtype != str(o.dtype).removeprefix("torch."):
                return False
        return True

    def _scalar_form(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, RecordedSchema]:
        other = scalar_overload(func, args, kwargs)
        if other is None:
            raise UnsupportedOperator(
                f"{user_line()}: {func} takes a number where it wants a tensor, and has no form for numbers",
                "pass a tensor instead of the number",
            )
        return other, schema_of(other)

    @staticmethod
    def _is_default(name: str, value: Any, default: Any) -> bool:
        if name in ("pin_memory", "device", "non_blocking", "layout"):
            return not value or name == "device" or value is torch.strided
        if isinstance(value, torch.Tensor) or isinstance(default, torch.Tensor):
            return False
        return bool(type(value) is type(default) and value == default)

    def scalar(self, expr: Expr) -> Arg:
        if expr.constant:
            return expr.value
        index = self._scalar_ids.setdefault(expr.index, len(self.record.scalars))
        if index == len(self.record.scalars):
            self.record.scalars.append(expr)
        return ScalarRef(index)

    def _arg(self, value: Any, fake: Any, takes_scalar: bool, target: str) -> Arg:
        """One argument as data. `value` may contain symbols; `fake` contains the fake tensors."""
        if isinstance(fake, torch.Tensor):
            return TensorRef(self.view_of(fake))
        if is_symbol(value):
            expr = self._scope.lift(value)
            fixed = not takes_scalar or isinstance(expr.value, bool)
            if not fixed and self._gpu and target not in NUMBERS_ON_GPU and is_lifted(expr):
                fixed = True  # a variant of each value runs there
            return self._scope.guard(expr) if fixed else self.scalar(expr)
        if isinstance(fake, (list, tuple)):
            return tuple(self._arg(v, f, takes_scalar, target) for v, f in zip(value, fake, strict=True))
        if fake is None or isinstance(fake, (bool, int, float, str)):
            plain: Arg = of_python(fake)
            return plain
        if isinstance(fake, complex):
            return Complex(fake.real, fake.imag)
        if isinstance(fake, torch.dtype):
            return Tag("dtype", str(fake).removeprefix("torch."))
        if isinstance(fake, torch.layout):
            return Tag("layout", str(fake).removeprefix("torch."))
        if isinstance(fake, torch.memory_format):
            return Tag("memory_format", str(fake).removeprefix("torch."))
        if isinstance(fake, torch.device):
            if fake.type != self._device.type:
                raise CaptureError(
                    f"{user_line()} places a tensor on {fake} inside the step", "let it follow its inputs' device"
                )
            return Tag("device", "")
        raise UnsupportedOperator(
            f"{user_line()}: {target} takes an argument of type {type(fake).__name__}", "replace the operator"
        )


def _shapes(outs: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    return tuple((tuple(o.shape), str(o.dtype)) for o in outs)


def _returns(func: Any, out: Any) -> Sequence[Any]:
    """An operator's results, one entry for each return of its schema."""
    declared = len(func._schema.returns)
    if declared == 1:
        return (out,)
    return out if declared else ()


def placed(value: Any, view_of: Callable[[torch.Tensor], int]) -> Out:
    """An operator's results, with tensors replaced by the numbers of their views."""
    if isinstance(value, torch.Tensor):
        return view_of(value)
    return tuple(view_of(v) for v in value) if isinstance(value, (list, tuple)) else None


def leaves(value: Any) -> list[Any]:
    """The leaves of nested lists, tuples and dicts as a flat list."""
    found: list[Any] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[Any]) -> None:
    if isinstance(value, (list, tuple)):
        for each in value:
            _collect(each, found)
    elif isinstance(value, dict):
        for each in value.values():
            _collect(each, found)
    else:
        found.append(value)


def tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor)]


# ---- the recorder

aten = torch.ops.aten


_HALF = (torch.bfloat16, torch.float16)

# Operators that give Python the values of tensors.
_READS = {
    aten._local_scalar_dense.default, aten._is_all_true.default, aten._is_any_true.default, aten.equal.default,
}  # fmt: skip

# Overloads that take a generator as their last argument, and those that they are with None there.
_OF_GENERATOR = {
    "generator": "default", "low_generator": "low", "Tensor_generator": "Tensor", "low_generator_dtype": "low_dtype",
}  # fmt: skip

_FIXED = "use an operator with a fixed output shape (masks, torch.where, padded sizes), or do it outside the step"


def _shaped(func: Any) -> DataDependent:
    return DataDependent(
        f"{user_line()}: the shape or value of {func}'s result depends on the data", instead_of(str(func), _FIXED)
    )


# The place of a real tensor in the job's state: (buffer, bytes of the buffer, byte offset of the storage in it).
Lookup = Callable[[torch.Tensor], "tuple[int, int, int] | None"]

# The value of a view that is made from constants alone.
Constant = Callable[[TraceRecord, int], "torch.Tensor | None"]

# The value of a view that is made from constants and from state that no step writes. The error is raised if one does.
StateValue = Callable[[TraceRecord, int, DataDependent], "torch.Tensor | None"]


@cache
def _consists_of_others(func: torch._ops.OpOverload) -> bool:
    """Whether torch runs other operators in an operator's place, on every device."""
    return bool(func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))


class Recorder(TorchDispatchMode):
    """Dispatch mode that records a trace. `lookup`: finds tensors of the job's state; `unknown`: the error for a tensor
    of another trace; `refused`: notes any other tensor, or raises; `allowed`: whether a Program may contain an
    operator; `gpu`: whether the step runs on a GPU; `constant`, `state_value`: see values/constants.py and
    values/held.py; `places`: `known`, `fixed` and `fix` of values/places.py; `after_backward`: is called before the
    first operator behind each backward pass."""

    def __init__(
        self, scope: Scope, tape: RngTape, *, lookup: Lookup, unknown: Callable[[torch.Tensor], Exception],
        refused: Callable[[torch.Tensor], None], allowed: Callable[[str], bool], observer: Observer,
        places: tuple[Collection[int], Collection[str], Callable[[str], Exception]],
        device: str = "cpu", layers: Layers | None = None, gpu: bool = False,
        constant: Constant = lambda record, view: None, after_backward: Callable[[], None] | None = None,
        state_value: StateValue | None = None,
    ) -> None:  # fmt: skip
        super().__init__()  # type: ignore[no-untyped-call]
        self.scope = scope
        # As in the daemon's check.
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=False, allow_fallback_kernels=False)
        self._operators = FakeOperators(self.fake_mode, device, fake_call)
        self._constant = constant
        self._state_value = state_value
        self._after_backward = after_backward
        self.checks: list[tuple[int, str]] = []  # the view that must be true in every step, and what is wrong else
        self._shapes = KnownShapes(self._known_value, self._lift)
        self._asserted = AssertedValues(
            self._device_op, lambda good, wrong: self.checks.append((self.view_of(good), wrong))
        )
        self.skips: list[tuple[torch.optim.Optimizer, int]] = []  # whose step is left out where the view is true
        self._lookup = lookup
        self._observer = observer
        self._layers = layers or Layers(())
        self._mkldnn = torch.backends.mkldnn.enabled
        self._unknown = unknown
        self._refused = refused
        self._stand_ins: dict[Any, torch.Tensor] = {}
        self.reshaped: dict[int, str] = {}  # by a fake tensor's id: the line that changed its shape in place
        self.value_read: int | None = None  # the view whose value Python reads, which ends the trace
        self.device = torch.device(device)
        self._gpu = gpu
        self.builder = TraceBuilder(scope, tape, allowed, self.device, gpu=gpu)
        self.conjugates = Conjugates(self.builder.keep, self._device_op, self._lift)
        self._on_host = HostTensors(scope, self.builder.keep)
        self.places = Places(
            scope, *places, operator=self._device_op, number=self.materialise, fake=self.to_fake,
            is_host=self.is_host, device=self.device,
        )  # fmt: skip
        self.host = self._on_host.values  # storage -> value of a tracked tensor of one element
        self.record = self.builder.record
        self.view_of = self.builder.view_of
        self._bases: dict[int, torch.Tensor] = {}  # job buffer -> fake bytes
        self._views: dict[tuple[Any, ...], torch.Tensor] = {}  # by the real tensor's id, place and layout
        self._rebound: dict[int, torch.Tensor] = {}  # real storage -> fake tensor that replaces it
        self._moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id: a real tensor, and its new memory

    # ---- tensors to storages and views ----------------------------------------------------------

    def input(self, tensor: torch.Tensor, position: int) -> torch.Tensor:
        """A fake twin of one batch tensor, with the bytes its strides span and offset 0."""
        with self.fake_mode:
            fake = torch.empty_strided(
                tuple(tensor.shape), tuple(tensor.stride()), dtype=tensor.dtype, device=self.device
            )
        self.builder.add_storage(fake.untyped_storage(), "input", position)
        self.record.inputs.append(self.view_of(fake))
        return fake

    def _const(self, tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor.detach().contiguous()
        data = bytes(torch._C.TensorBase.numpy(flat.view(-1).view(torch.uint8))) if flat.numel() else b""
        with self.fake_mode:
            fake = torch.empty(tuple(flat.shape), dtype=flat.dtype, device=self.device)
        self.builder.add_storage(fake.untyped_storage(), "const", data, str(flat.dtype).removeprefix("torch."))
        return fake

    def materialise(self, expr: Expr, dtype: torch.dtype) -> torch.Tensor:
        """A 0-dim device tensor with the value of a host scalar."""
        if expr.constant or isinstance(expr.value, bool):
            return self._const(torch.tensor(self.scope.guard(expr), dtype=dtype))
        with self.fake_mode:
            fake = torch.empty((), dtype=dtype, device=self.device)
        name = str(dtype).removeprefix("torch.")
        sid = self.builder.add_storage(fake.untyped_storage(), "temp", None, name)
        where, by_optimizer = origin()
        op = RawOp(
            "aten.full.default", ((), self.builder.scalar(expr)), (("dtype", Tag("dtype", name)),),
            (self.view_of(fake),), frozenset(), frozenset((sid,)), None, where, self.builder.label, by_optimizer,
            in_backward=self.builder.in_backward,
        )  # fmt: skip
        self.record.ops.append(op)
        return fake

    def _state_view(self, real: torch.Tensor, place: tuple[int, int, int]) -> torch.Tensor:
        if real.is_conj() or real.is_neg():
            raise CaptureError(
                f"{user_line()} uses part of the model through a view that conjugates or negates it, made outside the"
                " step",
                "make the view inside the step",
            )
        key = (id(real), place, real.dtype, real.storage_offset(), real.size(), real.stride())
        fake = self._views.get(key)
        if fake is not None:  # cached, because making one takes as long as an operator
            return fake
        buffer, nbytes, start = place
        base = self._bases.get(buffer)
        if base is None:
            base = self._operators.empty((nbytes,), (1,), torch.uint8)
            self._bases[buffer] = base
            self.record.state_storage[buffer] = self.builder.add_storage(base.untyped_storage(), "state", buffer)
        offset, rest = divmod(start, real.element_size())
        if rest:
            raise CaptureError(
                "parameters overlap at addresses that no strided view can express", "give them storages of their own"
            )
        fake = self._operators.view(
            base.untyped_storage(), real.size(), real.stride(), real.dtype, offset + int(real.storage_offset())
        )
        self._views[key] = fake
        return fake

    def to_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor):
            if tensor.fake_mode is not self.fake_mode:
                raise self._unknown(tensor)
            if self.places:
                self.places.refuse_stale(tensor)
            return tensor
        if tensor.layout is not torch.strided:
            raise self._unknown(tensor)
        if self._moved and (moved := self._moved_to(tensor)) is not None:
            return moved
        key = tensor.untyped_storage()._cdata
        fake = self._rebound.get(key)
        if fake is None and (expr := self.host.get(key)) is not None:
            fake = self.materialise(expr, tensor.dtype)
        if fake is not None:
            return fake if fake.shape == tensor.shape else self._device_op(aten.view.default, (fake, tensor.shape), {})
        place = self._lookup(tensor)
        if place is None:
            return self._stand_in(tensor)
        return self._state_view(tensor, place)

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor for one that the trace can't have. The trace goes on, to find others, and is refused at its
        end."""
        self._refused(tensor)
        key = tensor.untyped_storage()._cdata, tensor.size(), tensor.stride(), tensor.storage_offset()
        found = self._stand_ins.get(key)
        if found is None:
            with self.fake_mode:
                fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=self.device)
            self.builder.keep(tensor)
            self.builder.add_storage(fake.untyped_storage(), "temp", None, str(tensor.dtype).removeprefix("torch."))
            found = self._stand_ins[key] = fake
        return found

    # ---- tensors of the job whose `.data` the step sets --------------------------------------------

    @property
    def moved(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each real tensor whose `.data` was set, and the fake tensor that it lies on now."""
        return list(self._moved.values())

    def home(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake twin of a tensor of the job, in the job's memory."""
        place = self._lookup(tensor)
        if place is None:
            raise self._unknown(tensor)
        with torch.utils._python_dispatch._disable_current_modes():
            return self._state_view(tensor, place)

    def move(self, tensor: torch.Tensor, to: torch.Tensor | None) -> None:
        """Let a tensor of the job lie where the fake tensor `to` does, for the rest of the trace; None: at its home."""
        self._moved.pop(id(tensor), None)
        if to is not None:
            self.places.refuse_left(to)
            with torch.utils._python_dispatch._disable_current_modes():
                alias = self._operators.view(
                    to.untyped_storage(), to.size(), to.stride(), to.dtype, int(to.storage_offset())
                )
            self._moved[id(tensor)] = tensor, alias

    def is_moved(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._moved

    def _moved_to(self, tensor: torch.Tensor) -> torch.Tensor | None:
        found = self._moved.get(id(tensor))
        if found is not None:
            return found[1]
        place = self._lookup(tensor)
        for other, _ in self._moved.values() if place is not None else ():
            its = self._lookup(other)
            if (
                its is not None
                and place is not None
                and its[0] == place[0]
                and share_bytes(tensor, place[2], other, its[2])
            ):
                raise CaptureError(
                    f"{user_line()} uses a tensor over the memory of one whose .data the step has set to other memory",
                    "use a copy of it that was made before: p.detach().clone()",
                )
        return None

    # ---- dispatch --------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._observer.pause()
        try:
            with as_they_are():
                return self._dispatch(func, args, kwargs or {})
        except DataDependent as error:
            return Selected.of(func, args, error)
        finally:
            self._observer.resume()

    def _dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.builder.label = self._layers.here()
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward != self.builder.in_backward:
            self.builder.in_backward = in_backward
            if not in_backward and self._after_backward is not None:
                self._after_backward()
        if in_backward and func is aten.cumprod.default:  # one of those that the gradient of a product consists of
            refuse_by_values(user_line())
        if func is torch.ops.prim.device.default:
            return self.device
        if torch.is_inference_mode_enabled() and func.namespace == "aten" and _consists_of_others(func):
            with self:  # elsewhere autograd's layer, above this one, takes it apart
                return func.decompose(*args, **kwargs)
        if func.namespace != "aten":
            return self._foreign(func, args, kwargs)
        if torch.backends.mkldnn.enabled != self._mkldnn:
            raise CaptureError(
                f"{user_line()} runs under other torch.backends settings than the step began with",
                "set them before you submit, for the whole step",
            )
        if func is aten.lift_fresh.default:
            return self._lift(args[0])
        if func is aten._conj.default:
            return self.conjugates.conjugate(args[0])
        if func is aten._neg_view.default:
            return self.conjugates.negative(args[0])
        args, kwargs = self.conjugates.copied(func, (args, kwargs))
        found = leaves((args, kwargs))
        if any(isinstance(leaf, torch.Generator) for leaf in found):
            raise CaptureError(
                f"{user_line()} draws from a generator of its own",
                "drop generator=; the job has its own, seeded by submit(seed=...)",
            )
        if func._overloadname in _OF_GENERATOR:  # with None
            func = getattr(func.overloadpacket, _OF_GENERATOR[func._overloadname])
            kwargs = {key: value for key, value in kwargs.items() if key != "generator"}
        if not self._gpu:
            done, out = self._on_host.made(func, args, kwargs)
            if done:
                return out
        tensors = [t for t in found if isinstance(t, torch.Tensor)] if self.host else []
        if tensors and all(map(self.is_host, tensors)):
            done, out = self._on_host.run(func, args, kwargs)
            if done:
                return out
        if func in _READS:
            values = [self.constant(tensor) for tensor in args]
            if all(value is not None for value in values):
                return self._read(func, values)
        done, out = self._asserted.dispatch(func, args, kwargs)
        if done:
            return self._lift(out) if func is aten._is_all_true.default else out
        if func is aten._local_scalar_dense.default:
            view = self.view_of(self.to_fake(args[0]))
            of_batch = self.record.storages[self.record.views[view].storage].kind == "input"
            error = value_read(whole_number=args[0].dtype in (torch.int32, torch.int64), of_batch=of_batch)
            if self._state_value and (value := self._state_value(self.record, view, error)) is not None:
                return self._read(func, [value])
            self.value_read = view
            raise error
        if func is aten._is_all_true.default or func is aten._is_any_true.default:
            raise values_checked()
        if func is aten._embedding_bag_backward.default and not self._gpu:
            return bag_backward({p.name: value for p, value in bind(schema_of(func), args, kwargs)}, self._device_op)
        symbols = self.scope.symbols_of(func.overloadpacket.__name__)
        if symbols:
            kwargs = {**kwargs, **symbols}
        if "out" in kwargs and isinstance(kwargs["out"], torch.Tensor):
            functional = functional_overload(func)
            if functional is not None:
                out = kwargs["out"]
                given = {k: v for k, v in kwargs.items() if k != "out"}
                if not tensors_in((args, given)):
                    given |= {"dtype": out.dtype, "device": self.device}
                return self._into(out, self._device_op(functional, args, given))
        if func is aten.mul_.Tensor and not self._gpu and self._rounds_number(*args):
            return self._into(args[0], self._device_op(aten.mul.Tensor, args, kwargs))
        if func is aten.slice.Tensor and (window := self.places.sliced(args)) is not None:
            return window
        done, out = self._shapes.made(func, args, kwargs)
        if done:
            return out
        args = self._shapes.without_masks(func, args)
        return self._device_op(func, self._tensor_first(func, args), kwargs)

    def _known_value(self, func: Any, tensor: torch.Tensor) -> torch.Tensor | None:
        value = self.constant(tensor)
        if value is None and self._state_value is not None and not self.is_host(tensor):
            return self._state_value(self.record, self.view_of(self.to_fake(tensor)), _shaped(func))
        return value

    def _tensor_first(self, func: torch._ops.OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments with a tensor in place of a number that comes first (`torch.div(1.0, x)`), where the operator
        has no form for it: of the type to which torch rounds the number. In a half type it may round it later."""
        if len(args) < 2 or not (is_symbol(args[0]) or isinstance(args[0], (int, float))):
            return args
        others = [each for each in args[1:] if isinstance(each, torch.Tensor)]
        if not others or str(func._schema.arguments[0].type) != "Tensor":
            return args
        expr = self.scope.lift(args[0])
        dtype = torch.result_type(others[0], expr.value)
        return args if dtype in _HALF else (self.materialise(expr, dtype), *args[1:])

    def _rounds_number(self, into: torch.Tensor, factor: Any) -> bool:
        """Whether `mul_.Scalar`, of the overloads that take numbers the one that rounds them to the tensor's type,
        gives other bits than the call with a number in place of a tensor."""
        tracked = isinstance(factor, torch.Tensor)
        return into.dtype in _HALF and (self.is_host(factor) and into.dim() > 0 if tracked else True)

    def constant(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The value of a tensor that the step makes from constants and sizes alone, None for any other."""
        if isinstance(tensor, FakeTensor) and self.builder.storage_id(tensor.untyped_storage()) is not None:
            return self._constant(self.record, self.view_of(tensor))
        if not self.is_host(tensor) or not (expr := self.host[tensor.untyped_storage()._cdata]).constant:
            return None
        with torch.utils._python_dispatch._disable_current_modes():
            return torch.full(tensor.shape, expr.value, dtype=tensor.dtype)

    def _read(self, func: Any, values: list[Any]) -> Any:
        """What an operator that reads known values gives."""
        with torch.utils._python_dispatch._disable_current_modes():
            found = func(*values)
        return self._lift(found) if isinstance(found, torch.Tensor) else found

    def _into(self, out: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """Record an `out=` call as the operator and a copy, which every device can run."""
        if tuple(out.shape) != tuple(result.shape) or out.dtype != result.dtype:
            raise UnsupportedOperator(
                f"{user_line()} gives out= a tensor of another shape or type than the result",
                "drop out=, or make them alike",
            )
        self._device_op(aten.copy_.default, (out, result), {})
        return out

    def is_host(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's value is a tracked number."""
        key = tensor.untyped_storage()._cdata if not isinstance(tensor, FakeTensor) else None
        return key is not None and key in self.host and key not in self._rebound

    def is_number(self, value: Any) -> bool:
        """Whether a value is a tracked number that differs from step to step, or a local tensor that is one of the
        trace: it holds a number, also one that is different in other traces, or what the device writes there."""
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or isinstance(value, FakeTensor):
            return is_symbol(value)
        key = value.untyped_storage()._cdata
        return key in self._rebound or key in self.host

    def computed(self, value: torch.Tensor) -> torch.Tensor | None:
        """The fake tensor for a local one of the trace. None for any other."""
        return self.to_fake(value) if self.is_number(value) else None

    def _foreign(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func.namespace == "profiler":
            with torch.utils._python_dispatch._disable_current_modes():
                return func(*args, **kwargs)
        raise UnsupportedOperator(
            f"{user_line()} uses the operator {func}, which is not one of aten's",
            "write it with torch's own operators, or ask the daemon's operator to allow it (allow_ops)",
        )

    def _lift(self, tensor: torch.Tensor) -> torch.Tensor:
        """A constant made inside the step: `torch.tensor(3.0)`."""
        if isinstance(tensor, FakeTensor):
            return tensor
        if tensor.dim() == 0 and not tensor.is_complex():
            return self._on_host.lift(tensor)
        return self._const(tensor)

    def _device_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        originals: dict[int, torch.Tensor] = {}
        keep: list[torch.Tensor] = []
        fake_args = tuple(self._concrete(a, originals, keep) for a in args)
        fake_kwargs = {k: self._concrete(v, originals, keep) for k, v in kwargs.items()}
        schema = schema_of(func)
        if self.places:
            bound = bind(schema, fake_args, fake_kwargs)
            given = [
                (t, p.writes or i in schema.hidden_writes) for i, (p, v) in enumerate(bound) for t in tensors_in(v)
            ]
            if self.places.met(func, args, fake_args, given):
                return args[0]
        out = self._run_fake(func, fake_args, fake_kwargs)
        self.builder.write(func, schema, args, kwargs, fake_args, fake_kwargs, out)
        if schema.mutable:
            if torch.Tag.inplace_view in func.tags:  # the fake tensor was reshaped, but not the real one
                self._views.clear()
                self.reshaped[id(fake_args[0])] = user_line()
            self._rebind(schema, args, kwargs, fake_args, fake_kwargs)
        else:
            self._follow_views(originals, keep, out)
        if not originals:
            return out
        if isinstance(out, (list, tuple)):
            return type(out)(originals.get(id(o), o) for o in out)
        return originals.get(id(out), out)

    def _concrete(self, value: Any, originals: dict[int, torch.Tensor], keep: list[torch.Tensor]) -> Any:
        """An argument with each real tensor replaced by a fake one. Enters the real ones into `originals`, by the
        fake's id, and the fakes into `keep`. A method, because a recursive closure would hold the real ones until the
        cyclic collector runs."""
        if isinstance(value, torch.Tensor):
            fake = self.to_fake(value)
            if fake is not value:
                originals[id(fake)] = value
                keep.append(fake)
            return fake
        if is_symbol(value):
            return self.scope.lift(value).value
        if type(value) in (list, tuple):
            return type(value)(self._concrete(v, originals, keep) for v in value)
        return value

    def _run_fake(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return self._operators.run(func, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise _shaped(func) from error
        except (UnsupportedOperatorException, UnsupportedFakeTensorException) as error:
            raise UnsupportedOperator(
                f"{user_line()}: {func} can't run on fake tensors", "replace the operator or do it outside the step"
            ) from error

    def _follow_views(self, originals: dict[int, torch.Tensor], fakes: list[torch.Tensor], out: Any) -> None:
        """Move a tracked host tensor, of which a view was made, to the device, so that a later write to one of the two
        changes the other."""
        if not fakes:
            return
        made = {o.untyped_storage()._cdata for o in tensors_in(out)}
        for fake in fakes:
            real = originals[id(fake)]
            if fake.untyped_storage()._cdata in made and self.is_host(real):
                self._rebound[real.untyped_storage()._cdata] = fake

    def _rebind(self, schema: RecordedSchema, args: Any, kwargs: Any, fargs: Any, fkwargs: Any) -> None:
        """Move tracked host tensors that a device operator wrote to the device."""
        fakes = bind(schema, fargs, fkwargs)
        for (param, real), (_, fake) in zip(bind(schema, args, kwargs), fakes, strict=True):
            if param.writes:
                reals = real if isinstance(real, (list, tuple)) else [real]
                twins = fake if isinstance(fake, (list, tuple)) else [fake]
                for r, f in zip(reals, twins, strict=True):
                    if isinstance(r, torch.Tensor) and self.is_host(r):
                        self._rebound[r.untyped_storage()._cdata] = f
