"""`gpumux plan burst`: the number of GPUs of each layer, and what that is worth."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isfinite, isinf
from pathlib import Path

from gpumux.cli.advise import idle_option, model_profile
from gpumux.cli.text import ProgressLine, emit, emit_json, milliseconds, printable, table
from gpumux.errors import ConfigError
from gpumux.plan import baselines, costs, plot
from gpumux.plan.costs import Network, powers_of_two
from gpumux.plan.graph import members, reduce
from gpumux.plan.layers import ModelProfile
from gpumux.plan.network import measured
from gpumux.plan.plan import BurstPlan
from gpumux.plan.query import PlanQuery
from gpumux.program.saved_plan import save
from gpumux.wording import counted

CRITICAL_BATCH = 1024.0
NETWORK = "nvswitch"

Curve = Sequence[tuple[float, BurstPlan | None]]  # amplification limits, and the plan for each


def run(args: argparse.Namespace) -> int:
    """Find a plan and print it with its value."""
    _check_pictures(args)
    if args.save and not Path(args.save).parent.is_dir():
        raise ConfigError(f"{Path(args.save).parent} is no directory", "name a file in one that exists")
    link = _network(args)
    line = ProgressLine()
    try:
        return _run(args, link, line)
    finally:
        line.end()


def _run(args: argparse.Namespace, link: Network, line: ProgressLine) -> int:
    line.begin(f"reading the layers of {printable(args.model)}")
    profile = model_profile(args)
    counts = args.counts or powers_of_two(args.gpus)
    if counts[-1] > args.gpus:
        raise ConfigError(f"--counts has {counts[-1]}, and the cluster has {counted(args.gpus, 'GPU')}", "leave it out")
    query = PlanQuery(
        reduce(profile), args.global_batch, args.gpus, counts, link, args.amplification, args.overlap, args.algorithm
    )
    line.begin("searching for the plan")
    began = time.perf_counter()
    plan = query.plan()
    search_s = time.perf_counter() - began
    beside = _beside(query)
    curve = plot.over_limits(query, _limits(line)) if args.curve or args.figures else []
    if args.curve:
        line.begin("planning for smaller clusters, and other ways to scale")
    sizes = plot.over_sizes(query, _efficiency(args)) if args.curve else []
    notes = _notes(args, query, profile, curve)
    if args.save:
        line.begin("planning for smaller clusters, which the file has, too")
        save(query.saved(plan), Path(args.save))
        notes.append(f"saved; what sharing gives it: gpumux simulate --plan {args.save} --low PROFILE")
    line.end()
    if args.json:
        body = plan.figures() | {
            "counts": list(query.counts),
            "overlap": query.overlap,
            "search_s": search_s,
            "network": {"name": link.name, "bandwidth": link.bandwidth, "latency": link.latency},
            "baselines": [
                {"algorithm": each.algorithm, "gpus": each.width, "iteration_s": each.seconds, "idle_gpu_s": each.idle}
                for each in beside
            ],
            "notes": notes,
        }
        if args.curve:
            body["curve"] = [_point(limit, each) for limit, each in curve]
            body["sizes"] = [
                {"strategy": each.strategy, "gpus": each.gpus, "global_batch": each.batch,
                 "iteration_s": each.iteration_s,
                 "speedup_to_accuracy": each.speedup}
                for each in sizes
            ]  # fmt: skip
        emit_json(body)
    else:
        shown = [_curve(query, curve), _sizes(sizes)] if args.curve else []
        emit("\n\n".join([describe(plan), compare([plan, *beside]), *shown, "\n".join(notes)]))
    if args.plot or args.figures:
        line.begin("drawing")
        _draw(args, query, plan, curve)
    return 0


def _limits(line: ProgressLine) -> Callable[[int, int, float], None]:
    return lambda done, whole, limit: line.begin(f"{done} of {whole} amplification limits planned, now {_limit(limit)}")


def _network(args: argparse.Namespace) -> Network:
    if args.bandwidth is not None and args.latency is not None:
        idle_option(args, ["network"], "beside both --bandwidth and --latency", "what either does not say")
    name = args.network or NETWORK
    if name not in costs.PRESETS and (Path(name).suffix == ".json" or Path(name).is_file()):
        idle_option(args, ["bandwidth", "latency"], "beside a measured --network", "a preset, which they replace")
        return measured.load(Path(name)).network(Path(name).stem)
    found = costs.preset(name)
    if args.bandwidth is not None:
        found = replace(found, name="given", bandwidth=args.bandwidth, source="given")
    if args.latency is not None:
        found = replace(found, name="given", latency=args.latency, source="given")
    return found


def _beside(query: PlanQuery) -> list[BurstPlan]:
    """Data parallelism on one GPU and on as many as a layer may have, if layers were timed at those batches."""
    return [query.data_parallel(count) for count in sorted({1, query.counts[-1]})]


def describe(plan: BurstPlan) -> str:
    """A plan as text: runs of layers with the same count, and their costs."""
    names = [layer.name for layer in plan.graph.layers]
    rows = []
    for i in members(plan.graph.chain):
        amplification = plan.amplification[i]
        rows.append(
            (
                names[i],
                str(plan.placement.gpus[i]),
                milliseconds(plan.times[i]),
                "-" if amplification is None else f"{amplification:.2f}",
            )
        )
    head = (
        f"{plan.graph.name} on {counted(plan.gpus, 'GPU')}, global batch {plan.batch}, amplification limit"
        f" {_limit(plan.limit)}, {plan.algorithm}\niteration {milliseconds(plan.seconds)}, {plan.speedup:.2f} times as"
        f" fast as one GPU; {plan.busy * 1e3:.3f} GPU-ms used, {plan.idle * 1e3:.3f} GPU-ms idle for other jobs"
        f" ({_idle(plan):.0%} of {plan.gpus} GPUs)"
    )
    away = len(plan.placement.away)
    if away:
        head += f"\n{away} branch{'es run' if away > 1 else ' runs'} beside others, on GPUs of their own"
    over = [names[i] for i in plan.over_limit()]
    if over:
        head += f"\nabove the limit: {', '.join(over)}"
    return f"{head}\n{table(('LAYER', 'GPUS', 'TIME', 'AMPLIFICATION'), rows)}"


def compare(plans: Sequence[BurstPlan]) -> str:
    """Several plans for one cluster, as a table."""
    rows = [
        (
            "one GPU" if plan.algorithm == "data-parallel" and plan.width == 1 else plan.algorithm,
            str(plan.width),
            milliseconds(plan.seconds),
            f"{plan.speedup:.2f}",
            milliseconds(plan.busy),
            f"{_idle(plan):.0%}",
        )
        for plan in plans
    ]
    return table(("PLAN", "GPUS", "ITERATION", "SPEED-UP", "GPU TIME", _idle_of(plans[0].gpus)), rows)


def _curve(query: PlanQuery, curve: Curve) -> str:
    rows = [
        (
            (_limit(limit), "no plan", "-", "-", "-")
            if plan is None
            else (
                _limit(limit) + (" (exceeded)" if plan.over_limit() else ""),
                milliseconds(plan.seconds),
                f"{plan.speedup:.2f}",
                milliseconds(plan.busy),
                f"{_idle(plan):.0%}",
            )
        )
        for limit, plan in curve
    ]
    return table(("LIMIT", "ITERATION", "SPEED-UP", "GPU TIME", _idle_of(query.gpus)), rows)


def _sizes(sizes: Sequence[baselines.Scaled]) -> str:
    rows = [
        (str(each.gpus), each.strategy, str(each.batch), milliseconds(each.iteration_s), f"{each.speedup:.2f}")
        for each in sizes
    ]
    return table(("GPUS", "SCALING", "BATCH", "ITERATION", "SPEED-UP TO ACCURACY"), rows)


def _efficiency(args: argparse.Namespace) -> baselines.SampleEfficiency:
    return baselines.SampleEfficiency(args.critical_batch or CRITICAL_BATCH)


def _point(limit: float, plan: BurstPlan | None) -> dict[str, object]:
    """One limit of the curve as plain data: null if no plan keeps it."""
    keep = ("iteration_s", "speedup", "gpu_s", "busy_gpu_s", "idle_gpu_s", "over_limit")
    figures = dict.fromkeys(keep) if plan is None else plan.figures()
    return {"amplification_limit": limit if isfinite(limit) else None} | {key: figures[key] for key in keep}


def _notes(args: argparse.Namespace, query: PlanQuery, profile: ModelProfile, curve: Curve) -> list[str]:
    """The assumptions behind the figures, and what they leave out."""
    graph, link = query.graph, query.network
    sources = ", ".join(sorted({layer.source for layer in graph.layers}))
    notes = [
        f"layer times of {graph.device} ({sources}); network {link.name}: {link.bandwidth / 1e9:g} GB/s a GPU, "
        f"{link.latency * 1e6:g} us ({link.source})"
    ]
    if link.sums:
        among = _listed([each.gpus for each in link.sums])
        notes.append(f"all-reduces as measured among {among} ranks; between these numbers on a straight line")
    if query.overlap:
        notes.append(f"{query.overlap:.0%} of each layer's backward time hides the sync of its gradients")
    largest = min(layer.times[-1].samples for layer in graph.layers)
    if args.global_batch > largest:
        notes.append(f"batches above {largest} are taken as several of {largest}: none so large was timed")
    without = [_limit(limit) for limit, plan in curve if plan is None]
    if without:
        notes.append(f"no plan over {_listed(query.counts)} GPUs keeps a limit of {', '.join(without)}")
    share = query.batch // query.gpus
    if args.figures and plot.background_batch(query) > share:
        notes.append(
            f"background jobs of the trade-off run batches of {plot.background_batch(query)}: no layer was timed"
            f" at {share}"
        )
    notes += [profile.note] if args.profile else []
    notes += graph.notes
    notes += [profile.unsteady()] if profile.unsteady() else []
    return notes


def _check_pictures(args: argparse.Namespace) -> None:
    """Check the options for pictures before anything is traced or searched."""
    if not (args.figures or args.curve):
        idle_option(args, ["critical-batch"], "without --figures or --curve", "the ways to scale that they show")
    if not (args.plot or args.figures):
        return
    plot.available()
    if args.plot:
        path = Path(args.plot)
        if path.suffix.lower() != ".png":
            raise ConfigError(f"{path} is no name of a PNG", "pictures are PNG: name a FILE.png")
        if not path.parent.is_dir():
            raise ConfigError(f"{path.parent} is no directory", "name a file in one that exists")
    if args.figures:
        try:
            Path(args.figures).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"can't make {args.figures}: {error.strerror}", "name a directory you may write"
            ) from None


def _draw(args: argparse.Namespace, query: PlanQuery, plan: BurstPlan, curve: Curve) -> None:
    if args.plot:
        plot.timeline(plan, Path(args.plot))
    if not args.figures:
        return
    directory, name = Path(args.figures), query.graph.name
    efficiency = _efficiency(args)
    limited = f"{name}, amplification limit {_limit(query.limit)}, {query.algorithm}"
    plot.scaling(plot.over_sizes(query, efficiency), limited, directory / "scaling.png")
    plot.networks(plot.over_networks(query, efficiency), limited, directory / "networks.png")
    plot.layers(query.graph, plot.layer_speedups(query), query.counts, directory / "layers.png")
    points = plot.operating_points(query, [each for _, each in curve if each is not None])
    plot.trade_off(points, name, directory / "trade_off.png")


def _idle(plan: BurstPlan) -> float:
    """The part of the cluster's GPU time in which nothing runs."""
    return plan.idle / (plan.gpus * plan.seconds) if plan.seconds else 0.0


def _idle_of(gpus: int) -> str:
    return f"IDLE OF {gpus} GPUS" if gpus > 1 else "IDLE"


def _limit(limit: float) -> str:
    return "none" if isinf(limit) else f"{limit:g}"


def _listed(counts: Sequence[int]) -> str:
    return ", ".join(map(str, counts))
