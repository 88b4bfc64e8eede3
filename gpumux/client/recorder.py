"""Records every operator a step runs, over fake tensors, as raw operators on storages and views.

The recorder sits below autograd: what it sees is exactly the aten operators the plain loop runs,
backward and optimizer included. The user's own parameters and buffers stay where they are; each
time one reaches an operator it is looked up *by its storage* and replaced by a fake twin, so it does
not matter by which reference the step found it.

Identity is by storage, not by tensor: holding tensors would raise their reference counts and make
autograd copy gradients it otherwise takes over as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode

from gpumux.client import hostops
from gpumux.client.blame import user_line
from gpumux.client.host import Expr, Scope, is_symbol
from gpumux.client.patches import RngTape
from gpumux.client.schema import Schema, bind, functional_overload, scalar_overload, schema_of
from gpumux.errors import CaptureError, DataDependent, UnsupportedOperator
from gpumux.program.ir import Arg, Complex, Out, ScalarRef, Tag, TensorRef, View
from gpumux.program.metafix import fake_call

aten = torch.ops.aten

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


@dataclass(slots=True)
class Record:
    storages: list[RawStorage] = field(default_factory=list)
    views: list[View] = field(default_factory=list)
    ops: list[RawOp] = field(default_factory=list)
    scalars: list[Expr] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)  # view of each batch tensor
    state_storage: dict[int, int] = field(default_factory=dict)  # job buffer -> storage


# Finds a real tensor's place in the job's state: (buffer, its bytes, the storage's byte offset in it).
Lookup = Callable[[torch.Tensor], "tuple[int, int, int] | None"]


class Recorder(TorchDispatchMode):
    def __init__(
        self, scope: Scope, tape: RngTape, lookup: Lookup, unknown: Callable[[torch.Tensor], Exception],
        allowed: Callable[[str], bool], device: str = "cpu",
    ) -> None:  # fmt: skip
        super().__init__()  # type: ignore[no-untyped-call]
        self.scope = scope
        self.tape = tape
        self.record = Record()
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=False)
        self.host: dict[int, Expr] = {}  # storage -> value of a tracked 0-dim tensor
        self._lookup = lookup
        self._unknown = unknown
        self._allowed = allowed
        self._device = torch.device(device)
        self._storage_ids: dict[int, int] = {}
        self._view_ids: dict[View, int] = {}
        self._scalar_ids: dict[int, int] = {}
        self._bases: dict[int, torch.Tensor] = {}  # job buffer -> fake bytes
        self._rebound: dict[int, torch.Tensor] = {}  # real storage -> fake tensor that took its place
        self._keep: list[Any] = []  # storages, so that their addresses are not used again

    # ---- tensors to storages and views ----------------------------------------------------------

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

    def input(self, tensor: torch.Tensor, position: int) -> torch.Tensor:
        """A fake twin of one batch tensor, with the bytes its strides span and offset 0."""
        with self.fake_mode:
            fake = torch.empty_strided(
                tuple(tensor.shape), tuple(tensor.stride()), dtype=tensor.dtype, device=self._device
            )
        self.add_storage(fake.untyped_storage(), "input", position)
        self.record.inputs.append(self.view_of(fake))
        return fake

    def _const(self, tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor.detach().contiguous()
        data = bytes(torch._C.TensorBase.numpy(flat.view(-1).view(torch.uint8))) if flat.numel() else b""
        with self.fake_mode:
            fake = torch.empty(tuple(flat.shape), dtype=flat.dtype, device=self._device)
        self.add_storage(fake.untyped_storage(), "const", data)
        return fake

    def materialise(self, expr: Expr, dtype: torch.dtype) -> torch.Tensor:
        """A 0-dim device tensor holding a host scalar's value."""
        if expr.constant:
            return self._const(torch.tensor(expr.value, dtype=dtype))
        with self.fake_mode:
            fake = torch.empty((), dtype=dtype, device=self._device)
        name = str(dtype).removeprefix("torch.")
        sid = self.add_storage(fake.untyped_storage(), "temp", None, name)
        op = RawOp(
            "aten.full.default", ((), self._scalar(expr)), (("dtype", Tag("dtype", name)),), (self.view_of(fake),),
            frozenset(), frozenset((sid,)), None, user_line(),
        )  # fmt: skip
        self.record.ops.append(op)
        return fake

    def _state_view(self, real: torch.Tensor, place: tuple[int, int, int]) -> torch.Tensor:
        buffer, nbytes, start = place
        base = self._bases.get(buffer)
        if base is None:
            with self.fake_mode:
                base = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            self._bases[buffer] = base
            self.record.state_storage[buffer] = self.add_storage(base.untyped_storage(), "state", buffer)
        offset, rest = divmod(start, real.element_size())
        if rest:
            raise CaptureError(
                "parameters overlap at addresses that no strided view can express", "give them storages of their own"
            )
        with self.fake_mode:
            fake = torch.empty(0, dtype=real.dtype, device=self._device)
            fake.set_(base.untyped_storage(), offset + real.storage_offset(), real.size(), real.stride())
        return fake

    def to_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        key = tensor.untyped_storage()._cdata
        rebound = self._rebound.get(key)
        if rebound is not None:
            return rebound
        expr = self.host.get(key)
        if expr is not None:
            return self.materialise(expr, tensor.dtype)
        place = self._lookup(tensor)
        if place is None:
            raise self._unknown(tensor)
        return self._state_view(tensor, place)

    # ---- dispatch --------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return self._device
        if func.namespace != "aten":
            return self._foreign(func, args, kwargs)
        if func is aten.lift_fresh.default:
            return self._lift(args[0])
        if func is aten._conj.default:  # lazy conjugation is a flag on a view; make it real
            func = aten.conj_physical.default
        elif func is aten._neg_view.default:
            func = aten.neg.default
        leaves = _leaves((args, kwargs))
        if any(isinstance(leaf, torch.Generator) for leaf in leaves):
            raise CaptureError(
                f"{user_line()} draws from a generator of its own",
                "drop generator=; the job has its own, seeded by submit(seed=...)",
            )
        tensors = [t for t in leaves if isinstance(t, torch.Tensor)]
        if tensors and all(self._is_host(t) for t in tensors):
            done, out = hostops.run(self, func, args, kwargs)
            if done:
                return out
        if func is aten._local_scalar_dense.default:
            raise DataDependent(
                f"{user_line()} reads a tensor's value in Python (.item(), float(), bool() or a branch on it)",
                "keep the decision on the device (torch.where, masks), or return the tensor from the step and read it outside",
            )
        if "out" in kwargs and isinstance(kwargs["out"], torch.Tensor):
            functional = functional_overload(func)
            if functional is not None:
                return self._into(
                    kwargs["out"], self._device_op(functional, args, {k: v for k, v in kwargs.items() if k != "out"})
                )
        return self._device_op(func, args, kwargs)

    def _into(self, out: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """`out=` written as the operator and a copy, which any device can carry out."""
        if tuple(out.shape) != tuple(result.shape) or out.dtype != result.dtype:
            raise UnsupportedOperator(
                f"{user_line()} gives out= a tensor of another shape or type than the result",
                "drop out=, or make them alike",
            )
        self._device_op(aten.copy_.default, (out, result), {})
        return out

    def _is_host(self, tensor: torch.Tensor) -> bool:
        key = tensor.untyped_storage()._cdata if not isinstance(tensor, FakeTensor) else None
        return key is not None and key in self.host and key not in self._rebound

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
            self._keep.append(tensor.untyped_storage())
            self.host[tensor.untyped_storage()._cdata] = self.scope.const(tensor.item())
            return tensor
        return self._const(tensor)

    def _device_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        originals: dict[int, torch.Tensor] = {}

        def concrete(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                fake = self.to_fake(value)
                if fake is not value:
                    originals[id(fake)] = value
                    keep.append(fake)
                return fake
            if is_symbol(value):
                return self.scope.lift(value).value
            if isinstance(value, (list, tuple)):
                return type(value)(concrete(v) for v in value) if type(value) in (list, tuple) else value
            return value

        keep: list[torch.Tensor] = []
        fake_args = tuple(concrete(a) for a in args)
        fake_kwargs = {k: concrete(v) for k, v in kwargs.items()}
        out = self._run_fake(func, fake_args, fake_kwargs)
        schema = schema_of(func)
        self._write(func, schema, args, kwargs, fake_args, fake_kwargs, out)
        if schema.mutable:
            self._rebind(schema, args, kwargs, fake_args, fake_kwargs)
        if not originals:
            return out
        if isinstance(out, (list, tuple)):
            return type(out)(originals.get(id(o), o) for o in out)
        return originals.get(id(out), out)

    def _run_fake(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            with self.fake_mode:
                return fake_call(func, args, kwargs, self._device.type)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise DataDependent(
                f"{user_line()}: the shape or value of {func}'s result depends on the data",
                "use an operator with a fixed output shape (masks, torch.where, padded sizes), or do it outside the step",
            ) from error
        except UnsupportedOperatorException as error:
            raise UnsupportedOperator(
                f"{user_line()}: {func} can't run on fake tensors", "replace the operator or do it outside the step"
            ) from error

    def _rebind(self, schema: Schema, args: Any, kwargs: Any, fargs: Any, fkwargs: Any) -> None:
        """A device operator wrote into a tracked host tensor: from now on it lives on the device."""
        fakes = bind(schema, fargs, fkwargs)
        for (param, real), (_, fake) in zip(bind(schema, args, kwargs), fakes, strict=True):
            if param.writes:
                reals = real if isinstance(real, (list, tuple)) else [real]
                twins = fake if isinstance(fake, (list, tuple)) else [fake]
                for r, f in zip(reals, twins, strict=True):
                    if isinstance(r, torch.Tensor) and self._is_host(r):
                        self._rebound[r.untyped_storage()._cdata] = f

    # ---- writing an operator down ----------------------------------------------------------------

    def _write(self, func: Any, schema: Schema, args: Any, kwargs: Any, fargs: Any, fkwargs: Any, out: Any) -> None:
        outs = _returns(func, out)
        if torch.Tag.inplace_view in func.tags and func.overloadpacket.__name__ in _INPLACE_VIEWS:
            if not isinstance(args[0], FakeTensor):
                raise CaptureError(
                    f"{user_line()} changes the shape of the model's own tensor ({schema.target})",
                    "make a view of it instead",
                )
            return  # the tensor is another view of its storage from now on; nothing happens on the device
        fresh = [
            o for o in _leaves(outs) if isinstance(o, torch.Tensor) and self.storage_id(o.untyped_storage()) is None
        ]
        if not fresh and not schema.mutable and self._pure_view(outs):
            return
        if any(isinstance(v, (int, float)) or is_symbol(v) for p, v in bind(schema, args, kwargs) if p.is_tensor):
            func, schema = self._scalar_form(func, args, kwargs)
        if not self._allowed(schema.target):
            raise UnsupportedOperator(
                f"{user_line()} uses the operator {schema.target}, which is not on the allow-list",
                "write the step without it, or ask the daemon's operator to add it (allow_ops in its configuration)",
            )
        reads: set[int] = set()
        writes: set[int] = set()
        positional: list[Arg] = []
        keywords: list[tuple[str, Arg]] = []
        symbols, fakes = bind(schema, args, kwargs), bind(schema, fargs, fkwargs)
        for i, ((param, symbol), (_, fake)) in enumerate(zip(symbols, fakes, strict=True)):
            touched = {self._known(t) for t in _leaves(fake) if isinstance(t, torch.Tensor)}
            reads |= touched
            if param.writes or i in schema.hidden_writes:
                writes |= touched
            value = self._arg(symbol, fake, param.takes_scalar, schema.target)
            if not param.kwarg_only:
                positional.append(value)
            elif not self._is_default(param.name, fake, param.default):
                keywords.append((param.name, value))
        for o in fresh:
            writes.add(self.add_storage(o.untyped_storage(), "temp", None, str(o.dtype).removeprefix("torch.")))
        slot = (
            self.tape.draw((schema.target, repr(positional[1:]), self._shapes(outs)))
            if schema.random and self._draws(schema, fargs)
            else None
        )
        self.record.ops.append(
            RawOp(
                schema.target, tuple(positional), tuple(sorted(keywords)), tuple(self._out(o) for o in outs),
                frozenset(reads), frozenset(writes), slot, user_line(),
            )
        )  # fmt: skip

    @staticmethod
    def _draws(schema: Schema, args: tuple[Any, ...]) -> bool:
        """Whether this call really draws. Fused attention draws only with a dropout probability."""
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
        for o in _leaves(outs):
            if isinstance(o, torch.Tensor):
                storage = self.record.storages[self._known(o)]
                if storage.kind == "temp" and storage.dtype != str(o.dtype).removeprefix("torch."):
                    return False
        return True

    def _shapes(self, outs: Sequence[Any]) -> tuple[Any, ...]:
        return tuple((tuple(o.shape), str(o.dtype)) for o in _leaves(outs) if isinstance(o, torch.Tensor))

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

    def _out(self, value: Any) -> Out:
        if isinstance(value, torch.Tensor):
            return self.view_of(value)
        if isinstance(value, (list, tuple)):
            return tuple(self.view_of(v) for v in value)
        return None

    def _scalar(self, expr: Expr) -> Arg:
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
            expr = self.scope.lift(value)
            return self._scalar(expr) if takes_scalar and not isinstance(expr.value, bool) else self.scope.guard(expr)
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


def _leaves(value: Any) -> list[Any]:
    """Flat list of what nested lists, tuples and dicts hold."""
    if isinstance(value, (list, tuple)):
        return [leaf for v in value for leaf in _leaves(v)]
    if isinstance(value, dict):
        return [leaf for v in value.values() for leaf in _leaves(v)]
    return [value]
