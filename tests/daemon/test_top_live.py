"""`gpumux top` in a terminal of its own, on a real daemon: what it draws, keys, a daemon that is killed and comes back,
and that every way out restores the terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpumux.client.session import Session
from tests.program import samples

from .live import QUICK, SOON_S, LiveJob, floats, serving

LEAVE = b"\x1b[?1049l"  # the terminal's own screen comes back
CURSOR = b"\x1b[?25h"
_CODES = re.compile(rb"\x1b\[[0-9;?<>=]*[A-Za-z]|\x1b[=>]")


class Terminal:
    """A command in a terminal of 100 by 30, and all that it wrote."""

    def __init__(self, *flags):
        self.master, self.slave = pty.openpty()
        self.before = termios.tcgetattr(self.slave)
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("4H", 30, 100, 0, 0))
        environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
        command = [sys.executable, "-m", "gpumux.cli.main", "top", "--interval", "0.1", *flags]
        self.process = subprocess.Popen(
            command, stdin=self.slave, stdout=self.slave, stderr=self.slave, start_new_session=True,
            env=environment | {"TERM": "xterm-256color", "COLORTERM": "truecolor"},
        )  # fmt: skip
        self.written = b""

    def read(self):
        ready, _, _ = select.select([self.master], [], [], SOON_S)
        assert ready, self.text()
        self.written += os.read(self.master, 1 << 16)

    def text(self, after=0):
        """What was written, without codes."""
        return _CODES.sub(b"", self.written[after:]).decode(errors="replace")

    def until(self, text, after=0):
        """Wait until it has written the text, but for so many bytes."""
        end = time.monotonic() + SOON_S
        while text not in self.text(after):
            assert time.monotonic() < end, self.text(after)[-4000:]
            self.read()

    def type(self, keys):
        os.write(self.master, keys.encode())

    def end(self):
        """Its exit code, once it has ended; what it wrote is read meanwhile."""
        while self.process.poll() is None:
            if select.select([self.master], [], [], 0.05)[0]:
                self.written += os.read(self.master, 1 << 16)
        while select.select([self.master], [], [], 0)[0]:
            self.written += os.read(self.master, 1 << 16)
        return self.process.returncode

    def restored(self):
        return (
            termios.tcgetattr(self.slave) == self.before
            and self.written.rindex(LEAVE) > self.written.index(b"\x1b[?1049h")
            and CURSOR in self.written[self.written.rindex(LEAVE) - 200 :]
        )


@contextmanager
def terminal(daemon, *flags):
    made = Terminal("--endpoint", daemon.endpoint, *flags)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait()
        os.close(made.master)
        os.close(made.slave)


@contextmanager
def directory():
    path = Path(tempfile.mkdtemp(prefix="gmtop-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def daemon():
    with directory() as path, serving(path, *QUICK) as daemon:
        yield daemon


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "leave",
    [
        lambda shown: shown.type("q"),
        lambda shown: shown.type("\x03"),
        lambda shown: shown.process.send_signal(signal.SIGTERM),
        lambda shown: shown.process.send_signal(signal.SIGHUP),
    ],
    ids=["q", "ctrl-c", "SIGTERM", "SIGHUP"],
)
def test_every_way_out_restores_the_terminal(daemon, leave):
    with terminal(daemon) as shown:
        shown.until("NO JOBS")
        leave(shown)
        assert shown.end() == 0
        assert shown.restored()


def test_keys_reach_the_daemon(daemon):
    with Session.connect(daemon.endpoint, SOON_S) as session:
        job = LiveJob(session, samples.add_one(), name="background")
        job.run(floats(0, 1, 2, 3))
        with terminal(daemon) as shown:
            shown.until("background")
            shown.type("e")
            shown.until("s: all that is known")
            so_far = len(shown.written)
            shown.type("q")
            shown.until("PROMISE", so_far)  # the table is drawn again
            shown.type("p")
            shown.until("is paused")
            shown.type("P")
            shown.until("is high now")
            shown.type("q")
            assert shown.end() == 0
            assert shown.restored()
        job.data.release()


@pytest.mark.leaves_runtime_files
def test_a_daemon_that_is_killed_is_said_and_the_next_one_is_found():
    with directory() as path, serving(path, *QUICK) as first, terminal(first, "--timeout", "1") as shown:
        shown.until("NO JOBS")
        assert first.stop(signal.SIGKILL) == -signal.SIGKILL
        shown.until("NO ANSWER")
        shown.until("tried again every second")
        so_far = len(shown.written)
        with serving(path, *QUICK):
            shown.until("NO JOBS", so_far)
            shown.type("q")
            assert shown.end() == 0


def test_without_a_daemon_it_ends_as_every_command_does():
    with directory() as path:
        command = [sys.executable, "-m", "gpumux.cli.main", "top", "--endpoint", f"ipc://{path}/none.sock"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SOON_S)
        assert done.returncode == 1
        assert "start one with `gpumux serve`" in done.stderr
