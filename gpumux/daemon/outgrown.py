"""Jobs that take more memory than their Programs declare, and were admitted with: named once each.

Devices say what a job really holds where they can (`MemoryFigures.measured`). A job's process has things of its own
beside what its Programs declare (graphs, a library's scratch memory, gaps in the heap), hence the slack.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from gpumux.daemon.context import Desk, log
from gpumux.types import JobId

EVERY_S = 5.0
SLACK = 1.10
SLACK_BYTES = 128 << 20


class Outgrown:
    """`look` when it is `due`."""

    def __init__(self, desk: Desk, clock: Callable[[], float]) -> None:
        self._desk = desk
        self._due = clock() + EVERY_S
        self._named: set[JobId] = set()

    @property
    def due(self) -> float:
        """On the loop's clock; never while there are no jobs."""
        return self._due if self._desk.books.jobs else inf

    def look(self, now: float) -> None:
        """Name jobs that have outgrown their charge since the last look."""
        if now < self.due:
            return
        self._due = now + EVERY_S
        figures = self._desk.device.memory()
        if not any(figures.measured.values()):
            return
        jobs = self._desk.books.jobs
        self._named &= jobs.keys()
        declared = {job["job"]: int(job["memory"]["total"]) for job in self._desk.core.snapshot()["jobs"]}
        for job, measured in figures.measured.items():
            charged = declared.get(job, 0)
            if job in self._named or job not in jobs or measured <= charged * SLACK + SLACK_BYTES:
                continue
            self._named.add(job)
            self._desk.metrics.outgrown.inc()
            log.warning(
                "job %s: %r holds %d bytes in a step, and its Programs declare %d: it is charged what it holds from "
                "now on; leave room for that on this machine",
                jobs[job].short,
                jobs[job].spec.name,
                measured,
                charged,
            )
