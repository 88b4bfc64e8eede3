"""How the CPU's kernels lay their results in memory, where torch's shape rules say something else.

A Program declares the strides of every tensor, and its views are made by them. Strides of dimensions with one element
address nothing, but kernels read them: BLAS takes another path for a matrix whose leading dimension differs, and a
convolution decides by them whether its images are channels-last. So they have to be those of the plain loop as well, or
the last bits of a result differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._prims_common import (
    compute_elementwise_output_strides,
    is_non_overlapping_and_dense_or_false,
    make_contiguous_strides_for,
    suggest_memory_format,
)

aten = torch.ops.aten

# Views that a rule gives the tensor's own strides where the shape stays, and eager mode strides of its own.
_VIEWS = frozenset((aten.view.default, aten._unsafe_view.default))

# Elementwise operators whose result is laid out like the operands, the first operand first. torch's decompositions,
# which run instead of their shape rules, begin with another operand.
_BY_OPERANDS = frozenset(
    (
        aten.elu_backward.default, aten.hardsigmoid_backward.default, aten.hardswish_backward.default,
        aten.hardtanh_backward.default, aten.softplus_backward.default, aten.logit_backward.default, aten.xlogy.Tensor,
        aten.copysign.Tensor, aten.native_dropout_backward.default,
    )
)  # fmt: skip

# Operators whose result is laid out like this argument.
_LAID_AS = {aten.binary_cross_entropy.default: 0, aten.binary_cross_entropy_backward.default: 1}

# Operators whose result is always contiguous on the CPU.
_CONTIGUOUS = frozenset(
    (
        aten._softmax_backward_data.default, aten._log_softmax_backward_data.default, aten.mse_loss_backward.default,
        aten.smooth_l1_loss_backward.default, aten.huber_loss_backward.default, aten.tril.default, aten.triu.default,
    )
)  # fmt: skip

# Operators whose results keep the strides of a dense operand, also those of dimensions with one element.
_KEEP = frozenset(
    (
        aten.clone.default, aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default,
        aten.full_like.default, aten.rand_like.default, aten.randn_like.default, aten.flip.default,
        aten.sort.default, aten.sort.stable,
    )
)  # fmt: skip

# Batch norms lay their first result by the memory format of this argument, of whose strides they read no more.
_BY_FORMAT = {aten.native_batch_norm.default: 0, aten.native_batch_norm_backward.default: 1}


def laid_out(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, device: str) -> Any:
    """The fake result of an operator, `out`, with the strides of the kernel's. Under the active FakeTensorMode."""
    if func in _VIEWS:
        return _viewed(args[0], out)
    if func in _BY_OPERANDS and out.dim() > 1:
        strides = compute_elementwise_output_strides(*[a.expand(out.shape) for a in _tensors(args)])
        return _restrided(out, tuple(strides))
    if func in _LAID_AS and out.dim() == args[_LAID_AS[func]].dim():
        return torch.empty_like(args[_LAID_AS[func]])
    if device != "cpu":
        return out
    if func in _CONTIGUOUS:
        return torch.empty_like(out, memory_format=torch.contiguous_format)
    if func in _BY_FORMAT and out[0] is not None:
        form = suggest_memory_format(args[_BY_FORMAT[func]])
        return (torch.empty_like(out[0], memory_format=form), *out[1:])
    if func is aten.native_layer_norm_backward.default and out[0] is not None:
        return (torch.empty_like(out[0], memory_format=torch.contiguous_format), *out[1:])
    if func in _KEEP and kwargs.get("memory_format") in (None, torch.preserve_format):
        return _kept(args[0], out)
    if torch.Tag.pointwise in func.tags and isinstance(out, torch.Tensor) and not _otherwise(func, args):
        return _elementwise(_tensors((*args, *kwargs.values())), out)
    return out


