"""The core's refusals in words: a code from `gpumux.errors`, the numbers, and what to do."""

from __future__ import annotations

from gpumux.errors import AdmissionRefused, DaemonGone, JobClosed, NotOwner, ProgramError, Refused, UnknownJob
from gpumux.model import Fault, JobId, ProgramId, SessionId, TransferId


def size(nbytes: int) -> str:
    """Bytes for people, exact enough to act on: "1.50 GiB (1610612736 bytes)"."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(nbytes) >= scale:
            return f"{nbytes / scale:.2f} {unit} ({nbytes} bytes)"
    return f"{nbytes} bytes"


def admission(message: str, remedy: str) -> Fault:
    return Fault(AdmissionRefused.code, message, remedy)


def refused(message: str, remedy: str) -> Fault:
    return Fault(Refused.code, message, remedy)


def unknown_session(session: SessionId) -> Fault:
    return refused(f"session {session} is not open", "connect again")


def unknown_job(job: JobId) -> Fault:
    return Fault(UnknownJob.code, f"there is no job {job}", "submit it again; it may have been closed or refused")


def taken(job: JobId) -> Fault:
    return Fault(NotOwner.code, f"job {job} belongs to another session", "choose another job id")


def changed(job: JobId) -> Fault:
    return refused(f"job {job} is open with other settings", "close it first, or choose another job id")


def closing(job: JobId) -> Fault:
    return Fault(JobClosed.code, f"job {job} is closing and takes no more work", "submit a new job")


def closed(job: JobId, reason: str) -> Fault:
    return Fault(JobClosed.code, f"job {job} was closed: {reason}", "submit it again if that was not meant")


def leaving(reason: str) -> Fault:
    return Fault(DaemonGone.code, f"the daemon is leaving: {reason}", "submit again once it is back")


def unknown_program(job: JobId, program: ProgramId) -> Fault:
    return refused(f"job {job} has no program {program}", "load the program, and wait until it is accepted")


def no_pieces(program: ProgramId) -> Fault:
    return Fault(ProgramError.code, f"the device cut program {program} into no pieces", "report this as a device bug")


def too_many_steps(job: JobId, limit: int) -> Fault:
    return refused(
        f"job {job} has {limit} steps unanswered, its max_inflight",
        f"wait for a step's result first, or open the job with max_inflight above {limit}",
    )


def too_many_transfers(job: JobId, transfer: TransferId, limit: int) -> Fault:
    return refused(
        f"job {job} has {limit} transfers unanswered; transfer {transfer} is one too many",
        "wait for an earlier transfer to end",
    )
