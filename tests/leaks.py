"""What a process holds, and what a test left behind.

`snapshot()` counts threads, child processes, descriptors by kind, mapped memfds, ZeroMQ contexts and
/dev/shm entries; `leaked(before)` says what there is more of now, after giving asynchronous teardown
a moment (`settle_s`): a context's reaper thread ends a little after `term()` returns. It reads
/proc, so it counts what libraries hold too, and costs well under a millisecond.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path

SHM = Path("/dev/shm")
RUN_MARK = f"TESTS_RUN_BY={os.getpid()}"  # in the environment of all that is started from here
os.environ.update([RUN_MARK.split("=")])
_FD_KINDS = {
    "socket:": "socket",
    "/memfd:": "memfd",
    "anon_inode:[eventfd]": "eventfd",
    "anon_inode:[eventpoll]": "epoll",
}


@dataclass(frozen=True)
class Snapshot:
    """What one process held at one moment. Descriptors are numbers by kind, the rest are names."""

    threads: frozenset[tuple[int, str]]
    children: frozenset[tuple[int, str]]
    descriptors: tuple[tuple[str, int], ...]
    memfd_maps: int
    zmq_contexts: int
    shm: frozenset[str]

    def count(self, kind: str) -> int:
        """Of descriptors of that kind."""
        return dict(self.descriptors).get(kind, 0)


def snapshot() -> Snapshot:
    descriptors = Counter(_descriptor_kinds())
    return Snapshot(
        threads=frozenset(_threads()),
        children=frozenset(_children()),
        descriptors=tuple(sorted(descriptors.items())),
        memfd_maps=sum(1 for line in Path("/proc/self/maps").read_text().splitlines() if "/memfd:" in line),
        zmq_contexts=_zmq_contexts(),
        shm=frozenset(_shared_memory()),
    )


def leaked(before: Snapshot, settle_s: float = 30.0) -> list[str]:
    """One line for each kind of thing there is more of than in `before`; empty when all is well."""
    found = growth(before, snapshot())
    if not found:
        return found
    gc.collect()  # a leak is what nothing refers to any more, not what the collector has yet to see
    end = time.monotonic() + settle_s
    while (found := growth(before, snapshot())) and time.monotonic() < end:
        threading.Event().wait(0.02)
    return found


def growth(before: Snapshot, after: Snapshot) -> list[str]:
    """What `after` has and `before` had not, in words."""
    lines = [f"thread {name!r} still runs" for _, name in sorted(after.threads - before.threads)]
    # A process that a test started again, in the place of one that it killed, is not one more.
    more_children = Counter(name for _, name in after.children) - Counter(name for _, name in before.children)
    for pid, name in sorted(after.children - before.children):
        if more_children[name] > 0:
            more_children[name] -= 1
            lines.append(f"child process {pid} still there: {name}")
    for kind, count in after.descriptors:
        more = count - before.count(kind)
        if more > 0:
            lines.append(f"{more} more {kind} descriptor{'s' * (more > 1)} open")
    if (more := after.memfd_maps - before.memfd_maps) > 0:
        lines.append(f"{more} more memfd mapping{'s' * (more > 1)}")
    # Its thread gives itself that name a moment after the context is made: one that had not before is not new.
    more = min(after.zmq_contexts - before.zmq_contexts, after.count("epoll") - before.count("epoll"))
    if more > 0:
        lines.append(f"{more} more ZeroMQ context{'s' * (more > 1)} not terminated")
    shm = after.shm - before.shm
    if shm:
        shm -= _of_other_users(shm)
    lines += [f"/dev/shm/{name} left behind" for name in sorted(shm)]
    return lines


def _of_other_users(names: frozenset[str]) -> frozenset[str]:
    """Those that only other users of the machine have mapped. One that no process has mapped may be ours."""
    ours: set[str] = set()
    others: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        maps = _read(process / "maps")
        found = {name for name in names if f"{SHM}/{name}" in maps} if str(SHM) in maps else set()
        if found:
            (ours if _is_ours(process) else others).update(found)
    return frozenset(others - ours)


def _is_ours(process: Path) -> bool:
    """A descendant of this process, or one that began as one."""
    if RUN_MARK in _read(process / "environ").split("\0"):
        return True
    while process.name not in ("0", "1", str(os.getpid())):
        parent = re.search(r"^PPid:\s*(\d+)", _read(process / "status"), re.MULTILINE)
        process = process.parent / (parent[1] if parent else "0")
    return process.name == str(os.getpid())


def _threads() -> list[tuple[int, str]]:
    # Threads that Python merely met (a library's own, calling back) have no owner here to end them.
    return [(t.native_id or 0, t.name) for t in threading.enumerate() if not isinstance(t, threading._DummyThread)]


def _children() -> list[tuple[int, str]]:
    # multiprocessing's resource tracker is one a process, for its whole life, by design.
    tracker = getattr(resource_tracker._resource_tracker, "_pid", None)
    found = []
    for path in Path("/proc/self/task").glob("*/children"):
        for word in _read(path).split():
            if int(word) != tracker:
                command = _read(Path(f"/proc/{word}/cmdline")).replace("\0", " ").strip()
                found.append((int(word), command or "(ended, not waited for)"))
    return found


def _descriptor_kinds() -> list[str]:
    kinds = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:  # the listing's own descriptor, closed by now
            continue
        kinds += [kind for prefix, kind in _FD_KINDS.items() if target.startswith(prefix)]
    return kinds


def _zmq_contexts() -> int:
    """Each context has one reaper thread, which libzmq names, and one epoll set or more."""
    return sum(1 for path in Path("/proc/self/task").glob("*/comm") if _read(path).startswith("ZMQbg/Reaper"))


def _shared_memory() -> list[str]:
    """Our own user's entries, less those that torch names after another process that still lives."""
    names = []
    for entry in SHM.iterdir() if SHM.is_dir() else ():
        try:
            mine = entry.stat().st_uid == os.getuid()
        except FileNotFoundError:
            continue
        parts = entry.name.split("_")
        elsewhere = parts[0] == "torch" and len(parts) > 1 and parts[1].isdigit() and int(parts[1]) != os.getpid()
        if mine and not (elsewhere and Path(f"/proc/{parts[1]}").exists()):
            names.append(entry.name)
    return names


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # it ended meanwhile
        return ""


@contextmanager
def logging_as_before() -> Iterator[None]:
    """A daemon or a benchmark that runs in this process sets levels for all of it, or turns logging off, and later
    tests would miss warnings."""
    root = logging.getLogger()
    before, disabled = _levels(), root.manager.disable
    yield
    for name, level in _levels().items():
        if level != (was := before.get(name, logging.NOTSET)):
            logging.getLogger(name).setLevel(was)
    logging.disable(disabled)


def _levels() -> dict[str, int]:
    """Of the root logger and of gpumux's own; what other packages set when they are loaded is theirs."""
    root = logging.getLogger()
    own = [one for name, one in root.manager.loggerDict.items() if name.split(".")[0] == "gpumux"]
    return {one.name: one.level for one in (root, *own) if isinstance(one, logging.Logger)}
