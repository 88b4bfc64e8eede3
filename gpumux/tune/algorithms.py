"""Which trials run for how long: random search, and Hyperband with synchronous rungs (Li et al., JMLR 18, algorithm 1).

An algorithm is a generator of rungs that receives, after each, the trials that continue. It knows only numbers of
trials and steps, no configurations, models or times. It is therefore replayed exactly when a sweep is resumed.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from gpumux.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Rung:
    """Train `trials` from `start` steps to `steps`, score them, and let the best `keep` continue; 0: they are done."""

    bracket: int
    rung: int
    start: int
    steps: int
    trials: tuple[int, ...]
    keep: int = 0


Algorithm: TypeAlias = Generator[Rung, Sequence[int], None]


def random_search(trials: int, steps: int) -> Algorithm:
    """Every configuration gets the whole budget (Bergstra and Bengio, 2012)."""
    _at_least("trials", trials, 1)
    _at_least("steps", steps, 1)
    yield Rung(0, 0, 0, steps, tuple(range(trials)))


def brackets(steps: int, min_steps: int, eta: int) -> list[tuple[int, int]]:
    """(s, n) for s = s_max ... 0: bracket s starts with n configurations and has s + 1 rungs. In the paper's terms R is
    steps / min_steps, s_max = floor(log_eta R) and n = ceil((s_max + 1) / (s + 1) * eta**s)."""
    s_max = 0
    while min_steps * eta ** (s_max + 1) <= steps:
        s_max += 1
    return [(s, -(-(s_max + 1) * eta**s // (s + 1))) for s in range(s_max, -1, -1)]


def rung_steps(steps: int, eta: int, s: int, i: int) -> int:
    """Steps that a configuration of bracket s has behind it after rung i: R * eta**(i - s), at least 1."""
    return max(1, steps // int(eta ** (s - i)))


def hyperband(steps: int, *, min_steps: int, eta: int = 3, skip_last: int = 0, trials: int | None = None) -> Algorithm:
    """One pass over the brackets s_max ... 0. Each bracket is successive halving whose trials continue from the rung
    below.

    steps: the most steps of a configuration (R). min_steps: least steps of the first rung of the largest bracket.
    eta: one in eta continues to the next rung. skip_last: rungs left out at the end of every bracket, which keeps
    at least one (HFTA, table 11). trials: number of configurations in all, with passes one after another and the last
    bracket cut; default: those of one pass. Raises ConfigError.
    """
    _at_least("steps", steps, 1)
    _at_least("min_steps", min_steps, 1)
    _at_least("eta", eta, 2)
    _at_least("skip_last", skip_last, 0)
    if min_steps > steps:
        raise ConfigError(
            f"min_steps is {min_steps}, above steps {steps}", "a first rung is no longer than the last one"
        )
    if trials is not None:
        _at_least("trials", trials, 1)
    first, number = 0, 0
    while first == 0 or (trials is not None and first < trials):
        for s, wanted in brackets(steps, min_steps, eta):
            n = wanted if trials is None else min(wanted, trials - first)
            if n == 0:
                return
            alive: tuple[int, ...] = tuple(range(first, first + n))
            rungs, start = max(1, s + 1 - skip_last), 0
            for i in range(rungs):
                reached = rung_steps(steps, eta, s, i)
                if reached == start:  # a budget so small that two rungs coincide
                    continue
                keep = max(1, n // eta ** (i + 1)) if i + 1 < rungs else 0
                kept = yield Rung(number, i, start, reached, alive, min(keep, len(alive)))
                alive, start = tuple(kept), reached
            first += n
            number += 1


def ranked(scores: Mapping[int, float], *, maximize: bool) -> list[int]:
    """Trials from best to worst. One without a number (nan) is worst; of two equal ones the earlier is better."""
    sign = -1.0 if maximize else 1.0
    return sorted(scores, key=lambda trial: (math.isnan(scores[trial]), _key(sign * scores[trial]), trial))


def _key(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _at_least(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} is {value!r}", f"give a whole number from {least} up")
