"""`gpumux top` and `gpumux trace` on a real daemon under `guarded`, with an important and a background job."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gpumux.cli.control import Control
from gpumux.cli.main import main
from gpumux.client.session import Session
from tests.cli.tracks import check
from tests.program import samples

from .live import QUICK, SOON_S, LiveJob, floats, serving, slow

STEPS = 12
MOST_STEPS = 2000
LOW = slow(64, 8)
HIGH = slow(128, 40)  # takes longer than low work takes to arrive behind it
BATCH = floats(*[0.0] * 64 * 64)
HIGH_BATCH = floats(*[0.0] * 128 * 128)


@pytest.fixture(scope="module")
def daemon():
    path = Path(tempfile.mkdtemp(prefix="gmsee-"))
    with serving(path, "--policy", "guarded", "--log-level", "info") as daemon:
        yield daemon
    shutil.rmtree(path)


@pytest.fixture
def mortal():
    """One that a test ends."""
    path = Path(tempfile.mkdtemp(prefix="gmsee-"))
    with serving(path, "--log-level", "info", *QUICK) as daemon:
        yield daemon
    shutil.rmtree(path)


def until_logged(daemon, text, work, after=0):
    """Go on working until the daemon has said so, in a line but for the first so many."""
    for _ in range(1_000_000):
        if any(text in line for line in daemon.lines[after:]):
            return
        work()
    raise AssertionError(daemon.log)


def held_s(daemon, reason):
    """For how long low work was held for this reason, by the daemon's word."""
    with Control(daemon.endpoint, SOON_S) as control:
        return control.status()["guard"]["held_s"].get(reason, 0.0)


def recorder(daemon, path):
    command = [
        sys.executable,
        "-m",
        "gpumux",
        "trace",
        "-o",
        str(path),
        "--seconds",
        "600",
        "--endpoint",
        daemon.endpoint,
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_trace_of_two_jobs(daemon, tmp_path, capsys):
    path = tmp_path / "t.json"
    with Session.connect(daemon.endpoint, SOON_S) as mine, Session.connect(daemon.endpoint, SOON_S) as theirs:
        low = LiveJob(theirs, LOW, name="background")
        low.run(BATCH)
        said = len(daemon.lines)
        process = recorder(daemon, path)
        until_logged(daemon, "records what runs", lambda: low.run(BATCH), said)
        for _ in range(40):
            low.run(BATCH)
        high = LiveJob(mine, HIGH, priority=1, name="important")
        for number in range(
            MOST_STEPS
        ):  # the first are for calibration, and one now and then: low work that waits is held
            asked = high.post(HIGH_BATCH)
            behind = low.post(BATCH)
            high.wait(asked)
            low.wait(behind)
            if number + 1 >= STEPS and held_s(daemon, "calibration"):
                break
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=SOON_S)
        assert process.returncode == 0, err
        assert "ended early" in err
        assert str(path) in out
        assert (
            main(
                [
                    "top",
                    "--once",
                    "--json",
                    "--interval",
                    "0.05",
                    "--endpoint",
                    daemon.endpoint,
                    "--timeout",
                    str(SOON_S),
                ]
            )
            == 0
        )
        view = json.loads(capsys.readouterr().out)
        assert [(job["name"], job["priority"]) for job in view["jobs"]] == [
            ("important", "high"),
            ("background", "low"),
        ]
        for job in (high, low):
            job.data.release()
    content = json.loads(path.read_text())
    found = check(content)
    assert content["otherData"]["cut"].endswith("it was ended early")
    (name,) = [track for track in found if track.endswith("important (high)")]
    assert len({piece["args"]["step"] for piece in found[name]}) == high.steps >= STEPS
    (name,) = [track for track in found if track.endswith("background (low)")]
    pieces = found[name]
    assert len(pieces) >= 40 + STEPS
    assert {operator for piece in pieces for operator in piece["args"]["operators"]} == {"mm"}
    steps = [piece["args"]["step"] for piece in pieces]
    assert steps == sorted(steps)
    assert set(range(steps[0], steps[-1] + 1)) == set(steps), "a step is missing"
    (name,) = [track for track in found if track.endswith("background (low): held")]
    assert {span["name"] for span in found[name]} & {"held: calibration"}


def test_a_recorder_that_is_killed_leaves_nothing_behind(daemon, tmp_path):
    said = len(daemon.lines)
    process = recorder(daemon, tmp_path / "t.json")
    with Control(daemon.endpoint, SOON_S) as control:
        until_logged(daemon, "records what runs", control.status, said)
        process.kill()
        process.communicate(timeout=SOON_S)
        for _ in range(100_000):  # until the daemon has heard of it
            if control.status()["sessions"] == 1:
                break
            threading.Event().wait(0.002)
        assert control.record(0.01).reason == ""
    assert list(tmp_path.iterdir()) == []


def test_a_daemon_that_stops_leaves_what_was_recorded(mortal, tmp_path):
    path = tmp_path / "t.json"
    process = recorder(mortal, path)
    with Session.connect(mortal.endpoint, SOON_S) as session:
        job = LiveJob(session, samples.add_one())
        until_logged(mortal, "records what runs", lambda: job.run(floats(0, 1, 2, 3)))
        job.run(floats(0, 1, 2, 3))
        assert mortal.stop() == 0
        _, err = process.communicate(timeout=SOON_S)
        assert process.returncode == 0, err
        job.data.release()
    content = json.loads(path.read_text())
    assert "the daemon is leaving" in content["otherData"]["cut"]
    assert any(track.endswith("live (low)") for track in check(content))


@pytest.mark.leaves_runtime_files
def test_a_daemon_that_is_killed_leaves_what_it_had_sent(mortal, tmp_path):
    """And it is noticed long before the recording's 600 s are over."""
    path = tmp_path / "t.json"
    process = recorder(mortal, path)
    with Session.connect(mortal.endpoint, SOON_S) as session:
        job = LiveJob(session, samples.add_one())
        until_logged(mortal, "records what runs", lambda: job.run(floats(0, 1, 2, 3)))
        for _ in range(500):  # a part is sent every 400 records
            job.run(floats(0, 1, 2, 3))
        assert mortal.stop(signal.SIGKILL) == -signal.SIGKILL
        _, err = process.communicate(timeout=SOON_S)
        job.data.release()
    assert process.returncode == 0, err
    assert "shorter than asked: no daemon at" in err
    content = json.loads(path.read_text())
    assert "one that was killed" in content["otherData"]["cut"]
    assert any(track.endswith("live (low)") for track in check(content))


@pytest.mark.extended
def test_a_client_that_only_watches_is_not_taken_for_gone():
    """Both, a session each, go on for longer than the lease, and say nothing else meanwhile."""
    path = Path(tempfile.mkdtemp(prefix="gmsee-"))
    config = path / "g.toml"
    config.write_text(
        "[daemon]\nheartbeat_s = 0.2\nlease_s = 5.0\n"
    )  # on a busy machine a process may not run for a second or two
    with (
        serving(path, "--config", str(config), *QUICK) as daemon,
        Control(daemon.endpoint, SOON_S) as recording,
        Control(daemon.endpoint, SOON_S) as waiting,
        ThreadPoolExecutor(1) as beside,
    ):
        waited = beside.submit(waiting.wait, 6.0)
        assert recording.record(6.0).seconds >= 6.0
        assert not waited.result()
        assert waiting.status()["sessions"] == 2
        assert recording.status()["sessions"] == 2
    shutil.rmtree(path)
