"""A client's session with a daemon: requests, posts, waits, shared memory, heartbeats.

Callers' own threads send and receive (transport.py). A background thread (`SessionThread`) sends heartbeats,
receives while no thread waits, notices a daemon that fell silent, and closes a session that was dropped unclosed.
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
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from gpumux.client.transport import START_IT, Connection, Pump, handshake, hello, resolve_endpoint
from gpumux.errors import ConfigError, DaemonGone, GpumuxError, ProtocolError, SimulatedDeviceWarning, from_code
from gpumux.types import JobSpec
from gpumux.wire import messages as m
from gpumux.wire.channel import FROM_DAEMON, ClientChannel
from gpumux.wire.codec import decode, decode_step_done, encode, encode_alone
from gpumux.wire.endpoint import check_listening
from gpumux.wire.messages import Heartbeat, Leaving, Message, Refusal, Step, Welcome
from gpumux.wire.peers import ClientCurve, client_curve
from gpumux.wire.shared_memory import CopyMeter, Segment

# ---- Background thread of a session: sends heartbeats and closes sessions that were dropped without close().
#
# The garbage collector finds a dropped session at any moment, in any thread, under any lock. Closing a ZeroMQ
# context there could deadlock, so the collector only queues the work for the thread.


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SessionResources:
    """Resources to close after a session was garbage-collected; none of them refers to the session."""

    connection: Connection
    segments: dict[int, Segment]

    def close(self) -> None:
        """Send Goodbye, then close everything. Only for a session that no thread uses any more."""
        if self.connection.working:
            self.connection.say_goodbye()
        for segment in self.segments.values():
            segment.close()
        self.connection.close(linger=self.connection.working)


class SessionThread:
    """Calls `beat(session)` every `interval` seconds until it returns false. It holds a weak reference: if the session
    is garbage-collected before `end`, the thread closes its resources."""

    def __init__(self, session: T, beat: Callable[[T], bool], interval: float, resources: SessionResources) -> None:
        # What the thread does when it ends. SimpleQueue, because the collector may interrupt a `put` or
        # `get` of the same thread: an Event's lock would then be waited for by its own holder.
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_run_thread,
            args=(weakref.ref(session), beat, interval, self._orders),
            name="gpumux-session",
            daemon=True,
        )
        self._dropped = weakref.finalize(session, _close_later, self._orders, os.getpid(), resources)
        self._dropped.atexit = False  # the daemon notices that the process has ended
        self._thread.start()

    def end(self) -> None:
        """The session is closed by its owner: end the thread, and wait for that unless it is the caller."""
        self._dropped.detach()
        self._orders.put(_nothing)
        if self._thread is not threading.current_thread():
            self._thread.join()


def _run_thread(
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


def _close_later(orders: queue.SimpleQueue[Callable[[], None]], owner: int, resources: SessionResources) -> None:
    if os.getpid() == owner:  # a fork has no such thread, and the sockets are its parent's
        orders.put(resources.close)


# ---- Delivery of received messages: to the caller that waits for the ref, or to the handler of the job.


Handler = Callable[[Any, list[bytes]], None]
Answer = tuple[Any, list[bytes]]

_POSTED = 1024  # requests sent without waiting whose refusal can still be traced to their job


class Mailbox:
    """Numbers requests and delivers answers. The session's lock guards it, except that registering and expecting are
    single dictionary operations and need no lock."""

    def __init__(self) -> None:
        self._refs = itertools.count(1)
        self._answers: dict[int, list[Answer]] = {}
        self._posted: OrderedDict[int, str] = OrderedDict()  # ref to job
        self._handlers: dict[str, Handler] = {}

    def expect(self) -> tuple[int, list[Answer]]:
        """Make a new ref, and the list that will hold its answer."""
        ref = next(self._refs)
        answer: list[Answer] = []
        self._answers[ref] = answer
        return ref, answer

    def forget(self, ref: int) -> None:
        """Stop waiting for `ref`; a late answer is dropped."""
        self._answers.pop(ref, None)

    def posted(self, job: str) -> int:
        """Make a ref for a request sent without waiting. Its Refusal goes to the handler of `job`."""
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
        """Deliver one message; `ref` is 0 if it answers no request. An unexpected message is dropped."""
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
        """Pass a message to its job's handler, if the job still has one."""
        handler = self._handlers.get(job)
        if handler is not None:
            handler(message, frames)


