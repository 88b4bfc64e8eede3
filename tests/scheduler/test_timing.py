"""When a low launch would begin in a high step, and when it is to be made."""

from __future__ import annotations

from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

from gpumux.scheduler.guard.budget import (
    ALLOWED_VIOLATIONS,
    DEBT_FACTOR,
    LEAST_DEBT_FACTOR,
    TOLERATED_DEBT,
    VIOLATION_RATE,
)
from gpumux.scheduler.guard.costs import (
    MIN_SAMPLES,
    REPEAT_FACTOR,
    START,
    LaunchCost,
    LaunchOption,
    LaunchPlan,
)
from gpumux.scheduler.guard.device_view import RunningPiece
from gpumux.scheduler.guard.high_job import HighCosts, HighJob
from gpumux.scheduler.guard.timing import TIMED_S, exposed_part, launch_position, next_timed_launch
from gpumux.scheduler.jobs import LowKey

LOW = "0-7"
REFS = (400e-6, 300e-6, 500e-6)
STEP_S = sum(REFS)
REACH_S = 25e-6


def track(**budget: Any) -> HighJob:
    made = HighJob(SimpleNamespace(id="j", spec=SimpleNamespace(max_slowdown=1.05, gang=None)))  # type: ignore[arg-type]
    made.budget.begin_step(STEP_S)
    for name, value in budget.items():
        setattr(made.budget, name, value)
    return made


def running(of: HighJob, at: int, more: bool, late: float = 0.0) -> RunningPiece:
    """Its piece `at` began at 0."""
    model = HighCosts("key", (0, 1, 2, 3), REFS)
    return RunningPiece(high=of, costs=model, at=at, began=0.0, until=REFS[at] + late, more=more, late=late)


def view(now: float = 0.0, pending: float = 0.0) -> Any:
    return SimpleNamespace(now=now, free_at=0.0, pending=pending, launch_delay=REACH_S)


def planned(piece: int, place: LaunchOption) -> LaunchPlan:
    """To begin together with this piece, and nowhere else."""
    at: list[LaunchOption | None] = [None] * (3 * len(REFS) + 1)
    at[3 * piece + START] = place
    return LaunchPlan(at, at, seconds=1e-3, version=0, step=0, price=1.0, limit=1.0)


def test_the_end_of_a_step_is_a_moment_where_a_pause_follows() -> None:
    end = REFS[2] - REACH_S
    for off in (-0.9 * TIMED_S, 0.0, 0.9 * TIMED_S):
        assert launch_position(running(track(), 2, False), view(end + off))[:3] == (3, True, START)
    assert launch_position(running(track(), 2, True), view(end))[:3] == (0, True, START), "the next step begins there"
    for off in (-2 * TIMED_S, 2 * TIMED_S):
        assert launch_position(running(track(), 2, False), view(end + off))[0] == 2
    assert launch_position(running(track(), 2, False, 30e-6), view(end + 30e-6))[0] == 2, "when it ends nobody knows"


def test_a_launch_at_the_end_of_a_step_is_felt_as_far_as_it_outlasts_the_pause() -> None:
    high = running(track(), 2, False)
    for _ in range(20):
        high.high.arrivals.add(600e-6)
    assert exposed_part(high, 3, REFS[2], REFS[2], 500e-6) == 0.0
    assert exposed_part(high, 3, REFS[2], REFS[2], 800e-6) == pytest.approx(0.25)


@pytest.mark.parametrize("more", [False, True])
def test_the_end_of_a_step_is_waited_for_whatever_the_step_has_lost(more: bool) -> None:
    lost = track(used=1.0)
    found = next_timed_launch(
        running(lost, 1, more), planned(3, LaunchOption(1.0, cost=0.0, upper=1e-6, score=0.0, tried=True)), view()
    )
    assert found == (inf if more else pytest.approx(REFS[1] + REFS[2] - REACH_S))
    never = planned(3, LaunchOption(1.0, cost=0.0, upper=1.0, score=0.0, tried=True))
    assert next_timed_launch(running(lost, 1, False), never, view()) == inf, "the next one can't bear it"


