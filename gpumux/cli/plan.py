"""`gpumux plan`: profiles and plans before asking for GPUs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpumux.cli import advise, burst
from gpumux.cli.advise import DEFAULT_GPU, idle_option, is_file, model_profile
from gpumux.cli.setup import installation
from gpumux.cli.text import ProgressLine, emit, emit_json, milliseconds, size, table
from gpumux.device.sim.spec import preset
from gpumux.errors import ConfigError
from gpumux.pictures import check
from gpumux.plan.layers import ModelProfile, save
from gpumux.plan.network import measured, ranks
from gpumux.plan.network.measured import MeasuredNetwork
from gpumux.wording import counted

if TYPE_CHECKING:
    from gpumux.plan.memory.ways import MemoryComparison

BATCHES = (1, 2, 4, 8, 16, 32)
REPEATS = 5
MEASURING = ("device", "repeats", "threads", "algorithms")  # options that only apply to measuring


def run(args: argparse.Namespace) -> int:
    verbs = {"burst": burst.run, "profile": _profile, "network": _network, "memory": _memory, **advise.VERBS}
    return verbs[args.verb](args)


def _new_file(name: str) -> Path:
    """The path of a file that is written at the end. Raises ConfigError if it has no directory."""
    out = Path(name)
    if not out.parent.is_dir():
        raise ConfigError(f"{out.parent} is no directory", "name a file in one that exists")
    return out


def _progress(line: ProgressLine, verb: str) -> Callable[[int, int, str], None]:
    return lambda done, whole, what: line.say(f"{done} of {whole} {verb}, now {what}")


def _profile(args: argparse.Namespace) -> int:
    """Measure (or model) and write a profile."""
    out = _new_file(args.out)
    if args.profile:
        idle_option(args, MEASURING, "with --profile", "measuring layers here")
        if args.batches:
            raise ConfigError("--batches with --profile, whose batches are the steps'", "leave --batches out")
    elif is_file(args.model):
        raise ConfigError(f"{args.model} is a profile already", "name the model: module:factory, or a built-in")
    elif args.gpu_model is not None:
        idle_option(args, MEASURING, "with --gpu-model", "measuring layers here")
    found = model_profile(args, args.batches) if args.gpu_model is not None or args.profile else _measured(args)
    save(found, out)
    sources = ", ".join(f"{count} {source}" for source, count in found.sources().items())
    batches = [timing.samples for timing in found.layers[0].times]
    if args.json:
        emit_json({"file": str(out), "model": found.name, "device": found.device, "layers": len(found.layers),
                   "sources": found.sources(),
                   "seconds": {batch: found.seconds(batch) for batch in batches}})  # fmt: skip
    else:
        emit(f"{out}: {found.name}, {counted(len(found.layers), 'layer')} ({sources}) on {found.device}")
        emit(table(("BATCH", "ALL LAYERS"), [(str(batch), milliseconds(found.seconds(batch))) for batch in batches]))
        if found.algorithms:
            emit("\n" + _algorithms(found, out))
    if found.unsteady():
        sys.stderr.write(f"gpumux: {found.unsteady()}\n")
    return 0


def _algorithms(found: ModelProfile, out: Path) -> str:
    """Convolutions' times by algorithm at the largest batch, as a table."""
    names = list(dict.fromkeys(each.algorithm for each in found.algorithms))
    last = {(each.convolution, each.algorithm): each.times[-1] for each in found.algorithms}
    rows = [
        (name, *(milliseconds(last[name, each].forward + last[name, each].backward) for each in names))
        for name in dict.fromkeys(each.convolution for each in found.algorithms)
    ]
    header = (f"CONVOLUTION AT {found.algorithms[0].times[-1].samples}", *(each.upper() for each in names))
    return f"{table(header, rows)}\n\nchoose among them: gpumux plan batch MODEL --times {out} --memory SIZE"


def _measured(args: argparse.Namespace) -> ModelProfile:
    import torch

    from gpumux.plan import measure
    from gpumux.plan.models import find

    device = args.device or "cpu"
    if device == "cuda":
        idle_option(args, ["threads"], "with --device cuda", "measuring on the CPU")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("torch sees no CUDA device here", "use --device cpu, or --gpu-model to have times modelled")
    before = torch.get_num_threads()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    line = ProgressLine()
    try:
        loaded = find(args.model, args.input, device=device)
        batches, repeats = args.batches or BATCHES, args.repeats or REPEATS
        progress = _progress(line, "measured")
        found = measure.profile(
            loaded, device=device, batches=batches, repeats=repeats, whole=args.whole, progress=progress
        )
        if not args.algorithms:
            return found
        timed = measure.convolutions(loaded, device=device, batches=batches, repeats=repeats, progress=progress)
        if not timed:
            raise ConfigError(f"{loaded.name} has no 2d convolutions", "leave --algorithms out")
        return replace(found, algorithms=timed)
    finally:
        torch.set_num_threads(before)
        line.end()


# ---- `gpumux plan network`.


