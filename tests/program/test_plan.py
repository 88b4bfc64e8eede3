"""Liveness and the memory plan, against brute force."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumux.program.ir import ALIGN, Program, ProgramBuilder
from gpumux.program.memory import Interval, intervals, piece_bytes, plan
from gpumux.program.validate import op_args, out_views, tensor_refs
from tests.program import samples
from tests.program.strategies import programs


def alive(program: Program, storage: int, index: int) -> bool:
    """Whether a temporary must hold memory while operator `index` runs (brute force)."""

    def touches(i: int) -> bool:
        op = program.ops[i]
        views = [ref.view for ref in tensor_refs(op_args(op))] + list(out_views(op.outs))
        for one in program.collectives:
            if one.op == i:
                views += [*one.views, *(view for _, view in (*one.sends, *one.receives))]
        return storage in [program.views[v].storage for v in views]

    count = len(program.ops)
    used_before = any(touches(i) for i in range(min(index + 1, count)))
    in_results = storage in [program.views[v].storage for v in program.results]
    return used_before and (any(touches(i) for i in range(index, count)) or in_results)


@settings(deadline=None, max_examples=80)
@given(programs(max_ops=10))
def test_intervals_are_what_brute_force_finds(program):
    live = intervals(program)
    for storage, kind in enumerate(s.kind for s in program.storages):
        span = live[storage]
        assert (span is None) == (kind != "temp")
        if span is not None:
            for index in range(len(program.ops) + 1):
                assert alive(program, storage, index) == (span.birth <= index <= span.last)


@settings(deadline=None, max_examples=80)
@given(programs(max_ops=12), st.data())
def test_nothing_alive_overlaps_and_the_peak_is_honest(program, data):
    planned = plan(program)
    temps = [i for i, span in enumerate(planned.live) if span is not None and planned.sizes[i]]
    for i in temps:
        assert planned.offsets[i] % ALIGN == 0
        assert planned.sizes[i] >= program.storages[i].nbytes
        assert planned.offsets[i] + planned.sizes[i] <= planned.peak_bytes
        for j in temps:
            a, b = planned.live[i], planned.live[j]
            if i < j and a.birth <= b.last and b.birth <= a.last:
                assert (
                    planned.offsets[i] + planned.sizes[i] <= planned.offsets[j]
                    or planned.offsets[j] + planned.sizes[j] <= planned.offsets[i]
                )
    busiest = max(
        (sum(planned.sizes[i] for i in temps if alive(program, i, at)) for at in range(len(program.ops))), default=0
    )
    assert busiest <= planned.peak_bytes <= sum(planned.sizes)

    count = len(program.ops)
    inner = data.draw(st.sets(st.integers(1, count - 1))) if count > 1 else set()
    boundaries = [0, *sorted(inner), count]
    needed = piece_bytes(planned, boundaries)
    for at, (a, b) in enumerate(pairwise(boundaries)):
        ends = [planned.offsets[i] + planned.sizes[i] for i in temps if any(alive(program, i, k) for k in range(a, b))]
        assert needed[at] == max(ends, default=0)
    assert max(needed) == planned.peak_bytes


def test_memory_is_used_again():
    b = ProgramBuilder()
    x = b.input("float32", (16,))
    for step in range(50):
        x = b.call("aten.add.Scalar", x, step, size=(16,))
    b.result(x)
    planned = plan(b.build())
    assert planned.peak_bytes == 2 * 64
    assert planned.live[-1] == Interval(49, 50)


def test_state_inputs_and_constants_are_not_planned():
    planned = plan(samples.counter())
    assert planned.offsets == (-1,)
    assert planned.peak_bytes == 0


@pytest.mark.parametrize("boundaries", [(0, 0)])
def test_the_empty_program_has_one_empty_piece(boundaries):
    planned = plan(samples.empty())
    assert planned.peak_bytes == 0
    assert piece_bytes(planned, boundaries) == (0,)
