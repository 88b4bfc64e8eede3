"""What two waves hold of their arena: no byte twice, no two that wait for each other, and the scheduler keeps to it."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from gpumux.scheduler import events as ev
from gpumux.scheduler.config import SchedulerConfig
from gpumux.scheduler.leases import WaveLease
from gpumux.scheduler.scheduler import Scheduler
from gpumux.types import DeviceInfo, Footprint, JobSpec, Peer, PieceDone, Priority, ProgramReady, WavePieces
from tests.waves.interleavings import histories

INFO = DeviceInfo("sim", "virtual", 1 << 30, None, 0, "", {"high": 400e-6, "low": 300e-6}, run_s=1.0)
HEIGHTS = (1, 3, 5, 6, 6, 4, 2, 1, 1)
TAIL = 7
ARENA = 8


def test_no_byte_is_used_twice_and_no_wave_waits_for_ever():
    overlapped, small = histories(400)
    assert overlapped > 100
    assert small > 300


def _now(self: WaveLease, launched: int, done: int) -> int:
    """What the pieces that are out need, and nothing for those that come."""
    return max(self.heights[done:launched], default=0)


@pytest.mark.parametrize("held", [lambda self, launched, done: 0, _now], ids=["nothing is held", "only what is out"])
def test_these_histories_find_a_lease_that_is_wrong(held, monkeypatch):
    monkeypatch.setattr(WaveLease, "held", held)
    with pytest.raises(AssertionError, match=r"in use|wait for each other"):
        histories(400)


@pytest.mark.parametrize(
    ("launched", "done", "held"),
    [(0, 0, 0), (2, 0, 3), (2, 1, 3), (2, 2, 3), (4, 3, 6), (5, 3, 6), (5, 5, 4), (6, 5, 4), (9, 8, 1), (9, 9, 0)],
)
def test_a_step_holds_what_is_out_and_what_its_rest_needs(launched: int, done: int, held: int):
    lease = WaveLease(WavePieces(0, TAIL, HEIGHTS), ARENA)
    assert lease.held(launched, done) == held
    assert lease.descends(launched) is (launched > 4)


class Waves:
    """A low job whose steps are of two waves in turns, alone on a device that runs its pieces in order."""

    def __init__(
        self, arena: int = ARENA, priority: Priority = Priority.LOW, policy: str = "guarded", *, more: int = 0,
        arena_of_others: int | None = None,
    ) -> None:  # fmt: skip
        """`more`: bytes that an allocator takes besides the arena. `arena_of_others`: of the second wave's Program."""
        self.scheduler = Scheduler(SchedulerConfig(policy=policy))
        self.now = 0.0
        self.out: list[ev.LaunchPiece] = []
        self.order: list[tuple[int, int]] = []  # (step, piece) as they were launched
        self.finished: list[int] = []
        self.refused: list[ev.RefuseProgram] = []
        self.give(ev.DeviceOpened(INFO))
        self.give(ev.SessionOpened("s", Peer(1, 1, 1)))
        self.give(ev.JobRequested("s", "j", JobSpec("j", priority, max_inflight=4)))
        for lane in (0, 1):
            height = arena_of_others if lane and arena_of_others is not None else arena
            self.give(ev.ProgramOffered("j", lane, Footprint(10, height + more, 10, height)))
            if not self.refused:
                wave = WavePieces(lane, TAIL, HEIGHTS)
                self.give(ProgramReady("j", lane, 0, (1e-4,) * len(HEIGHTS), wave=wave))

    def give(self, event: ev.Event) -> None:
        self.now += 1e-5
        for command in self.scheduler.handle(event, self.now):
            if isinstance(command, ev.LaunchPiece):
                self.out.append(command)
                self.order.append((command.step, command.piece))
            elif isinstance(command, ev.FinishStep):
                self.finished.append(command.step)
            elif isinstance(command, ev.RefuseProgram):
                self.refused.append(command)
        self.scheduler.check_invariants()

    def steps(self, *steps: int) -> None:
        for step in steps:
            self.step(step, step % 2)

    def step(self, step: int, lane: int) -> None:
        self.give(ev.StepSubmitted("j", step, lane))

    def end_one(self) -> None:
        piece = self.out.pop(0)
        self.give(PieceDone(piece.launch, self.now, self.now + 1e-4))

    def drain(self) -> None:
        while self.out:
            self.end_one()


