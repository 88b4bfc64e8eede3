"""Devices that take steps from their client's lane: what runs is answered and told once, in order, and the lane
comes back with what was not acted on."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from time import monotonic
from typing import Any

import pytest

from gpumux.device.base import AnswerForm, JobLost, LaneReturned, Launch, Lending, LoanTerms
from gpumux.types import JobId, LaunchId, Priority, ProgramId, StepId
from gpumux.wire.codec import decode, encode, step_done_form, step_head
from gpumux.wire.messages import Goodbye, Step, StepDone
from tests.daemon.live import slow
from tests.device.harness import Driver, LoadedJob
from tests.program import samples

TURNS = 20  # of what depends on who is quicker


class Lane:
    """A job with a program that has settled, and its client's end of the lane."""

    def __init__(self, driver: Driver, program: Any, **load: Any) -> None:
        assert isinstance(driver.device, Lending)
        self.device: Lending = driver.device
        self.driver = driver
        self.ours, self.client = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.client.settimeout(60.0)
        self.job: LoadedJob = driver.open(priority=Priority.HIGH)
        self.program: ProgramId = self.job.load(program, **load)
        self.device.answer_on(self.job.job, self.ours.fileno(), AnswerForm(*step_done_form(self.job.job)))

    def settle(self) -> None:
        for _ in range(12):  # through all cuts
            self.job.step(self.program)

    def lend(self, first: bytes = b"") -> None:
        terms = LoanTerms(self.program, self.job.cut[self.program], 2, ())
        self.device.lend(self.job.job, step_head(self.job.job), self.job.steps - 1, [terms], first)

    def send(self, slot: int = 0) -> int:
        number = self.job.steps
        self.job.steps += 1
        self.client.send(self.packet(number, slot))
        return number

    def packet(self, number: int, slot: int = 0) -> bytes:
        return bytes(encode(Step(self.job.job, number, self.program, slot, [], 0))[0])

    def answer(self) -> StepDone:
        message, _ = decode([self.client.recv(1000)])
        assert isinstance(message, StepDone)
        return message

    def returned(self) -> LaneReturned:
        return self.driver.until(LaneReturned, self.job.job)

    def close(self) -> None:
        self.ours.close()
        self.client.close()


@pytest.fixture
def lanes(driver: Driver) -> Iterator[list[Lane]]:
    if not isinstance(driver.device, Lending):
        pytest.skip("this device takes no steps itself")
    made: list[Lane] = []
    yield made
    for lane in made:
        lane.close()


def test_steps_run_are_answered_and_are_told_afterwards(driver: Driver, lanes: list[Lane]) -> None:
    lanes.append(lane := Lane(driver, samples.add_one()))
    lane.settle()
    lane.lend()
    answers, told = [], []
    for turn in range(100):
        lane.job.put(lane.program, 0, struct.pack("4f", turn, 1, 2, 3), turn % 2)
        before = monotonic()
        number = lane.send(turn % 2)
        answers.append(lane.answer())
        assert answers[-1].step == number
        assert 0 <= answers[-1].queue_s <= answers[-1].total_s <= monotonic() - before
        assert struct.unpack("4f", lane.job.get(lane.program, 0, 16, turn % 2)) == (turn + 1, 2, 3, 4)
        told += lane.device.ran(lane.job.job) if turn % 7 == 0 else []
    lane.device.recall(lane.job.job)  # the last may have been answered, and not have ended quite
    told += lane.device.ran(lane.job.job)
    event = lane.returned()
    assert event.packet == b""
    told += event.ran
    assert [(s.step, s.slot, s.answered) for s in told] == [(a.step, i % 2, True) for i, a in enumerate(answers)]
    for step, answer in zip(told, answers, strict=True):
        assert step.submitted <= step.started <= step.ended
        assert (answer.queue_s, answer.device_s) == (step.started - step.submitted, step.ended - step.started)
        assert answer.total_s == step.ended - step.submitted
    lane.job.step(lane.program)  # launches go on as before


def test_what_is_no_ordinary_step_comes_back(driver: Driver, lanes: list[Lane]) -> None:
    lanes.append(lane := Lane(driver, samples.add_one()))
    lane.settle()
    lane.lend()
    goodbye = bytes(encode(Goodbye())[0])
    number = lane.send()
    lane.client.send(goodbye)
    assert lane.answer().step == number
    event = lane.returned()
    assert event.packet == goodbye
    assert number in [step.step for step in event.ran]
    assert lane.device.recall(lane.job.job) is None  # there is nothing left to recall
    assert lane.device.ran(lane.job.job) == []
    lane.lend()
    lane.client.send(lane.packet(number))  # the number of one that ran
    assert lane.returned().packet == lane.packet(number)


