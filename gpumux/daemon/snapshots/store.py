"""Snapshots in a directory. A snapshot is written whole or not at all, and read only if it is unchanged.

    ROOT/UID/JOB/NNNNNNNN-SHA256.safetensors

A snapshot is written under another name, forced to the disk, and renamed. Its name holds the SHA-256 of the whole file,
so that a torn or changed file is detected without a second file; `sha256sum` checks it as well. The newest two of a job
are kept. Names of files consist of numbers and hexadecimal ids; the job's own name is in the file's metadata. Only the
daemon's user may read directories and files.

The writer's process (writer.py) uses this module; its functions may take long.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from gpumux.errors import SnapshotFailed, UnknownJob
from gpumux.program.ir import aligned
from gpumux.types import GENERATOR_BYTES

GENERATIONS = 2
FORMAT = "1"
GENERATOR, NOTES = "generator", "notes"
_FILE = re.compile(r"(\d{8,19})-([0-9a-f]{64})\.safetensors", re.ASCII)
_JOB = re.compile(r"[0-9a-f]{32}", re.ASCII)
_UID = re.compile(r"-?\d{1,19}", re.ASCII)
_CHUNK = 4 << 20

Array = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class SnapshotOwner:
    """The owner of snapshots: one job of one user."""

    uid: int
    job: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot that was read: bytes of each state buffer, of the generator, and the client's notes."""

    number: int
    buffers: list[Array]
    generator: Array
    notes: Array


@dataclass(frozen=True, slots=True)
class Kept:
    """A job that has snapshots: their numbers, newest first, their bytes in all, and when the newest was written."""

    owner: SnapshotOwner
    numbers: tuple[int, ...]
    nbytes: int
    saved: float


def buffer_name(index: int) -> str:
    return f"buffer.{index:06d}"


