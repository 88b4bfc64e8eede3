"""Whether a promise is kept, in figures and in the line that every command, the page and the alerts show."""

from __future__ import annotations

from math import ceil, inf
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpumux.scheduler.guard.high_job import RECENT_STEPS, HighJob
from gpumux.scheduler.verdict import _of, slowdown_figures, verdict
from gpumux.wording import age


def judged(ratios: list[float], max_slowdown: float = 1.1) -> HighJob:
    """A high job whose steps ended a second apart, from 1.0 on, and were so many times as long as alone."""
    spec = SimpleNamespace(max_slowdown=max_slowdown, gang=None)
    high = HighJob(SimpleNamespace(id="high", paused=False, spec=spec))  # type: ignore[arg-type]
    for second, ratio in enumerate(ratios, start=1):
        high.judge(ratio, float(second))
    return high


def test_a_mean_and_a_tail_within_their_limits_are_kept():
    figures = slowdown_figures(judged([1.05] * 200))
    assert (figures["kept"], figures["broken_since"], figures["steps"]) == (True, None, 200)
    assert verdict(figures, 200.0) == "mean 1.05 of 1.10, tail 1.05 of 1.20 in 200 steps: kept"


def test_a_tail_breaks_the_promise_though_the_mean_keeps_it():
    figures = slowdown_figures(judged([1.0] * 190 + [2.36] * 6))
    assert figures["slowdown"] < 1.1
    assert verdict(figures, 205.0) == "mean 1.04 of 1.10, tail 2.36 of 1.20 in 196 steps: BROKEN for 13 s"


def test_since_when_is_the_step_that_broke_it_until_it_is_kept_again():
    high = judged([1.0, 1.0, 3.0])
    assert slowdown_figures(high)["broken_since"] == 3.0
    for second in range(4, 4 + RECENT_STEPS):
        high.judge(1.0, float(second))
    assert slowdown_figures(high)["broken_since"] is None
    high.judge(30.0, 999.0)
    assert slowdown_figures(high)["broken_since"] == 999.0


def test_nothing_measured_is_no_verdict():
    assert verdict(slowdown_figures(judged([])), 5.0) == "mean ? of 1.10, tail ? of 1.20: not measured yet"


def test_a_value_beyond_its_limit_never_reads_as_the_limit():
    figures = slowdown_figures(judged([1.1004] * 10))
    assert verdict(figures, 10.0).startswith("mean 1.1004 of 1.1000, tail 1.10 of 1.20 in 10 steps: BROKEN")
    figures = slowdown_figures(judged([1.1000004] * 10))
    assert verdict(figures, 10.0).startswith("mean 1.1001 of 1.1000, tail 1.10 of 1.20 in 10 steps: BROKEN")
    assert verdict(slowdown_figures(judged([1.0])), 1.0).endswith(" in 1 step: kept")


@given(st.floats(1.0, 3.0), st.floats(1.0, 3.0))
@example(1.00005000001, 1.00005)
def test_whether_a_value_is_beyond_its_limit_can_be_read(value: float, limit: float):
    shown, of = map(float, _of(value, limit).split(" of "))
    assert (shown > of) == (value > limit)


@given(st.lists(st.floats(0.9, 4.0), max_size=3 * RECENT_STEPS), st.floats(1.0, 2.0))
def test_the_running_judgement_is_that_of_the_newest_steps(ratios: list[float], max_slowdown: float):
    high = judged(ratios, max_slowdown)
    newest = ratios[-RECENT_STEPS:]
    slack = high.budget.slack
    figures = slowdown_figures(high)
    if not newest:
        assert figures["kept"] is None
        return
    mean, p99 = sum(newest) / len(newest), sorted(newest)[ceil(0.99 * len(newest)) - 1]
    assert figures["slowdown"] == pytest.approx(mean)
    assert figures["slowdown_p99"] == p99
    if abs(mean - 1.0 - slack) > 1e-9:
        assert figures["kept"] == (mean <= 1.0 + slack and p99 <= 1.0 + 2.0 * slack)
    assert (high.broken_since == inf) == figures["kept"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (0.42, "0.4 s"), (12.3, "12 s"), (119.0, "119 s"), (180.0, "3 min"), (7300.0, "2 h"),
     (200_000.0, "2 days"), (-1.0, "0.0 s")],
)  # fmt: skip
def test_ages_read_naturally(seconds: float, text: str):
    assert age(seconds) == text
