"""The daemon's end of the process that writes snapshots (writer.py): ask, and hear later. Imports nothing heavy."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgpack

import gpumux
from gpumux.errors import ConfigError, EndpointBusy, SnapshotFailed, from_code

PACKET = 192 << 10  # bytes of a request or an answer, at most
CLOSE_S = 10.0  # for what is being written when the daemon leaves
LOCK_S = 10.0  # for another daemon's processes to end that was killed a moment ago
_RETRY_S = 0.05

Then = Callable[[Any], None]  # called with the answer, or with a GpumuxError


class DirectoryLock:
    """One daemon a directory: flock on ROOT/lock, which the writer inherits, so that it is free only when both ended.
    Raises EndpointBusy after `wait_s`, ConfigError if there can be no lock."""

    def __init__(self, root: Path, wait_s: float = LOCK_S) -> None:
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.fd = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise ConfigError(
                f"can't use {root} for snapshots: {error.strerror}", "choose another state_dir"
            ) from error
        give_up = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= give_up:
                    os.close(self.fd)
                    raise EndpointBusy(
                        f"another daemon keeps its snapshots in {root}", "give each daemon a state_dir of its own"
                    ) from None
            except OSError as error:
                os.close(self.fd)
                raise ConfigError(f"can't lock {root}: {error.strerror}", "use a local file system") from error
            time.sleep(_RETRY_S)

    def close(self) -> None:
        os.close(self.fd)


class Link:
    """`ask` a verb of the writer's; call `hear` as `follow` says. One request is out at a time, the others
    wait here. A writer that ends answers nothing any more: its requests fail, and the next one starts another."""

    def __init__(self, root: Path, lock: DirectoryLock) -> None:
        self._root = root
        self._lock = lock
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._waiting: deque[tuple[bytes, list[int], Then]] = deque()
        self._then: Then | None = None
        self._watch: Callable[[Sequence[int]], None] = _unwatched
        self._start()

    def follow(self, watch: Callable[[Sequence[int]], None]) -> None:
        """Have `watch` called with the descriptors whose being readable means `hear`, now and when they change."""
        self._watch = watch
        watch((self._sock.fileno(),) if self._sock is not None else ())

    @property
    def busy(self) -> bool:
        return self._then is not None

    def ask(self, verb: str, arguments: dict[str, Any], fds: Sequence[int], then: Then) -> None:
        """`fds` stay the caller's. `then` is called by `hear`."""
        packet = bytes(msgpack.packb([verb, arguments]))
        self._waiting.append((packet, [os.dup(fd) for fd in fds], then))
        self._next()

    def hear(self) -> None:
        """Act on an answer, or on the end of the process."""
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
        if then is not None:
            self._then = None
            then(_meaning(answer))
        self._next()

    def close(self) -> None:
        """Let the process finish what it is at, CLOSE_S at most; nobody hears of it any more."""
        for _, fds, _ in self._waiting:
            _close(fds)
        self._waiting.clear()
        self._then, self._watch = None, _unwatched
        self._stop(CLOSE_S)

    def _next(self) -> None:
        while self._then is None and self._waiting:
            packet, fds, then = self._waiting.popleft()
            try:
                if self._sock is None:
                    self._start()
                assert self._sock is not None
                socket.send_fds(self._sock, [packet], fds)
                self._then = then
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
                    sys.executable, "-P", "-m", "gpumux.recovery.writer", str(theirs.fileno()), str(os.getpid()),
                    str(self._root),
                ],
                pass_fds=[theirs.fileno(), self._lock.fd], stdin=subprocess.DEVNULL, stdout=2, process_group=0,
                env={**os.environ, "PYTHONPATH": _path()},
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
    """Nobody waits yet."""


def _meaning(answer: bytes) -> Any:
    if not answer:
        return SnapshotFailed("the process that writes snapshots ended", "look at the daemon's log and its memory")
    code, body = msgpack.unpackb(answer)
    return from_code(code, *body) if code else body


def _path() -> str:
    """Where the writer finds gpumux: where we found it."""
    home = str(Path(gpumux.__file__).resolve().parent.parent)
    known = os.environ.get("PYTHONPATH", "")
    return f"{home}{os.pathsep}{known}" if known else home


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
