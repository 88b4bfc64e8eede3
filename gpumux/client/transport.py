"""The sockets of a client's session (ZeroMQ's, and the local channel), the handshake that opens it, and the pump.

`Connection` is not thread-safe: the session's lock guards every call but `poll` and `wake`.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import importlib.metadata
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any, TypeVar

import zmq
import zmq.utils.monitor

import gpumux
from gpumux.errors import DaemonGone, GpumuxError, ProtocolError, Refused, from_code
from gpumux.wire.channel import PACKET, ClientChannel
from gpumux.wire.codec import decode, encode
from gpumux.wire.endpoint import Endpoint, check_private, resolve, unanswered
from gpumux.wire.grants import with_token
from gpumux.wire.messages import PROTOCOL_VERSION, Goodbye, Heartbeat, Hello, Message, Refusal, Welcome
from gpumux.wire.peers import ClientCurve, secure_client

# ---- Ctrl-C and other signals, deferred while a message is sent or received.
#
# pyzmq checks for signals inside its calls: an interrupt there can lose a message that was already taken from the
# queue, send half of a multipart message, or be dropped in a destructor. A session therefore sends and receives under a
# shield; handlers that the script has set (a batch system's SIGTERM, say) run when the shield ends.


# The C functions below `signal.signal` and `signal.getsignal`: the conversions to enum members that those add would be
# a large part of a step's round trip.
_set: Callable[[int, Any], Any] = _signal.signal
_get: Callable[[int], Any] = _signal.getsignal
# The signals that scripts handle in Python. SIGINT is the last to get its handler back, because that usually raises.
_SIGNALS = tuple(
    map(
        int,
        (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2),
    )
)
_MAIN = threading.main_thread().ident


class Shield:
    """`with Shield(): ...` runs its block without Python's signal handlers, which run after it. Python runs them in the
    main thread only, so in any other this does nothing. May be nested."""

    __slots__ = ("_hit", "_old")

    def __enter__(self) -> None:
        self._old: list[tuple[int, Any]] = []
        self._hit: list[int] = []
        if threading.get_ident() == _MAIN:
            for number in _SIGNALS:
                old = _get(number)
                if callable(old):  # neither ignored, nor left to the system, nor set by other C code
                    self._old.append((number, old))
                    _set(number, self._defer)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        handlers = dict(self._old) if self._hit else {}
        while self._old:
            _set(*self._old[-1])
            self._old.pop()
        _run(self._hit, handlers)

    def _defer(self, number: int, frame: FrameType | None) -> None:
        self._hit.append(number)


def _run(numbers: list[int], handlers: dict[int, Any]) -> None:
    """Run deferred handlers in the order of their signals, each even if one before it raises."""
    if numbers:
        try:
            handlers[numbers[0]](numbers[0], None)
        finally:
            _run(numbers[1:], handlers)


# ---- The sockets of one session, and the handshake.


START_IT = "start gpumux serve, or set GPUMUX_ENDPOINT to where it listens"

_RETRY_MS = 50  # between attempts to connect
_LINGER_MS = 200  # longest wait of `close` for sent messages to leave
_FULL_MS = 5_000  # longest wait of a sender for a daemon that does not read
_LOST = zmq.EVENT_DISCONNECTED
_BARRED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_POLLIN = int(zmq.POLLIN)


MESSAGE, CHANNEL, BROKEN = 1, 2, 4  # bits of `poll`'s result


class Connection:
    """One DEALER socket with a monitor, in a context of its own: closing it waits for no other session.
    `channel` is None until the session has one, and once the daemon has closed it."""

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
            # ZeroMQ's descriptor signals an event only after the events were read once. The handshake may never read
            # them: it does not wait for a daemon that answers quickly.
            self.lost()
            self._socket.connect(endpoint.text)
        except BaseException:
            os.close(self._wake)
            self._context.destroy(linger=0)
            raise
        self._monitor_fd = int(self._monitor.getsockopt(zmq.FD))
        self._socket_fd = int(self._socket.getsockopt(zmq.FD))
        self.channel: ClientChannel | None = None
        self._channel_fd = -1
        self._meaning = {self._socket_fd: MESSAGE, self._monitor_fd: BROKEN, self._wake: 0}
        self._poller = select.poll()
        for fd in (self._socket_fd, self._monitor_fd, self._wake):
            self._poller.register(fd, select.POLLIN)

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """Send a message. Raises DaemonGone if the queue is full because the daemon does not read."""
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
        """Receive the oldest message, None if there is none. Call it under a Shield."""
        try:
            frame = self._socket.recv(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        parts = [frame.bytes]
        if frame.more:
            parts += self._socket.recv_multipart()
        return parts

    def readable(self) -> bool:
        """Whether a message waits. ZeroMQ must be asked this before a thread sleeps on its descriptor."""
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & _POLLIN)

    def use_channel(self, channel: ClientChannel) -> None:
        """Set the channel for `send_step` and `receive_step`."""
        self.channel = channel
        self._channel_fd = channel.fileno()
        self._meaning[self._channel_fd] = CHANNEL
        self._poller.register(self._channel_fd, select.POLLIN)

    def send_step(self, message: bytes | memoryview) -> bool:
        """Send by the channel. Returns False if the daemon has closed it. Raises DaemonGone as `send` does."""
        channel = self.channel
        if channel is None:
            return False
        try:
            if len(message) <= PACKET:
                sent = channel.send(message)
            else:
                with Shield():  # half a message would swallow the next one
                    sent = channel.send(message)
            return sent or self._flush(channel)
        except OSError:
            return False  # the daemon closed it, and sends the reason by ZeroMQ

    def _flush(self, channel: ClientChannel) -> bool:
        poller = select.poll()
        poller.register(channel.fileno(), select.POLLOUT)
        deadline = time.monotonic() + _FULL_MS / 1000
        while True:
            with Shield():
                if channel.flush():
                    return True
            left = deadline - time.monotonic()
            if left <= 0:
                raise DaemonGone("the daemon does not take messages", "look at gpumux status")
            poller.poll(left * 1000)

    def say_goodbye(self) -> None:
        """Send Goodbye behind all earlier messages; the daemon then ends the session."""
        goodbye = encode(Goodbye())
        try:
            if not self.send_step(goodbye[0]):
                self.send(goodbye)
        except DaemonGone:
            pass  # the daemon does not read; it notices the end of the connection

    def receive_step(self) -> bytes | None:
        """Receive the oldest message on the channel, None if there is none. Call it under a Shield."""
        if self.channel is None:
            return None
        try:
            return self.channel.receive()
        except EOFError:
            self.drop_channel()
            return None

    def drop_channel(self) -> None:
        """Idempotent."""
        channel, self.channel = self.channel, None
        if channel is not None:
            self._poller.unregister(self._channel_fd)
            del self._meaning[self._channel_fd]
            channel.close()

    def poll(self, timeout: float) -> int:
        """Sleep until something may have happened, `timeout` seconds at most: MESSAGE (one may wait),
        CHANNEL (as well, on the channel), BROKEN (the connection may have changed, ask `lost`) or several
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

    def close_channel_in_child(self) -> None:
        """Close only this process's copy, after a fork."""
        if self.channel is not None:
            self.channel.close_in_child()

    def close(self, linger: bool = False) -> None:
        """Close; with `linger`, wait a fifth of a second at most until what was sent has left."""
        self.drop_channel()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=_LINGER_MS if linger else 0)
        self._context.term()
        os.close(self._wake)


