"""The small AF_UNIX socket that descriptors travel over (SCM_RIGHTS), beside the control socket.

    client: connect, send one packet: the nonce of its Welcome
    daemon: checks the nonce and that SO_PEERCRED's uid is the session's, then sends one packet for
            each segment: segment id and size (two u64, network order) with one descriptor. The
            session's step lane (wire/lane.py) travels the same way, under an id of its own.

Packets (SOCK_SEQPACKET) keep their borders, so nothing has to be framed. A bound connection that
closes tells the daemon at once that the client is gone, long before its lease ends.

Nothing here blocks or reads a clock. Connections that have not said a valid nonce are bounded in
age and in number, in all and a user: beyond one for each session that is waited for, since a user's
hundred clients may well come at the same moment.
"""

from __future__ import annotations

import array
import ctypes
import errno
import fcntl
import mmap
import os
import select
import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from types import TracebackType

from gpumux import hostmemory
from gpumux.errors import AdmissionRefused, ConfigError, DaemonGone, ProtocolError
from gpumux.types import SessionId
from gpumux.wire.codec import MAX_CONTROL_BYTES
from gpumux.wire.lane import LANE_ID, Lane

NONCE_BYTES = 32
HEADER = struct.Struct("!QQ")  # segment id, bytes
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid

MAX_PENDING = 64  # connections that have not said their nonce, beyond those of sessions that are waited for
MAX_PENDING_PER_USER = 16
BACKLOG = 256  # clients that connect at the same moment wait in line; more of them wait before it
PENDING_S = 5.0
MAX_QUEUED = 64  # descriptors waiting for one client to read


@dataclass(slots=True)
class _Claim:
    """A session that may connect."""

    session: SessionId
    nonce: bytes
    uid: int
    connection: socket.socket | None = None
    queue: deque[tuple[int, int, int]] = field(default_factory=deque)  # segment id, bytes, own descriptor


@dataclass(frozen=True, slots=True)
class _Pending:
    connection: socket.socket
    uid: int
    since: float


