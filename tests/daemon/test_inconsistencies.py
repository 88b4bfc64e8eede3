"""Bugs: what one is about ends, is counted and reported; everything else goes on to the same results."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpumux.config import Config
from gpumux.daemon import inconsistencies
from gpumux.daemon.inconsistencies import CrashReports
from gpumux.daemon.segments import AT_ONCE_BYTES
from gpumux.errors import DeviceLost
from gpumux.metrics import gauges
from gpumux.program.ir import slot_layout
from gpumux.scheduler.events import DrainRequested
from gpumux.types import JobId, PieceDone
from gpumux.wire import messages as msg
from tests.daemon.fakes import Daemon, FakeWriter
from tests.daemon.stepping import only
from tests.program import samples

MINE, THEIRS = "ab" * 16, "cd" * 16


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """Users' sessions `s` with MINE, to which something happens, and `t` with THEIRS; both have a Program."""
    log = os.open(tmp_path / "crash.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    made = Daemon(Config(), writer=FakeWriter(), crashes=CrashReports(log))
    for session, uid, job in (("s", 1000, MINE), ("t", 1001, THEIRS)):
        made.connect(session, uid)
        made.open_job(session, job, name=f"job of {session}")
        made.load(session, job, samples.add_one(), new_buffers=[4])
    made.turn()
    yield made
    writer = made.loop._snapshot_requests._writer
    made.close()
    writer.close()
    os.close(log)


def step(job: str, number: int) -> msg.Step:
    return msg.Step(job, number, 0, number % 2, [], 0)


def counts(daemon: Daemon) -> dict[str, int]:
    read = daemon.metrics.registry.get_sample_value
    scopes = ("job", "session", "device", "report")
    return {s: int(n) for s in scopes if (n := read("gpumux_inconsistencies_total", {"scope": s}))}


def scheduled(daemon: Daemon, job: str) -> Any:
    return daemon.loop.scheduler._state.jobs[JobId(job)]


def theirs_goes_on(daemon: Daemon, numbers: range = range(100, 105)) -> None:
    """THEIRS computes what it is to compute, and its session hears nothing else."""
    for number in numbers:
        segment, layout = daemon.device.jobs[JobId(THEIRS)].programs[0].segment, slot_layout(samples.add_one())
        slot = (number % 2) * layout.nbytes
        with segment.view() as view:
            struct.pack_into("4f", view, slot + layout.inputs[0], *(4 * [float(number)]))
        assert daemon.say("t", step(THEIRS, number)) == []
        while daemon.device.work:
            daemon.device.finish()
        done = only(daemon.hear("t"))
        assert (type(done), done.step) == (msg.StepDone, number)
        with segment.view() as view:
            assert struct.unpack_from("4f", view, slot + layout.results[0]) == 4 * (number + 1.0,)


def ended(answers: list[tuple[Any, Any]]) -> msg.JobEnded:
    (found,) = [message for message, _ in answers if isinstance(message, msg.JobEnded)]
    return found


def lose_track_of_a_step(daemon: Daemon) -> None:
    """A step is running, and the scheduler does not know it."""
    daemon.say("s", step(MINE, 1))
    scheduled(daemon, MINE).running.clear()
    daemon.device.work.rotate(1)
    daemon.device.finish()


def lose_a_record(daemon: Daemon) -> None:
    """The daemon has no record of a step that the scheduler launches."""
    daemon.loop.context.records.jobs[JobId(MINE)].steps = Forgetful()
    daemon.say("s", step(MINE, 1))


class Forgetful(dict):
    def __setitem__(self, key: object, value: object) -> None:
        """Keeps nothing."""


def refuse_a_launch(daemon: Daemon) -> None:
    """The device raises what it never should."""

    def launch(launch: Any) -> None:
        raise RuntimeError("it can't be")

    daemon.device.launch = launch
    daemon.say("s", step(MINE, 1))
    del daemon.device.launch


def tell_nonsense(daemon: Daemon) -> None:
    """The device reports a piece that never ended."""
    daemon.say("s", step(MINE, 1))
    launch = daemon.device.work.pop()
    daemon.device.events.append(PieceDone(launch.launch, 0.0, None))


BUGS = [lose_track_of_a_step, lose_a_record, refuse_a_launch, tell_nonsense]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_bug_about_a_job_ends_it_and_nothing_else(daemon: Daemon, tmp_path: Path, bug: Callable[[Daemon], None]):
    theirs_goes_on(daemon, range(3))
    daemon.say("t", step(THEIRS, 50))
    before = len(daemon.router.sent)
    bug(daemon)
    daemon.turn()
    said = [(message, frames) for to, message, frames in daemon.router.sent[before:] if to == "s"]
    assert ended(said).code == "internal"
    assert "snapshots are kept" in ended(said).remedy
    assert JobId(MINE) not in daemon.loop.context.records.jobs
    assert JobId(MINE) not in daemon.device.jobs
    assert counts(daemon) == {"job": 1}
    assert "forget" not in [verb for verb, _, _ in daemon.loop._snapshot_requests._writer.asked]
    report = (tmp_path / "crash.log").read_text()
    assert "job j1 ends" in report
    assert "Traceback" in report
    assert "History of the job:" in report
    daemon.device.finish()
    assert only(daemon.hear("t")).step == 50
    theirs_goes_on(daemon)
    daemon.open_job("s", MINE)  # as a client that recovers does
    daemon.load("s", MINE, samples.add_one(), new_buffers=[4])
    assert daemon.say("s", step(MINE, 7)) == []
    daemon.device.finish()
    assert only(daemon.hear("s")).step == 7


def test_the_job_that_was_to_be_launched_is_blamed_not_the_one_whose_piece_ended(daemon: Daemon):
    """MINE waits for room in the window; its Program has lost its pieces when THEIRS makes room."""
    daemon.say("t", step(THEIRS, 0))
    for number in range(1, 30):  # jobs of the same user, until the window is full
        job = f"{number:032x}"
        daemon.open_job("t", job)
        daemon.load("t", job, samples.add_one())
        daemon.say("t", step(job, 0))
        if len(daemon.device.launched) <= number:
            break
    launched = len(daemon.device.launched)
    daemon.say("s", step(MINE, 0))
    assert len(daemon.device.launched) == launched, "it waits"
    scheduled(daemon, MINE).programs[0].pieces = ()
    while not counts(daemon):
        daemon.device.finish()  # a piece of another job, which makes room
        daemon.turn()
    assert counts(daemon) == {"job": 1}
    assert JobId(MINE) not in daemon.loop.context.records.jobs
    while daemon.device.work:
        daemon.device.finish()
        daemon.turn()
    daemon.router.read = len(daemon.router.sent)
    theirs_goes_on(daemon)


def test_a_message_whose_handler_fails_ends_the_senders_session_and_no_job_of_others(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
):
    """An operator asks about another user's job."""
    daemon.connect("root", 0)

    def explain(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(daemon.loop.scheduler, "explain", explain, raising=True)
    said = [message for message, _ in daemon.say("root", msg.ExplainJob(1, THEIRS))]
    assert [(m.ref, m.code) for m in said] == [(0, "daemon_gone")]
    assert counts(daemon) == {"session": 1}
    theirs_goes_on(daemon)


def test_a_message_about_ones_own_job_ends_that_job(daemon: Daemon, monkeypatch: pytest.MonkeyPatch):
    def profile(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(daemon.device, "profile", profile)
    assert ended(daemon.say("s", msg.ProfileJob(1, MINE, 0))).code == "internal"
    assert counts(daemon) == {"job": 1}
    theirs_goes_on(daemon)


def test_work_on_another_thread_that_fails_ends_the_session_it_was_for(daemon: Daemon):
    def then(_: Any) -> None:
        raise ZeroDivisionError

    daemon.loop.segments.create(1000, "s", AT_ONCE_BYTES + 1, "large", then)
    daemon.loop._offload.close()
    daemon.turn()
    assert counts(daemon) == {"session": 1}
    assert "s" not in daemon.loop.context.records.sessions
    theirs_goes_on(daemon)


def test_what_follows_a_snapshot_that_fails_ends_the_job(daemon: Daemon):
    daemon.say("s", msg.PrepareSnapshot(1, MINE))
    daemon.say("s", msg.TakeSnapshot(2, MINE, 1, 1, 1), b"notes")
    daemon.device.finish()
    daemon.turn()
    daemon.metrics.snapshot_saved = None
    daemon.loop._snapshot_requests._writer.answer(777)
    assert ended(daemon.hear("s")).code == "internal"
    assert counts(daemon) == {"job": 1}
    theirs_goes_on(daemon)


def test_a_report_that_fails_ends_nothing(daemon: Daemon, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(daemon.loop, "figures", lambda: 1 / 0)
    monkeypatch.setattr(daemon.loop.snapshots, "wanted", lambda: True)
    monkeypatch.setattr(daemon.loop._memory_overuse, "check", lambda now: 1 / 0)
    daemon.turn()
    assert counts(daemon)["report"] == 2
    assert JobId(MINE) in daemon.loop.context.records.jobs
    theirs_goes_on(daemon)


def test_metrics_that_can_not_be_read_are_reported_once_a_scrape_and_the_loop_is_not_called_stuck(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(gauges, "STALE_S", 0.0)
    monkeypatch.setattr(daemon.loop, "figures", lambda: 1 / 0)
    for scrapes in (1, 2):
        assert daemon.loop.snapshots.fetch() is None
        assert daemon.loop.snapshots.silent_s() > 0.0
        daemon.turn()
        daemon.turn()
        assert counts(daemon)["report"] == scrapes
        assert daemon.loop.snapshots.silent_s() == 0.0


def fails(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError


def test_what_is_done_on_time_or_for_another_thread_ends_nothing(daemon: Daemon, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(daemon.loop._snapshot_requests, "run_timers", fails)
    monkeypatch.setattr(daemon.loop._tracing, "due", 0.0)
    monkeypatch.setattr(daemon.loop._tracing, "finish", fails)
    daemon.loop.call_soon(fails)
    daemon.loop.turn()
    assert counts(daemon) == {"report": 3}
    theirs_goes_on(daemon, range(3))


def test_snapshots_that_can_not_be_looked_after_are_looked_at_again_later_and_not_all_the_time(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
):
    snapshots = daemon.loop._snapshot_requests
    monkeypatch.setattr(snapshots, "_living", fails)
    monkeypatch.setattr(snapshots, "_look_for_stall", fails)
    for number in range(1, 3):
        daemon.now = snapshots.due + 1
        daemon.loop.turn()
        assert counts(daemon) == {"report": number}
        assert snapshots.due > daemon.now


def test_a_session_that_can_not_begin_or_end_properly_ends_all_the_same(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patch:
        patch.setattr(daemon.metrics, "sessions_opened", None)
        daemon.connect("u", 1002)
        assert "u" not in daemon.router.open
    with monkeypatch.context() as patch:
        patch.setattr(daemon.loop._questions, "forget", fails)
        daemon.disconnect("s")
    assert counts(daemon) == {"session": 2}
    assert daemon.loop.context.records.sessions.keys() == {"t"}
    assert daemon.device.jobs.keys() == {THEIRS}
    theirs_goes_on(daemon)


def test_a_bug_of_the_wire_ends_the_session_that_was_looked_after(daemon: Daemon, monkeypatch: pytest.MonkeyPatch):
    daemon.router.at = "s"
    with monkeypatch.context() as patch:
        patch.setattr(daemon.router, "receive", fails)
        daemon.loop.turn()
    assert counts(daemon) == {"session": 1}
    daemon.turn()
    assert daemon.loop.context.records.sessions.keys() == {"t"}
    theirs_goes_on(daemon)


def test_a_wire_that_fails_again_and_again_ends_the_daemon(daemon: Daemon, monkeypatch: pytest.MonkeyPatch):
    """No session is to blame, and the next turn would fail as well."""
    monkeypatch.setattr(daemon.router, "receive", fails)
    daemon.loop.turn()
    assert counts(daemon) == {"report": 1}
    daemon.now += inconsistencies.DEVICE_AGAIN_S / 2
    with pytest.raises(ZeroDivisionError):
        daemon.loop.turn()
    assert daemon.loop.context.records.jobs.keys() == {MINE, THEIRS}


def test_messages_of_no_session_that_fail_end_nothing_however_many_they_are(daemon: Daemon):
    for number in range(1, 4):
        daemon.router.failed(ZeroDivisionError())
        assert counts(daemon) == {"report": number}
    theirs_goes_on(daemon)


def test_a_check_that_can_not_begin_ends_its_own_job_and_not_the_one_before_it(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
):
    """The check of MINE waits for the end of a check of THEIRS."""
    checks, check = daemon.loop.context.checks, daemon.device.check
    checks._at_once = checks._share = 1
    daemon.device.slow = True
    daemon.load("t", THEIRS, samples.add_one(), 1)
    daemon.load("s", MINE, samples.add_one(), 1)

    def of_theirs_alone(job: JobId, *rest: Any) -> None:
        if job == MINE:
            raise OSError(23, "Too many open files in system")
        check(job, *rest)

    monkeypatch.setattr(daemon.device, "check", of_theirs_alone)
    daemon.device.finish()
    daemon.turn()
    assert counts(daemon) == {"job": 1}
    assert daemon.device.jobs.keys() == {THEIRS}
    daemon.device.slow = False
    while daemon.device.work:
        daemon.device.finish()
        daemon.turn()
    assert [program.announced for program in daemon.loop.context.records.jobs[JobId(THEIRS)].programs.values()] == [
        True, True,
    ]  # fmt: skip
    daemon.router.read = len(daemon.router.sent)
    theirs_goes_on(daemon)


def test_a_recording_that_fails_ends_alone(daemon: Daemon):
    daemon.connect("root", 0)
    daemon.say("root", msg.RecordTrace(5, 10.0))
    daemon.loop._tracing._recording._out = None
    daemon.say("s", step(MINE, 1))
    assert [(m.ref, m.code) for _, m, _ in daemon.router.sent if isinstance(m, msg.Refusal)] == [(5, "internal")]
    assert counts(daemon) == {"report": 1}
    daemon.device.finish()
    assert only(daemon.hear("s")).step == 1
    theirs_goes_on(daemon)


def spoil_the_windows(daemon: Daemon) -> None:
    daemon.loop.scheduler._state.windows.active_jobs[0] += 1


def spoil_the_ledger(daemon: Daemon) -> None:
    daemon.loop.scheduler._state.ledger.used += 4096


@pytest.mark.parametrize("spoil", [spoil_the_windows, spoil_the_ledger], ids=lambda spoil: spoil.__name__)
def test_where_ending_a_job_does_not_help_all_jobs_end_and_the_daemon_serves(
    daemon: Daemon, spoil: Callable[[Daemon], None]
):
    daemon.say("t", step(THEIRS, 0))
    daemon.router.read = len(daemon.router.sent)
    daemon.consistent = False
    spoil(daemon)
    lose_track_of_a_step(daemon)
    daemon.turn()
    daemon.consistent = True
    sent = daemon.router.sent
    assert {(to, m.code) for to, m, _ in sent if isinstance(m, msg.JobEnded)} == {("s", "internal"), ("t", "internal")}
    assert [m.step for to, m, _ in sent if to == "t" and isinstance(m, msg.StepFailed)] == [0], "it is answered once"
    assert counts(daemon) == {"job": 1, "device": 1}
    assert daemon.loop.context.records.jobs == {}
    assert daemon.device.jobs == {}
    assert daemon.loop.scheduler.snapshot()["memory"]["used"] == 0
    daemon.router.read = len(sent)
    for session, job in (("s", MINE), ("t", THEIRS)):  # their clients come back
        daemon.open_job(session, job)
        daemon.load(session, job, samples.add_one(), new_buffers=[4])
    theirs_goes_on(daemon)


def test_all_jobs_end_once_and_the_next_time_so_does_the_daemon(daemon: Daemon, monkeypatch: pytest.MonkeyPatch):
    def poll() -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(daemon.device, "poll", poll)
    daemon.loop.turn()
    assert counts(daemon) == {"device": 1}
    daemon.now += inconsistencies.DEVICE_AGAIN_S / 2
    with pytest.raises(ZeroDivisionError):
        daemon.loop.turn()
    daemon.now += inconsistencies.DEVICE_AGAIN_S
    daemon.loop.turn()
    assert counts(daemon) == {"device": 2}


def test_a_lost_device_still_ends_the_daemon(daemon: Daemon, monkeypatch: pytest.MonkeyPatch):
    def poll() -> Any:
        raise DeviceLost("it is gone", "")

    monkeypatch.setattr(daemon.device, "poll", poll)
    with pytest.raises(DeviceLost):
        daemon.loop.turn()
    assert counts(daemon) == {}


def test_a_leaving_daemon_leaves_after_all_jobs_ended(daemon: Daemon):
    daemon.consistent = False
    spoil_the_ledger(daemon)
    lose_track_of_a_step(daemon)
    daemon.turn()
    daemon.consistent = True
    daemon.loop.context.feed(DrainRequested("the end"))
    daemon.turn()
    assert daemon.loop.scheduler.drained


def test_reports_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(inconsistencies, "MAX_REPORTS", 2)
    log = os.open(tmp_path / "crash.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    reports = CrashReports(log)
    for number in range(4):
        reports.write(f"number {number}", ValueError("x"), ["a line"])
    os.close(log)
    text = (tmp_path / "crash.log").read_text()
    assert "number 1" in text
    assert "number 2" not in text
    reports = CrashReports(log)  # closed: a disk that takes nothing
    reports.write("more", ValueError("x"), [])
    CrashReports(None).write("nowhere", ValueError("x"), [])
