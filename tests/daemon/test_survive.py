"""What a daemon survives: a clock that jumps, stopped processes, a disk that can't be written to, few descriptors, and
a daemon of another version in its place. One job's state is compared with what its steps add up to."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from gpumux.client.session import Session
from gpumux.config import Config
from gpumux.daemon import main as daemon_main
from gpumux.daemon import report
from gpumux.daemon.snapshots.requests import EXPIRE_EVERY_S, STALL_S
from gpumux.daemon.state import directory as state_directory
from gpumux.errors import AdmissionRefused, ConfigError, VersionMismatch
from gpumux.wire import messages as msg
from microbench.soaking import watch
from tests.daemon.fakes import Daemon, FakeWriter
from tests.program import samples

from .live import QUICK, SOON_S, LiveDaemon, LiveJob, floats, read_floats, serving

JOB = "ab" * 16
DAY_S = 86_400.0


class Counting:
    """A job that adds 0.5 to its state with each step, from 10 on."""

    def __init__(self, session: Session, name: str = "counting") -> None:
        self.job = LiveJob(session, samples.counter(), new_buffers=[4], binding=[0], name=name)
        try:
            self.job.push([0], floats(10))
        except AdmissionRefused:
            self.job.data.release()
            raise

    def check(self, steps: int = 10) -> None:
        """Run some steps; the state must be what all steps until now make of it."""
        for _ in range(steps):
            self.job.run(scalars=[0.5])
        assert read_floats(memoryview(self.job.pull([0])), 1) == (10 + 0.5 * self.job.steps,)

    def snapshot(self, number: int) -> None:
        """Begin one."""
        self.job.session.call(msg.PrepareSnapshot(0, self.job.id))
        self.job.session.call(msg.TakeSnapshot(0, self.job.id, number, self.job.steps, 1), [b"notes"])

    def saved(self, number: int) -> msg.SnapshotSaved:
        """Take one, and wait for its end."""
        self.snapshot(number)
        assert self.job.session.wait(lambda: number in self.job.saved, SOON_S)
        return self.job.saved[number]


def named(pid: int, word: str) -> list[int]:
    """The processes of a daemon that have `word` in their name or command."""
    found = []
    for child in watch.descendants(pid):
        at = Path(f"/proc/{child}")
        if word in at.joinpath("comm").read_text() or word in at.joinpath("cmdline").read_text():
            found.append(child)
    return found


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def until(condition) -> None:
    end = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < end
        threading.Event().wait(0.02)


# ---- The clock.


@pytest.fixture
def daemon_in_process() -> Iterator[tuple[Daemon, FakeWriter]]:
    writer = FakeWriter()
    made = Daemon(Config(), writer=writer)
    made.connect("s")
    made.open_job("s", JOB, name="sweep")
    yield made, writer
    made.close()
    writer.close()


@pytest.mark.parametrize("jump_s", [400 * DAY_S, -400 * DAY_S])
def test_a_clock_that_jumps_makes_no_snapshot_too_old(daemon_in_process: tuple[Daemon, FakeWriter], jump_s: float):
    """Set forward, all snapshots would be a year old at once, and deleted."""
    daemon, writer = daemon_in_process
    snapshots = daemon.loop._snapshot_requests
    started, _ = snapshots._started
    daemon.now += EXPIRE_EVERY_S + 1
    snapshots._now = lambda: started + jump_s
    daemon.turn()
    ((verb, asked, _),) = writer.asked
    assert verb == "expire"
    assert asked["before"] <= started + EXPIRE_EVERY_S + 1 - DAY_S


@pytest.mark.parametrize("jump_s", [400 * DAY_S, -400 * DAY_S])
def test_a_clock_that_jumps_makes_no_daemon_older_or_younger(
    daemon_in_process: tuple[Daemon, FakeWriter], monkeypatch: pytest.MonkeyPatch, jump_s: float
):
    """`gpumux top` computes rates from it, and takes a daemon that became younger for another one."""
    daemon, _ = daemon_in_process
    began, wall = daemon.loop._identity.began, time.time()
    monkeypatch.setattr(report.time, "monotonic", lambda: began + 7.0)
    monkeypatch.setattr(report.time, "time", lambda: wall + jump_s)
    ((told, _),) = daemon.say("s", msg.GetStatus(5))
    assert told.body["daemon"]["uptime_s"] == 7.0


# ---- Stopped processes.


def test_a_writer_that_does_not_answer_is_logged_and_no_question_waits_for_it(
    daemon_in_process: tuple[Daemon, FakeWriter], caplog: pytest.LogCaptureFixture
):
    daemon, writer = daemon_in_process
    writer.asked_at = daemon.now
    assert daemon.say("s", msg.FindKept(5, "gone")) == []
    daemon.now += STALL_S + 1
    daemon.turn()
    assert "the process that keeps snapshots has been at one request for 61 s" in caplog.text
    ((refusal, _),) = daemon.say("s", msg.FindKept(6, "gone"))
    assert (refusal.ref, refusal.code) == (6, "snapshot_failed")
    assert "kill -CONT" in refusal.remedy
    caplog.clear()
    daemon.now += STALL_S + 1
    daemon.turn()
    assert caplog.text == "", "it is said once"
    writer.answer({"job": JOB, "numbers": [1]})
    daemon.turn()
    daemon.now += STALL_S + 1
    with caplog.at_level("INFO"):
        daemon.turn()
    assert "their process answers again" in caplog.text


def test_stopped_processes_keep_no_other_job_from_its_steps(tmp_path: Path):
    with serving(tmp_path, "--state-dir", str(tmp_path / "state")) as daemon:
        pid = daemon.process.pid
        with Session.connect(daemon.endpoint, SOON_S) as mine, Session.connect(daemon.endpoint, SOON_S) as theirs:
            job = Counting(mine)
            (own,) = watch.executors(pid)
            other = Counting(theirs, "other")
            (others,) = [executor for executor in watch.executors(pid) if executor != own]
            (checker, *_), (zygote,), (writer,) = (
                named(pid, word) for word in ("gpumux-checker", "gpumux-zygote", "snapshots.writer")
            )
            with stopped(others):
                late = other.job.post(scalars=[0.5])
                job.check()
                assert late not in other.job.done
            other.job.wait(late)
            other.check()
            os.kill(checker, signal.SIGSTOP)  # for good: it is ended, and another process checks what it was sent
            job.check()
            LiveJob(theirs, samples.add_one())
            with stopped(zygote):
                job.check()
            LiveJob(theirs, samples.sgd_linear(rows=5), new_buffers=[12], binding=[0])
            kept = tmp_path / "state" / "snapshots" / str(os.geteuid()) / job.job.id
            with stopped(writer):
                job.snapshot(1)
                job.check()
                with pytest.raises(AdmissionRefused, match="under way"):
                    job.snapshot(2)
                other.job.close()
                assert not kept.exists()
            until(lambda: list(kept.glob("00000001-*")))
            job.check()


# ---- Disks.


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_state_directory_that_cannot_be_written_to_is_refused_with_what_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
):
    at = state_directory.open_state_directory(tmp_path)

    def fails(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", fails)
            with pytest.raises(ConfigError, match=os.strerror(number)) as refused:
                state_directory.open_log("crash.log", at, tmp_path / "crash.log")
            assert refused.value.remedy == state_directory.WRITABLE
            patch.setattr(os, "mkdir", fails)
            with pytest.raises(ConfigError, match=os.strerror(number)) as refused:
                state_directory.open_private("snapshots", at, tmp_path / "snapshots")
            assert refused.value.remedy == state_directory.WRITABLE
    finally:
        os.close(at)


def not_mountable() -> str:
    """Why no file system can be mounted here, or ""."""
    if os.geteuid() != 0:
        return "mounts a file system: run as root"
    with tempfile.TemporaryDirectory() as at:
        if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", at], capture_output=True, check=False).returncode:
            return "no file system can be mounted here"
        subprocess.run(["umount", at], check=True)
    return ""


@contextmanager
def disk(at: Path) -> Iterator[None]:
    """A disk of 8 MiB."""
    at.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=0700,size=8m", "tmpfs", str(at)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(at)], check=True)


@contextmanager
def full(at: Path) -> Iterator[None]:
    with suppress(OSError), (at / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 12))
    yield
    (at / "filler").unlink()


@pytest.mark.extended
def test_a_full_disk_costs_snapshots_and_no_step(tmp_path: Path):
    """One that became read-only does the same (tests/daemon/snapshots/test_store.py, tests/faults)."""
    if why := not_mountable():
        pytest.skip(why)
    state = tmp_path / "state"
    with (
        disk(state),
        serving(tmp_path, "--state-dir", str(state)) as daemon,
        Session.connect(daemon.endpoint, SOON_S) as session,
    ):
        job = Counting(session, "kept")
        kept = state / "snapshots" / str(os.geteuid()) / job.job.id

        def held() -> list[str]:
            return sorted(path.name.partition("-")[0] for path in kept.iterdir())

        assert job.saved(1).code == ""
        good = held()
        with full(state):
            failed = job.saved(2)
            assert (failed.code, "No space" in failed.message) == ("snapshot_failed", True), failed
            assert failed.remedy
            assert held() == good, "the one before stays"
            job.check()
            other = Counting(session, "beside")
            other.check()
            other.job.close()
        assert job.saved(3).code == ""
        job.check()
        assert held() == [f"{number:08}" for number in (1, 3)]


# ---- Descriptors.


def test_too_few_descriptors_are_refused_with_the_number_that_is_needed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (63, 63))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    with pytest.raises(ConfigError, match="63 descriptors only, and the daemon needs 64 or more") as refused:
        daemon_main.raise_file_limit()
    assert "to 1024 or more" in refused.value.remedy


@pytest.mark.parametrize(
    ("user", "hard", "works"), [(1000, 63, False), (1000, 64, True), (1000, -1, True), (0, 4, True)]
)
def test_too_few_processes_are_refused_with_the_number_that_is_needed(
    user: int, hard: int, works: bool, monkeypatch: pytest.MonkeyPatch
):
    """With four, libzmq ended the daemon without a word of why."""
    raised: list[object] = []
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda what, limits: raised.append((what, limits)))
    if works:
        daemon_main.raise_process_limit()
    else:
        with pytest.raises(ConfigError, match="63 processes and threads only, and the daemon needs 64") as refused:
            daemon_main.raise_process_limit()
        assert "LimitNPROC" in refused.value.remedy
    assert raised == [(resource.RLIMIT_NPROC, (hard, hard))]


FEW = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from gpumux.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_with_64_descriptors_some_jobs_run_and_the_rest_are_refused(tmp_path: Path):
    with Instead(tmp_path, FEW, "--device", "cpu", "--threads", "1") as daemon:
        sessions: list[Session] = []
        jobs: list[Counting] = []

        def open_many() -> None:
            while len(sessions) < 16:
                sessions.append(Session.connect(daemon.endpoint, SOON_S))
                jobs.append(Counting(sessions[-1]))

        try:
            with pytest.raises(AdmissionRefused, match="nearly all of the 64 descriptors"):
                open_many()
            assert jobs
            for job in jobs:  # reading the state takes a descriptor
                for _ in range(10):
                    job.job.run(scalars=[0.5])
        finally:
            for job in jobs[1:]:
                job.job.data.release()
            for session in sessions[1:]:
                session.close()

        def compared() -> bool:
            try:
                jobs[0].check()
            except AdmissionRefused:  # the ended jobs' descriptors are on their way out
                return False
            return True

        until(compared)
        jobs[0].job.close()
        sessions[0].close()

        def let_in() -> bool:
            try:
                with Session.connect(daemon.endpoint, SOON_S) as session:
                    late = Counting(session)
                    late.check()
                    late.job.close()
            except AdmissionRefused:
                return False
            return True

        until(let_in)


# ---- A daemon of another version.


NEWER = """
import sys
from gpumux.wire import channel, codec, messages, router
for module in (channel, codec, messages, router):
    module.PROTOCOL_VERSION += 1
