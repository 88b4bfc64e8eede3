"""A coordinator's connection to one daemon, where that does not answer as it should."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from gpumux.coordinator import daemons
from gpumux.coordinator.core import DaemonAway, DaemonFound, Happening
from gpumux.coordinator.daemons import FIRST_PAUSE_S, LONGEST_PAUSE_S, DaemonAddress, DaemonLink
from gpumux.errors import DaemonGone
from gpumux.wire import messages as msg

HERE = DaemonAddress("n", "h", "ipc:///run/n/gpumux.sock")
STATUS = {"daemon": {"endpoints": [HERE.endpoint]}, "memory": {"total_bytes": 1 << 30}, "jobs": []}


class FakeSession:
    """Answers each question with what `bodies` has for it, or raises it."""

    def __init__(self, bodies: dict[type[Any], Any], kind: str = "cpu") -> None:
        self.bodies = bodies
        self.welcome = SimpleNamespace(device={"kind": kind})
        self.dead: DaemonGone | None = None
        self.closed = False

    def call(self, message: Any, timeout: float) -> tuple[msg.Report, None]:
        body = self.bodies[type(message)]
        if isinstance(body, Exception):
            raise body
        return msg.Report(0, body), None

    def close(self) -> None:
        self.closed = True


def attempts(
    monkeypatch: pytest.MonkeyPatch, connect: Callable[[], Any], count: int
) -> tuple[list[Happening], list[float]]:
    """What a link finds, and for how long it pauses, in so many attempts."""
    found: list[Happening] = []
    pauses: list[float] = []
    enough = threading.Event()

    def pause(link: DaemonLink, seconds: float, reason: str) -> None:
        pauses.append(seconds)
        if len(pauses) == count:
            link.end()
            enough.set()

    monkeypatch.setattr(DaemonLink, "_refuse_for", pause)
    monkeypatch.setattr(daemons.Session, "connect", lambda *_, **__: connect())
    link = DaemonLink(HERE, lambda _, happening: found.append(happening))
    assert enough.wait(60.0)
    link.close()
    return found, pauses


@pytest.mark.parametrize("asked", [msg.GetStatus, msg.GetInterference])
@pytest.mark.parametrize("body", [{}, {"daemon": 3, "pairs": 3}, {"pairs": [{"high": None}], "daemon": {}}])
def test_a_daemon_whose_answers_are_not_understood_is_away_and_asked_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch, asked: type[Any], body: dict[str, Any]
):
    sessions: list[FakeSession] = []

    def connect() -> FakeSession:
        sessions.append(FakeSession({msg.GetStatus: STATUS, msg.GetInterference: {"pairs": []}, asked: body}))
        return sessions[-1]

    found, pauses = attempts(monkeypatch, connect, 8)
    away = [each for each in found if isinstance(each, DaemonAway)]
    assert away
    assert all(each.node == "n" and "not understood" in each.reason for each in away)
    assert pauses == [min(FIRST_PAUSE_S * 2**at, LONGEST_PAUSE_S) for at in range(8)]
    assert all(session.closed for session in sessions)
    assert len(sessions) == 8


def test_a_daemon_that_ends_at_once_each_time_is_asked_less_and_less_often(monkeypatch: pytest.MonkeyPatch):
    gone = DaemonGone("it ended")
    bodies = {msg.GetStatus: STATUS, msg.GetInterference: gone}
    found, pauses = attempts(monkeypatch, lambda: FakeSession(bodies), 4)
    assert pauses == [FIRST_PAUSE_S * 2**at for at in range(4)]
    assert [type(each) for each in found] == [DaemonFound, DaemonAway] * 4
    assert {each.reason for each in found if isinstance(each, DaemonAway)} == {"it ended"}


def test_one_that_can_not_be_reached_is_not_said_to_be_away_each_time(monkeypatch: pytest.MonkeyPatch):
    def refuse() -> FakeSession:
        raise DaemonGone("no daemon answers")

    found, pauses = attempts(monkeypatch, refuse, 3)
    assert found == [DaemonAway("n", "no daemon answers", "h")]
    assert pauses == [FIRST_PAUSE_S * 2**at for at in range(3)]


def test_a_coordinator_is_no_daemon(monkeypatch: pytest.MonkeyPatch):
    found, _ = attempts(monkeypatch, lambda: FakeSession({}, "cluster"), 2)
    assert all(isinstance(each, DaemonAway) and "is a coordinator's endpoint" in each.reason for each in found)
    assert found
