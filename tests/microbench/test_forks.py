"""What forks take: it runs in a process of its own, since it freezes what a process holds and forks it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.extended
def test_it_runs_and_reports(tmp_path: Path):
    out = tmp_path / "result.json"
    run = subprocess.run(
        [sys.executable, "-m", "microbench.forks", "--forks", "5", "--out", str(out)], cwd=ROOT, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    if "puts no pages together" in run.stderr:
        pytest.skip("a kernel before 6.1")
    assert run.returncode == 0, run.stderr
    report = json.loads(out.read_text())
    assert report["benchmark"] == "forks"
    assert report["pages"].keys() == {"4 KiB", "2 MiB"}
    for parts in report["pages"].values():
        for part in ("fork", "work", "end"):
            assert parts[part]["repeats"] == 5
            assert 0 < parts[part]["low"] <= parts[part]["median"] <= parts[part]["high"]
    assert 0 < report["put_together"] <= report["of"]
    (target,) = report["targets"].values()
    small, huge = (
        sum(report["pages"][pages][part]["median"] for part in ("fork", "end")) for pages in ("4 KiB", "2 MiB")
    )
    assert target["value"] == pytest.approx(huge / small)
