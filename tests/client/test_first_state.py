"""Until a job's first snapshots are saved, recovery begins with the state that was submitted. The local model is the
copy of its parameters, as long as nothing overwrites it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpumux import client
from gpumux.client.recovery import LocalBytes, PushEntry
from gpumux.client.replay import BEGINNING, ReplayLog
from gpumux.errors import JobFailed, LocalWrite
from microbench import kills
from microbench.kills import Phoenix

pytestmark = pytest.mark.usefixtures("one_thread")

X = torch.linspace(-1.0, 1.0, 24).reshape(4, 6)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Phoenix]:
    """A daemon whose jobs take snapshots only when they must."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kills, "SNAPSHOT_S", 3600.0)
        made = Phoenix(tmp_path_factory.mktemp("d"))
    try:
        made.wait_until_ready()
        yield made
        made.stop()
    finally:
        made.close()


def network() -> tuple[nn.Module, Any]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    return model, optimizer


def training(model: nn.Module, optimizer: Any) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def log_of(job: client.Job) -> ReplayLog:
    recorder = job._recovery.recorder
    assert recorder is not None
    return recorder.log


def first_state(job: client.Job) -> list[LocalBytes]:
    pushed = [entry.what for entry in log_of(job).since(BEGINNING) if isinstance(entry.what, PushEntry)]
    return [what.data for what in pushed if isinstance(what.data, LocalBytes)]


Between = Callable[[nn.Module, int], None]


def compare(daemon: Phoenix, between: Between, blow: int, steps: int = 6) -> None:
    """Train plainly, and in a job whose executor is killed before step `blow`, with `between` called before each."""
    model, optimizer = network()
    plain = training(model, optimizer)
    wanted = []
    for i in range(steps):
        between(model, i)
        wanted.append(plain(X).item())
    ours, optimizer = network()
    with client.submit(
        training(ours, optimizer), example=(X,), model=ours, optimizer=optimizer, endpoint=daemon.endpoint, name="first"
    ) as job:
        found = []
        for i in range(steps):
            try:
                between(ours, i)
                if i == blow:
                    daemon.kill_executors()
                found.append(job.step(X).item())
            except LocalWrite:
                job.load_state()
                if i == blow:
                    daemon.kill_executors()
                found.append(job.step(X).item())
    assert found == wanted
    for mine, theirs in zip(ours.state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)


def nothing(model: nn.Module, i: int) -> None:
    pass


def read(model: nn.Module, i: int) -> None:
    """Overwrites the local model with the job's."""
    next(model.parameters()).sum().item()


def read_later(model: nn.Module, i: int) -> None:
    if i == 4:
        read(model, i)


def loaded_at_once(model: nn.Module, i: int) -> None:
    """A checkpoint is loaded after submit: then that is the first state."""
    if i == 0:
        model.load_state_dict({name: value.clone().add_(1) for name, value in network()[0].state_dict().items()})


@pytest.mark.every(7)
@pytest.mark.parametrize("between", [nothing, read, read_later, loaded_at_once])
@pytest.mark.parametrize("blow", [1, 3, 5])
def test_a_job_that_is_killed_before_its_first_snapshot_ends_as_undisturbed(
    between: Between, blow: int, daemon: Phoenix
) -> None:
    compare(daemon, between, blow)


def test_the_parameters_are_not_copied_until_the_local_model_is_overwritten(daemon: Phoenix) -> None:
    model, optimizer = network()
    before = [p.detach().clone() for p in model.parameters()]
    with client.submit(
        training(model, optimizer), example=(X,), model=model, optimizer=optimizer, endpoint=daemon.endpoint
    ) as job:
        job.step(X).result()
        (kept,) = first_state(job)
        assert kept._copy is None
        model[0].weight.sum().item()
        assert kept._copy is not None
        for parameter, first in zip(model.parameters(), before, strict=True):
            assert not torch.equal(parameter, first)
        at = 0
        first_of = {job._table.lookup(p)[0]: first for p, first in zip(model.parameters(), before, strict=True)}  # type: ignore[index]
        for buffer in kept._buffers:
            first = first_of[buffer]
            assert torch.equal(kept.data()[at : at + first.nbytes], first.reshape(-1).view(torch.uint8))
            at += -(-first.nbytes // 64) * 64
        assert at == kept.data().numel()


def test_a_script_that_wrote_to_the_local_model_is_not_recovered_to_what_it_wrote(daemon: Phoenix) -> None:
    """Through memory that nothing watches. The job is refused, and not continued from a wrong state."""
    model, optimizer = network()
    alias = model[0].weight.detach().numpy()
    with client.submit(
        training(model, optimizer), example=(X,), model=model, optimizer=optimizer, endpoint=daemon.endpoint
    ) as job:
        job.step(X).result()
        alias[0, 0] += 1.0
        daemon.kill_executors()
        with pytest.raises(JobFailed, match="the local model was written before the first snapshot"):
            job.sync()
        job.close(sync=False)


def test_after_a_later_load_state_a_snapshot_is_taken_at_once(daemon: Phoenix) -> None:
    """Since the state that the job began with is gone."""
    model, optimizer = network()
    with client.submit(
        training(model, optimizer), example=(X,), model=model, optimizer=optimizer, endpoint=daemon.endpoint
    ) as job:
        job.step(X).result()
        with torch.no_grad():
            model[0].weight.add_(1.0)  # fetches, and so copies the first state
        job.load_state()
        assert log_of(job).candidates(None) == [BEGINNING]
    model, optimizer = network()
    with client.submit(
        training(model, optimizer), example=(X,), model=model, optimizer=optimizer, endpoint=daemon.endpoint
    ) as job:
        alias = model[0].weight.detach().numpy()
        job.step(X).result()
        alias[0, 0] += 1.0
        job.load_state()
        assert not log_of(job).recoverable
        while not log_of(job).recoverable:
            job.step(X).result()
            threading.Event().wait(0.01)  # the writer of snapshots has the lowest priority
        daemon.kill_executors()
        job.step(X).result()
