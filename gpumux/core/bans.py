"""Bans: "while these operators of that program run, this low job may not", measured and expiring.

A ban ends in one of two ways: it expires and a single launch, the probe, finds that the pair no longer
hurts, or the controller finds the loss worth the gain after all. A probe that hurts makes the next
ban twice as long, up to a bound: what stopped hurting is to be found out some day.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from gpumux.model import JobId

FIRST_STEPS: Final = 64  # how long a first ban lasts, in solo steps of the high job
LONGEST_STEPS: Final = 1024
# Whatever the steps' length, a ban lasts between these.
SHORTEST_S: Final = 10e-3
LONGEST_S: Final = 120.0
PROBE_EVERY: Final = 250  # steps of the high job after which what low work was found to cost is looked at again

Why: TypeAlias = Literal["tail", "price"]


@dataclass(slots=True, eq=False)
class Ban:
    """`operators` are [start, end) of the high program, whose key is `program`; `ratio` is shared over solo time of that range;
    `why`: one launch beside it costs more than a step may lose (tail), or other ranges give more low
    work for the same loss (price). Times are seconds on the core's clock."""

    high: JobId
    low: JobId
    operators: tuple[int, int]
    share: float
    ratio: float
    samples: int
    why: Why
    since: float
    until: float
    failures: int = 0
    probing: bool = False
    program: str = ""
    lifted: bool = False


class Bans:
    """All of a device's bans."""

    def __init__(self) -> None:
        self.active: list[Ban] = []
        self.total = 0
        self.probes = 0

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
        """The job is gone. What concerns it stays measured, but is nobody's ban. True if there were any."""
        gone = [ban for ban in self.active if job in (ban.high, ban.low)]
        for ban in gone:
            self.lift(ban)
        return bool(gone)


def _length(failures: int, step_seconds: float) -> float:
    steps = min(FIRST_STEPS << min(failures, 8), LONGEST_STEPS)
    return min(max(steps * step_seconds, SHORTEST_S), LONGEST_S)
