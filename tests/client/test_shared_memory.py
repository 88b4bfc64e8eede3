"""`memory="shared"`: jobs that take turns with memory for temporaries compute what they compute alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpumux import client, errors
from gpumux.client import Job
from gpumux.client.session import Session
from gpumux.wire import messages as m
from microbench.daemon import RunningDaemon, running_daemon
from microbench.shared_memory import executors
from microbench.wave_limit import private_bytes

pytestmark = pytest.mark.filterwarnings("ignore::gpumux.errors.SimulatedDeviceWarning")

LIMIT = 20 << 20  # bytes: one job's state and temporaries, and not two's


@pytest.fixture(scope="module", params=["cpu", "sim"])
def daemon(request: pytest.FixtureRequest) -> Iterator[RunningDaemon]:
    with running_daemon(threads=1, device=request.param, settings={"GPUMUX_MAX_BYTES_PER_USER": str(LIMIT)}) as running:
        yield running


def deep() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh())], nn.Linear(64, 10))


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(5)
    return [
        (torch.randn(4096, 64, generator=draw), torch.randint(0, 10, (4096,), generator=draw)) for _ in range(count)
    ]


def trained(steps: int) -> dict[str, torch.Tensor]:
    model = deep()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.state_dict()


def submit(daemon: RunningDaemon, **options: object) -> tuple[nn.Module, Job]:
    model = deep()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    job = client.submit(
        step, example=batches(1)[0], model=model, optimizer=optimizer, endpoint=daemon.endpoint, **options
    )
    return model, job


def test_two_jobs_fit_that_do_not_fit_beside_each_other(daemon: RunningDaemon, one_thread: None) -> None:
    """And each ends with the bits of a run alone."""
    first, one = submit(daemon, name="one", memory="shared")
    with one:
        with pytest.raises(errors.AdmissionRefused, match="the most one user may have"):
            submit(daemon, name="alone")
        second, two = submit(daemon, name="two", memory="shared")
        with two:
            status = daemon.status()
            charged = [
                job["memory_bytes"] for job in status["jobs"] if job["name"] != "alone"
            ]  # it may still be closing
            used = status["memory"]["total_bytes"] - status["memory"]["free_bytes"]
            assert len(charged) == 2
            assert max(charged) <= used < sum(charged) - LIMIT / 3, "what both need in turns counts once"
            for x, y in batches(6):
                one.step(x, y)
                two.step(x, y)
            one.sync()
            two.sync()
    if daemon.status()["device"]["kind"] == "cpu":
        want = trained(6)
        for model in (first, second):
            assert all(torch.equal(want[name], value) for name, value in model.state_dict().items())


@pytest.mark.extended
def test_what_a_step_no_longer_needs_goes_back_to_the_kernel(one_thread: None) -> None:
    """Or another job's process could not have it. A job with memory of its own keeps it for its next step."""
    grown: dict[str, int] = {}
    with running_daemon(threads=1) as daemon:
        for memory in ("shared", "own"):
            while executors(daemon.process.pid):  # of the job before, which ends a moment after it was closed
                threading.Event().wait(0.01)
            _, job = submit(daemon, memory=memory)
            with job:
                (pid,) = executors(daemon.process.pid)
                before = private_bytes(pid)
                for x, y in batches(3):
                    job.step(x.repeat(16, 1), y.repeat(16)).result()
                grown[memory] = private_bytes(pid) - before
                charged = daemon.status()["jobs"][0]["memory_bytes"]
    assert charged > 150 << 20
    assert grown["shared"] < charged / 4
    assert grown["own"] > charged / 2, "else this test shows nothing"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"memory": "ours"}, "memory is 'ours'"),
        ({"memory": "shared", "priority": "high"}, 'memory="shared" is for low jobs'),
        ({"memory": "shared", "waves": 2}, "does not go together with memory"),
        ({"memory": "shared", "endpoints": ["ipc:///a", "ipc:///b"]}, "memory= is given, and several daemons"),
    ],
    ids=["another word", "high", "waves", "several daemons"],
)
def test_what_does_not_go_together_is_refused_by_name(options: dict[str, object], says: str) -> None:
    model = deep()
    with pytest.raises(errors.ConfigError, match=says):
        client.submit(lambda x: model(x), example=(torch.randn(2, 64),), model=model, **options)


def test_a_job_that_shares_memory_stays_low(daemon: RunningDaemon) -> None:
    _, job = submit(daemon, memory="shared")
    with (
        job,
        Session.connect(daemon.endpoint, role="control") as session,
        pytest.raises(errors.Refused, match="a high job waits for none"),
    ):
        session.call(m.ChangeJob(0, job.id, 1, None))
