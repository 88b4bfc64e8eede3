"""What one step of a wave holds of the arena that it shares with its job's other wave (Wavelet, section 3.2.1).

A step ascends until it has launched the last of its highest pieces, and descends from then on. Only one of two steps
ascends at a time, and one that descends is never refused anything: it holds what its highest remaining piece needs. So
the one that ascends waits for the other at most until that has ended, and the arena, which is at least as high as one
step, is enough for it then: no two steps wait for each other.
"""

from __future__ import annotations

from itertools import accumulate

from gpumux.types import WavePieces


class WaveLease:
    """The heights of a step's pieces under one cut. `arena`: bytes that both waves share."""

    __slots__ = ("_falling", "_last_peak", "arena", "heights", "lane", "tail")

    def __init__(self, pieces: WavePieces, arena: int) -> None:
        self.lane, self.tail, self.heights, self.arena = pieces.lane, pieces.tail, pieces.heights, arena
        self._falling = list(accumulate(reversed(self.heights), max))[::-1]
        self._last_peak = len(self.heights) - 1 - self.heights[::-1].index(max(self.heights))

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
