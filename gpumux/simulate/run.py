"""The daemon's scheduler over the simulated GPU, on a virtual clock.

    client --client_s--> inbox --> scheduler (handle_s an event) --> launches --> Gpu --> what the host learns --> inbox

Everything the daemon does on its one thread is serial here too: an event waits while another is handled, and
what the scheduler decides takes effect when its handling is over. The GPU adds the host's launch calls and the
time until the host knows that a launch has ended (GpuSpec.completion_s). The same seed gives the same run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from heapq import heappop, heappush
from itertools import count
from math import inf
from random import Random
from typing import Any, Protocol

from gpumux.device.sim.cost import GpuSpec, Kernel
from gpumux.device.sim.device import TARGET_S, Pieces, recut
from gpumux.device.sim.gpu import Finished, Gpu
from gpumux.errors import ConfigError
from gpumux.scheduler import events as cmd
from gpumux.scheduler import events as ev
from gpumux.scheduler.config import SchedulerConfig
from gpumux.scheduler.scheduler import Scheduler
from gpumux.simulate.result import JobResult, LaunchRow, Result, Solo, percentile
from gpumux.simulate.workload import Workload, cut_workload
from gpumux.types import (
    DeviceInfo,
    Footprint,
    JobId,
    LaunchId,
    Peer,
    PieceDone,
    Priority,
    ProgramId,
    ProgramReady,
    SessionId,
    StepId,
)

# ---- A simulated job's client: it submits steps and records their times.


PROGRAM = ProgramId(0)


class World(Protocol):
    """The simulation that a client belongs to."""

    now: float
    client_s: float

    def feed(self, event: ev.Event) -> None:
        """Pass an event to the daemon now."""

    def push(self, when: float, act: Callable[[Any], None], argument: Any) -> None:
        """Call `act(argument)` at a virtual time."""


class Client:
    """The client of one job. Sums are over its whole life; `*_before_s` are the sums at the start of the measured
    window."""

    def __init__(self, index: int, workload: Workload, pieces: Pieces, seed: int) -> None:
        self.id = JobId(f"{index:032x}")
        self.workload = workload
        self.high = workload.priority is Priority.HIGH
        self.cuts: dict[int, Pieces] = {}  # the pieces that the device announced, by cut
        self.kernels: dict[int, tuple[tuple[Kernel, ...], ...]] = {}  # the kernels that run, by cut
        self.target_s = workload.target_s  # of the newest cut
        self.asked: tuple[float | None] | None = None  # piece length of the requested cut, if there is one
        # The work of each piece, by cut: a step is the same work in every cut.
        self._work: dict[int, tuple[float, ...]] = {}
        self.step_seconds: list[float] = []
        self.step_ends: list[float] = []
        self.work_s = self.device_s = 0.0
        self.work_before_s = self.device_before_s = 0.0
        self._random = Random(f"{seed}/{index}/{workload.name}")
        self._next_step = 0
        self._inflight = 0
        self._backlog = 0  # arrivals that found `max_inflight` steps unanswered
        self._submitted: deque[float] = deque()  # submission times of steps whose last piece has not ended
        self.cut(pieces)

    @property
    def newest(self) -> int:
        """The cut of newly submitted steps."""
        return len(self.cuts) - 1

    def cut(self, pieces: Pieces) -> None:
        """Cut the job's program like this from now on."""
        number = len(self.cuts)
        self.cuts[number], self.kernels[number] = pieces, pieces.kernels
        scale = self.cuts[0].step_s / pieces.step_s
        self._work[number] = tuple([scale * seconds for seconds in pieces.seconds])

    def cut_anew(self, cut: int, piece: int, spec: GpuSpec) -> bool:
        """Called after a piece; whether the program is now cut differently. That happens if a cut was requested and a
        step of the newest cut has ended, so that no step of an older cut is under way."""
        if self.asked is None or cut != self.newest or piece < len(self.cuts[cut].seconds) - 1:
            return False
        (target_s,), self.asked = self.asked, None
        self.target_s = self.workload.target_s if target_s is None else target_s
        pieces = cut_workload(replace(self.workload, target_s=self.target_s), spec)
        if pieces.bounds == self.cuts[cut].bounds:
            return False
        self.cut(pieces)
        return True

    def begin(self, world: World) -> None:
        """Start submitting: the job's program is loaded."""
        workload = self.workload
        if workload.rate is not None:
            world.push(world.now + self._random.expovariate(workload.rate), self._arrive, world)
        else:
            for _ in range(1 if workload.think_s else workload.max_inflight):
                self._submit(world)

    def answered(self, world: World) -> None:
        """Called when a step's answer is sent to the client."""
        if self.workload.rate is None:
            world.push(world.now + world.client_s + self.workload.think_s, self._submit_next, world)
        elif self._backlog:
            self._backlog -= 1
            world.push(world.now + world.client_s, self._submit_next, world)
        else:
            self._inflight -= 1

    def piece_ended(self, cut: int, piece: int, started: float, ended: float) -> None:
        pieces = self.cuts[cut]
        self.work_s += self._work[cut][piece]
        self.device_s += ended - started
        if piece == len(pieces.seconds) - 1:
            before = self.step_ends[-1] if self.step_ends else 0.0
            self.step_seconds.append(ended - max(self._submitted.popleft(), before))
            self.step_ends.append(ended)

    def begin_window(self) -> None:
        self.work_before_s, self.device_before_s = self.work_s, self.device_s

    def _arrive(self, world: World) -> None:
        assert self.workload.rate is not None
        world.push(world.now + self._random.expovariate(self.workload.rate), self._arrive, world)
        if self._inflight < self.workload.max_inflight:
            self._submit(world)
        else:
            self._backlog += 1

    def _submit_next(self, world: World) -> None:
        """Submit a step in place of an answered one."""
        self._inflight -= 1
        self._submit(world)

    def _submit(self, world: World) -> None:
        step = StepId(self._next_step)
        self._next_step += 1
        self._inflight += 1
        self._submitted.append(world.now)
        world.feed(ev.StepSubmitted(self.id, step, PROGRAM))


