"""Signals to stop, at odd moments and several at once: a daemon that has begun always cleans up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from gpumux.daemon import main as serve

from .live import SOON_S, serving

APART_S = 0.002  # two signals so close that the second one meets a daemon that is stopping


def files(path):
    return sorted(p.name for p in path.iterdir() if p.suffix != ".lock")


@pytest.mark.every(2)
# The CPU's device takes seconds to open and has processes of its own to end, the simulated one does not.
@pytest.mark.parametrize(
    ("device", "first", "second"),
    [
        ("cpu", signal.SIGTERM, signal.SIGINT),
        ("sim", signal.SIGINT, signal.SIGTERM),
        ("cpu", signal.SIGINT, signal.SIGINT),
        ("sim", signal.SIGTERM, signal.SIGTERM),
    ],
    ids=["cpu-SIGTERM-SIGINT", "sim-SIGINT-SIGTERM", "cpu-SIGINT-SIGINT", "sim-SIGTERM-SIGTERM"],
)
def test_two_signals_stop_a_daemon_as_one_does(runtime_dir, device, first, second):
    with serving(runtime_dir, "--device", device) as daemon:
        daemon.process.send_signal(first)
        time.sleep(APART_S)
        daemon.process.send_signal(second)
        assert daemon.process.wait(SOON_S) == 0, daemon.log
        daemon.stop()
        assert "Traceback" not in daemon.log
    assert files(runtime_dir) == []


@pytest.mark.every(2)
@pytest.mark.parametrize(("device", "until"), [("sim", "stop"), ("cpu", "exit")])
def test_signals_all_the_way_through_a_shutdown(runtime_dir, device, until):
    """One every few milliseconds until the process is gone, or until it says it has stopped."""
    with serving(runtime_dir, "--device", device) as daemon:
        while daemon.process.poll() is None:
            daemon.process.send_signal(signal.SIGTERM)
            if until == "stop" and "stopped:" in daemon.log:
                break
            time.sleep(APART_S)
        assert daemon.process.wait(SOON_S) == 0, daemon.log
        daemon.stop()
    assert files(runtime_dir) == []


@pytest.mark.every(2)
@pytest.mark.parametrize("seconds", [0.3, 0.9, 1.6, 2.5])
def test_a_signal_while_starting_leaves_nothing(runtime_dir, seconds):
    """Wherever in its start-up the daemon is by then; before it opens anything, the signal's own
    default may end it."""
    command = [sys.executable, "-m", "gpumux.cli.main", "serve", "--device", "cpu", "--threads", "1"]
    process = subprocess.Popen(
        [*command, "--endpoint", f"ipc://{runtime_dir}/g.sock", "--metrics-port", "0"],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    time.sleep(seconds)
    process.terminate()
    _, said = process.communicate(timeout=SOON_S)
    assert process.returncode == 0 or (process.returncode == -signal.SIGTERM and said == "")
    assert "Traceback" not in said
    assert files(runtime_dir) == []


def test_a_signal_between_two_steps_of_starting_ends_it_there(runtime_dir, monkeypatch, caplog):
    """At a moment that is exact: the sockets are open, the device is not."""

    def opening(config, stack):
        assert files(runtime_dir) != []
        os.kill(os.getpid(), signal.SIGTERM)
        return serve.OpenDevice(Nothing())

    class Nothing:
        def open(self):
            return None

    monkeypatch.setattr(serve, "open_device", opening)
    with caplog.at_level("INFO"):
        assert serve.run(serve.Config(endpoint=(f"ipc://{runtime_dir}/g.sock",), metrics_port=-1)) == serve.EX_OK
    assert "stopped while starting: the daemon got SIGTERM" in caplog.text
    assert files(runtime_dir) == []
