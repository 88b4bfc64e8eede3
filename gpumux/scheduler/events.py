"""Events, which the scheduler is given, and commands, which it returns. Frozen data; named tuples where there is one
for every piece, since they are cheaper. The clock is passed to `handle(event, now)` separately. Events that the device
emits are in `gpumux/types.py`, the rest comes from clients and operators, or from the daemon.

The scheduler never sees bytes, descriptors or programs: the daemon keeps those under the ids used here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from gpumux.scheduler.config import SchedulerConfig
from gpumux.types import (
    CollectiveEnded,
    DeviceInfo,
    Fault,
    Footprint,
    JobDied,
    JobId,
    JobReleased,
    JobSpec,
    LaunchId,
    Peer,
    PieceDone,
    PieceFailed,
    Priority,
    ProgramId,
    ProgramReady,
    SessionId,
    StepId,
    StepTimes,
    TransferEnded,
    TransferId,
)


@dataclass(frozen=True, slots=True)
class SessionOpened:
    session: SessionId
    peer: Peer


@dataclass(frozen=True, slots=True)
class SessionClosed:
    """The client left, died or lost its lease. Its jobs go with it."""

    session: SessionId
    reason: str


@dataclass(frozen=True, slots=True)
class JobRequested:
    """Idempotent: the same job from the same session again gets the same answer."""

    session: SessionId
    job: JobId
    spec: JobSpec


@dataclass(frozen=True, slots=True)
class ProgramOffered:
    """The device checked this program; the scheduler decides whether it fits."""

    job: JobId
    program: ProgramId
    footprint: Footprint
    content_hash: str = ""  # equal programs of any job have equal ones
    operators: tuple[str, ...] = ()  # their names, in captured order, where the device gives them
    live: tuple[int, ...] = ()  # bytes of temporaries alive at each of them, if the job shares an arena


@dataclass(frozen=True, slots=True)
class ProgramDropped:
    """Loading failed after admission: give back what was charged."""

    job: JobId
    program: ProgramId
    fault: Fault


class StepSubmitted(NamedTuple):
    """`waited`: seconds between the step's arrival and this event, as far as is known."""

    job: JobId
    step: StepId
    program: ProgramId
    waited: float = 0.0


@dataclass(frozen=True, slots=True)
class ClientWaits:
    """A thread of the client waits for this step, and also steps the jobs `before`: they get no step before this one
    is answered. `over`: it stopped waiting before the answer."""

    job: JobId
    step: StepId
    before: tuple[JobId, ...]
    over: bool = False


@dataclass(frozen=True, slots=True)
class TransferRequested:
    """Move state in or out, in order with the job's steps: after all submitted before it."""

    job: JobId
    transfer: TransferId
    into_device: bool


@dataclass(frozen=True, slots=True)
class PauseRequested:
    """The owner or an operator pauses a job. A paused job starts no further piece; what is out finishes."""

    job: JobId


@dataclass(frozen=True, slots=True)
class ResumeRequested:
    job: JobId


@dataclass(frozen=True, slots=True)
class ChangeRequested:
    """Another priority or weight for a job, by its owner or an operator, within what each may. None: as it is."""

    job: JobId
    priority: Priority | None
    weight: float | None


@dataclass(frozen=True, slots=True)
class CloseRequested:
    """`drain` answers every submitted step first; otherwise they are answered with a fault."""

    job: JobId
    drain: bool
    reason: str


@dataclass(frozen=True, slots=True)
class ReserveRequested:
    """Hold `nbytes`, and for a high job the high place, for the job of this id, until `lease_s` from now. The same
    request again begins the lease anew. Answered under `ref`, as the next two are."""

    session: SessionId
    ref: int
    job: JobId
    priority: Priority
    nbytes: int
    lease_s: float


@dataclass(frozen=True, slots=True)
class ConfirmRequested:
    """From now on the job may take its reservation up, for `lease_s`."""

    session: SessionId
    ref: int
    job: JobId
    lease_s: float


@dataclass(frozen=True, slots=True)
class ReleaseRequested:
    """Forget the reservation, if there is one. A job that took it up keeps it."""

    session: SessionId
    ref: int
    job: JobId


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """The daemon is leaving: fail what is queued, close every job."""

    reason: str


@dataclass(frozen=True, slots=True)
class Reconfigured:
    """Limits and access rules change; what was accepted stays. The rest of `config` is as it was."""

    config: SchedulerConfig


