"""Events per second through the scheduler's `handle`, with 10, 100 and 1,000 jobs, and what the guard costs.

A small device on a virtual clock (one piece at a time, the highest stream first) drives a scheduler
once and the events are written down: steps submitted, pieces done, and the launches, starts and
answers they lead to. The same events are then replayed against fresh cores, and only that is timed.
Opening jobs and loading programs is not in the figures. One job in ten is high, weights differ,
steps have 1 to 8 pieces, every job keeps two steps submitted; high clients pause between steps, for so
long that the high class wants about half of the device however many jobs there are.

Each policy is given a history of its own (what it launches decides what ends when). `guarded` may cost 1.5 times
as much an event as `paced`, by the processor's time; policies take turns, and each round has a ratio. As `guarded` asks
to be woken, it has more events for the same launches: what a launch costs is reported, too. `--after` gives every high
job so many steps before anything is timed: `guarded` learns from every step of the first 300, and from one in four of
those that follow.
"""

from __future__ import annotations

import gc
import random
import sys
import time
from collections import Counter, deque
from heapq import heappop, heappush
from math import inf
from typing import Any

from gpumux.scheduler import events as cmd
from gpumux.scheduler import events as ev
from gpumux.scheduler.config import SchedulerConfig
from gpumux.scheduler.scheduler import Scheduler
from gpumux.types import (
    DeviceInfo,
    Footprint,
    JobId,
    JobSpec,
    Peer,
    PieceDone,
    Priority,
    ProgramId,
    ProgramReady,
    SessionId,
    StepId,
)
from microbench import common

Timed = tuple[ev.Event, float]

JOBS = (10, 100, 1000)
PIECE_S = {Priority.HIGH: 400e-6, Priority.LOW: 300e-6}
THINK_S = 7.2e-3  # a high client's pause before its next step, for each high job there is
TARGET_RATE = 50_000.0  # events a second with 100 jobs
TARGET_RATIO = 0.5  # rate with 1,000 jobs over rate with 100
TARGET_COST = 1.5  # an event's time under `guarded` over that under `paced`
POLICIES = ("paced", "guarded")
AT_ONCE = 500  # events between two looks at how many steps there were
INFO = DeviceInfo("sim", "virtual", 1 << 40, 1, 0, "", {"high": 400e-6, "low": 300e-6})


