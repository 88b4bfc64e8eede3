"""Rules for elementwise operators, in place or not: the same operator, with the model dimension first.

A number that differs between models becomes a tensor of B numbers, and the overload that takes a number becomes the
overload that takes a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gpumux.fuse.call import Call, Operand, flat
from gpumux.fuse.emit import Declined
from gpumux.fuse.rules.table import per_model, rule
from gpumux.fuse.template import Varying
from gpumux.program.ir import Op
from gpumux.program.operators import ALLOWED

# Pointwise operators that torch does not tag as such.
_MORE = frozenset(("copy_", "zero_", "fill_", "clone", "_to_copy", "zeros_like", "ones_like", "full_like", "empty_like",
                   "alias_copy", "detach_copy", "where", "masked_fill", "masked_fill_", "bernoulli.p", "nan_to_num",
                   "softplus_backward", "mish_backward", "_prelu_kernel", "_prelu_kernel_backward",
                   "rrelu_with_noise_backward", "fill", "zero"))  # fmt: skip
_NOT = frozenset(("renorm", "renorm_"))


def is_pointwise(func: Any) -> bool:
    name = func.overloadpacket.__name__
    return (torch.Tag.pointwise in func.tags or name in _MORE) and name not in _NOT and not name.startswith("_foreach")


def pointwise(call: Call) -> Any:
    """The rule of every operator for which `is_pointwise` is true."""
    tensors = [v for v in flat(call.args) if isinstance(v, Operand)]
    rank = max((t.dim for t in tensors), default=0)
    special = _SCALARS.get(call.name)
    varying = dict(call.varying())
    if varying and special is not None:
        return special(call, rank)
    # A gradient's kernel may need operands of one size, as oneDNN's of gelu does.
    whole = call.name.endswith("_backward")
    args = call.filled(lambda t: t.all(rank) if whole else operand(call, t, rank))
    func = call.func
    if varying:
        func = _tensor_overload(func, set(varying))
        dtype = tensors[0].dtype
        for name, value in varying.items():
            args[name] = call.vector(value, dtype, rank)
    return call.invoke(args, func)


def operand(call: Call, tensor: Operand, rank: int) -> torch.Tensor:
    """An operand that broadcasts with others of up to `rank` dimensions. A tensor without dimensions does not decide
    the result's type; its stacked form has a dimension, so it is converted first."""
    if tensor.alike:
        return tensor.one()
    made = tensor.all(rank)
    if tensor.dim == 0 and rank > 0:
        others = [v.dtype for v in call.operands() if v.dim > 0 and v.dtype != torch.bool]
        if others and tensor.dtype != torch.bool and tensor.dtype != others[0] and call.name != "copy_":
            wanted = torch.result_type(torch.empty(1, dtype=others[0]), torch.empty((), dtype=tensor.dtype))
            made = made.to(wanted)
    return made


def _tensor_overload(func: Any, names: set[str]) -> Any:
    """The overload with equal argument names that takes tensors for the arguments `names`."""
    arguments = [a.name for a in func._schema.arguments]
    for overload in func.overloadpacket.overloads():
        other = getattr(func.overloadpacket, overload)
        found = {a.name: a for a in other._schema.arguments}
        if list(found) == arguments and all("Tensor" in str(found[n].type) for n in names):
            same = all(
                str(found[a.name].type) == str(a.type) or a.name in names or "Tensor" in str(found[a.name].type)
                for a in func._schema.arguments
            )
            if same and not any(a.kwarg_only and a.alias_info is not None for a in other._schema.arguments):
                return other
    raise Declined(f"{', '.join(sorted(names))} differs between models and {func} takes no tensor for it")


# ---- numbers without an overload of their own ------------------------------------------------------


def _scaled_add(call: Call, rank: int) -> Any:
    """self + alpha * other, if alpha differs between models."""
    if "other" not in call.args or not isinstance(call["other"], Operand):
        return _added_number(call, rank)
    a, b = operand(call, call["self"], rank), operand(call, call["other"], rank)
    alpha = call["alpha"]
    if not isinstance(alpha, Varying):
        raise Declined("an addend that differs between models")
    v = call.vector(alpha, _float(call), rank)
    sign = -1 if call.name.startswith("sub") else 1
    if call.name.endswith("_"):
        return a.addcmul_(b, v, value=sign)
    return torch.addcmul(a, b, v, value=sign)


def _added_number(call: Call, rank: int) -> Any:
    a = operand(call, call["self"], rank)
    other, alpha = call["other"], call["alpha"]
    dtype = _float(call)
    v = call.vector(other, dtype, rank) if isinstance(other, Varying) else None
    w = call.vector(alpha, dtype, rank) if isinstance(alpha, Varying) else None
    addend = v * w if v is not None and w is not None else w * other if v is None and w is not None else v
    assert addend is not None
    kind: Any = {"add": torch.add, "sub": torch.sub, "add_": torch.Tensor.add_, "sub_": torch.Tensor.sub_}[call.name]
    return kind(a, addend, alpha=1 if w is not None else alpha)