# ---- The session.


Payload = Sequence[bytes | memoryview]
_NO_FRAMES: list[bytes] = []


@dataclass(frozen=True, slots=True)
class Asked:
    """A request under way. Call `forget` when its answer was read, or is not needed."""

    _answer: list[Answer]
    forget: Callable[[], None]

    def reply(self) -> Any | None:
        """The answer or Refusal; None while there is none."""
        return self._answer[0][0] if self._answer else None

    def answers(self) -> list[Answer]:
        """The answer with its frames, of each daemon that was asked. Only once `reply` returns one."""
        return list(self._answer)


class Session:
    """Made by `connect`. All methods may be called from any thread of the process that connected.

    After the daemon left, fell silent or refused the session, every call and wait raises the error
    that `dead` holds.
    """

    def __init__(self, connection: Connection, welcome: Welcome) -> None:
        self.welcome = welcome
        self.copies = CopyMeter()
        self._connection = connection
        self._has_channel = connection.channel is not None
        self.holds_low_work = bool(welcome.device.get("holds_low_work"))  # for high work: it wants to know of waits
        self.forked = False
        self._owner = os.getpid()
        self._mailbox = Mailbox()
        self._pump = Pump(connection, self._dispatch, self._answered)
        self._segments: dict[int, Segment] = {}
        _live.add(self)
        self._thread = SessionThread(
            self, Session._beat, welcome.heartbeat_s, SessionResources(connection, self._segments)
        )

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
        try:
            welcome = handshake(connection, hello(role, inline=not found.is_ipc), timeout)
            if role == "client" and welcome.device.get("kind") == "cluster":
                raise ConfigError(
                    f"a coordinator is at {found.text}, not a daemon",
                    f'submit with cluster="{found.text}" in its place',
                )
            if welcome.channel and role == "client":
                connection.use_channel(ClientChannel.open(welcome.channel, welcome.nonce, timeout))
            return cls(connection, welcome)
        except BaseException:
            connection.close()
            raise

    @property
    def dead(self) -> GpumuxError | None:
        """The error that ended the session, None while it is open."""
        return self._pump.dead

    @property
    def endpoint(self) -> str:
        """The daemon's endpoint."""
        return self._connection.endpoint.text

    @property
    def inline(self) -> bool:
        """Whether tensors must travel as payload frames (tcp)."""
        return not self.welcome.channel

    @property
    def device_facts(self) -> str:
        """The properties of the daemon's device that results depend on."""
        device = self.welcome.device
        return f"{device['kind']} {device['name']}, torch {device['torch_version']}, {device['threads']} threads"

    def reconnect(self, timeout: float) -> Session:
        """Another session with the daemon at this endpoint, which may be another one. Raises what `connect` raises."""
        return Session.connect(self.endpoint, timeout)

    # ---- sending ---------------------------------------------------------------------------------

    def open_job(self, job: str, spec: JobSpec, timeout: float | None = 60.0) -> None:
        """Open a job. Raises what the daemon refuses with."""
        self.call(open_message(job, spec), timeout=timeout)

    def call(
        self,
        msg: Message,
        frames: Payload = (),
        timeout: float | None = 60.0,
        meanwhile: Callable[[], float] | None = None,
    ) -> tuple[Any, list[bytes]]:
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
        """Send a request without waiting. Its answer is received when any thread waits for a message."""
        ref, answer = self._mailbox.expect()
        self._send(_with_ref(msg, ref), ())
        return Asked(answer, lambda: self._mailbox.forget(ref))

    def wait_reply(self, asked: Asked) -> None:
        """Wait for the answer of a request that `ask` sent."""
        self.wait(lambda: asked.reply() is not None)

    @property
    def each_daemon(self) -> tuple[Session, ...]:
        """The sessions with single daemons that this one consists of: itself."""
        return (self,)

    def post(self, msg: Message, frames: Payload = ()) -> None:
        """Send without waiting. If `msg` is a request, a Refusal of it goes to its job's handler."""
        if type(msg) is Step:
            self.post_step(msg, frames)
            return
        if hasattr(msg, "ref"):
            msg = _with_ref(msg, self._mailbox.posted(getattr(msg, "job", "")))
        self._send(msg, frames)

    def post_step(self, step: Step, frames: Payload = ()) -> None:
        """Post a step, by the channel if the session has one."""
        if frames or not self._has_channel:
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
        """Have `handler(message, frames)` called for every message with this job and no ref. The thread that receives
        the message calls it, under the session's lock: it must be quick, must not raise and must not wait. It may
        post."""
        self._mailbox.register(job_id, handler)

    def unregister(self, job_id: str) -> None:
        """Drop messages for the job from now on. Idempotent."""
        self._mailbox.unregister(job_id)

    def pump(self) -> None:
        """Deliver messages that have arrived, without waiting. Raises the error of a dead session."""
        self._check_process()
        self._pump.drain()
        self._pump.raise_if_dead()

    def wait(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Receive until `predicate()` is true. Returns False if `timeout` seconds pass first.

        The predicate is called under the session's lock, after messages were delivered: it must be quick. Raises the
        session's error if the session dies before the predicate holds.
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
        """Deliver a message of the channel."""
        try:
            message = decode_step_done(packet)
            if type(message) not in FROM_DAEMON:
                raise ProtocolError(f"the daemon sent a {type(message).__name__} on the channel")
        except ProtocolError as error:
            self._pump.die(error)
            return
        self._mailbox.deliver_to(message.job, message, _NO_FRAMES)  # type: ignore[union-attr]

    # ---- life and death --------------------------------------------------------------------------

    def segment(self, segment_id: int, nbytes: int) -> memoryview:
        """The shared memory the daemon announced under this id, writable. Mapped until `release_segment` or
        `close`."""
        segment = self.take_segment(segment_id, nbytes)
        self._segments[segment_id] = segment
        return segment.view()

    def take_segment(self, segment_id: int, nbytes: int) -> Segment:
        """The segment the daemon announced under this id, which the caller closes."""
        self._check_process()
        self._pump.raise_if_dead()
        if not self._has_channel:
            raise ConfigError("this session takes no shared memory (tcp, or a control session)", "send payload frames")
        channel = self._connection.channel
        if channel is None:
            raise DaemonGone("the daemon has closed this session's channel", START_IT)
        return channel.take(segment_id, nbytes)

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
        self._thread.end()
        _live.discard(self)
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
        """Do one turn of the background thread. Returns False if it has no more work."""
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
        self._connection.close_channel_in_child()


def open_message(job: str, spec: JobSpec) -> m.OpenJob | m.OpenGangJob:
    """The request to open a job."""
    gang = spec.gang
    if gang is not None:
        return m.OpenGangJob(
            0, job, spec.name, int(spec.priority), spec.weight, spec.max_slowdown, spec.memory_limit, spec.max_inflight,
            spec.seed, spec.models, gang.id, gang.rank, gang.ranks, gang.store, gang.timeout_s,
        )  # fmt: skip
    opening = m.OpenFusibleJob if spec.fusible else m.OpenJob
    return opening(
        0, job, spec.name, int(spec.priority), spec.weight, spec.max_slowdown, spec.memory_limit, spec.max_inflight,
        spec.seed, spec.models, spec.arena is not None,
    )  # fmt: skip


def _with_ref(msg: Any, ref: int) -> Any:
    return replace(msg, ref=ref)


_live: weakref.WeakSet[Session] = weakref.WeakSet()


def _after_fork() -> None:
    for session in list(_live):
        session._leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)


