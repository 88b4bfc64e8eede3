"""Hyper-parameters of 0 in some models of an array and not in others.

torch's optimizers leave out the operators of a weight decay or a momentum of 0, so such a model would not be of one
kind with the others. It gets the smallest positive number instead: what that adds is 0, or far below what any parameter
is rounded to. Its `state_dict` has the 0 again, and a momentum's buffers, which a momentum of 0 makes no use of.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

LEAST = math.ulp(0.0)
KEYS = ("weight_decay", "momentum")


def stand_in(models: Sequence[Sequence[Any]], first: int = 0) -> None:
    """Give hyper-parameters of 0 the value LEAST where another model has more. `models`: the optimizers of each.
    `first`: models before this one are running, and keep what they have."""
    for optimizers in zip(*models, strict=False):
        if any(not _is_torchs(each) or type(each) is not type(optimizers[0]) for each in optimizers):
            continue
        for groups in zip(*[each.param_groups for each in optimizers], strict=False):
            for key in KEYS:
                if any(group.get(key) for group in groups):
                    _stand_in(groups[first:], key)


def stand_in_everywhere(optimizers: Sequence[Any]) -> None:
    """Give all hyper-parameters of 0 the value LEAST, as if another model had more."""
    for optimizer in optimizers:
        for key in KEYS:
            _stand_in(optimizer.param_groups if _is_torchs(optimizer) else (), key)


def _stand_in(groups: Iterable[dict[str, Any]], key: str) -> None:
    for group in groups:
        value = group.get(key)
        if isinstance(value, (int, float)) and value == 0 and (key != "momentum" or _is_plain(group)):
            group[key] = LEAST


def restored(groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Copies of parameter groups that have the zeros again."""
    return [{k: 0.0 if k in KEYS and v == LEAST else v for k, v in group.items()} for group in groups]


def places(optimizers: Sequence[Any]) -> list[tuple[int, int, str]]:
    """Where LEAST stands for a 0: optimizer, parameter group and key."""
    return [
        (number, at, key)
        for number, optimizer in enumerate(optimizers)
        if _is_torchs(optimizer)
        for at, group in enumerate(optimizer.param_groups)
        for key in KEYS
        if group.get(key) == LEAST
    ]


def put(optimizers: Sequence[Any], where: Iterable[tuple[int, int, str]], value: float) -> None:
    """Set these hyper-parameters, where they are 0 or LEAST."""
    for number, at, key in where:
        groups = optimizers[number].param_groups
        if at < len(groups) and groups[at].get(key) in (0.0, LEAST):
            groups[at][key] = value


def _is_torchs(optimizer: Any) -> bool:
    """Only of torch's own optimizers it is known that nothing is divided by these."""
    return isinstance(optimizer, torch.optim.Optimizer) and type(optimizer).__module__.startswith("torch.optim.")


def _is_plain(group: dict[str, Any]) -> bool:
    """Whether a momentum of nearly 0 does what one of 0 does: a momentum of 0 ignores the dampening."""
    return not group.get("dampening", 0) and not group.get("nesterov", False)
