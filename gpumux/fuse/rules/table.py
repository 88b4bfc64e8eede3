"""Helpers of the rules for the model dimension, and the table of rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch

from gpumux.fuse.call import Call, Operand


def split_models(made: torch.Tensor, dim: int, models: int) -> torch.Tensor:
    """[..., B*n, ...] -> [B, ..., n, ...], a view: the inverse of `Operand.merged(dim)`."""
    split: torch.Tensor = made.unflatten(dim, (models, made.size(dim) // models))
    return split.movedim(dim, 0)


def split_results(made: Iterable[tuple[torch.Tensor | None, int]], models: int) -> tuple[torch.Tensor | None, ...]:
    """`split_models` for several results, each with its dimension. A gradient that was not asked for is None."""
    return tuple(None if tensor is None else split_models(tensor, dim, models) for tensor, dim in made)


def writable_flat(operand: Operand) -> tuple[torch.Tensor, Callable[[], Any]]:
    """An operand [C] that the operator writes, as [B*C], and a function to call after it was written."""
    if operand.mergeable(0):
        return operand.merged(0), lambda: None
    place = operand.all()
    flat = place.reshape(-1)
    return flat, lambda: place.copy_(flat.view(place.shape))


def in_memory_order(
    tensor: torch.Tensor, last: int
) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor], list[int]]:
    """The tensor with all dimensions but the `last` ones in the order of memory, so that a kernel that needs dense
    rows copies nothing; a function that restores the order in a result of as many dimensions; and the order."""
    count, strides = tensor.dim() - last, tensor.stride()
    order = sorted(range(count), key=lambda d: -strides[d]) + list(range(count, tensor.dim()))
    inverse = [order.index(d) for d in range(len(order))]
    return tensor.permute(order), lambda made: made.permute(inverse), order


# ---- The table of rules.


Rule: TypeAlias = Callable[[Call], Any]

RULES: dict[str, Rule] = {}
PER_MODEL: dict[str, str] = {}  # operators that run once a model, and why


def rule(*targets: str) -> Callable[[Rule], Rule]:
    """Register a rule for operators, such as "mm" or "add.Tensor" (no overload: `.default`)."""

    def register(function: Rule) -> Rule:
        for target in map(_full, targets):
            assert target not in RULES, f"two rules for {target}"
            RULES[target] = function
        return function

    return register


def per_model(reason: str, *targets: str) -> None:
    """Let operators run once a model if they have no rule that works."""
    for target in map(_full, targets):
        PER_MODEL[target] = reason


def _full(target: str) -> str:
    return f"aten.{target}" if "." in target else f"aten.{target}.default"
