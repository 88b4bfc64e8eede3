"""Steps that lose much without low work: what of it is charged to low work beside others, and what is believed of
that."""

from __future__ import annotations

from random import Random

import pytest

from gpumux.device.sim.cost import Kernel
from gpumux.scheduler.guard.budget import (
    ALLOWED_VIOLATIONS,
    MOST_CONFIRMATIONS,
    MOST_DEBT,
    TAIL_MOST,
    SlowdownBudget,
    StepNoise,
)
from gpumux.scheduler.guard.costs import NOISE_FLOOR_S, START
from gpumux.scheduler.guard.high_job import HighCosts
from gpumux.scheduler.jobs import LowKey
from gpumux.simulate.run import Simulation
from tests.scheduler.scenarios import SMALL, high, low, pace, world

SOLO_S = 1e-3


def budget() -> SlowdownBudget:
    made = SlowdownBudget(1.10)
    made.begin_step(SOLO_S)
    made.end_learning()
    return made


def live(
    of: SlowdownBudget, random: Random, *, often: float, beside: float, steps: int = 4000, shift: float = 0.0
) -> None:
    """Steps of which one in four is alone; `often`, `beside`: how many of these, and of the others, lose half of a step
    by noise; `shift`: what the others lose besides, always."""
    for _ in range(steps):
        if random.random() < 0.25:
            late = 0.5 * SOLO_S if random.random() < often else 0.0
            of.solo_step_ended(late)
            of.end_step(late, shared=False, explored=False, unseen=0.0)
        else:
            late = (0.5 * SOLO_S if random.random() < beside else 0.0) + shift
            of.end_step(late, shared=True, explored=False, unseen=0.0)


@pytest.mark.parametrize("often", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("shift", [0.0, 0.08 * SOLO_S])
def test_what_happens_as_often_alone_costs_low_work_nothing(often: float, shift: float) -> None:
    noisy = budget()
    live(noisy, Random(1), often=often, beside=often, shift=shift)
    assert noisy.violations_left > -0.1 * MOST_DEBT
    assert noisy.tail > 0.5 * TAIL_MOST


def test_where_nothing_happens_alone_every_such_step_is_charged() -> None:
    calm = budget()
    live(calm, Random(1), often=0.0, beside=0.1)
    assert calm.violations_left < 0.99 * -MOST_DEBT
    assert calm.noise.violations == 0.0
    assert calm.confirmations == 1


def test_what_happens_more_often_than_alone_is_charged() -> None:
    noisy = budget()
    live(noisy, Random(1), often=0.05, beside=0.15)
    assert noisy.violations_left < -20.0


def test_a_loss_that_low_work_brings_to_many_steps_is_charged_in_noise_as_well() -> None:
    noisy = budget()
    live(noisy, Random(1), often=0.1, beside=0.1, shift=0.3 * SOLO_S)
    assert noisy.violations_left < 0.99 * -MOST_DEBT


def test_what_was_charged_before_the_noise_was_known_is_given_back() -> None:
    late = budget()
    for _ in range(100):
        late.end_step(0.5 * SOLO_S, shared=True, explored=False, unseen=0.0)
        for _ in range(9):
            late.end_step(0.0, shared=True, explored=False, unseen=0.0)
    owed = late.violations_left
    for index in range(100):
        late.solo_step_ended(0.5 * SOLO_S if index % 10 == 0 else 0.0)
    assert late.violations_left > owed + 5.0
    assert late.violations_left <= ALLOWED_VIOLATIONS


def test_work_that_changed_is_no_noise() -> None:
    noise = StepNoise()
    for violations in (0.0, 0.0, 0.0, 1.0):
        noise.add(violations)
    noise.changed()
    noise.add(0.0)
    noise.add(0.0)
    assert noise.over == noise.violations == 0.0


def test_the_likelier_noise_is_the_more_launches_it_takes_to_believe_in_a_cost() -> None:
    def confirmations(every: int) -> int:
        noise = StepNoise()
        for index in range(400):
            noise.add(1.0 if every and index % every == 0 else 0.0)
        return noise.confirmations()

    assert [confirmations(every) for every in (0, 50, 20, 4)] == [1, 2, 2, 4]
    assert confirmations(1) == MOST_CONFIRMATIONS


def test_one_dear_launch_in_noise_is_not_believed_and_several_in_a_row_are() -> None:
    pair = HighCosts("key", (0, 1, 2), (1e-3, 1e-3)).beside(LowKey("low", 1.0))
    spot, much, dear = (0, START, "0-7"), 1e-4, 5e-4
    assert [pair.confirms(spot, peak, 3, much) for peak in (dear, dear, 0.0, dear, dear, dear, dear)] == [
        False, False, True, False, False, True, False,
    ]  # fmt: skip
    assert dear > much > NOISE_FLOOR_S


NOISE_S = 0.5e-3  # for so long all is slower


def run(*workloads: object, every: float, seconds: float = 1.2, seed: int = 0) -> Simulation:
    """On a device that is two to six times slower for half a millisecond every now and then, for every job."""
    simulation, random = world(*workloads), Random(seed)  # type: ignore[arg-type]
    when = 0.0
    while every and when < seconds:
        when += random.expovariate(1 / every)
        simulation.at(when, lambda factor=random.uniform(2.0, 6.0): pace(simulation, factor))
        simulation.at(when + NOISE_S, lambda: pace(simulation, 1.0))
        when += NOISE_S
    return simulation


MANY = low(tuple(Kernel(f"k{i}", 40, (30 + 5 * (i % 17)) * 1e-6, 1, 0) for i in range(60)))
FULL = low(tuple(Kernel(f"k{i}", 216, (10 + 2 * (i % 7)) * 1e-6, 1, 0) for i in range(60)))


@pytest.mark.extended
@pytest.mark.parametrize(("other", "least"), [(MANY, 0.25), (FULL, 0.17)])
def test_low_work_is_not_held_for_noise(other: object, least: float) -> None:
    """A step in five loses more alone than low work may ever cost one. Without regard to that, nothing was known of low
    work for good that ran once at such a moment: of what it does in quiet a fifteenth was left, and a seventh."""
    important = high((SMALL,) * 16, max_slowdown=1.10)
    alone = run(important, every=5e-3).run(seconds=1.2).job("high").step_seconds
    noisy = run(important, other, every=5e-3)
    result = noisy.run(seconds=1.2)
    quiet = run(important, other, every=0.0).run(seconds=1.2)
    shared = result.job("high").step_seconds
    assert sum(shared) / len(shared) <= 1.10 * sum(alone) / len(alone)
    assert sorted(shared)[int(0.99 * len(shared))] <= 1.2 * sorted(alone)[int(0.99 * len(alone))]
    assert result.job("low").work_s > least * quiet.job("low").work_s
    (job,) = [client.id for client in noisy.clients if client.workload.name == "high"]
    assert "Without low work its steps differ, too" in "\n".join(noisy.scheduler.explain(job))
