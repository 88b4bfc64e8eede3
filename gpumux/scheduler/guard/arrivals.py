"""When each coming piece of a high job starts, and when its next step arrives.

High steps repeat, so the pieces after the one that runs are known, and solo estimates say when they
start. Collocation only makes them start later: a forecast from solo times errs on the side of the
high job. Between steps, the gaps there were tell how probable an arrival is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from gpumux.scheduler.guard.baseline import KEEP
from gpumux.scheduler.guard.costs import Cell

LATE: Final = 0.05  # of its time: what a piece that should be over is still given
GAPS: Final = 256  # gaps remembered
MANY: Final = 8  # gaps of which none was shorter: enough to count on
IDLE_FACTOR: Final = 16.0  # a job that has not come for so many usual gaps is idle, whatever gaps there were


class Cost:
    """Expected excess high seconds of one launch, what a step seldom loses more of, the piece where most is
    lost (-1: nothing is), and the first banned piece it would meet (-1: none)."""

    __slots__ = ("banned", "expected", "piece", "upper")

    def __init__(self, expected: float, upper: float, piece: int, banned: int) -> None:
        self.expected, self.upper, self.piece, self.banned = expected, upper, piece, banned


def overlap_cost(
    refs: list[float],
    cells: list[Cell],
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
            cell = cells[piece]
            cost = seconds * cell.rate
            expected += cost
            upper += seconds * cell.most
            if banned < 0 and cell.ban is not None:
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


NOT_LOOKED_FOR: Final = (1 << 30, 0, 0.0)


class Gaps:
    """The pauses between a job's steps: the newest ones, in order of time and of length. `usual` is the median one,
    `short` one that nine of ten exceed, `least` one that all but one in a hundred do; a job away for more than
    `longest` is idle: for longer than ever, or, unless it is `erratic`, for many usual ones. All are 0.0 while none is
    known."""

    __slots__ = ("_behind", "_newest", "_widest", "erratic", "least", "longest", "short", "sorted", "usual")

    def __init__(self) -> None:
        self.sorted: list[float] = []
        self.longest = self.short = self.usual = self.least = 0.0
        self.erratic = False  # steps came when none was expected
        self._newest: deque[float] = deque()
        self._widest = -1, 0.0  # neighbours farthest apart: where they lie (-1: not looked for), how far
        self._behind = NOT_LOOKED_FOR  # the same of those from where on

    def add(self, seconds: float) -> None:
        known = self.sorted
        widest, found = self._widest
        sure = widest >= 0  # it is known, and still will be: looking for it costs more than all else here
        if len(self._newest) == GAPS:
            at = _before(known, self._newest.popleft())
            del known[at]
            if at == len(known):
                sure = sure and widest != at - 1
            else:
                if at == 0:
                    sure = sure and widest != 0
                if widest >= at:
                    widest -= 1
                if at:
                    both = known[at] - known[at - 1]
                    if both >= found:
                        widest, found = at - 1, both
        self._newest.append(seconds)
        at = _before(known, seconds)
        known.insert(at, seconds)
        if at + 1 < len(known):
            beyond = known[at + 1] - seconds
            if at:
                sure = sure and widest != at - 1
            if widest >= at:
                widest += 1
            if not at and beyond > found:
                widest, found = 0, beyond
        elif at:
            beyond = seconds - known[at - 1]
            if beyond > found:
                widest, found = at - 1, beyond
        self._widest = (widest, found) if sure else (-1, 0.0)
        self._behind = NOT_LOOKED_FOR
        self.usual, self.short, self.least = known[len(known) // 2], known[len(known) // 10], known[len(known) // 128]
        self._bound()

    def trust(self, trusted: bool) -> None:
        """Whether the usual gap tells anything of the longest."""
        self.erratic = not trusted
        self._bound()

    def _bound(self) -> None:
        most, usual = self.sorted[-1] if self.sorted else 0.0, IDLE_FACTOR * self.usual
        self.longest = (most if self.erratic or most < usual else usual) * 1.01

    def soonest(self, behind: int) -> float:
        """The shortest known gap but `behind` that were no longer than the wait so far, or half of it where few are
        known; 0.0: anything may be."""
        left = len(self.sorted) - behind
        if left >= MANY:
            return self.sorted[behind]
        return 0.5 * self.sorted[behind] if left else 0.0

    def denser(self, behind: int, apart: float) -> bool:
        """Whether no two neighbours among the gaps from the shortest but `behind` on are so far apart."""
        known = self.sorted
        at, found = self._widest
        if at < 0:
            if len(known) < 2:
                return apart > 0.0
            at, found = _widest(known, 0)
            self._widest = at, found
        if behind <= at or found < apart:
            return found < apart
        # Of fewer gaps the widest is the same up to where it lies, and no more behind that.
        start, at, found = self._behind
        if behind < start or (behind > at and found >= apart):
            at, found = _widest(known, behind)
            self._behind = behind, at, found
        return found < apart

    def passed(self, waited: float, behind: int) -> int:
        """How many of the gaps were no longer than `waited`, where at least `behind` were: mostly just so many, or a
        few more."""
        known, beyond, stride = self.sorted, len(self.sorted), 1
        while behind < beyond:
            if waited < known[behind]:
                return behind
            behind += 1
            if behind + stride >= beyond:
                break
            if waited < known[behind + stride]:
                beyond = behind + stride
                break
            behind += stride + 1
            stride *= 2
        while behind < beyond:
            middle = (behind + beyond) >> 1
            if waited < known[middle]:
                beyond = middle
            else:
                behind = middle + 1
        return behind

    def within(self, behind: int, waited: float, seconds: float) -> float:
        """How probable it is that a job idle for `waited` seconds, which `behind` of the gaps were no longer than,
        comes within the next `seconds`."""
        known, until = self.sorted, waited + seconds
        left = len(known) - behind
        if left <= 0:
            return 0.0
        if until >= known[behind]:
            return (self.passed(until, behind + 1) - behind) / left
        # None so far does not mean never: the nearest ones on both sides say how thin they lie here.
        before = known[behind - 1] if behind else 0.0
        return min(1.0, seconds / (known[behind] - before)) / (left + 1)


def _before(known: list[float], seconds: float) -> int:
    """How many of these, in order, are less. The library's bisection compares objects of any kind, which costs four
    times as much where this is compiled."""
    first, beyond = 0, len(known)
    while first < beyond:
        middle = (first + beyond) >> 1
        if known[middle] < seconds:
            first = middle + 1
        else:
            beyond = middle
    return first


def _widest(known: list[float], start: int) -> tuple[int, float]:
    """After which of these, in order, from `start` on the next one is farthest away, and how far; 0.0 where there are
    no more."""
    at, found, last = start, 0.0, len(known) - 1
    if start < last:
        one = known[start]
        for place in range(start, last):
            other = known[place + 1]
            if other - one > found:
                at, found = place, other - one
            one = other
    return at, found


# ---- Whether the gaps there were tell when a high job's next step comes.
#
# Low work that is taken to be over before the next step, or to be met by one so seldom that it does not count, runs at
# the risk of being wrong. Steps that come at about the same time prove that right; of steps that come at random (a
# server's requests) there is always a gap that none came after so far. So what steps lose *because they came while low
# work was out* is counted by itself: as for all steps, so many may lose too much (tokens), and on average they may lose
# the credit. What they lose later, beside work that was let out with them there, is none of it. A few too many are held
# against the programs they were lost to: one of short pieces does not wait for what another one's long pieces did.


TOKENS: Final = 1.0  # steps that may lose too much on arrival, to begin with
TOKEN_RATE: Final = 0.006  # and for each step: no more than of all (budget.py)
MOST_OWED: Final = 4.0  # so that a disturbance is forgotten after some hundred steps
FEW: Final = 1.5  # tokens owed by single programs; beyond that no program is trusted
MOSTLY: Final = 0.5  # of what a step lost: so much on arrival, and that was why


class Surprise:
    """`trusted`: for any low program the gaps there were are relied on."""

    __slots__ = ("_blamed", "_few", "mean", "often", "tokens", "trusted")

    def __init__(self) -> None:
        self.tokens = TOKENS
        self.mean = 0.0  # seconds that steps lose on arrival
        self.often = 0.0  # the same, where a step counts for no more than it may lose
        self.trusted = True
        self._few = True
        self._blamed: set[str] = set()  # programs, since tokens are owed

    def trusts(self, program: str) -> bool:
        """Whether they are relied on for that low program."""
        return self.trusted or (self._few and program not in self._blamed)

    def step(self, lost: float, to: Iterable[str], excess: float, most: float, credit: float, noise: float) -> None:
        """A step lost `excess` seconds, of which `lost` on arrival, to these low programs. `most`: what it may lose,
        and no more than `credit` on average; `noise`: how probable it is that a step loses more by what is not low
        work's doing."""
        tokens = self.tokens + TOKEN_RATE
        if lost > 0.0:
            tokens += noise
            if excess > most and lost > MOSTLY * excess:
                tokens -= 1.0
                self._blamed.update(to)
        self.tokens = TOKENS if tokens > TOKENS else -MOST_OWED if tokens < -MOST_OWED else tokens
        mean = self.mean = KEEP * self.mean + (1.0 - KEEP) * lost
        self.often = KEEP * self.often + (1.0 - KEEP) * (lost if lost < most else most)
        self._few = tokens >= -FEW and mean <= credit
        self.trusted = tokens >= 0.0 and self._few
        if self.trusted and self._blamed:
            self._blamed.clear()
