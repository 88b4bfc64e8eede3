"""Writes the fused Program: operators that run on fake tensors while an FusionEmitter is active become its operators.

A rule is therefore a Python function over tensors, written with torch's own operators. View operators cost nothing:
they add a view to the Program and no operator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from gpumux.capture.recorder import bind, leaves, placed, scalar_overload, schema_of
from gpumux.errors import NotFusible
from gpumux.program.check import fake_call
from gpumux.program.ir import (
    Arg,
    Complex,
    Label,
    Numerics,
    Op,
    Out,
    Program,
    ScalarRef,
    Storage,
    StorageKind,
    Tag,
    View,
    spans,
)
from gpumux.program.ir import TensorRef as Ref
from gpumux.program.operators import is_allowed


class Declined(Exception):
    """A rule, or batching by torch, can't do this call; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Sizes of an emitter's lists, to undo what is recorded later."""

    storages: int
    views: int
    ops: int
    consts: int


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _layout(view: View) -> tuple[Any, ...]:
    return view.dtype, view.size, view.stride


def _mapped(outs: tuple[Out, ...], views: Mapping[int, int]) -> tuple[Out, ...]:
    """An operator's results, with views exchanged."""

    def one(view: int | None) -> Any:
        return None if view is None else views[view]

    return tuple(tuple(map(one, out)) if isinstance(out, tuple) else one(out) for out in outs)


