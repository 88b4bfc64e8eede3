"""Snapshots in the daemon: their place among the steps, which sessions may have them, what happens when they fail."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpumux.config import Config
from gpumux.errors import SnapshotFailed, UnknownJob
from gpumux.scheduler.events import PauseRequested
from gpumux.types import GENERATOR_BYTES, Fault
from gpumux.wire import messages as msg
from tests.daemon.fakes import Daemon, FakeWriter
from tests.program import samples

JOB, OTHER = "ab" * 16, "cd" * 16
STATE = 64 + 128  # bytes of buffers of 4 and 100, each on 64 bytes


def only(answers):
    ((message, _),) = answers
    return message


def kinds(answers) -> list[str]:
    return [type(message).__name__ for message, _ in answers]


def step(number: int, slot: int = 0) -> msg.Step:
    return msg.Step(JOB, number, 0, slot, [], 0)


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    made = Daemon(Config(), writer=FakeWriter())
    made.connect("s")
    made.open_job("s", JOB, name="sweep")
    made.load("s", JOB, samples.add_one(), new_buffers=[4, 100])
    made.turn()
    writer = made.loop._snapshot_requests._writer
    yield made
    made.close()
    writer.close()


@pytest.fixture
def writer(daemon: Daemon) -> FakeWriter:
    return daemon.loop._snapshot_requests._writer


def take(daemon: Daemon, number: int = 1, notes: bytes = b"notes", session: str = "s"):
    assert only(daemon.say(session, msg.PrepareSnapshot(9, JOB))) == msg.Done(9)
    return daemon.say(session, msg.TakeSnapshot(10, JOB, number, 5, 1), notes)


def test_a_snapshot_is_taken_between_the_steps_and_said_when_it_is_written(daemon: Daemon, writer: FakeWriter):
    daemon.say("s", step(0))
    assert only(take(daemon)) == msg.Done(10)  # its place is fixed, before anything was copied
    daemon.say("s", step(1, 1))
    assert [launch.step for launch in daemon.device.launched] == [0]
    daemon.device.finish()
    daemon.turn()
    assert [launch.step for launch in daemon.device.launched] == [0], "the copy comes first"
    daemon.device.finish()
    daemon.turn()
    assert [launch.step for launch in daemon.device.launched] == [0, 1], "the disk keeps no step waiting"
    ((verb, asked, (data, beside)),) = writer.asked
    assert verb == "save"
    assert (asked["uid"], asked["job"], asked["number"], asked["name"], asked["steps"]) == (1000, JOB, 1, "sweep", 5)
    assert (asked["buffers"], asked["notes"], asked["living"]) == (2, 5, [(1000, JOB)])
    assert len(data) == STATE + GENERATOR_BYTES
    assert data[:4] == b"made"
    assert beside == (4).to_bytes(8, "little") + (100).to_bytes(8, "little") + b"notes"
    daemon.hear("s")
    writer.answer(777)
    assert only(daemon.hear("s")) == msg.SnapshotSaved(JOB, 1, 777, 0.0, "", "", "")
    assert daemon.loop.context.records.jobs[JOB].transfers == {}
    data_segment = daemon.loop.context.records.jobs[JOB].programs[0].segment
    assert daemon.loop.segments.used_bytes == data_segment.nbytes, "the memory it was copied to is free"


def test_one_at_a_time_and_upwards(daemon: Daemon, writer: FakeWriter):
    assert only(daemon.say("s", msg.TakeSnapshot(1, JOB, 1, 0, 1), b"")).code == "admission_refused"
    take(daemon, 3)
    assert only(daemon.say("s", msg.PrepareSnapshot(11, JOB))).code == "admission_refused"
    daemon.device.finish()
    daemon.turn()
    writer.answer(1)
    daemon.turn()
    daemon.hear("s")
    assert only(take(daemon, 3)).code == "protocol"
    assert only(daemon.say("s", msg.TakeSnapshot(12, JOB, 4, 0, 1), b"x")) == msg.Done(12)


def test_state_that_grew_since_it_was_prepared_needs_more_memory(daemon: Daemon):
    daemon.say("s", msg.PrepareSnapshot(1, JOB))
    daemon.load("s", JOB, samples.add_one(), 1, new_buffers=[8])
    assert only(daemon.say("s", msg.TakeSnapshot(2, JOB, 1, 0, 1), b"")).code == "admission_refused"
    assert only(daemon.say("s", msg.PrepareSnapshot(3, JOB))) == msg.Done(3)
    assert only(daemon.say("s", msg.TakeSnapshot(4, JOB, 1, 0, 1), b"")) == msg.Done(4)


def test_a_disk_that_is_full_is_said_and_counted(daemon: Daemon, writer: FakeWriter):
    take(daemon)
    daemon.device.finish()
    daemon.turn()
    writer.answer(SnapshotFailed("no room", "make some"))
    failed = only(daemon.hear("s"))
    assert (failed.code, failed.message, failed.remedy) == ("snapshot_failed", "no room", "make some")
    counted = daemon.metrics.registry.get_sample_value(
        "gpumux_state_snapshot_failures_total", {"reason": "snapshot_failed"}
    )
    assert counted == 1
    assert only(take(daemon, 2)) == msg.Done(10)


def test_no_memory_to_copy_to_is_refused_and_counted(daemon: Daemon):
    daemon.loop.segments.limit = daemon.loop.segments.used_bytes
    assert only(daemon.say("s", msg.PrepareSnapshot(1, JOB))).code == "admission_refused"
    counted = daemon.metrics.registry.get_sample_value(
        "gpumux_state_snapshot_failures_total", {"reason": "admission_refused"}
    )
    assert counted == 1


def test_a_job_that_dies_meanwhile_leaves_no_memory(daemon: Daemon, writer: FakeWriter):
    take(daemon)
    daemon.device.lose(JOB, Fault("executor_crashed", "died", ""))
    assert "JobEnded" in kinds(daemon.hear("s"))
    assert writer.asked == []
    assert daemon.loop.segments.used_bytes == 0


def test_a_finished_job_is_forgotten_and_one_whose_client_left_is_kept(daemon: Daemon, writer: FakeWriter):
    take(daemon)
    daemon.device.finish()
    daemon.turn()
    writer.answer(1)
    daemon.turn()
    daemon.say("s", msg.CloseJob(20, JOB, True))
    assert writer.asked[-1] == ("forget", {"uid": 1000, "job": JOB}, [])
    writer.answer(None)
    daemon.turn()
    daemon.open_job("s", JOB)
    take(daemon)
    daemon.device.finish()
    daemon.turn()
    writer.answer(1)
    asked = len(writer.asked)
    daemon.disconnect("s")
    daemon.turn()
    assert len(writer.asked) == asked
    assert daemon.loop.segments.used_bytes == 0


def test_a_resumed_job_that_is_finished_before_its_first_snapshot_is_forgotten_too(daemon: Daemon, writer: FakeWriter):
    """The snapshots it had are of an earlier session, maybe of an earlier daemon."""
    daemon.say("s", msg.CloseJob(20, JOB, True))
    assert writer.asked == [("forget", {"uid": 1000, "job": JOB}, [])]


def test_a_name_asked_for_while_its_job_ends_is_answered_when_nothing_of_it_is_left(daemon: Daemon, writer: FakeWriter):
    take(daemon)
    daemon.connect("t")
    daemon.say("s", step(0))
    daemon.say("s", msg.CloseJob(20, JOB, True))  # the copy and the step are still to come
    assert daemon.say("t", msg.FindKept(1, "sweep")) == []
    for _ in range(2):
        daemon.device.finish()
        daemon.turn()
    writer.answer(1)  # the snapshot was written
    daemon.turn()
    assert [verb for verb, _, _ in writer.asked] == ["save", "forget", "find"]
    writer.answer(None)
    writer.answer(UnknownJob("no job called 'sweep' of yours was kept", ""))
    assert only(daemon.hear("t")).code == "unknown_job"


def test_questions_for_a_job_that_ends_are_bounded_and_go_with_their_session(daemon: Daemon, writer: FakeWriter):
    take(daemon)
    daemon.connect("t")
    daemon.say("s", msg.CloseJob(20, JOB, True))
    for ref in range(8):
        assert daemon.say("t", msg.FindKept(ref, "sweep")) == []
    assert only(daemon.say("t", msg.FindKept(8, "sweep"))).code == "admission_refused"
    daemon.disconnect("t")
    daemon.device.finish()
    daemon.turn()
    writer.answer(1)
    daemon.turn()
    assert [verb for verb, _, _ in writer.asked] == ["save", "forget"]
    assert daemon.loop._snapshot_requests._finds == []


def test_a_resumed_job_is_open_though_it_has_no_snapshot_of_its_own_yet(daemon: Daemon, writer: FakeWriter):
    daemon.connect("t")
    assert daemon.say("t", msg.FindKept(1, "sweep")) == []
    writer.answer({"job": JOB, "numbers": [4, 3]})
    assert only(daemon.hear("t")).code == "admission_refused"


def test_what_was_kept_long_enough_goes_and_not_right_after_a_start(daemon: Daemon, writer: FakeWriter):
    daemon.now += 599.0
    daemon.turn()
    assert writer.asked == []
    daemon.now += 2.0
    daemon.loop._snapshot_requests._now = lambda: 1e9
    daemon.turn()
    assert writer.asked == [("expire", {"before": 1e9 - 86400.0, "living": [(1000, JOB)]}, [])]


def test_only_the_owning_session_takes_snapshots(daemon: Daemon):
    daemon.connect("t")
    for message in (msg.PrepareSnapshot(1, JOB), msg.TakeSnapshot(1, JOB, 1, 0, 1), msg.Replay(1, JOB, 0, 1)):
        frames = [b""] if getattr(message, "frames", 0) else []
        assert only(daemon.say("t", message, *frames)).code == "not_owner"


def test_a_snapshot_is_read_for_its_user_alone(daemon: Daemon, writer: FakeWriter):
    daemon.connect("t", uid=2000)
    daemon.say("t", msg.ReadSnapshot(1, JOB, [2, 1]))
    assert writer.asked[-1] == ("read", {"uid": 2000, "job": JOB, "numbers": [2, 1]}, [])  # the uid is the peer's
    writer.answer(UnknownJob("there is no whole snapshot of this job", ""))
    assert only(daemon.hear("t")).code == "unknown_job"


def test_reads_follow_each_other(daemon: Daemon, writer: FakeWriter):
    daemon.connect("t")
    daemon.say("s", msg.ReadSnapshot(1, JOB, [2, 1]))
    daemon.say("t", msg.ReadSnapshot(2, OTHER, [1]))
    assert [verb for verb, _, _ in writer.asked] == ["read"]
    assert only(daemon.say("t", msg.ReadSnapshot(4, OTHER, [1]))).code == "admission_refused"  # one of a session waits
    writer.answer({"number": 1, "nbytes": 100, "notes": 10, "bad": [2]})
    daemon.turn()
    assert [verb for verb, _, _ in writer.asked] == ["read", "fill"]
    writer.answer(None, fill=b"state")
    read = only(daemon.hear("s"))
    assert (read.ref, read.job, read.snapshot, read.nbytes, read.notes, read.bad) == (1, JOB, 1, 100, 10, [2])
    assert daemon.router.segments["s", read.segment] == 100
    assert [verb for verb, _, _ in writer.asked] == ["read", "fill", "read"]
    daemon.disconnect("t")
    writer.answer({"number": 1, "nbytes": 100, "notes": 10, "bad": []})
    daemon.turn()
    writer.answer(None)
    daemon.turn()
    assert only(daemon.say("s", msg.ReadSnapshot(3, JOB, []))).code == "protocol"
    assert daemon.metrics.registry.get_sample_value("gpumux_state_snapshots_damaged_total") == 1


def test_inline_sessions_get_the_bytes(daemon: Daemon, writer: FakeWriter):
    daemon.connect("t", inline=True)
    daemon.say("t", msg.ReadSnapshot(2, JOB, [1]))
    writer.answer({"number": 1, "nbytes": 8, "notes": 2, "bad": []})
    daemon.turn()
    writer.answer(None, fill=b"stateful")
    ((read, frames),) = daemon.hear("t")
    assert (read.segment, read.frames, frames) == (0, 1, [b"stateful"])


def test_a_name_is_looked_for_among_ones_own_and_not_while_it_is_open(daemon: Daemon, writer: FakeWriter):
    take(daemon)
    assert only(daemon.say("s", msg.FindKept(1, "sweep"))).code == "admission_refused"
    daemon.connect("t", uid=2000)
    daemon.say("t", msg.FindKept(2, "sweep"))
    assert writer.asked[-1] == ("find", {"uid": 2000, "name": "sweep"}, [])
    writer.answer({"job": OTHER, "numbers": [4, 3]})
    assert only(daemon.hear("t")) == msg.KeptFound(2, OTHER, [4, 3])


def test_the_generator_is_put_back_among_the_steps(daemon: Daemon):
    assert daemon.say("s", msg.Replay(1, JOB, 12, 1), bytes(GENERATOR_BYTES)) == []
    daemon.device.finish()
    assert only(daemon.hear("s")) == msg.Done(1)
    assert only(daemon.say("s", msg.Replay(2, JOB, 0, 1), b"")) == msg.Done(2)
    assert only(daemon.say("s", msg.Replay(3, JOB, 0, 1), b"short")).code == "protocol"
    assert daemon.metrics.registry.get_sample_value("gpumux_replayed_steps_total") == 12
    assert daemon.metrics.registry.get_sample_value("gpumux_restores_total") == 2


def saved(daemon: Daemon, writer: FakeWriter, number: int = 1):
    take(daemon, number)
    daemon.device.finish()
    daemon.turn()
    writer.answer(1)
    daemon.hear("s")


def test_a_leaving_daemon_waits_for_snapshots_of_what_was_done(daemon: Daemon, writer: FakeWriter):
    saved(daemon, writer)
    daemon.say("s", step(0))
    daemon.device.finish()
    daemon.hear("s")
    daemon.loop.stop("told to")
    assert kinds(daemon.hear("s")) == ["SnapshotWanted"]
    assert only(take(daemon, 2)) == msg.Done(10)
    daemon.device.finish()
    daemon.now += 2.0
    assert daemon.hear("s") == []
    writer.answer(1)
    daemon.now += 0.1
    heard = kinds(daemon.hear("s"))
    assert heard[:2] == ["SnapshotSaved", "Leaving"]
    assert daemon.loop._snapshot_requests.due > daemon.now  # else the loop would not wait between its last turns


def test_a_leaving_daemon_waits_not_long_for_a_silent_client(daemon: Daemon, writer: FakeWriter):
    saved(daemon, writer)
    daemon.say("s", step(0))
    daemon.device.finish()
    daemon.hear("s")
    daemon.loop.stop("told to")
    daemon.hear("s")
    daemon.now += 0.5
    assert daemon.hear("s") == []
    daemon.now += 0.6
    assert kinds(daemon.hear("s"))[0] == "Leaving"


def test_a_leaving_daemon_asks_no_client_that_has_nothing_new(daemon: Daemon, writer: FakeWriter):
    daemon.say("s", step(0))
    daemon.device.finish()
    daemon.hear("s")
    saved(daemon, writer)
    daemon.loop.stop("told to")
    assert kinds(daemon.hear("s"))[0] == "Leaving"


def test_a_daemon_without_a_state_directory_refuses():
    daemon = Daemon()
    daemon.connect("s")
    daemon.open_job("s", JOB)
    for message, frames in (
        (msg.PrepareSnapshot(1, JOB), []), (msg.FindKept(1, "x"), []), (msg.ReadSnapshot(1, JOB, [1]), []),
        (msg.TakeSnapshot(1, JOB, 1, 0, 1), [b""]), (msg.Replay(1, JOB, 0, 1), [b""]),
    ):  # fmt: skip
        refusal = only(daemon.say("s", message, *frames))
        assert (refusal.code, refusal.remedy) == ("config", "start it with --state-dir")
    daemon.loop.stop("told to")
    assert kinds(daemon.hear("s"))[0] == "Leaving"
    daemon.close()


def test_a_paused_job_is_saved_when_it_goes_on(daemon: Daemon):
    """A copy has its place among the steps, and a paused job does nothing."""
    daemon.loop.context.feed(PauseRequested(JOB))
    take(daemon)
    assert not daemon.device.work
    daemon.say("s", msg.ResumeJob(30, JOB))
    assert daemon.device.work
