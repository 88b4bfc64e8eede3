"""One measured quantity each: excess of a range, cost of a kind of launch. Robust to single outliers."""

from __future__ import annotations

from typing import Final, TypeAlias

from gpumux.core.bans import Ban
from gpumux.core.queue import Span

MEMORY: Final = 10  # samples an estimate is the running mean of
CLIP: Final = 3.0  # deviations: what a sample may differ and still count in full
CREDIBLE: Final = 3  # samples before an estimate may ban
FLOOR_S: Final = 5e-6  # what launches of one kind may cost more or less, and it means nothing
RATE_FLOOR: Final = 0.02  # the same of a second beside low work
FIRST_SPREAD: Final = 0.15  # of what a first launch cost: how far the next may be off
TIMED_SPREAD: Final = 0.02  # the same of one that began together with a high piece, as the next will
FORGET: Final = 0.98
# Of what it costs: what a launch that repeats counts against a limit whose margin is for what is not known.
SURE: Final = 0.94


# A launch as it repeats: the high piece it was made beside (GAP: none, and a step came while it was out), whether together
# with it (`places.START`) or in which half of it, and the low piece's span (queue.Span). Made for every question: no class.
Spot: TypeAlias = tuple[int, int, Span]

GAP: Final = -1


class Mean:
    """A running mean that one outlier can't move far, with its deviation and the newest three samples."""

    # Attributes, not tuples and lists: each of those is memory of its own that a decision has to fetch.
    __slots__ = ("count", "deviation", "floor", "mean", "newest", "second", "third")

    def __init__(self, floor: float) -> None:
        self.floor = floor  # a difference that means nothing
        self.count = 0
        self.mean = 0.0
        self.deviation = 0.0
        self.newest = self.second = self.third = 0.0  # samples, as far as there were so many

    @property
    def bound(self) -> float:
        """What is seldom exceeded."""
        return self.mean + 2 * self.deviation

    @property
    def median(self) -> float:
        """Of the newest three samples: what at least two of them say."""
        known = sorted([self.newest, self.second, self.third][: self.count])
        return known[len(known) // 2] if known else 0.0

    def add(self, sample: float, weight: float = 1.0) -> None:
        self.count = count = self.count + 1
        self.third, self.second, self.newest = self.second, self.newest, sample
        # For every high piece beside low work: comparisons cost a third of what calls of min, max and sorted do.
        if count <= CREDIBLE:
            self._begin(count, sample)
            return
        part, mean, deviation = weight / (count if count < MEMORY else MEMORY), self.mean, self.deviation
        bound = CLIP * deviation + self.floor + 0.1 * (mean if mean > 0.0 else -mean)
        off = sample - mean
        if off > bound:
            off = bound
        elif off < -bound:
            off = -bound
        mean += part * off
        off, bound = sample - mean, 2.0 * bound
        if off < 0.0:
            off = -off
        if off > bound:
            off = bound
        self.mean, self.deviation = mean, deviation + part * (off - deviation)

    def _begin(self, count: int, sample: float) -> None:
        """One of the first three samples: the mean is their median."""
        if count == 1:
            self.mean, self.deviation = sample, 0.0
            return
        first = self.second if count == 2 else self.third
        low, high = (first, sample) if first < sample else (sample, first)
        if count == 2:
            self.mean, self.deviation = high, (high - low) / 2
            return
        second = self.second
        middle = low if second < low else high if second > high else second
        self.mean = middle
        self.deviation = (abs(first - middle) + abs(second - middle) + abs(sample - middle)) / 3


class Cell(Mean):
    """What a range of a high program loses in a second beside low work. `rate` and `most` are what the look-ahead takes that to be,
    expected and at worst; where there is no sample, what other ranges lose."""

    __slots__ = ("ban", "most", "rate", "speed")

    def __init__(self) -> None:
        super().__init__(RATE_FLOOR)
        self.rate = self.most = 0.0
        self.speed = 0.0  # solo seconds of low work done in a second; 0.0: not known
        self.ban: Ban | None = None

    def to_judge(self, slack: float) -> bool:
        """Whether what the range costs may be a reason to ban low work, or a ban to end."""
        if self.ban is not None:
            return self.ban.probing
        return self.count >= CREDIBLE and self.mean * (1.0 + slack) > slack

    def restart(self) -> None:
        """Forget the samples, but not the ban: what was known is no longer so."""
        self.count, self.mean, self.deviation = 0, 0.0, 0.0


class Launched:
    """What launches of one kind cost: high seconds in all, and in the step that lost most by one."""

    __slots__ = (
        "_cost", "count", "first", "index", "last", "mean", "peak", "rate", "seconds", "seen", "upper", "worst",
    )  # fmt: skip

    def __init__(self, first: float = FIRST_SPREAD, index: int = -1) -> None:
        # What every question reads comes first, and so lies together where this is compiled.
        self.count = 0
        self.mean = 0.0  # of what they cost in all
        self.upper = 0.0  # what a step seldom loses more of
        self.worst = 0.0  # the largest peak, slowly forgotten: what a launch at another place may do
        self.index = index  # 3 * high piece + moment, where the moment repeats (places.MOMENTS)
        self.seen = 0  # the high job's step when it was last seen
        self.first = first
        self.peak = self.last = 0.0
        self._cost = Mean(FLOOR_S)
        self.rate = 0.0  # high seconds lost in a second of it
        self.seconds = 0.0  # a launch took

    @property
    def bound(self) -> float:
        """What they seldom cost more than in all."""
        return self._cost.bound

    def add(self, cost: float, peak: float, rate: float, seconds: float, step: int) -> None:
        whole = self._cost
        whole.add(cost)
        self.mean, self.count = whole.mean, whole.count
        count, known, last = whole.count, self.peak, self.last
        part = 1.0 / count if count < 5 else 0.2
        felt = peak if peak > 0.0 else 0.0
        if count > CREDIBLE:
            # One that was delayed from outside is no reason to give a place up: it takes two in a row.
            bound = 2.0 * (known if known > last else last) + FLOOR_S
            if felt > bound:
                felt = bound
        self.last = peak
        self.peak = known = known + part * (felt - known)
        faded = FORGET * self.worst
        self.worst = peak if peak > faded else faded
        self.rate += part * (rate - self.rate)
        self.seconds += part * (seconds - self.seconds)
        self.seen = step
        upper = known + (2 * whole.deviation if count > 1 else self.first * known)
        self.upper = SURE * upper if count >= CREDIBLE and self.index >= 0 else upper

    def promises(self, limit: float) -> bool:
        """Whether it would be within the limit if it were sure that it costs what it did."""
        return self.index >= 0 and self.count < CREDIBLE and SURE * self.peak <= limit
