"""The process that writes and reads snapshots (`Writer`), and the daemon's side of it (`WriterClient`)."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

import gpumux
from gpumux.daemon.round_robin import DAEMON, RoundRobin
from gpumux.daemon.snapshots.store import GENERATOR, NOTES, Array, Snapshot, SnapshotOwner, Store, buffer_name, places
from gpumux.daemon.state.directory import DISK_FAULTS, WRITABLE, open_private
from gpumux.device.workers.confinement import may_be_looked_into
from gpumux.errors import (
    ConfigError,
    DaemonGone,
    EndpointBusy,
    GpumuxError,
    SnapshotFailed,
    UnknownJob,
    from_code,
)
from gpumux.program.ir import aligned
from gpumux.types import GENERATOR_BYTES

PACKET = 192 << 10  # most bytes of a request or an answer
CLOSE_S = 10.0  # time for the request under way when the daemon leaves
LOCK_S = 10.0  # time for the processes of another daemon, just killed, to end
_RETRY_S = 0.05

Then = Callable[[Any], None]  # called with the answer, or with a GpumuxError


class DirectoryLock:
    """Opens the directory `root` in the state directory of descriptor `state`, and locks it for one daemon: flock on
    ROOT/lock, which the writer inherits, so that the lock is free only when both have ended. Raises EndpointBusy after
    `wait_s` seconds, and ConfigError if the directory can't be locked, or others may read it or write to it."""

    def __init__(self, root: Path, state: int, wait_s: float = LOCK_S) -> None:
        self.root = root
        self.directory = open_private(root.name, state, root)
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self.fd = os.open("lock", flags, 0o600, dir_fd=self.directory)
        except OSError as error:
            os.close(self.directory)
            remedy = WRITABLE if error.errno in DISK_FAULTS else f"rm {root / 'lock'}"
            raise ConfigError(f"can't lock {root}: {error.strerror}", remedy) from error
        give_up = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= give_up:
                    self.close()
                    raise EndpointBusy(
                        f"another daemon keeps its snapshots in {root}", "give each daemon a state_dir of its own"
                    ) from None
            except OSError as error:
                self.close()
                raise ConfigError(f"can't lock {root}: {error.strerror}", "use a local file system") from error
            time.sleep(_RETRY_S)

    def close(self) -> None:
        os.close(self.fd)
        os.close(self.directory)


