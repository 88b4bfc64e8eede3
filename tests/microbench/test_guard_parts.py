"""The benchmark that turns one part of the guard off at a time: every part can be, and that makes a difference."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import gpumux
from microbench import guard_parts

SCHEDULER = Path(gpumux.__file__).parent / "scheduler"


@pytest.mark.extended
def test_parts_are_turned_off_one_at_a_time(tmp_path: Path) -> None:
    out = tmp_path / "parts.json"
    parts = ["nothing", "moments", "noise: steps"]
    arguments = ["--pairs", "1", "--corner-pairs", "1", "--steps", "210", "--processes", "1", "--kinds", "pairs"]
    assert guard_parts.main(["--parts", *parts, *arguments, "--interpreted", "--out", str(out)]) == 0
    found = {each["part"]: each["rows"] for each in json.loads(out.read_text())["parts"]}
    assert found["moments"] != found["nothing"]
    assert found["noise: steps"] == found["nothing"], "the simulated device makes none"


@pytest.mark.extended
def test_a_disturbed_run_is_measured_beside_its_own_high_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    guard_parts.measure([("disturbed", "4 high jobs", 0)], seed=0, steps=guard_parts.LEARNING + 20)
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 4
    assert {row["kind"] for row in rows} == {"disturbed"}
    assert guard_parts.summary("nothing", rows)["disturbed, 4 high jobs"]["mean"] == max(row["mean"] for row in rows)


@pytest.mark.parametrize("part", [part for part in guard_parts.PARTS if part != "nothing"])
@pytest.mark.every(4)
def test_every_part_is_an_edit_that_fits_and_changes_something(part: str, tmp_path: Path) -> None:
    sources = [path for path in SCHEDULER.rglob("*.py") if "__compiled__" not in path.parts]
    before = {path: path.read_text() for path in sources}
    shutil.copytree(SCHEDULER, tmp_path / "scheduler", ignore=shutil.ignore_patterns("__pycache__", "__compiled__"))
    guard_parts.switched(tmp_path, [part])
    changed = 0
    for path, text in before.items():
        edited = (tmp_path / "scheduler" / path.relative_to(SCHEDULER)).read_text()
        compile(edited, str(path), "exec")
        assert edited.count(guard_parts.SWITCHES) == (edited != text)
        changed += edited != text
    assert changed


def test_an_edit_that_no_longer_fits_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("MOST: Final = 1\n\n\ndef least() -> int:\n    return 0\n")
    for edit in (
        guard_parts.constant("module", LEAST=2), guard_parts.function("module", "most", "return 1"),
        guard_parts.expression("module", "MOST + 2", "1"),
    ):  # fmt: skip
        with pytest.raises(guard_parts.NotFound, match=r"guard_parts\.py"):
            edit(tmp_path, "OFF")
    guard_parts.constant("module", MOST=2)(tmp_path, "OFF")
    guard_parts.function("module", "least", "return 3")(tmp_path, "OFF")
    edited = "MOST: Final = 2 if OFF else 1\n\n\ndef least() -> int:\n    if OFF:\n        return 3\n    return 0\n"
    assert (tmp_path / "module.py").read_text() == edited
