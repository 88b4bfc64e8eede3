"""The sockets under a client's session (ZeroMQ's, and the step lane), and the handshake that opens it. Not thread-safe: the
session's lock guards every call but `poll` and `wake`.
"""

from __future__ import annotations

import importlib.metadata
import os
import select
import sys
import time
from collections.abc import Sequence

import zmq
import zmq.utils.monitor

import gpumux
from gpumux.client.interrupts import Shield
from gpumux.errors import DaemonGone, GpumuxError, ProtocolError, Refused, from_code
from gpumux.wire.codec import decode, encode
from gpumux.wire.curve import ClientCurve, secure_client
from gpumux.wire.endpoint import Endpoint
from gpumux.wire.lane import PACKET, Lane
from gpumux.wire.messages import PROTOCOL_VERSION, Goodbye, Heartbeat, Hello, Message, Refusal, Welcome
from gpumux.wire.probe import unanswered

START_IT = "start gpumux serve, or set GPUMUX_ENDPOINT to where it listens"

_RETRY_MS = 50  # between attempts to connect
_LINGER_MS = 200  # how long closing may wait to say goodbye
_FULL_MS = 5_000  # how long a sender waits for a daemon that does not read
_LOST = zmq.EVENT_DISCONNECTED
_BARRED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_POLLIN = int(zmq.POLLIN)


MESSAGE, LANE, BROKEN = 1, 2, 4  # what `poll` says there may be


class Connection:
    """One DEALER socket with a monitor, in a context of its own: closing it waits for nobody else.
    `lane` is None until the session has one, and from when the daemon closes it."""

    def __init__(self, endpoint: Endpoint, curve: ClientCurve | None) -> None:
        self.endpoint = endpoint
        self.working = True  # as far as its pump knows
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
            self._socket.setsockopt(zmq.RECONNECT_IVL, _RETRY_MS)
            if curve is not None:
                self._socket.setsockopt(zmq.IPV6, "[" in endpoint.text)
                secure_client(self._socket, curve)
            self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(_LOST | _BARRED)
            # ZeroMQ tells of an event only those who were once told that there is none. The handshake may never ask: a
            # daemon that answers quickly is not waited for.
            self.lost()
            self._socket.connect(endpoint.text)
        except BaseException:
            os.close(self._wake)
            self._context.destroy(linger=0)
            raise
        self._monitor_fd = int(self._monitor.getsockopt(zmq.FD))
        self._socket_fd = int(self._socket.getsockopt(zmq.FD))
        self.lane: Lane | None = None
        self._lane_fd = -1
        self._meaning = {self._socket_fd: MESSAGE, self._monitor_fd: BROKEN, self._wake: 0}
        self._poller = select.poll()
        for fd in (self._socket_fd, self._monitor_fd, self._wake):
            self._poller.register(fd, select.POLLIN)

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """Raises DaemonGone when the daemon has not read for so long that the queue is full."""
        try:
            self._send(parts)
        except zmq.Again:
            if not self._socket.poll(_FULL_MS, zmq.POLLOUT):
                raise DaemonGone("the daemon does not take messages", "look at gpumux status") from None
            self._send(parts)

    def _send(self, parts: Sequence[bytes | memoryview]) -> None:
        if len(parts) == 1:
            self._socket.send(parts[0], zmq.NOBLOCK)
            return
        with Shield():  # half a message would swallow the next one
            for part in parts[:-1]:
                self._socket.send(part, zmq.NOBLOCK | zmq.SNDMORE)  # the first of them decides
            self._socket.send(parts[-1], zmq.NOBLOCK)

    def receive(self) -> list[bytes] | None:
        """The oldest message, None when none is there. Call it under a Shield."""
        try:
            frame = self._socket.recv(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        parts = [frame.bytes]
        if frame.more:
            parts += self._socket.recv_multipart()
        return parts

    def readable(self) -> bool:
        """Whether a message waits. Also what ZeroMQ wants to be asked before anybody sleeps."""
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & _POLLIN)

    def use_lane(self, lane: Lane) -> None:
        """From now on `send_step` and `receive_step` have something to work with."""
        self.lane = lane
        self._lane_fd = lane.fileno()
        self._meaning[self._lane_fd] = LANE
        self._poller.register(self._lane_fd, select.POLLIN)

    def send_step(self, message: bytes | memoryview) -> bool:
        """Send by the lane; False when it has been closed. Raises DaemonGone like `send`."""
        lane = self.lane
        if lane is None:
            return False
        try:
            if len(message) <= PACKET:
                sent = lane.send(message)
            else:
                with Shield():  # half a message would swallow the next one
                    sent = lane.send(message)
            return sent or self._flush(lane)
        except OSError:
            return False  # the daemon closed it; what comes by ZeroMQ says why

    def _flush(self, lane: Lane) -> bool:
        poller = select.poll()
        poller.register(lane.fileno(), select.POLLOUT)
        deadline = time.monotonic() + _FULL_MS / 1000
        while True:
            with Shield():
                if lane.flush():
                    return True
            left = deadline - time.monotonic()
            if left <= 0:
                raise DaemonGone("the daemon does not take messages", "look at gpumux status")
            poller.poll(left * 1000)

    def say_goodbye(self) -> None:
        """The daemon then ends the session. Behind everything sent so far."""
        goodbye = encode(Goodbye())
        try:
            if not self.send_step(goodbye[0]):
                self.send(goodbye)
        except DaemonGone:
            pass  # it does not read; it will notice by itself

    def receive_step(self) -> bytes | None:
        """The oldest message on the lane, None when none is there. Call it under a Shield."""
        if self.lane is None:
            return None
        try:
            return self.lane.receive()
        except EOFError:
            self.drop_lane()
            return None

    def drop_lane(self) -> None:
        """Idempotent."""
        lane, self.lane = self.lane, None
        if lane is not None:
            self._poller.unregister(self._lane_fd)
            del self._meaning[self._lane_fd]
            lane.close()

    def poll(self, timeout: float) -> int:
        """Sleep until something may have happened, `timeout` seconds at most: MESSAGE (one may wait),
        LANE (as well, on the lane), BROKEN (the connection may have changed, ask `lost`) or several
        of them. One thread at a time, without the lock."""
        happened = 0
        for fd, _ in self._poller.poll(timeout * 1000):
            happened |= self._meaning.get(fd, 0)
            if fd == self._wake:
                self._clear_wake()
        return happened

    def _clear_wake(self) -> None:
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            pass  # read already

    def wake(self) -> None:
        """Make the thread in `poll` return."""
        os.eventfd_write(self._wake, 1)

    def lost(self) -> GpumuxError | None:
        """The error to raise if the connection broke or was barred."""
        error: GpumuxError | None = None
        while int(self._monitor.getsockopt(zmq.EVENTS)) & _POLLIN:
            event = zmq.utils.monitor.recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
            if event & _BARRED:
                return Refused(
                    f"{self.endpoint.text} does not accept this client's key",
                    "have your NAME.key put among the daemon's clients, and check the daemon's own key",
                )
            error = DaemonGone(f"the daemon at {self.endpoint.text} is gone", START_IT)
        return error

    def close_lane_in_child(self) -> None:
        """After a fork: only this process's copy. Were it kept open, the daemon would not notice the
        parent's death."""
        if self.lane is not None:
            self.lane.close()

    def close(self, linger: bool = False) -> None:
        """Close, with `linger` after what is still to be said (a fifth of a second at most)."""
        self.drop_lane()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=_LINGER_MS if linger else 0)
        self._context.term()
        os.close(self._wake)