def test_what_was_read_before_is_acted_on_or_comes_back(driver: Driver, lanes: list[Lane]) -> None:
    lanes.append(lane := Lane(driver, samples.add_one()))
    lane.settle()
    lane.job.steps += 1
    lane.lend(lane.packet(lane.job.steps))
    assert lane.answer().step == lane.job.steps
    lane.device.recall(lane.job.job)
    assert lane.returned().packet == b""
    lane.lend(b"odd")
    assert lane.returned().packet == b"odd"


def test_a_recall_in_the_middle_loses_and_repeats_nothing(driver: Driver, lanes: list[Lane]) -> None:
    """Whether the second step has begun by then is a matter of luck; what becomes of it is not."""
    lanes.append(lane := Lane(driver, slow(256, 1)))
    lane.settle()
    for turn in range(TURNS):
        lane.lend()
        first, second = lane.send(0), lane.send(1)
        assert lane.answer().step == first
        runs = lane.device.recall(lane.job.job)
        told = [step.step for step in lane.device.ran(lane.job.job)]
        if runs is not None:
            assert told == (
                [] if runs.step == first else [first]
            )  # the first may be answered and not be noted as ended yet
            number = LaunchId(10**6 + turn)
            cut = lane.job.cut[lane.program]
            lane.device.adopt(
                Launch(
                    number, lane.job.job, runs.step, runs.program, cut, 0, runs.slot, (), 0, submitted=runs.submitted
                )
            )
            done = driver.done(number)
            assert done.answered
            assert done.started <= done.ended
            told.append(runs.step)
        event = lane.returned()
        assert event.ran == ()
        if second in told:
            assert told == [first, second]
            assert lane.answer().step == second
            assert event.packet == b""
        else:
            assert told == [first]
            lane.ours.setblocking(False)
            assert (event.packet or lane.ours.recv(1000)) == lane.packet(second, 1)


def test_a_step_that_ends_the_job_is_told_before_the_end(driver: Driver, lanes: list[Lane]) -> None:
    lanes.append(lane := Lane(driver, samples.crash_div()))
    for slot in (0, 1):
        lane.job.put(lane.program, 0, struct.pack("4q", *[7] * 4), slot)
        lane.job.put(lane.program, 1, struct.pack("4q", *[3] * 4), slot)
    lane.settle()
    lane.lend()
    good = lane.send()
    lane.answer()
    lane.job.put(lane.program, 0, struct.pack("4q", *[-(1 << 63)] * 4), 1)
    lane.job.put(lane.program, 1, struct.pack("4q", *[-1] * 4), 1)
    bad = lane.send(1)
    ends = [
        driver.wait_for(lambda e: isinstance(e, LaneReturned | JobLost) and e.job == lane.job.job) for _ in range(2)
    ]
    assert [type(event) for event in ends] == [LaneReturned, JobLost]
    assert [(step.step, step.ended > 0.0) for step in ends[0].ran] == [(good, True), (bad, False)]
    assert ends[1].fault.code == "executor_crashed"
    assert "SIGFPE" in ends[1].fault.message
    assert "aten.div.Tensor_mode" in ends[1].fault.message


def test_a_client_that_hangs_up_returns_the_lane(driver: Driver, lanes: list[Lane]) -> None:
    lanes.append(lane := Lane(driver, samples.add_one()))
    lane.settle()
    lane.lend()
    lane.client.close()
    assert lane.returned() == LaneReturned(lane.job.job, b"", ())
    lane.job.step(lane.program)


def test_a_client_that_does_not_read_leaves_its_answers_to_the_caller(driver: Driver, lanes: list[Lane]) -> None:
    lanes.append(lane := Lane(driver, samples.add_one()))
    lane.ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the kernel makes it the least there is
    lane.settle()
    lane.lend()
    numbers = [lane.send() for _ in range(60)]
    event = lane.returned()
    ran = list(event.ran)
    assert [step.step for step in ran] == numbers[: len(ran)]
    assert [step.answered for step in ran] == [True] * (len(ran) - 1) + [False]
    assert [lane.answer().step for _ in ran[1:]] == numbers[: len(ran) - 1]


def test_unloading_ends_a_loan(driver: Driver, lanes: list[Lane]) -> None:
    lanes.append(lane := Lane(driver, samples.add_one()))
    lane.settle()
    lane.lend()
    driver.unload(lane.job.job)
    assert lane.device.recall(lane.job.job) is None
    assert lane.device.ran(lane.job.job) == []
    assert lane.device.ran(JobId("f" * 32)) == []
    lane.device.adopt(Launch(LaunchId(1), lane.job.job, StepId(1), lane.program, 0, 0, 0, (), 0))
