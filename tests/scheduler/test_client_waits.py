"""Low steps that a client waits for before it steps its high job again are not held for that job's sake."""

from __future__ import annotations

import pytest

from gpumux.scheduler import events as ev
from tests.scheduler.world import SMALL, World

HIGH_S, PAUSE_S, LONG_S = 1e-3, 2e-3, 20e-3
ROUNDS = 300  # in which nothing is left that is tried because it is not known


class Turns(World):
    """High jobs that pause equally long between their steps, and low jobs one piece of which is longer than any such
    pause, which is known to cost the step that meets it too much."""

    def __init__(self, *high: str) -> None:
        super().__init__("guarded", low_idle_window_s=1.0)  # room for several low pieces
        for name in high:
            self.job(name, "high", (HIGH_S,), session=name, max_slowdown=1.05)
        for name in ("low", "other"):
            self.low(name)
        self.count = 0
        for _ in range(ROUNDS):
            self.high_steps(*high)

    def low(self, name: str) -> None:
        """Another low job. Their programs are equal, so what is known of one is known of all."""
        self.job(name, "low", None, max_inflight=4)
        self.give(ev.ProgramOffered(name, 0, SMALL, content_hash="low"))
        self.jobs[name].pending.add(0)
        self.ready(name, 0, 0, (LONG_S,))

    def high_steps(self, *names: str) -> None:
        """One of each, beside a low one, where that may run, which delays them by its whole length."""
        self.count += 1
        if not self.jobs["low"].items:
            self.step("low", self.count)
        self.elapse(PAUSE_S)
        for name in names:
            self.step(name, self.count)
        while self.launches:
            for low in self.out("low"):
                self.done(low.launch, LONG_S)
            for high in self.out("high"):
                self.done(high.launch, HIGH_S)

    @property
    def newest(self) -> int:
        """The low job's step that waits."""
        return self.jobs["low"].items[0].id

    def waits(self, low: str, step: int, *high: str, over: bool = False) -> None:
        self.give(ev.ClientWaits(low, step, high, over))

    def runs(self) -> list[str]:
        return [piece.job for piece in self.launches.values()]

    def finish(self) -> None:
        for launch in sorted(self.launches):
            self.done(launch, LONG_S)


@pytest.fixture
def held() -> Turns:
    """A low step is held for the sake of the high job's next one."""
    world = Turns("high")
    assert world.runs() == []
    (hold,) = world.scheduler.held()
    assert (hold.job, hold.reason) == ("low", "gap")
    return world


def test_a_step_that_the_next_high_step_comes_after_is_not_held_for_it(held: Turns) -> None:
    held.waits("low", held.newest, "high")
    assert held.runs() == ["low"]
    assert held.scheduler.held() == []
    assert any("gives a step to 'high' only then" in line for line in held.scheduler.story("low"))


def test_it_runs_though_others_come_first(held: Turns) -> None:
    """By turn three or four low jobs are asked, and the one that is waited for may be none of them."""
    names = [f"low{number}" for number in range(8)]
    for name in names:
        held.low(name)
        held.step(name, 0)
    assert held.runs() == []
    held.waits("low7", 0, "high")
    assert held.runs() == ["low7"]


def test_only_that_step_runs_and_no_other_low_one(held: Turns) -> None:
    held.step("low", held.newest + 1)
    held.step("other", 0)
    held.waits("low", held.newest, "high")
    assert held.runs() == ["low"]
    held.finish()
    assert held.runs() == []
    assert "low" in {hold.job for hold in held.scheduler.held()}


def test_steps_before_the_one_waited_for_run_too(held: Turns) -> None:
    first, guard = held.newest, held.scheduler._state.guard
    assert guard is not None
    held.step("low", first + 1)
    held.step("low", first + 2)
    held.waits("low", first + 1, "high")
    assert [piece.step for piece in held.launches.values()] == [first, first + 1]
    held.done(min(held.launches), LONG_S)
    assert len(guard.awaited_steps.jobs) == 1
    held.done(min(held.launches), LONG_S)
    assert guard.awaited_steps.jobs == []


@pytest.fixture
def held_for_two() -> Turns:
    world = Turns("high", "another")
    assert world.runs() == []
    assert world.scheduler.held()
    return world


def test_what_is_held_for_another_high_job_stays_so(held_for_two: Turns) -> None:
    held_for_two.waits("low", held_for_two.newest, "high")
    assert held_for_two.runs() == []
    (hold,) = held_for_two.scheduler.held()
    assert hold.high == "another"
    held_for_two.waits("low", held_for_two.newest, "another")
    assert held_for_two.runs() == ["low"]


def test_a_client_that_gave_up_waiting_may_step_its_high_job_at_any_time(held_for_two: Turns) -> None:
    held_for_two.waits("low", held_for_two.newest, "high")
    held_for_two.waits("low", held_for_two.newest, "high", over=True)
    held_for_two.waits("low", held_for_two.newest, "another")
    assert held_for_two.runs() == []
    (hold,) = held_for_two.scheduler.held()
    assert hold.high == "high"


def test_a_high_step_that_runs_is_protected_as_ever() -> None:
    """Where low work is held beside it, it stays so until the step has ended."""
    world = Turns("high")
    for _ in range(ROUNDS):
        world.step("high", world.count + 1)
        if world.runs() == ["high"]:
            break
        world.finish()
        world.high_steps("high")
    world.waits("low", world.newest, "high")
    assert world.runs() == ["high"]
    world.done(min(world.launches), HIGH_S)
    assert world.runs() == ["low"], "the high job is idle now, and its client waits still"


def test_what_is_late_or_about_others_changes_nothing(held: Turns) -> None:
    held.waits("low", held.newest + 1, "high")  # was answered, or never asked for
    held.waits("gone", 0, "high")
    held.waits("low", held.newest, "gone", "other", "low")
    held.waits("high", held.count, "low")
    assert held.runs() == []
    assert held.scheduler.snapshot()["counters"]["ignored"]["ClientWaits"] == 2


@pytest.mark.parametrize("which", ["low", "high"])
@pytest.mark.parametrize("end", ["close", "change"])
def test_a_job_that_goes_leaves_nothing_behind(held_for_two: Turns, which: str, end: str) -> None:
    """check_invariants, after each event, would find what was left."""
    world = held_for_two
    world.waits("low", world.newest, "high")
    guard = world.scheduler._state.guard
    assert guard is not None
    assert [job.id for job in guard.awaited_steps.jobs] == ["low"]
    if end == "close":
        world.close(which)
    else:
        world.change(which, "high" if which == "low" else "low")
    assert guard.awaited_steps.jobs == []
