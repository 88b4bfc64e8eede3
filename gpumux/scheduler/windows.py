"""The mechanism below every policy: windows, ready jobs and active jobs of each class.

Policies look (`peek`, `fits`, `active`) and change nothing; the scheduler moves jobs and launches. Only the ready heaps
grow with the number of jobs, so an event costs O(log jobs).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from gpumux.scheduler.fair_queue import Order, ReadyQueue, make_queue
from gpumux.scheduler.jobs import Job, JobStep
from gpumux.types import LaunchId, Priority


class Limit(NamedTuple):
    """How much of a class may be outstanding: launches, and their predicted seconds."""

    launches: int
    seconds: float


class Outstanding:
    """One outstanding piece, launched at `at`. `limit`, `count_before` and `seconds_before` are the window's limit and
    content when it was launched; the invariants check them."""

    __slots__ = ("at", "count_before", "id", "job", "limit", "piece", "predicted", "seconds_before", "share", "step")

    def __init__(
        self, *, id: LaunchId, job: Job, step: JobStep, piece: int, predicted: float, at: float,  # noqa: A002
        limit: Limit, count_before: int, seconds_before: float, share: float,
    ) -> None:  # fmt: skip
        self.id, self.job, self.step, self.piece, self.predicted, self.at = id, job, step, piece, predicted, at
        self.limit, self.count_before, self.seconds_before, self.share = limit, count_before, seconds_before, share


@dataclass(slots=True, eq=False)
class Window:
    """What one class has outstanding on the device, oldest first."""

    launches: dict[LaunchId, Outstanding] = field(default_factory=dict)
    seconds: float = 0.0

    def fits(self, predicted: float, limit: Limit) -> bool:
        """Whether there is room. The first launch always fits: a piece longer than the window must run some time."""
        count = len(self.launches)
        return count < limit.launches and (count == 0 or self.seconds + predicted <= limit.seconds)


class Windows:
    """Windows and ready jobs of both classes. `by_class`, `ready` and `active_jobs` are indexed by Priority."""

    def __init__(self, order: Order) -> None:
        self.low, self.high = Window(), Window()
        self.by_class: tuple[Window, ...] = (self.low, self.high)
        self.low_ready, self.high_ready = make_queue(order), make_queue(order)
        self.ready: tuple[ReadyQueue, ...] = (self.low_ready, self.high_ready)
        self.active_jobs = [0 for _ in Priority]

    # ---- what policies read

    def peek(self, priority: Priority) -> Job | None:
        """The class's first ready job, or None."""
        return self.ready[priority].peek()

    def fits(self, job: Job, limit: Limit) -> bool:
        """Whether the next piece of this ready job has room in its class's window under `limit`."""
        window = self.by_class[job.priority]
        if not window.launches:
            return limit.launches > 0  # whatever it is predicted to take
        return window.fits(job.next_seconds(), limit)

    def active(self, priority: Priority) -> int:
        """Number of jobs of the class that have queued or outstanding work and are neither paused nor closing."""
        return self.active_jobs[priority]

    # ---- what the scheduler changes

    def update(self, job: Job) -> None:
        """Add the job to the ready queue or remove it, and count it as active or not. Called after every change to
        it."""
        blocked = job.blocked()
        active = not blocked or (blocked != "closing" and blocked != "paused" and job.busy())
        if active is not job.active:
            job.active = active
            self.active_jobs[job.priority] += 1 if active else -1
        if blocked:
            if job.ready_entry:
                self.ready[job.priority].remove(job)
        elif not job.ready_entry:
            self.ready[job.priority].add(job)

    def launch(
        self, launch_id: LaunchId, job: Job, step: JobStep, limit: Limit, share: float, now: float
    ) -> Outstanding:
        """Count the next piece of the job's next step as outstanding."""
        window = self.by_class[job.priority]
        predicted = step.pieces[step.launched]
        launch = Outstanding(
            id=launch_id, job=job, step=step, piece=step.launched, predicted=predicted, at=now, limit=limit,
            count_before=len(window.launches), seconds_before=window.seconds, share=share,
        )  # fmt: skip
        window.launches[launch_id] = launch
        window.seconds += predicted
        job.outstanding += 1
        self.ready[job.priority].charge(job, predicted)
        return launch

    def complete(self, launch_id: LaunchId, measured: float) -> Outstanding | None:
        """Remove a launch that ended on the device after `measured` seconds; None if it is not known."""
        for window in self.by_class:
            launch = window.launches.pop(launch_id, None)
            if launch is not None:
                # Sums of floats drift; an empty window holds exactly nothing.
                window.seconds = max(0.0, window.seconds - launch.predicted) if window.launches else 0.0
                job = launch.job
                job.outstanding -= 1
                self.ready[job.priority].settle(job, launch.predicted, measured)
                return launch
        return None

    def set_weight(self, job: Job, weight: float) -> None:
        """Give the job another weight. Launches that are out count by the new one, and what was served by the old."""
        self.ready[job.priority].remove(job)
        job.pending *= job.weight / weight
        job.weight = weight
        self.update(job)

    def set_priority(self, job: Job, priority: Priority) -> None:
        """Put the job into another class, level with the jobs there. None of its pieces may be out."""
        assert not job.outstanding, f"job {job.id} changes class with {job.outstanding} pieces out"
        self.ready[job.priority].purge(job)
        if job.active:
            self.active_jobs[job.priority] -= 1
            self.active_jobs[priority] += 1
        job.priority, job.served, job.pending = priority, 0.0, 0.0

    def drop_launches(self, job: Job) -> list[LaunchId]:
        """Remove all launches of a job of which the device holds nothing any more, and return their ids."""
        dropped: list[LaunchId] = []
        if job.outstanding:
            dropped = [launch.id for launch in self.by_class[job.priority].launches.values() if launch.job is job]
            for launch_id in dropped:
                self.complete(launch_id, 0.0)
        return dropped

    def remove_job(self, job: Job) -> list[LaunchId]:
        """Remove everything of the job, and return the ids of its launches."""
        dropped = self.drop_launches(job)
        self.ready[job.priority].purge(job)
        return dropped
