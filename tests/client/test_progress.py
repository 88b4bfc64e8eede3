"""A submit says what it does on a terminal, once it takes long; time is said by the test."""

from __future__ import annotations

import io
import logging
import queue
import threading

import pytest
import torch
from torch import nn

from gpumux import client
from gpumux.client import progress
from gpumux.client.progress import AGAIN_S, FIRST_S, Progress
from gpumux.errors import CaptureError
from tests.threads import one_thread


class Terminal(io.StringIO):
    def __init__(self, terminal: bool = True) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


class Time:
    """Lets a Progress wait as often as the test says."""

    def __init__(self) -> None:
        self.waits: queue.SimpleQueue[float] = queue.SimpleQueue()
        self._turns: queue.SimpleQueue[None] = queue.SimpleQueue()

    def wait(self, event: threading.Event, seconds: float) -> bool:
        self.waits.put(seconds)
        self._turns.get(timeout=60)
        return event.is_set()

    def passes(self) -> float:
        """The wait under way is over. Returns its seconds."""
        seconds = self.waits.get(timeout=60)
        self._turns.put(None)
        return seconds


def ended(shown: Progress, time: Time) -> None:
    thread = threading.Thread(target=shown.end)
    thread.start()
    while thread.is_alive():
        time._turns.put(None)
        thread.join(0.01)


def test_nothing_is_shown_before_two_seconds() -> None:
    time, out = Time(), Terminal()
    shown = Progress("digits", out, time.wait)
    shown.stage(lambda: "tracing")
    assert time.waits.get(timeout=60) == FIRST_S == 2.0
    ended(shown, time)
    assert out.getvalue() == ""


def test_a_line_follows_what_happens_and_is_erased() -> None:
    time, out, count = Time(), Terminal(), [5]
    shown = Progress("digits", out, time.wait)
    shown.stage(lambda: f"tracing, {count[0]} operators")
    assert time.passes() == FIRST_S
    assert time.waits.get(timeout=60) == AGAIN_S
    assert "gpumux: digits: tracing, 5 operators (2 s)" in out.getvalue()
    shown.stage(lambda: "the daemon checks")
    time._turns.put(None)
    assert time.waits.get(timeout=60) == AGAIN_S
    assert "gpumux: digits: the daemon checks" in out.getvalue()
    ended(shown, time)
    assert out.getvalue().endswith("\r\x1b[K")


def test_a_log_gets_one_quiet_line(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    time, out, said = Time(), Terminal(terminal=False), queue.SimpleQueue[None]()
    shown = Progress("digits", out, time.wait)

    class Told(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            said.put(None)
            return True

    told = Told()
    monkeypatch.setattr(progress.log, "filters", [*progress.log.filters, told])
    with caplog.at_level(logging.INFO, "gpumux.client"):
        shown.stage(lambda: "tracing")
        time.passes()
        said.get(timeout=60)
        shown.end()
    assert out.getvalue() == ""
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [("INFO", "digits: tracing")]


def test_a_submit_shows_both_of_its_stages(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    plain = Progress.stage

    def stage(self: Progress, text: object) -> None:
        assert callable(text)
        said.append(text())
        plain(self, text)

    monkeypatch.setattr(Progress, "stage", stage)
    model = nn.Linear(4, 2)
    with (
        one_thread(),
        client.submit(lambda x: model(x), example=torch.randn(3, 4), model=model, endpoint=endpoint) as job,
    ):
        at_submit = list(said)
        said.clear()
        job.step(torch.randn(5, 4)).result()  # another shape is captured
        assert not [t for t in threading.enumerate() if t.name == "gpumux-progress"]
    for texts in (at_submit, said):
        assert "tracing the step" in texts[0]
        assert texts[-1] == "the daemon checks and loads 1 operator"


def test_a_refused_submit_ends_its_line(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "FIRST_S", 60.0)
    with pytest.raises(CaptureError):
        client.submit(lambda x: x.nonzero(), example=torch.randn(3, 4), endpoint=endpoint)
    assert not [t for t in threading.enumerate() if t.name == "gpumux-progress"]
