"""How `smoke` asks: each by itself, in its time, with what was found kept. What it asks, tests/stub runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from microbench.cuda import smoke, smoke_driver, smoke_torch
from microbench.cuda.driver import NoDevice
from microbench.cuda.smoke_driver import Card

CARD = cast(Card, SimpleNamespace(torch=None, facts={"name": "a card"}, describe=lambda: "a card"))


def fails(card: Card) -> str:
    smoke_driver.hold(False, "not so")
    return ""


def ask(asked: list[Any], out: Path, limit_s: float = 60.0) -> dict[str, Any]:
    smoke.ask_all(asked, CARD, smoke.Report(out), limit_s)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_one_that_fails_hides_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    found = ask([("one", lambda card: "fine"), ("two", fails), ("three", lambda card: "fine")], tmp_path / "found.json")
    assert [row["verdict"] for row in found["found"]] == ["PASS", "FAIL", "PASS"]
    assert found["found"][1]["said"] == "Wrong: not so"
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["PASS", "FAIL", "PASS"]
    assert all(" us " in line for line in lines)


def test_what_needs_torch_is_skipped_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []
    monkeypatch.setattr(smoke_torch, "begin", lambda card: asked.append("torch") or "torch is built without CUDA")
    names = [name for name, _ in smoke_torch.ASSUMPTIONS]
    found = ask([*smoke_torch.ASSUMPTIONS, ("last", lambda card: "fine")], tmp_path / "found.json")
    assert {row["said"] for row in found["found"] if row["name"] in names} == {"torch is built without CUDA"}
    assert found["counts"] == {"PASS": 1, "FAIL": 0, "SKIP": len(names)}
    assert asked == ["torch"], "once is enough"


def test_what_comes_too_late_is_skipped(tmp_path: Path):
    found = ask([("one", lambda card: "fine")], tmp_path / "found.json", limit_s=-1.0)
    assert found["counts"]["SKIP"] == 1


def test_one_that_hangs_ends_the_program_and_what_was_found_is_kept(tmp_path: Path):
    script = """
import sys, time
from pathlib import Path
from microbench.cuda import smoke
from tests.microbench.test_smoke import CARD
asked = [("one", lambda card: "fine"), ("hangs", lambda card: time.sleep(600)), ("never", lambda card: "fine")]
smoke.ask_all(asked, CARD, smoke.Report(Path(sys.argv[1])), 60.0, one_s=0.1)
"""
    out = tmp_path / "found.json"
    root = Path(__file__).resolve().parent.parent.parent
    done = subprocess.run(
        [sys.executable, "-c", script, str(out)], cwd=root, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == smoke.FAILED, done.stderr
    found = json.loads(out.read_text())["found"]
    assert [(row["name"], row["verdict"]) for row in found] == [("one", "PASS"), ("hangs", "FAIL")]
    assert "1 hold, 1 don't" in done.stdout


def test_after_one_that_hangs_the_program_begins_anew_with_the_next(tmp_path: Path):
    """A program of three assumptions, the second of which hangs."""
    program = tmp_path / "asks.py"
    program.write_text("""
import sys, time
from microbench.cuda import smoke, smoke_driver, smoke_torch
from tests.microbench.test_smoke import CARD
smoke_torch.ASSUMPTIONS = ()
fine = lambda card: "fine"
smoke_driver.ASSUMPTIONS = (("one", fine), ("hangs", lambda card: time.sleep(600)), ("last", fine))
smoke.Card = lambda: CARD
whole = smoke.ask_all
smoke.ask_all = lambda *given, **named: whole(*given, one_s=0.1, **named)
sys.exit(smoke.main())
""")
    out = tmp_path / "found.json"
    root = Path(__file__).resolve().parent.parent.parent
    done = subprocess.run(
        [sys.executable, str(program), "--out", str(out)],
        cwd=root, env=os.environ | {"PYTHONPATH": str(root)}, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == smoke.FAILED, done.stderr
    found = json.loads(out.read_text())["found"]
    assert [(row["name"], row["verdict"]) for row in found] == [("one", "PASS"), ("hangs", "FAIL"), ("last", "PASS")]
    assert "2 hold, 1 don't" in done.stdout
    assert done.stdout.count("PASS one") == 1


def test_there_are_enough_of_them_with_names_of_their_own():
    names = [name for name, _ in (*smoke_driver.ASSUMPTIONS, *smoke_torch.ASSUMPTIONS)]
    assert len(set(names)) == len(names) >= 30
    assert max(map(len, names)) <= 46


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def none() -> Card:
        raise NoDevice("there is no CUDA driver")

    monkeypatch.setattr(smoke, "Card", none)
    assert smoke.main([]) == smoke.NO_DEVICE
    assert "nothing was asked: there is no CUDA driver" in capsys.readouterr().err


def test_an_unknown_name_is_wrong_usage(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        smoke.main(["--only", "no such thing"])
    assert "--list says what there is" in capsys.readouterr().err