def hello(role: str, inline: bool) -> Hello:
    greeting = Hello(
        protocol=PROTOCOL_VERSION,
        gpumux_version=gpumux.__version__,
        role=role,
        pid=os.getpid(),
        torch_version=_torch_version(),
        inline=inline,
    )
    return with_token(greeting)


def _torch_version() -> str:
    """torch's version, without an import, which takes seconds; `gpumux status` needs no torch."""
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
            continue  # a message from before the break still counts, and may have come after the last look
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


# ---- Sending and receiving in the threads that wait, without a thread of its own.
#
# An I/O thread would add two thread switches to a step's round trip. Instead any thread sends and receives under one
# lock, and one of the waiting threads is the *leader*: it alone sleeps on the sockets' descriptors, outside
# the lock, so that others can still send. It delivers what it receives; the other threads
# sleep on a condition until then, and one of them takes over when the leader has what it waited for.
#
# A local session's steps, their answers and descriptors go by its channel (wire/channel.py), which is
# looked at first: what the daemon put there before a ZeroMQ message is handed over before it.
#
# ZeroMQ's descriptor signals changes, not levels: after any call on the socket its events must be
# read before a thread sleeps on it. `_drain` does that. `_stale` says that it is still to be done:
# a sender leaves it to the next thread that sleeps, and does it itself only while a leader sleeps already.
# Reading the events costs as much as a message, so it is done once.
#
# A signal may come anywhere, but takes effect only outside sending and receiving (`Shield`): every
# message is handed over whole and once, and no lock stays held.


