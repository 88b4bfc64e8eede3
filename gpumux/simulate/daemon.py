"""One simulated daemon with its GPU, on a virtual clock that it may share with others.

    client --client_s--> inbox --> scheduler (handle_s an event) --> launches --> Gpu --> what the host learns --> inbox

Everything the daemon does on its one thread is serial here too: an event waits while another is handled, and
what the scheduler decides takes effect when its handling is over. The GPU adds the host's launch calls and the
time until the host knows that a launch has ended (GpuSpec.completion_s).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Any, Protocol

from gpumux.device.sim.device import TARGET_S
from gpumux.device.sim.gpu import Finished, Gpu, Held
from gpumux.device.sim.spec import GpuSpec
from gpumux.scheduler import events as cmd
from gpumux.scheduler import events as ev
from gpumux.scheduler.config import SchedulerConfig
from gpumux.scheduler.scheduler import Scheduler
from gpumux.simulate.result import LaunchRow
from gpumux.types import (
    DeviceInfo,
    Footprint,
    JobId,
    JobSpec,
    LaunchId,
    Peer,
    PieceDone,
    ProgramId,
    ProgramReady,
    SessionId,
)

HANDLE_S = 20e-6  # the daemon's own time for an event: twice what microbench/core_rate measures of the scheduler alone
CLIENT_S = 60e-6  # an answer's way to the client and the next step's way back; guess beside microbench/rtt
TIMELINE_ROWS = 20_000
FOOTPRINT = Footprint(1 << 20, 1 << 20, 1 << 10)  # of any simulated program: memory is not what is simulated

_SESSION = SessionId("simulated")


class Clock:
    """Virtual time, and what is to be done when. What is due at one time is done in the order it was given."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._serial = count()

    def push(self, when: float, act: Callable[[Any], None], argument: Any) -> None:
        """Call `act(argument)` at a virtual time."""
        heappush(self._due, (when, next(self._serial), act, argument))

    @property
    def next_at(self) -> float:
        """When the next thing is due; inf for never."""
        return self._due[0][0] if self._due else inf

    def act(self) -> None:
        """Let time pass to the next thing that is due, and do it."""
        self.now, _, act, argument = heappop(self._due)
        act(argument)


class EventHandler(Protocol):
    """What decides: the daemon's scheduler, or something to compare it with."""

    def handle(self, event: ev.Event, now: float) -> list[cmd.Command]: ...

    def snapshot(self) -> dict[str, Any]: ...

    def explain(self, job: JobId) -> list[str]: ...


class SimulatedJob(Protocol):
    """A job as its daemon sees it: its programs, its client, and what its launches run."""

    @property
    def id(self) -> JobId: ...

    @property
    def name(self) -> str: ...

    @property
    def job_spec(self) -> JobSpec: ...

    @property
    def starts_at(self) -> float: ...

    def offers(self) -> Sequence[ev.ProgramOffered]:
        """The programs, as they are offered once the job is accepted."""

    def ready(self, program: ProgramId) -> ProgramReady:
        """How a program is cut now."""

    def announced(self, daemon: SimulatedDaemon, program: ProgramId) -> None:
        """Called when a program is loaded."""

    def launch(self, daemon: SimulatedDaemon, launched: cmd.LaunchPiece) -> None:
        """Give the GPU the kernels of a launch, now or later."""

    def ended(self, daemon: SimulatedDaemon, launched: cmd.LaunchPiece, done: Finished) -> bool:
        """Called when the host learns that a launch has ended. Returns whether its program is now cut differently."""

    def cut_requested(self, program: ProgramId, target_s: float | None) -> None:
        """The scheduler wants the program in pieces of about `target_s`; None: as the device cuts it."""

    def answered(self, daemon: SimulatedDaemon, step: int) -> None:
        """Called when a step's answer is sent to the client."""


@dataclass(frozen=True)
class DaemonSettings:
    """How a daemon is simulated. graphs, priorities: see Gpu. timeline: whether launches are kept. scheduler: replaces
    the daemon's own."""

    policy: str = "guarded"
    graphs: bool = True
    priorities: bool = True
    scheduler_config: Mapping[str, Any] = field(default_factory=dict)
    timeline: bool = False
    handle_s: float = HANDLE_S
    client_s: float = CLIENT_S
    scheduler: EventHandler | None = None


