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


# Whose kernels take floating-point tensors of one type only, and whose shape rules take any: what a Program does with a batch of
# another type would fail when it runs, and the job's state with it.
_ONE_TYPE = frozenset(
    (
        aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.addbmm.default, aten.mv.default,
        aten.addmv.default, aten.linear.default, aten.convolution_backward.default,
        aten.binary_cross_entropy.default, aten.binary_cross_entropy_backward.default, aten.nll_loss_forward.default,
        aten.nll_loss_backward.default, aten.nll_loss2d_forward.default, aten.nll_loss2d_backward.default,
        aten.index_add.default, aten.index_add_.default, aten.index_copy.default, aten.index_copy_.default,
        aten.index_put.default, aten.index_put_.default, aten._prelu_kernel.default, aten._prelu_kernel_backward.default,
        aten._cdist_forward.default, aten.grid_sampler_2d.default, aten.grid_sampler_3d.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default, aten._softmax_backward_data.default,
        aten._log_softmax_backward_data.default,
    )
)  # fmt: skip
# Where the classes are that these losses are told, in int64 or uint8.
_CLASSES = {
    aten.nll_loss_forward.default: 1, aten.nll_loss2d_forward.default: 1,
    aten.nll_loss_backward.default: 2, aten.nll_loss2d_backward.default: 2,
}  # fmt: skip
# These take parameters in float32 beside data of low precision, too.
_NORMS = frozenset((aten.native_batch_norm.default, aten.native_layer_norm.default, aten.native_group_norm.default))


def _check_types(func: Any, args: tuple[Any, ...]) -> None:
    found = [a.dtype for a in args if isinstance(a, torch.Tensor) and a.dtype.is_floating_point]
    mixed = func in _NORMS and found[:1] in ([torch.bfloat16], [torch.float16])
    for dtype in found:
        if dtype is not found[0] and not (mixed and dtype is torch.float32):
            raise RuntimeError(f"{func} takes tensors of one type, not {found[0]} and {dtype}")
    if func in _CLASSES and args[_CLASSES[func]].dtype not in (torch.int64, torch.uint8):
        raise RuntimeError(f"{func} takes classes in int64 or uint8, not {args[_CLASSES[func]].dtype}")


def fake_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: str) -> Any:
    """`func(*args, **kwargs)` under the FakeTensorMode that is active."""
    if func in _ONE_TYPE or func in _NORMS:
        _check_types(func, args)
    if func in _LIKE:
        return torch.empty_like(args[_LIKE[func]])
    if func in _FUSED:
        return _same_lists(func, args)
    if func in _SAMPLED:
        return _SAMPLED[func](*args)
    if func in _RECURRENT:
        return _RECURRENT[func](*args)
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


# ---- recurrent layers, whose shape rules torch lacks, or gets wrong where there is no bias


