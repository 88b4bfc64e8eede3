"""The values that operators refuse: indices and probabilities out of range, and what an operator has to raise for.

Some kernels read or write out of bounds when an index is wrong, and none fails before the step has begun. So indices of
the batch are checked beforehand: by the client before it sends a step (capture/batch/checks.py, which also looks at
those that the Program computes from the batch), and by the executor, which trusts no client.

Values that the model computes are only known while the step runs. `undo_of` says how a step in which an operator
refuses such a value can be undone, so that it fails alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch

from gpumux.errors import JobFailed
from gpumux.program.check import named_arguments, written
from gpumux.program.ir import Op, Program, TensorRef, View
from gpumux.program.operators import INDEX_ARGS
from gpumux.program.validate import op_args, out_views, tensor_refs


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
class IndexUse:
    """A tensor that an operator takes indices from: they are in low..high, inclusive, or equal `ignored`."""

    view: int
    low: int
    high: int
    ignored: int | None = None


_Arguments = dict[str, Any]
_Views = tuple[View, ...]


def _size(views: _Views, ref: TensorRef, dim: int) -> int:
    size = views[ref.view].size
    return size[dim] if size else 1


def _embedding(a: _Arguments, views: _Views) -> Iterator[IndexUse]:
    yield IndexUse(a["indices"].view, 0, _size(views, a["weight"], 0) - 1)


def _embedding_backward(a: _Arguments, views: _Views) -> Iterator[IndexUse]:
    yield IndexUse(a["indices"].view, 0, a["num_weights"] - 1)


def _bag(a: _Arguments, views: _Views) -> Iterator[IndexUse]:
    yield IndexUse(a["indices"].view, 0, _size(views, a["weight"], 0) - 1)
    yield IndexUse(a["offsets"].view, 0, prod(views[a["indices"].view].size))


def _nll(a: _Arguments, views: _Views) -> Iterator[IndexUse]:
    size = views[a["self"].view].size
    classes = size[1] if len(size) > 1 else size[0]
    yield IndexUse(a["target"].view, 0, classes - 1, a["ignore_index"])


def _margin(a: _Arguments, views: _Views) -> Iterator[IndexUse]:
    yield IndexUse(a["target"].view, 0, _size(views, a["self"], -1) - 1)


def _margins(a: _Arguments, views: _Views) -> Iterator[IndexUse]:
    yield IndexUse(a["target"].view, -1, _size(views, a["self"], -1) - 1)


def _unpooled(a: _Arguments, views: _Views) -> Iterator[IndexUse]:
    yield IndexUse(a["indices"].view, 0, prod(a["output_size"]) - 1)


def _along(a: _Arguments, views: _Views) -> Iterator[IndexUse]:
    yield IndexUse(a["index"].view, 0, _size(views, a["self"], a["dim"]) - 1)


def _take(a: _Arguments, views: _Views) -> Iterator[IndexUse]:
    count = prod(views[a["self"].view].size)
    yield IndexUse(a["index"].view, -count, count - 1)


def _indexed(a: _Arguments, views: _Views) -> Iterator[IndexUse]:
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
            yield IndexUse(ref.view, -bound, bound - 1)


def _pooled(dims: int, a: _Arguments, views: _Views) -> Iterator[IndexUse]:
    yield IndexUse(a["indices"].view, 0, prod(views[a["self"].view].size[-dims:]) - 1)


_USES: dict[str, Callable[[_Arguments, _Views], Iterator[IndexUse]]] = {
    "embedding": _embedding, "_embedding_bag": _bag, "_embedding_bag_forward_only": _bag,
    "embedding_dense_backward": _embedding_backward, "_embedding_bag_dense_backward": _embedding_backward,
    "nll_loss_forward": _nll, "nll_loss_backward": _nll,
    "nll_loss2d_forward": _nll, "nll_loss2d_backward": _nll,
    "multi_margin_loss": _margin, "multilabel_margin_loss_forward": _margins,
    "max_unpool2d": _unpooled, "max_unpool3d": _unpooled,
    "gather": _along, "scatter": _along, "scatter_": _along, "scatter_add": _along, "scatter_add_": _along,
    "scatter_reduce": _along, "scatter_reduce_": _along, "index_select": _along,
    "index_add": _along, "index_add_": _along, "index_copy": _along, "index_copy_": _along,
    "index_reduce": _along, "index_reduce_": _along, "index_fill": _along, "index_fill_": _along,
    "take": _take, "put": _take, "put_": _take,
    "index": _indexed, "index_put": _indexed, "index_put_": _indexed, "_unsafe_index": _indexed,
    "_unsafe_index_put": _indexed,
    "max_pool2d_with_indices_backward": partial(_pooled, 2), "adaptive_max_pool2d_backward": partial(_pooled, 2),
    "max_pool3d_with_indices_backward": partial(_pooled, 3), "adaptive_max_pool3d_backward": partial(_pooled, 3),
}  # fmt: skip


def index_uses(op: Op, views: _Views) -> Iterator[IndexUse]:
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
        for use in index_uses(op, program.views):
            storage = program.views[use.view].storage
            if storage in positions and storage not in written:
                checks[IndexCheck(use.view, positions[storage], use.low, use.high, use.ignored, op.target)] = None
    return IndexChecks(frozenset(storages & positions.keys()), tuple(checks))


# ---- Operators that raise on values


_BETWEEN_0_AND_1 = {"aten.binary_cross_entropy.default": ("self", "target")}
_RAISE = frozenset(
    ("cholesky", "_linalg_eigh", "linalg_eig", "_linalg_eigvals", "_linalg_svd", "linalg_pinv", "linalg_ldl_solve",
     "floor_divide", "fmod", "remainder", "div", "gcd", "lcm", "binary_cross_entropy",
     "multinomial", "bernoulli", "bernoulli_", "poisson", "binomial", "normal")
)  # fmt: skip
_DIVIDE = frozenset(("floor_divide", "fmod", "remainder", "div", "gcd", "lcm"))
_WHOLE = frozenset(("uint8", "int8", "int16", "int32", "int64"))


def between_0_and_1(op: Op) -> Iterator[int]:
    """The views of an operator's arguments whose values must be from 0 to 1."""
    for name in _BETWEEN_0_AND_1.get(op.target, ()):
        arg = next(value for argument, value, _ in named_arguments(op) if argument.name == name)
        if isinstance(arg, TensorRef):
            yield arg.view


