"""A memory control group for each job's process. No torch.

RLIMIT_DATA (confinement.py) counts private memory alone. A control group counts files in memory, shared mappings and
what the process forks as well, and belongs to the daemon's user: a process that runs as another user can neither leave
it nor raise its limit. One that runs as the daemon's user could, since it may write the same files. Swap is bounded
too, where there is any: memory that the kernel moves there is not counted as the group's any more.

A daemon can only make groups below its own, and only if it was given that: version 2 by delegation (systemd:
`Delegate=memory` and no `ProtectControlGroups=`; a container: its own control groups, writable), version 1 by rights in
the hierarchy.

In version 2 a group has either processes or limited groups below it, so the daemon moves into a group of its own first.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final

ROOT: Final = Path("/")
_CGROUPS: Final = "sys/fs/cgroup"
_DELEGATED: Final = ("user.delegate", "trusted.delegate")  # extended attributes that systemd sets
_OWN: Final = "gpumux"  # the daemon's processes are in it


@dataclass(frozen=True, slots=True)
class Files:
    """Names of a group's files. `killed` has the field `oom_kill`; `full` and its field say how often the group had no
    room within its own limit. `swap` bounds what the group has in swap (version
    2), or in memory and swap together (version 1), so it takes `swap_factor` times the limit; the file is missing where
    the kernel does not count swap."""

    limit: str
    killed: str
    full: tuple[str, str]
    swap: str
    swap_factor: int


_VERSION_1: Final = Files(
    "memory.limit_in_bytes", "memory.oom_control", ("memory.failcnt", ""), "memory.memsw.limit_in_bytes", 2
)
_VERSION_2: Final = Files("memory.max", "memory.events", ("memory.events", "oom"), "memory.swap.max", 1)


@dataclass(frozen=True, slots=True)
class OwnGroup:
    """The daemon's own group. `missing`: why it can't make groups below, "" if it may."""

    path: Path
    files: Files
    missing: str = ""


def find(root: Path = ROOT) -> OwnGroup:
    """Look where this process may make memory control groups. Changes nothing. `root` stands for "/"."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError as error:
        return OwnGroup(root, _VERSION_2, f"/proc/self/cgroup: {error.strerror}")
    paths = {controllers: path.lstrip("/") for _, controllers, path in (line.split(":", 2) for line in lines)}
    base = root / _CGROUPS
    for controllers, path in paths.items():
        if "memory" in controllers.split(","):
            own = base / "memory" / path
            writable = os.access(own, os.W_OK) and (own / _VERSION_1.limit).exists()
            return OwnGroup(own, _VERSION_1, "" if writable else "the daemon may not make groups below its own")
    own = base / paths.get("", "")
    return OwnGroup(own, _VERSION_2, _not_delegated(own, base) if "" in paths else "this kernel has none")


def _not_delegated(own: Path, base: Path) -> str:
    """Why a group of version 2 can't have limited groups below it, or ""."""
    try:
        controllers = (own / "cgroup.controllers").read_text().split()
    except OSError as error:
        return f"{own}: {error.strerror}"
    if "memory" not in controllers:
        return "the daemon's group has no memory controller"
    if not all(os.access(path, os.W_OK) for path in (own, own / "cgroup.procs", own / "cgroup.subtree_control")):
        return "the daemon may not make groups below its own"
    # Root may write everywhere, also to groups that are the service manager's.
    given = own == base or own.stat().st_uid == os.geteuid() != 0 or any(_attribute(own, name) for name in _DELEGATED)
    return "" if given else "the daemon's group was not delegated to it"


def _attribute(path: Path, name: str) -> bool:
    try:
        return os.getxattr(path, name) == b"1"
    except OSError:
        return False


class MemoryGroups:
    """Makes, limits and removes groups. Raises OSError if there can be none. In version 2 this process, and what it
    starts from then on, moves to a group of its own."""

    _numbers = count(1)  # a process may have several devices

    def __init__(self, place: OwnGroup) -> None:
        self._files, self._parent = place.files, place.path
        self._limits: dict[str, int] = {}  # in bytes, by name
        self._left: set[str] = set()  # groups of which some process has not ended yet
        if place.files is _VERSION_2:
            self._move_out()
        for path in self._parent.glob(f"{_OWN}-*-*"):  # of daemons that were killed
            if not Path(f"/proc/{path.name.split('-')[1]}").exists():
                self._left.add(path.name)
        self._sweep()
        self._left.clear()

    def _move_out(self) -> None:
        """Leave the group below which limited ones are made. Raises OSError, and is back then."""
        own = self._parent / _OWN
        own.mkdir(exist_ok=True)
        (own / "cgroup.procs").write_text("0")
        try:
            (self._parent / "cgroup.subtree_control").write_text("+memory")
        except OSError as error:
            (self._parent / "cgroup.procs").write_text("0")
            own.rmdir()
            if error.errno == errno.EBUSY:
                raise OSError(errno.EBUSY, "other processes are in the daemon's control group") from error
            raise

    def make(self, most: int) -> str:
        """Make a group of at most `most` bytes of memory, and as many of swap. Returns its name. Raises OSError."""
        self._sweep()
        while True:
            name = f"{_OWN}-{os.getpid()}-{next(self._numbers)}"
            try:
                (self._parent / name).mkdir()
            except FileExistsError:
                continue  # it is of a daemon that was killed and had this process's id
            break
        try:
            self._limit(name, most)
        except OSError:
            (self._parent / name).rmdir()
            raise
        self._limits[name] = most
        return name

    def _limit(self, name: str, most: int) -> None:
        """Set or raise a group's limits. In version 1 that of memory and swap together may never be the smaller one."""
        limits = [(self._files.limit, most)]
        if (self._parent / name / self._files.swap).exists():
            limits.insert(0 if name in self._limits else 1, (self._files.swap, most * self._files.swap_factor))
        for file, value in limits:
            (self._parent / name / file).write_text(str(value))

    def entrance(self, name: str) -> str:
        """The file through which a process joins the group (`join`)."""
        return str(self._parent / name / "cgroup.procs")

    def allow(self, name: str, most: int) -> None:
        """Raise a group's limit to `most` bytes, if it is less. Raises OSError."""
        if most > self._limits[name]:
            self._limit(name, most)
            self._limits[name] = most

    def exceeded(self, name: str) -> int:
        """The group's limit in bytes, if the kernel has killed a process of it for taking more; else 0. One that was
        killed because the daemon's own group, or the machine, was full has taken no more than it may have."""
        killed = self._count(name, self._files.killed, "oom_kill") and self._count(name, *self._files.full)
        return self._limits[name] if killed else 0

    def _count(self, name: str, file: str, field: str) -> int:
        """A number in one of the group's files."""
        try:
            lines = (self._parent / name / file).read_text().splitlines()
        except OSError:
            return 0
        return next((int(value) for key, _, value in (line.rpartition(" ") for line in lines) if key == field), 0)

    def remove(self, name: str) -> None:
        """Remove a group whose process has ended. What that forked may take a moment longer: then it is tried again
        with the next group."""
        del self._limits[name]
        self._left.add(name)
        self._sweep()

    def _sweep(self) -> None:
        for name in list(self._left):
            try:
                (self._parent / name).rmdir()
            except FileNotFoundError:
                pass
            except OSError:
                continue
            self._left.discard(name)

    def close(self) -> None:
        """Remove all groups that have no process any more. Idempotent."""
        self._left |= self._limits.keys()
        self._limits.clear()
        self._sweep()


def join(entrance: str) -> None:
    """Move this process, which has one thread, into a group. Raises OSError."""
    Path(entrance).write_text("0")
