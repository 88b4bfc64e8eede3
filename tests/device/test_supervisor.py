"""When another fork server is started, and what waits until it is ready. No process is started here."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from math import inf
from typing import Any

import pytest

from gpumux.device.workers import fork_server
from gpumux.device.workers.fork_server import FIRST_PAUSE_S, LONGEST_PAUSE_S, ForkServer, ForkServerSupervisor


class FakeServer:
    """A fork server that is ready, or gone, when the test says so."""

    wants_write = False

    def __init__(self) -> None:
        self.facts: dict[str, Any] | None = None
        self.gone = False
        self.channel, self._other = socket.socketpair()

    def flush(self) -> None: ...

    def receive(self) -> list[tuple[int, int | str]]:
        if self.gone:
            raise EOFError
        return []

    def close(self) -> str:
        self.channel.close()
        self._other.close()
        return "died of signal 9"


class Epoll:
    def register(self, *_: int) -> None: ...


class Bench:
    """A supervisor on a clock of its own."""

    def __init__(self) -> None:
        self.now = 100.0
        self.made: list[FakeServer] = []
        self.error: OSError | None = None
        self.lost: list[str] = []
        self.able = 0
        self.supervisor = ForkServerSupervisor(Epoll(), self)  # type: ignore[arg-type]

    def make(self, operators: object) -> FakeServer:
        if self.error is not None:
            raise self.error
        self.made.append(FakeServer())
        return self.made[-1]

    def child_exited(self, token: int, status: int | str) -> None: ...

    def can_fork(self, server: ForkServer) -> None:
        self.able += 1

    def fork_server_lost(self, how: str) -> None:
        self.lost.append(how)

    def ready(self) -> None:
        self.made[-1].facts = {}
        self.supervisor.hear()

    def kill(self) -> None:
        self.made[-1].gone = True
        self.supervisor.hear()


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    made = Bench()
    monkeypatch.setattr(fork_server, "ForkServer", made.make)
    monkeypatch.setattr(fork_server, "monotonic", lambda: made.now)
    made.supervisor.start()
    yield made
    made.supervisor.close()


def test_one_that_dies_is_followed_by_another_at_once(bench: Bench) -> None:
    bench.ready()
    bench.kill()
    assert len(bench.made) == 2
    assert bench.supervisor.due == inf
    assert bench.lost == ["ended with the process that started it, which died of signal 9"]


def test_the_first_has_to_start(bench: Bench) -> None:
    bench.kill()
    assert bench.supervisor.server is None
    assert bench.supervisor.due == inf


def test_one_that_dies_before_it_is_ready_is_followed_by_another_after_a_pause(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """No job could run any more until the daemon was started again."""
    bench.ready()
    bench.kill()
    pause = FIRST_PAUSE_S
    for made in range(2, 12):
        bench.kill()
        assert bench.supervisor.server is None
        assert bench.supervisor.due == bench.now + pause
        bench.now += pause / 2
        bench.supervisor.start_due()
        assert len(bench.made) == made
        bench.now += pause / 2
        bench.supervisor.start_due()
        assert len(bench.made) == made + 1
        pause = min(2 * pause, LONGEST_PAUSE_S)
    assert "died of signal 9 before it was ready; it is tried again in 1 s" in caplog.text
    assert bench.able == 1, "nothing is asked of one that is not ready"
    bench.ready()
    bench.kill()
    bench.kill()
    assert bench.supervisor.due == bench.now + FIRST_PAUSE_S


def test_one_that_can_not_be_started_is_tried_again(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """A full disk of temporary files, or no descriptors: it was an error that nothing expected, and the last try."""
    bench.ready()
    bench.error = OSError(errno.ENOSPC, "No space left on device")
    bench.kill()
    assert bench.supervisor.server is None
    assert "can't be started: [Errno 28] No space left on device" in caplog.text
    bench.error = None
    bench.now += FIRST_PAUSE_S
    bench.supervisor.start_due()
    assert bench.supervisor.server is bench.made[-1]
    assert len(bench.made) == 2
