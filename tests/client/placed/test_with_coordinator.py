"""A job and a real coordinator, with real daemons: its node drains, the coordinator dies, its node dies."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from gpumux import client
from gpumux.client.session import Session
from gpumux.wire import messages as m
from microbench.killed import dropout_adam, plain
from microbench.kills import Run, differences
from tests.client.placed.coordinator import serving
from tests.coordinator.live import RunningCoordinator

SEED = 29

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory with a short name, for sockets."""
    made = Path(tempfile.mkdtemp(prefix="gm-"))
    yield made
    shutil.rmtree(made)


def ask(coordinator: RunningCoordinator, request: Any) -> Any:
    with Session.connect(coordinator.endpoint, 20.0, role="control") as session:
        return session.call(request)[0]


def nodes_of(coordinator: RunningCoordinator) -> list[str]:
    (job,) = ask(coordinator, m.GetStatus(0)).body["jobs"]
    return list(job["nodes"])


def turns_until_elsewhere(run: Run, endpoint: str) -> None:
    while run.job._session.endpoint == endpoint:
        run.turn()


def test_a_job_outlives_its_nodes_and_its_coordinator(place: Path):
    with ExitStack() as stack:
        daemons = serving(stack, place, 2)
        coordinator = RunningCoordinator([daemon.endpoint for daemon in daemons], place)
        stack.callback(coordinator.process.kill)
        trial = dropout_adam(SEED)
        job = client.submit(
            trial.functions["step"], example=trial.turn(0)[0][1], model=trial.models, optimizer=trial.optimizers,
            rng="own", seed=SEED, cluster=coordinator.endpoint,
        )  # fmt: skip
        run = Run(trial, job, {"step": job.step})
        with job:
            for _ in range(5):
                run.turn()
            first = job._session.endpoint
            (node,) = nodes_of(coordinator)
            ask(coordinator, m.DrainNode(0, node, True))
            turns_until_elsewhere(run, first)
            ask(coordinator, m.DrainNode(0, node, False))
            coordinator.kill()
            for _ in range(5):
                run.turn()
            coordinator.start()
            stack.callback(coordinator.process.kill)
            second = job._session.endpoint
            assert second != first
            while job._recovery._copy._read is None or nodes_of(coordinator) == [node]:
                run.turn()
            victim = next(daemon for daemon in daemons if daemon.endpoint == second)
            victim.process.kill()
            victim.process.wait()
            turns_until_elsewhere(run, second)
            run.turn()
            run.finish()
        alone = dropout_adam(SEED)
        assert differences(run.results, plain(alone, run.turns)) == 0
        assert differences(run.trial.state(), alone.state()) == 0
        assert ask(coordinator, m.GetStatus(0)).body["jobs"] == []
        assert coordinator.stop() == 0
        next(daemon for daemon in daemons if daemon is not victim).stop()
