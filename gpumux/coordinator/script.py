"""A user's script as a child process beside its daemon: its output, signals to it, and how it ended.

It runs on the machine of this process. `ray/script_actor.py` has it run in an actor of another node.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final, NamedTuple, Protocol

from gpumux.client.placed.handover import ENVIRONMENT
from gpumux.errors import ConfigError

READ_S: Final = 2.0  # how long `read` waits for output
MOST_PENDING: Final = 2**20  # bytes of output that were not read: more has the script wait, as a slow terminal does
LAST_S: Final = 1.0  # for the last output, where a process that the script left behind has its pipes, too
STDOUT: Final = 1
STDERR: Final = 2
# Has the program get SIGTERM when the process that started it ends in any way (PR_SET_PDEATHSIG is 1, and survives
# exec), and SIGINT, which processes of Ray have blocked.
_LAUNCHER: Final = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT, signal.SIGTERM])
if os.getppid() != int(sys.argv[1]):
    sys.exit("the starter is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""


def bound_to_this_process(words: Sequence[str]) -> list[str]:
    """The command line that runs `words` (the first is a path) and ends it by SIGTERM when this process ends. The
    thread that starts it must live as long as it does: its end would send the signal, too."""
    return [sys.executable, "-P", "-c", _LAUNCHER, str(os.getpid()), *words]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptCommand:
    """What to run: `python script *arguments` in `directory`, with these variables besides those of the process that
    starts it. python: a path, or a name on that machine's PATH; "" for the interpreter of that process. handover:
    the text of the file of devices that are held for it. uid: the only user as which it may run; None: any."""

    script: str
    arguments: tuple[str, ...] = ()
    directory: str = ""
    python: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    handover: str = "{}"
    uid: int | None = None


class ScriptOutput(NamedTuple):
    """What came since the last time: pieces of STDOUT and STDERR. status: how the script ended, None while it runs: its
    exit status, or less than 0 for the signal. taken: whether it took the devices that were held for it."""

    pieces: list[tuple[int, bytes]]
    status: int | None
    taken: bool


class RunningScript(Protocol):
    """A script that was started. Any thread may call `signal` while another one reads."""

    def read(self) -> ScriptOutput:
        """Wait for output or the end, for READ_S seconds at most."""
        ...

    def signal(self, number: int) -> None:
        """Send a signal to the script, and to the processes that it started."""
        ...

    def close(self) -> None:
        """Kill it if it still runs."""
        ...


class ScriptProcess:
    """A RunningScript that is a child of this process, and is sent SIGTERM when this process ends. Raises ConfigError
    if there is no such file, directory or interpreter."""

    def __init__(self, command: ScriptCommand) -> None:
        directory = command.directory or os.getcwd()
        words = [*_checked(command, directory), command.script, *command.arguments]
        self._place = Path(tempfile.mkdtemp(prefix="gpumux-run-"))
        self._handover = self._place / "job.json"
        self._handover.write_text(command.handover)
        self._environment = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",  # lines come when they are printed
            ENVIRONMENT: str(self._handover),
            **command.environment,
        }
        self._changed = threading.Condition()
        self._pieces: list[tuple[int, bytes]] = []
        self._pending = self._copied = 0  # bytes that wait to be read, and all
        self._status: int | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._error: OSError | None = None
        threading.Thread(target=self._run, args=(words, directory), name="gpumux-script", daemon=True).start()
        with self._changed:
            self._changed.wait_for(lambda: self._child is not None or self._error is not None)
        if self._error is not None:
            shutil.rmtree(self._place, ignore_errors=True)
            raise ConfigError(f"the script can't be started: {self._error}", "look at the node's limits") from None

    def read(self) -> ScriptOutput:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._pieces) or self._status is not None, READ_S)
            pieces, self._pieces, self._pending = self._pieces, [], 0
            self._changed.notify_all()
            return ScriptOutput(pieces, self._status, not self._handover.exists())

    def signal(self, number: int) -> None:
        assert self._child is not None
        if self._child.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._child.pid, number)

    def close(self) -> None:
        self.signal(signal.SIGKILL)
        shutil.rmtree(self._place, ignore_errors=True)

    def _run(self, words: Sequence[str], directory: str) -> None:
        try:
            child = subprocess.Popen(
                bound_to_this_process(words), cwd=directory, env=self._environment, process_group=0,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip
        except OSError as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
            return
        assert child.stdout is not None
        assert child.stderr is not None
        pipes = ((STDOUT, child.stdout), (STDERR, child.stderr))
        readers = [threading.Thread(target=self._copy, args=pipe, daemon=True) for pipe in pipes]
        for reader in readers:
            reader.start()
        with self._changed:
            self._child = child
            self._changed.notify_all()
        status = child.wait()
        for reader in readers:
            while reader.is_alive():
                before = self._copied
                reader.join(LAST_S)
                if self._copied == before and self._pending < MOST_PENDING:
                    break
        with self._changed:
            self._status = status
            self._changed.notify_all()

    def _copy(self, stream: int, pipe: IO[bytes]) -> None:
        with pipe:
            while data := os.read(pipe.fileno(), 2**16):
                with self._changed:
                    self._changed.wait_for(lambda: self._pending < MOST_PENDING)
                    self._pieces.append((stream, data))
                    self._pending += len(data)
                    self._copied += len(data)
                    self._changed.notify_all()


def _checked(command: ScriptCommand, directory: str) -> list[str]:
    """The interpreter's path. Raises ConfigError."""
    if command.uid is not None and os.getuid() != command.uid:
        raise ConfigError(
            f"the script would run as user {os.getuid()}, as Ray does on the node, and the devices are held for a job"
            f" of user {command.uid}",
            "run this as Ray's user, or start the script on the node by yourself (docs/cluster.md, A script beside its"
            " daemon)",
        )
    shared = "give a directory that the node has, too, by --cwd, or have this one copied there: --ship"
    if not os.path.isdir(directory):
        raise ConfigError(f"the node has no directory {directory}", shared)
    if not os.path.isfile(os.path.join(directory, command.script)):
        raise ConfigError(f"the node has no file {command.script} in {directory}", shared)
    python = shutil.which(command.python or sys.executable)
    if python is None:
        raise ConfigError(f"the node has no interpreter {command.python}", "name one that it has by --python")
    return [python]
