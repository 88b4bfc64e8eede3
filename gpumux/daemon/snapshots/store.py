"""Snapshots in a directory. A snapshot is written whole or not at all, and read only if it is unchanged.

    ROOT/UID/JOB/NNNNNNNN-SHA256.safetensors

A snapshot is written under another name, forced to the disk, and renamed. Its name holds the SHA-256 of the whole file,
so that a torn or changed file is detected without a second file; `sha256sum` checks it as well. The newest two of a job
are kept. Names of files consist of numbers and hexadecimal ids; the job's own name is in the file's metadata. Only the
daemon's user may read directories and files. Each directory is opened by descriptor without following links, and used
only if it is the daemon's own, so that nothing outside is read, written or removed.

The writer's process (writer.py) uses this module; its functions may take long.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from gpumux.daemon.state.directory import open_own
from gpumux.errors import SnapshotFailed, UnknownJob
from gpumux.program.ir import aligned
from gpumux.types import GENERATOR_BYTES

GENERATIONS = 2
MOST_KEPT = 4096  # jobs of one user: finding one by its name looks at all of them, and other users wait for that
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
    """The snapshots in the directory of descriptor `at`, which stays the caller's, and which no other process uses.
    `root`: its path, for errors. Times are seconds since 1970, given by the caller."""

    def __init__(self, root: Path, at: int) -> None:
        self.root = root
        self._at = at

    @contextmanager
    def _home(self, owner: SnapshotOwner, make: bool = False) -> Iterator[int]:
        """A descriptor of the job's directory, closed afterwards. Raises OSError if there is none, or if it is a link
        or another user's."""
        if not _JOB.fullmatch(owner.job):
            raise ValueError(f"{owner.job!r} is no job id")
        user_id = str(int(owner.uid))
        if make:
            self._make(user_id, self._at)
        with _opened(user_id, self._at) as user:
            if make:
                self._make(owner.job, user)
            with _opened(owner.job, user) as home:
                yield home

    def _make(self, name: str, at: int) -> None:
        """Make a directory if there is none. Its own name has to be on the disk before a snapshot in it counts; a
        writer that died may have made it and not come so far."""
        with suppress(FileExistsError):
            self._mkdir(name, at)
        self._sync_directory(at)

    def _mkdir(self, name: str, at: int) -> None:
        os.mkdir(name, 0o700, dir_fd=at)

    # ---- writing

    def save(self, owner: SnapshotOwner, number: int, tensors: Mapping[str, Array], facts: Mapping[str, str]) -> int:
        """Write snapshot `number`, and keep it and the newest one before. Returns the file's bytes. Raises
        SnapshotFailed, and leaves the directory as it was before."""
        try:
            with self._home(owner, make=True) as home:
                return self._save(home, number, tensors, facts)
        except (OSError, SafetensorError, MemoryError) as error:
            raise SnapshotFailed(
                f"{self.root / str(owner.uid) / owner.job} could not be written to: {_reason(error)}",
                _remedy(error),
            ) from error

    def _save(self, home: int, number: int, tensors: Mapping[str, Array], facts: Mapping[str, str]) -> int:
        temporary = f"{number:08d}.part"
        try:
            with _umask(0o077):
                save_file(dict(tensors), _path(home, temporary), {"gpumux": FORMAT, **facts})
            with open(temporary, "rb+", opener=_opener(home)) as file:
                digest = _digest(file)
                nbytes = os.fstat(file.fileno()).st_size
                self._sync(file.fileno())
            self._rename(home, temporary, f"{number:08d}-{digest}.safetensors")
            self._sync_directory(home)
        except (OSError, SafetensorError, MemoryError):
            with suppress(OSError):
                os.unlink(temporary, dir_fd=home)
            raise
        self._keep_newest(home, number, digest)
        return nbytes

    def _sync(self, fd: int) -> None:
        os.fsync(fd)

    def _rename(self, home: int, source: str, target: str) -> None:
        os.rename(source, target, src_dir_fd=home, dst_dir_fd=home)

    def _sync_directory(self, at: int) -> None:
        os.fsync(at)

    def _unlink(self, name: str, home: int) -> None:
        os.unlink(name, dir_fd=home)

    def _keep_newest(self, home: int, number: int, digest: str) -> None:
        """Delete snapshots that are too old, and those under this number or later ones from another history of the
        job."""
        files = _files(home)
        before = sorted((n for n, _, _ in files if n < number), reverse=True)[: GENERATIONS - 1]
        for n, theirs, name in files:
            if n not in before and (n, theirs) != (number, digest):
                with suppress(OSError):
                    self._unlink(name, home)

    # ---- reading

    def read(self, owner: SnapshotOwner, numbers: Sequence[int]) -> tuple[Snapshot | None, list[int]]:
        """Read the first of `numbers` that exists and is undamaged. Returns it, None if there is none, and the damaged
        ones before it."""
        try:
            with self._home(owner) as home:
                return _read_first(home, numbers)
        except OSError:
            return None, []  # there are none

    def find(self, uid: int, name: str) -> Kept:
        """Find the user's job of this name, the newest if there are several. Raises UnknownJob."""
        others: set[str] = set()
        unreadable = 0
        for kept in sorted(self.kept(uid), key=lambda k: k.saved, reverse=True):
            called = self.name_of(kept)
            if called == name:
                return kept
            unreadable += called is None
            others.add(called or "")
        listed = ", ".join(sorted(repr(other) for other in others if other)[:8])
        damaged = f", but what was kept of {unreadable} of your jobs can't be read" if unreadable else ""
        remedy = f"there are: {listed}" if listed else "submit it without resume="
        if unreadable:
            remedy = f"see whether the disk of the daemon's state directory is damaged; {remedy}"
        raise UnknownJob(f"no job called {name!r} of yours was kept{damaged}", remedy)

    def name_of(self, kept: Kept) -> str | None:
        """The job's name, from its newest readable snapshot; None if none can be read."""
        with suppress(OSError), self._home(kept.owner) as home:
            for _, _, name in sorted(_files(home), reverse=True):
                try:
                    with safe_open(_path(home, name), framework="np") as file:
                        return str((file.metadata() or {}).get("name", ""))
                except (OSError, SafetensorError, ValueError):
                    continue
        return None

    def kept(self, uid: int | None = None) -> Iterator[Kept]:
        """Every job with snapshots, of one user or all."""
        for user in _names(self._at, _UID):
            if uid is not None and user != str(uid):
                continue
            for job in self._jobs(user):
                found, owner = None, SnapshotOwner(int(user), job)
                with suppress(OSError), self._home(owner) as home:
                    found = _kept(owner, home)
                if found is not None:
                    yield found

    def _jobs(self, user: str) -> list[str]:
        with suppress(OSError), _opened(user, self._at) as opened:
            return _names(opened, _JOB)
        return []

    # ---- cleaning up

    def forget(self, owner: SnapshotOwner) -> None:
        """Remove a job's snapshots. Idempotent."""
        with suppress(OSError), _opened(str(int(owner.uid)), self._at) as user:
            with suppress(OSError), self._home(owner) as home:
                for name in os.listdir(home):
                    with suppress(OSError):
                        self._unlink(name, home)
            os.rmdir(owner.job, dir_fd=user)
        with suppress(OSError):
            os.rmdir(str(int(owner.uid)), dir_fd=self._at)  # if this was the user's last job

    def expire(self, before: float, living: frozenset[SnapshotOwner]) -> list[SnapshotOwner]:
        """Remove the jobs whose newest snapshot was written before, except `living` ones."""
        old = [kept.owner for kept in self.kept() if kept.saved < before and kept.owner not in living]
        for owner in old:
            self.forget(owner)
        return old

    def make_room(self, owner: SnapshotOwner, nbytes: int, limit: int, living: frozenset[SnapshotOwner]) -> None:
        """Delete snapshots of the user's jobs that are not open, the oldest first, until the user holds at most `limit`
        bytes with `nbytes` more, and those of MOST_KEPT jobs. Raises SnapshotFailed if that is not enough bytes."""
        held = sorted(self.kept(owner.uid), key=lambda kept: kept.saved)
        # One older snapshot of the job itself stays beside the new one.
        total = nbytes + sum(k.nbytes // len(k.numbers) if k.owner == owner else k.nbytes for k in held)
        jobs = len({owner, *(kept.owner for kept in held)})
        for kept in held:
            if total <= limit and jobs <= MOST_KEPT:
                return
            if kept.owner != owner and kept.owner not in living:
                self.forget(kept.owner)
                total -= kept.nbytes
                jobs -= 1
        if total > limit:
            raise SnapshotFailed(
                f"with this snapshot of {nbytes} bytes your jobs' would hold {total} bytes, and {limit} are allowed",
                "close a job, or ask for a larger max_snapshot_bytes_per_user",
            )

    def tidy(self) -> None:
        """Remove half-written files of a writer that was killed. Call it at the start, before any other use."""
        for user in _names(self._at, _UID):
            with suppress(OSError), _opened(user, self._at) as opened:
                for job in _names(opened, _JOB):
                    with suppress(OSError), _opened(job, opened) as home:
                        for name in os.listdir(home):
                            if not _FILE.fullmatch(name):  # also the library's own temporary files
                                with suppress(OSError):
                                    os.unlink(name, dir_fd=home)
                    with suppress(OSError):
                        os.rmdir(job, dir_fd=opened)  # if nothing is left
            with suppress(OSError):
                os.rmdir(user, dir_fd=self._at)


def _kept(owner: SnapshotOwner, home: int) -> Kept | None:
    files, stats = sorted(_files(home), reverse=True), []
    for _, _, name in files:
        with suppress(OSError):
            stats.append(os.stat(name, dir_fd=home, follow_symlinks=False))
    if not stats:
        return None
    numbers = tuple(dict.fromkeys(number for number, _, _ in files))
    return Kept(owner, numbers, sum(s.st_size for s in stats), max(s.st_mtime for s in stats))


def _read_first(home: int, numbers: Sequence[int]) -> tuple[Snapshot | None, list[int]]:
    """See Store.read."""
    present: dict[int, list[tuple[str, str]]] = {}
    for number, digest, name in _files(home):
        present.setdefault(number, []).append((digest, name))
    bad: list[int] = []
    for number in numbers:
        for digest, name in present.get(number, ()):
            found = _read(number, digest, home, name)
            if found is not None:
                return found, bad
        if number in present:
            bad.append(number)
    return None, bad


def _read(number: int, digest: str, home: int, name: str) -> Snapshot | None:
    try:
        with open(name, "rb", opener=_opener(home)) as raw:
            if _digest(raw) != digest:
                return None
        with safe_open(_path(home, name), framework="np") as file:
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


def _files(home: int) -> list[tuple[int, str, str]]:
    """(number, digest, name) of each snapshot in a job's directory."""
    found = [(match, name) for name in os.listdir(home) if (match := _FILE.fullmatch(name))]
    return [(int(match[1]), match[2], name) for match, name in found]


def _names(at: int, name: re.Pattern[str]) -> list[str]:
    try:
        return sorted(entry for entry in os.listdir(at) if name.fullmatch(entry))
    except OSError:
        return []


@contextmanager
def _opened(name: str, at: int) -> Iterator[int]:
    """A descriptor of a directory of the daemon's own. Raises OSError."""
    fd = open_own(name, at)
    try:
        yield fd
    finally:
        os.close(fd)


def _opener(home: int) -> Callable[[str, int], int]:
    return lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=home)


def _path(home: int, name: str) -> str:
    """A path for a library that takes no descriptor. Nothing but this user can put a link there."""
    return f"/proc/self/fd/{home}/{name}"


def _remedy(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno in (errno.EROFS, errno.EIO):
        return "look into the kernel's log what that disk has, mount it writable, or put state_dir on another one"
    return "make room on that disk, or put state_dir on a larger one"


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
