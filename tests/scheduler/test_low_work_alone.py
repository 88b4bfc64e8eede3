"""Low work runs without a question only where no high work can be met: however a high step came to run, it is asked
about."""

from __future__ import annotations

import pytest

from gpumux.types import Priority
from tests.scheduler.scenarios import pausing

from .world import World


def greedy(world: World, name: str, steps: int) -> None:
    world.job(name, pieces=(1e-4,), max_inflight=64)
    for number in range(steps):
        world.step(name, number)


def finish_lows(world: World) -> None:
    """Those low pieces that are out end."""
    for piece in [p for p in world.launches.values() if world.jobs[p.job].priority is Priority.LOW]:
        world.done(piece.launch)


def out(world: World, priority: Priority) -> list[str]:
    return [piece.job for piece in world.launches.values() if world.jobs[piece.job].priority is priority]


@pytest.mark.parametrize("how", ["none", "transfer", "paused", "program", "promoted", "resumed amid"])
def test_low_work_is_held_beside_a_high_step_however_that_came_to_run(how: str) -> None:
    world = World("guarded")
    pieces = (5e-3,) * 3
    if how == "program":
        world.job("high", priority="high", pieces=None)
        world.offer("high", 0)
    elif how == "promoted":
        world.job("high", priority="low", pieces=pieces)
    else:
        world.job("high", priority="high", pieces=pieces)
    greedy(world, "low", 40)
    if how == "none":
        world.step("high", 0)
    elif how == "transfer":
        world.transfer("high", 7)
        world.step("high", 0)
        finish_lows(world)
        world.end_transfer("high", 7)
    elif how == "paused":
        world.pause("high")
        world.step("high", 0)
        finish_lows(world)
        world.resume("high")
    elif how == "program":
        world.step("high", 0)
        finish_lows(world)
        world.ready("high", 0, 0, pieces)
    elif how == "promoted":
        world.pause("high")
        world.step("high", 0)
        finish_lows(world)
        world.change("high", "high")
        world.resume("high")
    else:
        world.step("high", 0)
        world.pause("high")
        for _ in range(2):
            for piece in [p for p in world.launches.values() if p.job == "high"]:
                world.done(piece.launch)
            finish_lows(world)
        world.resume("high")
    for _ in range(6):  # those that were made before it
        if out(world, Priority.LOW):
            world.done(next(piece.launch for piece in world.launches.values() if piece.stream == 0))
    assert out(world, Priority.HIGH), "the high step still runs"
    assert not out(world, Priority.LOW), "a low piece was launched beside a step that is to run without low work"


@pytest.mark.parametrize("paused", [False, True])
def test_a_job_that_was_paused_between_steps_is_considered_again(paused: bool) -> None:
    """Two steps of three without low work are known, and one gap."""
    world = World("guarded")
    pausing(world, 3, {"tiny": (1e-5,), "long": (4e-3,)})
    known = world.now
    world.scheduler._state.guard.high_jobs["high"].calibrating = 1
    if paused:
        world.pause("high")
        world.step("tiny", 0)
        world.done(min(world.launches), 1e-5)
        world.resume("high")
    world.elapse(known + 8e-3 - world.now)
    world.step("long", 0)
    assert not world.launches, "the high job's next step, which is to run without low work, is expected in 2 ms"
