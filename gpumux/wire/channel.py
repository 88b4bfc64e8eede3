"""The local channel: one AF_UNIX SOCK_SEQPACKET connection a session, for steps, their answers and descriptors.

ZeroMQ carries everything else, and everything over TCP. ZeroMQ passes each message through a thread of its own; on the
channel a step costs one system call to send and one to receive, and descriptors of shared memory can be passed.

    client -> daemon   OpenChannel, first and once; then Step and Goodbye
    daemon -> client   ChannelOpened or Refusal, first and once; then StepDone, GroupStepDone, StepFailed and
                       SegmentPassed, which brings the descriptor of a shared-memory segment (SCM_RIGHTS)

A message is one packet. A longer one from a client (a Step with many scalars) is several packets: all but the last
begin with the byte MORE, and the cuts are such that the last one does not. A message of the daemon is always one
packet: the process that ran a step may also write to the daemon's end, and packets of two writers may alternate.

No call blocks once the channel is open, and none reads a clock. A channel that closes ends its session.
"""

from __future__ import annotations

import array
import errno
import fcntl
import os
import select
import socket
import struct
import termios
from collections import Counter, deque
from dataclasses import dataclass
from math import inf
from pathlib import Path

from gpumux.errors import ConfigError, DaemonGone, GpumuxError, ProtocolError, from_code
from gpumux.types import SessionId
from gpumux.wire.codec import decode, decode_step, encode
from gpumux.wire.messages import (
    PROTOCOL_VERSION,
    ChannelOpened,
    Goodbye,
    GroupStepDone,
    Message,
    OpenChannel,
    Refusal,
    SegmentPassed,
    Step,
    StepDone,
    StepFailed,
)
from gpumux.wire.shared_memory import Segment

PACKET = 32 << 10  # bytes; well below the smallest socket buffer that Linux grants
MORE = 0xC1  # no msgpack value begins with this byte
FROM_CLIENT = frozenset({Step, Goodbye})  # on an open channel
FROM_DAEMON = frozenset({StepDone, GroupStepDone, StepFailed, SegmentPassed})

_MORE = bytes((MORE,))
_SEND = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_RECEIVE = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
_INT = array.array("i").itemsize
_ROOM = socket.CMSG_SPACE(4 * _INT)  # for more than the one descriptor expected, so that others are seen and closed


# ---- The client's end.


