"""A client's session with a daemon: requests, posts, waits, shared memory, heartbeats.

Callers' own threads send and receive (transport.py). A background thread (`Keeper`) sends heartbeats, drains
while nobody waits, notices a daemon that fell silent, and closes a session that was dropped unclosed.
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import threading
import time
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Final, TypeVar

from gpumux.client.transport import START_IT, Connection, Pump, handshake, hello, resolve_endpoint
from gpumux.client.turns import Turns, is_high
from gpumux.errors import ConfigError, DaemonGone, GpumuxError, ProtocolError, SimulatedDeviceWarning, from_code
from gpumux.wire import messages as m
from gpumux.wire.codec import decode, decode_step_done, encode, encode_alone
from gpumux.wire.endpoint import check_listening
from gpumux.wire.lane import FROM_DAEMON
from gpumux.wire.messages import Heartbeat, Leaving, Message, Refusal, Step, Welcome
from gpumux.wire.peers import ClientCurve, client_curve
from gpumux.wire.shared_memory import CopyMeter, DescriptorInbox, Segment

# ---- A session's background thread: it keeps the session alive, and closes what one leaves that nobody closed.
#
# The collector finds a dropped session at any moment, in any thread, under any lock. Closing a ZeroMQ
# context there could wait for ever, so the collector only leaves word, and the thread does the work.


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Belongings:
    """What must be closed when a session is gone; none of it refers to the session."""

    connection: Connection
    inbox: DescriptorInbox | None
    segments: dict[int, Segment]

    def close(self) -> None:
        """Say goodbye, then close everything. Only for a session that no thread uses any more."""
        if self.connection.working:
            self.connection.say_goodbye()
        if self.inbox is not None:
            self.inbox.close()
        for segment in self.segments.values():
            segment.close()
        self.connection.close(linger=self.connection.working)


class Keeper:
    """Calls `beat(session)` every `interval` seconds until it returns false. It holds the session
    weakly: one that goes without `end` is closed."""

    def __init__(self, session: T, beat: Callable[[T], bool], interval: float, belongings: Belongings) -> None:
        # What the thread does when it ends. SimpleQueue, because the collector may interrupt a `put` or
        # `get` of the same thread: an Event's lock would then be waited for by its own holder.
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_keep, args=(weakref.ref(session), beat, interval, self._orders), name="gpumux-session", daemon=True
        )
        self._dropped = weakref.finalize(session, _leave_word, self._orders, os.getpid(), belongings)
        self._dropped.atexit = False  # the daemon notices a process that ends
        self._thread.start()

    def end(self) -> None:
        """The session is closed by its owner: end the thread, and wait for that unless it is the caller."""
        self._dropped.detach()
        self._orders.put(_nothing)
        if self._thread is not threading.current_thread():
            self._thread.join()


def _keep(
    ref: weakref.ref[T], beat: Callable[[T], bool], interval: float, orders: queue.SimpleQueue[Callable[[], None]]
) -> None:
    pause: float | None = interval
    while True:
        try:
            last = orders.get(timeout=pause)
        except queue.Empty:
            session = ref()
            if session is not None and not beat(session):
                pause = None  # nothing to do until it is closed or dropped
            del session
        else:
            last()
            return


def _nothing() -> None:
    return None


def _leave_word(orders: queue.SimpleQueue[Callable[[], None]], owner: int, belongings: Belongings) -> None:
    if os.getpid() == owner:  # a fork has no such thread, and the sockets are its parent's
        orders.put(belongings.close)


# ---- Whom a received message is for: a caller that waits for its ref, or the handler of its job.


Handler = Callable[[Any, list[bytes]], None]
Answer = tuple[Any, list[bytes]]

_POSTED = 1024  # requests sent without waiting whose refusal can still be traced to their job


class Mailbox:
    """Numbers requests and sorts what comes back. Guarded by the session's lock, except that
    registering and expecting are single dictionary operations and need none."""

    def __init__(self) -> None:
        self._refs = itertools.count(1)
        self._answers: dict[int, list[Answer]] = {}
        self._posted: OrderedDict[int, str] = OrderedDict()  # ref to job
        self._handlers: dict[str, Handler] = {}

    def expect(self) -> tuple[int, list[Answer]]:
        """A new ref, and the list its answer will be put into."""
        ref = next(self._refs)
        answer: list[Answer] = []
        self._answers[ref] = answer
        return ref, answer

    def forget(self, ref: int) -> None:
        """Nobody waits for `ref` any more; a late answer is dropped."""
        self._answers.pop(ref, None)

    def posted(self, job: str) -> int:
        """A ref for a request nobody waits for. Its Refusal goes to the handler of `job`."""
        ref = next(self._refs)
        self._posted[ref] = job
        if len(self._posted) > _POSTED:
            self._posted.popitem(last=False)
        return ref

    def register(self, job: str, handler: Handler) -> None:
        self._handlers[job] = handler

    def unregister(self, job: str) -> None:
        self._handlers.pop(job, None)

    def deliver(self, ref: int, message: Any, frames: list[bytes]) -> None:
        """Sort in one message; `ref` 0 when it answers no request. One nobody wants is dropped."""
        if not ref:
            self.deliver_to(getattr(message, "job", ""), message, frames)
            return
        answer = self._answers.get(ref)
        if answer is not None:
            answer.append((message, frames))
            return
        job = self._posted.pop(ref, None)
        if job is not None and isinstance(message, Refusal):
            self.deliver_to(job, message, frames)

    def deliver_to(self, job: str, message: Any, frames: list[bytes]) -> None:
        """Hand a message to its job's handler, if it has one still."""
        handler = self._handlers.get(job)
        if handler is not None:
            handler(message, frames)


