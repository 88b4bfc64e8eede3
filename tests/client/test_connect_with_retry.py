"""`connect_with_retry`: submitting while daemons start and end, with sessions that end when a test says so."""

from __future__ import annotations

from typing import Any

import pytest

from gpumux.client import session as sessions_module
from gpumux.client.session import TRIES, connect_with_retry
from gpumux.errors import AdmissionRefused, DaemonGone

GONE = DaemonGone("the daemon is gone", "start it")


class Sessions:
    """`connect` fails where `absent` says so."""

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.absent: list[bool] = []

    def connect(self, timeout: float) -> Any:
        if self.absent and self.absent.pop(0):
            raise GONE
        self.made.append(
            type("S", (), {"dead": None, "closed": False, "close": lambda self: setattr(self, "closed", True)})()
        )
        return self.made[-1]


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> Sessions:
    made, now = Sessions(), [0.0]
    monkeypatch.setattr(sessions_module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(sessions_module.time, "sleep", lambda s: now.__setitem__(0, now[0] + s))
    return made


def die(session: Any) -> None:
    session.dead = GONE
    raise GONE


def test_one_that_dies_is_followed_by_another_when_there_is_one(sessions: Sessions) -> None:
    sessions.absent = [False, True, True, False]
    assert connect_with_retry(lambda s: die(s) if len(sessions.made) == 1 else "job", sessions.connect, 60.0) == "job"
    assert [s.closed for s in sessions.made] == [True, False]


def test_no_daemon_to_begin_with_is_an_error_at_once(sessions: Sessions) -> None:
    sessions.absent = [True, False]
    with pytest.raises(DaemonGone):
        connect_with_retry(lambda s: "job", sessions.connect, 60.0)
    assert not sessions.made


@pytest.mark.parametrize(
    "error", [AdmissionRefused("full", "wait"), DaemonGone("it did not answer", "look"), KeyboardInterrupt()]
)
def test_what_happens_on_a_session_that_lives_is_raised(sessions: Sessions, error: BaseException) -> None:
    def fail(session: Any) -> None:
        raise error

    with pytest.raises(type(error)):
        connect_with_retry(fail, sessions.connect, 60.0)
    assert [s.closed for s in sessions.made] == [True]


def test_nothing_is_tried_again_where_the_user_wants_none_of_it(sessions: Sessions) -> None:
    with pytest.raises(DaemonGone):
        connect_with_retry(die, sessions.connect, 0.0)
    assert len(sessions.made) == 1


def test_one_that_kills_every_daemon_is_not_tried_for_ever(sessions: Sessions) -> None:
    with pytest.raises(DaemonGone):
        connect_with_retry(die, sessions.connect, 60.0)
    assert len(sessions.made) == TRIES
    assert all(s.closed for s in sessions.made)


def test_a_daemon_that_stays_away_is_waited_for_so_long(sessions: Sessions) -> None:
    sessions.absent = [False] + [True] * 1000
    with pytest.raises(DaemonGone, match=r"could not be had back within 60 s"):
        connect_with_retry(die, sessions.connect, 60.0)
