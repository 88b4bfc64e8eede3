"""`gpumux plan`: what to know before asking for GPUs."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from math import isinf
from pathlib import Path

from gpumux.cli import advise
from gpumux.cli.text import emit, emit_json, table
from gpumux.device.sim.spec import preset as gpu_preset
from gpumux.errors import ConfigError
from gpumux.plan import baselines, curves, network
from gpumux.plan.costs import ProfiledCosts, powers_of_two
from gpumux.plan.graph import Graph, members, reduce
from gpumux.plan.layers import ModelProfile, load, save
from gpumux.plan.models import BUILT_IN
from gpumux.plan.network import Network
from gpumux.plan.plan import Plan

DEFAULT_GPU = "a100"
BATCHES = (1, 2, 4, 8, 16, 32)
PROGRESS_S = 1.0


def run(args: argparse.Namespace) -> int:
    verbs = {"burst": _burst, "profile": _profile, **advise.VERBS}
    return verbs[args.verb](args)


# ---- whose layers


def model_profile(args: argparse.Namespace, batches: Sequence[int] | None = None) -> ModelProfile:
    """The profile in a file, or modelled for --gpu-model. Raises ConfigError for a profile of another device than asked for."""
    if args.profile:
        return _of_steps(args)
    path = Path(args.model)
    if args.model not in BUILT_IN and (path.suffix == ".json" or path.is_file()):
        found = load(path)
        _same_device(args, str(path), found.device)
        if args.whole or args.input:
            flag = "--whole" if args.whole else "--input"
            raise ConfigError(
                f"{flag} with a file, whose layers are what they are", "give it when you profile the model"
            )
        return found
    from gpumux.plan import roofline
    from gpumux.plan.models import find
    from gpumux.plan.trace import trace

    traced = trace(find(args.model, args.input), whole=args.whole)
    return roofline.profile(traced, gpu_preset(args.gpu_model or DEFAULT_GPU), batches or roofline.BATCHES)


def _of_steps(args: argparse.Namespace) -> ModelProfile:
    """The model's layers with the times of steps that jobs ran."""
    from gpumux.plan import steps
    from gpumux.plan.models import find
    from gpumux.plan.trace import trace
    from gpumux.program.profile import load as load_step

    if args.model not in BUILT_IN and Path(args.model).is_file():
        raise ConfigError(
            f"--profile with {args.model}, which has times of its own", "name the model itself, or the file alone"
        )
    found = []
    for name in args.profile:
        found.append(load_step(Path(name)))
        _same_device(args, name, found[-1].device)
    return steps.profile(trace(find(args.model, args.input), whole=args.whole), found)


def _same_device(args: argparse.Namespace, name: str, device: str) -> None:
    if args.gpu_model is not None and device != args.gpu_model:
        raise ConfigError(
            f"{name} holds times of {device!r}, not of {args.gpu_model!r}",
            "profile the model there, or leave --gpu-model out",
        )


def _network(args: argparse.Namespace) -> Network:
    found = network.preset(args.network)
    if args.bandwidth is not None:
        found = replace(found, name="given", bandwidth=args.bandwidth, source="given")
    if args.latency is not None:
        found = replace(found, name="given", latency=args.latency, source="given")
    return found


def _profile(args: argparse.Namespace) -> int:
    """Measure (or model) and write a profile."""
    out = Path(args.out)
    if not out.parent.is_dir():
        raise ConfigError(f"{out.parent} is no directory", "name a file in one that exists")
    if args.profile and args.batches:
        raise ConfigError("--batches with --profile, whose batches are the steps'", "leave --batches out")
    found = model_profile(args, args.batches) if args.gpu_model is not None or args.profile else _measured(args)
    save(found, out)
    sources = ", ".join(f"{count} {source}" for source, count in found.sources().items())
    batches = [timing.samples for timing in found.layers[0].times]
    if args.json:
        emit_json({"file": str(out), "model": found.name, "device": found.device, "layers": len(found.layers),
                   "sources": found.sources(), "seconds": {batch: found.seconds(batch) for batch in batches}})  # fmt: skip
    else:
        emit(f"{out}: {found.name}, {len(found.layers)} layers ({sources}) on {found.device}")
        emit(table(("BATCH", "ALL LAYERS"), [(str(batch), _ms(found.seconds(batch))) for batch in batches]))
    if found.unsteady():
        sys.stderr.write(f"gpumux: {found.unsteady()}\n")
    return 0


