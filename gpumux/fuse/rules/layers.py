"""Rules for layers: normalizations, matrix products, pooling, indexing, embeddings, attention, convolutions."""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from gpumux.fuse.call import Call, Operand
from gpumux.fuse.emit import Declined
from gpumux.fuse.rules.table import in_memory_order, per_model, rule, split_models, split_results, writable_flat


def _flat(operand: Operand | None) -> torch.Tensor | None:
    """[C] -> [B*C]."""
    return None if operand is None else operand.merged(0)


def _dense(operand: Operand) -> torch.Tensor:
    """[N, C, *] -> [N, B*C, *], in a layout of which the kernels make a result of the same one: merged, models of one
    channel are a view with models outermost, for which kernels and fake tensors choose different layouts."""
    merged = operand.merged(1)
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    last = formats.get(merged.dim())
    if last is not None and merged.is_contiguous(memory_format=last):
        return merged
    return merged.contiguous()


@rule("native_batch_norm")
def batch_norm(call: Call) -> Any:
    """Batch norm with the models as more channels. The kernel writes the running statistics; its schema hides that."""
    changes: dict[str, Any] = {"input": _dense(call["input"])}
    changes |= {name: _flat(call[name]) for name in ("weight", "bias")}
    done = []
    for name in ("running_mean", "running_var"):
        changes[name] = None
        if call[name] is not None and call.number("training"):
            changes[name], finish = writable_flat(call[name])
            done.append(finish)
        elif call[name] is not None:
            changes[name] = call[name].merged(0)
    out, mean, invstd = call.invoke(changes)
    for finish in done:
        finish()
    return split_results(((out, 1), (mean, 0), (invstd, 0)), call.models)


@rule("native_batch_norm_backward")
def batch_norm_backward(call: Call) -> Any:
    changes: dict[str, Any] = {name: _dense(call[name]) for name in ("grad_out", "input")}
    for name in ("weight", "running_mean", "running_var", "save_mean", "save_invstd"):
        changes[name] = _flat(call[name])
    dx, dweight, dbias = call.invoke(changes)
    return split_results(zip((dx, dweight, dbias), (1, 0, 0), strict=True), call.models)


@rule("native_group_norm")
def group_norm(call: Call) -> Any:
    models = call.models
    changes = {"input": _dense(call["input"]), "weight": _flat(call["weight"]), "bias": _flat(call["bias"])}
    changes |= {"C": models * call["C"], "group": models * call["group"]}
    return split_results(((t, 1) for t in call.invoke(changes)), models)


@rule("native_group_norm_backward")
def group_norm_backward(call: Call) -> Any:
    changes: dict[str, Any] = {name: _dense(call[name]) for name in ("grad_out", "input")}
    changes |= {name: call[name].merged(1) for name in ("mean", "rstd")}
    changes |= {"weight": _flat(call["weight"]), "C": call.models * call["C"], "group": call.models * call["group"]}
    return split_results(zip(call.invoke(changes), (1, 0, 0), strict=True), call.models)


_NORMED = "normed"


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _computed_in(x: Operand, *weights: Operand | None) -> torch.dtype:
    """The type in which a normalization computes: that of its weights, if its input has another (autocast)."""
    return next((weight.dtype for weight in weights if weight is not None), x.dtype)


@rule("native_layer_norm")
def layer_norm(call: Call) -> Any:
    x, weight, bias, shape = (call[n] for n in ("input", "weight", "bias", "normalized_shape"))
    dense, back = (x.one(), _identity) if x.alike else in_memory_order(x.all(), len(shape))[:2]
    wide = _computed_in(x, weight, bias)
    normed, mean, rstd = call.invoke({"input": dense.to(wide), "weight": None, "bias": None})
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
        call.placements.notes[_NORMED, saved.storage] = normed  # for the weight's gradient
    out = out.to(x.dtype)
    return tuple(t.expand(call.models, *t.shape[-x.dim :]) for t in (out, back(mean), back(rstd)))


