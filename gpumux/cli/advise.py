"""`gpumux plan batch`, `gpus` and `servers`: advice from "Distributed training guidelines"."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from math import isinf
from pathlib import Path

from gpumux.cli.text import ProgressLine, emit, emit_json, printable, size, table
from gpumux.device.sim.spec import preset
from gpumux.errors import ConfigError
from gpumux.plan import guidelines
from gpumux.plan.layers import ModelProfile, load
from gpumux.plan.models import BUILT_IN
from gpumux.wording import counted

# ---- The layers that a verb of `gpumux plan` works on: from a file, from a job's steps, or of a model with modelled
# times.


DEFAULT_GPU = "a100"
BATCHES = (16, 32, 64, 128, 256, 512)  # mini-batches that `plan batch` tries


def model_profile(args: argparse.Namespace, batches: Sequence[int] | None = None) -> ModelProfile:
    """The profile in a file, or modelled for --gpu-model. Raises ConfigError for a profile of another device."""
    if args.profile:
        return _of_steps(args)
    if is_file(args.model):
        found = load(Path(args.model))
        _same_device(args, args.model, found.device)
        if args.whole or args.input:
            flag = "--whole" if args.whole else "--input"
            raise ConfigError(
                f"{flag} with a file, whose layers are what they are", "give it when you profile the model"
            )
        return found
    from gpumux.plan import measure
    from gpumux.plan.models import find
    from gpumux.plan.trace import trace

    traced = trace(find(args.model, args.input), whole=args.whole)
    return measure.roofline_profile(traced, preset(args.gpu_model or DEFAULT_GPU), batches or measure.BATCHES)


def is_file(model: str) -> bool:
    """Whether this MODEL is a profile's file."""
    path = Path(model)
    return model not in BUILT_IN and (path.suffix == ".json" or path.is_file())


def idle_option(args: argparse.Namespace, names: Sequence[str], beside: str, belongs: str) -> None:
    """Raise ConfigError if one of these options was given (None: it was not) although `beside` leaves it without
    effect."""
    for name in names:
        if getattr(args, name.replace("-", "_")) is not None:
            raise ConfigError(f"--{name} has no effect {beside}", f"it belongs to {belongs}: leave it out")


def _of_steps(args: argparse.Namespace) -> ModelProfile:
    """The model's layers with the times of steps that jobs ran."""
    from gpumux.plan import measure
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
    return measure.steps_profile(trace(find(args.model, args.input), whole=args.whole), found)


def _same_device(args: argparse.Namespace, name: str, device: str) -> None:
    if args.gpu_model is not None and device != args.gpu_model:
        raise ConfigError(
            f"{name} holds times of {device!r}, not of {args.gpu_model!r}",
            "profile the model there, or leave --gpu-model out",
        )


# ---- The verbs.


def _batch(args: argparse.Namespace) -> int:
    """`gpumux plan batch`: mini-batch and algorithms."""
    line = ProgressLine()
    try:
        return _suggested(args, line)
    finally:
        line.end()


