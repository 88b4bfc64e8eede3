"""Matrix products: one batched product, or one larger product where an operand is every model's (HFTA, table 6)."""

from __future__ import annotations

from typing import Any

import torch

from gpumux.fuse.call import Call, Operand
from gpumux.fuse.rules.layout import apart
from gpumux.fuse.rules.table import rule


def product(a: Operand, b: Operand, models: int) -> Any:
    """a @ b for every model: [B, n, m]."""
    if a.alike and b.mergeable(1):  # [n, k] @ [k, B * m]: one product, with the models side by side
        wide = torch.mm(a.one(), b.merged(1))
        return apart(wide, 1, models)
    if b.alike and a.mergeable(0):  # [B * n, k] @ [k, m]
        return apart(torch.mm(a.merged(0), b.one()), 0, models)
    return torch.bmm(a.all(), b.all())


@rule("mm")
def mm(call: Call) -> Any:
    return product(call["self"], call["mat2"], call.models)


@rule("addmm")
def addmm(call: Call) -> Any:
    bias, a, b = call["self"], call["mat1"], call["mat2"]
    if not bias.alike and bias.dim == 1 and bias.mergeable(0) and a.alike and b.mergeable(1):
        wide = call.invoke({"self": bias.merged(0), "mat1": a.one(), "mat2": b.merged(1)})
        return apart(wide, 1, call.models)
    return call.invoke({"self": bias.all(2), "batch1": a.all(), "batch2": b.all()}, torch.ops.aten.baddbmm.default)


@rule("bmm")
def bmm(call: Call) -> Any:
    """[B, batch, n, k] @ [B, batch, k, m]; the models join the batch."""
    return _batched(call["self"], call["mat2"], call.models)


def _batched(a: Operand, b: Operand, models: int) -> Any:
    if a.mergeable(0) and not b.alike:
        made = torch.bmm(a.merged(0), b.merged(0))
    else:
        made = torch.bmm(a.all().flatten(0, 1), b.all().flatten(0, 1))
    return apart(made, 0, models)


@rule("baddbmm")
def baddbmm(call: Call) -> Any:
    bias, a, b = call["self"], call["batch1"], call["batch2"]
    size = (call.models * a.size[0], a.size[1], b.size[2])
    wide = bias.all(3).expand(call.models, a.size[0], a.size[1], b.size[2]).reshape(size)
    made = call.invoke({"self": wide, "batch1": a.all().flatten(0, 1), "batch2": b.all().flatten(0, 1)})
    return apart(made, 0, call.models)


@rule("mv")
def mv(call: Call) -> Any:
    matrix, vector = call["self"], call["vec"]
    if vector.alike and matrix.mergeable(0):
        return apart(torch.mv(matrix.merged(0), vector.one()), 0, call.models)
    return torch.bmm(matrix.all(), vector.all().unsqueeze(2)).squeeze(2)


@rule("dot")
def dot(call: Call) -> Any:
    return torch.bmm(call["self"].all().unsqueeze(1), call["tensor"].all().unsqueeze(2)).flatten()


@rule("_trilinear")
def trilinear(call: Call) -> Any:
    """Products of three tensors, as of a bilinear layer: the models are one more dimension that all three have."""
    changes: dict[str, Any] = {name: call[name].all() for name in ("i1", "i2", "i3")}
    changes |= {name: [d + 1 for d in call[name]] for name in ("expand1", "expand2", "expand3", "sumdim")}
    return call.invoke(changes | {"unroll_dim": call["unroll_dim"] + 1})
