"""The simulated device, and the snapshots' writer without a process of its own."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
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


class Disk:
    """A directory of snapshots that outlives daemons, with faults. `fault`: "" or the name of an errno."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="gm-"))
        self.at = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        self.fault = ""

    def store(self) -> Store:
        disk = self

        class Faulty(Store):
            def _sync(self, fd: int) -> None:
                disk.check()  # tmpfs has nothing to sync

            def _rename(self, home: int, source: str, target: str) -> None:
                disk.check()
                super()._rename(home, source, target)

            def _sync_directory(self, home: int) -> None:
                disk.check()

        return Faulty(self.root, self.at)

    def check(self) -> None:
        if self.fault:
            number = getattr(errno, self.fault)
            raise OSError(number, os.strerror(number))


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

    def die(self) -> None:
        """The process ends; another one starts for the next request."""
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
