"""Operators on tracked 0-dim tensors (an optimizer's `step`), carried out on the host.

Such a tensor's value depends on nothing but step counts and hyperparameters, so it is computed as an
expression instead of on the device: `.item()` on it is then known, and Python may decide by it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from gpumux.client.host import Expr, is_symbol

if TYPE_CHECKING:
    from gpumux.client.recorder import Recorder

aten = torch.ops.aten

_ARITHMETIC = {"add": "add", "sub": "sub", "mul": "mul", "div": "div"}
_SAME = {aten.detach.default, aten.alias.default, aten.lift_fresh.default}
_COPIES = {aten.clone.default}
_TYPES = (torch.float32, torch.float64, torch.int64)


def run(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
    """(done, result). Not done: the operator isn't one of ours, and runs on the device."""
    if func is aten._local_scalar_dense.default:
        return True, rec.scope.symbol(_value(rec, args[0]))
    if func in _SAME:
        return True, args[0]
    if func in _COPIES:
        return True, _new(rec, _value(rec, args[0]), args[0].dtype)
    if func is aten._to_copy.default:
        return _cast(rec, args[0], kwargs)
    name = func.overloadpacket.__name__
    if name.startswith("_foreach_"):
        return _foreach(rec, name.removeprefix("_foreach_"), args, kwargs)
    if name in ("zero_", "fill_", "copy_"):
        return _assign(rec, name, args)
    if name in ("neg", "neg_") and len(args) == 1:
        return _negate(rec, name, args[0])
    inplace = name.endswith("_")
    if name.rstrip("_") not in _ARITHMETIC or not isinstance(args[0], torch.Tensor):
        return False, None
    if len(args) < 2 or kwargs.get("alpha", 1) != 1 or kwargs.get("rounding_mode") is not None or len(args) > 2:
        return False, None
    expr = _binary(rec, name.rstrip("_"), args[0], args[1])
    if expr is None:
        return False, None
    if inplace:
        _set(rec, args[0], expr)
        return True, args[0]
    return True, _new(rec, expr, args[0].dtype)


def filled(rec: Recorder, number: int, dtype: torch.dtype | None) -> tuple[bool, Any]:
    """(done, a tracked 0-dim tensor that holds this number). Not done: a type whose arithmetic is the device's."""
    kind = dtype or torch.get_default_dtype()
    if kind not in _TYPES:
        return False, None
    return True, _new(rec, rec.scope.const(float(number) if kind.is_floating_point else number), kind)


def _value(rec: Recorder, tensor: torch.Tensor) -> Expr:
    return rec.host[tensor.untyped_storage()._cdata]


def _set(rec: Recorder, tensor: torch.Tensor, expr: Expr) -> None:
    rec.host[tensor.untyped_storage()._cdata] = expr


def _new(rec: Recorder, expr: Expr, dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.zeros((), dtype=dtype)
    rec.ledger.keep(tensor)
    _set(rec, tensor, expr)
    return tensor


def _operand(rec: Recorder, value: Any, dtype: torch.dtype) -> Expr | None:
    if isinstance(value, torch.Tensor):
        return _value(rec, value) if value.dtype == dtype else None
    if is_symbol(value) or isinstance(value, (int, float)):
        expr = rec.scope.lift(value)
        if isinstance(expr.value, bool) or (not dtype.is_floating_point and isinstance(expr.value, float)):
            return None
        return expr
    return None


def _binary(rec: Recorder, name: str, left: torch.Tensor, right: Any) -> Expr | None:
    a, b = _value(rec, left), _operand(rec, right, left.dtype)
    if b is None:
        return None
    if left.dtype == torch.float32:
        return rec.scope.apply(f"f32.{name}", a, b)
    if left.dtype == torch.float64:
        return rec.scope.apply("truediv" if name == "div" else name, a, b)
    if left.dtype == torch.int64 and name != "div":
        return rec.scope.apply(name, a, b)
    return None


def _negate(rec: Recorder, name: str, tensor: torch.Tensor) -> tuple[bool, Any]:
    # No square roots and the like here: torch's vectorised float32 ones are not correctly rounded.
    if not tensor.is_floating_point():
        return False, None
    expr = rec.scope.apply("neg", _value(rec, tensor))
    if name == "neg_":
        _set(rec, tensor, expr)
        return True, tensor
    return True, _new(rec, expr, tensor.dtype)


def _assign(rec: Recorder, name: str, args: tuple[Any, ...]) -> tuple[bool, Any]:
    target = args[0]
    expr = (
        rec.scope.const(0.0 if target.is_floating_point() else 0)
        if name == "zero_"
        else _operand(rec, args[1], target.dtype)
    )
    if expr is None or target.dtype not in _TYPES:
        return False, None
    if target.dtype == torch.float32:
        expr = rec.scope.apply("f32.cast", expr)
    elif target.dtype == torch.float64:
        expr = rec.scope.apply("float", expr)
    _set(rec, target, expr)
    return True, target


def _cast(rec: Recorder, tensor: torch.Tensor, kwargs: dict[str, Any]) -> tuple[bool, Any]:
    dtype = kwargs.get("dtype") or tensor.dtype
    expr = _value(rec, tensor)
    if dtype == tensor.dtype:
        return True, _new(rec, expr, dtype)
    if dtype == torch.float32:
        return True, _new(rec, rec.scope.apply("f32.cast", expr), dtype)
    if dtype == torch.float64:
        return True, _new(rec, rec.scope.apply("float", expr), dtype)
    return False, None


def _foreach(rec: Recorder, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
    if name.rstrip("_") not in _ARITHMETIC or kwargs.get("alpha", 1) != 1 or len(args) != 2:
        return False, None
    tensors, other = args
    others = other if isinstance(other, (list, tuple)) else [other] * len(tensors)
    exprs = [_binary(rec, name.rstrip("_"), t, o) for t, o in zip(tensors, others, strict=True)]
    if any(e is None for e in exprs):
        return False, None
    if name.endswith("_"):
        for t, e in zip(tensors, exprs, strict=True):
            _set(rec, t, e)  # type: ignore[arg-type]
        return True, None
    return True, [_new(rec, e, t.dtype) for t, e in zip(tensors, exprs, strict=True)]  # type: ignore[arg-type]
