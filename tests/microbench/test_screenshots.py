"""The pictures of the manual: what a terminal shows is drawn as it is, and a browser takes pictures of what it
shows."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from gpumux.cli import top
from microbench import browser, screenshots
from microbench.browser import Browser, BrowserFailed
from tests.metrics.chromium import chromium


def wrote(capsys: pytest.CaptureFixture[str], *screens: list[str]) -> str:
    for screen in screens:
        top._put(screen)
    return capsys.readouterr().out


def test_the_newest_screen_is_drawn_with_its_colours(capsys):
    output = wrote(capsys, ["earlier"], ["a <b>", top._colour("JOB  NAME"), top._colour("1.3 BROKEN now")])
    drawn = screenshots.drawn(output)
    assert "earlier" not in drawn
    assert "a &lt;b&gt;\n" in drawn
    assert '<span class="b">JOB  NAME</span>' in drawn
    assert '1.3 <span class="r">BROKEN</span> now\n' in drawn


def test_half_a_screen_and_codes_that_it_can_not_draw_are_refused(capsys):
    with pytest.raises(ValueError, match="drew nothing"):
        screenshots.drawn(wrote(capsys, ["whole"])[:-1])
    with pytest.raises(ValueError, match="no drawing"):
        screenshots.drawn(wrote(capsys, ["\x1b[4munderlined"]))


def told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, out: Path) -> str:
    monkeypatch.setattr("sys.argv", ["screenshots", "--out", str(out)])
    with pytest.raises(SystemExit):
        screenshots.main()
    return capsys.readouterr().err


def test_without_a_browser_it_says_what_to_install(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(screenshots, "viewer", lambda: "vizviewer")
    monkeypatch.setattr(browser, "NAMES", ("no-such-browser",))
    assert "install one" in told(capsys, monkeypatch, tmp_path)


def test_without_the_viewer_it_says_what_to_install(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "pip install viztracer" in told(capsys, monkeypatch, tmp_path)


@pytest.mark.slow
def test_a_browser_runs_a_page_and_takes_its_picture():
    with Browser(chromium()) as opened:
        page = opened.open("data:text/html,<body style='background:red; height: 200px; margin: 0'>", 120, 80)
        assert page.evaluate("Promise.resolve(6 * 7)") == 42
        picture, whole = page.picture(), page.picture(whole=True)
        dark = opened.open("data:text/html,<p>", 120, 80, dark=True)
        assert dark.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
        dark.close()
        with pytest.raises(BrowserFailed, match="nothing_is_called_so"):
            page.evaluate("nothing_is_called_so")
        with pytest.raises(BrowserFailed, match="ERR_FILE_NOT_FOUND"):
            opened.open("file:///no/such/page", 120, 80)
    assert picture.startswith(b"\x89PNG")
    assert [struct.unpack(">2I", png[16:24]) for png in (picture, whole)] == [(120, 80), (120, 200)]
