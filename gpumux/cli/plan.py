"""`gpumux plan`: profiles and plans before asking for GPUs."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from gpumux.cli import advise, burst
from gpumux.cli.advise import idle_option, is_file, model_profile
from gpumux.cli.text import emit, emit_json, milliseconds, table
from gpumux.errors import ConfigError
from gpumux.plan.layers import ModelProfile, save

BATCHES = (1, 2, 4, 8, 16, 32)
REPEATS = 5
PROGRESS_S = 1.0
MEASURING = ("device", "repeats", "threads")  # options that only apply to measuring


def run(args: argparse.Namespace) -> int:
    verbs = {"burst": burst.run, "profile": _profile, **advise.VERBS}
    return verbs[args.verb](args)


def _profile(args: argparse.Namespace) -> int:
    """Measure (or model) and write a profile."""
    out = Path(args.out)
    if not out.parent.is_dir():
        raise ConfigError(f"{out.parent} is no directory", "name a file in one that exists")
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
        emit(f"{out}: {found.name}, {len(found.layers)} layers ({sources}) on {found.device}")
        emit(table(("BATCH", "ALL LAYERS"), [(str(batch), milliseconds(found.seconds(batch))) for batch in batches]))
    if found.unsteady():
        sys.stderr.write(f"gpumux: {found.unsteady()}\n")
    return 0


def _measured(args: argparse.Namespace) -> ModelProfile:
    import torch

    from gpumux.plan import measure
    from gpumux.plan.models import find

    device = args.device or "cpu"
    if device == "cuda":
        idle_option(args, ["threads"], "with --device cuda", "measuring on the CPU")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("torch sees no CUDA device here", "use --device cpu, or --gpu-model to have times modelled")
    shown_at = time.monotonic()

    def progress(done: int, whole: int, what: str) -> None:
        nonlocal shown_at
        if sys.stderr.isatty() or time.monotonic() - shown_at >= PROGRESS_S:
            shown_at = time.monotonic()
            end = "\r" if sys.stderr.isatty() else "\n"
            sys.stderr.write(f"gpumux: {done} of {whole} measured, now {what}".ljust(78) + end)

    before = torch.get_num_threads()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    try:
        loaded = find(args.model, args.input, device=device)
        return measure.profile(
            loaded,
            device=device,
            batches=args.batches or BATCHES,
            repeats=args.repeats or REPEATS,
            whole=args.whole,
            progress=progress,
        )
    finally:
        torch.set_num_threads(before)
        if sys.stderr.isatty():
            sys.stderr.write("\n")