@dataclass(frozen=True, slots=True)
class DeviceOpened:
    info: DeviceInfo


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed: what was held until a time may be launched."""


Event = (
    SessionOpened | SessionClosed | JobRequested | ProgramOffered | ProgramReady | ProgramDropped | StepSubmitted
    | ClientWaits | TransferRequested | PieceDone | PieceFailed | CollectiveEnded | TransferEnded | JobDied
    | JobReleased | PauseRequested | ResumeRequested | ChangeRequested | CloseRequested | DrainRequested | Reconfigured
    | ReserveRequested | ConfirmRequested | ReleaseRequested | DeviceOpened | Tick
)  # fmt: skip


# ---- Commands: what the daemon's loop has to do, in order


@dataclass(frozen=True, slots=True)
class AcceptJob:
    """Tell the session, and the device to make room (unless it already did: idempotent)."""

    session: SessionId
    job: JobId
    fresh: bool


@dataclass(frozen=True, slots=True)
class RefuseJob:
    session: SessionId
    job: JobId
    fault: Fault


@dataclass(frozen=True, slots=True)
class AcceptProgram:
    """Load a program, which fits and is charged."""

    job: JobId
    program: ProgramId


@dataclass(frozen=True, slots=True)
class RefuseProgram:
    """Refuse a program that does not fit, or that could not be loaded. The job goes on."""

    job: JobId
    program: ProgramId
    fault: Fault


@dataclass(frozen=True, slots=True)
class AnnounceProgram:
    """The program is loaded for the first time; tell the client."""

    job: JobId
    program: ProgramId


@dataclass(frozen=True, slots=True)
class CutProgram:
    """Have the device cut a loaded program into pieces of about `target_s`, None: as long as it makes them itself. If
    that is another cut than the newest, ProgramReady says so, after a step of the newest."""

    job: JobId
    program: ProgramId
    target_s: float | None


class LaunchPiece(NamedTuple):
    launch: LaunchId
    job: JobId
    step: StepId
    program: ProgramId
    cut: int
    piece: int
    stream: int  # priority, larger first
    share: float = 1.0  # part of the multiprocessors it may use
    submitted: float | None = None  # with the step's last piece: when the step was, so that the device can answer it
    pieces: int = 1  # from `piece` on


@dataclass(frozen=True, slots=True)
class StartTransfer:
    job: JobId
    transfer: TransferId
    into_device: bool


@dataclass(frozen=True, slots=True)
class FinishTransfer:
    job: JobId
    transfer: TransferId
    fault: Fault | None


class FinishStep(NamedTuple):
    """The step is answered, successfully. Exactly one FinishStep or FailStep per submitted step.
    `answered`: the device has answered the client already."""

    job: JobId
    step: StepId
    times: StepTimes
    answered: bool = False


@dataclass(frozen=True, slots=True)
class FailStep:
    job: JobId
    step: StepId
    fault: Fault


@dataclass(frozen=True, slots=True)
class UnloadJob:
    """Have the device release the job; it answers with JobReleased."""

    job: JobId


@dataclass(frozen=True, slots=True)
class EndJob:
    """Tell the client the job is over. `fault` None: closed as it asked."""

    job: JobId
    session: SessionId
    fault: Fault | None


@dataclass(frozen=True, slots=True)
class JobChanged:
    """Every change that was asked for is in force: these are the job's priority and weight from now on."""

    job: JobId
    priority: Priority
    weight: float


@dataclass(frozen=True, slots=True)
class ForgetJob:
    """Drop the metrics, segments and owner of a job of which nothing is left anywhere."""

    job: JobId


@dataclass(frozen=True, slots=True)
class AnswerReservation:
    """Answer a request about a reservation: it was done, or refused with `fault`."""

    session: SessionId
    ref: int
    fault: Fault | None


class WakeAt(NamedTuple):
    """Send a Tick at this time, at the latest. Any Tick cancels this command: the scheduler then asks again."""

    when: float


Command = (
    AcceptJob | RefuseJob | AcceptProgram | RefuseProgram | AnnounceProgram | CutProgram | LaunchPiece | StartTransfer
    | FinishTransfer | FinishStep | FailStep | UnloadJob | EndJob | JobChanged | ForgetJob | AnswerReservation
    | WakeAt
)  # fmt: skip
