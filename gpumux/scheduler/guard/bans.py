"""Bans: while these operators of a high program run, this low program may not. Measured, and never for ever.

A ban ends in one of three ways: it expires, and a single launch (the probe) finds that the pair no longer hurts; the
same range is found not to hurt under another cut; or one of the jobs is gone. A probe that hurts makes the next ban
twice as long, up to a bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from gpumux.types import JobId

FIRST_STEPS: Final = 64  # length of a first ban, in solo steps of the high job
LONGEST_STEPS: Final = 1024
# Whatever the steps' length, a ban lasts between these:
SHORTEST_S: Final = 10e-3
LONGEST_S: Final = 120.0

Why: TypeAlias = Literal["tail", "price"]


@dataclass(slots=True, eq=False, kw_only=True)
class Ban:
    """`operators` are [start, end) of the high program with key `program`, or empty: the collectives before `start`.
    `ratio` is the time of that range beside the low program over its time alone. `why`: one launch beside it costs more
    than a step may lose (tail), or other ranges give more low work for the same loss (price). Times are seconds on the
    scheduler's clock."""

    high: JobId
    low: JobId
    operators: tuple[int, int]
    program: str
    share: float
    ratio: float
    samples: int
    why: Why
    since: float
    until: float = 0.0
    failures: int = 0
    probing: bool = False  # a probe is out
    lifted: bool = False

    @property
    def of_collective(self) -> bool:
        return self.operators[0] == self.operators[1]


class Bans:
    """All bans of one device."""

    def __init__(self) -> None:
        self.active: list[Ban] = []
        self.total = 0  # ever imposed
        self.probes = 0  # launches that were explored although they should have been held

    def impose(self, ban: Ban, step_seconds: float) -> None:
        ban.until = ban.since + _length(0, step_seconds)
        self.active.append(ban)
        self.total += 1

    def lengthen(self, ban: Ban, now: float, step_seconds: float) -> None:
        """Its probe failed."""
        ban.probing = False
        ban.failures += 1
        ban.until = now + _length(ban.failures, step_seconds)

    def lift(self, ban: Ban) -> None:
        if not ban.lifted:
            ban.lifted = True
            self.active.remove(ban)

    def forget(self, job: JobId) -> bool:
        """The job is gone: lift its bans. What was measured is kept. True if there were any."""
        gone = [ban for ban in self.active if job in (ban.high, ban.low)]
        for ban in gone:
            self.lift(ban)
        return bool(gone)


def _length(failures: int, step_seconds: float) -> float:
    steps = min(FIRST_STEPS << min(failures, 8), LONGEST_STEPS)
    return min(max(steps * step_seconds, SHORTEST_S), LONGEST_S)
