"""What each technique is worth: a high job's and a low job's throughput as techniques are added (DeepPool, figure 11).

The high job is VGG-16 as DeepPool scales it: 4 images a GPU, one of 8 GPUs under a burst-parallel plan, its gradients
all-reduced, waiting between steps for the dense layers that another GPU runs. The low job is VGG-16 alone with 16
images. Each row changes one thing from the row before it. Throughput is in steps over what the same job does alone with
graphs; the last row's low job is counted in images over what the 16-image one does alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpumux import config
from gpumux.cli.arguments import whole
from gpumux.device.sim.spec import GpuSpec, preset
from gpumux.errors import ConfigError
from gpumux.program.profile import StepProfile
from gpumux.simulate import workload as analytic
from gpumux.simulate import workload as shipped
from gpumux.simulate.run import simulate, solo
from gpumux.simulate.workload import Workload, cut_workload, from_profile
from gpumux.types import Priority
from microbench import charts, common, deeppool, oracle

GPUS = 8
HIGH_BATCH, LOW_BATCH, SMALL_BATCH = 4, 16, 4
# Host seconds an eager framework takes for one operator, its launch included. Guess: the middle of what is published
# for torch, 5 to 25 us (the driver's launch alone is GpuSpec.call_s). The result says what graphs gain at others.
EAGER_S = 15e-6
EAGER_RANGE_S = (5e-6, 10e-6, 15e-6, 20e-6, 25e-6, 30e-6)
ROWS = (
    "single launches", "graphs", "naive second job", "+ stream priorities", "+ launch pacing", "+ slowdown feedback",
    "+ smaller background batch",
)  # fmt: skip
PACED_SMALL = "(pacing, smaller batch)"  # beside the paper's order: what a smaller batch is worth without feedback


@dataclass(frozen=True)
class Row:
    """One bar. Throughputs are over the same job's alone, with graphs; `images`: both jobs' images a second over
    the high job's alone, where both are counted in images."""

    label: str
    high: float
    low: float
    mean_slowdown: float | None = None
    p99_slowdown: float | None = None
    images: float | None = None

    @property
    def total(self) -> float:
        return self.high + self.low

    def figures(self) -> dict[str, Any]:
        return vars(self) | {"total": self.total}


@dataclass(frozen=True)
class Jobs:
    high: Workload
    low: Workload
    small: Workload
    images: tuple[int, int]  # a step of the low job, and of the small one
    source: str

    def both_images(self, spec: GpuSpec, high: float, low: float) -> float:
        """What is done in all, in images a second over the high job's alone: `high` and `low` of what the high and
        the large low job do alone. A large batch does more images a second, so this is more than their sum."""
        alone = solo(self.high, spec).steps_per_s * HIGH_BATCH
        return high + low * solo(self.low, spec).steps_per_s * self.images[0] / alone


def main(argv: list[str] | None = None) -> int:
    arguments = common.parser(__doc__)
    arguments.add_argument("--device", choices=("sim", "cpu", "cuda"), default="sim", help="default: sim")
    arguments.add_argument(
        "--gpu-model",
        choices=config.SIMULATED_GPUS,
        help="what is simulated (default: a100; beside a GPU the one most like it)",
    )
    arguments.add_argument("--profile", type=Path, help="DeepPool's A100_vgg.prof instead of the shipped profiles")
    arguments.add_argument("--high", help="another shipped profile, or a profile's file, as the high job")
    arguments.add_argument("--max-slowdown", type=float, default=1.05, help="what the high job is promised")
    arguments.add_argument("--steps", type=whole, default=400, help="high steps of each row, after the warm-up")
    arguments.add_argument("--warmup", type=int, default=200, help="high steps of each row left out")
    arguments.add_argument("--oracle", action="store_true", help="sim: also say what could be reached at best")
    arguments.add_argument("--repeats", type=whole, default=3, help="cpu: turns alone and shared of each row")
    arguments.add_argument("--png", type=common.new_file, metavar="FILE.png", help="draw the bars")
    args = arguments.parse_args(argv)
    try:
        found = run(args)
    except ConfigError as error:
        print(f"{error.message}: {error.remedy}", file=sys.stderr)
        return 78
    rows = found["rows"]
    print(found["source"])
    print(show([*rows, *found["oracle"]]))
    for name, target in found["targets"].items():
        print(f"{name}: {target['value']:.3f}, target {target['target']:.2f}, {'met' if target['met'] else 'MISSED'}")
    if found["graphs_gain"]:
        told = ", ".join(f"{gain['gain']:.2f} at {gain['call_s'] * 1e6:.0f} us" for gain in found["graphs_gain"])
        print(f"graphs over single launches, by host time an operator: {told}")
    plain = {key: [row.figures() for row in found[key]] for key in ("rows", "oracle")}
    common.report("ablation", args.out, {"device": args.device, "max_slowdown": args.max_slowdown, **found, **plain})
    if args.png:
        on = f"{args.gpu_model or 'a100'} {args.device}" if args.device == "sim" else args.device
        draw(args.png, plain["rows"], on)
    return 0


