"""What tells one kind of batch from another: types, shapes and strides, and which tensors are the same object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import torch

from gpumux.capture.batch.arrays import layable, tensor_over
from gpumux.capture.batch.containers import flatten
from gpumux.capture.batch.effects import refuse_gradient
from gpumux.capture.state import NUMBERS
from gpumux.errors import CaptureError

Numbers = tuple[tuple[int, Any], ...]  # (position among the batch's leaves, number or text)

_PLAIN = frozenset({torch.Tensor})
_NUMBERS = NUMBERS | {str}
_ARRAYS = frozenset({numpy.ndarray, numpy.memmap})


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
