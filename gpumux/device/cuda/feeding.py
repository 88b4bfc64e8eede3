"""Host scalars through device memory.

A captured kernel keeps the numbers it was captured with. Learning rates and bias corrections change from step to
step, so operators that take a host scalar run in another form here: the step's numbers lie in device memory, and
the form reads them there. Each is what the operator is defined to compute, in the precision in which torch's
kernel computes it (float32 for the half types); sums of products may round once more than torch's fused kernel.
An operator without such a form is refused when the program is loaded, never captured with a stale number.

The forms run the same way operator by operator and captured, so that a job's numbers don't change at capture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy
import torch
from torch import Tensor

from gpumux.device.cuda import asking, optimizer_steps
from gpumux.errors import ProgramError
from gpumux.program.ir import ITEM_BYTES, Op, Program, ScalarRef, TensorRef
from gpumux.program.schemas import schema
from gpumux.program.validate import leaves, op_args

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
        """As a kernel takes it that computes on `dtype`."""
        if dtype == torch.float64:
            return self.f64
        if dtype in (torch.float32, *_HALF):
            return self.f32
        if dtype.is_complex:
            return self.f64.to(dtype)
        return self.f32 if self.is_float else self.i64  # integers with a float are computed as floats

    def value(self, dtype: torch.dtype) -> Tensor:
        """As an element of a tensor of `dtype`."""
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
        """The numbers that lie in three vectors, as float64, int64 and float32."""
        f64, i64, f32 = vectors
        return [Number(f64[i], f32[i], i64[i], kind == "float") for i, kind in enumerate(program.scalars)]

    @staticmethod
    def write(memory: memoryview, values: Sequence[float | int], kinds: Sequence[str]) -> None:
        """The same block on the host. Raises OverflowError for an integer of more than 64 bits."""
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
    """The functional and the in-place form of a formula. Numbers come 0-dimensional, tensors at the precision that
    kernels compute in; the formula's last operator writes to `out`."""

    def functional(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        args, kwargs = tuple(_operand(x, a) for a in args), {k: _operand(x, a) for k, a in kwargs.items()}
        made = compute(_widened(x), *args, out=None, **kwargs)
        return made.to(x.dtype) if x.dtype in _HALF and made.is_floating_point() else made

    def in_place(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if x.dtype in _HALF:
            return x.copy_(functional(x, *args, **kwargs))
        args, kwargs = tuple(_operand(x, a) for a in args), {k: _operand(x, a) for k, a in kwargs.items()}
        return compute(x, *args, out=x, **kwargs)

    return functional, in_place


def _operand(x: Tensor, arg: Any) -> Any:
    if isinstance(arg, Number):
        return arg.beside(x.dtype)
    return _widened(arg) if isinstance(arg, Tensor) else arg


def _times(x: Any, alpha: Any) -> Any:
    return x if isinstance(alpha, int) and alpha == 1 else x * alpha


def _add(x: Tensor, other: Any, alpha: Any = 1, *, out: Tensor | None) -> Tensor:
    return torch.add(x, _times(other, alpha), out=out)


def _sub(x: Tensor, other: Any, alpha: Any = 1, *, out: Tensor | None) -> Tensor:
    return torch.sub(x, _times(other, alpha), out=out)


def _rsub(x: Tensor, other: Any, alpha: Any = 1, *, out: Tensor | None) -> Tensor:
    return torch.add(_times(x, alpha).neg(), other, out=out)


def _div(x: Tensor, other: Any, *, out: Tensor | None) -> Tensor:
    if x.is_cuda and x.is_floating_point() and isinstance(other, Tensor):
        # torch's kernel multiplies floats by the reciprocal of a number it knows on the host.
        return torch.mul(x, torch.reciprocal(other), out=out)
    return torch.div(x, other, out=out)


def _addcmul(x: Tensor, a: Tensor, b: Tensor, value: Any = 1, *, out: Tensor | None) -> Tensor:
    return torch.add(x, _times(a * b, value), out=out)


def _addcdiv(x: Tensor, a: Tensor, b: Tensor, value: Any = 1, *, out: Tensor | None) -> Tensor:
    return torch.add(x, _times(a / b, value), out=out)


def _clamp(x: Tensor, least: Any = None, most: Any = None, *, out: Tensor | None) -> Tensor:
    if least is None:
        return torch.clamp(x, max=most, out=out)
    least_done = torch.clamp(x, min=least, out=out)
    return least_done if most is None else torch.clamp(least_done, max=most, out=out)


def _clamp_max(x: Tensor, most: Any, *, out: Tensor | None) -> Tensor:
    return _clamp(x, None, most, out=out)


_FORMULAS: dict[str, Callable[..., Tensor]] = {
    "add.Scalar": _add, "sub.Scalar": _sub, "rsub.Scalar": _rsub, "mul.Scalar": torch.mul, "div.Scalar": _div,
    "pow.Tensor_Scalar": torch.pow, "add.Tensor": _add, "sub.Tensor": _sub, "addcmul.default": _addcmul,
    "addcdiv.default": _addcdiv, "lerp.Scalar": torch.lerp, "clamp.default": _clamp, "clamp_min.default": _clamp,
    "clamp_max.default": _clamp_max, "eq.Scalar": torch.eq, "ne.Scalar": torch.ne, "lt.Scalar": torch.lt,
    "le.Scalar": torch.le, "gt.Scalar": torch.gt, "ge.Scalar": torch.ge,
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
    return asking.masked_fill(x, mask, value.value(x.dtype))


def _masked_fill_(x: Tensor, mask: Tensor, value: Number) -> Tensor:
    return asking.masked_fill_(x, mask, value.value(x.dtype))


def _power_of(value: Number, x: Tensor) -> Tensor:
    return torch.pow(value.beside(x.dtype), _widened(x)).to(x.dtype)


# ---- lists of tensors

# By overload: Python's torch._foreach_add_ takes a 0-dimensional tensor for a number, and brings it to the host.
_add_to_all = torch.ops.aten._foreach_add_.Tensor
_multiply_all = torch.ops.aten._foreach_mul_.Tensor
_divide_all = torch.ops.aten._foreach_div_.Tensor
_products = torch.ops.aten._foreach_mul.Tensor


def _same(scalars: Any, count: int) -> Scalar | None:
    """The one number that stands for all of a list; None where they differ."""
    if not isinstance(scalars, list):
        return scalars  # type: ignore[no-any-return]
    first = scalars[0]
    return first if all(s is first for s in scalars) and len(scalars) == count else None


def _alike(xs: Sequence[Tensor]) -> bool:
    return len({x.dtype for x in xs}) == 1 and xs[0].dtype not in _HALF and xs[0].is_floating_point()


def _foreach(single: Callable[..., Tensor], together: Callable[..., None] | None) -> Callable[..., None]:
    """In place: all at once where one number serves tensors of one type, else one by one with `single`."""

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
    """The very tensors, of which nothing else knows: a second list of them may be as large as all parameters."""
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
    """A fused optimizer with the learning rate in memory: torch has kernels that read it there, and not the other numbers."""
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
        optimizer_steps.step(name, lists, numbers)

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
    table |= {f"{name}.default": _fused(name) for name in optimizer_steps.STEPS}
    return {f"aten.{name}": function for name, function in table.items()}


FORMS = _functions()
_LIST_MAKERS = frozenset(
    f"aten._foreach_{base}{ending}"
    for base in ("add", "sub", "addcmul", "addcdiv", "lerp")
    for ending in (".List", "_.List", ".Scalar", "_.Scalar", ".ScalarList", "_.ScalarList")
    if (base in ("add", "sub")) == ending.endswith(".List")
)  # fmt: skip


def made_beside(program: Program, op: Op) -> int:
    """Bytes of the temporary lists that an operator's form makes, which the Program knows nothing of."""
    if not takes_numbers(op) or not isinstance(op.args[0], tuple):
        return 0
    views = [program.views[leaf.view] for leaf in op.args[0] if isinstance(leaf, TensorRef)]
    nbytes = sum(prod(view.size) * ITEM_BYTES[view.dtype] for view in views)
    if op.target in _LIST_MAKERS:
        return nbytes
    name = op.target.removeprefix("aten.").removesuffix(".default")
    if name in optimizer_steps.STEPS and any(isinstance(value, ScalarRef) for key, value in op.kwargs if key != "lr"):
        return optimizer_steps.LISTS * sum(4 * prod(view.size) for view in views) if views else 0
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
            f"operator {index} ({op.target}) takes a number that changes from step to step, which a captured piece can't",
            "pass the number as a tensor argument of the step, or use --device cpu",
        )
    return known
