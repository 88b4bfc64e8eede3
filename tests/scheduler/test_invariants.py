"""check_invariants can fail: each kind of damage is found and named."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpumux.scheduler.state import SchedulerState
from gpumux.scheduler.windows import Limit
from gpumux.types import Footprint
from tests.scheduler.world import World


def healthy() -> World:
    """Both classes with work out and queued, and a program not ready."""
    world = World()
    world.job("a", "high", (1e-4,) * 4)
    world.job("b", "low", (1e-4,) * 4)
    world.offer("b", 1)
    for job in ("a", "b"):
        world.steps(job, 1, 2)
    return world


def launch(state: SchedulerState, priority: int) -> object:
    return next(iter(state.windows.by_class[priority].launches.values()))


def rob_the_room(state: SchedulerState) -> None:
    launch(state, 1).limit = Limit(0, 1.0)


def overfill_the_window(state: SchedulerState) -> None:
    last = list(state.windows.by_class[1].launches.values())[-1]
    last.limit = Limit(9, last.predicted)


def lose_a_launch(state: SchedulerState) -> None:
    state.windows.by_class[1].launches.popitem()


def reorder_launches(state: SchedulerState) -> None:
    window = state.windows.by_class[1]
    window.launches = dict(reversed(window.launches.items()))


def set_seconds(state: SchedulerState) -> None:
    state.windows.by_class[0].seconds += 1.0


def miscount_active(state: SchedulerState) -> None:
    state.windows.active_jobs[1] += 1


def forget_ready(state: SchedulerState) -> None:
    state.windows.ready[0].remove(state.jobs["b"])


def bad_key(state: SchedulerState) -> None:
    state.jobs["b"].served -= 5.0


def owe_too_much(state: SchedulerState) -> None:
    state.jobs["a"].pending += 1.0


def reorder_steps(state: SchedulerState) -> None:
    state.jobs["a"].queue.reverse()


def lose_a_step(state: SchedulerState) -> None:
    state.jobs["a"].queue.pop()


def lose_memory(state: SchedulerState) -> None:
    state.ledger.used -= 1


def charge_wrongly(state: SchedulerState) -> None:
    state.jobs["a"].programs[0].footprint = Footprint(9, 9, 9)


def lose_a_session(state: SchedulerState) -> None:
    state.sessions.clear()


def miscount_uid(state: SchedulerState) -> None:
    state.ledger.jobs_by_uid[1000] = 1


def leave_room_unused(state: SchedulerState) -> None:
    state.policy._high = Limit(3, 1.0)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (rob_the_room, "of 0 out"), (overfill_the_window, "s out"), (lose_a_launch, "window holds"),
        (reorder_launches, "out of order"), (set_seconds, "window holds"), (miscount_active, "active"),
        (forget_ready, "ready queue"), (bad_key, "ready under key"), (owe_too_much, "job a"),
        (reorder_steps, "out of order"), (lose_a_step, "in flight"), (lose_memory, "is not the charges' sum"),
        (charge_wrongly, "owes"), (lose_a_session, "outlives its session"), (miscount_uid, "jobs by uid"),
        (leave_room_unused, "room was left unused"),
    ],
)  # fmt: skip
def test_damage_is_found(damage: Callable[[SchedulerState], None], says: str) -> None:
    world = healthy()
    world.scheduler.check_invariants()
    damage(world.scheduler._state)
    with pytest.raises(AssertionError, match=says):
        world.scheduler.check_invariants()
