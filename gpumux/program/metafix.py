"""Fake execution of one operator, with what torch's fake kernels get wrong put right.

A Program states every tensor's type and strides, and later views rely on them, so they must be what
the real kernel returns. Where torch's meta kernel differs from the CPU kernel, the difference is
mended here, for the capture and for the daemon's check alike.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._prims_common import compute_elementwise_output_strides

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

# Fused optimizers without any shape rule: they return nothing, and change their lists in place.
_FUSED = frozenset(
    (
        aten._fused_sgd_.default,
        aten._fused_sgd_.tensor_lr,
        aten._fused_adagrad_.default,
        aten._fused_adagrad_.tensor_lr,
    )
)

# Element by element, with a result laid out as the operands are, the first of them first; torch's decompositions, which
# run in place of their shape rules, start with another.
_BY_OPERANDS = frozenset(
    (
        aten.elu_backward.default, aten.hardsigmoid_backward.default, aten.hardswish_backward.default,
        aten.hardtanh_backward.default, aten.softplus_backward.default, aten.logit_backward.default,
        aten.xlogy.Tensor, aten.copysign.Tensor, aten.native_dropout_backward.default,
    )
)  # fmt: skip

# With a result laid out as this argument is.
_LAID_AS = {aten.binary_cross_entropy.default: 0, aten.binary_cross_entropy_backward.default: 1}

# Whose result is always contiguous on the CPU.
_CONTIGUOUS = frozenset(
    (
        aten._softmax_backward_data.default, aten._log_softmax_backward_data.default, aten.mse_loss_backward.default,
        aten.smooth_l1_loss_backward.default, aten.huber_loss_backward.default,
    )
)  # fmt: skip


def fake_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: str) -> Any:
    """`func(*args, **kwargs)` under the FakeTensorMode that is active."""
    if func in _LIKE:
        return torch.empty_like(args[_LIKE[func]])
    if func in _FUSED:
        return _same_lists(func, args)
    out = func(*args, **kwargs)
    if device == "cpu" and func is aten.log_sigmoid_forward.default:  # always contiguous, whatever its argument is
        return tuple(torch.empty_like(each, memory_format=torch.contiguous_format) for each in out)
    if device == "cpu" and func in _STATISTICS:
        return _statistics(args[0], args[_STATISTICS[func]], out)
    if device == "cpu" and func is aten._scaled_dot_product_flash_attention_for_cpu.default:
        # The logarithm of the sums is double for double queries; older shape rules say float.
        return out[0], torch.empty_like(out[1], dtype=torch.promote_types(args[0].dtype, torch.float32))
    if device == "cpu" and func is aten.native_group_norm_backward.default and out[0] is not None:
        return torch.empty_like(out[0], dtype=args[1].dtype), out[1], out[2]
    if func is aten.native_batch_norm_backward.default:  # the kernels make only the gradients that are asked for
        return tuple(o if wanted else None for o, wanted in zip(out, args[-1], strict=True))
    if func in _BY_OPERANDS and out.dim() > 1:
        return _laid_as([a for a in args if isinstance(a, torch.Tensor)], out)
    if func in _LAID_AS and out.dim() == args[_LAID_AS[func]].dim():
        return torch.empty_like(args[_LAID_AS[func]])
    if device == "cpu" and func in _CONTIGUOUS:
        return torch.empty_like(out, memory_format=torch.contiguous_format)
    return out


def _laid_as(operands: list[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    strides = tuple(compute_elementwise_output_strides(*[a.expand(out.shape) for a in operands]))
    if out.stride() == strides:
        return out
    return torch.empty_strided(out.shape, strides, dtype=out.dtype, device=out.device)


def _same_lists(func: Any, args: tuple[Any, ...]) -> None:
    """The kernels walk all lists by the length of the first, and each tensor by the size of its parameter."""
    params, *others = args
    if func.overloadpacket is aten._fused_sgd_ and not others[-1]:
        others.pop()  # no momentum
    for at, items in enumerate(others):
        counts = func.overloadpacket is aten._fused_adagrad_ and at == 2
        if len(items) != len(params):
            raise ValueError(f"{func} takes lists of equal length, not of {len(params)} and {len(items)}")
        for param, other in zip(params, items, strict=True):
            if counts and other.numel() != 1:
                raise ValueError(f"{func} takes step counts of one element, not of shape {tuple(other.shape)}")
            if not counts and _form(param) != _form(other):
                raise ValueError(f"{func} takes tensors alike, not {_form(param)} and {_form(other)}")


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.stride()


# Normalizations that return (result, mean, inverse deviation), with the position of their weight.
_STATISTICS: dict[Any, int] = {
    aten.native_batch_norm.default: 1,
    aten.native_layer_norm.default: 2,
    aten.native_group_norm.default: 1,
}


def _statistics(data: torch.Tensor, weight: torch.Tensor | None, out: Any) -> Any:
    """With a low-precision input and float32 weights (autocast), the CPU kernels keep the statistics
    in the weights' type; the meta kernels say the input's."""
    result, mean, invstd = out
    if weight is None or weight.dtype == data.dtype:
        return out
    return result, torch.empty_like(mean, dtype=weight.dtype), torch.empty_like(invstd, dtype=weight.dtype)
