"""How much of an arena a step holds while it runs, of an arena that several steps share (Wavelet, section 3.2.1).

A step ascends until it has launched the last of its highest pieces, and descends from then on. Only one step at a time
ascends, and one that descends is never refused anything: it holds what its highest remaining piece needs. So the one
that ascends waits for the others at most until those have ended, and the arena, which is at least as high as any one
step, is enough for it then: no two steps wait for each other.

The two waves of a job share an arena (`WaveLease`), and so do the low jobs of a user that were submitted for it
(jobs.SharedArena).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from gpumux.types import WavePieces


class Lease:
    """The heights of a step's pieces under one cut: bytes of the arena that each of them needs."""

    __slots__ = ("_falling", "_last_peak", "heights")

    def __init__(self, heights: tuple[int, ...]) -> None:
        self.heights = heights
        self._falling = list(accumulate(reversed(heights), max))[::-1]
        self._last_peak = len(heights) - 1 - heights[::-1].index(max(heights))

    def descends(self, launched: int) -> bool:
        """Whether a step that launched so many pieces will need no more than it has."""
        return launched > self._last_peak

    def held(self, launched: int, done: int) -> int:
        """Bytes that a step holds, of which so many pieces were launched, and so many of those have ended."""
        if done == len(self.heights) or not launched:
            return 0
        if self.descends(launched):
            return self._falling[done]
        if launched > done:
            return max(self.heights[done:launched])
        return min(self.heights[done - 1], self.heights[done])  # what is alive between two pieces is alive in both

    def with_next(self, launched: int, done: int) -> int:
        """Bytes that a step holds once its next piece is launched, too."""
        return max(self.held(launched, done), self.heights[launched])


class WaveLease(Lease):
    """That of a step of one of a job's two waves. `arena`: bytes that both waves share."""

    __slots__ = ("arena", "lane", "tail")

    def __init__(self, pieces: WavePieces, arena: int) -> None:
        super().__init__(pieces.heights)
        self.lane, self.tail, self.arena = pieces.lane, pieces.tail, arena


def lease_of(live: Sequence[int], transient: int, bounds: Sequence[int]) -> Lease:
    """That of a step whose operator i has live[i] bytes of temporaries alive, cut into [bounds[i], bounds[i + 1]).

    An allocator that takes `transient` bytes for them takes more than are alive; the difference is held by every piece
    that holds anything. Where nothing is known of what is alive, each piece holds all."""
    if not live:
        return Lease(tuple([transient] * (len(bounds) - 1)))
    more = max(0, transient - max(live))
    found = [max(live[start:stop], default=0) for start, stop in pairwise(bounds)]
    found[-1] = max(live[bounds[-2] :], default=0)  # results live past the last operator
    return Lease(tuple([height + more if height else 0 for height in found]))
