"""Equal numbers mean equal values: what an operator does, and on what, is in the number of what it writes."""

from __future__ import annotations

from typing import Any

import pytest

from gpumux.burst.numbering import Numbering, Unknown
from gpumux.capture.recorder import RawCollective, RawOp, RawStorage, TraceRecord
from gpumux.program.ir import TensorRef, View

A, B, C, HALF, OTHER_HALF, TURNED = map(TensorRef, range(6))


def numbering(known: dict[Any, int]) -> Numbering:
    """Of three tensors of 4 x 4, the first of which is state."""
    storages = [RawStorage("state", 64, 7, "float32"), *(RawStorage("temp", 64, None, "float32") for _ in range(2))]
    whole = [View(storage, "float32", (4, 4), (4, 1)) for storage in range(3)]
    pieces = [View(2, "float32", (2, 4), (4, 1)), View(2, "float32", (2, 4), (4, 1), 8)]
    turned = View(0, "float32", (4, 4), (1, 4))
    return Numbering(TraceRecord(storages, [*whole, *pieces, turned]), known, lambda storage: True)


def op(target: str, *args: Any, out: TensorRef, random: int | None = None) -> RawOp:
    at = [0, 1, 2, 2, 2, 0]
    reads = frozenset(at[arg.view] for arg in args if isinstance(arg, TensorRef))
    return RawOp(f"aten.{target}", args, (), (out.view,), reads, frozenset((at[out.view],)), random, "")


def number(*ops: RawOp, of: int = 2, known: dict[Any, int]) -> int:
    found = numbering(known)
    for one in ops:
        found.run(one)
    return found.of(of)


COPY = op("clone.default", A, out=C)
DIFFERENT = [
    [op("neg.default", A, out=C)],
    [op("abs.default", A, out=C)],
    [op("neg.default", TURNED, out=C)],
    [op("mul.Scalar", A, 1, out=C)],
    [op("mul.Scalar", A, 1.0, out=C)],
    [op("mul.Scalar", A, True, out=C)],
    [op("mul.Scalar", A, 0.0, out=C)],
    [op("mul.Scalar", A, -0.0, out=C)],
    [COPY, op("neg_.default", C, out=C)],
    [COPY, op("neg_.default", HALF, out=HALF)],
    [COPY, op("neg_.default", OTHER_HALF, out=OTHER_HALF)],
    [COPY, op("neg_.default", C, out=C), op("abs_.default", C, out=C)],
    [COPY, op("abs_.default", C, out=C), op("neg_.default", C, out=C)],
    [COPY, op("normal_.default", C, out=C, random=0)],
    [COPY, op("normal_.default", C, out=C, random=1)],
    [COPY, op("normal_.default", HALF, out=HALF, random=0)],
    [op("neg.default", A, out=B), op("neg.default", B, out=C)],
]


def test_what_is_computed_otherwise_has_another_number() -> None:
    known: dict[Any, int] = {}
    numbers = [number(*ops, known=known) for ops in DIFFERENT]
    assert len({*numbers}) == len(DIFFERENT)
    assert [number(*ops, known=known) for ops in DIFFERENT] == numbers


def test_it_does_not_matter_where_a_value_lies_nor_what_is_not_read() -> None:
    known: dict[Any, int] = {}
    there = number(op("neg.default", A, out=B), of=1, known=known)
    assert there == number(op("neg.default", A, out=C), known=known)
    drawn = [
        number(first, op("normal_.default", C, out=C, random=0), known=known)
        for first in (COPY, op("neg.default", A, out=C), op("empty_like.default", A, out=C))
    ]
    assert len({*drawn}) == 1
    like = [number(COPY, op("zeros_like.default", pattern, out=B), of=1, known=known) for pattern in (A, C)]
    assert like[0] == like[1]


def test_a_piece_is_copied_as_an_operator_would_copy_it() -> None:
    known: dict[Any, int] = {}
    both = numbering(known)
    both.run(op("neg.default", A, out=B))
    both.copy(2, 1)
    fresh = op("empty_strided.default", out=C)
    copy = op("copy_.default", C, B, out=C)
    assert both.of(2) == number(op("neg.default", A, out=B), fresh, copy, known=known)


def test_what_no_operator_made_is_not_known() -> None:
    known: dict[Any, int] = {}
    with pytest.raises(Unknown):
        number(op("neg.default", B, out=C), known=known)
    absent = Numbering(numbering(known)._record, known, lambda storage: False)
    with pytest.raises(Unknown):
        absent.of(0)
    one = RawCollective("all_reduce", 0, (0, 1), (2,), 1.0)
    summed = RawOp("collective", (), (), (), frozenset((2,)), frozenset((2,)), None, "", collective=one)
    with pytest.raises(Unknown):
        number(COPY, summed, known=known)
