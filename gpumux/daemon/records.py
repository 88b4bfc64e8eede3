"""What the daemon remembers under the core's ids: descriptors, layouts, request numbers.

The core decides about jobs and never sees any of this; the loop keeps it until ForgetJob. A record
holds no copy of anything the core counts, so the two can't disagree about state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from gpumux.daemon.segments import SharedSegment
from gpumux.program.codec import Outline
from gpumux.program.ir import aligned
from gpumux.types import Fault, JobId, JobSpec, Peer, ProgramId, SessionId, StepId, TransferId


@dataclass(slots=True, eq=False)
class SessionRecord:
    """One connected client. `inline`: its tensors travel as frames (TCP)."""

    id: SessionId
    peer: Peer
    inline: bool
    opened: float
    jobs: set[JobId] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class ProgramRecord:
    """A program from its offer on. `encoded` is dropped once the device has loaded it."""

    id: ProgramId
    ref: int
    encoded: bytes
    new_buffers: tuple[int, ...]
    binding: tuple[int, ...]
    slots: int
    slot_bytes: int = 0
    scalars: tuple[type, ...] = ()  # of each host scalar a step brings: float or int
    offered: bool = False  # the core knows it
    announced: bool = False  # the client knows it
    segment: SharedSegment | None = None
    outline: Outline | None = None  # inline sessions only
    busy: dict[int, StepId] = field(default_factory=dict)  # slot -> the unanswered step in it
    steps: int = 0  # ever submitted


@dataclass(slots=True, eq=False)
class StepRecord:
    program: ProgramRecord
    slot: int
    scalars: tuple[float | int, ...]


@dataclass(slots=True, eq=False)
class TransferRecord:
    """A transfer from OpenTransfer on; `asked`: the core knows it, `due`: the core wants it moved now."""

    ref: int
    buffers: tuple[int, ...]
    push: bool
    nbytes: int
    segment: SharedSegment | None = None
    asked: bool = False
    due: bool = False
    refused: bool = False  # the client knows that it will not happen
    then: Callable[[Fault | None], None] | None = None  # of the daemon's own: who hears of its end


@dataclass(slots=True, eq=False)
class JobRecord:
    id: JobId
    short: str
    session: SessionRecord
    spec: JobSpec
    programs: dict[ProgramId, ProgramRecord] = field(default_factory=dict)
    waiting: deque[ProgramRecord] = field(default_factory=deque)  # offered behind one that is loading
    loading: ProgramRecord | None = None
    buffers: list[int] = field(default_factory=list)  # bytes of each state buffer
    steps: dict[StepId, StepRecord] = field(default_factory=dict)
    transfers: dict[TransferId, TransferRecord] = field(default_factory=dict)
    profiles: deque[tuple[SessionRecord, int]] = field(default_factory=deque)  # who waits for one, oldest first
    changes: deque[tuple[SessionRecord, int]] = field(default_factory=deque)  # whose ChangeJob is not in force yet
    stopped_by: str = ""  # who closed it, if somebody else than its client
    finished: bool = False  # its client closed it when its work was done
    closing: bool = False  # somebody asked for its end
    last_step: int = -1
    last_transfer: int = -1
    unloading: bool = False  # the device was told to let go of it
    over: bool = False  # CloseJob was executed: the client has been told
    device_answers: bool = False  # the device has the session's lane, to answer steps itself

    @property
    def ending(self) -> bool:
        return self.closing or self.unloading or self.over

    def close_segments(self) -> None:
        """Let go of all shared memory of this job. Idempotent."""
        for program in self.programs.values():
            if program.segment is not None:
                program.segment.close()
        for transfer in self.transfers.values():
            if transfer.segment is not None:
                transfer.segment.close()


class Books:
    """All records, by the ids the core and the clients use."""

    def __init__(self) -> None:
        self.sessions: dict[SessionId, SessionRecord] = {}
        self.jobs: dict[JobId, JobRecord] = {}
        self.opening: dict[tuple[SessionId, JobId], tuple[int, JobSpec]] = {}  # OpenJobs the core decides on
        self._numbers = 0

    def add_job(self, job: JobId, session: SessionRecord, spec: JobSpec) -> JobRecord:
        self._numbers += 1
        record = JobRecord(job, f"j{self._numbers}", session, spec)
        self.jobs[job] = record
        session.jobs.add(job)
        return record

    def forget_job(self, job: JobId) -> JobRecord | None:
        record = self.jobs.pop(job, None)
        if record is not None:
            record.session.jobs.discard(job)
            record.close_segments()
        return record

    def unloaded(self, uid: int) -> Iterator[ProgramRecord]:
        """Each Program of one user that the device has not loaded yet."""
        for job in self.jobs.values():
            if job.session.peer.uid == uid:
                yield from (program for program in job.programs.values() if not program.announced)


def aligned_total(sizes: Sequence[int]) -> int:
    """Bytes of `sizes` laid end to end, each aligned as every buffer is."""
    return sum(map(aligned, sizes))
