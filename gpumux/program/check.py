"""Checks an encoded Program with torch: fake execution, torch's schemas, and `check`, which does all of it.

A Program states every tensor's type and strides, and later views rely on them, so they must be what the real kernel
returns. If torch's meta kernel differs from the CPU kernel, the difference is corrected here, for the capture and for
the daemon's check alike.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from gpumux.errors import ProgramError
from gpumux.program import onednn_lstm, operators
from gpumux.program.codec import content_hash, decode
from gpumux.program.fake import FakeOperators
from gpumux.program.ir import (
    DEFAULT,
    ITEM_BYTES,
    Arg,
    Complex,
    Op,
    Out,
    Program,
    ProgramLimits,
    ScalarRef,
    Tag,
    TensorRef,
    View,
    aligned,
)
from gpumux.program.layouts import grouped_product, laid_out
from gpumux.program.memory import first_fit, footprint, live_bytes
from gpumux.program.validate import check_sizes, describe_op, leaves, op_args, tensor_refs, validate
from gpumux.types import Footprint

aten = torch.ops.aten

# Operators without any shape rule in torch: their result has the shape of this argument.
_LIKE: dict[Any, int] = {
    aten.multi_margin_loss_backward.default: 1,
    aten.multilabel_margin_loss_backward.default: 1,
    aten.fractional_max_pool3d_backward.default: 1,
    aten._standard_gamma_grad.default: 0,
    aten._sample_dirichlet.default: 0,
    aten._dirichlet_grad.default: 0,
    aten.binomial.default: 0,
}

# Fused optimizers without any shape rule: they return nothing and change their lists in place.
_FUSED = frozenset(
    (
        aten._fused_sgd_.default,
        aten._fused_sgd_.tensor_lr,
        aten._fused_adagrad_.default,
        aten._fused_adagrad_.tensor_lr,
    )
)

# Operators whose kernels take floating-point tensors of one type only, and whose shape rules take any. With a batch of
# another type such a Program would fail while it runs and break the job's state.
_ONE_TYPE = frozenset(
    (
        aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.addbmm.default,
        aten.mv.default, aten.addmv.default, aten.linear.default, aten.convolution_backward.default,
        aten.binary_cross_entropy.default, aten.binary_cross_entropy_backward.default, aten.nll_loss_forward.default,
        aten.nll_loss_backward.default, aten.nll_loss2d_forward.default, aten.nll_loss2d_backward.default,
        aten.index_add.default, aten.index_add_.default, aten.index_copy.default, aten.index_copy_.default,
        aten.index_put.default, aten.index_put_.default, aten._prelu_kernel.default,
        aten._prelu_kernel_backward.default, aten._cdist_forward.default, aten.grid_sampler_2d.default,
        aten.grid_sampler_3d.default, aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._softmax_backward_data.default, aten._log_softmax_backward_data.default,
    )
)  # fmt: skip
# Position of the class labels (int64 or uint8) of these losses.
_CLASSES = {
    aten.nll_loss_forward.default: 1, aten.nll_loss2d_forward.default: 1,
    aten.nll_loss_backward.default: 2, aten.nll_loss2d_backward.default: 2,
}  # fmt: skip
# Operators that take parameters in float32 beside data of low precision, too.
_NORMS = frozenset((aten.native_batch_norm.default, aten.native_layer_norm.default, aten.native_group_norm.default))


def _check_types(func: Any, args: tuple[Any, ...]) -> None:
    found = [a.dtype for a in args if isinstance(a, torch.Tensor) and a.dtype.is_floating_point]
    mixed = func in _NORMS and found[:1] in ([torch.bfloat16], [torch.float16])
    for dtype in found:
        if dtype is not found[0] and not (mixed and dtype is torch.float32):
            raise RuntimeError(f"{func} takes tensors of one type, not {found[0]} and {dtype}")
    if func in _CLASSES and args[_CLASSES[func]].dtype not in (torch.int64, torch.uint8):
        raise RuntimeError(f"{func} takes classes in int64 or uint8, not {args[_CLASSES[func]].dtype}")


# ---- Sizes that a kernel takes from another argument.
#
# torch's shape rules do not check them, and the kernels read or write past the end of the smaller tensor. Those of
# validate.py need no torch; here the operators of torch say what the sizes have to be. Found by calling each operator
# with arguments made smaller, at the end of a page that is followed by one that can't be read (tests/program/
# guard_pages.py).


def _agree(what: str, *shapes: Any) -> None:
    first, *others = (tuple(shape) for shape in shapes)
    for other in others:
        if other != first:
            raise ValueError(f"{what}: {first} and {other}")


def _all_dense(what: str, *tensors: torch.Tensor) -> None:
    """Raise ValueError unless each tensor fills its memory without gaps and overlaps."""
    for tensor in tensors:
        expected = 1
        for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
            if size != 1 and stride != expected:
                raise ValueError(f"{what} of strides {tensor.stride()}, and the kernel reads it as it lies in memory")
            expected *= size


def _unit_stride(what: str, *tensors: torch.Tensor) -> None:
    """Raise ValueError unless the numbers of each tensor's last dimension lie side by side."""
    for tensor in tensors:
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{what} of strides {tensor.stride()}, and the kernel reads rows as they lie in memory")


