"""Steps that come when none was expected: what they lose by it is noticed, and gaps are no longer relied on."""

from __future__ import annotations

from random import Random

import pytest

from gpumux.scheduler import events as ev
from gpumux.scheduler.guard import high_job, learning, timing
from gpumux.scheduler.guard.budget import DECAY, VIOLATION_RATE
from gpumux.scheduler.guard.costs import LaunchCost
from gpumux.scheduler.guard.high_job import ArrivalTrust, InterArrivals
from gpumux.scheduler.guard.learning import DEAR, Cutting
from tests.scheduler.scenarios import (
    CREDIT,
    FULL,
    GAP_S,
    MOST,
    STEP_S,
    chain,
    explained,
    held_seconds,
    high,
    ident,
    known_high_job,
    low,
    pausing,
)
from tests.scheduler.scenarios import world as simulated

from .world import World


def after(lost: float, excess: float, steps: int = 1, noise: float = 0.0) -> ArrivalTrust:
    made = ArrivalTrust()
    for _ in range(steps):
        made.step_ended(lost, excess=excess, most=MOST, credit=CREDIT, noise=noise)
    return made


def test_steps_that_lose_too_much_on_arrival_end_the_trust_and_others_bring_it_back() -> None:
    made = after(2 * MOST, 2 * MOST)
    assert made.trusted, "one may be chance"
    made.step_ended(2 * MOST, excess=2 * MOST, most=MOST, credit=CREDIT, noise=0.0)
    assert not made.trusted
    steps = 0
    while not made.trusted:
        made.step_ended(0.0, excess=0.0, most=MOST, credit=CREDIT, noise=0.0)
        steps += 1
    assert steps == pytest.approx(1 / VIOLATION_RATE, rel=0.02)


def test_what_a_step_loses_later_is_no_surprise() -> None:
    assert after(0.4 * MOST, 2 * MOST, 9).trusted
    assert after(0.0, 9 * MOST, 99).trusted


def test_steps_that_lose_the_credit_on_average_end_it_too() -> None:
    assert after(0.9 * CREDIT, 0.9 * CREDIT, 1000).trusted
    assert not after(1.1 * CREDIT, 1.1 * CREDIT, 1000).trusted


def test_one_step_that_lost_everything_does_not_pass_for_many_that_lose_much() -> None:
    made = after(99 * CREDIT, 99 * CREDIT)
    assert made.mean_loss > DEAR * CREDIT
    assert made.capped_loss < 0.1 * DEAR * CREDIT


def test_where_steps_are_late_of_themselves_so_many_are_no_surprise() -> None:
    assert not after(2 * MOST, 2 * MOST, 5).trusted
    assert after(2 * MOST, 2 * MOST, 5, noise=1.0).violations_left == after(0.0, 0.0).violations_left


LATE_S = 2e-3


@pytest.mark.parametrize("caught", [True, False])
def test_what_a_step_loses_by_coming_is_what_it_loses_beside_what_relied_on_it_not_to(caught: bool) -> None:
    """A step comes long before it was expected, while a low piece is out; or as soon as that has ended, and another one
    is launched beside it."""
    world = World("guarded")
    pausing(world, 13, {"low": (2e-3,)})
    track = world.scheduler._state.guard.high_jobs["high"]
    world.elapse(2e-3)
    world.step("low", 0)
    assert world.launches, "the next step is expected in 8 ms"
    if not caught:
        world.done(min(world.launches), 2e-3)
    world.step("high", 100)
    if not caught:
        world.step("low", 1)
    high_launch = next(number for number, piece in world.launches.items() if piece.job == "high")
    world.elapse(1e-3 + LATE_S - 1e-4)
    track.budget.end_learning()
    before = track.trust.mean_loss
    world.done(high_launch, 1e-4)
    lost = (track.trust.mean_loss - DECAY * before) / (1.0 - DECAY)
    assert lost == pytest.approx(LATE_S if caught else 0.0, rel=0.2, abs=1e-9)
    assert track.arrival_loss == 0.0, "it is the step's, and that is over"


