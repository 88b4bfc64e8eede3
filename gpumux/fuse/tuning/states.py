"""The state of a model with its optimizer as one dictionary, and back. Several of either are lists, as in client.Job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils._pytree as pytree


def read(model: Any, optimizer: Any) -> dict[str, Any]:
    """A copy on the CPU that later steps leave alone."""
    state = {"model": _dictionaries(model), "optimizer": _dictionaries(optimizer)}
    return pytree.tree_map_only(torch.Tensor, lambda t: t.detach().cpu().clone(), state)  # type: ignore[no-any-return]


def write(model: Any, optimizer: Any, state: dict[str, Any]) -> None:
    """Load what `read` gave, or Job.state_dict(), into equal models and optimizers. The state stays as it is."""
    state = pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, state)  # Adam's `step` would be shared otherwise
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
def forked() -> Iterator[None]:
    """A block that may seed torch's generators, and leaves them as they were."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        yield