# ---- The jobs that each thread of this process steps, so that the daemon learns which jobs get no step while a thread
# waits.
#
# One loop may step a high job and low jobs in turn. While it waits for a low step, its high job's next step can't come,
# and the daemon must not hold the low step back for the high job. The daemon can't see that from the gaps between
# steps, so the client sends StepAwaited when a wait has lasted for a while and its thread steps high jobs as well. A
# job that two threads step in turn counts for neither thread until one of them has made several steps in a row.


SURE: Final = 16  # steps in a row by another thread, after which the job counts as stepped by that thread
MOST_NAMED: Final = 256  # jobs named in one message

_Jobs: TypeAlias = "dict[str, weakref.ref[SteppingThread]]"


class _Here(threading.local):
    """The jobs that a thread steps, by id, and the high ones among them."""

    def __init__(self) -> None:
        self.jobs: _Jobs = {}
        self.high: _Jobs = {}


_here = _Here()


class SteppingThread:
    """The thread that steps a job. A job that several threads step in turn, as those of a pool do, belongs to no
    thread, because the others could step it while one waits. `high`: whether the job is known to be a high job."""

    __slots__ = ("__weakref__", "_by", "_high_by", "_job", "_unsure", "high", "newest")

    def __init__(self, job: str, high: bool) -> None:
        self._job = job
        self.high = high
        self.newest = -1  # number of the newest step
        self._by: _Jobs | None = None  # the jobs of the thread that made the newest step
        self._high_by: _Jobs | None = None
        self._unsure = 0  # further steps that the thread has to make before the job counts as its own

    def stepped(self, step: int) -> None:
        """Record that the calling thread has submitted this step of the job."""
        self.newest = step
        jobs = _here.jobs
        if self._by is not jobs:
            first = self._by is None
            self.forget()
            self._by, self._high_by = jobs, _here.high
            self._unsure = 0 if first else SURE
            if first:
                self._is_mine()
        elif self._unsure:
            self._unsure -= 1
            if not self._unsure:
                self._is_mine()

    def _is_mine(self) -> None:
        _put(_here.jobs, self._job, self)
        if self.high:
            _put(_here.high, self._job, self)

    def others(self) -> bool:
        """Whether the calling thread steps other high jobs."""
        high = _here.high
        return bool(high) and (len(high) > 1 or self._job not in high)

    def names(self) -> list[str]:
        """The ids of the other high jobs that the calling thread steps, at most MOST_NAMED."""
        return [job for job in list(_here.high) if job != self._job][:MOST_NAMED]

    def forget(self) -> None:
        """Record that no thread steps the job."""
        for jobs in (self._by, self._high_by):
            if jobs is not None:
                jobs.pop(self._job, None)