@rule("native_layer_norm_backward")
def layer_norm_backward(call: Call) -> Any:
    """The gradient of the input is the kernel's, without weights. Those of weights and biases are sums over each
    model's own samples; the kernel would sum over all models."""
    x, weight, shape = call["input"], call["weight"], call["normalized_shape"]
    wants_x, wants_weight, wants_bias = call["output_mask"]
    samples = list(range(1, 1 + x.dim - len(shape)))
    wide = _computed_in(x, weight, call["bias"])
    g = call["grad_out"].all().to(wide)
    dx = dweight = dbias = None
    if wants_x:
        dense, back, order = in_memory_order(x.all().to(wide), len(shape))
        scaled = g if weight is None else g * weight.all(x.dim)
        # The kernel copies operands that are not dense and gives its result a dense layout. Fake tensors take the
        # layout of the first operand.
        changes = {
            "grad_out": scaled.permute(order).contiguous(),
            "input": dense.contiguous(),
            "weight": None,
            "bias": None,
        }
        changes |= {name: call[name].all().permute(order).contiguous() for name in ("mean", "rstd")}
        dx = back(call.invoke(changes | {"output_mask": [True, False, False]})[0]).to(x.dtype)
    if wants_weight:
        normed = call.placements.notes.get((_NORMED, call["mean"].view.storage))
        if normed is None:
            normed = (x.all() - call["mean"].all()) * call["rstd"].all()
        dweight = _sum(g * normed, samples)
    if wants_bias:
        dbias = _sum(g, samples)
    return dx, dweight, dbias


@rule("_weight_norm_interface")
def weight_norm(call: Call) -> Any:
    """[B, *size] and the norms [B, *size of g]: direction times length for each row (or column) of a weight."""
    v, g = call["v"].all(), call["g"].all()
    norms = torch.linalg.vector_norm(v, dim=_all_but(call), keepdim=True)
    return v * (g / norms), norms


@rule("_weight_norm_interface_backward")
def weight_norm_backward(call: Call) -> Any:
    grad, v, g, norms = (call[n].all() for n in ("grad_w", "saved_v", "saved_g", "saved_norms"))
    along = (grad * v).sum(_all_but(call), keepdim=True) / norms
    return (grad - v * (along / norms)) * (g / norms), along


def _all_but(call: Call) -> list[int]:
    """The dimensions within a row of the weights: all but the model dimension and `dim`."""
    weight: Operand = next(call.operands())
    return [d for d in range(1, 1 + weight.dim) if d != 1 + call["dim"]]


def _sum(tensor: torch.Tensor, dims: list[int]) -> torch.Tensor:
    return tensor.sum(dims) if dims else tensor.clone()  # a sum over [] is over all dimensions


# ---- Matrix products: one batched product, or one larger product if all models share an operand (HFTA, table 6).


def product(a: Operand, b: Operand, models: int) -> Any:
    """a @ b for every model: [B, n, m]."""
    if a.alike and b.mergeable(1):  # [n, k] @ [k, B * m]: one product, with the models side by side
        wide = torch.mm(a.one(), b.merged(1))
        return split_models(wide, 1, models)
    if b.alike and a.mergeable(0):  # [B * n, k] @ [k, m]
        return split_models(torch.mm(a.merged(0), b.one()), 0, models)
    return torch.bmm(a.all(), b.all())


@rule("mm")
def mm(call: Call) -> Any:
    return product(call["self"], call["mat2"], call.models)


@rule("addmm")
def addmm(call: Call) -> Any:
    bias, a, b = call["self"], call["mat1"], call["mat2"]
    if not bias.alike and bias.dim == 1 and bias.mergeable(0) and a.alike and b.mergeable(1):
        wide = call.invoke({"self": bias.merged(0), "mat1": a.one(), "mat2": b.merged(1)})
        return split_models(wide, 1, call.models)
    return call.invoke({"self": bias.all(2), "batch1": a.all(), "batch2": b.all()}, torch.ops.aten.baddbmm.default)