class FusionEmitter(TorchDispatchMode):
    """Collects the parts of the fused Program. While it is active, torch operators on its tensors are recorded."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake = FakeTensorMode(allow_non_fake_inputs=False, allow_fallback_kernels=False)
        self.device = device
        self.storages: list[Storage] = []
        self.views: list[View] = []
        self.ops: list[Op] = []
        self.labels: list[Label | None] = []
        self.scalars: list[Any] = []  # "float" or "int"
        self.consts: list[bytes] = []
        self.label: Label | None = None
        self._view_ids: dict[View, int] = {}
        self._windows: dict[View, torch.Tensor] = {}
        self._storage_ids: dict[int, int] = {}
        self._bases: list[torch.Tensor] = []
        self._silent = self._plain = False
        self._birth_dtype: list[torch.dtype | None] = []

    # ---- storages and views ------------------------------------------------------------------------

    def add_storage(self, kind: StorageKind, nbytes: int, slot: int = -1, room: int | None = None) -> int:
        """Add a storage that exists before the step and return its index. room: bytes it may grow to (see resize)."""
        with self._bookkeeping():
            base = torch.empty(nbytes if room is None else room, dtype=torch.uint8, device=self.device)
        return self._enter(base, Storage(kind, nbytes, slot), None)

    def add_const(self, data: bytes) -> int:
        self.consts.append(data)
        return self.add_storage("const", len(data), len(self.consts) - 1)

    def resize(self, storage: int, nbytes: int, slot: int) -> None:
        self.storages[storage] = Storage(self.storages[storage].kind, nbytes, slot)

    @contextmanager
    def _bookkeeping(self) -> Iterator[None]:
        """A block whose operators are not recorded, not even within a rule."""
        before, self._silent = self._silent, True
        try:
            with self.fake, torch.no_grad():
                yield
        finally:
            self._silent = before

    def _enter(self, base: torch.Tensor, storage: Storage, dtype: torch.dtype | None) -> int:
        self._storage_ids[base.untyped_storage()._cdata] = len(self.storages)
        self.storages.append(storage)
        self._bases.append(base)
        self._birth_dtype.append(dtype)
        return len(self.storages) - 1

    def window(
        self, storage: int, dtype: str, size: Sequence[int], stride: Sequence[int], offset: int = 0
    ) -> torch.Tensor:
        """A fake tensor that views a storage of the fused Program."""
        return self._window_of(View(storage, dtype, tuple(size), tuple(stride), offset))

    def _window_of(self, view: View) -> torch.Tensor:
        found = self._windows.get(view)
        if found is None:
            found = self._windows[view] = self._made(view)
        return found

    def _made(self, view: View) -> torch.Tensor:
        """A fake tensor of the view's. It is made of a tensor on the meta device, in a fifteenth of the time that the
        same operators on fake tensors take: an array of ten models has thousands of views."""
        before, self._plain = self._plain, True
        try:
            with torch.no_grad():
                made = torch.empty(0, dtype=getattr(torch, view.dtype), device="meta")
                made.set_(self._bases[view.storage].untyped_storage(), view.offset, view.size, view.stride)
        finally:
            self._plain = before
        return FakeTensor(self.fake, made, torch.device(self.device))

    def storage_of(self, tensor: torch.Tensor) -> int:
        return self._storage_ids[tensor.untyped_storage()._cdata]

    def view_of(self, tensor: torch.Tensor) -> int:
        view = View(
            self.storage_of(tensor), dtype_name(tensor.dtype), tuple(tensor.shape), tuple(tensor.stride()),
            int(tensor.storage_offset()),
        )  # fmt: skip
        return self._id_of(view)

    def _id_of(self, view: View) -> int:
        found = self._view_ids.get(view)
        if found is None:
            found = self._view_ids[view] = len(self.views)
            self.views.append(view)
        return found

    # ---- operators -----------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return torch.device(self.device)
        if self._plain:
            return func(*args, **(kwargs or {}))
        if self._silent:
            with self.fake:
                return func(*args, **(kwargs or {}))
        return self.emit(func, tuple(args), kwargs or {})

    def emit(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], scalars: Sequence[float | int] = (),
        random: int | None = None, stream: int | None = None,
    ) -> Any:  # fmt: skip
        """Record one operator on fake tensors. ScalarRefs among the arguments name scalars of the fused Program;
        `scalars` are their present values."""

        def value(arg: Any) -> Any:
            if isinstance(arg, ScalarRef):
                return scalars[arg.index]
            return type(arg)(value(a) for a in arg) if type(arg) in (list, tuple) else arg

        fargs, fkwargs = value(args), {k: value(v) for k, v in kwargs.items()}
        gradients = torch.is_grad_enabled()  # some operators do something else where they are on
        with self._bookkeeping(), torch.set_grad_enabled(gradients):
            try:
                out = fake_call(func, fargs, fkwargs, self.device)
            except ValueError as error:  # of the check of the sizes and layouts that kernels rely on
                raise Declined(str(error)) from error
        schema = schema_of(func)
        outs = (out,) if len(func._schema.returns) == 1 else tuple(out or ())
        fresh = self._new_outputs(outs)
        if not fresh and not schema.mutable and random is None and self._is_view(outs):
            return out
        if any(isinstance(v, (int, float)) for p, v in bind(schema, fargs, fkwargs) if p.is_tensor):
            other = scalar_overload(func, fargs, fkwargs)
            if other is None:
                raise Declined(f"{func} with a number for a tensor")
            func, schema = other, schema_of(other)
        if not is_allowed(schema.target):
            raise Declined(f"it needs {schema.target}, which Programs may not name")
        positional: list[Arg] = []
        keywords: list[tuple[str, Arg]] = []
        for (param, given), (_, fake) in zip(bind(schema, args, kwargs), bind(schema, fargs, fkwargs), strict=True):
            if not param.kwarg_only:
                positional.append(self._arg(given))
            elif param.name not in ("pin_memory", "device", "non_blocking", "layout") and not (
                type(fake) is type(param.default) and not isinstance(fake, torch.Tensor) and fake == param.default
            ):
                keywords.append((param.name, self._arg(given)))
        for tensor in fresh:
            nbytes = tensor.untyped_storage().nbytes()
            self._enter(tensor, Storage("temp", nbytes), tensor.dtype)
        views = tuple(placed(o, self.view_of) for o in outs)
        self.ops.append(Op(schema.target, tuple(positional), tuple(sorted(keywords)), views, random, stream))
        self.labels.append(self.label)
        return out

    def repeat(self, since: Mark, operands: Sequence[Any], others: Sequence[Any]) -> list[torch.Tensor | None] | None:
        """Record the operator that was recorded first after the mark, whose arguments have `operands` for leaves, once
        more with `others` in their places. Returns its results, lists flattened, or None if they might be laid out
        otherwise: nothing is recorded then, and `emit` has to find out. Nothing is run on fake tensors, which would
        take most of the time of making a Program for many models."""
        op = self.ops[since.ops]
        exchanged = self._exchanged(operands, others)
        outs = [v for out in op.outs for v in (out if isinstance(out, tuple) else (out,))]
        made = {v: self.views[v] for v in outs if v is not None and self.views[v].storage >= since.storages}
        if exchanged is None or any(v is not None and v not in made and v not in exchanged[0] for v in outs):
            return None
        views, scalars = exchanged
        storages = {}
        for storage in sorted({view.storage for view in made.values()}):
            nbytes = self.storages[storage].nbytes
            base = torch.empty(nbytes, dtype=torch.uint8, device="meta")
            storages[storage] = self._enter(base, Storage("temp", nbytes), self._birth_dtype[storage])
        for v, view in made.items():
            views[v] = self._id_of(replace(view, storage=storages[view.storage]))

        def again(arg: Any) -> Any:
            if isinstance(arg, Ref):
                return Ref(views[arg.view])
            if isinstance(arg, ScalarRef):
                return ScalarRef(scalars[arg.index])
            return tuple(map(again, arg)) if isinstance(arg, tuple) else arg

        keywords = tuple((name, again(arg)) for name, arg in op.kwargs)
        self.ops.append(replace(op, args=again(op.args), kwargs=keywords, outs=_mapped(op.outs, views)))
        self.labels.append(self.label)
        return [None if v is None else self._window_of(self.views[views[v]]) for v in outs]

    def _exchanged(
        self, operands: Sequence[Any], others: Sequence[Any]
    ) -> tuple[dict[int, int], dict[int, int]] | None:
        """For each view and host scalar among `operands` that in its place among `others`. None if the views are laid
        out otherwise, or a number differs."""
        views: dict[int, int] = {}
        scalars: dict[int, int] = {}
        for one, other in zip(operands, others, strict=True):
            if isinstance(one, torch.Tensor):
                a, b = self.view_of(one), self.view_of(other)
                if _layout(self.views[a]) != _layout(self.views[b]) or views.setdefault(a, b) != b:
                    return None
            elif isinstance(one, ScalarRef):
                if self.scalars[one.index] != self.scalars[other.index]:
                    return None
                if scalars.setdefault(one.index, other.index) != other.index:
                    return None
            elif one != other:
                return None
        return views, scalars

    def _new_outputs(self, outs: Sequence[Any]) -> list[torch.Tensor]:
        found: dict[int, torch.Tensor] = {}
        for o in leaves(list(outs)):
            if isinstance(o, torch.Tensor) and o.untyped_storage()._cdata not in self._storage_ids:
                found.setdefault(o.untyped_storage()._cdata, o)
        return list(found.values())

    def _is_view(self, outs: Sequence[Any]) -> bool:
        """Whether these are views that strides alone describe."""
        for o in leaves(list(outs)):
            if isinstance(o, torch.Tensor):
                born = self._birth_dtype[self.storage_of(o)]
                if o.is_conj() or o.is_neg() or (born is not None and born != o.dtype):
                    return False
        return True

    def _arg(self, value: Any) -> Arg:
        if isinstance(value, torch.Tensor):
            return Ref(self.view_of(value))
        if isinstance(value, (list, tuple)):
            return tuple(self._arg(v) for v in value)
        if value is None or isinstance(value, (bool, int, float, str, ScalarRef)):
            return value
        if isinstance(value, complex):
            return Complex(value.real, value.imag)
        if isinstance(value, torch.dtype):
            return Tag("dtype", dtype_name(value))
        if isinstance(value, torch.layout):
            return Tag("layout", dtype_name(value))  # type: ignore[arg-type]
        if isinstance(value, torch.memory_format):
            return Tag("memory_format", dtype_name(value))  # type: ignore[arg-type]
        if isinstance(value, torch.device):
            return Tag("device", "")
        raise Declined(f"an argument of type {type(value).__name__}")

    # ---- trying ------------------------------------------------------------------------------------

    def mark(self) -> Mark:
        return Mark(len(self.storages), len(self.views), len(self.ops), len(self.consts))

    def back(self, mark: Mark) -> None:
        """Undo everything since `mark`."""
        for view in self.views[mark.views :]:
            del self._view_ids[view]
        if len(self.storages) > mark.storages:
            self._windows = {v: t for v, t in self._windows.items() if v.storage < mark.storages}
        for base in self._bases[mark.storages :]:
            self._storage_ids.pop(base.untyped_storage()._cdata, None)
        del self.storages[mark.storages :], self._bases[mark.storages :], self._birth_dtype[mark.storages :]
        del self.views[mark.views :], self.ops[mark.ops :], self.labels[mark.ops :], self.consts[mark.consts :]

    def build(self, inputs: Sequence[int], results: Sequence[int], numerics: Numerics) -> Program:
        layers, found = spans(self.labels)
        if any(t.kind == "temp" and t.nbytes < 0 for t in self.storages):
            raise NotFusible("a storage of unknown size", "report this as a bug with the step's code")
        return Program(
            tuple(self.storages), tuple(self.views), tuple(self.ops), tuple(inputs), tuple(results),
            tuple(self.scalars), tuple(self.consts), numerics=numerics, device=self.device, layers=layers, spans=found,
        )  # fmt: skip
