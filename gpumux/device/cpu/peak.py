"""Measures how much memory an executor really takes for its job: the most that it held during a step. No torch.

The measure counts memory of the process alone: its anonymous memory, less what it had when it was forked, and shared
memory mapped since. Linux keeps the highest value (VmHWM in /proc/PID/status), and resets it on request
(/proc/PID/clear_refs, proc(5)). Where the reset is forbidden, the highest value since the process began is used. A
measurement takes time, so not every step is measured.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct

PAGE_MEMORY, PAGE_MEMORY_AT = struct.Struct("<Q"), 40
EVERY_S = 0.5
SLACK, SLACK_BYTES = 1.15, 64 << 20  # allowed beyond what is planned, before the heap is trimmed
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
_BEGIN_ANEW = b"5"


class PeakMemory:
    """Measures this process, and writes the result, in bytes, to the page that it shares with the daemon."""

    def __init__(self, page: mmap.mmap) -> None:
        self._page = page
        anonymous, shared, _, _ = _read()
        self._base = anonymous + shared
        self._next = 0.0
        self._looking = False

    def begin(self, now: float) -> None:
        """Reset the peak at the start of a step, at most every EVERY_S. `now` in seconds."""
        if now < self._next:
            return
        self._next, self._looking = now + EVERY_S, True
        try:
            file = os.open("/proc/self/clear_refs", os.O_WRONLY | os.O_CLOEXEC)
        except OSError:
            return
        try:
            os.write(file, _BEGIN_ANEW)
        except OSError:
            pass  # some containers forbid it: see the module's docstring
        finally:
            os.close(file)

    def end(self) -> int:
        """Read the peak at the end of a step. Returns bytes, 0 if this step was not measured."""
        if not self._looking:
            return 0
        self._looking = False
        _, _, files, highest = _read()
        held = max(0, highest - files - self._base)
        PAGE_MEMORY.pack_into(self._page, PAGE_MEMORY_AT, held)
        return held


class Heap:
    """Returns free heap memory to the kernel if a job takes more than was planned for it: glibc keeps free blocks of
    tens of megabytes for reuse, and those of one batch shape do not fit another's. The next step pays for mapping the
    pages again, so each trim doubles the pause before the next one."""

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
        self._planned = 0
        self._largest = 0
        self._next, self._pause = 0.0, FIRST_PAUSE_S

    def loaded(self, kept: int, transient: int) -> None:
        """Plan for another Program. Bytes that it keeps add up; of transient bytes the largest count, because Programs
        never run at once."""
        self._planned += kept
        self._largest = max(self._largest, transient)
        self._next, self._pause = 0.0, FIRST_PAUSE_S

    def look(self, held: int, now: float) -> None:
        """Trim the heap if a step held more bytes than planned, and no trim was made recently."""
        if self._trim is None or now < self._next or held <= (self._planned + self._largest) * SLACK + SLACK_BYTES:
            return
        self._trim(0)
        self._next, self._pause = now + self._pause, min(LONGEST_PAUSE_S, 2 * self._pause)


def _read() -> tuple[int, int, int, int]:
    """Resident bytes: anonymous, shared memory, files; and the highest sum of the three."""
    with open("/proc/self/status", "rb") as file:
        lines = (line.split() for line in file)
        found = {words[0]: int(words[1]) << 10 for words in lines if words[0] in _FIELDS}
    return tuple(found.get(name, 0) for name in _FIELDS)  # type: ignore[return-value]


_FIELDS = (b"RssAnon:", b"RssShmem:", b"RssFile:", b"VmHWM:")
