"""Low steps that a client waits for before it steps its high jobs again.

One program may step a high job and low jobs in turn. Its high job then looks like any other that pauses between two
steps, and low work is held for the sake of its next step, which can't come: it is stepped by the thread that waits
for the low step. The client says so (ClientWaits). Until the low step is answered, it is not held for the sake of
those high jobs while they are idle. All else stays: low work is held for the other high jobs, other low steps are
held for these, and a high step that runs is protected as ever.
"""

from __future__ import annotations

from gpumux.scheduler.guard.high_job import Track
from gpumux.scheduler.jobs import Job
from gpumux.types import StepId


class Awaited:
    """`jobs`: the low jobs of which a client waits for a step, those longest so first. Which high jobs come only
    after it, and after which step, the jobs and the high jobs' tracks know themselves."""

    __slots__ = ("jobs",)

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def add(self, low: Job, step: StepId, track: Track) -> None:
        """The track's job gets no step before this one of the low job is answered."""
        self.remove(track)
        track.after, track.after_step = low, step
        if low.awaited_by is None:
            low.awaited_by = []
            self.jobs.append(low)
        low.awaited_by.append(track)

    def remove(self, track: Track) -> None:
        """The track's job may get a step at any time again."""
        low = track.after
        if low is None:
            return
        track.after = None
        waiting = low.awaited_by
        assert waiting is not None
        waiting.remove(track)
        if not waiting:
            low.awaited_by = None
            self.jobs.remove(low)

    def answered(self, low: Job, step: StepId) -> None:
        """This step of the low job was answered."""
        for track in list(low.awaited_by or ()):
            if track.after_step <= step:
                self.remove(track)

    def forget(self, low: Job) -> None:
        """The job is gone, or is no low one any more."""
        for track in list(low.awaited_by or ()):
            self.remove(track)
