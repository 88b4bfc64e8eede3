"""Bars, charts and cut text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumux.cli.top.drawing import BEYOND, LEVELS, LIMIT, Styled, bar, cells, chart, clip, cut, plain, sparkline, wrap

TEXTS = st.text(st.sampled_from("ab -10ß字́"), max_size=40)
VALUES = st.lists(st.none() | st.floats(0.0, 1e6), max_size=30)


@given(TEXTS, st.integers(0, 30))
def test_clipped_text_fits_and_is_whole_where_it_can_be(text, width):
    found = clip(text, width)
    assert cells(found) <= width
    assert (found == text) == (cells(text) <= width)


@given(TEXTS, st.integers(1, 30))
def test_wrapped_text_fits_and_loses_no_short_word(text, width):
    lines = wrap(text, width)
    assert all(cells(line) <= width for line in lines)
    if all(cells(word) + 2 <= width for word in text.split(" ")):
        assert " ".join(lines).split() == text.split()


@given(st.lists(TEXTS, max_size=5), st.integers(0, 30))
def test_a_cut_line_fits(texts, width):
    line = tuple(Styled(text, "bad") for text in texts)
    found = cut(line, width)
    assert cells(plain(found)) <= width
    assert (found == tuple(each for each in line if each.text)) == (cells(plain(line)) <= width)


def test_a_wide_character_takes_two_cells():
    assert cells("字a") == 3
    assert clip("字字字", 4) == "字…"


@given(st.lists(st.tuples(st.floats(0.0, 2.0), st.just("x"), st.just("")), max_size=4), st.integers(0, 50))
def test_a_bar_has_its_width(parts, width):
    assert cells(plain(bar(parts, width))) == width


def test_a_bar_has_its_parts_and_shows_little_as_a_cell():
    assert plain(bar([(0.25, "H", ""), (0.5, "l", "")], 8)) == "HHllll··"
    assert plain(bar([(0.001, "H", ""), (0.0, "l", "")], 4)) == "H···"
    assert plain(bar([(0.7, "H", ""), (0.7, "l", "")], 10)) == "HHHHHHHlll"


def test_a_sparkline_has_the_newest_values_at_the_right():
    assert sparkline([9.0, 0.0, 4.0, None, 8.0], 4) == "▁▅ █"
    assert sparkline([1.0], 3) == "  █"
    assert sparkline([0.0, 0.0], 2) == "▁▁"
    assert sparkline([1.0], 0) == ""


@given(VALUES, st.integers(1, 40), st.integers(1, 6), st.none() | st.integers(1, 5))
def test_a_chart_has_its_size(values, width, height, limit_row):
    rows = chart(values, width, height, least=0.0, most=100.0, limit_row=limit_row)
    assert [cells(plain(row)) for row in rows] == [width] * height


def test_a_chart_has_its_values_and_gaps():
    rows = [plain(row) for row in chart([0.0, 4.0, None, 8.0], 5, 2, least=0.0, most=8.0)]
    assert rows == ["    █", " ▁█ █"]


def test_a_limit_is_a_line_that_only_what_is_beyond_it_crosses():
    top, bottom = chart([1.05, 1.1, 1.1001, 9.0], 5, 2, least=1.0, most=1.2, limit_row=1)
    assert plain(top) == f"{LIMIT * 3}▁{BEYOND}"
    assert plain(bottom) == f" ▄{LEVELS[-1] * 3}"
    assert [each.style for each in top] == ["limit", "bad"]
    assert [each.style for each in bottom] == ["", "high"]


def test_values_on_no_scale_are_at_its_bottom():
    assert plain(chart([5.0], 1, 1, least=1.0, most=1.0)[0]) == "▁"


@pytest.mark.parametrize("indent", ["", "    "])
def test_further_lines_are_indented(indent):
    assert wrap("one two three", 9, indent) == ["one two", f"{indent}three"]
