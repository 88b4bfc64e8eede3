"""The experiments that need no kernel's result, to their ends. Their figures mean nothing on the stand-in."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

import microbench.cuda as experiments
from microbench.cuda import driver, experiment
from tests.stub.inside.stub import Stub

NOT_HERE = ("rebuild", "capture")  # they capture what torch does on the GPU
# Fewer of what each has one or more processes for.
FEWER: dict[str, dict[str, Any]] = {
    "idle_contexts": {"CONTEXTS": (0, 1)},
    "same_address": {"HINTS": (0x6000_0000_0000,)},
    "depth": {"CONNECTIONS": (8,)},
    "boundary_gaps": {"DEPTHS": (1, 2, 4)},
    "completion": {"POLLS": 50},
}


@pytest.mark.parametrize("name", [name for name in experiments.NAMES if name not in NOT_HERE])
def test_it_runs_to_its_end(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(f"microbench.cuda.{name}")
    monkeypatch.setattr(driver, "PRIMING_S", 0.0)
    for constant, value in FEWER.get(name, {}).items():
        monkeypatch.setattr(module, constant, value)
    out = tmp_path / "found.json"
    assert experiment.main(module.EXPERIMENT, ["--repeats", "1", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["device"]["name"] == "Stub GPU"
    assert result["rows"]
    assert result["answer"]
    if name == "same_address":  # here it is really done: a file mapped by two processes
        assert result["answer"].startswith("yes, at 1 of 1 hints")


def test_no_experiment_breaks_a_rule() -> None:
    """In the order of this file: all that the ones above called."""
    assert Stub().violations() == []
