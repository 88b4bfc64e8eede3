"""ChangeJob: which sessions may send it, what is refused, and that Done means that the change is in force."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpumux.access import Rule
from gpumux.config import Config
from gpumux.daemon.requests import MAX_CHANGES
from gpumux.types import Fault, Priority
from gpumux.wire import messages as msg
from tests.daemon.stepping import JOB, only, step
from tests.program import samples

from .fakes import Daemon, FakeDevice

LIMITED = Rule("students", users=frozenset({1000}), max_priority=Priority.LOW, max_weight=2.0)
ADMINS = Rule("admins", users=frozenset({2000}), operator=True, max_priority=Priority.LOW)
NO = Fault("refused", "it can't be", "leave it")


class Regraded(FakeDevice):
    """A device that records changes of priority."""

    def __init__(self):
        super().__init__()
        self.told: list[tuple[str, Priority]] = []
        self.refuses: Fault | None = None

    def may_regrade(self, priority):
        return self.refuses

    def regrade(self, job, priority):
        self.told.append((job, priority))


@pytest.fixture
def running():
    daemon = Daemon(Config(rules=(LIMITED, ADMINS)), device=Regraded())
    daemon.connect("s")
    daemon.open_job("s", JOB)
    daemon.load("s", JOB, samples.add_one())
    yield daemon
    daemon.close()


def shown(daemon) -> tuple[str, float]:
    (job,) = only(daemon.say("s", msg.GetStatus(99))).body["jobs"]
    return job["priority"], job["weight"]


def test_done_is_said_when_it_is_so(running):
    running.connect("root", uid=0)
    running.say("s", step(1))
    assert running.say("root", msg.ChangeJob(5, JOB, 1, 4.0)) == [], "a piece is out"
    assert running.device.told == []
    running.device.finish(running.now)
    assert only(running.hear("root")) == msg.Done(5)
    assert shown(running) == ("high", 4.0)
    assert running.device.told == [(JOB, Priority.HIGH)]
    running.say("s", step(2))
    assert running.device.launched[-1].stream == 1


def test_a_weight_is_in_force_at_once_and_the_device_has_nothing_to_do_with_it(running):
    running.say("s", step(1))
    assert only(running.say("s", msg.ChangeJob(5, JOB, None, 1.5))) == msg.Done(5)
    assert shown(running) == ("low", 1.5)
    assert running.device.told == []


def test_a_client_that_asks_several_times_is_answered_each_time(running):
    running.connect("root", uid=0)
    running.say("s", step(1))
    for ref in range(1, MAX_CHANGES + 1):
        assert running.say("root", msg.ChangeJob(ref, JOB, 1, None)) == []
    assert only(running.say("root", msg.ChangeJob(90, JOB, 1, None))).code == "admission_refused"
    running.device.finish(running.now)
    assert [m.ref for m, _ in running.hear("root")] == list(range(1, MAX_CHANGES + 1))


def test_a_job_that_ends_first_answers_with_a_refusal(running):
    running.connect("root", uid=0)
    running.say("s", step(1))
    running.say("root", msg.ChangeJob(5, JOB, 1, None))
    running.say("s", msg.CloseJob(6, JOB, False))
    heard = [m for _, m, _ in running.router.sent if getattr(m, "ref", 0) == 5]
    assert [(type(m), m.code) for m in heard] == [(msg.Refusal, "job_closed")]
    assert only(running.say("root", msg.ChangeJob(7, JOB, 1, None))).code in ("job_closed", "unknown_job")


def test_a_client_that_asked_and_left_is_no_trouble(running):
    running.connect("root", uid=0)
    running.say("s", step(1))
    running.say("root", msg.ChangeJob(5, JOB, 1, None))
    running.disconnect("root")
    running.device.finish(running.now)
    running.hear("s")
    assert shown(running)[0] == "high"


@pytest.mark.parametrize(
    ("uid", "message", "code"),
    [
        (1000, msg.ChangeJob(5, JOB, 1, None), "access_denied"),
        (1000, msg.ChangeJob(5, JOB, None, 2.5), "access_denied"),
        (1000, msg.ChangeJob(5, JOB, 0, 2.0), ""),
        (1001, msg.ChangeJob(5, JOB, 0, None), "not_owner"),
        (0, msg.ChangeJob(5, JOB, 1, 900.0), ""),
        (2000, msg.ChangeJob(5, JOB, 1, 900.0), ""),  # what an operator may submit is another matter
        (2000, msg.ChangeJob(5, JOB, None, 1e9), "refused"),
        (0, msg.ChangeJob(5, JOB, 2, None), "protocol"),
        (0, msg.ChangeJob(5, JOB, None, None), "protocol"),
        (0, msg.ChangeJob(5, "f" * 32, 1, None), "unknown_job"),
    ],
)
def test_owners_and_operators_may_change_what_the_rules_say(running, uid, message, code):
    running.connect("t", uid=uid)
    before = shown(running)
    answer = only(running.say("t", message))
    assert getattr(answer, "code", "") == code
    if code:
        assert answer.remedy
        assert shown(running) == before


def test_what_the_device_can_not_do_is_refused_before_anything_changes(running):
    running.connect("root", uid=0)
    running.device.refuses = NO
    answer = only(running.say("root", msg.ChangeJob(5, JOB, 1, 3.0)))
    assert (answer.code, answer.message, answer.remedy) == ("refused", "it can't be", "leave it")
    assert shown(running) == ("low", 1.0)


class ForWaves(Regraded):
    """A device whose programs are for one of two waves while `waves` is set."""

    waves = False

    def _check(self, job, program, encoded):
        super()._check(job, program, encoded)
        if self.waves:
            checked = self.events[-1]
            self.events[-1] = replace(checked, footprint=replace(checked.footprint, arena_bytes=64))


def test_a_job_of_which_any_program_is_for_waves_stays_low():
    daemon = Daemon(device=ForWaves())
    daemon.connect("s")
    daemon.open_job("s", JOB)
    for number, waves in enumerate((False, True, False)):
        daemon.device.waves = waves
        daemon.load("s", JOB, samples.add_one(), number)
    daemon.connect("root", uid=0)
    answer = only(daemon.say("root", msg.ChangeJob(5, JOB, 1, 3.0)))
    assert answer.code == "refused"
    assert "trains two waves" in answer.message
    assert shown(daemon) == ("low", 1.0)
    assert daemon.device.told == []
    assert only(daemon.say("root", msg.ChangeJob(6, JOB, None, 3.0))) == msg.Done(6)
    daemon.close()
