"""Jobs and sessions that are dropped without close(): they end without a wait, and the daemon learns of it."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpumux import client, errors
from gpumux.client.session import Session
from gpumux.wire import messages as m

LONG = 60.0  # seconds; a bound for a broken test
X, Y = torch.randn(4, 6), torch.tensor([0, 1, 2, 0])


def keepers() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name == "gpumux-session"}


def jobs(endpoint: str) -> list[str]:
    with Session.connect(endpoint, LONG, role="control") as control:
        return [job["name"] for job in control.call(m.GetStatus(0))[0].body["jobs"]]


def wait_until_gone(name: str, endpoint: str) -> None:
    """The daemon unloads a job after its client's goodbye; a broken one keeps it until the test times out."""
    while name in jobs(endpoint):
        threading.Event().wait(0.02)


def train(model: nn.Module, endpoint: str, **options: Any) -> None:
    """Submits, trains, and forgets to close."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    job = client.submit(step, example=(X, Y), model=model, optimizer=optimizer, endpoint=endpoint, **options)
    float(job.step(X, Y))
    model.state_dict()  # else the stale model would keep the job alive


def forget(model: nn.Module, endpoint: str, name: str) -> set[threading.Thread]:
    """Drops an open job. Returns its threads."""
    before = keepers()
    train(model, endpoint, name=name)
    ours = keepers() - before
    gc.collect()
    return ours


def test_a_dropped_job_says_so_and_is_gone(endpoint: str) -> None:
    model = nn.Linear(6, 3)
    with pytest.warns(ResourceWarning, match=r"'forgotten' was dropped .*: call job\.close\(\)"):
        ours = forget(model, endpoint, "forgotten")
    for thread in ours:
        thread.join(LONG)
        assert not thread.is_alive()
    wait_until_gone("forgotten", endpoint)
    assert model(X).shape == (4, 3), "nothing holds newer state any more"
    with pytest.warns(ResourceWarning):  # the model can be submitted again
        forget(model, endpoint, "again")
    wait_until_gone("again", endpoint)


def test_a_closed_job_says_nothing(endpoint: str) -> None:
    model = nn.Linear(6, 3)
    job = client.submit(lambda x: model(x), example=(X,), model=model, endpoint=endpoint)
    job.close()
    gone = weakref.ref(job)
    del job
    gc.collect()  # warnings are errors
    assert gone() is None


def test_the_collector_may_come_in_any_thread_at_any_moment(endpoint: str) -> None:
    """Also under the locks of the dropped session's own thread, and while another job is at work."""
    model, other = nn.Linear(6, 3), nn.Linear(6, 3)
    with client.submit(lambda x: other(x), example=(X,), model=other, endpoint=endpoint) as job:
        for _ in range(3):
            with job._session._pump._lock, pytest.warns(ResourceWarning):  # as if this thread were sending
                forget(model, endpoint, "forgotten")
            job.step(X).result(LONG)
        wait_until_gone("forgotten", endpoint)


def test_a_dropped_session_is_closed(endpoint: str) -> None:
    before = keepers()
    session = Session.connect(endpoint, LONG)
    ours = keepers() - before
    session.call(m.GetStatus(0))
    del session
    gc.collect()
    for thread in ours:
        thread.join(LONG)
        assert not thread.is_alive()


def test_a_dead_session_is_closed_too(endpoint: str) -> None:
    before = keepers()
    session = Session.connect(endpoint, LONG)
    ours = keepers() - before
    session._pump.die(RuntimeError("lost"))  # type: ignore[arg-type]
    del session
    gc.collect()
    for thread in ours:
        thread.join(LONG)
        assert not thread.is_alive()


def test_a_fork_leaves_a_dropped_job_to_its_parent(endpoint: str) -> None:
    model = nn.Linear(6, 3)
    job = client.submit(lambda x: model(x), example=(X,), model=model, endpoint=endpoint, name="parent")
    child = os.fork()
    if child == 0:
        try:
            del job
            gc.collect()
        finally:
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert job.step(X).result(LONG).shape == (4, 3), "the parent's job is none the worse"
    assert "parent" in jobs(endpoint)
    job.close()


def test_a_job_that_another_client_stops_says_so(endpoint: str) -> None:
    model = nn.Linear(6, 3)
    with client.submit(lambda x: model(x), example=(X,), model=model, endpoint=endpoint) as job:
        with Session.connect(endpoint, LONG, role="control") as control:
            control.call(m.CloseJob(0, job.id, False))
        assert job._session.wait(lambda: job._remote.ended is not None, LONG)
        with pytest.raises(errors.JobClosed, match=f"user {os.getuid()} stopped the job"):
            job.step(X)
