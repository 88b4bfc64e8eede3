"""Recordings: what is in them, which sessions may have them, how they end, and that nothing is left of them."""

from __future__ import annotations

from itertools import pairwise
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumux.config import Config
from gpumux.daemon import tracing
from gpumux.daemon.tracing import Recording
from gpumux.scheduler.events import Tick
from gpumux.scheduler.report import BannedRange, HeldJob, JobLoad
from gpumux.types import Priority
from gpumux.wire import messages as msg
from gpumux.wire import messages as rec
from tests.daemon.stepping import JOB, OTHER, only, step
from tests.program import samples

from .fakes import Daemon


@pytest.fixture
def daemon():
    daemon = Daemon()
    yield daemon
    daemon.close()


@pytest.fixture
def running(daemon):
    """JOB of session `s` (high), OTHER of session `t` (low, another user), each with a loaded program; `w` (the user of
    `s`) watches."""
    daemon.connect("s")
    daemon.open_job("s", JOB, priority=1, name="important")
    daemon.load("s", JOB, samples.add_one())
    daemon.connect("t", uid=2000)
    daemon.open_job("t", OTHER)
    daemon.load("t", OTHER, samples.add_one())
    daemon.connect("w")
    return daemon


def begin(daemon, session="w", seconds=10.0):
    return daemon.say(session, msg.RecordTrace(daemon.ref(), seconds))


def run(daemon, session, job, number, lasts=0.004):
    """One step that is launched at once, waits 1 ms and runs 1 ms (the fake's time)."""
    daemon.say(session, step(number, job=job))
    daemon.now += lasts
    daemon.device.finish(daemon.now - 0.003)
    daemon.turn()


def records_of(answers):
    return [record for part, frames in answers if isinstance(part, msg.TracePart) for record in rec.unpack(frames[0])]


def rest(daemon, session="w", after=10.0):
    """What is left of the recording when its time is over: its last part, and the records."""
    daemon.now += after
    answers = daemon.hear(session)
    last = answers[-1][0]
    assert isinstance(last, msg.TracePart), answers
    assert last.last
    return last, records_of(answers)


def kind(found, wanted):
    return [record for record in found if isinstance(record, wanted)]


def is_off(daemon):
    loop = daemon.loop
    return loop._handle == loop.scheduler.handle and loop._tracing.due == inf and loop._tracing._recording is None


def test_a_step_is_there_with_its_piece_by_operator_and_its_times(running):
    assert is_off(running)
    assert begin(running) == []
    assert not is_off(running)
    running.now += 1.0
    run(running, "s", JOB, 1)
    last, found = rest(running)
    assert (last.reason, last.seconds) == ("", pytest.approx(11.004))
    assert kind(found, rec.JobSeen) == [("j1", "important", "high", True), ("j2", "", "low", False)]
    assert kind(found, rec.ProgramSeen) == [("j1", 0, ["aten.add.Tensor"])]
    (piece,) = kind(found, rec.PieceRan)
    assert (piece.job, piece.stream, piece.step, piece.piece, piece.first, piece.end) == ("j1", 1, 1, 0, 0, 1)
    assert (piece.launched, piece.started, piece.ended) == pytest.approx((1.0, 1.001, 1.002))
    assert piece.how == "done"
    (ran,) = kind(found, rec.StepRan)
    assert (ran.submitted, ran.answered, ran.queue_s) == pytest.approx((1.0, 1.004, 0.001))
    assert is_off(running)


def test_the_load_of_each_job_is_there_at_first_and_whenever_it_changes(running):
    begin(running)
    running.say("s", msg.PauseJob(running.ref(), JOB))
    running.say("s", step(1))
    running.now += 0.25
    running.say("s", msg.ResumeJob(running.ref(), JOB))
    running.now += 0.25
    while running.device.work:
        running.device.finish(running.now - 0.1)
        running.turn()
    _, found = rest(running)
    loads = {job: [load for load in kind(found, rec.LoadSeen) if load.job == job] for job in ("j1", "j2")}
    charged = loads["j1"][0].memory_bytes
    assert charged > 0
    assert [(load.when, load.queued, load.running) for load in loads["j1"]] == [
        (0.0, 0, 0), (0.0, 1, 0), (0.25, 0, 1), (0.5, 0, 0),
    ]  # fmt: skip
    assert {load.memory_bytes for load in loads["j1"]} == {charged}
    assert [(load.queued, load.running) for load in loads["j2"]] == [(0, 0)]
    records = [record for record in found if isinstance(record, rec.JobSeen | rec.LoadSeen)]
    assert [type(record) for record in records[:4]] == 2 * [rec.JobSeen, rec.LoadSeen], "a job's name comes first"


