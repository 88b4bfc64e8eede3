"""Checkpoints of an array: tensors, numbers and strings in a file of torch.save."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gpumux.errors import ConfigError
from gpumux.fuse import given

if TYPE_CHECKING:
    from gpumux.fuse.models import Models

_FORM = "gpumux array 1"
_PARTS = {"model", "optimizer", "random"}


def save(array: Models, path: str | Path, models: Iterable[int]) -> None:
    """Each model's state_dict and random state. The file appears whole or not at all."""
    states = [{**array.state_dict(b), "random": array.random_state(b)} for b in models]
    target = Path(path)
    half = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        torch.save({"form": _FORM, "models": states}, half)
        half.replace(target)
    finally:
        half.unlink(missing_ok=True)


def restore(array: Models, path: str | Path, model: int | None) -> None:
    """Raises ConfigError for a file that is no checkpoint, of another number of models, or of models or optimizers that differ
    from those here; nothing is restored then."""
    states = _read(Path(path))
    targets = range(len(array)) if model is None else [model]
    if len(states) != len(targets):
        raise ConfigError(
            f"{path} holds {len(states)} models, and {len(targets)} are to be restored",
            "restore into an array of that size, or a checkpoint of one model into one",
        )
    before = {b: array.state_dict(b) for b in targets}
    for b, state in zip(targets, states, strict=True):
        given.check_random_state(state["random"])
        here, there = (_shapes(found["model"]) for found in (before[b], state))
        if here != there:
            name = next(iter(dict(here.items() ^ there.items())))
            raise ConfigError(
                f"{path} does not fit model {b}: {name} is {there.get(name, 'not there')}, and here {here.get(name, 'there is none')}",
                "restore into an array whose factory makes the models that were saved",
            )
    for b, state in zip(targets, states, strict=True):
        try:
            array.load(b, {k: v for k, v in state.items() if k != "random"})
        except (ValueError, KeyError, TypeError, RuntimeError) as error:  # torch's, of another kind of optimizer
            for loaded in targets[: list(targets).index(b)]:
                array.load(loaded, before[loaded])
            raise ConfigError(
                f"{path} does not fit model {b}: {type(error).__name__}: {str(error).splitlines()[0]}",
                "restore into an array whose factory makes the models and optimizers that were saved",
            ) from error
    for b, state in zip(targets, states, strict=True):
        array.set_random_state(b, state["random"])


def _shapes(found: Any) -> dict[str, Any]:
    """Of each tensor of a model's dictionary, or of several models', by name."""
    several = enumerate(found) if isinstance(found, list) else [(None, found)]
    return {
        name if number is None else f"{number}.{name}": tuple(value.shape)
        for number, part in several
        for name, value in part.items()
        if isinstance(value, torch.Tensor)
    }


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        found = torch.load(path, weights_only=True)
    except OSError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{path} is no checkpoint: {str(error).splitlines()[0]}", "give a file of Array.save"
        ) from error
    if not isinstance(found, dict) or found.get("form") != _FORM:
        raise ConfigError(f"{path} is no checkpoint of an array", "give a file of Array.save")
    models = found.get("models")
    if not isinstance(models, list) or not all(isinstance(m, dict) and m.keys() >= _PARTS for m in models):
        raise ConfigError(f"{path} is damaged: it lacks a part of a model", "give another checkpoint")
    return models
