"""Jobs that a coordinator places: bit-equal wherever and however often they move, and answered if they get nothing."""

from __future__ import annotations

import gc
import random
import signal
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from gpumux import client
from gpumux.burst.placement import data_parallel
from gpumux.cli.control import Control
from gpumux.client.placed import link
from gpumux.client.recovery import Recovery
from gpumux.client.remote import Remote
from gpumux.client.replay import ReplayLog
from gpumux.client.session import Session
from gpumux.errors import AccessDenied, AdmissionRefused, ConfigError, DaemonGone, JobClosed, JobFailed
from gpumux.wire import messages as m
from gpumux.wire.peers import make_keys
from microbench.daemon import running_daemon
from microbench.killed import Trial, accumulate_adamw, conv_sgd, dropout_adam, plain
from microbench.kills import Phoenix, Run, differences, undisturbed
from tests.client.placed.coordinator import WAIT_S, FakeCoordinator, coordinating, serving
from tests.client.placed.trials import close, wide

SEED = 23

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(900)]  # as the daemons here have


def submit(
    trial: Trial, coordinator: FakeCoordinator, rng: Literal["client", "own"] = "own", **options: Any
) -> Run:  # fmt: skip
    first, *others = trial.functions
    example = {name: batch for i in range(8) for name, batch in trial.turn(i)}
    job = client.submit(
        trial.functions[first], example=example[first], model=trial.models, optimizer=trial.optimizers, name=trial.name,
        seed=trial.seed if rng == "own" else None, rng=rng, **{"cluster": coordinator.endpoint} | options,
    )  # fmt: skip
    calls: dict[str, Callable[..., client.StepFuture]] = {first: job.step}
    for name in others:
        calls[name] = job.add(trial.functions[name], example=example[name])
    return Run(trial, job, calls)


def placed(trial: Trial, coordinator: FakeCoordinator, *daemons: Phoenix, **options: Any) -> Run:
    """The trial, submitted, and placed at these daemons one after another."""
    coordinator.places = [daemon.endpoint for daemon in daemons]
    return submit(trial, coordinator, **options)


def turns(run: Run, count: int) -> None:
    for _ in range(count):
        run.turn()


def as_undisturbed(run: Run, make: Callable[[int], Trial]) -> None:
    run.finish()
    alone = make(SEED)
    assert differences(run.results, plain(alone, run.turns)) == 0
    assert differences(run.trial.state(), alone.state()) == 0


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "gpumux.client"]


def test_a_placed_job_is_the_plain_loop(
    daemons: list[Phoenix], coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):  # fmt: skip
    caplog.set_level("INFO", logger="gpumux.client")
    monkeypatch.setenv("GPUMUX_CLUSTER", coordinator.endpoint)
    run = placed(conv_sgd(SEED), coordinator, daemons[0], urgency=3, cluster="auto")
    with run.job:
        turns(run, 12)
        as_undisturbed(run, conv_sgd)
    asked = coordinator.hear(m.PlaceJob)
    assert (asked.job, asked.attempt, asked.devices, asked.urgency, asked.movable) == (run.job.id, 0, 1, 3, True)
    assert asked.nbytes == 64 << 20
    assert coordinator.all(m.ProgramsKnown)[0].programs
    assert coordinator.hear(m.PlacedJobEnded).fault == ""
    coordinator.hear_session_end()
    assert not [line for line in lines(caplog) if "without its coordinator's word" in line]


def test_the_coordinator_learns_of_programs_that_come_later(
    daemons: list[Phoenix], coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
):
    """Once for each change, not for each step or look; of many the newest."""
    monkeypatch.setattr(link, "LOOK_S", 0.001)
    monkeypatch.setattr(link, "MOST_PROGRAMS", 2)
    model = torch.nn.Linear(4, 2)
    coordinator.places = [daemons[0].endpoint]
    with client.submit(model, example=torch.ones(8, 4), model=model, cluster=coordinator.endpoint) as job:
        for size, count in ((8, 1), (3, 2), (8, 2), (3, 2), (5, 3), (8, 3)):
            job.step(torch.ones(size, 4)).result()
            coordinator.hear(m.ProgramsKnown, count)
    told = [known.programs for known in coordinator.all(m.ProgramsKnown)]
    assert [len(programs) for programs in told] == [1, 2, 2]
    assert told[1][:1] == told[0]
    assert told[2][:1] == told[1][1:]