def test_a_launch_dearer_than_an_account_can_hold_is_waited_for_when_it_is_full() -> None:
    """What it costs is spread over many steps, none of which loses more than it may: nothing would ever pay for it
    else."""
    dear = planned(1, LaunchOption(0.25, cost=20 * 0.05 * STEP_S, upper=1e-6, score=0.0, tried=True))
    full, half = track(full=True), track(balance=0.0)
    assert next_timed_launch(running(full, 0, False), dear, view()) == pytest.approx(REFS[0] - REACH_S)
    assert next_timed_launch(running(half, 0, False), dear, view()) == inf
    assert next_timed_launch(running(full, 0, False), dear, view(pending=1e-6)) == inf, "one at a time"


def test_once_a_job_is_known_what_steps_lost_too_much_is_paid_back_by_those_that_follow() -> None:
    """So that no more than one in a hundred does, whatever they lost it for."""
    budget = track().budget
    over = 2.5 * budget.credit
    before = budget.limit
    for _ in range(8):
        budget.end_step(over, shared=True, explored=True, unseen=0.0)
    assert budget.violations_left < -TOLERATED_DEBT
    assert budget.limit == before, "a new job's steps are for learning"
    budget.end_learning()
    steps, lost = 2000, 0
    tight = before
    for _ in range(steps):  # every step that could loses too much, and none was foreseen
        could = budget.limit >= DEBT_FACTOR * before
        lost += could
        budget.end_step(over if could else 0.0, shared=could, explored=True, unseen=0.0)
        tight = min(tight, budget.limit)
    assert lost <= ALLOWED_VIOLATIONS + TOLERATED_DEBT + 2 + VIOLATION_RATE * steps <= 0.01 * steps
    assert lost > 0.5 * VIOLATION_RATE * steps, "nor are they held for good"
    assert tight >= LEAST_DEBT_FACTOR * before * 0.9
    for _ in range(steps):
        budget.end_step(0.0, shared=False, explored=False, unseen=0.0)
    assert budget.limit >= before


def test_what_repeats_is_counted_without_the_margin_for_what_is_not_known() -> None:
    limit = 100e-6
    timed, anyhow = LaunchCost(repeats=True), LaunchCost()
    for count in range(1, 2 * MIN_SAMPLES):
        for launched in (timed, anyhow):
            launched.add_launch(103e-6, 103e-6, 1e-3, count)
        assert timed.may_fit(limit) == (count < MIN_SAMPLES), "it is worth another look"
        assert (timed.upper <= limit) == (count >= MIN_SAMPLES)
        assert not anyhow.may_fit(limit)
        assert anyhow.upper > limit
    assert timed.upper == pytest.approx(REPEAT_FACTOR * 103e-6)
    dear = LaunchCost(repeats=True)
    dear.add_launch(110e-6, 110e-6, 1e-3, 1)
    assert not dear.may_fit(limit)


def test_what_falls_into_the_pause_tells_nothing_of_what_is_felt() -> None:
    model = HighCosts("key", (0, 1, 2, 3), REFS)
    pair = model.beside(LowKey("low", 1.0))
    pair.learn((3, START, LOW), 0.0, 0.0, 5e-4, 10, 0.0)
    assert LOW not in pair.lows
    assert not pair.placement.of(LOW).learned
    assert pair.launches[(3, START, LOW)].upper == 0.0
    pair.learn((1, START, LOW), 2e-4, 1e-4, 5e-4, 11, 1.0)
    assert pair.lows[LOW].upper > 1e-4
    options: Any = {"price": 1.0, "limit": 1.5e-4, "step": 300, "exploration": 0, "solo_s": REFS}
    plan = pair.placement.plan(LOW, 5e-4, **options, from_idle=True, pause=6e-4)
    assert plan.at[-1] is not None
    assert plan.at[-1].tried
    assert plan.cost == 0.0
    busy = pair.placement.plan(LOW, 5e-4, **options, from_idle=False, pause=0.0)
    assert busy.at[-1] is None, "it has no pauses just now"
