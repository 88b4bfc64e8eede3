"""Steps that an executor answers itself: what the device knows of them when the executor has not come to tell."""

from __future__ import annotations

import mmap
import socket
import struct
from itertools import pairwise

import pytest

from gpumux.device.base import Launch
from gpumux.device.cpu.device import answer, obituary, unheard
from gpumux.device.cpu.executor import StepAnswers
from gpumux.device.cpu.jobs import ExecutorRecord
from gpumux.device.run.schedule import Schedule
from gpumux.device.workers.channel import (
    DONE,
    DONE_BODY,
    PAGE_LAUNCH,
    PAGE_LAUNCH_AT,
    PAGE_MEMORY,
    PAGE_MEMORY_AT,
    PAGE_TIMES,
    PAGE_TIMES_AT,
    Channel,
    pair,
)
from gpumux.types import JobDied, JobId, LaunchId, PieceDone, ProgramId, StepId

JOB = JobId("a" * 32)
FORM = (bytes(32), 0, 8, 16, 24)


@pytest.fixture
def page():
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        yield page


@pytest.fixture
def executor(page):
    """Its process is not there; its page is."""
    ours, theirs = pair()
    with ours, theirs:
        yield ExecutorRecord(JOB, Channel(ours), page)


@pytest.fixture
def answers(page):
    """What the process would answer with, and the client's end of its channel."""
    ours, theirs = pair()
    answers = StepAnswers(page)
    answers.use(ours.detach(), *FORM)
    with theirs:
        theirs.settimeout(10.0)
        yield answers, theirs
        answers.close()


def launched(number: int, submitted: float | None = 1.0) -> tuple[Schedule, Launch]:
    schedule: Schedule = Schedule(1)
    launch = Launch(LaunchId(number), JOB, StepId(5), ProgramId(0), 0, 0, 0, (), 0, submitted=submitted)
    schedule.open(JOB)
    assert schedule.claim(JOB, launch, 0)
    return schedule, launch


def done(launch: int, answered: bool) -> memoryview:
    return memoryview(DONE_BODY.pack(DONE, launch, 2.0, 3.0, answered, 0.25))[1:]


def test_an_answer_is_known_before_it_is_told_and_told_once(executor, answers):
    schedule, launch = launched(7)
    assert unheard(executor, schedule) == []
    assert answers[0].ran(7, 5, 1.0, 2.0, 3.0, 0.25, True)
    assert struct.unpack(">Qddd", answers[1].recv(100)) == (5, 1.0, 0.75, 2.0)
    assert unheard(executor, schedule) == [PieceDone(launch.launch, 2.0, 3.0, True, 0.25)]
    assert unheard(executor, schedule) == []
    assert schedule.running(JOB) is None
    assert answer(executor, schedule, DONE, done(7, True)) == []
    assert executor.failure is None


def test_another_launch_is_not_taken_for_the_answered_one(executor, answers):
    answers[0].ran(7, 5, 1.0, 2.0, 3.0, 0.0, True)
    for number, submitted in ((8, 1.0), (7, None)):
        schedule, _ = launched(number, submitted)
        assert unheard(executor, schedule) == []
        assert schedule.running(JOB) is not None


def test_an_answered_step_counts_even_if_the_process_died_before_it_told(executor, answers):
    schedule, _ = launched(7)
    answers[0].ran(7, 5, 1.0, 2.0, 3.0, 0.0, True)
    executor.status, executor.ended = 9, True
    events = [*unheard(executor, schedule), *obituary(executor, schedule.drop(JOB))]
    assert [type(event) for event in events] == [PieceDone, JobDied]


def test_an_answer_that_could_not_be_sent_is_nowhere(executor, answers):
    schedule, _ = launched(7)
    answers[1].close()
    assert not answers[0].ran(7, 5, 1.0, 2.0, 3.0, 0.0, True)
    assert unheard(executor, schedule) == []
    assert answer(executor, schedule, DONE, done(7, False)) == [PieceDone(LaunchId(7), 2.0, 3.0, False, 0.25)]


def test_an_answer_lost_after_we_counted_on_it_fails_the_job(executor, answers):
    schedule, _ = launched(7)
    answers[0].ran(7, 5, 1.0, 2.0, 3.0, 0.0, True)
    assert unheard(executor, schedule)
    assert answer(executor, schedule, DONE, done(7, False)) == []
    assert executor.failure is not None


def test_what_lies_on_the_page_lies_apart():
    fields = [(PAGE_TIMES_AT, PAGE_TIMES), (PAGE_LAUNCH_AT, PAGE_LAUNCH), (PAGE_MEMORY_AT, PAGE_MEMORY)]
    parts = sorted([(0, 4), *((at, field.size) for at, field in fields)])
    assert all(at % 8 == 0 for at, _ in parts)
    assert all(at + size <= beyond for (at, size), (beyond, _) in pairwise([*parts, (mmap.PAGESIZE, 0)]))


def test_seconds_are_summed_over_pieces_and_never_negative(answers):
    mine, theirs = answers
    assert not mine.ran(1, 5, -1.0, 2.0, 3.0, 0.0, False)
    assert mine.ran(2, 5, 2.5, 4.0, 4.5, 0.0, True)  # the submitter's clock was ahead
    assert struct.unpack(">Qddd", theirs.recv(100)) == (5, 0.0, 1.5, 2.0)
    assert mine.ran(
        3, 6, 4.5, 4.5, 5.0, 0.5000001, True
    )  # two clocks: it can't have stood still for longer than it took
    assert struct.unpack(">Qddd", theirs.recv(100))[2] == 0.0
    assert theirs.type == socket.SOCK_SEQPACKET