from gpumux.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


class Instead(LiveDaemon):
    """A daemon that runs other code first."""

    def __init__(self, directory: Path, code: str, *flags: str) -> None:
        self.endpoint = f"ipc://{directory}/gpumux.sock"
        self.log_path = directory / "instead.log"
        with self.log_path.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, "serve", "--endpoint", self.endpoint, "--metrics-port", "0", *flags],
                stderr=out,
            )
        until(lambda: " serves " in self.log or self.process.poll() is not None)
        assert self.process.poll() is None, self.log

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def __enter__(self) -> Instead:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        assert self.process.wait(SOON_S) == 0, self.log


def test_a_newer_daemon_refuses_older_clients_by_name_and_loses_nothing_they_kept(tmp_path: Path):
    state = ("--state-dir", str(tmp_path / "state"))
    with serving(tmp_path, *state) as daemon, Session.connect(daemon.endpoint, SOON_S) as session:
        job = Counting(session, "kept")
        job.check()
        job.snapshot(1)
        kept = tmp_path / "state" / "snapshots" / str(os.geteuid()) / job.job.id
        until(lambda: list(kept.glob("00000001-*")))
        job.job.data.release()
        daemon.stop()
    before = {path: path.read_bytes() for path in kept.iterdir()}
    with Instead(tmp_path, NEWER, *QUICK, *state) as newer:
        ours, theirs = msg.PROTOCOL_VERSION, msg.PROTOCOL_VERSION + 1
        with pytest.raises(VersionMismatch, match=f"protocol {ours}.*protocol {theirs}") as refused:
            Session.connect(newer.endpoint, SOON_S)
        assert refused.value.remedy == "install the same gpumux version on both sides"
    assert {path: path.read_bytes() for path in kept.iterdir()} == before
    with serving(tmp_path, *QUICK, *state) as daemon, Session.connect(daemon.endpoint, SOON_S) as session:
        found, _ = session.call(msg.FindKept(0, "kept"), (), SOON_S)
        assert (found.job, list(found.snapshots)) == (job.job.id, [1])
