"""The description of a step's batch, by which its variant is found: structure, types and layouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import torch

from gpumux.capture.batch.arrays import tensor_over
from gpumux.capture.batch.containers import flatten
from gpumux.capture.batch.effects import refuse_gradient
from gpumux.capture.state import NUMBERS
from gpumux.errors import CaptureError

Numbers = tuple[tuple[int, Any], ...]  # (position among the batch's leaves, number or text)

_PLAIN = frozenset({torch.Tensor})
_NUMBERS = NUMBERS | {str}
_ARRAYS = frozenset({numpy.ndarray, numpy.memmap})


def layable(tensor: torch.Tensor, position: int) -> torch.Tensor:
    """The tensor itself. Raises CaptureError if its bytes can't lie in shared memory with its own strides, which
    matter because kernels may choose their order of summation by strides."""
    if tensor.is_contiguous():
        return tensor
    span, expected = 1, 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride > 0:
            if stride < expected:  # overlapping windows (unfold)
                raise _unlayable(position, "its elements overlap in memory")
            expected = stride * size
            span += (size - 1) * stride
    if span > 8 * max(1, tensor.numel()) and span > 1 << 20:
        raise _unlayable(position, f"it is spread over {span * tensor.element_size()} bytes")
    return tensor


def _unlayable(position: int, why: str) -> CaptureError:
    return CaptureError(
        f"tensor {position} of the batch can't be laid into shared memory as it is: {why}",
        "pass .contiguous() (and do so in runs you compare with)",
    )


def batch_key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[torch.Tensor], Numbers]:
    """(hashable description, tensors in order, (position, value) of the numbers and texts) of a batch. The description
    has the types of numbers and texts alone. Raises CaptureError for a leaf that is neither a tensor nor a plain
    constant."""
    if not kwargs and _PLAIN.issuperset(map(type, args)):
        key: list[Any] = []
        for i, t in enumerate(args):
            if not t.is_contiguous():
                layable(t, i)
            requires_grad = t.requires_grad
            if requires_grad:
                refuse_gradient(t, i)
            key.append((t.dtype, t.shape, t.stride(), requires_grad))
        return (*key, *_repeated(args)), list(args), ()
    leaves, spec = flatten((args, kwargs), hiding=True)
    tensors: list[torch.Tensor] = []
    arrays: dict[int, torch.Tensor] = {}
    parts: list[Any] = [str(spec)]
    numbers: list[tuple[int, Any]] = []
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            tensors.append(layable(leaf, len(tensors)))
            t = tensors[-1]
            if t.requires_grad:
                refuse_gradient(t, len(tensors) - 1)
            parts.append((t.dtype, t.shape, t.stride(), t.requires_grad))
        elif type(leaf) in _NUMBERS:
            parts.append(type(leaf))
            numbers.append((i, leaf))
        elif type(leaf) in _ARRAYS:
            t = arrays.get(id(leaf))
            if t is None:
                t = arrays[id(leaf)] = layable(tensor_over(leaf), len(tensors))
            tensors.append(t)
            parts.append(("array", t.dtype, t.shape, t.stride()))
        elif leaf is None or isinstance(leaf, (bool, int, float, str)):
            parts.append((type(leaf), repr(leaf)))
        else:
            kind = f"numpy.{type(leaf).__name__}" if isinstance(leaf, numpy.generic) else type(leaf).__name__
            raise CaptureError(
                f"the batch holds a {kind}",
                "pass tensors, arrays, Python's own numbers (int(n), float(x)), strings and containers of them",
            )
    return (*parts, *_repeated(tensors)), tensors, tuple(numbers)


def _repeated(tensors: Sequence[torch.Tensor]) -> tuple[tuple[int, ...], ...]:
    """Which tensors of a batch are the same object, because Python tells them apart by `is`, as multi-head attention
    does with query and key. Empty if all are different."""
    if len(set(map(id, tensors))) == len(tensors):
        return ()
    first: dict[int, int] = {}
    return (tuple([first.setdefault(id(t), i) for i, t in enumerate(tensors)]),)


def other_batch(old: tuple[Any, ...], new: tuple[Any, ...]) -> str:
    """How the description of a batch differs from that of another one."""
    if len(old) != len(new):
        return "another structure of the batch"
    before, now = next((a, b) for a, b in zip(old, new, strict=True) if a != b)
    if isinstance(before, type) and isinstance(now, type):
        return f"a value of type {now.__name__} in the batch, where one of type {before.__name__} was"
    tensors = [isinstance(one, tuple) and isinstance(one[0], torch.dtype) for one in (before, now)]
    if all(tensors):
        if before[0] != now[0]:
            return f"a batch tensor of type {now[0]}, where one of {before[0]} was"
        if before[1] != now[1]:
            return f"a batch tensor of shape {tuple(now[1])}, where one of {tuple(before[1])} was"
        return "a batch tensor with other strides, or that requires grad where it did not"
    if all(isinstance(one, tuple) and isinstance(one[0], type) for one in (before, now)):
        return f"{now[1]:.60} in the batch, where {before[1]:.60} was"
    return "another structure of the batch"
