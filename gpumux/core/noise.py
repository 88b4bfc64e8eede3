"""How often a high job's steps lose much without low work: somebody else's doing, which low work has no part in beside a step
either. On a CPU that other programs use every fourth step may; on a GPU of its own next to none."""

from __future__ import annotations

from math import ceil, log
from typing import Final

from gpumux.core.baseline import DOUBT, KEEP

CHANCE: Final = 0.01
LIKELY: Final = 0.5  # no noise is taken to be likelier
MOST_DOUBTS: Final = 5


class Noise:
    """Of steps without low work. Where all take the same time both figures are 0."""

    __slots__ = ("_count", "_newest", "_over", "_toll", "over", "toll")

    def __init__(self) -> None:
        self.over = 0.0  # what part of the steps loses much
        self.toll = 0.0  # tokens (controller.py) that each would cost on average
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
        """How many launches in a row have to seem to cost much before that is believed: so many that it happens by chance
        once in a hundred times, but not more than a few."""
        if self.over <= CHANCE:
            return 1
        return min(ceil(log(CHANCE) / log(min(self.over, LIKELY))), MOST_DOUBTS)