def _measured(args: argparse.Namespace) -> ModelProfile:
    import torch

    from gpumux.plan import measure
    from gpumux.plan.models import find

    if args.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("torch sees no CUDA device here", "use --device cpu, or --gpu-model to have times modelled")
    told = time.monotonic()

    def progress(done: int, whole: int, what: str) -> None:
        nonlocal told
        if sys.stderr.isatty() or time.monotonic() - told >= PROGRESS_S:
            told = time.monotonic()
            end = "\r" if sys.stderr.isatty() else "\n"
            sys.stderr.write(f"gpumux: {done} of {whole} measured, now {what}".ljust(78) + end)

    before = torch.get_num_threads()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    try:
        loaded = find(args.model, args.input, device=args.device)
        return measure.profile(
            loaded,
            device=args.device,
            batches=args.batches or BATCHES,
            repeats=args.repeats,
            whole=args.whole,
            progress=progress,
        )
    finally:
        torch.set_num_threads(before)
        if sys.stderr.isatty():
            sys.stderr.write("\n")


# ---- burst-parallel plans


def _burst(args: argparse.Namespace) -> int:
    _check_pictures(args)
    profile = model_profile(args)
    graph = reduce(profile)
    counts = args.counts or powers_of_two(args.gpus)
    if counts[-1] > args.gpus:
        raise ConfigError(f"--counts has {counts[-1]}, and the cluster has {args.gpus} GPUs", "leave it out")
    costs = ProfiledCosts(graph, args.global_batch, counts, _network(args), args.overlap)
    began = time.perf_counter()
    plan = curves.plan(
        graph,
        batch=args.global_batch,
        gpus=args.gpus,
        counts=counts,
        network=costs.network,
        limit=args.amplification,
        overlap=args.overlap,
        algorithm=args.algorithm,
    )
    search_s = time.perf_counter() - began
    beside = [baselines.data_parallel(graph, args.global_batch, count, costs.network, args.overlap)
              for count in sorted({1, counts[-1]})]  # fmt: skip
    curve = curves.over_limits(plan, costs) if args.curve else []
    notes = [*_notes(args, graph, costs), *([profile.note] if args.profile else []), *graph.notes]
    notes += [profile.unsteady()] if profile.unsteady() else []
    if args.json:
        body = plan.figures() | {
            "search_s": search_s,
            "network": {
                "name": costs.network.name,
                "bandwidth": costs.network.bandwidth,
                "latency": costs.network.latency,
            },
            "baselines": [
                {"algorithm": each.algorithm, "gpus": each.gpus, "iteration_s": each.seconds} for each in beside
            ],
            "notes": notes,
        }
        if args.curve:
            keep = ("amplification_limit", "iteration_s", "speedup", "gpu_s", "idle_gpu_s")
            body["curve"] = [{key: each.figures()[key] for key in keep} for each in curve]
        emit_json(body)
    else:
        emit("\n\n".join(filter(None, (describe(plan), compare([plan, *beside]), _curve(curve), "\n".join(notes)))))
    _draw(args, plan, costs)
    return 0