@pytest.mark.parametrize("rng", ["own", "client"])
def test_a_job_moves_while_it_is_stepped(
    rng: Literal["own", "client"], daemons: list[Phoenix], coordinator: FakeCoordinator,
    caplog: pytest.LogCaptureFixture,
):  # fmt: skip
    """To and fro, with steps under way each time."""
    first, second = daemons
    run = placed(dropout_adam(SEED), coordinator, first, second, first, second, rng=rng)
    torch.manual_seed(SEED)  # as plain() begins
    with run.job:
        for move in range(1, 4):
            turns(run, 5)
            coordinator.vacate(reason=f"reason {move}", attempt=move)
            while len(coordinator.all(m.DevicesVacated)) < move:
                run.turn()
            turns(run, 3)
        assert [left.attempt for left in coordinator.all(m.DevicesVacated)] == [1, 2, 3]
        as_undisturbed(run, dropout_adam)
    back = [line for line in lines(caplog) if "It is back after" in line]
    assert [f"(reason {move})" in line for move, line in enumerate(back, 1)] == [True] * 3
    assert all("and 0 steps run again" in line for line in back)


@pytest.mark.extended
def test_a_job_moves_while_the_users_thread_does_something_else(daemons: list[Phoenix], coordinator: FakeCoordinator):
    """The thread waits in a data loader from the order to leave until the job is at its new daemon; and the next time
    it collates a batch before the job has devices."""
    first, second = daemons
    run = placed(accumulate_adamw(SEED), coordinator, first, second)
    with run.job:
        turns(run, 4)
        coordinator.vacate()
        coordinator.hear(m.DevicesVacated)
        until(lambda: run.job._session.endpoint == second.endpoint and run.job._recovery._away is None)
        turns(run, 4)
        lent = run.job.collate([torch.ones(48)] * 32)
        coordinator.vacate()
        coordinator.hear(m.DevicesVacated, 2)
        coordinator.place(first.endpoint)
        assert torch.equal(run.job.collate([torch.ones(48)] * 32), lent)
        turns(run, 4)
        as_undisturbed(run, accumulate_adamw)


def test_a_paused_job_moves_with_its_unanswered_steps(
    daemons: list[Phoenix], coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
):
    """None of which runs at the new daemon before it is paused there: that would depend on how quick the daemon is."""
    sent: list[Any] = []
    call, post_step = Remote.call, Remote.post_step
    monkeypatch.setattr(
        Remote, "call", lambda remote, make, *a, **k: (sent.append(make), call(remote, make, *a, **k))[1]
    )
    monkeypatch.setattr(
        Remote, "post_step", lambda remote, step, *a: (sent.append(step), post_step(remote, step, *a))[1]
    )
    first, second = daemons
    trial = dropout_adam(SEED)
    run = placed(trial, coordinator, first, second)
    with run.job:
        run.turn()
        run.job.pause()
        futures = [run.job.step(*trial.turn(i)[0][1]) for i in range(1, 3)]
        coordinator.vacate()
        assert not futures[1].done()
        coordinator.hear(m.DevicesVacated)
        with pytest.raises(TimeoutError):
            futures[1].result(timeout=0.01)
        assert run.job.stats()["paused"]
        assert run.job._session.endpoint == second.endpoint
        moved = [each for each in sent if each in (m.PauseJob, 0, 1, 2)]
        assert moved in ([0, m.PauseJob, 1, 2, 0, m.PauseJob, 1, 2], [0, m.PauseJob, 1, 2, m.PauseJob, 1, 2])
        run.job.resume()
        assert [f.item() for f in futures] == [r.item() for r in plain(dropout_adam(SEED), 3)[1:]]