def _dense_at(*positions: int) -> Callable[..., None]:
    """A rule: the kernel reads these arguments, if given, as they lie in memory."""

    def rule(*args: Any, **_: Any) -> None:
        given = [args[at] for at in positions if at < len(args) and args[at] is not None]
        _all_dense("an argument", *given)

    return rule


def _noise(x: Any, noise: Any, *rest: Any, **_: Any) -> None:
    _agree("noise and what it is for", x.shape, noise.shape)
    _all_dense("noise", noise)


def _of_forward(forward: Callable[..., Any], dense: int | None = None) -> Callable[..., None]:
    """A rule: the first argument is a gradient of what `forward` of the arguments gives. `dense`: the position of one
    that the kernel reads as it lies in memory."""

    def rule(grad: torch.Tensor, *args: Any) -> None:
        if grad.numel() and not args[0].numel():
            raise ValueError(f"a gradient of {tuple(grad.shape)} where there was nothing")
        if dense is not None:
            _all_dense("an argument", args[dense - 1])
        found = forward(grad, *args)
        result = found[0] if isinstance(found, tuple) else found
        _agree("a gradient and the result that it is of", grad.shape, result.shape)

    return rule


def _of_padding(pad: Any) -> Callable[..., None]:
    return _of_forward(lambda grad, x, by: pad(x, by))


def _attention(q: Any, k: Any, v: Any, *rest: Any, attn_mask: Any = None, **_: Any) -> None:
    _agree(
        "batches, heads or widths of query, key and value", (*q.shape[:-2], q.shape[-1]), (*k.shape[:-2], k.shape[-1])
    )
    _agree("key and value", k.shape, v.shape)
    _unit_stride("query, key and value", q, k, v)
    if q.dim() != 4 or 0 in (*q.shape, *k.shape):
        raise ValueError(f"attention of {tuple(q.shape)} over {tuple(k.shape)}")
    if attn_mask is not None:
        aten.expand.default(attn_mask, (*q.shape[:-1], k.shape[-2]))


def _attention_backward(
    grad: Any, q: Any, k: Any, v: Any, out: Any, sums: Any, dropout: float, causal: bool, *, attn_mask: Any = None,
    **_: Any,
) -> None:  # fmt: skip
    _attention(q, k, v, attn_mask=attn_mask)
    _agree("query, result and gradient", q.shape, out.shape, grad.shape)
    _unit_stride("the result", out)
    _all_dense("the logarithms of the sums", sums)
    _agree("the logarithms of the sums", q.shape[:-1], sums.shape)


