"""Where a low piece may begin in a high step: plans."""

from __future__ import annotations

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from gpumux.scheduler.guard.costs import AFTER_START, START, LaunchOption, LaunchPlan

SECONDS = 1e-3

PLACE = st.none() | st.tuples(st.floats(0.0, 1e-3), st.floats(0.0, 2e-3), st.booleans())


@given(st.lists(st.tuples(PLACE, PLACE, PLACE), min_size=1, max_size=6), PLACE)
def test_a_plan_knows_the_moments_that_a_timer_marks_and_that_are_worth_waiting_for(pieces, end) -> None:
    moments = [(piece, moment, found) for piece, all_of in enumerate(pieces) for moment, found in enumerate(all_of)]
    at = [
        None if found is None else LaunchOption(1.0, cost=found[0], upper=found[0], score=found[1], tried=found[2])
        for _, _, found in (*moments, (len(pieces), START, end))
    ]
    plan = LaunchPlan(at, at, seconds=SECONDS, version=0, step=0, price=1.0, limit=1.0)
    timed = {
        (index // 3, index % 3, place.upper if place.tried else -inf)
        for index, place in enumerate(at)
        if place is not None and index % 3 != AFTER_START and place.score - plan.score <= SECONDS
    }
    assert {(piece, moment, least) for piece, found in plan.timed.items() for moment, least, _ in found} == timed


def test_a_plan_lasts_until_the_price_or_the_limit_is_another_one() -> None:
    plan = LaunchPlan([None] * 4, [None] * 4, seconds=SECONDS, version=0, step=100, price=2.0, limit=1e-4)
    assert plan.is_current(0, 110, 4.0, 1e-4), "for a while it does in any case"
    assert plan.is_current(0, 130, 2.0, 1e-4)
    assert not plan.is_current(0, 130, 2.5, 1e-4)
    assert not plan.is_current(0, 130, 2.0, 1.2e-4)
    assert not plan.is_current(0, 200, 2.0, 1e-4), "what is known of other low pieces has changed by then"
