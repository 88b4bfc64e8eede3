"""Trials' states between rungs, in memory or as files. A file is written atomically; reading one runs no code."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree

from gpumux.errors import ConfigError


class MemoryCheckpoints:
    """Checkpoints of a sweep that is not stored."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[int, dict[str, Any]]] = {}

    def save(self, trial: int, steps: int, state: dict[str, Any]) -> None:
        self._held[trial] = (steps, state)

    def load(self, trial: int, steps: int) -> dict[str, Any]:
        reached, state = self._held[trial]
        if reached != steps:
            raise KeyError(f"trial {trial} stands at {reached} steps, not {steps}")
        return state

    def has(self, trial: int, steps: int) -> bool:
        return trial in self._held and self._held[trial][0] == steps

    def drop(self, trial: int) -> None:
        self._held.pop(trial, None)


class DiskCheckpoints:
    """One file a trial in `folder`, `trial-7-at-81.pt`: only the latest is kept. Raises ConfigError when one can't be
    written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"can't keep checkpoints in {folder}: {error.strerror}", "choose another place with --checkpoints"
            ) from None

    def path(self, trial: int, steps: int) -> Path:
        return self._folder / f"trial-{trial}-at-{steps}.pt"

    def save(self, trial: int, steps: int, state: dict[str, Any]) -> None:
        import torch

        made = self.path(trial, steps)
        part = made.with_suffix(".part")
        try:
            torch.save(state, part)
            os.replace(part, made)
        except (OSError, RuntimeError) as error:  # RuntimeError: what torch makes of a full disk
            part.unlink(missing_ok=True)
            raise ConfigError(
                f"can't write checkpoint {made}: {error}", "make room, or give --checkpoints DIR"
            ) from error
        for older in self._folder.glob(f"trial-{trial}-at-*.pt"):
            if older != made:
                older.unlink()

    def load(self, trial: int, steps: int) -> dict[str, Any]:
        import torch

        path = self.path(trial, steps)
        if not path.exists():
            raise KeyError(f"there is no {path}")
        state: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
        return state

    def has(self, trial: int, steps: int) -> bool:
        return self.path(trial, steps).exists()

    def drop(self, trial: int) -> None:
        for path in self._folder.glob(f"trial-{trial}-at-*.pt"):
            path.unlink(missing_ok=True)


# ---- The state of a model with its optimizer as one dictionary, and back. Several of either are lists, as in
# client.Job.


def read_state(model: Any, optimizer: Any) -> dict[str, Any]:
    """A copy on the CPU that later steps don't change."""
    state = {"model": _dictionaries(model), "optimizer": _dictionaries(optimizer)}
    return pytree.tree_map_only(torch.Tensor, lambda t: t.detach().cpu().clone(), state)  # type: ignore[no-any-return]


def write_state(model: Any, optimizer: Any, state: dict[str, Any]) -> None:
    """Load the result of `read_state`, or of Job.state_dict(), into equal models and optimizers."""
    state = pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, state)  # else Adam would share its `step`
    _load(model, state["model"])
    _load(optimizer, state["optimizer"])


def _dictionaries(owner: Any) -> Any:
    return owner.state_dict() if hasattr(owner, "state_dict") else [each.state_dict() for each in owner]


def _load(owner: Any, state: Any) -> None:
    if hasattr(owner, "load_state_dict"):
        owner.load_state_dict(state)
        return
    for each, of_it in zip(owner, state, strict=True):
        each.load_state_dict(of_it)


@contextmanager
def preserving_random_state() -> Iterator[None]:
    """A block that may seed torch's generators; afterwards they are as before."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        yield
