"""The benchmark that turns one part of the guard off at a time: every part can be, and some make a difference."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from microbench import guard_parts


def measured(tmp_path: Path, *parts: str) -> list[dict[str, object]]:
    """What remains with each part off, in a process whose core is interpreted."""
    out = tmp_path / "parts.json"
    command = [
        sys.executable, "-m", "microbench.guard_parts", "--parts", *parts, "--pairs", "1", "--corner-pairs", "1",
        "--steps", "210", "--processes", "1", "--kinds", "pairs", "--out", str(out),
    ]  # fmt: skip
    done = subprocess.run(
        command, env={**os.environ, "GPUMUX_CORE": "interpreted"}, capture_output=True, text=True, timeout=220
    )
    assert done.returncode == 0, done.stderr
    return list(json.loads(out.read_text())["parts"])


def test_parts_are_turned_off_one_at_a_time(tmp_path: Path) -> None:
    found = {each["part"]: each["rows"] for each in measured(tmp_path, "nothing", "moments", "noise: steps")}
    assert found["moments"] != found["nothing"]
    assert found["noise: steps"] == found["nothing"], "the simulated device makes none"


def test_every_part_can_be_turned_off() -> None:
    """In a process of its own: the modules stay changed."""
    source = "from microbench.guard_parts import PARTS\nfor part in PARTS.values(): part()"
    subprocess.run(
        [sys.executable, "-c", source], env={**os.environ, "GPUMUX_CORE": "interpreted"}, check=True, timeout=200
    )


def test_a_compiled_core_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(guard_parts, "RUNS", replace(guard_parts.RUNS, directory=Path("/compiled")))
    assert guard_parts.main([]) == 78
    assert "GPUMUX_CORE=interpreted" in capsys.readouterr().err
