"""A step that came while the core was busy lost what it waited, though no piece of it was late."""

from __future__ import annotations

from typing import Any

import pytest

from gpumux.scheduler import events as cmd
from gpumux.scheduler import events as ev
from gpumux.scheduler.guard.budget import MOST_DELAY_S, SlowdownBudget
from gpumux.scheduler.scheduler import Scheduler
from gpumux.types import JobId, PieceDone, ProgramId, StepId
from tests.scheduler.scenarios import LIGHT, SMALL, high, ident, low
from tests.scheduler.scenarios import world as simulated

from .world import World

SOLO_S = 1e-3


class Listening:
    """The core of a simulation, and for how long each step of a job had been there when it heard of it: as long as it
    is told, if it is."""

    def __init__(self, core: Scheduler, job: JobId, told: float | None = None) -> None:
        self.scheduler = core
        self.waited: list[float] = []
        self._job, self._told = job, told

    def handle(self, event: ev.Event, now: float) -> list[cmd.Command]:
        if isinstance(event, ev.StepSubmitted) and event.job == self._job:
            if self._told is not None:
                event = event._replace(waited=self._told)
            self.waited.append(event.waited)
        return self.scheduler.handle(event, now)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scheduler, name)


def test_what_the_guard_knows_of_a_steps_loss_is_what_its_client_lost() -> None:
    simulation = simulated(high((SMALL,) * 12, think_s=0.7e-3), low((LIGHT,) * 24))
    core = simulation.scheduler
    assert isinstance(core, Scheduler)
    simulation.scheduler = heard = Listening(core, ident(simulation, "high"))
    job = simulation.run(steps=400).job("high")
    guard = core._state.guard
    assert guard is not None
    track = guard.high_jobs[ident(simulation, "high")]
    took = simulation.clients[0].step_seconds[: track.steps]  # of the last one it may not have heard yet
    assert sum(waited > 0.0 for waited in heard.waited) > 100
    assert max(heard.waited) < MOST_DELAY_S
    newest = list(track.ratios)
    assert newest == pytest.approx([seconds / job.solo.step_s for seconds in took[-len(newest) :]], rel=1e-9)
    assert max(newest) > 1.0


def charged(waited: float, shared: bool = True) -> float:
    """What a step that waited so long takes from an account, over one that did not."""
    left = []
    for seconds in (0.0, waited):
        budget = SlowdownBudget(1.05)
        budget.begin_step(SOLO_S)
        budget.end_step(0.0, shared=shared, explored=False, unseen=0.0, delay=seconds)
        left.append(budget.balance)
    return left[0] - left[1]


@pytest.mark.parametrize("shared", [True, False])
def test_it_is_taken_from_the_account_whether_low_work_ran_beside_the_step_or_only_before_it(shared: bool) -> None:
    assert charged(15e-6, shared) == pytest.approx(15e-6)


def test_a_step_over_what_it_may_lose_by_waiting_counts_as_one() -> None:
    budget = SlowdownBudget(1.05)
    budget.begin_step(SOLO_S)
    budget.end_learning()
    budget.end_step(0.9 * budget.most, shared=True, explored=False, unseen=0.0, delay=0.2 * budget.most)
    assert budget.violations_left < 2.5
    budget.end_step(0.9 * budget.most, shared=True, explored=False, unseen=0.0)
    assert budget.violations_left > 2.0


def charges(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What each high step that ended was charged for waiting, from now on."""
    found: list[float] = []
    end = SlowdownBudget.end_step

    def ends(self: SlowdownBudget, excess: float, **rest: Any) -> None:
        found.append(rest["delay"])
        end(self, excess, **rest)

    monkeypatch.setattr(SlowdownBudget, "end_step", ends)
    return found


def test_each_step_is_charged_what_it_waited_and_no_other_step_is(monkeypatch: pytest.MonkeyPatch) -> None:
    found = charges(monkeypatch)
    simulation = simulated(high((SMALL,) * 12, think_s=0.7e-3), low((LIGHT,) * 24))
    core = simulation.scheduler
    assert isinstance(core, Scheduler)
    simulation.scheduler = heard = Listening(core, ident(simulation, "high"))
    simulation.run(steps=60)
    assert found[1:] == heard.waited[1 : len(found)]  # the first one's job was not known by then
    assert 0.0 in found[1:]
    assert max(found) > 0.0


def test_a_step_behind_another_one_lost_nothing_by_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    found = charges(monkeypatch)
    simulation = simulated(high((SMALL,) * 12), low((LIGHT,) * 24))  # two steps in flight
    core = simulation.scheduler
    assert isinstance(core, Scheduler)
    simulation.scheduler = heard = Listening(core, ident(simulation, "high"))
    simulation.run(steps=60)
    assert max(heard.waited) > 0.0
    assert set(found) == {0.0}


@pytest.mark.parametrize(("waited", "counted"), [(50e-6, 50e-6), (5e-3, MOST_DELAY_S)])
def test_low_work_pays_for_no_more_than_its_events_take_and_people_are_told_all(
    waited: float, counted: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon that was busy for so long was so with something else."""
    found = charges(monkeypatch)
    for others in ([low((LIGHT,) * 24)], []):
        found.clear()
        simulation = simulated(high((SMALL,) * 12, think_s=0.7e-3), *others)
        core = simulation.scheduler
        assert isinstance(core, Scheduler)
        simulation.scheduler = Listening(core, ident(simulation, "high"), waited)
        job = simulation.run(steps=60).job("high")
        # Of the first steps low work may not run beside it is not heard of; where there is none, no step is delayed.
        assert set(found[16:]) <= ({0.0, counted} if others else {0.0})
        assert (found.count(counted) > 20) is bool(others)
        guard = core._state.guard
        assert guard is not None
        told = guard.high_jobs[ident(simulation, "high")].ratios
        assert min(told) == pytest.approx(1.0 + waited / job.solo.step_s, rel=1e-3)


def test_of_steps_that_come_at_once_the_first_one_found_the_job_idle() -> None:
    """A daemon hears of them in one turn, at one time."""
    world = World("guarded")
    world.job("high", priority="high", pieces=(SOLO_S,), max_inflight=3)
    for number in range(6):
        world.step("high", number)
        world.done(min(world.launches), SOLO_S)
        world.elapse(1e-2)
    core, began, job = world.scheduler, world.now, JobId("high")
    launches = [
        command.launch
        for number in (6, 7, 8)
        for command in core.handle(ev.StepSubmitted(job, StepId(number), ProgramId(0), 1e-4), began)
        if isinstance(command, cmd.LaunchPiece)
    ]
    for number in range(3):
        started = began + number * SOLO_S
        commands = core.handle(PieceDone(launches[number], started, started + SOLO_S), started + SOLO_S)
        launches += [command.launch for command in commands if isinstance(command, cmd.LaunchPiece)]
    guard = core._state.guard
    assert guard is not None
    track = guard.high_jobs[job]
    assert list(track.ratios)[-3:] == pytest.approx([1.1, 1.0, 1.0])
