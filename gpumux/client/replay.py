"""The log of what a job sent to its daemon, from which recovery runs it again.

A *point* is a state that can be restored: the beginning (number 0; the log itself holds the state pushed then), or a
snapshot, by its number. The log reaches back to the snapshot before the newest saved one, so that recovery survives one
damaged snapshot, while its bounds allow. Beyond its bounds the log drops that older part first. Then it is `full`: the
caller must wait for a snapshot before it adds more. If no snapshot can be saved, `give_up` drops everything: the job
goes on, but can't be recovered until a snapshot succeeds.

Plain data and no clock. The caller decides what entries contain (recovery.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

BEGINNING = 0
EARLY = 4  # a new point is wanted once 1/EARLY of the bounds is used since the newest one


@dataclass(frozen=True, slots=True)
class ReplayEntry:
    """One thing sent to the daemon. `step`: the step's number, -1 if it is no step. `nbytes`: bytes that `what`
    holds."""

    step: int
    nbytes: int
    what: Any


@dataclass(slots=True)
class _Point:
    position: int  # number of entries, ever added, that its state contains
    step: int  # the first step after it
    nbytes: int  # bytes of all entries ever added before it
    saved: bool


class ReplayLog:
    """Entries since the points that can be restored, within bounds of bytes and of their number. `dropped` is called
    once with each entry that leaves the log."""

    def __init__(self, max_bytes: int, max_entries: int, dropped: Callable[[ReplayEntry], None] | None = None) -> None:
        self.max_bytes = max_bytes
        self.max_entries = max_entries
        self._dropped = dropped
        self._entries: deque[ReplayEntry] = deque()
        self._start = 0  # position of the first entry in the log
        self._points: dict[int, _Point] = {BEGINNING: _Point(0, 0, 0, True)}  # by number, oldest first
        self._added = 0  # bytes of all entries ever added
        self._next_step = 0
        self.nbytes = 0

    # ---- adding

    def add(self, entry: ReplayEntry) -> None:
        """Add what is sent next. It is kept if there is a point before it."""
        if entry.step >= 0:
            self._next_step = entry.step + 1
        if not self._points:
            self._start += 1
            self._drop(entry)
            return
        self._entries.append(entry)
        self.nbytes += entry.nbytes
        self._added += entry.nbytes

    def remove_newest(self, entry: ReplayEntry) -> None:
        """Undo the last `add`, because the entry was not sent."""
        if self._entries and self._entries[-1] is entry:
            self._entries.pop()
            self.nbytes -= entry.nbytes
            self._added -= entry.nbytes
            self._drop(entry)
        elif not self._points:
            self._start -= 1

    def mark(self, number: int) -> None:
        """Snapshot `number` is being taken after the newest entry. Whether it succeeds is not known yet."""
        self._points[number] = _Point(self._start + len(self._entries), self._next_step, self._added, False)

    def saved(self, number: int, *, alone: bool = False) -> None:
        """The snapshot can be had back. Of the older points only the newest saved one is kept; `alone`: none."""
        point = self._points.get(number)
        if point is None:
            return
        point.saved = True
        older = [n for n, p in self._points.items() if p.saved and n < number]
        for n in older if alone else older[:-1]:
            del self._points[n]
        for n in [n for n, p in self._points.items() if n < number and not p.saved]:
            del self._points[n]
        self._trim()

    def failed(self, number: int) -> None:
        """The snapshot is not on the disk."""
        self._points.pop(number, None)
        self._trim()

    # ---- bounds

    @property
    def full(self) -> bool:
        """Whether nothing may be added before a snapshot is saved or `give_up` is called. Drops all points but the
        newest saved one if that makes room."""
        if self._within():
            return False
        saved = [n for n, p in self._points.items() if p.saved]
        for n in saved[:-1]:
            del self._points[n]
        self._trim()
        return not self._within()

    def _within(self) -> bool:
        return self.nbytes < self.max_bytes and len(self._entries) < self.max_entries

    @property
    def wants_point(self) -> bool:
        """Whether so much was added since the newest point that a snapshot should be taken early."""
        if not self._points:
            return True
        newest = next(reversed(self._points.values()))
        entries = self._start + len(self._entries) - newest.position
        return (self._added - newest.nbytes) * EARLY > self.max_bytes or entries * EARLY > self.max_entries

    @property
    def has_news(self) -> bool:
        """Whether an entry was added since the newest point."""
        newest = next(reversed(self._points.values()), None)
        return newest is None or newest.position < self._start + len(self._entries)

    def give_up(self) -> None:
        """Drop all entries but those after a snapshot that is being taken."""
        self._points = {n: p for n, p in self._points.items() if not p.saved}
        self._trim()

    def lose_beginning(self) -> None:
        """The state at the beginning can't be had any more."""
        self._points.pop(BEGINNING, None)
        self._trim()

    def begin_anew(self) -> None:
        """All state is sent again now. If no step was sent yet and there is no point, this is the beginning."""
        if not self._points and not self._next_step:
            self._points[BEGINNING] = _Point(self._start + len(self._entries), 0, self._added, True)

    # ---- recovery

    @property
    def recoverable(self) -> bool:
        """Whether there is a point that is known to be saved."""
        return any(p.saved for p in self._points.values())

    def candidates(self, first_open: int | None) -> list[int]:
        """Points to recover from, best first. Snapshots whose success is not known are included, because they may be on
        the disk. Points after `first_open`, the first unanswered step, are not: that step must run again."""
        usable = [n for n, p in self._points.items() if first_open is None or p.step <= first_open]
        return usable[::-1]

    def since(self, number: int) -> Iterator[ReplayEntry]:
        """The entries after a point, oldest first."""
        skipped = self._points[number].position - self._start
        for i, entry in enumerate(self._entries):
            if i >= skipped:
                yield entry

    def recovered(self, number: int, lost: list[int]) -> None:
        """The job was recovered from point `number` up to the newest entry. The points in `lost` can't be restored."""
        for n in [n for n, p in self._points.items() if n in lost or (n > number and not p.saved)]:
            del self._points[n]
        if number in self._points:
            self._points[number].saved = True
        self._trim()

    def _trim(self) -> None:
        """Drop the entries before the oldest point."""
        end = self._start + len(self._entries)
        until = min((p.position for p in self._points.values()), default=end)
        while self._start < until:
            entry = self._entries.popleft()
            self._start += 1
            self.nbytes -= entry.nbytes
            self._drop(entry)

    def _drop(self, entry: ReplayEntry) -> None:
        if self._dropped is not None:
            self._dropped(entry)

    def __len__(self) -> int:
        return len(self._entries)
