"""The daemon's scheduler over one simulated GPU, on a virtual clock (`daemon.py`): jobs' clients, and a run's beginning
and end. The same seed gives the same run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import count
from math import inf
from random import Random
from typing import Any

from gpumux.device.sim.cost import Kernel
from gpumux.device.sim.device import Pieces, recut
from gpumux.device.sim.gpu import Finished
from gpumux.device.sim.spec import GpuSpec
from gpumux.errors import ConfigError
from gpumux.scheduler import events as ev
from gpumux.scheduler.events import LaunchPiece
from gpumux.simulate.daemon import (
    CLIENT_S,
    FOOTPRINT,
    HANDLE_S,
    Clock,
    DaemonSettings,
    EventHandler,
    SimulatedDaemon,
)
from gpumux.simulate.result import JobResult, Result, Solo, percentile
from gpumux.simulate.workload import Workload, cut_workload
from gpumux.types import JobId, JobSpec, Priority, ProgramId, ProgramReady, StepId

# ---- A simulated job's client: it submits steps and records their times.


PROGRAM = ProgramId(0)


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
    def name(self) -> str:
        return self.workload.name

    @property
    def job_spec(self) -> JobSpec:
        return self.workload.job_spec

    @property
    def starts_at(self) -> float:
        return self.workload.starts_at

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

    def offers(self) -> Sequence[ev.ProgramOffered]:
        names = tuple([kernel.name for kernel in self.workload.kernels])
        return (ev.ProgramOffered(self.id, PROGRAM, FOOTPRINT, self.workload.content_hash, names),)

    def ready(self, program: ProgramId) -> ProgramReady:
        pieces = self.cuts[self.newest]
        return ProgramReady(self.id, program, self.newest, pieces.seconds, pieces.bounds)

    def announced(self, daemon: SimulatedDaemon, program: ProgramId) -> None:
        """Start submitting."""
        workload = self.workload
        if workload.rate is not None:
            daemon.push(daemon.now + self._random.expovariate(workload.rate), self._arrive, daemon)
        else:
            for _ in range(1 if workload.think_s else workload.max_inflight):
                self._submit(daemon)

    def launch(self, daemon: SimulatedDaemon, launched: LaunchPiece) -> None:
        kernels = self.kernels[launched.cut][launched.piece]
        daemon.gpu.launch(launched.launch, launched.job, launched.stream, kernels, daemon.now, launched.share)

    def ended(self, daemon: SimulatedDaemon, launched: LaunchPiece, done: Finished) -> bool:
        cut, piece, ended = launched.cut, launched.piece, done.ended
        pieces = self.cuts[cut]
        self.work_s += self._work[cut][piece]
        self.device_s += ended - done.started
        if piece == len(pieces.seconds) - 1:
            before = self.step_ends[-1] if self.step_ends else 0.0
            self.step_seconds.append(ended - max(self._submitted.popleft(), before))
            self.step_ends.append(ended)
        return self.asked is not None and self._cut_anew(cut, piece, daemon.spec)

    def cut_requested(self, program: ProgramId, target_s: float | None) -> None:
        self.asked = (target_s,)

    def _cut_anew(self, cut: int, piece: int, spec: GpuSpec) -> bool:
        """Whether the program is now cut differently. That happens if a cut was requested and a step of the newest cut
        has ended, so that no step of an older cut is under way."""
        if self.asked is None or cut != self.newest or piece < len(self.cuts[cut].seconds) - 1:
            return False
        (target_s,), self.asked = self.asked, None
        self.target_s = self.workload.target_s if target_s is None else target_s
        pieces = cut_workload(replace(self.workload, target_s=self.target_s), spec)
        if pieces.bounds == self.cuts[cut].bounds:
            return False
        self.cut(pieces)
        return True

    def answered(self, daemon: SimulatedDaemon, step: int) -> None:
        if self.workload.rate is None:
            daemon.push(daemon.now + daemon.client_s + self.workload.think_s, self._submit_next, daemon)
        elif self._backlog:
            self._backlog -= 1
            daemon.push(daemon.now + daemon.client_s, self._submit_next, daemon)
        else:
            self._inflight -= 1

    def begin_window(self) -> None:
        self.work_before_s, self.device_before_s = self.work_s, self.device_s

    def _arrive(self, daemon: SimulatedDaemon) -> None:
        assert self.workload.rate is not None
        daemon.push(daemon.now + self._random.expovariate(self.workload.rate), self._arrive, daemon)
        if self._inflight < self.workload.max_inflight:
            self._submit(daemon)
        else:
            self._backlog += 1

    def _submit_next(self, daemon: SimulatedDaemon) -> None:
        """Submit a step in place of an answered one."""
        self._inflight -= 1
        self._submit(daemon)

    def _submit(self, daemon: SimulatedDaemon) -> None:
        step = StepId(self._next_step)
        self._next_step += 1
        self._inflight += 1
        self._submitted.append(daemon.now)
        daemon.feed(ev.StepSubmitted(self.id, step, PROGRAM))


# ---- The simulation.


SOLO_STEPS, SOLO_WARMUP = 48, 4
SOLO_POISSON_STEPS = 512
PROGRESS_EVERY = 256  # turns of the loop

Progress = Callable[["Simulation"], None]
Enough = Callable[["Simulation"], bool]


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
        self.spec, self.policy = spec, policy
        settings = DaemonSettings(
            policy, graphs, priorities, scheduler_config or {}, timeline, handle_s, client_s, scheduler
        )
        self._clock = Clock()
        self._daemon = daemon = SimulatedDaemon(spec, self._clock, settings)
        self.gpu, self.timeline = daemon.gpu, daemon.timeline
        self.feed = daemon.feed  # passes an event to the daemon now
        self.clients = [Client(i, w, cut_workload(w, spec), seed) for i, w in enumerate(workloads)]
        self._graphs = graphs
        self._window_from: float | None = 0.0
        self._warmup = 0
        daemon.open(self.clients)

    @property
    def scheduler(self) -> EventHandler:
        """What decides in the daemon. It may be replaced between two runs."""
        return self._daemon.scheduler

    @scheduler.setter
    def scheduler(self, scheduler: EventHandler) -> None:
        self._daemon.scheduler = scheduler

    @property
    def now(self) -> float:
        """Virtual seconds since the start."""
        return self._clock.now

    # ---- interventions

    def at(self, when: float, act: Callable[[], None]) -> None:
        """Call `act` at a virtual time, for instance to change what a job does from then on."""
        self._clock.push(when, lambda _: act(), None)

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
        self._daemon.recut(client, PROGRAM)

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
        clock, gpu, warmup = self._clock, self.gpu, self._warmup
        counted = [c.step_seconds for c in self.clients if c.high] or [c.step_seconds for c in self.clients]
        wanted = inf if steps is None else steps + warmup
        for turn in count(1):
            limit = min(clock.next_at, until)
            if limit == inf and gpu.next_event() == inf:
                raise RuntimeError(
                    "nothing will ever happen again: the scheduler left the device idle with steps submitted"
                )
            if finished := gpu.advance_to_finish(limit):
                clock.now = gpu.now
                for each in finished:
                    self._daemon.finished(each)
            elif clock.next_at <= until:
                clock.act()
            else:
                clock.now = until
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
