"""StepAwaited, on its way from a client to the scheduler, and what the client hears of jobs that hold its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpumux.config import Config
from gpumux.types import HighPromise, JobStatistics, LowPromise, Peer, SessionId
from gpumux.wire import messages as msg
from gpumux.wire.router import Opened
from tests.program import samples

from .fakes import Daemon

LOW, HIGH = "a" * 32, "b" * 32
GAP_S = 4e-3  # between the high job's steps


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    daemon = Daemon(Config(policy="guarded"))
    yield daemon
    daemon.close()


def connect(daemon: Daemon, name: str, peer: Peer) -> None:
    daemon.router.open[name] = peer
    daemon.router.arrivals.append(
        Opened(SessionId(name), peer, msg.Hello(msg.PROTOCOL_VERSION, "0", "client", 1, "", False), False)
    )
    daemon.turn()


def held(daemon: Daemon, peer: Peer) -> None:
    """A low step of the session `low` waits for the next one of a job of the peer, in the session `high`."""
    connect(daemon, "low", Peer(1000, 1000, 7))
    connect(daemon, "high", peer)
    daemon.open_job("low", LOW, name="little")
    daemon.open_job("high", HIGH, priority=1, name="important")
    daemon.load("low", LOW, samples.add_one())
    daemon.load("high", HIGH, samples.add_one())
    for number in range(2):
        daemon.say("high", msg.Step(HIGH, number, 0, 0, [], 0))
        daemon.device.finish(daemon.now)
        daemon.turn()
        daemon.now += GAP_S
    daemon.now -= 0.4 * GAP_S  # half of it is over, and the next step may come at any time
    daemon.say("low", msg.Step(LOW, 5, 0, 0, [], 0))
    assert launched(daemon) == []


def launched(daemon: Daemon) -> list[int]:
    return [launch.step for launch in daemon.device.launched if launch.job == LOW]


def awaits(daemon: Daemon, step: int = 5, session: str = "low", job: str = LOW, over: bool = False) -> list[object]:
    said = msg.StepAwaited(daemon.ref(), job, step, [HIGH, "c" * 32], over)
    return [type(message) for message, _ in daemon.say(session, said)]


def test_a_step_is_not_held_for_a_job_of_the_same_client_that_comes_after_it(daemon: Daemon) -> None:
    held(daemon, Peer(1000, 1000, 7))
    assert awaits(daemon) == []
    assert launched(daemon) == [5]


@pytest.mark.parametrize("peer", [Peer(1000, 1000, 8), Peer(1001, 1001, 7)])
def test_of_the_jobs_of_other_processes_and_users_a_client_can_say_nothing(daemon: Daemon, peer: Peer) -> None:
    held(daemon, peer)
    assert awaits(daemon) == []
    assert launched(daemon) == []


def test_a_step_that_was_answered_or_never_was_is_passed_over(daemon: Daemon) -> None:
    held(daemon, Peer(1000, 1000, 7))
    assert awaits(daemon, step=4) == []
    assert launched(daemon) == []


def test_it_is_said_by_the_session_whose_job_it_is(daemon: Daemon) -> None:
    held(daemon, Peer(1000, 1000, 7))
    assert awaits(daemon, session="high") == [msg.Refusal]
    assert awaits(daemon, job="c" * 32) == [msg.Refusal]
    assert launched(daemon) == []


def test_a_client_learns_for_which_of_its_jobs_a_step_is_held_and_for_how_long(daemon: Daemon) -> None:
    held(daemon, Peer(1000, 1000, 8))
    ((report, _),) = daemon.say("low", msg.JobStats(daemon.ref(), LOW))
    promise = report.body["promise"]
    assert (promise["held_by_name"], promise["held_by_job"]) == ("important", HIGH)
    assert promise["held"] in promise["held_s"]


def test_what_clients_learn_is_what_type_checkers_read(daemon: Daemon) -> None:
    held(daemon, Peer(1000, 1000, 8))
    for name, job, kind in (("high", HIGH, HighPromise), ("low", LOW, LowPromise)):
        ((report, _),) = daemon.say(name, msg.JobStats(daemon.ref(), job))
        assert report.body["promise"].keys() == kind.__annotations__.keys()
        of_the_client = {"exactness", "because", "tolerance", "microbatches", "waves", "ranks", "rng"}
        assert report.body.keys() == JobStatistics.__annotations__.keys() - of_the_client


def test_the_status_page_learns_it_too(daemon: Daemon) -> None:
    held(daemon, Peer(1000, 1000, 8))
    found = {job.priority: job for job in daemon.loop.figures().jobs}
    ((report, _),) = daemon.say("low", msg.JobStats(daemon.ref(), LOW))
    promise = report.body["promise"]
    assert (found["low"].held, found["low"].held_for_s) == (promise["held"], pytest.approx(promise["held_for_s"]))
    assert found["low"].held_by == found["high"].short == promise["held_by"]
    assert (found["high"].held, found["high"].held_by, found["high"].held_for_s) == ("", "", 0.0)


def test_of_another_users_job_it_learns_the_number_alone(daemon: Daemon) -> None:
    held(daemon, Peer(1001, 1001, 8))
    ((report, _),) = daemon.say("low", msg.JobStats(daemon.ref(), LOW))
    promise = report.body["promise"]
    assert promise["held_by"]
    assert (promise["held_by_name"], promise["held_by_job"]) == ("", "")