# ----


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
        tcp endpoint; without them the environment must name them (wire/peers.py). Raises
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
        seconds (None: as long as the daemon lives). Without one, `meanwhile` says each time for how many seconds to
        wait until it is called again.
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


# ---- Waits for a job's work that neither hinder it nor stay silent while nothing can happen.
#
# A wait that lasts tells the daemon what it waits for, where the same thread steps other jobs (turns.py). One that
# lasts long, or many that do together, ask the daemon why, and log it if there is something to be done about it.


log = logging.getLogger("gpumux.client")
PATIENCE_S = 5.0  # how long a wait lasts before it asks why, and long ones together
LONG_S = 0.05  # a wait that counts among those
MOSTLY: Final = 0.5  # of the time waited: a job that was held for other jobs' next steps for so much of it is told so
# How long a wait lasts before the daemon is told that other jobs get no step meanwhile, by whether it is for a high
# job: its steps are held for none, unless an operator made it a low one.
SAY_AFTER_S: Final = {False: 2e-3, True: 50e-3}
AT_ONCE: Final = 64  # waits for a low job after one that had to be told of: these are told of before they last
LOADING_S = 15.0  # ordinary Programs take a second or two
AGAIN_S = 60.0


class Waits:
    """Waits for one job's steps and transfers. `high`: it was submitted as a high job."""

    def __init__(self, job: str, high: bool) -> None:
        self.turns = Turns(job, high)
        self._job = job
        self._high = high
        self._at_once = 0  # waits left that are told of before they last
        self._long_s = 0.0  # of long waits since the daemon was asked why,
        self._enough_s = PATIENCE_S  # and how many make it ask again
        self._held_s = 0.0  # for which the job had been held for other jobs' next steps, when it was asked
        self._told: set[str] = set()  # jobs for which it was held that were named

    def wait(
        self, session: Session, predicate: Callable[[], bool], timeout: float | None, step: int | None = None
    ) -> bool:
        """`session.wait` for what is there once `step` is answered (default: the newest step)."""
        until: float | None = None
        if timeout is not None:
            if timeout <= 0.0:
                return session.wait(predicate, timeout)
            until = time.monotonic() + timeout
        if session.holds_low_work and self.turns.others():
            return self._in_turn(session, predicate, until, self.turns.newest if step is None else step)
        return self._patiently(session, predicate, until, step)

    def _in_turn(self, session: Session, predicate: Callable[[], bool], until: float | None, step: int) -> bool:
        """The thread steps other jobs, too. Tell the daemon so, unless the answer is there soon."""
        first = SAY_AFTER_S[self._high]
        if self._at_once:
            first, self._at_once = 0.0, self._at_once - 1
        if session.wait(predicate, _at_most(first, until)):
            return True
        if until is not None and until <= time.monotonic():
            return False
        others = self.turns.names()
        session.post(m.StepAwaited(0, self._job, step, others, False))
        answered = False
        try:
            answered = self._patiently(session, predicate, until, step)
        finally:
            if not answered:  # the others may get a step before it is
                with suppress(GpumuxError):
                    session.post(m.StepAwaited(0, self._job, step, others, True))
            elif first and not self._high:
                self._at_once = AT_ONCE
        return answered

    def _patiently(
        self, session: Session, predicate: Callable[[], bool], until: float | None, step: int | None
    ) -> bool:
        if session.wait(predicate, LONG_S if until is None else _at_most(LONG_S, until)):
            return True
        began = time.monotonic() - LONG_S
        step = self.turns.newest if step is None else step
        try:
            if self._long_s >= self._enough_s:
                self._ask(session, step, 0.0)
            if session.wait(predicate, _at_most(PATIENCE_S - LONG_S, until)):
                return True
            if until is not None and until <= time.monotonic():
                return False
            self._ask(session, step, PATIENCE_S)
            return session.wait(predicate, None if until is None else max(0.0, until - time.monotonic()))
        finally:
            self._long_s += time.monotonic() - began

    def _ask(self, session: Session, step: int, lasted: float) -> None:
        """Why the step waits; `lasted`: the wait's seconds so far, where it is long by itself."""
        waited, self._long_s = self._long_s + lasted, -lasted
        self._enough_s *= 2.0
        try:
            body = session.call(m.JobStats(0, self._job), timeout=PATIENCE_S)[0].body
        except GpumuxError:
            return  # it ended, or the daemon did: the wait will say so
        if body["paused"]:
            log.warning(
                "job %r is paused, and a thread has waited for it for %.3g s: job.resume() in another thread, or "
                "`gpumux jobs resume`, lets it go on",
                body["name"], lasted or waited,
            )  # fmt: skip
            return
        promise: dict[str, Any] = body["promise"] or {}
        seconds: dict[str, float] = promise.get("held_s", {})
        before, self._held_s = self._held_s, seconds.get("gap", 0.0) + seconds.get("calibration", 0.0)
        held, by = self._held_s - before, promise.get("held_by_name") or promise.get("held_by", "")
        if is_high(promise.get("held_by_job", "")):
            return  # the daemon is told of it from the next wait on
        if by and by not in self._told and held >= MOSTLY * waited:
            self._told.add(by)
            log.warning(
                "step %d of job %r waits for job %r: while %.1f s were waited, the job's steps were held for %.1f s "
                "for the sake of that one's next step, which did not come. If it comes only after this one, step both "
                "jobs in one thread, which the daemon then knows, or give both one priority;"
                " `gpumux jobs explain` says more",
                step, body["name"], by, waited, held,
            )  # fmt: skip


