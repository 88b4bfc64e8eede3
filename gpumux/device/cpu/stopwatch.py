"""How long work of this thread takes on a core of its own: the time by the clock, less what the thread stood in a
queue for a core.

A low job's processes give way to others' (low_nice), so by the clock an operator of theirs may seem to take a hundred
times as long as it does, beside a high job or anything else on the machine. Linux counts what a thread waits, in
/proc/thread-self/schedstat (proc_pid_schedstat(5)). Where it doesn't, the time by the clock is all there is. What torch's
own threads wait for a core is not taken off.
"""

from __future__ import annotations

import os
from functools import cache
from time import perf_counter

_STATISTICS = "/proc/thread-self/schedstat"


class Stopwatch:
    """For the thread that starts it."""

    __slots__ = ("_began", "_waited")

    def __init__(self) -> None:
        self._waited = self._began = 0.0

    def start(self) -> None:
        self._waited = waited()
        self._began = perf_counter()

    def stop(self) -> float:
        """Seconds since `start`."""
        seconds = perf_counter() - self._began
        return max(0.0, seconds - (waited() - self._waited))


def waited() -> float:
    """Seconds this thread has stood in a queue for a core since it began; 0.0 where nobody counts them."""
    if not _counted():
        return 0.0
    file = os.open(_STATISTICS, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _queued(file)
    finally:
        os.close(file)


class Waits:
    """`waited` for a thread that asks before and after each piece: a fifth of the cost, as the file stays open. For the
    thread that makes it."""

    def __init__(self) -> None:
        self._file = os.open(_STATISTICS, os.O_RDONLY | os.O_CLOEXEC) if _counted() else -1

    def seconds(self) -> float:
        return _queued(self._file) if self._file >= 0 else 0.0

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)


def _queued(file: int) -> float:
    return 1e-9 * int(os.pread(file, 128, 0).split()[1])


@cache
def _counted() -> bool:
    """Whether the kernel keeps such statistics."""
    try:
        with open(_STATISTICS, "rb") as file:
            return len(file.read().split()) == 3
    except OSError:
        return False
