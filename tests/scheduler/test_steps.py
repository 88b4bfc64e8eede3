"""Steps, programs and transfers: order, answers and what waits for what."""

from __future__ import annotations

import pytest

from gpumux.scheduler import events as cmd
from gpumux.scheduler import events as ev
from gpumux.types import PieceDone, ProgramReady, StepTimes, TransferEnded
from tests.scheduler.world import FAULT, World


def failed(commands: list[cmd.Command]) -> list[tuple[int, str]]:
    return [(c.step, c.fault.code) for c in commands if isinstance(c, cmd.FailStep)]


def launched(commands: list[cmd.Command]) -> list[tuple[int, int]]:
    return [(c.step, c.piece) for c in commands if isinstance(c, cmd.LaunchPiece)]


def test_a_step_is_launched_piece_by_piece_and_answered_with_its_times() -> None:
    world = World()
    world.job("a", "high", (1e-4, 2e-4, 3e-4))
    assert launched(world.step("a", 7)) == [(7, 0), (7, 1)]
    submitted = world.now
    assert launched(world.done(1, seconds=1e-3)) == [(7, 2)]
    assert world.done(2, seconds=2e-3) == []
    (finish,) = world.done(3, seconds=3e-3)
    assert isinstance(finish, cmd.FinishStep)
    assert finish.times.queue_s == pytest.approx(0.0)
    assert finish.times.device_s == pytest.approx(6e-3)
    assert finish.times.total_s == pytest.approx(world.now - submitted)
    (job,) = world.scheduler.snapshot()["jobs"]
    assert (job["steps_done"], job["steps_failed"], job["running"], job["queued"]) == (1, 0, 0, 0)
    assert job["device_seconds"] == pytest.approx(6e-3)


def test_the_next_step_begins_while_the_last_piece_of_the_one_before_is_out() -> None:
    world = World()
    world.job("a", "high", (1e-4, 1e-4))
    world.steps("a", 1, 2)
    assert launched(world.done(1)) == [(2, 0)]
    assert world.scheduler.snapshot()["jobs"][0]["running"] == 2


def test_a_step_keeps_the_cut_it_began_with() -> None:
    world = World()
    world.job("a", "high", (1e-4, 1e-4, 1e-4))
    world.steps("a", 1, 2)
    world.ready("a", 0, 1, (4e-4,))
    cuts = [(p.step, p.cut, p.piece) for p in world.run()]
    assert cuts == [(1, 0, 0), (1, 0, 1), (1, 0, 2), (2, 1, 0)]


def test_an_older_or_empty_cut_changes_nothing() -> None:
    world = World()
    world.job("a")
    world.ready("a", 0, 3, (1e-4, 1e-4))
    assert world.give(ProgramReady("a", 0, 2, (1e-4,))) == []
    assert world.give(ProgramReady("a", 0, 4, ())) == []
    world.steps("a", 1)
    assert {p.cut for p in world.run()} == {3}


def test_a_step_waits_for_its_program_and_others_wait_behind_it() -> None:
    world = World()
    world.job("a")
    world.offer("a", 1)
    assert world.step("a", 1, program=1) == []
    assert world.step("a", 2, program=0) == []
    commands = world.ready("a", 1, 0, (1e-4,))
    assert commands[0] == cmd.AnnounceProgram("a", 1)
    assert launched(commands) == [(1, 0), (2, 0)]


def test_a_program_that_fails_to_load_fails_its_steps_alone() -> None:
    world = World()
    world.job("a")
    world.offer("a", 1)
    world.steps("a", 1)
    world.step("a", 2, program=1)
    commands = world.give(ev.ProgramDropped("a", 1, FAULT))
    assert commands == [cmd.RefuseProgram("a", 1, FAULT), cmd.FailStep("a", 2, FAULT)]
    assert [c.step for c in world.run()] == [1]
    assert failed(world.step("a", 3, program=1)) == [(3, "refused")]
    assert launched(world.step("a", 4)) == [(4, 0)]


def test_a_program_without_pieces_is_refused() -> None:
    world = World()
    world.job("a", pieces=None)
    world.offer("a", 0)
    (refusal,) = world.give(ProgramReady("a", 0, 0, ()))
    assert isinstance(refusal, cmd.RefuseProgram)
    assert refusal.fault.code == "program"
    assert world.scheduler.snapshot()["memory"]["used"] == 0


def test_steps_of_programs_never_offered_or_refused_fail() -> None:
    world = World()
    world.job("a")
    assert failed(world.step("a", 1, program=9)) == [(1, "refused")]
    assert failed(world.step("nobody", 1)) == [(1, "unknown_job")]


def test_more_steps_than_max_inflight_are_refused_and_the_others_run() -> None:
    world = World()
    world.job("a", max_inflight=2)
    world.pause("a")
    world.steps("a", 1, 2)
    (refusal,) = world.step("a", 3)
    assert isinstance(refusal, cmd.FailStep)
    assert refusal.fault.code == "refused"
    assert "2 steps" in refusal.fault.message
    world.resume("a")
    assert [p.step for p in world.run()] == [1, 2]
    assert launched(world.step("a", 4)) == [(4, 0)]


