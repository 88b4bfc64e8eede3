"""How long a launch between a high job's steps has to wait."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumux.scheduler.guard import high_job
from gpumux.scheduler.guard.device_view import MAX_IDLE, DeviceView
from gpumux.scheduler.guard.high_job import RARELY, HighJob, InterArrivals
from gpumux.scheduler.guard.timing import (
    AFTER_ARRIVAL_S,
    MOST_LOOKAHEAD,
    SPOILS,
    bearable,
    most_delay,
    time_until_bearable,
)
from gpumux.scheduler.windows import Windows


@pytest.mark.parametrize("known", [[0.2], [0.1, 0.2], [0.1, 0.1, 0.2]])
@pytest.mark.parametrize("waited", [0.05, 0.15])
@pytest.mark.parametrize("seconds", [0.0, 0.0001])
def test_a_launch_shorter_than_what_a_step_may_lose_is_answered_behind_the_last_gap_but_one(known, waited, seconds):
    gaps = InterArrivals()
    for gap in known:
        gaps.add(gap)
    until = time_until_bearable(
        gaps, bisect_right(gaps.sorted, waited), seconds, mean=0.1, worst=1.0, room=0.01, affordable=0.0
    )
    assert waited < until <= gaps.longest + AFTER_ARRIVAL_S


def bearable_at(gaps: InterArrivals, waited: float, seconds: float, *cost: float) -> list[float]:
    """The moments behind a gap, and before the next, at which the launch may run, by trying each; the longest gap
    counts in any case."""
    found = []
    for gap, coming in pairwise(gaps.sorted):
        at = gap + AFTER_ARRIVAL_S
        if waited < gap and at < gaps.longest and coming > at:
            behind = bisect_right(gaps.sorted, at)
            end, soonest, chance = at + seconds, gaps.earliest(behind), gaps.chance_within(behind, at, seconds)
            if chance <= 0.0 or end < soonest or bearable(chance, most_delay(end, soonest, at), *cost):
                found.append(at)
    return [*found, gaps.longest + AFTER_ARRIVAL_S]


PARTS = st.floats(0.0, 1.0)


@given(
    st.lists(st.floats(1e-6, 1.0) | st.sampled_from([0.1, 0.2, 0.2000001]), min_size=1, max_size=120),
    st.tuples(PARTS, st.floats(1e-6, 1.0), PARTS, PARTS, st.floats(-0.5, 0.5), st.floats(-0.5, 0.5)),
    st.sampled_from([RARELY, SPOILS]),
)
def test_no_job_waits_longer_than_needed_nor_is_reconsidered_at_once(
    known: list[float], figures: tuple[float, ...], rare: float
) -> None:
    gaps = InterArrivals()
    for gap in known:
        gaps.add(gap)
    waited, seconds, mean, more, room, affordable = figures
    waited *= gaps.longest
    until = time_until_bearable(
        gaps,
        bisect_right(gaps.sorted, waited),
        seconds,
        mean=mean,
        worst=mean + more,
        room=room,
        affordable=affordable,
        rare=rare,
    )
    moments = bearable_at(gaps, waited, seconds, mean, mean + more, room, affordable, rare)
    assert waited < until <= min(moments)
    if until < min(moments):  # it is time to look again
        assert sum(waited < gap <= until for gap in gaps.sorted) > MOST_LOOKAHEAD


@given(st.lists(st.floats(0.0, 1.0) | st.sampled_from([0.0, 0.1, 1.0]), min_size=1, max_size=3 * 8))
def test_gaps_are_kept_in_order_and_the_oldest_are_forgotten(known: list[float]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(high_job, "KEPT_INTERVALS", 8)
        gaps = InterArrivals()
        for count, gap in enumerate(known, 1):
            gaps.add(gap)
            assert gaps.sorted == sorted(known[max(0, count - 8) : count])


@given(
    st.lists(st.floats(0.0, 1.0) | st.sampled_from([0.1, 0.2]), min_size=1, max_size=300), st.floats(0.0, 1.2), PARTS
)
def test_the_gaps_a_wait_has_passed_are_counted_from_any_that_it_had_passed_before(gaps, waited, part):
    found = InterArrivals()
    for gap in gaps:
        found.add(gap)
    passed = bisect_right(found.sorted, waited)
    assert found.sorted == sorted(gaps[-high_job.KEPT_INTERVALS :])
    assert found.count_passed(waited, int(part * passed)) == passed


def test_a_job_whose_step_comes_is_not_idle_and_of_many_idle_ones_the_newest_are_considered():
    scene = DeviceView()
    tracks = [
        HighJob(SimpleNamespace(id=str(n), paused=False, spec=SimpleNamespace(max_slowdown=1.05, gang=None)))
        for n in range(7)
    ]
    for when, track in enumerate(tracks):
        track.arrivals.add(100.0)
        track.idle_since = float(when)
        before = [other.version for other in tracks]
        scene.became_idle(track)
        dropped = [other for other, count in zip(tracks, before, strict=True) if other.version > count]
        assert dropped == ([tracks[when - MAX_IDLE]] if when >= MAX_IDLE else []), (
            "nobody is held for its sake any more"
        )
    scene.became_busy(tracks[5])
    scene.became_busy(tracks[5])  # it is not there: nothing happens
    assert scene.idle_jobs == [*tracks[:5], tracks[6]]
    scene.refresh(Windows("fair"), {}, 7.0)
    assert scene.idle == [tracks[6], *tracks[4:1:-1]]
