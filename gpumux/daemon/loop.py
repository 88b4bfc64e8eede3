"""The dispatch loop: the one place where scheduler, wire and device meet.

    wait -> device events -> client messages -> finished side work -> scheduler -> commands -> wait

Device events go first: a completed piece frees room for the next one, and no client message is as urgent. The scheduler
handles every event as soon as it exists, and its commands are carried out before the next event, so the scheduler's
state never runs ahead of what was done. One turn takes one message of each socket and channel, so a flood delays a
completion by no more than that.

Everything here runs on one thread. Only `wake`, `stop`, `call_soon` and `explain` may be called from other threads (the
first three also from signal handlers). An exception that no handler expects is a bug: it ends the job or the session
that it is about (daemon/inconsistencies.py). One that leaves `run` ends the daemon (daemon/main.py).
"""

from __future__ import annotations

import gc
import logging
import os
import select
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, Final

from gpumux.config import Config
from gpumux.daemon import report
from gpumux.daemon.config_reload import Reloading, core_config
from gpumux.daemon.config_reload import fusion_rules as rules_of
from gpumux.daemon.context import DaemonContext, log
from gpumux.daemon.effects import CommandRunner, Completions
from gpumux.daemon.fusion.jobs import JobFusion
from gpumux.daemon.inconsistencies import CrashReports, Inconsistencies
from gpumux.daemon.records import JobRecord, SessionRecord
from gpumux.daemon.requests import Requests
from gpumux.daemon.segments import Offload, Segments
from gpumux.daemon.snapshots.requests import SnapshotRequests
from gpumux.daemon.snapshots.writer import WriterClient
from gpumux.daemon.state.learned import Learned, LearnedFile
from gpumux.daemon.tracing import Handle, Tracing
from gpumux.device.base import Answering, Device
from gpumux.metrics.gauges import STALE_S, Figures, SnapshotBox
from gpumux.metrics.series import Metrics
from gpumux.scheduler import events as ev
from gpumux.scheduler.events import Command
from gpumux.scheduler.fusion.groups import FusionRules
from gpumux.scheduler.scheduler import Scheduler
from gpumux.types import JobId, LaunchId, SessionId
from gpumux.wire import router as wire
from gpumux.wire.messages import Leaving

# ---- Waiting for descriptors. Much cheaper than zmq.Poller.


IN = select.EPOLLIN


class Waiter:
    """Watches descriptors in named groups, which may change, through an epoll that may watch others as well."""

    def __init__(self, epoll: select.epoll) -> None:
        self._epoll = epoll
        self._groups: dict[int, str] = {}

    def follow(self, group: str, fds: Iterable[int]) -> None:
        """Watch exactly `fds` under this name from now on. They stay open while they are watched."""
        wanted = set(fds)
        watched = {fd for fd, name in self._groups.items() if name == group}
        for fd in watched - wanted:
            del self._groups[fd]
            self._epoll.unregister(fd)
        for fd in wanted - watched:
            self._epoll.register(fd, IN)
            self._groups[fd] = group

    def wait(self, seconds: float) -> tuple[set[str], list[tuple[int, int]]]:
        """Wait for at most `seconds`. Returns the groups that may have something, and (descriptor, events) pairs of
        descriptors that are in no group."""
        groups: set[str] = set()
        others: list[tuple[int, int]] = []
        for event in self._epoll.poll(seconds):
            name = self._groups.get(event[0])
            if name is None:
                others.append(event)
            else:
                groups.add(name)
        return groups, others


# ---- Waking the loop from other threads and signal handlers.


