"""How long things take when no low work is beside them: solo estimates that notice drift.

A solo sample is rarely wrong but can be noisy (a host that paused, a clock that stepped), so the
estimate is a median. Two samples in a row that disagree with it in the same direction are no noise:
the work itself changed (another clock rate, other data), and they replace what was known. Where
samples always differ (a CPU that other programs use, too) that would be found all the time, and each time
low work would have to wait for a calibration: what counts as disagreement grows with the usual difference. There
the mean is not the median either; `late` is by how much.
"""

from __future__ import annotations

from math import ceil, log
from typing import Final

KEPT: Final = 5  # samples: a median of these ignores two bad ones
CHANGED: Final = 0.10  # a sample this far off, relative, may mean that the work changed
NOISY: Final = 3.0  # usual differences that a sample is off by before it may mean that
USUAL_PART: Final = 0.1  # of the newest difference in the usual one: a change has no time to pass for noise
KEEP: Final = 0.99  # of what samples told of their mean, with each new one: a hundred count
DOUBT: Final = 8.0  # samples without a difference that this begins with
ALIKE: Final = 0.05  # a difference, relative, that is none
MOST_LATE: Final = 3.0  # times the estimate: what a sample counts for at most
WANTED: Final = 2  # samples before an estimate is relied on


class Baseline:
    """Seconds without low work. `value` is 0.0 while nothing is known."""

    __slots__ = ("_newest", "_suspects", "_weight", "count", "drifts", "known", "late", "noise", "samples", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self.count = 0  # samples ever taken
        self.known = False  # there were as many as are wanted
        self.drifts = 0  # how often the work was found to have changed
        self.noise = 0.0  # by what part of the lesser of the two samples usually differ from the estimate
        self.samples: list[float] = []
        self.late = 0.0  # seconds by which samples are over the estimate on average, if they are
        self._weight = 0.0  # of those samples
        self._newest = 0.0  # by how much the newest one does, which shows later whether it is one of them
        self._suspects = 0  # samples in a row that disagree: positive when slower, negative when faster

    @property
    def suspect(self) -> bool:
        """The newest sample disagrees with the estimate; another one will tell."""
        return self._suspects != 0

    def add(self, seconds: float) -> bool:
        """Take a sample. True when it shows that the work changed."""
        samples, value = self.samples, self.value
        samples.append(seconds)
        self.count += 1
        if self.count == WANTED:
            self.known = True
        if seconds > value:
            least, off = value, seconds - value
        else:
            least, off = seconds, value - seconds
        bound = NOISY * self.noise
        if least > 0.0:
            self.noise += USUAL_PART * ((off / least if off < least else 1.0) - self.noise)
        if off <= (bound * least if bound > CHANGED else CHANGED * value):
            self._suspects = 0
        elif self.count > WANTED:
            step = 1 if seconds > value else -1
            self._suspects = self._suspects + step if self._suspects * step > 0 else step
            if abs(self._suspects) >= 2:
                del samples[:-2]
                self._suspects = 0
                self.drifts += 1
                self.value = min(samples)
                self._newest = 0.0
                return True
        self._weight = KEEP * self._weight + 1.0
        if self._newest or self.late:
            late = self.late + (self._newest - self.late) / (self._weight + DOUBT)
            self.late = late if late > 0.0 else 0.0
        if off <= ALIKE * value or not value:
            self._newest = 0.0
        else:
            most = MOST_LATE * value
            self._newest = seconds - value if seconds - value < most else most
        if len(samples) > KEPT:
            gone = samples.pop(0)
            # A sample that takes the place of one on the same side leaves the median where it was: most do.
            if (gone > value and seconds >= value) or (gone < value and seconds <= value):
                return False
        self.value = sorted(samples)[(len(samples) - 1) // 2]
        return False


# ---- How often a high job's steps lose much without low work: somebody else's doing, which low work has no part in
# beside a step
# either. On a CPU that other programs use every fourth step may; on a GPU of its own next to none.


CHANCE: Final = 0.01
LIKELY: Final = 0.5  # no noise is taken to be likelier
MOST_DOUBTS: Final = 5


class Noise:
    """Of steps without low work. Where all take the same time both figures are 0."""

    __slots__ = ("_count", "_newest", "_over", "_toll", "over", "toll")

    def __init__(self) -> None:
        self.over = 0.0  # what part of the steps loses much
        self.toll = 0.0  # tokens (budget.py) that each would cost on average
        self._count = self._over = self._toll = 0.0
        self._newest: float | None = None

    def add(self, toll: float) -> None:
        """One more. It counts when the next one comes: the work may turn out to have changed."""
        before, self._newest = self._newest, toll
        if before is not None:
            self._count = self._count * KEEP + 1.0
            self._over = self._over * KEEP + (before > 0.0)
            self._toll = self._toll * KEEP + before
            doubtful = self._count + max(0.0, DOUBT - self._count / 4)  # what it begins with has faded after 32
            self.over, self.toll = self._over / doubtful, self._toll / doubtful

    def changed(self) -> None:
        """The work takes another time by now, and the newest one was the first to."""
        self._newest = None

    def doubts(self) -> int:
        """How many launches in a row have to seem to cost much before that is believed: so many that it happens by
        chance once in a hundred times, but not more than a few."""
        if self.over <= CHANCE:
            return 1
        return min(ceil(log(CHANCE) / log(min(self.over, LIKELY))), MOST_DOUBTS)
