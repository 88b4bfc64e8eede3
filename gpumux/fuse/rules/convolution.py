"""Convolutions, transposed or not, of one, two or three dimensions (HFTA, table 6).

Models become groups: [N, B*C, ...] by weights [B*Cy, C/g, ...] in B*g groups. Where all models see one input, no
groups are needed for that: their filters stand side by side in one wide convolution.
"""

from __future__ import annotations

from math import prod
from typing import Any

from gpumux.fuse.call import Call, Operand
from gpumux.fuse.rules.layout import apart, parts
from gpumux.fuse.rules.table import rule


def _is_wide(call: Call, x: Operand, weight: Operand) -> bool:
    """One input for all, without groups. The filters of a transposed convolution, [Cx, Cy, ...], must be copied to
    stand side by side: not when the input is the smaller one to copy."""
    if not x.alike or call["groups"] != 1:
        return False
    return not call["transposed"] or prod(weight.size) <= prod(x.size)


@rule("convolution")
def convolution(call: Call) -> Any:
    x, weight, bias = call["input"], call["weight"], call["bias"]
    side = 1 if call["transposed"] else 0  # of the filters: output channels
    merged = None if bias is None else bias.merged(0)
    if _is_wide(call, x, weight):
        made = call.invoke({"input": x.one(), "weight": weight.merged(side), "bias": merged})
    elif weight.alike and (bias is None or bias.alike):  # the models are so many more samples
        one = None if bias is None else bias.one()
        made = call.invoke({"input": x.merged(0), "weight": weight.one(), "bias": one})
        return apart(made, 0, call.models)
    else:
        groups = call.models * call["groups"]
        made = call.invoke({"input": x.merged(1), "weight": weight.merged(0), "bias": merged, "groups": groups})
    return apart(made, 1, call.models)


@rule("convolution_backward")
def convolution_backward(call: Call) -> Any:
    grad, x, weight, sizes = call["grad_output"], call["input"], call["weight"], call["bias_sizes"]
    wants_x = call["output_mask"][0]
    changes: dict[str, Any] = {"grad_output": grad.merged(1)}
    if sizes is not None:
        changes["bias_sizes"] = [call.models * n for n in sizes]
    if _is_wide(call, x, weight) and not wants_x:
        side = 1 if call["transposed"] else 0
        changes |= {"input": x.one(), "weight": weight.merged(side)}
    else:
        side = 0
        changes |= {"input": x.merged(1), "weight": weight.merged(0), "groups": call.models * call["groups"]}
    return parts(zip(call.invoke(changes), (1, side, 0), strict=True), call.models)
