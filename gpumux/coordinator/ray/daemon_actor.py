"""The actor that keeps a daemon running on a Ray node: `gpumux serve` is a child of its process.

When the daemon ends by itself, so does the actor's process, and Ray starts another: one mechanism restarts what has
failed, whether it was the daemon or the process around it. A daemon that can't be started as it is set up (exit status
78) is not started again.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

from gpumux.coordinator.script import bound_to_this_process
from gpumux.daemon.main import EX_CONFIG
from gpumux.wire.endpoint import parse

PAUSE_S: Final = 1.0  # before Ray starts another in the place of one that has ended
STOP_S: Final = 8.0  # for a daemon that is asked to end; `gpumux cluster down` waits for 15 s
WATCH_S: Final = 60.0
CALLS: Final = 16  # at a time: a `watch` of each coordinator of the last minute, workers that ask, and a `stop`
KEPT_LINES: Final = 5  # of the daemon's log, to be shown if it does not start


class DaemonActor:
    """`arguments`: of `gpumux serve`; `endpoints`: where it listens, the local one first."""

    def __init__(self, arguments: Sequence[str], endpoints: Sequence[str]) -> None:
        self._arguments = list(arguments)
        self._endpoints = list(endpoints)
        self._stopping = False
        self._ended = threading.Event()
        self._why = ""
        self._child: subprocess.Popen[str] | None = None
        # The thread that starts the child lives as long as the child: its end would send the signal, too.
        threading.Thread(target=self._run, name="gpumux-daemon", daemon=True).start()

    def endpoints(self) -> list[str]:
        return self._endpoints

    def watch(self) -> str:
        """Wait until the daemon has ended and is not started again, and say why; "" after WATCH_S while it runs. The
        wait is bounded, since a call whose coordinator was killed holds its thread till the end."""
        return self._why if self._ended.wait(WATCH_S) else ""

    def stop(self) -> None:
        """End the daemon, and remove the directory of its sockets."""
        self._stopping = True
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(signal.SIGTERM)
            if not self._ended.wait(STOP_S):
                self._child.kill()
                self._ended.wait()
        for endpoint in self._endpoints:
            path = parse(endpoint).path
            if path is not None:
                shutil.rmtree(path.parent, ignore_errors=True)

    def _run(self) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GPUMUX_")}
        self._child = subprocess.Popen(
            bound_to_this_process([sys.executable, "-m", "gpumux.cli.main", "serve", *self._arguments]),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace",
            env=environment, process_group=0,
        )  # fmt: skip
        last: deque[str] = deque(maxlen=KEPT_LINES)
        assert self._child.stderr is not None
        for line in self._child.stderr:
            sys.stderr.write(line)  # Ray keeps it, with its other logs of the node
            last.append(line.rstrip())
        status = self._child.wait()
        self._why = f"it ended with status {status}: " + " / ".join(last)
        if self._stopping or status == EX_CONFIG:
            self._ended.set()
            return
        time.sleep(PAUSE_S)
        os._exit(1)
