"""Memory and the high place of the device, held for a job that is about to come.

A coordinator of several daemons reserves on each of them, confirms when all have agreed, and has the job opened under
the ids that it reserved for. A reservation expires by itself, so one whose coordinator died holds nothing for long. It
counts as a job of its user in every limit. The job that takes it up is charged its bytes at least, from the start.

The high place: while it is reserved, and while a job is open that came by such a reservation, no other job is opened as
a high one or becomes one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from gpumux.types import JobId, Peer, Priority


@dataclass(slots=True, eq=False)
class Reservation:
    """What is held for a job, which peer reserved it, and until when. `for_all`: an operator reserved, so the job may
    be any user's; otherwise it has to be the same user's."""

    peer: Peer
    priority: Priority
    nbytes: int
    expires: float
    for_all: bool
    confirmed: bool = False


@dataclass(slots=True, eq=False)
class Reservations:
    """All that are held, by the job that they are for."""

    by_job: dict[JobId, Reservation] = field(default_factory=dict)

    def expire(self, now: float) -> None:
        for job in [job for job, each in self.by_job.items() if each.expires <= now]:
            del self.by_job[job]

    def next_expiry(self) -> float:
        """When the first one expires; inf if there is none."""
        first = inf
        for each in self.by_job.values():
            first = min(first, each.expires)
        return first

    def total_bytes(self) -> int:
        return sum([each.nbytes for each in self.by_job.values()])

    def bytes_of(self, uid: int) -> int:
        return sum([each.nbytes for each in self.by_job.values() if each.peer.uid == uid])

    def count_of(self, uid: int) -> int:
        return len([each for each in self.by_job.values() if each.peer.uid == uid])

    def high_for(self) -> JobId | None:
        """The job that the high place is reserved for."""
        for job, each in self.by_job.items():
            if each.priority is Priority.HIGH:
                return job
        return None
