"""The daemon that benchmarks, the demo and tests start: it answers, and it always goes again."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from microbench.daemon import DaemonFailed, running_daemon


def test_it_answers_and_is_gone_afterwards(runtime_dir: Path):
    with running_daemon(policy="fifo", directory=runtime_dir) as daemon:
        status = daemon.status()
        assert status["daemon"]["pid"] == daemon.process.pid
        assert status["daemon"]["policy"] == "fifo"
        assert status["device"]["threads"] == 1
    assert daemon.process.returncode == 0
    assert not daemon.log.exists()


def test_it_keeps_to_its_cores():
    core = min(os.sched_getaffinity(0))
    with running_daemon(cores=[core]) as daemon:
        assert os.sched_getaffinity(daemon.process.pid) == {core}
        assert daemon.status()["device"]["parallel"] == 1


def test_a_daemon_that_does_not_start_says_why():
    with pytest.raises(DaemonFailed, match="no-such-flag"), running_daemon(flags=["--no-such-flag"]):
        pass


@pytest.mark.leaves_runtime_files
def test_one_that_the_block_killed_is_no_failure(runtime_dir: Path):
    with running_daemon(directory=runtime_dir) as daemon:
        daemon.process.kill()
        daemon.process.wait()
        with pytest.raises(DaemonFailed, match="gpumux status failed"):
            daemon.status(timeout_s=0.5)


STARTER = """
import signal, sys
from microbench.daemon import running_daemon
with running_daemon() as daemon:
    print(daemon.process.pid, daemon.directory, daemon.log, flush=True)
    signal.pause()
"""


def test_it_does_not_outlive_the_process_that_started_it():
    with subprocess.Popen([sys.executable, "-c", STARTER], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        pid, directory, log = starter.stdout.readline().split()
        watch = os.pidfd_open(int(pid))
        try:
            starter.send_signal(signal.SIGKILL)
            starter.wait()
            assert select.select([watch], [], [], 120.0)[0]  # a pidfd turns readable when its process has ended
        finally:
            os.close(watch)
    Path(log).unlink()
    assert not (Path(directory) / "gpumux.sock").exists()  # it stopped in order
    shutil.rmtree(directory)