def draw(path: Path, rows: Sequence[dict[str, Any]], on: str) -> None:
    """A bar a technique; `on`: the device."""
    names, high, low = ([row[key] for row in rows] for key in ("label", "high", "low"))
    charts.stacked_bars(path, f"techniques one by one, on {on}", names, high, low)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """source, rows, what an oracle reaches, targets, graphs_gain. Raises ConfigError for a device that is not there."""
    if args.device == "cuda":
        return on_cuda(args)
    if args.device == "cpu":
        from microbench import ablation_cpu  # torch, and a daemon

        rows, source = ablation_cpu.measure(args.steps, args.repeats, args.max_slowdown)
        return {"source": source, "rows": rows, "oracle": [], "targets": {}, "graphs_gain": []}
    spec = preset(args.gpu_model or "a100")
    jobs = make_jobs(spec, args.max_slowdown, args.profile, args.high)
    rows = simulated(jobs, spec, args.steps, args.warmup)
    return {
        "source": jobs.source,
        "rows": rows,
        "oracle": best(jobs, spec) if args.oracle else [],
        "targets": targets(rows, args.max_slowdown),
        "graphs_gain": graphs_gain(jobs.high, spec),
    }


def on_cuda(args: argparse.Namespace) -> dict[str, Any]:
    """The rows on the GPU, and what the simulator says of the same jobs."""
    from microbench import ablation_cuda, predicted, ways
    from microbench.cuda import probe

    model = args.gpu_model or predicted.model_of(probe.card().card)
    rows, profiles = ablation_cuda.measure(ways.Setting("cuda", "full", ablation_cuda.SECONDS, ablation_cuda.SETTLE_S))
    says, source = ablation_cuda.predict(model, profiles, args.steps, args.warmup, args.max_slowdown)
    compared = predicted.bars([row.figures() for row in rows], [row.figures() for row in says])
    told = f"VGG-16, 4 images a step beside 16 (or 4), no pauses; the prediction is for {model}, from profiles {source}"
    print(predicted.show_bars(compared))
    more = {"compared": compared, "predicted": [row.figures() for row in says], "profiles": profiles}
    return {"source": told, "rows": rows, "oracle": [], "targets": {}, "graphs_gain": [], **more}


def make_jobs(spec: GpuSpec, max_slowdown: float, path: Path | None, high: str | None) -> Jobs:
    """The three jobs: from DeepPool's file at `path`, or as shipped. Raises ConfigError when there is no such
    profile."""
    if path is None:
        first = shipped.find(high or f"vgg16-b{HIGH_BATCH}-burst")
        low, small = (shipped.find(f"vgg16-b{batch}") for batch in (LOW_BATCH, SMALL_BATCH))
        wait_s = analytic.dense_seconds(HIGH_BATCH * GPUS)
        source = f"high {first.name}, low {low.name} and {small.name}: modelled profiles that come with gpumux"
    else:
        by_batch = deeppool.read(path)
        missing = {HIGH_BATCH, LOW_BATCH, SMALL_BATCH, HIGH_BATCH * GPUS} - by_batch.keys()
        if missing:
            raise ConfigError(f"{path} has no times for batches of {sorted(missing)}", "use A100_vgg.prof")
        first = deeppool.vgg16(by_batch[HIGH_BATCH], gpus=GPUS, dense=False)
        low, small = (deeppool.vgg16(by_batch[batch]) for batch in (LOW_BATCH, SMALL_BATCH))
        wait_s = deeppool.dense_seconds(by_batch[HIGH_BATCH * GPUS])
        source = f"high {first.name}, low {low.name} and {small.name}: DeepPool's layer times, the rest modelled"

    def job(profile: StepProfile, name: str, priority: Priority, think_s: float = 0.0) -> Workload:
        return from_profile(profile, spec, priority, name=name, think_s=think_s, max_slowdown=max_slowdown)

    think_s = wait_s if first.name.endswith("burst") else 0.0
    if think_s:
        source += f"; the high job waits {think_s * 1e3:.2f} ms between steps for another GPU's dense layers"
    lows = (job(low, "low", Priority.LOW), job(small, "small", Priority.LOW))
    return Jobs(job(first, "high", Priority.HIGH, think_s), *lows, (LOW_BATCH, SMALL_BATCH), source)


