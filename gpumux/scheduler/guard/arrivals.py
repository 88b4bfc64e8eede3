"""When a high job's next step arrives, and what low work costs the pieces of the step that runs.

High steps repeat, so the pieces after the one that runs are known, and their solo times say when they start. Low work
beside them only makes them start later, so a forecast from solo times errs on the side of the high job. Between steps,
the pauses seen so far tell how probable an arrival is.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable
from typing import Final

from gpumux.scheduler.guard.baseline import DECAY
from gpumux.scheduler.guard.costs import RangeCost

KEPT_INTERVALS: Final = 256  # pauses remembered
ENOUGH_INTERVALS: Final = 8  # pauses none of which was shorter: enough to rely on
IDLE_FACTOR: Final = 16.0  # a job that has had no step for so many usual pauses is idle for good


class OverlapCost:
    """Expected excess high seconds of one launch, what a step seldom loses more of, the piece that loses most (-1: none
    does), and the first banned piece it would overlap (-1: none)."""

    __slots__ = ("banned", "expected", "piece", "upper")

    def __init__(self, expected: float, upper: float, piece: int, banned: int) -> None:
        self.expected, self.upper, self.piece, self.banned = expected, upper, piece, banned


def overlap_cost(
    solo_s: list[float],
    ranges: list[RangeCost],
    at: int,
    runs_until: float,
    more: bool,
    start: float,
    end: float,
) -> OverlapCost:
    """What low work over [start, end) costs a job whose piece `at` runs until `runs_until` and whose pieces follow each
    other; after the last comes the first again if `more` steps are queued."""
    expected = upper = 0.0
    piece, reached = at, runs_until
    dear, dearest, banned = -1, 0.0, -1
    while True:
        if reached > start:
            seconds = min(reached, end) - start
            range_cost = ranges[piece]
            cost = seconds * range_cost.rate
            expected += cost
            upper += seconds * range_cost.upper_rate
            if banned < 0 and range_cost.ban is not None:
                banned = piece
            if cost > dearest:
                dear, dearest = piece, cost
            start = reached
            if reached >= end:
                break
        piece += 1
        if piece == len(solo_s):
            if not more:
                break
            piece, more = 0, False
        reached += solo_s[piece]
    return OverlapCost(expected, upper, dear, banned)


class InterArrivals:
    """The newest pauses between a job's steps. `usual` is the median one, `short` one that nine in ten exceed, `least`
    one that nearly all exceed. A job that has been without a step for `longest` is idle for good: that is the longest
    pause seen or, unless arrivals are `unpredictable`, many usual ones. All are 0.0 while no pause is known."""

    __slots__ = ("_newest", "_widest", "least", "longest", "short", "sorted", "unpredictable", "usual")

    def __init__(self) -> None:
        self.sorted: list[float] = []  # by length
        self.longest = self.short = self.usual = self.least = 0.0
        self.unpredictable = False  # steps came when none was expected
        self._newest: deque[float] = deque()
        self._widest: float | None = None  # distance between neighbours; None: not known since the newest pause

    def add(self, seconds: float) -> None:
        """One more pause; the oldest is forgotten."""
        known = self.sorted
        if len(self._newest) == KEPT_INTERVALS:
            del known[bisect_left(known, self._newest.popleft())]
        self._newest.append(seconds)
        insort(known, seconds)
        self._widest = None
        self.usual, self.short, self.least = known[len(known) // 2], known[len(known) // 10], known[len(known) // 128]
        self._bound()

    def set_predictable(self, predictable: bool) -> None:
        """Whether the usual pause says anything about the longest."""
        self.unpredictable = not predictable
        self._bound()

    def _bound(self) -> None:
        most, usual = self.sorted[-1] if self.sorted else 0.0, IDLE_FACTOR * self.usual
        self.longest = (most if self.unpredictable else min(most, usual)) * 1.01

    def earliest(self, passed: int) -> float:
        """The pause after which a step is expected at the earliest, where `passed` of them were no longer than this one
        is already: the next longer one, or half of it where few are longer. 0.0: a step may come at any time."""
        left = len(self.sorted) - passed
        if left >= ENOUGH_INTERVALS:
            return self.sorted[passed]
        return 0.5 * self.sorted[passed] if left else 0.0

    def denser(self, passed: int, apart: float) -> bool:
        """Whether no two neighbours among the pauses, without the `passed` shortest, are `apart` or more."""
        known, widest = self.sorted, self._widest
        if widest is None:
            widest = 0.0
            for at in range(1, len(known)):
                widest = max(widest, known[at] - known[at - 1])
            self._widest = widest
        if widest < apart:  # mostly
            return True
        for at in range(passed + 1, len(known)):
            if known[at] - known[at - 1] >= apart:
                return False
        return apart > 0.0

    def count_passed(self, waited: float, at_least: int) -> int:
        """How many pauses were no longer than `waited`; `at_least` of them are known to be."""
        return bisect_right(self.sorted, waited, at_least)

    def chance_within(self, passed: int, waited: float, seconds: float) -> float:
        """How probable it is that a job idle for `waited` seconds, which `passed` of the pauses were no longer than,
        gets a step within the next `seconds`."""
        known, until = self.sorted, waited + seconds
        left = len(known) - passed
        if left <= 0:
            return 0.0
        if until >= known[passed]:
            return (self.count_passed(until, passed + 1) - passed) / left
        # None so far does not mean never: the nearest pauses on both sides say how dense they are here.
        before = known[passed - 1] if passed else 0.0
        return min(1.0, seconds / (known[passed] - before)) / (left + 1)


# ---- Whether the pauses seen so far tell when a high job's next step comes.
#
# Low work that should be over before the next step, or that meets one so seldom that it does not count, runs at the
# risk of being wrong. Where steps come at about the same time that is right. Where they come at random (a server's
# requests) there is always a pause after which none came so far. So what steps lose *because they came while low work
# was out* is counted by itself: as for all steps, a part of them may lose too much, and on average they may lose the
# credit. What they lose later, beside work that was launched while they ran, does not count here. A few too many are
# held against the programs they were lost to: a program of short pieces does not pay for another one's long pieces.


ALLOWED_VIOLATIONS: Final = 1.0  # steps that may lose too much on arrival, to begin with
VIOLATION_RATE: Final = 0.006  # and for each step: no more than of all (budget.py)
MOST_DEBT: Final = 4.0  # so that a disturbance is forgotten after some hundred steps
PROGRAM_DEBT: Final = 1.5  # violations too many up to which only the programs that caused them are distrusted
MOSTLY: Final = 0.5  # part of a step's loss: if so much was lost on arrival, the arrival was the reason


class ArrivalTrust:
    """Whether the known pauses are relied on: for every low program if `trusted`, else for each by `trusts`."""

    __slots__ = ("_causes", "_few_violations", "capped_loss", "mean_loss", "trusted", "violations_left")

    def __init__(self) -> None:
        self.violations_left = ALLOWED_VIOLATIONS
        self.mean_loss = 0.0  # seconds that steps lose on arrival
        self.capped_loss = 0.0  # the same, where a step counts for no more than it may lose
        self.trusted = True
        self._few_violations = True
        self._causes: set[str] = set()  # low programs that caused violations while there were too many

    def trusts(self, program: str) -> bool:
        """Whether the pauses are relied on for that low program."""
        return self.trusted or (self._few_violations and program not in self._causes)

    def step_ended(
        self, lost: float, programs: Iterable[str], *, excess: float, most: float, credit: float, noise: float
    ) -> None:
        """A step lost `excess` seconds, of which `lost` on arrival, to these low programs. It may lose `most`, and
        steps no more than `credit` on average. `noise`: how probable it is that a step loses more for another
        reason."""
        left = self.violations_left + VIOLATION_RATE
        if lost > 0.0:
            left += noise
            if excess > most and lost > MOSTLY * excess:
                left -= 1.0
                self._causes.update(programs)
        self.violations_left = left = max(-MOST_DEBT, min(left, ALLOWED_VIOLATIONS))
        self.mean_loss = DECAY * self.mean_loss + (1.0 - DECAY) * lost
        self.capped_loss = DECAY * self.capped_loss + (1.0 - DECAY) * min(lost, most)
        self._few_violations = left >= -PROGRAM_DEBT and self.mean_loss <= credit
        self.trusted = left >= 0.0 and self._few_violations
        if self.trusted:
            self._causes.clear()
