"""Normalizations. Those with statistics by channel take the models as more channels, [N, B*C, ...] (HFTA, table 6)."""

from __future__ import annotations

from typing import Any

import torch

from gpumux.fuse.call import Call, Operand
from gpumux.fuse.rules.layout import by_memory, parts, written
from gpumux.fuse.rules.table import rule


def _flat(operand: Operand | None) -> torch.Tensor | None:
    """[C] -> [B*C]."""
    return None if operand is None else operand.merged(0)


@rule("native_batch_norm")
def batch_norm(call: Call) -> Any:
    """The running statistics are written, which the schema hides."""
    changes: dict[str, Any] = {"input": call["input"].merged(1)}
    changes |= {name: _flat(call[name]) for name in ("weight", "bias")}
    done = []
    for name in ("running_mean", "running_var"):
        changes[name] = None
        if call[name] is not None and call.number("training"):
            changes[name], finish = written(call[name])
            done.append(finish)
        elif call[name] is not None:
            changes[name] = call[name].merged(0)
    out, mean, invstd = call.invoke(changes)
    for finish in done:
        finish()
    return parts(((out, 1), (mean, 0), (invstd, 0)), call.models)


@rule("native_batch_norm_backward")
def batch_norm_backward(call: Call) -> Any:
    changes: dict[str, Any] = {name: call[name].merged(1) for name in ("grad_out", "input")}
    for name in ("weight", "running_mean", "running_var", "save_mean", "save_invstd"):
        changes[name] = _flat(call[name])
    dx, dweight, dbias = call.invoke(changes)
    return parts(zip((dx, dweight, dbias), (1, 0, 0), strict=True), call.models)


@rule("native_group_norm")
def group_norm(call: Call) -> Any:
    models = call.models
    changes = {"input": call["input"].merged(1), "weight": _flat(call["weight"]), "bias": _flat(call["bias"])}
    changes |= {"C": models * call["C"], "group": models * call["group"]}
    return parts(((t, 1) for t in call.invoke(changes)), models)


@rule("native_group_norm_backward")
def group_norm_backward(call: Call) -> Any:
    changes: dict[str, Any] = {name: call[name].merged(1) for name in ("grad_out", "input", "mean", "rstd")}
    changes |= {"weight": _flat(call["weight"]), "C": call.models * call["C"], "group": call.models * call["group"]}
    return parts(zip(call.invoke(changes), (1, 0, 0), strict=True), call.models)


_NORMED = "normed"


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@rule("native_layer_norm")
def layer_norm(call: Call) -> Any:
    x, weight, bias, shape = (call[n] for n in ("input", "weight", "bias", "normalized_shape"))
    dense, back = (x.one(), _as_it_is) if x.alike else by_memory(x.all(), len(shape))[:2]
    normed, mean, rstd = call.invoke({"input": dense, "weight": None, "bias": None})
    normed = back(normed)
    out = normed
    if weight is not None and bias is not None:
        out = torch.addcmul(bias.all(x.dim), normed, weight.all(x.dim))
    elif weight is not None:
        out = normed * weight.all(x.dim)
    elif bias is not None:
        out = normed + bias.all(x.dim)
    saved = call.outputs()[1]
    if weight is not None and saved is not None:
        call.homes.notes[_NORMED, saved.storage] = normed  # what the weight's gradient needs
    return tuple(t.expand(call.models, *t.shape[-x.dim :]) for t in (out, back(mean), back(rstd)))


@rule("native_layer_norm_backward")
def layer_norm_backward(call: Call) -> Any:
    """The gradient of the input is the kernel's, without weights. Those of weights and biases are sums over each model's
    own samples, which the kernel would add up over all models."""
    x, weight, shape = call["input"], call["weight"], call["normalized_shape"]
    wants_x, wants_weight, wants_bias = call["output_mask"]
    samples = list(range(1, 1 + x.dim - len(shape)))
    g = call["grad_out"].all()
    dx = dweight = dbias = None
    if wants_x:
        dense, back, order = by_memory(x.all(), len(shape))
        scaled = g if weight is None else g * weight.all(x.dim)
        # The kernel copies what is not dense, and lays its result out so; fake tensors follow whichever operand comes first.
        changes = {
            "grad_out": scaled.permute(order).contiguous(),
            "input": dense.contiguous(),
            "weight": None,
            "bias": None,
        }
        changes |= {name: call[name].all().permute(order).contiguous() for name in ("mean", "rstd")}
        dx = back(call.invoke(changes | {"output_mask": [True, False, False]})[0])
    if wants_weight:
        normed = call.homes.notes.get((_NORMED, call["mean"].view.storage))
        if normed is None:
            normed = (x.all() - call["mean"].all()) * call["rstd"].all()
        dweight = _sum(g * normed, samples)
    if wants_bias:
        dbias = _sum(g, samples)
    return dx, dweight, dbias


@rule("_weight_norm_interface")
def weight_norm(call: Call) -> Any:
    """[B, *size] and the norms [B, *size of g]: a direction and a length for each row (or column) of a weight."""
    v, g = call["v"].all(), call["g"].all()
    norms = torch.linalg.vector_norm(v, dim=_all_but(call), keepdim=True)
    return v * (g / norms), norms


@rule("_weight_norm_interface_backward")
def weight_norm_backward(call: Call) -> Any:
    grad, v, g, norms = (call[n].all() for n in ("grad_w", "saved_v", "saved_g", "saved_norms"))
    along = (grad * v).sum(_all_but(call), keepdim=True) / norms
    return (grad - v * (along / norms)) * (g / norms), along


def _all_but(call: Call) -> list[int]:
    """The dimensions of all models' weights that are no rows of them: not the models', nor `dim`."""
    weight: Operand = next(call.operands())
    return [d for d in range(1, 1 + weight.dim) if d != 1 + call["dim"]]


def _sum(tensor: torch.Tensor, dims: list[int]) -> torch.Tensor:
    return tensor.sum(dims) if dims else tensor.clone()  # sum over no dimensions is over all
