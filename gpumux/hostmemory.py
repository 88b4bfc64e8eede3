"""The host memory that this process may still allocate or has freed, and files in memory.

Two things limit it: the memory that the kernel reports as available, and every memory control group that the process
is in, its own and all above it. A group's usage counts the page cache of files its processes read and wrote. The kernel
drops the inactive part of that cache before it refuses memory, so it counts as free.
`root` stands for "/" so that a test can pass another machine.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
_UNLIMITED = 1 << 60  # version 1 says "no limit" with the largest multiple of a page


@dataclass(frozen=True, slots=True)
class Group:
    """One memory control group that has a limit. All in bytes; `cache` is inactive page cache."""

    path: Path
    limit: int
    used: int
    cache: int

    @property
    def free(self) -> int:
        return max(0, self.limit - self.used + self.cache)


def free_bytes(root: Path = ROOT) -> int:
    """Bytes this process may still allocate. Raises OSError if /proc does not say."""
    return min([_available(root), *(group.free for group in groups(root))])


_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # of mallopt(3)
_MOST_MAPPED, _LARGEST_OF_HEAP = 1 << 16, 32 << 20  # glibc: blocks mapped at most; the largest threshold it adapts to


@contextmanager
def freed_is_reused() -> Iterator[None]:
    """A block in which glibc keeps what is freed, of any size, for what is allocated next. It would map large blocks
    anew each time, and the kernel fill them page by page, which takes a third of the time of work on numbers of tens of
    megabytes. At its end, all that is free is returned to the kernel, and the limits are those that glibc adapts to in
    a process with large tensors. Settings of the user's own, and other allocators, are left as they are."""
    libc = ctypes.CDLL(None)
    change, trim = getattr(libc, "mallopt", None), getattr(libc, "malloc_trim", None)
    if any(name.startswith("MALLOC_") or "glibc.malloc" in value for name, value in os.environ.items()):
        change = None
    try:
        if change is not None:
            change(_MMAP_MAX, 0)
            change(_TRIM_THRESHOLD, (1 << 31) - 1)
        yield
    finally:
        if change is not None:
            change(_MMAP_MAX, _MOST_MAPPED)
            change(_MMAP_THRESHOLD, _LARGEST_OF_HEAP)
            change(_TRIM_THRESHOLD, 2 * _LARGEST_OF_HEAP)
        if trim is not None:
            trim(0)


def groups(root: Path = ROOT) -> Iterator[Group]:
    """The process's memory control groups that have a limit, its own first; versions 1 and 2."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        base = root / "sys/fs/cgroup"
        if controllers == "":
            files = ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            base /= "memory"
        else:
            continue
        own = base / path.lstrip("/")
        for level in (own, *own.parents):
            yield from _group(level, *files)
            if level == base:
                break


def _group(path: Path, limit: str, used: str, cache: str) -> Iterator[Group]:
    try:
        most, now = (path / limit).read_text().strip(), int((path / used).read_text())
    except (OSError, ValueError):
        return  # the root group has no limit file, and a container may not see its parents
    if most.isdecimal() and int(most) < _UNLIMITED:
        yield Group(path, int(most), now, min(now, _statistic(path, cache)))


def _statistic(path: Path, name: str) -> int:
    """One figure of the group's memory.stat, 0 if it is missing."""
    try:
        lines = (path / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(value) for key, _, value in (line.partition(" ") for line in lines) if key == name), 0)


def _available(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo does not say how much memory is available")


def memory_file(name: str, parts: Sequence[bytes]) -> int:
    """A memfd holding `parts` end to end, for data that is too long for a message. The caller closes it. Raises OSError
    if there is no memory or no descriptor left."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        for part in parts:
            view = memoryview(part)
            while len(view):
                view = view[os.write(fd, view) :]
    except BaseException:
        os.close(fd)
        raise
    return fd


# ---- The name of this machine's processor.


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return "CPU"
