"""When a client takes snapshots, on a virtual clock, with a list in place of the daemon."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from gpumux.client import snapshots
from gpumux.client.replay import BEGINNING, ReplayEntry, ReplayLog
from gpumux.client.session import Asked
from gpumux.client.snapshots import SnapshotCopy, Snapshots
from gpumux.errors import DaemonGone, SnapshotFailed
from gpumux.wire import messages as m
from gpumux.wire.messages import PrepareSnapshot, ReadSnapshot, SnapshotSaved, SnapshotWanted, TakeSnapshot

JOB = "ab" * 16


class FakeDaemon:
    """A session whose daemon does what `prepared` and `written` say, at a wait or when `answer` is called."""

    def __init__(self) -> None:
        self.news: deque[SnapshotSaved | SnapshotWanted] = deque()
        self.sent: list[Any] = []
        self.prepared: Any = m.Done(0)
        self.written = ""
        self.dead: Any = None
        self.seconds = 0.1
        self.unreadable: Any = None  # the answer to ReadSnapshot, if it is a refusal
        self.each_daemon = (self,)
        self._asked: list[tuple[Any, list[Any]]] = []
        self._taken: deque[int] = deque()

    def ask(self, message: Any) -> Asked:
        if self.dead is not None:
            raise self.dead
        self.sent.append(message)
        answer: list[Any] = []
        self._asked.append((message, answer))
        return Asked(answer, lambda: None)

    def wait_reply(self, asked: Asked) -> None:
        self.wait(lambda: asked.reply() is not None)

    def call(self, message: Any, frames: Any = (), timeout: float | None = None) -> Any:
        if self.dead is not None:
            raise self.dead
        self.sent.append((message, frames))
        self._taken.append(message.snapshot)
        return m.Done(0), []

    def answer(self) -> None:
        while self._asked:
            message, answer = self._asked.pop()
            if isinstance(message, ReadSnapshot):
                (number,) = message.snapshots
                read = m.SnapshotRead(0, JOB, number, 0, 3, 1, [], 1)
                answer.append((self.unreadable or read, [b"%03d" % number]))
            else:
                answer.append((self.prepared, []))
        while self._taken:
            number = self._taken.popleft()
            self.news.append(
                SnapshotSaved(JOB, number, 1, self.seconds, self.written, "why not" if self.written else "", "")
            )

    def wait(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        if self.dead is not None:
            raise self.dead
        self.answer()
        assert predicate(), "waits for ever"
        return True

    def kinds(self) -> list[type]:
        return [type(s[0] if isinstance(s, tuple) else s) for s in self.sent]


class Job:
    """A loop of steps of 10 bytes, one a tenth of a second."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, max_bytes: int = 1 << 30, interval_s: float = 30.0,
        copy: SnapshotCopy | None = None,
    ) -> None:  # fmt: skip
        self.now = 1000.0
        monkeypatch.setattr(snapshots.time, "monotonic", lambda: self.now)
        self.daemon = FakeDaemon()
        self.log = ReplayLog(max_bytes, 1 << 30)
        self.snapshots = Snapshots(
            JOB, "sweep", self.log, interval_s=interval_s, last=0, news=self.daemon.news, notes=lambda: (b"notes", 7),
            copy=copy,
        )  # fmt: skip
        self.step = 0

    def steps(self, count: int, answering: bool = True) -> None:
        for _ in range(count):
            self.snapshots.tick(self.daemon)
            self.log.add(ReplayEntry(self.step, 10, None))
            self.step += 1
            self.now += 0.1
            if answering:
                self.daemon.answer()


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(monkeypatch)


def test_the_first_comes_after_a_second_and_the_next_at_the_interval(job: Job):
    job.steps(10)
    assert job.daemon.sent == []
    job.steps(3)
    assert job.daemon.kinds() == [PrepareSnapshot, TakeSnapshot]
    taken, frames = job.daemon.sent[1]
    assert (taken.snapshot, taken.steps, frames) == (1, 7, [b"notes"])
    assert job.log.candidates(None) == [1, BEGINNING]
    job.steps(290)
    assert len(job.daemon.sent) == 2
    job.steps(20)
    assert len(job.daemon.sent) == 4
    assert job.log.candidates(None) == [2, 1]


def test_steps_go_on_while_the_daemon_prepares_and_writes(job: Job):
    job.steps(8)
    job.steps(20, answering=False)
    assert job.daemon.kinds() == [PrepareSnapshot]
    job.daemon.answer()
    job.steps(20, answering=False)
    assert job.daemon.kinds() == [PrepareSnapshot, TakeSnapshot]
    assert job.log.candidates(None) == [1, BEGINNING]


def test_a_slow_disk_is_written_to_less_often(job: Job):
    job.daemon.seconds = 20.0
    job.steps(700)
    assert job.daemon.kinds().count(TakeSnapshot) == 1
    job.steps(200)
    assert job.daemon.kinds().count(TakeSnapshot) == 2


def test_nothing_is_saved_twice(job: Job):
    job.steps(15)
    job.now += 100.0
    job.snapshots.tick(job.daemon)
    job.daemon.answer()
    job.snapshots.tick(job.daemon)
    count = len(job.daemon.sent)
    job.now += 100.0
    for _ in range(5):
        job.snapshots.tick(job.daemon)
        job.daemon.answer()
    assert len(job.daemon.sent) <= count + 2


