"""What a simulation found: for each job its steps against the same job alone, and what ran when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any, NamedTuple

from gpumux.device.sim.gpu import Busy
from gpumux.model import Priority


class Row(NamedTuple):
    """One launch: `started` and `ended` are device seconds, waiting for room on the multiprocessors included."""

    job: str
    step: int
    piece: int
    share: float
    started: float
    ended: float


class Solo(NamedTuple):
    """A job alone on the device: seconds a step takes on average and at the 99th percentile, steps a second."""

    step_s: float
    p99_s: float
    steps_per_s: float


@dataclass(slots=True)
class JobResult:
    """One job. `step_seconds` has every answered step, in order: from its submission, or from the end of the job's step
    before it if that was later, to its last piece's end. Figures leave the first `warmup` steps of high jobs out, and
    count what the others did only from the moment all high jobs had passed them: `window_s` seconds."""

    name: str
    priority: Priority
    max_slowdown: float
    step_work_s: float  # device seconds of one step, alone
    solo: Solo
    step_seconds: list[float] = field(default_factory=list)
    step_ends: list[float] = field(default_factory=list)
    warmup: int = 0
    window_s: float = 0.0
    work_s: float = 0.0  # in the window: seconds alone of the pieces that ended
    device_s: float = 0.0  # in the window: seconds those pieces took

    @property
    def measured(self) -> list[float]:
        return self.step_seconds[self.warmup :]

    @property
    def steps(self) -> int:
        return len(self.measured)

    @property
    def mean_slowdown(self) -> float:
        """Mean step time over the mean alone; nan without a step."""
        return self.slowdown_of(self.measured)

    @property
    def learning_slowdown(self) -> float:
        """The same of the steps left out; nan if there are none."""
        return self.slowdown_of(self.step_seconds[: self.warmup])

    @property
    def p50_slowdown(self) -> float:
        return percentile(self.measured, 0.50) / self.solo.step_s

    @property
    def p99_slowdown(self) -> float:
        """99th percentile of the step times over the same alone."""
        return percentile(self.measured, 0.99) / self.solo.p99_s

    @property
    def steps_over_target(self) -> int:
        """Steps slower than `max_slowdown` times the mean alone."""
        return sum(seconds > self.max_slowdown * self.solo.step_s for seconds in self.measured)

    @property
    def relative_throughput(self) -> float:
        """Work done over what the job would have done alone in the same time; nan without time."""
        alone = self.solo.steps_per_s * self.step_work_s * self.window_s
        return self.work_s / alone if alone else float("nan")

    def slowdown_of(self, seconds: Sequence[float]) -> float:
        """Mean of `seconds` over the mean step alone."""
        return sum(seconds) / len(seconds) / self.solo.step_s if seconds else float("nan")

    def figures(self) -> dict[str, Any]:
        """Plain data; None where there is no figure."""
        found = {
            "name": self.name,
            "priority": self.priority.name.lower(),
            "steps": self.steps,
            "solo_step_s": self.solo.step_s,
            "mean_slowdown": self.mean_slowdown,
            "p50_slowdown": self.p50_slowdown,
            "p99_slowdown": self.p99_slowdown,
            "steps_over_target": self.steps_over_target,
            "warmup_steps": self.warmup,
            "warmup_slowdown": self.learning_slowdown,
            "relative_throughput": self.relative_throughput,
            "work_s": self.work_s,
            "device_s": self.device_s,
        }
        return {key: None if value != value else value for key, value in found.items()}


@dataclass(slots=True)
class Result:
    """A whole run. `ended_at` is virtual seconds, `window_s` those that figures are about; `explanations` are the core's
    sentences about each job at the end; `timeline` the latest launches, if they were asked for."""

    device: str
    policy: str
    jobs: list[JobResult]
    ended_at: float
    window_s: float
    interrupted: bool
    busy: Busy
    snapshot: dict[str, Any]
    explanations: dict[str, list[str]]
    timeline: list[Row]

    def job(self, name: str) -> JobResult:
        """The job called `name`. Raises KeyError."""
        for job in self.jobs:
            if job.name == name:
                return job
        raise KeyError(name)

    def of(self, priority: Priority) -> list[JobResult]:
        return [job for job in self.jobs if job.priority is priority]

    @property
    def harvested_s(self) -> float:
        """Seconds of low work (as it takes alone) done in the window."""
        return sum(job.work_s for job in self.of(Priority.LOW))

    @property
    def harvest(self) -> float:
        """The same for each second of the window; nan without time."""
        return self.harvested_s / self.window_s if self.window_s else float("nan")

    @property
    def total_throughput(self) -> float:
        """Sum of the jobs' throughputs, each over its own alone: 1.0 is what one job a device gives."""
        return sum(job.relative_throughput for job in self.jobs)

    def figures(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "device": self.device,
            "policy": self.policy,
            "simulated_s": self.ended_at,
            "window_s": self.window_s,
            "interrupted": self.interrupted,
            "device_busy_s": self.busy.device_s,
            "host_launching_s": self.busy.launching_s,
            "total_throughput": None if self.total_throughput != self.total_throughput else self.total_throughput,
            "jobs": [job.figures() for job in self.jobs],
            "explanations": self.explanations,
        }


def percentile(samples: Sequence[float], share: float) -> float:
    """The smallest sample that at least `share` (0..1) of the samples do not exceed; nan of none."""
    ordered = sorted(samples)
    return ordered[max(0, ceil(share * len(ordered)) - 1)] if ordered else float("nan")