def _network(args: argparse.Namespace) -> int:
    """Measure the network among ranks, here or as one of several, and write it to a file."""
    if (args.rank is None) != (args.store is None):
        raise ConfigError("--rank and --store belong together", "give both to be one of several ranks, or neither")
    follows = args.rank is not None and args.rank > 0
    if follows and args.out is not None:
        raise ConfigError(f"-o on rank {args.rank}", "rank 0 writes the file: leave it out here")
    if not follows and args.out is None:
        raise ConfigError("no file for the result", "name one: -o net.json")
    installation.check_torch()  # the ranks import it
    out = None if args.out is None else _new_file(args.out)
    asked = ranks.Measurement(args.ranks, args.device, int(args.largest), args.rounds, args.limit)
    line = ProgressLine()
    progress = _progress(line, "rounds")
    try:
        if args.rank is None:
            found: MeasuredNetwork | None = ranks.measure_here(asked, progress)
        else:
            found = ranks.measure_as(asked, args.rank, args.store, progress)
    finally:
        line.end()
    if found is None or out is None:
        return 0
    link = found.network(out.stem)  # refuses a measurement without lines before a file is written
    measured.save(found, out)
    if args.json:
        lines = [(each, each.line()) for each in found.series]
        emit_json({"file": str(out), "backend": found.backend, "device": found.device, "ranks": found.ranks,
                   "machines": list(found.machines), "versions": dict(found.versions), "note": found.note,
                   "bandwidth": link.bandwidth, "latency": link.latency,
                   "lines": [{"kind": each.kind, "ranks": each.ranks, "delay_s": line.delay,
                              "bandwidth": line.bandwidth, "residual": line.residual, "worst": line.worst}
                             for each, line in lines]})  # fmt: skip
    else:
        emit(_described(found, out))
    return 0


def _described(found: MeasuredNetwork, out: Path) -> str:
    """A measured network as text: each series' line, how far its points are from it, and some of them."""
    machines = dict.fromkeys(found.machines)
    sizes = found.series[0].points
    shown = [0, len(sizes) // 2, len(sizes) - 1]
    rows = []
    for each in sorted(found.series, key=lambda each: (each.kind != "transfer", each.ranks)):
        line = each.line()
        points = [f"{each.points[i].median * 1e6:.0f} us" for i in shown]
        rows.append(
            (each.kind, str(each.ranks), f"{line.delay * 1e6:.0f} us", f"{line.bandwidth / 1e9:.3g} GB/s",
             f"x {line.residual:.2f}", f"x {line.worst:.2f}", *points)
        )  # fmt: skip
    header = ("OPERATION", "RANKS", "DELAY", "BANDWIDTH", "RESIDUAL", "WORST", *(size(sizes[i].nbytes) for i in shown))
    notes = [
        "delay + bytes / bandwidth is the line through the medians; RESIDUAL, WORST: by what factors they lie off it",
        *([found.note] if found.note else []),
        f"plan with it: gpumux plan burst MODEL --network {out}",
    ]
    head = (
        f"{out}: {found.backend} among {found.ranks} ranks on {found.device}, medians of"
        f" {counted(found.rounds, 'round')} ({'; '.join(machines)}; torch {found.versions.get('torch', 'unknown')})"
    )
    return "\n".join([head, table(header, rows), "", *notes])


# ---- `gpumux plan memory`.


def _memory(args: argparse.Namespace) -> int:
    """Capture a step in several ways, and say what each takes."""
    if is_file(args.model):
        raise ConfigError(
            f"{args.model} has layers' times and no step to capture", "name the model: module:factory, or a built-in"
        )
    if args.plot is not None:
        check(Path(args.plot))
    from gpumux.plan.memory import advice, picture, ways
    from gpumux.plan.models import find

    loaded = find(args.model, args.input, device="cpu")
    spec = preset(args.gpu_model or DEFAULT_GPU)
    line = ProgressLine()
    try:
        found = ways.compare(loaded, args.batch, spec, optimizer=args.optimizer, progress=_progress(line, "ways"))
    finally:
        line.end()
    if args.plot is not None:
        picture.draw(found, Path(args.plot))
    if args.json:
        emit_json(advice.body(found, args.within))
    else:
        emit(_compared(found, args.within))
    return 0


def _compared(found: MemoryComparison, within: float) -> str:
    """The ways as a table, then what to take and what was left out."""
    from gpumux.plan.memory import advice

    doubled = found.way("doubled").total_bytes
    rows = [
        (advice.SAID[each.way], str(each.samples), size(each.state_bytes), size(each.batch_bytes),
         size(each.temporary_bytes), size(each.total_bytes), f"{each.total_bytes / doubled:.0%}",
         f"x {found.relative(each.way):.2f}")
        for each in found.ways
    ]  # fmt: skip
    header = ("WAY", "SAMPLES", "STATE", "BATCH", "TEMPORARIES", "TOTAL", "OF DOUBLED", "TIME")
    lines = [
        f"{found.model}, batch {found.batch}, {found.optimizer}; times are modelled for an {found.device}, launches not"
        " included",
        table(header, rows),
        "",
        advice.sentence(found, within),
    ]
    lines += [f"{advice.SAID[way]}: left out, since {why}" for way, why in found.left_out.items()]
    lines += [f"{advice.SAID[way]}: {note}" for way, note in found.notes.items()]
    return "\n".join(lines)
