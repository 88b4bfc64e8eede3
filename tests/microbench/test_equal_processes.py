"""A short run of the benchmark of separate processes that train equal jobs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from microbench import equal_processes


@pytest.mark.extended
def test_processes_run_as_one_and_one_that_is_killed_costs_the_others_nothing(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    arguments = ["--models", "2", "--size", "tiny", "--turns", "1", "--steps", "20", "--straggler", "1", "--kills", "1"]
    assert equal_processes.main([*arguments, "--set", "fuse_retry_s=0", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["steps_per_s"].keys() == {"alone", "fused", "array"}
    assert all(figure["low"] > 0 for figure in result["steps_per_s"].values())
    assert result["off"]["alone"] == 0.0
    assert max(*result["off"].values(), result["kills"]["off"]) <= 1e-9
    assert result["kills"]["count"] == 1