T = TypeVar("T")
_FOREVER = 3600.0  # the longest single sleep


class Pump:
    """Moves messages between one connection and the threads of this process. `dispatch` is called
    with each message's frames, under the lock, `answered` with each message of the channel; they may
    `send`, but not `wait`.

    `dead` is the error that ended the connection; `heard` and `sent` are the times of the newest messages.
    """

    def __init__(
        self, connection: Connection, dispatch: Callable[[list[bytes]], None], answered: Callable[[bytes], None]
    ) -> None:
        self.dead: GpumuxError | None = None
        self.heard = self.sent = time.monotonic()
        self._connection = connection
        self._dispatch = dispatch
        self._answered = answered
        self._closed = False
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._leader: int | None = None  # thread that sleeps on the sockets
        self._sleepers = 0  # threads that wait on the condition
        self._draining = False
        self._stale = True

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """Send a message. Raises the error of a dead connection."""
        with self._lock:
            self.raise_if_dead()
            self._stale = True
            self._connection.send(parts)
            self.sent = time.monotonic()
            if self._leader is not None:
                self._drain()

    def send_step(self, message: bytes | memoryview) -> None:
        """Send by the channel. Raises the error of a dead connection."""
        with self._lock:
            if self.dead is not None:
                self.raise_if_dead()
            if self._connection.send_step(message):
                self.sent = time.monotonic()
                return
            # The daemon has closed the channel and the session. The message with the reason is under way, or here
            # already; otherwise the daemon answers the next message with a Refusal.
            self._drain()
            self.send(encode(Heartbeat(time.monotonic())))

    def drain(self) -> None:
        """Dispatch messages that have arrived, without waiting, and notice a broken connection."""
        with self._lock:
            if not self._closed:
                self._drain()
                self._check_connection()

    def wait(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Receive until `predicate()` is true. Returns False if `timeout` seconds pass first.

        The predicate is called under the lock, after messages were dispatched. Raises the error of a connection that
        dies before the predicate holds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        me = threading.get_ident()
        if self._leader == me:
            return self._wait_amid_poll(predicate)
        happened = 0
        try:
            while True:
                with self._lock:
                    left = _FOREVER if deadline is None else deadline - time.monotonic()
                    if self._look(predicate, happened, left):
                        return True
                    if left <= 0:
                        return False
                    if self._leader is not None:
                        happened = 0
                        self._sleep(left)
                        continue
                    self._leader = me
                happened = self._connection.poll(left)
                self._leader = None
        finally:
            if self._sleepers or self._leader == me:
                self._step_down(me)

    def _wait_amid_poll(self, predicate: Callable[[], bool]) -> bool:
        """`wait` in a signal handler that runs while this thread sleeps on the sockets. Raises GpumuxError if it would
        have to sleep there a second time."""
        with self._lock:
            if predicate():
                return True
        raise GpumuxError(
            "a signal handler can't wait for the daemon while the program waits for it: let it set a flag, and act on"
            " that in the loop",
            "set a flag in the handler, and act on it in the loop",
        )

    def _look(self, predicate: Callable[[], bool], happened: int, left: float) -> bool:
        """Receive waiting messages until the predicate holds. Returns whether it does."""
        if self._draining:
            raise GpumuxError("a handler can't wait for the daemon", "wait in the thread that asked")
        if predicate():
            return True
        if self._closed:
            pass
        elif happened == CHANNEL and not self._stale:
            if self._take_steps(predicate):
                return True
        elif happened or self._stale or left <= 0:
            self._drain(predicate, expected=bool(happened & MESSAGE))
            if happened & BROKEN:
                self._check_connection()
            if predicate():
                return True
        if self.dead is not None:
            self.raise_if_dead()
        return False

    def _sleep(self, timeout: float) -> None:
        self._sleepers += 1
        try:
            self._changed.wait(timeout)
        finally:
            self._sleepers -= 1

    def _step_down(self, me: int) -> None:
        """Leave `wait`, in success or error: another thread must watch the sockets now."""
        if self._leader == me:
            self._leader = None
        if self._sleepers:
            with self._lock:
                self._changed.notify_all()

    def _drain(self, predicate: Callable[[], bool] | None = None, expected: bool = False) -> None:
        """Dispatch all messages that have arrived, or until `predicate` is true. Needs the lock."""
        if self._draining:
            return  # a handler posts: the drain below it goes on afterwards
        self._stale = True
        if self._take_steps(predicate):
            return
        while expected or self._connection.readable():
            if self._take_one(predicate):
                return
            expected = False
        self._stale = False

    def _take_steps(self, predicate: Callable[[], bool] | None) -> bool:
        """Dispatch the channel's messages until `predicate` holds. Returns whether it does."""
        if self._draining:
            return False
        while self._take_step():
            if predicate is not None and predicate():
                return True
        return False

    def _take_step(self) -> bool:
        """Dispatch one message of the channel. Returns whether there was one."""
        with Shield():
            try:
                message = self._connection.receive_step()
            except ProtocolError as error:
                self.die(error)
                return False
            if message is None:
                return False
            self._hand_over(self._answered, message)
        return True

    def _take_one(self, predicate: Callable[[], bool] | None) -> bool:
        """Dispatch one message. Returns whether `predicate` holds now."""
        with Shield():
            parts = self._connection.receive()
            if parts is None:
                return False
            while self._take_step():
                pass  # written before this message, so dispatched before it
            self._hand_over(self._dispatch, parts)
        return predicate is not None and predicate()

    def _hand_over(self, to: Callable[[T], None], what: T) -> None:
        self.heard = time.monotonic()
        self._draining = True
        try:
            to(what)
        finally:
            self._draining = False
            if self._sleepers or self._leader is not None:
                self._wake_others()

    def _wake_others(self) -> None:
        if self._sleepers:
            self._changed.notify_all()
        if self._leader not in (None, threading.get_ident()):
            self._connection.wake()

    def _check_connection(self) -> None:
        if self.dead is None and (error := self._connection.lost()) is not None:
            self._drain()  # messages from before the break still count
            self.die(error)

    def die(self, error: GpumuxError) -> None:
        """Make every call and wait raise from now on. The first reason stays."""
        with self._lock:
            if self.dead is None:
                self.dead = error
                self._connection.working = False
            self._wake_others()

    def raise_if_dead(self) -> None:
        if self.dead is not None:
            raise from_code(self.dead.code, self.dead.message, self.dead.remedy)

    def end(self) -> bool:
        """Send Goodbye and make every wait raise, then wait until no thread sleeps on the socket. Returns False if it
        was called before."""
        with self._lock:
            if self._closed:
                return False
            if self.dead is None:
                self._connection.say_goodbye()
            self._closed = True
            self.die(DaemonGone("this session is closed", "open another"))
            while self._leader not in (None, threading.get_ident()):
                self._sleep(1.0)
        return True


# ---- The endpoint of a client's daemon, by the rule that the daemon uses, too (wire/endpoint.py).


__all__ = ["resolve_endpoint"]


def resolve_endpoint(endpoint: str | None = None) -> Endpoint:
    """The explicit endpoint, else GPUMUX_ENDPOINT, else this machine's daemon of GPU 0.

    Raises ConfigError for a malformed endpoint, or a default below /tmp that another user made.
    """
    found = resolve(endpoint)
    if found.path is not None:
        check_private(found.path.parent)
    return found
