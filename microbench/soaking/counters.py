"""Counts by clients in many processes, in a file that all of them map, so that a killed client's counts are kept.

There is a row for each slot, which one process at a time writes.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Sequence
from pathlib import Path

FIELDS = (
    "lives",  # clients that connected
    "right",  # steps answered with the right bits
    "wrong",  # steps answered with other bits
    "states_right",  # comparisons of the whole state that found it right
    "states_wrong",
    "stopped",  # clients whose job an operator stopped
    "refused",  # OpenJob or connections refused with a typed error, and tried again
    "cut",  # clients whose session was lost because their process had been stopped
    "trouble",  # errors of any other kind; trouble.txt describes them
)
_NUMBER = struct.Struct("=q")


class SharedCounters:
    """`create` makes the file; `open` maps it. `fields`: what is counted in each slot."""

    def __init__(self, path: Path, slots: int, fields: Sequence[str] = FIELDS) -> None:
        self.path = path
        self.slots = slots
        self.fields = tuple(fields)
        self._file = os.open(path, os.O_RDWR)
        self._map = mmap.mmap(self._file, 0)

    @classmethod
    def create(cls, path: Path, slots: int, fields: Sequence[str] = FIELDS) -> SharedCounters:
        path.write_bytes(bytes(slots * len(fields) * _NUMBER.size))
        return cls(path, slots, fields)

    def _at(self, slot: int, field: str) -> int:
        return (slot * len(self.fields) + self.fields.index(field)) * _NUMBER.size

    def get(self, slot: int, field: str) -> int:
        return int(_NUMBER.unpack_from(self._map, self._at(slot, field))[0])

    def add(self, slot: int, field: str, count: int = 1) -> int:
        """The new number."""
        number = self.get(slot, field) + count
        _NUMBER.pack_into(self._map, self._at(slot, field), number)
        return number

    def total(self, field: str) -> int:
        return sum(self.get(slot, field) for slot in range(self.slots))

    def trouble(self, slot: int, text: str) -> None:
        """Record an error."""
        self.add(slot, "trouble")
        with self.path.with_name("trouble.txt").open("a") as out:
            out.write(f"slot {slot}: {text}\n")

    def troubles(self) -> list[str]:
        path = self.path.with_name("trouble.txt")
        return path.read_text().splitlines() if path.exists() else []

    def close(self) -> None:
        self._map.close()
        os.close(self._file)
