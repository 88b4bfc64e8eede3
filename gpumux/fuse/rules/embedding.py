"""Embedding tables, one under the other: [B*V, D], with each model's indices moved by V (HFTA, table 6)."""

from __future__ import annotations

from array import array
from typing import Any

import torch

from gpumux.fuse.call import Call, Operand
from gpumux.fuse.emit import Declined
from gpumux.fuse.rules.layout import apart, written
from gpumux.fuse.rules.table import rule


def _moved(call: Call, indices: Operand, rows: int) -> torch.Tensor:
    """[B, *size]: the indices of each model in the table of all."""
    notes = call.homes.notes
    if ("rows", rows) not in notes:
        storage = call.homes.emitter.add_const(array("q", [rows * b for b in range(call.models)]).tobytes())
        notes["rows", rows] = call.homes.emitter.window(storage, "int64", (call.models,), (1,))
    starts: torch.Tensor = notes["rows", rows]
    return indices.all() + starts.view(call.models, *[1] * indices.dim)


@rule("embedding")
def embedding(call: Call) -> Any:
    weight, indices = call["weight"], call["indices"]
    if call["sparse"]:
        raise Declined("sparse gradients can't be stacked")
    if indices.alike:  # the same row of every table
        flat = indices.one().reshape(-1)
        return weight.all().index_select(1, flat).unflatten(1, indices.size)
    return call.invoke({"weight": weight.merged(0), "indices": _moved(call, indices, weight.size[0])})


@rule("embedding_dense_backward")
def embedding_dense_backward(call: Call) -> Any:
    grad, indices, rows = call["grad_output"], call["indices"], call["num_weights"]
    padding = call["padding_idx"]
    made = call.invoke(
        {"grad_output": grad.all(), "indices": _moved(call, indices, rows), "num_weights": call.models * rows,
         "padding_idx": -1}
    )  # fmt: skip
    tables = apart(made, 0, call.models)
    if 0 <= padding < rows:  # the row of every model, and no other
        tables.select(1, padding).zero_()
    return tables


@rule("embedding_renorm_")
def embedding_renorm(call: Call) -> Any:
    weight, indices = call["self"], call["indices"]
    tables, finish = written(weight)
    call.invoke({"self": tables, "indices": _moved(call, indices, weight.size[0])})
    finish()
    return weight.all()