def _suggested(args: argparse.Namespace, line: ProgressLine) -> int:
    from gpumux.plan import guidelines
    from gpumux.plan.models import find
    from gpumux.plan.trace import trace

    if is_file(args.model):
        raise ConfigError(
            f"{args.model} says nothing of convolutions' shapes", "name the model: module:factory, or a built-in"
        )
    line.begin(f"reading the layers of {printable(args.model)}")
    network = guidelines.read(trace(find(args.model, args.input), whole=args.whole))
    line.begin("choosing algorithms for each mini-batch")
    if args.times is not None:
        idle_option(args, ["algorithms", "gpu-model"], "beside --times", "modelled times")
        profile = load(Path(args.times))
        if not profile.algorithms:
            raise ConfigError(
                f"{args.times} has no times of algorithms", "profile the model with --algorithms, or leave --times out"
            )
        if args.memory is None:
            raise ConfigError("--times without --memory", "say how much memory the device has for training")
        memory = args.memory
        batches = args.batches or [timing.samples for timing in profile.algorithms[0].times]
        choices = guidelines.suggest(
            network, batches, memory, lambda batch: guidelines.measured_options(network, batch, profile)
        )
        source = f"times were measured on {profile.device}"
        if not any(timing.workspace for each in profile.algorithms for timing in each.times):
            source += "; algorithms' workspace was not, and counts as none"
    else:
        algorithms = (args.algorithms or ",".join(guidelines.ALGORITHMS)).split(",")
        unknown = [each for each in algorithms if each not in guidelines.ALGORITHMS]
        if unknown or "gemm" not in algorithms:
            raise ConfigError(
                f"no algorithm is called {unknown[0]!r}"
                if unknown
                else "algorithms without gemm, which every layer has",
                f"choose from {', '.join(guidelines.ALGORITHMS)}, gemm among them",
            )
        spec = preset(args.gpu_model or DEFAULT_GPU)
        memory, batches = args.memory or spec.memory_bytes, args.batches or BATCHES
        choices = guidelines.suggest(
            network, batches, memory, lambda batch: guidelines.options(network, batch, spec, algorithms)
        )
        source = f"times are modelled for an {spec.title}; nothing here was measured"
    line.end()
    best = choices[0]
    if args.json:
        emit_json(
            {
                "model": network.name,
                "memory_bytes": memory,
                "suggested": best.batch,
                "times": source,
                "choices": [
                    {"batch": c.batch, "seconds": c.seconds, "seconds_a_sample": c.seconds_a_sample,
                     "workspace_bytes": c.workspace,
                     "bound_bytes": c.bound, "algorithms": dict(c.algorithms)}
                    for c in sorted(choices, key=lambda c: c.batch)
                ],
                "fft_over_gemm": {
                    c.name: c.fft_bytes(best.batch) / c.gemm_bytes(best.batch) for c in network.convolutions
                },
            }
        )  # fmt: skip
        return 0
    emit(f"suggested mini-batch for {network.name} within {size(int(memory))}: {best.batch}")
    rows = [
        (str(c.batch), f"{c.seconds * 1e3:.3f} ms", f"{c.seconds_a_sample * 1e6:.1f} us", size(int(c.workspace)),
         size(int(c.bound)),
         _counted(c.algorithms.values()))
        for c in sorted(choices, key=lambda c: c.batch)
    ]  # fmt: skip
    emit(table(("BATCH", "CONVOLUTIONS", "A SAMPLE", "WORKSPACE", "OF", "ALGORITHMS"), rows))
    emit("")
    layers = [
        (c.name, best.algorithms[c.name], f"{c.fft_bytes(best.batch) / c.gemm_bytes(best.batch):.2f}")
        for c in network.convolutions
    ]
    emit(table(("LAYER", f"AT {best.batch}", "FFT/GEMM MEMORY"), layers))
    emit(f"\n{source}")
    left_out = sorted(set(batches) - {c.batch for c in choices})
    if left_out:
        emit(f"do not fit: {', '.join(map(str, left_out))}")
    return 0


def _counted(names: object) -> str:
    listed = list(names)  # type: ignore[call-overload]
    return ", ".join(f"{listed.count(each)} {each}" for each in dict.fromkeys(listed))


def _gpus(args: argparse.Namespace) -> int:
    """`gpumux plan gpus`: lemma 3.1 in either direction."""
    if args.overhead is not None and args.trace is not None:
        raise ConfigError("both --overhead and --trace", "give one of them")
    measured = guidelines.load(Path(args.trace)) if args.trace is not None else None
    given = measured.ratio if measured is not None else args.overhead
    body: dict[str, object] = {}
    lines = []
    if measured is not None:
        body["measured"] = {"total_s": measured.total, "compute_s": measured.compute, "loading_s": measured.loading,
                            "device": measured.device}  # fmt: skip
        lines.append(
            f"R_O is {measured.ratio:.1%}: {measured.compute:.3f} s of computation ({measured.device}) in"
            f" {measured.total:.3f} s; data loading took {measured.loading:.3f} s"
        )
    if given is not None:
        body |= {"overhead": given, "most_speedup": guidelines.most_speedup(given)}
    if args.speedup is not None and given is not None:
        gpus = guidelines.gpus_for(args.speedup, given)
        body |= {"speedup": args.speedup, "gpus": gpus}
        if gpus is None:
            lines.append(
                f"no number of GPUs is {args.speedup:g} times as fast: at R_O {given:.1%} the most is"
                f" {guidelines.most_speedup(given):.2f}"
            )
        else:
            lines.append(
                f"{args.speedup:g} times as fast with R_O {given:.1%}: {counted(gpus, 'GPU')} (they give"
                f" {guidelines.speedup(gpus, given):.2f}, efficiency {guidelines.efficiency(gpus, given):.0%})"
            )
            if args.efficiency is not None:
                kept = guidelines.efficiency(gpus, given) >= args.efficiency
                body["efficiency_kept"] = kept
                lines.append(f"that {'keeps' if kept else 'does not keep'} the efficiency of {args.efficiency:.0%}")
    if args.gpus is not None and given is not None:
        body |= {
            "efficiency": guidelines.efficiency(args.gpus, given),
            "speedup_of_gpus": guidelines.speedup(args.gpus, given),
        }
        lines.append(
            f"{counted(args.gpus, 'GPU')} with R_O {given:.1%}: {guidelines.speedup(args.gpus, given):.2f} times as"
            f" fast, efficiency {guidelines.efficiency(args.gpus, given):.0%}"
        )
    if args.speedup is not None and args.efficiency is not None and given is None:
        fewest = guidelines.gpus_at(args.speedup, args.efficiency)
        most = guidelines.tolerable_overhead(fewest, args.efficiency)
        body |= {
            "speedup": args.speedup,
            "gpus": fewest,
            "tolerable_overhead_of_speedup": None if isinf(most) else most,
        }
        lines.append(
            f"{args.speedup:g} times as fast at efficiency {args.efficiency:.0%}: {counted(fewest, 'GPU')};"
            f" {_tolerable(most)}"
        )
    if args.gpus is not None and args.efficiency is not None:
        most = guidelines.tolerable_overhead(args.gpus, args.efficiency)
        body["tolerable_overhead"] = None if isinf(most) else most
        lines.append(f"{counted(args.gpus, 'GPU')} at efficiency {args.efficiency:.0%}: {_tolerable(most)}")
    idle = _unanswered(args, given)
    if not lines or idle:
        raise ConfigError(
            f"not enough to go by{idle and f' for {idle}'}",
            "give --speedup or --gpus with --overhead or --trace, or either with --efficiency",
        )
    if args.json:
        emit_json(body)
    else:
        emit("\n".join(lines))
    return 0


