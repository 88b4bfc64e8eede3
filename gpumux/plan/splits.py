"""Ways to share GPUs among the branches of a block."""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from itertools import combinations
from math import inf
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from gpumux.errors import ConfigError

MAX_SPLITS = 20_000
HOME, AWAY = 0, 1

Indices: TypeAlias = npt.NDArray[np.intp]


class Split(NamedTuple):
    """One way to share GPUs: for each branch whether it is HOME or AWAY, and how many it may use at most, as an index into
    the counts (0 for an empty branch, which uses none)."""

    modes: tuple[int, ...]
    caps: tuple[int, ...]


@lru_cache(maxsize=256)
def splits(branches: int, empty: tuple[int, ...], gpus: int, counts: tuple[int, ...]) -> tuple[Split, ...]:
    """Every split of `gpus` in which nobody could have more. At least one branch is at home, since moving one back there
    costs nothing; those in `empty` always are, and use no GPU. Raises ConfigError where there are too many."""
    found: list[Split] = []
    index = {0: 0, **{count: i for i, count in enumerate(counts)}}
    movable = [i for i in range(branches) if i not in empty]
    for away_count in range(branches):
        for away in combinations(movable, away_count):
            nobody = all(i in empty for i in range(branches) if i not in away)
            places = [1 + away.index(i) if i in away else 0 for i in range(branches)]
            modes = tuple(AWAY if i in away else HOME for i in range(branches))
            parts = _parts(away_count + (not nobody), gpus, counts)
            if len(found) + len(parts) > MAX_SPLITS:
                raise ConfigError(
                    f"a block of {branches} branches over {len(counts)} GPU counts has too many ways to run",
                    "let the counts be powers of two",
                )
            for part in parts:
                sizes = (0, *part) if nobody else part
                found.append(Split(modes, tuple([index[sizes[place]] for place in places])))
    return tuple(found)


@lru_cache(maxsize=256)
def _parts(number: int, gpus: int, counts: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Tuples of counts that together use at most `gpus`, none of which could be the next larger count."""
    larger = dict(zip(counts, (*counts[1:], inf), strict=True))
    found: list[tuple[int, ...]] = []

    def visit(chosen: tuple[int, ...], left: int) -> None:
        if len(found) > MAX_SPLITS:
            return
        if len(chosen) == number:
            if all(larger[each] - each > left for each in chosen):
                found.append(chosen)
        elif len(chosen) + 1 == number:  # the last one takes as much as it can
            fitting = bisect_right(counts, left)
            if fitting:
                visit((*chosen, counts[fitting - 1]), left - counts[fitting - 1])
        else:
            for each in counts[: bisect_right(counts, left)]:
                visit((*chosen, each), left - each)

    visit((), gpus)
    return tuple(found)


class Table(NamedTuple):
    """Splits of several numbers of GPUs, and for each number `modes` and `caps` [branches, splits] of them."""

    splits: tuple[tuple[Split, ...], ...]
    modes: tuple[Indices, ...]
    caps: tuple[Indices, ...]


@lru_cache(maxsize=256)
def tabled(branches: int, empty: tuple[int, ...], limits: tuple[int, ...], counts: tuple[int, ...]) -> Table:
    """The splits of each of `limits` GPUs (see `splits`)."""
    found = tuple([splits(branches, empty, gpus, counts) for gpus in limits])
    modes = [np.array([split.modes for split in some], dtype=np.intp).reshape(-1, branches).T for some in found]
    caps = [np.array([split.caps for split in some], dtype=np.intp).reshape(-1, branches).T for some in found]
    return Table(found, tuple(modes), tuple(caps))
