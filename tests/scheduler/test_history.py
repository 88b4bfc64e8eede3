"""`story()` says why a step waited; the ring it reads is bounded."""

from __future__ import annotations

from string import Formatter

from gpumux.scheduler import events as ev
from gpumux.scheduler.config import SchedulerConfig
from gpumux.scheduler.explain import TEMPLATES, story
from gpumux.scheduler.state import SchedulerState
from tests.scheduler.world import World


def told(world: World, job: str, step: int | None = None) -> str:
    return "\n".join(world.scheduler.story(job, step))


def test_it_names_the_job_that_held_the_window() -> None:
    world = World()
    world.job("greedy", "low", (1e-4,) * 8)
    world.job("patient", "low")
    world.steps("greedy", 1)
    world.steps("patient", 5)
    lines = world.scheduler.story("patient", 5)
    assert "queued behind 0 unanswered steps" in lines[0]
    assert "[StepSubmitted step 5 program 0]" in lines[0]
    assert "the low window is full (4 of 4 launches" in lines[1]
    assert "its oldest launch is 1, piece 0 of step 1 of job greedy" in lines[1]
    world.done(1)
    assert "launched as 5 on stream 0, cut 0 [PieceDone 1]" in world.scheduler.story("patient", 5)[2]
    world.run()
    assert "finished" in world.scheduler.story("patient", 5)[-1]
    assert "finished" not in world.scheduler.story("patient", 5)[-2]


def test_it_names_the_class_that_comes_first_and_each_reason_once() -> None:
    world = World()
    world.job("high", "high", (1e-4,) * 8)
    world.job("a", "low", (1e-4,) * 4)
    world.job("b", "low")
    world.steps("high", 1)
    world.steps("a", 1)
    world.steps("b", 1)
    assert "the low window is full (1 of 1 launches" in told(world, "b", 1)
    world.steps("b", 2)
    assert told(world, "b", 1).count("waits:") == 1


def test_it_says_paused_not_ready_and_behind_a_transfer() -> None:
    world = World()
    world.job("a", max_inflight=4)
    world.offer("a", 1)
    world.pause("a")
    world.steps("a", 1)
    assert "waits: the job is paused" in told(world, "a", 1)
    world.resume("a")
    assert "job resumed" in told(world, "a", 1)
    world.step("a", 2, program=1)
    world.run()
    assert "waits: program 1 is not ready" in told(world, "a", 2)
    world.ready("a", 1, 0, (1e-4,))
    world.transfer("a", 1)
    world.step("a", 3)
    world.run()
    assert "a transfer of state comes first" in told(world, "a", 3)
    world.end_transfer("a", 1)
    assert "transfer 1 ended: well" in told(world, "a", 3)
    assert "queued behind 1 unanswered" in told(world, "a", 3)


def test_it_outlives_the_job() -> None:
    world = World()
    world.job("a")
    world.pause("a")
    world.steps("a", 1)
    world.died("a")
    world.release("a")
    assert "failed (executor_crashed): it crashed [JobDied]" in told(world, "a", 1)
    assert "job gone from the device" in world.scheduler.story("a")[-1]
    assert world.scheduler.story("a", 99) == world.scheduler.story("nobody") == []


def test_a_refused_step_is_in_the_story_too() -> None:
    world = World()
    world.job("a")
    world.step("a", 4, program=9)
    assert "refused: job a has no program 9" in told(world, "a", 4)


def test_memory_is_bounded() -> None:
    world = World(story_records=50)
    world.job("a")
    for step in range(100):
        world.step("a", step)
        world.run()
    assert len(world.scheduler._state.history) == 50
    assert world.scheduler.story("a", 0) == []
    assert "finished" in told(world, "a", 99)


def test_every_kind_can_be_put_into_words() -> None:
    for kind, template in TEMPLATES.items():
        fields = [f for _, f, _, _ in Formatter().parse(template) if f is not None]
        state = SchedulerState(SchedulerConfig())
        state.history.append((1.0, "a", None, kind, tuple(range(len(fields))), ev.Tick()))
        (line,) = story(state, "a")
        assert line.startswith("1.000000 ")
        assert line.endswith("[Tick]")