def _tolerable(most: float) -> str:
    return "any R_O is tolerable" if isinf(most) else f"R_O may be {most:.1%} at most"


def _unanswered(args: argparse.Namespace, given: float | None) -> str:
    """The given option that had no effect, if there is one."""
    for name, needs in (
        ("speedup", args.efficiency),
        ("gpus", args.efficiency),
        ("efficiency", args.speedup or args.gpus),
    ):
        if getattr(args, name) is not None and needs is None and (given is None or name == "efficiency"):
            return f"--{name}"
    return ""


def _servers(args: argparse.Namespace) -> int:
    """`gpumux plan servers`: lemma 3.2, and alternatives without servers."""
    nbytes = args.parameters
    if (nbytes is None) == (args.model is None):
        raise ConfigError("either --parameters or --model says how much is exchanged", "give one of them")
    if nbytes is None:
        nbytes = float(_parameters(args.model))
    found = [
        (bandwidth, guidelines.servers(nbytes, args.workers, bandwidth, args.compute),
         guidelines.exchanges(nbytes, args.workers, bandwidth, args.compute))
        for bandwidth in args.bandwidth
    ]  # fmt: skip
    if args.json:
        emit_json(
            {
                "parameter_bytes": nbytes,
                "workers": args.workers,
                "compute_s": args.compute,
                "networks": [
                    {"bandwidth": bandwidth, "servers": servers, "one_push_s": nbytes / bandwidth,
                     "without_servers": [{"name": e.name, "bytes": e.nbytes, "seconds": e.seconds, "hidden": e.hidden,
                                          "bandwidth_needed": e.bandwidth} for e in ways]}
                    for bandwidth, servers, ways in found
                ],
            }
        )  # fmt: skip
        return 0
    emit(
        f"{args.workers} workers that compute {args.compute:g} s an iteration and exchange {nbytes / 1e6:.0f} MB of"
        " parameters"
    )
    rows = []
    for bandwidth, servers, ways in found:
        speed = f"{bandwidth * 8e-9:g} Gb/s"
        rows.append((speed, f"{servers} parameter servers", f"{nbytes / bandwidth:.3f} s a push", "hidden"))
        for each in ways:
            enough = "hidden" if each.hidden else f"not hidden: needs {each.bandwidth * 8e-9:.1f} Gb/s"
            rows.append(("", each.name, f"{each.seconds:.3f} s", enough))
    emit(table(("NETWORK", "WAY", "TRANSFERS", "BEHIND COMPUTATION"), rows))
    for each in found[0][2]:
        emit(f"{each.name}: {each.what}")
    return 0


def _parameters(model: str) -> int:
    """Bytes of all parameters of a model that get a gradient."""
    if is_file(model):
        return load(Path(model)).parameter_bytes
    from gpumux.plan.models import build

    module, _ = build(model)
    return sum(each.numel() * each.element_size() for each in module.parameters() if each.requires_grad)


VERBS: dict[str, Callable[[argparse.Namespace], int]] = {"batch": _batch, "gpus": _gpus, "servers": _servers}
