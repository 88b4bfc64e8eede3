"""A step that came while the core was busy lost what it waited, though no piece of it was late."""

from __future__ import annotations

from typing import Any

import pytest

from gpumux.core import commands as cmd
from gpumux.core import events as ev
from gpumux.core.controller import MOST_WAITED_S, Account
from gpumux.core.machine import Core
from gpumux.core.track import Track

from .test_guard_scenarios import LIGHT, SMALL, high, ident, low
from .test_guard_scenarios import world as simulated

SOLO_S = 1e-3


class Listening:
    """The core of a simulation, and for how long each step had been there when it heard of it."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.waited: list[float] = []

    def handle(self, event: ev.Event, now: float) -> list[cmd.Command]:
        if isinstance(event, ev.StepSubmitted):
            self.waited.append(event.waited)
        return self.core.handle(event, now)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.core, name)


def test_what_the_guard_knows_of_a_steps_loss_is_what_its_client_lost() -> None:
    simulation = simulated(high((SMALL,) * 12, think_s=0.7e-3), low((LIGHT,) * 24))
    core = simulation.core
    assert isinstance(core, Core)
    simulation.core = heard = Listening(core)
    job = simulation.run(steps=400).job("high")
    guard = core._state.guard
    assert guard is not None
    track = guard.tracks[ident(simulation, "high")]
    took = simulation.clients[0].step_seconds[: track.steps]  # of the last one it may not have heard yet
    assert sum(waited > 0.0 for waited in heard.waited) > 100
    assert max(heard.waited) < MOST_WAITED_S
    newest = list(track.ratios)
    assert newest == pytest.approx([seconds / job.solo.step_s for seconds in took[-len(newest) :]], rel=1e-9)
    assert max(newest) > 1.0


def charged(waited: float, shared: bool = True) -> float:
    """What a step that waited so long takes from an account, over one that did not."""
    left = []
    for seconds in (0.0, waited):
        account = Account(1.05)
        account.begin(SOLO_S)
        account.end(0.0, shared, True, 0.0, 0.0, seconds)
        left.append(account.balance)
    return left[0] - left[1]


@pytest.mark.parametrize("shared", [True, False])
def test_it_is_taken_from_the_account_whether_low_work_ran_beside_the_step_or_only_before_it(shared: bool) -> None:
    assert charged(15e-6, shared) == pytest.approx(15e-6)


def test_a_step_over_what_it_may_lose_by_waiting_counts_as_one() -> None:
    account = Account(1.05)
    account.begin(SOLO_S)
    account.learn_no_more()
    account.end(0.9 * account.most, True, True, 0.0, 0.0, 0.2 * account.most)
    assert account.tokens < 2.5
    account.end(0.9 * account.most, True, True, 0.0, 0.0, 0.0)
    assert account.tokens > 2.0


@pytest.mark.parametrize(("waited", "counted"), [(50e-6, 50e-6), (5e-3, MOST_WAITED_S)])
def test_low_work_pays_for_no_more_than_its_events_take_and_people_are_told_all(waited: float, counted: float) -> None:
    """A daemon that was busy for so long was so with something else."""
    simulation = simulated(high((SMALL,) * 12, think_s=0.7e-3), low((LIGHT,) * 24))
    simulation.run(steps=30)
    core = simulation.core
    assert isinstance(core, Core)
    guard = core._state.guard
    assert guard is not None
    track: Track = guard.tracks[ident(simulation, "high")]
    track.account.balance, track.waited, track.shared = 0.0, waited, False
    track.began, credit = 1.0, track.account.credit
    track.end_step(1.0 + track.solo_step())
    assert credit - track.account.balance == pytest.approx(counted, rel=1e-6)
    assert track.ratios[-1] == pytest.approx(1.0 + waited / track.solo_step())


def test_a_step_behind_another_one_lost_nothing_by_waiting() -> None:
    simulation = simulated(high((SMALL,) * 12), low((LIGHT,) * 24))  # two steps in flight
    core = simulation.core
    assert isinstance(core, Core)
    simulation.core = heard = Listening(core)
    simulation.run(steps=60)
    guard = core._state.guard
    assert guard is not None
    assert max(heard.waited) > 0.0
    assert guard.tracks[ident(simulation, "high")].waited == 0.0
