"""Operators whose results have as many elements as values say, where the step knows these values.

A mask that is made of constants (`~torch.eye(n, dtype=torch.bool)`), or a buffer that no step writes, chooses as many
elements in every step: an index by it is recorded as one by the places of the chosen elements, which is what torch's
kernels make of it. What is computed of known values alone (`torch.unique_consecutive(torch.tensor(sizes))`) is computed
once and is a constant.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

aten = torch.ops.aten

# Their second argument is a list of indices, which may be masks.
_INDEXED = {
    aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default,
}  # fmt: skip


class KnownShapes:
    """`value`: the value of a tensor that is the same in every step, None for another. `constant`: a tensor of the
    trace for one whose values are known."""

    def __init__(
        self, value: Callable[[Any, torch.Tensor], torch.Tensor | None], constant: Callable[[torch.Tensor], Any]
    ) -> None:
        self._value, self._constant = value, constant

    def without_masks(self, func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments with, for each known mask among the indices, the places that it chooses."""
        if func not in _INDEXED:
            return args
        indices: list[Any] = []
        for index in args[1]:
            mask = isinstance(index, torch.Tensor) and index.dtype is torch.bool
            value = self._value(func, index) if mask else None
            if value is None:
                indices.append(index)
                continue
            with _disable_current_modes():
                chosen = value.nonzero().unbind(1)
            indices += map(self._constant, chosen)
        return (args[0], indices, *args[2:])

    def made(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
        """Whether the operator's result could be computed, and the result."""
        if torch.Tag.dynamic_output_shape not in func.tags or func in _INDEXED:
            return False, None
        given, structure = pytree.tree_flatten((args, kwargs))
        tensors = {i: self._value(func, x) for i, x in enumerate(given) if isinstance(x, torch.Tensor)}
        if not tensors or any(value is None for value in tensors.values()):
            return False, None
        args, kwargs = pytree.tree_unflatten([tensors.get(i, x) for i, x in enumerate(given)], structure)
        with _disable_current_modes():
            made = func(*args, **kwargs)
        return True, pytree.tree_map_only(torch.Tensor, self._constant, made)