def test_steps_of_both_waves_take_turns_and_are_answered_in_order():
    waves = Waves()
    waves.steps(0, 1, 2, 3)
    waves.drain()
    assert waves.finished == [0, 1, 2, 3]
    first = [piece for step, piece in waves.order if step == 0]
    assert first == list(range(len(HEIGHTS)))
    begins = waves.order.index((1, 0))
    assert waves.order.index((0, 4)) < begins < waves.order.index((0, 8)), "the second begins behind the first's peak"
    assert waves.order.index((1, TAIL)) > waves.order.index((0, 8)), "its tail waits for the end of the first"
    changes = sum(a[0] != b[0] for a, b in pairwise(waves.order))
    assert changes > 6, "pieces of both are launched in turns"


def test_both_launch_a_piece_in_turn_where_there_is_room_for_both():
    waves = Waves(arena=20)
    waves.steps(0, 1)
    waves.drain()
    assert waves.order[4:14] == [(0, 4), (1, 0), (0, 5), (1, 1), (0, 6), (1, 2), (0, 7), (1, 3), (0, 8), (1, 4)]


@pytest.mark.parametrize(
    ("given", "begins"),
    [({"arena": 7}, True), ({"arena": 6}, False), ({"arena": 6, "more": 5}, False),
     ({"arena": 6, "arena_of_others": 7}, True), ({"arena": 7, "arena_of_others": 6}, True)],
    ids=["both fit exactly", "one byte too few", "what an allocator takes is no room", "an arena of another height",
         "of a lower one"],
)  # fmt: skip
def test_the_second_begins_behind_the_peak_if_both_fit(given: dict[str, int], begins: bool):
    """The first holds 6 until its last highest piece has ended, and the second's first piece needs 1."""
    waves = Waves(**given)
    waves.steps(0, 1)
    waves.drain()
    assert (waves.order.index((1, 0)) < waves.order.index((0, 5))) is begins


def test_two_steps_of_one_wave_run_one_after_the_other():
    waves = Waves(arena=20)
    waves.step(0, 1)
    waves.step(1, 1)
    while (1, 0) not in waves.order:
        waves.end_one()
    assert not waves.finished, "it is launched behind the first's last piece, which has not ended"
    waves.drain()
    assert waves.order == sorted(waves.order)


def test_a_wave_waits_where_both_do_not_fit():
    waves = Waves(arena=6)
    waves.steps(0, 1)
    waves.drain()
    assert waves.finished == [0, 1]
    # Beside the first's rest of 1, at most 5 fit: the highest pieces of the second come behind its end.
    assert waves.order.index((1, 3)) > waves.order.index((0, 8))


def test_explain_says_that_a_wave_waits_for_the_other():
    waves = Waves(arena=6)
    waves.steps(0, 1)
    said = []
    while waves.out:
        said.append(waves.scheduler.explain("j")[0])
        waves.end_one()
    assert any("waits for its other wave to give memory back" in line for line in said)


def test_random_histories_of_one_job_keep_the_invariants():
    for seed in range(20):
        rng = random.Random(seed)
        waves = Waves(arena=rng.choice((6, 7, 8, 12)), policy=rng.choice(("fifo", "streams", "paced", "guarded")))
        submitted = 0
        while submitted < 12 or waves.out:
            if submitted < 12 and submitted - len(waves.finished) < 4 and rng.random() < 0.3:
                waves.steps(submitted)
                submitted += 1
            elif waves.out:
                waves.end_one()
            if rng.random() < 0.05:
                waves.give(ev.PauseRequested("j"))
                waves.give(ev.ResumeRequested("j"))
        assert waves.finished == list(range(12))


def test_a_transfer_waits_for_both_waves():
    waves = Waves()
    waves.steps(0, 1)
    waves.give(ev.TransferRequested("j", 0, False))
    waves.steps(2)
    while len(waves.finished) < 2:
        waves.end_one()
    assert not [step for step, _ in waves.order if step == 2]


def test_a_high_job_has_no_waves():
    waves = Waves(priority=Priority.HIGH)
    (refused, *_) = waves.refused
    assert "two waves" in refused.fault.message
    assert "low" in refused.fault.remedy
