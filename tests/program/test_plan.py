"""Liveness and the memory plan, against brute force."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumux.program import memory
from gpumux.program.ir import ALIGN, Program, ProgramBuilder, TensorRef
from gpumux.program.memory import (
    ArenaPlan,
    Interval,
    first_fit,
    footprint,
    heights,
    intervals,
    live_bytes,
    live_peak,
    piece_bytes,
    plan,
    plans,
)
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


@settings(deadline=None, max_examples=40)
@given(programs(max_ops=10))
def test_intervals_are_what_brute_force_finds(program):
    live = intervals(program)
    for storage, kind in enumerate(s.kind for s in program.storages):
        span = live[storage]
        assert (span is None) == (kind != "temp")
        if span is not None:
            for index in range(len(program.ops) + 1):
                assert alive(program, storage, index) == (span.birth <= index <= span.last)


def overlapping(program: Program, planned: ArenaPlan) -> list[tuple[int, int]]:
    """Pairs of temporaries that are alive at once and share bytes of the arena."""
    temps = [i for i, span in enumerate(planned.live) if span is not None and planned.sizes[i]]
    alive_at = {i: {at for at in range(len(program.ops) + 1) if alive(program, i, at)} for i in temps}
    return [
        (i, j)
        for i, j in combinations(temps, 2)
        if alive_at[i] & alive_at[j]
        and planned.offsets[i] < planned.offsets[j] + planned.sizes[j]
        and planned.offsets[j] < planned.offsets[i] + planned.sizes[i]
    ]


@settings(deadline=None, max_examples=40)
@given(programs(max_ops=12), st.data())
def test_nothing_alive_overlaps_in_any_plan_and_the_peak_is_honest(program, data):
    temps = [i for i, s in enumerate(program.storages) if s.kind == "temp"]
    count = len(program.ops)
    inner = data.draw(st.sets(st.integers(1, count - 1))) if count > 1 else set()
    boundaries = [0, *sorted(inner), count]
    made = plans(program)
    for planned in made.values():
        assert overlapping(program, planned) == []
        for i in temps:
            assert planned.offsets[i] >= 0
            assert planned.offsets[i] % ALIGN == 0
            assert planned.sizes[i] >= program.storages[i].nbytes
            assert planned.offsets[i] + planned.sizes[i] <= planned.peak_bytes
        assert all(planned.offsets[i] == -1 for i in range(len(planned.offsets)) if i not in temps)
        held = [sum(planned.sizes[i] for i in temps if alive(program, i, at)) for at in range(count + 1)]
        assert live_bytes(planned) == held[: len(live_bytes(planned))]
        assert not any(held[len(live_bytes(planned)) :])
        assert max(held) == live_peak(planned) <= planned.peak_bytes <= sum(planned.sizes)

        ends = [
            [planned.offsets[i] + planned.sizes[i] for i in temps if planned.sizes[i] and alive(program, i, at)]
            for at in range(count + 1)
        ]
        highest = [max(each, default=0) for each in ends]
        assert heights(planned) == highest[: len(heights(planned))]
        assert max(highest) == planned.peak_bytes
        needed = piece_bytes(planned, boundaries)
        assert list(needed) == [max(highest[a:b], default=0) for a, b in pairwise(boundaries)]
        assert max(needed) == planned.peak_bytes
    chosen = plan(program)
    assert chosen in made.values()
    assert chosen.peak_bytes == min(each.peak_bytes for each in made.values())


def chain(sizes_and_lives: list[tuple[int, int, int]]) -> Program:
    """A Program of temporaries, each of so many bytes, born at one operator and last read by another."""
    b = ProgramBuilder()
    count = max(last for _, _, last in sizes_and_lives) + 1
    views: dict[int, TensorRef] = {}
    for index in range(count):
        read = [views[i] for i, (_, born, last) in enumerate(sizes_and_lives) if last == index and born < index]
        outs = []
        for i, (size, born, _) in enumerate(sizes_and_lives):
            if born == index:
                views[i] = TensorRef(b.add_tensor("temp", "uint8", (size,)))
                outs.append(views[i].view)
        b.add_op("aten.cat.default", tuple(read), outs=(tuple(outs),))
    return b.build()


@pytest.mark.parametrize(
    ("name", "lives"),
    [
        # A hole of 64 bytes below the one of 128 fits nothing later; the largest first leaves no hole.
        ("largest", [(64, 0, 1), (128, 0, 3), (128, 2, 3)]),
        ("longest", [(64, 0, 1), (128, 0, 3), (128, 2, 3)]),
        ("dies last", [(64, 0, 1), (128, 0, 3), (128, 2, 3)]),
    ],
)
def test_a_plan_that_sees_the_whole_step_is_lower_than_first_fit(name, lives):
    program = chain(lives)
    assert plans(program)["first fit"].peak_bytes == 320
    assert plans(program)[name].peak_bytes == live_peak(first_fit(program)) == 256
    assert plan(program).peak_bytes == 256


def test_of_plans_of_one_height_the_one_that_sinks_early_is_taken():
    """A gradient that lives to the end lies at the bottom, below the activation that dies at once."""
    program = chain([(4096, 0, 1), (64, 0, 9)])
    planned = plan(program)
    assert planned.peak_bytes == 4160
    assert heights(planned)[2:] == [64] * 8


def test_programs_with_very_many_temporaries_are_planned_in_the_order_of_the_step(monkeypatch):
    program = chain([(64, 0, 1), (128, 0, 3), (128, 2, 3)])
    monkeypatch.setattr(memory, "MOST_PLANNED", 2)
    assert plans(program) == {"first fit": first_fit(program)}
    assert plan(program) == first_fit(program)


def test_a_footprint_is_of_the_plan_that_it_is_given():
    program = chain([(64, 0, 1), (128, 0, 3), (128, 2, 3)])
    assert footprint(program, first_fit(program)).transient_bytes == 320
    assert footprint(program, plan(program), unseen_bytes=64).transient_bytes == 256 + 64


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