def _otherwise(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an elementwise operator makes no new tensor, or makes it as its rule says: a number that becomes an
    operand of no dimension is none of TensorIterator's fast cases, and hardtanh is not elementwise by itself."""
    mutable: bool = func._schema.is_mutable
    numbers = any(isinstance(a, (int, float, torch.SymInt, torch.SymFloat)) for a in args[:2])
    of_number = func._overloadname.startswith("Scalar") or (func._overloadname.startswith("Tensor") and numbers)
    return mutable or of_number or func is aten.hardtanh.default


def grouped_product(
    one: torch.Tensor, other: torch.Tensor, offs: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    """The fake result of `_grouped_mm` on the CPU: products of groups of rows or columns that end at `offs`. torch's
    rule is that of a GPU's kernel, which takes bfloat16 alone. Raises ValueError."""
    flat = one.dim() == 2, other.dim() == 2
    if {one.dim(), other.dim()} - {2, 3} or one.dtype != other.dtype or not one.is_floating_point():
        raise ValueError(f"grouped products of {one.dtype} {tuple(one.shape)} and {other.dtype} {tuple(other.shape)}")
    if one.shape[-1] != other.shape[-2] or not all(map(_in_steps, (one, other))):
        raise ValueError(f"products of {tuple(one.shape)} and {tuple(other.shape)}, or of strides not in 16 bytes")
    if (offs is not None) != any(flat) or (offs is not None and (offs.dim() != 1 or offs.dtype is not torch.int32)):
        raise ValueError("groups end at offsets in int32, which two matrices of one group each don't have")
    groups = [each.shape[0] for each in (offs, one, other) if each is not None and each.dim() != 2]
    if len(set(groups)) > 1 or bias is not None or out_dtype not in (None, one.dtype):
        raise ValueError(f"products of groups with a bias, in {out_dtype}, or of {groups} groups")
    rows, columns = one.shape[-2], other.shape[-1]
    step = 16 // one.element_size()
    width = -(-columns // step) * step  # of a row in memory
    if flat[0] != flat[1]:
        return torch.empty_strided((rows, columns), (width, 1), dtype=one.dtype, device=one.device)
    size, strides = (groups[0], rows, columns), (rows * width, width, 1)
    return torch.empty_strided(size, strides, dtype=one.dtype, device=one.device)


def _in_steps(matrices: torch.Tensor) -> bool:
    """Whether rows or columns lie side by side, at a distance that is a multiple of 16 bytes."""
    (down, right), (rows, columns) = matrices.stride()[-2:], matrices.shape[-2:]
    step = right if down == 1 and right >= max(1, rows) else down if right == 1 and down >= max(1, columns) else 1
    return step % (16 // matrices.element_size()) == 0


def view_strides(size: Sequence[int], stride: Sequence[int], to: Sequence[int]) -> tuple[int, ...] | None:
    """The strides of a tensor of these sizes and strides, viewed in the shape `to` of as many elements, as eager mode
    computes them. None if there is no such view, or nothing to see."""
    if 0 in size:
        return None
    if not size:
        return (1,) * len(to)
    found = [0] * len(to)
    at, base, elements, placed = len(to) - 1, stride[-1], 1, 1
    for dim in reversed(range(len(size))):
        elements *= size[dim]
        if dim and (size[dim - 1] == 1 or stride[dim - 1] == elements * base):
            continue
        while at >= 0 and (placed < elements or to[at] == 1):
            found[at] = placed * base
            placed *= to[at]
            at -= 1
        if placed != elements:
            return None
        if dim:
            base, elements, placed = stride[dim - 1], 1, 1
    return tuple(found) if at < 0 else None


def _viewed(source: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    strides = view_strides(source.shape, source.stride(), out.shape)
    if strides is None or strides == out.stride():
        return out
    return source.as_strided(out.shape, strides, source.storage_offset())


def _tensors(args: Sequence[Any]) -> list[torch.Tensor]:
    return [a for a in args if isinstance(a, torch.Tensor)]


def _restrided(out: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    if out.stride() == strides:
        return out
    return torch.empty_strided(out.shape, strides, dtype=out.dtype, device=out.device)


def _alike(size: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether these strides address the same elements."""
    return 0 not in size and all(n == 1 or a == b for n, a, b in zip(size, one, other, strict=True))


def _kept(source: torch.Tensor, out: Any) -> Any:
    if not isinstance(out, torch.Tensor):
        return type(out)(_kept(source, each) for each in out)
    if source.shape != out.shape or not is_non_overlapping_and_dense_or_false(source):
        return out
    return _restrided(out, source.stride())


def _elementwise(operands: list[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    """`out` with the strides that torch's TensorIterator gives dimensions with one element. It knows three fast cases
    for operands of one shape: contiguous, channels-last, and dense with the same strides."""
    if 1 not in out.shape or not operands or any(a.shape != out.shape for a in operands):
        return out
    first = operands[0].stride()
    if all(a.is_contiguous() for a in operands):
        strides = tuple(make_contiguous_strides_for(out.shape))
    elif out.dim() == 4 and all(a.is_contiguous(memory_format=torch.channels_last) for a in operands):
        strides = torch.empty(out.shape, device=out.device, memory_format=torch.channels_last).stride()
    elif all(is_non_overlapping_and_dense_or_false(a) and a.stride() == first for a in operands):
        strides = first
    else:
        strides = tuple(compute_elementwise_output_strides(*operands))
    return _restrided(out, strides) if _alike(out.shape, strides, out.stride()) else out
