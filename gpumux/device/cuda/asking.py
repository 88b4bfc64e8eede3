"""Operators whose CUDA kernels ask a tensor for its value, which waits for the GPU, so that no capture allows it.

Those that only check a value, or take one as a number, are told in others that compute the same from the same random
numbers, without the check. The rest is refused when the program is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gpumux.errors import ProgramError
from gpumux.program.ir import Op


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
    """normal with a tensor of deviations. One that is negative is not refused: it mirrors the draw."""
    like, shape = (
        (mean, torch.broadcast_shapes(std.shape, mean.shape)) if isinstance(mean, Tensor) else (std, std.shape)
    )
    drawn = torch.empty(shape, dtype=like.dtype, device=std.device).normal_()
    return drawn.mul_(std).add_(mean)


def multinomial(weights: Tensor, count: int, replacement: bool = False, **_: Any) -> Tensor:
    """multinomial of one draw or without replacement. Weights that are negative, infinite or all zero are not refused:
    which of them is drawn is undefined."""
    if replacement and count != 1:
        return torch.multinomial(weights, count, True)  # in a kernel that asks nothing
    raced = weights / torch.empty_like(weights).exponential_()
    if count == 1:
        return raced.argmax(-1, keepdim=True)
    return raced.topk(count, -1).indices


FORMS: dict[str, Callable[..., Any]] = {
    "aten.masked_fill.Tensor": masked_fill,
    "aten.masked_fill_.Tensor": masked_fill_,
    "aten.index_fill.int_Tensor": index_fill,
    "aten.index_fill_.int_Tensor": index_fill_,
    "aten.normal.float_Tensor": normal,
    "aten.normal.Tensor_Tensor": normal,
    "aten.multinomial.default": multinomial,
}

# Whose results come by way of the host, or whose kernels tell it whether they succeeded.
_REFUSED = {
    "aten.linalg_eig.default": "use torch.linalg.eigh for symmetric matrices",
    "aten._linalg_eigvals.default": "use torch.linalg.eigvalsh for symmetric matrices",
    "aten.cholesky.default": "use torch.linalg.cholesky_ex",
}


def refuse(index: int, op: Op) -> None:
    """Raises ProgramError for an operator that no capture allows, with what to use instead."""
    remedy = _REFUSED.get(op.target)
    if op.target == "aten.histc.default":
        least, most = (*op.args[2:4], 0, 0)[:2] if len(op.args) > 2 else (0, 0)
        remedy = "name the bounds of the histogram: min and max" if least == most else None
    if remedy is not None:
        raise ProgramError(
            f"operator {index} ({op.target}) asks the GPU for a value, for which captured work can't wait",
            f"{remedy}, do it outside the step, or use --device cpu",
        )
