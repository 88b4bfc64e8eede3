"""The loop over a device and a router in memory: which session gets which answer, and what is left afterwards."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from prometheus_client import generate_latest

from gpumux.config import Config
from gpumux.daemon import segments
from gpumux.daemon.effects import MAX_SCALARS
from gpumux.daemon.requests import MAX_PROFILES
from gpumux.program import codec
from gpumux.scheduler import events as ev
from gpumux.types import Fault
from gpumux.wire import codec as codec_of_messages
from gpumux.wire import messages as msg
from gpumux.wire import router as wire
from gpumux.wire import shared_memory
from gpumux.wire.limits import Limits
from gpumux.wire.router import Incoming
from tests.daemon.stepping import JOB, OTHER, only, step
from tests.program import samples

from .fakes import BAD, UNLOADABLE, Daemon


@pytest.fixture
def daemon():
    daemon = Daemon()
    yield daemon
    daemon.close()


@pytest.fixture
def running(daemon):
    """A session `s` with JOB and a loaded program 0."""
    daemon.connect("s")
    daemon.open_job("s", JOB)
    ((loaded, _),) = daemon.load("s", JOB, samples.add_one())
    assert isinstance(loaded, msg.ProgramLoaded)
    return daemon


def with_scalars(*kinds):
    return replace(samples.add_one(), scalars=kinds)


def test_a_step_is_launched_with_its_slot_and_scalars_and_answered_with_its_times(running):
    running.load("s", JOB, with_scalars("float", "int"), 1)
    assert running.say("s", step(1, slot=1, program=1, scalars=[0.5, 3])) == []
    (launch,) = running.device.launched
    assert (launch.slot, launch.scalars, launch.step, launch.job) == (1, (0.5, 3), 1, JOB)
    running.device.finish(running.now)
    done = only(running.hear("s"))
    assert isinstance(done, msg.StepDone)
    assert (done.step, done.frames) == (1, 0)
    assert done.device_s == pytest.approx(0.001)


def test_the_time_a_piece_stood_still_is_not_counted(running):
    running.say("s", step(1))
    running.device.finish(running.now)
    done = running.device.events.pop()
    running.device.events.append(done._replace(ended=done.started + 0.010, suspended=0.009))
    assert only(running.hear("s")).device_s == pytest.approx(0.001)
    (job,) = running.loop.figures().jobs
    assert job.device_busy_s == pytest.approx(0.001)


def test_the_segment_is_handed_over_at_its_full_size(daemon):
    daemon.connect("s")
    daemon.open_job("s", JOB, inflight=3)
    loaded = only(daemon.load("s", JOB, samples.add_one()))
    assert loaded.slots == 3
    assert daemon.router.segments["s", loaded.segment] == loaded.slots * loaded.slot_bytes
    assert daemon.loop.segments.used_bytes == loaded.slots * loaded.slot_bytes


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (step(2, slot=2), "protocol"),
        (step(2, slot=0), "protocol"),
        (step(2, slot=1, program=7), "program"),
        (step(2, slot=1, job=OTHER), "unknown_job"),
        (step(0, slot=1), "protocol"),
    ],
    ids=["slot out of range", "slot in use", "no such program", "no such job", "number not rising"],
)
def test_a_wrong_step_is_answered_and_never_reaches_the_device(running, wrong, code):
    running.say("s", step(1, slot=0))
    failed = only(running.say("s", wrong))
    assert isinstance(failed, msg.StepFailed)
    assert (failed.step, failed.code) == (wrong.step, code)
    assert len(running.device.launched) == 1
    running.device.finish()
    assert only(running.hear("s")).step == 1


@pytest.mark.parametrize("scalars", [[], [1.0], [1.0, 2, 3], [2, 1.0], [1.0, 2.0]])
def test_a_step_with_other_scalars_than_its_program_takes_is_refused(running, scalars):
    running.load("s", JOB, with_scalars("float", "int"), 1)
    failed = only(running.say("s", step(1, program=1, scalars=scalars)))
    assert isinstance(failed, msg.StepFailed)
    assert (failed.step, failed.code) == (1, "protocol")
    assert running.device.launched == []
    assert running.say("s", step(2, program=1, scalars=[1.0, 2])) == []
    running.device.finish()
    assert isinstance(only(running.hear("s")), msg.StepDone)


def test_a_program_with_more_scalars_than_a_step_can_carry_is_refused(daemon):
    daemon.connect("s")
    daemon.open_job("s", JOB)
    wire = codec_of_messages.encode(msg.Step(JOB, 2**62, 2**62, 2**62, [2**62] * MAX_SCALARS, 0))
    assert len(wire[0]) <= Limits().max_control_bytes
    refusal = only(daemon.load("s", JOB, with_scalars(*["int"] * (MAX_SCALARS + 1))))
    assert (type(refusal), refusal.code) == (msg.Refusal, "program")
    assert isinstance(only(daemon.load("s", JOB, with_scalars(*["int"] * MAX_SCALARS), 1)), msg.ProgramLoaded)


def test_a_step_said_twice_is_answered_once(running):
    running.say("s", step(1))
    assert running.say("s", step(1, slot=1)) == []
    assert running.loop.context.unexpected == 1
    running.device.finish()
    assert [m.step for m, _ in running.hear("s")] == [1]


def test_a_slot_is_free_again_when_its_step_is_answered(running):
    for number in (1, 2, 3):
        assert running.say("s", step(number)) == []
        running.device.finish()
        assert isinstance(only(running.hear("s")), msg.StepDone)


def test_opening_twice_is_the_same_job_and_another_session_can_not_take_the_id(running):
    again = msg.OpenJob(91, JOB, "a job", 0, 1.0, 1.1, None, 2, 0)
    assert running.say("s", again) == [(msg.JobOpened(91, JOB), [])]
    assert len(running.device.jobs) == 1
    running.connect("t", uid=1000)
    refusal = only(running.say("t", again))
    assert (refusal.ref, refusal.code) == (91, "not_owner")


@pytest.mark.parametrize("field", ["weight", "max_slowdown", "max_inflight", "priority"])
def test_settings_that_make_no_sense_are_refused(daemon, field):
    daemon.connect("s")
    values = {"weight": 1.0, "max_slowdown": 1.1, "max_inflight": 2, "priority": 0} | {
        field: {"weight": -1.0, "max_slowdown": 0.5, "max_inflight": 0, "priority": 7}[field]
    }
    refusal = only(daemon.say("s", msg.OpenJob(5, JOB, "x", memory_limit=None, seed=0, **values)))
    assert isinstance(refusal, msg.Refusal)
    assert refusal.ref == 5
    assert daemon.device.jobs == {}


def test_a_program_that_fails_its_check_or_its_load_leaves_the_job_as_it_was(running):
    assert only(running.load("s", JOB, BAD, 1)).code == "program"
    before = running.loop.segments.used_bytes
    assert only(running.load("s", JOB, UNLOADABLE, 1, new_buffers=[8])).code == "program"
    assert running.loop.segments.used_bytes == before
    assert running.loop.context.records.jobs[JOB].buffers == []
    assert isinstance(only(running.load("s", JOB, samples.add_one(), 1)), msg.ProgramLoaded)


def test_bytes_of_programs_that_wait_are_bounded(running, monkeypatch):
    from gpumux.daemon import requests

    monkeypatch.setattr(requests, "MAX_ENCODED_BYTES", 100)
    assert only(running.load("s", JOB, bytes(101), 1)).code == "admission_refused"


def test_anybody_may_look_at_a_job(running):
    running.connect("t", uid=1001)
    assert only(running.say("t", msg.JobStats(5, JOB))).body["short"] == "j1"


def test_loads_of_one_job_go_one_after_the_other(daemon):
    daemon.connect("s")
    daemon.open_job("s", JOB)
    first = msg.LoadProgram(11, JOB, 1, [8], [])
    second = msg.LoadProgram(12, JOB, 2, [16], [])
    third = msg.LoadProgram(13, JOB, 3, [32], [])
    encoded = codec.encode(samples.add_one())
    for load, frame in ((first, encoded), (second, BAD), (third, encoded)):
        daemon.router.arrivals.append(Incoming("s", daemon.router.open["s"], load, [frame]))
    answers = [m for m, _ in daemon.hear("s")]
    assert [(type(m), m.ref) for m in answers] == [
        (msg.ProgramLoaded, 11),
        (msg.Refusal, 12),
        (msg.ProgramLoaded, 13),
    ]
    assert daemon.device.jobs[JOB].buffers == [8, 32]
    assert daemon.loop.context.records.jobs[JOB].buffers == [8, 32]


@pytest.mark.parametrize(
    ("uid", "allowed"), [(1000, True), (0, True), (1001, False), (-1, False)], ids=["owner", "root", "other", "nobody"]
)
def test_owners_and_operators_may_pause_resume_and_close(running, uid, allowed):
    running.connect("t", uid=uid)
    for message in (msg.PauseJob(31, JOB), msg.ResumeJob(32, JOB), msg.CloseJob(33, JOB, False)):
        answer = only(running.say("t", message))
        assert answer.ref == message.ref
        assert isinstance(answer, msg.Done) == allowed
        assert allowed or answer.code == "not_owner"
    assert (JOB not in running.loop.context.records.jobs) == allowed


@pytest.mark.parametrize(
    ("uid", "allowed"), [(1000, True), (0, True), (1001, False), (-1, False)], ids=["owner", "root", "other", "nobody"]
)
def test_owners_and_operators_may_profile(running, uid, allowed):
    running.connect("t", uid=uid)
    ((answer, frames),) = running.say("t", msg.ProfileJob(31, JOB, None))
    if allowed:
        assert (answer, frames) == (msg.JobProfile(31, JOB, 0, 1), [b"profile 0"])
    else:
        assert (answer.ref, answer.code) == (31, "not_owner")


def test_commands_to_paste_name_jobs_by_their_short_ids(running):
    running.say("s", msg.PauseJob(30, JOB))
    answer = only(running.say("s", msg.ExplainJob(31, JOB)))
    assert answer.body["remedies"] == [{"text": "let it go on", "command": "gpumux jobs resume j1"}]


@pytest.mark.parametrize(("uid", "allowed"), [(1000, True), (0, True), (1001, False)], ids=["owner", "root", "other"])
def test_owners_and_operators_may_ask_for_an_explanation(running, uid, allowed):
    running.connect("t", uid=uid)
    answer = only(running.say("t", msg.ExplainJob(31, JOB)))
    if allowed:
        assert answer.body["job"] == JOB
        assert answer.body["sentences"] == running.loop.scheduler.explain(JOB)
        assert answer.body["story"] == running.loop.scheduler.story(JOB)[-60:]
        assert answer.body["verdict"] == "has nothing queued; 0 steps done"
        assert (answer.body["causes"], answer.body["remedies"]) == ([], [])
    else:
        assert (answer.ref, answer.code) == (31, "not_owner")


def test_a_profile_is_of_the_busiest_program_unless_one_is_named(running):
    running.load("s", JOB, samples.add_one(), 1)
    for index in (1, 2):
        running.say("s", step(index, slot=index - 1, program=1))
    assert only(running.say("s", msg.ProfileJob(1, JOB, None))).program == 1
    assert only(running.say("s", msg.ProfileJob(2, JOB, 0))).program == 0
    assert only(running.say("s", msg.ProfileJob(3, JOB, 77))).code == "program"


def test_profiles_are_answered_in_order_and_not_without_bound(running):
    running.device.slow = True
    for ref in range(1, MAX_PROFILES + 1):
        assert running.say("s", msg.ProfileJob(ref, JOB, None)) == []
    assert only(running.say("s", msg.ProfileJob(90, JOB, None))).code == "admission_refused"
    for ref in range(1, MAX_PROFILES + 1):
        running.device.finish()
        ((answer, _),) = running.hear("s")
        assert answer.ref == ref


def test_what_is_not_measured_is_refused_and_so_is_what_a_job_takes_with_it(running):
    running.device.unmeasured = True
    assert only(running.say("s", msg.ProfileJob(1, JOB, None))).code == "program"
    running.device.slow = True
    running.connect("t", uid=1000)
    running.say("t", msg.ProfileJob(2, JOB, None))
    running.say("s", msg.CloseJob(9, JOB, False))
    assert [(m.ref, m.code) for m, _ in running.hear("t")] == []
    refused = [m for to, m, _ in running.router.sent if to == "t" and isinstance(m, msg.Refusal)]
    assert [(m.ref, m.code) for m in refused] == [(2, "job_closed")]
    assert running.loop.context.records.jobs == {}


def test_only_its_own_session_may_feed_a_job(running):
    running.connect("t", uid=1000)
    assert only(running.say("t", step(1))).code == "not_owner"
    assert only(running.load("t", JOB, samples.add_one(), 5)).code == "not_owner"
    assert only(running.say("t", msg.OpenTransfer(1, JOB, 1, [], False))).code == "not_owner"
    assert running.device.launched == []


def test_a_paused_job_starts_nothing_until_it_is_resumed(running):
    running.say("s", msg.PauseJob(1, JOB))
    running.say("s", step(1))
    assert running.device.launched == []
    running.say("s", msg.ResumeJob(2, JOB))
    assert len(running.device.launched) == 1


def test_close_with_drain_answers_what_was_submitted_first(running):
    running.say("s", step(1))
    assert only(running.say("s", msg.CloseJob(9, JOB, True))) == msg.Done(9)
    running.device.finish()
    kinds = [type(m) for m, _ in running.hear("s")]
    assert kinds == [msg.StepDone, msg.JobEnded]
    assert running.loop.segments.used_bytes == 0


def test_close_without_drain_fails_what_was_submitted(running):
    running.say("s", step(1))
    kinds = [type(m) for m, _ in running.say("s", msg.CloseJob(9, JOB, False))]
    assert sorted(k.__name__ for k in kinds) == ["Done", "JobEnded", "StepFailed"]
    assert running.device.jobs == {}


def test_a_client_that_vanishes_leaves_nothing_and_harms_no_other(running):
    running.connect("t", uid=1001)
    running.open_job("t", OTHER)
    running.load("t", OTHER, samples.add_one())
    running.say("t", step(1, job=OTHER))
    running.say("s", step(1))
    mine = running.loop.segments.used_bytes // 2
    running.disconnect("s")
    assert set(running.loop.context.records.jobs) == {OTHER}
    assert set(running.device.jobs) == {OTHER}
    assert running.loop.segments.used_bytes == mine
    assert running.loop.scheduler.snapshot()["memory"]["slots"] == mine
    running.device.finish()
    assert isinstance(only(running.hear("t")), msg.StepDone)


def test_a_job_the_device_loses_fails_its_steps_with_the_devices_words(running):
    running.say("s", step(1))
    running.say("s", step(2, slot=1))
    running.device.lose(JOB, Fault("executor_crashed", "signal 11", "look at op 3"))
    answers = [m for m, _ in running.hear("s")]
    assert {(m.step, m.code) for m in answers if isinstance(m, msg.StepFailed)} == {
        (1, "executor_crashed"),
        (2, "executor_crashed"),
    }
    assert [m.code for m in answers if isinstance(m, msg.JobEnded)] == ["executor_crashed"]
    assert running.loop.segments.used_bytes == 0
    assert only(running.say("s", step(3))).code == "executor_crashed", "it was sent before its client heard of the end"


def test_state_is_pushed_and_pulled_in_order_with_the_steps(running):
    assert isinstance(only(running.load("s", JOB, samples.add_one(), 1, new_buffers=[100, 4])), msg.ProgramLoaded)
    segment = only(running.say("s", msg.OpenTransfer(5, JOB, 1, [1, 0], True)))
    assert (segment.ref, segment.nbytes) == (5, 64 + 128)
    assert running.router.segments["s", segment.segment] == 192
    assert running.say("s", msg.FillTransfer(6, JOB, 1, 0)) == []
    running.say("s", step(1))
    assert running.device.launched == [], "the step is behind the push"
    running.device.finish()
    assert only(running.hear("s")) == msg.TransferDone(JOB, 1, "", "", "", 0)
    pull = only(running.say("s", msg.OpenTransfer(7, JOB, 2, [0], False)))
    assert isinstance(pull, msg.TransferSegment)
    running.device.finish()
    running.hear("s")
    running.device.finish()
    assert only(running.hear("s")) == msg.TransferDone(JOB, 2, "", "", "", 0)
    assert running.loop.context.records.jobs[JOB].transfers == {}
    text = exposition(running)
    assert 'gpumux_transfer_bytes_total{direction="push"} 192.0' in text
    assert 'gpumux_transfers_total{direction="pull"} 1.0' in text


@pytest.mark.parametrize(
    "message",
    [
        msg.OpenTransfer(1, JOB, 1, [0], False),
        msg.OpenTransfer(1, JOB, 1, [1 << 60], False),
        msg.FillTransfer(1, JOB, 1, 0),
    ],
    ids=["no such buffer", "far too large", "not opened"],
)
def test_a_wrong_transfer_is_refused(running, message):
    refusal = only(running.say("s", message))
    assert isinstance(refusal, msg.Refusal)
    assert running.device.work == type(running.device.work)()


def test_transfers_under_way_are_bounded(running):
    running.load("s", JOB, samples.add_one(), 1, new_buffers=[4])
    answers = [only(running.say("s", msg.OpenTransfer(n, JOB, n, [0], True))) for n in range(1, 18)]
    assert [type(a) for a in answers[:16]] == [msg.TransferSegment] * 16
    assert answers[16].code == "admission_refused"


@pytest.fixture
def loaded_large(running):
    """With a job that has a state buffer too large for a segment made at once."""
    running.load("s", JOB, samples.add_one(), 1, new_buffers=[1 << 20])
    return running


@pytest.fixture
def slow_segments(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Segments are made only once this is set."""
    make, go_on = segments._attempt, threading.Event()

    def made(nbytes: int, name: str, touch: bool):
        assert go_on.wait(60)
        return make(nbytes, name, touch)

    monkeypatch.setattr(segments, "_attempt", made)
    yield go_on
    go_on.set()


