"""Sessions and jobs: how they begin, how they end, and what is left (nothing)."""

from __future__ import annotations

import gc

import pytest

from gpumux.scheduler import events as cmd
from gpumux.scheduler import events as ev
from gpumux.scheduler.jobs import ScheduledJob
from gpumux.types import JobDied, JobReleased, JobSpec, Peer, PieceDone, PieceFailed, TransferEnded
from tests.scheduler.world import FAULT, INFO, World, assert_empty

ENDINGS = ["close", "drain", "died", "failed", "session", "leaving"]


def busy_world() -> World:
    """Job a: two steps of three pieces, one under way, and a transfer behind them. Job b: idle."""
    world = World()
    world.job("a", "high", (1e-4,) * 3)
    world.job("b", session="other")
    world.steps("a", 1, 2)
    world.transfer("a", 1)
    world.offer("a", 5)
    return world


def end(world: World, how: str) -> list[cmd.Command]:
    if how == "close":
        return world.close("a")
    if how == "drain":
        return world.close("a", drain=True)
    if how == "died":
        return world.died("a")
    if how == "failed":
        return world.fail(1)
    if how == "session":
        world.sessions.remove("s")
        return world.give(ev.SessionClosed("s", "its lease ran out"))
    return world.give(ev.DrainRequested("SIGTERM"))


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("close", "job_closed"),
        ("died", "executor_crashed"),
        ("failed", "executor_crashed"),
        ("session", "job_closed"),
        ("leaving", "daemon_gone"),
    ],
)
def test_an_end_answers_everything_at_once(how: str, code: str) -> None:
    world = busy_world()
    commands = [c for c in end(world, how) if getattr(c, "job", "a") == "a"]
    kinds = [type(c) for c in commands]
    told = [] if how == "close" else [cmd.EndJob]
    assert kinds == [cmd.FailStep, cmd.FailStep, cmd.FinishTransfer, *told, cmd.RefuseProgram, cmd.UnloadJob]
    assert {c.fault.code for c in commands[:-1]} == {code}
    (after,) = world.step("a", 3)
    assert isinstance(after, cmd.FailStep)
    assert after.fault.code == "job_closed"
    (late,) = world.transfer("a", 9)
    assert isinstance(late, cmd.FinishTransfer)
    assert late.fault.code == "job_closed"
    commands = world.release("a")
    told = [cmd.EndJob("a", "s", None)] if how == "close" else []
    assert commands == [*told, cmd.ForgetJob("a")]


def test_a_drain_answers_every_step_first() -> None:
    world = busy_world()
    assert end(world, "drain") == []
    (refused,) = world.step("a", 3)
    assert isinstance(refused, cmd.FailStep)
    assert refused.fault.code == "job_closed"
    assert [p.step for p in world.run()] == [1, 1, 1, 2, 2, 2]
    commands = world.end_transfer("a", 1)
    assert [type(c) for c in commands] == [cmd.FinishTransfer, cmd.RefuseProgram, cmd.UnloadJob]
    assert world.release("a") == [cmd.EndJob("a", "s", None), cmd.ForgetJob("a")]


def test_an_idle_job_drains_at_once_and_a_drain_can_be_cut_short() -> None:
    world = World()
    world.job("a")
    assert world.close("a", drain=True) == [cmd.UnloadJob("a")]
    world.job("b")
    world.steps("b", 1)
    assert world.close("b", drain=True) == []
    assert world.give(ev.CloseRequested("b", True, "again")) == []
    assert [type(c) for c in world.close("b")] == [cmd.FailStep, cmd.UnloadJob]


def test_a_paused_job_is_resumed_to_drain_and_may_be_paused_again() -> None:
    world = World()
    world.job("a")
    world.pause("a")
    world.steps("a", 1, 2)
    assert not world.launches
    assert cmd.LaunchPiece in map(type, world.close("a", drain=True))
    world.pause("a")
    (job,) = world.scheduler.snapshot()["jobs"]
    assert (job["state"], job["paused"]) == ("draining", True)
    world.run()
    world.close("a", drain=True)
    world.run()
    assert world.jobs["a"].unloading


@pytest.mark.every(2)
@pytest.mark.parametrize("how", ENDINGS)
def test_a_closed_job_leaves_nothing_behind(how: str) -> None:
    world = busy_world()
    mine = {id(job) for job in world.scheduler._state.jobs.values()}
    end(world, how)
    world.finish()
    gc.collect()
    assert not [found for found in gc.get_objects() if type(found) is ScheduledJob and id(found) in mine]
    assert_empty(world.scheduler)