class Store:
    """The snapshots in one directory, which no other process uses. Times are seconds since 1970, given by the
    caller."""

    def __init__(self, root: Path) -> None:
        self.root = root

    # ---- writing

    def save(self, owner: SnapshotOwner, number: int, tensors: Mapping[str, Array], facts: Mapping[str, str]) -> int:
        """Write snapshot `number`, and keep it and the newest one before. Returns the file's bytes. Raises
        SnapshotFailed, and leaves the directory as it was before."""
        home = self._home(owner)
        temporary = home / f"{number:08d}.part"
        try:
            _make_private(self.root, home)
            with _umask(0o077):
                save_file(dict(tensors), temporary, {"gpumux": FORMAT, **facts})
            with temporary.open("rb+") as file:
                digest = _digest(file)
                nbytes = os.fstat(file.fileno()).st_size
                self._sync(file.fileno())
            self._rename(temporary, home / f"{number:08d}-{digest}.safetensors")
            self._sync_directory(home)
        except (OSError, SafetensorError, MemoryError) as error:
            with suppress(OSError):
                temporary.unlink()
            raise SnapshotFailed(
                f"{home} could not be written to: {_reason(error)}",
                "make room on that disk, or put state_dir on a larger one",
            ) from error
        self._keep_newest(home, number, digest)
        return nbytes

    def _sync(self, fd: int) -> None:
        os.fsync(fd)

    def _rename(self, source: Path, target: Path) -> None:
        source.rename(target)

    def _sync_directory(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def _keep_newest(self, home: Path, number: int, digest: str) -> None:
        """Delete snapshots that are too old, and those under this number or later ones from another history of the
        job."""
        before = sorted((n for n, _, _ in _files(home) if n < number), reverse=True)[: GENERATIONS - 1]
        for n, theirs, path in _files(home):
            if n not in before and (n, theirs) != (number, digest):
                with suppress(OSError):
                    path.unlink()

    # ---- reading

    def read(self, owner: SnapshotOwner, numbers: Sequence[int]) -> tuple[Snapshot | None, list[int]]:
        """Read the first of `numbers` that exists and is undamaged. Returns it, None if there is none, and the damaged
        ones before it."""
        present: dict[int, list[tuple[str, Path]]] = {}
        for number, digest, path in _files(self._home(owner)):
            present.setdefault(number, []).append((digest, path))
        bad: list[int] = []
        for number in numbers:
            for digest, path in present.get(number, ()):
                found = _read(number, digest, path)
                if found is not None:
                    return found, bad
            if number in present:
                bad.append(number)
        return None, bad

    def find(self, uid: int, name: str) -> Kept:
        """Find the user's job of this name, the newest if there are several. Raises UnknownJob."""
        others: set[str] = set()
        for kept in sorted(self.kept(uid), key=lambda k: k.saved, reverse=True):
            called = self.name_of(kept)
            if called == name:
                return kept
            others.add(called)
        listed = ", ".join(sorted(repr(other) for other in others if other)[:8])
        raise UnknownJob(
            f"no job called {name!r} of yours was kept",
            f"there are: {listed}" if listed else "submit it without resume=",
        )

    def name_of(self, kept: Kept) -> str:
        """The job's name, from its newest readable snapshot; "" if none can be read."""
        for _, _, path in sorted(_files(self._home(kept.owner)), reverse=True):
            try:
                with safe_open(path, framework="np") as file:
                    return str((file.metadata() or {}).get("name", ""))
            except (OSError, SafetensorError, ValueError):
                continue
        return ""

    def kept(self, uid: int | None = None) -> Iterator[Kept]:
        """Every job with snapshots, of one user or all."""
        for user in _children(self.root, _UID):
            if uid is not None and user.name != str(uid):
                continue
            for home in _children(user, _JOB):
                files = sorted(_files(home), reverse=True)
                stats = [path.stat() for _, _, path in files if path.exists()]
                if files and stats:
                    numbers = tuple(dict.fromkeys(number for number, _, _ in files))
                    nbytes, saved = sum(s.st_size for s in stats), max(s.st_mtime for s in stats)
                    yield Kept(SnapshotOwner(int(user.name), home.name), numbers, nbytes, saved)

    # ---- cleaning up

    def forget(self, owner: SnapshotOwner) -> None:
        """Remove a job's snapshots. Idempotent."""
        home = self._home(owner)
        shutil.rmtree(home, ignore_errors=True)
        with suppress(OSError):
            home.parent.rmdir()  # if this was the user's last job

    def expire(self, before: float, living: frozenset[SnapshotOwner]) -> list[SnapshotOwner]:
        """Remove the jobs whose newest snapshot was written before, except `living` ones."""
        old = [kept.owner for kept in self.kept() if kept.saved < before and kept.owner not in living]
        for owner in old:
            self.forget(owner)
        return old

    def make_room(self, owner: SnapshotOwner, nbytes: int, limit: int, living: frozenset[SnapshotOwner]) -> None:
        """Delete snapshots of the user's jobs that are not open, the oldest first, until the user holds at most `limit`
        bytes with `nbytes` more. Raises SnapshotFailed if that is not enough."""
        held = sorted(self.kept(owner.uid), key=lambda kept: kept.saved)
        # One older snapshot of the job itself stays beside the new one.
        total = nbytes + sum(k.nbytes // len(k.numbers) if k.owner == owner else k.nbytes for k in held)
        for kept in held:
            if total <= limit:
                return
            if kept.owner != owner and kept.owner not in living:
                self.forget(kept.owner)
                total -= kept.nbytes
        if total > limit:
            raise SnapshotFailed(
                f"with this snapshot of {nbytes} bytes your jobs' would hold {total} bytes, and {limit} are allowed",
                "close a job, or ask for a larger max_snapshot_bytes_per_user",
            )

    def tidy(self) -> None:
        """Remove half-written files of a writer that was killed. Call it at the start, before any other use."""
        for user in _children(self.root, _UID):
            for home in _children(user, _JOB):
                for path in home.iterdir():
                    if not _FILE.fullmatch(path.name):  # also the library's own temporary files
                        with suppress(OSError):
                            path.unlink()
                with suppress(OSError):
                    home.rmdir()  # if nothing is left
            with suppress(OSError):
                user.rmdir()

    def _home(self, owner: SnapshotOwner) -> Path:
        if not _JOB.fullmatch(owner.job):
            raise ValueError(f"{owner.job!r} is no job id")
        return self.root / str(int(owner.uid)) / owner.job


def _read(number: int, digest: str, path: Path) -> Snapshot | None:
    try:
        with path.open("rb") as raw:
            if _digest(raw) != digest:
                return None
        with safe_open(path, framework="np") as file:
            names = set(file.keys())
            if (file.metadata() or {}).get("gpumux") != FORMAT or not {GENERATOR, NOTES} <= names:
                return None
            count = len(names) - 2
            tensors = [file.get_tensor(name) for name in (*map(buffer_name, range(count)), GENERATOR, NOTES)]
    except (OSError, SafetensorError, ValueError, MemoryError):
        return None
    if any(tensor.dtype != np.uint8 or tensor.ndim != 1 for tensor in tensors):
        return None
    return Snapshot(number, tensors[:-2], tensors[-2], tensors[-1])


def _digest(file: Any) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
    return digest.hexdigest()


def _files(home: Path) -> list[tuple[int, str, Path]]:
    """(number, digest, path) of each snapshot in a job's directory."""
    try:
        entries = list(home.iterdir())
    except OSError:
        return []
    found = [(match, path) for path in entries if (match := _FILE.fullmatch(path.name))]
    return [(int(match[1]), match[2], path) for match, path in found]


def _children(path: Path, name: re.Pattern[str]) -> list[Path]:
    try:
        return sorted(entry for entry in path.iterdir() if name.fullmatch(entry.name) and entry.is_dir())
    except OSError:
        return []


def _make_private(root: Path, home: Path) -> None:
    for path in (root, home.parent, home):
        path.mkdir(mode=0o700, exist_ok=True)


def _reason(error: BaseException) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


@contextmanager
def _umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


# ---- The layout of a job's state in a segment: its buffers end to end, each aligned to 64 bytes, as in transfers; then
# its generator.


def places(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(offset, bytes) of each buffer."""
    at = 0
    for nbytes in sizes:
        yield at, nbytes
        at += aligned(nbytes)


def staged_bytes(sizes: Sequence[int]) -> int:
    """Bytes of a segment for buffers of these sizes and the generator."""
    return sum(map(aligned, sizes)) + GENERATOR_BYTES
