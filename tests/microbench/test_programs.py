"""Each benchmark runs, briefly, and writes what it measured. Its figures mean nothing here."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch

QUICK = {
    "overhead": ["--repeats", "2", "--steps", "5"],
    "priority": ["--repeats", "1", "--steps", "5", "--policies", "paced"],
    "rtt": ["--repeats", "2", "--trips", "20"],
    "copies": ["--repeats", "3"],
    "core_rate": ["--repeats", "1", "--events", "500", "--jobs", "10"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_it_runs_and_reports(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    threads = torch.get_num_threads()
    out = tmp_path / "result.json"
    try:
        assert importlib.import_module(f"microbench.{name}").main([*QUICK[name], "--out", str(out)]) == 0
    finally:
        torch.set_num_threads(threads)
    report = json.loads(out.read_text())
    assert report["benchmark"] == name
    assert report["machine"]["cores"] >= 1
    assert "targets" in report
    assert "cores, load" in capsys.readouterr().out