def test_a_large_segment_is_made_beside_the_loop(loaded_large, slow_segments):
    running = loaded_large
    assert running.say("s", msg.OpenTransfer(5, JOB, 1, [0], False)) == []
    slow_segments.set()
    running.loop._offload.close()
    answer = only(running.hear("s"))
    assert isinstance(answer, msg.TransferSegment)
    assert len(running.device.work) == 1


@pytest.mark.parametrize("push", [True, False])
def test_only_memory_that_the_daemon_fills_has_its_pages_cleared_ahead(
    loaded_large, monkeypatch: pytest.MonkeyPatch, push: bool
):
    cleared: list[int] = []
    monkeypatch.setattr(shared_memory, "_touch", lambda _, nbytes: cleared.append(nbytes))
    loaded_large.say("s", msg.OpenTransfer(5, JOB, 1, [0], push))
    loaded_large.loop._offload.close()
    assert cleared == ([] if push else [1 << 20])


def test_a_job_that_ends_while_its_segment_is_made_keeps_nothing(loaded_large, slow_segments):
    running = loaded_large
    running.say("s", msg.OpenTransfer(5, JOB, 1, [0], True))
    running.say("s", msg.OpenTransfer(6, JOB, 2, [0], False))
    answers = [m for m, _ in running.say("s", msg.CloseJob(7, JOB, False))]
    assert {m.ref for m in answers if isinstance(m, msg.Refusal)} == {5, 6}
    slow_segments.set()
    running.loop._offload.close()
    running.turn()
    assert running.loop.segments.used_bytes == 0


