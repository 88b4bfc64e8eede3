"""A lane that an executor reads: each step is run by it and known to us, or left, whenever we want it back."""

from __future__ import annotations

import mmap
import socket
from collections.abc import Sequence
from contextlib import contextmanager

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpumux.device.base import LaneReturned, Launch, LaunchDone, LoanTerms, StepRan
from gpumux.device.cpu.jobs import Executor, answer
from gpumux.device.cpu.lending import TELL_EVERY, LentLane, Loan, returned
from gpumux.device.run.schedule import Schedule
from gpumux.device.workers.channel import COUNT, RAN, RETURNED, RING_STEPS, TAKEN_AT, Channel, pack, pair
from gpumux.types import JobId, LaunchId, ProgramId, StepId
from gpumux.wire.codec import encode, step_head
from gpumux.wire.messages import Goodbye, Step

JOB = "a" * 32
TERMS = [(0, 3, 2, ["float", "int"]), (1, 0, 1, [])]


class Both:
    """The daemon's side and the executor's side of one lent lane, and the client's end of it."""

    def __init__(self, last: int = 0) -> None:
        self.page = mmap.mmap(-1, mmap.PAGESIZE)
        self.lane, self.client = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.ours, theirs = pair()
        self.channel = Channel(theirs)
        self.executor = Executor(JobId(JOB), 1, Channel(self.ours), self.page)
        self.schedule: Schedule = Schedule(1)
        self.schedule.open(JobId(JOB))
        self.last = last
        self.lend()

    def lend(self, first: bytes = b"", terms: Sequence = TERMS) -> None:
        self.loan = self.executor.loan = Loan(self.page, [LoanTerms(*program) for program in terms])
        self.lent = LentLane(
            self.channel.fileno(), self.lane, self.loan.token, self.page, step_head(JOB), self.last, terms, first
        )

    def send(self, step: int, program: int = 1, slot: int = 0, scalars: tuple = ()) -> bytes:
        packet = bytes(encode(Step(JOB, step, program, slot, list(scalars), 0))[0])
        self.client.send(packet)
        return packet

    def close(self) -> None:
        if self.executor.loan is not None:
            self.executor.loan.close()
        for sock in (self.lane, self.client, self.ours, self.channel):
            sock.close()
        self.page.close()


@contextmanager
def both(last: int = 0):
    made = Both(last)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def lane():
    with both() as made:
        yield made


def test_a_step_is_taken_as_it_was_sent_and_recorded(lane):
    lane.send(7, 0, 1, (0.5, 3))
    assert lane.lent.ready()
    taken = lane.lent.take()
    assert taken[:5] == (7, 0, 3, 1, [0.5, 3])
    assert lane.loan.ran() == []
    assert lane.loan.running()[:3] == (7, 0, 1)
    lane.lent.ended(10.0, 11.0, True)
    assert lane.loan.ran() == [StepRan(StepId(7), ProgramId(0), 1, taken.submitted, 10.0, 11.0, True)]
    assert lane.loan.ran() == []
    assert lane.loan.running() is None


def test_a_programs_number_may_be_any_that_a_client_chooses(lane):
    most = 2**63 - 1
    lane.loan.close()
    lane.lend(terms=[(most, 0, 1, [])])
    lane.send(1, most)
    assert lane.lent.take()[:2] == (1, most)
    lane.lent.ended(1.0, 2.0, True)
    assert [step.program for step in lane.loan.ran()] == [most]


def test_what_was_read_before_is_acted_on_first(lane):
    first = lane.send(1)
    assert lane.lane.recv(1000) == first
    lane.send(2)
    lane.loan.close()
    lane.lend(first)
    for number in (1, 2):
        assert lane.lent.ready()
        assert lane.lent.take().step == number
        lane.lent.ended(1.0, 2.0, True)
    assert [step.step for step in lane.loan.ran()] == [1, 2]


@pytest.mark.parametrize(
    "packet",
    [
        bytes(encode(Goodbye())[0]),
        bytes(encode(Step("b" * 32, 7, 1, 0, [], 0))[0]),  # of another job
        *[bytes(encode(Step(JOB, *fields))[0]) for fields in (
            (5, 1, 0, [], 0),  # not after the last
            (7, 2, 0, [], 0),  # no such program
            (7, 1, 1, [], 0),  # no such slot
            (7, 1, 0, [1.0], 0),  # a scalar too many
            (7, 0, 0, [1, 1], 0),  # of the wrong kinds
            (7, 0, 0, [1.0], 0),  # too few
        )],
        step_head(JOB) + b"\xc0" * 5,
        step_head(JOB),
        step_head(JOB) + b"".join(map(msgpack.packb, (7, 1, 0, [], 1))),  # a payload follows
        step_head(JOB) + b"".join(map(msgpack.packb, (7, 1, 0, [], 0, 0))),
        step_head(JOB) + b"".join(map(msgpack.packb, (7, [1], 0, [], 0))),
        step_head(JOB) + b"".join(map(msgpack.packb, (7, True, 0, [], 0))),
        step_head(JOB) + b"".join(map(msgpack.packb, (7, 1, -1, [], 0))),
        step_head(JOB) + b"".join(map(msgpack.packb, (7, 0, 0, [1.0, 2**63], 0))),
        step_head(JOB) + b"".join(map(msgpack.packb, (2**63, 1, 0, [], 0))),
        step_head(JOB) + b"\xdd\xff\xff\xff\xff",
        b"\xc1" + b"part of something longer",
        bytes(encode(Step(JOB, 7, 0, 0, [0.5, *range(2000)], 0))[0]),
        b"\x00",
    ],
)  # fmt: skip
def test_what_is_out_of_the_ordinary_is_given_back_whole(packet):
    with both(last=5) as lane:
        lane.client.send(packet)
        assert lane.lent.ready()
        assert lane.lent.take() is None
        assert lane.lent.packet == packet
        assert lane.loan.stop() is None
        assert lane.loan.ran() == []


