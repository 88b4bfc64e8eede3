"""What several families of rules do with the model dimension."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch

from gpumux.fuse.call import Call, Operand


def apart(made: torch.Tensor, dim: int, models: int) -> torch.Tensor:
    """[..., B*n, ...] -> [B, ..., n, ...], a view: what `Operand.merged(dim)` undoes."""
    split: torch.Tensor = made.unflatten(dim, (models, made.size(dim) // models))
    return split.movedim(dim, 0)


def parts(made: Iterable[tuple[torch.Tensor | None, int]], models: int) -> tuple[torch.Tensor | None, ...]:
    """`apart` of several results, each with its dimension, of which a gradient nobody asked for may be None."""
    return tuple(None if tensor is None else apart(tensor, dim, models) for tensor, dim in made)


def written(operand: Operand) -> tuple[torch.Tensor, Callable[[], Any]]:
    """An operand [C] that the operator writes as [B*C], and what is to be called when it was written."""
    if operand.mergeable(0):
        return operand.merged(0), lambda: None
    place = operand.all()
    flat = place.reshape(-1)
    return flat, lambda: place.copy_(flat.view(place.shape))


def by_memory(
    tensor: torch.Tensor, last: int
) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor], list[int]]:
    """The tensor with all dimensions but the `last` ones in the order of memory, so that a kernel that asks for dense
    rows copies nothing; what undoes that to a result with as many dimensions; and the order."""
    count, strides = tensor.dim() - last, tensor.stride()
    order = sorted(range(count), key=lambda d: -strides[d]) + list(range(count, tensor.dim()))
    inverse = [order.index(d) for d in range(len(order))]
    return tensor.permute(order), lambda made: made.permute(inverse), order


# ---- The table of rules.


Rule: TypeAlias = Callable[[Call], Any]

RULES: dict[str, Rule] = {}
PER_MODEL: dict[str, str] = {}  # operators that run once a model, with the reason


def rule(*targets: str) -> Callable[[Rule], Rule]:
    """Register a rule for operators, as "mm" or "add.Tensor" (no overload: `.default`)."""

    def register(function: Rule) -> Rule:
        for target in map(_full, targets):
            assert target not in RULES, f"two rules for {target}"
            RULES[target] = function
        return function

    return register


def per_model(reason: str, *targets: str) -> None:
    """Let operators run once a model where nothing better is known."""
    for target in map(_full, targets):
        PER_MODEL[target] = reason


def _full(target: str) -> str:
    return f"aten.{target}" if "." in target else f"aten.{target}.default"