class SideChannel:
    """The daemon's end. `fileno()` turns readable when `process` has something to do. `introduced` is
    called when a session's client has connected; False: the session can't go on."""

    def __init__(self, path: Path, introduced: Callable[[SessionId], bool] = lambda session: True) -> None:
        self.path = path
        self._introduced = introduced
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            self._listener.bind(str(path))
            self._listener.listen(BACKLOG)
        except OSError as error:  # str(error): a path that is too long has no errno
            self._listener.close()
            raise ConfigError(
                f"can't listen on {path}: {error.strerror or error}", "choose another --endpoint"
            ) from error
        self._spare = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)
        self._pending: dict[int, _Pending] = {}
        self._claims: dict[bytes, _Claim] = {}
        self._by_session: dict[SessionId, _Claim] = {}
        self._bound: dict[int, _Claim] = {}

    def fileno(self) -> int:
        return self._epoll.fileno()

    def expect(self, session: SessionId, uid: int) -> bytes:
        """Let `session` connect; the nonce it must say."""
        nonce = os.urandom(NONCE_BYTES)
        self._claims[nonce] = self._by_session[session] = _Claim(session, nonce, uid)
        return nonce

    def forget(self, session: SessionId) -> None:
        """The session is over: close its connection and what waits for it. Idempotent."""
        claim = self._by_session.pop(session, None)
        if claim is None:
            return
        del self._claims[claim.nonce]
        for _, _, fd in claim.queue:
            os.close(fd)
        if claim.connection is not None:
            self._drop(claim.connection)

    def send(self, session: SessionId, segment: int, nbytes: int, fd: int) -> bool:
        """Pass `fd` (kept by the caller, duplicated here) to the session's client, now or when it
        connects or reads again. False when the session is unknown or too many wait already."""
        claim = self._by_session.get(session)
        if claim is None or len(claim.queue) >= MAX_QUEUED:
            return False
        try:
            claim.queue.append((segment, nbytes, os.dup(fd)))
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            return False
        self._flush(claim)
        return True

    def process(self, now: float) -> list[SessionId]:
        """Accept, check and flush what is ready; the sessions whose client hung up."""
        gone: list[SessionId] = []
        for fd, events in self._epoll.poll(0):
            if fd == self._listener.fileno():
                self._accept(now)
            elif fd in self._pending:
                gone += self._introduce(self._pending.pop(fd))
            elif fd in self._bound:
                claim = self._bound[fd]
                if events & ~select.EPOLLOUT:
                    # A bound client has nothing to say: whatever this is, it ends the connection.
                    gone.append(claim.session)
                    self._unbind(claim)
                else:
                    self._flush(claim)
        return gone

    def expire(self, now: float) -> None:
        """Close connections that have kept their nonce to themselves for too long."""
        if not self._pending:
            return
        for fd, pending in list(self._pending.items()):
            if now - pending.since >= PENDING_S and not _has_spoken(pending.connection):
                del self._pending[fd]
                self._drop(pending.connection)

    def next_deadline(self) -> float:
        """When `expire` has something to do, inf when nothing waits."""
        if not self._pending:
            return inf
        return min(pending.since for pending in self._pending.values()) + PENDING_S

    def close(self) -> None:
        for session in list(self._by_session):
            self.forget(session)
        for pending in self._pending.values():
            pending.connection.close()
        self._pending.clear()
        self._epoll.close()
        self._listener.close()
        os.close(self._spare)
        self.path.unlink(missing_ok=True)

    def _accept(self, now: float) -> None:
        for _ in range(MAX_PENDING):
            try:
                connection, _address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._turn_away()
                    continue
                return  # aborted before it was accepted
            connection.setblocking(False)
            uid = peer_uid(connection)
            if not self._has_room(uid):
                connection.close()
                continue
            self._pending[connection.fileno()] = _Pending(connection, uid, now)
            self._epoll.register(connection, select.EPOLLIN)

    def _has_room(self, uid: int) -> bool:
        """Whether one more connection of this user may be without a nonce for a while."""
        users = Counter(pending.uid for pending in self._pending.values())
        awaited = Counter(claim.uid for claim in self._claims.values() if claim.connection is None)
        if users[uid] < awaited[uid]:
            return True
        surplus = users - awaited  # of users who have more than that
        return surplus[uid] < MAX_PENDING_PER_USER and surplus.total() < MAX_PENDING

    def _turn_away(self) -> None:
        """Out of descriptors: without this the listener would stay readable and the loop spin."""
        os.close(self._spare)
        try:
            self._listener.accept()[0].close()
        except OSError:
            pass  # it went by itself
        self._spare = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)

    def _introduce(self, pending: _Pending) -> list[SessionId]:
        try:
            nonce = pending.connection.recv(NONCE_BYTES + 1)
        except OSError:
            nonce = b""
        claim = self._claims.get(nonce)
        if claim is None or claim.uid != pending.uid or claim.connection is not None:
            self._drop(pending.connection)
            return []
        claim.connection = pending.connection
        self._bound[pending.connection.fileno()] = claim
        self._flush(claim)
        return [] if self._introduced(claim.session) else [claim.session]

    def _flush(self, claim: _Claim) -> None:
        connection = claim.connection
        if connection is None:
            return
        while claim.queue:
            segment, nbytes, fd = claim.queue[0]
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))
            try:
                connection.sendmsg([HEADER.pack(segment, nbytes)], [rights], socket.MSG_NOSIGNAL)
            except OSError:
                break  # full (EPOLLOUT says when not) or gone (process() will see it)
            claim.queue.popleft()
            os.close(fd)
        self._epoll.modify(connection, select.EPOLLIN | (select.EPOLLOUT if claim.queue else 0))

    def _unbind(self, claim: _Claim) -> None:
        connection, claim.connection = claim.connection, None
        if connection is not None:
            self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        self._bound.pop(connection.fileno(), None)
        self._epoll.unregister(connection)
        connection.close()


