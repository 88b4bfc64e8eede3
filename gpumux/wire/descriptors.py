"""The client's end of the side channel: segments arrive here, by their ids, and the step lane."""

from __future__ import annotations

import array
import os
import socket
import struct
import threading
import time

from gpumux.errors import DaemonGone, ProtocolError
from gpumux.wire.codec import MAX_CONTROL_BYTES
from gpumux.wire.dataplane import Segment
from gpumux.wire.lane import LANE_ID, Lane
from gpumux.wire.sidechannel import HEADER

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
