"""Which trials share an array: partitions by infusible values, cut to capacity, and put back in order (HFTA, appendix E).

After a rung the survivors are partitioned anew, so that arrays are full again however the losers were spread. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from gpumux.errors import ConfigError
from gpumux.fuse.tuning.space import Config, Space, Value

T = TypeVar("T")
Key: TypeAlias = tuple[tuple[str, Value], ...]


@dataclass(frozen=True, slots=True)
class Partition:
    """Trials with equal infusible values. `key`: those values."""

    key: Key
    trials: tuple[int, ...]

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.key) or "all alike"


def partition(configs: Mapping[int, Config], space: Space) -> list[Partition]:
    """The trials by their infusible values, in the order in which they were first met."""
    found: dict[tuple[object, ...], tuple[Key, list[int]]] = {}
    for trial, config in configs.items():
        key = space.infusible(config)
        typed = tuple(
            (name, type(value), value) for name, value in key
        )  # 1, 1.0 and True are equal, and are not the same
        found.setdefault(typed, (key, []))[1].append(trial)
    return [Partition(key, tuple(trials)) for key, trials in found.values()]


def arrays(
    partitions: Iterable[Partition], capacity: Callable[[Partition], int]
) -> list[tuple[Partition, tuple[int, ...]]]:
    """Full arrays first, what is left over last, of each partition. Raises ConfigError for one that holds nothing."""
    made = []
    for each in partitions:
        most = capacity(each)
        if most < 1:
            raise ConfigError(
                f"not one model of the partition {each} fits into the memory allowed", "allow more memory"
            )
        made += [(each, each.trials[at : at + most]) for at in range(0, len(each.trials), most)]
    return made


def reorder(results: Mapping[int, T], trials: Sequence[int]) -> dict[int, T]:
    """What arrays gave, in the order in which the algorithm asked. Every trial must be there once, and no other."""
    if results.keys() != set(trials) or len(set(trials)) != len(trials):
        raise AssertionError(f"asked for trials {sorted(trials)}, got {sorted(results)}")
    return {trial: results[trial] for trial in trials}