def _has_spoken(connection: socket.socket) -> bool:
    """Whether something waits to be read: where the daemon was held up, `process` is late, and not the client."""
    try:
        return bool(connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except OSError:
        return False


def peer_uid(connection: socket.socket) -> int:
    """The uid at the other end, as the kernel recorded it when the connection was made."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])


# ---- Shared-memory segments: how batches, results and state travel without passing through a socket.
#
# The daemon makes each segment at its full size, every page allocated, and seals it: a client that
# holds the descriptor can neither shrink it under the daemon's feet (SIGBUS) nor grow it. Sealing
# does not stop hole punching; a client that punches holes reads zeros of its own making, and the page
# comes back charged to whoever touches it, in a segment that is already charged at full size.


SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
RESERVE_BYTES = 64 << 20  # host memory left alone: a memfd has no limit of its own, the OOM killer does


class CopyMeter:
    """Counts bytes copied into or out of segments, so that "one copy at most" can be shown."""

    __slots__ = ("copied_bytes",)

    def __init__(self) -> None:
        self.copied_bytes = 0

    def copy(self, target: memoryview, source: bytes | bytearray | memoryview) -> None:
        """Copy `source` to the start of `target`. Raises ValueError when it does not fit."""
        view = memoryview(source).cast("B")
        if view.nbytes > target.nbytes:
            raise ValueError(f"{view.nbytes} bytes do not fit into {target.nbytes}")
        target[: view.nbytes] = view
        self.copied_bytes += view.nbytes


_TOUCHED_BYTES = 1 << 20  # of less, the faults take no time that matters


class Segment:
    """One memfd of exactly `nbytes`, owned by this object: `fd` is closed with it.

    `view()` maps it on first use; views handed out keep the mapping alive after `close`, which
    never waits for them.
    """

    __slots__ = ("_map", "fd", "nbytes")

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = fd
        self.nbytes = nbytes
        self._map: mmap.mmap | None = None

    @classmethod
    def create(cls, nbytes: int, name: str = "gpumux") -> Segment:
        """Daemon side. Raises AdmissionRefused when host memory can't hold it.

        Every page is touched: about half a second a gigabyte, without Python's lock held.
        """
        if nbytes <= 0:
            raise AdmissionRefused(f"a segment of {nbytes} bytes", "ask for at least one byte")
        free = free_host_bytes()
        if nbytes > free - RESERVE_BYTES:
            raise _no_room(nbytes, f"{max(free - RESERVE_BYTES, 0)} bytes are free")
        try:
            fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise _no_room(nbytes, str(error)) from error
        try:
            os.ftruncate(fd, nbytes)
            os.posix_fallocate(fd, 0, nbytes)
            if nbytes >= _TOUCHED_BYTES:
                _touch(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        except (OSError, OverflowError) as error:
            os.close(fd)
            raise _no_room(nbytes, str(error)) from error
        return cls(fd, nbytes)

    @classmethod
    def adopt(cls, fd: int, nbytes: int) -> Segment:
        """Receiving side: take over `fd` if it is a sealed segment of exactly `nbytes`; otherwise
        close it and raise ProtocolError."""
        try:
            size = os.fstat(fd).st_size
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError as error:
            os.close(fd)
            raise ProtocolError(f"the descriptor is no shared memory: {error.strerror}") from error
        if size != nbytes or seals & SEALS != SEALS:
            os.close(fd)
            raise ProtocolError(f"the segment has {size} bytes and seals {seals:#x}; {nbytes} bytes were announced")
        return cls(fd, nbytes)

    def view(self) -> memoryview:
        """The whole segment as writable bytes. Raises ValueError after `close`."""
        if self.fd < 0:
            raise ValueError("the segment is closed")
        if self._map is None:
            self._map = mmap.mmap(self.fd, self.nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        return memoryview(self._map)

    def close(self) -> None:
        """Close the descriptor and unmap. Memory still in use through a view or a tensor over it
        is unmapped when the last of those is gone. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
        mapped, self._map = self._map, None
        if mapped is not None:
            try:
                mapped.close()
            except BufferError:
                pass  # views are out: the mapping goes with the last of them

    def __enter__(self) -> Segment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _touch(fd: int, nbytes: int) -> None:
    """Have the kernel clear the file's pages, which fallocate leaves to the first to write there: in a snapshot that is
    the executor, while the job's next step waits."""
    with mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE) as memory:
        window = (ctypes.c_char * nbytes).from_buffer(memory)
        ctypes.memset(window, 0, nbytes)
        del window  # the mapping can't be closed under it


def _no_room(nbytes: int, why: str) -> AdmissionRefused:
    return AdmissionRefused(
        f"host memory can't hold a segment of {nbytes} bytes: {why}",
        "use a smaller batch or max_inflight, or close other jobs",
    )


def free_host_bytes() -> int:
    """Bytes this process may still allocate."""
    try:
        return hostmemory.free_bytes()
    except OSError as error:
        raise AdmissionRefused(f"nobody says how much memory is free: {error}", "mount /proc") from error


# ---- The client's end of the side channel: segments arrive here, by their ids, and the step lane.


_MAX_FDS = 4  # room for more than the one expected, so that a wrong count is seen and closed
_TIMEVAL = struct.Struct("@ll")
_CHUNK_S = 0.25  # how long one wait holds the socket, so that several threads can look in turn


