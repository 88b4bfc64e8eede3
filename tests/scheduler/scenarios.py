"""Support: high and low jobs beside each other on a simulated GPU, and what is known of a high job."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import inf
from types import SimpleNamespace
from typing import Any

from gpumux.device.sim.cost import Kernel
from gpumux.device.sim.spec import A100, GpuSpec
from gpumux.scheduler.config import SchedulerConfig
from gpumux.scheduler.guard.decisions import LaunchDecision
from gpumux.scheduler.guard.guard import SlowdownGuard
from gpumux.scheduler.guard.high_job import LEARNING_STEPS, HighCosts, HighJob
from gpumux.scheduler.jobs import LowKey
from gpumux.simulate.run import Simulation
from gpumux.simulate.workload import Workload
from gpumux.types import DeviceInfo, JobId, Priority

from .world import World

WHOLE = replace(A100, shares=(1.0,))  # where a launch can't be confined
SMALL = Kernel("small", 54, 100e-6, 1, 0)  # half of the multiprocessors: low work fits beside it
LIGHT = Kernel("light", 40, 50e-6, 1, 0)  # fits beside SMALL and REDUCE


def high(kernels: tuple[Kernel, ...], name: str = "high", **rest: float | int) -> Workload:
    return Workload(name, Priority.HIGH, kernels, **{"max_slowdown": 1.05, **rest})  # type: ignore[arg-type]


def low(kernels: tuple[Kernel, ...], name: str = "low", **rest: float | int) -> Workload:
    return Workload(name, Priority.LOW, kernels, **rest)  # type: ignore[arg-type]


def world(*workloads: Workload, spec: GpuSpec = WHOLE) -> Simulation:
    return Simulation(workloads, spec, "guarded")


def ident(simulation: Simulation, name: str) -> JobId:
    return next(client.id for client in simulation.clients if client.workload.name == name)


def explained(simulation: Simulation, name: str) -> str:
    return "\n".join(simulation.scheduler.explain(ident(simulation, name)))


def held_seconds(simulation: Simulation, name: str) -> Counter[str]:
    """By reason, since the low job opened."""
    (job,) = [job for job in simulation.scheduler.snapshot()["jobs"] if job["name"] == name]
    return Counter(job["guard"]["held_seconds"])


def pace(simulation: Simulation, factor: float) -> None:
    """From now on the device takes `factor` times as long for every job."""
    for client in simulation.clients:
        job = client.workload
        simulation.change(job.name, [k._replace(block_s=factor * k.block_s) for k in job.kernels])


def chain(simulation: Simulation, name: str) -> list[int]:
    """Pieces of a step under each cut, oldest first."""
    client = next(client for client in simulation.clients if client.workload.name == name)
    return [len(pieces.seconds) for pieces in client.cuts.values()]


GAP_S = 10e-3


def pausing(world: World, steps: int, lows: dict[str, tuple[float, ...]]) -> None:
    """A high job that pauses for 10 ms after each step, known by now, and low ones of which nothing was ever
    submitted."""
    world.job("high", priority="high", pieces=(1e-3,))
    for name, pieces in lows.items():
        world.job(name, pieces=pieces, max_inflight=64)
    for number in range(steps):
        if number:
            world.elapse(GAP_S - 1e-4)
        world.step("high", number)
        world.done(next(iter(world.launches)), 1e-3)


LOW, SPAN = LowKey("low", 1.0), "1-2"
STEP_S = 1e-3


def known_high_job(name: str, gaps: list[float] | None = None, since: float = inf) -> HighJob:
    """A high job that is known by now and has no violations left; `since`: when it became idle, inf if it is not."""
    made = HighJob(SimpleNamespace(id=JobId(name), paused=False, spec=SimpleNamespace(max_slowdown=1.05, gang=None)))  # type: ignore[arg-type]
    made.budget.begin_step(STEP_S)
    made.steps, made.calibrating, made.budget.violations_left, made.idle_since = LEARNING_STEPS, 0, 0.0, since
    made.costs = HighCosts(f"of {name}", (0, 1), (STEP_S,))
    for gap in gaps or ():
        made.arrivals.add(gap)
    return made


def decided(seconds: float) -> LaunchDecision:
    """About a low piece that takes so long, before anything is known of it."""
    job: Any = SimpleNamespace(id=JobId("low"))
    step: Any = SimpleNamespace(id=0)
    return LaunchDecision(job, step, 1.0, seconds)


def guard_of(*tracks: HighJob) -> SlowdownGuard:
    guard = SlowdownGuard(SchedulerConfig(policy="guarded"), DeviceInfo("sim", "virtual", 1 << 40, 1, 0, "", {}))
    for one in tracks:
        guard.high_jobs[one.job.id] = one
        guard.view.idle_jobs.append(one)
    return guard


def known_by_now(world: World) -> None:
    found = world.scheduler._state.guard.high_jobs["high"]
    found.steps, found.budget.violations_left = LEARNING_STEPS + 100, 0.0


MOST, CREDIT = 1e-4, 5e-5  # seconds that a step may lose, at most and on average
FULL = Kernel("full", 432, 100e-6, 4, 0)