def test_the_log_keeps_its_entries_until_a_snapshot_was_copied(monkeypatch: pytest.MonkeyPatch):
    copy = SnapshotCopy(tuple)
    job = Job(monkeypatch, copy=copy)
    job.steps(12)
    assert job.daemon.kinds() == [PrepareSnapshot, TakeSnapshot]
    job.steps(5, answering=False)
    assert job.daemon.kinds() == [PrepareSnapshot, TakeSnapshot, ReadSnapshot]
    assert copy.read([1]) is None
    assert len(job.log) == 17
    job.daemon.answer()
    job.steps(1)
    assert job.log.candidates(None) == [1]
    assert len(job.log) == 7
    found = copy.read([2, 1])
    assert found is not None
    assert found.snapshot == 1
    assert found.parts[0][1] == [b"001"]
    assert job.snapshots.take_now(job.daemon)
    assert copy.read([1]) is None
    assert copy.read([2]) is not None
    assert len(job.log) == 0


def test_a_snapshot_that_cannot_be_copied_counts_as_failed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    copy = SnapshotCopy(tuple)
    job = Job(monkeypatch, copy=copy)
    job.steps(20)
    job.daemon.unreadable = m.Refusal(0, "unknown_job", "snapshot 2 is damaged", "")
    assert not job.snapshots.take_now(job.daemon)
    assert job.log.candidates(None) == [1]
    assert copy.read([1]) is not None
    assert "snapshot 2 is damaged" in caplog.text
    job.daemon.unreadable = None
    job.steps(310)
    assert job.log.candidates(None) == [3]
    assert "its state is saved again" in caplog.text


def test_a_filling_log_wants_one_early(monkeypatch: pytest.MonkeyPatch):
    job = Job(monkeypatch, max_bytes=400)
    job.steps(9)
    assert job.daemon.sent == []
    job.steps(5)
    assert job.daemon.kinds() == [PrepareSnapshot, TakeSnapshot]
    job.steps(300)
    assert job.log.recoverable
    assert job.log.nbytes < 400


def test_a_full_log_waits_for_the_snapshot_under_way(monkeypatch: pytest.MonkeyPatch):
    job = Job(monkeypatch, max_bytes=400)
    job.steps(13)
    job.steps(60, answering=False)  # the disk is slower than the loop: only waiting brings the answer
    assert job.log.recoverable
    assert job.log.nbytes < 400


def test_when_it_can_be_saved_nowhere_it_goes_on(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    job = Job(monkeypatch, max_bytes=400)
    job.daemon.written = SnapshotFailed.code
    job.steps(200)
    assert not job.log.recoverable
    assert len(job.log) == 0
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert "could not be saved" in messages[0]
    assert "can't come back" in messages[1]
    job.daemon.written = ""
    job.steps(200)
    assert job.log.recoverable
    assert "saved again" in caplog.records[-1].getMessage()


def test_a_log_that_fills_behind_the_only_snapshot_waits_for_one_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """After the log was given up it has nothing older than the snapshot to drop, and the steps made while that was
    written fill it alone."""
    job = Job(monkeypatch, max_bytes=400)
    job.log.give_up()
    job.steps(1)
    job.steps(60, answering=False)  # the disk is slower than the loop: only waiting brings the answer
    assert job.log.recoverable
    assert 0 < job.log.nbytes < 400
    assert job.daemon.kinds().count(TakeSnapshot) >= 2
    (said,) = [record.getMessage() for record in caplog.records]  # once, not each time
    assert "waited until its state was saved" in said
    assert "raise replay_bytes" in said


def test_a_refusal_to_prepare_is_tried_again_and_said_once(job: Job, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING)
    job.daemon.prepared = m.Refusal(0, "admission_refused", "no memory", "free some")
    job.steps(700)
    assert 2 <= job.daemon.kinds().count(PrepareSnapshot) <= 4
    assert TakeSnapshot not in job.daemon.kinds()
    assert len(caplog.records) == 1


def test_a_daemon_that_leaves_gets_one_at_the_next_step(job: Job):
    job.steps(20)
    job.steps(5)
    job.daemon.sent.clear()
    job.daemon.news.append(SnapshotWanted(JOB))
    job.steps(3)
    assert job.daemon.kinds() == [PrepareSnapshot, TakeSnapshot]


def test_taking_one_now(job: Job):
    assert job.snapshots.take_now(job.daemon)
    job.steps(3)
    assert job.snapshots.take_now(job.daemon)
    assert job.log.candidates(None)[0] == job.snapshots.number
    job.steps(3)
    job.daemon.written = SnapshotFailed.code
    assert not job.snapshots.take_now(job.daemon)


def test_a_daemon_that_goes_meanwhile_may_have_written_it(job: Job):
    job.steps(5)
    job.now += 1.0
    job.snapshots.tick(job.daemon)
    job.daemon.answer()
    job.daemon.dead = DaemonGone("gone", "")
    with pytest.raises(DaemonGone):
        job.steps(1)
    assert job.log.candidates(None) == [1, BEGINNING]
    job.log.recovered(BEGINNING, [1])
    job.snapshots.restart()
    job.daemon.dead = None
    job.steps(15)
    assert job.log.candidates(None) == [2, BEGINNING]
