"""High steps that come in bursts, now and then, or never soon: the promise is kept, and what is left of the device is
used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf
from random import Random
from types import SimpleNamespace

import pytest

from gpumux.scheduler.guard.timing import expected_arrival, hold_for_arrival
from gpumux.simulate.run import Simulation
from gpumux.simulate.workload import Workload
from microbench.common import percentile
from tests.scheduler.scenarios import (
    FULL,
    LOW,
    MOST,
    SPAN,
    decided,
    guard_of,
    high,
    known_high_job,
    low,
)
from tests.scheduler.scenarios import world as simulated

LONG = low((FULL._replace(name="long", block_s=300e-6),) * 10, "long")
STEPS = {"steps": 500, "warmup_steps": 300}
FEWER = {"steps": 300, "warmup_steps": 300}  # where steps come seldom, and low work is of many short pieces


def coming(next_s: Callable[[Random], Iterator[float]], kernels: int, *lows: Workload, rate: float = 50) -> Simulation:
    """A high job of so many kernels of 0.1 ms, whose steps come so many seconds after each other."""
    simulation = simulated(high((FULL,) * kernels, rate=rate, max_inflight=16), *lows)
    seconds = next_s(Random(2))
    simulation.clients[0]._random = SimpleNamespace(expovariate=lambda _: next(seconds))  # type: ignore[assignment]
    return simulation


def slowed(
    next_s: Callable[[Random], Iterator[float]], kernels: int, *lows: Workload, steps: dict[str, int] = STEPS
) -> tuple[float, float, float]:
    """How many times as long steps take on average, and 99 in 100, as without low work; and its seconds a second."""
    alone = coming(next_s, kernels).run(**steps).job("high").measured
    result = coming(next_s, kernels, *lows).run(**steps)
    beside = result.job("high").measured
    return sum(beside) / sum(alone), percentile(beside, 0.99) / percentile(alone, 0.99), result.harvest


def bursts(random: Random) -> Iterator[float]:
    """About twenty steps, then a pause of more than 16 usual gaps."""
    while True:
        for _ in range(max(1, int(random.gauss(20, 5)))):
            yield 4e-3 * random.uniform(0.95, 1.05)
        yield random.uniform(80e-3, 160e-3)


def heavy_tailed(random: Random) -> Iterator[float]:
    while True:
        yield min(2.0, 4e-3 * random.paretovariate(1.3))


def busy_and_quiet(random: Random) -> Iterator[float]:
    while True:
        yield random.expovariate(100 if random.random() < 0.9 else 5)


def sure_to_stay_away(random: Random) -> Iterator[float]:
    """Never comes within 8 ms after a step, and any time after that."""
    while True:
        yield random.uniform(10e-3, 30e-3)


@pytest.mark.parametrize("next_s", [bursts, heavy_tailed, busy_and_quiet])
@pytest.mark.every(3)
def test_the_promise_holds_where_steps_come_in_bursts(next_s: Callable[[Random], Iterator[float]]) -> None:
    """A job whose arrivals are not trusted is not taken for idle after 16 usual pauses: bursts are as far apart."""
    mean, most, _ = slowed(next_s, 20, LONG)
    assert mean <= 1.05
    assert most <= 1.10


@pytest.mark.extended
def test_a_gap_shorter_than_any_there_was_is_not_to_be_expected_of_anybody() -> None:
    """8 of 18 ms of each gap are sure, whatever comes after that."""
    _, most, harvest = slowed(sure_to_stay_away, 20, LONG)
    assert most <= 1.10
    assert harvest > 0.15


def test_a_job_that_could_run_once_what_is_out_has_ended_is_reconsidered_then() -> None:
    """What it costs behind other low work is no reason to hold it after that has ended."""
    now = 1.0
    one = known_high_job("high", [1e-3 * count for count in range(1, 40)], now - 5.2e-3)
    while one.trust.trusted:
        one.trust.step_ended(2 * MOST, excess=2 * MOST, most=MOST, credit=MOST / 2, noise=0.0)
    one.arrivals.set_predictable(one.trust.trusted)
    one.budget.limit = 0.46e-3
    guard = guard_of(one)
    scene, seconds = guard.view, 0.3e-3
    scene.now = now
    scene.free_at, scene.low_out = now, False
    one.passed = 5
    assert hold_for_arrival(one, LOW, SPAN, decided(seconds), scene, now + seconds, expected_arrival(one)) is None, (
        "a step can bear it"
    )
    scene.free_at, scene.low_out, scene.pending = now + seconds, True, 0.15e-3
    hold = hold_for_arrival(one, LOW, SPAN, decided(seconds), scene, scene.free_at + seconds, expected_arrival(one))
    assert hold is not None, "but not both"
    assert hold.until == inf, "until what is out has ended"


@pytest.mark.extended
def test_steps_that_can_bear_a_low_piece_leave_it_more_than_one_a_gap() -> None:
    """8 ms of which 0.8 may be lost, pieces of 0.3 ms."""

    def seldom(random: Random) -> Iterator[float]:
        while True:
            yield random.expovariate(10)

    mean, most, harvest = slowed(seldom, 80, LONG, steps={"steps": 150, "warmup_steps": 150})
    assert mean <= 1.05
    assert most <= 1.10
    assert harvest > 0.3


OF_30_US = low((FULL._replace(name="of 30", block_s=30e-6),) * 30, "of 30")
OF_100_US = low((FULL._replace(name="of 100", block_s=100e-6),) * 30, "of 100")


def at_random(random: Random) -> Iterator[float]:
    while True:
        yield random.expovariate(50)


@pytest.mark.extended
def test_what_is_lost_to_programs_that_are_trusted_still_is_counted() -> None:
    """`Launch.trusting` of a launch that was asked about: without it each program that is not blamed would go on."""
    one_ms = low((FULL._replace(name="of 1000", block_s=1e-3),) * 6, "of 1000")
    _, most, _ = slowed(at_random, 20, OF_30_US, OF_100_US, LONG, one_ms, steps=FEWER)
    assert most <= 1.10


@pytest.mark.extended
def test_a_program_of_short_pieces_does_not_wait_for_what_one_of_long_pieces_did() -> None:
    """`foreseen` for a program that is trusted where not all are."""
    mean, most, harvest = slowed(at_random, 20, OF_30_US, LONG, steps=FEWER)
    assert mean <= 1.05
    assert most <= 1.10
    assert harvest > 0.04