def test_a_verb_waits_for_the_thread_that_brings_the_job_back(
    daemons: list[Phoenix], coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
):
    """Also one that begins when that thread is at the new daemon already, and the job not yet."""
    first, second = daemons
    run = placed(dropout_adam(SEED), coordinator, first, second)
    here = threading.current_thread()
    there, looked = threading.Event(), threading.Event()
    restore, check_open = Recovery._restore, Recovery.check_open

    def restored(recovery: Recovery, log: ReplayLog) -> Any:
        there.set()
        assert looked.wait(WAIT_S)
        return restore(recovery, log)

    def checked(recovery: Recovery) -> None:
        try:
            check_open(recovery)
        finally:
            if there.is_set() and threading.current_thread() is here:
                looked.set()

    with run.job:
        run.turn()
        monkeypatch.setattr(Recovery, "_restore", restored)
        monkeypatch.setattr(Recovery, "check_open", checked)
        monkeypatch.setattr("gpumux.client.recovery.LEAVING_S", 0.0)
        coordinator.vacate()
        assert there.wait(WAIT_S)
        assert not run.job.stats()["paused"]
        assert run.job._session.endpoint == second.endpoint
        as_undisturbed(run, dropout_adam)


def until(holds: Callable[[], bool]) -> None:
    """Look again and again: nothing says when a thread of the client is done."""
    while not holds():
        threading.Event().wait(0.01)


def until_copied(run: Run) -> None:
    """Turns until a snapshot of the job lies in this process."""
    while run.job._recovery._copy._read is None:
        run.turn()
        threading.Event().wait(0.01)


@pytest.mark.slow
def test_a_job_whose_node_is_lost_goes_on_elsewhere(
    tmp_path: Path, coordinator: FakeCoordinator, caplog: pytest.LogCaptureFixture
):
    """Once before it was saved; once while the user's thread does something else; once the daemon comes back first."""
    with ExitStack() as stack:
        first, second, third = serving(stack, tmp_path, 3)
        run = placed(dropout_adam(SEED), coordinator, first)
        with run.job:
            run.job._recovery.snapshots._due = float("inf")  # no snapshot before the first daemon is gone
            turns(run, 6)
            first.process.kill()
            first.process.wait()
            coordinator.place(second.endpoint)
            turns(run, 3)
            until_copied(run)
            turns(run, 3)
            second.process.kill()
            second.process.wait()
            coordinator.place(third.endpoint)
            until(lambda: run.job._session.endpoint == third.endpoint and run.job._recovery._away is None)
            turns(run, 3)
            third.kill()  # starts another at the same endpoint
            turns(run, 3)
            as_undisturbed(run, dropout_adam)
        back = [line for line in lines(caplog) if "It is back after" in line]
        assert "from its first state" in back[0]
        assert all("from snapshot" in line for line in back[1:])
        assert len(back) == 3
        third.stop()


def test_a_coordinator_that_is_gone_is_not_missed(
    daemons: list[Phoenix], coordinator: FakeCoordinator, caplog: pytest.LogCaptureFixture
):
    """The job goes on at its daemon, says to the one that comes back where it runs, and obeys that one."""
    first, second = daemons
    run = placed(conv_sgd(SEED), coordinator, first, second)
    with run.job:
        turns(run, 3)
        coordinator.die()
        turns(run, 10)
        coordinator.come_back()
        again = coordinator.hear(m.PlaceJob, 2)
        assert (again.attempt, again.programs) == (1, coordinator.hear(m.ProgramsKnown).programs)
        coordinator.vacate()
        coordinator.hear(m.DevicesVacated)
        turns(run, 3)
        assert run.job._session.endpoint == second.endpoint
        as_undisturbed(run, conv_sgd)
    assert coordinator.hear(m.PlacedJobEnded).fault == ""
    assert [line for line in lines(caplog) if "has lost its coordinator" in line]
    assert [line for line in lines(caplog) if "its coordinator is back" in line]


def test_a_job_ends_while_its_coordinator_is_gone(daemons: list[Phoenix], coordinator: FakeCoordinator):
    run = placed(conv_sgd(SEED), coordinator, daemons[0])
    with run.job:
        turns(run, 3)
        coordinator.die()
        as_undisturbed(run, conv_sgd)
    assert not coordinator.all(m.PlacedJobEnded)