# ---- The simulation.


HANDLE_S = 20e-6  # the daemon's own time for an event: twice what microbench/core_rate measures of the scheduler alone
CLIENT_S = 60e-6  # an answer's way to the client and the next step's way back; guess beside microbench/rtt
SOLO_STEPS, SOLO_WARMUP = 48, 4
SOLO_POISSON_STEPS = 512
TIMELINE_ROWS = 20_000
PROGRESS_EVERY = 256  # turns of the loop

_SESSION = SessionId("simulated")
Progress = Callable[["Simulation"], None]
Enough = Callable[["Simulation"], bool]


class EventHandler(Protocol):
    """What decides: the daemon's scheduler, or something to compare it with."""

    def handle(self, event: ev.Event, now: float) -> list[cmd.Command]: ...

    def snapshot(self) -> dict[str, Any]: ...

    def explain(self, job: JobId) -> list[str]: ...


class Simulation:
    """Jobs on one device under one policy. `run` may be called again, and continues. Raises ConfigError for invalid
    jobs or settings. Job ids are the workloads' positions in hexadecimal. scheduler: replaces the one of the daemon."""

    def __init__(
        self,
        workloads: Sequence[Workload],
        spec: GpuSpec,
        policy: str = "guarded",
        *,
        seed: int = 0,
        graphs: bool = True,
        priorities: bool = True,
        scheduler_config: Mapping[str, Any] | None = None,
        timeline: bool = False,
        handle_s: float = HANDLE_S,
        client_s: float = CLIENT_S,
        scheduler: EventHandler | None = None,
    ) -> None:
        names = [workload.name for workload in workloads]
        if not workloads or len(set(names)) != len(names):
            raise ConfigError(f"jobs named {names}", "give at least one job, each a name of its own")
        self.spec, self.policy, self.now = spec, policy, 0.0
        self.scheduler = scheduler or Scheduler(SchedulerConfig(policy=policy, **dict(scheduler_config or {})))
        self.gpu = Gpu(spec, graphs=graphs, priorities=priorities)
        self.clients = [Client(i, w, cut_workload(w, spec), seed) for i, w in enumerate(workloads)]
        self.timeline: deque[LaunchRow] = deque(maxlen=TIMELINE_ROWS)
        self._graphs = graphs
        self._keep_rows = timeline
        self._handle_s, self.client_s = handle_s, client_s
        self._by_id = {client.id: client for client in self.clients}
        self._due: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._serial = count()
        self._inbox: deque[tuple[ev.Event, float]] = deque()  # each with its time
        self._busy = False
        self._wake = inf
        self._in_flight: dict[int, tuple[Client, cmd.LaunchPiece]] = {}
        self._window_from: float | None = 0.0
        self._warmup = 0
        self._execute: dict[type, Callable[[Any], None]] = {
            cmd.LaunchPiece: self._launch,
            cmd.FinishStep: self._finish_step,
            cmd.WakeAt: self._wake_at,
            cmd.AcceptJob: self._accepted,
            cmd.AcceptProgram: self._load,
            cmd.AnnounceProgram: self._announced,
            cmd.CutProgram: self._cut,
        }
        self._open()

    # ---- interventions

    def at(self, when: float, act: Callable[[], None]) -> None:
        """Call `act` at a virtual time, for instance to change what a job does from then on."""
        self.push(when, lambda _: act(), None)

    def change(self, name: str, kernels: Sequence[Kernel]) -> None:
        """Silently replace a job's kernels by as many others. Its program, cut and predictions stay."""
        client = next(c for c in self.clients if c.workload.name == name)
        if len(kernels) != len(client.workload.kernels):
            raise ConfigError(f"{len(kernels)} kernels for a step of {len(client.workload.kernels)}", "give as many")
        for number, pieces in client.cuts.items():
            client.kernels[number] = recut(kernels, pieces.bounds, self.spec).kernels

    def recut(self, name: str, bounds: tuple[int, ...]) -> None:
        """Let the device cut a job's program anew and announce it. Raises ConfigError for invalid bounds."""
        client = next(c for c in self.clients if c.workload.name == name)
        kernels = client.workload.kernels
        if bounds[:1] != (0,) or bounds[-1] != len(kernels) or list(bounds) != sorted(set(bounds)):
            raise ConfigError(f"bounds {bounds} of {len(kernels)} kernels", "rise from 0 to their number")
        client.cut(recut(kernels, bounds, self.spec))
        self._ready(client)

    def run(
        self,
        *,
        seconds: float | None = None,
        steps: int | None = None,
        warmup_steps: int = 0,
        progress: Progress | None = None,
        enough: Enough | None = None,
    ) -> Result:
        """Run until `seconds` of virtual time from the start, until every high job (every job, if none is high) has
        `steps` answered after the warm-up, or until `enough`, called after every piece, is true: whichever comes first.
        An interrupt from the keyboard ends the run early, with a result so far. Raises ConfigError without `seconds`
        and `steps`."""
        if seconds is None and steps is None:
            raise ConfigError("a simulation without an end", "give seconds, steps or both")
        self._warmup = warmup_steps
        if warmup_steps:
            self._window_from = None
        interrupted = False
        try:
            self._run(inf if seconds is None else seconds, steps, progress, enough)
        except KeyboardInterrupt:
            interrupted = True
        return self._result(interrupted)

    # ---- the loop

    def _run(self, until: float, steps: int | None, progress: Progress | None, enough: Enough | None) -> None:
        due, gpu, warmup = self._due, self.gpu, self._warmup
        counted = [c.step_seconds for c in self.clients if c.high] or [c.step_seconds for c in self.clients]
        wanted = inf if steps is None else steps + warmup
        for turn in count(1):
            limit = min(due[0][0], until) if due else until
            if limit == inf and gpu.next_event() == inf:
                raise RuntimeError(
                    "nothing will ever happen again: the scheduler left the device idle with steps submitted"
                )
            if finished := gpu.advance_to_finish(limit):
                self.now = gpu.now
                for each in finished:
                    self._finished(each)
            elif due and due[0][0] <= until:
                self.now, _, act, argument = heappop(due)
                act(argument)
            else:
                self.now = until
                return
            if self._window_from is None and min(map(len, counted)) >= warmup:
                self._begin_window()
            if finished and (min(map(len, counted)) >= wanted or (enough is not None and enough(self))):
                return
            if progress is not None and turn % PROGRESS_EVERY == 0:
                progress(self)

    def _begin_window(self) -> None:
        self._window_from = self.now
        for client in self.clients:
            client.begin_window()

    def push(self, when: float, act: Callable[[Any], None], argument: Any) -> None:
        """Call `act(argument)` at a virtual time."""
        heappush(self._due, (when, next(self._serial), act, argument))

    # ---- the daemon

    def feed(self, event: ev.Event) -> None:
        """Pass an event to the daemon now: from a client, the device or elsewhere (a pause, a resume)."""
        self._inbox.append((event, self.now))
        if not self._busy:
            self._handle()

    def _handle(self) -> None:
        event, came = self._inbox.popleft()
        if type(event) is ev.StepSubmitted and came < self.now:
            event = event._replace(waited=self.now - came)
        self._busy = True
        self.push(self.now + self._handle_s, self._handled, self.scheduler.handle(event, self.now))

    def _handled(self, commands: list[cmd.Command]) -> None:
        for command in commands:
            if (act := self._execute.get(type(command))) is None:
                raise RuntimeError(f"the scheduler refused what was simulated: {command}")
            act(command)
        self._busy = bool(self._inbox)
        if self._busy:
            self._handle()

    def _wake_at(self, c: cmd.WakeAt) -> None:
        if c.when < self._wake:
            self._wake = c.when
            self.push(max(c.when, self.now), self._tick, c.when)

    def _tick(self, when: float) -> None:
        if when == self._wake:
            self._wake = inf
            self.feed(ev.Tick())

    def _launch(self, c: cmd.LaunchPiece) -> None:
        client = self._by_id[c.job]
        self._in_flight[c.launch] = (client, c)
        self.gpu.launch(c.launch, c.job, c.stream, client.kernels[c.cut][c.piece], self.now, c.share)

    def _finished(self, done: Finished) -> None:
        """Process the end of a launch when the host learns of it."""
        client, launched = self._in_flight.pop(done.launch)
        client.piece_ended(launched.cut, launched.piece, done.started, done.ended)
        if self._keep_rows:
            name = client.workload.name
            self.timeline.append(
                LaunchRow(name, launched.step, launched.piece, launched.share, done.started, done.ended)
            )
        self.feed(PieceDone(LaunchId(done.launch), done.started, done.ended))
        if client.asked is not None and client.cut_anew(launched.cut, launched.piece, self.spec):
            self._ready(client)

    def _cut(self, c: cmd.CutProgram) -> None:
        self._by_id[c.job].asked = (c.target_s,)

    # ---- jobs

    def _open(self) -> None:
        spec = self.spec
        targets = {priority.name.lower(): seconds for priority, seconds in TARGET_S.items()}
        info = DeviceInfo("sim", spec.title, spec.memory_bytes, None, 0, "", targets, shares=spec.shares)
        self.feed(ev.DeviceOpened(info))
        self.feed(ev.SessionOpened(_SESSION, Peer(1000, 1000, 1)))
        for client in self.clients:
            request = ev.JobRequested(_SESSION, client.id, client.workload.job_spec)
            if client.workload.starts_at:
                self.push(client.workload.starts_at, self.feed, request)
            else:
                self.feed(request)

    def _accepted(self, c: cmd.AcceptJob) -> None:
        footprint = Footprint(1 << 20, 1 << 20, 1 << 10)
        workload = self._by_id[c.job].workload
        names = tuple([kernel.name for kernel in workload.kernels])
        self.feed(ev.ProgramOffered(c.job, PROGRAM, footprint, workload.content_hash, names))

    def _load(self, c: cmd.AcceptProgram) -> None:
        self._ready(self._by_id[c.job])

    def _ready(self, client: Client) -> None:
        pieces = client.cuts[client.newest]
        self.feed(ProgramReady(client.id, PROGRAM, client.newest, pieces.seconds, pieces.bounds))

    def _announced(self, c: cmd.AnnounceProgram) -> None:
        self._by_id[c.job].begin(self)

    def _finish_step(self, c: cmd.FinishStep) -> None:
        self._by_id[c.job].answered(self)

    # ---- the result

    def _result(self, interrupted: bool) -> Result:
        window_s = 0.0 if self._window_from is None else self.now - self._window_from
        jobs = []
        for client in self.clients:
            w = client.workload
            job = JobResult(w.name, w.priority, w.max_slowdown, client.cuts[0].step_s, solo(w, self.spec, self._graphs))
            job.step_seconds, job.step_ends = list(client.step_seconds), list(client.step_ends)
            job.warmup, job.window_s = self._warmup if client.high else 0, window_s
            if self._window_from is not None:
                job.work_s = client.work_s - client.work_before_s
                job.device_s = client.device_s - client.device_before_s
            jobs.append(job)
        explanations = {client.workload.name: self.scheduler.explain(client.id) for client in self.clients}
        return Result(
            device=self.spec.name,
            policy=self.policy,
            jobs=jobs,
            ended_at=self.now,
            window_s=window_s,
            interrupted=interrupted,
            busy=self.gpu.busy(),
            snapshot=self.scheduler.snapshot(),
            explanations=explanations,
            timeline=list(self.timeline),
        )


