"""What a daemon holds, by /proc: processes, memory, descriptors and shared memory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Holding:
    """`resident` bytes of the daemon and of each process it keeps, by what it is; `segments`: memory of memfds that is
    mapped or open in the daemon."""

    resident: dict[str, int]
    descriptors: int
    segments: int
    processes: int

    @property
    def memory(self) -> int:
        return sum(self.resident.values())


def holding(pid: int) -> Holding:
    """What the daemon holds now. Raises ProcessLookupError if it has ended."""
    try:
        below = descendants(pid)
        names = os.listdir(f"/proc/{pid}/fd")
        memfds = sum(_is_memfd(f"/proc/{pid}/fd/{name}") for name in names)
        mapped = sum("/memfd:" in line for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
    except FileNotFoundError:
        raise ProcessLookupError(f"no process {pid}") from None
    found = {"daemon": resident(pid)}
    for child in children(pid):
        found[f"process {child}"] = resident(child)
    return Holding(found, len(names), memfds + mapped, 1 + len(below))


def resident(pid: int) -> int:
    """Bytes; 0 when it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
    except OSError:
        return 0


def threads(pid: int) -> int:
    """How many threads it has; 0 when it is gone."""
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0


def children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(p) for p in task.read_text().split()]
        except OSError:
            continue  # the thread ended
    return found


def executors(daemon: int) -> list[int]:
    """The processes of a daemon that run jobs, by their names: processes that check Programs stand beside them."""
    found: list[int] = []
    for child in children(daemon):
        for pid in children(child):
            try:
                name = Path(f"/proc/{pid}/comm").read_text().strip()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has just ended
            if name == "gpumux-executor":
                found.append(pid)
    return found


def descendants(pid: int) -> list[int]:
    found = children(pid)
    return found + [d for child in found for d in descendants(child)]


def marked(mark: str) -> list[int]:
    """Processes, but for this one, that have `mark` (NAME=VALUE) in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            has = f"\0{mark}\0".encode() in b"\0" + path.read_bytes() + b"\0"
        except OSError:
            continue
        if has and int(path.parent.name) != os.getpid():
            found.append(int(path.parent.name))
    return found


def _is_memfd(path: str) -> bool:
    try:
        return os.readlink(path).startswith("/memfd:")
    except OSError:
        return False
