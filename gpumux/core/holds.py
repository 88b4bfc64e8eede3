"""Who is held, why and since when; and how long the low class was held in all, by reason.

calibration   a step without low work is wanted, to know what steps take alone
learning      nothing is known yet of this low work beside that high job: one launch at a time
ban           it would run into a range it is banned from
price         other ranges give more low work for what the high job may lose
budget        the high job has lost what it may lose on average
tail          the step that runs may not lose more
next          it would outlast that step, and the next one, which may have come by then, may not lose so much
gap           it would still run when the high job's next step is expected
"""

from __future__ import annotations

from typing import Final

from gpumux.core.bans import Ban
from gpumux.core.queue import Job
from gpumux.model import JobId

REASONS: Final = ("calibration", "learning", "ban", "price", "budget", "tail", "next", "gap")


class Hold:
    """Why a low job may not launch now: for the sake of which high job, which of its pieces (-1: none in
    particular), by which ban, and when to ask again at the latest (inf: something will happen before)."""

    __slots__ = ("ban", "begun", "foreseen", "high", "piece", "reason", "since", "until")

    def __init__(self, reason: str, high: JobId, piece: int, ban: Ban | None, until: float) -> None:
        self.reason, self.high, self.piece, self.ban, self.until = reason, high, piece, ban, until
        self.since = 0.0  # the job is held, whatever for; and for this reason since `begun`
        self.begun = 0.0
        self.foreseen = True  # where it is a gap's end: the next step is expected then, and not at any time


class Holds:
    __slots__ = ("_asked", "_seconds", "fresh", "newest", "reason")

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(REASONS, 0.0)
        self.newest: dict[JobId, Hold] = {}  # of those held now, who is for longest first
        self.fresh: list[tuple[JobId, Hold]] = []  # who was not held before the event
        self.reason = ""  # of the low job whose turn it is
        self._asked = 0.0

    def note(self, reason: str, now: float) -> None:
        """After an event: why the low job is held whose turn it is; "": nobody is."""
        before = self.reason
        if reason == before:
            return
        if before:
            self._seconds[before] += now - self._asked
        self.reason, self._asked = reason, now

    def seconds(self, now: float) -> dict[str, float]:
        """By reason, in which low work was ready and had room, but was held."""
        found = dict(self._seconds)
        if self.reason:
            found[self.reason] += now - self._asked
        return found

    def hold(self, job: Job, hold: Hold, now: float) -> None:
        """The job is held now, for this reason."""
        old, job.hold = job.hold, hold
        self.newest[job.id] = hold
        if old is None:
            hold.since = hold.begun = now
            self.fresh.append((job.id, hold))
            return
        hold.since = old.since
        if old.reason == hold.reason:
            hold.begun = old.begun
        else:
            self._count(job, old, now)
            hold.begun = now

    def freed(self, job: Job, now: float) -> None:
        """The job was launched, or has nothing to launch."""
        old = job.hold
        if old is not None:
            job.hold = None
            del self.newest[job.id]
            self._count(job, old, now)

    def of(self, job: Job, now: float) -> dict[str, float]:
        """Seconds for which the low job was held since it opened, by reason, the longest first."""
        found = dict(job.held_s)
        hold = job.hold
        if hold is not None:
            found[hold.reason] = found.get(hold.reason, 0.0) + now - hold.begun
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def _count(self, job: Job, hold: Hold, now: float) -> None:
        job.held_s[hold.reason] = job.held_s.get(hold.reason, 0.0) + (now - hold.begun)
