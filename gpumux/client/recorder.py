"""Records every operator a step runs, over fake tensors, as raw operators on storages and views.

The recorder sits below autograd: what it sees is exactly the aten operators the plain loop runs,
backward and optimizer included. The user's own parameters and buffers stay where they are; each
time one reaches an operator it is looked up *by its storage* and replaced by a fake twin, so it does
not matter by which reference the step found it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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

from gpumux.client import hostops
from gpumux.client.advice import instead_of, value_read
from gpumux.client.blame import by_numbers, user_line
from gpumux.client.executed import Observer
from gpumux.client.host import Expr, Scope, is_symbol
from gpumux.client.layers import Layers
from gpumux.client.ledger import Ledger, RawOp, leaves
from gpumux.client.ongpu import as_they_are
from gpumux.client.patches import RngTape
from gpumux.client.schema import Schema, bind, functional_overload, schema_of
from gpumux.errors import CaptureError, DataDependent, UnsupportedOperator
from gpumux.program.ir import Tag
from gpumux.program.metafix import fake_call

aten = torch.ops.aten

# How ASGD begins the numbers of its state (step, mu), of which its Python later reads the values. Others that begin so (the
# fused and capturable ones) leave them to the device.
_FILLED = {aten.zeros.default: 0, aten.ones.default: 1}

_FIXED = "use an operator with a fixed output shape (masks, torch.where, padded sizes), or do it outside the step"

# Finds a real tensor's place in the job's state: (buffer, its bytes, the storage's byte offset in it).
Lookup = Callable[[torch.Tensor], "tuple[int, int, int] | None"]


class Recorder(TorchDispatchMode):
    def __init__(
        self, scope: Scope, tape: RngTape, lookup: Lookup, unknown: Callable[[torch.Tensor], Exception],
        allowed: Callable[[str], bool], observer: Observer, device: str = "cpu", layers: Layers | None = None,
        gpu: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()  # type: ignore[no-untyped-call]
        self.scope = scope
        self.fake_mode = FakeTensorMode(
            allow_non_fake_inputs=False, allow_fallback_kernels=False
        )  # like the daemon's check
        self.host: dict[int, Expr] = {}  # storage -> value of a tracked 0-dim tensor
        self._lookup = lookup
        self._observer = observer
        self._layers = layers or Layers(())
        self._mkldnn = torch.backends.mkldnn.enabled
        self._unknown = unknown
        self.device = torch.device(device)
        self._gpu = gpu
        self.ledger = Ledger(scope, tape, allowed, self.device)
        self.record = self.ledger.record
        self.view_of = self.ledger.view_of
        self._bases: dict[int, torch.Tensor] = {}  # job buffer -> fake bytes
        self._views: dict[tuple[Any, ...], torch.Tensor] = {}  # by what the real one is, and how it lies in its buffer
        self._rebound: dict[int, torch.Tensor] = {}  # real storage -> fake tensor that took its place

    # ---- tensors to storages and views ----------------------------------------------------------

    def input(self, tensor: torch.Tensor, position: int) -> torch.Tensor:
        """A fake twin of one batch tensor, with the bytes its strides span and offset 0."""
        with self.fake_mode:
            fake = torch.empty_strided(
                tuple(tensor.shape), tuple(tensor.stride()), dtype=tensor.dtype, device=self.device
            )
        self.ledger.add_storage(fake.untyped_storage(), "input", position)
        self.record.inputs.append(self.view_of(fake))
        return fake

    def _const(self, tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor.detach().contiguous()
        data = bytes(torch._C.TensorBase.numpy(flat.view(-1).view(torch.uint8))) if flat.numel() else b""
        with self.fake_mode:
            fake = torch.empty(tuple(flat.shape), dtype=flat.dtype, device=self.device)
        self.ledger.add_storage(fake.untyped_storage(), "const", data, str(flat.dtype).removeprefix("torch."))
        return fake

    def materialise(self, expr: Expr, dtype: torch.dtype) -> torch.Tensor:
        """A 0-dim device tensor holding a host scalar's value."""
        if expr.constant:
            return self._const(torch.tensor(expr.value, dtype=dtype))
        with self.fake_mode:
            fake = torch.empty((), dtype=dtype, device=self.device)
        name = str(dtype).removeprefix("torch.")
        sid = self.ledger.add_storage(fake.untyped_storage(), "temp", None, name)
        op = RawOp(
            "aten.full.default", ((), self.ledger.scalar(expr)), (("dtype", Tag("dtype", name)),), (self.view_of(fake),),
            frozenset(), frozenset((sid,)), None, user_line(), self.ledger.label,
        )  # fmt: skip
        self.record.ops.append(op)
        return fake

    def _state_view(self, real: torch.Tensor, place: tuple[int, int, int]) -> torch.Tensor:
        if real.is_conj() or real.is_neg():
            raise CaptureError(
                f"{user_line()} uses part of the model through a view that conjugates or negates it, made outside the step",
                "make the view inside the step",
            )
        key = (id(real), place, real.dtype, real.storage_offset(), real.size(), real.stride())
        fake = self._views.get(key)
        if fake is not None:  # making one takes as long as an operator does
            return fake
        buffer, nbytes, start = place
        base = self._bases.get(buffer)
        if base is None:
            with self.fake_mode:
                base = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            self._bases[buffer] = base
            self.record.state_storage[buffer] = self.ledger.add_storage(base.untyped_storage(), "state", buffer)
        offset, rest = divmod(start, real.element_size())
        if rest:
            raise CaptureError(
                "parameters overlap at addresses that no strided view can express", "give them storages of their own"
            )
        with self.fake_mode:
            fake = torch.empty(0, dtype=real.dtype, device=self.device)
            fake.set_(base.untyped_storage(), offset + real.storage_offset(), real.size(), real.stride())
        self._views[key] = fake
        return fake

    def to_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor):
            if tensor.fake_mode is not self.fake_mode:
                raise self._unknown(tensor)
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
        self._observer.pause()
        try:
            with as_they_are():
                return self._dispatch(func, args, kwargs or {})
        finally:
            self._observer.resume()

    def _dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.ledger.label = self._layers.here()
        if func is torch.ops.prim.device.default:
            return self.device
        if func.namespace != "aten":
            return self._foreign(func, args, kwargs)
        if torch.backends.mkldnn.enabled != self._mkldnn:
            raise CaptureError(
                f"{user_line()} runs under other torch.backends settings than the step began with",
                "set them before you submit, for the whole step",
            )
        if func is aten.lift_fresh.default:
            return self._lift(args[0])
        if func is aten.mkldnn_rnn_layer.default:
            raise UnsupportedOperator(
                f"{user_line()} runs an LSTM through oneDNN, whose backward can't be captured",
                "set torch.backends.mkldnn.enabled = False before you submit (and in runs you compare with)",
            )
        if func is aten._conj.default:  # lazy conjugation is a flag on a view; make it real
            func = aten.conj_physical.default
        elif func is aten._neg_view.default:
            func = aten.neg.default
        found = leaves((args, kwargs))
        if any(isinstance(leaf, torch.Generator) for leaf in found):
            raise CaptureError(
                f"{user_line()} draws from a generator of its own",
                "drop generator=; the job has its own, seeded by submit(seed=...)",
            )
        tensors = [t for t in found if isinstance(t, torch.Tensor)]
        if func in _FILLED and args and not args[0] and not self._gpu and by_numbers():
            done, out = hostops.filled(self, _FILLED[func], kwargs.get("dtype"))
            if done:
                return out
        if tensors and all(self.is_host(t) for t in tensors):
            done, out = hostops.run(self, func, args, kwargs)
            if done:
                return out
        if func is aten._local_scalar_dense.default:
            raise value_read()
        if func is aten._is_all_true.default or func is aten._is_any_true.default:
            raise DataDependent(
                f"{user_line()} checks the values of a tensor in Python",
                "torch.distributions does so by default: pass validate_args=False, or call "
                "torch.distributions.Distribution.set_default_validate_args(False) before you submit",
            )
        symbols = self.scope.symbols_of(func.overloadpacket.__name__)
        if symbols:
            kwargs = {**kwargs, **symbols}
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

    def is_host(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's value is a tracked number."""
        key = tensor.untyped_storage()._cdata if not isinstance(tensor, FakeTensor) else None
        return key is not None and key in self.host and key not in self._rebound

    def is_number(self, value: Any) -> bool:
        """Whether it is a tracked number, or the tensor of one, that is another at another step."""
        if is_symbol(value):
            return True
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or not self.is_host(value):
            return False
        return not self.host[value.untyped_storage()._cdata].constant

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
            self.ledger.keep(tensor)
            self.host[tensor.untyped_storage()._cdata] = self.scope.const(tensor.item())
            return tensor
        return self._const(tensor)

    def _device_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        originals: dict[int, torch.Tensor] = {}
        keep: list[torch.Tensor] = []
        fake_args = tuple(self._concrete(a, originals, keep) for a in args)
        fake_kwargs = {k: self._concrete(v, originals, keep) for k, v in kwargs.items()}
        out = self._run_fake(func, fake_args, fake_kwargs)
        schema = schema_of(func)
        self.ledger.write(func, schema, args, kwargs, fake_args, fake_kwargs, out)
        if schema.mutable:
            if torch.Tag.inplace_view in func.tags:  # a fake was reshaped, and its real one was not
                self._views.clear()
            self._rebind(schema, args, kwargs, fake_args, fake_kwargs)
        else:
            self._follow_views(originals, keep, out)
        if not originals:
            return out
        if isinstance(out, (list, tuple)):
            return type(out)(originals.get(id(o), o) for o in out)
        return originals.get(id(out), out)

    def _concrete(self, value: Any, originals: dict[int, torch.Tensor], keep: list[torch.Tensor]) -> Any:
        """An argument with a fake tensor for each real one: those are noted in `originals`, by the fake's id, and the fakes
        in `keep`. A method, since a closure that calls itself would hold the real ones until the cyclic collector runs."""
        if isinstance(value, torch.Tensor):
            fake = self.to_fake(value)
            if fake is not value:
                originals[id(fake)] = value
                keep.append(fake)
            return fake
        if is_symbol(value):
            return self.scope.lift(value).value
        if isinstance(value, (list, tuple)):
            return (
                type(value)(self._concrete(v, originals, keep) for v in value)
                if type(value) in (list, tuple)
                else value
            )
        return value

    def _run_fake(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            with self.fake_mode:
                return fake_call(func, args, kwargs, self.device.type)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise DataDependent(
                f"{user_line()}: the shape or value of {func}'s result depends on the data",
                instead_of(str(func), _FIXED),
            ) from error
        except (UnsupportedOperatorException, UnsupportedFakeTensorException) as error:
            raise UnsupportedOperator(
                f"{user_line()}: {func} can't run on fake tensors", "replace the operator or do it outside the step"
            ) from error

    def _follow_views(self, originals: dict[int, torch.Tensor], fakes: list[torch.Tensor], out: Any) -> None:
        """A view of a tracked host tensor: both live on the device from now on, so that a later write
        to one is seen through the other."""
        made = {o.untyped_storage()._cdata for o in leaves(out) if isinstance(o, torch.Tensor)}
        for fake in fakes:
            real = originals[id(fake)]
            if fake.untyped_storage()._cdata in made and self.is_host(real):
                self._rebound[real.untyped_storage()._cdata] = fake

    def _rebind(self, schema: Schema, args: Any, kwargs: Any, fargs: Any, fkwargs: Any) -> None:
        """A device operator wrote into a tracked host tensor: from now on it lives on the device."""
        fakes = bind(schema, fargs, fkwargs)
        for (param, real), (_, fake) in zip(bind(schema, args, kwargs), fakes, strict=True):
            if param.writes:
                reals = real if isinstance(real, (list, tuple)) else [real]
                twins = fake if isinstance(fake, (list, tuple)) else [fake]
                for r, f in zip(reals, twins, strict=True):
                    if isinstance(r, torch.Tensor) and self.is_host(r):
                        self._rebound[r.untyped_storage()._cdata] = f
