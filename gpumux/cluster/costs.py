"""What two programs cost each other on one device, as daemons have measured it, and what a device is worth with them.

A pair that no daemon has measured yet is taken as the mean of what its two programs were measured to do beside others,
and without that as `UNKNOWN`. A job of several programs counts as the mean of them. Low jobs on one device take turns,
so each of k does a k-th of what it would do alone beside the high job, and that one loses the mean of what it loses
beside each: docs/cluster.md says how far that is from the simulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from math import isfinite
from typing import Final, NamedTuple

from gpumux.cluster.events import PairMeasured

MOST_PAIRS: Final = 16_384  # those measured last
HIGH_LOSS: Final = 2.0  # what high work lost is worth in low work done
OWN_SPEED: Final = 0.25  # what a job's own speed counts, beside the work that its device does in all


class PairCost(NamedTuple):
    """What a high job takes over alone beside a low one, and what that does in a second of its time alone."""

    slowdown: float
    low_speed: float


UNKNOWN: Final = PairCost(1.05, 0.4)


@dataclass(slots=True)
class _Mean:
    """Sums over the measured pairs of a program."""

    slowdown: float = 0.0
    low_speed: float = 0.0
    count: int = 0

    def add(self, pair: PairCost, sign: int) -> None:
        self.slowdown += sign * pair.slowdown
        self.low_speed += sign * pair.low_speed
        self.count += sign


Programs = tuple[str, ...]


class LearnedCosts:
    """All pairs that were measured. `learned`: how many measurements there were."""

    def __init__(self) -> None:
        self.learned = 0
        self._pairs: dict[tuple[str, str], PairCost] = {}
        self._of_high: dict[str, _Mean] = {}
        self._of_low: dict[str, _Mean] = {}
        self._cached: dict[tuple[Programs, Programs], PairCost] = {}

    def __len__(self) -> int:
        return len(self._pairs)

    def learn(self, measured: PairMeasured) -> None:
        """The newest measurement of a pair counts. One that is no measurement is ignored."""
        numbers = isfinite(measured.slowdown) and isfinite(measured.low_speed)
        if not numbers or measured.samples < 1 or measured.slowdown <= 0.0 or measured.low_speed < 0.0:
            return
        key = (measured.high, measured.low)
        self._forget(key)
        pair = PairCost(max(1.0, measured.slowdown), measured.low_speed)
        self._pairs[key] = pair
        self.learned += 1
        self._of_high.setdefault(key[0], _Mean()).add(pair, 1)
        self._of_low.setdefault(key[1], _Mean()).add(pair, 1)
        while len(self._pairs) > MOST_PAIRS:
            self._forget(next(iter(self._pairs)))
        self._cached.clear()

    def newest(self, count: int) -> list[PairMeasured]:
        """The pairs of the last `count` measurements, at least, oldest first."""
        found = list(islice(reversed(self._pairs.items()), count))
        return [PairMeasured(high, low, *pair) for (high, low), pair in reversed(found)]

    def _forget(self, key: tuple[str, str]) -> None:
        pair = self._pairs.pop(key, None)
        if pair is None:
            return
        for means, program in ((self._of_high, key[0]), (self._of_low, key[1])):
            means[program].add(pair, -1)
            if not means[program].count:
                del means[program]

    def between(self, high: Programs, low: Programs) -> PairCost:
        """What jobs of these programs cost each other."""
        found = self._cached.get((high, low))
        if found is None:
            pairs = [self._between(one, other) for one in high for other in low] or [UNKNOWN]
            found = PairCost(
                sum(pair.slowdown for pair in pairs) / len(pairs), sum(pair.low_speed for pair in pairs) / len(pairs)
            )
            if len(self._cached) >= MOST_PAIRS:
                self._cached.clear()
            self._cached[high, low] = found
        return found

    def _between(self, high: str, low: str) -> PairCost:
        pair = self._pairs.get((high, low))
        if pair is not None:
            return pair
        means = [mean for mean in (self._of_high.get(high), self._of_low.get(low)) if mean is not None]
        if not means:
            return UNKNOWN
        return PairCost(
            sum(mean.slowdown / mean.count for mean in means) / len(means),
            sum(mean.low_speed / mean.count for mean in means) / len(means),
        )

    def worth(self, high: Programs | None, lows: Sequence[Programs]) -> float:
        """Solo seconds of low work that the device does in a second, less what its high job loses by it."""
        if not lows:
            return 0.0
        if high is None:
            return 1.0
        pairs = [self.between(high, low) for low in lows]
        speed = sum(pair.low_speed for pair in pairs) / len(pairs)
        slowdown = sum(pair.slowdown for pair in pairs) / len(pairs)
        return speed - HIGH_LOSS * (slowdown - 1.0)

    def gain(self, high: Programs | None, lows: Sequence[Programs], low: Programs) -> float:
        """What a further low job adds to the device: to the work of all on it, and a part for the speed that the job
        itself gets, since one that crawls keeps its user waiting."""
        speed = 1.0 if high is None else self.between(high, low).low_speed
        return self.worth(high, [*lows, low]) - self.worth(high, lows) + OWN_SPEED * speed / (len(lows) + 1)
