"""A client's session with a daemon: requests, posts, waits, heartbeats.

There is no thread between a caller and the socket: a step's round trip would pay for two hops.
Instead any thread sends and receives under one lock, and one of those that wait is the *leader*:
it alone sleeps on the socket's descriptor, outside the lock, so that others can still send. What
it receives it hands to whoever it is for; the others sleep on a condition until then, and one of
them takes over when the leader has what it waited for.

ZeroMQ's descriptor signals changes, not levels: after any call on the socket its events must be
looked at before somebody sleeps on it. `_drain` does that. `_stale` says that it is still to be done:
a sender leaves it to whoever sleeps next, and does it itself only while a leader sleeps already.
Asking costs as much as a message, so nobody asks twice.

A background thread sends heartbeats, drains while nobody waits, and notices a silent daemon.

Ctrl-C may come anywhere, but takes effect only outside sending and receiving (interrupts.py): every
message is handed over whole and once, and no lock stays held.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

from gpumux.client.connection import START_IT, Connection, handshake, hello
from gpumux.client.endpoint import resolve_endpoint
from gpumux.client.interrupts import Shield
from gpumux.client.mailbox import Handler, Mailbox
from gpumux.errors import ConfigError, DaemonGone, GpumuxError, ProtocolError, from_code
from gpumux.wire.codec import decode, encode
from gpumux.wire.curve import ClientCurve, client_curve
from gpumux.wire.dataplane import CopyMeter, Segment
from gpumux.wire.descriptors import DescriptorInbox
from gpumux.wire.messages import Goodbye, Heartbeat, Leaving, Message, Refusal, Welcome

Payload = Sequence[bytes | memoryview]

_FOREVER = 3600.0  # one sleep; nobody sleeps longer without looking


class Session:
    """Made by `connect`. All methods may be called from any thread of the process that connected.

    After the daemon left, fell silent or refused the session, every call and wait raises the error
    that `dead` holds.
    """

    def __init__(self, connection: Connection, welcome: Welcome, inbox: DescriptorInbox | None) -> None:
        self.welcome = welcome
        self.copies = CopyMeter()
        self._connection = connection
        self._inbox = inbox
        self._dead: GpumuxError | None = None
        self._closed = False
        self._forked = False
        self._owner = os.getpid()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._leader: int | None = None  # thread that sleeps on the socket
        self._sleepers = 0  # threads that wait on the condition
        self._draining = False
        self._stale = True
        self._mailbox = Mailbox()
        self._segments: dict[int, Segment] = {}
        self._heard = self._sent = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=_beat_until_stopped,
            args=(weakref.ref(self), self._stop, welcome.heartbeat_s),
            name="gpumux-session",
            daemon=True,
        )
        _live.add(self)
        self._thread.start()

    @classmethod
    def connect(
        cls,
        endpoint: str | None = None,
        timeout: float = 10.0,
        *,
        role: str = "client",
        curve: ClientCurve | None = None,
    ) -> Session:
        """Open a session, waiting `timeout` seconds at most for a daemon to answer.

        `role` is "client", or "control" for tools that move no tensors. `curve` are the keys for a
        tcp endpoint; without them the environment must name them (wire/curve.py). Raises
        DaemonGone, ConfigError, VersionMismatch, or what the daemon refuses with.
        """
        found = resolve_endpoint(endpoint)
        if not found.is_ipc and curve is None:
            curve = client_curve()
        connection = Connection(found, None if found.is_ipc else curve)
        inbox: DescriptorInbox | None = None
        try:
            welcome = handshake(connection, hello(role, inline=not found.is_ipc), timeout)
            if welcome.side_channel and role == "client":
                inbox = DescriptorInbox(welcome.side_channel, welcome.nonce, timeout)
            return cls(connection, welcome, inbox)
        except BaseException:
            if inbox is not None:
                inbox.close()
            connection.close()
            raise

    @property
    def dead(self) -> GpumuxError | None:
        """Why the session is over, None while it lives."""
        return self._dead

    @property
    def inline(self) -> bool:
        """Whether tensors must travel as payload frames (tcp)."""
        return not self.welcome.side_channel

    # ---- sending ---------------------------------------------------------------------------------

    def call(self, msg: Message, frames: Payload = (), timeout: float | None = 60.0) -> tuple[Any, list[bytes]]:
        """Send a request (its `ref` is filled in here) and wait for the answer.

        Raises the error a Refusal stands for, and DaemonGone when no answer comes in `timeout`
        seconds (None: as long as the daemon lives).
        """
        ref, answer = self._mailbox.expect()
        try:
            self._send(_with_ref(msg, ref), frames)
            if not self.wait(lambda: bool(answer), timeout):
                raise DaemonGone(
                    f"the daemon lives but did not answer {type(msg).__name__} in {timeout} s", "look at gpumux status"
                )
        finally:
            self._mailbox.forget(ref)
        reply, reply_frames = answer[0]
        if isinstance(reply, Refusal):
            raise from_code(reply.code, reply.message, reply.remedy)
        return reply, reply_frames

    def post(self, msg: Message, frames: Payload = ()) -> None:
        """Send without waiting. If `msg` is a request, a Refusal of it goes to its job's handler."""
        if hasattr(msg, "ref"):
            msg = _with_ref(msg, self._mailbox.posted(getattr(msg, "job", "")))
        self._send(msg, frames)

    def _send(self, msg: Message, frames: Payload) -> None:
        parts = encode(msg, frames)
        if frames:
            self._check_sizes(msg, frames)
        self._check_process()
        with self._lock:
            self._raise_if_dead()
            self._stale = True
            self._connection.send(parts)
            self._sent = time.monotonic()
            if self._leader is not None:
                self._drain()

    def _check_sizes(self, msg: Message, frames: Payload) -> None:
        most = self.welcome.max_message_bytes
        largest = max(memoryview(frame).nbytes for frame in frames)
        if largest > most:
            raise ProtocolError(
                f"{type(msg).__name__} has a payload of {largest} bytes, the daemon takes {most} at most",
                "raise the daemon's max_message_bytes, or use its ipc endpoint",
            )

    # ---- receiving -------------------------------------------------------------------------------

    def register(self, job_id: str, handler: Handler) -> None:
        """`handler(message, frames)` is called for every message with this job and no ref, by
        whichever thread receives it, under the session's lock: it must be quick, must
        not raise and must not wait. It may post."""
        self._mailbox.register(job_id, handler)

    def unregister(self, job_id: str) -> None:
        """Messages for the job are dropped from now on. Idempotent."""
        self._mailbox.unregister(job_id)

    def pump(self) -> None:
        """Hand over what has arrived, without waiting. Raises the error of a dead session."""
        self._check_process()
        with self._lock:
            if not self._closed:
                self._drain()
            self._raise_if_dead()

    def wait(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Receive until `predicate()` is true; False when `timeout` seconds pass first.

        The predicate is called under the session's lock after messages were handed over. Raises
        the session's error when it dies before the predicate holds.
        """
        self._check_process()
        deadline = None if timeout is None else time.monotonic() + timeout
        me = threading.get_ident()
        woken = broken = False
        try:
            while True:
                with self._lock:
                    left = _FOREVER if deadline is None else deadline - time.monotonic()
                    if self._look(predicate, woken, broken, left):
                        return True
                    if left <= 0:
                        return False
                    if self._leader is not None:
                        woken = broken = False
                        self._sleep(left)
                        continue
                    self._leader = me
                woken, broken = self._connection.poll(left)
                self._leader = None
        finally:
            self._step_down(me)

    def _look(self, predicate: Callable[[], bool], woken: bool, broken: bool, left: float) -> bool:
        """Receive what there is until the predicate holds, and say whether it does."""
        if self._draining:
            raise GpumuxError("a handler can't wait for the daemon", "wait in the thread that asked")
        if predicate():
            return True
        if not self._closed and (woken or self._stale or left <= 0):
            self._drain(predicate, expected=woken)
            if broken and self._dead is None:
                self._check_connection()
            if predicate():
                return True
        self._raise_if_dead()
        return False

    def _sleep(self, timeout: float) -> None:
        self._sleepers += 1
        try:
            self._changed.wait(timeout)
        finally:
            self._sleepers -= 1

    def _step_down(self, me: int) -> None:
        """Leave `wait`, however it ends: somebody else must watch the socket now."""
        if self._leader == me:
            self._leader = None
        if self._sleepers:
            with self._lock:
                self._changed.notify_all()

    def _drain(self, predicate: Callable[[], bool] | None = None, expected: bool = False) -> None:
        """Hand over all that has arrived, or as much as makes `predicate` true. Needs the lock."""
        if self._draining:
            return  # a handler posts: the drain below it goes on afterwards
        self._stale = True
        while expected or self._connection.readable():
            if self._take_one(predicate):
                return
            expected = False
        self._stale = False

    def _take_one(self, predicate: Callable[[], bool] | None) -> bool:
        """Hand over one message; whether `predicate` holds now."""
        with Shield():
            parts = self._connection.receive()
            if parts is None:
                return False
            self._heard = time.monotonic()
            self._draining = True
            try:
                self._dispatch(parts)
            finally:
                self._draining = False
                self._tell_others()
        return predicate is not None and predicate()

    def _dispatch(self, parts: list[bytes]) -> None:
        try:
            message, frames = decode(parts)
        except ProtocolError as error:
            self._die(error)
            return
        ref: int = getattr(message, "ref", 0)
        if isinstance(message, Refusal) and not ref:
            self._die(from_code(message.code, message.message, message.remedy))
        elif isinstance(message, Leaving):
            self._die(DaemonGone(f"the daemon left: {message.reason}", START_IT))
        elif not isinstance(message, Heartbeat):
            self._mailbox.deliver(ref, message, frames)

    def _tell_others(self) -> None:
        if self._sleepers:
            self._changed.notify_all()
        if self._leader not in (None, threading.get_ident()):
            self._connection.wake()

    # ---- life and death --------------------------------------------------------------------------

    def segment(self, segment_id: int, nbytes: int, timeout: float = 10.0) -> memoryview:
        """The shared memory the daemon announced under this id, writable, once it has arrived on
        the side channel. Mapped until `release_segment` or `close`."""
        self._check_process()
        self._raise_if_dead()
        if self._inbox is None:
            raise ConfigError("this session takes no shared memory (tcp, or a control session)", "send payload frames")
        segment = self._inbox.take(segment_id, nbytes, timeout)
        self._segments[segment_id] = segment
        return segment.view()

    def release_segment(self, segment_id: int) -> None:
        """Unmap a segment, once the last view onto it is gone. Idempotent."""
        segment = self._segments.pop(segment_id, None)
        if segment is not None:
            segment.close()

    def close(self) -> None:
        """Say goodbye (the daemon closes this session's jobs), end the thread, close sockets,
        descriptors and maps. Waits that are under way raise. Idempotent."""
        if self._forked:
            return  # the sockets are the parent's
        with self._lock:
            if self._closed:
                return
            alive = self._dead is None
            if alive:
                self._say_goodbye()
            self._closed = True
            self._die(DaemonGone("this session is closed", "open another"))
            while self._leader not in (None, threading.get_ident()):
                self._sleep(1.0)
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
        _live.discard(self)
        if self._inbox is not None:
            self._inbox.close()
        for segment_id in list(self._segments):
            self.release_segment(segment_id)
        with self._lock:
            self._connection.close(linger=alive)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _say_goodbye(self) -> None:
        try:
            self._connection.send(encode(Goodbye()))
        except DaemonGone:
            pass  # it does not read; it will notice by itself

    def _die(self, error: GpumuxError) -> None:
        if self._dead is None:
            self._dead = error
        self._tell_others()

    def _raise_if_dead(self) -> None:
        if self._dead is not None:
            raise from_code(self._dead.code, self._dead.message, self._dead.remedy)

    def _check_process(self) -> None:
        if self._forked:
            raise GpumuxError(
                f"this session belongs to process {self._owner}, and this is a fork of it",
                "connect in the child itself, or use the job only in the process that submitted it",
            )

    def _check_connection(self) -> None:
        error = self._connection.lost()
        if error is not None:
            self._drain()  # what came before the break still counts
            self._die(error)

    def _beat(self) -> bool:
        """One turn of the background thread. False when there is nothing left to do."""
        with self._lock:
            if self._dead is not None or self._forked:
                return False
            self._drain()
            self._check_connection()
            now = time.monotonic()
            if now - self._heard > self.welcome.lease_s:
                self._die(DaemonGone(f"the daemon has been silent for {self.welcome.lease_s:g} s", START_IT))
            elif self._dead is None and now - self._sent >= self.welcome.heartbeat_s / 2:
                self._connection.send(encode(Heartbeat(now)))
                self._sent = now
            return self._dead is None

    def _leave_to_parent(self) -> None:
        self._forked = True
        if self._inbox is not None:
            self._inbox.close_in_child()


def _with_ref(msg: Any, ref: int) -> Any:
    return replace(msg, ref=ref)


def _beat_until_stopped(ref: weakref.ref[Session], stop: threading.Event, interval: float) -> None:
    while not stop.wait(interval):
        session = ref()
        if session is None or not session._beat():
            return
        del session  # a session nobody else holds may go


_live: weakref.WeakSet[Session] = weakref.WeakSet()


def _after_fork() -> None:
    for session in list(_live):
        session._leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)
