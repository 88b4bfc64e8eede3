"""Which columns and rows the table has, in which order, and what is in them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumux.cli.top.columns import (
    COLUMNS,
    GAP,
    arranged,
    heading,
    layout,
    matching,
    natural,
    row,
)
from gpumux.cli.top.drawing import cells
from gpumux.cli.top.rates import compare

from .bodies import BREAKS, UNMEASURED, body, job, later


def seen(*jobs, seconds=2.0, **per_job):
    """Jobs as a view has them."""
    before = body(jobs=list(jobs))
    return compare(before, later(before, seconds, **per_job))["jobs"]


def titles(width, jobs):
    return [column.title for column, _ in layout(width, jobs)]


def cell(title, width, shown):
    (column,) = [each for each in COLUMNS if each.title == title]
    return column.cell(shown, width, {})


NAMES = st.text(st.sampled_from("ab-10 字"), max_size=50)


@given(st.lists(NAMES, max_size=4), st.integers(1, 250))
def test_a_wider_terminal_shows_no_less_and_all_of_it_fits(names, width):
    jobs = seen(*(job(f"j{i}", name=name) for i, name in enumerate(names)))
    found, wider = layout(width, jobs), dict(layout(width + 1, jobs))
    assert found
    assert {column for column, _ in found} <= set(wider)
    assert len(found) == 1 or sum(wide + GAP for _, wide in found) <= width
    for each in jobs:
        for (_, wide), made in zip(found, row(each, found, {}), strict=True):
            assert cells(made.text) <= wide


def test_columns_leave_by_importance():
    jobs = seen(job("j1", "high", name="a-name-of-16-char"), job("j2"))
    assert titles(39, jobs) == ["JOB", "NAME", "PRIO", "PROMISE"]
    assert titles(79, jobs) == ["JOB", "NAME", "PRIO", "PROMISE", "STEP/S", "DEVICE", "STATE"]
    wide = titles(119, jobs)
    assert wide == ["JOB", "NAME", "PRIO", "PROMISE", "STEP/S", "DEVICE", "TREND", "STATE", "QUEUED", "MEMORY"]
    assert set(titles(400, jobs)) == {column.title for column in COLUMNS}
    assert titles(3, jobs) == ["JOB"]


def test_titles_say_how_the_table_is_sorted_and_fit():
    for width in (40, 80, 120, 250):
        for column, wide in layout(width, []):
            assert cells(heading(column, wide, column.title, True)) <= wide
    column = next(each for each in COLUMNS if each.title == "DEVICE")
    assert heading(column, 8, "DEVICE", False) == " DEVICE▼"
    assert heading(column, 8, "NAME", False) == "  DEVICE"


@given(st.lists(st.text(max_size=12), min_size=2, max_size=6))
def test_any_names_have_an_order(names):
    assert [natural(name) for name in sorted(names, key=natural)] == sorted(map(natural, names))


def test_job_2_comes_before_job_10():
    names = ["job-10", "Job-9", "job-2", "job", "job-2b", "job-02a", ""]
    assert sorted(names, key=natural) == ["", "job", "job-2", "job-02a", "job-2b", "Job-9", "job-10"]
    assert natural("1" * 5000)  # more digits than Python makes a number of


def order(jobs, *how):
    return [each["short"] for each in arranged(jobs, *how)]


def test_high_jobs_come_first_broken_ones_before_them_and_names_in_natural_order():
    jobs = seen(
        job("j1", name="sweep-10"), job("j2", name="sweep-9"), job("j3", "high", name="a"),
        job("j4", "high", BREAKS, name="z"),
    )  # fmt: skip
    assert order(jobs) == ["j4", "j3", "j2", "j1"]
    assert order(jobs, "", True) == ["j1", "j2", "j3", "j4"]


def test_each_column_sorts():
    jobs = seen(
        job("j2", name="b", memory_bytes=5, uid=3), job("j10", name="a", queued=7), job("j1", "high", paused=True),
        j2=(8, 0.5), j10=(2, 1.5),
    )  # fmt: skip
    assert order(jobs, "JOB") == ["j1", "j2", "j10"]
    assert order(jobs, "JOB", True) == ["j10", "j2", "j1"]
    assert order(jobs, "NAME") == ["j10", "j2", "j1"]
    assert order(jobs, "PRIO") == ["j1", "j10", "j2"]
    assert order(jobs, "STEP/S") == ["j2", "j10", "j1"]
    assert order(jobs, "DEVICE") == ["j10", "j2", "j1"]
    assert order(jobs, "QUEUED")[0] == "j10"
    assert order(jobs, "MEMORY")[-1] == "j2"
    assert order(jobs, "UID")[0] == "j2"
    assert order(jobs, "STATE")[0] == "j1"
    assert order(jobs, "PROMISE")[0] == "j1"
    for column in COLUMNS:
        assert sorted(order(jobs, column.title)) == ["j1", "j10", "j2"]


def test_jobs_of_which_nothing_is_known_sort_too():
    jobs = compare(body(), body(jobs=[job("j9", promise=None, steps_done=0) | {"promise": None}]))["jobs"]
    for column in COLUMNS:
        assert order(jobs, column.title) == ["j9"]
        assert column.cell(jobs[0], 30, {}) is not None


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("", ["j1", "j2", "j3"]),
        ("high", ["j1"]),
        ("HIGH broken", ["j1"]),
        ("cnn", ["j1"]),
        ("sweep- j3", ["j3"]),
        ("paused", ["j2"]),
        ("budget", ["j2", "j3"]),
        ("uid:7", ["j1", "j2", "j3"]),
        ("cnn low", []),
    ],
)
def test_every_word_of_the_filter_has_to_be_shown_of_a_job(words, found):
    jobs = seen(
        job("j1", "high", BREAKS, name="CNN-serve"), job("j2", name="sweep-1", paused=True, state="paused"),
        job("j3", name="sweep-2"),
    )  # fmt: skip
    assert sorted(each["short"] for each in matching(jobs, words)) == found


def high(promise=None):
    (found,) = seen(job("j1", "high", promise))
    return found


def test_a_promise_is_said_in_words_at_every_width():
    assert [cell("PROMISE", width, high()).text for width in (12, 20, 28)] == ["1.04 kept", *["1.04 of 1.10 kept"] * 2]
    tail = high(BREAKS)
    assert cell("PROMISE", 12, tail) == ("tail BROKEN", "bad")
    assert cell("PROMISE", 20, tail).text == "tail 2.36 BROKEN"
    assert cell("PROMISE", 28, tail).text == "tail 2.36 of 1.20 BROKEN"
    mean = high(BREAKS | {"slowdown": 3.5})
    assert [cell("PROMISE", width, mean).text for width in (12, 20)] == ["3.50 BROKEN", "3.50 of 1.10 BROKEN"]
    assert cell("PROMISE", 12, high(UNMEASURED)).text == "not measured"
    assert cell("PROMISE", 12, high(BREAKS | {"slowdown": 12345.6})).text == "12346 BROKEN"


def held(share, **promise):
    before = body(jobs=[job("j1", "high"), job("j2", promise=promise)])
    after = later(before)
    after["jobs"][1]["promise"]["held_s"] = {"budget": 4.0 + 2.0 * share}
    return next(each for each in compare(before, after)["jobs"] if each["short"] == "j2")


def test_a_low_job_says_how_much_it_was_held_and_why():
    part = held(0.25)
    assert [cell("PROMISE", width, part).text for width in (12, 20, 28)] == [
        "held 25%", "held 25%: budget", "held 25% for j1: budget",
    ]  # fmt: skip
    whole = held(1.0, held_for_s=90.0)
    assert [cell("PROMISE", width, whole).text for width in (12, 28)] == ["held 1m30s", "held 1m30s for j1: budget"]
    assert cell("PROMISE", 28, held(0.0, held="", held_by="")).text == ""
    assert cell("PROMISE", 28, held(0.25, held="", held_by="")).text == "held 25%: budget"


def test_the_job_of_another_user_is_theirs():
    (found,) = seen(job("j1", name="", mine=False, uid=1003))
    assert cell("NAME", 20, found).text == "(of user 1003)"


def test_names_are_printable_and_have_their_rank():
    (found,) = seen(job("j1", name="a\x1b[2Jb", gang={"rank": 1, "ranks": 4, "waited_s": 1.0, "waits": False}))
    assert cell("NAME", 40, found).text == "a?[2Jb (rank 1 of 4, waits 0%)"