class ClientChannel:
    """The client's end of a channel, made by `open`. One thread at a time may send, and one receive."""

    __slots__ = ("_receive", "_segments", "_send", "_sock", "_unsent")

    def __init__(self, sock: socket.socket) -> None:
        """Take over a connected socket whose channel is open."""
        sock.setblocking(False)
        self._sock = sock
        self._send = sock.send
        self._receive = sock.recvmsg
        self._unsent: deque[bytes] = deque()  # packets that wait for room in the socket
        self._segments: dict[int, Segment] = {}  # received segments that were not taken yet, by id

    @classmethod
    def open(cls, path: str, nonce: bytes, timeout: float) -> ClientChannel:
        """Connect and send the nonce of the session's Welcome. Raises DaemonGone if no answer comes within `timeout`
        seconds, and the error of a Refusal."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            # While the daemon's queue of new connections is full, the kernel lets a blocking connect wait. A socket
            # with a timeout of Python's does not block in the kernel, and would fail.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(timeout))
            sock.connect(path)
            sock.send(encode(OpenChannel(PROTOCOL_VERSION, nonce))[0])
            sock.settimeout(max(timeout, 0.001))
            packet = sock.recv(PACKET)
            if not packet:
                raise DaemonGone(f"the daemon closed the channel {path}", "look at the daemon's log")
            answer, _ = decode((packet,))
            if isinstance(answer, Refusal):
                raise from_code(answer.code, answer.message, answer.remedy)
            if not isinstance(answer, ChannelOpened):
                raise ProtocolError(f"the daemon answered OpenChannel with {type(answer).__name__}")
            return cls(sock)
        except BaseException as error:
            sock.close()
            if isinstance(error, OSError) and not isinstance(error, GpumuxError):
                raise DaemonGone(f"can't open the daemon's channel {path}: {error}", "start gpumux serve") from error
            raise

    def fileno(self) -> int:
        """-1 when closed."""
        return self._sock.fileno()

    def send(self, message: bytes | memoryview) -> bool:
        """Send one message. Returns False if a part of it waits; then send no message, by ZeroMQ neither, until `flush`
        returns True. Raises OSError when the daemon has closed the channel."""
        if len(message) <= PACKET and not self._unsent:
            try:
                self._send(message, _SEND)
            except BlockingIOError:
                self._unsent.append(bytes(message))
                return False
            return True
        data = bytes(message)
        while len(data) > PACKET:
            cut = PACKET - 1
            while data[cut] == MORE:  # what follows may be the last packet, and a part of a number may be any byte
                cut -= 1
            self._unsent.append(_MORE + data[:cut])
            data = data[cut:]
        self._unsent.append(data)
        return self.flush()

    def flush(self) -> bool:
        """Send waiting packets. Returns whether all were sent. Raises OSError when the daemon has closed the
        channel."""
        while self._unsent:
            try:
                self._send(self._unsent[0], _SEND)
            except BlockingIOError:
                return False
            self._unsent.popleft()
        return True

    def receive(self) -> bytes | None:
        """The next answer, None if there is none. Segments that came before it are kept for `take`. Raises EOFError
        when the daemon has closed the channel, ProtocolError for a descriptor that is no segment."""
        while True:
            try:
                packet, ancillary, flags, _ = self._receive(PACKET + 1, _ROOM, _RECEIVE)
            except BlockingIOError:
                return None
            except OSError as error:
                raise EOFError from error
            if ancillary:
                self._adopt(packet, _descriptors(ancillary), flags)
            elif packet:
                return packet
            else:
                raise EOFError

    def _adopt(self, packet: bytes, fds: list[int], flags: int) -> None:
        try:
            message, _ = decode((packet,))
            if type(message) is not SegmentPassed or len(fds) != 1 or flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
                raise ProtocolError(f"{len(fds)} descriptors with a {type(message).__name__} on the channel")
        except ProtocolError:
            for fd in fds:
                os.close(fd)
            raise
        old = self._segments.pop(message.segment, None)
        if old is not None:
            old.close()
        self._segments[message.segment] = Segment.adopt(fds[0], message.nbytes)

    def take(self, segment: int, nbytes: int) -> Segment:
        """The segment that a message has announced under this id; the caller owns it. Raises ProtocolError if it was
        not passed before the announcement, or has another size."""
        found = self._segments.pop(segment, None)
        if found is None:
            raise ProtocolError(f"segment {segment} was announced and not passed")
        if found.nbytes != nbytes:
            found.close()
            raise ProtocolError(f"segment {segment} has {found.nbytes} bytes, {nbytes} were announced")
        return found

    def close(self) -> None:
        """Close the connection and every segment that was not taken. Idempotent."""
        self._sock.close()
        segments, self._segments = self._segments, {}
        for segment in segments.values():
            segment.close()

    def close_in_child(self) -> None:
        """After a fork: close only this process's copy of the connection. Were it left open, the daemon would not
        notice the parent's death."""
        self._sock.close()


def _timeval(seconds: float) -> bytes:
    whole = int(seconds)
    return _TIMEVAL.pack(whole, max(int((seconds - whole) * 1_000_000), 0 if whole else 1))  # 0 means no timeout


_TIMEVAL = struct.Struct("@ll")
_UNREAD = struct.Struct("@i")


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)


# ---- The daemon's end.


