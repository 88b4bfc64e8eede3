"""Operators on tracked tensors of one element (an optimizer's `step`, a pointer in a buffer), computed on the host.

The value of such a tensor depends only on step counts and hyperparameters, so it is computed as an expression and not
on the device. Then the result of `.item()` is known, and Python may decide by it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from gpumux.capture.source import counting
from gpumux.capture.symbols import Expr, Scope, is_symbol

aten = torch.ops.aten

_ARITHMETIC = frozenset(("add", "sub", "mul", "div", "remainder", "floor_divide"))
_OF_INTEGERS = {"remainder": "mod", "floor_divide": "floordiv"}
_COMPARISONS = frozenset(("eq", "ne", "lt", "le", "gt", "ge"))
_SAME = {aten.detach.default, aten.lift_fresh.default}
_COPIES = {aten.clone.default}
_TYPES = (torch.float32, torch.float64, torch.int64)
_FLAGS = (torch.bool, torch.uint8)  # which are set and compared alone

# Operators by which ASGD makes the numbers of its state (step, mu), whose values its Python reads later. Optimizers
# that make them in the same way but do not read them (fused and capturable ones) leave them on the device.
_FILLED = {aten.zeros.default: 0, aten.ones.default: 1}


class HostTensors:
    """The tracked tensors of one trace. `values`: of each storage; `keep` has a tensor live as long as the trace."""

    def __init__(self, scope: Scope, keep: Callable[[torch.Tensor], None]) -> None:
        self.scope = scope
        self.values: dict[int, Expr] = {}
        self._keep = keep
        self._made: set[int] = set()  # storages of tensors that the step makes

    def lift(self, tensor: torch.Tensor) -> torch.Tensor:
        """Track a constant that the step makes: `torch.tensor(3.0)`."""
        self._keep(tensor)
        self._made.add(tensor.untyped_storage()._cdata)
        self.values[tensor.untyped_storage()._cdata] = self.scope.const(tensor.item())
        return tensor

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
        """(done, result). `done` is False for an operator that the host does not compute and that the device runs."""
        if func is aten._local_scalar_dense.default:
            found = self._value(args[0])
            if args[0].dtype == torch.bool:
                return True, bool(self.scope.guard(found))
            return True, self.scope.guard(found) if isinstance(found.value, bool) else self.scope.symbol(found)
        if kwargs.get("out") is not None:
            return False, None  # the result belongs into that tensor, as the device's operator writes it
        if func in _SAME:
            return True, args[0]
        if func.is_view:
            return self._view(func, args, kwargs)
        if func in _COPIES:
            return True, self._new(self._value(args[0]), args[0].dtype, args[0].shape)
        if func is aten._to_copy.default:
            return self._cast(args[0], kwargs)
        name = func.overloadpacket.__name__
        if name.startswith("_foreach_"):
            return self._foreach(name.removeprefix("_foreach_"), args, kwargs)
        if name in ("zero_", "fill_", "copy_"):
            return self._assign(name, args)
        if name in ("neg", "neg_") and len(args) == 1:
            return self._negate(name, args[0])
        if name in _COMPARISONS:
            return self._compare(name, *args)
        inplace = name.endswith("_")
        if inplace and isinstance(args[0], torch.Tensor) and _shape(args) != args[0].shape:
            return False, None  # torch refuses it
        if name.rstrip("_") not in _ARITHMETIC or not isinstance(args[0], torch.Tensor):
            return False, None
        if len(args) < 2 or kwargs.get("alpha", 1) != 1 or kwargs.get("rounding_mode") is not None or len(args) > 2:
            return False, None
        expr = self._binary(name.rstrip("_"), args[0], args[1])
        if expr is None:
            return False, None
        if inplace:
            self._set(args[0], expr)
            return True, args[0]
        return True, self._new(expr, args[0].dtype, _shape(args))

    def made(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
        """(done, a tracked 0-dim tensor) for an operator that makes one of a number: in optimizers that count in it,
        and where the step writes a number that changes into one element, as in `buffer[0] = n`. `done` is False for
        others, and for types that the host does not compute with."""
        if func is aten.scalar_tensor.default and is_symbol(args[0]):
            number = args[0]
        elif func in _FILLED and args and not args[0] and counting():
            number = _FILLED[func]
        else:
            return False, None
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        expr = self.scope.lift(number)
        if dtype not in _TYPES or (isinstance(expr.value, float) and not dtype.is_floating_point):
            return False, None
        if expr.constant:
            return True, self._new(self.scope.const(float(number) if dtype.is_floating_point else number), dtype, ())
        tensor = self._new(expr, dtype, ())
        return self._assign("fill_", (tensor, number))[0], tensor

    def _value(self, tensor: torch.Tensor) -> Expr:
        return self.values[tensor.untyped_storage()._cdata]

    def _set(self, tensor: torch.Tensor, expr: Expr) -> None:
        key = tensor.untyped_storage()._cdata
        self.values[key] = expr
        if expr.constant and key in self._made:  # where the step leaves it, it holds that
            with _disable_current_modes(), torch.no_grad():
                tensor.fill_(expr.value)

    def _new(self, expr: Expr, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        with _disable_current_modes():
            tensor = torch.zeros(shape, dtype=dtype)
        self._keep(tensor)
        self._made.add(tensor.untyped_storage()._cdata)
        self._set(tensor, expr)
        return tensor

    def _view(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
        """A view of the one element, as itself; others are made on the device."""
        with _disable_current_modes():
            view = func(*args, **kwargs)
        same = isinstance(view, torch.Tensor) and view.numel() == 1 and view.dtype == args[0].dtype
        return same, view if same else None

    def _operand(self, value: Any, dtype: torch.dtype) -> Expr | None:
        if isinstance(value, torch.Tensor):
            return self._value(value) if value.dtype == dtype else None
        if is_symbol(value) or isinstance(value, (int, float)):
            expr = self.scope.lift(value)
            if isinstance(expr.value, bool) != (dtype == torch.bool) or (
                not dtype.is_floating_point and isinstance(expr.value, float)
            ):
                return None
            return expr
        return None

    def _binary(self, name: str, left: torch.Tensor, right: Any) -> Expr | None:
        a, b = self._value(left), self._operand(right, left.dtype)
        if b is None:
            return None
        if name in _OF_INTEGERS:
            whole = left.dtype == torch.int64 and b.constant and b.value > 0
            return self.scope.apply(_OF_INTEGERS[name], a, b) if whole else None
        if left.dtype == torch.float32:
            return self.scope.apply(f"f32.{name}", a, b)
        if left.dtype == torch.float64:
            return self.scope.apply("truediv" if name == "div" else name, a, b)
        if left.dtype == torch.int64 and name != "div":
            return self.scope.apply(f"i64.{name}", a, b)
        return None

    def _compare(self, name: str, left: Any, right: Any) -> tuple[bool, Any]:
        """Of integers, as an average counts its updates."""
        if not isinstance(left, torch.Tensor) or left.dtype not in (torch.int64, torch.uint8):
            return False, None
        other = self._operand(right, left.dtype)
        if other is None:
            return False, None
        return True, self._new(self.scope.apply(name, self._value(left), other), torch.bool, _shape((left, right)))

    def _negate(self, name: str, tensor: torch.Tensor) -> tuple[bool, Any]:
        # No square roots and similar functions: torch's vectorised float32 ones are not correctly rounded.
        if not tensor.is_floating_point():
            return False, None
        expr = self.scope.apply("neg", self._value(tensor))
        if name == "neg_":
            self._set(tensor, expr)
            return True, tensor
        return True, self._new(expr, tensor.dtype, tensor.shape)

    def _assign(self, name: str, args: tuple[Any, ...]) -> tuple[bool, Any]:
        target = args[0]
        if _shape(args) != target.shape:
            return False, None  # torch refuses it
        expr = (
            self.scope.const(0.0 if target.is_floating_point() else 0)
            if name == "zero_"
            else self._operand(args[1], target.dtype)
        )
        if expr is None or target.dtype not in (*_TYPES, *_FLAGS):
            return False, None
        if target.dtype == torch.uint8 and not (expr.constant and 0 <= expr.value < 256):
            return False, None
        if target.dtype == torch.float32:
            expr = self.scope.apply("f32.cast", expr)
        elif target.dtype == torch.float64:
            expr = self.scope.apply("float", expr)
        self._set(target, expr)
        return True, target

    def _cast(self, tensor: torch.Tensor, kwargs: dict[str, Any]) -> tuple[bool, Any]:
        dtype = kwargs.get("dtype") or tensor.dtype
        expr = self._value(tensor)
        if dtype == tensor.dtype:
            return True, self._new(expr, dtype, tensor.shape)
        if dtype == torch.float32:
            return True, self._new(self.scope.apply("f32.cast", expr), dtype, tensor.shape)
        if dtype == torch.float64:
            return True, self._new(self.scope.apply("float", expr), dtype, tensor.shape)
        return False, None

    def _foreach(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
        if name.rstrip("_") not in _ARITHMETIC or kwargs.get("alpha", 1) != 1 or len(args) != 2:
            return False, None
        tensors, other = args
        others = other if isinstance(other, (list, tuple)) else [other] * len(tensors)
        if any(isinstance(each, torch.Tensor) and each.dim() for each in (*tensors, *others)):
            return False, None
        exprs = [self._binary(name.rstrip("_"), t, o) for t, o in zip(tensors, others, strict=True)]
        if any(e is None for e in exprs):
            return False, None
        if name.endswith("_"):
            for t, e in zip(tensors, exprs, strict=True):
                self._set(t, e)  # type: ignore[arg-type]
            return True, None
        return True, [self._new(e, t.dtype, ()) for t, e in zip(tensors, exprs, strict=True)]  # type: ignore[arg-type]


def _shape(args: Sequence[Any]) -> torch.Size:
    """That of the result of an operator on these."""
    return torch.Size(torch.broadcast_shapes(*(arg.shape for arg in args if isinstance(arg, torch.Tensor))))