class WriterClient:
    """The daemon's side of the writer: `ask` queues a request, and `hear` handles its answer. Call `hear` as `follow`
    says. One request is under way at a time; users take turns, so that one user's requests delay another's by one. If
    the writer ends, the request under way fails, and the next one starts another writer."""

    def __init__(self, lock: DirectoryLock, clock: Callable[[], float] = time.monotonic) -> None:
        self._lock = lock
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._waiting: RoundRobin[tuple[str, bytes, list[int], Then]] = RoundRobin()
        self._then: Then | None = None
        self._clock = clock
        self._asked_at = 0.0  # when the request under way was sent
        self.owner = ""  # session or job of the request under way, or answered last
        self._watch: Callable[[Sequence[int]], None] = _unwatched
        self._start()

    def follow(self, watch: Callable[[Sequence[int]], None]) -> None:
        """Have `watch` called, now and when they change, with the descriptors to watch: call `hear` when one is
        readable."""
        self._watch = watch
        watch((self._sock.fileno(),) if self._sock is not None else ())

    @property
    def busy(self) -> bool:
        return self._then is not None

    def waited(self, now: float) -> float:
        """For how long the request under way has had no answer; 0 if there is none."""
        return now - self._asked_at if self.busy else 0.0

    def ask(
        self, verb: str, arguments: dict[str, Any], fds: Sequence[int], then: Then, *, uid: int = DAEMON,
        owner: str = "",
    ) -> None:  # fmt: skip
        """Queue a request of the user's session or job `owner`; default: the daemon's own. `fds` stay the caller's.
        `hear` calls `then` with the answer."""
        packet = bytes(msgpack.packb([verb, arguments]))
        self._waiting.add(uid, owner, (owner, packet, [os.dup(fd) for fd in fds], then))
        self._next()

    def count(self, uid: int, owner: str) -> int:
        """The number of requests of this session or job that wait, without the one under way."""
        return self._waiting.count(uid, owner)

    def forget(self, uid: int, owner: str) -> None:
        """Drop the requests of a session that has ended. Their `then` is called with an error. Idempotent."""
        for _, _, fds, then in self._waiting.forget(uid, owner):
            _close(fds)
            then(DaemonGone("its session has ended", "connect again"))

    def hear(self) -> None:
        """Handle an answer, or the end of the process."""
        sock, then = self._sock, self._then
        if sock is None:
            return
        try:
            answer = sock.recv(PACKET)
        except BlockingIOError:
            return
        except OSError:
            answer = b""
        if not answer:
            self._stop(0.0)
        try:
            if then is not None:
                self._then = None
                then(_meaning(answer))
        finally:
            self._next()

    def close(self) -> None:
        """Let the process finish the request under way, for at most CLOSE_S, and end it. No callback is called any
        more."""
        while (found := self._waiting.next()) is not None:
            _close(found[1][2])
        self._then, self._watch = None, _unwatched
        self._stop(CLOSE_S)

    def _next(self) -> None:
        while self._then is None and (found := self._waiting.next()) is not None:
            _, (owner, packet, fds, then) = found
            try:
                if self._sock is None:
                    self._start()
                assert self._sock is not None
                socket.send_fds(self._sock, [packet], fds)
                self._then, self.owner, self._asked_at = then, owner, self._clock()
            except OSError as error:
                then(SnapshotFailed(f"the snapshots' process can't be asked: {error}", "look at the daemon's log"))
            finally:
                _close(fds)

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * PACKET)
        ours.setblocking(False)
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable, "-P", "-m", "gpumux.daemon.snapshots.writer", str(theirs.fileno()),
                    str(os.getpid()), str(self._lock.directory), str(self._lock.root),
                ],
                pass_fds=[theirs.fileno(), self._lock.fd, self._lock.directory], stdin=subprocess.DEVNULL, stdout=2,
                process_group=0, env={**os.environ, "PYTHONPATH": _path()},
            )  # fmt: skip
        self._sock = ours
        self._watch((ours.fileno(),))

    def _stop(self, wait_s: float) -> None:
        sock, self._sock = self._sock, None
        process, self._process = self._process, None
        if sock is not None:
            self._watch(())
            sock.close()
        if process is not None:
            try:
                process.wait(wait_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _unwatched(fds: Sequence[int]) -> None:
    """The default of `WriterClient._watch`, before `follow` and after `close`."""


def _meaning(answer: bytes) -> Any:
    if not answer:
        return SnapshotFailed("the process that writes snapshots ended", "look at the daemon's log and its memory")
    code, body = msgpack.unpackb(answer)
    return from_code(code, *body) if code else body


def _path() -> str:
    """PYTHONPATH for the writer, with the daemon's own gpumux first."""
    home = str(Path(gpumux.__file__).resolve().parent.parent)
    known = os.environ.get("PYTHONPATH", "")
    return f"{home}{os.pathsep}{known}" if known else home


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


# ---- The process that uses the snapshots' disk, so that a slow or full disk delays no step.
#
# It handles one request after the other, at the lowest priority, and ends with the daemon.


_PR_SET_PDEATHSIG = 1


class Writer:
    """Carries out one request after the other."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._read: Snapshot | None = None  # the snapshot of the newest "read", until "fill" or "drop"
        self._verbs: dict[str, Callable[[dict[str, Any], list[int]], Any]] = {
            "save": self._save,
            "read": self._find_whole,
            "fill": self._fill,
            "drop": self._drop,
            "find": self._find,
            "forget": lambda a, _: store.forget(SnapshotOwner(a["uid"], a["job"])),
            "expire": self._expire,
            "kept": self._kept,
        }

    def answer(self, packet: bytes, fds: list[int]) -> bytes:
        """Handle a request and return the answer. Closes the request's descriptors."""
        try:
            verb, arguments = msgpack.unpackb(packet)
            return bytes(msgpack.packb(["", self._verbs[verb](arguments, fds)]))
        except GpumuxError as error:
            return bytes(msgpack.packb([error.code, [error.message, error.remedy]]))
        except (OSError, ValueError, MemoryError) as error:
            said = f"the snapshot's process failed: {type(error).__name__}: {error}"
            return bytes(msgpack.packb([SnapshotFailed.code, [said[:1000], "see that the machine has memory left"]]))
        finally:
            for fd in fds:
                os.close(fd)

    def _save(self, a: dict[str, Any], fds: list[int]) -> int:
        owner = SnapshotOwner(a["uid"], a["job"])
        with _mapped(fds[0]) as data, _mapped(fds[1]) as beside:
            sizes = np.frombuffer(beside, np.uint64, a["buffers"]).tolist()
            whole = np.frombuffer(data, np.uint8)
            tensors = {buffer_name(i): whole[at : at + n] for i, (at, n) in enumerate(places(sizes))}
            region = whole[sum(map(aligned, sizes)) :][:GENERATOR_BYTES]
            tensors[GENERATOR] = region[8 : 8 + int(region[:8].view(np.uint64)[0])]
            tensors[NOTES] = np.frombuffer(beside, np.uint8, a["notes"], 8 * a["buffers"])
            nbytes = sum(t.nbytes for t in tensors.values())
            facts = {k: str(a[k]) for k in ("name", "uid", "job", "number", "steps")} | {"saved": f"{time.time():.3f}"}
            try:
                self._store.make_room(owner, nbytes, a["limit"], _owners(a["living"]))
                return self._store.save(owner, a["number"], tensors, facts)
            finally:
                tensors.clear()
                del whole, region  # the mapping can't be closed under them

    def _find_whole(self, a: dict[str, Any], _: list[int]) -> dict[str, Any]:
        found, bad = self._store.read(SnapshotOwner(a["uid"], a["job"]), a["numbers"])
        self._read = found
        if found is None:
            there = f"; damaged: {', '.join(map(str, bad))}" if bad else ""
            raise UnknownJob(f"there is no whole snapshot of this job{there}", "start the job anew")
        nbytes = sum(aligned(b.nbytes) for b in found.buffers) + GENERATOR_BYTES + found.notes.nbytes
        return {"number": found.number, "nbytes": nbytes, "notes": found.notes.nbytes, "bad": bad}

    def _fill(self, _: dict[str, Any], fds: list[int]) -> None:
        found, self._read = self._read, None
        if found is None:
            raise SnapshotFailed("the snapshot that was read is gone", "try again")
        with _mapped(fds[0], write=True) as memory:
            whole: Array = np.frombuffer(memory, np.uint8)
            sizes = [b.nbytes for b in found.buffers]
            for (at, n), buffer in zip(places(sizes), found.buffers, strict=True):
                whole[at : at + n] = buffer
            at = sum(map(aligned, sizes))
            whole[at : at + 8] = np.frombuffer(found.generator.nbytes.to_bytes(8, "little"), np.uint8)
            whole[at + 8 : at + 8 + found.generator.nbytes] = found.generator
            at += GENERATOR_BYTES
            whole[at : at + found.notes.nbytes] = found.notes
            del whole

    def _drop(self, _: dict[str, Any], __: list[int]) -> None:
        self._read = None

    def _find(self, a: dict[str, Any], _: list[int]) -> dict[str, Any]:
        kept = self._store.find(a["uid"], a["name"])
        return {"job": kept.owner.job, "numbers": list(kept.numbers)}

    def _expire(self, a: dict[str, Any], _: list[int]) -> int:
        return len(self._store.expire(a["before"], _owners(a["living"])))

    def _kept(self, a: dict[str, Any], _: list[int]) -> dict[str, int]:
        kept = list(self._store.kept())
        return {"jobs": len(kept), "nbytes": sum(k.nbytes for k in kept)}


def _owners(pairs: list[list[Any]]) -> frozenset[SnapshotOwner]:
    return frozenset(SnapshotOwner(uid, job) for uid, job in pairs)


@contextmanager
def _mapped(fd: int, write: bool = False) -> Iterator[mmap.mmap]:
    prot = mmap.PROT_READ | mmap.PROT_WRITE if write else mmap.PROT_READ
    mapping = mmap.mmap(fd, os.fstat(fd).st_size, mmap.MAP_SHARED, prot)
    try:
        yield mapping
    finally:
        try:
            mapping.close()
        except BufferError:
            # A raised error refers to arrays over the mapping, which is unmapped when they are gone.
            pass


def main() -> None:
    """`python -m gpumux.daemon.snapshots.writer SOCKET PARENT DIRECTORY ROOT`, started by the daemon. SOCKET and
    DIRECTORY are descriptors."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    # If the daemon is killed, the kernel kills its writer, so that the next daemon is alone in the directory.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[2]):
        return
    for ignored in (signal.SIGINT, signal.SIGTERM):  # the daemon says when it is time
        signal.signal(ignored, signal.SIG_IGN)
    os.nice(19)
    may_be_looked_into(False)
    store = Store(Path(sys.argv[4]), int(sys.argv[3]))
    store.tidy()
    writer = Writer(store)
    while True:
        try:
            packet, fds, _, _ = socket.recv_fds(sock, PACKET, 2)
        except ConnectionResetError:  # the daemon closed it with an answer unread
            return
        if not packet:
            return
        answer = writer.answer(packet, list(fds))
        try:
            sock.send(answer)
        except OSError:
            return


if __name__ == "__main__":
    main()
