"""Jobs that go on from what some daemon of the cluster kept of them."""

from __future__ import annotations

import pytest

from gpumux.client import recovery
from gpumux.errors import AdmissionRefused, ConfigError, UnknownJob
from microbench.killed import dropout_adam, gan, plain
from microbench.kills import Phoenix, Run, differences
from tests.client.placed.coordinator import FakeCoordinator
from tests.client.placed.test_placed import placed, submit, turns, until_copied

SEED = 31

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(900)]


def known(coordinator: FakeCoordinator, *daemons: Phoenix, away: str = "") -> None:
    """Have the coordinator say that these are its nodes."""
    nodes = [{"name": f"node-{at}", "endpoint": each.endpoint, "state": "up"} for at, each in enumerate(daemons)]
    if away:
        nodes.append({"name": away, "endpoint": "ipc:///nowhere/gpumux.sock", "state": "away"})
    coordinator.nodes = nodes


def resumed(coordinator: FakeCoordinator, daemon: Phoenix, seed: int = SEED + 1) -> Run:
    """The job once more, placed at this daemon, from another start, which what was kept overwrites."""
    coordinator.places = [daemon.endpoint]
    fresh = dropout_adam(seed)
    return submit(fresh, coordinator, resume=fresh.name)


def test_a_job_whose_client_is_gone_goes_on_at_another_daemon(daemons: list[Phoenix], coordinator: FakeCoordinator):
    """It moves before it has saved anything there, draws from the generator that was kept, and leaves nothing."""
    first, second = daemons
    known(coordinator, first, second)
    run = placed(dropout_adam(SEED), coordinator, first)
    turns(run, 7)
    run.results += [future.result() for future in run.futures]
    run.job.close(keep=True)
    again = resumed(coordinator, second)
    with again.job:
        assert again.job.resumed_steps == 7
        assert again.job._session.endpoint == second.endpoint
        second.kill_executors()
        again.turns = 7
        turns(again, 2)
        coordinator.places = [first.endpoint]
        coordinator.vacate_for_sure()
        turns(again, 3)
        assert again.job._session.endpoint == first.endpoint
        again.finish()
    alone = dropout_adam(SEED)
    assert differences(run.results + again.results, plain(alone, 12)) == 0
    assert differences(again.trial.state(), alone.state()) == 0
    with pytest.raises(UnknownJob, match="no job called 'dropout, Adam' of yours was kept by a daemon of the cluster"):
        resumed(coordinator, second)


def test_the_newest_state_is_taken_and_one_that_is_not_finished_stays(
    daemons: list[Phoenix], coordinator: FakeCoordinator, caplog: pytest.LogCaptureFixture
):
    first, second = daemons
    known(coordinator, first, second, away="node-x")
    for daemon, count in ((second, 5), (first, 2)):
        run = placed(dropout_adam(SEED), coordinator, daemon)
        turns(run, count)
        run.job.close(keep=True)
    again = resumed(coordinator, second)
    assert again.job.resumed_steps == 2
    assert any("nodes node-x could not be asked" in record.getMessage() for record in caplog.records)
    again.job.close(drain=False)  # as a program does that fails, before anything new was saved
    again = resumed(coordinator, second)
    assert again.job.resumed_steps == 2
    again.job.close()
    with pytest.raises(UnknownJob, match="node-x could not be asked") as caught:
        resumed(coordinator, second)
    assert "wait until these are back" in caught.value.remedy


def test_what_can_not_go_on_is_refused_before_anything_is_placed(
    daemons: list[Phoenix], coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(recovery, "PUT_AWAY_S", 0.1)
    first, second = daemons
    known(coordinator, first, second)
    run = placed(dropout_adam(SEED), coordinator, first)
    with run.job:
        until_copied(run)
        with pytest.raises(AdmissionRefused, match="still open"):
            resumed(coordinator, second)
    run = placed(dropout_adam(SEED), coordinator, first)
    turns(run, 1)
    run.job.close(keep=True)
    other = gan(SEED)
    coordinator.places = [second.endpoint]
    with pytest.raises(ConfigError, match="not the job that was kept"):
        submit(other, coordinator, resume="dropout, Adam")
    resumed(coordinator, second).job.close()