def test_the_load_of_a_job_that_ends_is_nothing(running):
    begin(running)
    running.say("s", msg.CloseJob(running.ref(), JOB, False))
    running.turn()
    _, found = rest(running)
    last = [load for load in kind(found, rec.LoadSeen) if load.job == "j1"][-1]
    assert (last.queued, last.running, last.memory_bytes) == (0, 0, 0)


def test_of_another_users_job_there_are_times_and_no_operators(running):
    begin(running)
    run(running, "t", OTHER, 1)
    _, found = rest(running)
    assert ("j2", "", "low", False) in kind(found, rec.JobSeen)
    assert kind(found, rec.ProgramSeen) == []
    (piece,) = kind(found, rec.PieceRan)
    assert (piece.job, piece.first, piece.end) == ("j2", 0, 0)


def test_root_sees_everything(running):
    running.connect("root", uid=0)
    begin(running, "root")
    run(running, "t", OTHER, 1)
    _, found = rest(running, "root")
    assert kind(found, rec.ProgramSeen) == [("j2", 0, ["aten.add.Tensor"])]


def test_one_recording_at_a_time(running):
    begin(running)
    refused = only(begin(running, "s"))
    assert (type(refused), refused.code) == (msg.Refusal, "admission_refused")
    refused = only(begin(running))
    assert (type(refused), refused.code) == (msg.Refusal, "admission_refused")
    rest(running)
    assert begin(running, "s") == []


@pytest.mark.parametrize("seconds", [-1.0, tracing.MAX_SECONDS * 1.01])
def test_a_length_that_is_none_is_refused(running, seconds):
    refused = only(begin(running, seconds=seconds))
    assert (type(refused), refused.code) == (msg.Refusal, "protocol")
    assert is_off(running)


def test_a_client_that_leaves_leaves_nothing_behind(running):
    begin(running)
    run(running, "s", JOB, 1)
    running.disconnect("s")  # another session than the one that records
    assert not is_off(running)
    running.disconnect("w")
    assert is_off(running)
    assert begin(running, "t") == []
    rest(running, "t")


def test_it_can_be_ended_early_only_by_the_session_that_began_it(running):
    begin(running)
    assert begin(running, "t", 0.0) == []
    assert not is_off(running)
    run(running, "s", JOB, 1)
    running.now += 1.0
    answers = begin(running, seconds=0.0)
    assert answers[-1][0].reason == "1.004 of 10 s: it was ended early"
    assert len(kind(records_of(answers), rec.PieceRan)) == 1
    assert is_off(running)


def test_records_leave_in_parts_and_the_bound_ends_it_with_a_note(running, monkeypatch):
    monkeypatch.setattr(tracing, "PART", 4)
    monkeypatch.setattr(tracing, "MAX_RECORDS", 11)
    begin(running)
    most, before = 0, len(running.router.sent)
    for number in range(1, 20):
        running.say("s", step(number))
        running.device.finish(running.now)
        running.turn()
        recording = running.loop._tracing._recording
        most = max(most, len(recording.records) if recording else 0)
    assert most < 4 + 4  # what a step adds at once
    answers = [(message, frames) for to, message, frames in running.router.sent[before:] if to == "w"]
    parts = [part for part, _ in answers]
    assert [part.last for part in parts] == [False, False, True]
    assert parts[-1].reason.endswith("it reached the bound of 11 records; record a shorter time")
    assert 11 <= len(records_of(answers)) <= 11 + 4
    assert is_off(running)
    running.say("s", step(50))
    assert running.device.work, "steps go on"


def test_a_daemon_that_leaves_sends_what_there_is_first(running):
    begin(running)
    run(running, "s", JOB, 1)
    running.loop.stop("told to")
    answers = running.hear("w")
    assert [type(message) for message, _ in answers] == [msg.TracePart, msg.Leaving]
    assert "the daemon is leaving" in answers[0][0].reason
    assert len(kind(records_of(answers), rec.PieceRan)) == 1


def test_what_ran_before_and_what_still_runs_is_cut_at_the_ends(running):
    running.say("s", step(1))
    running.now += 0.5
    begin(running)
    running.now += 0.25
    running.device.finish(running.now - 0.001)  # ends now
    running.turn()
    running.say("s", step(2))
    running.now += 0.25
    _, found = rest(running, after=9.5)
    before, after = kind(found, rec.PieceRan)
    assert (before.launched, before.ended, before.how) == (0.0, pytest.approx(0.25), "done")
    assert (after.started, after.ended, after.how) == (pytest.approx(0.25), pytest.approx(10.0), "running")
    (whole,) = kind(found, rec.StepRan)
    assert (whole.submitted, whole.answered) == (0.0, pytest.approx(0.25))


