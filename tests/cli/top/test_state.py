"""What the screen knows and shows: answers, silence, restarts, history, a table that is kept."""

from __future__ import annotations

import pytest

from gpumux.cli.top.columns import COLUMNS
from gpumux.cli.top.history import SAMPLES
from gpumux.cli.top.state import OVERDUE_S, TopState
from gpumux.errors import DaemonGone

from .bodies import body, job, later


def answered(count=2, interval=2.0):
    """A state that took so many answers, at 0, 2, 4 ... seconds, and the last of them."""
    state, newest = TopState(interval), body()
    for i in range(count):
        newest = later(newest, interval, j1=(50, 1.0)) if i else newest
        state.take(newest, now=interval * i)
    return state, newest


def test_the_first_answer_has_jobs_and_no_rates():
    state, _ = answered(1)
    assert [each["short"] for each in state.rows()] == ["j1", "j2", "j3"]
    assert state.rows()[0]["steps_s"] is None
    assert list(state.history.device) == [None]


def test_rates_are_of_the_interval():
    state, _ = answered(3)
    assert state.rows()[0]["steps_s"] == 25.0
    assert list(state.history.device) == [None, 0.5, 0.5]
    assert list(state.history.steps["j1"]) == [None, 25.0, 25.0]
    assert list(state.history.slowdown["j1"]) == [1.04] * 3
    assert list(state.history.queued) == [3.0] * 3


def test_an_early_answer_is_shown_and_changes_neither_history_nor_the_next_rates():
    state, newest = answered(2)
    early = later(newest, 0.1)
    early["jobs"][0]["paused"] = True
    state.take(early, now=2.1, early=True)
    (paused,) = [each for each in state.rows() if each["short"] == "j2"]
    assert paused["paused"]
    assert state.view["seconds"] == pytest.approx(2.1)
    assert len(state.history.device) == 2
    state.take(later(newest, 2.0, j1=(100, 1.0)), now=4.0)
    assert state.view["seconds"] == pytest.approx(2.0)
    assert state.rows()[0]["steps_s"] == 50.0


def test_a_first_early_answer_does_no_harm():
    state, newest = answered(1)
    state.take(later(newest, 0.1), now=0.1, early=True)
    assert len(state.rows()) == 3


def test_a_job_that_comes_later_has_a_history_as_long_and_one_that_goes_has_none():
    state, newest = answered(2)
    after = later(newest)
    after["jobs"] = [*after["jobs"][1:], job("j4", "high")]
    state.take(after, now=4.0)
    assert list(state.history.steps["j4"]) == [None] * 3
    assert set(state.history.steps) == {"j1", "j3", "j4"}
    assert set(state.history.slowdown) == {"j1", "j4"}


def test_history_has_an_end():
    state, newest = answered(1)
    for i in range(SAMPLES + 5):
        state.take(newest, now=float(i))
    assert len(state.history.device) == len(state.history.steps["j1"]) == SAMPLES


def test_a_daemon_that_is_silent_is_said_to_be_with_or_without_an_error():
    state, _ = answered(2)
    assert state.silent_s(2.0 + 2.0 + OVERDUE_S) is None
    assert state.silent_s(2.0 + 2.5 + OVERDUE_S) == 2.5 + OVERDUE_S
    state.lose(DaemonGone("it is gone"))
    assert state.silent_s(3.5) == 1.5
    assert len(state.rows()) == 3
    state.lose(DaemonGone("still"))
    assert list(state.history.device)[-2:] == [0.5, None]  # one gap


def test_a_daemon_that_comes_back_goes_on_and_another_begins_anew():
    state, newest = answered(2)
    state.lose(DaemonGone("it is gone"))
    state.take(later(newest, 8.0, j1=(80, 1.0)), now=10.0)
    assert (state.lost, state.silent_s(10.0), state.rows()[0]["steps_s"]) == (None, None, 10.0)
    state.take(body(), now=12.0)  # it is up for less long than before
    assert state.rows()[0]["steps_s"] is None
    assert list(state.history.steps["j1"]) == [None] * len(state.history.device)
    other = later(body())
    other["daemon"]["pid"] = 8
    state.take(other, now=14.0)
    assert state.rows()[0]["steps_s"] is None


def test_a_table_that_is_kept_stays_while_verdicts_go_on():
    state, newest = answered(2)
    state.freeze()
    state.take(later(newest, 2.0, j1=(100, 1.0)), now=4.0)
    assert state.rows()[0]["steps_s"] == 25.0
    assert state.view["jobs"][0]["steps_s"] == 50.0
    state.freeze()
    assert state.rows()[0]["steps_s"] == 50.0


def test_sorting_goes_round_the_columns_that_are_shown():
    state, _ = answered(1)
    few = COLUMNS[:2]
    for expected in ("JOB", "NAME", "", "JOB"):
        state.sort_by_neighbour(few, 1)
        assert state.sorted_by == expected
    state.sort_by_neighbour(few, -1)
    assert state.sorted_by == ""
    state.sort_by("MEMORY")  # which has left since
    state.sort_by_neighbour(few, 1)
    assert state.sorted_by == "JOB"


def test_sorting_by_the_same_column_again_is_backwards():
    state, _ = answered(1)
    found = []
    for title in ("JOB", "JOB", "JOB", "NAME"):
        state.sort_by(title)
        found.append(state.backwards)
    assert found == [False, True, False, False]


def test_the_filter_chooses_rows():
    state, _ = answered(1)
    state.wanted = "low"
    assert [each["short"] for each in state.rows()] == ["j2", "j3"]
