"""How long things take when no low work is beside them: solo estimates that notice when the work changed.

A solo sample is rarely wrong but can be noisy (a host that paused, a clock that stepped), so the estimate is a median.
Two samples in a row that differ from it in the same direction are no noise: the work itself changed (another clock
rate, other data), and they replace what was known. Where samples always differ (a CPU that other programs use, too),
the difference that counts grows with the usual difference, since each such finding makes low work wait for a
calibration. The mean is not the median there either; `late` is the difference.
"""

from __future__ import annotations

from math import ceil, log
from typing import Final

MEDIAN_OF: Final = 5  # samples: a median of these ignores two bad ones
CHANGED: Final = 0.10  # relative difference of a sample that may mean that the work changed
NOISY: Final = 3.0  # usual differences that it has to exceed as well
USUAL_PART: Final = 0.1  # weight of the newest difference in the usual one: a change must not pass for noise
DECAY: Final = 0.99  # for each new sample, of the weight of earlier ones in a mean: about a hundred count
PRIOR_SAMPLES: Final = 8.0  # samples without a difference that such a mean begins with
ALIKE: Final = 0.05  # relative difference that counts as none
MOST_LATE: Final = 3.0  # times the estimate: what a sample counts for at most
ENOUGH_SAMPLES: Final = 2  # before an estimate is relied on


class Baseline:
    """Seconds without low work. `value` is 0.0 while nothing is known."""

    __slots__ = ("_newest", "_suspects", "_weight", "count", "drifts", "known", "late", "noise", "samples", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self.count = 0  # samples ever taken
        self.known = False  # there were enough samples
        self.drifts = 0  # how often the work was found to have changed
        self.noise = 0.0  # usual difference between a sample and the estimate, relative to the lesser of the two
        self.samples: list[float] = []
        self.late = 0.0  # seconds by which samples exceed the estimate on average
        self._weight = 0.0  # of the samples in `late`
        self._newest = 0.0  # difference of the newest sample, added to `late` once the next one shows it was no change
        self._suspects = 0  # samples in a row that differ: positive when slower, negative when faster

    @property
    def suspect(self) -> bool:
        """Whether the newest sample differs from the estimate, so that the next one decides."""
        return self._suspects != 0

    def add(self, seconds: float) -> bool:
        """Take a sample. True when it shows that the work changed."""
        value = self.value
        self.samples.append(seconds)
        self.count += 1
        if self.count == ENOUGH_SAMPLES:
            self.known = True
        least, off = min(value, seconds), abs(seconds - value)
        bound = NOISY * self.noise
        if least > 0.0:
            self.noise += USUAL_PART * (min(off / least, 1.0) - self.noise)
        if off <= (bound * least if bound > CHANGED else CHANGED * value):
            self._suspects = 0
        elif self.count > ENOUGH_SAMPLES:
            step = 1 if seconds > value else -1
            self._suspects = self._suspects + step if self._suspects * step > 0 else step
            if abs(self._suspects) >= 2:
                del self.samples[:-2]
                self._suspects = 0
                self.drifts += 1
                self.value = min(self.samples)
                self._newest = 0.0
                return True
        self._weight = DECAY * self._weight + 1.0
        if self._newest or self.late:
            self.late = max(0.0, self.late + (self._newest - self.late) / (self._weight + PRIOR_SAMPLES))
        self._newest = 0.0 if off <= ALIKE * value or not value else min(seconds - value, MOST_LATE * value)
        if len(self.samples) > MEDIAN_OF:
            del self.samples[0]
        self.value = sorted(self.samples)[(len(self.samples) - 1) // 2]
        return False


# ---- How often a high job's steps lose much without low work. On a CPU that other programs use that may be every
# fourth step; on a GPU of its own next to none. As many steps beside low work lose much for the same reasons.


CHANCE: Final = 0.01  # how probable it may be that noise alone passes for the cost of a launch
LIKELY: Final = 0.5  # noise is not taken to be more probable than this
MOST_CONFIRMATIONS: Final = 5


class StepNoise:
    """Of steps without low work: `over` is the part that loses much, and `violations` how many violations (budget.py)
    such steps cause on average. Both are 0.0 where all take the same time."""

    __slots__ = ("_count", "_newest", "_over", "_violations", "over", "violations")

    def __init__(self) -> None:
        self.over = self.violations = 0.0
        self._count = self._over = self._violations = 0.0
        self._newest: float | None = None

    def add(self, violations: float) -> None:
        """One more step. It counts when the next one comes, since the work may turn out to have changed."""
        before, self._newest = self._newest, violations
        if before is not None:
            self._count = self._count * DECAY + 1.0
            self._over = self._over * DECAY + (before > 0.0)
            self._violations = self._violations * DECAY + before
            count = self._count + max(0.0, PRIOR_SAMPLES - self._count / 4)  # the prior has faded after 32
            self.over, self.violations = self._over / count, self._violations / count

    def changed(self) -> None:
        """The work changed, and the newest step was the first to show it."""
        self._newest = None

    def confirmations(self) -> int:
        """How many launches in a row have to seem costly before that is believed: so many that noise causes it with
        probability CHANCE, but not more than a few."""
        if self.over <= CHANCE:
            return 1
        return min(ceil(log(CHANCE) / log(min(self.over, LIKELY))), MOST_CONFIRMATIONS)