def test_shared_memory_is_bounded():
    daemon = Daemon(shared_limit=4096)
    try:
        daemon.connect("s")
        daemon.open_job("s", JOB, inflight=64)
        refusal = only(daemon.load("s", JOB, samples.add_one()))
        assert refusal.code == "admission_refused"
        assert "max_shared_bytes" in refusal.remedy
        assert daemon.loop.segments.used_bytes == 0
    finally:
        daemon.close()


def test_a_users_bytes_are_bounded():
    daemon = Daemon(Config(max_bytes_per_user=4096))
    try:
        daemon.connect("s")
        daemon.open_job("s", JOB)
        assert isinstance(only(daemon.load("s", JOB, samples.add_one())), msg.ProgramLoaded)
        refusal = only(daemon.load("s", JOB, samples.add_one(), 1, new_buffers=[4096]))
        assert refusal.code == "admission_refused"
        daemon.connect("t", uid=1001)
        daemon.open_job("t", OTHER)
        assert isinstance(only(daemon.load("t", OTHER, samples.add_one())), msg.ProgramLoaded)
    finally:
        daemon.close()


def test_programs_of_a_job_are_bounded():
    daemon = Daemon(Config(max_programs_per_job=1))
    try:
        daemon.connect("s")
        daemon.open_job("s", JOB)
        daemon.load("s", JOB, samples.add_one())
        assert only(daemon.load("s", JOB, samples.add_one(), 1)).code == "admission_refused"
    finally:
        daemon.close()


