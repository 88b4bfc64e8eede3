"""Operators by name, what their schemas say, range checks of indices, and numerics.

Some kernels read or write out of bounds when an index is wrong. Indices that the program computes can't be checked
before a kernel runs; the executor's process confines the damage. Indices that come with the batch are checked, and the
error names the input, the value and the bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from typing import Any

import torch

from gpumux.errors import JobFailed, ProgramError
from gpumux.program.check import schema, written
from gpumux.program.ir import Arg, Complex, Numerics, Op, Program, ScalarRef, Tag, TensorRef, View
from gpumux.program.operators import INDEX_ARGS
from gpumux.program.validate import op_args, out_views, tensor_refs

# ---- Operators by name, and what their schemas say about arguments.


DTYPES: dict[str, torch.dtype] = {
    "bool": torch.bool, "uint8": torch.uint8, "int8": torch.int8, "int16": torch.int16, "int32": torch.int32,
    "int64": torch.int64, "float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32,
    "float64": torch.float64, "complex64": torch.complex64, "complex128": torch.complex128,
}  # fmt: skip
MEMORY_FORMATS: dict[str, torch.memory_format] = {
    "contiguous_format": torch.contiguous_format,
    "preserve_format": torch.preserve_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
}


def overload(target: str) -> Any:
    """The torch operator called `target`. Raises ProgramError when this torch build has none."""
    return schema(target).overload


@cache
def takes_generator(target: str) -> bool:
    """Whether the operator takes a random generator as an argument."""
    return any(a.name == "generator" for a in overload(target)._schema.arguments)


def constant(tag: Tag) -> Any:
    if tag.kind == "dtype":
        return DTYPES[tag.name]
    if tag.kind == "memory_format":
        return MEMORY_FORMATS[tag.name]
    if tag.kind == "layout":
        return getattr(torch, tag.name)
    return torch.device("cpu")


def named_arguments(op: Op) -> list[tuple[Any, Arg, bool]]:
    """(schema argument, value, given) for every argument of the operator, in schema order. If the Program gives none,
    `given` is false and the value is torch's default, as a plain value."""
    kwargs = dict(op.kwargs)
    rows: list[tuple[Any, Arg, bool]] = []
    for index, argument in enumerate(overload(op.target)._schema.arguments):
        if index < len(op.args):
            rows.append((argument, op.args[index], True))
        elif argument.name in kwargs:
            rows.append((argument, kwargs[argument.name], True))
        else:
            rows.append((argument, argument.default_value, False))
    return rows


def views_read(op: Op) -> Iterator[int]:
    for ref in tensor_refs(op_args(op)):
        yield ref.view
    if op.stream is not None:
        yield op.stream


def views_made(op: Op) -> Iterator[int]:
    yield from out_views(op.outs)


def views_written(op: Op) -> Iterator[int]:
    """The views that an operator changes in place, with batch norm's running statistics and random streams."""
    for ref in tensor_refs(tuple(written(op))):
        yield ref.view
    if op.stream is not None:
        yield op.stream


def evaluate(arg: Arg, views: Any, scalars: Sequence[float | int]) -> Any:
    """An argument as torch takes it. `views` maps a view's index to a tensor."""
    if isinstance(arg, TensorRef):
        return views(arg.view)
    if isinstance(arg, ScalarRef):
        return scalars[arg.index]
    if isinstance(arg, tuple):
        return [evaluate(item, views, scalars) for item in arg]
    if isinstance(arg, Tag):
        return constant(arg)
    if isinstance(arg, Complex):
        return complex(arg.re, arg.im)
    return arg


# ---- Range checks of indices


@dataclass(frozen=True, slots=True)
class IndexCheck:
    """A check that values of `view` are in low..high, inclusive, or equal `ignored`."""

    view: int
    position: int
    low: int
    high: int
    ignored: int | None
    target: str

    def run(self, tensor: torch.Tensor) -> None:
        """Raise JobFailed with the first value out of range, if there is one."""
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


# ---- Process-wide settings that change results, as recorded in the Program.


class CurrentNumerics:
    """The settings in force, so that steps of the same settings need not set them again."""

    def __init__(self) -> None:
        self._now: Numerics | None = None

    def apply(self, wanted: Numerics) -> None:
        """Set the numerics. Raises ProgramError if this machine can't."""
        if wanted is self._now or wanted == self._now:
            return
        self._now = None
        torch.set_float32_matmul_precision(wanted.matmul_precision)
        # Not torch.use_deterministic_algorithms: that imports the compiler to set it there, too, which takes a second.
        torch._C._set_deterministic_algorithms(wanted.deterministic, warn_only=False)
        if not torch.set_flush_denormal(wanted.flush_denormal) and wanted.flush_denormal:
            raise ProgramError("this CPU can't flush denormal numbers", "train without torch.set_flush_denormal(True)")
        torch.backends.mkldnn.set_flags(_enabled=wanted.mkldnn)
        torch.set_default_dtype(DTYPES[wanted.default_dtype])
        self._now = wanted
