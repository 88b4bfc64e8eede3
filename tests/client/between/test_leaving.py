"""Rows L1 and L2 of docs/plain-loop.md, "Between two steps": how a script leaves a job."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gpumux import client, errors
from gpumux.client.session import Session
from gpumux.client.transport import Connection
from gpumux.wire import messages as m
from tests.client.between.support import DATA, X, Y, adam, assert_equal, detached, made, network, whole

LONG = 60.0


def trained(steps: int) -> Any:
    """The state at the end of the plain loop."""
    torch.manual_seed(7)
    model = network()
    optimizer = adam(model)
    step = whole(model, optimizer)
    for batch in DATA[:steps]:
        step(*batch)
    return detached((model.state_dict(), optimizer.state_dict()))


def submitted(endpoint: str, **options: Any) -> tuple[Any, Any, Any]:
    torch.manual_seed(7)
    model = network()
    optimizer = adam(model)
    body = whole(model, optimizer)
    job = client.submit(body, example=(X, Y), model=model, optimizer=optimizer, endpoint=endpoint, **options)
    return model, optimizer, job


def end_of_with(job: Any) -> None:
    with job:
        for batch in DATA[:3]:
            job.step(*batch)


def close(job: Any) -> None:
    for batch in DATA[:3]:
        job.step(*batch)
    job.close()


def error_inside(job: Any) -> None:
    with pytest.raises(ZeroDivisionError), job:  # noqa: PT012
        for batch in DATA[:3]:
            job.step(*batch)
        1 / 0


def interrupt_inside(job: Any) -> None:
    with pytest.raises(KeyboardInterrupt), job:  # noqa: PT012
        for batch in DATA[:3]:
            job.step(*batch)
        os.kill(os.getpid(), signal.SIGINT)
        signal.pause()


def exit_inside(job: Any) -> None:
    with pytest.raises(SystemExit), job:  # noqa: PT012
        for batch in DATA[:3]:
            job.step(*batch)
        sys.exit(3)


@pytest.mark.parametrize("leave", [end_of_with, close, error_inside, interrupt_inside, exit_inside])
def test_l1_what_was_trained_is_in_the_local_model(
    leave: Callable[[Any], None], endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer, job = submitted(endpoint, name="left")
    with caplog.at_level(logging.INFO, "gpumux.client"):
        leave(job)
    assert_equal((model.state_dict(), optimizer.state_dict()), trained(3))
    said = [r.getMessage() for r in caplog.records if "'left' ends" in r.getMessage()]
    assert len(said) == 1
    assert "last 3 steps trained is in the local model" in said[0]
    assert all(type(t) in (nn.Parameter, torch.Tensor) for t in model.state_dict(keep_vars=True).values())


def test_l1_a_dropped_job_lives_until_what_it_trained_was_read(endpoint: str) -> None:
    model, optimizer, job = submitted(endpoint, name="left")
    for batch in DATA[:3]:
        job.step(*batch)
    gone = weakref.ref(job)
    del job
    gc.collect()
    with pytest.warns(ResourceWarning, match=r"'left' was dropped while it was open: call job\.close\(\)"):  # noqa: PT031
        assert_equal((model.state_dict(), optimizer.state_dict()), trained(3))
        model.zero_grad()
        optimizer.state.clear()
        gc.collect()
        assert gone() is None


def test_l1_a_job_dropped_with_its_model_is_gone(endpoint: str) -> None:
    model, optimizer, job = submitted(endpoint, name="left")
    job.step(X, Y)
    gone = weakref.ref(job)
    with pytest.warns(ResourceWarning, match="'left' was dropped while it was open"):  # noqa: PT031
        del model, optimizer, job
        gc.collect()
        assert gone() is None


def test_l1_thrown_away_on_purpose(endpoint: str, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, job = submitted(endpoint)
    before = detached(model.state_dict())
    job.step(X, Y)
    with caplog.at_level(logging.INFO, "gpumux.client"):
        job.close(sync=False)
    assert_equal(model.state_dict(), before)
    assert not optimizer.state_dict()["state"]
    assert "trained" not in caplog.text


def test_l1_a_job_that_changes_no_state_fetches_nothing(endpoint: str) -> None:
    model = network().eval()
    with client.submit(lambda x: model(x), example=(X,), model=model, endpoint=endpoint) as job:
        job._remote.pull = None  # type: ignore[assignment, method-assign]
        job.step(X).result()
        model[0].weight.sum()


def test_l1_a_job_that_ended_says_that_nothing_comes(endpoint: str, caplog: pytest.LogCaptureFixture) -> None:
    model, _, job = submitted(endpoint, name="left")
    job.step(X, Y).result()
    with Session.connect(endpoint, LONG, role="control") as control:
        control.call(m.CloseJob(0, job.id, False))
    assert job._session.wait(lambda: job._remote.ended is not None, LONG)
    with pytest.raises(errors.StaleState, match="stopped the job"):
        model[0].weight.sum()
    with caplog.at_level(logging.WARNING, "gpumux.client"):
        job.close()
    assert "what its last 1 step trained could not be brought back" in caplog.text
    assert model[0].weight.sum().isfinite()


def test_l1_leaving_in_disorder_is_bounded(
    endpoint: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A paused job ends no step."""
    monkeypatch.setattr("gpumux.client.job.LEAVE_S", 0.1)
    _, _, job = submitted(endpoint, name="left")
    with caplog.at_level(logging.WARNING, "gpumux.client"), pytest.raises(ZeroDivisionError), job:  # noqa: PT012
        job.pause()
        job.step(X, Y)
        1 / 0
    assert "could not be brought back: no step ended within 0.1 s" in caplog.text


