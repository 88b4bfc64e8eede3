"""Which jobs each thread of this process steps, so that a daemon can be told which get no step while the thread waits.

One loop may step a high job and low jobs in turn. Where it waits for a low step, its high job's next step can't come
before that one's answer, and the daemon must not hold the low step for the high one's sake (docs/architecture.md,
"Jobs stepped in turn").
"""

from __future__ import annotations

import threading
from typing import Final, TypeAlias
from weakref import ref

SURE: Final = (
    16  # steps in a row by another thread than before: from then on it is taken for the one that steps the job
)
MOST: Final = 256  # jobs that are named

_Jobs: TypeAlias = "dict[str, ref[Turns]]"


class _Here(threading.local):
    """Of each thread: the jobs it steps, by id, and those of them that are high ones."""

    def __init__(self) -> None:
        self.jobs: _Jobs = {}
        self.high: _Jobs = {}


_here = _Here()


class Turns:
    """Which thread steps a job. One that several threads step in turn, as those of a pool do, is no thread's: the
    others could give it a step while one waits. `high`: the job is known to be a high one."""

    __slots__ = ("__weakref__", "_by", "_high_by", "_job", "_unsure", "high", "newest")

    def __init__(self, job: str, high: bool) -> None:
        self._job = job
        self.high = high
        self.newest = -1  # step
        self._by: _Jobs | None = None  # what the thread steps that made the newest step
        self._high_by: _Jobs | None = None
        self._unsure = 0  # further steps it has to make before the job is taken for its own

    def stepped(self, step: int) -> None:
        """The calling thread has submitted this step of the job."""
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
        """Whether the calling thread steps other jobs that are high ones."""
        high = _here.high
        return bool(high) and (len(high) > 1 or self._job not in high)

    def names(self) -> list[str]:
        """Their ids."""
        return [job for job in list(_here.high) if job != self._job][:MOST]

    def forget(self) -> None:
        """No thread steps the job."""
        for jobs in (self._by, self._high_by):
            if jobs is not None:
                jobs.pop(self._job, None)


def is_high(job: str) -> bool:
    """Take note that this job has become a high one since it was submitted; False where the calling thread doesn't
    step it."""
    known = _here.jobs.get(job)
    found = known() if known is not None else None
    if found is None:
        return False
    found.high = True
    _put(_here.high, job, found)
    return True


def _put(jobs: _Jobs, job: str, turns: Turns) -> None:
    """Until it is forgotten, or dropped."""

    def dropped(gone: ref[Turns]) -> None:
        jobs.pop(job, None)

    jobs[job] = ref(turns, dropped)
