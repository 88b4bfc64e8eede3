"""Operators of a Program on a GPU, in forms that CUDA graphs can capture.

A captured kernel keeps the numbers it was captured with. Learning rates and bias corrections change from step to step,
so operators that take a host scalar run in another form: the step's numbers lie in device memory, and the form reads
them there. Each form computes what the operator is defined to compute, in the precision that torch's kernel computes in
(float32 for the half types); sums of products may round once more than torch's fused kernel. An operator without such a
form is refused when the program is loaded, so that no stale number is captured.

Forms are the same operator by operator and captured, so that a job's results don't change at capture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy
import torch
from torch import Tensor

from gpumux.device.cuda import kernels
from gpumux.device.run.schema import DTYPES, constant
from gpumux.errors import ProgramError
from gpumux.program import onednn_lstm
from gpumux.program.check import schema
from gpumux.program.ir import ITEM_BYTES, Arg, Complex, Op, Out, Program, ScalarRef, Tag, TensorRef, View
from gpumux.program.validate import leaves, op_args

# ---- Operators whose CUDA kernels read a tensor's value on the host. That waits for the GPU, so no capture allows it.
#
# Operators that only check a value, or take one as a number, are replaced by others that compute the same from the same
# random numbers, without the check. The rest is refused when the program is loaded.


def masked_fill(x: Tensor, mask: Tensor, value: Tensor) -> Tensor:
    return torch.where(mask, value.to(x.dtype), x)


def masked_fill_(x: Tensor, mask: Tensor, value: Tensor) -> Tensor:
    return x.copy_(masked_fill(x, mask, value))


def index_fill_(x: Tensor, dim: int, index: Tensor, value: Tensor) -> Tensor:
    if not x.dim():
        return x.copy_(value) if index.numel() else x
    size = list(x.shape)
    size[dim] = index.numel()
    return x.index_copy_(dim, index.reshape(-1), value.to(x.dtype).expand(size))


def index_fill(x: Tensor, dim: int, index: Tensor, value: Tensor) -> Tensor:
    return index_fill_(x.clone(), dim, index, value)


def normal(mean: Tensor | float, std: Tensor, **_: Any) -> Tensor:
    """normal with a tensor of deviations. A negative deviation is not refused: it mirrors the draw."""
    like, shape = (
        (mean, torch.broadcast_shapes(std.shape, mean.shape)) if isinstance(mean, Tensor) else (std, std.shape)
    )
    drawn = torch.empty(shape, dtype=like.dtype, device=std.device).normal_()
    return drawn.mul_(std).add_(mean)


def multinomial(weights: Tensor, count: int, replacement: bool = False, **_: Any) -> Tensor:
    """multinomial, of one draw or without replacement. Weights that are negative, infinite or all zero are not refused:
    the result is undefined then."""
    if replacement and count != 1:
        return torch.multinomial(weights, count, True)  # this kernel checks nothing
    raced = weights / torch.empty_like(weights).exponential_()
    if count == 1:
        return raced.argmax(-1, keepdim=True)
    return raced.topk(count, -1).indices


CAPTURABLE_FORMS: dict[str, Callable[..., Any]] = {
    "aten.masked_fill.Tensor": masked_fill,
    "aten.masked_fill_.Tensor": masked_fill_,
    "aten.index_fill.int_Tensor": index_fill,
    "aten.index_fill_.int_Tensor": index_fill_,
    "aten.normal.float_Tensor": normal,
    "aten.normal.Tensor_Tensor": normal,
    "aten.multinomial.default": multinomial,
}

# Operators whose results pass through the host, or whose kernels report to it whether they succeeded.
_REFUSED = {
    "aten.linalg_eig.default": "use torch.linalg.eigh for symmetric matrices",
    "aten._linalg_eigvals.default": "use torch.linalg.eigvalsh for symmetric matrices",
    "aten.cholesky.default": "use torch.linalg.cholesky_ex",
}


def refuse_uncapturable(index: int, op: Op) -> None:
    """Raise ProgramError for an operator that no capture allows. Its remedy names what to use instead."""
    remedy = _REFUSED.get(op.target)
    if op.target == "aten.histc.default":
        least, most = (*op.args[2:4], 0, 0)[:2] if len(op.args) > 2 else (0, 0)
        remedy = "name the bounds of the histogram: min and max" if least == most else None
    if remedy is not None:
        raise ProgramError(
            f"operator {index} ({op.target}) asks the GPU for a value, for which captured work can't wait",
            f"{remedy}, do it outside the step, or use --device cpu",
        )


# ---- Steps of torch's fused optimizers as operators over lists, for hyperparameters that lie in device memory.
#
# torch's fused kernels read the learning rate from memory, but no other number. If another number changes from step to
# step (momentum under OneCycleLR), the same formulas run operator by operator, in the precision of the kernels, and
# slower.


Value = Tensor | float | int
Lists = list[Tensor]
TEMPORARY_LISTS = 6  # at most at once, each as large as the parameters; half types need copies in float32 besides


def adam_(
    params: Lists,
    grads: Lists,
    averages: Lists,
    squares: Lists,
    greatest: Lists,
    steps: Lists,
    *,
    lr: Value,
    beta1: Value,
    beta2: Value,
    weight_decay: Value,
    eps: Value,
    amsgrad: bool,
    maximize: bool,
    decoupled: bool = False,
) -> None:
    """A step of Adam, or of AdamW if `decoupled`. `steps` are incremented already, as torch does before its kernel."""
    if decoupled:
        torch._foreach_mul_(params, _tensor(1 - lr * weight_decay, params))
        grads = list(torch._foreach_neg(grads) if maximize else grads)
    else:
        grads = _decayed(params, grads, weight_decay, maximize)
    _blend_(averages, grads, beta1)
    _blend_(squares, list(torch._foreach_mul(grads, grads)), beta2)
    if amsgrad:
        torch._foreach_maximum_(greatest, squares)
    count = torch.stack(list(steps)).to(averages[0].dtype)
    first, second = (1 - torch.pow(_tensor(beta, params), count) for beta in (beta1, beta2))
    bottom = list(torch._foreach_sqrt(greatest if amsgrad else squares))
    torch._foreach_div_(bottom, list(second.sqrt().unbind()))
    _add_to_all(bottom, _tensor(eps, params))
    update = torch._foreach_div(averages, bottom)
    torch._foreach_mul_(update, list((_tensor(lr, params) / first).unbind()))
    torch._foreach_sub_(params, update)


def sgd_(
    params: Lists,
    grads: Lists,
    buffers: Lists,
    *,
    weight_decay: Value,
    momentum: Value,
    lr: Value,
    dampening: Value,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
) -> None:
    """A step of SGD. `buffers` is empty without momentum."""
    grads = _decayed(params, grads, weight_decay, maximize)
    if buffers:
        if is_first_step:
            torch._foreach_copy_(buffers, grads)
        else:
            torch._foreach_mul_(buffers, _tensor(momentum, params))
            torch._foreach_add_(buffers, torch._foreach_mul(grads, _tensor(1 - dampening, params)))
        if nesterov:
            torch._foreach_add_(grads, torch._foreach_mul(buffers, _tensor(momentum, params)))
        else:
            grads = list(buffers)
    torch._foreach_sub_(params, torch._foreach_mul(grads, _tensor(lr, params)))


def _decayed(params: Lists, grads: Lists, weight_decay: Value, maximize: bool) -> Lists:
    """The gradients of the minimised loss plus weight decay, as a new list."""
    decay = torch._foreach_mul(params, _tensor(weight_decay, params))
    (torch._foreach_sub_ if maximize else torch._foreach_add_)(decay, grads)
    return list(decay)


def _blend_(averages: Lists, values: Lists, beta: Value) -> None:
    torch._foreach_mul_(averages, _tensor(beta, averages))
    torch._foreach_add_(averages, torch._foreach_mul(values, _tensor(1 - beta, averages)))


def _tensor(value: Value, beside: Lists) -> Tensor:
    """A number as operators over lists take it."""
    if isinstance(value, Tensor):
        return value.to(beside[0].dtype)
    return torch.full((), value, dtype=beside[0].dtype, device=beside[0].device)


FUSED_STEPS: dict[str, Callable[..., None]] = {"_fused_adam_": adam_, "_fused_adamw_": adam_, "_fused_sgd_": sgd_}


def fused_step(name: str, lists: Sequence[Lists], numbers: dict[str, Any]) -> None:
    """The step of the fused operator `name`. Half types are computed in float32, as in its kernel."""
    options = {"decoupled": True} if name == "_fused_adamw_" else {}
    exact = [[x.float() if x.dtype in (torch.float16, torch.bfloat16) else x for x in xs] for xs in lists]
    FUSED_STEPS[name](*exact, **numbers, **options)
    for mine, computed in zip(lists, exact, strict=True):
        changed = [(x, y) for x, y in zip(mine, computed, strict=True) if x is not y]
        if changed:
            torch._foreach_copy_([x for x, _ in changed], [y for _, y in changed])


# ---- the step's numbers in device memory


_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Number:
    """One host scalar of the current step, in device memory, 0-dimensional in each type a kernel may want.
    `is_float`: as the client declared it."""

    f64: Tensor
    f32: Tensor
    i64: Tensor
    is_float: bool

    def beside(self, dtype: torch.dtype) -> Tensor:
        """The number as a kernel that computes on `dtype` takes it."""
        if dtype == torch.float64:
            return self.f64
        if dtype in (torch.float32, *_HALF):
            return self.f32
        if dtype.is_complex:
            return self.f64.to(dtype)
        return self.f32 if self.is_float else self.i64  # integers with a float are computed as floats

    def value(self, dtype: torch.dtype) -> Tensor:
        """The number as an element of a tensor of `dtype`."""
        return (self.f64 if self.is_float else self.i64).to(dtype)


Scalar = Number | float | int


class NumberTable:
    """The step's scalars in one block of device memory: as float64, int64 and float32, one after the other."""

    BYTES = 8 + 8 + 4

    def __init__(self, block: Tensor, program: Program) -> None:
        count = len(program.scalars)
        f64 = block[: 8 * count].view(torch.float64)
        i64 = block[8 * count : 16 * count].view(torch.int64)
        f32 = block[16 * count : 20 * count].view(torch.float32)
        self.vectors = (f64, i64, f32)
        self.numbers = self.of(self.vectors, program)

    @staticmethod
    def of(vectors: tuple[Tensor, Tensor, Tensor], program: Program) -> list[Number]:
        """The numbers in three vectors, of float64, int64 and float32."""
        f64, i64, f32 = vectors
        return [Number(f64[i], f32[i], i64[i], kind == "float") for i, kind in enumerate(program.scalars)]

    @staticmethod
    def write(memory: memoryview, values: Sequence[float | int], kinds: Sequence[str]) -> None:
        """Write the same block on the host. Raises OverflowError for an integer of more than 64 bits."""
        count = len(values)
        if not count:
            return
        f64 = numpy.frombuffer(memory, numpy.float64, count)
        i64 = numpy.frombuffer(memory, numpy.int64, count, 8 * count)
        f32 = numpy.frombuffer(memory, numpy.float32, count, 16 * count)
        f64[:] = values
        with numpy.errstate(over="ignore"):  # beyond float32 is infinity, as on the device
            f32[:] = f64
        for i, kind in enumerate(kinds):
            if kind == "int":
                i64[i] = values[i]


