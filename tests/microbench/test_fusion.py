"""The benchmark of fusion: what it says of what was measured, and one short run of all of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from microbench import fusion
from microbench.common import figure

SERIAL, OURS = "serial", "fused"


def measured(name: str, batch: int, models: int, ours: float) -> dict:
    rates = {
        SERIAL: {"samples": [10.0, 12.0]},
        OURS: {"samples": [10.0 * ours, 12.0 * ours]},
        "hand": {"error": "nobody did"},
    }
    peaks = {SERIAL: {"bytes": 3 << 20}, OURS: {"bytes": 2 << 20}}
    return {
        name: {
            "batch": batch,
            "models": {str(models): fusion.summary(rates, peaks, SERIAL)},
            "paper": fusion.PAPER.get(name, {}),
        }
    }


def test_ratios_are_of_turns():
    ways = fusion.summary({SERIAL: {"samples": [1.0, 4.0]}, OURS: {"samples": [2.0, 12.0]}}, {}, SERIAL)
    assert ways[OURS]["over_serial"] == figure([2.0, 3.0])
    assert ways[SERIAL]["over_serial"].median == 1.0


@pytest.mark.parametrize(
    ("name", "batch", "models", "target"),
    [("transformer", 2, 8, 2.6), ("transformer", 16, 8, 0.95), ("transformer", 2, 4, 0.95), ("cnn", 4, 8, 1.6), ("dcgan", 4, 8, 0.95)],
)  # fmt: skip
def test_the_marks_are_where_they_were_set(name: str, batch: int, models: int, target: float):
    for ours in (target - 0.01, target):
        (found,) = fusion.targets(measured(name, batch, models, ours), "small", "cpu", OURS).values()
        assert found["target"] == target
        assert found["met"] == (found["value"] >= target)
    (elsewhere,) = fusion.targets(measured(name, batch, models, 1.0), "full", "cpu", OURS).values()
    assert elsewhere["target"] == fusion.FLOOR


def test_the_table_says_what_is_missing_and_why():
    text = fusion.show(measured("dcgan", 4, 8, 1.5), [SERIAL, "hand", OURS], 8)
    assert "1.50" in text
    assert "V100 4.59" in text
    assert "dcgan, hand: nobody did" in text
    (row,) = [line for line in text.splitlines() if line.startswith("dcgan, batch 4")]
    assert row.split()[4:6] == ["1.00", "-"]


@pytest.mark.parametrize("arguments", [["--workload", "nonsense"], ["--models", "0"], ["--device", "cuda"]])
def test_what_can_not_be_measured_is_refused(arguments: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fusion, "DRIVER", Path("/nowhere"))
    with pytest.raises(SystemExit) as end:
        fusion.main(arguments)
    assert end.value.code == 2


def test_a_short_run_measures_what_it_says(tmp_path: Path):
    """In a process of its own, since it forks. That arrays train: tests/fuse."""
    out = tmp_path / "fusion.json"
    command = [sys.executable, "-m", "microbench.fusion", "--size", "tiny", "--workload", "cnn", "--models", "2"]
    command += [
        "--repeats",
        "2",
        "--seconds",
        "0.02",
        "--threads",
        "1",
        "--ways",
        "hand",
        "processes",
        "--out",
        str(out),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=230)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    ways = found["workloads"]["cnn"]["models"]["2"]
    assert ways.keys() == {"serial", "hand", "processes"}
    for way in ways.values():
        assert len(way["samples"]) == 2
        assert way["models_steps_per_s"]["low"] > 0
        assert way["bytes"] > 0
    ratios = [a / b for a, b in zip(ways["hand"]["samples"], ways["serial"]["samples"], strict=True)]
    assert (ways["hand"]["over_serial"]["low"], ways["hand"]["over_serial"]["high"]) == pytest.approx(
        (min(ratios), max(ratios))
    )
    assert found["overhead_bytes"] > 0
