"""`gpumux interference` without a daemon: what it prints of the daemon's answer, and what it draws."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gpumux.cli import interference
from gpumux.cli.main import EX_CONFIG, main

BERT, SWEEP, EVIL = "3f2a91c0" + "0" * 56, "9b01dd23" + "1" * 56, "e" * 64


def pair(high: str = BERT, low: str = SWEEP, share: float = 1.0, slowdown: float = 1.07, **more: Any) -> dict[str, Any]:
    ranges = [
        {"first": 0, "end": 12, "solo_s": 2e-3, "slowdown": 1.01, "samples": 40, "banned": False},
        {"first": 12, "end": 20, "solo_s": 1e-3, "slowdown": 1.29, "samples": 12, "banned": True},
    ]
    found = {
        "high": {"program": high, "name": "bert"}, "low": {"program": low, "name": ""}, "share": share,
        "slowdown": slowdown, "low_speed": 0.22, "samples": 52, "solo_s": 4e-3, "cut_into": 3, "ranges": ranges,
        "ranges_left_out": 0,
    }  # fmt: skip
    return found | more


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the daemon says; tests change it."""
    body: dict[str, Any] = {
        "pairs": [pair(), pair(share=0.5, slowdown=1.03)],
        "left_out": 0,
        "kept_in": "/s/interference",
    }

    class FakeControl:
        def __init__(self, *_: object) -> None: ...

        def __enter__(self) -> FakeControl:
            return self

        def __exit__(self, *_: object) -> None: ...

        def interference(self, program: str) -> dict[str, Any]:
            return body if program in ("", "bert") else {**body, "pairs": []}

    monkeypatch.setattr(interference, "Control", FakeControl)
    return body


def test_each_pair_is_a_line(answer, capsys):
    assert main(["interference"]) == 0
    header, first, second, _, kept = capsys.readouterr().out.splitlines()
    assert header.split("  ")[0] == "HIGH PROGRAM"
    assert " ".join(first.split()) == "bert 3f2a91c0 9b01dd23 1 1.07 x 0.22 52 12 to 19: 1.29 x (1 of 3 ranges banned)"
    assert second.split()[3:6] == ["0.5", "1.03", "x"]
    assert kept == "kept over restarts in /s/interference"


def test_ranges_are_listed_one_by_one(answer, capsys):
    assert main(["interference", "--ranges", "--program", "bert"]) == 0
    said = capsys.readouterr().out
    assert (
        "bert 3f2a91c0 beside 9b01dd23 on 0.5 of the device: 1.03 x, a step alone 4.000 ms, 2 of 3 ranges measured\n"
        in said
    )
    rows = [" ".join(line.split()) for line in said.splitlines()[2:4]]
    assert rows == ["0 to 11 2.000 ms 1.01 x 40", "12 to 19 1.000 ms 1.29 x 12 banned"]


def test_json_is_what_the_daemon_said(answer, capsys):
    assert main(["interference", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == answer


def test_it_says_so_where_there_is_nothing(answer, capsys):
    assert main(["interference", "--program", "none"]) == 0
    assert "no measured pair has a program none" in capsys.readouterr().out
    assert main(["interference", "--program", "none", "--plot", "heat.png"]) == 0
    assert "heat.png was not written" in capsys.readouterr().out
    answer["pairs"] = []
    assert main(["interference"]) == 0
    assert "nothing was measured yet" in capsys.readouterr().out


def test_what_is_left_out_is_said(answer, capsys):
    answer["left_out"], answer["kept_in"] = 7, ""
    answer["pairs"] = [pair(ranges_left_out=5, cut_into=9)]
    assert main(["interference", "--ranges"]) == 0
    said = capsys.readouterr().out
    assert "7 more pairs" in said
    assert "7 of 9 ranges measured; 5 that lose less are not shown" in said
    assert "not kept over restarts: the daemon has no --state-dir" in said


def test_names_of_other_users_can_not_command_the_terminal(answer, capsys):
    answer["pairs"] = [pair(low=EVIL, high=BERT) | {"low": {"program": EVIL, "name": "\x1b[2Jx"}}]
    assert main(["interference"]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_a_heat_map_has_a_cell_for_each_pair_and_share(answer, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    answer["pairs"].append(pair(high=EVIL, slowdown=1.9) | {"high": {"program": EVIL, "name": r"$\frac$"}})
    path = tmp_path / "heat.svg"
    assert main(["interference", "--plot", str(path)]) == 0
    drawn = path.read_text()
    for text in ("1.07", "1.03", "1.90", "bert 3f2a91c0", r"$\frac$ eeeeeeee", "9b01dd23 on 0.5"):
        assert f">{text}<" in drawn
    assert f"wrote {path}" in capsys.readouterr().out


def test_a_picture_that_can_not_be_written_is_said_before_the_daemon_is_asked(answer, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(interference, "Control", None)
    assert main(["interference", "--plot", "/nowhere/heat.png"]) == EX_CONFIG
    assert "can't write /nowhere/heat.png" in capsys.readouterr().err