def graphs_gain(job: Workload, spec: GpuSpec) -> list[dict[str, float]]:
    """What graphs gain the high job alone, by what an operator launched by itself costs the host."""
    alone = solo(job, spec).steps_per_s
    costs = [replace(spec, call_s=seconds) for seconds in EAGER_RANGE_S]
    return [{"call_s": cost.call_s, "gain": alone / solo(job, cost, graphs=False).steps_per_s} for cost in costs]


def simulated(jobs: Jobs, spec: GpuSpec, steps: int, warmup: int) -> list[Row]:
    """Every row on the simulated device."""
    eager = replace(spec, call_s=EAGER_S)
    alone = solo(jobs.high, spec)
    rows = [
        Row(ROWS[0], solo(jobs.high, eager, graphs=False).steps_per_s / alone.steps_per_s, 0.0),
        Row(ROWS[1], 1.0, 0.0, images=1.0),
    ]
    rows[0] = replace(rows[0], images=rows[0].high)
    ways: Sequence[tuple[str, str, bool, Workload]] = (
        (ROWS[2], "streams", False, jobs.low),
        (ROWS[3], "streams", True, jobs.low),
        (ROWS[4], "paced", True, jobs.low),
        (ROWS[5], "guarded", True, jobs.low),
        (ROWS[6], "guarded", True, jobs.small),
        (PACED_SMALL, "paced", True, jobs.small),
    )
    for label, policy, priorities, low in ways:
        pair = [jobs.high, low]
        result = simulate(pair, spec, policy, steps=steps, warmup_steps=warmup, priorities=priorities)
        high, beside = result.of(Priority.HIGH)[0], result.of(Priority.LOW)[0]
        images = jobs.images[low is jobs.small]
        per_s = beside.relative_throughput * beside.solo.steps_per_s * images
        of_large = per_s / (solo(jobs.low, spec).steps_per_s * jobs.images[0])
        both = jobs.both_images(spec, high.relative_throughput, of_large)
        rows.append(Row(label, high.relative_throughput, of_large, high.mean_slowdown, high.p99_slowdown, both))
    return rows


def best(jobs: Jobs, spec: GpuSpec) -> list[Row]:
    """What an oracle reaches under the high job's promise, with the larger and the smaller low job."""
    rows = []
    alone = solo(jobs.high, spec)
    for label, low, images in (
        ("oracle", jobs.low, jobs.images[0]),
        ("oracle, smaller batch", jobs.small, jobs.images[1]),
    ):
        found = oracle.Search(jobs.high, low, spec).run().best
        images_per_s = found.harvest / cut_workload(low, spec).step_s * images
        # A slower step makes the whole period, pause included, longer by as much.
        period_s = 1 / alone.steps_per_s
        high = period_s / (period_s + (found.mean - 1) * alone.step_s)
        of_large = images_per_s / (solo(jobs.low, spec).steps_per_s * jobs.images[0])
        rows.append(Row(label, high, of_large, found.mean, found.p99, jobs.both_images(spec, high, of_large)))
    return rows


def targets(rows: Sequence[Row], max_slowdown: float) -> dict[str, dict[str, Any]]:
    """The shape the paper's figure has."""
    by = {row.label: row for row in rows}
    single, graphs, naive, priorities, paced, feedback, small = (by[label] for label in ROWS)

    def at_least(value: float, target: float) -> dict[str, Any]:
        return {"value": value, "target": target, "met": value >= target}

    return {
        "graphs over single launches": at_least(graphs.high / single.high, 1.1),
        "what a naive second job costs the high one": at_least(1 - naive.high, 0.25),
        "priorities give little back: naive over priorities": at_least(naive.high / priorities.high, 0.9),
        "pacing over priorities": at_least(paced.high / priorities.high, 1.0),
        "feedback over pacing": at_least(feedback.high / paced.high, 1.0),
        "pacing gives most of what comes back": at_least(
            (paced.high - priorities.high) / (small.high - priorities.high), 0.5
        ),
        "the high job at the end": at_least(small.high, 1 / max_slowdown),
        "both jobs at the end, steps over alone": at_least(small.total, 1.3),
        "both jobs at the end, images": at_least(small.images or 0.0, 1.3),
        "both jobs with feedback, images": at_least(feedback.images or 0.0, 1.3),
    }


def show(rows: Sequence[Row]) -> str:
    def figure(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    header = ["technique", "high", "low", "total", "images", "high slowdown", "p99"]
    cells = [
        [
            r.label,
            f"{r.high:.3f}",
            f"{r.low:.3f}",
            f"{r.total:.3f}",
            figure(r.images),
            figure(r.mean_slowdown),
            figure(r.p99_slowdown),
        ]
        for r in rows
    ]
    return common.table(header, cells)


if __name__ == "__main__":
    sys.exit(main())
