"""A real daemon that leaves a lone job's steps to its executor: results, accounts and every way that ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from gpumux.cli.control import Control
from gpumux.client.session import Session
from gpumux.daemon.loans import AFTER_STEPS
from gpumux.errors import DaemonGone
from gpumux.wire import messages as msg
from tests.program import samples

from .live import SOON_S, LiveJob, read_floats, serving
from .test_live import sample, scrape, status_when

MOST_STEPS = 20_000  # alone, within which a lane is lent even where nothing is short at first


@pytest.fixture(scope="module")
def daemon():
    path = Path(tempfile.mkdtemp(prefix="gmlent-"))
    with serving(path, "--log-level", "debug") as daemon:
        yield daemon
    shutil.rmtree(path)
    assert daemon.process.returncode == 0, daemon.log


def lent(daemon) -> int:
    """How often a lane was lent so far."""
    return sum("is lent" in line for line in daemon.lines)


class Counting(LiveJob):
    """A job that counts its steps; `value` is what the newest that was waited for gave."""

    def __init__(self, session, **how):
        super().__init__(session, samples.counter(), new_buffers=[4], binding=[0], **how)
        self.value = 0.0

    def one(self) -> None:
        (result,) = self.run(scalars=[1.0])
        self.value += 1
        assert read_floats(result, 1) == (self.value,)


def until_lent(daemon, job) -> None:
    """Step until the executor takes the job's steps by itself."""
    before = lent(daemon)
    for _ in range(MOST_STEPS):
        job.one()
        if lent(daemon) > before:
            return
    raise AssertionError(f"never lent: {daemon.log}")


def alone(daemon, session) -> Counting:
    job = Counting(session, name="alone")
    until_lent(daemon, job)
    return job


def entry(body, job):
    return next(j for j in body["jobs"] if j["job"] == job.id)


def test_every_step_counts_wherever_it_went(daemon):
    series = 'gpumux_steps_total{priority="low"}'
    before = sample(scrape(daemon), series)
    with Session.connect(daemon.endpoint, SOON_S) as session, Control(daemon.endpoint, SOON_S) as control:
        job = alone(daemon, session)
        for i in range(1, 301):
            job.one()
            if i % 100 == 0:
                assert entry(control.status(), job)["steps_done"] >= job.value - 1
        status_when(control, lambda body: entry(body, job)["steps_done"] == job.value)
        assert sample(scrape(daemon), series) - before == job.value
        job.close()


def test_state_moves_in_order_with_steps_the_executor_took(daemon):
    with Session.connect(daemon.endpoint, SOON_S) as session:
        job = alone(daemon, session)
        for turn in range(5):
            for _ in range(turn * 13):
                job.one()
            number = job.post(scalars=[1.0], slot=1)  # not waited for: the pull comes behind it
            job.value += 1
            assert read_floats(memoryview(job.pull([0])), 1) == (job.value,)
            assert isinstance(job.wait(number), msg.StepDone)
        job.close()


def test_a_bad_step_is_refused_and_good_ones_go_on(daemon):
    with Session.connect(daemon.endpoint, SOON_S) as session:
        job = alone(daemon, session)
        failed = job.wait(job.post(scalars=[1]))  # an int where a float belongs
        assert isinstance(failed, msg.StepFailed)
        assert failed.code == "protocol"
        session.post(msg.Step(job.id, 10**6, 5, 0, [], 0))
        assert job.wait(10**6).code == "program"
        job.steps = 10**6
        job.one()
        job.close()


def test_another_job_comes_and_goes(daemon):
    with Session.connect(daemon.endpoint, SOON_S) as session, Session.connect(daemon.endpoint, SOON_S) as other:
        mine = alone(daemon, session)
        theirs = Counting(other, priority=1)
        for _ in range(30):
            mine.one()
            theirs.one()
        until_lent(daemon, theirs)  # the high one, which is alone now
        mine.one()
        theirs.close()
        mine.close()