class DaemonChannel:
    """The daemon's end of one open channel. Takes messages of `max_bytes` at most."""

    __slots__ = ("_max_bytes", "_parts", "_receive", "_send", "_sock", "taken")

    def __init__(self, sock: socket.socket, max_bytes: int) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._send = sock.send
        self._receive = sock.recv  # without room for descriptors: the kernel closes what a client sends along
        # Each call says that it does not wait: the job's process may have a copy of this end, and could have it wait.
        self._max_bytes = max_bytes
        self._parts: list[bytes] = []  # of a message that has begun to arrive
        self.taken = 0  # bytes received so far

    def fileno(self) -> int:
        """-1 when closed."""
        return self._sock.fileno()

    def send(self, packet: bytes | memoryview, fd: int = -1) -> bool:
        """Send one message, with a descriptor unless `fd` is -1. False: there is no room for it now. Raises OSError
        when the client is gone, or takes so few descriptors that the kernel passes no more."""
        try:
            if fd < 0:
                self._send(packet, _SEND)
            else:
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))
                self._sock.sendmsg([packet], [rights], _SEND)
        except BlockingIOError:
            return False
        return True

    def receive(self) -> bytes | None:
        """The next message, None if none has arrived completely. Raises EOFError when the client is gone, and
        ProtocolError for packets that form no message."""
        while True:
            try:
                packet = self._receive(PACKET + 1, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            except OSError as error:
                raise EOFError from error
            if not packet:
                raise EOFError
            self.taken += len(packet)
            if packet[0] != MORE and not self._parts:
                return packet
            message = self._assemble(packet)
            if message is not None:
                return message

    def unread(self) -> int:
        """Bytes that have arrived and were not received yet."""
        return int(_UNREAD.unpack(fcntl.ioctl(self._sock, termios.FIONREAD, bytes(_UNREAD.size)))[0])

    def _assemble(self, packet: bytes) -> bytes | None:
        last = packet[0] != MORE
        self._parts.append(packet if last else packet[1:])
        if len(packet) > PACKET or sum(map(len, self._parts)) > self._max_bytes:
            raise ProtocolError(f"a message of more than {self._max_bytes} bytes on the channel")
        if not last:
            return None
        message = b"".join(self._parts)
        self._parts.clear()
        return message

    def close(self) -> None:
        """End the channel, also for the processes that hold a copy of this end. Idempotent."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the client is gone already, or the channel was closed
        self._sock.close()


def decode_packet(packet: bytes, max_bytes: int) -> Message:
    """The message in a packet of a client's open channel. Raises ProtocolError for one that clients don't send
    there."""
    message = decode_step(packet, max_bytes)
    if type(message) not in FROM_CLIENT:
        raise ProtocolError(f"a {type(message).__name__} on the channel", "send it by ZeroMQ")
    return message


# ---- Where clients connect.
#
# Connections that have not sent a valid nonce are bounded in age and in number, in all and for each user. Those of
# expected clients (one for each session without a channel) don't count, since many may connect at the same moment.


NONCE_BYTES = 32
MAX_PENDING = 64  # connections without a nonce, beyond those of sessions that are expected
MAX_PENDING_PER_USER = 16
PENDING_S = 5.0
BACKLOG = 256  # clients that connect at the same moment queue here
_OPENING_BYTES = 256  # of an OpenChannel
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


@dataclass(frozen=True, slots=True)
class _Expected:
    """A session whose client may connect."""

    session: SessionId
    nonce: bytes
    uid: int


@dataclass(frozen=True, slots=True)
class _Pending:
    """A connection that has not sent a nonce."""

    connection: socket.socket
    uid: int
    since: float


class ChannelListener:
    """Accepts connections and finds their sessions by the nonce. `fileno()` turns readable when `process` has something
    to do."""

    def __init__(self, path: Path) -> None:
        self.path = path
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
        self._pending: dict[int, _Pending] = {}  # by descriptor
        self._expected: dict[bytes, _Expected] = {}  # by nonce
        self._nonces: dict[SessionId, bytes] = {}

    def fileno(self) -> int:
        return self._epoll.fileno()

    def expect(self, session: SessionId, uid: int) -> bytes:
        """Let the session's client connect, once. Returns the nonce that it must send."""
        nonce = os.urandom(NONCE_BYTES)
        self._expected[nonce] = _Expected(session, nonce, uid)
        self._nonces[session] = nonce
        return nonce

    def forget(self, session: SessionId) -> None:
        """The session's client may not connect any more. Idempotent."""
        nonce = self._nonces.pop(session, None)
        if nonce is not None:
            self._expected.pop(nonce, None)

    def process(self, now: float) -> list[tuple[SessionId, socket.socket]]:
        """Accept and check connections. Returns the sessions whose clients have connected, each with its connection,
        which the caller owns."""
        opened: list[tuple[SessionId, socket.socket]] = []
        for fd, _ in self._epoll.poll(0):
            if fd == self._listener.fileno():
                self._accept(now)
            elif fd in self._pending:
                opened += self._introduce(self._pending.pop(fd))
        return opened

    def expire(self, now: float) -> None:
        """Close connections that have not sent a nonce in time."""
        if not self._pending:
            return
        for fd, pending in list(self._pending.items()):
            if now - pending.since >= PENDING_S and not _has_spoken(pending.connection):
                del self._pending[fd]
                self._drop(pending.connection)

    def next_deadline(self) -> float:
        """The time of the next call of `expire`, inf if no connection is pending."""
        if not self._pending:
            return inf
        return min(pending.since for pending in self._pending.values()) + PENDING_S

    def close(self) -> None:
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
        """Whether one more connection of this user may be pending."""
        users = Counter(pending.uid for pending in self._pending.values())
        expected = Counter(session.uid for session in self._expected.values())
        if users[uid] < expected[uid]:
            return True
        surplus = users - expected  # of users who have more than that
        return surplus[uid] < MAX_PENDING_PER_USER and surplus.total() < MAX_PENDING

    def _turn_away(self) -> None:
        """Refuse a connection when there are no descriptors left: the listener would stay readable, and the loop
        would spin."""
        os.close(self._spare)
        try:
            self._listener.accept()[0].close()
        except OSError:
            pass  # the client gave up meanwhile
        self._spare = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)

    def _introduce(self, pending: _Pending) -> list[tuple[SessionId, socket.socket]]:
        connection = pending.connection
        self._epoll.unregister(connection)
        try:
            expected = self._identify(connection.recv(_OPENING_BYTES + 1), pending.uid)
            connection.send(encode(ChannelOpened())[0], _SEND)
        except OSError:
            connection.close()
            return []
        except ProtocolError as error:
            try:
                connection.send(encode(Refusal(0, error.code, error.message, error.remedy))[0], _SEND)
            except OSError:
                pass  # it is gone
            connection.close()
            return []
        self.forget(expected.session)
        return [(expected.session, connection)]

    def _identify(self, packet: bytes, uid: int) -> _Expected:
        """The session whose channel the packet opens. Raises ProtocolError, and VersionMismatch if the protocols
        differ."""
        message, _ = decode((packet,), _OPENING_BYTES)
        if not isinstance(message, OpenChannel):
            raise ProtocolError(f"a {type(message).__name__} on a channel that is not open", "send OpenChannel first")
        expected = self._expected.get(message.nonce)
        if expected is None or expected.uid != uid:
            raise ProtocolError("no session of this user waits for a channel with this nonce", "connect again")
        return expected

    def _drop(self, connection: socket.socket) -> None:
        self._epoll.unregister(connection)
        connection.close()


def _has_spoken(connection: socket.socket) -> bool:
    """Whether something waits to be read: then the daemon is late, not the client."""
    try:
        return bool(connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except OSError:
        return False


def peer_uid(connection: socket.socket) -> int:
    """The uid at the other end, as the kernel recorded it when the connection was made."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])
