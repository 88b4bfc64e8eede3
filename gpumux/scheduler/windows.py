"""The mechanism below every policy: windows, ready jobs and active jobs of each class.

Policies look (`first`, `fits`, `active`) and never touch; the machine moves jobs and launches.
Nothing here grows with the number of jobs but the ready heaps, so an event costs O(log jobs).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from gpumux.scheduler.fair_queue import Order, ReadyQueue, make_queue
from gpumux.scheduler.jobs import Job, PairKey, Step
from gpumux.types import LaunchId, Priority

if TYPE_CHECKING:
    from gpumux.scheduler.guard.costs import Cell, HighModel, Pair, Spot


class Limit(NamedTuple):
    """How much of a class may be outstanding: launches, and their predicted seconds."""

    launches: int
    seconds: float


UNKNOWN: Final = PairKey("", 1.0)


class Launch:
    """One outstanding piece, and the room there was when it was let out (for the invariants). What follows
    is the guard's: when it was launched, ran and should be over, what low work was expected to cost high
    work and was blamed for, in seconds, and who learns how fast it ran."""

    # One is made for every piece: what most of them leave as it is here is not set in each.
    key = UNKNOWN
    at = 0.0
    began = 0.0
    ended = 0.0
    latest = 0.0  # end of any low launch by the time this one's was heard of
    due = 0.0
    speed = 1.0
    expected = 0.0
    blamed = 0.0
    exposed = 1.0
    here = 0.0  # of that, in the high step that runs
    peak = 0.0
    beside_high = False
    alone = False
    caught = False
    tried = False
    trusting = False  # that idle high jobs come when they usually do
    overlap = 0.0  # seconds beside the high piece that ended last
    weight = 0.0  # what part of its excess is taken to be this one's, over what others' are
    spots: list[tuple[Pair, Spot]] | None = None
    gaps: list[HighModel] | None = None
    touched: list[Cell] | None = None

    def __init__(
        self, id: LaunchId, job: Job, step: Step, piece: int, predicted: float, limit: Limit, count_before: int,  # noqa: A002
        seconds_before: float, share: float = 1.0,
    ) -> None:  # fmt: skip
        self.id, self.job, self.step, self.piece, self.predicted, self.limit = id, job, step, piece, predicted, limit
        self.count_before, self.seconds_before, self.share = count_before, seconds_before, share


@dataclass(slots=True, eq=False)
class Window:
    """What one class has outstanding on the device, oldest first."""

    launches: dict[LaunchId, Launch] = field(default_factory=dict)
    seconds: float = 0.0

    def fits(self, predicted: float, limit: Limit) -> bool:
        """The first launch always fits: a piece longer than the window must run some time."""
        count = len(self.launches)
        return count < limit.launches and (count == 0 or self.seconds + predicted <= limit.seconds)


class Board:
    """Both classes' windows and jobs. Indexed by Priority."""

    def __init__(self, order: Order) -> None:
        self.low, self.high = Window(), Window()
        self.windows: tuple[Window, ...] = (self.low, self.high)
        self.low_ready, self.high_ready = make_queue(order), make_queue(order)
        self.ready: tuple[ReadyQueue, ...] = (self.low_ready, self.high_ready)
        self.active_jobs = [0 for _ in Priority]

    # ---- what policies see

    def first(self, priority: Priority) -> Job | None:
        """The class's ready job whose turn it is, or None."""
        return self.ready[priority].first()

    def fits(self, job: Job, limit: Limit) -> bool:
        """The next piece of this ready job has room in its class's window under `limit`."""
        window = self.windows[job.priority]
        if not window.launches:
            return limit.launches > 0  # whatever it is predicted to take
        return window.fits(job.next_seconds(), limit)

    def active(self, priority: Priority) -> int:
        """Jobs of the class with queued or outstanding work that are not paused or closing."""
        return self.active_jobs[priority]

    # ---- what the machine does

    def update(self, job: Job) -> None:
        """Put the job where its state says it belongs. After every change to it."""
        blocked = job.blocked()
        active = not blocked or (blocked != "closing" and blocked != "paused" and job.busy())
        if active is not job.active:
            job.active = active
            self.active_jobs[job.priority] += 1 if active else -1
        if blocked:
            if job.entry:
                self.ready[job.priority].leave(job)
        elif not job.entry:
            self.ready[job.priority].enter(job)

    def occupy(self, launch_id: LaunchId, job: Job, step: Step, limit: Limit, share: float = 1.0) -> Launch:
        """Let the next piece of the job's next step out."""
        window = self.windows[job.priority]
        predicted = step.pieces[step.launched]
        launch = Launch(
            launch_id, job, step, step.launched, predicted, limit, len(window.launches), window.seconds, share
        )  # fmt: skip
        window.launches[launch_id] = launch
        window.seconds += predicted
        job.outstanding += 1
        self.ready[job.priority].charge(job, predicted)
        return launch

    def vacate(self, launch_id: LaunchId, measured: float) -> Launch | None:
        """The launch is off the device after `measured` seconds; None if it is not known."""
        for window in self.windows:
            launch = window.launches.pop(launch_id, None)
            if launch is not None:
                # Sums of floats drift; an empty window holds nothing, exactly.
                window.seconds = max(0.0, window.seconds - launch.predicted) if window.launches else 0.0
                job = launch.job
                job.outstanding -= 1
                self.ready[job.priority].settle(job, launch.predicted, measured)
                return launch
        return None

    def reweigh(self, job: Job, weight: float) -> None:
        """Give the job another weight: what it had keeps the old one, what is out has the new."""
        self.ready[job.priority].leave(job)
        job.pending *= job.weight / weight
        job.weight = weight
        self.update(job)

    def move(self, job: Job, priority: Priority) -> None:
        """Put the job into another class, level with those that are there. Nothing of it may be out."""
        assert not job.outstanding, f"job {job.id} changes class with {job.outstanding} pieces out"
        self.ready[job.priority].forget(job)
        if job.active:
            self.active_jobs[job.priority] -= 1
            self.active_jobs[priority] += 1
        job.priority, job.served, job.pending = priority, 0.0, 0.0

    def clear(self, job: Job) -> None:
        """The device holds nothing of the job any more: give back its room in the window."""
        if job.outstanding:
            for launch in list(self.windows[job.priority].launches.values()):
                if launch.job is job:
                    self.vacate(launch.id, 0.0)

    def forget(self, job: Job) -> None:
        self.clear(job)
        self.ready[job.priority].forget(job)
