"""The simulated day of a cluster, with few jobs: figures are whole, repeat, and no work is lost or made up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpumux.types import Priority
from microbench import cluster_day
from microbench.cluster_day import HIGHS, LOWS, WAYS, Day, Pair, Way, draw_jobs

PAIRS = {(high, low): Pair(1.04, 0.3 + 0.1 * (at % 4)) for at, high in enumerate(HIGHS) for low in LOWS}


@pytest.mark.extended
def test_the_report_has_every_way_and_says_what_was_wanted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "day.json"
    few = ["--jobs", "40", "--days", "1", "--steps", "20", "--kinds", "2"]
    assert cluster_day.main([*few, "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert [row["way"] for row in report["rows"]] == [way.name for way in WAYS]
    assert len(report["pairs"]) == 4
    assert len(report["two_low_jobs"]) == 2
    assert len(report["targets"]) == len(WAYS) + 1
    assert all(row["high_slowdown_max"] >= row["high_slowdown_mean"] >= 1.0 - 1e-9 for row in report["rows"])
    assert "shared, by learned costs" in capsys.readouterr().out


def test_days_differ_by_their_seed_alone() -> None:
    assert draw_jobs(50, 1, HIGHS, LOWS) == draw_jobs(50, 1, HIGHS, LOWS) != draw_jobs(50, 2, HIGHS, LOWS)


@pytest.mark.every(3)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_all_work_is_done_once(way: Way) -> None:
    """Every job does its whole length, however often it was moved."""
    jobs = draw_jobs(120, 3, HIGHS, LOWS)
    day = Day(jobs, way, PAIRS)
    day.run()
    done = {each.job.request.id: each for each in day.known.values()}
    assert all(each.remaining == pytest.approx(0.0, abs=1e-3) for each in done.values())
    for priority in Priority:
        submitted = sum(job.length_s * job.request.devices for job in jobs if job.request.priority is priority)
        assert 0.0 < day.work_s[priority] <= submitted * (1 + 1e-9)
    assert day.moves == 0 or way.moves
    figures = day.figures()
    assert figures["high_slowdown_max"] <= (1.04 + 1e-9 if way.max_jobs > 1 else 1.0 + 1e-9)
    assert not day.placement.jobs
