"""Jobs and a real coordinator, with real daemons: nodes drain and die, the coordinator dies."""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from gpumux import client
from gpumux.client.session import Session
from gpumux.wire import messages as m
from microbench.killed import Trial, dropout_adam, plain
from microbench.kills import Run, differences
from tests.client.placed.coordinator import serving
from tests.client.placed.trials import close, wide
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


@pytest.mark.extended
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


def placed(trial: Trial, coordinator: RunningCoordinator, **options: Any) -> Run:
    """A gang of two."""
    job = client.submit(
        trial.functions["step"], example=trial.turn(0)[0][1], model=trial.models, optimizer=trial.optimizers,
        cluster=coordinator.endpoint, gpus=2, **options,
    )  # fmt: skip
    return Run(trial, job, {"step": job.step})


@pytest.mark.extended
def test_a_gang_that_lost_a_node_goes_on_alone_and_one_that_may_not_waits(place: Path):
    """No other node is left for either."""
    with ExitStack() as stack:
        daemons = serving(stack, place, 2)
        file = place / "cluster.toml"
        ends = [f'[[daemons]]\nendpoint = "{daemon.endpoint}"\n' for daemon in daemons]
        file.write_text("".join(ends))
        coordinator = RunningCoordinator([str(file)], place)
        stack.callback(coordinator.process.kill)
        trial, other = wide(SEED), wide(SEED + 1)
        run = placed(trial, coordinator, priority="high", seed=SEED)
        strict = placed(other, coordinator, min_gpus=2, seed=SEED + 1)
        with run.job:
            for _ in range(3):
                run.turn()
                strict.turn()
            while run.job._recovery._copy._read is None or strict.job._recovery._copy._read is None:
                run.turn()
                strict.turn()
            daemons[1].process.kill()
            daemons[1].process.wait()
            file.write_text(ends[0])
            coordinator.process.send_signal(signal.SIGHUP)  # at once, and not only after a daemon was away for long
            for _ in range(5):
                run.turn()
            while ask(coordinator, m.GetStatus(0)).body["jobs"][1]["state"] != "waiting":
                run.turn()
            said = " ".join(ask(coordinator, m.ExplainJob(0, strict.job.id)).body["sentences"])
            assert "1 of the 2 devices that it was submitted for are left, and it may not go on with fewer" in said
            said = " ".join(ask(coordinator, m.ExplainJob(0, run.job.id)).body["sentences"])
            assert "It was submitted for 2 devices and goes on with 1" in said
            run.finish()
        alone = wide(SEED)
        close(run.results, plain(alone, run.turns))
        close(run.trial.state(), alone.state())
        file.write_text("".join(ends))
        daemons[1].kill()
        daemons[1].wait_until_ready()
        coordinator.process.send_signal(signal.SIGHUP)
        with strict.job:
            strict.turn()
            strict.finish()
        alone = wide(SEED + 1)
        close(strict.results, plain(alone, strict.turns))
        assert coordinator.stop() == 0
        for daemon in daemons:
            daemon.stop()
