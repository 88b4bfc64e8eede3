"""Places in page-locked memory where the GPU says that a launch is over. Pure: it is given the memory.

A launch takes a number that no earlier launch had, and the place that the number gives; the GPU stores the number there when the
launch's stream reaches it, and the host compares, at the price of reading its own memory. Launches of several streams end in any
order: a number whose place is still taken is left out.
"""

from __future__ import annotations

LAST = 0xFFFFFFFF  # numbers are 32 bits; 0 means nothing was ever here


class Ring:
    """`memory` is an array of 32-bit unsigned numbers, a place each, zeroed here."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory.cast("B").cast("I")
        self._places = len(self._memory)
        for place in range(self._places):
            self._memory[place] = 0
        self._taken = bytearray(self._places)
        self._outstanding = 0
        self._number = 0

    def __len__(self) -> int:
        """Places taken."""
        return self._outstanding

    def take(self) -> int | None:
        """A number whose place is free; None when all are taken."""
        if self._outstanding == self._places:
            return None
        number, taken, places = self._number, self._taken, self._places
        number = 1 if number == LAST else number + 1
        while taken[number % places]:
            number = 1 if number == LAST else number + 1
        taken[number % places] = 1
        self._outstanding += 1
        self._number = number
        return number

    def offset(self, number: int) -> int:
        """Bytes from the memory's start to the number's place."""
        return number % self._places * 4

    def reached(self, number: int) -> bool:
        return self._memory[number % self._places] == number

    def give(self, number: int) -> None:
        """Free the place. Raises ValueError when it is not taken: the next launch there would end at once."""
        place = number % self._places
        if not self._taken[place]:
            raise ValueError(f"place {place} is not taken")
        self._taken[place] = 0
        self._outstanding -= 1
