"""A daemon that contradicts itself about a job: the job comes back with the same bits, others notice nothing."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from microbench.killed import conv_sgd, dropout_adam
from microbench.kills import Phoenix, submit
from tests.client.test_recovery import as_undisturbed, turns, until_saved

pytestmark = pytest.mark.usefixtures("one_thread")  # as the daemon here has
SEED = 11

# `gpumux` with bugs: at SIGUSR1 the scheduler loses track of the running step of "convolutions, SGD", or, at
# SIGUSR2, of that and of what all jobs are charged.
BUGGY = """
import signal, sys
from gpumux.cli.main import main
from gpumux.scheduler import scheduler
from gpumux.types import PieceDone

asked = []
piece_done = scheduler.HANDLERS[PieceDone]

def buggy(state, event):
    launches = {k: v for window in state.windows.by_class for k, v in window.launches.items()}
    launch = launches.get(event.launch)
    if asked and launch is not None and launch.job.spec.name == "convolutions, SGD":
        if asked.pop() == signal.SIGUSR2:
            state.ledger.used += 1
        launch.job.running.clear()
    return piece_done(state, event)

if __name__ == "__main__":
    scheduler.HANDLERS[PieceDone] = buggy
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, frame: asked.append(number))
    sys.exit(main())
"""


class Buggy(Phoenix):
    """A daemon of BUGGY."""

    def __init__(self, directory: Path) -> None:
        self._script = directory / "buggy.py"
        self._script.write_text(BUGGY)
        super().__init__(directory)

    def _start(self):
        self._command = [sys.executable, str(self._script), *self._command[self._command.index("serve") :]]
        return super()._start()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Buggy]:
    made = Buggy(tmp_path)
    try:
        made.wait_until_ready()
        yield made
        made.stop()
    finally:
        made.close()


@pytest.mark.every(2)
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_bug_about_a_job_changes_no_bit(daemon: Buggy, caplog: pytest.LogCaptureFixture, number: int):
    hit, other = submit(conv_sgd(SEED), daemon.endpoint), submit(dropout_adam(SEED), daemon.endpoint)
    for run in (hit, other):
        until_saved(run)
    pid = daemon.process.pid
    os.kill(pid, number)
    end = time.monotonic() + 120
    log = daemon.directory / "daemon.log"  # the whole of it: `said` is its end, which the line may have left again
    while "a bug, the daemon goes on" not in log.read_text(errors="replace"):
        turns(hit, 1)
        turns(other, 1)
        assert time.monotonic() < end
    for run in (hit, other):
        turns(run, 5)
    as_undisturbed(hit, conv_sgd)
    as_undisturbed(other, dropout_adam)
    back = [record.getMessage() for record in caplog.records if "It is back after" in record.getMessage()]
    assert [name for name in ("convolutions", "dropout") if any(name in line for line in back)] == (
        ["convolutions"] if number == signal.SIGUSR1 else ["convolutions", "dropout"]
    )
    assert daemon.process.poll() is None
    assert daemon.process.pid == pid
    report = (daemon.directory / "state" / "crash.log").read_text()
    assert "KeyError" in report
    for run in (hit, other):
        run.job.close()
