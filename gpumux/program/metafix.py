"""Fake execution of one operator, with what torch's fake kernels get wrong put right.

A Program states every tensor's type and strides, and later views rely on them, so they must be what
the real kernel returns. Where torch's meta kernel differs from the CPU kernel, the difference is
mended here, for the capture and for the daemon's check alike.
"""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten

# Operators without any shape rule in torch, whose result is like this argument.
_LIKE: dict[Any, int] = {
    aten.multi_margin_loss_backward.default: 1,
    aten.multilabel_margin_loss_backward.default: 1,
    aten.fractional_max_pool3d_backward.default: 1,
    aten._standard_gamma_grad.default: 0,
    aten._sample_dirichlet.default: 0,
    aten._dirichlet_grad.default: 0,
    aten.binomial.default: 0,
}


def fake_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: str) -> Any:
    """`func(*args, **kwargs)` under the FakeTensorMode that is active."""
    if func in _LIKE:
        return torch.empty_like(args[_LIKE[func]])
    out = func(*args, **kwargs)
    if func is aten.native_batch_norm.default and device == "cpu":
        return _batch_norm(args, out)
    return out


def _batch_norm(args: tuple[Any, ...], out: Any) -> Any:
    """With a low-precision input and float32 weights (autocast), the CPU kernel keeps the batch
    statistics in the weights' type; the meta kernel says the input's."""
    result, mean, invstd = out
    weight = args[1]
    if weight is None or weight.dtype == args[0].dtype:
        return out
    return result, torch.empty_like(mean, dtype=weight.dtype), torch.empty_like(invstd, dtype=weight.dtype)