def test_inline_tensors_travel_as_frames(daemon):
    daemon.connect("s", inline=True)
    daemon.open_job("s", JOB)
    loaded = only(daemon.load("s", JOB, samples.add_one()))
    assert (loaded.segment, daemon.router.segments) == (0, {})
    assert daemon.say("s", step(1, slot=1, frames=1), struct.pack("4f", 1, 2, 3, 4)) == []
    daemon.device.finish()
    ((done, frames),) = daemon.hear("s")
    assert done.frames == 1
    assert struct.unpack("4f", frames[0]) == (2, 3, 4, 5)
    refused = only(daemon.say("s", step(2, frames=1), b"short"))
    assert refused.code == "protocol"


def test_inline_state_travels_as_frames(daemon):
    daemon.connect("s", inline=True)
    daemon.open_job("s", JOB)
    daemon.load("s", JOB, samples.add_one(), new_buffers=[4])
    daemon.say("s", msg.OpenTransfer(1, JOB, 1, [0], True))
    assert only(daemon.say("s", msg.FillTransfer(2, JOB, 1, 1), b"12")).code == "protocol"
    assert daemon.say("s", msg.FillTransfer(3, JOB, 1, 1), b"1234".ljust(64, b"\0")) == []
    daemon.device.finish()
    daemon.hear("s")
    daemon.say("s", msg.OpenTransfer(4, JOB, 2, [0], False))
    daemon.device.finish()
    ((done, frames),) = daemon.hear("s")
    assert (done.code, frames[0][:4]) == ("", b"made")