@pytest.mark.parametrize(("refusals", "room_s"), [(2, LONG), (1_000, 0.0)])
def test_l1_a_daemon_without_room_is_asked_again_and_forgets_nothing_that_was_not_fetched(
    endpoint: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, refusals: int, room_s: float
) -> None:
    """It has no descriptors, or no memory to spare, for a moment."""
    monkeypatch.setattr("gpumux.client.local_model.ROOM_S", room_s)
    monkeypatch.setattr("gpumux.client.local_model.ROOM_PAUSE_S", 0.0)
    model, optimizer, job = submitted(endpoint, name="left")
    before = detached(model.state_dict())
    for batch in DATA[:3]:
        job.step(*batch)
    call, asked, closed = job._remote.call, [], []

    def refused(make: Any, *fields: Any, **options: Any) -> Any:
        if make is m.OpenTransfer:
            asked.append(make)
            if len(asked) <= refusals:
                raise errors.AdmissionRefused("no descriptors", "close jobs")
        if make is m.CloseJob:
            closed.extend(fields)
        return call(make, *fields, **options)

    monkeypatch.setattr(job._remote, "call", refused)
    with caplog.at_level(logging.WARNING, "gpumux.client"):
        job.close()
    if room_s:
        assert_equal((model.state_dict(), optimizer.state_dict()), trained(3))
        assert closed == [True]
    else:
        assert_equal(model.state_dict(), before)
        assert "what its last 3 steps trained could not be brought back: no descriptors" in caplog.text
        assert closed == [False], "the daemon keeps its snapshots"


SCRIPT = """
import atexit, sys, torch

def look():
    torch.save((model.state_dict(), optimizer.state_dict()), sys.argv[2])

atexit.register(look)  # before gpumux is imported, so it runs after gpumux has
from tests.client.between.test_leaving import DATA, submitted

torch.set_num_threads(1)
model, optimizer, job = submitted(sys.argv[1])
for batch in DATA[:3]:
    job.step(*batch)
END
"""


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))


def stopped(number: int, frame: Any) -> None:
    raise SystemExit(number)


@pytest.fixture(params=["SIGINT", "SIGTERM", "SIGALRM", "SIGUSR1"])
def raising(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    """A signal whose handler raises an exception."""
    number = signal.Signals[request.param]
    before = signal.signal(number, stopped)
    yield number
    signal.signal(number, before)


@pytest.mark.covering
@pytest.mark.parametrize("make", [network, with_dropout])
@pytest.mark.parametrize("end", ["at once", "after more steps"])
def test_l1_an_interrupt_while_a_step_is_sent(
    make: Any, end: str, endpoint: str, raising: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step counts in full: its parameters, its count of steps and its draws."""
    post = Session.post_step

    def interrupted(*given: Any) -> None:
        monkeypatch.setattr(Session, "post_step", post)
        post(*given)
        signal.raise_signal(raising)

    found = []
    for at in (None, endpoint):
        with made(at, make) as s:
            s.train(2)
            if at is None:
                s.step(*DATA[2])
            else:
                monkeypatch.setattr(Session, "post_step", interrupted)
                with pytest.raises(SystemExit):
                    s.step(*DATA[2])
            if end == "after more steps":
                s.train(2, 3)
        found.append(detached((s.state(), torch.get_rng_state())))
    assert_equal(found[1], found[0])


@pytest.mark.parametrize("make", [network, with_dropout])
def test_m3_a_signal_handler_that_saves_the_model_while_the_program_waits(
    make: Any, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs where the thread sleeps on the sockets, and can't sleep there a second time."""
    poll = Connection.poll
    found = []
    for at in (None, endpoint):
        with made(at, make) as s:
            s.train(2)

            def handled(connection: Connection, timeout: float, model: Any = s.model) -> int:
                monkeypatch.setattr(Connection, "poll", poll)
                model.state_dict()
                return poll(connection, timeout)

            future = s.step(*DATA[2])
            if s.job is not None:
                monkeypatch.setattr(Connection, "poll", handled)
                with pytest.raises(errors.StaleState, match="set a flag"):
                    s.job._wait(lambda: False, 1.0)
                monkeypatch.setattr(Connection, "poll", poll)
            future.item()
            s.train(2, 3)
        found.append(detached((s.state(), torch.get_rng_state())))
    assert_equal(found[1], found[0])


@pytest.mark.parametrize(
    "end", ["", "sys.exit(0)", pytest.param("raise SystemExit", marks=pytest.mark.extended), "1 / 0"]
)
@pytest.mark.every(2)
def test_l1_the_end_of_the_script(end: str, endpoint: str, tmp_path: Path) -> None:
    saved = tmp_path / "state.pt"
    script = SCRIPT.replace("END", end)
    run = subprocess.run(
        [sys.executable, "-c", script, endpoint, str(saved)], capture_output=True, text=True, timeout=LONG, check=False
    )
    assert run.returncode == (1 if end == "1 / 0" else 0), run.stderr
    assert_equal(torch.load(saved, weights_only=True), trained(3))