def simulate(
    workloads: Sequence[Workload],
    spec: GpuSpec,
    policy: str = "guarded",
    *,
    seconds: float | None = None,
    steps: int | None = None,
    seed: int = 0,
    warmup_steps: int = 0,
    graphs: bool = True,
    priorities: bool = True,
    scheduler_config: Mapping[str, Any] | None = None,
    timeline: bool = False,
    progress: Progress | None = None,
) -> Result:
    """One run from beginning to end; see Simulation and its `run`."""
    simulation = Simulation(
        workloads,
        spec,
        policy,
        seed=seed,
        graphs=graphs,
        priorities=priorities,
        scheduler_config=scheduler_config,
        timeline=timeline,
    )
    return simulation.run(seconds=seconds, steps=steps, warmup_steps=warmup_steps, progress=progress)


@lru_cache(maxsize=1024)
def _alone(workload: Workload, spec: GpuSpec, graphs: bool) -> Solo:
    simulation = Simulation([workload], spec, "paced", graphs=graphs)
    steps = SOLO_STEPS if workload.rate is None else SOLO_POISSON_STEPS
    simulation._run(inf, steps + SOLO_WARMUP, None, None)
    (client,) = simulation.clients
    seconds = client.step_seconds[SOLO_WARMUP:]
    took = client.step_ends[-1] - client.step_ends[SOLO_WARMUP - 1]
    return Solo(sum(seconds) / len(seconds), percentile(seconds, 0.99), len(seconds) / took)


def solo(workload: Workload, spec: GpuSpec, graphs: bool = True) -> Solo:
    """The job alone on the device, under the policy `paced`: without other jobs there is nothing to guard."""
    return _alone(replace(workload, name="alone", starts_at=0.0, weight=1.0), spec, graphs)