class Recorder:
    """Drives one scheduler with `jobs` jobs and keeps every event it gave it."""

    def __init__(self, jobs: int, seed: int, policy: str = "paced") -> None:
        self.random = random.Random(seed)
        self.scheduler = new_scheduler(jobs, policy)
        self.wake = inf
        self.think = THINK_S * max(1, jobs // 10)
        self.events: list[Timed] = []
        self.commands = 0
        self.now = 0.0
        self.free_at = 0.0
        self.waiting: tuple[deque[cmd.LaunchPiece], ...] = tuple(deque() for _ in Priority)
        self.running: cmd.LaunchPiece | None = None
        self.submit_at: list[tuple[float, JobId]] = []
        self.next_step: dict[JobId, int] = {}
        self.priority: dict[JobId, Priority] = {}
        self.seconds: dict[JobId, tuple[float, ...]] = {}

    def give(self, event: ev.Event) -> None:
        self.events.append((event, self.now))
        if self.wake <= self.now:
            self.wake = inf
        for command in self.scheduler.handle(event, self.now):
            self.commands += 1
            if isinstance(command, cmd.LaunchPiece):
                self.waiting[command.stream].append(command)
            elif isinstance(command, cmd.FinishStep):
                high = self.priority[command.job] is Priority.HIGH
                heappush(self.submit_at, (self.now + (self.think if high else 0.0), command.job))
            elif isinstance(command, cmd.WakeAt):
                self.wake = min(self.wake, command.when)

    def set_up(self, jobs: int) -> None:
        self.give(ev.DeviceOpened(INFO))
        self.give(ev.SessionOpened(SessionId("s"), Peer(1000, 1000, 1)))
        for index in range(jobs):
            job = JobId(f"{index:032x}")
            self.priority[job] = Priority.HIGH if index % 10 == 0 else Priority.LOW
            self.seconds[job] = tuple(
                PIECE_S[self.priority[job]] * self.random.uniform(0.5, 1.5) for _ in range(self.random.randint(1, 8))
            )
            spec = JobSpec(f"job-{index}", self.priority[job], weight=self.random.choice((0.5, 1.0, 2.0)))
            self.give(ev.JobRequested(SessionId("s"), job, spec))
            self.give(ev.ProgramOffered(job, ProgramId(0), Footprint(1 << 20, 1 << 20, 1 << 10)))
            self.give(ProgramReady(job, ProgramId(0), 0, self.seconds[job]))
            self.next_step[job] = 0
            for _ in range(spec.max_inflight):
                heappush(self.submit_at, (0.0, job))

    def advance(self) -> None:
        """One event: the next client's step, the end of the piece that runs, or the time a Tick was asked for."""
        if self.running is None:
            stream = next((s for s in reversed(self.waiting) if s), None)
            if stream:
                self.running = stream.popleft()
                piece = self.seconds[self.running.job][self.running.piece]
                self.free_at = self.now + piece * self.random.uniform(0.8, 1.3)
        next_submit = self.submit_at[0][0] if self.submit_at else inf
        if self.wake < min(next_submit, inf if self.running is None else self.free_at):
            self.now = max(self.now, self.wake)
            self.give(ev.Tick())
            return
        if self.submit_at and (self.running is None or next_submit <= self.free_at):
            when, job = heappop(self.submit_at)
            self.now = max(self.now, when)
            self.give(ev.StepSubmitted(job, StepId(self.next_step[job]), ProgramId(0)))
            self.next_step[job] += 1
            return
        if self.running is None:
            raise RuntimeError("the scheduler left the device idle with steps submitted")
        started, self.now, done = self.now, max(self.now, self.free_at), self.running
        self.running = None
        self.give(PieceDone(done.launch, min(started, self.now), self.now))


def new_scheduler(jobs: int, policy: str) -> Scheduler:
    return Scheduler(SchedulerConfig(policy=policy, max_jobs=jobs, max_jobs_per_uid=jobs))


def record(jobs: int, events: int, policy: str, seed: int = 0, after: int = 0) -> tuple[list[Timed], list[Timed], int]:
    """(events that set up and let every high job do `after` steps, events to time, commands all of them led to)."""
    recorder = Recorder(jobs, seed, policy)
    recorder.set_up(jobs)
    high = [job for job in recorder.scheduler.snapshot()["jobs"] if job["priority"] == "high"]
    while after and any(job["steps_done"] < after for job in high):
        for _ in range(AT_ONCE):
            recorder.advance()
        high = [job for job in recorder.scheduler.snapshot()["jobs"] if job["priority"] == "high"]
    setup = len(recorder.events)
    while len(recorder.events) < setup + events:
        recorder.advance()
    recorder.scheduler.check_invariants()
    return recorder.events[:setup], recorder.events[setup:], recorder.commands


def replay(jobs: int, policy: str, setup: list[Timed], timed: list[Timed], commands: int) -> float:
    """Events per second of processor time, a fresh scheduler. Raises RuntimeError unless it repeats the recording."""
    scheduler = new_scheduler(jobs, policy)
    commanded = sum(len(scheduler.handle(event, now)) for event, now in setup)
    handle = scheduler.handle
    gc.collect()
    # as the daemon does: it collects when it is idle, and here a collection would walk the recordings, too
    gc.disable()
    try:
        begin = time.process_time()
        for event, now in timed:
            commanded += len(handle(event, now))
        seconds = time.process_time() - begin
    finally:
        gc.enable()
    if commanded != commands:
        raise RuntimeError(f"the replay made {commanded} commands, the recording {commands}")
    return len(timed) / seconds


def main(argv: list[str] | None = None) -> int:
    arguments = common.parser(__doc__)
    arguments.add_argument("--jobs", type=int, nargs="+", default=list(JOBS), help="numbers of jobs to try")
    arguments.add_argument("--events", type=int, default=30_000, help="events a run")
    arguments.add_argument("--repeats", type=int, default=7, help="runs of each")
    arguments.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES), help="default: both")
    arguments.add_argument("--after", type=int, default=0, help="steps of every high job that are not timed")
    args = arguments.parse_args(argv)
    facts = common.machine()
    cases = [(policy, jobs) for jobs in args.jobs for policy in args.policies]
    recordings = {case: record(case[1], args.events, case[0], after=args.after) for case in cases}
    samples: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    for _ in range(args.repeats):  # in turns, so that a busy moment of the machine hits all alike
        for (policy, jobs), recording in recordings.items():
            samples[policy, jobs].append(replay(jobs, policy, *recording))
    figures = {policy: {j: common.figure(samples[policy, j]) for j in args.jobs} for policy in args.policies}
    rows = [
        [
            policy,
            str(jobs),
            *[f"{rate:,.0f}" for rate in (f.median, f.low, f.high)],
            f"{f.spread:.0%}",
            f"{1e6 / f.median:.1f}",
        ]
        for policy, by_jobs in figures.items()
        for jobs, f in by_jobs.items()
    ]
    print(common.describe(facts))
    print(common.table(["policy", "jobs", "events/s", "lowest", "highest", "spread", "us/event"], rows))
    result: dict[str, Any] = {"machine": facts, "events_per_second": figures}
    result["samples"] = {policy: {j: samples[policy, j] for j in args.jobs} for policy in args.policies}
    result["mix"] = {policy: {j: mix(recordings[policy, j][1]) for j in args.jobs} for policy in args.policies}
    result["after_steps"] = args.after
    result["cost"], result["cost_of_a_launch"] = costs(result["samples"], result["mix"])
    result["targets"] = targets(figures, result["cost"])
    for jobs, cost in result["cost_of_a_launch"].items():
        print(f"guarded over paced, a launch with {jobs} jobs: {cost.median:.2f} ({cost.low:.2f} to {cost.high:.2f})")
    for name, target in result["targets"].items():
        print(f"{name}: {target['value']:,.2f}, target {target['target']:,.2f}, {'met' if target['met'] else 'MISSED'}")
    common.report("core_rate", args.out, result)
    return 0