def test_a_pause_holds_and_a_resume_lets_go(daemon):
    with Session.connect(daemon.endpoint, SOON_S) as session, Control(daemon.endpoint, SOON_S) as control:
        job = alone(daemon, session)
        for turn in range(3):
            control.change("pause", job.id)
            number = job.post(scalars=[1.0])
            status_when(control, lambda body: entry(body, job)["queued"] == 1)
            assert number not in job.done
            control.change("resume", job.id)
            assert isinstance(job.wait(number), msg.StepDone)
            job.value += 1
            until_lent(daemon, job)
        job.close()


def test_a_pause_in_the_midst_of_steps_loses_none(daemon):
    with Session.connect(daemon.endpoint, SOON_S) as session, Control(daemon.endpoint, SOON_S) as control:
        job = alone(daemon, session)
        stop, failed = threading.Event(), []

        def step_on():
            try:
                while not stop.is_set():
                    job.one()
            except BaseException as error:
                failed.append(error)
                raise

        def held(body):
            return bool(failed) or (entry(body, job)["queued"] == 1 and not entry(body, job)["outstanding"])

        thread = threading.Thread(target=step_on)
        thread.start()
        for _ in range(20):
            control.change("pause", job.id)
            status_when(control, held)
            control.change("resume", job.id)
            goal = job.value + AFTER_STEPS + 1
            status_when(control, lambda body: bool(failed) or job.value > goal)
        stop.set()
        thread.join(SOON_S)
        assert not failed
        job.close()


def executors(daemon) -> list[int]:
    """Processes of the daemon's that run a job now."""
    tree = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        tree.setdefault(int(fields[1]), []).append(int(path.parent.name))
    return [job for warm in tree.get(daemon.process.pid, []) for job in tree.get(warm, [])]


def test_an_executor_that_dies_ends_its_job_alone(daemon):
    with Session.connect(daemon.endpoint, SOON_S) as session, Session.connect(daemon.endpoint, SOON_S) as other:
        bystander = Counting(other)
        bystander.one()
        known = set(executors(daemon))
        job = Counting(session, priority=1, name="dies")
        (pid,) = set(executors(daemon)) - known
        until_lent(daemon, job)
        os.kill(pid, signal.SIGKILL)
        assert session.wait(lambda: bool(job.ended), SOON_S)
        assert job.ended[0].code == "executor_crashed"
        assert job.wait(job.post(scalars=[1.0])).code == "unknown_job"
        job.data.release()
        bystander.one()
        bystander.close()


def test_a_client_that_dies_frees_its_job(daemon):
    with Control(daemon.endpoint, SOON_S) as control:
        before = control.status()
        command = [sys.executable, "-m", "tests.daemon.victim", daemon.endpoint, "alone"]
        victim = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert victim.stdout.readline() == "submitted\n"
        victim.kill()
        victim.wait(SOON_S)
        victim.stdout.close()
        after = status_when(control, lambda body: not body["jobs"])
        assert after["memory"] == before["memory"]


def test_a_client_that_leaves_with_a_goodbye_is_not_counted_lost(daemon):
    before = sample(scrape(daemon), "gpumux_sessions_lost_total")
    with Control(daemon.endpoint, SOON_S) as control:
        with Session.connect(daemon.endpoint, SOON_S) as session:
            job = alone(daemon, session)
            job.data.release()
        status_when(control, lambda body: not body["jobs"])
    assert sample(scrape(daemon), "gpumux_sessions_lost_total") == before


def test_a_daemon_told_to_stop_ends_well(runtime_dir):
    with serving(runtime_dir, "--log-level", "debug") as daemon, Session.connect(daemon.endpoint, SOON_S) as session:
        job = alone(daemon, session)
        stepping, gone = threading.Event(), []

        def step_on():
            try:
                while True:
                    job.one()
                    stepping.set()
            except (DaemonGone, AssertionError) as error:
                gone.append(error)

        thread = threading.Thread(target=step_on)
        thread.start()
        assert stepping.wait(SOON_S)
        assert daemon.stop() == 0, daemon.log
        thread.join(SOON_S)
        assert gone
        job.data.release()
    assert "Traceback" not in daemon.log