def test_leaving_is_said_first_and_to_everyone(running):
    running.connect("t")
    running.say("s", step(1))
    assert running.loop.figures().leaving == ""
    running.loop.stop("the daemon got SIGTERM")
    assert running.loop.figures().leaving == "the daemon got SIGTERM"
    running.turn()
    assert running.loop.figures().leaving == "the daemon got SIGTERM"
    said = [(session, type(m)) for session, m, _ in running.router.sent[running.router.read :]]
    assert said[:2] == [("s", msg.Leaving), ("t", msg.Leaving)]
    assert ("s", msg.StepFailed) in said
    assert running.loop.scheduler.drained
    running.loop.run()  # returns at once


def test_a_device_that_does_not_let_go_holds_the_daemon_up_no_longer_than_drain_s(running):
    unload, running.device.unload = running.device.unload, lambda job: None
    running.loop.stop("enough")
    running.turn()
    assert not running.loop.scheduler.drained
    running.now += Config().drain_s
    running.loop.run()
    running.device.unload = unload


def test_status_and_stats(running):
    body = only(running.say("s", msg.GetStatus(3))).body
    assert body["daemon"]["endpoints"] == ["ipc:///fake"]
    (job,) = body["jobs"]
    assert (job["job"], job["short"], job["state"], job["uid"]) == (JOB, "j1", "open", 1000)
    running.say("s", msg.PauseJob(4, JOB))
    assert only(running.say("s", msg.JobStats(5, JOB))).body["state"] == "paused"
    assert only(running.say("s", msg.JobStats(6, OTHER))).code == "unknown_job"