def _pdist_backward(grad: Any, points: Any, p: float, distances: Any) -> None:
    rows = points.shape[0]
    _agree("distances of pairs", (rows * (rows - 1) // 2,), grad.shape, distances.shape)


def _cdist_backward(grad: Any, x1: Any, x2: Any, p: float, distances: Any) -> None:
    _agree("widths of points", x1.shape[-1:], x2.shape[-1:])
    _agree("batches of points", x1.shape[:-2], x2.shape[:-2])
    _agree("distances of points", (*x1.shape[:-1], x2.shape[-2]), grad.shape, distances.shape)


def _weight_norm(v: Any, g: Any, dim: int = 0) -> None:
    _all_dense("weights and their lengths", v, g)
    if dim not in (0, v.dim() - 1) or g.numel() != v.shape[dim]:
        raise ValueError(f"weight norm of {tuple(v.shape)} along {dim} by {tuple(g.shape)}")


def _weight_norm_backward(grad: Any, v: Any, g: Any, norms: Any, dim: int) -> None:
    _weight_norm(v, g, dim)
    _agree("weights and gradient", v.shape, grad.shape)
    _all_dense("gradient and norms", grad, norms)
    if norms.numel() != g.numel():
        raise ValueError(f"norms of {tuple(norms.shape)} for {tuple(g.shape)}")


def _bags(
    weight: Any, indices: Any, offsets: Any, by_frequency: bool = False, mode: int = 0, sparse: bool = False,
    factors: Any = None, *rest: Any,
) -> None:  # fmt: skip
    _all_dense("indices, offsets or factors", indices, offsets, *([factors] if factors is not None else []))
    if offsets.dim() != 1 or not offsets.numel():
        raise ValueError("bags without offsets")


def _bag_weights_backward(grad: Any, weight: Any, indices: Any, offsets: Any, bags: Any, *rest: Any) -> None:
    _bags(weight, indices, offsets)
    _agree("widths of gradient and weight", grad.shape[1:], weight.shape[1:])
    if indices.numel() and not (grad.numel() and weight.numel()):
        raise ValueError(f"indices into a gradient of {tuple(grad.shape)} and weights of {tuple(weight.shape)}")
    if bags.numel() not in (0, indices.numel()):
        raise ValueError(f"bags of {bags.numel()} indices, where there are {indices.numel()}")


def _bag_backward(grad: Any, indices: Any, bags: Any, sizes: Any, largest: Any, weights: int, *rest: Any) -> None:
    if weights < 1 and indices.numel():
        raise ValueError(f"indices into {weights} weights")
    _agree("indices and the bags that they are in", indices.shape, bags.shape)
    _agree("bags", grad.shape[:1], sizes.shape)


def _lu_unpack(lu: Any, pivots: Any, *rest: Any, **_: Any) -> None:
    _agree("pivots", (*lu.shape[:-2], min(lu.shape[-2:])), pivots.shape)


def _adam(
    params: Any, grads: Any, means: Any, squares: Any, largest: Any, steps: Any, *, amsgrad: bool = False,
    lr: Any = 0.0, grad_scale: Any = None, found_inf: Any = None, **_: Any,
) -> None:  # fmt: skip
    for items in (grads, means, squares, steps, largest if amsgrad or largest else params):
        _agree("lists of a fused optimizer", (len(params),), (len(items),))
    for tensors in zip(params, grads, means, squares, *([largest] if largest else []), strict=True):
        _agree("parameter, gradient and moments", *(tensor.shape for tensor in tensors))
        _all_dense("parameter, gradient or moments", *tensors)
    for single in (*steps, *(each for each in (lr, grad_scale, found_inf) if isinstance(each, torch.Tensor))):
        if single.numel() != 1:
            raise ValueError(f"a number of shape {tuple(single.shape)}")


_SIDES: dict[Any, Callable[..., None]] = {
    aten._adaptive_avg_pool2d_backward.default: _of_forward(lambda g, x: aten._adaptive_avg_pool2d(x, g.shape[-2:])),
    aten._adaptive_avg_pool3d_backward.default: _of_forward(lambda g, x: aten._adaptive_avg_pool3d(x, g.shape[-3:])),
    aten.adaptive_max_pool2d_backward.default: _of_forward(
        lambda g, x, _: aten.adaptive_max_pool2d(x, g.shape[-2:]), dense=2
    ),
    aten.adaptive_max_pool3d_backward.default: _of_forward(
        lambda g, x, _: aten.adaptive_max_pool3d(x, g.shape[-3:]), dense=2
    ),
    aten.avg_pool2d_backward.default: _of_forward(lambda g, x, *rest: aten.avg_pool2d(x, *rest)),
    aten.avg_pool3d_backward.default: _of_forward(lambda g, x, *rest: aten.avg_pool3d(x, *rest)),
    aten.max_pool2d_with_indices_backward.default: _of_forward(
        lambda g, x, *rest: aten.max_pool2d_with_indices(x, *rest[:-1]), dense=7
    ),
    aten.max_pool3d_with_indices_backward.default: _of_forward(
        lambda g, x, *rest: aten.max_pool3d_with_indices(x, *rest[:-1]), dense=7
    ),
    aten.grid_sampler_2d_backward.default: _of_forward(lambda g, x, at, *how: aten.grid_sampler_2d(x, at, *how[:3])),
    aten.grid_sampler_3d_backward.default: _of_forward(lambda g, x, at, *how: aten.grid_sampler_3d(x, at, *how[:3])),
    **{
        getattr(aten, f"{kind}_pad{n}d_backward").default: _of_padding(getattr(aten, f"{kind}_pad{n}d"))
        for kind in ("reflection", "replication")
        for n in (1, 2, 3)
    },
    aten._softmax_backward_data.default: _of_forward(lambda g, out, *rest: out),
    aten._log_softmax_backward_data.default: _of_forward(lambda g, out, *rest: out),
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
    aten._pdist_backward.default: _pdist_backward,
    aten._cdist_backward.default: _cdist_backward,
    aten._weight_norm_interface.default: _weight_norm,
    aten._weight_norm_interface_backward.default: _weight_norm_backward,
    aten._embedding_bag.default: _bags,
    aten._embedding_bag_forward_only.default: _bags,
    aten._embedding_bag_dense_backward.default: _bag_backward,
    aten._embedding_bag_per_sample_weights_backward.default: _bag_weights_backward,
    aten.lu_unpack.default: _lu_unpack,
    aten.native_group_norm.default: _dense_at(1, 2),
    aten.native_group_norm_backward.default: _dense_at(0, 1, 2, 3, 4),
    aten.native_layer_norm_backward.default: _dense_at(3, 4, 5, 6),
    aten.fractional_max_pool2d_backward.default: _dense_at(4),
    aten.fractional_max_pool3d_backward.default: _dense_at(4),
    aten.rrelu_with_noise.default: _noise,
    aten.rrelu_with_noise_.default: _noise,
    aten.rrelu_with_noise_functional.default: _noise,
    **{
        getattr(getattr(aten, name), overload): _adam
        for name in ("_fused_adam_", "_fused_adamw_")
        for overload in ("default", "tensor_lr")
    },
}


def fake_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: str) -> Any:
    """`func(*args, **kwargs)` under the active FakeTensorMode."""
    if func in _ONE_TYPE or func in _NORMS:
        _check_types(func, args)
    if func in _SIDES:
        _SIDES[func](*args, **kwargs)
    if func in _LIKE:
        return torch.empty_like(args[_LIKE[func]])
    if func in _FUSED:
        return _same_lists(func, args)
    if func in _SAMPLED:
        return _SAMPLED[func](*args)
    if func in _RECURRENT:
        return _RECURRENT[func](*args)
    if device == "cpu" and func is aten._grouped_mm.default:
        return grouped_product(*args, **kwargs)
    out = func(*args, **kwargs)
    if device == "cpu" and func is aten.log_sigmoid_forward.default:  # its result is always contiguous
        return tuple(torch.empty_like(each, memory_format=torch.contiguous_format) for each in out)
    if device == "cpu" and func in _STATISTICS:
        out = _statistics(args[0], args[_STATISTICS[func]], out)
    if device == "cpu" and func is aten._scaled_dot_product_flash_attention_for_cpu.default:
        # The logarithm of the sums is double for double queries; older shape rules say float.
        return out[0], torch.empty_like(out[1], dtype=torch.promote_types(args[0].dtype, torch.float32))
    if device == "cpu" and func is aten.native_group_norm_backward.default and out[0] is not None:
        return torch.empty_like(out[0], dtype=args[1].dtype), out[1], out[2]
    if func is aten.native_batch_norm_backward.default:  # the kernels make only the gradients asked for
        out = tuple(o if wanted else None for o, wanted in zip(out, args[-1], strict=True))
    return laid_out(func, args, kwargs, out, device)


def _same_lists(func: Any, args: tuple[Any, ...]) -> None:
    """Check the lists: kernels walk all of them by the length of the first, and tensors by their parameters."""
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


# Normalizations that return (result, mean, inverse deviation), with the positions of their parameters: weight and bias,
# and for a batch norm the running mean and variance.
_STATISTICS: dict[Any, slice] = {
    aten.native_batch_norm.default: slice(1, 5),
    aten.native_layer_norm.default: slice(2, 4),
    aten.native_group_norm.default: slice(1, 3),
}


def _statistics(data: torch.Tensor, parameters: Sequence[torch.Tensor | None], out: Any) -> Any:
    """With a low-precision input and float32 parameters (autocast), the CPU kernels keep the statistics in the type of
    the first parameter that is there; the meta kernels give them the input's."""
    result, mean, invstd = out
    dtype = next((one.dtype for one in parameters if one is not None), data.dtype)
    if dtype == data.dtype:
        return out
    return result, torch.empty_like(mean, dtype=dtype), torch.empty_like(invstd, dtype=dtype)


# ---- recurrent layers, whose shape rules torch lacks, or gets wrong without a bias


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
    """The sizes of the weights of cuDNN's recurrent layers, in order. each: weights of a layer and direction. Raises
    ValueError for a number of them that no layer has."""
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
    """cuDNN decides on the machine how many bytes it keeps for the backward pass; a Program does not state them."""
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
    onednn_lstm.LAYER: onednn_lstm.layer,
    onednn_lstm.BACKWARD: onednn_lstm.backward,
}


