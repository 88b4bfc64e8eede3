"""One end of a step lane: a socket pair that Step, StepDone and StepFailed of one session travel over.

ZeroMQ puts a thread of its own between two processes; on a lane a step costs one system call to send
and one to receive. The socket is of type SOCK_SEQPACKET, so packets keep their borders: a message is
one packet, or, longer than PACKET, several, all but the last of which begin with the byte MORE.
Neither end ever blocks in `send` or `receive`.
"""

from __future__ import annotations

import socket
from collections import deque

from gpumux.errors import ProtocolError
from gpumux.wire.messages import Goodbye, Step, StepDone, StepFailed

LANE_ID = 0  # in the side channel's packets: this descriptor is no segment, but the lane
PACKET = 32 << 10  # bytes; well below the least socket buffer Linux grants
MORE = 0xC1  # the one byte no msgpack value begins with
FROM_CLIENT = frozenset({Step, Goodbye})
FROM_DAEMON = frozenset({StepDone, StepFailed})

_MORE = bytes((MORE,))
_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Lane:
    """Owns `sock`. Takes messages of `max_bytes` at most."""

    __slots__ = ("_max_bytes", "_parts", "_receive", "_send", "_sock", "_unsent")

    def __init__(self, sock: socket.socket, max_bytes: int) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._send = sock.send
        self._receive = sock.recv
        self._max_bytes = max_bytes
        self._parts: list[bytes] = []  # of a message that has begun to arrive
        self._unsent: deque[bytes] = deque()  # packets the socket had no room for

    def fileno(self) -> int:
        """-1 when closed."""
        return self._sock.fileno()

    def send(self, message: bytes | memoryview) -> bool:
        """Send one message. False: some of it waits here until `flush` is true, and nothing later
        may be sent on any way before. Raises OSError when the other end is gone."""
        if len(message) <= PACKET and not self._unsent:
            try:
                self._send(message, _FLAGS)
            except BlockingIOError:
                self._unsent.append(bytes(message))
                return False
            return True
        data = bytes(message)
        while len(data) > PACKET:
            self._unsent.append(_MORE + data[: PACKET - 1])
            data = data[PACKET - 1 :]
        self._unsent.append(data)
        return self.flush()

    def flush(self) -> bool:
        """Send what waits; whether nothing waits any more. Raises OSError when the other end is gone."""
        while self._unsent:
            try:
                self._send(self._unsent[0], _FLAGS)
            except BlockingIOError:
                return False
            self._unsent.popleft()
        return True

    def receive(self) -> bytes | None:
        """The next message, None when none is whole. Raises EOFError when the other end is gone, and
        ProtocolError for packets that make up no message."""
        while True:
            try:
                packet = self._receive(PACKET + 1)
            except BlockingIOError:
                return None
            except OSError as error:
                raise EOFError from error
            if not packet:
                raise EOFError
            if packet[0] != MORE and not self._parts:
                return packet
            message = self._assemble(packet)
            if message is not None:
                return message

    def restore(self, packet: bytes) -> None:
        """A packet that somebody who read in our place did not want is the next one again."""

        def again(size: int, flags: int = 0) -> bytes:
            self._receive = self._sock.recv
            return packet

        self._receive = again

    @property
    def between(self) -> bool:
        """Whether no message has begun to arrive, and none waits to be sent."""
        return not (self._parts or self._unsent)

    def _assemble(self, packet: bytes) -> bytes | None:
        last = packet[0] != MORE
        self._parts.append(packet if last else packet[1:])
        if len(packet) > PACKET or sum(map(len, self._parts)) > self._max_bytes:
            raise ProtocolError(f"a message of more than {self._max_bytes} bytes on the step lane")
        if not last:
            return None
        message = b"".join(self._parts)
        self._parts.clear()
        return message

    def shut_down(self) -> None:
        """End the lane for everybody who holds a copy of this end. Idempotent."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other end is gone already

    def close(self) -> None:
        """Idempotent."""
        self._sock.close()
