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
import errno
import os
import select
import socket
import struct
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from gpumux.errors import ConfigError
from gpumux.model import SessionId

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