def test_a_step_said_twice_is_answered_once() -> None:
    world = World()
    world.job("a")
    world.steps("a", 1)
    assert world.give(ev.StepSubmitted("a", 1, 0)) == []
    world.run()
    assert world.give(ev.StepSubmitted("a", 1, 0)) == []
    assert world.decisions["a", 1] == [cmd.FinishStep("a", 1, world.decisions["a", 1][0].times)]
    assert isinstance(world.decisions["a", 1][0].times, StepTimes)


def test_a_transfer_waits_for_earlier_steps_and_later_steps_wait_for_it() -> None:
    world = World()
    world.job("a", max_inflight=4)
    world.steps("a", 1, 2)
    assert world.transfer("a", 1, into_device=False) == []
    assert world.step("a", 3) == []
    assert world.done(1)[1:] == []
    assert cmd.StartTransfer("a", 1, False) in world.done(2)
    assert world.launches == {}
    commands = world.end_transfer("a", 1)
    assert commands[0] == cmd.FinishTransfer("a", 1, None)
    assert launched(commands) == [(3, 0)]


def test_a_failed_transfer_fails_alone() -> None:
    world = World()
    world.job("a")
    assert world.transfer("a", 5) == [cmd.StartTransfer("a", 5, True)]
    world.step("a", 1)
    commands = world.end_transfer("a", 5, FAULT)
    assert commands[0] == cmd.FinishTransfer("a", 5, FAULT)
    assert launched(commands) == [(1, 0)]


def test_transfers_are_bounded_and_answered_once() -> None:
    world = World(max_transfers_per_job=2)
    world.job("a")
    world.transfer("a", 1)
    world.transfer("a", 2)
    assert world.give(ev.TransferRequested("a", 1, True)) == []
    (refusal,) = world.transfer("a", 3)
    assert isinstance(refusal, cmd.FinishTransfer)
    assert refusal.fault.code == "refused"
    assert world.end_transfer("a", 1) == [cmd.FinishTransfer("a", 1, None), cmd.StartTransfer("a", 2, True)]
    assert world.give(TransferEnded("a", 1, None)) == []


def test_a_paused_job_starts_nothing_and_finishes_what_is_out() -> None:
    world = World()
    world.job("a", "high", (1e-4,) * 4)
    world.steps("a", 1)
    world.pause("a")
    assert len(world.run()) == 2
    world.job("c")
    world.pause("c")
    assert world.transfer("c", 1) == []
    assert world.resume("c") == [cmd.StartTransfer("c", 1, True)]
    world.job("b")
    world.pause("b")
    assert world.step("b", 1) == []
    assert world.transfer("b", 1) == []
    assert launched(world.resume("a")) == [(1, 2), (1, 3)]
    world.run()
    assert launched(world.resume("b")) == [(1, 0)]
    assert world.done(min(world.launches))[-1] == cmd.StartTransfer("b", 1, True)


def test_the_time_a_piece_stood_still_is_nobodys_device_time() -> None:
    """A low piece of the CPU device gives its core to a high one and goes on afterwards."""
    world = World("guarded")
    world.job("a", "high", (1e-3,))
    world.job("b", "low", (1e-3,))
    world.steps("a", 1)
    world.run()
    world.elapse(1.0)
    world.steps("b", 1)
    (low,) = world.launches
    (finish,) = [c for c in world.done(low, 0.010, 0.009) if isinstance(c, cmd.FinishStep)]
    assert finish.times.device_s == pytest.approx(0.001)
    told = world.scheduler.snapshot()
    assert next(job for job in told["jobs"] if job["job"] == "b")["device_seconds"] == pytest.approx(0.001)
    assert told["guard"]["harvested_seconds"] == pytest.approx(0.001)
    said = "Of 0.010 s that its pieces were on the device they stood still for 0.009 s: they gave the device away"
    assert said in " ".join(world.scheduler.explain("b"))
    assert "stood still" not in " ".join(world.scheduler.explain("a"))


def test_a_step_that_fails_alone_is_answered_so_and_the_next_one_runs() -> None:
    world = World()
    world.job("a", "high", (1e-4, 1e-4))
    world.step("a", 0)
    world.step("a", 1)
    first, second = world.launches
    assert failed(world.done(first)) == []
    done = world.done(second, fault=FAULT)
    assert failed(done) == [(0, FAULT.code)]
    assert not any(isinstance(c, cmd.FinishStep | cmd.EndJob) for c in done)
    (job,) = world.scheduler.snapshot()["jobs"]
    assert (job["steps_done"], job["steps_failed"]) == (0, 1)
    ended = [c for launch in list(world.launches) for c in world.done(launch)]
    while world.launches:
        ended += world.done(next(iter(world.launches)))
    assert [c.step for c in ended if isinstance(c, cmd.FinishStep)] == [1]


def test_negative_times_from_a_device_count_as_nothing() -> None:
    world = World()
    world.job("a")
    world.steps("a", 1)
    (finish,) = world.scheduler.handle(PieceDone(1, 5.0, 4.0), world.now)
    assert isinstance(finish, cmd.FinishStep)
    assert finish.times.device_s == 0.0
