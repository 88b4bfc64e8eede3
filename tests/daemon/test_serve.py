"""Start-up, the command line against a live daemon, TCP with keys, service managers, exit codes."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack, closing
from dataclasses import fields
from functools import partial
from pathlib import Path

import pytest

from gpumux.cli.main import main
from gpumux.client.session import Session
from gpumux.config import Config
from gpumux.daemon import main as serve
from gpumux.daemon.snapshots.writer import DirectoryLock
from gpumux.daemon.state.directory import open_state_directory
from gpumux.errors import ConfigError
from gpumux.program import codec
from gpumux.wire import messages as msg
from gpumux.wire.peers import ClientCurve, make_keys
from tests.program import samples

from .live import SOON_S, LiveJob, floats, serving

JOB = "d" * 32


def test_a_state_directory_that_can_not_be_made_is_a_configuration_error(tmp_path):
    (tmp_path / "file").write_text("")
    code = serve.run(Config(state_dir=str(tmp_path / "file"), endpoint=(f"ipc://{tmp_path}/s",)))
    assert code == serve.EX_CONFIG


def test_a_bug_in_the_loop_ends_the_daemon_loudly(monkeypatch, caplog):
    def broken(*args):
        raise RuntimeError("a bug")

    monkeypatch.setattr(serve, "serve", broken)
    assert serve.run(Config()) == serve.EX_SOFTWARE
    assert "a bug" in caplog.text


def test_signals_stop_once_and_are_put_back():
    before = signal.getsignal(signal.SIGTERM)
    asked = []
    with serve.stop_signals(asked.append):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    assert asked == ["the daemon got SIGTERM", "the daemon got SIGTERM", "the daemon got SIGINT"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_after_the_last_run_of_a_process_signals_are_ignored():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with serve.stop_signals(lambda why: None, signal.SIG_IGN):
            pass
        assert {signal.getsignal(number) for number in before} == {signal.SIG_IGN}
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_metrics_port_that_is_taken_may_be_free_soon(runtime_dir):
    """So a service manager tries again."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = subprocess.run(
            [sys.executable, "-m", "gpumux.cli.main", "serve", "--device", "cpu", "--endpoint",
             f"ipc://{runtime_dir}/g.sock", "--metrics-port", str(taken.getsockname()[1])],
            capture_output=True, text=True, timeout=SOON_S,
        )  # fmt: skip
    assert done.returncode == serve.EX_TEMPFAIL
    assert "--metrics-port" in done.stderr


@pytest.mark.parametrize("taken", ["port", "state directory"])
def test_what_another_daemon_has_is_noticed_before_the_device_is_opened(
    taken, runtime_dir, tmp_path, monkeypatch, caplog
):
    """Which takes seconds."""

    def opened(*args):
        raise AssertionError("it opened the device first")

    monkeypatch.setattr(serve, "open_device", opened)
    monkeypatch.setattr(serve, "DirectoryLock", partial(DirectoryLock, wait_s=0.0))
    with ExitStack() as other:
        port = -1
        if taken == "port":
            port = other.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
        else:
            state = open_state_directory(tmp_path)
            other.callback(os.close, state)
            other.enter_context(closing(DirectoryLock(tmp_path / "snapshots", state)))
        config = Config(state_dir=str(tmp_path), endpoint=(f"ipc://{runtime_dir}/g.sock",), metrics_port=port)
        assert serve.run(config) == serve.EX_TEMPFAIL
    assert ("--metrics-port" if taken == "port" else "state_dir of its own") in caplog.text


@pytest.fixture
def notified(runtime_dir):
    """What a service manager hears, and its address; an abstract name needs no file. It is read all the time: the
    kernel keeps a few messages only."""
    heard: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        name = f"gpumux-test-{os.getpid()}"
        sock.bind("\0" + name)

        def listen():
            while message := sock.recv(1000):
                heard.put(message)

        thread = threading.Thread(target=listen)
        thread.start()
        yield heard, "@" + name
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
            end.sendto(b"", "\0" + name)
        thread.join(SOON_S)


