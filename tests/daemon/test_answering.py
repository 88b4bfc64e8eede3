"""A device that answers steps itself: each step answered once, counted once, and never refused for our being slow."""

from __future__ import annotations

import pytest
from prometheus_client import generate_latest

from gpumux.types import Fault
from gpumux.wire import messages as msg
from gpumux.wire.codec import step_done_form
from tests.daemon.stepping import JOB, only, step
from tests.program import samples

from .fakes import AnsweringDevice, Daemon

CHANNEL = 77


@pytest.fixture
def running():
    """A session `s` with JOB of two steps at most in flight, a loaded program 0, and a channel."""
    daemon = Daemon(device=AnsweringDevice())
    daemon.router.channel = CHANNEL
    daemon.connect("s")
    daemon.open_job("s", JOB, inflight=2)
    daemon.load("s", JOB, samples.add_one())
    yield daemon
    daemon.close()


def counted(daemon) -> str:
    return next(line for line in generate_latest(daemon.metrics.registry).decode().splitlines() if line.startswith(
        'gpumux_steps_total{priority="low"}'))  # fmt: skip


def test_what_the_device_answered_is_counted_and_not_answered_again(running):
    assert running.say("s", step(1)) == []
    assert running.device.channels == {JOB: (CHANNEL, step_done_form(JOB))}
    running.device.finish(running.now + 0.5)
    assert running.hear("s") == []
    assert counted(running).endswith(" 1.0")
    running.say("s", step(2))  # and the channel is given once
    running.device.finish(running.now)
    assert running.device.answered == [1, 2]
    assert "501.000 ms in all" in "\n".join(running.loop.scheduler.story(JOB))  # what the client's answer contained


def test_what_the_device_leaves_to_us_is_answered_here(running):
    running.device.decline = True
    running.say("s", step(1))
    running.device.finish(running.now)
    assert only(running.hear("s")).step == 1
    assert counted(running).endswith(" 1.0")


def test_a_client_that_is_quicker_than_the_device_tells_is_not_refused(running):
    running.device.quick = True
    for number in range(1, 20):
        assert running.say("s", step(number, slot=0)) == []
        running.device.finish(running.now)  # answered, and nothing said of it
    assert [launch.step for launch in running.device.launched] == list(range(1, 20))


@pytest.mark.parametrize("how", ["close", "leave"])
def test_a_step_that_was_answered_before_the_end_has_not_failed(running, how):
    running.device.quick = True
    running.say("s", step(1))
    running.device.finish(running.now)
    if how == "close":
        said = running.say("s", msg.CloseJob(60, JOB, False))
        assert [type(message) for message, _ in said] == [msg.Done, msg.JobEnded]
    else:
        running.disconnect("s")
    assert counted(running).endswith(" 1.0")


def test_full_by_count_with_another_program_is_not_refused_either(running):
    running.load("s", JOB, samples.add_one(), 1)
    running.device.quick = True
    running.say("s", step(1, slot=0))
    running.say("s", step(2, slot=1))
    running.device.finish(running.now)
    assert running.say("s", step(3, program=1, slot=0)) == []
    assert len(running.device.launched) == 3


def test_a_slot_that_is_in_use_is_refused_still(running):
    running.say("s", step(1, slot=0))
    failed = only(running.say("s", step(2, slot=0)))
    assert isinstance(failed, msg.StepFailed)
    assert (failed.step, failed.code) == (2, "protocol")


def test_one_step_too_many_is_refused_still(running):
    running.load("s", JOB, samples.add_one(), 1)
    running.say("s", step(1, slot=0))
    running.say("s", step(2, slot=1))
    failed = only(running.say("s", step(3, program=1, slot=0)))
    assert isinstance(failed, msg.StepFailed)
    assert failed.step == 3


def test_without_a_channel_everything_is_answered_here(running):
    running.router.channel = None
    running.say("s", step(1))
    running.device.finish(running.now)
    assert only(running.hear("s")).step == 1
    assert running.device.channels == {}


def test_a_job_whose_end_we_learn_by_catching_up_is_refused_in_words(running):
    running.device.quick = True
    running.say("s", step(1, slot=0))
    running.device.lose(JOB, Fault("executor_crashed", "it died", "try again"))
    answers = [message for message, _ in running.say("s", step(2, slot=0))]
    assert [m.step for m in answers if isinstance(m, msg.StepFailed)] == [1, 2]
    assert [type(m) for m in answers].count(msg.JobEnded) == 1
