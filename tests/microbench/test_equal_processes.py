"""A short run of the benchmark of separate processes that train equal jobs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


def run(*arguments: str) -> None:
    """In a process of its own, with which the one that its trainers are copies of ends."""
    subprocess.run([sys.executable, "-m", "microbench.equal_processes", *arguments], cwd=REPOSITORY, check=True)


@pytest.mark.extended
def test_processes_run_as_one_and_one_that_is_killed_costs_the_others_nothing(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    arguments = ["--models", "2", "--size", "tiny", "--turns", "1", "--steps", "20", "--straggler", "1", "--kills", "1"]
    run(*arguments, "--set", "fuse_retry_s=0", "--out", str(out))
    result = json.loads(out.read_text())
    assert result["steps_per_s"].keys() == {"alone", "fused", "array"}
    assert all(figure["low"] > 0 for figure in result["steps_per_s"].values())
    assert result["off"]["alone"] == 0.0
    assert max(*result["off"].values(), result["kills"]["off"]) <= 1e-9
    assert result["kills"]["count"] == 1


@pytest.mark.extended
def test_kills_one_after_another_with_snapshots_between_cost_the_others_nothing(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    arguments = ["--models", "3", "--size", "tiny", "--ways", "fused", "--turns", "1", "--steps", "6", "--kills", "2"]
    settings = ["fuse_retry_s=0", "snapshot_s=0.5", f"state_dir={tmp_path / 'state'}"]
    run(*arguments, "--set", *settings, "--out", str(out))
    kills = json.loads(out.read_text())["kills"]
    assert kills["count"] == kills["until_fused_s"]["repeats"] == 2
    assert kills["off"] <= 1e-9
