"""Handlers for the device, sessions and jobs: who is here, and how it ends.

A job's life: OPEN -> (DRAINING ->) CLOSING -> forgotten. CLOSING means that all it had submitted is
answered and the device was asked to let go of it. Until the device says so (JobReleased) its memory
stays charged, and its launches stay in the window because they may still be running. A client that
closes its job hears of it (CloseJob) only then, so that its next job finds the memory free; a job
that ends for any other reason hears of it at once.
"""

from __future__ import annotations

from gpumux.core import events as ev
from gpumux.core import faults
from gpumux.core.commands import AcceptJob, CloseJob, ForgetJob, RefuseJob
from gpumux.core.queue import Job, JobState, Session
from gpumux.core.state import CoreState
from gpumux.model import Fault


def device_opened(core: CoreState, event: ev.DeviceOpened) -> None:
    if core.info is not None:
        return core.ignore()
    core.info = event.info
    core.policy = core.policy_class(core.config, event.info)
    core.guard = core.policy.guard
    return core.ledger.open_device(event.info.memory_bytes)


def reconfigured(core: CoreState, event: ev.Reconfigured) -> None:
    core.config = core.ledger.config = event.config


def session_opened(core: CoreState, event: ev.SessionOpened) -> None:
    if event.session in core.sessions:
        return core.ignore()
    core.sessions[event.session] = Session(event.session, event.peer)
    return None


def session_closed(core: CoreState, event: ev.SessionClosed) -> None:
    session = core.sessions.pop(event.session, None)
    if session is None:
        return core.ignore()
    for job_id in sorted(session.jobs):
        job = core.jobs[job_id]
        if job.state is not JobState.CLOSING:
            fault = faults.closed(job_id, f"its session ended: {event.reason}")
            core.close(job, fault, tell=fault)
    return None


def job_requested(core: CoreState, event: ev.JobRequested) -> None:
    session, known = core.sessions.get(event.session), core.jobs.get(event.job)
    if known is not None and _same(known, event):
        return core.out.append(AcceptJob(event.session, event.job, fresh=False))
    fault = _why_not(core, event, session, known)
    if session is None or fault is not None:
        fault = fault or faults.unknown_session(event.session)
        return core.refuse(RefuseJob(event.session, event.job, fault), fault)
    spec = event.spec
    job = Job(event.job, session.id, session.peer, spec, core.now, spec.priority, spec.weight)
    core.jobs[job.id] = job
    session.jobs.add(job.id)
    core.ledger.add_job(job)
    core.tell(job.id, None, "opened", spec.priority.name.lower(), spec.weight)
    return core.out.append(AcceptJob(session.id, job.id, fresh=True))


def _same(job: Job, event: ev.JobRequested) -> bool:
    return job.session == event.session and job.spec == event.spec and job.state is JobState.OPEN


def _why_not(core: CoreState, event: ev.JobRequested, session: Session | None, known: Job | None) -> Fault | None:
    if core.leaving is not None:
        return faults.leaving(core.leaving)
    if session is None:
        return faults.unknown_session(event.session)
    if known is None:
        return core.ledger.refuse_job(session.peer, event.spec)
    if known.session != event.session:
        return faults.taken(event.job)
    return faults.closing(event.job) if known.state is not JobState.OPEN else faults.changed(event.job)


def _pause(core: CoreState, job: Job, paused: bool) -> None:
    job.paused = paused
    core.tell(job.id, None, "paused" if paused else "resumed")
    if core.guard is not None:
        core.guard.paused(job)


def pause_requested(core: CoreState, event: ev.PauseRequested) -> None:
    job = core.live(event.job)
    if job is not None and not job.paused:
        _pause(core, job, True)
        core.refresh(job)


def resume_requested(core: CoreState, event: ev.ResumeRequested) -> None:
    job = core.live(event.job)
    if job is not None and job.paused:
        _pause(core, job, False)
        core.refresh(job)


def close_requested(core: CoreState, event: ev.CloseRequested) -> None:
    """A paused job that is to drain is resumed: to answer what was submitted, it has to run."""
    job = core.live(event.job)
    if job is None:
        return
    if not event.drain:
        core.close(job, faults.closed(job.id, event.reason), tell=None)
        return
    if job.state is JobState.OPEN:
        job.state = JobState.DRAINING
        core.tell(job.id, None, "draining", event.reason)
    if job.paused:
        _pause(core, job, False)
    core.refresh(job)


def drain_requested(core: CoreState, event: ev.DrainRequested) -> None:
    if core.leaving is not None:
        return core.ignore()
    core.leaving = event.reason
    fault = faults.leaving(event.reason)
    for job in core.jobs.values():
        if job.state is not JobState.CLOSING:
            core.close(job, fault, tell=fault)
    return None


def job_died(core: CoreState, event: ev.JobDied) -> None:
    """The device still answers the unload that follows, and only then is the job forgotten."""
    job = core.jobs.get(event.job)
    if job is None:
        return core.ignore()
    core.board.clear(job)
    if job.state is not JobState.CLOSING:
        core.close(job, event.fault, tell=event.fault)
    return None


def job_released(core: CoreState, event: ev.JobReleased) -> None:
    job = core.jobs.get(event.job)
    if job is None or job.state is not JobState.CLOSING:
        return core.ignore()
    core.board.forget(job)
    core.ledger.remove_job(job)
    del core.jobs[job.id]
    if job.session in core.sessions:
        core.sessions[job.session].jobs.remove(job.id)
    core.tell(job.id, None, "forgotten")
    if not job.told:
        core.out.append(CloseJob(job.id, job.session, None))
    return core.out.append(ForgetJob(job.id))