def is_high(job: str) -> bool:
    """Record that this job has become a high job since it was submitted. False if the calling thread doesn't step
    it."""
    known = _here.jobs.get(job)
    found = known() if known is not None else None
    if found is None:
        return False
    found.high = True
    _put(_here.high, job, found)
    return True


def _put(jobs: _Jobs, job: str, thread: SteppingThread) -> None:
    """Enter a job into `jobs` until it is forgotten or its `SteppingThread` is collected."""

    def dropped(gone: weakref.ref[SteppingThread]) -> None:
        jobs.pop(job, None)

    jobs[job] = weakref.ref(thread, dropped)


# ---- Waits for a job's work, which log the reason if they last long.
#
# Where a thread steps several jobs in turn, a wait that lasts tells the daemon which step it waits
# for, so that the daemon does not hold that step back for the sake of the thread's other jobs. A long wait, or many
# that are long together, ask the daemon for the reason, and log it if the user can do something about it.


log = logging.getLogger("gpumux.client")
PATIENCE_S = 5.0  # how long a wait, or long ones together, last before the daemon is asked for the reason
LONG_S = 0.05  # a wait of this length counts as a long one
MOSTLY: Final = 0.5  # part of the time waited for which a job was held for another, above which that is logged
# How long a wait lasts before the daemon is told that other jobs get no step meanwhile, by whether it is for a high
# job: the daemon holds no high job's steps, unless an operator made the job a low one.
SAY_AFTER_S: Final = {False: 2e-3, True: 50e-3}
AT_ONCE: Final = 64  # after a long wait of a low job, this many further waits are reported without delay
LOADING_S = 15.0  # ordinary Programs take a second or two
AGAIN_S = 60.0


