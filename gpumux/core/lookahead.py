"""When each coming piece of a high job starts, and when its next step arrives.

High steps repeat, so the pieces after the one that runs are known, and solo estimates say when they
start. Collocation only makes them start later: a forecast from solo times errs on the side of the
high job. Between steps, the gaps there were tell how probable an arrival is.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

LATE = 0.05  # of its time: what a piece that should be over is still given
GAPS = 256  # gaps remembered
MANY = 8  # gaps of which none was shorter: enough to count on
IDLE_FACTOR = 16.0  # a job that has not come for so many usual gaps is idle, whatever gaps there were


class Cost(NamedTuple):
    """Expected excess high seconds of one launch, what a step seldom loses more of, the piece where most is
    lost (-1: nothing is), and the first banned piece it would meet (-1: none)."""

    expected: float
    upper: float
    piece: int
    banned: int


def overlap_cost(
    refs: Sequence[float],
    rates: Sequence[float],
    uppers: Sequence[float],
    bans: Sequence[bool],
    at: int,
    runs_until: float,
    more: bool,
    start: float,
    end: float,
) -> Cost:
    """What low work over [start, end) costs a job whose piece `at` runs until `runs_until` and whose
    pieces follow each other; after the last comes the first again if `more` steps are queued."""
    expected = upper = 0.0
    piece, reached, count = at, runs_until, len(refs)
    dear, dearest, banned = -1, 0.0, -1
    while True:
        if reached > start:
            seconds = (reached if reached < end else end) - start
            cost = seconds * rates[piece]
            expected += cost
            upper += seconds * uppers[piece]
            if bans[piece] and banned < 0:
                banned = piece
            if cost > dearest:
                dear, dearest = piece, cost
            start = reached
            if reached >= end:
                break
        piece += 1
        if piece == count:
            if not more:
                break
            piece, more = 0, False
        reached += refs[piece]
    return Cost(expected, upper, dear, banned)


class Gaps:
    """The pauses between a job's steps: the newest ones, in order of time and of length. `usual` is the median one,
    `short` one that nine of ten exceed, `least` one that all but one in a hundred do; a job away for more than `longest` is idle.
    All are 0.0 while none is known."""

    __slots__ = ("_newest", "_widest", "apart", "least", "longest", "short", "sorted", "usual")

    def __init__(self) -> None:
        self._newest: deque[float] = deque()
        self._widest = (-1, 0.0)  # see `widest`
        self.sorted: list[float] = []
        self.apart: list[float] = []  # how much longer the next one is than each of `sorted`; one fewer
        self.usual = self.short = self.least = self.longest = 0.0

    def add(self, seconds: float) -> None:
        known, apart = self.sorted, self.apart
        if len(self._newest) == GAPS:
            at = bisect_left(known, self._newest.popleft())
            del known[at], apart[at if at < len(apart) else -1]
            if 0 < at < len(known):
                apart[at - 1] = known[at] - known[at - 1]
        self._newest.append(seconds)
        at = bisect_right(known, seconds)
        known.insert(at, seconds)
        if at + 1 < len(known):
            apart.insert(at, known[at + 1] - seconds)
            if at:
                apart[at - 1] = seconds - known[at - 1]
        elif at:
            apart.append(seconds - known[at - 1])
        self._widest = (-1, 0.0)
        self.usual, self.short, self.least = known[len(known) // 2], known[len(known) // 10], known[len(known) // 128]
        self.longest = min(known[-1], IDLE_FACTOR * self.usual) * 1.01

    def soonest(self, waited: float) -> float:
        """The shortest known gap longer than `waited`, or half of it where few are known; 0.0: anything may be."""
        known = self.sorted
        behind = bisect_right(known, waited)
        left = len(known) - behind
        if left >= MANY:
            return known[behind]
        return 0.5 * known[behind] if left else 0.0

    def widest(self, behind: int) -> float:
        """The longest time between two neighbours among the gaps from the shortest but `behind` on."""
        at, found = self._widest
        if at != behind:
            found = max(self.apart[behind:], default=0.0)
            self._widest = (behind, found)
        return found

    def arrival(self, waited: float, seconds: float) -> float:
        """How probable it is that a job idle for `waited` seconds comes within the next `seconds`."""
        known = self.sorted
        if not known or waited > self.longest:
            return 0.0
        behind = bisect_right(known, waited)
        left = len(known) - behind
        if not left:
            return 0.0
        within = bisect_right(known, waited + seconds, behind) - behind
        if within:
            return within / left
        # None so far does not mean never: the nearest ones on both sides say how thin they lie here.
        before = known[behind - 1] if behind else 0.0
        return min(1.0, seconds / (known[behind] - before)) / (left + 1)