def test_without_trust_a_piece_that_would_be_over_before_the_next_step_is_expected_waits() -> None:
    for trusted in (True, False):
        world = World("guarded")
        pausing(world, 13, {"low": (2e-3,)})
        track = world.scheduler._state.guard.high_jobs["high"]
        track.steps, track.budget.violations_left = 300, 0.0
        while not trusted and track.trust.trusted:
            track.trust.step_ended(2 * MOST, excess=2 * MOST, most=MOST, credit=CREDIT, noise=0.0)
        track.arrivals.set_predictable(track.trust.trusted)
        world.elapse(2e-3)
        world.step("low", 0)
        assert bool(world.launches) is trusted
        told = "\n".join(world.scheduler.explain("low"))
        assert ("may come at any time, as steps came when none was expected" in told) is not trusted
    world.elapse(2 * GAP_S)
    assert {piece.job for piece in world.launches.values()} == {"low"}, "away for longer than ever, it holds nobody"


OTHERS = {
    "short": low((FULL._replace(name="short", block_s=30e-6),) * 30, "short"),
    "long": low((FULL._replace(name="long", blocks=1728, block_s=60e-6),) * 8, "long"),
}


@pytest.mark.parametrize(
    ("other", "rate"), [("short", 100.0), ("short", 400.0), ("long", 20.0), ("long", 100.0), ("long", 400.0)]
)
@pytest.mark.every(3)
def test_the_promise_holds_where_steps_come_at_random(other: str, rate: float) -> None:
    """Of random gaps two neighbours are nearly always far enough apart for a low piece to end between them."""
    simulation = simulated(high((FULL,) * 5, rate=rate), OTHERS[other])
    job = simulation.run(steps=500, warmup_steps=300).job("high")
    assert job.mean_slowdown <= 1.05
    assert job.p99_slowdown <= 1.10
    held = held_seconds(simulation, other)
    assert held["gap"] > 0.5 * held.total()
    assert simulation.scheduler._state.guard.high_jobs[ident(simulation, "high")].step_arrivals.at_random
    assert "may come at any time, as steps came at random" in explained(simulation, other)
    assert "Its steps come at random" in explained(simulation, "high")


@pytest.mark.extended
def test_it_is_the_gaps_that_are_not_relied_on_that_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ArrivalTrust, "step_ended", lambda *_, **__: None)
    monkeypatch.setattr(high_job, "AT_RANDOM", 0.0)
    simulation = simulated(high((FULL,) * 5, rate=100.0), OTHERS["short"])
    assert simulation.run(steps=500, warmup_steps=300).job("high").p99_slowdown > 1.2