def exposition(daemon):
    return generate_latest(daemon.metrics.registry).decode()


def test_what_happens_is_counted(running):
    running.say("s", step(1))
    running.device.finish(running.now)
    running.hear("s")
    running.say("s", step(1))
    running.say("s", step(2))
    running.device.lose(JOB, Fault("executor_crashed", "x"))
    running.turn()
    running.disconnect("s")
    text = exposition(running)
    for line in (
        'gpumux_steps_total{priority="low"} 1.0',
        'gpumux_step_failures_total{reason="executor_crashed"} 1.0',
        'gpumux_job_failures_total{reason="executor_crashed"} 1.0',
        'gpumux_rejections_total{reason="protocol"} 1.0',
        'gpumux_launches_total{priority="low"} 2.0',
        'gpumux_jobs_opened_total{priority="low"} 1.0',
        'gpumux_messages_received_total{type="Step"} 3.0',
        "gpumux_sessions_lost_total 1.0",
    ):
        assert line in text.splitlines(), line


@pytest.mark.parametrize("reason", [wire.GOODBYE, wire.GONE])
def test_a_client_that_simply_ends_is_no_failure(running, reason):
    """With a job that has work on the device, and a program that is not loaded yet."""
    running.say("s", step(1))
    asked = msg.LoadProgram(77, JOB, 1, [8], [])
    running.router.arrivals.append(Incoming("s", running.router.open["s"], asked, [codec.encode(samples.add_one())]))
    running.disconnect("s", reason)
    text = exposition(running)
    assert "gpumux_sessions_lost_total 0.0" in text.splitlines()
    assert "gpumux_job_failures_total{" not in text
    assert "gpumux_rejections_total{" not in text


