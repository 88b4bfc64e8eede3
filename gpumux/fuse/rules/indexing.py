"""Reads and writes at indices that torch.func does not batch."""

from __future__ import annotations

from typing import Any

import torch

from gpumux.fuse.call import Call, Operand
from gpumux.fuse.emit import Declined
from gpumux.fuse.rules.table import per_model, rule


@rule("index_put_", "index_put")
def index_put(call: Call) -> Any:
    """One number where a mask says so, as Rprop puts it."""
    x, indices, values = call["self"], call["indices"], call["values"]
    whole = len(indices) == 1 and isinstance(indices[0], Operand) and indices[0].dtype == torch.bool
    if not whole or indices[0].dim != x.dim or values.dim or not values.alike or call["accumulate"]:
        raise Declined("no mask of one number")
    fill = torch.Tensor.masked_fill_ if call.name == "index_put_" else torch.Tensor.masked_fill
    return fill(x.all(), indices[0].all(), values.one())


def _places(call: Call) -> torch.Tensor:
    """[B, n]: where in each model's flat tensor. The operators count from the end, too."""
    count = torch.Size(call["self"].size).numel()
    index = call["index"].all().reshape(call.models, -1)
    return torch.where(index < 0, index + count, index)


@rule("take")
def take(call: Call) -> Any:
    found = call["self"].all().reshape(call.models, -1).gather(1, _places(call))
    return found.view(call.models, *call["index"].size)


@rule("put", "put_")
def put(call: Call) -> Any:
    x, values = call["self"].all(), call["source"].all().reshape(call.models, -1)
    flat = x.reshape(call.models, -1)
    made = flat.scatter_add(1, _places(call), values) if call["accumulate"] else flat.scatter(1, _places(call), values)
    made = made.view(x.shape)
    return x.copy_(made) if call.name == "put_" else made


@rule("unfold_backward")
def unfold_backward(call: Call) -> Any:
    sizes = call["input_sizes"]
    changes = {
        "grad_in": call["grad_in"].all(),
        "input_sizes": [call.models, *sizes],
        "dim": call["dim"] % len(sizes) + 1,
    }
    return call.invoke(changes)


per_model(
    "how much it takes of the values is what the mask says",
    "masked_scatter",
    "masked_scatter_",
    "masked_scatter_backward",
)
per_model("its kernel takes one matrix", "_pdist_forward", "_pdist_backward")
