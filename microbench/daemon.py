"""A gpumux daemon of one's own, for as long as a `with` block: benchmarks, the demo and tests.

with running_daemon(policy="fifo", threads=1) as daemon:
    client.submit(..., endpoint=daemon.endpoint)
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpumux.cli.control import Control
from gpumux.cli.jobs import find
from gpumux.errors import GpumuxError

GPUMUX = (sys.executable, "-m", "gpumux.cli.main")
START_S = 180.0  # the warm executor imports torch, which a cold disk makes slow
STOP_S = 60.0
# Runs before the daemon, in its process: it keeps to the cores it was given, and gets SIGTERM when
# the process that started it ends in any way (PR_SET_PDEATHSIG is 1, and survives exec).
LAUNCHER = """
import ctypes, os, signal, sys
parent, cores, *command = sys.argv[1:]
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(parent):
    sys.exit("the starter is gone")
if cores:
    os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
os.execv(command[0], command)
"""


class DaemonFailed(RuntimeError):
    """The daemon did not start, or did not stop as asked. Carries what it said on stderr."""


@dataclass(frozen=True)
class RunningDaemon:
    endpoint: str
    process: subprocess.Popen[bytes]
    directory: Path
    log: Path

    def status(self, timeout_s: float = 60.0) -> dict[str, Any]:
        """What `gpumux status --json` says. Raises DaemonFailed when there is no answer."""
        try:
            with Control(self.endpoint, timeout_s) as control:
                return control.status()
        except GpumuxError as error:
            raise DaemonFailed(f"gpumux status failed: {error}") from error

    def change(self, verb: str, name: str, timeout_s: float = 60.0) -> None:
        """What `gpumux jobs VERB NAME` does; `verb` is pause, resume or stop. Raises GpumuxError."""
        with Control(self.endpoint, timeout_s) as control:
            control.change(verb, find(control.status()["jobs"], name)["job"])


@contextmanager
def running_daemon(
    *,
    policy: str = "paced",
    threads: int = 1,
    device: str = "cpu",
    directory: Path | None = None,
    cores: Collection[int] = (),
    flags: Sequence[str] = (),
    settings: Mapping[str, str] | None = None,
) -> Iterator[RunningDaemon]:
    """Start `gpumux serve`, yield it once it answers, stop it with SIGTERM.

    `cores`: those it and its executors may use (default: all that we may). `directory`: where its sockets go (default:
    a new short one, removed at the end). `settings`: variables of its environment. On leaving, a daemon that needs
    killing, or ends with another status than 0, raises DaemonFailed; one that the block itself has ended (a test that
    kills it) is left alone.
    """
    own = directory is None
    where = Path(tempfile.mkdtemp(prefix="gm-")) if directory is None else directory
    descriptor, name = tempfile.mkstemp(prefix="gm-", suffix=".log")
    log = Path(name)
    endpoint = f"ipc://{where}/gpumux.sock"
    command = [sys.executable, "-c", LAUNCHER, str(os.getpid()), ",".join(map(str, cores)), *GPUMUX]
    command += ["serve", "--device", device, "--threads", str(threads), "--policy", policy]
    command += ["--endpoint", endpoint, "--metrics-port", "0", *flags]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GPUMUX_")}
    environment |= settings or {}
    try:
        with os.fdopen(descriptor, "wb") as out:
            # A group of its own: Ctrl-C at the terminal reaches us, and we end the daemon in order.
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment, process_group=0
            )
        daemon = RunningDaemon(endpoint, process, where, log)
        try:
            _wait_until_ready(daemon)
            yield daemon
        finally:
            _stop(daemon)
    finally:
        log.unlink()
        if own:
            shutil.rmtree(where, ignore_errors=True)


def _answers(endpoint: str) -> bool:
    """It listens early and answers once its device is open, so this mostly waits; a process to ask would take its
    core."""
    try:
        Control(endpoint, timeout=2.0).close()
    except GpumuxError:
        return False
    return True


def _wait_until_ready(daemon: RunningDaemon) -> None:
    end = time.monotonic() + START_S
    while not _answers(daemon.endpoint):
        if daemon.process.poll() is not None:
            raise DaemonFailed(f"gpumux serve ended with {daemon.process.returncode}:\n{daemon.log.read_text()}")
        if time.monotonic() > end:
            raise DaemonFailed(f"gpumux serve did not answer within {START_S:.0f} s:\n{daemon.log.read_text()}")
        time.sleep(0.05)


def _stop(daemon: RunningDaemon) -> None:
    if daemon.process.poll() is not None:
        return
    daemon.process.send_signal(signal.SIGTERM)
    try:
        status = daemon.process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(daemon.process.pid, signal.SIGKILL)
        daemon.process.wait()
        raise DaemonFailed(f"gpumux serve did not stop within {STOP_S:.0f} s:\n{daemon.log.read_text()}") from None
    if status:
        raise DaemonFailed(f"gpumux serve ended with {status}:\n{daemon.log.read_text()}")
