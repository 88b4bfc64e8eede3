"""When a low launch would begin in a high step, and when it is to be made."""

from __future__ import annotations

from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

from gpumux.scheduler.guard.budget import LEAST_OWED, LENT, OWED, TOKEN_RATE, TOKENS
from gpumux.scheduler.guard.costs import CREDIBLE, HEARD, START, SURE, TIMED_SPREAD, HighModel, Launched, Place, Plan
from gpumux.scheduler.guard.high_job import Track
from gpumux.scheduler.guard.scene import Running
from gpumux.scheduler.guard.timing import TIMED_S, appointment, exposed, where
from gpumux.scheduler.jobs import PairKey

LOW = "0-7"
REFS = (400e-6, 300e-6, 500e-6)
STEP_S = sum(REFS)
REACH_S = 25e-6


def track(**account: Any) -> Track:
    made = Track(SimpleNamespace(id="j", spec=SimpleNamespace(max_slowdown=1.05)))  # type: ignore[arg-type]
    made.account.begin(STEP_S)
    for name, value in account.items():
        setattr(made.account, name, value)
    return made


def running(of: Track, at: int, more: bool, late: float = 0.0) -> Running:
    """Its piece `at` began at 0."""
    model = HighModel("key", (0, 1, 2, 3), REFS)
    return Running(of, model, at, 0.0, REFS[at] + late, more, late)


def scene(free_at: float = 0.0, pending: float = 0.0) -> Any:
    return SimpleNamespace(free_at=free_at, pending=pending)


def planned(piece: int, place: Place) -> Plan:
    """To begin together with this piece, and nowhere else."""
    at: list[Place | None] = [None] * (3 * len(REFS) + 1)
    at[3 * piece + START] = place
    return Plan(at, at, 1e-3, 0, 0, 1.0, 1.0)


def test_the_end_of_a_step_is_a_moment_where_a_pause_follows() -> None:
    end = REFS[2] - REACH_S
    for off in (-0.9 * TIMED_S, 0.0, 0.9 * TIMED_S):
        assert where(running(track(), 2, False), scene(), end + off, REACH_S)[:3] == (3, True, START)
    assert where(running(track(), 2, True), scene(), end, REACH_S)[:3] == (0, True, START), "the next step begins there"
    for off in (-2 * TIMED_S, 2 * TIMED_S):
        assert where(running(track(), 2, False), scene(), end + off, REACH_S)[0] == 2
    assert where(running(track(), 2, False, 30e-6), scene(), end + 30e-6, REACH_S)[0] == 2, "when it ends nobody knows"


def test_a_launch_at_the_end_of_a_step_is_felt_as_far_as_it_outlasts_the_pause() -> None:
    high = running(track(), 2, False)
    for _ in range(20):
        high.track.gaps.add(600e-6)
    assert exposed(high, 3, REFS[2], REFS[2], 500e-6) == 0.0
    assert exposed(high, 3, REFS[2], REFS[2], 800e-6) == pytest.approx(0.25)


@pytest.mark.parametrize("more", [False, True])
def test_the_end_of_a_step_is_waited_for_whatever_the_step_has_lost(more: bool) -> None:
    lost = track(used=1.0)
    found = appointment(running(lost, 1, more), planned(3, Place(1.0, 0.0, 1e-6, 0.0, True)), scene(), 0.0, REACH_S)
    assert found == (inf if more else pytest.approx(REFS[1] + REFS[2] - REACH_S))
    never = planned(3, Place(1.0, 0.0, 1.0, 0.0, True))
    assert appointment(running(lost, 1, False), never, scene(), 0.0, REACH_S) == inf, "the next one can't bear it"


def test_a_launch_dearer_than_an_account_can_hold_is_waited_for_when_it_is_full() -> None:
    """What it costs is spread over many steps, none of which loses more than it may: nothing would ever pay for it
    else."""
    dear = planned(1, Place(0.25, 20 * 0.05 * STEP_S, 1e-6, 0.0, True))
    full, half = track(full=True), track(balance=0.0)
    assert appointment(running(full, 0, False), dear, scene(), 0.0, REACH_S) == pytest.approx(REFS[0] - REACH_S)
    assert appointment(running(half, 0, False), dear, scene(), 0.0, REACH_S) == inf
    assert appointment(running(full, 0, False), dear, scene(pending=1e-6), 0.0, REACH_S) == inf, "one at a time"


def test_once_a_job_is_known_what_steps_lost_too_much_is_paid_back_by_those_that_follow() -> None:
    """So that no more than one in a hundred does, whatever they lost it for."""
    account = track().account
    over = 2.5 * account.credit
    before = account.limit
    for _ in range(8):
        account.end(over, shared=True, foreseen=False, unseen=0.0)
    assert account.tokens < -LENT
    assert account.limit == before, "a new job's steps are for learning"
    account.learn_no_more()
    steps, lost = 2000, 0
    tight = before
    for _ in range(steps):  # every step that could loses too much, and nobody foresaw it
        could = account.limit >= OWED * before
        lost += could
        account.end(over if could else 0.0, shared=could, foreseen=False, unseen=0.0)
        tight = min(tight, account.limit)
    assert lost <= TOKENS + LENT + 2 + TOKEN_RATE * steps <= 0.01 * steps
    assert lost > 0.5 * TOKEN_RATE * steps, "nor are they held for good"
    assert tight >= LEAST_OWED * before * 0.9
    for _ in range(steps):
        account.end(0.0, shared=False, foreseen=True, unseen=0.0)
    assert account.limit >= before


def test_what_repeats_is_counted_without_the_margin_for_what_is_not_known() -> None:
    limit = 100e-6
    timed, anyhow = Launched(TIMED_SPREAD, 3 + HEARD), Launched()
    for count in range(1, 2 * CREDIBLE):
        for launched in (timed, anyhow):
            launched.add(103e-6, 103e-6, 0.1, 1e-3, count)
        assert timed.promises(limit) == (count < CREDIBLE), "it is worth another look"
        assert (timed.upper <= limit) == (count >= CREDIBLE)
        assert not anyhow.promises(limit)
        assert anyhow.upper > limit
    assert timed.upper == pytest.approx(SURE * 103e-6)
    dear = Launched(TIMED_SPREAD, 3 + HEARD)
    dear.add(110e-6, 110e-6, 0.1, 1e-3, 1)
    assert not dear.promises(limit)


def test_what_falls_into_the_pause_tells_nothing_of_what_is_felt() -> None:
    model = HighModel("key", (0, 1, 2, 3), REFS)
    pair = model.pair(PairKey("low", 1.0))
    pair.learn((3, START, LOW), 0.0, 0.0, 5e-4, 10, 0.0)
    assert LOW not in pair.lows
    assert not pair.places.of(LOW).learned
    assert pair.launches[(3, START, LOW)].upper == 0.0
    pair.learn((1, START, LOW), 2e-4, 1e-4, 5e-4, 11, 1.0)
    assert pair.lows[LOW].upper > 1e-4
    plan = pair.places.plan(LOW, 5e-4, 1.0, 1.5e-4, 300, 0, True, REFS, 6e-4)
    assert plan.at[-1] is not None
    assert plan.at[-1].tried
    assert plan.cost == 0.0
    busy = pair.places.plan(LOW, 5e-4, 1.0, 1.5e-4, 300, 0, False, REFS, 0.0)
    assert busy.at[-1] is None, "it has no pauses just now"
