"""The simulated device, and the snapshots' writer without a process of its own."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any

import msgpack

from gpumux.daemon.round_robin import DAEMON, RoundRobin
from gpumux.daemon.snapshots.store import Store
from gpumux.daemon.snapshots.writer import Writer, _meaning
from gpumux.errors import DaemonGone
from gpumux.program.ir import aligned, slot_layout
from gpumux.types import GENERATOR_BYTES
from tests.daemon.fakes import FakeDevice

STATE = 16  # bytes of a job's state
GENERATOR = b"generator"


def advance(state: bytes, batch: bytes) -> bytes:
    """The state after a step: it shows which batches were trained on, in which order, and how often."""
    return blake2b(state + batch, digest_size=STATE).digest()


class Device(FakeDevice):
    """The first buffer of a job is its state, and a step's result is the state after it."""

    def __init__(self) -> None:
        super().__init__()
        self.memory_of: dict[Any, list[bytearray]] = {}

    def open_job(self, job, spec):
        super().open_job(job, spec)
        self.memory_of[job] = []

    def _load(self, job, program, new_buffers):
        self.memory_of[job] += [bytearray(n) for n in new_buffers]
        super()._load(job, program, new_buffers)

    def unload(self, job):
        self.memory_of.pop(job, None)
        super().unload(job)

    def lose(self, job, fault):
        del self.memory_of[job]
        super().lose(job, fault)

    def _move(self, job, segment, into_device):
        with segment.view() as view:
            self._copy(view, self.memory_of[job], into_device, view.nbytes)

    def _run(self, launch):
        program = self.jobs[launch.job].programs[launch.program]
        layout = slot_layout(program.program)
        base = launch.slot * layout.nbytes
        state = self.memory_of[launch.job][0]
        with program.segment.view() as view:
            batch = bytes(view[base + layout.inputs[0] : base + layout.inputs[0] + STATE])
            state[:] = advance(bytes(state), batch)
            view[base + layout.results[0] : base + layout.results[0] + STATE] = state

    def _copy(self, view, buffers, into_device, nbytes):
        at = 0
        for buffer in buffers:
            if into_device:
                buffer[:] = view[at : at + len(buffer)]
            else:
                view[at : at + len(buffer)] = buffer
            at += aligned(len(buffer))
        if not into_device and nbytes >= at + GENERATOR_BYTES:
            view[at : at + 8] = len(GENERATOR).to_bytes(8, "little")
            view[at + 8 : at + 8 + len(GENERATOR)] = GENERATOR


class Died(BaseException):
    """The writer's process has died in the middle of its work, so that nothing is tidied up."""


