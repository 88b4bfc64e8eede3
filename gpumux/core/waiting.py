"""Who the guard holds, and until when: what it said of a low job's next piece, for as long as that stands."""

from __future__ import annotations

from math import inf
from typing import Final

from gpumux.core.answers import Answer, Rest
from gpumux.core.queue import Job
from gpumux.core.record import Record

EVERYBODY: Final = frozenset(("calibration", "learning"))  # reasons to hold all, where they name no piece
PINCHING: Final = frozenset(("tail", "next", "price", "budget"))


class Waiting(Record):
    """What was answered. Nobody is asked again whom nothing new can free."""

    def answer(self, job: Job, now: float) -> Answer | None:
        """What it was told in this event, or before it if that stands."""
        answer = job.held
        if answer is None or answer in self.answers:
            return answer
        return answer if self.resting and answer.stands(self.low_version, now) else None

    def _hold(self, job: Job, answer: Answer) -> None:
        """This is the answer; what the job was told earlier in the event is not."""
        told, before = self.answers, job.held
        job.held = answer
        if told and before is not None:
            for at in range(len(told)):
                if told[at] is before:
                    told[at] = answer
                    return
        told.append(answer)

    def recut(self, job: Job) -> None:
        """A program of the job has come, or is cut another way: what was said of its pieces is of others."""
        if job.held is not None:
            self.unheld(job)
            self.rest = None

    def waits(self, job: Job) -> None:
        """A client waits for a step of the job. Where it is held for the sake of an idle high job that comes only after
        it, that is no longer so; any other answer stands."""
        track = job.held.track if job.held is not None else None
        if track is not None and track.after is job and track.idle_since < inf:
            self.unheld(job)
        self.rest = None  # it may not have been asked at all

    def holds_all(self, job: Job) -> bool:
        """Whether what holds this job, just asked about, holds every low job."""
        answer = job.held
        hold = answer.hold if answer is not None else None
        return hold is not None and hold.piece < 0 and hold.reason in EVERYBODY

    def settled(self, now: float) -> float:
        """After an event: note who is held and why. When to look again, at the latest; inf: an event will come."""
        wake, reason, holds = inf, "", self.holds
        rest: Rest | None = None
        first = self.asked
        if first is not None:
            rest = self._rest
            if rest is None:
                rest = self._rest = Rest(first, self.entered, self.low_version)
            else:
                rest.begin(first, self.entered, self.low_version)
        for answer in self.answers:
            job, hold = answer.job, answer.hold
            assert job is not None
            assert hold is not None
            if job.hold is not hold:
                holds.hold(job, hold, now)
            if hold.until < wake:
                wake = hold.until
            if not reason:
                reason = hold.reason
            if hold.reason in PINCHING:
                self._pinched = True
                if hold.reason == "budget" and answer.track is not None:
                    answer.track.account.short = True
            if rest is not None:
                rest.add(answer)
        holds.note(reason, now)
        if rest is not None:
            rest.until, rest.partial, self.rest = wake, self.partial, rest
        return wake