def test_a_closing_job_keeps_its_room_until_the_device_lets_go() -> None:
    world = World()
    world.job("a", "high", (1e-4,) * 4)
    world.job("b", "high", (1e-4,) * 4)
    world.steps("a", 1)
    world.steps("b", 1)
    world.close("a")
    assert {p.job for p in world.launches.values()} == {"a"}
    world.done(1)
    assert [p.job for p in world.launches.values()] == ["a", "b"]
    world.release("a")
    assert [p.job for p in world.launches.values()] == ["b", "b"]


def test_a_dead_jobs_room_is_free_at_once_and_late_news_of_it_is_ignored() -> None:
    world = World()
    world.job("a", "high", (1e-4,) * 4)
    world.job("b", "high", (1e-4,) * 4)
    world.steps("a", 1)
    world.steps("b", 1)
    world.died("a")
    assert [p.job for p in world.launches.values()] == ["b", "b"]
    assert world.give(PieceDone(1, 0.0, 1.0)) == []
    assert world.give(PieceFailed(2, FAULT)) == []
    assert world.give(JobDied("a", FAULT)) == []
    assert world.release("a") == [cmd.ForgetJob("a")]
    assert world.give(JobReleased("a")) == []
    assert world.scheduler.snapshot()["counters"]["ignored"] == {"PieceDone": 1, "PieceFailed": 1, "JobReleased": 1}


def test_a_forgotten_job_is_out_of_the_ready_heap_too() -> None:
    world = World()
    for name in ("holds", "first", "gone"):
        world.job(name, "low", (1e-4,) * 4)
        world.steps(name, 1)
    queue = world.scheduler._state.windows.ready[0]
    assert {entry[2].id for entry in queue._heap} >= {"first", "gone"}
    world.close("gone")
    world.release("gone")
    assert {entry[2].id for entry in queue._heap} == {"first"}


def test_one_jobs_end_does_not_touch_another() -> None:
    world = busy_world()
    world.steps("b", 1)
    end(world, "died")
    assert [p.job for p in world.run()] == ["b"]
    assert len(world.decisions["b", 1]) == 1


def test_a_jobs_end_is_its_owners_to_hear_after_the_session_is_gone() -> None:
    world = World()
    world.job("a")
    world.close("a")
    world.give(ev.SessionClosed("s", "it left"))
    world.sessions.remove("s")
    assert world.release("a") == [cmd.EndJob("a", "s", None), cmd.ForgetJob("a")]


def test_asking_for_a_job_again_gets_the_same_answer() -> None:
    world = World()
    world.job("a")
    assert world.give(ev.JobRequested("s", "a", JobSpec("a"))) == [cmd.AcceptJob("s", "a", False)]
    (other,) = world.give(ev.JobRequested("s", "a", JobSpec("a", weight=2.0)))
    assert isinstance(other, cmd.RefuseJob)
    assert other.fault.code == "refused"
    world.session("thief", uid=2)
    (stolen,) = world.give(ev.JobRequested("thief", "a", JobSpec("a")))
    assert isinstance(stolen, cmd.RefuseJob)
    assert stolen.fault.code == "not_owner"
    (nobody,) = world.give(ev.JobRequested("unheard of", "c", JobSpec("c")))
    assert isinstance(nobody, cmd.RefuseJob)
    assert nobody.fault.code == "refused"


def test_an_id_can_be_used_again_once_its_job_is_forgotten() -> None:
    world = World()
    world.job("a")
    world.close("a")
    (closing,) = world.give(ev.JobRequested("s", "a", JobSpec("a")))
    assert isinstance(closing, cmd.RefuseJob)
    assert closing.fault.code == "job_closed"
    world.release("a")
    world.job("a")
    world.steps("a", 1)
    assert [p.step for p in world.run()] == [1]


def test_a_leaving_daemon_closes_every_job_and_takes_no_more() -> None:
    world = busy_world()
    assert not world.scheduler.drained
    commands = end(world, "leaving")
    assert [c.job for c in commands if isinstance(c, cmd.EndJob)] == ["a", "b"]
    (refused,) = world.request("c")
    assert isinstance(refused, cmd.RefuseJob)
    assert refused.fault.code == "daemon_gone"
    assert world.give(ev.DrainRequested("again")) == []
    world.release("a")
    assert not world.scheduler.drained
    world.release("b")
    assert world.scheduler.drained


def test_what_is_said_twice_is_counted_and_changes_nothing() -> None:
    world = World()
    world.job("a")
    for event in (
        ev.DeviceOpened(INFO), ev.SessionOpened("s", Peer(9, 9, 9)), ev.ProgramOffered("a", 0, None), JobReleased("a"),
        ev.ProgramDropped("a", 0, FAULT), TransferEnded("a", 1, None), ev.SessionClosed("nobody", ""),
    ):  # fmt: skip
        assert world.give(event) == []
    assert sum(world.scheduler.snapshot()["counters"]["ignored"].values()) == 7
    assert world.scheduler.snapshot()["jobs"][0]["uid"] == 1000
