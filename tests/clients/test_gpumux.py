"""The client programs through a real daemon: equal to their plain runs, bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from clients import compare, demo, digits_cnn, digits_gan, digits_inference, digits_transformer, promise
from clients.common import INTERRUPTED
from microbench import common
from microbench.daemon import RunningDaemon, running_daemon
from tests.clients.leaving import jobs_left


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(threads=1) as running:
        yield running


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run(program, tmp_path: Path, name: str, *flags: str) -> dict:
    out = tmp_path / f"{name}.json"
    files = ["--json", str(out), "--save", str(tmp_path / f"{name}.pt")]
    assert program.main(["--size", "tiny", *files, *flags]) == 0
    return json.loads(out.read_text())


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "program",
    [digits_cnn, pytest.param(digits_transformer, marks=pytest.mark.extended), digits_gan],
    ids=lambda p: p.__name__,
)
def test_equal_to_the_plain_run(program, daemon: RunningDaemon, tmp_path: Path):
    flags = ["--steps", "25"]
    ours = run(program, tmp_path, "gpumux", *flags, "--endpoint", daemon.endpoint)
    plain = run(program, tmp_path, "plain", *flags, "--plain")
    assert compare.compare(tmp_path / "gpumux.pt", tmp_path / "plain.pt") == []
    assert compare.compare(tmp_path / "gpumux.json", tmp_path / "plain.json") == []
    assert (ours["mode"], plain["mode"]) == ("gpumux", "plain")
    assert ours["device_s"] > 0
    assert jobs_left(daemon) == []


def test_inference_is_served(daemon: RunningDaemon, tmp_path: Path):
    flags = ["--steps", "30", "--priority", "high"]
    ours = run(digits_inference, tmp_path, "gpumux", *flags, "--endpoint", daemon.endpoint)
    plain = run(digits_inference, tmp_path, "plain", *flags, "--plain")
    assert ours["accuracy"] == plain["accuracy"]
    assert ours["sha256"] == plain["sha256"]
    assert ours["extra"]["latency_s"]["p99.9"] > 0
    assert jobs_left(daemon) == []


def test_scheduled_inference_is_served(daemon: RunningDaemon, tmp_path: Path):
    ours = run(digits_inference, tmp_path, "a", "--steps", "30", "--rate", "200", "--endpoint", daemon.endpoint)
    assert ours["steps"] == 30
    assert jobs_left(daemon) == []


def test_no_daemon_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert digits_cnn.main(["--size", "tiny", "--endpoint", f"ipc://{tmp_path}/none.sock"]) == 1
    assert "Traceback" not in (err := capsys.readouterr().err)
    assert "digits_cnn" in err or "none.sock" in err


def test_ctrl_c_closes_the_job(daemon: RunningDaemon):
    command = [sys.executable, "-u", "-m", "clients.digits_cnn", "--size", "tiny", "--epochs", "100000"]
    command += ["--endpoint", daemon.endpoint]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert "accuracy" in child.stdout.readline()
        assert [job["name"] for job in daemon.status()["jobs"]] == ["digits-cnn"]
        os.kill(child.pid, signal.SIGINT)
        _, err = child.communicate(timeout=120)
    assert child.returncode == INTERRUPTED
    assert err.strip().endswith("interrupted")
    assert "Traceback" not in err
    assert jobs_left(daemon) == []


@pytest.mark.extended
@pytest.mark.slow
def test_the_demo_shows_what_it_claims(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    guarded = promise.parts(quick=True)[1:]
    monkeypatch.setattr(promise, "parts", lambda quick: guarded)  # each takes a daemon and a process more
    status = demo.main(["--quick"])
    out, err = capfd.readouterr()
    assert status == 0, out + err
    assert "bit for bit" in out
    assert [line for line in out.splitlines() if line.startswith("priority: a step of the high job waited ")]
    assert [line for line in out.splitlines() if line.startswith("promised: at most 1.10 of the time alone; ")]


@pytest.mark.parametrize(("guarded", "said"), [(1.04, "kept"), (1.3, "not kept on this machine")])
def test_the_demo_says_whether_the_promise_was_kept(guarded: float, said: str):
    def found(slowdown: float) -> dict[str, object]:
        return {
            "alone_s": common.figure([0.010]), "shared_s": common.figure([0.010 * slowdown]),
            "slowdown": common.figure([slowdown]), "samples": {"low_steps_per_s": [0.0, 0.0, 1.5]},
        }  # fmt: skip

    measured = {"fifo": found(20.0), "guarded": found(guarded)}
    assert promise.verdict(measured).endswith(f"{guarded:.2f}: {said}")
    rows = [line.split() for line in promise.table(measured).splitlines()[1:]]
    assert [row[3:] for row in rows] == [["20.00", "0.5"], [f"{guarded:.2f}", "0.5"]]
    assert promise.complaints(measured) == []
    assert promise.complaints({"fifo": found(1.2), "guarded": found(1.3)})


@pytest.mark.parametrize(
    ("high", "low", "said"), [(0.1, 0.4, "the high job went first"), (0.4, 0.1, "the high job had no advantage")]
)
def test_the_demo_says_what_the_queue_times_show(tmp_path: Path, high: float, low: float, said: str):
    clients = demo.roster(quick=True)
    for client in clients:
        waited = high if client.priority == "high" else low
        client.json(tmp_path, "gpumux").write_text(json.dumps({"steps": 100, "queue_s": waited}))
    line = demo.waits(clients, tmp_path)
    assert "\n" not in line
    assert f"high job waited {10 * high:.2f} ms" in line
    assert f"low job {10 * low:.2f} ms" in line
    assert said in line


def test_the_demo_can_fail(tmp_path: Path):
    """Its checks find unequal results, learning that did not happen and jobs that did not meet."""
    clients = demo.roster(quick=True)
    for client, began in zip(clients, (0.0, 5.0), strict=True):
        for mode, value in (("gpumux", 1.0), ("plain", 2.0)):
            torch.save({"w": torch.tensor(value)}, client.saved(tmp_path, mode))
            outcome = {
                "client": client.name, "steps": 1, "sha256": mode, "losses": [], "accuracy": [0.1, 0.2],
                "began": began, "wall_s": 1.0,
            }  # fmt: skip
            client.json(tmp_path, mode).write_text(json.dumps(outcome))
    found = "\n".join(demo.complaints(clients, tmp_path))
    for words in ("digits_cnn: w: largest difference 1", "sha256", "rose by 0.100 only", "not run at the same time"):
        assert words in found


def test_a_client_that_fails_fails_the_demo():
    with pytest.raises(demo.DemoFailed, match="ended with status 3"):
        demo.run_together({"x": [sys.executable, "-c", "raise SystemExit(3)"]})
