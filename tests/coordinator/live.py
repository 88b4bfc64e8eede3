"""A coordinator in a process of its own, as `gpumux cluster up` starts it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gpumux.cli.control import Control
from gpumux.errors import GpumuxError
from microbench.daemon import GPUMUX

END_S = 30.0


class RunningCoordinator:
    """Starts when it is made, and answers from then on. `start` again after `kill`."""

    def __init__(
        self, daemons: Sequence[str], directory: Path, *, state: bool = True, flags: Sequence[str] = ()
    ) -> None:
        self.endpoint = f"ipc://{directory}/c/gpumux.sock"
        self.log = directory / "coordinator.log"
        keep = ["--state-dir", str(directory / "state")] if state else []
        self._command = [*GPUMUX, "cluster", "up", *daemons, "--endpoint", self.endpoint, *keep, *flags]
        self.start()

    def start(self) -> None:
        with open(self.log, "ab") as out:
            self.process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, process_group=0
            )
        while not self._answers():
            assert self.process.poll() is None, self.log.read_text()
            with tempfile.TemporaryFile():  # lets the other process run
                os.sched_yield()

    def _answers(self) -> bool:
        try:
            with Control(self.endpoint, 2.0, coordinator=True):
                return True
        except GpumuxError:
            return False

    @property
    def metrics(self) -> str:
        """host:port of its metrics, for one that has --metrics-port."""
        return re.findall(r"metrics at http://(\S+)/metrics", self.log.read_text())[-1]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(END_S)

    def stop(self) -> int:
        """Ask it to end; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(END_S)