class Disk:
    """A directory of snapshots that outlives daemons, with faults. `fault`: "" or the name of an errno. `dies_in`: the
    number of operations after which the process that calls them dies; 0 for never.

    What was not forced to the disk may be lost with the machine's power: bytes of a file, and any of the changes to a
    directory, each by itself, as POSIX allows."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="gm-"))
        self.at = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        self.fault, self.dies_in = "", 0
        self._forced: set[int] = set()  # inodes of files
        self._removed = Path(tempfile.mkdtemp(prefix="gm-"))  # files that were unlinked, under numbers
        self._number = itertools.count()
        self._changes: list[tuple[Path, Callable[[], object]]] = []  # to directories, each with what takes it back

    def store(self) -> Store:
        return DiskStore(self)

    def act(self) -> None:
        """An operation begins."""
        if self.fault:
            number = getattr(errno, self.fault)
            raise OSError(number, os.strerror(number))
        if self.dies_in:
            self.dies_in -= 1
            if not self.dies_in:
                raise Died

    def force(self, fd: int) -> None:
        self._forced.add(os.fstat(fd).st_ino)

    def force_directory(self, at: int) -> None:
        where = _path_of(at)
        self._changes = [(folder, back) for folder, back in self._changes if folder != where]

    def made(self, at: int, name: str) -> None:
        where = _path_of(at)
        self._changes.append((where, lambda: shutil.rmtree(where / name, ignore_errors=True)))

    def renamed(self, at: int, source: str, target: str) -> None:
        where = _path_of(at)
        self._changes.append((where, lambda: (where / target).rename(where / source)))

    def unlinks(self, at: int, name: str) -> None:
        where, copy = _path_of(at), self._removed / str(next(self._number))
        os.link(where / name, copy)
        self._changes.append((where, lambda: os.link(copy, where / name)))

    def lose_power(self, random: Random) -> None:
        """The machine stops, and starts again."""
        for _, back in reversed(self._changes):
            if random.random() < 0.5:
                with suppress(OSError):  # of a directory that is gone as well
                    back()
        self._changes.clear()
        for path in sorted(path for path in self.root.rglob("*") if path.is_file()):
            if path.stat().st_ino not in self._forced:
                os.truncate(path, random.randrange(path.stat().st_size + 1))

    def close(self) -> None:
        os.close(self.at)
        shutil.rmtree(self.root)
        shutil.rmtree(self._removed)


class DiskStore(Store):
    """The real store, whose operations on the disk are noted."""

    def __init__(self, disk: Disk) -> None:
        super().__init__(disk.root, disk.at)
        self._disk = disk

    def _sync(self, fd: int) -> None:
        self._disk.act()
        self._disk.force(fd)

    def _rename(self, home: int, source: str, target: str) -> None:
        self._disk.act()
        super()._rename(home, source, target)
        self._disk.renamed(home, source, target)

    def _sync_directory(self, at: int) -> None:
        self._disk.act()
        self._disk.force_directory(at)

    def _mkdir(self, name: str, at: int) -> None:
        self._disk.act()
        super()._mkdir(name, at)
        self._disk.made(at, name)

    def _unlink(self, name: str, home: int) -> None:
        self._disk.act()
        self._disk.unlinks(home, name)
        super()._unlink(name, home)


def _path_of(fd: int) -> Path:
    return Path(os.readlink(f"/proc/self/fd/{fd}"))


class DirectWriter:
    """WriterClient, with the writer in this process. `later(call)`: how the world delays an answer."""

    def __init__(self, store: Store, later: Callable[[Callable[[], None]], None]) -> None:
        self._writer, self._store, self._later = Writer(store), store, later
        self._waiting: RoundRobin[Any] = RoundRobin()
        self._then: Any = None
        self._request: tuple[bytes, list[int]] | None = None
        self._answers: list[bytes] = []
        self.owner = ""

    def follow(self, watch: Callable[[Sequence[int]], None]) -> None:
        watch(())

    def ask(self, verb, arguments, fds, then, *, uid=DAEMON, owner=""):
        packet = bytes(msgpack.packb([verb, arguments]))
        self._waiting.add(uid, owner, (owner, packet, [os.dup(fd) for fd in fds], then))
        self._next()

    def count(self, uid, owner):
        return self._waiting.count(uid, owner)

    def forget(self, uid, owner):
        for _, _, fds, then in self._waiting.forget(uid, owner):
            _close(fds)
            then(DaemonGone("its session has ended", "connect again"))

    def _next(self) -> None:
        if self._then is None and (found := self._waiting.next()) is not None:
            _, (self.owner, packet, fds, self._then) = found
            self._request = packet, fds
            self._later(self._work)

    def _work(self) -> None:
        """The process carries out its request."""
        if self._request is not None:
            (packet, fds), self._request = self._request, None
            self._answers.append(self._writer.answer(packet, fds))

    def die(self, disk: Disk, after: int) -> None:
        """The process ends before its next request (`after` 0), in the middle of it, after so many operations on the
        disk, or behind it; another one starts for the request that follows."""
        disk.dies_in = after
        try:
            if after:
                self._work()
        except Died:
            self._answers.append(b"")
        finally:
            disk.dies_in = 0
        self._writer = Writer(self._store)
        if self._request is not None:
            _close(self._request[1])
            self._request = None
            self._answers.append(b"")

    def hear(self) -> None:
        while self._answers:
            answer, then, self._then = self._answers.pop(0), self._then, None
            try:
                then(_meaning(answer))
            finally:
                self._next()

    def waited(self, now: float) -> float:
        return 0.0  # the slowest request of a history takes some seconds

    @property
    def quiet(self) -> bool:
        return self._then is None and not self._answers

    def close(self) -> None:
        """The daemon has ended. Requests are answered, for what their answers free."""
        gone = DaemonGone("it has ended", "start another")
        if self._request is not None:
            _close(self._request[1])
            self._request = None
        if self._then is not None:
            self._then(gone)
        while (found := self._waiting.next()) is not None:
            _, (_, _, fds, then) = found
            _close(fds)
            then(gone)


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
