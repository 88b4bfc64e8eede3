"""What the core asks the daemon's loop to do, in order. Frozen data (events.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from gpumux.model import Fault, JobId, LaunchId, Priority, ProgramId, SessionId, StepId, StepTimes, TransferId


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
    """It fits and is charged: load it."""

    job: JobId
    program: ProgramId


@dataclass(frozen=True, slots=True)
class RefuseProgram:
    """It does not fit, or loading failed. The job lives on."""

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
    """Have the device cut a loaded program into pieces of about `target_s`, None: as long as it makes them itself. If that
    is another cut than the newest, ProgramReady says so, after a step of the newest."""

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
    `answered`: the device has told the client already."""

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
    """Make the device let go of the job; it answers with JobReleased."""

    job: JobId


@dataclass(frozen=True, slots=True)
class CloseJob:
    """Tell the client the job is over. `fault` None: closed as it asked."""

    job: JobId
    session: SessionId
    fault: Fault | None


@dataclass(frozen=True, slots=True)
class JobChanged:
    """Every change that was asked for is in force; these are the job's from now on."""

    job: JobId
    priority: Priority
    weight: float


@dataclass(frozen=True, slots=True)
class ForgetJob:
    """Nothing of the job is left anywhere: drop its metrics, segments and owner."""

    job: JobId


class WakeAt(NamedTuple):
    """Send a Tick at this time, at the latest. One that comes is for all that were asked for: the core asks anew."""

    when: float


Command = (
    AcceptJob | RefuseJob | AcceptProgram | RefuseProgram | AnnounceProgram | CutProgram | LaunchPiece | StartTransfer
    | FinishTransfer | FinishStep | FailStep | UnloadJob | CloseJob | JobChanged | ForgetJob | WakeAt
)  # fmt: skip
