"""A short run of the benchmark of jobs with equal Programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from microbench import equal_jobs


@pytest.mark.extended
def test_every_way_is_measured_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "result.json"
    arguments = ["--jobs", "2", "--size", "tiny", "--turns", "2", "--steps", "2", "--out", str(out)]
    assert equal_jobs.main(arguments) == 0
    result = json.loads(out.read_text())
    assert all(figure["low"] > 0 and figure["repeats"] == 2 for figure in result["steps_per_s"].values())
    assert result["steps_per_s"].keys() == {"alone", "fused", "array"}
    assert result["fused_over"].keys() == {"alone", "array"}
    assert capsys.readouterr().out.count("2 jobs, batch 4: fused over") == 2
