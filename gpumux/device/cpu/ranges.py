"""Range checks on index inputs, before a kernel sees them.

Some kernels read or write out of bounds when an index is wrong. Indices computed by the program
itself can't be checked ahead (the executor process is the fence for those); indices that come with
the batch can, and then the error names the input, the value and the bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch

from gpumux.device.cpu.schema import named_arguments
from gpumux.errors import JobFailed
from gpumux.program.allowlist import INDEX_ARGS
from gpumux.program.ir import Op, Program, TensorRef, View
from gpumux.program.validate import tensor_refs


@dataclass(frozen=True, slots=True)
class IndexCheck:
    """Values of `view` must be in low..high, inclusive, or equal `ignored`."""

    view: int
    position: int
    low: int
    high: int
    ignored: int | None
    target: str

    def run(self, tensor: torch.Tensor) -> None:
        """Raises JobFailed naming the first value out of range."""
        if tensor.numel() == 0:
            return
        low, high = torch.aminmax(tensor)
        if int(low) >= self.low and int(high) <= self.high:
            return
        bad = (tensor < self.low) | (tensor > self.high)
        if self.ignored is not None:
            bad &= tensor != self.ignored
        found = tensor[bad]
        if found.numel():
            raise JobFailed(
                f"input {self.position} holds the index {int(found[0])} where {self.target} takes "
                f"{self.low} to {self.high}",
                "check the batch's labels or indices against the sizes the model was made with",
            )


@dataclass(frozen=True, slots=True)
class IndexChecks:
    """`storages`: input storages that hold indices (checked or not); `checks`: what can be checked."""

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
    """self[indices...]: entry i indexes dimension i, as long as no mask (which takes several) came before."""
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
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_backward,
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
    """Every use of an input as indices. An index computed from an input is not found here, and one in
    a storage that the program writes (`written`) is not checked: its values are not final yet."""
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
