"""Operators on tracked 0-dim tensors (an optimizer's `step`), computed on the host.

The value of such a tensor depends only on step counts and hyperparameters, so it is computed as an expression and not
on the device. Then the result of `.item()` is known, and Python may decide by it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gpumux.capture.symbols import Expr, Scope, is_symbol

aten = torch.ops.aten

_ARITHMETIC = frozenset(("add", "sub", "mul", "div", "remainder", "floor_divide"))
_OF_INTEGERS = {"remainder": "mod", "floor_divide": "floordiv"}
_COMPARISONS = frozenset(("eq", "ne", "lt", "le", "gt", "ge"))
_SAME = {aten.detach.default, aten.alias.default, aten.lift_fresh.default}
_COPIES = {aten.clone.default}
_TYPES = (torch.float32, torch.float64, torch.int64)
_FLAGS = (torch.bool, torch.uint8)  # which are set and compared alone


class HostTensors:
    """The tracked tensors of one trace. `values`: of each storage; `keep` has a tensor live as long as the trace."""

    def __init__(self, scope: Scope, keep: Callable[[torch.Tensor], None]) -> None:
        self.scope = scope
        self.values: dict[int, Expr] = {}
        self._keep = keep

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
        """(done, result). `done` is False for an operator that the host does not compute and that the device runs."""
        if func is aten._local_scalar_dense.default:
            found = self._value(args[0])
            if args[0].dtype == torch.bool:
                return True, bool(self.scope.guard(found))
            return True, self.scope.guard(found) if isinstance(found.value, bool) else self.scope.symbol(found)
        if func in _SAME:
            return True, args[0]
        if func in _COPIES:
            return True, self._new(self._value(args[0]), args[0].dtype)
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
        return True, self._new(expr, args[0].dtype)

    def filled(self, number: int, dtype: torch.dtype | None) -> tuple[bool, Any]:
        """(done, a tracked 0-dim tensor that holds this number). `done` is False for a type that the host does not
        compute with."""
        kind = dtype or torch.get_default_dtype()
        if kind not in _TYPES:
            return False, None
        return True, self._new(self.scope.const(float(number) if kind.is_floating_point else number), kind)

    def _value(self, tensor: torch.Tensor) -> Expr:
        return self.values[tensor.untyped_storage()._cdata]

    def _set(self, tensor: torch.Tensor, expr: Expr) -> None:
        self.values[tensor.untyped_storage()._cdata] = expr

    def _new(self, expr: Expr, dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.zeros((), dtype=dtype)
        self._keep(tensor)
        self._set(tensor, expr)
        return tensor

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
            return self.scope.apply(name, a, b)
        return None

    def _compare(self, name: str, left: Any, right: Any) -> tuple[bool, Any]:
        """Of integers, as an average counts its updates."""
        if not isinstance(left, torch.Tensor) or left.dtype not in (torch.int64, torch.uint8):
            return False, None
        other = self._operand(right, left.dtype)
        if other is None:
            return False, None
        return True, self._new(self.scope.apply(name, self._value(left), other), torch.bool)

    def _negate(self, name: str, tensor: torch.Tensor) -> tuple[bool, Any]:
        # No square roots and similar functions: torch's vectorised float32 ones are not correctly rounded.
        if not tensor.is_floating_point():
            return False, None
        expr = self.scope.apply("neg", self._value(tensor))
        if name == "neg_":
            self._set(tensor, expr)
            return True, tensor
        return True, self._new(expr, tensor.dtype)

    def _assign(self, name: str, args: tuple[Any, ...]) -> tuple[bool, Any]:
        target = args[0]
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
            return True, self._new(expr, dtype)
        if dtype == torch.float32:
            return True, self._new(self.scope.apply("f32.cast", expr), dtype)
        if dtype == torch.float64:
            return True, self._new(self.scope.apply("float", expr), dtype)
        return False, None

    def _foreach(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
        if name.rstrip("_") not in _ARITHMETIC or kwargs.get("alpha", 1) != 1 or len(args) != 2:
            return False, None
        tensors, other = args
        others = other if isinstance(other, (list, tuple)) else [other] * len(tensors)
        exprs = [self._binary(name.rstrip("_"), t, o) for t, o in zip(tensors, others, strict=True)]
        if any(e is None for e in exprs):
            return False, None
        if name.endswith("_"):
            for t, e in zip(tensors, exprs, strict=True):
                self._set(t, e)  # type: ignore[arg-type]
            return True, None
        return True, [self._new(e, t.dtype) for t, e in zip(tensors, exprs, strict=True)]  # type: ignore[arg-type]