class DescriptorInbox:
    """Connects to the daemon's side channel and says the nonce. Raises DaemonGone when nobody
    listens there."""

    def __init__(self, path: str, nonce: bytes, timeout: float) -> None:
        self._arrived: dict[int, Segment] = {}
        self._lane: Lane | None = None
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            # Where many come at once the line before the daemon is full. A socket with a timeout of Python's is told
            # so and fails; one of the kernel's waits.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(timeout))
            self._socket.connect(path)
            self._socket.send(nonce)
        except OSError as error:
            self._socket.close()
            raise DaemonGone(f"can't reach the daemon's side channel {path}: {error}", "start gpumux serve") from error

    def take(self, segment: int, nbytes: int, timeout: float) -> Segment:
        """The segment announced under this id; the caller owns it. Raises DaemonGone when it does
        not come in time or the daemon hangs up, ProtocolError when it is not as announced."""
        deadline = time.monotonic() + timeout
        while True:
            with self._lock:
                found = self._arrived.pop(segment, None)
                if found is None:
                    self._receive(min(_CHUNK_S, max(deadline - time.monotonic(), 0.001)))
                    found = self._arrived.pop(segment, None)
            if found is not None:
                break
            if time.monotonic() >= deadline:
                raise DaemonGone(f"segment {segment} did not arrive in {timeout:g} s", "look at gpumux status")
        if found.nbytes != nbytes:
            found.close()
            raise ProtocolError(f"segment {segment} has {found.nbytes} bytes, {nbytes} were announced")
        return found

    def take_lane(self, timeout: float) -> Lane:
        """The session's step lane; the caller owns it. It comes as soon as the daemon has heard the
        nonce. Raises DaemonGone when it does not come in time or the daemon hangs up."""
        deadline = time.monotonic() + timeout
        while self._lane is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise DaemonGone(f"no step lane arrived in {timeout:g} s", "look at gpumux status")
            with self._lock:
                self._receive(left)
        lane, self._lane = self._lane, None
        return lane

    def _receive(self, timeout: float) -> None:
        try:
            self._socket.settimeout(timeout)
            room = socket.CMSG_SPACE(_MAX_FDS * array.array("i").itemsize)
            data, ancillary, flags, _ = self._socket.recvmsg(HEADER.size + 1, room, socket.MSG_CMSG_CLOEXEC)
        except TimeoutError:
            return
        except OSError as error:
            raise DaemonGone(f"the side channel failed: {error}", "start gpumux serve") from error
        fds = _descriptors(ancillary)
        if not data and not fds:
            raise DaemonGone("the daemon closed the side channel", "start gpumux serve")
        if len(data) != HEADER.size or len(fds) != 1 or flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
            for fd in fds:
                os.close(fd)
            raise ProtocolError("a side-channel packet that is not one segment")
        segment, nbytes = HEADER.unpack(data)
        if segment == LANE_ID:
            self._adopt_lane(fds[0])
            return
        old = self._arrived.pop(segment, None)
        if old is not None:
            old.close()
        self._arrived[segment] = Segment.adopt(fds[0], nbytes)

    def _adopt_lane(self, fd: int) -> None:
        try:
            sock = socket.socket(fileno=fd)
        except OSError as error:
            os.close(fd)
            raise ProtocolError(f"the step lane is no socket: {error.strerror}") from error
        lane, self._lane = self._lane, Lane(sock, MAX_CONTROL_BYTES)
        if lane is not None or (sock.family, sock.type) != (socket.AF_UNIX, socket.SOCK_SEQPACKET):
            self._lane.close()
            self._lane = lane
            raise ProtocolError("the step lane is a socket of another kind, or a second one")

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        """Close the connection and every descriptor nobody took. Idempotent."""
        with self._lock:
            self.close_in_child()
            arrived, self._arrived = self._arrived, {}
            lane, self._lane = self._lane, None
        if lane is not None:
            lane.close()
        for segment in arrived.values():
            segment.close()

    def close_in_child(self) -> None:
        """After a fork: only this process's copy of the connection, without the lock. Were it kept
        open, the daemon would not notice the parent's death."""
        self._socket.close()


def _timeval(seconds: float) -> bytes:
    whole = int(seconds)
    return _TIMEVAL.pack(whole, max(int((seconds - whole) * 1_000_000), 0 if whole else 1))  # 0 would be for ever


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)
