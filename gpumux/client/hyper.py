"""An optimizer's hyperparameters by name: the numbers of its groups, lifted to host scalars."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy
import torch

from gpumux.client.host import Number
from gpumux.errors import CaptureError


def hyperparameters(optimizers: Sequence[Any]) -> Iterator[tuple[int, int, str, int | None, Any]]:
    """(optimizer, group, key, position in a tuple or None, value) for every number of every group."""
    for i, optimizer in enumerate(optimizers):
        for j, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if key == "params" or isinstance(value, (bool, str)):
                    continue
                if isinstance(value, numpy.generic) and not isinstance(value, float):
                    raise CaptureError(
                        f"param_groups[{j}][{key!r}] is a numpy.{type(value).__name__}",
                        "give it as a Python float or int",
                    )
                if isinstance(value, (int, float)) or _is_host_tensor(value):
                    yield i, j, key, None, value
                elif isinstance(value, (tuple, list)):
                    for k, item in enumerate(value):
                        if isinstance(item, (int, float)) and not isinstance(item, bool):
                            yield i, j, key, k, item


def _is_host_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.device.type == "cpu"


def hyper_name(i: int, j: int, key: str, k: int | None) -> str:
    return f"o{i}.g{j}.{key}" if k is None else f"o{i}.g{j}.{key}.{k}"


class HyperReader:
    """Reads the optimizers' numbers at every call, without walking the groups again."""

    def __init__(self, optimizers: list[Any]) -> None:
        self._slots = [
            (hyper_name(i, j, key, k), optimizers[i], j, key, k) for i, j, key, k, _ in hyperparameters(optimizers)
        ]

    def read(self) -> dict[str, Number]:
        out: dict[str, Number] = {}
        for name, optimizer, j, key, k in self._slots:
            value = optimizer.param_groups[j][key]  # asked anew: load_state_dict makes new groups
            if k is not None:
                value = value[k]
            out[name] = value.item() if isinstance(value, torch.Tensor) else value
        return out
