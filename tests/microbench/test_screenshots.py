"""The pictures of the manual: the screen of a daemon, and a browser that takes pictures."""

from __future__ import annotations

import asyncio
import select
import struct
from pathlib import Path

import pytest

from microbench import browser, screenshots
from microbench.browser import Browser, BrowserFailed
from tests.cli.top.bodies import body, job
from tests.metrics.chromium import chromium

ENDPOINT = "ipc:///run/gpumux/0/gpumux.sock"


class FakeControl:
    """A daemon that says the same at once, whenever it is asked."""

    def __init__(self, endpoint):
        assert endpoint == ENDPOINT

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def status(self):
        return body(jobs=[job("j1", "high"), job("j2", name="sweep-1")])

    def wait(self, seconds, watch):
        return bool(select.select([watch], [], [], 0.01)[0])


def test_the_screen_is_that_of_the_daemon(monkeypatch):
    monkeypatch.setattr(screenshots, "Control", FakeControl)
    picture = asyncio.run(screenshots.top(ENDPOINT, 3))
    for text in ("PROMISE&#160;KEPT", "sweep-1", "mean&#160;slowdown&#160;of&#160;j1"):
        assert text in picture
    assert "Fira" not in picture
    assert "http" not in picture.replace("http://www.w3.org/2000/svg", "").replace("https://www.textualize.io", "")


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