# ---- arithmetic of one tensor and one number


def _beside(x: Tensor, s: Scalar) -> Tensor | float | int:
    return s.beside(x.dtype) if isinstance(s, Number) else s


def _widened(x: Tensor) -> Tensor:
    return x.float() if x.dtype in _HALF else x


def _elementwise(compute: Callable[..., Tensor]) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """The functional and the in-place form of a formula. The formula takes numbers as 0-dimensional tensors, and
    tensors in the precision that kernels compute in; its last operator writes to `out`. Formulas of `_PROMOTING` take
    tensors of half types as they are."""

    def computed(x: Tensor, out: Tensor | None, args: Any, kwargs: Any) -> Tensor:
        operand = _operand
        if x.dtype in _HALF:
            if compute in _PROMOTING and x.dim():
                operand, out = _vector, torch.empty_like(x) if out is None else out
            else:
                made = compute(_widened(x), *(_operand(x, a) for a in args), out=None,
                               **{k: _operand(x, a) for k, a in kwargs.items()})  # fmt: skip
                made = made.to(x.dtype) if made.is_floating_point() and out is None else made
                return made if out is None else out.copy_(made)
        return compute(x, *(operand(x, a) for a in args), out=out, **{k: operand(x, a) for k, a in kwargs.items()})

    def functional(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return computed(x, None, args, kwargs)

    def in_place(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return computed(x, x, args, kwargs)

    return functional, in_place


def _operand(x: Tensor, arg: Any) -> Any:
    if isinstance(arg, Number):
        return arg.beside(x.dtype)
    return _widened(arg) if isinstance(arg, Tensor) else arg


def _vector(x: Tensor, arg: Any) -> Any:
    return arg.beside(x.dtype).view(1) if isinstance(arg, Number) else arg


def _times(x: Any, alpha: Any) -> Any:
    return x if isinstance(alpha, int) and alpha == 1 else x * alpha


def _scaled(fresh: Tensor, alpha: Any) -> Tensor:
    """`_times` in place, for a tensor that nothing else refers to."""
    one = isinstance(alpha, int) and alpha == 1
    return fresh.mul_(alpha) if fresh.is_floating_point() and not one else _times(fresh, alpha)


def _add(x: Tensor, other: Any, alpha: Any = 1, *, out: Tensor | None) -> Tensor:
    return torch.add(x, _times(other, alpha), out=out)


def _sub(x: Tensor, other: Any, alpha: Any = 1, *, out: Tensor | None) -> Tensor:
    return torch.sub(x, _times(other, alpha), out=out)


def _rsub(x: Tensor, other: Any, alpha: Any = 1, *, out: Tensor | None) -> Tensor:
    return torch.add(_times(x, alpha).neg(), other, out=out)


def _div(x: Tensor, other: Any, *, out: Tensor | None) -> Tensor:
    if x.is_cuda and x.is_floating_point() and isinstance(other, Tensor):
        # torch's kernel multiplies floats by the reciprocal of a number that is known on the host.
        return torch.mul(x, torch.reciprocal(other), out=out)
    return torch.div(x, other, out=out)


def _addcmul(x: Tensor, a: Tensor, b: Tensor, value: Any = 1, *, out: Tensor | None) -> Tensor:
    return torch.add(x, _scaled(_widened(a) * b, value), out=out)


def _addcdiv(x: Tensor, a: Tensor, b: Tensor, value: Any = 1, *, out: Tensor | None) -> Tensor:
    return torch.add(x, _scaled(_widened(a) / b, value), out=out)


def _clamp(x: Tensor, least: Any = None, most: Any = None, *, out: Tensor | None) -> Tensor:
    if least is None:
        return torch.clamp(x, max=most, out=out)
    least_done = torch.clamp(x, min=least, out=out)
    return least_done if most is None else torch.clamp(least_done, max=most, out=out)


def _clamp_max(x: Tensor, most: Any, *, out: Tensor | None) -> Tensor:
    return _clamp(x, None, most, out=out)


def _softshrink(x: Tensor, width: Any = 0.5, *, out: Tensor | None) -> Tensor:
    return torch.sub(x, torch.clamp(x, -width, width), out=out)


# Formulas in which every operator that rounds takes a float32 of one dimension or more. torch then computes in float32
# and rounds once, to `out`, without copies of the tensors in float32. A number of 0 dimensions would be rounded to the
# tensors' type.
_PROMOTING = frozenset({_add, _sub, torch.mul, _div, torch.pow, _addcmul, _addcdiv})
_FORMULAS: dict[str, Callable[..., Tensor]] = {
    "add.Scalar": _add, "sub.Scalar": _sub, "rsub.Scalar": _rsub, "mul.Scalar": torch.mul, "div.Scalar": _div,
    "pow.Tensor_Scalar": torch.pow, "add.Tensor": _add, "sub.Tensor": _sub, "addcmul.default": _addcmul,
    "addcdiv.default": _addcdiv, "lerp.Scalar": torch.lerp, "clamp.default": _clamp, "clamp_min.default": _clamp,
    "clamp_max.default": _clamp_max, "eq.Scalar": torch.eq, "ne.Scalar": torch.ne, "lt.Scalar": torch.lt,
    "le.Scalar": torch.le, "gt.Scalar": torch.gt, "ge.Scalar": torch.ge, "softshrink.default": _softshrink,
}  # fmt: skip
_IN_PLACE_NAMES = {"pow.Tensor_Scalar": "pow_.Scalar"}


# ---- tensors made of a number


def _fill_(x: Tensor, value: Number) -> Tensor:
    return x.copy_(value.value(x.dtype))


def _full(size: Sequence[int], value: Number, *, dtype: torch.dtype | None = None, **where: Any) -> Tensor:
    dtype = dtype or (torch.get_default_dtype() if value.is_float else torch.int64)
    return torch.empty(size, dtype=dtype, **where).copy_(value.value(dtype))


def _full_like(x: Tensor, value: Number, **options: Any) -> Tensor:
    return _fill_(torch.empty_like(x, **options), value)


def _scalar_tensor(value: Number, *, dtype: torch.dtype | None = None, **where: Any) -> Tensor:
    return _full((), value, dtype=dtype or torch.get_default_dtype(), **where)


def _masked_fill(x: Tensor, mask: Tensor, value: Number) -> Tensor:
    return masked_fill(x, mask, value.value(x.dtype))


def _masked_fill_(x: Tensor, mask: Tensor, value: Number) -> Tensor:
    return masked_fill_(x, mask, value.value(x.dtype))


def _power_of(value: Number, x: Tensor) -> Tensor:
    return torch.pow(value.beside(x.dtype), _widened(x)).to(x.dtype)


# ---- lists of tensors

# By overload: Python's torch._foreach_add_ takes a 0-dimensional tensor as a number, and copies it to the host.
_add_to_all = torch.ops.aten._foreach_add_.Tensor
_multiply_all = torch.ops.aten._foreach_mul_.Tensor
_divide_all = torch.ops.aten._foreach_div_.Tensor
_products = torch.ops.aten._foreach_mul.Tensor


def _same(scalars: Any, count: int) -> Scalar | None:
    """The one number for all tensors of a list; None if they have different ones."""
    if not isinstance(scalars, list):
        return scalars  # type: ignore[no-any-return]
    first = scalars[0]
    return first if all(s is first for s in scalars) and len(scalars) == count else None


def _alike(xs: Sequence[Tensor]) -> bool:
    return len({x.dtype for x in xs}) == 1 and xs[0].dtype not in _HALF and xs[0].is_floating_point()


def _foreach(single: Callable[..., Tensor], together: Callable[..., None] | None) -> Callable[..., None]:
    """In place: all tensors in one call if they have one number and one type, else one by one with `single`."""

    def run(xs: list[Tensor], *args: Any, **kwargs: Any) -> None:
        *lists, scalars = [*args, *kwargs.values()]
        one = _same(scalars, len(xs))
        if together is not None and one is not None and _alike([*xs, *[x for tensors in lists for x in tensors]]):
            together(xs, *lists, _beside(xs[0], one))
            return
        each = scalars if isinstance(scalars, list) else [scalars] * len(xs)
        for x, *rest, s in zip(xs, *lists, each, strict=True):
            single(x, *rest, s)

    return run


def _out_of_place(run: Callable[..., None]) -> Callable[..., list[Tensor]]:
    def functional(xs: list[Tensor], *args: Any, **kwargs: Any) -> list[Tensor]:
        made = [x.clone() for x in xs]
        run(made, *args, **kwargs)
        return made

    return functional


def _multiplied(fresh: tuple[Tensor, ...], value: Tensor) -> tuple[Tensor, ...]:
    """The products, in place: a second list may be as large as all parameters. Nothing else refers to `fresh`."""
    _multiply_all(fresh, value)
    return fresh


def _add_list(xs: list[Tensor], others: list[Tensor], alpha: Tensor) -> None:
    torch._foreach_add_(xs, _products(others, alpha))


def _sub_list(xs: list[Tensor], others: list[Tensor], alpha: Tensor) -> None:
    torch._foreach_sub_(xs, _products(others, alpha))


def _addcmul_list(xs: list[Tensor], a: list[Tensor], b: list[Tensor], value: Tensor) -> None:
    torch._foreach_addcmul_(xs, _products(a, value), b)


def _addcdiv_list(xs: list[Tensor], a: list[Tensor], b: list[Tensor], value: Tensor) -> None:
    torch._foreach_addcdiv_(xs, _products(a, value), b)


def _fused(name: str) -> Callable[..., None]:
    """A fused optimizer whose numbers lie in device memory. torch's kernel reads the learning rate there; other numbers
    take `fused_step`."""
    kernel = getattr(torch.ops.aten, name).tensor_lr

    def run(*lists: list[Tensor], lr: Scalar, **others: Any) -> None:
        if not any(isinstance(value, Number) for value in others.values()):
            assert isinstance(lr, Number)
            kernel(*lists, lr=lr.f32, **others)
            return
        unscaled = {key: value for key, value in others.items() if key not in ("grad_scale", "found_inf")}
        double = lists[0][0].dtype == torch.float64
        values = {"lr": lr, **unscaled}
        numbers = {k: (v.f64 if double else v.f32) if isinstance(v, Number) else v for k, v in values.items()}
        fused_step(name, lists, numbers)

    return run


def _lerp_list(xs: list[Tensor], ends: list[Tensor], weight: Tensor) -> None:
    torch._foreach_add_(xs, _multiplied(torch._foreach_sub(ends, xs), weight))


def _functions() -> dict[str, Callable[..., Any]]:
    table: dict[str, Callable[..., Any]] = {
        "fill_.Scalar": _fill_, "fill.Scalar": lambda x, value: _fill_(torch.empty_like(x), value),
        "full.default": _full, "full_like.default": _full_like, "scalar_tensor.default": _scalar_tensor,
        "masked_fill.Scalar": _masked_fill, "masked_fill_.Scalar": _masked_fill_, "pow.Scalar": _power_of,
        "_foreach_pow.ScalarAndTensor": lambda value, xs: [_power_of(value, x) for x in xs],
    }  # fmt: skip
    for name, formula in _FORMULAS.items():
        functional, in_place = _elementwise(formula)
        base, overload = name.split(".")
        table[name] = functional
        table[_IN_PLACE_NAMES.get(name, f"{base}_.{overload}")] = in_place

    def foreach(names: str, single: str, together: Callable[..., Any]) -> None:
        run = _foreach(table[single], together)
        for name in names.split():
            base, overload = name.split(".")
            table[f"_foreach_{base}_.{overload}"] = run
            table[f"_foreach_{base}.{overload}"] = _out_of_place(run)

    foreach("add.Scalar add.ScalarList", "add_.Scalar", _add_to_all)
    foreach("sub.Scalar sub.ScalarList", "sub_.Scalar", lambda xs, s: _add_to_all(xs, -s))
    foreach("mul.Scalar mul.ScalarList", "mul_.Scalar", _multiply_all)
    foreach("div.Scalar div.ScalarList", "div_.Scalar", _divide_all)
    foreach("add.List", "add_.Tensor", _add_list)
    foreach("sub.List", "sub_.Tensor", _sub_list)
    foreach("addcmul.Scalar addcmul.ScalarList", "addcmul_.default", _addcmul_list)
    foreach("addcdiv.Scalar addcdiv.ScalarList", "addcdiv_.default", _addcdiv_list)
    foreach("lerp.Scalar lerp.ScalarList", "lerp_.Scalar", _lerp_list)
    table |= {f"{name}.default": _fused(name) for name in FUSED_STEPS}
    return {f"aten.{name}": function for name, function in table.items()}


FORMS = _functions()
_LIST_MAKERS = frozenset(
    f"aten._foreach_{base}{ending}"
    for base in ("add", "sub", "addcmul", "addcdiv", "lerp")
    for ending in (".List", "_.List", ".Scalar", "_.Scalar", ".ScalarList", "_.ScalarList")
    if (base in ("add", "sub")) == ending.endswith(".List")
)  # fmt: skip


def form_temporary_bytes(program: Program, op: Op) -> int:
    """Bytes of the temporary lists that an operator's form makes, which the Program does not declare."""
    if not takes_numbers(op) or not isinstance(op.args[0], tuple):
        return 0
    views = [program.views[leaf.view] for leaf in op.args[0] if isinstance(leaf, TensorRef)]
    nbytes = sum(prod(view.size) * ITEM_BYTES[view.dtype] for view in views)
    if op.target in _LIST_MAKERS:
        return nbytes
    name = op.target.removeprefix("aten.").removesuffix(".default")
    if name in FUSED_STEPS and any(isinstance(value, ScalarRef) for key, value in op.kwargs if key != "lr"):
        return TEMPORARY_LISTS * sum(4 * prod(view.size) for view in views) if views else 0
    return 0


def takes_numbers(op: Op) -> bool:
    """Whether a host scalar is among the operator's arguments."""
    return any(isinstance(leaf, ScalarRef) for leaf in leaves(op_args(op)))


def form(index: int, op: Op) -> Callable[..., Any]:
    """The form of an operator that reads its numbers from device memory. Raises ProgramError when there is none."""
    known = FORMS.get(op.target)
    if known is None:
        schema(op.target)  # an operator this torch lacks is another error
        raise ProgramError(
            f"operator {index} ({op.target}) takes a number that changes from step to step, which a captured piece"
            " can't",
            "pass the number as a tensor argument of the step, or use --device cpu",
        )
    return known


# ---- Programs traced on the CPU, run on another device.
#
# A client needs no GPU: it traces on the CPU, and its Program names no device (ir.Tag: "the device the job runs on").
# Nearly all operators are the same on both. The others are here: operators that only the CPU has, replaced by others;
# operators that make tensors, which take the device as an argument; random numbers that are drawn twice; and layouts
# that kernels choose otherwise than the Program declares. What can't run is refused by name at load.


_FORMS: dict[str, Callable[..., Any]] = {**CAPTURABLE_FORMS, **kernels.FORMS}
_COMPILED: dict[str, Callable[..., Any]] = {**CAPTURABLE_FORMS, **kernels.COMPILED}

# Recomputation draws an operator's numbers again. On a GPU the first draw is kept instead. That is the same only if the
# numbers depend on nothing but the arguments' shapes.
_KEPT_DRAWS = frozenset(
    f"aten.{name}"
    for name in (
        "bernoulli.p", "bernoulli_.float", "rand.default", "randn.default", "rand_like.default", "randn_like.default",
        "uniform_.default", "uniform.default", "normal_.default", "exponential_.default", "random_.default",
        "native_dropout.default",
    )
)  # fmt: skip


def call(index: int, op: Op, supports: Callable[[str], bool], *, compiled: bool = False) -> Callable[..., Any]:
    """The function that runs an operator on another device than the CPU. `supports`: whether the device has a kernel
    for an operator of torch; `compiled`: the function is for the compiler. Raises ProgramError if there is none."""
    if takes_numbers(op):
        return form(index, op)
    known = (_COMPILED if compiled else _FORMS).get(op.target)
    if known is not None:
        return known
    if not supports(op.target):
        raise ProgramError(
            f"operator {index} ({op.target}) exists on the CPU alone",
            f"write the step without it (for an LSTM: {onednn_lstm.REMEDY}), or use --device cpu",
        )
    return schema(op.target).overload  # type: ignore[no-any-return]


def takes_device(op: Op) -> bool:
    """Whether the operator takes the device of its result as an argument, and the Program gives none."""
    known = schema(op.target)
    return "device" in known.keyword and "device" not in dict(op.kwargs)


def kept_draws(program: Program) -> frozenset[int]:
    """Random slots whose first draw is kept for a second operator. Raises ProgramError if keeping it is not enough."""
    first: dict[int, int] = {}
    kept: set[int] = set()
    for index, op in enumerate(program.ops):
        if op.random is None:
            continue
        before = first.setdefault(op.random, index)
        if before == index:
            continue
        earlier = program.ops[before]
        if (
            op.target not in _KEPT_DRAWS
            or earlier.target != op.target
            or shapes(program, earlier) != shapes(program, op)
        ):
            raise ProgramError(
                f"operator {index} ({op.target}) is to draw the numbers of operator {before} again",
                "recompute (checkpoint) nothing that draws anything but dropout masks, or use --device cpu",
            )
        kept.add(op.random)
    return frozenset(kept)


def unsized(program: Program) -> frozenset[int]:
    """Temporary storages whose size only the kernel knows, and which a Program declares empty: what cuDNN's recurrent
    layers keep for their backward."""
    found: set[int] = set()
    for op in program.ops:
        outs: Sequence[Out] = ()
        if op.target == "aten._cudnn_rnn.default":
            outs = op.outs[3:]
        elif op.target == "aten.clone.default" and isinstance(
            op.args[0], TensorRef
        ):  # of a backward graph that is retained
            outs = op.outs if program.views[op.args[0].view].storage in found else ()
        found |= {program.views[out].storage for out in outs if isinstance(out, int)}
    return frozenset(found)


def repeat_draw(op: Op, arguments: Sequence[Any], kept: Tensor) -> Any:
    """The result of an operator that draws the numbers of another one again, of which `kept` is the draw."""
    if op.target == "aten.native_dropout.default":
        x, p, _ = arguments
        return torch.ops.aten.native_dropout_backward.default(x, kept, 1 / (1 - p)), kept.clone()
    if op.target.split(".")[1].endswith("_"):
        return arguments[0].copy_(kept)
    return kept.clone()


def shapes(program: Program, op: Op) -> tuple[object, ...]:
    """An operator's arguments, with tensors replaced by their types and sizes."""

    def describe(arg: Arg) -> object:
        if isinstance(arg, TensorRef):
            view = program.views[arg.view]
            return (view.dtype, view.size)
        return tuple(map(describe, arg)) if isinstance(arg, tuple) else arg

    return (tuple(map(describe, op.args)), tuple((name, describe(arg)) for name, arg in op.kwargs))


def evaluate(arg: Arg, tensor: Callable[[int], Tensor], numbers: Sequence[Any], device: torch.device) -> Any:
    """An argument as torch takes it on `device`. `tensor` maps a view's index to a tensor; `numbers`: the step's host
    scalars."""
    if isinstance(arg, TensorRef):
        return tensor(arg.view)
    if isinstance(arg, ScalarRef):
        return numbers[arg.index]
    if isinstance(arg, tuple):
        return [evaluate(item, tensor, numbers, device) for item in arg]
    if isinstance(arg, Tag):
        return device if arg.kind == "device" else constant(arg)
    return complex(arg.re, arg.im) if isinstance(arg, Complex) else arg


def window(base: Tensor, view: View) -> Tensor:
    """`view` of the storage of `base`, whatever the type of `base`."""
    made = torch.empty(0, dtype=DTYPES[view.dtype], device=base.device)
    return made.set_(base.untyped_storage(), view.offset, view.size, view.stride)


def conforming(made: Tensor, view: View, nbytes: int, arguments: frozenset[int]) -> Tensor:
    """A new tensor in the layout that the Program declares: `made` itself if it has that layout, else a copy.
    `arguments`: addresses of the operator's arguments, whose memory a new tensor may not share. Raises ProgramError if
    size or type are not as declared."""
    if tuple(made.size()) != view.size or made.dtype != DTYPES[view.dtype]:
        raise ProgramError(
            f"it returned {tuple(made.size())} of {made.dtype} where the program declares {view.size} of {view.dtype}",
            "capture the step with the daemon's torch version",
        )
    storage = made.untyped_storage()
    as_declared = (
        _used(view.size, made.stride()) == _used(view.size, view.stride)
        and (not made.numel() or made.storage_offset() == view.offset)
        and storage.nbytes() >= nbytes
        and storage.data_ptr() not in arguments
    )
    if as_declared or not made.numel():
        return made
    return window(torch.empty(nbytes, dtype=torch.uint8, device=made.device), view).copy_(made)


def _used(size: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """The strides that matter: those of dimensions of more than one element."""
    return tuple(s for n, s in zip(size, stride, strict=True) if n > 1)