@pytest.mark.extended
def test_what_may_cost_too_much_runs_between_random_steps_as_long_as_few_lose_by_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One operator of the low job is longer than any step may be delayed. Held for good, it would hold all the rest."""
    long = FULL._replace(name="long", block_s=0.25e-3)
    both = high((FULL,) * 20, rate=100.0), low((FULL._replace(name="short", block_s=90e-6),) * 40 + (long,), "low")
    simulation = simulated(*both)
    result = simulation.run(steps=700, warmup_steps=300)
    assert result.job("high").mean_slowdown <= 1.05
    assert result.job("high").p99_slowdown <= 1.10
    assert result.job("low").relative_throughput > 0.1
    monkeypatch.setattr(timing, "RISK", 0.0)
    monkeypatch.setattr(timing, "UNKNOWN_RISK", 0.0)
    monkeypatch.setattr(timing, "MOST_RISK", 0.0)
    without = simulated(*both).run(steps=700, warmup_steps=300)
    assert without.job("low").relative_throughput < 0.6 * result.job("low").relative_throughput


@pytest.mark.parametrize(
    ("pauses", "at_random"),
    [
        ([5e-3] * 40, False),
        ([5e-3 * (1.0 + 0.01 * (at % 20)) for at in range(40)], False),
        ([5e-3] * 39 + [1.0], False),  # an epoch's end
        ([1e-3 * (1 + at) for at in range(40)], True),
        ([1e-3, 20e-3] * 20, True),
        ([1e-3 * (1 + at) for at in range(15)], False),  # too few to say
    ],
)
def test_the_spread_of_pauses_tells_whether_steps_come_at_random(pauses: list[float], at_random: bool) -> None:
    arrivals = InterArrivals()
    for seconds in pauses:
        arrivals.add(seconds)
    assert arrivals.at_random is arrivals.unpredictable is at_random
    for_peers = InterArrivals(before_steps=False)
    for seconds in pauses:
        for_peers.add(seconds)
    assert not for_peers.at_random


@pytest.mark.parametrize("samples", [2, 5, 20])
def test_the_most_that_few_samples_show_is_not_the_most_there_is(samples: int) -> None:
    """Of losses spread evenly up to 1, the most that there is is found on average, whatever the number of samples."""
    random = Random(0)
    found = []
    for _ in range(4000):
        cost = LaunchCost()
        cost.count, cost.worst = samples, max(random.random() for _ in range(samples))
        found.append(timing.worst_on_arrival(cost))
    assert sum(found) / len(found) == pytest.approx(1.0, abs=0.02)


def test_only_the_beginning_of_a_launch_is_dangerous() -> None:
    assert timing.too_early(1.0, 2.0, 3.0) == 0.0
    assert timing.too_early(1.0, 2.0, 1.5) == pytest.approx(0.25)
    assert (
        timing.too_early(1.0, 2.0, 0.0) == timing.too_early(1.0, 2.0, -1.0) == timing.too_early(1.0, 0.0, -1.0) == 1.0
    )


@pytest.mark.extended
def test_low_work_is_cut_finer_where_a_step_may_come_at_any_time_and_runs_for_it() -> None:
    """What a step of 2 ms may lose is more than one operator costs it that it meets, and less than three do."""
    simulation = simulated(high((FULL,) * 20, rate=100.0), OTHERS["short"])
    simulation.run(steps=8)
    assert chain(simulation, "short") == [4, 10], "three of 30 us each"
    result = simulation.run(steps=150, warmup_steps=150)
    assert chain(simulation, "short") == [4, 10, 30]
    assert result.job("high").mean_slowdown <= 1.05
    assert result.job("high").p99_slowdown <= 1.10
    assert result.job("short").relative_throughput > 0.4
    assert "pieces of about 0.030 ms, not 0.300" in explained(simulation, "short")


@pytest.mark.extended
def test_a_cut_finer_than_that_is_for_as_long_as_anybody_needs_a_finer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "AWAY_S", 0.5)
    simulation = simulated(high((FULL,) * 20, rate=100.0), OTHERS["short"])
    for _ in range(20):
        simulation.run(seconds=simulation.now + 0.5)
        if len(chain(simulation, "short")) > 2:
            break
    simulation.run(seconds=simulation.now + 1.0)
    assert chain(simulation, "short") == [4, 10, 30]
    simulation.feed(ev.PauseRequested(ident(simulation, "high")))
    simulation.run(seconds=simulation.now + 1.0)
    assert chain(simulation, "short") == [4, 10, 30, 4]


@pytest.mark.parametrize(("part", "finest"), [(0.2, False), (0.3, True)])
def test_low_work_is_cut_finer_where_steps_lose_much_of_what_they_may_by_coming_while_it_is_out(
    part: float, finest: bool
) -> None:
    """Though they seldom lose too much by it: with pieces of a third a budget harvests more."""
    of, cut = known_high_job("high"), Cutting(300e-6)
    cut.step_ended(of, STEP_S, 1.0)
    assert cut.changed
    assert cut.target_s == pytest.approx(100e-6)
    cut.changed, of.trust.capped_loss = False, part * of.budget.credit
    cut.step_ended(of, STEP_S, 2.0)
    assert cut.finest is cut.changed is finest
    assert cut.target_s == pytest.approx(30e-6 if finest else 100e-6)
    cut.changed, of.trust.capped_loss = False, 0.0
    cut.step_ended(of, STEP_S, 3.0)
    assert (cut.finest, cut.changed) == (finest, False), "it cost less because it was finer"


@pytest.mark.extended
def test_steps_that_come_at_random_but_can_bear_to_meet_low_work_leave_it_most_of_the_time() -> None:
    result = simulated(high((FULL,) * 50, rate=60.0), OTHERS["short"]).run(steps=120, warmup_steps=120)
    assert result.job("high").p99_slowdown <= 1.10
    assert result.job("short").relative_throughput > 0.5
