"""What a job can run again: everything its daemon was told since a state that can be had back.

A *point* is such a state: the beginning (number 0, where what was pushed is in the log itself), or a snapshot, by its
number. The log reaches back to the snapshot before the newest saved one, so that a damaged one costs nothing, while
its bounds allow. Beyond them that older part goes first; then whoever adds has to wait for a snapshot (`full`), and if
there can be none, everything goes (`give_up`): the job then goes on, and can't come back until a snapshot succeeds.

Plain data and no clock: what entries are is the caller's business (recovery.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

BEGINNING = 0
EARLY = 4  # a new point is wanted when this part of the bounds is used since the last one


@dataclass(frozen=True, slots=True)
class Entry:
    """`step` is the step's number, -1 for what is no step. `nbytes` is what `what` holds."""

    step: int
    nbytes: int
    what: Any


@dataclass(slots=True)
class _Point:
    position: int  # entries before it are in the state
    step: int  # the first step that isn't
    nbytes: int  # of all entries ever added before it
    saved: bool


class ReplayLog:
    """Bounds: bytes and number of entries. `dropped` is called with each entry that nobody will ask for again."""

    def __init__(self, max_bytes: int, max_entries: int, dropped: Callable[[Entry], None] | None = None) -> None:
        self.max_bytes = max_bytes
        self.max_entries = max_entries
        self._dropped = dropped
        self._entries: deque[Entry] = deque()
        self._start = 0  # position of the first entry
        self._points: dict[int, _Point] = {BEGINNING: _Point(0, 0, 0, True)}  # by number, oldest first
        self._added = 0  # bytes of all entries ever
        self._next_step = 0
        self.nbytes = 0

    # ---- adding

    def add(self, entry: Entry) -> None:
        """The daemon is told this next. Kept if it follows a point."""
        if entry.step >= 0:
            self._next_step = entry.step + 1
        if not self._points:
            self._start += 1
            self._drop(entry)
            return
        self._entries.append(entry)
        self.nbytes += entry.nbytes
        self._added += entry.nbytes

    def take_back(self, entry: Entry) -> None:
        """The daemon was not told what was added last."""
        if self._entries and self._entries[-1] is entry:
            self._entries.pop()
            self.nbytes -= entry.nbytes
            self._added -= entry.nbytes
            self._drop(entry)
        elif not self._points:
            self._start -= 1

    def mark(self, number: int) -> None:
        """A snapshot is taken here; whether it succeeds is not known yet."""
        self._points[number] = _Point(self._start + len(self._entries), self._next_step, self._added, False)

    def saved(self, number: int) -> None:
        """The snapshot is on the disk: of what is older, the newest saved one stays, and what follows it."""
        point = self._points.get(number)
        if point is None:
            return
        point.saved = True
        older = [n for n, p in self._points.items() if p.saved and n < number]
        for n in older[:-1]:
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
        """Nothing may be added before a snapshot is saved or everything is given up. Gives the older part up first."""
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
        """Enough was added since the newest point that a new one should be made early."""
        if not self._points:
            return True
        newest = next(reversed(self._points.values()))
        entries = self._start + len(self._entries) - newest.position
        return (self._added - newest.nbytes) * EARLY > self.max_bytes or entries * EARLY > self.max_entries

    @property
    def has_news(self) -> bool:
        """Something was added since the newest point."""
        newest = next(reversed(self._points.values()), None)
        return newest is None or newest.position < self._start + len(self._entries)

    def give_up(self) -> None:
        """Forget everything but what follows a snapshot that is being taken."""
        self._points = {n: p for n, p in self._points.items() if not p.saved}
        self._trim()

    # ---- coming back

    @property
    def recoverable(self) -> bool:
        return any(p.saved for p in self._points.values())

    def candidates(self, first_open: int | None) -> list[int]:
        """Points to come back from, best first: also a snapshot nobody has confirmed, for it may be on the disk. None
        that has steps behind it whose answers were lost: `first_open` is the first unanswered step."""
        usable = [n for n, p in self._points.items() if first_open is None or p.step <= first_open]
        return usable[::-1]

    def since(self, number: int) -> Iterator[Entry]:
        """What was told after a point, oldest first."""
        skipped = self._points[number].position - self._start
        for i, entry in enumerate(self._entries):
            if i >= skipped:
                yield entry

    def came_back(self, number: int, lost: list[int]) -> None:
        """The daemon stands at the head again, from point `number`; the points in `lost` are no more."""
        for n in [n for n, p in self._points.items() if n in lost or (n > number and not p.saved)]:
            del self._points[n]
        if number in self._points:
            self._points[number].saved = True
        self._trim()

    def _trim(self) -> None:
        """Let go of what no point needs."""
        end = self._start + len(self._entries)
        until = min((p.position for p in self._points.values()), default=end)
        while self._start < until:
            entry = self._entries.popleft()
            self._start += 1
            self.nbytes -= entry.nbytes
            self._drop(entry)

    def _drop(self, entry: Entry) -> None:
        if self._dropped is not None:
            self._dropped(entry)

    def __len__(self) -> int:
        return len(self._entries)
