"""Trials as jobs of a daemon: as many at a time as allowed, equal to serial training bit for bit, none left behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gpumux.errors import AdmissionRefused, DaemonGone, TrialFailed
from gpumux.tune import concurrent, tune
from gpumux.tune.sweep import Listener
from gpumux.tune.task import find, make
from microbench.daemon import RunningDaemon, running_daemon
from tests.clients.leaving import jobs_left
from tests.tune import toy

pytestmark = pytest.mark.usefixtures("one_thread")

TASK = "tests.tune.toy:factory"
SPACE = {
    "lr": {"low": 1e-3, "high": 0.3, "log": True, "fusible": True},
    "batch_size": {"choices": [8, 16]},
    "optimizer": {"choices": ["sgd", "adam"]},
    "momentum": {"low": 0.1, "high": 0.9, "fusible": True, "when": {"optimizer": "sgd"}},
}
ONE = {"lr": SPACE["lr"], "batch_size": {"choices": [8]}, "optimizer": {"choices": ["adam"]}}
HYPERBAND = {"algorithm": "hyperband", "steps": 6, "min_steps": 3, "eta": 2}


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(threads=1) as running:
        yield running


def test_equal_to_serial(daemon: RunningDaemon):
    """Scores, dropout's masks, schedules, and the state that trials continue from."""
    many = tune(TASK, SPACE, scheduler="concurrent", concurrent=3, endpoint=daemon.endpoint, **HYPERBAND)
    alone = tune(TASK, SPACE, scheduler="serial", **HYPERBAND)
    assert [(e.config, e.state, e.scores) for e in many.entries] == [
        (e.config, e.state, e.scores) for e in alone.entries
    ]
    assert many.best is not None
    assert alone.best is not None
    assert many.best.number == alone.best.number
    for name, value in many.state()["model"].items():
        assert torch.equal(value, alone.state()["model"][name]), name
    assert many.notes == {"jobs_at_once": 2}
    assert many.device_s > 0
    assert jobs_left(daemon) == []


def test_trials_that_the_daemon_may_run_as_one_equal_serial(daemon: RunningDaemon):
    """So short ones have ended before a group of them is there."""
    many = tune(TASK, SPACE, scheduler="daemon", concurrent=3, endpoint=daemon.endpoint, **HYPERBAND)
    alone = tune(TASK, SPACE, scheduler="serial", **HYPERBAND)
    assert [e.config for e in many.entries] == [e.config for e in alone.entries]
    for ours, theirs in zip(many.entries, alone.entries, strict=True):
        assert ours.scores == pytest.approx(theirs.scores, rel=1e-9)
    trained = sum(entry.steps for entry in alone.entries)
    assert (many.scheduler, many.notes["steps"], many.notes["jobs_at_once"]) == ("daemon", trained, 2)
    assert many.device_s > 0
    assert jobs_left(daemon) == []


def test_why_no_trials_ran_as_one_is_said(daemon: RunningDaemon):
    found = tune(TASK, ONE, scheduler="daemon", trials=2, steps=3, endpoint=daemon.endpoint)
    assert found.notes["steps_as_one"] == 0
    assert found.notes["none_as_one_because"].startswith("runs by itself: ")


@pytest.mark.slow
@pytest.mark.extended
def test_a_sweep_s_trials_run_as_one(one_thread: None):
    """Trials with other learning rates and betas are one group, in which each draws its own masks."""
    space = ONE | {"beta1": {"low": 0.8, "high": 0.95, "fusible": True}}
    asked = {"trials": 4, "steps": 6000}
    settings = {"GPUMUX_FUSE_GATHER_S": "0.1", "GPUMUX_FUSE_RETRY_S": "0.5"}
    with running_daemon(threads=1, settings=settings) as own:
        many = tune(TASK, space, scheduler="daemon", endpoint=own.endpoint, **asked)
    alone = tune(TASK, space, scheduler="serial", **asked)
    assert many.notes["steps"] == 4 * 6000
    assert many.notes["steps_as_one"] > 0
    for ours, theirs in zip(many.entries, alone.entries, strict=True):
        assert ours.scores == pytest.approx(theirs.scores, rel=1e-9)


@pytest.mark.extended
def test_arrays_as_jobs_equal_serial(daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Two arrays, and a survivor that then trains alone as a job of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    many = tune(TASK, ONE, scheduler="fused", endpoint=daemon.endpoint, **HYPERBAND)
    alone = tune(TASK, ONE, scheduler="serial", **HYPERBAND)
    assert many.notes["array_sizes"] == [2, 1, 2]
    assert [e.config for e in many.entries] == [e.config for e in alone.entries]
    for ours, theirs in zip(many.entries, alone.entries, strict=True):
        assert ours.scores == pytest.approx(theirs.scores, rel=1e-9)
    assert many.device_s > 0
    assert jobs_left(daemon) == []


def test_what_goes_wrong_leaves_no_job(daemon: RunningDaemon, caplog: pytest.LogCaptureFixture):
    def stops(*_: object) -> None:
        raise KeyboardInterrupt

    listener = Listener(lambda *_: None, stops, lambda *_: None, lambda *_: None)
    with pytest.raises(KeyboardInterrupt):
        tune(TASK, SPACE, trials=4, steps=5, scheduler="concurrent", endpoint=daemon.endpoint, listener=listener)
    assert jobs_left(daemon) == []
    assert "not synced" not in caplog.text


@pytest.mark.extended
def test_a_full_daemon_is_waited_for(daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch):
    """The daemon takes two jobs: the third waits until one is done; if it takes none, that is an error."""
    submitted = []
    submit = concurrent.submit

    def refuses(*args, **named):
        status = len([t for t in submitted if not t._closed])
        if status >= 2:
            raise AdmissionRefused("there is no room", "wait")
        submitted.append(submit(*args, **named))
        return submitted[-1]

    monkeypatch.setattr(concurrent, "submit", refuses)
    found = tune(TASK, SPACE, trials=4, steps=3, scheduler="concurrent", endpoint=daemon.endpoint)
    assert found.notes == {"jobs_at_once": 2}
    assert {e.state for e in found.entries} == {"complete"}

    def never(*args, **named):
        raise AdmissionRefused("there is no room", "wait")

    monkeypatch.setattr(concurrent, "submit", never)
    with pytest.raises(AdmissionRefused):
        tune(TASK, SPACE, trials=1, steps=3, scheduler="concurrent", endpoint=daemon.endpoint)


def test_no_daemon(tmp_path):
    with pytest.raises(DaemonGone):
        tune(TASK, SPACE, trials=1, steps=3, scheduler="concurrent", endpoint=f"ipc://{tmp_path}/none.sock")


def test_a_score_that_raises_names_its_trial(daemon: RunningDaemon):
    task = find(TASK)

    def score(model, config):
        raise ValueError("no validation data")

    broken = make("t", task.factory, task.batches, score, "minimize")
    with pytest.raises(TrialFailed, match=r"trial \d .*score raises ValueError: no validation data"):
        tune(broken, SPACE, trials=2, steps=2, scheduler="concurrent", endpoint=daemon.endpoint)
    assert toy.direction == "minimize"