@rule("bmm")
def bmm(call: Call) -> Any:
    """[B, batch, n, k] @ [B, batch, k, m]; the models are merged into the batch."""
    return _batched(call["self"], call["mat2"], call.models)


def _batched(a: Operand, b: Operand, models: int) -> Any:
    if a.mergeable(0) and not b.alike:
        made = torch.bmm(a.merged(0), b.merged(0))
    else:
        made = torch.bmm(a.all().flatten(0, 1), b.all().flatten(0, 1))
    return split_models(made, 0, models)


@rule("baddbmm")
def baddbmm(call: Call) -> Any:
    bias, a, b = call["self"], call["batch1"], call["batch2"]
    size = (call.models * a.size[0], a.size[1], b.size[2])
    wide = bias.all(3).expand(call.models, a.size[0], a.size[1], b.size[2]).reshape(size)
    made = call.invoke({"self": wide, "batch1": a.all().flatten(0, 1), "batch2": b.all().flatten(0, 1)})
    return split_models(made, 0, call.models)


@rule("mv")
def mv(call: Call) -> Any:
    matrix, vector = call["self"], call["vec"]
    if vector.alike and matrix.mergeable(0):
        return split_models(torch.mv(matrix.merged(0), vector.one()), 0, call.models)
    return torch.bmm(matrix.all(), vector.all().unsqueeze(2)).squeeze(2)


@rule("dot")
def dot(call: Call) -> Any:
    return torch.bmm(call["self"].all().unsqueeze(1), call["tensor"].all().unsqueeze(2)).flatten()


@rule("_trilinear")
def trilinear(call: Call) -> Any:
    """Products of three tensors, as in a bilinear layer: the models are one more dimension of all three."""
    changes: dict[str, Any] = {name: call[name].all() for name in ("i1", "i2", "i3")}
    changes |= {name: [d + 1 for d in call[name]] for name in ("expand1", "expand2", "expand3", "sumdim")}
    return call.invoke(changes | {"unroll_dim": call["unroll_dim"] + 1})


# ---- Operators that process every channel of every sample by itself: pooling, resampling, padding with the operand's
# own values.
#
# Models are merged into the samples or into the channels, whichever needs fewer copies.


_UPSAMPLING = (
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d",
    "upsample_bicubic2d", "upsample_trilinear3d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
)  # fmt: skip
_POOLING = (
    "max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d",
    "_adaptive_avg_pool3d", "adaptive_max_pool2d", "adaptive_max_pool3d",
)  # fmt: skip
_PADDING = (*(f"{kind}_pad{d}d" for kind in ("reflection", "replication") for d in (1, 2, 3)),)
_BOTH = _UPSAMPLING + _POOLING + _PADDING


@rule(*_BOTH, *(f"{name}_backward" for name in _BOTH), "max_unpool2d", "max_unpool3d")
def by_channel(call: Call) -> Any:
    operands = {name: v for name, v in call.args.items() if isinstance(v, Operand)}
    found = re.search(r"([123])d", call.name)
    assert found is not None
    leading = min(o.dim for o in operands.values()) - int(found[1])  # 2: samples and channels, 1: channels
    if leading not in (1, 2):
        raise Declined("an operand without channels")
    dim = max(range(leading), key=lambda d: sum(o.mergeable(d) for o in operands.values()))
    changes: dict[str, Any] = {name: o.merged(dim) for name, o in operands.items()}
    if "input_size" in call.args:
        changes["input_size"] = [n * call.models if d == dim else n for d, n in enumerate(call["input_size"])]
    made = call.invoke(changes)
    if isinstance(made, torch.Tensor):
        return split_results([(made, dim)], call.models)[0]
    return split_results([(t, dim) for t in made], call.models)


_BY_SAMPLE = ("fractional_max_pool2d", "fractional_max_pool3d", "affine_grid_generator")