@pytest.mark.parametrize(("role", "levels"), [("client", {"INFO"}), ("control", {"DEBUG"})])
def test_commands_that_come_and_go_are_logged_for_debugging_alone(daemon, role, levels, caplog):
    with caplog.at_level("DEBUG", "gpumux.daemon"):
        daemon.connect("c", role=role)
        daemon.disconnect("c", wire.GOODBYE)
    assert {record.levelname for record in caplog.records if "session c" in record.getMessage()} == levels


def test_figures_name_jobs_while_they_live(running):
    (job,) = running.loop.figures().jobs
    assert (job.short, job.priority, job.uid) == ("j1", "low", 1000)
    running.disconnect("s")
    assert running.loop.figures().jobs == ()


def test_a_step_that_came_while_the_loop_was_busy_is_known_to_have_waited(running):
    heard, launch = [], running.device.launch

    def handle(event, now):
        if isinstance(event, ev.StepSubmitted):
            heard.append(event.waited)
        return running.loop.scheduler.handle(event, now)

    def slow(*args):
        running.now += 100e-6
        return launch(*args)

    running.loop._observe(handle)
    running.device.launch = slow
    running.now += 1.0
    running.say("s", step(1, slot=0))
    running.say(
        "s", step(2, slot=1)
    )  # found as soon as the loop looked: it may have come at any time since it last did
    running.device.finish(running.now)
    running.hear("s")
    running.now += 30e-6  # the loop waited for so long: whatever it finds came just now
    running.say("s", step(3, slot=0))
    assert heard == pytest.approx([0.0, 50e-6, 0.0])