def test_a_coordinator_that_comes_back_and_refuses_does_not_end_a_job_that_runs(
    daemons: list[Phoenix], coordinator: FakeCoordinator, caplog: pytest.LogCaptureFixture
):
    run = placed(conv_sgd(SEED), coordinator, daemons[0])
    with run.job:
        turns(run, 2)
        coordinator.die()
        coordinator.refuse("access_denied", "not yours")
        coordinator.come_back()
        coordinator.hear(m.PlaceJob, 2)
        turns(run, 2)
        as_undisturbed(run, conv_sgd)


def test_a_cancelled_job_ends_where_it_runs(daemons: list[Phoenix], coordinator: FakeCoordinator):
    run = placed(conv_sgd(SEED), coordinator, daemons[0])
    turns(run, 3)
    coordinator.vacate(keep=False, reason="an operator cancelled it")
    coordinator.hear(m.DevicesVacated)
    with pytest.raises(JobFailed, match="an operator cancelled it"):
        run.job.step(*run.trial.turn(0)[0][1])
    with pytest.raises(JobFailed, match="an operator cancelled it"):
        run.job.sync()
    run.job.close()
    with pytest.raises(JobClosed):
        run.turn()


def test_a_submit_that_reaches_none_of_the_daemons_that_it_is_given_says_so(
    coordinator: FakeCoordinator, tmp_path: Path
):
    coordinator.places = [f"ipc://{tmp_path}/{at}/gpumux.sock" for at in range(link.MOST_UNREACHED + 1)]
    with pytest.raises(DaemonGone, match="could be reached") as caught:
        submit(dropout_adam(SEED), coordinator)
    assert "GPUMUX_CURVE_SERVER" in caught.value.remedy
    assert len(coordinator.all(m.JobNotStarted)) == link.MOST_UNREACHED - 1
    assert "could be reached" in coordinator.hear(m.PlacedJobEnded).fault


def test_a_job_that_is_given_up_while_it_runs_ends(daemons: list[Phoenix], coordinator: FakeCoordinator):
    """As one that may not move, and whose node the coordinator has lost, though it is there for the client."""
    trial = dropout_adam(SEED)
    run = placed(trial, coordinator, daemons[0])
    run.job.pause()
    future = run.job.step(*trial.turn(0)[0][1])
    coordinator.answer("failed", "node-0 was lost")
    coordinator.hear(m.DevicesVacated)
    with pytest.raises(JobFailed, match="node-0 was lost"):
        future.result()
    with pytest.raises(JobFailed, match="node-0 was lost"):
        run.turn()
    run.job.close()


def test_a_job_that_is_answered_while_it_is_between_devices_ends(daemons: list[Phoenix], coordinator: FakeCoordinator):
    trial = dropout_adam(SEED)
    run = placed(trial, coordinator, daemons[0])
    run.job.pause()
    future = run.job.step(*trial.turn(0)[0][1])
    coordinator.vacate()
    coordinator.hear(m.DevicesVacated)
    coordinator.answer("failed", "no node is left")
    with pytest.raises(JobFailed, match="no node is left"):
        future.result()
    with pytest.raises(JobFailed, match="no node is left"):
        run.turn()
    run.job.close()
    assert "no node is left" in coordinator.hear(m.PlacedJobEnded).fault


@pytest.mark.parametrize(
    ("outcome", "error"), [("refused", AdmissionRefused), ("cancelled", JobFailed), ("failed", JobFailed)]
)
def test_a_job_that_gets_no_devices(outcome: str, error: type[Exception], coordinator: FakeCoordinator):
    threading.Thread(
        target=lambda: (coordinator.hear(m.PlaceJob), coordinator.answer(outcome, "the quota of team a is 0")),
        daemon=True,
    ).start()
    with pytest.raises(error, match="the quota of team a is 0"):
        submit(dropout_adam(SEED), coordinator)
    coordinator.hear_session_end()


def test_coordinators_that_take_no_job(daemons: list[Phoenix], coordinator: FakeCoordinator, tmp_path: Path):
    coordinator.refuse("admission_refused", "1,000 jobs are open")
    with pytest.raises(AdmissionRefused, match="1,000 jobs are open"):
        submit(dropout_adam(SEED), coordinator)
    coordinator.die()
    with pytest.raises(DaemonGone, match="no coordinator answers"):
        submit(dropout_adam(SEED), coordinator)
    (tmp_path / "other").mkdir()
    with (
        coordinating(tmp_path / "other", kind="cpu") as daemon,
        pytest.raises(ConfigError, match="a daemon's endpoint"),
    ):
        submit(dropout_adam(SEED), daemon)