def mix(timed: list[Timed]) -> dict[str, int]:
    """How many events of each kind were timed."""
    return dict(Counter(type(event).__name__ for event, _ in timed))


def costs(
    samples: dict[str, dict[int, list[float]]], mixes: dict[str, dict[int, dict[str, int]]]
) -> tuple[dict[int, common.Figure], dict[int, common.Figure]]:
    """By number of jobs, an event's time under `guarded` over that under `paced`, one ratio a round; the same of a
    launch."""
    paced, guarded = (samples.get(policy, {}) for policy in POLICIES)
    event, launch = {}, {}
    for jobs in paced.keys() & guarded.keys():
        ratios = [fast / slow for fast, slow in zip(paced[jobs], guarded[jobs], strict=True)]
        of_paced, of_guarded = (mixes[policy][jobs].get("PieceDone", 0) for policy in POLICIES)
        event[jobs] = common.figure(ratios)
        if of_paced and of_guarded:
            launch[jobs] = common.figure([ratio * of_paced / of_guarded for ratio in ratios])
    return event, launch


def targets(figures: dict[str, dict[int, common.Figure]], cost: dict[int, common.Figure]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    paced = figures.get("paced", {})
    if 100 in paced:
        value = paced[100].median
        found["rate with 100 jobs"] = {"value": value, "target": TARGET_RATE, "met": value >= TARGET_RATE}
        if 1000 in paced:
            ratio = paced[1000].median / value
            found["1000 jobs over 100"] = {"value": ratio, "target": TARGET_RATIO, "met": ratio >= TARGET_RATIO}
    for jobs, ratios in cost.items():
        name, value = f"guarded over paced, an event with {jobs} jobs", ratios.median
        found[name] = {"value": value, "target": TARGET_COST, "met": value <= TARGET_COST}
    return found


if __name__ == "__main__":
    sys.exit(main())
