"""What burst parallelism and low work give a cluster: DeepPool's figures 9 to 11 on 8 simulated GPUs.

For each model: every layer on all GPUs (DP), burst-parallel plans under several amplification limits (BP), the plans
beside a low job on every GPU, which trains the same model by itself on a GPU's share of the batch (BP + low), and the
cluster parted into GPUs for one and GPUs for the other. Then, for VGG-16, what each technique of sharing is worth.

With --profiles DIR, which holds DeepPool's `profile/*.prof`, the layer times are theirs; without, they are modelled.
Throughput is in samples a second of all jobs, as the paper has it.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from gpumux.cli.arguments import whole
from gpumux.device.sim.spec import A100, GpuSpec
from gpumux.errors import ConfigError
from gpumux.plan.costs import powers_of_two, preset
from gpumux.plan.graph import LayerGraph, reduce
from gpumux.plan.plan import Placement
from gpumux.plan.query import PlanQuery
from gpumux.program.saved_plan import SavedPlan
from gpumux.simulate.cluster import ClusterSimulation, parts_of
from gpumux.simulate.comparison import ClusterCase, Comparison, LowJob
from gpumux.simulate.daemon import DaemonSettings
from gpumux.simulate.run import solo
from gpumux.simulate.workload import Workload
from gpumux.types import Priority
from microbench import a100, common
from microbench.ablation import EAGER_S, ROWS
from microbench.planner import modelled

GPUS = 8
NETWORK = "nvswitch"
LIMITS = (1.5, 2.0, 4.0, inf)
POLICIES = ("paced", "guarded")
LOSS = 0.18  # of the foreground's throughput by low work, at most (section 7.1)
GAINS = (1.2, 2.3)  # of cluster throughput over DP (abstract)
LARGE = 16  # samples of the low job in figure 11, before its batch is made smaller
NAIVE_ITERATIONS = 1  # takes a hundred times as long as alone


@dataclass(frozen=True)
class Paper:
    """What section 7.1 says of a model: how much faster the foreground is at the throughput of a partition, at best,
    and whether that is where the cluster gives more than with 2 GPUs for the foreground."""

    faster: float
    says: str


PAPER = {
    "vgg16": Paper(0.38, "up to 38 % faster at the same throughput"),
    "wide_resnet101_2": Paper(0.11, "up to 11 % faster, and up to 25 % more throughput"),
    "inception_v3": Paper(0.37, "up to 37 % faster where throughput is above that of 2 foreground GPUs"),
}


@dataclass(frozen=True)
class Point:
    """One way to use the cluster. limit: the amplification limit of a plan, 0 for none."""

    limit: float
    case: ClusterCase

    @property
    def label(self) -> str:
        if not self.limit:
            return self.case.name
        return f"limit {'none' if self.limit == inf else f'{self.limit:g}'}, {self.case.policy or 'alone'}"

    @property
    def samples_per_s(self) -> float:
        return self.case.samples_per_s or 0.0

    def figures(self) -> dict[str, Any]:
        limit = None if self.limit in (0, inf) else self.limit
        return self.case.figures() | {"label": self.label, "amplification_limit": limit}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = common.parser(__doc__)
    arguments.add_argument("--profiles", type=Path, metavar="DIR", help="where DeepPool's A100_*.prof lie")
    arguments.add_argument("--models", nargs="+", choices=list(a100.MODELS), default=list(a100.MODELS))
    arguments.add_argument("--iterations", type=whole, default=20, help="of each run, after as many to warm up")
    arguments.add_argument("--max-slowdown", type=float, default=1.1, help="what the foreground is promised")
    args = arguments.parse_args(argv)
    machine = common.machine()
    print(common.describe(machine))
    began = time.monotonic()
    report: dict[str, Any] = {"machine": machine, "max_slowdown": args.max_slowdown, "iterations": args.iterations,
                              "models": {}, "targets": {}}  # fmt: skip
    try:
        for name in args.models:
            report["models"][name] = found = figures_9_and_10(name, args)
            report["targets"] |= found["targets"]
        if "vgg16" in args.models:
            report["techniques"] = figure_11(args)
    except ConfigError as error:
        print(f"{error.message}: {error.remedy}", file=sys.stderr)
        return 78
    report["seconds"] = time.monotonic() - began
    for name, target in report["targets"].items():
        shown = "-" if target["value"] is None else f"{target['value']:.3f}"
        print(f"{name}: {shown}, published {target['target']}, {'met' if target['met'] else 'NOT MET'}")
    common.report("cluster", args.out, report)
    return 0


# ---- figures 9 and 10: throughput, and what it costs the foreground


def figures_9_and_10(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Every way to use the cluster with a model, printed as it is known."""
    graph, batch = graph_of(name, args.profiles), a100.MODELS[name].batch
    query = PlanQuery(graph, batch, GPUS, powers_of_two(GPUS), preset(NETWORK))
    low = low_job(graph, max(batch // GPUS, smallest(graph)), A100)
    only = GPUS * solo(low.workload, A100).steps_per_s * (low.batch or 0)
    print(f"\n{name}, batch {batch}; low: the same with batch {low.batch}, {only:.0f} samples/s on all GPUs alone")
    print(_line(("", "iteration", "speed-up", "loss", "low", "samples/s", "over DP")), flush=True)
    points: list[Point] = []
    for point in points_of(query, low, args):
        points.append(point)
        print(_line(_cells(point, points)), flush=True)
    judged = targets(name, points)
    return {
        "sources": sorted({layer.source for layer in graph.layers}),
        "global_batch": batch,
        "low_batch": low.batch,
        "low_only_samples_per_s": only,
        "points": [point.figures() for point in points],
        "targets": judged,
        "paper": PAPER[name].says,
    }


def points_of(query: PlanQuery, low: LowJob, args: argparse.Namespace) -> Iterator[Point]:
    """DP, the parted cluster, and each different plan alone and beside low work."""
    known: set[Placement] = set()
    for limit in LIMITS:
        limited = replace(query, limit=limit)
        plan = limited.plan()
        if plan.placement in known:
            continue
        compared = _compared(limited.saved(plan), low, POLICIES, args)
        for case in compared.cases():
            if case.policy or case.name == "plan":
                yield Point(limit, case)
            elif not known:
                yield Point(0, case)
        known.add(plan.placement)


def _compared(plan: SavedPlan, low: LowJob, policies: Sequence[str], args: argparse.Namespace) -> Comparison:
    return Comparison(plan, [low], A100, policies, args.iterations, args.iterations, max_slowdown=args.max_slowdown)


def targets(name: str, points: Sequence[Point]) -> dict[str, dict[str, Any]]:
    """The published shares and ours, at one operating point: the one with the most throughput of those that cost the
    foreground no more than the paper allows, and leave it faster than data parallel, if there are any."""
    plain = points[0]
    parted = [point for point in points if not point.limit and point is not plain]
    shared = [point for point in points if point.case.policy]
    fitting = [point for point in shared if loss(point) < LOSS] or shared
    faster = [point for point in fitting if point.case.speedup > plain.case.speedup]
    chosen = max(faster or fitting, key=lambda point: point.samples_per_s)
    gain, more = chosen.samples_per_s / plain.samples_per_s, chosen.case.speedup / plain.case.speedup
    ahead, which = faster_at_equal_throughput(shared, parted)
    wanted = PAPER[name].faster
    return {
        f"{name}: throughput over DP ({chosen.label})": {
            "value": gain, "target": f"{GAINS[0]} to {GAINS[1]}", "met": GAINS[0] <= gain <= GAINS[1]
        },
        f"{name}: what low work costs the foreground ({chosen.label})": {
            "value": loss(chosen), "target": f"below {LOSS}", "met": loss(chosen) < LOSS
        },
        f"{name}: foreground over DP's, beside low work ({chosen.label})": {
            "value": more, "target": "above 1", "met": more > 1
        },
        f"{name}: foreground faster than a parted cluster's at equal throughput ({which})": {
            "value": ahead, "target": f"up to {wanted}", "met": ahead is not None and ahead >= wanted
        },
    }  # fmt: skip


def loss(point: Point) -> float:
    """The part of the foreground's throughput that its plan loses by low work."""
    return 1 - 1 / point.case.slowdown


def faster_at_equal_throughput(shared: Sequence[Point], parted: Sequence[Point]) -> tuple[float | None, str]:
    """How much faster the foreground is with low work beside it than in a parted cluster of the same throughput, at
    best, and at which point. Between two partitions lie mixtures of them. Points beyond every partition's throughput
    have nothing to be compared with; None if all are."""
    found: list[tuple[float, str]] = []
    for point in shared:
        speedups = [
            reached
            for one, other in itertools.combinations(parted, 2)
            if (reached := _speedup_at(point.samples_per_s, one, other)) is not None
        ]
        if speedups:
            found.append((point.case.speedup / max(speedups) - 1, point.label))
    return max(found) if found else (None, "all give more than any partition")


def _speedup_at(samples_per_s: float, one: Point, other: Point) -> float | None:
    """The foreground's speed-up where a mixture of two partitions has this throughput; None if none has."""
    low, high = sorted((one, other), key=lambda point: point.samples_per_s)
    if not low.samples_per_s <= samples_per_s <= high.samples_per_s or low.samples_per_s == high.samples_per_s:
        return None
    share = (samples_per_s - low.samples_per_s) / (high.samples_per_s - low.samples_per_s)
    return (1 - share) * low.case.speedup + share * high.case.speedup


# ---- figure 11: what each technique is worth


def figure_11(args: argparse.Namespace) -> list[dict[str, Any]]:
    """VGG-16's plan on all GPUs as techniques are added; throughputs over that of the plan alone with graphs."""
    graph = graph_of("vgg16", args.profiles)
    query = PlanQuery(graph, a100.MODELS["vgg16"].batch, GPUS, powers_of_two(GPUS), preset(NETWORK), 2.0)
    plan = query.saved(query.plan())
    large, small = (low_job(graph, batch, A100) for batch in (LARGE, plan.batch // GPUS))
    eager = replace(A100, call_s=EAGER_S)
    ways: list[tuple[str, GpuSpec, DaemonSettings, LowJob | None]] = [
        (ROWS[0], eager, DaemonSettings("paced", graphs=False), None),
        (ROWS[1], A100, DaemonSettings("paced"), None),
        (ROWS[2], A100, DaemonSettings("streams", priorities=False), large),
        (ROWS[3], A100, DaemonSettings("streams"), large),
        (ROWS[4], A100, DaemonSettings("paced"), large),
        (ROWS[5], A100, DaemonSettings("guarded"), large),
        (ROWS[6], A100, DaemonSettings("guarded"), small),
    ]
    rows: list[dict[str, Any]] = []
    print(f"\nvgg16, limit 2: techniques one by one; low batch {large.batch}, then {small.batch}")
    print(_line(("", "iteration", "high", "low GPUs", "samples/s", "over alone")), flush=True)
    alone = 0.0
    for label, spec, settings, low in ways:
        parts = parts_of(plan.rows, plan.layers, plan.batch, spec)
        some = [] if low is None else [low.workload]
        simulation = ClusterSimulation(parts, GPUS, spec, settings, low=some, max_slowdown=args.max_slowdown)
        if settings.policy == "streams" or low is None:  # without low work all iterations are alike
            result = simulation.run(NAIVE_ITERATIONS)
        else:
            result = simulation.run(args.iterations, args.iterations)
        batch = 0 if low is None else low.batch or 0
        per_s = plan.batch / result.iteration_s + batch * sum(each.steps_per_s for each in result.low)
        rows.append({"label": label, "iteration_s": result.iteration_s, "low": result.low_throughput,
                     "samples_per_s": per_s})  # fmt: skip
        if label == ROWS[1]:
            alone = result.iteration_s
            rows[0]["high"] = alone / rows[0]["iteration_s"]
        rows[-1]["high"] = alone / result.iteration_s if alone else None
        print(
            _line(
                (label, f"{result.iteration_s * 1e3:.2f} ms", "-" if not alone else f"{alone / result.iteration_s:.3f}",
                 f"{result.low_throughput:.2f}", f"{per_s:.0f}",
                 "-" if not alone else f"{per_s * alone / plan.batch:.2f}")
            ),
            flush=True,
        )  # fmt: skip
    return rows


# ---- models and low jobs


def graph_of(name: str, profiles: Path | None) -> LayerGraph:
    return reduce(a100.profile(profiles, name) if profiles else modelled(name))


def smallest(graph: LayerGraph) -> int:
    """The smallest batch that all layers were timed at."""
    return max(layer.times[0].samples for layer in graph.layers)


def low_job(graph: LayerGraph, batch: int, spec: GpuSpec) -> LowJob:
    """The model trained by itself on one GPU, with kernels as the plan's have."""
    query = PlanQuery(graph, batch, 1, (1,), preset(NETWORK))
    alone = query.saved(query.data_parallel(1))
    kernels = [kernel for part in parts_of(alone.rows, alone.layers, batch, spec) for kernel in part.kernels]
    return LowJob(Workload(f"low {graph.name}", Priority.LOW, tuple(kernels)), batch)


# ---- lines, printed as they come


def _cells(point: Point, points: Sequence[Point]) -> tuple[str, ...]:
    case = point.case
    return (
        point.label,
        f"{case.iteration_s * 1e3:.2f} ms",
        f"{case.speedup:.2f}",
        f"{loss(point):.1%}" if case.policy else "-",
        f"{case.low_throughput:.2f}",
        f"{point.samples_per_s:.0f}",
        f"{point.samples_per_s / points[0].samples_per_s:.2f}",
    )


def _line(cells: Sequence[str]) -> str:
    return f"{cells[0]:<28}" + "".join(f"{cell:>12}" for cell in cells[1:])


if __name__ == "__main__":
    sys.exit(main())
