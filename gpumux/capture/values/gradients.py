"""Gradients that torch does not record as it computes them: of a product, and of an EmbeddingBag.

torch decides by values how to compute the gradient of torch.prod: where no factor is zero, it divides the product by
each factor; otherwise it multiplies the others. For tensors without values, those of a trace, it always multiplies, and
the last bits are not those of the plain loop. So while a step is traced, the gradient is both, and the step chooses.

The gradient of an EmbeddingBag is one call to a trace, and several operators on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gpumux.capture.source import user_line
from gpumux.errors import CaptureError, UnsupportedOperator

aten = torch.ops.aten

_PLAIN = torch.Tensor.prod
# Nodes of the autograd graph whose operators are not those of the plain loop.
_BY_VALUES = frozenset(("ProdBackward0", "ProdBackward1"))


def product(source: torch.Tensor, dim: int | None = None, keepdim: bool = False, *, dtype: Any = None) -> torch.Tensor:
    """Replaces torch.prod and Tensor.prod."""
    whole = dim is None and not keepdim
    if not (
        isinstance(source, torch.Tensor)
        and source.requires_grad
        and torch.is_grad_enabled()
        and source.is_floating_point()
        and dtype in (None, source.dtype)
        and (whole or isinstance(dim, int))
    ):
        given = {"dim": dim, "keepdim": keepdim} if dim is not None else {}
        return _PLAIN(source, **given, dtype=dtype)
    made: torch.Tensor = _Product.apply(source, dim, keepdim)  # type: ignore[no-untyped-call]
    return made


def refuse_by_values(where: str) -> None:
    """Raises CaptureError if the running node of the backward pass is torch's own gradient of a product. `where`: the
    user's line."""
    node = torch._C._current_autograd_node()
    if node is not None and node.name() in _BY_VALUES:
        raise CaptureError(
            f"{where} takes the gradient of a product, which torch computes in another way where a factor is zero, and"
            " gpumux has not seen it: it is of another type than its factors, or its function was imported by name",
            "write x.prod() or torch.prod(x), of floating-point factors and without dtype=",
        )


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, dim: int | None, keepdim: bool) -> torch.Tensor:
        made = _PLAIN(source) if dim is None else _PLAIN(source, dim, keepdim)
        ctx.save_for_backward(source, made)
        ctx.dim, ctx.keepdim = dim, keepdim
        return made

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        source, made = ctx.saved_tensors
        if source.dim() == 0:
            return grad.clone(), None, None
        if ctx.dim is None:
            zeros = (source == 0).sum()
            others = _of_others(grad, source.contiguous().view(-1), 0).view_as(source)
            some = torch.where(zeros > 1, torch.zeros_like(source), others)
            return torch.where(zeros == 0, grad * (made / source), some), None, None
        dim = ctx.dim
        if not ctx.keepdim:
            grad, made = grad.unsqueeze(dim), made.unsqueeze(dim)
        if source.shape[dim] == 1:
            return grad, None, None
        found = torch.where((source == 0).any(), _of_others(grad, source, dim), grad * (made / source))
        return found, None, None


def _of_others(grad: torch.Tensor, source: torch.Tensor, dim: int) -> torch.Tensor:
    """The gradient as the product of the other factors, from those before and those behind each."""
    if source.shape[dim] == 1:
        return grad
    size = list(source.shape)
    size[dim] = 1
    one = torch.ones(size, dtype=grad.dtype, device=grad.device)
    rest = source.shape[dim] - 1
    before = torch.cat([one, source.narrow(dim, 0, rest)], dim).cumprod(dim)
    behind = torch.cat([one, source.narrow(dim, 1, rest).flip(dim)], dim).cumprod(dim).flip(dim)
    return grad * (before * behind)


def bag_backward(given: dict[str, Any], operator: Callable[..., Any]) -> Any:
    """The operators that the backward of EmbeddingBag runs on the CPU, of which torch records one call. `given`: its
    arguments by name; `operator`: records an operator and gives its result. Raises UnsupportedOperator."""
    if given.pop("sparse"):
        raise UnsupportedOperator(
            f"{user_line()} makes a sparse gradient (EmbeddingBag)", "make it with sparse=False: SGD or Adam takes it"
        )
    offsets, count = given.pop("offsets"), given["indices"].shape[0]
    if count and not given["offset2bag"].shape[0]:  # the forward pass of sums needs none
        starts = operator(aten.new_zeros.default, (offsets, [count + 1]), {})
        ones = operator(aten.ones_like.default, (offsets,), {})
        operator(aten.index_add_.default, (starts, 0, offsets, ones), {})
        bags = operator(aten.cumsum.default, (starts, 0), {"dtype": offsets.dtype})
        bags = operator(aten.sub.Scalar, (bags, 1), {})
        given["offset2bag"] = operator(aten.slice.Tensor, (bags, 0, 0, count), {})
    return operator(aten._embedding_bag_dense_backward.default, tuple(given.values()), {})