class Wakeup:
    """An eventfd that makes the loop's poll return; safe from any thread and from signal handlers."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._open = True

    def set(self) -> None:
        if self._open:
            os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            pass  # not set since the last time

    def close(self) -> None:
        self._open = False
        os.close(self.fd)


# ---- The loop.


IDLE_GC_S = 0.25  # the loop runs a full collection after it was idle for this long
BUSY_GC_S = 10.0  # if it is never idle for this long, it runs a young collection, which is short
MAX_WAIT_S = 1.0
AT_ONCE_S: Final = 20e-6  # a wait shorter than this found something that had arrived before the wait began
ALL = frozenset({"device", "clients", "wakeup", "snapshots"})


class Loop:
    """Runs a daemon whose parts are open. `identity` is what GetStatus reports about the daemon. `writer` is None if
    this daemon keeps no snapshots, `crashes` if it writes no reports of bugs, `learned` if it forgets at its end what
    it learned of interference. `fusion_rules`: when jobs run as one, if not as `config` says."""

    def __init__(
        self,
        identity: report.Identity,
        router: wire.Router,
        device: Device,
        *,
        metrics: Metrics,
        shared_limit: int,
        clock: Callable[[], float] = time.monotonic,
        writer: WriterClient | None = None,
        crashes: CrashReports | None = None,
        learned: LearnedFile | None = None,
        fusion_rules: FusionRules | None = None,
    ) -> None:
        config = identity.config
        self._clock = clock
        self._router = router
        self._sockets = router.sockets
        self._device = device
        self._metrics = metrics
        self._identity = identity
        self._wakeup = Wakeup()
        self._offload = Offload(self._wakeup.set, self._work_failed)
        self.scheduler = Scheduler(core_config(config))
        self.segments = Segments(shared_limit, self._offload, config.max_shared_bytes_per_user or None)
        self.context = DaemonContext(
            config=config,
            router=router,
            device=device,
            segments=self.segments,
            metrics=metrics,
            scheduler=self.scheduler,
            device_checks=identity.device.checks,
            catch_up=self._catch_up,
            clock=clock,
        )
        self._questions = self.context.questions.waiting
        self._openings, self._checks = self.context.openings, self.context.checks
        self.snapshots = SnapshotBox(self._wakeup.set)
        self._handle: Handle = self.scheduler.handle  # or the recording's, which calls it
        self._bugs = Inconsistencies(
            self.context, crashes or CrashReports(None), lambda event, now: self._handle(event, now)
        )
        self._tracing = Tracing(self.context, clock, self._observe, self._bugs.in_report)
        self._snapshot_requests = SnapshotRequests(self.context, writer, clock)
        self._memory_overuse = report.MemoryOveruseCheck(self.context, clock)
        self._learned = Learned(
            self.scheduler, names=self.context.records.program_names, offload=self._offload, file=learned,
            device=identity.device, clock=clock,
        )  # fmt: skip
        self._requests = Requests(
            self.context,
            report=self.status,
            interference=lambda session, program: self._learned.body(
                session, self.context.permissions.operates(session), program
            ),
            tracing=self._tracing,
            snapshot_requests=self._snapshot_requests,
            failed=self._message_failed,
        )
        self._commands = CommandRunner(self.context, self._snapshot_requests.forgotten)
        self.fusion = JobFusion(
            self.context,
            fusion_rules or rules_of(config),
            carry_out=lambda command: self._commands.handlers[type(command)](command),
            clock=clock,
            failed=self._job_failed,
        )
        self._checks.failed = self._job_failed
        router.failed = partial(self._bugs.in_report, "a message of no session")
        self._completions = Completions(self.context, self.fusion)
        self._answering = device if isinstance(device, Answering) else None
        self._latest = -inf  # the newest time that the scheduler was given
        self._waiter = Waiter(router.sockets.epoll)
        self._waiter.follow("clients", router.sockets.descriptors())
        self._waiter.follow("wakeup", [self._wakeup.fd])
        if writer is not None:
            writer.follow(partial(self._waiter.follow, "snapshots"))
        self._device_fds: tuple[int, ...] = ()
        self._calls: deque[Callable[[], None]] = deque()
        self._stop_reason: str | None = None
        self._leave_by = inf
        self._next_gc = inf
        self._young_gc = inf
        self._next_call = inf
        self._alarm = inf  # the earliest deadline that _run_timers handles
        self._turned = self._clock()  # when the last turn ended
        self._looked = 0.0  # when the last turn began
        self._router_due = self._turned
        self._every_s = inf
        self._on_time: Callable[[], None] = _nothing
        self._on_leaving: Callable[[str], None] = _unheard
        self.context.feed(ev.DeviceOpened(identity.device))
        self._settle(self._clock())
        self._learned.take_up()

    # ---- from other threads and signal handlers

    def wake(self) -> None:
        """Make the loop take a turn soon."""
        self._wakeup.set()

    def stop(self, reason: str) -> None:
        """Have the loop tell every client, unload every job, then return from `run`."""
        self._stop_reason = self._stop_reason or reason
        self._wakeup.set()

    def call_soon(self, call: Callable[[], None]) -> None:
        """Have the loop's thread make a call."""
        self._calls.append(call)
        self._wakeup.set()

    def call_every(self, seconds: float, on_time: Callable[[], None]) -> None:
        """Have the loop call `on_time` about every `seconds`, as long as it takes turns (a watchdog)."""
        self._every_s, self._on_time, self._next_call = seconds, on_time, self._clock()

    def call_when_leaving(self, on_leaving: Callable[[str], None]) -> None:
        """Have the loop call `on_leaving` with the reason, once, when it begins to leave."""
        self._on_leaving = on_leaving

    def reloading(self, read: Callable[[], Config]) -> Reloading:
        """Make the object that reloads the configuration, which `read` returns."""
        return Reloading(self.context, read, self.call_soon)

    # ---- the loop

    def run(self) -> None:
        """Serve until `stop`. Jobs that the device has not unloaded within `drain_s` are left behind."""
        while self._leave_by == inf or not (self.scheduler.drained or self._turned >= self._leave_by):
            self.turn(*self._wait())

    def turn(self, ready: Collection[str] = ALL, channels: Sequence[tuple[int, int]] = ()) -> None:
        """Handle everything that is ready, and all that follows from it. `ready` and `channels` are the groups and
        channels that may have something, as `_wait` returned them; the others are not polled."""
        now = self._clock()
        # After a real wait, messages have just arrived; after none, they arrived while the loop was busy.
        self.context.waited = 0.5 * (now - self._looked) if now - self._turned < AT_ONCE_S else 0.0
        self._looked = now
        if "device" in ready:
            self._complete(self._device.poll, now)
        if channels:
            self._hear(partial(self._router.receive_channels, channels), now)
        if "clients" in ready:
            self._hear(self._router.receive, now)
            self._router_due = self._router.next_deadline(now)
        if "snapshots" in ready:
            try:
                self._snapshot_requests.hear()
            except Exception as error:  # noqa: BLE001 - a bug, which ends what it is about
                self._work_failed(self._snapshot_requests.heard, error)
            self._settle(now)
        if self._questions.items and now >= self.context.questions.due:
            self.context.questions.answer_next(self._clock)
            self._settle(now)
        if self._openings.due <= now:
            self._openings.open_next(now)
            self._settle(now)
        if self._checks.due <= now:
            self._checks.start()
            self._settle(now)
        if "wakeup" in ready or now >= self._alarm:
            self._run_timers(now)
            self._settle(now)
        if now >= self._router_due or self._router.has_news:
            self._hear(self._router.expire, now)
            self._router_due = self._router.next_deadline(now)
        self._turned = self._clock()
        self._metrics.tally.busy_s += self._turned - now

    def _run_timers(self, now: float) -> None:
        """Run timers and calls queued by other threads. Called on a wake-up or when a deadline has passed."""
        self._offload.collect()
        while self._calls:
            self._try("what another thread asked for", self._calls.popleft())
        if self._commands.wake_at is not None and now >= self._commands.wake_at:
            self._commands.wake_at = None
            self.context.feed(ev.Tick())
        if self.fusion.active and now >= self.fusion.due:
            self.fusion.tick()
        if now >= self._tracing.due:
            self._try("the end of a recording", self._tracing.finish)
        self._try("looking after snapshots", partial(self._snapshot_requests.run_timers, now))
        self._make_reports(now)
        if self._stop_reason is not None and self._leave_by == inf and self._snapshot_requests.may_leave(now):
            self._leave(self._stop_reason, now)
        if now >= self._next_call:
            self._next_call = now + self._every_s
            self._on_time()

    def _try(self, what: str, do: Callable[[], object]) -> None:
        """Do something on which no job hangs: a bug in it ends nothing."""
        try:
            do()
        except Exception as error:  # noqa: BLE001
            self._bugs.in_report(what, error)

    def _make_reports(self, now: float) -> None:
        """Make what operators read, and keep what was learned, when it is due. No job hangs on it, so a bug in it ends
        nothing."""
        self._try("the check of jobs' memory", partial(self._memory_overuse.check, now))
        if self.snapshots.wanted():
            try:
                self.snapshots.publish(self.figures())
            except Exception as error:  # noqa: BLE001
                self._bugs.in_report("a reading of the metrics", error)
                self.snapshots.fail()  # the next scrape tries again, and not the next turn
        if now >= self._learned.due:
            self._try("keeping what was learned of interference", self._learned.save)

    def _wait(self) -> tuple[Collection[str], Sequence[tuple[int, int]]]:
        """Wait until something is ready. Returns the groups that may have something, and the channels that do."""
        fds = tuple(self._device.filenos())
        if fds != self._device_fds:
            self._device_fds = fds
            self._waiter.follow("device", fds)
        now, wake_at = self._turned, self._commands.wake_at
        self._alarm = alarm = min(
            self._leave_by, self._next_call, self._tracing.due, self._snapshot_requests.due, self._memory_overuse.due,
            self._learned.due, self.fusion.due if self.fusion.active else inf, inf if wake_at is None else wake_at,
        )  # fmt: skip
        due = self._device.due()
        question = self.context.questions.due if self._questions.items else inf
        queues = min(question, self._openings.due, self._checks.due)
        until = min(alarm, due, queues, self._router_due, self._next_gc, now + MAX_WAIT_S)
        unread = self._sockets.touched and self._sockets.unread()
        if unread:
            os.sched_yield()  # a flood of messages must not keep a core from the processes of steps for a time slice
        ready, channels = self._waiter.wait(0.0 if unread else max(0.0, until - now))
        if unread:
            ready.add("clients")
        if due < inf and due <= self._clock():
            ready.add("device")
        if "wakeup" in ready:
            self._wakeup.clear()
        if not (ready or channels):
            self._when_idle()
        else:
            self._next_gc = self._turned + IDLE_GC_S
            if self._turned >= self._young_gc:
                self._young_gc = self._turned + BUSY_GC_S
                gc.collect(0)
        return ready, channels

    def _when_idle(self) -> None:
        """Run a full garbage collection if one is due. Automatic collection is off (daemon/main.py): a full one takes
        longer than many steps. When the loop is never idle, `_wait` collects young objects alone."""
        now = self._clock()
        if now >= self._next_gc:
            gc.collect()
            self._next_gc, self._young_gc = inf, now + BUSY_GC_S

    def _settle(self, now: float) -> None:
        """Have the scheduler handle every queued event, and carry out its commands, until no event is left."""
        events, handlers = self.context.events, self._commands.handlers
        fusion, released = self.fusion, self.fusion.released
        if now < self._latest:
            now = self._latest
        self._latest = now
        while events or released:
            event = released.popleft() if released else None
            if event is None:
                event = events.popleft()
                if fusion.active or (type(event) is ev.JobRequested and event.spec.fusible):
                    try:
                        fusion.take(event)
                    except Exception as error:  # noqa: BLE001
                        self._carry_out(self._bugs.about(getattr(event, "job", None), error, now), now)
                    continue
            try:
                commands = self._handle(event, now)
            except Exception as error:  # noqa: BLE001 - a bug, which ends what it is about
                commands = self._bugs.in_event(error, now)
            for command in commands:
                try:
                    if fusion.active:
                        fusion.carry_out(command)
                    else:
                        handlers[type(command)](command)
                except Exception as error:  # noqa: BLE001
                    self._carry_out(self._bugs.about(getattr(command, "job", None), error, now), now)

    def _carry_out(self, commands: Sequence[Command], now: float) -> None:
        """Carry out the commands by which something ends that a bug was about."""
        for command in commands:
            try:
                self.fusion.carry_out(command)
            except Exception as error:  # noqa: BLE001
                self._carry_out(self._bugs.about(getattr(command, "job", None), error, now), now)

    def _complete(self, take: Callable[[], Iterable[Any]], now: float) -> None:
        """Handle what the device has completed, which `take` returns, and all that follows from it."""
        try:
            found = take()
        except Exception as error:  # noqa: BLE001
            self._carry_out(self._bugs.about(None, error, now), now)
            return
        for event in found:
            try:
                self._completions.handlers[type(event)](event)
            except Exception as error:  # noqa: BLE001
                self._carry_out(self._bugs.about(self._job_of(event), error, now), now)
            self._settle(now)

    def _job_of(self, event: Any) -> JobId | None:
        job: JobId | None = getattr(event, "job", None)
        if job is None and (launch := self.scheduler.out(getattr(event, "launch", LaunchId(0)))) is not None:
            job = launch.job
        return job

    def _job_failed(self, job: JobId | None, error: Exception) -> None:
        """Something about this job raised; None: about none."""
        now = self._latest
        self._carry_out(self._bugs.about(job, error, now), now)

    def _message_failed(self, session: SessionRecord, job: JobRecord | None, error: Exception) -> None:
        now = self._latest
        self._carry_out(self._bugs.in_message(session, job, error, now), now)

    def _work_failed(self, owner: str, error: Exception) -> None:
        """Work that was done for a session or a job, or what followed it, raised."""
        records = self.context.records
        session, job = records.sessions.get(SessionId(owner)), records.jobs.get(JobId(owner))
        if session is None and job is not None:
            session = job.session
        if session is not None:
            self._message_failed(session, job, error)
        else:
            self._bugs.in_report("work of a session that has ended, or of none,", error)

    def _observe(self, handle: Handle) -> None:
        """Use `handle` to pass events to the scheduler from now on."""
        self._handle = handle

    def _catch_up(self, job: JobRecord) -> None:
        """Handle what the device has completed for this job, before the client's message that is being handled."""
        if job.device_answers and self._answering is not None:
            now = self._clock()
            answering = self._answering
            self._complete(lambda: answering.catch_up(job.id), now)

    # ---- sessions

    def _hear(self, read: Callable[[float], list[wire.Arrival]], now: float) -> None:
        """Handle what the router has read, and all that follows from it."""
        try:
            arrivals = read(now)
        except Exception as error:  # noqa: BLE001 - a bug, which ends what it is about
            self._bugs.in_router(error, now)
            return
        for arrival in arrivals:
            try:
                self._arrived(arrival, now)
            except Exception as error:  # noqa: BLE001
                self._bugs.in_session(arrival.session, error)
            self._settle(now)

    def _arrived(self, arrival: wire.Arrival, now: float) -> None:
        if type(arrival) is wire.Incoming:
            self._metrics.tally.received[type(arrival.message)] += 1
            session = self.context.records.sessions.get(arrival.session)
            if session is not None:
                self._requests.handle(session, arrival.message, arrival.frames)
                if self._openings.due <= now:
                    self._openings.open_next(now)
        elif type(arrival) is wire.Opened:
            self._opened(arrival, now)
        elif type(arrival) is wire.Closed:
            self._closed(arrival)

    def _opened(self, arrival: wire.Opened, now: float) -> None:
        record = SessionRecord(arrival.session, arrival.peer, arrival.inline, now, arrival.hello.role)
        self.context.records.sessions[arrival.session] = record
        self._metrics.sessions_opened.inc()
        peer = record.peer
        log.log(_level(record), "session %s: %s of uid %d, pid %d", record.id, record.role, peer.uid, peer.pid)
        self.context.feed(ev.SessionOpened(record.id, record.peer))

    def _closed(self, arrival: wire.Closed) -> None:
        record = self.context.records.sessions.pop(arrival.session, None)
        if record is None:
            return
        try:
            self._forget_session(record, arrival)
        finally:  # its jobs end, whatever failed
            self.context.feed(ev.SessionClosed(arrival.session, arrival.reason))

    def _forget_session(self, record: SessionRecord, arrival: wire.Closed) -> None:
        for job in [self.context.records.jobs[job] for job in record.jobs]:
            self.context.catch_up(job)
        if arrival.reason not in (wire.GOODBYE, wire.GONE):  # a process that simply ends says nothing
            self._metrics.sessions_lost.inc()
        log.log(_level(record), "session %s: over, %s", arrival.session, arrival.reason)
        self._tracing.left(arrival.session)
        self._questions.forget(record.peer.uid, record.id)
        self._openings.waiting.forget(record.peer.uid, record.id)
        self._offload.forget(record.peer.uid, record.id)
        self._snapshot_requests.left(record)

    # ---- leaving

    def _leave(self, reason: str, now: float) -> None:
        log.info("leaving: %s", reason)
        self._on_leaving(reason)
        self._leave_by = now + self.context.config.drain_s
        self._tracing.finish("the daemon is leaving")
        for session in list(self.context.records.sessions.values()):
            self.context.reply(session, Leaving(reason))  # before anything else: it ends the clients' open calls
        self.context.feed(ev.DrainRequested(reason))

    def close(self) -> None:
        """Release everything the loop made. Its owner closes the router and the device."""
        self.snapshots.close()
        self._offload.close()
        self._try("keeping what was learned of interference", self._learned.close)
        self._snapshot_requests.close()
        self.fusion.close()
        for job in list(self.context.records.jobs):
            self.context.records.forget_job(job)
        self._wakeup.close()

    # ---- status and figures

    def status(self) -> dict[str, Any]:
        """The body of GetStatus."""
        held = self._device.memory()
        return report.status(
            self._identity, self.scheduler, self.context.records, self.segments.used_bytes, held, self.fusion.report
        )

    def figures(self) -> Figures:
        """The figures that the gauges show."""
        newest, pairs = self._snapshot_requests.newest_snapshot, self._learned.figures()
        found = report.figures(self._identity, self.scheduler, self.context, self.segments.used_bytes, newest, pairs)
        # it leaves as soon as it is told to, though jobs still have their last snapshots taken
        return found if self._stop_reason is None else replace(found, leaving=self._stop_reason)

    def explain(self, short: str) -> dict[str, Any] | None:
        """What the status page says of a job, None if there is none with this short id. For other threads: the loop's
        thread finds it out. Raises TimeoutError if it doesn't within STALE_S, or could not."""
        found: Future[dict[str, Any] | None] = Future()

        def answer() -> None:
            try:
                found.set_result(report.page_explanation(self.scheduler, self.context, short))
            except Exception as error:  # noqa: BLE001
                self._bugs.in_report("an explanation on the status page", error)
                found.set_exception(TimeoutError("the daemon could not say: its log has the reason"))

        self.call_soon(answer)
        return found.result(STALE_S)


def _level(session: SessionRecord) -> int:
    """The log level of a session's beginning and end: commands such as `gpumux status` come and go by the hundred."""
    return logging.DEBUG if session.role == "control" else logging.INFO


def _nothing() -> None:
    """The default of `Loop.call_every`: there is no watchdog."""


def _unheard(reason: str) -> None:
    """The default of `Loop.call_when_leaving`: there is no service manager."""
