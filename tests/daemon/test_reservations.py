"""Reserve, ConfirmReservation and ReleaseReservation as messages: all are answered, and a job uses what is held."""

from __future__ import annotations

import pytest

from gpumux.config import Config
from gpumux.types import Priority
from gpumux.wire import messages as msg
from tests.daemon.stepping import JOB, only
from tests.program import samples

from .fakes import Daemon

OTHER = "cd" * 16


@pytest.fixture
def daemon():
    made = Daemon(Config())
    made.connect("s", uid=1000)
    made.connect("t", uid=1001)
    yield made
    made.close()


def memory(daemon, part="reserved_bytes"):
    return only(daemon.say("s", msg.GetStatus(99))).body["memory"][part]


def test_each_request_is_answered_with_done(daemon):
    assert only(daemon.say("s", msg.Reserve(1, JOB, 0, 1000, 30.0))) == msg.Done(1)
    assert memory(daemon) == 1000
    assert only(daemon.say("s", msg.ConfirmReservation(2, JOB, 30.0))) == msg.Done(2)
    assert only(daemon.say("s", msg.ReleaseReservation(3, JOB))) == msg.Done(3)
    assert memory(daemon) == 0


def test_the_job_that_is_opened_under_the_id_has_it(daemon):
    daemon.say("s", msg.Reserve(1, JOB, 0, 1 << 20, 30.0))
    daemon.say("s", msg.ConfirmReservation(2, JOB, 30.0))
    daemon.open_job("s", JOB)
    assert memory(daemon) == 1 << 20
    daemon.load("s", JOB, samples.add_one())
    assert memory(daemon, "total_bytes") - memory(daemon, "free_bytes") == 1 << 20
    assert memory(daemon) < 1 << 20
    assert only(daemon.say("s", msg.Reserve(3, JOB, 0, 1000, 30.0))).code == "not_owner"


def test_refusals_have_a_remedy(daemon):
    daemon.say("s", msg.Reserve(1, JOB, 1, 1000, 30.0))
    for message in (
        msg.Reserve(2, OTHER, 1, 1000, 30.0),
        msg.Reserve(2, OTHER, 0, -1, 30.0),
        msg.Reserve(2, OTHER, 0, 1000, 1e9),
        msg.Reserve(2, OTHER, 5, 1000, 30.0),
        msg.Reserve(2, "short", 0, 1000, 30.0),
        msg.ConfirmReservation(2, OTHER, 30.0),
        msg.ConfirmReservation(2, JOB, 30.0),
        msg.ReleaseReservation(2, JOB),
    ):
        refusal = only(daemon.say("t", message))
        assert type(refusal) is msg.Refusal
        assert refusal.ref == 2
        assert refusal.remedy


def test_no_other_job_becomes_high_while_the_place_is_reserved(daemon):
    daemon.open_job("t", OTHER)
    daemon.load("t", OTHER, samples.add_one())
    daemon.say("s", msg.Reserve(1, JOB, int(Priority.HIGH), 1000, 30.0))
    refusal = only(daemon.say("t", msg.ChangeJob(5, OTHER, 1, None)))
    assert refusal.code == "admission_refused"
    assert "high place" in refusal.message
    daemon.say("s", msg.ReleaseReservation(2, JOB))
    assert only(daemon.say("t", msg.ChangeJob(6, OTHER, 1, None))) == msg.Done(6)


def test_the_loop_wakes_up_when_a_lease_is_over(daemon):
    daemon.say("s", msg.Reserve(1, JOB, 0, 1000, 5.0))
    daemon.now += 5.1
    daemon.turn()
    assert memory(daemon) == 0
