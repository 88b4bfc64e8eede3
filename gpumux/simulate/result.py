"""The result of a simulation: each job's steps compared with the same job alone, and the launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gpumux.device.sim.gpu import Busy
from gpumux.pictures import HIGH_COLOR, LINE_COLOR, LOOKS, LOW_COLOR, TEXT, WIDE, figure, label, literal, save
from gpumux.types import Priority

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class LaunchRow(NamedTuple):
    """One launch. `started` and `ended` are device seconds, including time waiting for room on multiprocessors."""

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
    """One job. step_seconds: every answered step, in order, from its submission, or from the end of the job's previous
    step if that was later, to its last piece's end. Figures leave out the first `warmup` steps of high jobs, and count
    other jobs' work only from the moment when all high jobs had passed them: `window_s` seconds."""

    name: str
    priority: Priority
    max_slowdown: float
    step_work_s: float  # device seconds of one step, alone
    solo: Solo
    step_seconds: list[float] = field(default_factory=list)
    step_ends: list[float] = field(default_factory=list)
    warmup: int = 0
    window_s: float = 0.0
    work_s: float = 0.0  # in the window: time that the ended pieces take alone
    device_s: float = 0.0  # in the window: time that those pieces took

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
        """Mean slowdown of the warm-up steps; nan if there are none."""
        return self.slowdown_of(self.step_seconds[: self.warmup])

    @property
    def p50_slowdown(self) -> float:
        return percentile(self.measured, 0.50) / self.solo.step_s

    @property
    def p99_slowdown(self) -> float:
        """99th percentile of the step times over that of the job alone."""
        return percentile(self.measured, 0.99) / self.solo.p99_s

    @property
    def steps_over_target(self) -> int:
        """Steps slower than `max_slowdown` times the mean alone."""
        return sum(seconds > self.max_slowdown * self.solo.step_s for seconds in self.measured)

    @property
    def relative_throughput(self) -> float:
        """Work done, relative to the job alone in the same time; nan without time."""
        alone = self.solo.steps_per_s * self.step_work_s * self.window_s
        return self.work_s / alone if alone else float("nan")

    def slowdown_of(self, seconds: Sequence[float]) -> float:
        """Mean of `seconds` over the mean step alone."""
        return sum(seconds) / len(seconds) / self.solo.step_s if seconds else float("nan")

    def figures(self) -> dict[str, Any]:
        """Plain data; None if there is no figure."""
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
    """A whole run. ended_at: virtual seconds. window_s: seconds that figures cover. explanations: the scheduler's
    sentences about each job at the end. timeline: the latest launches, if they were asked for."""

    device: str
    policy: str
    jobs: list[JobResult]
    ended_at: float
    window_s: float
    interrupted: bool
    busy: Busy
    snapshot: dict[str, Any]
    explanations: dict[str, list[str]]
    timeline: list[LaunchRow]

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
        """Harvested seconds for each second of the window; nan without time."""
        return self.harvested_s / self.window_s if self.window_s else float("nan")

    @property
    def total_throughput(self) -> float:
        """Sum of the jobs' relative throughputs: 1.0 is what a device gives to one job."""
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
    """The smallest sample that at least `share` (0..1) of the samples do not exceed; nan without samples."""
    ordered = sorted(samples)
    return ordered[max(0, ceil(share * len(ordered)) - 1)] if ordered else float("nan")


# ---- Pictures of simulations.


STEPS_SHOWN = 6  # of the slowest high job, in a timeline
MOST_EDGED = 150  # bars; with more, only their edges would be visible


def timelines(results: Sequence[Result], path: Path) -> None:
    """For each run: its high jobs' slowdown step by step, and its latest launches as bars, a lane a job."""
    lanes = max(len(result.jobs) for result in results)
    drawn = figure(WIDE, len(results) * (1.9 + 0.35 * lanes))
    axes = drawn.subplots(len(results), 2, squeeze=False, width_ratios=(1, 2))
    for row, result in zip(axes, results, strict=True):
        _slowdowns(row[0], result, legend=result is results[0])
        _launches(row[1], result)
    save(drawn, path)


def _slowdowns(axes: Axes, result: Result, *, legend: bool) -> None:
    jobs = result.of(Priority.HIGH) or result.jobs
    for job, look in zip(jobs, cycle(LOOKS), strict=False):
        slowdowns = [seconds / job.solo.step_s for seconds in job.step_seconds]
        axes.plot(
            slowdowns, lw=0.9, color=look.color, ls=look.dashes if len(jobs) > 1 else "-", label=literal(job.name)
        )
        axes.axhline(job.max_slowdown, color=LINE_COLOR, ls=":", lw=1.2)
        if job.warmup:
            axes.axvspan(0, job.warmup, color=LINE_COLOR, alpha=0.12, lw=0)
    axes.plot([], [], color=LINE_COLOR, ls=":", lw=1.2, label="promised")
    axes.set_ylim(bottom=min(0.9, axes.get_ylim()[0]))
    label(
        axes,
        "step (shaded: warm-up)",
        "step over alone",
        f"{result.policy}: high steps",
        legend=legend or len(jobs) > 1,
    )


def _launches(axes: Axes, result: Result) -> None:
    """Draw the end of the run, long enough for a few steps of the high job."""
    shown = _shown_seconds(result.of(Priority.HIGH) or result.jobs)
    last = max((row.ended for row in result.timeline), default=0.0)
    first = max(0.0, last - shown)
    for lane, job in enumerate(result.jobs):
        rows = [row for row in result.timeline if row.job == job.name and row.ended > first]
        high = job.priority is Priority.HIGH
        for share in sorted({row.share for row in rows}):
            bars = [((r.started - first) * 1e3, (r.ended - r.started) * 1e3) for r in rows if r.share == share]
            height = 0.8 * share  # a launch confined to half of the device is drawn half as high
            edge = {"edgecolor": "white", "lw": 0.4} if len(bars) < MOST_EDGED else {"lw": 0}
            axes.broken_barh(bars, (lane - height / 2, height), facecolor=HIGH_COLOR if high else LOW_COLOR, **edge)
    names = [f"{literal(job.name)}\n({job.priority.name.lower()})" for job in result.jobs]
    axes.set_ylim(len(result.jobs) - 0.4, -0.6)
    axes.set_xlim(0, max(last - first, 1e-9) * 1e3)
    label(axes, "time (ms)", "", f"{result.policy}: launches, the last few steps")
    axes.set_yticks(range(len(result.jobs)), names, fontsize=TEXT)


def _shown_seconds(jobs: Sequence[JobResult]) -> float:
    latest = [max(job.step_seconds[-STEPS_SHOWN:], default=0.0) for job in jobs]
    return STEPS_SHOWN * max(max(latest, default=0.0), max(job.solo.step_s for job in jobs))
