"""`gpumux` that checks the scheduler's invariants as it serves. A violation ends the daemon with exit code 70.

    SOAK_CHECKS=FILE SOAK_FILES=4096 python -m microbench.soaking.checked serve ...

A check visits every job, so a check after every event would take most of the time: checks take a fixed part of the
time. FILE gets {"events", "checks"} when the daemon ends. SOAK_FILES: how many descriptors the daemon may have.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

from gpumux.cli.main import main
from gpumux.daemon import loop
from gpumux.scheduler import events as ev
from gpumux.scheduler.config import SchedulerConfig
from gpumux.scheduler.events import Command
from gpumux.scheduler.scheduler import Scheduler

PART = 0.1  # of the time, for checks


class CheckedScheduler:
    """A core that checks its invariants after an event, whenever the checks so far took less than PART of the time. It
    has one, and is none, since a compiled class can't be derived from."""

    events = 0
    checks = 0
    _spent_s = 0.0
    _began = time.perf_counter()

    def __init__(self, config: SchedulerConfig) -> None:
        self._core = Scheduler(config)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def handle(self, event: ev.Event, now: float) -> list[Command]:
        commands = self._core.handle(event, now)
        CheckedScheduler.events += 1
        began = time.perf_counter()
        if CheckedScheduler._spent_s <= PART * (began - CheckedScheduler._began):
            self._core.check_invariants()
            CheckedScheduler.checks += 1
            CheckedScheduler._spent_s += time.perf_counter() - began
        return commands


def run() -> int:
    files = int(os.environ["SOAK_FILES"])
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    setattr(loop, "Scheduler", CheckedScheduler)  # noqa: B010 - a name the module does not export
    try:
        return main(sys.argv[1:])
    finally:
        found = {"events": CheckedScheduler.events, "checks": CheckedScheduler.checks}
        Path(os.environ["SOAK_CHECKS"]).write_text(json.dumps(found))


if __name__ == "__main__":
    sys.exit(run())
