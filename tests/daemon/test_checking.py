"""Checks of Programs: users in turn, so that one user's slow ones do not delay another's."""

from __future__ import annotations

import math

import pytest

from gpumux.daemon import context
from gpumux.daemon.context import CHECKED_PER_S, CheckQueue
from gpumux.daemon.requests import MAX_UNLOADED
from gpumux.program import codec
from gpumux.wire import messages as msg
from tests.program import samples

from .fakes import Daemon

PROGRAM = codec.encode(samples.add_one())


@pytest.fixture
def daemon():
    daemon = Daemon()
    daemon.device.slow = True
    yield daemon
    daemon.close()


def job(number):
    return f"{number:032x}"


def offer(daemon, who, uid, count, first):
    """`count` jobs of one user, each with a Program to check."""
    daemon.connect(who, uid)
    for number in range(first, first + count):
        daemon.open_job(who, job(number))
        assert daemon.load(who, job(number), PROGRAM) == []


def under_check(daemon):
    return [item.job for item in daemon.device.work]


def test_a_user_with_many_checks_leaves_a_place_to_the_next(daemon):
    offer(daemon, "hog", 1000, 6, first=0)
    assert under_check(daemon) == [job(0)]
    offer(daemon, "honest", 1001, 1, first=10)
    assert under_check(daemon) == [job(0), job(10)]


def test_users_take_turns(daemon):
    offer(daemon, "a", 1000, 3, first=0)
    offer(daemon, "b", 1001, 3, first=10)
    offer(daemon, "c", 1002, 1, first=20)
    order = under_check(daemon)
    while len(order) < 7:
        daemon.device.work.popleft().run()  # a check ends; the load that follows waits behind the others
        daemon.turn()
        order += [name for name in under_check(daemon) if name not in order]
    assert order == [job(n) for n in (0, 10, 1, 11, 20, 2, 12)]


def test_a_users_sessions_take_turns(daemon):
    offer(daemon, "sweep", 1000, 3, first=0)
    offer(daemon, "notebook", 1000, 1, first=10)
    order = under_check(daemon)
    while len(order) < 4:
        daemon.device.work.popleft().run()
        daemon.turn()
        order += [name for name in under_check(daemon) if name not in order]
    assert order == [job(n) for n in (0, 1, 10, 2)]


def test_the_checks_of_a_job_that_ends_make_room(daemon):
    offer(daemon, "a", 1000, 2, first=0)
    daemon.say("a", msg.CloseJob(daemon.ref(), job(0), False))
    assert under_check(daemon) == [job(1)]
    daemon.disconnect("a")
    assert under_check(daemon) == []
    offer(daemon, "b", 1001, 1, first=10)
    assert under_check(daemon) == [job(10)]


def test_what_one_user_has_waiting_is_bounded(daemon):
    daemon.connect("a")
    for number in range(8):
        daemon.open_job("a", job(number))
    answers = []
    for number in range(MAX_UNLOADED + 1):
        answers += daemon.load("a", job(number % 8), PROGRAM, number // 8)
    ((refusal, _),) = answers
    assert (type(refusal), refusal.code) == (msg.Refusal, "admission_refused")
    daemon.open_job(daemon.connect("b", 1001), job(20))
    assert daemon.load("b", job(20), PROGRAM) == []
    assert job(20) in under_check(daemon)


@pytest.mark.parametrize(("at_once", "share"), [(1, 1), (2, 1), (4, 3), (32, 24)])
def test_no_user_has_all_places(at_once, share):
    asked = []

    class Device:
        def check(self, job, program, encoded, user=None):
            asked.append(job)

    class Thing:
        def __init__(self, **values):
            self.__dict__.update(values)

    queue = CheckQueue(Device(), at_once, lambda: 0.0)
    session = Thing(id="s", peer=Thing(uid=1))
    for number in range(40):
        queue.submit(Thing(id=number, session=session), Thing(id=0, encoded=b""))
    assert asked == list(range(share))


def test_a_user_with_many_programs_waits_for_more_and_keeps_no_other_waiting(daemon, monkeypatch):
    """Each costs a fork, however short its check. Trusted users never wait."""
    monkeypatch.setattr(context, "CHECKED_AT_ONCE", 3)
    monkeypatch.setattr(context, "TRUSTED", frozenset({0}))
    daemon.device.slow = False  # checks end at once
    checks = daemon.loop.context.checks
    assert loaded(daemon, "a", 1000, 5, first=0) == [True, True, True, False, False]
    assert loaded(daemon, "b", 1001, 1, first=10) == [True]
    assert loaded(daemon, "root", 0, 5, first=20) == [True] * 5
    for more in (3, 4):
        daemon.now += 1.001 / CHECKED_PER_S
        daemon.turn()
        assert [m.job for _, m, _ in daemon.router.sent if isinstance(m, msg.ProgramLoaded)][-1] == job(more)
        assert (checks.due == math.inf) == (more == 4)


def loaded(daemon, who, uid, count, first):
    """For each of so many jobs whether its Program was loaded at once."""
    daemon.connect(who, uid)
    found = []
    for number in range(first, first + count):
        daemon.open_job(who, job(number))
        found.append(bool(daemon.load(who, job(number), PROGRAM)))
    return found