def test_a_client_that_hangs_up_leaves_nothing(lane):
    lane.client.close()
    assert lane.lent.ready()
    assert lane.lent.take() is None
    assert lane.lent.packet == b""


def test_what_the_daemon_says_comes_first(lane):
    lane.send(1)
    lane.ours.send(b"x")
    assert not lane.lent.ready()


def test_after_a_recall_no_step_starts(lane):
    packet = lane.send(1)
    assert lane.loan.stop() is None
    assert lane.lent.take() is None
    assert lane.lent.packet == packet
    assert lane.loan.running() is None


def test_a_recall_names_the_step_that_runs(lane):
    lane.send(1)
    lane.lent.take()
    assert lane.loan.stop().step == 1
    lane.lent.ended(1.0, 2.0, True)
    assert lane.loan.ran() == []  # it has become a launch, and ends as one
    assert [step.step for step in lane.loan.over()] == [1]


def test_a_daemon_that_does_not_read_for_long_gets_the_lane_back(lane):
    for number in range(1, RING_STEPS + 1):
        lane.send(number)
        assert lane.lent.take().step == number
        assert lane.lent.ended(1.0, 2.0, True) is (number % TELL_EVERY == 0)
    packet = lane.send(RING_STEPS + 1)
    assert lane.lent.take() is None
    assert lane.lent.packet == packet
    assert [step.step for step in lane.loan.ran()] == list(range(1, RING_STEPS + 1))


def test_the_step_that_was_adopted_ends_as_a_launch_and_others_as_steps(lane):
    for number in (1, 2):
        lane.send(number)
        lane.lent.take()
        if number == 2:
            break
        lane.lent.ended(1.0, 2.0, True)
    launch = Launch(LaunchId(9), JobId(JOB), StepId(2), ProgramId(1), 0, 0, 0, (), 0, submitted=1.0)
    assert lane.loan.stop().step == 2
    lane.loan.adopted = launch
    lane.schedule.adopt(JobId(JOB), launch, 0)
    assert lane.schedule.pieces_running == 1
    lane.lent.ended(3.0, 4.0, False)
    returns, ends = answer(lane.executor, lane.schedule, RETURNED, memoryview(pack(b"rest")))
    assert isinstance(returns, LaneReturned)
    assert (returns.packet, [step.step for step in returns.ran]) == (b"rest", [1])
    assert ends == LaunchDone(LaunchId(9), 3.0, 4.0, False)
    assert lane.schedule.pieces_running == 0
    assert lane.executor.loan is None
    assert returned(lane.executor, lane.schedule, b"") == []  # said twice


def test_a_step_that_a_dead_process_was_at_is_known(lane):
    lane.send(1)
    lane.lent.take()
    lane.executor.ended = True
    (event,) = returned(lane.executor, lane.schedule, b"")
    assert [(step.step, step.ended) for step in event.ran] == [(1, 0.0)]


def test_word_that_something_ran_is_no_event(lane):
    assert answer(lane.executor, lane.schedule, RAN, memoryview(pack([]))) == []


def test_a_step_that_a_dead_process_was_about_to_begin_after_a_recall_never_began(lane):
    lane.send(1)
    assert lane.loan.stop() is None
    COUNT.pack_into(lane.page, TAKEN_AT, 1)  # it said so, and was killed before it found the token gone
    lane.executor.ended = True
    (event,) = returned(lane.executor, lane.schedule, b"")
    assert event.ran == ()


@given(st.lists(st.sampled_from(["send", "look", "take", "end", "read", "stop", "lend"]), max_size=80))
@example(["send", "send", "look", "take", "stop", "end", "read", "look", "take"])
@example(["send", "look", "stop", "take"])
def test_every_step_is_known_once_in_whatever_order_both_sides_work(moves):
    """The executor's moves and ours, mixed anyhow: each step the client sent was run once and told once, or lies on
    the lane, or came back; after a stop nothing starts. The executor looks for a recall before it takes a step, and the
    stop may come in between."""
    sent, looked, named = 0, False, None
    told, back, begun, stopped, over = [], [], None, False, False
    with both() as lane:
        for move in moves:
            if move == "send" and sent - len(told) < 20:
                sent += 1
                lane.send(sent)
            elif move == "look" and begun is None and not over:
                looked, over = not stopped, stopped
            elif move == "take" and looked and sent > len(told) + len(back):
                lane.lane.setblocking(False)
                looked = False
                taken = lane.lent.take()
                if taken is None:
                    over = True
                    if lane.lent.packet:
                        assert stopped
                        back.append(lane.lent.packet)
                else:
                    assert not stopped
                    begun = taken.step
            elif move == "end" and begun is not None:
                lane.lent.ended(1.0, 2.0, True)
                lane.last, begun = begun, None
            elif move == "read":
                told += [step.step for step in lane.loan.ran()]
                assert named is None or named not in told
            elif move == "stop" and not stopped:
                stopped = True
                runs = lane.loan.stop()
                named = None if runs is None else runs.step
                assert named == begun
            elif move == "lend" and over and begun is None:
                told += [step.step for step in lane.loan.over()]
                named = None
                for packet in back:  # the daemon acts on it, behind what ran
                    lane.last = msgpack.unpackb(packet)[2]
                    told.append(lane.last)
                back.clear()
                lane.loan.close()
                lane.lend()
                stopped = over = False
        told += [step.step for step in lane.loan.over()]
        assert told == list(range(1, len(told) + 1))
        if begun is not None:
            assert begun == len(told) + 1
            assert lane.loan.running().step == begun
