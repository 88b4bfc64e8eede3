"""The benchmark of schedulers runs, and compares what they found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from clients.hfta import tasks
from gpumux.tune.checkpoints import MemoryCheckpoints
from gpumux.tune.run import SweepResult
from gpumux.tune.sweep import TrialRecord
from microbench import hfht, tuning


def found(scores: list[float], wall_s: float = 2.0) -> SweepResult:
    entries = tuple(TrialRecord(n, {"lr": 0.1}, "complete", {5: score}, 0.5) for n, score in enumerate(scores))
    best = max(entries, key=lambda e: e.score)
    return SweepResult("t", "random", "serial", "maximize", entries, best, wall_s, {}, MemoryCheckpoints())


def test_agreement_is_worked_out():
    same = tuning.agree({"serial": [found([0.1, 0.5])], "fused": [found([0.1, 0.25 + 0.125])]})
    assert same["same_best"]
    assert same["largest_score_difference"] == 0.125
    other = tuning.agree({"serial": [found([0.1, 0.5])], "fused": [found([0.6, 0.5])]})
    assert not other["same_best"]
    assert "other best trials" in other["said"]


def test_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    out, threads = tmp_path / "r.json", torch.get_num_threads()
    try:
        asked = ["--trials", "2", "--steps", "4", "--repeats", "2", "--schedulers", "serial", "--out", str(out)]
        assert tuning.main(asked) == 0
    finally:
        torch.set_num_threads(threads)
    body = json.loads(out.read_text())
    row = body["schedulers"]["serial"]
    assert row["wall_s"]["repeats"] == 2
    assert row["gpu_hours"]["median"] == pytest.approx(row["device_s"]["median"] / 3600)
    assert body["agreement"]["same_best"]
    assert "the same best trial" in capsys.readouterr().out


@pytest.mark.extended
def test_hfta_s_workloads_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    out, threads = tmp_path / "r.json", torch.get_num_threads()
    monkeypatch.setitem(tasks.SETTINGS, "pointnet", tasks.Settings(4, 2, 1, 3, 1))
    try:
        assert hfht.main(["--tasks", "pointnet", "--schedulers", "serial", "--out", str(out)]) == 0
    finally:
        torch.set_num_threads(threads)
    rows = json.loads(out.read_text())["workloads"]
    assert [(row["algorithm"], row["trials"]) for row in rows] == [("random", 3), ("hyperband", 4 + 3 + 3)]
    assert all(row["schedulers"]["serial"]["device_s"]["median"] > 0 for row in rows)
    assert "published" in capsys.readouterr().out
