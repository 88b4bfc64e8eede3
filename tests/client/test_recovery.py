"""Jobs that lose their daemon, their executor, their snapshots or their client, and end as if nothing had happened."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from gpumux import client
from gpumux.client import job as job_module
from gpumux.client.recovery import MAX_CRASHES, Recovery
from gpumux.errors import ConfigError, JobFailed, SnapshotFailed, UnknownJob
from microbench.killed import Trial, accumulate_adamw, conv_sgd, dropout_adam, gan, plain
from microbench.kills import Phoenix, Run, differences, submit

SEED = 11
EXTENDED = pytest.mark.extended


pytestmark = pytest.mark.usefixtures("one_thread")  # as the daemons here have


@contextmanager
def serving(directory: Path) -> Iterator[Phoenix]:
    made = Phoenix(directory)
    try:
        made.wait_until_ready()
        yield made
        made.stop()
    finally:
        made.close()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Phoenix]:
    """A daemon for the tests that don't kill it."""
    with serving(tmp_path_factory.mktemp("d")) as made:
        yield made


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Phoenix]:
    with serving(tmp_path) as made:
        yield made


def turns(run: Run, count: int) -> None:
    for _ in range(count):
        run.turn()


def until_saved(run: Run, number: int = 1) -> None:
    """Turns until a snapshot was confirmed, with pauses, because the writer of snapshots has the lowest priority."""
    log = run.job._recovery.recorder.log
    while not any(point.saved and n >= number for n, point in log._points.items()):
        run.turn()
        threading.Event().wait(0.01)


def as_undisturbed(run: Run, make: Any) -> None:
    run.finish()
    alone: Trial = make(SEED)
    assert differences(run.results, plain(alone, run.turns)) == 0
    assert differences(run.trial.state(), alone.state()) == 0


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The logged lines without those that depend on how long something takes."""
    lines = [record.getMessage() for record in caplog.records if record.name == "gpumux.client"]
    return [
        line
        for line in lines
        if not line.endswith("waiting for it to come back") and not line.startswith("the daemon has been ")
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)  # several daemons start, and machines are busy
def test_jobs_whose_daemon_is_killed_end_as_undisturbed(
    victim: Phoenix, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """Once while one is submitted, once when there is a snapshot, and once while they come back."""
    capture = client.Job.capture

    def struck(job: client.Job, *given: Any) -> Any:
        monkeypatch.setattr(client.Job, "capture", capture)
        victim.kill()
        return capture(job, *given)

    monkeypatch.setattr(client.Job, "capture", struck)
    makes = (conv_sgd, accumulate_adamw)
    runs = [submit(make(SEED), victim.endpoint) for make in makes]
    assert "to submit again" in said(caplog)[0]
    for run in runs:
        turns(run, 3)
        until_saved(run)
    victim.kill()
    turns(runs[0], 3)
    victim.kill()  # the others were not back yet
    for run, make in zip(runs, makes, strict=True):
        turns(run, 9)
        as_undisturbed(run, make)
        run.job.close()
    lines = said(caplog)
    for run in runs:
        mine = [line for line in lines if f"job '{run.trial.name}'" in line and "It is back after" in line]
        assert 1 <= len(mine) <= 2
        assert "is gone" in mine[0]
        assert "from snapshot" in mine[-1]


@pytest.mark.parametrize(
    "fusible",
    [pytest.param(False, id="draws in the daemon"), pytest.param(True, id="draws in the client", marks=EXTENDED)],
)
def test_an_executor_that_is_killed(
    fusible: bool, daemon: Phoenix, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """And Ctrl-C during the recovery: the half that was done is not used."""
    rerun = Recovery._run_again

    def interrupted(*given: Any) -> None:
        monkeypatch.setattr(Recovery, "_run_again", rerun)
        raise KeyboardInterrupt

    run = submit(dropout_adam(SEED), daemon.endpoint, fusible=fusible)
    with run.job:
        until_saved(run)
        turns(run, 1)
        daemon.kill_executors()
        monkeypatch.setattr(Recovery, "_run_again", interrupted)
        with pytest.raises(KeyboardInterrupt):
            turns(run, 10)
        turns(run, 10)
        as_undisturbed(run, dropout_adam)
    assert "SIGKILL" in said(caplog)[0]


def test_a_process_that_ends_before_its_step_is_sent_again_is_not_the_steps_fault(
    daemon: Phoenix, monkeypatch: pytest.MonkeyPatch
):
    """The fork server may have ended, or another rank's process, more often than a step may crash its own."""
    restore, kills = Recovery._restore, []

    def killed(self: Recovery, replay: Any) -> Any:
        found = restore(self, replay)
        if len(kills) <= MAX_CRASHES:
            kills.append(self.session)
            daemon.kill_executors()
            assert self.session.wait(lambda: self._remote.ended is not None, 60.0)
        return found

    run = submit(dropout_adam(SEED), daemon.endpoint)
    with run.job:
        until_saved(run)
        monkeypatch.setattr(Recovery, "_restore", killed)
        daemon.kill_executors()
        turns(run, 10)
        as_undisturbed(run, dropout_adam)
    assert len(kills) == MAX_CRASHES + 1


