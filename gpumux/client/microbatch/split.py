"""From a step's traces on the whole batch and on a part of it to one that runs part by part."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree

from gpumux.client.microbatch.classify import classify
from gpumux.client.microbatch.emit import Emitter
from gpumux.client.microbatch.join import join
from gpumux.client.microbatch.load import Loader
from gpumux.client.microbatch.pairs import pair_up, scaled
from gpumux.client.microbatch.proof import prove
from gpumux.client.microbatch.values import Kind, Setting
from gpumux.client.state import StateTable
from gpumux.client.structure import thaw
from gpumux.client.trace import DeviceExit, RawTrace, TensorResult
from gpumux.errors import ConfigError, NotSplittable

# How far a split step's gradients and results may be from the whole step's, by the type they are in: relative
# to the largest element of the tensor. In exact arithmetic they are equal.
TOLERANCE = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}
MOST = 4096


def check_microbatches(count: Any) -> None:
    """Raises ConfigError for anything but a whole number from 1 to MOST."""
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MOST:
        raise ConfigError(f"microbatches is {count!r}", f"use a whole number from 1 to {MOST}")


def split_positions(tensors: list[torch.Tensor], count: int) -> set[int]:
    """Which tensors of a batch are cut along dimension 0: those as long as the first one. Raises
    NotSplittable when `count` does not divide that."""
    sized = [t for t in tensors if t.dim()]
    if not sized:
        raise NotSplittable(
            f"the batch holds no tensor with a batch dimension to cut in {count} parts",
            "pass the batch as tensors with their samples along dimension 0, or submit without microbatches",
        )
    size = sized[0].shape[0]
    if size % count or size == 0:
        raise NotSplittable(
            f"{count} microbatches do not divide a batch of {size} samples",
            "use a number that divides the batch size, and drop_last=True in the loader",
        )
    return {i for i, t in enumerate(tensors) if t.dim() and t.shape[0] == size}


def first_part(args: Any, kwargs: Any, count: int) -> tuple[Any, Any]:
    """The step's arguments with the first of `count` parts of the batch."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    split = split_positions([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)], count)
    position = 0
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            if position in split:
                leaves[i] = leaf[: leaf.shape[0] // count]
            position += 1
    first_args, first_kwargs = pytree.tree_unflatten(leaves, spec)
    return first_args, first_kwargs


def split(full: RawTrace, part: RawTrace, tensors: list[torch.Tensor], count: int, table: StateTable) -> RawTrace:
    """The trace that runs `count` parts of the batch one after the other. Raises NotSplittable."""
    pairs = pair_up(full, part)
    cut = split_positions(tensors, count)
    returned = [
        (a.view, b.view) for a, b in zip(full.results, part.results, strict=True) if isinstance(a, TensorResult)
    ]
    setting = Setting(cut, _fixed(table), {place.buffer for _, place in full.entry.gradients})
    plan = classify(pairs, full.record, part.record, count, setting, _exits(full), [a for a, _ in returned])

    def emitter(shared: set[int] | None = None) -> Emitter:
        return Emitter(pairs, full.record, part.record, plan, count, cut, shared)

    joined = [(a, b) for a, b in returned if _per_sample(full, plan.kinds, a)]
    for a, b in joined:
        if scaled(full.record.views[a], part.record.views[b], count) < 0:
            raise NotSplittable(
                f"the step returns certain samples of the batch (shape {full.record.views[a].size})",
                "return per-sample values of the whole batch, sums, or means, or submit without microbatches",
            )
    proof = prove(pairs, plan, emitter, Loader(full.record, table, tensors, cut), joined)
    return join(full, part, pairs, plan, emitter(plan.shares), proof)


def _per_sample(full: RawTrace, kinds: list[Kind], view: int) -> bool:
    """Whether each part has its own samples of a result. What lies on the batch itself is there whole."""
    storage = full.record.views[view].storage
    return kinds[storage] in (Kind.SAMPLE, Kind.DATA) and full.record.storages[storage].kind == "temp"


def _exits(full: RawTrace) -> list[int]:
    """Views of everything the step leaves in gradients, optimizers and buffers."""
    found = [*full.gradients.values(), *(view for _, view in full.replaced)]

    def leaf(value: Any) -> None:
        if isinstance(value, DeviceExit):
            found.append(value.view)

    for frozen in full.optimizers:
        for _, tree in frozen:
            thaw(tree, leaf)
    return found


def _fixed(table: StateTable) -> set[int]:
    """Job buffers that hold no parameter."""
    params = {place.buffer for p in table.params if (place := table.place(p)) is not None}
    return set(range(len(table.buffers))) - params
