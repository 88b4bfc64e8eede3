"""The dispatch loop: the one place where core, wire and device meet.

    wait -> device events -> client messages -> finished side work -> core -> commands -> wait

Device events go first: a completed piece frees room for the next, and nothing a client says is as
urgent. Every event is handed to the core as soon as it exists, and its commands are carried out
before the next, so state never runs ahead of what was done. One pass takes a bounded number of
messages (wire/limits.py), so a flood delays a completion by no more than that.

Everything here runs on one thread. `wake` and `stop` alone may be called from others (and from signal
handlers). An exception that gets out of `run` is a bug: the daemon ends, loudly (daemon/main.py).
"""

from __future__ import annotations

import gc
import os
import select
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from math import inf
from typing import Any

from gpumux.config import Config
from gpumux.daemon import report
from gpumux.daemon.config_reload import Reloading, core_config
from gpumux.daemon.context import Desk, log
from gpumux.daemon.effects import Completions, Executor, lanes_first
from gpumux.daemon.loans import Loans
from gpumux.daemon.outgrown import Outgrown
from gpumux.daemon.records import JobRecord, SessionRecord
from gpumux.daemon.requests import Requests
from gpumux.daemon.segments import Offload, Segments
from gpumux.daemon.snapshots.requests import Keeping
from gpumux.daemon.snapshots.writer import Link
from gpumux.daemon.tracing import Handle, Tracing
from gpumux.device.base import Answering, Device, Lending
from gpumux.metrics.gauges import Figures, SnapshotBox
from gpumux.metrics.series import Metrics
from gpumux.scheduler import events as ev
from gpumux.scheduler.scheduler import Core
from gpumux.wire import router as wire
from gpumux.wire.messages import Leaving

# ---- Waiting for many descriptors at once, a third of the cost of zmq.Poller.


IN = select.EPOLLIN


class Waiter:
    """Watches descriptors in named groups, which may change, through an epoll that may watch others."""

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
        """After `seconds` at most: the groups that may have something, and (descriptor, events) of
        those that others watch."""
        groups: set[str] = set()
        others: list[tuple[int, int]] = []
        for event in self._epoll.poll(seconds):
            name = self._groups.get(event[0])
            if name is None:
                others.append(event)
            else:
                groups.add(name)
        return groups, others


# ---- How other threads, and signal handlers, wake the loop.


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
            pass  # nobody called since the last time

    def close(self) -> None:
        self._open = False
        os.close(self.fd)


# ----


IDLE_GC_S = 0.25  # nothing to do for this long: a good moment for a full collection
BUSY_GC_S = 10.0  # never idle for this long: a young collection, which is short
MAX_WAIT_S = 1.0
ALL = frozenset({"device", "clients", "wakeup", "snapshots"})


