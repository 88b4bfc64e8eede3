"""A launch that outlasts the step it began in: what the next step loses by it, where that one is there at times and at
times not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gpumux.device.sim.spec import A100
from gpumux.scheduler.explain import held
from gpumux.scheduler.guard.costs import START, RangeCost
from gpumux.scheduler.guard.decisions import Hold
from gpumux.scheduler.guard.device_view import RunningPiece
from gpumux.scheduler.guard.high_job import QUEUED_STEPS, HighJob
from gpumux.scheduler.guard.timing import next_step_loss, step_end
from gpumux.scheduler.scheduler import Scheduler
from gpumux.simulate import workload as shipped
from gpumux.simulate.run import Simulation
from gpumux.simulate.workload import Workload, from_profile
from gpumux.types import Priority
from tests.scheduler.scenarios import LIGHT, SMALL, high, ident, known_high_job, low
from tests.scheduler.scenarios import world as simulated

GAPS = [1e-3 * gap for gap in range(1, 21)]


def free_at(when: float) -> Any:
    return SimpleNamespace(free_at=when)


def queued(part: float, gaps: list[float]) -> HighJob:
    made = known_high_job("high", gaps)
    made.queued_part = part
    return made


@pytest.mark.parametrize(
    ("part", "gaps", "beyond", "seconds"),
    [
        (0.3, GAPS, 2e-3, 2e-3),  # three of ten follow at once
        (0.3, [10e-3] * 20, 2e-3, 2e-3),  # and the others come much later
        (0.8, [10e-3] * 20, 2e-3, 2e-3),
        (0.001, [10e-3] * 20, 2e-3, 0.0),  # next to none does
        (0.3, GAPS, 0.0, 0.0),  # it ends with the step
        (1.0, [10e-3] * 20, 2e-3, 0.0),  # each follows at once: what such launches cost holds that
        (0.0, [10e-3] * 20, 2e-3, 0.0),  # none comes so soon
        (0.0, [10e-3] * 20, 12e-3, 0.0),  # each does
        (0.0, GAPS, 5e-3, 4e-3),  # one in four does, 1 ms after the step at the earliest
        (0.0, [], 5e-3, 0.0),
    ],
)
def test_the_next_step_is_looked_out_for_where_it_may_come_or_not(
    part: float, gaps: list[float], beyond: float, seconds: float
) -> None:
    assert queued(part, gaps).may_meet(beyond) == pytest.approx(seconds)


def test_what_the_next_step_loses_is_counted_from_its_beginning() -> None:
    of = queued(0.3, GAPS)
    model = of.costs
    assert model is not None
    model.solo_s, cells = [1e-3, 2e-3, 4e-3], [RangeCost(), RangeCost(), RangeCost()]
    for cell, most in zip(cells, (0.1, 0.5, 0.9), strict=True):
        cell.upper_rate = most
    high_job = RunningPiece(high=of, costs=model, at=1, began=0.0, until=2e-3, more=False, late=0.0)
    high_job.position = (1, False, START, 2e-3)
    assert step_end(high_job, 1, 2e-3) == pytest.approx(6e-3)
    assert next_step_loss(high_job, cells, free_at(1e-3), 5e-3) == 0.0
    assert next_step_loss(high_job, cells, free_at(1e-3), 7e-3) == pytest.approx(0.1 * 1e-3 + 0.5 * 1e-3)
    assert next_step_loss(high_job, cells, free_at(7.5e-3), 0.5e-3) == pytest.approx(0.1 * 0.5e-3), (
        "it is no longer than that"
    )
    high_job.position = (1, True, START, 2e-3)  # it begins in the next one, and is counted there
    assert next_step_loss(high_job, cells, free_at(1e-3), 7e-3) == 0.0


@pytest.mark.parametrize(
    ("rest", "part"),
    [({"think_s": 1e-3}, 0.0), ({}, 1.0), ({"rate": 400.0, "max_inflight": 8}, None)],
    ids=["each finds it idle", "each follows", "at random"],
)
def test_how_many_steps_follow_at_once_is_known(rest: dict[str, Any], part: float | None) -> None:
    simulation = simulated(high((SMALL,) * 12, **rest), low((LIGHT,) * 24))
    core = simulation.scheduler
    assert isinstance(core, Scheduler)
    simulation.run(steps=3 * QUEUED_STEPS)
    guard = core._state.guard
    assert guard is not None
    found = guard.high_jobs[ident(simulation, "high")].queued_part
    if part is None:
        assert 0.2 < found < 0.8
    else:
        assert found == pytest.approx(part, abs=1e-9)


def of_profile(name: str, priority: Priority, **rest: float) -> Workload:
    return from_profile(shipped.find(name), A100, priority, name=name, max_slowdown=1.05, **rest)


def test_a_slow_launch_late_in_a_step_costs_no_step_behind_it_too_much() -> None:
    """Operators of 0.9 ms last 7 ms on a quarter of the device, beyond the end of 5 ms steps that come at random. One
    step in four comes while another runs, and lost up to 0.16 of its time; the launches cost little on average."""
    jobs = [of_profile("vgg16-b4-burst", Priority.HIGH, rate=50.0), of_profile("vgg16-b4", Priority.LOW)]
    simulation = Simulation(jobs, A100, "guarded", seed=1)
    result = simulation.run(steps=1500, warmup_steps=300)
    job = result.job("vgg16-b4-burst")
    assert job.mean_slowdown <= 1.05
    assert job.p99_slowdown <= 1.10
    assert result.harvest > 0.01
    important, other = simulation.scheduler.snapshot()["jobs"]
    assert other["guard"]["held_seconds"]["next"] > 0.0
    told = held(simulation.scheduler._state, Hold("next", important["job"], piece=0))
    assert told.startswith(
        "it would outlast the step of job 'vgg16-b4-burst' that runs, and cost the next one, which may have come"
    )
