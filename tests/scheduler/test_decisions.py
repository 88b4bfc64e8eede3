"""When held jobs are reconsidered: as seldom as does no harm, since decisions are what the guard spends its time on."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpumux.device.sim.cost import Kernel
from gpumux.scheduler.guard.costs import START
from gpumux.scheduler.guard.device_view import MAX_IDLE
from gpumux.scheduler.guard.high_job import HighCosts
from gpumux.scheduler.guard.timing import expected_arrival, hold_for_arrival
from gpumux.scheduler.jobs import LowKey
from gpumux.scheduler.windows import Windows
from tests.scheduler.scenarios import (
    LIGHT,
    LOW,
    SMALL,
    SPAN,
    STEP_S,
    decided,
    guard_of,
    held_seconds,
    high,
    known_by_now,
    known_high_job,
    low,
    pausing,
)
from tests.scheduler.scenarios import world as simulated

from .world import World

GAPS = st.lists(st.floats(1e-3, 20e-3), min_size=8, max_size=24)
IDLE_FOR = st.floats(0.0, 15e-3)


@given(st.lists(st.tuples(GAPS, IDLE_FOR), min_size=1, max_size=4), st.floats(0.1e-3, 5e-3))
def test_a_job_that_several_idle_jobs_hold_is_reconsidered_when_the_last_of_them_allows_it(
    jobs: list[tuple[list[float], float]], seconds: float
) -> None:
    now = 1.0
    guard = guard_of(*[known_high_job(str(index), gaps, now - ago) for index, (gaps, ago) in enumerate(jobs)])
    guard.view.refresh(Windows("fair"), guard.high_jobs, now)
    alone = {
        one.job.id: hold_for_arrival(one, LOW, SPAN, decided(seconds), guard.view, now + seconds, expected_arrival(one))
        for one in guard.view.idle
        if now + seconds >= one.earliest_arrival
    }
    holds = {job: hold for job, hold in alone.items() if hold is not None}
    answer = decided(seconds)
    guard._between_steps(answer, LOW, SPAN, now + seconds)
    if not holds:
        assert answer.hold is None
        return
    assert answer.hold is not None
    assert answer.high is not None
    assert answer.hold.until == max(hold.until for hold in holds.values())
    assert answer.hold.high_id == answer.high.job.id, "who lets it last is who it is held for"
    assert holds[answer.hold.high_id].until == answer.hold.until


def test_what_ran_beside_it_once_was_seen_whatever_the_share() -> None:
    model = HighCosts("high", (0, 1), (STEP_S,))
    assert model.never_ran(LOW.program, SPAN)
    half = model.beside(LowKey(LOW.program, 0.5))
    assert model.never_ran(LOW.program, SPAN)
    half.learn((0, START, SPAN), 1e-5, 1e-5, 1e-4, 3, 1.0)
    assert not model.never_ran(LOW.program, SPAN)
    assert model.never_ran(LOW.program, "2-3")
    assert model.never_ran("another", SPAN)


def test_what_ran_beside_it_under_another_cut_was_seen() -> None:
    model = HighCosts("high", (0, 2), (STEP_S,))
    model.beside(LOW).learn((0, START, SPAN), 1e-5, 1e-5, 1e-4, 3, 1.0)
    heir = model.recut((0, 1, 2), (STEP_S / 2, STEP_S / 2))
    assert SPAN in heir.beside(LOW).lows
    assert not heir.never_ran(LOW.program, SPAN)


def test_low_work_is_not_held_anew_for_what_it_costs_as_the_high_job_is_cut_anew() -> None:
    """What launches cost is inherited, and with no token to risk nothing that is known needs one."""
    simulation = simulated(high((SMALL,) * 16), low((LIGHT,) * 24))
    simulation.run(steps=260)
    next(iter(simulation.scheduler._state.guard.high_jobs.values())).budget.violations_left = 0.0
    simulation.recut("high", (0, 3, 8, 12, 16))
    simulation.run(steps=460)
    held = held_seconds(simulation, "low")
    assert held["learning"] < 0.1 * simulation.now, held


def test_a_job_that_fits_goes_on_in_a_pause_while_the_first_does_not_fit() -> None:
    """It is held until a time, and another one was out when it was asked: that one's end has the others asked."""
    world = World("guarded")
    pausing(world, 13, {"short": (2e-4,) * 4, "long": (2e-3,)})
    known = world.now
    known_by_now(world)
    world.elapse(8.1e-3)
    world.step("long", 0)
    world.steps("short", 0, 1, 2)
    assert {piece.job for piece in world.launches.values()} == {"short"}
    while world.now < known + 9.5e-3:
        world.done(min(world.launches), 2e-4)
        assert {piece.job for piece in world.launches.values()} == {"short"}, world.now - known


def test_a_job_that_does_not_fit_into_the_rest_of_a_pause_leaves_it_to_one_that_does() -> None:
    full = Kernel("full", 432, 100e-6, 4, 0)
    hog = low((full._replace(name="hog", block_s=0.9e-3),), "hog")
    small = low((full._replace(name="small", block_s=30e-6),) * 30, "small")
    simulation = simulated(high((full,) * 50, think_s=10e-3), hog, small)
    result = simulation.run(steps=300, warmup_steps=200)
    assert result.job("high").p99_slowdown <= 1.10
    assert result.job("hog").relative_throughput > 0.3
    assert result.job("small").relative_throughput > 0.05
    held = held_seconds(simulation, "small")
    assert held["gap"] < 0.5 * held.total()


def test_a_finer_cut_of_a_held_low_program_is_asked_about_at_once() -> None:
    """What is held is 2 ms long; cut anew, its first piece takes 0.5 ms, which fits before the high step that is
    expected."""
    world = World("guarded")
    pausing(world, 13, {"long": (2e-3,)})
    known_by_now(world)
    world.elapse(8.1e-3)
    world.step("long", 0)
    assert not world.launches
    world.ready("long", 0, 1, (0.5e-3,) * 4)
    assert {piece.job for piece in world.launches.values()} == {"long"}


def test_no_job_is_held_for_an_idle_job_that_is_no_longer_considered() -> None:
    """Of many idle high jobs the newest few count: a hold for the sake of another is over when so many came after
    it."""
    now = 1.0
    rare = known_high_job("rare", [0.1 * count for count in range(1, 25)], now - 0.01)
    guard, windows = guard_of(rare), Windows("fair")
    guard.view.refresh(windows, guard.high_jobs, now)
    answer = decided(0.095)
    guard._between_steps(answer, LOW, SPAN, now + 0.095)
    assert answer.hold is not None
    assert answer.hold.until > now + 0.09
    for count in range(MAX_IDLE):
        assert answer.is_current(guard.view.low_version, now + 1e-4)
        later = known_high_job(f"often{count}", [1e-3] * 24, now)
        guard.high_jobs[later.job.id] = later
        guard.view.became_idle(later)
    guard.view.refresh(windows, guard.high_jobs, now + 1e-4)
    assert rare not in guard.view.idle
    assert not answer.is_current(guard.view.low_version, now + 1e-4)
