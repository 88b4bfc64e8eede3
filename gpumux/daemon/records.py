"""The daemon's records of sessions, jobs, programs, steps and transfers: descriptors, layouts, request numbers.

The scheduler never sees them. The daemon drops a job's records at ForgetJob. A record holds no copy of a fact that the
scheduler tracks, so the two can't disagree about state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from gpumux.daemon.segments import SharedSegment
from gpumux.program.codec import Outline
from gpumux.program.ir import aligned
from gpumux.types import Fault, GroupPlace, JobId, JobSpec, Peer, ProgramId, SessionId, StepId, TransferId

MOST_ENDS = 64


@dataclass(slots=True, eq=False)
class SessionRecord:
    """One connected client. `inline`: its tensors travel as frames (TCP). `role`: client, or control (a command such as
    `gpumux status`)."""

    id: SessionId
    peer: Peer
    inline: bool
    opened: float
    role: str = "client"
    jobs: set[JobId] = field(default_factory=set)
    ends: dict[JobId, Fault] = field(default_factory=dict)  # why its newest jobs to fail have ended, MOST_ENDS of them

    def ended(self, job: JobId, fault: Fault) -> None:
        """Remember why a job failed, to answer messages with that were sent before JobEnded arrived."""
        self.ends[job] = fault
        if len(self.ends) > MOST_ENDS:
            del self.ends[next(iter(self.ends))]


@dataclass(slots=True, eq=False)
class ProgramRecord:
    """A program, from LoadProgram on. `encoded` is dropped once the device has loaded it."""

    id: ProgramId
    ref: int
    encoded: bytes
    new_buffers: tuple[int, ...]
    binding: tuple[int, ...]
    slots: int
    slot_bytes: int = 0
    scalars: tuple[type, ...] = ()  # type of each host scalar of a step: float or int
    offered: bool = False  # the scheduler knows it
    announced: bool = False  # the client knows it
    segment: SharedSegment | None = None
    outline: Outline | None = None  # inline sessions only
    busy: dict[int, StepId] = field(default_factory=dict)  # slot -> the unanswered step in it
    steps: int = 0  # steps submitted so far


@dataclass(slots=True, eq=False)
class StepRecord:
    program: ProgramRecord
    slot: int
    scalars: tuple[float | int, ...]
    group: GroupPlace | None = None  # once it has run, if it did in a group


@dataclass(slots=True, eq=False)
class TransferRecord:
    """A transfer, from OpenTransfer on. `asked`: the scheduler knows it; `due`: the scheduler has started it."""

    ref: int
    buffers: tuple[int, ...]
    push: bool
    nbytes: int
    segment: SharedSegment | None = None
    asked: bool = False
    due: bool = False
    refused: bool = False  # the client knows that it will not happen
    # Called at the end of a transfer that the daemon started, with the fault, None on success.
    then: Callable[[Fault | None], None] | None = None


@dataclass(slots=True, eq=False)
class JobRecord:
    id: JobId
    short: str
    session: SessionRecord
    spec: JobSpec
    programs: dict[ProgramId, ProgramRecord] = field(default_factory=dict)
    waiting: deque[ProgramRecord] = field(default_factory=deque)  # programs to load after `loading`
    loading: ProgramRecord | None = None
    buffers: list[int] = field(default_factory=list)  # bytes of each state buffer
    steps: dict[StepId, StepRecord] = field(default_factory=dict)
    transfers: dict[TransferId, TransferRecord] = field(default_factory=dict)
    profiles: deque[tuple[SessionRecord, int]] = field(default_factory=deque)  # unanswered ProfileJob, oldest first
    changes: deque[tuple[SessionRecord, int]] = field(default_factory=deque)  # ChangeJob that is not in force yet
    stopped_by: str = ""  # the user that closed it, if not its client
    finished: bool = False  # its client closed it when its work was done
    closing: bool = False  # its end was requested
    last_step: int = -1
    last_transfer: int = -1
    unloading: bool = False  # the device was told to unload it
    over: bool = False  # EndJob was executed: the client has been told
    waves: bool = False  # a program of it is for one of two waves
    device_answers: bool = False  # the device has the session's channel, to answer steps itself
    group_steps: int = 0  # steps that ran in a group of jobs (daemon/fusion), and its part of their device seconds
    group_s: float = 0.0
    replays: int = 0  # steps that its client, which came back, runs again from now on

    @property
    def ending(self) -> bool:
        return self.closing or self.unloading or self.over

    def close_segments(self) -> None:
        """Close all shared memory of this job. Idempotent."""
        for program in self.programs.values():
            if program.segment is not None:
                program.segment.close()
        for transfer in self.transfers.values():
            if transfer.segment is not None:
                transfer.segment.close()


MOST_NAMES = 512  # programs whose jobs' names are remembered
MOST_USERS = 8  # of one program whose jobs' names are remembered


class ProgramNames:
    """The name of the newest job of each user that had a program, by its content hash. The oldest are forgotten."""

    def __init__(self) -> None:
        self._by_program: dict[str, dict[int, str]] = {}

    def add(self, program: str, uid: int, name: str) -> None:
        """A job of this user has the program."""
        names = self._by_program.pop(program, {})
        names.pop(uid, None)
        names[uid] = name
        if len(names) > MOST_USERS:
            del names[next(iter(names))]
        self._by_program[program] = names
        if len(self._by_program) > MOST_NAMES:
            del self._by_program[next(iter(self._by_program))]

    def of(self, program: str, uid: int | None) -> str:
        """The name that the user knows the program by; None: any user. "" if there is none."""
        names = self._by_program.get(program, {})
        return next(reversed(names.values()), "") if uid is None else names.get(uid, "")

    def all(self) -> list[tuple[str, int, str]]:
        """(program, uid, name) of each, the oldest first."""
        return [(program, uid, name) for program, names in self._by_program.items() for uid, name in names.items()]


class Records:
    """All records, by the ids that the scheduler and the clients use."""

    def __init__(self) -> None:
        self.sessions: dict[SessionId, SessionRecord] = {}
        self.jobs: dict[JobId, JobRecord] = {}
        # OpenJob requests that the scheduler has not answered: their ref and spec.
        self.opening: dict[tuple[SessionId, JobId], tuple[int, JobSpec]] = {}
        self.program_names = ProgramNames()
        self._numbers = 0

    def add_job(self, job: JobId, session: SessionRecord, spec: JobSpec) -> JobRecord:
        self._numbers += 1
        record = JobRecord(job, f"j{self._numbers}", session, spec)
        self.jobs[job] = record
        session.jobs.add(job)
        session.ends.pop(job, None)
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