def _sampled(x: Any, grid: Any) -> Any:
    if x.dim() != 4 or grid.dim() != 4 or grid.shape[0] != x.shape[0] or grid.shape[3] != 2 or x.dtype != grid.dtype:
        raise ValueError(f"no grid of {tuple(grid.shape)} fits images of {tuple(x.shape)}")
    return x.new_empty((*x.shape[:2], *grid.shape[1:3]))


_SAMPLED: dict[Any, Any] = {
    aten.cudnn_grid_sampler.default: _sampled,
    aten.cudnn_grid_sampler_backward.default: lambda x, grid, grad: (_flat(x), _flat(grid)),
}


# ---- Operator calls checked against torch's own schemas: number, kinds and names of arguments.
#
# Imports torch: for the process that checks Programs and for executors, not for the daemon itself.


# A host scalar in these would decide a size, which must not change between steps.
SIZED_BY_NUMBERS = frozenset(
    f"aten.{name}" for name in ("arange.default", "arange.start", "arange.start_step", "range.default", "range.step")
)

Accepts = Callable[[Arg], bool]


@dataclass(frozen=True, slots=True)
class SchemaParam:
    """One argument of a schema. `kind` is its type as torch prints it, such as List[int]."""

    name: str
    kind: str
    keyword_only: bool
    required: bool
    written: bool
    accepts: Accepts


