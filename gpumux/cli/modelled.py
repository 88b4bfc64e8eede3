"""Whose layers a verb of `gpumux plan` is about: those in a file, of a job's steps, or of a model with modelled times."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from gpumux.device.sim.spec import preset
from gpumux.errors import ConfigError
from gpumux.plan.layers import ModelProfile, load
from gpumux.plan.models import BUILT_IN

DEFAULT_GPU = "a100"


def model_profile(args: argparse.Namespace, batches: Sequence[int] | None = None) -> ModelProfile:
    """The profile in a file, or modelled for --gpu-model. Raises ConfigError for a profile of another device than asked for."""
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
    from gpumux.plan import roofline
    from gpumux.plan.models import find
    from gpumux.plan.trace import trace

    traced = trace(find(args.model, args.input), whole=args.whole)
    return roofline.profile(traced, preset(args.gpu_model or DEFAULT_GPU), batches or roofline.BATCHES)


def is_file(model: str) -> bool:
    """Whether this MODEL is a profile's file."""
    path = Path(model)
    return model not in BUILT_IN and (path.suffix == ".json" or path.is_file())


def idle_option(args: argparse.Namespace, names: Sequence[str], beside: str, belongs: str) -> None:
    """Raises ConfigError where one of these options was given (None: it was not), which `beside` leaves without effect."""
    for name in names:
        if getattr(args, name.replace("-", "_")) is not None:
            raise ConfigError(f"--{name} has no effect {beside}", f"it belongs to {belongs}: leave it out")


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
