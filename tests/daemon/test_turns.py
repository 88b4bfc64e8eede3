"""Questions are answered one a turn and in a part of the time, jobs opened so many a second: they delay no steps."""

from __future__ import annotations

import math
import os
from contextlib import ExitStack

import pytest

from gpumux.config import Config
from gpumux.daemon import context
from gpumux.daemon.context import MAX_WAITING, OPENED_AT_ONCE, OPENED_PER_S, QUESTIONS_SHARE
from gpumux.errors import AdmissionRefused
from gpumux.wire import listen as connections
from gpumux.wire import messages as msg
from gpumux.wire.router import Incoming
from tests.daemon.stepping import JOB, only, step
from tests.program import samples

from .fakes import Daemon


@pytest.fixture
def daemon():
    daemon = Daemon()
    for name, uid in (("s", 1000), ("s2", 1000), ("t", 1001)):
        daemon.connect(name, uid=uid)
    daemon.open_job("t", JOB)
    daemon.load("t", JOB, samples.add_one())
    yield daemon
    daemon.close()


def ask(daemon: Daemon, session: str, *refs: int) -> None:
    for ref in refs:
        daemon.router.arrivals.append(Incoming(session, daemon.router.open[session], msg.GetStatus(ref), []))


def answered(daemon: Daemon) -> list[tuple[str, int, str]]:
    new = daemon.router.sent[daemon.router.read :]
    daemon.router.read = len(daemon.router.sent)
    return [(to, m.ref, type(m).__name__) for to, m, _ in new if hasattr(m, "ref")]


def test_one_a_turn_users_in_turn_and_a_step_does_not_wait_for_the_rest(daemon):
    answered(daemon)
    ask(daemon, "s", *range(1, 9))
    ask(daemon, "s2", 11, 12)
    ask(daemon, "t", 21)
    daemon.router.arrivals.append(Incoming("t", daemon.router.open["t"], step(1), []))
    daemon.loop.turn()
    assert len(daemon.device.launched) == 1, "the step that came behind them"
    assert answered(daemon) == [("s", 1, "Report")]
    daemon.loop.turn()
    assert answered(daemon) == [("t", 21, "Report")], "the other user comes next, not whoever asked first"
    for _ in range(4):
        daemon.loop.turn()
    assert [to for to, _, _ in answered(daemon)] == ["s2", "s", "s2", "s"]
    daemon.turn()
    assert [ref for _, ref, _ in answered(daemon)] == [4, 5, 6, 7, 8]


def test_too_many_at_once_are_refused(daemon):
    answered(daemon)
    ask(daemon, "s", *range(1, MAX_WAITING + 11))
    daemon.turn()
    found = answered(daemon)
    assert sum(kind == "Refusal" for _, _, kind in found) == 10
    assert sum(kind == "Report" for _, _, kind in found) == MAX_WAITING


def test_a_question_whose_job_is_gone_when_its_turn_comes_is_refused(daemon):
    ask(daemon, "s", 1, 2, 3)
    for message in (msg.JobStats(31, JOB), msg.ExplainJob(32, JOB), msg.CloseJob(33, JOB, False)):
        daemon.router.arrivals.append(Incoming("t", daemon.router.open["t"], message, []))
    daemon.turn()
    assert {(ref, kind) for to, ref, kind in answered(daemon) if to == "t"} >= {(31, "Refusal"), (32, "Refusal")}


def test_questions_take_a_fixed_part_of_the_time(daemon):
    """An answer takes two milliseconds here, so the next one comes eight later."""

    def slow():
        daemon.now += 0.002

    session = daemon.loop.context.records.sessions["s"]
    questions = daemon.loop.context.questions
    for _ in range(3):
        questions.add(session, slow)
    daemon.loop.turn()
    assert len(questions.waiting.items[session.peer.uid]["s"]) == 2
    assert questions.due == pytest.approx(daemon.now + 0.002 * (1 / QUESTIONS_SHARE - 1))
    daemon.loop.turn()
    daemon.now = questions.due - 1e-6
    daemon.loop.turn()
    assert len(questions.waiting.items[session.peer.uid]["s"]) == 2
    daemon.now = questions.due
    daemon.loop.turn()
    assert len(questions.waiting.items[session.peer.uid]["s"]) == 1