def describe(plan: Plan) -> str:
    """A plan as people read it: runs of layers with the same count, and what they cost."""
    names = [layer.name for layer in plan.graph.layers]
    rows = []
    for i in members(plan.graph.chain):
        amplification = plan.amplification[i]
        rows.append(
            (
                names[i],
                str(plan.placement.gpus[i]),
                _ms(plan.times[i]),
                "-" if amplification is None else f"{amplification:.2f}",
            )
        )
    head = (
        f"{plan.graph.name} on {plan.gpus} GPUs, global batch {plan.batch}, amplification limit {_limit(plan.limit)}, {plan.algorithm}\n"
        f"iteration {_ms(plan.seconds)}, {plan.speedup:.2f} times as fast as one GPU; {plan.gpu_seconds * 1e3:.3f} GPU-ms used, "
        f"{plan.idle * 1e3:.3f} GPU-ms idle for other jobs ({_idle(plan):.0%})"
    )
    away = len(plan.placement.away)
    if away:
        head += f"\n{away} branch{'es run' if away > 1 else ' runs'} beside others, on GPUs of their own"
    over = [names[i] for i in plan.over_limit()]
    if over:
        head += f"\nabove the limit: {', '.join(over)}"
    return f"{head}\n{table(('LAYER', 'GPUS', 'TIME', 'AMPLIFICATION'), rows)}"


def compare(plans: list[Plan]) -> str:
    rows = [
        (p.algorithm if p.gpus > 1 or p.algorithm != "data-parallel" else "one GPU", str(p.gpus), _ms(p.seconds), f"{p.speedup:.2f}",
         f"{p.busy * 1e3:.3f} ms", f"{_idle(p):.0%}")
        for p in plans
    ]  # fmt: skip
    return table(("PLAN", "GPUS", "ITERATION", "SPEED-UP", "GPU TIME", "IDLE"), rows)


def _curve(plans: list[Plan]) -> str:
    if not plans:
        return ""
    rows = [
        (_limit(p.limit), _ms(p.seconds), f"{p.speedup:.2f}", f"{p.gpu_seconds * 1e3:.3f} ms",
         f"{_idle(p):.0%}")
        for p in plans
    ]  # fmt: skip
    return table(("LIMIT", "ITERATION", "SPEED-UP", "GPU TIME", "IDLE"), rows)


def _notes(args: argparse.Namespace, graph: Graph, costs: ProfiledCosts) -> list[str]:
    """What the figures rest on."""
    sources = ", ".join(sorted({layer.source for layer in graph.layers}))
    link = costs.network
    notes = [
        f"layer times of {graph.device} ({sources}); network {link.name}: {link.bandwidth / 1e9:g} GB/s a GPU, "
        f"{link.latency * 1e6:g} us ({link.source})"
    ]
    largest = min(layer.times[-1].samples for layer in graph.layers)
    if args.global_batch > largest:
        notes.append(f"batches above {largest} are taken as several of {largest}: none so large was timed")
    return notes


def _check_pictures(args: argparse.Namespace) -> None:
    """Before anything is traced or searched."""
    if not (args.plot or args.figures):
        return
    from gpumux.plan import plot

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


def _draw(args: argparse.Namespace, plan: Plan, costs: ProfiledCosts) -> None:
    if not (args.plot or args.figures):
        return
    from gpumux.plan import plot

    if args.plot:
        plot.timeline(plan, Path(args.plot))
    if not args.figures:
        return
    directory = Path(args.figures)
    graph, efficiency = costs.graph, baselines.SampleEfficiency(args.critical_batch)
    found = curves.over_sizes(graph, args.global_batch, costs.counts, costs.network, efficiency, args.amplification)
    limited = f"{graph.name}, amplification limit {_limit(args.amplification)}"
    plot.scaling(found, limited, directory / "scaling.png")
    speeds = curves.over_networks(
        graph, args.global_batch, costs.counts[-1], costs.network, efficiency, args.amplification
    )
    plot.networks(speeds, limited, directory / "networks.png")
    speedups = curves.layer_speedups(graph, args.global_batch, costs.counts)
    plot.layers(graph, speedups, costs.counts, directory / "layers.png")
    points = curves.operating_points(curves.over_limits(plan, costs), costs)
    plot.trade_off(points, graph.name, directory / "trade_off.png")


def _idle(plan: Plan) -> float:
    return plan.idle / (plan.gpus * plan.seconds) if plan.seconds else 0.0


def _limit(limit: float) -> str:
    return "none" if isinf(limit) else f"{limit:g}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"