def snapshots(daemon: Phoenix, run: Run) -> list[Path]:
    return sorted(
        (Path(daemon.directory) / "state" / "snapshots" / str(os.getuid()) / run.job.id).glob("*.safetensors")
    )


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.timeout(900)  # several daemons start, and machines are busy
def test_what_else_may_happen_when_a_daemon_goes(
    victim: Phoenix, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """In one test, because a start of a daemon takes seconds."""
    restarted_in_order(victim, caplog)
    caplog.clear()
    one_death_of_three_jobs(victim, caplog)
    a_step_that_writes_into_its_batch(victim, monkeypatch)


def restarted_in_order(victim: Phoenix, caplog: pytest.LogCaptureFixture) -> None:
    run = submit(dropout_adam(SEED), victim.endpoint)
    with run.job:
        until_saved(run)
        turns(run, 5)
        victim.restart()
        turns(run, 10)
        as_undisturbed(run, dropout_adam)
    assert any(words in said(caplog)[-1] for words in ("the daemon is leaving", "the daemon left"))


def one_death_of_three_jobs(victim: Phoenix, caplog: pytest.LogCaptureFixture) -> None:
    damaged = submit(conv_sgd(SEED), victim.endpoint)
    until_saved(damaged, 2)
    turns(damaged, 3)
    lost = submit(accumulate_adamw(SEED), victim.endpoint)
    turns(lost, 2)
    lost.job._recovery.recorder.log.give_up()  # as when no snapshot succeeds
    trial = dropout_adam(SEED)
    paused = submit(trial, victim.endpoint)
    paused.job.pause()
    futures = [paused.job.step(*trial.turn(i)[0][1]) for i in range(2)]
    victim.process.kill()
    victim.process.wait()
    *_, older, newest = snapshots(victim, damaged)
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 4
    newest.write_bytes(data)
    victim.kill()  # starts another
    waiting_and_polling(paused, futures)
    a_damaged_snapshot(damaged, older, newest, caplog)
    nothing_saved_and_too_much_to_run_again(lost)


def waiting_and_polling(run: Run, futures: list[Any]) -> None:
    """Unanswered futures get their values, `done()` does not wait, and a paused job is paused after recovery."""
    with run.job:
        assert not futures[1].done()
        with pytest.raises(TimeoutError):
            futures[1].result(timeout=0.01)
        assert run.job.stats()["paused"]
        run.job.resume()
        assert [f.item() for f in futures] == [r.item() for r in plain(dropout_adam(SEED), 2)]


def a_damaged_snapshot(run: Run, older: Path, newest: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The damage is found and logged, and the snapshot before is used."""
    with run.job:
        turns(run, 5)
        as_undisturbed(run, conv_sgd)
    mine = [line for line in said(caplog) if f"job '{run.trial.name}'" in line]
    damaged, back = mine
    assert f"snapshot {int(newest.name[:8])} is damaged; {int(older.name[:8])} is used" in damaged
    assert f"from snapshot {int(older.name[:8])}" in back


def nothing_saved_and_too_much_to_run_again(run: Run) -> None:
    with pytest.raises(JobFailed, match="can't come back"):
        turns(run, 9)
    with pytest.raises(JobFailed, match="can't come back"):
        run.job.sync()
    run.job.close()


def test_a_disk_that_takes_nothing(daemon: Phoenix, caplog: pytest.LogCaptureFixture):
    """Training goes on with a warning, and a later loss of the daemon raises an error that says why."""
    trial = dropout_adam(SEED)
    blocked = Path(daemon.directory) / "state" / "snapshots" / str(os.getuid())
    aside = blocked.with_name("aside")
    if blocked.exists():
        blocked.rename(aside)
    blocked.write_text("in the way")
    step = trial.functions["step"]
    job = client.submit(
        step, example=trial.turn(0)[0][1], model=trial.models, optimizer=trial.optimizers, endpoint=daemon.endpoint,
        name="full", seed=SEED, replay_bytes=400_000,
    )  # fmt: skip
    run = Run(trial, job, {"step": job.step})
    try:
        turns(run, 120)  # 8 KiB each: more than may be kept
        assert "could not be saved" in said(caplog)[0]
        assert "holds all it may keep" in said(caplog)[1]
        assert len(said(caplog)) == 2
        with pytest.raises(SnapshotFailed):
            job.close(keep=True)
        results = len(plain(dropout_adam(SEED), 120))
        assert len(run.results) + len(run.futures) == results
        blocked.unlink()
        job._recovery.snapshots._not_before = 0.0
        until_saved(run)
        assert "saved again" in said(caplog)[2]
        assert job._recovery.save()  # the steps since then may be more than it may keep, too
        daemon.kill_executors()
        turns(run, 3)
        as_undisturbed(run, dropout_adam)
    finally:
        job.close()
        if blocked.is_file():
            blocked.unlink()
        shutil.rmtree(aside, ignore_errors=True)  # of jobs that are over


@pytest.mark.every(3)
@pytest.mark.parametrize("kept", [False, True], ids=["drew in the daemon", "drew in the client"])
@pytest.mark.parametrize("resumed", [False, True], ids=["draws in the daemon", "draws in the client"])
def test_a_job_that_was_kept_goes_on_in_another_program(kept: bool, resumed: bool, daemon: Phoenix):
    """Parameters, statistics, optimizer state, step counters, hyperparameters and the generator: all from the
    snapshot. A fusible job has its own generator in the client."""
    run = submit(gan(SEED), daemon.endpoint, fusible=kept)
    turns(run, 9)
    run.results += [future.result() for future in run.futures]
    run.job.close(keep=True)
    fresh = gan(SEED + 1)  # another start, which the snapshot overwrites
    again = submit(fresh, daemon.endpoint, resume=fresh.name, fusible=resumed)
    assert again.job.resumed_steps == 9
    assert again.job.id == run.job.id
    again.turns = 9
    turns(again, 8)
    again.finish()
    again.job.close()
    alone = gan(SEED)
    assert differences(run.results + again.results, plain(alone, 17)) == 0
    assert differences(fresh.state(), alone.state()) == 0
    with pytest.raises(UnknownJob, match="no job called"):  # it was finished
        submit(gan(SEED), daemon.endpoint, resume=fresh.name)


def test_l2_a_client_that_died_is_resumed_from_the_last_snapshot(daemon: Phoenix):
    run = submit(conv_sgd(SEED), daemon.endpoint)
    turns(run, 30)  # the rate is lowered after 25
    until_saved(run)
    turns(run, 3)
    run.job.close(drain=False)  # as a program does that fails: nothing is drained or synced
    again = submit(conv_sgd(SEED + 1), daemon.endpoint, resume="convolutions, SGD")
    with again.job:
        done = again.job.resumed_steps
        assert 0 < done <= run.turns
        groups = [group for optimizer in again.trial.optimizers for group in optimizer.param_groups]
        rates = [group["lr"] for group in groups]  # as they were at the snapshot
        for _ in range(done):
            again.trial.between(0)  # the program advances its own schedule
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate  # the restored rates are lowered already
        again.turns = done
        turns(again, 5)
        again.finish()
    alone = conv_sgd(SEED)
    expected = plain(alone, done + 5)
    assert differences(again.results, expected[len(expected) - len(again.results) :]) == 0
    assert differences(again.trial.state(), alone.state()) == 0


@pytest.mark.extended
def test_draws_from_the_clients_generator_come_back_as_they_were(daemon: Phoenix):
    """Steps that run again draw the same numbers, also if the script drew others meanwhile. The executor is killed: a
    job comes back from the death of its daemon in the same way."""
    seen = []
    torch.manual_seed(SEED)
    run = submit(dropout_adam(SEED), daemon.endpoint, rng="client")
    torch.manual_seed(SEED)
    with run.job:
        for count in (3, 2):
            for _ in range(count):
                run.turn()
                seen.append(torch.rand(3))
            _until_saved(run, seen)
            daemon.kill_executors()
        run.turn()
        run.finish()
    alone = dropout_adam(SEED)
    torch.manual_seed(SEED)
    results, drawn = [], []
    for i in range(run.turns):
        results += [alone.functions[name](*batch).detach().clone() for name, batch in alone.turn(i)]
        if len(drawn) < len(seen):
            drawn.append(torch.rand(3))
    assert differences(run.results, results) == 0
    assert differences(run.trial.state(), alone.state()) == 0
    assert differences(seen, drawn) == 0


def a_step_that_writes_into_its_batch(victim: Phoenix, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it wrote is in the script's tensor once, also where the daemon dies while the script waits for it."""

    def step(x: torch.Tensor) -> torch.Tensor:
        weight.mul_(0.5)
        return x.add_(weight).sum()

    answered, deaths = job_module._answered, iter([False, True])

    def wait(future: Any) -> bool:
        if next(deaths, False):
            victim.kill()
        return answered(future)

    module = torch.nn.Module()
    module.register_buffer("weight", torch.full((4,), 8.0))
    weight, x = module.weight, torch.zeros(4)
    monkeypatch.setattr(job_module, "_answered", wait)
    with client.submit(step, example=(x,), model=module, endpoint=victim.endpoint) as job:
        expected = 0.0
        for i in range(4):
            expected += 8.0 / 2 ** (i + 1)
            assert job.step(x).result() == 4 * expected
            assert torch.equal(x, torch.full((4,), expected))


def _until_saved(run: Run, seen: list[torch.Tensor]) -> None:
    """Turns until one more snapshot is confirmed, with a draw of the script's after each."""
    log = run.job._recovery.recorder.log
    before = max(log._points, default=0)
    while not any(point.saved and n > before for n, point in log._points.items()):
        run.turn()
        seen.append(torch.rand(3))
        threading.Event().wait(0.01)


def test_a_program_that_goes_on_draws_from_where_the_snapshot_was_taken(daemon: Phoenix):
    torch.manual_seed(SEED)
    run = submit(dropout_adam(SEED), daemon.endpoint, rng="client")
    torch.manual_seed(SEED)
    turns(run, 3)
    torch.rand(3)
    left = torch.get_rng_state()
    run.finish()
    run.job.close(keep=True)
    torch.manual_seed(99)  # the program that goes on has drawn its own initial values
    again = submit(dropout_adam(SEED), daemon.endpoint, resume="dropout, Adam", rng="client")
    with again.job:
        assert torch.equal(torch.get_rng_state(), left)
        again.turns = 3
        turns(again, 3)
        again.finish()
    alone = dropout_adam(SEED)
    torch.manual_seed(SEED)
    expected = []
    for i in range(6):
        if i == 3:
            torch.rand(3)
        expected += [alone.functions[name](*batch).detach().clone() for name, batch in alone.turn(i)]
    assert differences(again.results, expected[3:]) == 0
    assert differences(again.trial.state(), alone.state()) == 0


def test_another_model_does_not_go_on_from_it(daemon: Phoenix):
    run = submit(dropout_adam(SEED), daemon.endpoint)
    turns(run, 2)
    run.job.close(keep=True)
    other = gan(SEED)
    before = other.state()
    with pytest.raises(ConfigError, match="not the job that was kept"):
        submit(other, daemon.endpoint, resume="dropout, Adam")
    assert differences(other.state(), before) == 0
    again = submit(dropout_adam(SEED), daemon.endpoint, resume="dropout, Adam")
    again.job.close()


def test_it_is_off_when_asked(daemon: Phoenix):
    trial = dropout_adam(SEED)
    job = client.submit(
        trial.functions["step"], example=trial.turn(0)[0][1], model=trial.models, optimizer=trial.optimizers,
        endpoint=daemon.endpoint, replay_bytes=0,
    )  # fmt: skip
    assert job._recovery.recorder is None
    logging.getLogger("gpumux.client").info("nothing is kept")
    with pytest.raises(SnapshotFailed):
        job.close(keep=True)
    job.close()


def test_a_step_that_was_undone_is_not_part_of_what_is_run_again(daemon: Phoenix):
    """Nor is what it drew."""

    def train(run_with: Any) -> tuple[list[float], list[torch.Tensor]]:
        torch.manual_seed(SEED)
        layers = torch.nn.Linear(4, 8), torch.nn.Dropout(), torch.nn.Linear(8, 1), torch.nn.Sigmoid()
        model = torch.nn.Sequential(*layers)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        batches = torch.rand(24, 6, 4).unbind()

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = torch.nn.functional.binary_cross_entropy(model(x), torch.full((6, 1), 0.3))
            loss.backward()
            optimizer.step()
            return loss

        losses = []
        with run_with(step, model, optimizer, batches[0]) as run:
            for i, x in enumerate(batches):
                state = torch.get_rng_state()
                if i in (7, 12, 18):
                    with pytest.raises(RuntimeError, match="between 0 and 1"):
                        run(x / 0 * 0)
                    torch.set_rng_state(state)  # as the job has it
                if i in (9, 12):
                    run(None)
                losses.append(run(x).item())
        return losses, [p.detach() for p in model.parameters()]

    @contextmanager
    def plainly(step: Any, *_: Any) -> Iterator[Any]:
        yield lambda x: step(x) if x is not None else None

    @contextmanager
    def in_the_daemon(step: Any, model: Any, optimizer: Any, x: torch.Tensor) -> Iterator[Any]:
        with client.submit(step, example=(x,), model=model, optimizer=optimizer, endpoint=daemon.endpoint) as job:
            yield lambda x: job.step(x) if x is not None else daemon.kill_executors()

    losses, parameters = train(in_the_daemon)
    expected = train(plainly)
    assert losses == expected[0]
    assert all(map(torch.equal, parameters, expected[1]))
