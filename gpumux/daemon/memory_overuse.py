"""Finds jobs that hold more memory than their Programs declare, which is what they were admitted with.

Devices report what a job really holds if they can measure it (`MemoryFigures.measured`). A job's process also holds
memory that its Programs don't declare (graphs, a library's scratch memory, gaps in the heap), hence the slack.
"""

from __future__ import annotations

from collections.abc import Callable

from gpumux.daemon.context import DaemonContext, log
from gpumux.types import JobId

EVERY_S = 5.0
SLACK = 1.10
SLACK_BYTES = 128 << 20


class MemoryOveruseCheck:
    """Logs each such job once. Call `check` when it is `due`, on the loop's clock."""

    def __init__(self, context: DaemonContext, clock: Callable[[], float]) -> None:
        self._context = context
        self.due = clock() + EVERY_S
        self._named: set[JobId] = set()

    def check(self, now: float) -> None:
        """Log jobs that hold more than they are charged, and were not logged before. Does nothing before `due`."""
        if now < self.due:
            return
        self.due = now + EVERY_S
        figures = self._context.device.memory()
        if not any(figures.measured.values()):
            return
        jobs = self._context.records.jobs
        self._named &= jobs.keys()
        declared = {job["job"]: int(job["memory"]["total"]) for job in self._context.scheduler.snapshot()["jobs"]}
        for job, measured in figures.measured.items():
            charged = declared.get(job, 0)
            if job in self._named or job not in jobs or measured <= charged * SLACK + SLACK_BYTES:
                continue
            self._named.add(job)
            self._context.metrics.outgrown.inc()
            log.warning(
                "job %s: %r holds %d bytes in a step, and its Programs declare %d: it is charged what it holds from "
                "now on; leave room for that on this machine",
                jobs[job].short,
                jobs[job].spec.name,
                measured,
                charged,
            )