def test_pauses_ends_and_what_was_dropped(running):
    begin(running)
    running.say("s", msg.PauseJob(running.ref(), JOB))
    running.say("s", msg.ResumeJob(running.ref(), JOB))
    running.say("s", step(1))
    running.now += 0.5
    running.say("s", msg.CloseJob(running.ref(), JOB, False))
    _, found = rest(running)
    assert [(e.what, e.when) for e in kind(found, rec.Happened)][:2] == [("paused", 0.0), ("resumed", 0.0)]
    said = {e.what: e.message for e in kind(found, rec.Happened)}
    assert "closed" in said["step 1 failed"]
    assert "job ended" in said
    (piece,) = kind(found, rec.PieceRan)
    assert (piece.how, piece.ended) == ("dropped", pytest.approx(0.5))


def test_held_low_work_is_a_span_with_its_reason_and_high_job():
    """A high program's first steps are for calibration."""
    daemon = Daemon(Config(policy="guarded"))
    for session, job, priority in (("s", JOB, 1), ("t", OTHER, 0)):
        daemon.connect(session)
        daemon.open_job(session, job, priority=priority)
        daemon.load(session, job, samples.add_one())
    daemon.connect("w")
    daemon.say("s", step(1))
    begin(daemon)
    daemon.now += 0.25
    daemon.say("t", step(1, job=OTHER))
    assert [held.reason for held in daemon.loop.scheduler.held()] == ["calibration"]
    daemon.now += 0.5
    daemon.say("t", msg.PauseJob(daemon.ref(), OTHER))  # now it waits for another reason
    assert daemon.loop.scheduler.held() == []
    daemon.now += 0.5
    daemon.say("t", msg.ResumeJob(daemon.ref(), OTHER))
    _, found = rest(daemon)
    spans = kind(found, rec.WasHeld)
    assert [(s.job, s.high, s.reason) for s in spans] == [("j2", "j1", "calibration")] * 2
    assert (spans[0].since, spans[0].until) == pytest.approx((0.25, 0.75))
    assert spans[1].until == pytest.approx(11.25)
    daemon.close()


# ---- spans of holds and bans, from whatever the scheduler says


class FakeJob:
    def __init__(self, short):
        self.short = short
        self.spec = type("Spec", (), {"name": short, "priority": Priority.LOW})


class FakeBooks:
    def __init__(self):
        self.jobs = {name: FakeJob(name) for name in ("a", "b", "h", "i")}


class FakeScheduler:
    """A scheduler with prepared answers."""

    def __init__(self):
        self.now_held, self.now_banned = [], []

    def all_out(self):
        return []

    def held(self):
        return self.now_held

    def banned(self):
        return self.now_banned

    def load(self, job):
        return JobLoad(0, 0, 0)


reasons = st.sampled_from(["tail", "gap"])
changes = st.lists(
    st.tuples(
        st.dictionaries(st.sampled_from("ab"), st.tuples(st.sampled_from("hi"), reasons)), st.sets(st.integers(0, 2))
    ),
    max_size=20,
)


@given(changes)
def test_spans_of_holds_and_bans_cover_exactly_the_time_they_lasted(history):
    scheduler = FakeScheduler()
    recording = Recording(scheduler, FakeBooks(), 0.0, lambda job: True)
    since, seconds, banned_s = {}, dict.fromkeys("ab", 0), [0, 0, 0]
    for now, (held, bans) in enumerate(history):
        since = {job: since.get(job, now) for job in held}
        scheduler.now_held = [HeldJob(job, high, reason, float(since[job])) for job, (high, reason) in held.items()]
        scheduler.now_banned = [BannedRange("h", "a", n, n + 1, 1.0, 0.0, 2.0, "tail") for n in bans]
        recording.saw(Tick(), [], float(now))
        for job in held:
            seconds[job] += 1
        for n in bans:
            banned_s[n] += 1
    recording.end(float(len(history)))
    for job in "ab":
        spans = sorted((r.since, r.until) for r in kind(recording.records, rec.WasHeld) if r.job == job)
        assert sum(until - begun for begun, until in spans) == seconds[job]
        assert all(until <= begun for (_, until), (begun, _) in pairwise(spans))
    assert {r.first for r in kind(recording.records, rec.WasBanned)} == {n for n in range(3) if banned_s[n]}
    assert recording._held == {}
    assert recording._bans == {}
