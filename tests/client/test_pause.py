"""A thread that waits for a paused job gets a warning, and goes on when the job is resumed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from gpumux import client
from gpumux.client import session as patience

LONG = 60.0  # seconds; a bound for a broken test
X = torch.randn(4, 6)


@contextmanager
def told(react: Callable[[], None]) -> Iterator[list[str]]:
    """The lines logged inside the block; `react()` runs at each line."""
    lines: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())
            react()

    ear = Ear()
    patience.log.addHandler(ear)
    try:
        yield lines
    finally:
        patience.log.removeHandler(ear)


@pytest.fixture
def job(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[client.Job]:
    monkeypatch.setattr(patience, "PATIENCE_S", 0.05)
    model = nn.Linear(6, 3)
    with client.submit(lambda x: model(x), example=(X,), model=model, endpoint=endpoint, name="held") as job:
        job.step(X).result(LONG)
        yield job


WAITS: dict[str, Callable[[client.Job], Any]] = {
    "sync": lambda job: job.sync(),
    "state_dict": lambda job: job.state_dict(),
    "result": lambda job: job.step(X).result(),
    "result with a timeout": lambda job: job.step(X).result(LONG),
    "a step too many": lambda job: [job.step(X) for _ in range(3)],
}


@pytest.mark.parametrize("verb", WAITS)
def test_waiting_for_a_paused_job_says_so(verb: str, job: client.Job) -> None:
    job.pause()
    job.step(X)
    with told(job.resume) as lines:
        WAITS[verb](job)
    assert len(lines) == 1
    assert "'held' is paused" in lines[0]
    assert "job.resume()" in lines[0]


def test_a_short_timeout_is_kept_without_a_word(job: client.Job) -> None:
    job.pause()
    with told(lambda: None) as lines:
        with pytest.raises(TimeoutError):
            job.step(X).result(0.01)
        assert lines == []
    job.resume()


def test_a_long_step_is_no_news(job: client.Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "PATIENCE_S", 0.0)
    with told(lambda: None) as lines:
        for _ in range(5):
            job.step(X).result()
    assert lines == []


def test_a_long_load_is_logged() -> None:
    clock = iter((0.0, 16.2, 76.2))
    loading = patience.Loading(118, True, lambda: next(clock))
    with told(lambda: None) as lines:
        assert loading() == patience.LOADING_S
        assert not lines
        assert loading() == loading() == patience.AGAIN_S
    assert [line.partition(";")[0] for line in lines] == [
        "the daemon has been checking, compiling and loading a program of 118 operators for 16 s",
        "the daemon has been checking, compiling and loading a program of 118 operators for 76 s",
    ]


def test_a_load_says_what_is_loaded(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "LOADING_S", 0.0)
    model = nn.Linear(6, 2)
    with (
        told(lambda: None) as lines,
        client.submit(lambda x: model(x), example=(X,), model=model, endpoint=endpoint) as other,
    ):
        other.step(X).result(LONG)
    assert any(
        line.startswith("the daemon has been checking and loading a program of 1 operator for 0 s") for line in lines
    ), lines
