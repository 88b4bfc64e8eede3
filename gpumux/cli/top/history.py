"""How it was: the newest figures of a daemon's views, one of each look. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

SAMPLES = 300  # that are kept; wider charts than that there are none

Series = deque[float | None]  # None: not known at that look


def _series(values: Iterable[float | None] = ()) -> Series:
    return deque(values, SAMPLES)


class History:
    """Series of one length, the newest value last: `device` (device seconds a second), `queued` (steps) and, by the
    short ids of jobs that are there, `steps` (a second) and `slowdown` (of high jobs)."""

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self.device = _series()
        self.queued = _series()
        self.steps: dict[str, Series] = {}
        self.slowdown: dict[str, Series] = {}

    def add(self, view: dict[str, Any]) -> None:
        """Take the figures of one look; a job that is gone is forgotten."""
        before = len(self.device)
        jobs = {job["short"]: job for job in view["jobs"]}
        self.device.append(view["device"]["busy"] if view["seconds"] > 0.0 else None)
        self.queued.append(float(sum(job["queued"] for job in jobs.values())))
        high = {short: job for short, job in jobs.items() if job["priority"] == "high"}
        self.steps = _grown(self.steps, {short: job["steps_s"] for short, job in jobs.items()}, before)
        self.slowdown = _grown(self.slowdown, {short: job["slowdown"] for short, job in high.items()}, before)

    def gap(self) -> None:
        """There was no answer for a while."""
        for series in (self.device, self.queued, *self.steps.values(), *self.slowdown.values()):
            series.append(None)

    def forget_jobs(self) -> None:
        """Another daemon answers, whose short ids stand for other jobs."""
        self.steps, self.slowdown = {}, {}


def _grown(series: dict[str, Series], values: dict[str, float | None], before: int) -> dict[str, Series]:
    """The series of jobs that are there, with one value more; a new job's begins with `before` unknown ones."""
    found = {short: series.get(short) or _series([None] * before) for short in values}
    for short, value in values.items():
        found[short].append(value)
    return found