@dataclass(frozen=True, slots=True)
class OperatorSchema:
    """An operator. `returns`: "Tensor", "List[Tensor]" or "int", one a return."""

    overload: Any
    positional: tuple[SchemaParam, ...]
    keyword: dict[str, SchemaParam]
    returns: tuple[str, ...]


@cache
def schema(target: str) -> OperatorSchema:
    """The schema of an allowed `target`. ProgramError when this torch build has no such operator."""
    parts = target.split(".")
    found: Any = torch.ops
    for part in parts if len(parts) == 3 else ():
        found = getattr(found, part, None) if part.isidentifier() else None
    if not isinstance(found, torch._ops.OpOverload):
        raise ProgramError(
            f"this torch build ({torch.__version__}) has no operator {target!r:.200}",
            "capture and run with the same torch version",
        )
    declared = found._schema
    hidden = operators.written_args(target) if target in operators.HIDDEN_WRITES else ()
    params = [_param(argument, index in hidden) for index, argument in enumerate(declared.arguments)]
    return OperatorSchema(
        found,
        tuple(p for p in params if not p.keyword_only),
        {p.name: p for p in params if p.keyword_only},
        tuple(str(r.real_type) for r in declared.returns),
    )


def overload(target: str) -> Any:
    """The torch operator called `target`. Raises ProgramError when this torch build has none."""
    return schema(target).overload


def named_arguments(op: Op) -> list[tuple[Any, Arg, bool]]:
    """(schema argument, value, given) for every argument of the operator, in schema order. If the Program gives none,
    `given` is false and the value is torch's default, as a plain value."""
    kwargs = dict(op.kwargs)
    rows: list[tuple[Any, Arg, bool]] = []
    for index, argument in enumerate(overload(op.target)._schema.arguments):
        if index < len(op.args):
            rows.append((argument, op.args[index], True))
        elif argument.name in kwargs:
            rows.append((argument, kwargs[argument.name], True))
        else:
            rows.append((argument, argument.default_value, False))
    return rows


def match(op: Op) -> OperatorSchema:
    """The schema of `op`. Raises ProgramError unless its arguments fit in number, kind and name."""
    known = schema(op.target)
    if len(op.args) > len(known.positional):
        raise ProgramError(f"{len(op.args)} positional arguments; the operator takes {len(known.positional)}")
    for param, arg in zip(known.positional, op.args, strict=False):
        _check(op, param, arg)
    missing = [p.name for p in known.positional[len(op.args) :] if p.required]
    given = dict(op.kwargs)
    missing += [p.name for p in known.keyword.values() if p.required and p.name not in given]
    if missing:
        raise ProgramError(f"the argument {missing[0]} is missing")
    for name, arg in op.kwargs:
        keyword = known.keyword.get(name)
        if keyword is None:
            raise ProgramError(f"the operator has no keyword-only argument {name!r:.40}")
        _check(op, keyword, arg)
    if len(op.outs) != len(known.returns):
        raise ProgramError(f"{len(op.outs)} outputs are declared; the operator returns {len(known.returns)}")
    return known


def written(op: Op) -> list[Arg]:
    """The arguments that `op` changes."""
    places, names = _written_arguments(op.target)
    found = [op.args[place] for place in places if place < len(op.args)]
    return found + [arg for name, arg in op.kwargs if name in names] if names else found


@cache
def _written_arguments(target: str) -> tuple[tuple[int, ...], frozenset[str]]:
    """The positions and the names of the arguments that an operator changes."""
    known = schema(target)
    places = tuple([place for place, param in enumerate(known.positional) if param.written])
    return places, frozenset(name for name, param in known.keyword.items() if param.written)


# Returns for which torch gives an undefined tensor although the schema says a tensor.
_UNDEFINED = {("aten._scaled_dot_product_efficient_attention_backward.default", "attn_bias")}


def _check(op: Op, param: SchemaParam, arg: Arg) -> None:
    if arg is None and (op.target, param.name) in _UNDEFINED:
        return
    if not param.accepts(arg):
        raise ProgramError(f"the argument {param.name} takes {param.kind}, not {_kind(arg)}", _remedy(param, arg))
    if param.name == "pin_memory" and arg:
        raise ProgramError("pinned memory is not a Program's to ask for")
    if isinstance(arg, ScalarRef) and op.target in SIZED_BY_NUMBERS:
        raise ProgramError(f"a host scalar as {param.name} would change the output's size from step to step")


def _kind(arg: Arg) -> str:
    if isinstance(arg, tuple):
        kinds = sorted({_kind(item) for item in arg})
        return f"a list of {' and '.join(kinds)}" if kinds else "an empty list"
    if isinstance(arg, Tag):
        return f"a {arg.kind}"
    names = {TensorRef: "a tensor", ScalarRef: "a host scalar", Complex: "a complex number", type(None): "nothing"}
    return names.get(type(arg), f"a {type(arg).__name__}")


