"""Writes at indices that torch.func does not batch."""

from __future__ import annotations

from typing import Any

import torch

from gpumux.fuse.call import Call, Operand
from gpumux.fuse.emit import Declined
from gpumux.fuse.rules.table import rule


@rule("index_put_", "index_put")
def index_put(call: Call) -> Any:
    """One number where a mask says so, as Rprop puts it."""
    x, indices, values = call["self"], call["indices"], call["values"]
    whole = len(indices) == 1 and isinstance(indices[0], Operand) and indices[0].dtype == torch.bool
    if not whole or indices[0].dim != x.dim or values.dim or not values.alike or call["accumulate"]:
        raise Declined("no mask of one number")
    fill = torch.Tensor.masked_fill_ if call.name == "index_put_" else torch.Tensor.masked_fill
    return fill(x.all(), indices[0].all(), values.one())
