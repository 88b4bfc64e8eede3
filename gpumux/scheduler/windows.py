"""The mechanism below every policy: fair queues of ready jobs, and windows on what is outstanding.

Policies look (`peek`, `fits`, `active`) and change nothing; the scheduler moves jobs and launches. Only the ready heaps
grow with the number of jobs, so an event costs O(log jobs).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from math import inf
from typing import Final, Literal, NamedTuple, TypeAlias

from gpumux.scheduler.jobs import JobState, JobStep, ScheduledJob
from gpumux.types import DeviceInfo, JobId, LaunchId, Priority

# ---- The order of ready jobs within a class: start-time fair queueing by weight and measured device time.
#
# Every job has a virtual clock that advances by device seconds over weight; the ready job with the earliest clock goes
# next. A launch is charged by its prediction and corrected when the device reports what it took, so a wrong prediction
# moves a job's turn only while that piece is out.
#
# A class's virtual time is the latest *measured* clock a job was ever picked at. A job that becomes ready is moved up
# to it: idle time earns no credit, so the job can't monopolise the device, and it starts level with the others, so it
# can't starve. Predictions are left out of virtual time: a job whose first prediction was a second would otherwise push
# virtual time ahead, and jobs that become ready next would wait for it.


Order: TypeAlias = Literal["fair", "arrival"]
Entry: TypeAlias = tuple[float, int, ScheduledJob]  # key, number of the entry, job

# Pieces that take no time by the clock still use a turn, or a job of them would always be first.
MIN_COST_S: Final = 1e-6
LEAST_WEIGHT: Final = 1e-3  # of a grant's job, as of any

# How far a job may fall behind virtual time, in virtual seconds, because its own predictions were too long. It may
# catch up that much; without a bound it could then keep the device for as long as its predictions were bad.
MAX_LAG_S: Final = 10e-3

MAX_STALE_ENTRIES: Final = 8  # beyond as many as there are ready jobs, before the heap is compacted
# Of the job that may be launched out of turn while those before it are held:
MOST_HOLDS: Final = 16  # times in a row it may be held before another job is chosen
MOST_LAUNCHES: Final = 32  # launches before another job is chosen
MOST_SCANNED: Final = 16  # heap entries looked at to choose one


class ReadyQueue:
    """The ready jobs of one class, smallest key first: a heap that may contain stale entries.

    An entry is valid while the job has its number. A key that grew is corrected when its entry comes to the top; a key
    that fell is pushed again at once.
    """

    def __init__(self) -> None:
        self._heap: list[Entry] = []
        self._number = 0  # of the newest entry
        self.size = 0  # ready jobs
        self._other: ScheduledJob | None = None  # the job that may be launched out of turn
        self._holds_left = 0
        self._launches_left = 0
        self._scanned = 0  # position in the heap where it was found

    def key(self, job: ScheduledJob) -> float:
        """What jobs are ordered by. Here: arrival of the step at the head, across all jobs."""
        return job.oldest_arrival()

    def add(self, job: ScheduledJob) -> None:
        self.size += 1
        self._push(job)

    def remove(self, job: ScheduledJob) -> None:
        if job.ready_entry:
            job.ready_entry = 0
            self.size -= 1
            if len(self._heap) > 2 * self.size + MAX_STALE_ENTRIES:
                self._compact()

    def purge(self, job: ScheduledJob) -> None:
        """Remove the job and its stale entries, so that nothing refers to it any more."""
        self.remove(job)
        if self._other is job:
            self._other = None
        self._heap = [entry for entry in self._heap if entry[2] is not job]
        heapify(self._heap)

    def peek(self) -> ScheduledJob | None:
        """The first job, or None."""
        heap = self._heap
        while heap:
            known, number, job = heap[0]
            if job.ready_entry != number:
                heappop(heap)
                continue
            key = self.key(job)
            if key > known:
                self._number = job.ready_entry = number = self._number + 1
                job.ready_key = key
                heapreplace(heap, (key, number, job))
                continue
            return job
        return None

    def next_two(self) -> list[ScheduledJob]:
        """The two jobs behind the first, in order, or fewer. Valid right after `peek`.

        No entry of the heap comes before the one above it, so only the top of the heap is visited.
        """
        heap = self._heap
        second: ScheduledJob | None = None
        third: ScheduledJob | None = None
        second_key = third_key = inf
        at = 1
        while at:
            if at >= len(heap) or heap[at][0] >= third_key:
                at = _after_subtree(at)
                continue
            _, number, job = heap[at]
            if job.ready_entry == number:
                key = self.key(job)
                if key < second_key:
                    third, third_key, second, second_key = second, second_key, job, key
                elif key < third_key:
                    third, third_key = job, key
            at = 2 * at + 1
        if second is None:
            return []
        return [second] if third is None else [second, third]

    def peek_other(self, first: ScheduledJob, others: list[ScheduledJob]) -> ScheduledJob | None:
        """A ready job that is neither the first nor one of `others`: the same job as before, until it was held or
        launched often enough. None if there is none, or none was found soon."""
        self._holds_left -= 1
        job = self._other
        if job is not None and self._holds_left > 0 and job is not first and job not in others:
            return job if job.ready_entry else None
        heap = self._heap
        for _ in range(min(len(heap), MOST_SCANNED)):
            self._scanned = (self._scanned + 1) % len(heap)
            _, number, job = heap[self._scanned]
            if job.ready_entry == number and job is not first and job not in others:
                self._other, self._holds_left, self._launches_left = job, MOST_HOLDS, MOST_LAUNCHES
                return job
        return None

    def charge(self, job: ScheduledJob, predicted: float) -> None:
        """A piece of `predicted` seconds was launched."""
        if job is self._other:
            self._launches_left -= 1
            self._holds_left = MOST_HOLDS if self._launches_left > 0 else 0

    def correct_charge(self, job: ScheduledJob, predicted: float, measured: float) -> None:
        """A piece charged as `predicted` took `measured` seconds."""

    def check(self, jobs: list[ScheduledJob]) -> None:
        """Raise AssertionError unless exactly `jobs` are ready, each with a key not above its own."""
        live = [entry for entry in self._heap if entry[2].ready_entry == entry[1]]
        assert len(live) == self.size, f"ready queue counts {self.size} jobs and holds {len(live)}"
        assert {id(entry[2]) for entry in live} == {id(job) for job in jobs}, "ready queue holds the wrong jobs"
        for key, _, job in live:
            assert key <= self.key(job), f"job {job.id}: ready under key {key}, above its own {self.key(job)}"
        most = 2 * self.size + MAX_STALE_ENTRIES
        assert len(self._heap) <= most, f"{len(self._heap)} heap entries for {self.size} ready jobs"

    def _push(self, job: ScheduledJob) -> None:
        key = self.key(job)
        self._number = job.ready_entry = number = self._number + 1
        job.ready_key = key
        heappush(self._heap, (key, number, job))
        if len(self._heap) > 2 * self.size + MAX_STALE_ENTRIES:
            self._compact()

    def _compact(self) -> None:
        """Drop stale entries."""
        self._heap = [entry for entry in self._heap if entry[2].ready_entry == entry[1]]
        heapify(self._heap)


def _after_subtree(at: int) -> int:
    """The position in a heap that is visited after `at` and everything below it: parents before children, left before
    right. 0: it was the last."""
    while at and at % 2 == 0:  # the right one of its parent's two
        at = (at - 1) // 2
    return at + 1 if at else 0


class FairQueue(ReadyQueue):
    """Ready jobs by virtual clock."""

    def __init__(self) -> None:
        super().__init__()
        self.virtual = 0.0

    def key(self, job: ScheduledJob) -> float:
        return job.served + job.pending

    def add(self, job: ScheduledJob) -> None:
        job.served = max(job.served, self.virtual)
        super().add(job)

    def charge(self, job: ScheduledJob, predicted: float) -> None:
        super().charge(job, predicted)
        self.virtual = max(self.virtual, job.served)
        job.pending += max(predicted, MIN_COST_S) / job.weight

    def correct_charge(self, job: ScheduledJob, predicted: float, measured: float) -> None:
        if job.outstanding:
            charged = max(predicted, MIN_COST_S) / job.weight
            job.pending = max(0.0, job.pending - charged)
        else:
            job.pending = 0.0  # sums of floats drift; nothing outstanding means exactly nothing pending
        job.served += max(measured, MIN_COST_S) / job.weight
        job.served = max(job.served, self.virtual - MAX_LAG_S - job.pending)
        if job.ready_entry and job.ready_key > job.served + job.pending:
            self._push(job)


def make_queue(order: Order) -> ReadyQueue:
    return FairQueue() if order == "fair" else ReadyQueue()


# ---- Windows: how much of each class may be out on the device, and what is.


class Limit(NamedTuple):
    """How much of a class may be outstanding: launches, and their predicted seconds."""

    launches: int
    seconds: float


class Outstanding:
    """One outstanding launch, made at `at`, of a piece, or of several `pieces` from `piece` on. `limit`, `count_before`
    and `seconds_before` are the window's limit and content when it was made; the invariants check them."""

    __slots__ = (
        "at", "count_before", "id", "job", "limit", "piece", "pieces", "predicted", "seconds_before", "share", "step",
    )  # fmt: skip

    def __init__(
        self, *, id: LaunchId, job: ScheduledJob, step: JobStep, piece: int, predicted: float, at: float,  # noqa: A002
        limit: Limit, count_before: int, seconds_before: float, share: float, pieces: int = 1,
    ) -> None:  # fmt: skip
        self.id, self.job, self.step, self.piece, self.predicted, self.at = id, job, step, piece, predicted, at
        self.limit, self.count_before, self.seconds_before, self.share = limit, count_before, seconds_before, share
        self.pieces = pieces

    @property
    def which(self) -> str:
        """The piece or pieces, for the history."""
        one = self.pieces == 1
        return f"piece {self.piece}" if one else f"pieces {self.piece} to {self.piece + self.pieces - 1}"


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
        self._open_high: set[JobId] = set()
        self._run_s, self._at_once = 0.0, 0.0  # of the device: DeviceInfo.run_s, and how many jobs it runs at once

    # ---- what policies read

    def peek(self, priority: Priority) -> ScheduledJob | None:
        """The class's first ready job, or None."""
        return self.ready[priority].peek()

    def fits(self, job: ScheduledJob, limit: Limit) -> bool:
        """Whether the next piece of this ready job has room in its class's window under `limit`."""
        window = self.by_class[job.priority]
        if not window.launches:
            return limit.launches > 0  # whatever it is predicted to take
        return window.fits(job.next_seconds(), limit)

    def active(self, priority: Priority) -> int:
        """Number of jobs of the class that have queued or outstanding work and are neither paused nor closing, nor wait
        for their peers."""
        return self.active_jobs[priority]

    @property
    def in_runs(self) -> bool:
        """Whether several pieces may be one launch, since no job waits for its end: no high job is open, whatever it
        does, and the device can run all low jobs at once."""
        return not self._open_high and self.active_jobs[Priority.LOW] <= self._at_once

    # ---- what the scheduler changes

    def open_device(self, info: DeviceInfo) -> None:
        if info.run_s > 0:
            self._run_s, self._at_once = info.run_s, inf if info.parallel is None else info.parallel

    def add_job(self, job: ScheduledJob, jobs: Collection[ScheduledJob]) -> None:
        """The job, one of `jobs`, was opened."""
        self._opened(job.id, job.priority is Priority.HIGH)
        self.weigh(job, jobs)

    def update(self, job: ScheduledJob) -> None:
        """Add the job to the ready queue or remove it, and count it as active or not. Called after every change to
        it."""
        blocked = job.blocked()
        active = not blocked or (blocked != "closing" and blocked != "paused" and job.busy() and not job.parked())
        if active is not job.active:
            job.active = active
            self.active_jobs[job.priority] += 1 if active else -1
        if blocked:
            if job.ready_entry:
                self.ready[job.priority].remove(job)
        elif not job.ready_entry:
            self.ready[job.priority].add(job)

    def launch(
        self, launch_id: LaunchId, job: ScheduledJob, step: JobStep, limit: Limit, share: float, now: float
    ) -> Outstanding:
        """Count the next piece of the job's next step as outstanding, or several that are one launch."""
        window = self.by_class[job.priority]
        pieces, predicted = 1, step.pieces[step.launched]
        if self.in_runs and step.wave is None and step.lease is None:
            most = min(self._run_s, limit.seconds - window.seconds) if window.launches else self._run_s
            pieces, predicted = _run(step, predicted, most)
        launch = Outstanding(
            id=launch_id, job=job, step=step, piece=step.launched, predicted=predicted, at=now, limit=limit,
            count_before=len(window.launches), seconds_before=window.seconds, share=share, pieces=pieces,
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
                self.ready[job.priority].correct_charge(job, launch.predicted, measured)
                return launch
        return None

    def weigh(self, job: ScheduledJob, jobs: Collection[ScheduledJob], asked: float | None = None) -> None:
        """Give a job that was opened, changed or is closing the weight that it asks for, from now on `asked` if that is
        given. A grant's `jobs` of each class divide the grant's weight instead, by what they ask for: more of them get
        no more of the device."""
        if asked is not None:
            job.asked_weight = asked
        grant = job.peer.grant
        if grant is None:
            if job.weight != job.asked_weight:
                self.set_weight(job, job.asked_weight)
            return
        for priority in Priority:
            open_jobs = [
                each
                for each in jobs
                if each.peer.uid == job.peer.uid and each.priority is priority and each.state is not JobState.CLOSING
            ]
            total = sum([each.asked_weight for each in open_jobs])
            for each in open_jobs:
                self.set_weight(each, max(LEAST_WEIGHT, grant.weight * each.asked_weight / total))

    def set_weight(self, job: ScheduledJob, weight: float) -> None:
        """Give the job another weight. Launches that are out count by the new one, and what was served by the old."""
        self.ready[job.priority].remove(job)
        job.pending *= job.weight / weight
        job.weight = weight
        self.update(job)

    def set_priority(self, job: ScheduledJob, priority: Priority, jobs: Collection[ScheduledJob]) -> None:
        """Put the job, one of `jobs`, into another class, level with the jobs there. None of its pieces may be out."""
        assert not job.outstanding, f"job {job.id} changes class with {job.outstanding} pieces out"
        self.ready[job.priority].purge(job)
        if job.active:
            self.active_jobs[job.priority] -= 1
            self.active_jobs[priority] += 1
        self._opened(job.id, priority is Priority.HIGH)
        job.priority, job.served, job.pending = priority, 0.0, 0.0
        self.weigh(job, jobs)

    def drop_launches(self, job: ScheduledJob) -> list[LaunchId]:
        """Remove all launches of a job of which the device holds nothing any more, and return their ids."""
        dropped: list[LaunchId] = []
        if job.outstanding:
            dropped = [launch.id for launch in self.by_class[job.priority].launches.values() if launch.job is job]
            for launch_id in dropped:
                self.complete(launch_id, 0.0)
        return dropped

    def remove_job(self, job: ScheduledJob) -> list[LaunchId]:
        """Remove everything of the job, and return the ids of its launches."""
        dropped = self.drop_launches(job)
        self.ready[job.priority].purge(job)
        self._opened(job.id, False)
        return dropped

    def _opened(self, job: JobId, high: bool) -> None:
        """Note whether the job is an open high one."""
        (self._open_high.add if high else self._open_high.discard)(job)


def _run(step: JobStep, first_s: float, most_s: float) -> tuple[int, float]:
    """How many pieces of the step the next launch is made of where it may take `most_s`, and what they take: one at
    least, which takes `first_s`, and none behind a collective, which begins when a piece has ended.

    Each launch takes processor time of the daemon. What is launched can't be called back, which matters to high jobs
    alone: those to come are opened, and capture their steps, long before their first one."""
    end = step.gated[step.met] if step.met < len(step.gated) else len(step.pieces)
    at, seconds = step.launched + 1, first_s
    while at < end and seconds + step.pieces[at] <= most_s:
        seconds += step.pieces[at]
        at += 1
    return at - step.launched, seconds
