"""Low work that is held until a time is looked at again by then, however late the scheduler is woken."""

from __future__ import annotations

import random

import pytest

from .world import World

TURNS = 3000


@pytest.mark.covering
@pytest.mark.parametrize("tardy", [0.0, 0.5, 0.9])
@pytest.mark.parametrize(("highs", "lows"), [(1, 1), (1, 3), (3, 3)])
def test_no_held_job_is_forgotten(highs: int, lows: int, tardy: float) -> None:
    """`World.give` asserts it behind every event."""
    draw = random.Random(lows)
    world = World("guarded")
    world.late = lambda: draw.random() < tardy
    names = [*[f"high{i}" for i in range(highs)], *[f"low{i}" for i in range(lows)]]
    for name in names[:highs]:
        world.job(name, priority="high", pieces=(2e-4,))
    for name in names[highs:]:
        world.job(name, pieces=(4e-4,))
    numbers = dict.fromkeys(names, 0)
    for _ in range(TURNS):
        for name in names:
            if not world.jobs[name].items and (name in names[highs:] or draw.random() < 0.5 / highs):
                numbers[name] += 1
                world.step(name, numbers[name])
        world.elapse(draw.expovariate(1 / 4e-4))
        if world.launches and draw.random() < 0.7:
            world.done(min(world.launches.values(), key=lambda piece: (-piece.stream, piece.launch)).launch)
    assert all(world.scheduler.snapshot()["guard"]["held_seconds"][reason] for reason in ("calibration", "tail", "gap"))
