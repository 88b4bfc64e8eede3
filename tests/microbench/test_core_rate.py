"""The core's benchmark runs, repeats its recording and writes what it measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from microbench import common, core_rate


@pytest.mark.extended
def test_it_reports_every_number_of_jobs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rate.json"
    assert core_rate.main(["--jobs", "3", "100", "--events", "400", "--repeats", "2", "--out", str(out)]) == 0
    written = json.loads(out.read_text())
    assert written["benchmark"] == "core_rate"
    assert set(written["events_per_second"]) == {"paced", "guarded"}
    for policy, by_jobs in written["events_per_second"].items():
        assert set(by_jobs) == {"3", "100"}
        for jobs, figure in by_jobs.items():
            assert 0 < figure["low"] <= figure["median"] <= figure["high"]
            assert figure["repeats"] == len(written["samples"][policy][jobs]) == 2
            assert sum(written["mix"][policy][jobs].values()) == 400
    assert written["machine"]["versions"]["python"]
    assert "rate with 100 jobs" in written["targets"]
    assert "guarded over paced, an event with 100 jobs" in written["targets"]
    for cost in (written["cost"], written["cost_of_a_launch"]):
        assert {jobs: figure["repeats"] for jobs, figure in cost.items()} == {"3": 2, "100": 2}
    rates = [written["samples"][policy]["3"] for policy in core_rate.POLICIES]
    assert max(paced / guarded for paced, guarded in zip(*rates, strict=True)) == written["cost"]["3"]["high"]
    assert "events/s" in capsys.readouterr().out


def test_steps_that_are_not_timed_are_part_of_what_sets_up() -> None:
    setup, timed, commands = core_rate.record(10, 100, "guarded", after=5)
    core = core_rate.new_scheduler(10, "guarded")
    assert core_rate.replay(10, "guarded", setup, timed, commands) > 0
    for event, now in setup:
        core.handle(event, now)
    high = [job for job in core.snapshot()["jobs"] if job["priority"] == "high"]
    assert high
    assert all(job["steps_done"] >= 5 for job in high)
    assert len(timed) == 100


@pytest.mark.parametrize("policy", core_rate.POLICIES)
def test_a_replay_that_differs_from_the_recording_is_an_error(policy: str) -> None:
    setup, timed, commands = core_rate.record(3, 200, policy)
    assert core_rate.replay(3, policy, setup, timed, commands) > 0
    with pytest.raises(RuntimeError, match="the recording"):
        core_rate.replay(3, policy, setup, timed[:-20], commands)


def test_summaries() -> None:
    assert common.figure([1.0, 4.0, 2.0]) == common.Figure(2.0, 1.0, 4.0, 1.5, 3)
    assert [common.percentile(range(1, 101), share) for share in (0.0, 0.5, 0.99, 1.0)] == [1, 50, 99, 100]
    assert common.table(["a", "bb"], [["x", "1"]]).splitlines() == ["a  bb", "-  --", "x   1"]
