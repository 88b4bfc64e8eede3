"""What other threads ask a coordinator's loop, and how they see that it does not turn."""

from __future__ import annotations

import queue
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any, cast

import pytest

from gpumux.cluster.events import (
    ConfirmDevice,
    DeviceConfirmed,
    DeviceFacts,
    DeviceReserved,
    PairMeasured,
    ReserveDevice,
)
from gpumux.coordinator import daemons
from gpumux.coordinator.config import address
from gpumux.coordinator.core import Coordinator, CoordinatorConfig, DaemonFound, Order, PromiseSeen
from gpumux.coordinator.journal import Journal
from gpumux.coordinator.loop import CoordinatorLoop
from gpumux.types import Peer, SessionId
from gpumux.wire import messages as msg
from gpumux.wire.limits import Limits
from gpumux.wire.router import Closed, Incoming, Opened, Router

ME = Peer(1000, 1000, 7)
HELLO = msg.Hello(msg.PROTOCOL_VERSION, "0", "control", 1, "", False)


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory with a short name, for sockets."""
    made = Path(tempfile.mkdtemp(prefix="gm-"))
    yield made
    shutil.rmtree(made)


def arrivals() -> tuple[Opened, Incoming]:
    """A client, and its job."""
    place_job = msg.PlaceJob(1, f"{1:032x}", "a job", 0, 1, 1, [], 0, True, 0)
    return Opened(SessionId("s"), ME, HELLO, False), Incoming(SessionId("s"), ME, place_job, [])


class PlayedRouter:
    """A router without sockets. `received` and `expired` are what it has next of each."""

    def __init__(self) -> None:
        self.received: list[Any] = []
        self.expired: list[Any] = []
        self.sent: queue.SimpleQueue[msg.Message] = queue.SimpleQueue()

    def fds(self) -> tuple[int, ...]:
        return ()

    def next_deadline(self, now: float) -> float:
        return inf

    def receive(self, now: float) -> list[Any]:
        found, self.received = self.received, []
        return found

    def expire(self, now: float) -> list[Any]:
        found, self.expired = self.expired, []
        return found

    def send(self, session: SessionId, message: msg.Message) -> None:
        self.sent.put(message)


class PlayedLink:
    """The connection to a daemon that grants everything at once. `say`: have it report something."""

    made: dict[str, PlayedLink]

    def __init__(self, where: daemons.DaemonAddress, report: Any) -> None:
        self.address, self._report, self.alive = where, report, False
        self.made[where.node] = self
        self.say(DaemonFound(where.node, where.host, (where.endpoint,), DeviceFacts(2**30)))

    def say(self, happening: Any) -> None:
        self._report(self, happening)

    def order(self, order: Order) -> None:
        match order.command:
            case ReserveDevice():
                self.say(DeviceReserved(order.command.attempt, order.command.device))
            case ConfirmDevice():
                self.say(DeviceConfirmed(order.command.attempt, order.command.device))

    def end(self) -> None:
        pass

    close = end


@contextmanager
def turning(router: PlayedRouter) -> Iterator[CoordinatorLoop]:
    """A loop that turns in a thread of its own, on a clock that stands."""
    coordinator = Coordinator(CoordinatorConfig(), lambda peer: ("ada", "vision"))
    loop = CoordinatorLoop(coordinator, cast("Router", router), [], journal=None, clock=lambda: 5.0)
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        yield loop
    finally:
        loop.stop("the test is over")
        thread.join()
        loop.close()


def test_a_client_that_was_silent_for_too_long_is_away():
    router = PlayedRouter()
    router.received += arrivals()
    router.expired.append(Closed(SessionId("s"), ME, "nothing was heard"))
    with turning(router) as loop:
        loop.ask(lambda asked: None)
        assert loop.ask(lambda asked: [job.session for job in asked.jobs.values()]) == [None]


def test_daemons_that_left_are_not_listened_to_and_refuse_what_is_ordered_of_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Both daemons of a cluster leave at once. The job of one of them is placed at the other, before the coordinator
    has heard that this one has left, too."""
    caplog.set_level("INFO", "gpumux.coordinator")
    monkeypatch.setattr(daemons, "DaemonLink", PlayedLink)
    PlayedLink.made = {}
    router = PlayedRouter()
    with turning(router) as loop:
        loop.follow([address(f"ipc:///nowhere/{name}/gpumux.sock", name, "h") for name in "ab"])
        router.received += arrivals()
        assert isinstance(router.sent.get(timeout=60.0), msg.Done)
        placed = router.sent.get(timeout=60.0)
        assert isinstance(placed, msg.JobPlaced)
        assert placed.nodes == ["a"]
        loop.follow([])
        while loop.ask(lambda asked: asked.daemons):
            pass
        (job,) = loop.ask(lambda asked: list(asked.placement.jobs.values()))
        assert (job.holds, job.began) == (False, True)
        for link in PlayedLink.made.values():
            link.say(PromiseSeen(link.address.node, True, "kept"))
        loop.ask(lambda asked: None)
        assert loop.ask(lambda asked: asked.daemons) == {}
    refusals = [record.getMessage() for record in caplog.records if "refused job" in record.getMessage()]
    assert refusals == ["node b refused job 00000000: its daemon has left the cluster"]


