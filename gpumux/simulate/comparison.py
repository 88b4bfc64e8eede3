"""A saved plan with low jobs beside it, compared as in DeepPool's figures 9 and 10: every layer on all GPUs, the plan
alone, the plan beside low work under each policy, and the cluster parted into GPUs for one and for the other.

Throughput is in GPUs' worth: a job's over what it does alone on one GPU. Where low profiles say how many samples a step
has, it is also in samples a second, which is what the paper counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpumux.device.sim.spec import GpuSpec
from gpumux.errors import ConfigError
from gpumux.pictures import BLUE, LOW_COLOR, LOW_HATCH, SKY, TEXT, VERMILION, WIDE, figure, label, save
from gpumux.program.saved_plan import PlanRow, SavedPlan
from gpumux.simulate.cluster import ClusterResult, ClusterSimulation, parts_of
from gpumux.simulate.daemon import DaemonSettings
from gpumux.simulate.run import solo
from gpumux.simulate.workload import Workload

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ALONE_ITERATIONS = 3  # without low work all are equal
PATIENCE = 4.0  # times what a run's iterations take alone, after which it ends: some policies slow the plan fiftyfold

Progress = Callable[[str, ClusterSimulation], None]


@dataclass(frozen=True)
class LowJob:
    """A low job that each GPU gets. batch: samples of one step, if known."""

    workload: Workload
    batch: int | None = None


@dataclass(frozen=True)
class ClusterCase:
    """One way to use the cluster. gpus: those of the foreground job. slowdown: its iteration over that of the plan
    alone. speedup: over one GPU. low: throughput of low work on each GPU. samples_per_s: of all jobs, None if a low
    profile does not say how many samples a step has. policy: None without low work beside the foreground."""

    name: str
    gpus: int
    iteration_s: float
    slowdown: float
    speedup: float
    low: tuple[float, ...]
    samples_per_s: float | None
    policy: str | None = None
    result: ClusterResult | None = None

    @property
    def low_throughput(self) -> float:
        return sum(self.low)

    @property
    def throughput(self) -> float:
        """Of the whole cluster, in GPUs' worth."""
        return self.speedup + self.low_throughput

    def figures(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        found: dict[str, Any] = {
            "case": self.name,
            "policy": self.policy,
            "foreground_gpus": self.gpus,
            "iteration_s": self.iteration_s,
            "slowdown": self.slowdown,
            "speedup": self.speedup,
            "low": list(self.low),
            "low_throughput": self.low_throughput,
            "throughput": self.throughput,
            "samples_per_s": self.samples_per_s,
        }
        if self.result is not None:
            found["iterations"] = len(self.result.iterations)
            found["simulated_s"] = self.result.ended_at
            found["busy"] = list(self.result.busy)
            found["interrupted"] = self.result.interrupted
        return {key: None if isinstance(value, float) and value != value else value for key, value in found.items()}


@dataclass(frozen=True)
class Comparison:
    """What is compared, and how long each run with low work is. settings: of the daemons, apart from the policy."""

    plan: SavedPlan
    low: Sequence[LowJob]
    spec: GpuSpec
    policies: Sequence[str]
    iterations: int = 60
    warmup: int = 60
    seconds: float | None = None
    max_slowdown: float = 1.10
    seed: int = 0
    settings: DaemonSettings = field(default_factory=DaemonSettings)

    def cases(self, progress: Progress | None = None) -> Iterator[ClusterCase]:
        """Each case as it is known; an interrupted run is the last. Raises ConfigError."""
        plan = self.plan
        alone = self._foreground(plan.rows, plan.gpus)
        widest = max(plan.data_parallel, key=_width, default=None)
        if widest is not None:
            seconds = self._foreground(widest, _width(widest))
            yield self._case("data parallel", _width(widest), seconds, alone)
        yield self._case("plan", _width(plan.rows), alone, alone)
        for policy in self.policies if self.low else ():
            result = self._beside(policy, alone, progress)
            low = tuple([result.low_of(gpu) for gpu in range(plan.gpus)])
            per_s = [each.steps_per_s * self._batch(each.name) for each in result.low]
            found = self._case(f"plan, {policy}", _width(plan.rows), result.iteration_s, alone, low, per_s)
            yield replace(found, policy=policy, result=result)
            if result.interrupted:
                return
        for rows in sorted(plan.data_parallel, key=_width) if self.low else ():
            yield self._parted(rows, alone)

    def _parted(self, rows: Sequence[PlanRow], alone: float) -> ClusterCase:
        """The foreground data parallel on some GPUs, low jobs alone on the others, in turn where there are several."""
        count, gpus = _width(rows), self.plan.gpus
        seconds = self._foreground(rows, count)
        low = (*[0.0] * count, *[1.0] * (gpus - count))
        share = (gpus - count) / len(self.low)
        per_s = [
            share * solo(each.workload, self.spec).steps_per_s * self._batch(each.workload.name) for each in self.low
        ]
        return self._case(f"{count} of {gpus} GPUs", count, seconds, alone, low, per_s)

    def _case(
        self,
        name: str,
        gpus: int,
        seconds: float,
        alone: float,
        low: tuple[float, ...] = (),
        samples: Sequence[float] = (),
    ) -> ClusterCase:
        """samples: a second, of each low job; nan where they are not known."""
        per_s = self.plan.batch / seconds + sum(samples)
        return ClusterCase(
            name,
            gpus,
            seconds,
            seconds / alone,
            self.plan.single_seconds / seconds,
            low or (0.0,) * self.plan.gpus,
            per_s if per_s == per_s else None,
        )

    def _batch(self, name: str) -> float:
        """Samples of a step of a low job; nan if unknown."""
        (batch,) = [each.batch for each in self.low if each.workload.name == name]
        return float("nan") if batch is None else float(batch)

    def _foreground(self, rows: Sequence[PlanRow], gpus: int) -> float:
        """Seconds of an iteration of the plan's job without low work."""
        result = self._simulation(rows, gpus, (), "paced").run(ALONE_ITERATIONS, 1)
        if result.interrupted:  # nothing is known yet that the rest could be compared with
            raise KeyboardInterrupt
        return result.iteration_s

    def _beside(self, policy: str, alone: float, progress: Progress | None) -> ClusterResult:
        low = [each.workload for each in self.low]
        simulation = self._simulation(self.plan.rows, self.plan.gpus, low, policy)
        seconds = PATIENCE * alone * (self.iterations + self.warmup)
        if self.seconds is not None:
            seconds = min(seconds, self.seconds)
        report = None if progress is None else lambda now: progress(policy, now)
        return simulation.run(self.iterations, self.warmup, seconds=seconds, progress=report)

    def _simulation(
        self, rows: Sequence[PlanRow], gpus: int, low: Sequence[Workload], policy: str
    ) -> ClusterSimulation:
        plan = self.plan
        return ClusterSimulation(
            parts_of(rows, plan.layers, plan.batch, self.spec),
            gpus,
            self.spec,
            replace(self.settings, policy=policy),
            low=low,
            max_slowdown=self.max_slowdown,
            seed=self.seed,
        )


def _width(rows: Sequence[PlanRow]) -> int:
    return max(row.first + row.gpus for row in rows)


# ---- Pictures.


# Colour and hatch of each kind of work; idle time is white.
KINDS = {"comp": (BLUE, ""), "comm": (VERMILION, "xxxx"), "sync": (SKY, "...."), "low": (LOW_COLOR, LOW_HATCH)}
MEANT = {"comp": "computation", "comm": "samples moved", "sync": "gradients summed", "low": "low work"}
ITERATIONS_SHOWN = 2


def picture(cases: Sequence[ClusterCase], path: Path) -> None:
    """The last iterations of each run with low work: a lane for each GPU, high work above low work."""
    shown = [case for case in cases if case.result is not None and any(case.result.timeline)]
    if not shown:
        raise ConfigError("no low work was simulated, so there is nothing to draw", "name low jobs with --low")
    gpus = max(case.result.gpus for case in shown if case.result)
    drawn = figure(WIDE, len(shown) * (0.9 + 0.32 * gpus))
    for axes, case in zip(drawn.subplots(len(shown), 1, squeeze=False)[:, 0], shown, strict=True):
        assert case.result is not None
        _lanes(axes, case, case.result)
    handles = [
        drawn.axes[0].broken_barh([], (0, 0), facecolor=color, hatch=hatch, edgecolor="white", lw=0, label=MEANT[kind])
        for kind, (color, hatch) in KINDS.items()
    ]
    drawn.legend(handles=handles, loc="outside upper center", ncols=len(KINDS), fontsize=TEXT, frameon=False)
    save(drawn, path)


def _lanes(axes: Axes, case: ClusterCase, result: ClusterResult) -> None:
    last = max(row.ended for rows in result.timeline for row in rows)
    seconds = ITERATIONS_SHOWN * (case.iteration_s if case.iteration_s < inf else last)
    first = max(0.0, last - seconds)
    for gpu, rows in enumerate(result.timeline):
        for kind, (color, hatch) in KINDS.items():
            height = 0.4 if kind == "low" else 0.42
            bars = [
                ((max(row.started, first) - first) * 1e3, (row.ended - max(row.started, first)) * 1e3)
                for row in rows
                if row.kind == kind and row.ended > first
            ]
            axes.broken_barh(
                bars,
                (gpu if kind == "low" else gpu - 0.44, height),
                facecolor=color,
                hatch=hatch,
                edgecolor="white",
                lw=0,
            )
    axes.set_ylim(result.gpus - 0.45, -0.6)
    axes.set_xlim(0, (last - first) * 1e3)
    axes.set_yticks(range(result.gpus))
    title = f"{case.name}: iteration {case.iteration_s * 1e3:.2f} ms, slowdown {case.slowdown:.2f}"
    label(axes, "time (ms)", "GPU", f"{title}, low work of {case.low_throughput:.2f} GPUs")