def _scaled_product(call: Call, rank: int) -> Any:
    """self + value * tensor1 * tensor2 (or / tensor2)."""
    a, b, c = (operand(call, call[name], rank) for name in ("self", "tensor1", "tensor2"))
    scaled = b * call.vector(call["value"], _float(call), rank)
    name = call.name.removesuffix("_")
    if call.name.endswith("_"):
        return getattr(a, call.name)(scaled, c)
    return getattr(torch, name)(a, scaled, c)


def _interpolated(call: Call, rank: int) -> Any:
    a, b = operand(call, call["self"], rank), operand(call, call["end"], rank)
    weight = call.vector(call["weight"], _float(call), rank)
    return a.lerp_(b, weight) if call.name.endswith("_") else torch.lerp(a, b, weight)


def _filled(call: Call, rank: int) -> Any:
    v = call.vector(call["value"], _float(call), rank)
    a = operand(call, call["self"], rank)
    return a.copy_(v) if call.name.endswith("_") else torch.empty_like(a).copy_(v)


def _clamped(call: Call, rank: int) -> Any:
    a = operand(call, call["self"], rank)
    bounds = {
        k: call.vector(v, _float(call), rank) if isinstance(v, Varying) else v
        for k, v in ((k, call[k]) for k in ("min", "max"))
    }
    if not call.name.endswith("_"):
        for k, v in bounds.items():
            if v is not None:
                a = _bound(k, a, v)
        return a
    for k, v in bounds.items():
        if v is not None:
            getattr(a, f"clamp_{k}_")(v)
    return a


def _bound(kind: str, a: torch.Tensor, v: Any) -> torch.Tensor:
    made: torch.Tensor = getattr(torch, f"clamp_{kind}")(a, v)
    return made


def _float(call: Call) -> torch.dtype:
    """The dtype for numbers that are combined with this call's tensors."""
    return call["self"].dtype  # type: ignore[no-any-return]


_SCALARS: dict[str, Callable[[Call, int], Any]] = {
    "add": _scaled_add, "add_": _scaled_add, "sub": _scaled_add, "sub_": _scaled_add,
    "addcmul": _scaled_product, "addcmul_": _scaled_product, "addcdiv": _scaled_product, "addcdiv_": _scaled_product,
    "lerp": _interpolated, "lerp_": _interpolated, "fill_": _filled, "fill": _filled, "clamp": _clamped,
    "clamp_": _clamped,
}  # fmt: skip


@rule("full")
def full(call: Call) -> Any:
    """A new tensor of numbers that differ between models; one of equal numbers is made once."""
    value, size = call["fill_value"], call["size"]
    if not isinstance(value, Varying):
        raise Declined("nothing differs")
    dtype = getattr(torch, call.outputs()[0].dtype)  # type: ignore[union-attr]
    return call.vector(value, dtype, len(size)).expand(call.models, *size).clone(memory_format=torch.contiguous_format)


# ---- Optimizers over lists of tensors: the same operator on stacked lists. If numbers differ between models, one
# operator for each tensor, as a CPU runs such lists in any case.


_FOREACH = sorted(t.removeprefix("aten.") for t in ALLOWED if t.startswith("aten._foreach_"))
_REDUCING = ("_foreach_norm", "_foreach_max", "_foreach_mm")  # names without overload
_ALONE = {"List": ("Tensor", "default", "Tensor_Tensor"), "Tensor": ("Tensor",), "default": ("default",),
          "Scalar": ("Scalar", "default", "Tensor_Scalar"),
          "ScalarList": ("Scalar", "default", "Tensor_Scalar")}  # fmt: skip


@rule(*[t for t in _FOREACH if t.split(".")[0] not in _REDUCING])
def elementwise(call: Call) -> Any:
    if not call.varies and _lists_match(call):
        return call.invoke(call.filled(Operand.all))
    return _one_by_one(call)


def _lists_match(call: Call) -> bool:
    """Whether operands of one element have equally many dimensions, so that their model dimensions align."""
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
        made.append(pointwise(Call(call.placements, Op(target, alone[0], (*alone[1], *call.op.kwargs), out))))
    return made if call.op.outs else None


def _with_value(target: str, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]:
    """The arguments for a single tensor's operator: a factor that comes last in lists is passed by name."""
    if target.split(".")[1].removesuffix("_") in ("addcmul", "addcdiv"):
        return args[:3], tuple(("value", v) for v in args[3:])
    return args, ()


@rule("_foreach_norm.Scalar")
def norms(call: Call) -> Any:
    return [
        (
            torch.linalg.vector_norm(o.all(), call.number("ord"), list(range(1, o.dim + 1)), dtype=call["dtype"])
            if o.dim
            else o.all().abs()
        )
        for o in call["self"]
    ]


@rule("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
def fused_optimizer(call: Call) -> Any:
    """One call over stacked lists. The kernels walk memory in order, so that every tensor must have its parameter's
    strides, and they take one step count a parameter."""
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
            # Gradients are among these operands; only AMP's unscaling writes them.
            args[name] = [_as(o.all(), p, id(o.view) in written) for o, p in zip(value, params, strict=True)]
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
