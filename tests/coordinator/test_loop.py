"""What other threads ask a coordinator's loop, and how they see that it does not turn."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpumux.cluster.events import PairMeasured
from gpumux.coordinator.core import Coordinator, CoordinatorConfig
from gpumux.coordinator.journal import Journal
from gpumux.coordinator.loop import CoordinatorLoop
from gpumux.types import Peer, SessionId
from gpumux.wire import messages as msg
from gpumux.wire.limits import Limits
from gpumux.wire.router import Incoming, Opened, Router


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory with a short name, for sockets."""
    made = Path(tempfile.mkdtemp(prefix="gm-"))
    yield made
    shutil.rmtree(made)


def test_a_question_that_is_not_answered_tells_for_how_long_the_loop_has_not_turned(place: Path):
    now = [5.0]
    router = Router((f"ipc://{place}/gpumux.sock",), place, Limits(), None)
    coordinator = Coordinator(CoordinatorConfig(), lambda peer: ("ada", "vision"))
    loop = CoordinatorLoop(coordinator, router, [], journal=None, clock=lambda: now[0])
    turning = threading.Thread(target=loop.run)
    try:
        assert (loop.turning, loop.silent_s(), loop.leaving) == (False, 0.0, "")
        with pytest.raises(TimeoutError):
            loop.ask(lambda asked: "too late", 0.0)
        assert loop.silent_s() == 0.0
        now[0] = 36.0
        assert loop.silent_s() == 31.0, "since it was asked first"
        turning.start()
        assert loop.ask(lambda asked: asked) is coordinator
        assert loop.turning
        assert loop.silent_s() == 0.0, "the older one is answered, too"
    finally:
        loop.stop("told to stop")
        assert loop.leaving == "told to stop"
        if turning.ident is not None:
            turning.join()
            assert not loop.turning
        loop.close()
        router.close("the test is over")


def test_a_loop_goes_on_by_the_clock_that_was_kept_does_what_is_due_and_keeps_what_was_learned(place: Path):
    """A job's client does not come back, and nothing happens but time."""
    config, now = CoordinatorConfig(rejoin_s=30.0), [5.0]
    journal = Journal(place / "state")
    before = Coordinator(config, lambda peer: ("ada", "vision"))
    me = Peer(1000, 1000, 7)
    before.handle(
        Opened(SessionId("s"), me, msg.Hello(msg.PROTOCOL_VERSION, "0", "control", 1, "", False), False), 999.0
    )
    place_job = msg.PlaceJob(1, f"{1:032x}", "a job", 0, 1, 1, [], 0, True, 0)
    before.handle(Incoming(SessionId("s"), me, place_job, []), 1000.0)
    journal.keep(before)
    router = Router((f"ipc://{place}/gpumux.sock",), place, Limits(), None)
    kept = journal.load(config, lambda peer: ("ada", "vision"))
    loop = CoordinatorLoop(kept, router, [], journal=journal, clock=lambda: now[0])
    turning = threading.Thread(target=loop.run)
    try:
        turning.start()
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
        turning.join()
        loop.close()
        router.close("the test is over")
        journal.close()
    again = Journal(place / "state")
    assert len(again.load(config, lambda peer: ("ada", "vision")).placement.costs) == 2
    again.close()