def test_between_turns_of_a_flood_others_get_the_core(daemon, monkeypatch):
    yielded = []
    monkeypatch.setattr(os, "sched_yield", lambda: yielded.append(True))
    sockets = daemon.loop._sockets
    monkeypatch.setattr(sockets, "touched", True, raising=False)
    for unread in (False, True):
        monkeypatch.setattr(sockets, "unread", lambda unread=unread: unread, raising=False)
        monkeypatch.setattr(daemon.loop._waiter, "wait", lambda seconds: ({"clients"}, []))
        daemon.loop._wait()
        assert bool(yielded) == unread


@pytest.fixture
def made(monkeypatch):
    """Makes daemons."""
    monkeypatch.setattr(context, "OPENED_AT_ONCE", 1)
    with ExitStack() as stack:

        def make(config):
            daemon = Daemon(config)
            stack.callback(daemon.close)
            return daemon

        yield make


def opened(daemon):
    found = [(to, message.job) for to, message, _ in daemon.router.sent if isinstance(message, msg.JobOpened)]
    daemon.router.sent.clear()
    daemon.router.read = 0
    return found


def ask_to_open(daemon, session, *numbers):
    for n in numbers:
        message = msg.OpenJob(n, f"{n:032x}", "x", 0, 1.0, 1.1, None, 2, 0)
        daemon.router.arrivals.append(Incoming(session, daemon.router.open[session], message, []))


def test_a_user_that_opens_one_job_after_another_waits_and_keeps_no_other_waiting(made):
    daemon = made(Config(max_jobs_per_user=3))
    daemon.connect("s", uid=1000)
    daemon.connect("t", uid=1001)
    for n in range(1, 4):
        ask_to_open(daemon, "s", n)
        daemon.turn()
        daemon.say("s", msg.CloseJob(100 + n, f"{n:032x}", False))
    opened(daemon)
    ask_to_open(daemon, "s", 4, 5)
    ask_to_open(daemon, "t", 6)
    daemon.turn()
    assert [to for to, _ in opened(daemon)] == ["t"], "three were opened at once; the next have to wait"
    daemon.now += 1.001 / OPENED_PER_S
    daemon.turn()
    assert [job for _, job in opened(daemon)] == [f"{4:032x}"]
    daemon.now += 1.001 / OPENED_PER_S
    daemon.turn()
    assert [job for _, job in opened(daemon)] == [f"{5:032x}"]
    assert daemon.loop.context.openings.due == math.inf


def test_few_jobs_at_a_time_may_still_be_opened_one_after_another():
    daemon = Daemon(Config(max_jobs_per_user=1))
    daemon.connect("s", uid=1000)
    for n in range(OPENED_AT_ONCE):
        ask_to_open(daemon, "s", n)
        daemon.turn()
        daemon.say("s", msg.CloseJob(100 + n, f"{n:032x}", False))
    assert len(opened(daemon)) == OPENED_AT_ONCE
    daemon.close()


def test_jobs_that_wait_to_be_opened_are_bounded_and_go_with_their_session(made):
    daemon = made(Config(max_jobs_per_user=1))
    daemon.connect("s", uid=1000)
    ask_to_open(daemon, "s", *range(1, MAX_WAITING + 5))
    daemon.turn()
    refused = [message for _, message, _ in daemon.router.sent if isinstance(message, msg.Refusal)]
    assert [message.code for message in refused] == ["admission_refused"] * 3
    assert "wait for JobOpened" in refused[0].remedy
    daemon.disconnect("s")
    assert not daemon.loop.context.openings.waiting.items
    daemon.now += 100.0
    daemon.turn()
    assert daemon.loop.context.openings.due == math.inf


def test_a_session_that_leaves_is_answered_no_more(daemon):
    ask(daemon, "s", 1, 2, 3)
    daemon.loop.turn()
    daemon.disconnect("s")
    assert not daemon.loop.context.questions.waiting.items
    assert only(daemon.say("t", msg.GetStatus(5))).ref == 5


def test_nothing_is_begun_with_the_last_descriptors(daemon, monkeypatch):
    monkeypatch.setattr(connections, "file_limit", lambda: 8)
    for message, frames in (
        (msg.OpenJob(1, "b" * 32, "x", 0, 1.0, 1.1, None, 2, 0), []),
        (msg.LoadProgram(2, JOB, 1, [], []), [b"x"]),
        (msg.OpenTransfer(3, JOB, 1, [], True), []),
    ):
        session = "s" if message.ref == 1 else "t"
        answer = only(daemon.say(session, message, *frames))
        assert answer.code == "admission_refused"
        assert "LimitNOFILE" in answer.remedy
    with pytest.raises(AdmissionRefused, match="8 descriptors"):
        connections.check_descriptors()
