"""How much memory an executor really takes for its job: the most it held during a step. No torch.

Counted is what the process has of its own: its anonymous memory, less what it had at birth (pages of the fork server
that it copies are the interpreter's), and shared memory that is mapped meanwhile. Linux keeps the highest value (VmHWM
in /proc/PID/status) and begins anew when asked (/proc/PID/clear_refs, proc(5)); where it may not be asked, the highest
value since the process began stands in for it. A look takes about a tenth of a millisecond, so not every step is looked
at.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct

PAGE_MEMORY, PAGE_MEMORY_AT = struct.Struct("<Q"), 40
EVERY_S = 0.5
SLACK, SLACK_BYTES = 1.15, 64 << 20  # over what is planned, before the heap gives anything back
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
_BEGIN_ANEW = b"5"


class PeakMemory:
    """Of this process. What is found stands in the page that it shares with the daemon: bytes."""

    def __init__(self, page: mmap.mmap) -> None:
        self._page = page
        anonymous, shared, _, _ = _read()
        self._base = anonymous + shared
        self._next = 0.0
        self._looking = False

    def begin(self, now: float) -> None:
        """A step begins."""
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
            pass  # not in every container: see above
        finally:
            os.close(file)

    def end(self) -> int:
        """It has ended: what it held at most; 0 if it was not looked at."""
        if not self._looking:
            return 0
        self._looking = False
        _, _, files, highest = _read()
        held = max(0, highest - files - self._base)
        PAGE_MEMORY.pack_into(self._page, PAGE_MEMORY_AT, held)
        return held


class Heap:
    """Gives the kernel back what the heap holds free where a job takes more than was planned for it: glibc keeps blocks
    of tens of megabytes that it could use again, and those of one batch shape do not fit another's. Taking pages again
    costs the next step time, so it is done the more rarely the less it helps."""

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
        self._planned = 0
        self._largest = 0
        self._next, self._pause = 0.0, FIRST_PAUSE_S

    def loaded(self, kept: int, transient: int) -> None:
        """The job has another Program: what it keeps for good is added, and Programs never run at once."""
        self._planned += kept
        self._largest = max(self._largest, transient)
        self._next, self._pause = 0.0, FIRST_PAUSE_S

    def look(self, held: int, now: float) -> None:
        """A step held so much."""
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
