"""Which steps the core would launch at once, so that a device may take them unasked. That it then does is
shown on random lives in test_properties.py."""

from __future__ import annotations

import pytest

from tests.scheduler.world import World


@pytest.fixture(params=["guarded", "paced", "streams", "fifo"])
def world(request):
    return World(request.param)


def test_a_job_alone_may_run_its_steps(world):
    world.job("a")
    assert world.core.standing("a") == {0: 0}
    world.step("a", 1)
    assert world.core.standing("a") == {}  # while one runs, the next waits its turn
    (launch,) = world.launches
    world.done(launch)
    assert world.core.standing("a") == {0: 0}


def test_only_programs_of_one_piece_and_ready_ones(world):
    world.job("a", pieces=(1e-4, 1e-4))
    assert world.core.standing("a") == {}
    world.program("a", 1, (1e-4,))
    world.offer("a", 2)
    assert world.core.standing("a") == {1: 0}
    world.ready("a", 0, 1, (2e-4,))
    assert world.core.standing("a") == {0: 1, 1: 0}


def test_not_beside_work_of_others_not_paused_and_not_unknown(world):
    world.job("a", "high")
    world.job("b", "high")
    assert world.core.standing("a") == {0: 0}  # b is there and wants nothing
    world.step("b", 1)
    assert world.core.standing("a") == {}
    (launch,) = world.launches
    world.done(launch)
    world.pause("a")
    assert world.core.standing("a") == {}
    world.resume("a")
    assert world.core.standing("a") == {0: 0}
    world.transfer("a", 1)
    assert world.core.standing("a") == {}
    assert world.core.standing("nobody") == {}


def test_not_low_work_where_a_high_job_may_come_back_any_moment(world):
    world.job("low")
    assert world.core.standing("low") == {0: 0}
    world.job("high", "high")
    assert world.core.standing("low") == {}
    assert world.core.standing("high") == {0: 0}


def test_not_while_a_job_that_is_gone_holds_the_device(world):
    world.job("a", "high")
    world.job("b", "high")
    world.step("b", 1)
    world.close("b")
    assert world.core.standing("a") == {}  # its launch may be running still
    world.release("b")
    assert world.core.standing("a") == {0: 0}
