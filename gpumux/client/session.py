"""A client's session with a daemon: requests, posts, waits, shared memory, heartbeats.

Callers' own threads send and receive (pump.py). A background thread (keeper.py) sends heartbeats, drains
while nobody waits, notices a daemon that fell silent, and closes a session that was dropped unclosed.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from gpumux.client.connection import START_IT, Connection, handshake, hello
from gpumux.client.endpoint import resolve_endpoint
from gpumux.client.keeper import Belongings, Keeper
from gpumux.client.mailbox import Answer, Handler, Mailbox
from gpumux.client.pump import Pump
from gpumux.errors import ConfigError, DaemonGone, GpumuxError, ProtocolError, from_code
from gpumux.wire.codec import decode, decode_step_done, encode, encode_alone
from gpumux.wire.curve import ClientCurve, client_curve
from gpumux.wire.dataplane import CopyMeter, Segment
from gpumux.wire.descriptors import DescriptorInbox
from gpumux.wire.lane import FROM_DAEMON
from gpumux.wire.messages import Heartbeat, Leaving, Message, Refusal, Step, Welcome
from gpumux.wire.probe import check_listening

Payload = Sequence[bytes | memoryview]
_NO_FRAMES: list[bytes] = []


@dataclass(frozen=True, slots=True)
class Asked:
    """A request under way. `forget` it when its answer is read or not wanted any more."""

    _answer: list[Answer]
    forget: Callable[[], None]

    def reply(self) -> Any | None:
        """The answer, or a Refusal; None while there is none."""
        return self._answer[0][0] if self._answer else None


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
        self.holds_low_work = bool(welcome.device.get("holds_low_work"))  # for high work: it wants to know of waits
        self.forked = False
        self._owner = os.getpid()
        self._mailbox = Mailbox()
        self._pump = Pump(connection, self._dispatch, self._answered)
        self._segments: dict[int, Segment] = {}
        _live.add(self)
        self._keeper = Keeper(self, Session._beat, welcome.heartbeat_s, Belongings(connection, inbox, self._segments))

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
        check_listening(found, START_IT)
        if not found.is_ipc and curve is None:
            curve = client_curve()
        connection = Connection(found, None if found.is_ipc else curve)
        inbox: DescriptorInbox | None = None
        try:
            welcome = handshake(connection, hello(role, inline=not found.is_ipc), timeout)
            if welcome.side_channel and role == "client":
                inbox = DescriptorInbox(welcome.side_channel, welcome.nonce, timeout)
                connection.use_lane(inbox.take_lane(timeout))
            return cls(connection, welcome, inbox)
        except BaseException:
            if inbox is not None:
                inbox.close()
            connection.close()
            raise

    @property
    def dead(self) -> GpumuxError | None:
        """Why the session is over, None while it lives."""
        return self._pump.dead

    @property
    def endpoint(self) -> str:
        """Where the daemon was reached."""
        return self._connection.endpoint.text

    @property
    def inline(self) -> bool:
        """Whether tensors must travel as payload frames (tcp)."""
        return not self.welcome.side_channel

    # ---- sending ---------------------------------------------------------------------------------

    def call(
        self, msg: Message, frames: Payload = (), timeout: float | None = 60.0, meanwhile: Callable[[], float] | None = None
    ) -> tuple[Any, list[bytes]]:  # fmt: skip
        """Send a request (its `ref` is filled in here) and wait for the answer.

        Raises the error a Refusal stands for, and DaemonGone when no answer comes in `timeout`
        seconds (None: as long as the daemon lives). Without one, `meanwhile` says each time for how many seconds to wait until
        it is called again.
        """
        ref, answer = self._mailbox.expect()
        try:
            self._send(_with_ref(msg, ref), frames)
            while meanwhile is not None and not self.wait(lambda: bool(answer), meanwhile()):
                pass
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

    def ask(self, msg: Message) -> Asked:
        """Send a request without waiting. Its answer is there later, as soon as somebody waits for anything."""
        ref, answer = self._mailbox.expect()
        self._send(_with_ref(msg, ref), ())
        return Asked(answer, lambda: self._mailbox.forget(ref))

    def post(self, msg: Message, frames: Payload = ()) -> None:
        """Send without waiting. If `msg` is a request, a Refusal of it goes to its job's handler."""
        if type(msg) is Step:
            self.post_step(msg, frames)
            return
        if hasattr(msg, "ref"):
            msg = _with_ref(msg, self._mailbox.posted(getattr(msg, "job", "")))
        self._send(msg, frames)

    def post_step(self, step: Step, frames: Payload = ()) -> None:
        """`post` of a step, by the step lane if it has no frames and there is a lane."""
        if frames:
            self._send(step, frames)
            return
        message = encode_alone(step)
        if self.forked:
            self._check_process()
        self._pump.send_step(message)

    def _send(self, msg: Message, frames: Payload) -> None:
        parts = encode(msg, frames)
        if frames:
            self._check_sizes(msg, frames)
        self._check_process()
        self._pump.send(parts)

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
        self._pump.drain()
        self._pump.raise_if_dead()

    def wait(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Receive until `predicate()` is true; False when `timeout` seconds pass first.

        The predicate is called under the session's lock, after messages were handed over: it must
        be quick. Raises the session's error when it dies before the predicate holds.
        """
        if self.forked:
            self._check_process()
        return self._pump.wait(predicate, timeout)

    def _dispatch(self, parts: list[bytes]) -> None:
        try:
            message, frames = decode(parts)
        except ProtocolError as error:
            self._pump.die(error)
            return
        ref: int = getattr(message, "ref", 0)
        if isinstance(message, Refusal) and not ref:
            self._pump.die(from_code(message.code, message.message, message.remedy))
        elif isinstance(message, Leaving):
            self._pump.die(DaemonGone(f"the daemon left: {message.reason}", START_IT))
        elif not isinstance(message, Heartbeat):
            self._mailbox.deliver(ref, message, frames)

    def _answered(self, packet: bytes) -> None:
        """A message of the step lane."""
        try:
            message = decode_step_done(packet)
            if type(message) not in FROM_DAEMON:
                raise ProtocolError(f"the daemon sent a {type(message).__name__} on the step lane")
        except ProtocolError as error:
            self._pump.die(error)
            return
        self._mailbox.deliver_to(message.job, message, _NO_FRAMES)  # type: ignore[union-attr]

    # ---- life and death --------------------------------------------------------------------------

    def segment(self, segment_id: int, nbytes: int, timeout: float = 10.0) -> memoryview:
        """The shared memory the daemon announced under this id, writable, once it has arrived on
        the side channel. Mapped until `release_segment` or `close`."""
        self._check_process()
        self._pump.raise_if_dead()
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
        if self.forked:
            return  # the sockets are the parent's
        alive = self.dead is None
        if not self._pump.end():
            return
        self._keeper.end()
        _live.discard(self)
        if self._inbox is not None:
            self._inbox.close()
        for segment_id in list(self._segments):
            self.release_segment(segment_id)
        self._connection.close(linger=alive)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_process(self) -> None:
        if self.forked:
            raise GpumuxError(
                f"this session belongs to process {self._owner}, and this is a fork of it",
                "connect in the child itself, or use the job only in the process that submitted it",
            )

    def _beat(self) -> bool:
        """One turn of the background thread. False when there is nothing left to do."""
        pump = self._pump
        if pump.dead is not None or self.forked:
            return False
        try:
            pump.drain()
            now = time.monotonic()
            if now - pump.heard > self.welcome.lease_s:
                raise DaemonGone(f"the daemon has been silent for {self.welcome.lease_s:g} s", START_IT)
            if now - pump.sent >= self.welcome.heartbeat_s / 2:
                pump.send(encode(Heartbeat(now)))
        except GpumuxError as error:
            pump.die(error)
        return pump.dead is None

    def _leave_to_parent(self) -> None:
        self.forked = True
        self._connection.close_lane_in_child()
        if self._inbox is not None:
            self._inbox.close_in_child()


def _with_ref(msg: Any, ref: int) -> Any:
    return replace(msg, ref=ref)


_live: weakref.WeakSet[Session] = weakref.WeakSet()


def _after_fork() -> None:
    for session in list(_live):
        session._leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)
