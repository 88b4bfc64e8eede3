"""Places in page-locked memory where the GPU says that a launch is over. Pure: it is given the memory.

A launch takes a free place and a number no earlier launch in that place had; the GPU stores the number there
when the launch's stream reaches it, and the host compares, at the price of reading its own memory. Launches of
several streams end in any order, so places are given back one by one.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

LAST = 0xFFFFFFFF  # numbers are 32 bits; 0 means nothing was ever here


class Ticket(NamedTuple):
    place: int
    number: int


class Ring:
    """`memory` is an array of 32-bit unsigned numbers, a place each, zeroed here."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory.cast("B").cast("I")
        for place in range(len(self._memory)):
            self._memory[place] = 0
        self._free = deque(range(len(self._memory)))
        self._taken: set[int] = set()
        self._number = 0

    def __len__(self) -> int:
        """Places taken."""
        return len(self._taken)

    def take(self) -> Ticket | None:
        """A place, the one free for longest; None when all are taken."""
        if not self._free:
            return None
        self._number = 1 if self._number == LAST else self._number + 1
        place = self._free.popleft()
        self._taken.add(place)
        return Ticket(place, self._number)

    def offset(self, ticket: Ticket) -> int:
        """Bytes from the memory's start to the ticket's place."""
        return ticket.place * 4

    def reached(self, ticket: Ticket) -> bool:
        return self._memory[ticket.place] == ticket.number

    def give(self, ticket: Ticket) -> None:
        """Free the place. Raises ValueError when it is not taken: the next launch there would end at once."""
        if ticket.place not in self._taken:
            raise ValueError(f"place {ticket.place} is not taken")
        self._taken.remove(ticket.place)
        self._free.append(ticket.place)