def test_over_tcp_with_keys_for_a_service_manager_and_for_operators(
    runtime_dir, tmp_path, monkeypatch, capsys, notified
):
    """One daemon for all of these: starting one takes seconds."""
    manager, address = notified
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    monkeypatch.setenv("WATCHDOG_USEC", "1000000")
    public, secret = make_keys(tmp_path / "server", "daemon")
    clients = tmp_path / "clients"
    _, our_secret = make_keys(clients, "me")
    file = tmp_path / "gpumux.toml"
    file.write_text(
        f"[access]\ncurve_secret_key = '{secret}'\ncurve_client_keys = '{clients}'\n"
        f"[daemon]\nstate_dir = '{tmp_path}/state'\n"
    )
    with serving(runtime_dir, "--endpoint", "tcp://127.0.0.1:*", "--config", str(file)) as daemon:
        ready, status = manager.get(timeout=SOON_S).split(b"\n")
        assert ready == b"READY=1"
        assert re.fullmatch(rb"STATUS=serves .+ at ipc://.+", status)
        assert manager.get(timeout=SOON_S) == b"WATCHDOG=1"
        assert (tmp_path / "state" / "crash.log").stat().st_mode & 0o777 == 0o600
        monkeypatch.delenv("NOTIFY_SOCKET")
        tcp = re.search(r"tcp://127\.0\.0\.1:\d+", daemon.until(" serves "))
        check_inline_steps(tcp[0], ClientCurve(our_secret, public))
        check_operators_verbs(daemon, capsys)
    assert daemon.process.returncode == 0
    while (said := manager.get(timeout=SOON_S)) == b"WATCHDOG=1":
        pass
    assert said == b"STOPPING=1\nSTATUS=leaving: the daemon got SIGTERM"


def check_inline_steps(endpoint, curve):
    with Session.connect(endpoint, SOON_S, curve=curve) as session:
        heard = []
        session.register(JOB, lambda message, frames: heard.append((message, frames)))
        session.call(msg.OpenJob(0, JOB, "inline", 0, 1.0, 1.1, None, 2, 0))
        loaded, _ = session.call(msg.LoadProgram(0, JOB, 0, [4], []), [codec.encode(samples.add_one())])
        assert loaded.segment == 0
        session.post(msg.Step(JOB, 1, 0, 1, [], 1), [floats(1, 2, 3, 4)])
        assert session.wait(lambda: bool(heard), SOON_S)
        ((done, frames),) = heard
        assert (done.frames, frames) == (1, [floats(2, 3, 4, 5)])
        session.call(msg.OpenTransfer(0, JOB, 1, [0], True))
        session.post(msg.FillTransfer(0, JOB, 1, 1), [b"1234".ljust(64, b"\0")])
        session.call(msg.OpenTransfer(0, JOB, 2, [0], False))
        assert session.wait(lambda: len(heard) == 3, SOON_S)
        assert heard[2][1][0][:4] == b"1234"
        session.call(msg.CloseJob(0, JOB, True))
        # One that only its session's end closed would be listed until its executor has died.
        assert session.wait(lambda: isinstance(heard[-1][0], msg.JobEnded), SOON_S)


def check_operators_verbs(daemon, capsys):
    flags = ["--endpoint", daemon.endpoint, "--timeout", str(SOON_S)]
    with Session.connect(daemon.endpoint, SOON_S) as session:
        job = LiveJob(session, samples.add_one(), name="operated", priority=1)
        assert main(["status", *flags]) == 0
        assert "operated" in capsys.readouterr().out
        assert main(["jobs", "pause", "operated", *flags]) == 0
        assert "paused" in capsys.readouterr().out
        assert main(["jobs", "--json", *flags]) == 0
        (listed,) = json.loads(capsys.readouterr().out)
        assert (listed["state"], listed["priority"], listed["job"]) == ("paused", "high", job.id)
        assert main(["jobs", "resume", listed["short"], *flags]) == 0
        assert main(["jobs", "stop", job.id[:8], *flags]) == 0
        assert session.wait(lambda: bool(job.ended), SOON_S)
        assert (job.ended[0].code, f"user {os.getuid()} stopped the job" in job.ended[0].message) == ("", True)
        assert main(["jobs", "pause", "operated", *flags]) == 1
        capsys.readouterr()
        assert main(["doctor", *flags]) in (0, 1)
        assert daemon.endpoint in capsys.readouterr().out
        job.data.release()


def test_keys_are_needed_for_tcp():
    from gpumux.config import load

    with pytest.raises(ConfigError, match="CURVE"):
        load({"endpoint": ["tcp://127.0.0.1:1"]}, {})


def test_remedies_name_settings_that_exist():
    """What a refusal tells an operator to raise can be raised."""
    source = Path(serve.__file__).parents[1]
    text = "".join(
        path.read_text()
        for part in ("scheduler", "daemon", "wire", "device")
        for path in source.glob(f"{part}/**/*.py")
    )
    named = set(re.findall(r"(?:raise|larger) (max_\w+)", text))
    named |= set(re.findall(r'_limited\(.*"(max_\w+)"\)', text))
    assert "max_jobs_per_user" in named
    assert named <= {field.name for field in fields(Config)}


@pytest.mark.parametrize(("confine", "calls"), [("auto", [False]), ("off", [])])
def test_a_daemon_cannot_be_looked_into_by_its_jobs(confine: str, calls: list[bool], monkeypatch: pytest.MonkeyPatch):
    """Where its jobs run as its own user, they could do as the daemon."""
    found: list[bool] = []
    monkeypatch.setattr(serve.confinement, "may_be_looked_into", found.append)
    with ExitStack() as stack:
        serve.open_device(Config(device="sim", confine=confine), stack)
    assert found == calls