class SimulatedDaemon:
    """A daemon with its GPU and its jobs. The loop that drives it lets the GPU's time pass, calls `finished` for each
    launch that ends, and does what is due on the clock. held: see Gpu."""

    def __init__(
        self,
        spec: GpuSpec,
        clock: Clock,
        settings: DaemonSettings,
        *,
        held: Held | None = None,
    ) -> None:
        self.spec, self.clock = spec, clock
        self.client_s = settings.client_s
        self.scheduler = settings.scheduler or Scheduler(
            SchedulerConfig(policy=settings.policy, **dict(settings.scheduler_config))
        )
        self.gpu = Gpu(spec, graphs=settings.graphs, priorities=settings.priorities, held=held)
        self.timeline: deque[LaunchRow] = deque(maxlen=TIMELINE_ROWS)
        self.push = clock.push
        self._keep_rows = settings.timeline
        self._handle_s = settings.handle_s
        self._jobs: dict[JobId, SimulatedJob] = {}
        self._inbox: deque[tuple[ev.Event, float]] = deque()  # each with its time
        self._busy = False
        self._wake = inf
        self._in_flight: dict[int, tuple[SimulatedJob, cmd.LaunchPiece]] = {}
        self._execute: dict[type, Callable[[Any], None]] = {
            cmd.LaunchPiece: self._launch,
            cmd.FinishStep: self._finish_step,
            cmd.WakeAt: self._wake_at,
            cmd.AcceptJob: self._accepted,
            cmd.AcceptProgram: self._load,
            cmd.AnnounceProgram: self._announced,
            cmd.CutProgram: self._cut,
        }

    @property
    def now(self) -> float:
        return self.clock.now

    @property
    def jobs(self) -> Sequence[SimulatedJob]:
        return tuple(self._jobs.values())

    def open(self, jobs: Sequence[SimulatedJob]) -> None:
        """Open the device and have all jobs requested, each at its time."""
        spec = self.spec
        targets = {priority.name.lower(): seconds for priority, seconds in TARGET_S.items()}
        info = DeviceInfo("sim", spec.title, spec.memory_bytes, None, 0, "", targets, shares=spec.shares)
        self.feed(ev.DeviceOpened(info))
        self.feed(ev.SessionOpened(_SESSION, Peer(1000, 1000, 1)))
        for job in jobs:
            self._jobs[job.id] = job
            request = ev.JobRequested(_SESSION, job.id, job.job_spec)
            if job.starts_at:
                self.push(job.starts_at, self.feed, request)
            else:
                self.feed(request)

    def feed(self, event: ev.Event) -> None:
        """Pass an event to the daemon now: from a client, the device or elsewhere (a pause, a resume)."""
        self._inbox.append((event, self.clock.now))
        if not self._busy:
            self._handle()

    def recut(self, job: SimulatedJob, program: ProgramId) -> None:
        """Announce that the device has cut a program anew."""
        self.feed(job.ready(program))

    def finished(self, done: Finished) -> None:
        """Process the end of a launch when the host learns of it."""
        job, launched = self._in_flight.pop(done.launch)
        recut = job.ended(self, launched, done)
        if self._keep_rows:
            self.timeline.append(
                LaunchRow(job.name, launched.step, launched.piece, launched.share, done.started, done.ended)
            )
        self.feed(PieceDone(LaunchId(done.launch), done.started, done.ended))
        if recut:
            self.recut(job, launched.program)

    # ---- one event after the other

    def _handle(self) -> None:
        event, came = self._inbox.popleft()
        now = self.clock.now
        if type(event) is ev.StepSubmitted and came < now:
            event = event._replace(waited=now - came)
        self._busy = True
        self.push(now + self._handle_s, self._handled, self.scheduler.handle(event, now))

    def _handled(self, commands: list[cmd.Command]) -> None:
        for command in commands:
            if (act := self._execute.get(type(command))) is None:
                raise RuntimeError(f"the scheduler refused what was simulated: {command}")
            act(command)
        self._busy = bool(self._inbox)
        if self._busy:
            self._handle()

    # ---- commands

    def _wake_at(self, c: cmd.WakeAt) -> None:
        if c.when < self._wake:
            self._wake = c.when
            self.push(max(c.when, self.clock.now), self._tick, c.when)

    def _tick(self, when: float) -> None:
        if when == self._wake:
            self._wake = inf
            self.feed(ev.Tick())

    def _launch(self, c: cmd.LaunchPiece) -> None:
        job = self._jobs[c.job]
        self._in_flight[c.launch] = (job, c)
        job.launch(self, c)

    def _cut(self, c: cmd.CutProgram) -> None:
        self._jobs[c.job].cut_requested(c.program, c.target_s)

    def _accepted(self, c: cmd.AcceptJob) -> None:
        for offer in self._jobs[c.job].offers():
            self.feed(offer)

    def _load(self, c: cmd.AcceptProgram) -> None:
        self.feed(self._jobs[c.job].ready(c.program))

    def _announced(self, c: cmd.AnnounceProgram) -> None:
        self._jobs[c.job].announced(self, c.program)

    def _finish_step(self, c: cmd.FinishStep) -> None:
        self._jobs[c.job].answered(self, c.step)