def _remedy(param: SchemaParam, arg: Arg) -> str:
    if "Tensor" in param.kind and isinstance(arg, (int, float, ScalarRef, Complex)):
        return "use the operator's .Scalar overload for numbers"
    return ""


# ---- which values a schema type takes ------------------------------------------------------------


def _param(argument: Any, hidden_write: bool) -> SchemaParam:
    kind = str(argument.real_type)
    accepts = _accepts(kind)
    if argument.N is not None and kind == "List[int]":  # int[2]: one number stands for all
        accepts = _either(accepts, _is_int)
    required = not argument.has_default_value()
    alias = argument.alias_info
    writes = hidden_write or (alias is not None and alias.is_write)
    return SchemaParam(argument.name, kind, argument.kwarg_only, required, writes, accepts)


def _accepts(kind: str) -> Accepts:
    if kind.startswith("Optional[") and kind.endswith("]"):
        return _either(_is_none, _accepts(kind[9:-1]))
    if kind.startswith("List[") and kind.endswith("]"):
        return _each(_accepts(kind[5:-1]))
    return _LEAF_KINDS.get(kind, _is_none)


def _either(one: Accepts, other: Accepts) -> Accepts:
    return lambda arg: one(arg) or other(arg)


def _each(item: Accepts) -> Accepts:
    return lambda arg: isinstance(arg, tuple) and all(map(item, arg))


def _is_none(arg: Arg) -> bool:
    return arg is None


def _is_int(arg: Arg) -> bool:
    return type(arg) is int


def _tag(kind: str) -> Accepts:
    return lambda arg: isinstance(arg, Tag) and arg.kind == kind


# Other types take no value: Generator (random slots replace it), Storage, Stream and so on.
_LEAF_KINDS: dict[str, Accepts] = {
    "Tensor": lambda arg: isinstance(arg, TensorRef),
    "number": lambda arg: isinstance(arg, (bool, int, float, Complex, ScalarRef)),
    "float": lambda arg: type(arg) in (int, float, ScalarRef),
    "int": _is_int,
    "bool": lambda arg: type(arg) is bool,
    "str": lambda arg: type(arg) is str,
    "ScalarType": _tag("dtype"),
    "Layout": _tag("layout"),
    "MemoryFormat": _tag("memory_format"),
    "Device": _tag("device"),
}


# ---- Fake execution: the results of every operator, without memory and without running a kernel.
#
# Imports torch, and changes its default dtype while it runs: for a process of its own.


DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}
# torch logs a traceback whenever a shape rule fails: a bad Program would fill the daemon's log.
_TORCH_LOG = logging.getLogger("torch._subclasses.fake_tensor")
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

# Operators that make one output for every row of a dimension: an expanded view could ask for 2**40 outputs.
_LIST_MAKERS = frozenset(
    f"aten.{name}"
    for name in ("unbind.int", "unbind_copy.int", "split.Tensor", "split_copy.Tensor", "unsafe_split.Tensor")
)
_LONGEST_LIST = 65_536


