"""The operators of a whole-batch trace and of a part's trace, side by side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from gpumux.client.ledger import RawOp, Record
from gpumux.client.trace import RawTrace
from gpumux.errors import NotSplittable
from gpumux.program.ir import Arg, Out, ScalarRef, TensorRef, View

UNSCALED = -1  # the two views have one size
OTHER = -2  # they differ, but not by the number of parts in one dimension

REMEDY = (
    "submit the step without microbatches, or make the loss an average over samples that do not depend on each other"
)


@dataclass(frozen=True, slots=True)
class Pair:
    """One operator in both traces. `refs`, `outs`: (view of the whole trace, view of the part's).
    `same`: the calls are equal in every number and view."""

    full: RawOp
    part: RawOp
    refs: tuple[tuple[int, int], ...]
    outs: tuple[tuple[int, int], ...]
    same: bool

    @property
    def name(self) -> str:
        """`convolution_backward` of `aten.convolution_backward.default`."""
        return self.full.target.split(".")[1]


def refs_of(value: Any) -> Iterator[int]:
    """The views an argument, or a tuple of them, names, in order."""
    if isinstance(value, TensorRef):
        yield value.view
    elif isinstance(value, tuple):
        for item in value:
            yield from refs_of(item)


def outs_of(outs: tuple[Out, ...]) -> Iterator[int]:
    for out in outs:
        if isinstance(out, tuple):
            yield from out
        elif out is not None:
            yield out


def call_refs(op: RawOp) -> list[int]:
    return [*refs_of(op.args), *refs_of(tuple(a for _, a in op.kwargs))]


def _plain(value: Any, record: Record) -> Any:
    """An argument with its views spelled out, to compare across traces."""
    if isinstance(value, TensorRef):
        return record.views[value.view]
    if isinstance(value, tuple):
        return tuple(_plain(v, record) for v in value)
    return (type(value), value)


def _call(op: RawOp, record: Record) -> Any:
    views = tuple(record.views[v] for v in outs_of(op.outs))
    return (op.target, _plain(op.args, record), tuple((k, _plain(v, record)) for k, v in op.kwargs), views)


def scaled(full: View, part: View, count: int) -> int:
    """The dimension in which `full` is `count` times as long as `part`; UNSCALED or OTHER."""
    if len(full.size) != len(part.size):
        return OTHER
    differ = [d for d, (a, b) in enumerate(zip(full.size, part.size, strict=True)) if a != b]
    if not differ:
        return UNSCALED
    only = differ[0]
    return only if len(differ) == 1 and full.size[only] == count * part.size[only] else OTHER


def elements(view: View) -> int:
    return prod(view.size)


def pair_up(full: RawTrace, part: RawTrace) -> list[Pair]:
    """Both traces, operator by operator. Raises NotSplittable where they take different ways."""
    a, b = full.record, part.record
    pairs: list[Pair] = []
    for x, y in zip(a.ops, b.ops, strict=False):
        pair = _pair(x, y, a, b)
        if pair is None:
            raise _other_way(x.where, f"{x.target} on the whole batch, {y.target} on a part")
        pairs.append(pair)
    if len(a.ops) != len(b.ops):
        extra = max(a.ops, b.ops, key=len)[len(pairs)]
        raise _other_way(extra.where, f"{len(a.ops)} operators on the whole batch, {len(b.ops)} on a part")
    kinds = [[(s.kind, s.key if s.kind in ("state", "input") else None) for s in r.storages] for r in (a, b)]
    formulas = [[str(e) for e in r.scalars] for r in (a, b)]
    guards = [{(str(g.expr), g.value) for g in t.guards} for t in (full, part)]
    if kinds[0] != kinds[1] or formulas[0] != formulas[1] or guards[0] != guards[1]:
        raise _other_way("the step", "what it uses or decides by depends on the batch's size")
    if full.gradients.keys() != part.gradients.keys() or full.result_spec != part.result_spec:
        raise _other_way("the step", "what it returns or leaves behind depends on the batch's size")
    return pairs


def _pair(x: RawOp, y: RawOp, a: Record, b: Record) -> Pair | None:
    refs, others = call_refs(x), call_refs(y)
    outs, other_outs = list(outs_of(x.outs)), list(outs_of(y.outs))
    if (
        x.target != y.target
        or [k for k, _ in x.kwargs] != [k for k, _ in y.kwargs]
        or [a.views[v].storage for v in refs] != [b.views[v].storage for v in others]
        or [a.views[v].storage for v in outs] != [b.views[v].storage for v in other_outs]
        or _scalars(x) != _scalars(y)
        or x.random != y.random
    ):
        return None
    return Pair(
        x,
        y,
        tuple(zip(refs, others, strict=True)),
        tuple(zip(outs, other_outs, strict=True)),
        _call(x, a) == _call(y, b),
    )


def _scalars(op: RawOp) -> list[int]:
    def found(value: Arg) -> Iterator[int]:
        if isinstance(value, ScalarRef):
            yield value.index
        elif isinstance(value, tuple):
            for item in value:
                yield from found(item)

    return [i for value in (*op.args, *(v for _, v in op.kwargs)) for i in found(value)]


def _other_way(where: str, why: str) -> NotSplittable:
    return NotSplittable(
        f"{where} does something else on a part of the batch than on all of it: {why}",
        "use fewer microbatches (a part of one sample often takes another way), or submit the step without them",
    )
