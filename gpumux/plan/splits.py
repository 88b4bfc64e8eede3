"""Ways to share GPUs among the branches of a block."""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from itertools import chain, combinations
from math import inf
from operator import itemgetter
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


class Splits(NamedTuple):
    """Ways to share GPUs: what a Split has of each."""

    modes: list[tuple[int, ...]]
    caps: list[tuple[int, ...]]


def splits(branches: int, empty: tuple[int, ...], gpus: int, counts: tuple[int, ...]) -> Splits:
    """Every split of `gpus` in which nobody could have more. At least one branch is at home, since moving one back there
    costs nothing; those in `empty` always are, and use no GPU. Raises ConfigError where there are too many."""
    found = Splits([], [])
    movable = [i for i in range(branches) if i not in empty]
    for away_count in range(branches):
        for away in combinations(movable, away_count):
            nobody = len(away) == len(movable)  # is at home that uses a GPU
            parts = _parts(away_count + (not nobody), gpus, counts)
            if len(found.caps) + len(parts) > MAX_SPLITS:
                raise ConfigError(
                    f"a block of {branches} branches over {len(counts)} GPU counts has too many ways to run",
                    "let the counts be powers of two",
                )
            modes, places = [HOME] * branches, [0] * branches
            for place, i in enumerate(away, 1):
                modes[i], places[i] = AWAY, place
            found.modes.extend([tuple(modes)] * len(parts))
            found.caps.extend(map(itemgetter(*places), [(0, *part) for part in parts] if nobody else parts))
    return found


@lru_cache(maxsize=256)
def _parts(number: int, gpus: int, counts: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Tuples of counts (as indices) that together use at most `gpus`, none of which could be the next larger count."""
    larger = (*counts[1:], inf)
    found: list[tuple[int, ...]] = []

    def visit(chosen: tuple[int, ...], left: int) -> None:
        if len(found) > MAX_SPLITS:
            return
        if len(chosen) == number:
            if not any(larger[each] - counts[each] <= left for each in chosen):
                found.append(chosen)
        elif len(chosen) + 1 == number:  # the last one takes as much as it can
            last = bisect_right(counts, left) - 1
            if last >= 0:
                visit((*chosen, last), left - counts[last])
        else:
            for each in range(bisect_right(counts, left)):
                visit((*chosen, each), left - counts[each])

    visit((), gpus)
    return tuple(found)


class Table(NamedTuple):
    """Splits of several numbers of GPUs, and for each number `modes` and `caps` [branches, splits] of them."""

    splits: tuple[Splits, ...]
    modes: tuple[Indices, ...]
    caps: tuple[Indices, ...]


@lru_cache(maxsize=256)
def tabled(branches: int, empty: tuple[int, ...], limits: tuple[int, ...], counts: tuple[int, ...]) -> Table:
    """The splits of each of `limits` GPUs (see `splits`), of two branches or more."""
    found = tuple([splits(branches, empty, gpus, counts) for gpus in limits])
    modes, caps = ([_array(some, branches) for some in each] for each in zip(*found, strict=True))
    return Table(found, tuple(modes), tuple(caps))


def _array(rows: list[tuple[int, ...]], branches: int) -> Indices:
    return np.fromiter(chain.from_iterable(rows), np.intp, len(rows) * branches).reshape(-1, branches).T
