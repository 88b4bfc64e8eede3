"""Ranks of a gang on daemons of their own: results, what operators see, and how they end together."""

from __future__ import annotations

import shutil
import signal
import struct
import tempfile
import urllib.request
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from gpumux.cli.control import Control
from gpumux.cli.jobs import job_table
from gpumux.client.session import Session
from gpumux.errors import AccessDenied, Refused
from gpumux.types import Gang
from gpumux.wire import messages as msg
from tests.daemon.stepping import JOB, only
from tests.device.cpu.gangs import gangs, summing
from tests.program import samples

from .fakes import Daemon
from .live import SOON_S, LiveJob, serving

COUNT = 6


@pytest.fixture(scope="module")
def made(daemon):
    """Two daemons. The last test that uses them kills the second."""
    path = Path(tempfile.mkdtemp(prefix="gmgang-"))
    with serving(path) as second:
        yield [daemon, second]
    shutil.rmtree(path)


@pytest.fixture
def sessions(made):
    """A session with each."""
    with ExitStack() as stack:
        yield [stack.enter_context(Session.connect(each.endpoint, SOON_S)) for each in made]


def ranks_of(sessions, gang) -> list[LiveJob]:
    return [
        LiveJob(session, summing(rank, 2, [("float64", (COUNT,))]), gang=one, name="a gang")
        for rank, (session, one) in enumerate(zip(sessions, gang, strict=True))
    ]


def values(rank: int, number: int) -> tuple[float, ...]:
    return tuple(float(100 * rank + number + i) for i in range(COUNT))


def read(job: LiveJob) -> tuple[float, ...]:
    offset = job.layout.results[0]
    return struct.unpack(f"{COUNT}d", bytes(job.data[offset : offset + 8 * COUNT]))


def run(jobs: list[LiveJob], number: int) -> None:
    asked = [job.post(struct.pack(f"{COUNT}d", *values(rank, number))) for rank, job in enumerate(jobs)]
    for job, step in zip(jobs, asked, strict=True):
        answer = job.wait(step)
        assert isinstance(answer, msg.StepDone), answer


def ended(job: LiveJob) -> msg.JobEnded:
    assert job.session.wait(lambda: bool(job.ended), SOON_S)
    job.data.release()
    return job.ended[0]


def test_two_daemons_run_one_step_together_and_show_it(made, sessions):
    with gangs(2) as gang:
        jobs = ranks_of(sessions, gang)
        for number in range(30):
            run(jobs, number)
            wanted = tuple(2 * (a + b) for a, b in zip(values(0, number), values(1, number), strict=True))
            assert [read(job) for job in jobs] == [wanted, wanted]
        with Control(made[1].endpoint) as control:
            (entry,) = control.status()["jobs"]
            sentences = " ".join(control.explain(jobs[1].id)["sentences"])
        moved = 30 * COUNT * 8
        shown = entry["gang"]
        assert (shown["rank"], shown["ranks"], shown["sent_bytes"], shown["received_bytes"]) == (1, 2, moved, moved)
        assert shown["waited_s"] > 0.0
        assert "rank 1 of 2" in job_table([entry])
        assert f"It is rank 1 of 2. It waited {shown['waited_s']:.3f} s" in sentences
        with urllib.request.urlopen(made[1].metrics_url, timeout=SOON_S) as answer:
            text = answer.read().decode()
        assert f'gpumux_collective_bytes_total{{direction="sent",job_id="{entry["short"]}"}} {moved}' in text
        assert "gpumux_peers_wait_seconds_total{" in text
        asked = []
        for rank, job in enumerate(jobs):  # two steps in flight on each
            for slot in range(2):
                asked.append((job, job.post(struct.pack(f"{COUNT}d", *values(rank, slot)), slot=slot)))
        assert all(isinstance(job.wait(step), msg.StepDone) for job, step in asked)
        for job in jobs:
            job.close()


def test_a_rank_that_waits_is_shown_and_closed_at_once(made, sessions):
    with gangs(2) as gang:
        jobs = ranks_of(sessions, gang)
        run(jobs, 0)
        jobs[0].post(struct.pack(f"{COUNT}d", *values(0, 1)))
        with Control(made[0].endpoint) as control:
            for _ in range(100_000):
                (entry,) = [entry for entry in control.status()["jobs"] if entry["job"] == jobs[0].id]
                if entry["gang"]["waits"]:
                    break
            assert "waits for peers" in job_table([entry])
            sentence = control.explain(jobs[0].id)["sentences"][0]
            assert "waits for its peers: collective 1 of 1 of its step, before piece 1 (operator 1" in sentence
        jobs[0].close(drain=False)
        jobs[1].post(struct.pack(f"{COUNT}d", *values(1, 1)))
        assert ended(jobs[1]).code == "peers_lost"


def test_a_daemon_that_is_killed_ends_the_other_ranks_job(made, sessions):
    with gangs(2) as gang:
        jobs = ranks_of(sessions, gang)
        run(jobs, 0)
        made[1].stop(signal.SIGKILL)
        jobs[0].post(struct.pack(f"{COUNT}d", *values(0, 1)))
        end = ended(jobs[0])
        assert (end.code, "rank 1 is gone" in end.message) == ("peers_lost", True)
        jobs[1].data.release()


# ---- what is refused


GANG = Gang("ab" * 16, 0, 2, "127.0.0.1:29500")


def opening(gang: Gang) -> msg.OpenGangJob:
    return msg.OpenGangJob(
        5, JOB, "x", 0, 1.0, 1.1, None, 2, 0, 1, gang.id, gang.rank, gang.ranks, gang.store, gang.timeout_s
    )


def test_a_device_without_process_groups_takes_no_gang():
    daemon = Daemon()
    refusal = only(daemon.say(daemon.connect("s"), opening(GANG)))
    daemon.close()
    assert (refusal.code, "not proven" in refusal.message) == ("refused", True)


def test_a_store_on_another_machine_needs_a_setting_that_the_error_names(daemon):
    away = replace(GANG, store="10.1.2.3:29500")
    with Session.connect(daemon.endpoint, SOON_S) as session:
        with pytest.raises(AccessDenied, match=r"stores in \[gangs\]"):
            session.call(opening(away))
        with pytest.raises(Refused, match="rank 2 of 2"):
            session.call(opening(replace(GANG, rank=2)))
        LiveJob(session, samples.add_one()).close()  # the session goes on