class FakeRun:
    """Runs the operators of a Program in order. Fake storages stand for the Program's: those of state,
    inputs and constants from the start, temporaries from the operator that makes them."""

    def __init__(self, program: Program) -> None:
        self._program = program
        # Without a shape rule, torch's fallback would run the real kernel on real memory.
        self._operators = FakeOperators(FakeTensorMode(allow_fallback_kernels=False), program.device, fake_call)
        self._tensors: dict[int, torch.Tensor] = {}  # by view
        self._bases: dict[int, torch.Tensor] = {}  # by storage; keeps the fake storage alive
        self._owner: dict[int, int] = {}  # identity of a fake storage -> the Program's storage
        self.unseen_bytes = 0  # the most bytes that one operator returns without a view in the Program
        self._workspaces: dict[int, onednn_lstm.Layer] = {}  # storage -> the LSTM layer that makes it as its workspace

    @contextmanager
    def active(self) -> Iterator[None]:
        """The Program's default dtype, no autograd and no log; restores the process's own settings."""
        before = torch.get_default_dtype()
        quiet, _TORCH_LOG.disabled = _TORCH_LOG.disabled, True
        torch.set_default_dtype(DTYPES[self._program.numerics.default_dtype])
        try:
            with torch.no_grad():
                yield
        finally:
            torch.set_default_dtype(before)
            _TORCH_LOG.disabled = quiet

    def run(self, op: Op, schema: OperatorSchema) -> None:
        """Run one operator inside `active` and compare its outputs with the declared ones."""
        args = [self._value(arg) for arg in op.args]
        kwargs = {name: self._value(arg) for name, arg in op.kwargs}
        self._bounded(op)
        try:
            if schema.overload is onednn_lstm.LAYER:
                returned = self._lstm_layer(op, args)
            else:
                if schema.overload is onednn_lstm.BACKWARD:
                    self._same_layer(op, args)
                returned = self._operators.run(schema.overload, tuple(args), kwargs)
        except ProgramError:
            raise
        except Exception as e:
            raise ProgramError(f"torch refuses the call: {type(e).__name__}: {str(e)[:500]}") from e
        returns = (returned,) if len(schema.returns) == 1 else tuple(returned or ())
        if len(returns) != len(op.outs):
            raise ProgramError(f"it returns {len(returns)} values, {len(op.outs)} are declared")
        unseen = 0
        for position, (kind, out, value) in enumerate(zip(schema.returns, op.outs, returns, strict=True)):
            unseen += self._output(f"output {position}", kind, out, value)
        self.unseen_bytes = max(self.unseen_bytes, unseen)

    def _lstm_layer(self, op: Op, args: list[Any]) -> Any:
        view = onednn_lstm.workspace_view(op)
        if view is None:
            return onednn_lstm.layer(*args)
        storage = self._program.views[view].storage
        self._workspaces[storage] = onednn_lstm.layer_made(args)
        with torch.enable_grad():
            return onednn_lstm.layer(*args, declared=self._program.storages[storage].nbytes)

    def _same_layer(self, op: Op, args: list[Any]) -> None:
        """Check that a backward pass gets the whole workspace of a layer like its own. The kernel does not look."""
        given = op.args[onednn_lstm.GIVEN]
        assert isinstance(given, TensorRef)
        view = self._program.views[given.view]
        made_for = self._workspaces.get(view.storage)
        if made_for != onednn_lstm.layer_used(args) or view.size != (self._program.storages[view.storage].nbytes,):
            raise ProgramError("its workspace is not that of a forward pass of this layer")

    # ---- arguments -------------------------------------------------------------------------------

    def _value(self, arg: Arg) -> Any:
        if isinstance(arg, TensorRef):
            return self._tensor(arg.view)
        if isinstance(arg, tuple):
            return [self._value(item) for item in arg]
        if isinstance(arg, ScalarRef):
            return 0.5 if self._program.scalars[arg.index] == "float" else 1
        if isinstance(arg, Complex):
            return complex(arg.re, arg.im)
        return self._constant(arg) if isinstance(arg, Tag) else arg

    def _constant(self, tag: Tag) -> Any:
        if tag.kind == "dtype":
            return DTYPES[tag.name]
        return torch.device(self._program.device) if tag.kind == "device" else getattr(torch, tag.name)

    def _tensor(self, index: int) -> torch.Tensor:
        found = self._tensors.get(index)
        if found is None:
            found = self._tensors[index] = self._window(self._program.views[index])
        return found

    def _window(self, view: View) -> torch.Tensor:
        storage = self._base(view.storage).untyped_storage()
        return self._operators.view(storage, view.size, view.stride, DTYPES[view.dtype], view.offset)

    def _base(self, storage: int) -> torch.Tensor:
        found = self._bases.get(storage)
        if found is None:
            found = self._operators.empty((self._program.storages[storage].nbytes,), (1,), torch.uint8)
            self._adopt(storage, found)
        return found

    def _adopt(self, storage: int, base: torch.Tensor) -> None:
        self._bases[storage] = base
        self._owner[base.untyped_storage()._cdata] = storage

    def _bounded(self, op: Op) -> None:
        first = op.args[0] if op.args else None
        if op.target in _LIST_MAKERS and isinstance(first, TensorRef):
            longest = max(self._program.views[first.view].size, default=0)
            if longest > _LONGEST_LIST:
                raise ProgramError(f"it may make {longest} outputs; the limit is {_LONGEST_LIST}")

    # ---- outputs ---------------------------------------------------------------------------------

    def _output(self, where: str, kind: str, out: Out, value: Any) -> int:
        """Bytes that `value` holds and no view names."""
        if kind == "List[Tensor]":
            if out is None:
                return sum(self._single(where, None, item) for item in value)
            if not isinstance(out, tuple) or len(out) != len(value):
                raise ProgramError(f"{where}: a list of {len(value)} tensors is not declared as one")
            return sum(self._single(where, view, item) for view, item in zip(out, value, strict=True))
        if isinstance(out, tuple):
            raise ProgramError(f"{where}: a list is declared where one value is returned")
        return self._single(where, out, value)

    def _single(self, where: str, out: int | None, value: Any) -> int:
        if not isinstance(value, FakeTensor):
            if out is not None:
                raise ProgramError(f"{where}: a tensor is declared, {type(value).__name__} is returned")
            return 0
        owner = self._owner.get(value.untyped_storage()._cdata)
        if out is None:
            return aligned(value.untyped_storage().nbytes()) if owner is None else 0
        view = self._program.views[out]
        if owner is None:
            self._birth(where, view.storage, value)
        elif owner != view.storage:
            raise ProgramError(f"{where}: it lies on storage {owner}, {view.storage} is declared")
        self._compare(where, view, value)
        self._tensors.setdefault(out, value)
        return 0

    def _birth(self, where: str, storage: int, value: FakeTensor) -> None:
        declared = self._program.storages[storage]
        if declared.kind != "temp" or storage in self._bases:
            raise ProgramError(f"{where}: new memory is returned, but storage {storage} exists already")
        nbytes = value.untyped_storage().nbytes()
        if nbytes != declared.nbytes:
            raise ProgramError(f"{where}: storage {storage} has {nbytes} bytes, {declared.nbytes} are declared")
        self._adopt(storage, value)

    def _compare(self, where: str, view: View, value: FakeTensor) -> None:
        if value.layout != torch.strided or value.is_conj() or value.is_neg():
            raise ProgramError(
                f"{where}: a tensor that is not strided, or lazily conjugated or negated",
                "make the tensor plain in the step: resolve_conj(), resolve_neg() or to_dense()",
            )
        got = (
            _NAMES.get(value.dtype, str(value.dtype)),
            tuple(value.shape),
            value.stride(),
            value.storage_offset(),
            value.device.type,
        )
        declared = (view.dtype, view.size, view.stride, view.offset, self._program.device)
        for what, a, b in zip(("dtype", "size", "stride", "offset", "device"), got, declared, strict=True):
            if a != b:
                raise ProgramError(f"{where}: its {what} is {a}, declared is {b}")


