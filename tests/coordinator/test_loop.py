"""What other threads ask a coordinator's loop, and how they see that it does not turn."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpumux.coordinator.core import Coordinator, CoordinatorConfig
from gpumux.coordinator.loop import CoordinatorLoop
from gpumux.wire.limits import Limits
from gpumux.wire.router import Router


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
