"""Whose turn it is within a class: start-time fair queueing by weight and measured device time.

Every job has a virtual clock that runs by device seconds over weight; the ready job whose clock is
furthest behind goes next. What is out but not measured yet is charged by its prediction and settled
when the device says what it took, so a wrong guess moves a job's turn only while its piece is out.

A class's virtual time is the furthest *measured* clock a job was ever picked at. A job that becomes
ready is moved up to it: idle time earns no credit (it can't monopolise), and it starts level with
the others (it can't starve). Predictions are left out of virtual time on purpose: a job whose first
guess was a second would otherwise push virtual time ahead, and whoever joins next would wait for it.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace
from math import inf
from typing import Final, Literal, TypeAlias

from gpumux.scheduler.jobs import Job

Order: TypeAlias = Literal["fair", "arrival"]
Entry: TypeAlias = tuple[float, int, Job]  # key, number, whose

# Pieces that cost nothing by the clock still take a turn, or a job of them would be first for ever.
MIN_COST_S: Final = 1e-6

# How far behind virtual time a job may fall that its own bad predictions held back, in virtual
# seconds. It may catch up that much; without a bound it could then have the device to itself for as
# long as its predictions were bad.
MAX_LAG_S: Final = 10e-3

# Of jobs that may go out of turn where all whose turn it is are held:
PATIENCE: Final = 16  # times in a row one of them may be held before it is another one's chance
TURNS: Final = 32  # times it may be launched
SPARE: Final = 8  # entries out of date, beyond as many as there are jobs, before they are cleared
LOOKED_AT: Final = 16  # entries, of which some may be out of date, to find one


class ReadyQueue:
    """The ready jobs of one class, smallest key first: a heap whose entries may be out of date.

    An entry counts while the job has its number: a tuple has no identity where this is compiled. A key that grew is put
    right when its entry comes to the top, one that fell at once.
    """

    def __init__(self) -> None:
        self._heap: list[Entry] = []
        self._number = 0  # of the newest entry
        self.size = 0  # ready jobs
        self.entered = 0  # how often one became ready
        self._another: Job | None = None  # who may be launched out of turn
        self._patience = self._turns = 0  # and how often it may still be held or launched before it is somebody else
        self._looked = 0  # where that one was found
        self._second: Job | None = None  # what `following` found,
        self._third: Job | None = None
        self._found = False  # which is so still

    def key(self, job: Job) -> float:
        """What jobs are ordered by. Here: arrival of the step at the head, across all jobs."""
        return job.head_step().arrival

    def enter(self, job: Job) -> None:
        self.size += 1
        self.entered += 1
        self._push(job)

    def leave(self, job: Job) -> None:
        self._found = False
        if job.entry:
            job.entry = 0
            self.size -= 1
            if len(self._heap) > 2 * self.size + SPARE:
                self._tidy()

    def forget(self, job: Job) -> None:
        """Leave, and drop even outdated entries, so that nothing refers to the job any more."""
        self.leave(job)
        self._second = self._third = None
        if self._another is job:
            self._another = None
        self._heap = [entry for entry in self._heap if entry[2] is not job]
        heapify(self._heap)

    def first(self) -> Job | None:
        heap = self._heap
        while heap:
            known, number, job = heap[0]
            if job.entry != number:
                heappop(heap)
                continue
            key = self.key(job)
            if key > known:
                self._number = job.entry = number = self._number + 1
                job.entry_key = key
                heapreplace(heap, (key, number, job))
                continue
            return job
        return None

    def following(self) -> list[Job]:
        """The two jobs whose turn comes after the first's, in order, as far as there are so many. Asked right after
        `first`."""
        if not self._found:
            self._look()
        second, third = self._second, self._third
        if second is None:
            return []
        return [second] if third is None else [second, third]

    def _look(self) -> None:
        """None below an entry in the heap comes before it, so few are looked at: each before those below it, left
        before right."""
        heap = self._heap
        second: Job | None = None
        third: Job | None = None
        sooner = later = inf
        at, count = 1, len(heap)
        while at:
            if at < count:
                known, number, job = heap[at]
                if known < later:
                    if job.entry == number:
                        key = self.key(job)
                        if key < sooner:
                            third, later, second, sooner = second, sooner, job, key
                        elif key < later:
                            third, later = job, key
                    at = 2 * at + 1
                    continue
            while at and not at & 1:  # from a right one up
                at = (at >> 1) - 1
            if at:
                at += 1
        self._second, self._third, self._found = second, third, True

    def another(self, first: Job, than: list[Job]) -> Job | None:
        """A ready job that is neither the first nor one of these few: the same one as before, until it was held so many
        times in a row or launched often enough. None if there is none, or it was not found soon."""
        self._patience -= 1
        job = self._another
        if job is not None and self._patience > 0 and job is not first and job not in than:
            return job if job.entry else None
        heap = self._heap
        for _ in range(min(len(heap), LOOKED_AT)):
            self._looked = (self._looked + 1) % len(heap)
            _, number, job = heap[self._looked]
            if job.entry == number and job is not first and job not in than:
                self._another, self._patience, self._turns = job, PATIENCE, TURNS
                return job
        return None

    def charge(self, job: Job, predicted: float) -> None:
        """A piece of `predicted` seconds was launched."""
        self._found = False
        if job is self._another:
            self._turns -= 1
            self._patience = PATIENCE if self._turns > 0 else 0

    def settle(self, job: Job, predicted: float, measured: float) -> None:
        """A piece charged as `predicted` took `measured` seconds."""

    def check(self, jobs: list[Job]) -> None:
        """Raise AssertionError unless exactly `jobs` are in, each with a key not above its own."""
        live = [entry for entry in self._heap if entry[2].entry == entry[1]]
        assert len(live) == self.size, f"ready queue counts {self.size} jobs and holds {len(live)}"
        assert {id(entry[2]) for entry in live} == {id(job) for job in jobs}, "ready queue holds the wrong jobs"
        for key, _, job in live:
            assert key <= self.key(job), f"job {job.id}: ready under key {key}, above its own {self.key(job)}"
        assert len(self._heap) <= 2 * self.size + SPARE, f"{len(self._heap)} heap entries for {self.size} ready jobs"

    def _push(self, job: Job) -> None:
        self._found = False
        key = self.key(job)
        self._number = job.entry = number = self._number + 1
        job.entry_key = key
        heappush(self._heap, (key, number, job))
        if len(self._heap) > 2 * self.size + SPARE:
            self._tidy()

    def _tidy(self) -> None:
        """Drop what is out of date."""
        self._heap = [entry for entry in self._heap if entry[2].entry == entry[1]]
        heapify(self._heap)


class FairQueue(ReadyQueue):
    """Ready jobs by virtual clock."""

    def __init__(self) -> None:
        super().__init__()
        self.virtual = 0.0

    def key(self, job: Job) -> float:
        return job.served + job.pending

    def enter(self, job: Job) -> None:
        if job.served < self.virtual:
            job.served = self.virtual
        self.size += 1
        self.entered += 1
        self._push(job)

    def charge(self, job: Job, predicted: float) -> None:
        super().charge(job, predicted)
        if job.served > self.virtual:
            self.virtual = job.served
        job.pending += (predicted if predicted > MIN_COST_S else MIN_COST_S) / job.weight

    def settle(self, job: Job, predicted: float, measured: float) -> None:
        self._found = False
        if job.outstanding:
            charged = max(predicted, MIN_COST_S) / job.weight
            job.pending = max(0.0, job.pending - charged)
        else:
            job.pending = 0.0  # sums of floats drift; nothing outstanding means nothing pending, exactly
        job.served += (measured if measured > MIN_COST_S else MIN_COST_S) / job.weight
        least = self.virtual - MAX_LAG_S - job.pending
        if job.served < least:
            job.served = least
        if job.entry and job.entry_key > job.served + job.pending:
            self._push(job)


def make_queue(order: Order) -> ReadyQueue:
    return FairQueue() if order == "fair" else ReadyQueue()
