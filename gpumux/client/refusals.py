"""What a trace may not have done, looked at when it is over."""

from __future__ import annotations

from typing import Any

import torch

from gpumux.client import blame
from gpumux.client.ledger import Record
from gpumux.errors import CaptureError, NotRepeatable


def refuse_batch_gradients(given: list[Any], fakes: list[Any]) -> None:
    tensors = [(g, f) for g, f in zip(given, fakes, strict=True) if isinstance(g, torch.Tensor)]
    for i, (tensor, fake) in enumerate(tensors):
        if fake.grad is not None or fake.requires_grad != tensor.requires_grad:
            raise CaptureError(
                f"the step makes tensor {i} of the batch require grad, and its gradient would stay in the daemon",
                "begin with x = x.detach().requires_grad_() inside the step",
            )


def refuse_draws(fn: Any, before: list[tuple[str, Any]], after: list[tuple[str, Any]]) -> None:
    """Python's own random numbers are not drawn again in the daemon: a branch that is rarely taken
    would be baked in even though two traces agree."""
    for (name, old), (_, new) in zip(before, after, strict=True):
        if old != new:
            raise NotRepeatable(
                f"the step ({blame.definition(fn)}) draws random numbers from Python's {name}",
                "draw with torch (torch.rand), or outside the step and pass the number in as a tensor",
            )


def refuse_written_batch(record: Record) -> None:
    """The batch is copied to the daemon, so a write to it would not be seen here: the plain loop's
    next use of the same tensor would differ."""
    for op in record.ops:
        for storage in op.writes:
            found = record.storages[storage]
            if found.kind == "input":
                raise CaptureError(
                    f"{op.where} writes into tensor {found.key} of the batch ({op.target.removeprefix('aten.')})",
                    "clone it first, or use the operator that returns a new tensor",
                )
