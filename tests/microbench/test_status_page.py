"""The pictures of the status page: of real daemons, with and without jobs."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest

from microbench import browser, status_page
from microbench.browser import Browser
from tests.metrics.chromium import chromium


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["status_page", *arguments])
    return status_page.main()


@pytest.mark.slow
@pytest.mark.extended
def test_it_takes_each_picture_of_daemons_with_and_without_jobs(monkeypatch, capsys, tmp_path):
    chromium()
    monkeypatch.setattr(status_page, "SCREENS", ((400, False), (1280, True)))  # a picture takes a second
    monkeypatch.setattr(status_page, "EMPTY_S", 1.0)
    assert run(monkeypatch, "--out", str(tmp_path / "made"), "--jobs", "0", "3", "--seconds", "2") == 0
    states = {"0": True, "3": True, "explained": False, "gone": True}
    screens = {(400, "light"), (1280, "dark")}
    found = {path.stem: path.read_bytes() for path in (tmp_path / "made").iterdir()}
    assert set(found) == {f"{state}_{width}_{kind}" for state in states for width, kind in screens}
    assert len(set(found.values())) == len(found)
    for name, png in found.items():
        state, width, _ = name.split("_")
        wide, high = struct.unpack(">2I", png[16:24])
        assert wide == int(width)
        assert high > 900 if state == "3" else high >= 900
    names = ("0_1280_dark", "3_400_light")
    with Browser(chromium()) as opened:
        sheet = status_page.sheet(opened, tmp_path / "made", names)
    assert struct.unpack(">2I", sheet[16:24])[0] == status_page.SHEET_WIDTH
    assert "3 jobs: watched for 2 s" in capsys.readouterr().out


def test_sheets_need_every_picture_they_show(monkeypatch, capsys, tmp_path):
    shown = {name.split("_")[0] for names in status_page.SHEETS.values() for name in names}
    assert shown == {*map(str, status_page.NUMBERS), "explained", "gone"}
    with pytest.raises(SystemExit):
        run(monkeypatch, "--sheets", str(tmp_path), "--jobs", "3")
    assert "pictures of 0, 3 and 30 jobs" in capsys.readouterr().err


def test_without_a_browser_it_says_what_to_install(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(browser, "NAMES", ("no-such-browser",))
    with pytest.raises(SystemExit):
        run(monkeypatch, "--out", str(tmp_path))
    assert "install one" in capsys.readouterr().err
    assert list(Path(tmp_path).iterdir()) == []
