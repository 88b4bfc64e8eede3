"""From the host to the device: one thread that launches, and one in-order queue that all priorities share.

The queue's head leaves it only when its own stream has room on the device. Until then everything behind it
waits, whatever its priority: the head-of-line blocking that launch pacing avoids (DeepPool, section 5).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import inf

from gpumux.device.sim.work import Work

Accept = Callable[["Entry", float], bool]


class Entry:
    """One call of the host: a graph, or a single kernel. `last` marks a launch's last one; `began` is
    where the launch's start is noted, shared by its entries."""

    __slots__ = ("arrived", "began", "cost", "job", "last", "launch", "priority", "work")

    def __init__(
        self, launch: int, job: str, priority: int, work: Work, cost: float, last: bool, began: list[float]
    ) -> None:
        self.launch = launch
        self.job = job
        self.priority = priority
        self.work = work
        self.cost = cost  # host seconds
        self.last = last
        self.began = began
        self.arrived = inf  # when its stream can see it


class LaunchPath:
    """`accept(entry, now)` puts an entry on its stream if that has room, and says whether it had."""

    def __init__(self, length: int, transmit_s: float, accept: Accept) -> None:
        self._length = length
        self._transmit_s = transmit_s
        self._accept = accept
        self._waiting: deque[Entry] = deque()  # the host is at the first of them
        self._queue: deque[Entry] = deque()
        self._free_at = 0.0  # when the host is done with all it was told before
        self._done_at = inf  # when it is done with the first of `_waiting`
        self.launching_s = 0.0  # host seconds spent so far
        self.holds = False  # whether anything is on its way
        self.next_at = inf  # when an entry moves without any launch ending first

    def submit(self, entry: Entry, now: float) -> None:
        """The host is told to launch `entry`."""
        if not self._waiting:
            start = max(now, self._free_at)
            done = start + entry.cost
            entry.arrived = done + self._transmit_s
            # Nothing is ahead of it, so room on its stream now is room when it gets there.
            if not self._queue and self._accept(entry, now):
                self._free_at = done
                self.launching_s += entry.cost
                return
            self._done_at = done
        self._waiting.append(entry)
        self._look()

    def move(self, now: float) -> None:
        """Move what can move at `now`."""
        queue, waiting = self._queue, self._waiting
        while True:
            while queue and self._accept(queue[0], now):
                queue.popleft()
            if not waiting or self._done_at > now or len(queue) >= self._length:
                self._look()
                return
            entry = waiting.popleft()
            entry.arrived = max(now, self._done_at + self._transmit_s)
            self.launching_s += entry.cost
            queue.append(entry)
            self._free_at = now
            self._done_at = now + waiting[0].cost if waiting else inf

    def drop(self, job: str, now: float) -> None:
        """Forget what is on its way for `job`."""
        at_it = self._waiting[0] if self._waiting else None
        for held in (self._waiting, self._queue):
            kept = [entry for entry in held if entry.job != job]
            held.clear()
            held.extend(kept)
        if at_it is not None and at_it.job == job:
            self._free_at = now
            self._done_at = now + self._waiting[0].cost if self._waiting else inf
        self._look()

    def _look(self) -> None:
        self.holds = bool(self._waiting or self._queue)
        self.next_at = self._done_at if len(self._queue) < self._length else inf
