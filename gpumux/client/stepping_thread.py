"""The jobs that each thread of this process steps, so that the daemon learns which jobs get no step while a thread
waits.

One loop may step a high job and low jobs in turn. While it waits for a low step, its high job's next step can't come,
and the daemon must not hold the low step back for the high job. The daemon can't see that from the gaps between steps,
so the client sends StepAwaited when a wait has lasted for a while and its thread steps high jobs as well. A job that
two threads step in turn counts for neither thread until one of them has made several steps in a row.
"""

from __future__ import annotations

import threading
from typing import Final, TypeAlias
from weakref import ref

SURE: Final = 16  # steps in a row by another thread, after which the job counts as stepped by that thread
MOST: Final = 256  # jobs named in one message

_Jobs: TypeAlias = "dict[str, ref[SteppingThread]]"


class _Here(threading.local):
    """The jobs that a thread steps, by id, and the high ones among them."""

    def __init__(self) -> None:
        self.jobs: _Jobs = {}
        self.high: _Jobs = {}


_here = _Here()


class SteppingThread:
    """The thread that steps a job. A job that several threads step in turn, as those of a pool do, belongs to no
    thread, because the others could step it while one waits. `high`: whether the job is known to be a high job."""

    __slots__ = ("__weakref__", "_by", "_high_by", "_job", "_unsure", "high", "newest")

    def __init__(self, job: str, high: bool) -> None:
        self._job = job
        self.high = high
        self.newest = -1  # number of the newest step
        self._by: _Jobs | None = None  # the jobs of the thread that made the newest step
        self._high_by: _Jobs | None = None
        self._unsure = 0  # further steps that the thread has to make before the job counts as its own

    def stepped(self, step: int) -> None:
        """Record that the calling thread has submitted this step of the job."""
        self.newest = step
        jobs = _here.jobs
        if self._by is not jobs:
            first = self._by is None
            self.forget()
            self._by, self._high_by = jobs, _here.high
            self._unsure = 0 if first else SURE
            if first:
                self._is_mine()
        elif self._unsure:
            self._unsure -= 1
            if not self._unsure:
                self._is_mine()

    def _is_mine(self) -> None:
        _put(_here.jobs, self._job, self)
        if self.high:
            _put(_here.high, self._job, self)

    def others(self) -> bool:
        """Whether the calling thread steps other high jobs."""
        high = _here.high
        return bool(high) and (len(high) > 1 or self._job not in high)

    def names(self) -> list[str]:
        """The ids of the other high jobs that the calling thread steps, at most MOST."""
        return [job for job in list(_here.high) if job != self._job][:MOST]

    def forget(self) -> None:
        """Record that no thread steps the job."""
        for jobs in (self._by, self._high_by):
            if jobs is not None:
                jobs.pop(self._job, None)


def is_high(job: str) -> bool:
    """Record that this job has become a high job since it was submitted. False if the calling thread doesn't step
    it."""
    known = _here.jobs.get(job)
    found = known() if known is not None else None
    if found is None:
        return False
    found.high = True
    _put(_here.high, job, found)
    return True


def _put(jobs: _Jobs, job: str, thread: SteppingThread) -> None:
    """Enter a job into `jobs` until it is forgotten or its `SteppingThread` is collected."""

    def dropped(gone: ref[SteppingThread]) -> None:
        jobs.pop(job, None)

    jobs[job] = ref(thread, dropped)
