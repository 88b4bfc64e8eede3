"""Another priority or weight at run time: when it is in force, which clients are informed, and that no job starves."""

from __future__ import annotations

from collections import Counter

import pytest

from gpumux.scheduler import events as cmd
from gpumux.scheduler import events as ev
from gpumux.types import Priority
from tests.scheduler.world import World

PIECE = 1e-3


def changed(commands: list[cmd.Command]) -> list[tuple[str, Priority, float]]:
    return [(c.job, c.priority, c.weight) for c in commands if isinstance(c, cmd.JobChanged)]


def feed(world: World, *jobs: str, steps: int) -> Counter[str]:
    """Keep the jobs busy for so many pieces. Returns how many of them each job ran."""
    ran: Counter[str] = Counter()
    number = max([10_000, *(step for _, step in world.submitted)])
    for _ in range(steps):
        for job in jobs:
            while len(world.jobs[job].items) < world.jobs[job].spec.max_inflight:
                number += 1
                world.step(job, number)
        launch = min(world.launches.values(), key=lambda p: (-p.stream, p.launch))
        ran[launch.job] += 1
        world.done(launch.launch, PIECE)
    return ran


def test_an_idle_job_changes_at_once() -> None:
    world = World()
    world.job("a")
    assert changed(world.change("a", "high", 3.0)) == [("a", Priority.HIGH, 3.0)]
    assert changed(world.change("a", "high")) == [("a", Priority.HIGH, 3.0)], "it is so already"
    (shown,) = world.scheduler.snapshot()["jobs"]
    assert (shown["priority"], shown["weight"]) == ("high", 3.0)
    world.finish()


def test_what_is_out_ends_first_and_only_then_is_it_said_to_be_so() -> None:
    world = World()
    world.job("a", pieces=(PIECE, PIECE))
    world.steps("a", 1, 2)
    first, *rest = sorted(world.launches)
    assert changed(world.change("a", "high")) == []
    for launch in (first, *rest[:-1]):
        assert changed(world.done(launch)) == []
        assert "about to change its priority" in world.scheduler.explain("a")[0]
    commands = world.done(rest[-1] if rest else first)
    assert changed(commands) == [("a", Priority.HIGH, 1.0)]
    assert {c.stream for c in commands if isinstance(c, cmd.LaunchPiece)} == {1}, "it goes on at once, as a high job"
    assert "priority is high from now on" in "\n".join(world.scheduler.story("a"))
    world.finish()


def test_a_change_taken_back_while_it_waits_is_none() -> None:
    world = World()
    world.job("a")
    world.step("a", 1)
    world.change("a", "high")
    assert changed(world.change("a", "low")) == [("a", Priority.LOW, 1.0)]
    world.finish()


def test_a_paused_job_changes_too() -> None:
    world = World()
    world.job("a", pieces=(PIECE, PIECE, PIECE))
    world.step("a", 1)
    world.pause("a")
    world.change("a", "high")
    for launch in sorted(world.launches):
        world.done(launch)
    assert world.jobs["a"].priority is Priority.HIGH
    world.resume("a")
    world.finish()


@pytest.mark.parametrize("end", ["close", "died"])
def test_a_job_that_ends_first_is_never_said_to_have_changed(end: str) -> None:
    world = World()
    world.job("a")
    world.step("a", 1)
    world.change("a", "high")
    commands = world.close("a") if end == "close" else world.died("a")
    commands += world.release("a")
    assert changed(commands) == []


@pytest.mark.parametrize("policy", ["guarded", "paced"])
@pytest.mark.parametrize("out", range(4))
def test_a_job_is_promoted_in_the_middle_of_a_step(policy: str, out: int) -> None:
    """Whatever part of the step ran as a low job's, the rest runs as a high one's, beside another low job."""
    world = World(policy)
    world.job("a", pieces=(PIECE,) * 6)
    world.job("b", pieces=(PIECE,))
    world.steps("a", 1, 2)
    for _ in range(out):
        world.done(min(world.launches))
    world.change("a", "high")
    world.steps("b", 3, 4)
    world.run()
    assert world.jobs["a"].priority is Priority.HIGH
    feed(world, "a", "b", steps=60)
    world.change("a", "low")
    feed(world, "a", "b", steps=60)
    world.run()
    world.finish()


def test_device_time_follows_the_weight_from_the_next_piece_on() -> None:
    world = World()
    world.job("a", pieces=(PIECE,), max_inflight=8)
    world.job("b", pieces=(PIECE,), max_inflight=8)
    even = feed(world, "a", "b", steps=200)
    assert abs(even["a"] - even["b"]) <= 4
    assert changed(world.change("a", weight=3.0)) == [("a", Priority.LOW, 3.0)]
    uneven = feed(world, "a", "b", steps=400)
    assert uneven["a"] == pytest.approx(300, abs=6)
    world.run()
    world.finish()


@pytest.mark.parametrize("priority", ["high", "low"])
def test_a_job_that_changes_class_neither_starves_nor_starves_others(priority: str) -> None:
    """Virtual clocks of the classes have nothing to do with each other, however long either ran."""
    other = "low" if priority == "high" else "high"
    world = World()
    world.job("veteran", other, pieces=(PIECE,))
    feed(world, "veteran", steps=500)
    world.job("settled", priority, pieces=(PIECE,))
    feed(world, "settled", steps=50)
    world.run()
    world.change("veteran", priority)
    ran = feed(world, "settled", "veteran", steps=100)
    assert abs(ran["settled"] - ran["veteran"]) <= 6
    world.run()
    world.finish()


def test_a_change_of_a_job_that_is_gone_is_late_and_not_wrong() -> None:
    world = World()
    assert world.give(ev.ChangeRequested("nobody", Priority.HIGH, 1.0)) == []