def _at_most(seconds: float, until: float | None) -> float:
    return seconds if until is None else max(0.0, min(seconds, until - time.monotonic()))


class Loading:
    """Says now and then that the daemon is still at a Program. Called whenever there was no answer so far; returns
    for how many seconds to wait until then."""

    def __init__(self, operators: int, compiled: bool, clock: Callable[[], float] = time.monotonic) -> None:
        doing = "checking, compiling and loading" if compiled else "checking and loading"
        self._what = f"{doing} a program of {operators} operator{'' if operators == 1 else 's'}"
        self._clock = clock
        self._since: float | None = None

    def __call__(self) -> float:
        if self._since is None:
            self._since = self._clock()
            return LOADING_S
        log.warning(
            "the daemon has been %s for %.0f s; `gpumux status` says how it is", self._what, self._clock() - self._since
        )
        return AGAIN_S


# ---- Something that is begun again where the daemon is killed before it is done.


TRIES = 5  # so that what kills every daemon is not tried for ever
CONNECT_S = 10.0  # one attempt
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0


def through(attempt: Callable[[Session], T], endpoint: str | None, reconnect_s: float) -> T:
    """What `attempt` makes on a session. When the daemon goes amid one, another follows as soon as there is one again;
    `reconnect_s` seconds are waited for it at most (0: there is no second attempt). `attempt` must leave nothing behind
    when it fails.

    Raises DaemonGone where there is no daemon to begin with, and whatever `attempt` raises on a session that lives."""
    session = Session.connect(endpoint)
    for left in range(TRIES - 1, -1, -1):
        try:
            return attempt(session)
        except BaseException as error:
            gone = error if isinstance(error, DaemonGone) and session.dead is not None else None
            session.close()
            if gone is None or not left or not reconnect_s:
                raise
        session = _another(endpoint, gone, reconnect_s)
    raise AssertionError("unreachable")


def _another(endpoint: str | None, gone: DaemonGone, reconnect_s: float) -> Session:
    log.warning("%s; waiting for it to come back, to submit again", gone.message)
    started, pause = time.monotonic(), FIRST_PAUSE_S
    while True:
        try:
            session = Session.connect(endpoint, CONNECT_S)
        except DaemonGone as error:
            if time.monotonic() - started > reconnect_s:
                raise DaemonGone(
                    f"{gone.message}, and could not be had back within {reconnect_s:g} s: {error.message}", error.remedy
                ) from gone
        else:
            log.warning("the daemon is back after %.1f s", time.monotonic() - started)
            return session
        time.sleep(pause)
        pause = min(pause * 1.5, LONGEST_PAUSE_S)


# ---- Where the steps of a daemon's jobs are traced, and where they run.


def devices_of(session: Session, stacklevel: int = 3) -> tuple[str, str]:
    """The device type on which a job's steps are traced, and the one that they run on. Warns of a daemon that computes
    nothing, so many calls further up."""
    device = session.welcome.device
    if device["kind"] == "cuda":
        return "cpu", "cuda"  # the daemon runs on its GPU what was traced on the CPU; this process needs none
    if device["kind"] != "sim":
        return str(device["kind"]), str(device["kind"])
    warnings.warn(
        f"the daemon only SIMULATES its device ({device['name']}): steps take time, every result is "
        "zero and nothing is trained. For real results submit to a daemon on a real device (gpumux serve --device cpu)",
        SimulatedDeviceWarning,
        stacklevel=stacklevel,
    )
    return "cpu", "cpu"