class Waits:
    """Waits for one job's steps and transfers. `high`: it was submitted as a high job."""

    def __init__(self, job: str, high: bool) -> None:
        self.thread = SteppingThread(job, high)
        self._job = job
        self._high = high
        self._at_once = 0  # further waits to report to the daemon at once
        self._long_s = 0.0  # seconds of long waits since the daemon was last asked for the reason
        self._enough_s = PATIENCE_S  # seconds of long waits after which it is asked again
        self._held_s = 0.0  # seconds the job had been held for other jobs' next steps, when the daemon was last asked
        self._named: set[str] = set()  # high jobs that a warning has named

    def wait(
        self, session: Session, predicate: Callable[[], bool], timeout: float | None, step: int | None = None
    ) -> bool:
        """Wait as `session.wait` does, for the answer of `step` (default: the newest step)."""
        until: float | None = None
        if timeout is not None:
            if timeout <= 0.0:
                return session.wait(predicate, timeout)
            until = time.monotonic() + timeout
        if session.holds_low_work and self.thread.others():
            return self._in_turn(session, predicate, until, self.thread.newest if step is None else step)
        return self._patiently(session, predicate, until, step)

    def _in_turn(self, session: Session, predicate: Callable[[], bool], until: float | None, step: int) -> bool:
        """Wait in a thread that steps other jobs as well. Tells the daemon about it, unless the answer comes soon."""
        first = SAY_AFTER_S[self._high]
        if self._at_once:
            first, self._at_once = 0.0, self._at_once - 1
        if session.wait(predicate, _at_most(first, until)):
            return True
        if until is not None and until <= time.monotonic():
            return False
        others = self.thread.names()
        session.post(m.StepAwaited(0, self._job, step, others, False))
        answered = False
        try:
            answered = self._patiently(session, predicate, until, step)
        finally:
            if not answered:  # the thread may step its other jobs before the answer comes
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
        step = self.thread.newest if step is None else step
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
        """Ask the daemon why the step waits, and log it. `lasted`: the wait's seconds so far, if it is long by
        itself."""
        waited, self._long_s = self._long_s + lasted, -lasted
        self._enough_s *= 2.0
        try:
            body = session.call(m.JobStats(0, self._job), timeout=PATIENCE_S)[0].body
        except GpumuxError:
            return  # the job or the daemon has ended: the wait raises that
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
        if by and by not in self._named and held >= MOSTLY * waited:
            self._named.add(by)
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
    """Logs from time to time that the daemon is still checking or loading a Program. Call it while there is no answer;
    it returns the seconds to wait until the next call."""

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


# ---- Connecting, and connecting again if the daemon ends before the first work on the session is done.


TRIES = 5  # the attempt itself may be the cause of the daemon's end
CONNECT_S = 10.0  # timeout of one attempt
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0


class Closable(Protocol):
    """A session with one daemon or several."""

    @property
    def dead(self) -> GpumuxError | None: ...

    def close(self) -> None: ...


S = TypeVar("S", bound=Closable)


def connect_with_retry(attempt: Callable[[S], T], connect: Callable[[float], S], reconnect_s: float) -> T:
    """Connect by `connect(timeout)`, and return what `attempt` makes of the session. If the daemon ends meanwhile,
    connect to the next one within `reconnect_s` seconds and try again (0: do not). `attempt` must leave nothing behind
    when it fails.

    Raises DaemonGone if there is no daemon at the start, and any error of `attempt` on a session that is still open."""
    session = connect(CONNECT_S)
    for left in range(TRIES - 1, -1, -1):
        try:
            return attempt(session)
        except BaseException as error:
            gone = error if isinstance(error, DaemonGone) and session.dead is not None else None
            session.close()
            if gone is None or not left or not reconnect_s:
                raise
        session = _another(connect, gone, reconnect_s)
    raise AssertionError("unreachable")


def _another(connect: Callable[[float], S], gone: DaemonGone, reconnect_s: float) -> S:
    log.warning("%s; waiting for it to come back, to submit again", gone.message)
    started, pause = time.monotonic(), FIRST_PAUSE_S
    while True:
        try:
            session = connect(CONNECT_S)
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


# ---- The devices on which steps are traced and run.


def devices_of(session: Session, stacklevel: int = 3) -> tuple[str, str]:
    """The device type on which a job's steps are traced, and the one that they run on. Warns about a daemon that
    computes nothing; `stacklevel` as in warnings.warn."""
    device = session.welcome.device
    if device["kind"] == "cuda":
        return "cpu", "cuda"  # the daemon runs steps traced on the CPU on its GPU; this process needs no GPU
    if device["kind"] != "sim":
        return str(device["kind"]), str(device["kind"])
    warnings.warn(
        f"the daemon only SIMULATES its device ({device['name']}): steps take time, every result is "
        "zero and nothing is trained. For real results submit to a daemon on a real device (gpumux serve --device cpu)",
        SimulatedDeviceWarning,
        stacklevel=stacklevel,
    )
    return "cpu", "cpu"