def test_devices_that_do_not_take_the_job(
    daemons: list[Phoenix], coordinator: FakeCoordinator, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """No daemon is there, and then too many of them."""
    first, second = daemons
    coordinator.places = [
        f"ipc://{tmp_path}/none.sock",
        [first.endpoint, second.endpoint],
        first.endpoint,
        second.endpoint,
    ]
    run = submit(dropout_adam(SEED), coordinator)
    nowhere, too_many = coordinator.all(m.JobNotStarted)
    assert (nowhere.attempt, nowhere.nbytes, too_many.attempt) == (1, 0, 2)
    assert "no daemon at" in nowhere.why
    with run.job:
        turns(run, 3)
        coordinator.places.insert(0, f"ipc://{tmp_path}/none.sock")
        coordinator.vacate()
        assert coordinator.hear(m.JobNotStarted, 3).attempt == 4
        turns(run, 3)
        assert run.job._session.endpoint == second.endpoint
        as_undisturbed(run, dropout_adam)


def test_ctrl_c_while_a_job_waits_for_devices(daemons: list[Phoenix], coordinator: FakeCoordinator):
    """In submit(), which gives the job up; and in a verb, after which the job can be used as before."""
    main = threading.main_thread().ident
    assert main is not None

    def interrupt(kind: type[Any]) -> None:
        coordinator.hear(kind)
        signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=interrupt, args=(m.PlaceJob,), daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        submit(dropout_adam(SEED), coordinator)
    assert coordinator.hear(m.PlacedJobEnded).fault == "KeyboardInterrupt"
    coordinator.heard.clear()
    run = placed(dropout_adam(SEED), coordinator, daemons[0])
    with run.job:
        turns(run, 3)
        coordinator.vacate()
        threading.Thread(target=interrupt, args=(m.DevicesVacated,), daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            turns(run, 1 << 40)
        coordinator.place(daemons[1].endpoint)
        turns(run, 3)
        as_undisturbed(run, dropout_adam)


def test_what_does_not_go_together():
    def step(x: torch.Tensor) -> torch.Tensor:
        return x

    x = torch.ones(2)
    for given, says in (
        ({"gpus": 2}, "gpus= is given, and no cluster="),
        ({"urgency": 1}, "urgency= is given, and no cluster="),
        ({"min_gpus": 2}, "min_gpus= is given, and no cluster="),
        ({"cluster": "auto", "gpus": 2, "min_gpus": 3}, "min_gpus is 3"),
        ({"cluster": "auto", "endpoint": "ipc:///a"}, "cluster= and endpoint="),
        ({"cluster": "auto", "endpoints": ["ipc:///a"]}, "cluster= and endpoints="),
        ({"cluster": "auto", "devices": 2}, "cluster= and devices="),
        ({"cluster": "auto", "gpus": 0}, "gpus is 0"),
        ({"cluster": "auto", "gpus": 3, "plan": data_parallel(2)}, "the plan is for 2 devices, and gpus=3"),
        ({"cluster": "auto", "resume": "a", "gpus": 2}, "resume= is given, and several daemons"),
        ({"cluster": "auto", "urgency": 0.5}, "urgency is 0.5"),
        ({"cluster": "a place"}, "is not an endpoint"),
    ):
        with pytest.raises(ConfigError, match=says):
            client.submit(step, example=(x,), **given)  # type: ignore[arg-type]


def test_a_job_that_a_daemon_may_not_take_fails_or_goes_elsewhere_if_it_ran(
    daemons: list[Phoenix], coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
):
    """As where the coordinator's user is no operator."""
    first, second = daemons
    open_job = Session.open_job

    def opens(session: Session, *arguments: Any) -> None:
        if session.endpoint == second.endpoint:
            raise AccessDenied("the coordinator's user is no operator here", "make it one")
        open_job(session, *arguments)

    monkeypatch.setattr(Session, "open_job", opens)
    with pytest.raises(AccessDenied, match="is no operator here"):
        placed(conv_sgd(SEED), coordinator, second)
    assert "is no operator here" in coordinator.hear(m.PlacedJobEnded).fault
    coordinator.heard.clear()
    run = placed(dropout_adam(SEED), coordinator, first, second, first)
    with run.job:
        turns(run, 3)
        coordinator.vacate()
        assert "is no operator here" in coordinator.hear(m.JobNotStarted).why
        turns(run, 3)
        as_undisturbed(run, dropout_adam)


def test_a_job_whose_loop_raises_has_failed_and_one_whose_script_ends_there_has_not(
    daemons: list[Phoenix], coordinator: FakeCoordinator
):
    for error, fault in ((ValueError("the data"), "ValueError"), (SystemExit(0), "")):
        run = placed(conv_sgd(SEED), coordinator, daemons[0])
        with pytest.raises(type(error)), run.job:
            raise error
        assert coordinator.hear(m.PlacedJobEnded).fault == fault
        coordinator.heard.clear()


def test_a_job_that_is_dropped_without_close_is_given_up(
    daemons: list[Phoenix], coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(link, "LOOK_S", 0.05)
    run = placed(conv_sgd(SEED), coordinator, daemons[0])
    ref = weakref.ref(run.job)
    del run
    with pytest.warns(ResourceWarning, match="dropped while it was open"):
        gc.collect()
    assert ref() is None
    assert "dropped" in coordinator.hear(m.PlacedJobEnded).fault
    coordinator.hear_session_end()


def test_a_job_that_waits_says_why(
    daemons: list[Phoenix], coordinator: FakeCoordinator, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    monkeypatch.setattr(link, "LOOK_S", 0.05)
    monkeypatch.setattr(link, "EXPLAIN_S", 0.0)

    def place() -> None:
        coordinator.hear(m.ExplainJob, 2)
        coordinator.place(daemons[0].endpoint)

    threading.Thread(target=place, daemon=True).start()
    submit(conv_sgd(SEED), coordinator).job.close()
    said = [line for line in lines(caplog) if "for devices: " in line]
    assert said
    assert said[0].startswith("job 'convolutions, SGD' has waited 0 s for devices: Its turn has come")


@pytest.mark.extended
@pytest.mark.slow
def test_a_daemon_without_room_and_without_snapshots(coordinator: FakeCoordinator, caplog: pytest.LogCaptureFixture):
    """The job asks for twice the memory until it fits; it is not moved from a daemon that saves nothing; and a limit of
    the user's is not raised."""
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(2, 64)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).sum()
        loss.backward()
        optimizer.step()
        return loss

    with running_daemon() as roomy, running_daemon() as full:
        coordinator.places = [full.endpoint, full.endpoint, roomy.endpoint]
        refusals = iter([AdmissionRefused("the program needs 1.00 GiB more", "free it")] * 2)
        capture = client.Job.capture

        def refused(job: client.Job[Any], *given: Any) -> Any:
            for refusal in refusals:
                raise refusal
            return capture(job, *given)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(client.Job, "capture", refused)
            with client.submit(
                step, example=(x,), model=model, optimizer=optimizer, cluster=coordinator.endpoint
            ) as job:
                assert [each.nbytes >> 20 for each in coordinator.all(m.JobNotStarted)] == [128, 256]
                assert not coordinator.hear(m.PlaceJob, 2).movable
                assert "takes no snapshots; start it with --state-dir" in " ".join(lines(caplog))
                coordinator.vacate()
                until(lambda: any("and stays" in line for line in lines(caplog)))
                job.step(x).result()
                assert not coordinator.all(m.DevicesVacated)
        coordinator.places, coordinator.attempt = [roomy.endpoint], 10
        with pytest.raises(AdmissionRefused, match="memory_limit"):
            client.submit(
                step, example=(x,), model=model, optimizer=optimizer, cluster=coordinator.endpoint, memory_limit=100
            )
        assert len(coordinator.all(m.JobNotStarted)) == 2


def test_a_gang_is_placed_and_moves(daemons: list[Phoenix], coordinator: FakeCoordinator):
    """Its ranks change places; the results are those of the same job over the same daemons, not moved."""
    ends = [daemon.endpoint for daemon in daemons]
    coordinator.places = [ends, ends[::-1]]
    run = submit(dropout_adam(SEED), coordinator, gpus=2)
    with run.job:
        turns(run, 5)
        coordinator.vacate()
        coordinator.hear(m.DevicesVacated)
        turns(run, 5)
        run.finish()
        assert run.job._session.endpoint == ",".join(ends[::-1])
    alone = dropout_adam(SEED)
    assert differences(run.results, undisturbed(alone, run.turns, ends)) == 0
    assert differences(run.trial.state(), alone.state()) == 0


def test_a_job_that_ends_while_it_should_move_ends_where_it_is(daemons: list[Phoenix], coordinator: FakeCoordinator):
    """It waits for no other devices just to fetch its state."""
    run = placed(conv_sgd(SEED), coordinator, daemons[0])
    with run.job:
        turns(run, 3)
        run.results += [future.result() for future in run.futures]
        with run.job._recovery.lock:  # the thread that would move the job waits for it
            coordinator.vacate()
            until(lambda: run.job._recovery.place.order() is not None)
            run.job.close()
    assert not coordinator.all(m.DevicesVacated)
    assert coordinator.hear(m.PlacedJobEnded).fault == ""
    alone = conv_sgd(SEED)
    assert differences(run.results, plain(alone, 3)) == 0
    assert differences(run.trial.state(), alone.state()) == 0


def test_a_verb_that_lasts_too_long_goes_on_elsewhere(
    daemons: list[Phoenix], coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
):
    """A thread waits for a step of a paused job, which holds the job until an operator resumes it."""
    monkeypatch.setattr(link, "PATIENCE_S", 0.05)
    first, second = daemons
    trial = dropout_adam(SEED)
    run = placed(trial, coordinator, first, second)
    with run.job:
        run.job.pause()
        futures = [run.job.step(*trial.turn(i)[0][1]) for i in range(2)]
        third: list[client.StepFuture] = []
        waiting = threading.Thread(target=lambda: third.append(run.job.step(*trial.turn(2)[0][1])))
        waiting.start()
        until(lambda: not _is_free(run.job._recovery.lock))
        coordinator.vacate()
        coordinator.hear(m.DevicesVacated)
        until(lambda: run.job._session.endpoint == second.endpoint and run.job._recovery._away is None)
        with Control(second.endpoint) as control:
            control.change("resume", run.job.id)
        waiting.join()
        assert [f.item() for f in [*futures, *third]] == [r.item() for r in plain(dropout_adam(SEED), 3)]


def _is_free(lock: Any) -> bool:
    if not lock.acquire(blocking=False):
        return False
    lock.release()
    return True


@pytest.mark.slow
@pytest.mark.extended
def test_a_gang_whose_node_is_lost_goes_on_with_another(tmp_path: Path, coordinator: FakeCoordinator):
    with ExitStack() as stack:
        first, second, third = serving(stack, tmp_path, 3)
        coordinator.places = [[first.endpoint, second.endpoint]]
        run = submit(dropout_adam(SEED), coordinator, gpus=2)
        with run.job:
            until_copied(run)
            turns(run, 3)
            second.process.kill()
            second.process.wait()
            coordinator.place([first.endpoint, third.endpoint])
            turns(run, 5)
            run.finish()
        alone = dropout_adam(SEED)
        assert differences(run.results, undisturbed(alone, run.turns, [first.endpoint, third.endpoint])) == 0
        assert differences(run.trial.state(), alone.state()) == 0


@pytest.mark.slow
@pytest.mark.extended
def test_a_gang_goes_on_over_other_numbers_of_devices(
    tmp_path: Path, coordinator: FakeCoordinator, caplog: pytest.LogCaptureFixture
):
    """Of three, one is lost. Then it has a batch that two don't divide, so it goes on with one, and later with three
    again."""
    odd: set[int] = set()
    with ExitStack() as stack:
        daemons = serving(stack, tmp_path, 3)
        first, second, third = (daemon.endpoint for daemon in daemons)
        coordinator.places = [[first, second, third]]
        run = submit(wide(SEED, odd), coordinator, rng="client", gpus=3, priority="high")
        torch.manual_seed(SEED)
        assert coordinator.hear(m.GangSizes).sizes == [1, 2]
        with run.job:
            until_copied(run)
            daemons[1].kill()
            coordinator.place([first, third])
            turns(run, 4)
            assert len(run.job.stats()["ranks"]) == 2
            odd.add(run.turns)
            coordinator.places = [[third]]
            moving = threading.Thread(target=lambda: (coordinator.hear(m.GangSizes, 2), coordinator.vacate()))
            moving.start()
            turns(run, 4)
            moving.join()
            assert coordinator.all(m.GangSizes)[-1].sizes == [1]
            assert len(run.job.stats()["ranks"]) == 1
            coordinator.places = [[first, second, third]]
            coordinator.vacate_for_sure()
            turns(run, 4)
            assert len(run.job.stats()["ranks"]) == 3
            told = [known.programs for known in coordinator.all(m.ProgramsKnown)]
            while told[-1] != run.job._recovery.programs():  # other Programs than over three devices
                coordinator.hear(m.ProgramsKnown, len(told) + 1)
                told = [known.programs for known in coordinator.all(m.ProgramsKnown)]
            run.finish()
        assert len([line for line in lines(caplog) if "It is back after" in line]) == 3
        assert not [line for line in lines(caplog) if "reads the local model" in line]
        alone = wide(SEED, odd)
        torch.manual_seed(SEED)
        close(run.results, plain(alone, run.turns))
        close(run.trial.state(), alone.state())


@pytest.mark.extended
@pytest.mark.slow
def test_a_job_moves_between_machines(tmp_path: Path, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch):
    """From a daemon on another machine, reached over tcp, to one on this machine, and back."""
    server, alice = (make_keys(tmp_path / name, name) for name in ("daemon", "alice"))
    keys = tmp_path / "clients"
    keys.mkdir()
    (keys / "alice.key").write_text(alice[0].read_text())
    monkeypatch.setenv("GPUMUX_CURVE_KEY", str(alice[1]))
    monkeypatch.setenv("GPUMUX_CURVE_SERVER", str(server[0]))
    config = tmp_path / "gpumux.toml"
    config.write_text(f'[access]\ncurve_secret_key = "{server[1]}"\ncurve_client_keys = "{keys}"\n')
    daemon = Phoenix(tmp_path, flags=["--endpoint", "tcp://127.0.0.1:*", "--config", str(config)])
    try:
        daemon.wait_until_ready()
        with Control(daemon.endpoint) as control:
            far = next(end for end in control.status()["daemon"]["endpoints"] if end.startswith("tcp"))
        coordinator.places = [far, daemon.endpoint, far]
        run = submit(dropout_adam(SEED), coordinator)
        with run.job:
            for move in (1, 2):
                turns(run, 4)
                coordinator.vacate(attempt=move)
                coordinator.hear(m.DevicesVacated, move)
            turns(run, 4)
            assert run.job._session.endpoint == far
            as_undisturbed(run, dropout_adam)
        daemon.stop()
    finally:
        daemon.close()


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.extended) for seed in (0, 2))])
def test_whatever_happens_to_a_job_its_training_is_the_plain_loops(
    seed: int, daemons: list[Phoenix], coordinator: FakeCoordinator
):
    """Forty events, drawn at random: it has to leave, is placed elsewhere unasked, its process is killed, the
    coordinator is started again, also while the job moves."""
    draw = random.Random(seed)
    coordinator.places = [draw.choice(daemons).endpoint for _ in range(200)]
    run = submit(dropout_adam(SEED), coordinator, rng=draw.choice(["own", "client"]))
    torch.manual_seed(SEED)

    def started_again() -> None:
        coordinator.die()
        coordinator.come_back()

    def vacated_and_started_again() -> None:
        coordinator.vacate()
        started_again()

    def killed() -> None:
        for daemon in daemons:
            daemon.kill_executors()

    happens: list[Callable[[], Any]] = [
        coordinator.vacate_for_sure, coordinator.vacate_for_sure, started_again, vacated_and_started_again, killed,
        lambda: coordinator.place(draw.choice(daemons).endpoint),
    ]  # fmt: skip
    with run.job:
        for _ in range(40):
            turns(run, draw.randrange(5))
            draw.choice(happens)()
        turns(run, 3)
        as_undisturbed(run, dropout_adam)
    assert len(coordinator.all(m.DevicesVacated)) >= 8