@rule(*_BY_SAMPLE, *(f"{name}_backward" for name in _BY_SAMPLE))
def by_sample(call: Call) -> Any:
    """Models are merged into the samples."""
    operands = {name: v for name, v in call.args.items() if isinstance(v, Operand)}
    found = re.search(r"([23])d", call.name)
    if found is not None and call["self"].dim != int(found[1]) + 2:
        raise Declined("an operand without samples")
    changes: dict[str, Any] = {name: o.merged(0) for name, o in operands.items()}
    if "size" in call.args:
        changes["size"] = [call.models * call["size"][0], *call["size"][1:]]
    made = call.invoke(changes)
    if isinstance(made, torch.Tensor):
        return split_results([(made, 0)], call.models)[0]
    return split_results([(t, 0) for t in made], call.models)


# ---- Reads and writes at indices that torch.func does not batch.


@rule("index_put_", "index_put")
def index_put(call: Call) -> Any:
    """Writes one number under a mask, as Rprop does."""
    x, indices, values = call["self"], call["indices"], call["values"]
    whole = len(indices) == 1 and isinstance(indices[0], Operand) and indices[0].dtype == torch.bool
    if not whole or indices[0].dim != x.dim or values.dim or not values.alike or call["accumulate"]:
        raise Declined("no mask of one number")
    fill = torch.Tensor.masked_fill_ if call.name == "index_put_" else torch.Tensor.masked_fill
    return fill(x.all(), indices[0].all(), values.one())


def _places(call: Call) -> torch.Tensor:
    """[B, n]: indices into each model's flat tensor. Negative indices count from the end."""
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
per_model("oneDNN takes the layers of one LSTM", "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward")
per_model("cuDNN takes the layers of one model", "_cudnn_rnn", "_cudnn_rnn_backward")


# ---- Embedding tables stacked by rows: [B*V, D], with each model's indices shifted by V (HFTA, table 6).


def _moved(call: Call, indices: Operand, rows: int) -> torch.Tensor:
    """[B, *size]: the indices of each model in the stacked table."""
    notes = call.placements.notes
    if ("rows", rows) not in notes:
        storage = call.placements.emitter.add_const(array("q", [rows * b for b in range(call.models)]).tobytes())
        notes["rows", rows] = call.placements.emitter.window(storage, "int64", (call.models,), (1,))
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
    tables = split_models(made, 0, call.models)
    if 0 <= padding < rows:  # this row of every model
        tables.select(1, padding).zero_()
    return tables


@rule("embedding_renorm_")
def embedding_renorm(call: Call) -> Any:
    weight, indices = call["self"], call["indices"]
    tables, finish = writable_flat(weight)
    call.invoke({"self": tables, "indices": _moved(call, indices, weight.size[0])})
    finish()
    return weight.all()


# ---- Attention kernels: models are merged into the batch.


