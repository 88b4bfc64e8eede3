"""Mistakes that simulated histories have to notice: `python -m tests.faults --mistake NAME`."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from gpumux.daemon.segments import Segments, SharedSegment
from gpumux.daemon.snapshots import requests, store
from tests.faults import parts


def early(self: Any, verb: str, arguments: Any, fds: Any, then: Any, **of: Any) -> None:
    """A snapshot that is said to be saved before it is written."""
    if verb == "save":
        answered: list[Any] = []
        then(1)
        then = answered.append
    asked(self, verb, arguments, fds, then, **of)


asked = parts.DirectWriter.ask


def keeps_the_older(self: Any, home: int, number: int, digest: str) -> None:
    names = sorted((n, name) for n, _, name in store._files(home))
    for _, name in names[1:]:
        store.os.unlink(name, dir_fd=home)


def charges_twice(self: Any, uid: int, nbytes: int) -> None:
    self._notes_bytes[uid] += 2 * nbytes


def frees_for_all_alone(self: Any, uid: int, nbytes: int) -> None:
    """Shared memory that stays charged to its user."""
    self.used_bytes -= nbytes


def at_once(self: Any, job: Any, segment: Any, buffers: Any, push: bool, then: Any) -> None:
    """A transfer that does not wait for the steps before it."""
    device, data = self._context.device, bytearray(segment.read(0, segment.nbytes))
    device._copy(memoryview(data), device.memory_of[job.id], push, len(data))
    segment.write(0, data)
    then(None)


def unforced(self: Any, name: str, at: int) -> None:
    with suppress(FileExistsError):
        self._mkdir(name, at)


MISTAKES: dict[str, tuple[Any, str, Any]] = {
    "shared memory is kept": (SharedSegment, "close", lambda self: None),
    "shared memory stays charged": (Segments, "_released", frees_for_all_alone),
    "records of snapshots are kept": (requests.SnapshotRequests, "forgotten", lambda self, job: None),
    "saved before it is written": (parts.DirectWriter, "ask", early),
    "the newest snapshot is deleted": (store.Store, "_keep_newest", keeps_the_older),
    "notes stay charged": (requests.SnapshotRequests, "_charge_notes", charges_twice),
    "a snapshot is not forced to the disk": (parts.DiskStore, "_sync", lambda self, fd: None),
    "names are not forced to the disk": (parts.DiskStore, "_sync_directory", lambda self, at: None),
    "directories' names are not forced to the disk": (store.Store, "_make", unforced),
    "a snapshot goes ahead of the steps": (requests.DaemonTransfers, "start", at_once),
}
