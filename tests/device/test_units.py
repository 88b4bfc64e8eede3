"""Which operators are compiled together: it hangs on the Program alone, and pieces are whole units."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from gpumux.program.cut import HEAVY, OPERATORS, Unit, cut_units, units
from gpumux.program.ir import Op, Program, Storage, TensorRef, View

TARGETS = ("aten.relu.default", "aten.mm.default", "aten.bernoulli.p")


def program(kinds: list[int]) -> Program:
    """A chain of operators on a square: light, heavy, or drawing."""
    storages = (Storage("input", 64, 0), *[Storage("temp", 64)] * len(kinds))
    views = tuple(View(i, "float32", (4, 4), (4, 1)) for i in range(len(kinds) + 1))
    ops = tuple(
        Op(TARGETS[kind], (TensorRef(i),), (), (i + 1,), i if kind == 2 else None) for i, kind in enumerate(kinds)
    )
    return Program(storages, views, ops, (0,), ())


@given(st.lists(st.integers(0, 2), max_size=120), st.sets(st.integers(0, 119)))
def test_units_cover_all_operators_and_keep_their_bounds(kinds: list[int], apart: set[int]) -> None:
    made = program(kinds)
    found = units(made, apart)
    assert [u.start for u in found] == [0, *(u.stop for u in found)][: len(found)]
    assert (found[-1].stop if found else 0) == len(kinds)
    for unit in found:
        inside = range(unit.start, unit.stop)
        alone = [i for i in inside if i in apart or kinds[i] == 2]
        assert unit.compiled == (not alone)
        assert unit.compiled or len(inside) == 1
        assert 1 <= len(inside) <= OPERATORS
        assert sum(kinds[i] == 1 for i in inside) <= HEAVY
    assert units(made, apart) == found


@given(st.lists(st.integers(0, 2), min_size=1, max_size=120), st.data())
def test_pieces_are_whole_units_whatever_was_measured(kinds: list[int], data: st.DataObject) -> None:
    found = units(program(kinds))
    op_s = data.draw(st.lists(st.floats(0, 1e-3), min_size=len(kinds), max_size=len(kinds)))
    bounds = cut_units(found, op_s, 300e-6, None, ())
    assert set(bounds) <= {0, *(u.stop for u in found)}
    assert bounds[0] == 0
    assert bounds[-1] == len(kinds)
    assert all(a < b for a, b in pairwise(bounds))


def test_a_gate_begins_a_unit_and_nothing_is_one_empty_piece() -> None:
    from gpumux.program.ir import Collective

    gated = Program(
        *[getattr(program([0] * 6), n) for n in ("storages", "views", "ops", "inputs", "results")],
        collectives=(Collective(3, "exchange", 0, (0, 1), sends=((1, 0),)),),
    )
    found = units(gated)
    assert found == (Unit(0, 3, True), Unit(3, 6, True))
    assert 3 in cut_units(found, [1e-6] * 6, 1.0, None, (3,))
    assert cut_units((), [], 1.0, None, ()) == (0, 0)
