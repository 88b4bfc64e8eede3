"""An optimizer's hyperparameters by name: the numbers of its groups, lifted to host scalars."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy
import torch

from gpumux.client.host import Expr, Number
from gpumux.errors import CaptureError


def hyperparameters(optimizers: Sequence[Any]) -> Iterator[tuple[int, int, str, int | None, Any]]:
    """(optimizer, group, key, position in a tuple or None, value) for every number of every group. Numbers
    are Python's own. Raises CaptureError for what behaves like neither a float nor an int."""
    for i, optimizer in enumerate(optimizers):
        for j, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if key == "params":
                    continue
                place = f"param_groups[{j}][{key!r}]"
                if _is_number(value, place) or _is_host_tensor(value):
                    yield i, j, key, None, _plain(value)
                elif isinstance(value, (tuple, list)):
                    for k, item in enumerate(value):
                        if _is_number(item, f"{place}[{k}]"):
                            yield i, j, key, k, _plain(item)


def _is_number(value: Any, place: str) -> bool:
    """numpy.float64 is a float, to Python too. Its other numbers are not: they round and overflow by rules
    of their own."""
    if isinstance(value, numpy.generic) and not isinstance(value, (float, str)):
        kind = "bool" if isinstance(value, numpy.bool_) else "float or int"
        raise CaptureError(f"{place} is a numpy.{type(value).__name__}", f"give it as a Python {kind}")
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _plain(value: Any) -> Any:
    """A number without what a subclass of float may add: what crosses the wire is a float."""
    return float(value) if isinstance(value, float) else value


def _is_host_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.device.type == "cpu"


def hyper_name(i: int, j: int, key: str, k: int | None) -> str:
    return f"o{i}.g{j}.{key}" if k is None else f"o{i}.g{j}.{key}.{k}"


class Steady:
    """Which numbers of a step are written into its Program, because hyperparameters alone make them that no schedule usually
    changes: all but the learning rate. Not those seen to change. A kernel is quicker with a number it knows."""

    def __init__(self) -> None:
        self._moved: set[str] = set()

    def holds(self, expr: Expr) -> bool:
        """Whether an expression is made of such hyperparameters, and constants, alone."""
        names = set(_variables(expr))
        return bool(names) and all(map(self._steady, names))

    def moved(self, exprs: Iterable[Expr], now: Mapping[str, Number]) -> list[str]:
        """The hyperparameters among these that have changed since their trace; they are steady no more."""
        found = sorted(
            {name for expr in exprs for name, old in _variables(expr).items() if repr(now.get(name)) != repr(old)}
        )
        self._moved.update(found)
        return found

    def _steady(self, name: str) -> bool:
        return name not in self._moved and bool(re.fullmatch(r"o\d+\.g\d+\.(?!lr$).*", name))


def _variables(expr: Expr) -> dict[str, Number]:
    """Names, with the values at the trace."""
    if expr.op == "var":
        return {expr.args[0]: expr.value}
    if expr.op == "const":
        return {}
    return {name: value for arg in expr.args for name, value in _variables(arg).items()}


def _read(value: Any, place: str) -> Any:
    return _plain(value) if _is_number(value, place) else value


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
            kind = type(value)
            if kind is not float and kind is not int:
                value = value.item() if isinstance(value, torch.Tensor) else _read(value, f"param_groups[{j}][{key!r}]")
            out[name] = value
        return out
