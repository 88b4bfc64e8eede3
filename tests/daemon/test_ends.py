"""Sessions, jobs and the daemon end while a Program is checked or loaded and while state moves: the loop
goes on, every request has one answer, and nothing is left."""

from __future__ import annotations

import pytest

from gpumux.daemon.records import MOST_ENDS
from gpumux.program import codec
from gpumux.scheduler import events as ev
from gpumux.types import Fault, JobId, JobReleased, ProgramId, StepId, TransferId
from gpumux.wire import messages as msg
from tests.program import samples

from .fakes import Daemon

JOB = "a" * 32
PROGRAM = codec.encode(samples.add_one())
LOST = Fault("executor_crashed", "gone", "")


@pytest.fixture
def daemon():
    daemon = Daemon()
    daemon.connect("s")
    daemon.open_job("s", JOB)
    yield daemon
    daemon.close()


def checking(daemon):
    """A check is under way, and a second Program waits behind it."""
    daemon.device.slow = True
    assert daemon.load("s", JOB, PROGRAM, 1) == []
    assert daemon.load("s", JOB, PROGRAM, 2) == []


def loading(daemon):
    """The scheduler has charged the Program and the device loads it."""
    checking(daemon)
    daemon.device.finish()
    assert daemon.hear("s") == []
    assert daemon.loop.segments.used_bytes > 0


def pulling(daemon):
    """A transfer at the device, one queued behind it, and a push that was never filled."""
    daemon.load("s", JOB, PROGRAM, 1, new_buffers=[4])
    for number in (1, 2, 3):
        daemon.say("s", msg.OpenTransfer(daemon.ref(), JOB, number, [0], number == 3))


def gone(daemon):
    daemon.disconnect("s")


def drained(daemon):
    daemon.loop.stop("the test says so")
    daemon.turn()
    assert daemon.loop.scheduler.drained


def lost(daemon):
    daemon.device.lose(JOB, LOST)
    daemon.turn()


def closed(daemon):
    daemon.say("s", msg.CloseJob(daemon.ref(), JOB, False))


@pytest.mark.parametrize("end", [gone, drained, lost, closed])
@pytest.mark.parametrize("doing", [checking, loading, pulling])
def test_an_end_in_the_middle_of_something_leaves_nothing(daemon, doing, end):
    doing(daemon)
    end(daemon)
    assert daemon.loop.context.records.jobs == {}
    assert daemon.device.jobs == {}
    assert daemon.loop.segments.used_bytes == 0
    assert daemon.loop.scheduler.snapshot()["memory"]["used"] == 0
    refs = [m.ref for _, m, _ in daemon.router.sent if isinstance(m, msg.Refusal | msg.TransferSegment)]
    assert sorted(refs) == sorted(set(refs))
    if doing is pulling and end is not gone:
        ended = [m.transfer for _, m, _ in daemon.router.sent if isinstance(m, msg.TransferDone)]
        assert sorted(ended) == [1, 2, 3]
    elif end is not gone:
        refused = [m for _, m, _ in daemon.router.sent if isinstance(m, msg.Refusal)]
        assert len(refused) == 2


@pytest.mark.parametrize(
    "queued",
    [
        ev.StepSubmitted(JobId(JOB), StepId(7), ProgramId(1)),
        ev.TransferRequested(JobId(JOB), TransferId(7), False),
        ev.ProgramDropped(JobId(JOB), ProgramId(1), LOST),
    ],
    ids=["step", "transfer", "program"],
)
def test_what_the_scheduler_answers_for_a_job_that_is_forgotten_goes_nowhere(daemon, queued):
    daemon.load("s", JOB, PROGRAM, 1)
    daemon.loop.context.feed(ev.CloseRequested(JobId(JOB), False, "x"))
    daemon.loop.context.feed(JobReleased(JobId(JOB)))
    daemon.loop.context.feed(queued)
    daemon.turn()
    assert daemon.loop.context.records.jobs == {}


def test_a_step_that_the_scheduler_never_saw_is_answered_when_its_job_is_forgotten(daemon):
    daemon.load("s", JOB, PROGRAM, 1)
    daemon.loop.context.feed(ev.CloseRequested(JobId(JOB), False, "x"))
    daemon.loop.context.feed(JobReleased(JobId(JOB)))
    answers = [message for message, _ in daemon.say("s", msg.Step(JOB, 1, 1, 0, [], 0))]
    assert [type(a) for a in answers if not isinstance(a, msg.JobEnded)] == [msg.StepFailed]


@pytest.mark.parametrize("asked", [msg.LoadProgram(90, JOB, 5, [], []), msg.OpenTransfer(90, JOB, 5, [], False)])
def test_a_closing_job_takes_nothing_new_and_says_so(daemon, asked):
    daemon.load("s", JOB, PROGRAM, 1)
    daemon.loop.context.records.jobs[JobId(JOB)].unloading = True  # the device has not let go of it yet
    ((refusal, _),) = daemon.say("s", asked, *([PROGRAM] if isinstance(asked, msg.LoadProgram) else []))
    assert (refusal.ref, refusal.code) == (90, "job_closed")


# ---- A message that crosses the news of its job's end.


LATE = [
    (msg.LoadProgram(9, JOB, 1, [], []), (PROGRAM,)),
    (msg.OpenTransfer(9, JOB, 1, [], False), ()),
    (msg.FillTransfer(9, JOB, 1, 0), ()),
    (msg.Step(JOB, 1, 1, 0, [], 0), ()),
]


@pytest.mark.parametrize(("message", "frames"), LATE, ids=lambda value: type(value).__name__)
def test_a_message_to_a_job_that_has_just_failed_is_answered_with_its_failure(daemon, message, frames):
    """A process could not be made right after OpenJob, and submit said that there was no such job."""
    daemon.device.lose(JobId(JOB), LOST)
    assert [m.code for m, _ in daemon.hear("s") if isinstance(m, msg.JobEnded)] == [LOST.code]
    assert JobId(JOB) not in daemon.loop.context.records.jobs
    ((answer, _),) = daemon.say("s", message, *frames)
    assert (answer.code, answer.message) == (LOST.code, LOST.message)


def test_a_job_that_is_being_unloaded_after_its_failure_says_why_as_well(daemon, monkeypatch):
    monkeypatch.setattr(daemon.device, "unload", lambda job: None)  # it takes its time
    daemon.loop._job_failed(JobId(JOB), ZeroDivisionError())
    daemon.router.read = len(daemon.router.sent)
    assert daemon.loop.context.records.jobs[JobId(JOB)].unloading
    message, frames = LATE[0]
    assert [m.code for m, _ in daemon.say("s", message, *frames)] == ["internal"]


def test_reasons_are_for_the_jobs_own_session_until_it_is_opened_again_and_bounded(daemon):
    daemon.connect("t")
    daemon.device.lose(JobId(JOB), LOST)
    daemon.hear("s")
    message, frames = LATE[0]
    assert [m.code for m, _ in daemon.say("t", message, *frames)] == ["unknown_job"]
    daemon.open_job("s", JOB)
    daemon.say("s", msg.CloseJob(5, JOB, False))
    assert [m.code for m, _ in daemon.say("s", message, *frames)] == ["unknown_job"]
    session = daemon.loop.context.records.sessions["s"]
    for number in range(2 * MOST_ENDS):
        session.ended(JobId(f"{number:032x}"), LOST)
    assert len(session.ends) == MOST_ENDS
    assert JobId(f"{2 * MOST_ENDS - 1:032x}") in session.ends
