"""Two answers of the daemon as rates and shares."""

from __future__ import annotations

import json

import pytest

from gpumux.cli.top import command
from gpumux.cli.top.rates import compare

from .bodies import body, job, later


def test_rates_are_of_the_time_between():
    after = later(body(), j1=(50, 1.0), j2=(3, 0.1), j3=(8, 0.5))
    after["guard"]["harvested_s"] += 0.4
    after["guard"]["held_s"]["budget"] += 1.2
    view = compare(body(), after)
    assert view["seconds"] == pytest.approx(2.0)
    assert [(j["short"], j["steps_s"]) for j in view["jobs"]] == [("j1", 25.0), ("j3", 4.0), ("j2", 1.5)]
    assert (view["device"]["high"], view["device"]["low"]) == (pytest.approx(0.5), pytest.approx(0.3))
    assert view["device"]["busy"] == pytest.approx(0.8)
    assert view["guard"]["harvested"] == pytest.approx(0.2)
    assert view["guard"]["held_by_reason"] == {"budget": pytest.approx(0.6), "gap": 0.0}
    json.dumps(view)


def test_a_job_that_is_new_has_no_rate_yet_and_one_that_is_gone_is_not_shown():
    before = body(jobs=[job("j1", "high"), job("j4", "low")])
    view = compare(before, later(body(), j1=(2, 0.2)))
    assert {j["short"]: j["steps_s"] for j in view["jobs"]} == {"j1": 1.0, "j2": None, "j3": None}
    assert "j4" not in command.describe(view)


def test_no_time_between_and_no_guard_are_no_error():
    view = compare(body(guard=None), body(guard=None))
    assert view["guard"] is None
    assert view["jobs"][0]["steps_s"] is None
    assert "guard  " not in command.describe(view)
    assert "no jobs" in command.describe(compare(body(jobs=[]), later(body(jobs=[]))))


def test_a_low_job_was_held_for_part_of_the_time():
    before = body()
    after = later(before)
    after["jobs"][0]["promise"]["held_s"] = {"budget": 4.5, "gap": 1.0}
    found = {job["short"]: job["held_share"] for job in compare(before, after)["jobs"]}
    assert found == {"j1": None, "j2": {"budget": pytest.approx(0.25), "gap": pytest.approx(0.5)}, "j3": {}}
    assert {job["held_share"] for job in compare(before, before)["jobs"]} == {None}