def hello(role: str, inline: bool) -> Hello:
    return Hello(
        protocol=PROTOCOL_VERSION,
        gpumux_version=gpumux.__version__,
        role=role,
        pid=os.getpid(),
        torch_version=_torch_version(),
        inline=inline,
    )


def _torch_version() -> str:
    """Without importing it: that takes seconds, and `gpumux status` has no use for it."""
    torch = sys.modules.get("torch")
    if torch is not None:
        return str(torch.__version__)
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""


def handshake(connection: Connection, greeting: Hello, timeout: float) -> Welcome:
    """Say `greeting` and wait for the answer. Raises DaemonGone when none comes in `timeout`
    seconds, VersionMismatch and other refusals as the daemon gives them."""
    deadline = time.monotonic() + timeout
    connection.send(encode(greeting))
    error: GpumuxError | None = None
    while True:
        parts = connection.receive()
        if parts is not None:
            message, _ = decode(parts)
            if isinstance(message, Heartbeat):
                continue
            return _welcome(message)
        if error is not None:
            raise error
        error = connection.lost()
        if error is not None:
            continue  # what came before the break still counts, and may have come after we looked
        left = deadline - time.monotonic()
        if left <= 0:
            raise unanswered(connection.endpoint, START_IT)
        connection.poll(left)


def _welcome(message: Message) -> Welcome:
    if isinstance(message, Refusal):
        raise from_code(message.code, message.message, message.remedy)
    if not isinstance(message, Welcome):
        raise ProtocolError(f"the daemon answered Hello with {type(message).__name__}", "use one gpumux version")
    return message