def raises_on_values(op: Op, views: _Views) -> bool:
    """Whether an operator raises on some values of its arguments, other than indices. Of divisions, only those of whole
    numbers by a tensor raise."""
    name = op.target.split(".")[1]
    if name not in _RAISE:
        return False
    if name not in _DIVIDE:
        return True
    refs = list(tensor_refs(op.args[:2]))
    return len(refs) == 2 and all(views[ref.view].dtype in _WHOLE for ref in refs)


# ---- Undoing a step in which an operator raised


MOST_UNDO_BYTES = 16 << 20  # of state that is copied at the beginning of each step
_NO_VALUES = ("aten.bernoulli_.float", "aten.bernoulli.p", "aten.normal.Tensor_float")  # numbers decide if they raise


@dataclass(frozen=True, slots=True)
class Undo:
    """How to undo a step that fails at operator `last` or before it. `copied`: the storages of state that are written
    until then, which are to be copied beforehand."""

    last: int
    copied: tuple[int, ...]


def undo_of(program: Program) -> Undo | None:
    """None if no operator raises on values that the model's state takes part in, or if its step can't be undone. Client
    and executor both ask: a client waits for each step that may fail alone."""
    undo = _undo_of(program)
    if undo is None or sum(program.storages[storage].nbytes for storage in undo.copied) > MOST_UNDO_BYTES:
        return None
    return undo


def raises_on_computed(program: Program) -> bool:
    """Whether an operator may raise on values that the model's state takes part in, which no client can check ahead."""
    return _undo_of(program) is not None


def _undo_of(program: Program) -> Undo | None:
    if program.device != "cpu" or program.kind == "compiled" or program.wave is not None or program.ranks > 1:
        return None
    storages, views = program.storages, program.views
    of_batch = {i for i, storage in enumerate(storages) if storage.kind in ("input", "const")}
    if program.generator is not None:
        of_batch.discard(views[program.generator].storage)
    most: dict[int, int] = {}  # by storage, the largest index that the operator which made it gives
    seen: set[tuple[int, int, int]] = set()
    last, changed, copied = -1, frozenset[int](), frozenset[int]()
    for index, op in enumerate(program.ops):
        given = {views[ref.view].storage for ref in tensor_refs(op_args(op))}
        writes = {views[ref.view].storage for ref in tensor_refs(tuple(written(op)))}
        made = {views[v].storage for v in out_views(op.outs)}
        may = {views[v].storage for v in between_0_and_1(op)}
        if raises_on_values(op, views) and op.target not in _NO_VALUES:
            may |= given
        for use in index_uses(op, views):
            storage = views[use.view].storage
            if most.get(storage, use.high + 1) > use.high and (storage, use.low, use.high) not in seen:
                may.add(storage)
            seen.add((storage, use.low, use.high))
        changed |= {storage for storage in writes if storages[storage].kind == "state"}
        if may - of_batch:
            last, copied = index, changed
        if given <= of_batch and op.random is None:
            of_batch |= made
        else:
            of_batch -= made | writes
        for storage in made | writes:
            most.pop(storage, None)
        most.update(_largest_indices(op, views))
    if last < 0:
        return None
    return Undo(last, tuple(sorted(copied)))


_DIMS = {"max_pool2d_with_indices": 2, "adaptive_max_pool2d": 2, "max_pool3d_with_indices": 3, "adaptive_max_pool3d": 3}
_PLACES = frozenset(("argmax", "argmin", "argsort", "topk", "sort", "max", "min", "kthvalue", "median", "mode"))


def _largest_indices(op: Op, views: _Views) -> Iterator[tuple[int, int]]:
    """(storage, largest index) of an operator's last result, if that holds places in a dimension of its argument."""
    name = op.target.split(".")[1]
    if name not in _PLACES and name not in _DIMS and name != "multinomial":
        return
    outs = list(out_views(op.outs))
    if not outs or views[outs[-1]].dtype != "int64":
        return
    given: _Arguments = {argument.name: value for argument, value, _ in named_arguments(op)}
    size = views[given["self"].view].size
    if name in _DIMS:
        largest = prod(size[-_DIMS[name] :])
    elif name == "multinomial":
        largest = size[-1]
    else:
        dim = given.get("dim")
        largest = prod(size) if dim is None or not size else size[dim]
    yield views[outs[-1]].storage, largest - 1