class Loop:
    """Runs a daemon whose parts are open. `identity` is what GetStatus says of it."""

    def __init__(
        self,
        identity: report.Identity,
        router: wire.Router,
        device: Device,
        metrics: Metrics,
        shared_limit: int,
        clock: Callable[[], float] = time.monotonic,
        link: Link | None = None,
    ) -> None:
        config = identity.config
        self._clock = clock
        self._router = router
        self._sockets = router.sockets
        self._device = device
        self._metrics = metrics
        self._identity = identity
        self._wakeup = Wakeup()
        self._offload = Offload(self._wakeup.set)
        self.core = Core(core_config(config))
        self.segments = Segments(shared_limit, self._offload, config.max_shared_bytes_per_user or None)
        self.desk = Desk(config, router, device, self.segments, metrics, self.core, identity.device.checks)
        self.snapshots = SnapshotBox(self._wakeup.set)
        self._handle: Handle = self.core.handle  # or what looks on while somebody records
        self._tracing = Tracing(self.desk, clock, self._observe)
        self._keeping = Keeping(self.desk, link, clock)
        self._outgrown = Outgrown(self.desk, clock)
        self._requests = Requests(self.desk, self.status, self._tracing, self._keeping)
        self._completions = Completions(self.desk)
        self._executor = Executor(self.desk, self._keeping.forgotten)
        if isinstance(device, Answering):
            self.desk.catch_up = partial(self._catch_up, device)
        self._told = -inf  # the newest time the core was told
        self._loans: Loans | None = None
        if isinstance(device, Lending):
            self._loans = self._executor.loans = Loans(self.desk, device, self._tell, clock)
            self._completions.use(self._loans)
        self._waiter = Waiter(router.sockets.lane_epoll)
        self._waiter.follow("clients", router.sockets.descriptors())
        self._waiter.follow("wakeup", [self._wakeup.fd])
        if link is not None:
            link.follow(partial(self._waiter.follow, "snapshots"))
        self._device_fds: tuple[int, ...] = ()
        self._calls: deque[Callable[[], None]] = deque()
        self._stop_reason: str | None = None
        self._leave_by = inf
        self._next_gc = inf
        self._young_gc = inf
        self._next_call = inf
        self._alarm = inf  # the earliest of what _seldom looks after
        self._turned = self._clock()  # when the last turn ended
        self._router_due = self._turned
        self.every_s = inf
        self.on_time: Callable[[], None] = _nothing
        self.on_leaving: Callable[[str], None] = _unheard
        self.desk.feed(ev.DeviceOpened(identity.device))
        self._settle(self._clock())

    # ---- from other threads and signal handlers

    def wake(self) -> None:
        """Make the loop take a turn soon."""
        self._wakeup.set()

    def stop(self, reason: str) -> None:
        """Leave: tell every client, unload every job, then return from `run`."""
        self._stop_reason = self._stop_reason or reason
        self._wakeup.set()

    def call_soon(self, call: Callable[[], None]) -> None:
        """Have the loop's thread make a call."""
        self._calls.append(call)
        self._wakeup.set()

    def call_every(self, seconds: float, on_time: Callable[[], None]) -> None:
        """Have the loop call `on_time` about every `seconds`, as long as it turns (a watchdog)."""
        self.every_s, self.on_time, self._next_call = seconds, on_time, self._clock()

    def reloading(self, read: Callable[[], Config]) -> Reloading:
        """What reloads the configuration that `read` gives."""
        return Reloading(self.desk, read, self.call_soon)

    # ---- the loop

    def run(self) -> None:
        """Serve until `stop`. Jobs that don't let go of the device in `drain_s` are left behind."""
        while self._leave_by == inf or not (self.core.drained or self._turned >= self._leave_by):
            self.turn(*self._wait())

    def turn(self, ready: Collection[str] = ALL, lanes: Sequence[tuple[int, int]] = ()) -> None:
        """Handle everything that is ready, and all that follows from it. `ready` and `lanes`: who the
        wait says may have something; asking the others would only cost time."""
        now = self._clock()
        self.desk.looks(now, self._turned)
        if self._loans is not None and self._loans.out is not None:
            self._loans.hear()
        if "device" in ready:
            for event in lanes_first(self._device.poll()):
                self._completions.handlers[type(event)](event)
                self._settle(now)
        if lanes:
            arrivals = self._router.receive_lanes(lanes, now)
            if not (len(arrivals) == 1 and self._lent(arrivals[0])):
                for arrival in arrivals:
                    self._arrived(arrival, now)
                    self._settle(now)
        if "clients" in ready:
            for arrival in self._router.receive(now):
                self._arrived(arrival, now)
                self._settle(now)
            self._router_due = self._router.next_deadline(now)
        if "snapshots" in ready:
            self._keeping.hear()
            self._settle(now)
        if self.desk.turns:
            self.desk.turns.next()
            self._settle(now)
        if "wakeup" in ready or now >= self._alarm:
            self._seldom(now)
            self._settle(now)
        if now >= self._router_due or self._router.has_news:
            for arrival in self._router.expire(now):
                self._arrived(arrival, now)
                self._settle(now)
            self._router_due = self._router.next_deadline(now)
        self._turned = self._clock()
        self._metrics.tally.busy_s += self._turned - now

    def _seldom(self, now: float) -> None:
        """What most turns have nothing of."""
        self._offload.collect()
        while self._calls:
            self._calls.popleft()()
        if self._executor.wake_at is not None and now >= self._executor.wake_at:
            self._executor.wake_at = None
            self.desk.feed(ev.Tick())
        if now >= self._tracing.due:
            self._tracing.finish()
        self._keeping.seldom(now)
        self._outgrown.look(now)
        if self._stop_reason is not None and self._leave_by == inf and self._keeping.may_leave(now):
            self._leave(self._stop_reason, now)
        if self.snapshots.wanted():
            self.snapshots.publish(self.figures())
        if now >= self._next_call:
            self._next_call = now + self.every_s
            self.on_time()

    def _wait(self) -> tuple[Collection[str], Sequence[tuple[int, int]]]:
        """Wait until something is ready; who may have it."""
        fds = tuple(self._device.filenos())
        if fds != self._device_fds:
            self._device_fds = fds
            self._waiter.follow("device", fds)
        now, wake_at = self._turned, self._executor.wake_at
        self._alarm = alarm = min(
            self._leave_by, self._next_call, self._tracing.due, self._keeping.due, self._outgrown.due,
            inf if wake_at is None else wake_at,
        )  # fmt: skip
        due = self._device.due()
        until = min(alarm, due, self._router_due, self._next_gc, now + MAX_WAIT_S)
        unread = self._sockets.unread() or bool(self.desk.turns)
        ready, lanes = self._waiter.wait(0.0 if unread else max(0.0, until - now))
        if unread:
            ready.add("clients")
        if due < inf and due <= self._clock():
            ready.add("device")
        if "wakeup" in ready:
            self._wakeup.clear()
        if not (ready or lanes):
            self._when_idle()
        else:
            self._next_gc = self._turned + IDLE_GC_S
            if self._turned >= self._young_gc:
                self._young_gc = self._turned + BUSY_GC_S
                gc.collect(0)
        return ready, lanes

    def _when_idle(self) -> None:
        """The collector is off (daemon/main.py): a full one takes longer than many steps. It runs
        when nobody waits for the loop, and on young objects alone when that never happens (`_wait`)."""
        now = self._clock()
        if now >= self._next_gc:
            gc.collect()
            self._next_gc, self._young_gc = inf, now + BUSY_GC_S

    def _settle(self, now: float) -> None:
        """Let the core see every event that waits, and do what it says, until nothing is left."""
        events, handlers = self.desk.events, self._executor.handlers
        if events and self._loans is not None and self._loans.out is not None:
            self._loans.recall()  # first what the device did by itself
        if now < self._told:
            now = self._told
        self._told = now
        handle = self._handle
        while events:
            for command in handle(events.popleft(), now):
                handlers[type(command)](command)

    def _lent(self, arrival: wire.Arrival) -> bool:
        """Whether a step that came alone is left to the device, with all that follow."""
        if self._loans is None or self._loans.due is None or type(arrival) is not wire.Incoming:
            return False
        session = self.desk.books.sessions.get(arrival.session)
        return session is not None and self._loans.takes(session, arrival.message)

    def _tell(self, event: ev.Event, when: float) -> None:
        """Let the core see an event of the past, ahead of those that wait."""
        if when > self._told:
            self._told = when
        handlers = self._executor.handlers
        for command in self._handle(event, self._told):
            handlers[type(command)](command)

    def _observe(self, handle: Handle) -> None:
        """Hand events to the core by `handle` from now on."""
        self._handle = handle

    def _catch_up(self, device: Answering, job: JobRecord) -> None:
        """Handle what the device has done before the client's message that is being handled."""
        if job.device_answers:
            now = self._clock()
            for event in lanes_first(device.catch_up(job.id)):
                self._completions.handlers[type(event)](event)
                self._settle(now)

    # ---- sessions

    def _arrived(self, arrival: wire.Arrival, now: float) -> None:
        if type(arrival) is wire.Incoming:
            self._metrics.tally.received[type(arrival.message)] += 1
            session = self.desk.books.sessions.get(arrival.session)
            if session is not None:
                self._requests.handle(session, arrival.message, arrival.frames)
        elif type(arrival) is wire.Opened:
            self._opened(arrival, now)
        elif type(arrival) is wire.Closed:
            self._closed(arrival)

    def _opened(self, arrival: wire.Opened, now: float) -> None:
        record = SessionRecord(arrival.session, arrival.peer, arrival.inline, now)
        self.desk.books.sessions[arrival.session] = record
        self._metrics.sessions_opened.inc()
        log.info("session %s: %s of uid %d, pid %d", record.id, arrival.hello.role, arrival.peer.uid, arrival.peer.pid)
        self.desk.feed(ev.SessionOpened(record.id, record.peer))

    def _closed(self, arrival: wire.Closed) -> None:
        record = self.desk.books.sessions.pop(arrival.session, None)
        if record is None:
            return
        for job in [self.desk.books.jobs[job] for job in record.jobs]:
            self.desk.catch_up(job)
        if arrival.reason != wire.GOODBYE:
            self._metrics.sessions_lost.inc()
        log.info("session %s: over, %s", arrival.session, arrival.reason)
        self._tracing.left(arrival.session)
        self.desk.turns.forget(record)
        self.desk.feed(ev.SessionClosed(arrival.session, arrival.reason))

    # ---- leaving

    def _leave(self, reason: str, now: float) -> None:
        log.info("leaving: %s", reason)
        self.on_leaving(reason)
        self._leave_by = now + self.desk.config.drain_s
        self._tracing.finish("the daemon is leaving")
        for session in list(self.desk.books.sessions.values()):
            self.desk.reply(session, Leaving(reason))  # first of all: their open calls end here
        self.desk.feed(ev.DrainRequested(reason))

    def close(self) -> None:
        """Let go of everything the loop made; the router and the device are its owner's."""
        self.snapshots.close()
        self._offload.close()
        self._keeping.close()
        for job in list(self.desk.books.jobs):
            self.desk.books.forget_job(job)
        self._wakeup.close()

    # ---- what it says of itself

    def status(self) -> dict[str, Any]:
        """The body of GetStatus."""
        held = self._device.memory()
        return report.status(self._identity, self.core, self.desk.books, self.segments.used_bytes, held)

    def figures(self) -> Figures:
        """What the gauges show."""
        return report.figures(self._identity, self.core, self.desk, self.segments.used_bytes, self._keeping.of)


def _nothing() -> None:
    """No watchdog."""


def _unheard(reason: str) -> None:
    """No service manager."""