class Batch:
    """[B, N, heads, ...] as [B*N, heads, ...], or N and B exchanged if the query is in that order in memory."""

    def __init__(self, call: Call) -> None:
        query = call["query"].all()
        self.order = in_memory_order(query, 3)[2][:2]
        self.lead = (query.shape[self.order[0]], query.shape[self.order[1]])

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Merge models and samples. Dimensions of stride 0 keep it, also if a copy must be made."""
        tensor = tensor.permute(*self.order, *range(2, tensor.dim()))
        real = tensor
        for d in range(2, tensor.dim()):
            if tensor.stride(d) == 0:
                real = real.narrow(d, 0, 1)
        return real.flatten(0, 1).expand(-1, *tensor.shape[2:])

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        split: torch.Tensor = packed.unflatten(0, self.lead)
        return split.permute(*self.order, *range(2, split.dim()))

    def mask(self, mask: Operand | None) -> torch.Tensor | None:
        """The packed mask: [L, S], or [N or 1, heads or 1, L, S]."""
        if mask is None or (mask.alike and (mask.dim < 4 or mask.size[0] == 1)):
            return None if mask is None else mask.one()
        tensor = mask.all()
        if mask.dim < 4:
            tensor = tensor.unflatten(0, (-1, *[1] * (4 - mask.dim)))
        return self.pack(tensor.expand(-1, self.lead[1 - self.order.index(0)], *tensor.shape[2:]))


def _packed(call: Call, batch: Batch, other: frozenset[str]) -> dict[str, Any]:
    """The operands but for `other`, with models merged into the batch."""
    tensors = {name: v for name, v in call.args.items() if isinstance(v, Operand) and name not in other}
    return {name: batch.pack(operand.all()) for name, operand in tensors.items()}


@rule("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward")
def flash_for_cpu(call: Call) -> Any:
    batch = Batch(call)
    changes = _packed(call, batch, frozenset({"attn_mask"})) | {"attn_mask": batch.mask(call["attn_mask"])}
    return tuple(batch.unpack(made) for made in call.invoke(changes))


@rule("_scaled_dot_product_efficient_attention", "_scaled_dot_product_efficient_attention_backward")
def efficient_attention(call: Call) -> Any:
    """Attention with a mask, as it is traced for a GPU. Without dropout the seed and the offset of its random numbers
    have no meaning, and are the same for all models."""
    if call["dropout_p"]:
        raise Declined("it drops what the model's own forward has drawn")
    batch = Batch(call)
    seeds = {name: operand.of(0) for name in ("philox_seed", "philox_offset") if (operand := call.args.get(name))}
    changes = _packed(call, batch, frozenset(seeds)) | seeds
    if call["attn_bias"] is not None:
        changes["attn_bias"] = _in_rows(changes["attn_bias"], call["attn_bias"].of(0).stride())
    made = call.invoke(changes)
    if seeds:
        return tuple(None if tensor is None else batch.unpack(tensor) for tensor in made)
    out, sums, *drawn = made
    return batch.unpack(out), batch.unpack(sums), *(one.expand(call.models, *one.shape) for one in drawn)


def _in_rows(mask: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """A packed mask whose rows lie as far apart as one model's, of these strides: the kernel wants them aligned."""
    if mask.stride()[-2:] == tuple(strides[-2:]):
        return mask
    columns, pitch = mask.shape[-1], strides[-2]
    if strides[-1] != 1 or pitch < columns:
        raise Declined("the rows of its mask lie otherwise than in order")
    return torch.nn.functional.pad(mask, (0, pitch - columns))[..., :columns]


per_model("it drops what the model's own forward has drawn", "_scaled_dot_product_efficient_attention_backward")


# ---- Convolutions, transposed or not, of one, two or three dimensions (HFTA, table 6).
#
# Models become groups: [N, B*C, ...] by weights [B*Cy, C/g, ...] in B*g groups. If all models have one input, no
# groups are needed: the filters are concatenated in one wide convolution.


def _is_wide(call: Call, x: Operand, weight: Operand) -> bool:
    """Whether to run one wide convolution: one input for all, without groups. The filters of a transposed convolution,
    [Cx, Cy, ...], must be copied to be concatenated, so not if the input is cheaper to copy."""
    if not x.alike or call["groups"] != 1:
        return False
    return not call["transposed"] or prod(weight.size) <= prod(x.size)


@rule("convolution")
def convolution(call: Call) -> Any:
    x, weight, bias = call["input"], call["weight"], call["bias"]
    side = 1 if call["transposed"] else 0  # dimension of the filters' output channels
    merged = None if bias is None else bias.merged(0)
    if _is_wide(call, x, weight):
        made = call.invoke({"input": x.one(), "weight": weight.merged(side), "bias": merged})
    elif weight.alike and (bias is None or bias.alike):  # models are merged into the samples
        one = None if bias is None else bias.one()
        made = call.invoke({"input": x.merged(0), "weight": weight.one(), "bias": one})
        return split_models(made, 0, call.models)
    else:
        groups = call.models * call["groups"]
        made = call.invoke({"input": x.merged(1), "weight": weight.merged(0), "bias": merged, "groups": groups})
    return split_models(made, 1, call.models)


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
    return split_results(zip(call.invoke(changes), (1, side, 0), strict=True), call.models)
