"""Optimizers over lists of tensors: the same operator on stacked lists, or, where numbers differ between models, one
operator for each tensor (which is what a CPU does with such lists in any case)."""

from __future__ import annotations

from typing import Any

import torch

from gpumux.fuse.call import Call, Operand
from gpumux.fuse.emit import Declined
from gpumux.fuse.rules.pointwise import pointwise
from gpumux.fuse.rules.table import per_model, rule
from gpumux.program.allowlist import ALLOWED
from gpumux.program.ir import Op

_FOREACH = sorted(t.removeprefix("aten.") for t in ALLOWED if t.startswith("aten._foreach_"))
_REDUCING = ("_foreach_norm", "_foreach_max", "_foreach_mm")  # without overload
_ALONE = {"List": ("Tensor", "default", "Tensor_Tensor"), "Tensor": ("Tensor",), "default": ("default",),
          "Scalar": ("Scalar", "default", "Tensor_Scalar"), "ScalarList": ("Scalar", "default", "Tensor_Scalar")}  # fmt: skip


@rule(*[t for t in _FOREACH if t.split(".")[0] not in _REDUCING])
def elementwise(call: Call) -> Any:
    if not call.varies and _lists_match(call):
        return call.invoke(call.filled(Operand.all))
    return _one_by_one(call)


def _lists_match(call: Call) -> bool:
    """Whether operands that meet have the same dimensions: the model dimension in front then meets itself."""
    lists = [v for v in call.args.values() if isinstance(v, list) and v and isinstance(v[0], Operand)]
    alone = [v for v in call.args.values() if isinstance(v, Operand)]
    return not alone and all(len({o.dim for o in each}) == 1 for each in zip(*lists, strict=True))


def _one_by_one(call: Call) -> Any:
    base, overload = call.name.removeprefix("_foreach_"), call.target.split(".")[2]
    target = next((f"aten.{base}.{o}" for o in _ALONE.get(overload, ()) if f"aten.{base}.{o}" in ALLOWED), None)
    if target is None:
        raise Declined(f"there is no operator of single tensors for {call.target}")
    made = []
    lists = list(call.op.args)
    count = len(call["self"])
    outs = call.op.outs[0] if call.op.outs else ()
    for i in range(count):
        args = tuple(a[i] if isinstance(a, tuple) else a for a in lists)
        alone = _with_value(target, args)
        out = (outs[i],) if isinstance(outs, tuple) and outs else (None,)
        made.append(pointwise(Call(call.homes, Op(target, alone[0], (*alone[1], *call.op.kwargs), out))))
    return made if call.op.outs else None


def _with_value(target: str, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]:
    """A factor that comes last in lists is given by name to a single tensor's operator."""
    if target.split(".")[1].removesuffix("_") in ("addcmul", "addcdiv"):
        return args[:3], tuple(("value", v) for v in args[3:])
    return args, ()


@rule("_foreach_norm.Scalar")
def norms(call: Call) -> Any:
    return [
        torch.linalg.vector_norm(o.all(), call.number("ord"), list(range(1, o.dim + 1)), dtype=call["dtype"])
        if o.dim
        else o.all().abs()
        for o in call["self"]
    ]


@rule("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
def fused_optimizer(call: Call) -> Any:
    """One call over stacked lists. The kernels walk memory, so that every tensor must lie as its parameter does, and they take
    one step count a parameter."""
    if call.varies:
        raise Declined("its numbers differ between models")
    params = [o.all() for o in call["self"]]
    written = {id(o.view) for o in call.written}
    args: dict[str, Any] = {}
    for name, value in call.args.items():
        if name == "state_steps":
            if not all(o.alike for o in value):
                raise Declined("step counts that differ between models")
            args[name] = [o.one() for o in value]
        elif isinstance(value, list) and value and isinstance(value[0], Operand):
            args[name] = [
                _as(o.all(), p, id(o.view) in written) for o, p in zip(value, params, strict=True)
            ]  # gradients are written by none but AMP's unscaling
        elif isinstance(value, Operand):
            if not value.alike:
                raise Declined(f"{name} differs between models")
            args[name] = value.one()
        else:
            args[name] = value
    return call.invoke(args)


def _as(tensor: torch.Tensor, like: torch.Tensor, written: bool) -> torch.Tensor:
    if tensor.stride() == like.stride():
        return tensor
    if written or not like.is_contiguous():
        raise Declined("tensors that lie in memory otherwise than their parameters")
    return tensor.clone(memory_format=torch.contiguous_format)


per_model("its numbers are one for all tensors", "_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
