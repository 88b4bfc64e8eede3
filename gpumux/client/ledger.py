"""What a trace has recorded so far: storages, views, operators, each as plain data.

Identity is by storage, not by tensor: holding tensors would raise their reference counts and make
autograd copy gradients it otherwise takes over as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from gpumux.client.advice import instead_of
from gpumux.client.blame import user_line
from gpumux.client.host import Expr, Scope, is_symbol
from gpumux.client.patches import RngTape
from gpumux.client.schema import Schema, bind, scalar_overload, schema_of
from gpumux.errors import CaptureError, UnsupportedOperator
from gpumux.program.ir import Arg, Complex, Out, ScalarRef, Tag, TensorRef, View
from gpumux.program.layers import Label

# Operators that turn a tensor into another view of its storage, in place: nothing runs on the device.
_INPLACE_VIEWS = frozenset(
    ("t_", "transpose_", "swapaxes_", "swapdims_", "unsqueeze_", "squeeze_", "detach_", "as_strided_")
)


@dataclass(slots=True)
class RawStorage:
    """`key` is the job buffer (state), the batch position (input) or the bytes (const)."""

    kind: str
    nbytes: int
    key: Any = None
    dtype: str = ""  # of the tensor it was born as (temp)


@dataclass(slots=True)
class RawOp:
    target: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    outs: tuple[Out, ...]
    reads: frozenset[int]  # storages
    writes: frozenset[int]  # storages changed in place or born
    random: int | None
    where: str
    label: Label | None = None  # whose layer it is


@dataclass(slots=True)
class Record:
    storages: list[RawStorage] = field(default_factory=list)
    views: list[View] = field(default_factory=list)
    ops: list[RawOp] = field(default_factory=list)
    scalars: list[Expr] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)  # view of each batch tensor
    state_storage: dict[int, int] = field(default_factory=dict)  # job buffer -> storage


class Ledger:
    """Numbers storages, views and host scalars as they come up, and writes operators down."""

    def __init__(self, scope: Scope, tape: RngTape, allowed: Callable[[str], bool], device: torch.device) -> None:
        self.record = Record()
        self._scope = scope
        self._tape = tape
        self._allowed = allowed
        self._device = device
        self._storage_ids: dict[int, int] = {}
        self._view_ids: dict[View, int] = {}
        self._scalar_ids: dict[int, int] = {}
        self.label: Label | None = None  # of what is being recorded
        self._keep: list[Any] = []  # storages, so that their addresses are not used again

    def keep(self, tensor: torch.Tensor) -> None:
        """Let the tensor's storage live, so that its address names it for the whole trace."""
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

    # ---- writing an operator down ----------------------------------------------------------------

    def write(self, func: Any, schema: Schema, args: Any, kwargs: Any, fargs: Any, fkwargs: Any, out: Any) -> None:
        outs = _returns(func, out)
        if any(isinstance(o, torch.Tensor) and o.layout is not torch.strided for o in leaves(outs)):
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
            return  # the tensor is another view of its storage from now on; nothing happens on the device
        fresh = [
            o for o in leaves(outs) if isinstance(o, torch.Tensor) and self.storage_id(o.untyped_storage()) is None
        ]
        if not fresh and not schema.mutable and self._pure_view(outs):
            return
        if any(isinstance(v, (int, float)) or is_symbol(v) for p, v in bind(schema, args, kwargs) if p.is_tensor):
            func, schema = self._scalar_form(func, args, kwargs)
        if not self._allowed(schema.target):
            raise UnsupportedOperator(
                f"{user_line()} uses the operator {schema.target}, which is not on the allow-list",
                instead_of(
                    schema.target,
                    "write the step without it, or ask the daemon's operator to add it (allow_ops in its configuration)",
                ),
            )
        reads: set[int] = set()
        writes: set[int] = set()
        positional: list[Arg] = []
        keywords: list[tuple[str, Arg]] = []
        symbols, fakes = bind(schema, args, kwargs), bind(schema, fargs, fkwargs)
        for i, ((param, symbol), (_, fake)) in enumerate(zip(symbols, fakes, strict=True)):
            touched = {self._known(t) for t in leaves(fake) if isinstance(t, torch.Tensor)}
            reads |= touched
            if param.writes or i in schema.hidden_writes:
                writes |= touched
            value = self._arg(symbol, fake, param.takes_scalar, schema.target)
            if not param.kwarg_only:
                positional.append(value)
            elif isinstance(value, ScalarRef) or not self._is_default(param.name, fake, param.default):
                keywords.append((param.name, value))  # a number that is the default now may be another later
        for o in fresh:
            writes.add(self.add_storage(o.untyped_storage(), "temp", None, str(o.dtype).removeprefix("torch.")))
        slot = (
            self._tape.draw((schema.target, repr(positional[1:]), self._shapes(outs)))
            if schema.random and self._draws(schema, fargs)
            else None
        )
        self.record.ops.append(
            RawOp(
                schema.target, tuple(positional), tuple(sorted(keywords)), tuple(placed(o, self.view_of) for o in outs),
                frozenset(reads), frozenset(writes), slot, user_line(), self.label,
            )
        )  # fmt: skip

    @staticmethod
    def _draws(schema: Schema, args: tuple[Any, ...]) -> bool:
        """Whether this call really draws. Fused attention draws only with a dropout probability, and forward; cuDNN's
        recurrent layers only with a state to draw from, which they are never given."""
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

    def _pure_view(self, outs: Sequence[Any]) -> bool:
        """All outputs are views of known storages that as_strided could make."""
        for o in leaves(outs):
            if isinstance(o, torch.Tensor):
                storage = self.record.storages[self._known(o)]
                if storage.kind == "temp" and storage.dtype != str(o.dtype).removeprefix("torch."):
                    return False
        return True

    def _shapes(self, outs: Sequence[Any]) -> tuple[Any, ...]:
        return tuple((tuple(o.shape), str(o.dtype)) for o in leaves(outs) if isinstance(o, torch.Tensor))

    def _scalar_form(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Schema]:
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
        """One argument as data. `value` may hold symbols, `fake` has the fake tensors."""
        if isinstance(fake, torch.Tensor):
            return TensorRef(self.view_of(fake))
        if is_symbol(value):
            expr = self._scope.lift(value)
            return self.scalar(expr) if takes_scalar and not isinstance(expr.value, bool) else self._scope.guard(expr)
        if isinstance(fake, (list, tuple)):
            return tuple(self._arg(v, f, takes_scalar, target) for v, f in zip(value, fake, strict=True))
        if fake is None or isinstance(fake, (bool, int, float, str)):
            return fake
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


def _returns(func: Any, out: Any) -> Sequence[Any]:
    """What an operator returned, one entry a return of its schema."""
    declared = len(func._schema.returns)
    if declared == 1:
        return (out,)
    return out if declared else ()


def placed(value: Any, view_of: Callable[[torch.Tensor], int]) -> Out:
    """What an operator returned, tensors by the numbers of their views."""
    if isinstance(value, torch.Tensor):
        return view_of(value)
    return tuple(view_of(v) for v in value) if isinstance(value, (list, tuple)) else None


def leaves(value: Any) -> list[Any]:
    """Flat list of what nested lists, tuples and dicts hold."""
    if isinstance(value, (list, tuple)):
        return [leaf for v in value for leaf in leaves(v)]
    if isinstance(value, dict):
        return [leaf for v in value.values() for leaf in leaves(v)]
    return [value]
