"""Value numbering of recorded operators: where two storages have one number, the same operators computed what is there,
from the same state, batch and random numbers.

A step in which all ranks run all layers, each on its part of the batch, computes what the parts did that the proof of
the split (capture/microbatch/proof.py) has compared with the whole step. Numbers show it, and no tensor is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

from gpumux.capture.microbatch.classify import OperatorPair, call_refs, scaled
from gpumux.capture.microbatch.emit import PartEmitter
from gpumux.capture.recorder import RawOp, TraceRecord
from gpumux.capture.values.machine import PATTERN_ONLY, UNDEFINED, outs_of
from gpumux.program.ir import ITEM_BYTES, TensorRef, View, extent

# Operators that fill a tensor with random numbers and don't read what was there.
FILLS = frozenset(
    ("bernoulli_.float", "uniform_.default", "normal_.default", "exponential_.default", "random_.default",
     "random_.from", "random_.to", "log_normal_.default", "cauchy_.default", "geometric_.default")
)  # fmt: skip
# Operators that make a tensor of random numbers from its size, or like another one.
DRAWS = frozenset(("rand", "randn", "randint", "rand_like", "randn_like", "randint_like"))


def covers(record: TraceRecord, view: int) -> bool:
    """Whether a dense view is all of its storage."""
    v = record.views[view]
    nbytes = prod(v.size) * ITEM_BYTES[v.dtype]
    return nbytes == extent(v) == record.storages[v.storage].nbytes


class Unknown(Exception):
    """An operator reads what none has made, writes what it does not name, or is a collective."""


class Numbering:
    """The numbers of a record's storages, as its operators write them. `known`: the numbers given so far, in all
    numberings that are compared. `given`: whether a storage of state or batch is there to be read."""

    def __init__(self, record: TraceRecord, known: dict[Any, int], given: Callable[[int], bool]) -> None:
        self._record, self._known, self._given = record, known, given
        self._numbers: dict[int, int] = {}

    def of(self, storage: int) -> int:
        """Raises Unknown."""
        if storage in self._numbers:
            return self._numbers[storage]
        one = self._record.storages[storage]
        if one.kind == "const":
            return self._number("const", one.dtype, one.key)
        if one.kind == "temp" or not self._given(storage):
            raise Unknown
        return self._number(one.kind, one.key)

    def set(self, storage: int, number: int) -> None:
        self._numbers[storage] = number

    def run(self, op: RawOp) -> None:
        """Number what an operator writes. Raises Unknown."""
        if op.collective is not None:
            raise Unknown
        _, name, overload = op.target.split(".")
        views = self._record.views
        written = {views[view].storage: None for view in (*outs_of(op.outs), *call_refs(op))}
        if not op.writes <= written.keys():
            raise Unknown
        if name in UNDEFINED:
            self._numbers.update((s, self._number("undefined")) for s in written if s in op.writes)
            return
        patterns = name in PATTERN_ONLY or name in DRAWS
        filled = f"{name}.{overload}" in FILLS and all(covers(self._record, view) for view in outs_of(op.outs))
        args = self._seen(op.args, patterns or filled)
        kwargs = [(key, self._seen(value, patterns or filled)) for key, value in op.kwargs]
        before = [] if filled else [self.of(s) for s in written if s in op.writes & op.reads]
        made = [self._seen(tuple(map(TensorRef, outs_of((out,)))), True) for out in op.outs]
        number = self._number(op.target, args, *kwargs, *before, *made, op.random)
        self._numbers.update((s, self._number(number, at)) for at, s in enumerate(s for s in written if s in op.writes))

    def copy(self, into: int, source: int) -> None:
        """Number what a copy into a view of memory with undefined values writes."""
        there, here = (self._record.views[view].storage for view in (into, source))
        self._numbers[there] = self._number("undefined")
        both, target = frozenset((there, here)), frozenset((there,))
        self.run(RawOp("aten.copy_.default", (TensorRef(into), TensorRef(source)), (), (into,), both, target, None, ""))

    def _number(self, *what: Any) -> int:
        return self._known.setdefault(what, len(self._known))

    def _seen(self, arg: Any, unread: bool) -> Any:
        """What an operator sees of an argument: of tensors their views and, if it reads them, numbers."""
        if isinstance(arg, TensorRef):
            view = self._record.views[arg.view]
            return replace(view, storage=-1 if unread else self.of(view.storage))
        if isinstance(arg, tuple):
            return tuple(self._seen(one, unread) for one in arg)
        return type(arg).__name__, repr(arg)  # 1, 1.0 and True are equal


def run_in_parts(numbering: Numbering, emitter: PartEmitter, j: int, pair: OperatorPair) -> None:
    """Number what an operator writes on all parts, as the proof of a split has run it. Raises Unknown."""
    for part in range(emitter.count):
        ops = emitter.emit(j, part)
        for extra in emitter.extras:
            numbering.run(extra)
        emitter.extras.clear()
        if pair.full.random is None:
            for op in ops:
                numbering.run(op)
            continue
        for a, b in zip(outs_of(pair.full.outs), outs_of(pair.part.outs), strict=True):
            into = emitter.part_view(b, part)
            numbering.copy(into, emitter.view(_piece(emitter, a, into, part)))


def _piece(emitter: PartEmitter, whole: int, into: int, part: int) -> View:
    """The samples of a part in a view of the whole batch."""
    view, other = emitter.record.views[whole], emitter.record.views[into]
    dim = scaled(view, other, emitter.count)
    if dim < 0:
        raise Unknown
    size = (*view.size[:dim], other.size[dim], *view.size[dim + 1 :])
    return replace(view, size=size, offset=view.offset + part * other.size[dim] * view.stride[dim])
