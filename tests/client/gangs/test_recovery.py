"""Jobs over several daemons that lose a rank's process or daemon end as if nothing had happened."""

from __future__ import annotations

import math
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from gpumux import client, errors
from gpumux.cli.control import Control
from gpumux.device.workers import confinement
from microbench.daemon import running_daemon
from microbench.killed import Trial, conv_sgd, dropout_adam, gan
from microbench.kills import Phoenix, Run, differences, submit
from microbench.soaking.watch import executors

pytestmark = pytest.mark.usefixtures("one_thread")  # as the daemons here have

SEED = 11
TURNS = 20
Make = Callable[[int], Trial]


@contextmanager
def serving(directories: Sequence[Path]) -> Iterator[list[Phoenix]]:
    with ExitStack() as stack:
        made = [Phoenix(directory) for directory in directories]
        for daemon in made:
            stack.callback(daemon.close)
        for daemon in made:
            daemon.wait_until_ready()
        yield made


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Phoenix]]:
    """Two daemons for all tests of this file. A test that kills one leaves another in its place."""
    with serving([tmp_path_factory.mktemp("d") for _ in range(2)]) as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(pair: list[Phoenix]) -> Callable[[Make, int], tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """The results and the state of a number of turns over two daemons with nothing killed."""

    @cache
    def found(make: Make, count: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        run = over(pair, make)
        turns(run, count)
        run.finish()
        run.job.close()
        return run.results, run.trial.state()

    return found


def over(daemons: Sequence[Phoenix], make: Make = dropout_adam, name: str | None = None, **options: Any) -> Run:
    trial = make(SEED)
    trial = trial if name is None else replace(trial, name=name)
    return submit(trial, [daemon.endpoint for daemon in daemons], **options)


def turns(run: Run, count: int) -> None:
    for _ in range(count):
        run.turn()


def until_saved(run: Run, number: int = 1) -> None:
    """Turns until a snapshot was saved by all ranks, with pauses, because the writers have the lowest priority."""
    log = run.job._recovery.recorder.log
    while not any(point.saved and n >= number for n, point in log._points.items()):
        run.turn()
        threading.Event().wait(0.05)


def stop_executor(daemon: Phoenix, number: int = signal.SIGKILL) -> None:
    """Send a signal to the one process of the daemon that runs a job. That of an earlier job may not be gone yet."""
    while len(found := executors(daemon.process.pid)) > 1:
        threading.Event().wait(0.01)
    os.kill(found[0], number)


def same(run: Run, make: Make, undisturbed: Any) -> bool:
    """Finish the job after a multiple of TURNS turns, since a snapshot takes more or fewer of them. Whether its results
    and state are equal to the last bit to those of a job that was not disturbed."""
    turns(run, -run.turns % TURNS)
    run.finish()
    run.job.close()
    wanted = undisturbed(make, run.turns)
    return [differences(*each) for each in zip((run.results, run.trial.state()), wanted, strict=True)] == [0, 0]


def last(run: Run) -> None:
    """Three more turns, and the result of the last."""
    turns(run, 3)
    run.futures[-1].result()


def save_nothing(run: Run) -> None:
    """Take no snapshot until the job has come back."""
    run.job._recovery.snapshots._not_before = math.inf


def lines(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    return [line for record in caplog.records if words in (line := record.getMessage())]


def test_a_rank_whose_process_is_killed_brings_the_gang_back_to_the_same_bits(
    pair: list[Phoenix], undisturbed: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Before there is a snapshot, after one, and while it has just come back."""
    run = over(pair)
    save_nothing(run)
    turns(run, 3)
    stop_executor(pair[1])
    turns(run, 3)
    until_saved(run)
    stop_executor(pair[1])
    turns(run, 1)
    run.futures[-1].result()
    stop_executor(pair[0])
    turns(run, 3)
    assert same(run, dropout_adam, undisturbed)
    back = lines(caplog, "It is back after")
    assert len(back) == 3
    assert "rank 1: the process running the job died of SIGKILL" in back[0]
    assert "from its first state" in back[0]
    assert "from snapshot" in back[1]


@pytest.mark.parametrize("make", [conv_sgd, gan])
@pytest.mark.extended
def test_steps_of_many_kinds_run_again_to_the_same_bits(pair: list[Phoenix], undisturbed: Any, make: Make) -> None:
    """Running statistics and an evaluation, two optimizers and noise."""
    run = over(pair, make)
    turns(run, 4)
    stop_executor(pair[1])
    turns(run, 4)
    until_saved(run)
    turns(run, 2)
    stop_executor(pair[0])
    turns(run, 2)
    assert same(run, make, undisturbed)


@pytest.mark.extended
def test_a_daemon_that_is_killed_and_all_of_them_together(
    pair: list[Phoenix], undisturbed: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run = over(pair)
    save_nothing(run)
    turns(run, 3)
    pair[1].kill()
    turns(run, 3)
    until_saved(run)
    for daemon in pair:
        daemon.kill()
    turns(run, 3)
    assert same(run, dropout_adam, undisturbed)
    back = lines(caplog, "It is back after")
    assert len(back) == 2
    assert "is gone" in back[0]
    assert "from snapshot" in back[1]


@pytest.mark.extended
def test_a_daemon_that_leaves_in_order_saves_the_gang_first(
    pair: list[Phoenix], undisturbed: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run = over(pair)
    until_saved(run)
    leaving = threading.Thread(target=pair[0].restart)
    leaving.start()
    while leaving.is_alive():
        run.turn()
        threading.Event().wait(0.01)
    leaving.join()
    turns(run, 3)
    assert same(run, dropout_adam, undisturbed)
    assert "from snapshot" in lines(caplog, "It is back after")[0]


@pytest.mark.extended
def test_a_daemon_that_is_killed_during_submit_is_waited_for(
    pair: list[Phoenix], undisturbed: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture = client.Job.capture

    def struck(job: client.Job, *given: Any) -> Any:
        monkeypatch.setattr(client.Job, "capture", capture)
        pair[1].kill()
        return capture(job, *given)

    monkeypatch.setattr(client.Job, "capture", struck)
    run = over(pair)
    turns(run, 3)
    assert same(run, dropout_adam, undisturbed)
    assert lines(caplog, "to submit again")


@pytest.mark.extended
def test_the_newest_snapshot_that_all_ranks_have_whole_is_taken(
    pair: list[Phoenix], undisturbed: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """One rank's newest snapshot is damaged: the one before is restored on both."""
    run = over(pair)
    until_saved(run, 2)
    log = run.job._recovery.recorder.log
    newest = max(n for n, point in log._points.items() if point.saved)
    stop_executor(pair[0])
    kept = pair[1].directory / "state" / "snapshots" / str(os.getuid()) / run.job.id
    found = [path for path in kept.iterdir() if path.name.startswith(f"{newest:08d}-")]
    assert len(found) == 1, sorted(path.name for path in kept.iterdir())
    found[0].write_bytes(found[0].read_bytes()[:-1])
    last(run)
    (back,) = lines(caplog, "It is back after")
    assert f"from snapshot {newest}" not in back
    assert same(run, dropout_adam, undisturbed)


def test_a_gang_whose_snapshots_are_lost_on_one_rank_says_so(pair: list[Phoenix]) -> None:
    run = over(pair, replay_bytes=100_000)
    log = run.job._recovery.recorder.log
    until_saved(run)
    while 0 in log._points:  # the beginning
        until_saved(run, max(log._points) + 1)
    shutil.rmtree(pair[1].directory / "state" / "snapshots" / str(os.getuid()))
    stop_executor(pair[0])
    with pytest.raises(errors.JobFailed, match="can't come back") as error:
        last(run)
    assert error.value.remedy
    run.job.close(drain=False)


def test_a_process_that_stands_still_costs_its_peers_time_and_no_training(
    pair: list[Phoenix], undisturbed: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run = over(pair, peers_timeout_s=1.0)
    turns(run, 3)
    stop_executor(pair[1], signal.SIGSTOP)
    turns(run, 3)
    assert same(run, dropout_adam, undisturbed)
    back = lines(caplog, "It is back after")  # more than once where the machine is too busy for peers to answer in time
    assert back
    if confinement.measures()[0].missing:  # else it runs as its job's user, and is ended when it is stopped
        assert any("did not answer within 1 s" in line for line in back)


@pytest.mark.extended
def test_a_daemon_that_stays_away_ends_the_job_with_an_error(pair: list[Phoenix]) -> None:
    run = over(pair, reconnect_s=0.5)
    turns(run, 3)
    pair[1].stop()
    with pytest.raises(errors.DaemonGone, match="could not be had back within") as error:
        last(run)
    assert error.value.remedy
    run.job.close(drain=False)
    pair[1].restart()
    pair[1].wait_until_ready()


@pytest.mark.extended
def test_a_step_that_fails_is_not_run_again_and_the_error_is_its_own(
    pair: list[Phoenix], caplog: pytest.LogCaptureFixture
) -> None:
    """An index out of range on one rank: the other rank loses its peer, which is not the reason. The model's state
    has a part in the index, so that no check of the batch finds it before the step is sent."""
    table = torch.nn.Embedding(10, 4)
    table.register_buffer("shift", torch.zeros(()))
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = table((x + table.shift).long()).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    good, bad = torch.arange(8.0), torch.arange(3.0, 11.0)
    job = client.submit(
        step, example=good, model=table, optimizer=optimizer, endpoints=[daemon.endpoint for daemon in pair]
    )
    job.step(good).result()
    with pytest.raises(errors.GpumuxError, match=r"rank 1: .*index"):
        job.step(bad).result()
    job.close(drain=False)
    assert not lines(caplog, "It is back after")


def test_a_rank_that_an_operator_stops_stays_stopped(pair: list[Phoenix]) -> None:
    run = over(pair)
    turns(run, 1)
    with Control(pair[1].endpoint, 60.0) as control:
        control.change("stop", run.job.id)
    with pytest.raises(errors.JobClosed):
        last(run)
    run.job.close(drain=False)


def test_state_of_a_rank_alone_is_not_resumed(pair: list[Phoenix]) -> None:
    run = over(pair, name="half")
    turns(run, 1)
    with pytest.raises(errors.ConfigError, match="can't be resumed"):
        run.job.close(keep=True)
    until_saved(run)
    run.job.close(drain=False)
    with pytest.raises(errors.ConfigError, match="over several daemons"):
        submit(run.trial, pair[0].endpoint, resume="half")


def test_nothing_is_kept_of_a_gang_that_was_closed(pair: list[Phoenix]) -> None:
    run = over(pair, name="over")
    until_saved(run)
    run.job.close()
    with pytest.raises(errors.UnknownJob):
        submit(run.trial, pair[1].endpoint, resume="over")


@pytest.mark.extended
def test_a_gang_with_a_daemon_that_keeps_no_snapshots_does_not_come_back(
    pair: list[Phoenix], caplog: pytest.LogCaptureFixture
) -> None:
    with running_daemon() as other:
        run = submit(dropout_adam(SEED), [pair[0].endpoint, other.endpoint])
        assert other.endpoint in lines(caplog, "keeps no snapshots")[0]
        turns(run, 3)
        stop_executor(pair[0])
        with pytest.raises(errors.ExecutorCrashed, match="rank 0"):
            last(run)
        run.job.close(drain=False)