def test_a_question_that_is_not_answered_tells_for_how_long_the_loop_has_not_turned(place: Path):
    now = [5.0]
    router = Router((f"ipc://{place}/gpumux.sock",), place, Limits(), None)
    coordinator = Coordinator(CoordinatorConfig(), lambda peer: ("ada", "vision"))
    loop = CoordinatorLoop(coordinator, router, [], journal=None, clock=lambda: now[0])
    thread = threading.Thread(target=loop.run)
    try:
        assert (loop.turning, loop.silent_s(), loop.leaving) == (False, 0.0, "")
        with pytest.raises(TimeoutError):
            loop.ask(lambda asked: "too late", 0.0)
        assert loop.silent_s() == 0.0
        now[0] = 36.0
        assert loop.silent_s() == 31.0, "since it was asked first"
        thread.start()
        assert loop.ask(lambda asked: asked) is coordinator
        assert loop.turning
        assert loop.silent_s() == 0.0, "the older one is answered, too"
    finally:
        loop.stop("told to stop")
        assert loop.leaving == "told to stop"
        if thread.ident is not None:
            thread.join()
            assert not loop.turning
        loop.close()
        router.close("the test is over")


def test_a_loop_goes_on_by_the_clock_that_was_kept_does_what_is_due_and_keeps_what_was_learned(place: Path):
    """A job's client does not come back, and nothing happens but time."""
    config, now = CoordinatorConfig(rejoin_s=30.0), [5.0]
    journal = Journal(place / "state")
    before = Coordinator(config, lambda peer: ("ada", "vision"))
    opened, placing = arrivals()
    before.handle(opened, 999.0)
    before.handle(placing, 1000.0)
    journal.keep(before)
    router = Router((f"ipc://{place}/gpumux.sock",), place, Limits(), None)
    kept = journal.load(config, lambda peer: ("ada", "vision"))
    loop = CoordinatorLoop(kept, router, [], journal=journal, clock=lambda: now[0])
    thread = threading.Thread(target=loop.run)
    try:
        thread.start()
        assert loop.ask(lambda asked: (len(asked.jobs), loop.now())) == (1, 1000.0)
        now[0] = 34.0
        assert loop.ask(lambda asked: (len(asked.jobs), loop.now())) == (1, 1029.0)
        now[0] = 36.0
        loop.ask(lambda asked: None)  # what is due is done in the same turn, after questions
        assert loop.ask(lambda asked: len(asked.jobs)) == 0
        loop.ask(lambda asked: asked.placement.costs.learn(PairMeasured("h", "l", 1.5, 0.5)))
        loop.ask(lambda asked: asked.placement.costs.learn(PairMeasured("h", "m", 1.5, 0.5)))
    finally:
        loop.stop("told to stop")
        thread.join()
        loop.close()
        router.close("the test is over")
        journal.close()
    again = Journal(place / "state")
    assert len(again.load(config, lambda peer: ("ada", "vision")).placement.costs) == 2
    again.close()