# ---- The whole check of an encoded Program before a device touches it.
#
# Imports torch and runs slowly (a few hundred microseconds an operator): a child process of the daemon
# calls it, with a time and memory limit of its own. It is a check, not a sandbox: shapes, kinds, names
# and aliases are right afterwards; some kernels still crash on bad *values* (`CheckReport.notes`).


_DIVISIONS = frozenset({"div", "div_", "floor_divide", "floor_divide_", "fmod", "fmod_", "remainder", "remainder_"})


@dataclass(frozen=True, slots=True)
class CheckReport:
    """A Program that passed. content_hash: of the encoding. footprint: state holds the state slots and the constants,
    each rounded up to 64 bytes; transient is what a general allocator is estimated to take for the temporaries
    (`first_fit`), and what one operator returns that no view names. live: bytes of temporaries alive at each operator
    (`live_bytes`). notes: values that could still crash a kernel."""

    program: Program
    content_hash: str
    footprint: Footprint
    live: tuple[int, ...]
    notes: tuple[str, ...]


def check(encoded: bytes, limits: ProgramLimits = DEFAULT, extra_ops: Collection[str] = ()) -> CheckReport:
    """Decode and check a Program. Raises ProgramError naming the operator and the difference."""
    program = decode(encoded, limits)
    validate(program, limits)
    run = FakeRun(program)
    with run.active():
        for index, op in enumerate(program.ops):
            try:
                _operator(program, op, run, extra_ops)
            except ProgramError as e:
                line = describe_op(program, index).strip()
                raise ProgramError(f"operator {index}, {op.target}: {e.message} [{line:.400}]", e.remedy) from e
    planned = first_fit(program)
    return CheckReport(
        program,
        content_hash(encoded),
        footprint(program, planned, run.unseen_bytes),
        tuple(live_bytes(planned)),
        _notes(program),
    )


def _operator(program: Program, op: Op, run: FakeRun, extra_ops: Collection[str]) -> None:
    operators.resolve(op.target, extra_ops)
    schema = match(op)
    for arg in written(op):
        for ref in tensor_refs((arg,)):
            storage = program.storages[program.views[ref.view].storage]
            if storage.kind == "const":
                raise ProgramError("it changes a constant", "make what changes from step to step state")
    check_sizes(program, op)
    run.run(op, schema)


def _notes(program: Program) -> tuple[str, ...]:
    notes = []
    for index, op in enumerate(program.ops):
        name = op.target.split(".")[1]
        if name in _DIVISIONS and all(_is_integer(program, leaf) for leaf in leaves(op_args(op))):
            notes.append(f"operator {index}, {op.target}: integer division traps on the least value by -1")
        for position in operators.INDEX_ARGS.get(op.target, ()):
            for ref in tensor_refs(op.args[position : position + 1]):
                view = program.views[ref.view]
                if program.storages[view.storage].kind != "input" and view.dtype != "bool":
                    notes.append(f"operator {index}, {op.target}: indices made by the step can't be checked ahead")
    return tuple(notes)


def _is_integer(program: Program, arg: Arg) -> bool:
    if isinstance(arg, TensorRef):
        return program.views[arg.view].dtype in ("int8", "int16", "int32", "int64")
    return not isinstance(arg, float)
