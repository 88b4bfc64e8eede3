"""Pieces: every operator once, in order, near the target."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumux.program.cut import cut, cut_unmeasured, piece_seconds

TIMES = st.lists(st.floats(0, 5e-3), max_size=60)


@settings(deadline=None, max_examples=300)
@given(TIMES, st.floats(1e-5, 1e-2), st.none() | st.floats(0, 1e-2), st.data())
def test_pieces_cover_everything_once_and_stay_near_the_target(times, target, least, data):
    gates = data.draw(st.sets(st.integers(0, len(times) - 1), max_size=3)) if times else set()
    boundaries = cut(times, target, least, sorted(gates))
    if not times:
        assert boundaries == (0, 0)
        return
    assert boundaries[0] == 0
    assert boundaries[-1] == len(times)
    assert list(boundaries) == sorted(set(boundaries)), "at least one operator each, in order"
    assert gates <= set(boundaries)
    for a, b, seconds in zip(boundaries, boundaries[1:], piece_seconds(times, boundaries), strict=False):
        assert seconds <= (target + max(times[a:b])) * (1 + 1e-9) + 1e-12
    assert cut(times, target, least, sorted(gates)) == boundaries


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 400), st.floats(1e-5, 1e-2))
def test_equal_operators_make_even_pieces(count, target):
    boundaries = cut_unmeasured(count, target)
    sizes = [b - a for a, b in pairwise(boundaries)]
    assert sum(sizes) == count
    assert max(sizes) - min(sizes) <= 1


def test_examples():
    assert cut([1.0] * 10, 2.0) == (0, 2, 4, 6, 8, 10)
    assert cut([1.0] * 10, 100.0) == (0, 10)
    assert cut([1.0] * 3, 0.1) == (0, 1, 2, 3)
    assert cut([0.3] * 10, 3.0) == (0, 10), "rounding makes no extra piece"
    assert cut([5.0, 1.0, 1.0], 1.0) == (0, 1, 2, 3)
    assert cut([1.0] * 4, 10.0, gates=[1, 3]) == (0, 1, 3, 4)
    assert cut([], 1.0) == (0, 0)
    assert cut_unmeasured(0, 1.0) == (0, 0)


def test_short_pieces_join_a_neighbour():
    times = [1.0, 1.0, 0.1, 1.0, 1.0, 0.1]
    plain, merged = cut(times, 1.0), cut(times, 1.0, min_s=0.5)
    assert min(piece_seconds(times, plain)) < 0.5
    assert min(piece_seconds(times, merged)) >= 0.5


@pytest.mark.parametrize(
    ("times", "target", "gates"),
    [([-1.0], 1.0, []), ([float("nan")], 1.0, []), ([float("inf")], 1.0, []), ([1.0], 0.0, []), ([1.0], 1.0, [1])],
)
def test_nonsense_is_refused(times, target, gates):
    with pytest.raises(ValueError):
        cut(times, target, gates=gates)
