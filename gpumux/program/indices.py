"""The indices that come with a batch (labels, token numbers), and range checks of them.

Some kernels read or write out of bounds when an index is wrong, and none fails before the step has begun. So indices of
the batch are checked beforehand: by the client before it sends a step, and by the executor, which trusts no client.
Indices that the Program computes can't be checked ahead, but for those that it only pads, copies or converts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch

from gpumux.errors import BadBatch, JobFailed
from gpumux.program.check import DTYPES, named_arguments, written
from gpumux.program.ir import Op, Program, TensorRef, View
from gpumux.program.operators import INDEX_ARGS
from gpumux.program.validate import tensor_refs


@dataclass(frozen=True, slots=True)
class IndexCheck:
    """A check that the values of `view`, which are those of input `position`, are in low..high, inclusive, or equal
    `ignored`."""

    view: int
    position: int
    low: int
    high: int
    ignored: int | None
    target: str

    def bad(self, tensor: torch.Tensor) -> int | None:
        """The first value out of range, None if there is none."""
        if tensor.numel() == 0:
            return None
        low, high = torch.aminmax(tensor)
        if int(low) >= self.low and int(high) <= self.high:
            return None
        found = (tensor < self.low) | (tensor > self.high)
        if self.ignored is not None:
            found &= tensor != self.ignored
        values = tensor[found]
        return int(values[0]) if values.numel() else None

    def run(self, tensor: torch.Tensor) -> None:
        """Raises JobFailed for a value out of range."""
        value = self.bad(tensor)
        if value is not None:
            raise JobFailed(
                self.sentence(value), "check the batch's labels or indices against the sizes the model was made with"
            )

    def sentence(self, value: int) -> str:
        return f"input {self.position} holds the index {value} where {self.target} takes {self.low} to {self.high}"


@dataclass(frozen=True, slots=True)
class IndexChecks:
    """`storages`: input storages that hold indices, checked or not; `checks`: the checks that are possible."""

    storages: frozenset[int]
    checks: tuple[IndexCheck, ...]


@dataclass(frozen=True, slots=True)
class _Use:
    view: int
    low: int
    high: int
    ignored: int | None = None


_Arguments = dict[str, Any]
_Views = tuple[View, ...]


def _size(views: _Views, ref: TensorRef, dim: int) -> int:
    size = views[ref.view].size
    return size[dim] if size else 1


def _embedding(a: _Arguments, views: _Views) -> Iterator[_Use]:
    yield _Use(a["indices"].view, 0, _size(views, a["weight"], 0) - 1)


def _embedding_backward(a: _Arguments, views: _Views) -> Iterator[_Use]:
    yield _Use(a["indices"].view, 0, a["num_weights"] - 1)


def _bag(a: _Arguments, views: _Views) -> Iterator[_Use]:
    yield _Use(a["indices"].view, 0, _size(views, a["weight"], 0) - 1)
    yield _Use(a["offsets"].view, 0, prod(views[a["indices"].view].size))


def _nll(a: _Arguments, views: _Views) -> Iterator[_Use]:
    size = views[a["self"].view].size
    classes = size[1] if len(size) > 1 else size[0]
    yield _Use(a["target"].view, 0, classes - 1, a["ignore_index"])


def _along(a: _Arguments, views: _Views) -> Iterator[_Use]:
    yield _Use(a["index"].view, 0, _size(views, a["self"], a["dim"]) - 1)


def _take(a: _Arguments, views: _Views) -> Iterator[_Use]:
    count = prod(views[a["self"].view].size)
    yield _Use(a["index"].view, -count, count - 1)


def _indexed(a: _Arguments, views: _Views) -> Iterator[_Use]:
    """self[indices...]: entry i indexes dimension i, unless a mask came before, which takes several dimensions."""
    known = True
    for dim, ref in enumerate(a["indices"]):
        if ref is None:
            continue
        if views[ref.view].dtype in ("bool", "uint8"):
            known = False
            continue
        bound = _size(views, a["self"], dim)
        if known:
            yield _Use(ref.view, -bound, bound - 1)


def _pooled(dims: int, a: _Arguments, views: _Views) -> Iterator[_Use]:
    yield _Use(a["indices"].view, 0, prod(views[a["self"].view].size[-dims:]) - 1)


_USES: dict[str, Callable[[_Arguments, _Views], Iterator[_Use]]] = {
    "embedding": _embedding, "_embedding_bag": _bag, "_embedding_bag_forward_only": _bag,
    "embedding_dense_backward": _embedding_backward, "_embedding_bag_dense_backward": _embedding_backward,
    "nll_loss_forward": _nll, "nll_loss_backward": _nll,
    "nll_loss2d_forward": _nll, "nll_loss2d_backward": _nll,
    "gather": _along, "scatter": _along, "scatter_": _along, "scatter_add": _along, "scatter_add_": _along,
    "scatter_reduce": _along, "scatter_reduce_": _along, "index_select": _along,
    "index_add": _along, "index_add_": _along, "index_copy": _along, "index_copy_": _along,
    "index_fill": _along, "index_fill_": _along,
    "take": _take, "put": _take, "put_": _take,
    "index": _indexed, "index_put": _indexed, "index_put_": _indexed, "_unsafe_index": _indexed,
    "_unsafe_index_put": _indexed,
    "max_pool2d_with_indices_backward": partial(_pooled, 2), "adaptive_max_pool2d_backward": partial(_pooled, 2),
    "max_pool3d_with_indices_backward": partial(_pooled, 3), "adaptive_max_pool3d_backward": partial(_pooled, 3),
}  # fmt: skip


def _uses(op: Op, views: _Views) -> Iterator[_Use]:
    bounds = _USES.get(op.target.split(".")[1])
    if bounds is not None:
        yield from bounds({argument.name: value for argument, value, _ in named_arguments(op)}, views)


def index_checks(program: Program, written: Set[int]) -> IndexChecks:
    """All uses of inputs as indices. Indices computed from an input are not found. Those in a storage that the program
    writes (`written`) are not checked: their values are not final when a step begins."""
    positions = {program.views[v].storage: i for i, v in enumerate(program.inputs)}
    storages: set[int] = set()
    checks: dict[IndexCheck, None] = {}
    for op in program.ops:
        for position in INDEX_ARGS.get(op.target, ()):
            refs = tensor_refs(op.args[position : position + 1])
            storages.update(program.views[ref.view].storage for ref in refs)
        for use in _uses(op, program.views):
            storage = program.views[use.view].storage
            if storage in positions and storage not in written:
                checks[IndexCheck(use.view, positions[storage], use.low, use.high, use.ignored, op.target)] = None
    return IndexChecks(frozenset(storages & positions.keys()), tuple(checks))


# ---- the check of a client, before it sends a step


# Operators whose result has the values of their argument, and constants.
_MOVES = frozenset(("aten.clone.default", "aten._to_copy.default", "aten.constant_pad_nd.default"))
_INTEGERS = frozenset(("uint8", "int8", "int16", "int32", "int64"))


class BatchCheck:
    """Checks the indices of a Program's batches, and those that the step pads, copies or converts first: those are
    computed as the step does."""

    def __init__(self, program: Program) -> None:
        changed = {program.views[ref.view].storage for op in program.ops for ref in tensor_refs(tuple(written(op)))}
        self._views = program.views
        self._inputs = {program.views[v].storage: i for i, v in enumerate(program.inputs)}
        self._made = {
            program.views[op.outs[0]].storage: op
            for op in program.ops
            if op.target in _MOVES and isinstance(op.outs[0], int)
        }
        self._made = {storage: op for storage, op in self._made.items() if storage not in changed}
        found: dict[tuple[int, int, int, int | None], IndexCheck] = {}
        for op in program.ops:
            for use in _uses(op, program.views):
                position = self._source(use.view, changed)
                if position is not None:
                    key = (use.view, use.low, use.high, use.ignored)
                    found.setdefault(key, IndexCheck(use.view, position, use.low, use.high, use.ignored, op.target))
        self.checks = tuple(found.values())

    def _source(self, view: int, changed: Set[int]) -> int | None:
        """The input that the values of a view are those of; None if they are computed."""
        storage = self._views[view].storage
        if self._views[view].dtype not in _INTEGERS or storage in changed:
            return None
        if storage in self._inputs:
            return self._inputs[storage]
        op = self._made.get(storage)
        first = op.args[0] if op is not None else None
        return self._source(first.view, changed) if isinstance(first, TensorRef) else None

    def run(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raises BadBatch for the first index out of range in a batch on the CPU. A batch on a GPU is left to the
        device's own check, because reading it here would wait for the GPU."""
        for check in self.checks:
            if tensors[check.position].device.type == "cpu":
                value = check.bad(self._values(check.view, tensors))
                if value is not None:
                    raise BadBatch(
                        f"{check.sentence(value)}: it is out of range",
                        "the step was not run, and the job's state is as it was: correct the batch, or leave it out",
                    )

    def _values(self, view: int, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        found = self._views[view]
        if found.storage in self._inputs:
            tensor = tensors[self._inputs[found.storage]].detach()
            return tensor.as_strided(found.size, found.stride, tensor.storage_offset() + found.offset)
        op = self._made[found.storage]
        source = op.args[0]
        assert isinstance(source, TensorRef)
        values = self._values(source.view, tensors)
        if op.target == "aten.constant_pad_nd.default":
            values = torch.ops.aten.constant_pad_nd.default(values, *op.args[1:])
        whole = self._views[_first(op)]
        made = torch.empty_strided(whole.size, whole.stride, dtype=DTYPES[whole.dtype])
        return made.copy_(values).as_strided(found.size, found.stride, found.offset)


def _first(op: Op) -> int:
    made = op.outs[0]
    assert isinstance(made, int)
    return made