def _lstm_cell(igates: Any, hgates: Any, cx: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    _same_gates(igates, hgates, cx, 4, b_ih, b_hh)
    return _flat(cx), _flat(cx), _flat(igates)


def _gru_cell(igates: Any, hgates: Any, hx: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    _same_gates(igates, hgates, hx, 3, b_ih, b_hh)
    return _flat(hx), hx.new_empty((hx.shape[0], 5 * hx.shape[1]))


def _gru_cell_backward(grad: Any, workspace: Any, has_bias: bool) -> Any:
    rows, hidden = grad.shape
    if tuple(workspace.shape) != (rows, 5 * hidden) or workspace.dtype != grad.dtype:
        raise ValueError(f"a workspace of {tuple(workspace.shape)} for gradients of {tuple(grad.shape)}")
    gates = [grad.new_empty((rows, 3 * hidden)) for _ in range(2)]
    biases = [grad.new_empty(3 * hidden) if has_bias else None for _ in range(2)]
    return (*gates, _flat(grad), *biases)


def _same_gates(igates: Any, hgates: Any, state: Any, count: int, *biases: Any) -> None:
    rows, hidden = state.shape
    for gates in (igates, hgates):
        if tuple(gates.shape) != (rows, count * hidden) or gates.dtype != state.dtype:
            raise ValueError(f"gates of {tuple(gates.shape)} for a state of {tuple(state.shape)}")
    for bias in biases:
        if bias is not None and (tuple(bias.shape) != (count * hidden,) or bias.dtype != state.dtype):
            raise ValueError(f"a bias of {tuple(bias.shape)} for a state of {tuple(state.shape)}")


def _flat(tensor: Any) -> Any:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def cudnn_rnn_weights(
    width: int, mode: int, hidden: int, projected: int, layers: int, bidirectional: bool, each: int
) -> list[tuple[int, ...]]:
    """The sizes of the weights that cuDNN's recurrent layers take, in order; `each` says how many a layer and direction
    has. Raises ValueError for a number of them that no layer has."""
    gates = {0: 1, 1: 1, 2: 4, 3: 3}.get(mode)
    biased = each - (1 if projected else 0)
    if gates is None or biased not in (2, 4) or (projected and mode != 2):
        raise ValueError(f"no recurrent layer of kind {mode} has {each} weights")
    out, ways = projected or hidden, 2 if bidirectional else 1
    sizes: list[tuple[int, ...]] = []
    for layer in range(layers):
        for _ in range(ways):
            sizes += [(gates * hidden, width if layer == 0 else out * ways), (gates * hidden, out)]
            sizes += [(gates * hidden,)] * (biased - 2) + [(projected, hidden)] * (each - biased)
    return sizes


def _cudnn_rnn(
    x: Any, weights: Any, each: int, buffer: Any, hx: Any, cx: Any, mode: int, hidden: int, projected: int, layers: int,
    batch_first: bool, dropout: float, train: bool, bidirectional: bool, batch_sizes: Any, dropout_state: Any,
) -> Any:  # fmt: skip
    """What it keeps for the backward is as large as cuDNN says on the machine: a Program states nothing of it."""
    if buffer is not None or batch_sizes or dropout_state is not None or x.dim() != 3:
        raise ValueError(
            "cuDNN's recurrent layers are taken with plain batches, without dropout, and with weights one by one"
        )
    out, ways = projected or hidden, 2 if bidirectional else 1
    rows = x.shape[0 if batch_first else 1]
    wanted = cudnn_rnn_weights(x.shape[2], mode, hidden, projected, layers, bidirectional, each)
    states = [(hx, out)] + ([(cx, hidden)] if mode == 2 else [])
    if (cx is None) != (mode != 2) or any(tuple(s.shape) != (layers * ways, rows, n) for s, n in states):
        raise ValueError("the states do not fit the layers")
    if [tuple(w.shape) for w in weights] != wanted or {w.dtype for w in [*weights, *[s for s, _ in states]]} != {
        x.dtype
    }:
        raise ValueError("the weights do not fit the layers")
    last = x.new_empty((layers * ways, rows, hidden)) if mode == 2 else x.new_empty(0)
    return (
        x.new_empty((*x.shape[:2], out * ways)), x.new_empty((layers * ways, rows, out)), last,
        x.new_empty(0, dtype=torch.uint8), x.new_empty(0),
    )  # fmt: skip


def _cudnn_rnn_backward(
    x: Any, weights: Any, each: int, buffer: Any, hx: Any, cx: Any, out: Any, *rest: Any
) -> Any:  # fmt: skip
    wanted = rest[-1]
    return (
        _flat(x) if wanted[0] else None,
        _flat(hx) if wanted[1] else None,
        _flat(cx) if wanted[2] and cx is not None else None,
        [_flat(w) for w in weights] if wanted[3] else [],
    )


_RECURRENT: dict[Any, Any] = {
    aten._thnn_fused_lstm_cell.default: _lstm_cell,
    aten._thnn_fused_gru_cell.default: _gru_cell,
    aten._thnn_fused_gru_cell_backward.default: _gru_cell_backward,
    aten._cudnn_rnn.default: _cudnn_rnn,
    aten._cudnn_rnn_backward.default: _cudnn_rnn_backward,
}


def _sampled(x: Any, grid: Any) -> Any:
    if x.dim() != 4 or grid.dim() != 4 or grid.shape[0] != x.shape[0] or grid.shape[3] != 2 or x.dtype != grid.dtype:
        raise ValueError(f"no grid of {tuple(grid.shape)} fits images of {tuple(x.shape)}")
    return x.new_empty((*x.shape[:2], *grid.shape[1:3]))


_SAMPLED: dict[Any, Any] = {
    aten.cudnn_grid_sampler.default: _sampled,
    aten.cudnn_grid_sampler_backward.default: lambda x, grid, grad: (_flat(x), _flat(grid)),
}
