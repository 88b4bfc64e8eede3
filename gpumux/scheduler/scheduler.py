"""The scheduler: `handle(event, now)` takes one event and returns commands, what to do about it.

Pure: no clock, no sockets, no threads. Each event has a handler, which updates the state; then the policy launches
whatever there is room for. A submitted step is answered exactly once, by FinishStep or FailStep. Events about jobs,
launches or transfers that are over are late, not wrong: they are counted in the snapshot and change nothing.

To read: `Scheduler.handle` at the end, then the handlers, which are in the order of `HANDLERS`. `events.py` lists
events and commands, `state.py` what the scheduler knows, `policy.py` what is launched next.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any, Final

from gpumux.scheduler import admission, advice, explain, invariants, report
from gpumux.scheduler import events as ev
from gpumux.scheduler.config import SchedulerConfig
from gpumux.scheduler.events import (
    AcceptJob,
    AcceptProgram,
    AnnounceProgram,
    AnswerReservation,
    Command,
    CutProgram,
    EndJob,
    FailStep,
    FinishStep,
    FinishTransfer,
    ForgetJob,
    JobChanged,
    LaunchPiece,
    RefuseJob,
    RefuseProgram,
    StartTransfer,
    UnloadJob,
    WakeAt,
)
from gpumux.scheduler.guard import interference
from gpumux.scheduler.guard.guard import SlowdownGuard
from gpumux.scheduler.guard.interference import Kept, PairSlowdown
from gpumux.scheduler.jobs import (
    JobProgram,
    JobState,
    JobStep,
    JobTransfer,
    OpenSession,
    ScheduledJob,
    SharedArena,
    spans,
)
from gpumux.scheduler.leases import WaveLease, lease_of
from gpumux.scheduler.policy import NextLaunch, Policy
from gpumux.scheduler.reservations import Reservation
from gpumux.scheduler.state import Hidden, SchedulerState, nothing_hidden
from gpumux.types import (
    CollectiveEnded,
    Fault,
    JobDied,
    JobId,
    JobReleased,
    LaunchId,
    PieceDone,
    PieceFailed,
    Priority,
    ProgramId,
    ProgramReady,
    SessionId,
    StepId,
    StepTimes,
    TransferEnded,
)

_HIGH: Final = Priority.HIGH
SHORTEST_WAKE_S: Final = 20e-6  # a Tick is not asked for sooner
MOST_DEPARTED: Final = 1024  # names of jobs that are gone: a few for each job there can be


# ---- Changes that several handlers share


def ignore(state: SchedulerState) -> None:
    """The event is late or came before; it changes nothing."""
    state.ignored[type(state.cause).__name__] += 1


def record(state: SchedulerState, job: JobId, step: StepId | None, kind: str, *detail: object) -> None:
    """Add a record to the history; `kind` is one of explain.TEMPLATES."""
    state.history.append((state.now, job, step, kind, detail, state.cause))


def live(state: SchedulerState, job_id: JobId) -> ScheduledJob | None:
    """The job, unless it is unknown or closing; then the event is ignored."""
    job = state.jobs.get(job_id)
    if job is None or job.state is JobState.CLOSING:
        ignore(state)
        return None
    return job


def refuse(state: SchedulerState, command: RefuseJob | RefuseProgram | FailStep | FinishTransfer, fault: Fault) -> None:
    """Refuse something that was not accepted yet."""
    state.refusals[fault.code] += 1
    step = command.step if isinstance(command, FailStep) else None
    record(state, command.job, step, "refused", fault.message)
    state.commands.append(command)


def fail(state: SchedulerState, job: ScheduledJob, step: StepId, fault: Fault) -> None:
    """Fail a step that was accepted."""
    job.steps_failed += 1
    record(state, job.id, step, "failed", fault.code, fault.message)
    state.commands.append(FailStep(job.id, step, fault))


def refresh(state: SchedulerState, job: ScheduledJob) -> None:
    """After a change to the job: start what needs no window, and update the ready queue."""
    if job.new_priority is not None:
        finish_change(state, job)
    state.changed_jobs.append(job)
    head = job.queue[0] if job.queue else None
    if isinstance(head, JobTransfer):
        if not job.running and job.transfer is None and not job.paused:
            job.transfer = head
            job.queue.popleft()
            record(state, job.id, None, "transfer", head.id)
            state.commands.append(StartTransfer(job.id, head.id, head.into_device))
    elif job.state is JobState.DRAINING and not job.busy():
        _unload(state, job, admission.closing(job.id), None)
    state.windows.update(job)
    if job.arena is not None:
        refresh_arena(state, job, job.arena)


def refresh_arena(state: SchedulerState, job: ScheduledJob, arena: SharedArena) -> None:
    """After a change to what the job holds of an arena, or waits for: which of its jobs may go on."""
    state.ledger.resize(job.peer.uid, arena)
    for each in arena.jobs.values():
        state.windows.update(each)
        state.changed_jobs.append(each)


def finish_change(state: SchedulerState, job: ScheduledJob) -> None:
    """Change the job's class if that was asked for and is possible; say so once no change is left.

    A class is changed while no piece of the job is out: then each class's window holds launches of its own jobs
    alone, and the guard never sees one part of a step in each class. So a job that is to change its class launches
    nothing until its pieces have ended, changes, and goes on where it was.
    """
    priority = job.new_priority
    if priority is not None and priority is not job.priority:
        if job.outstanding:
            return
        _set_priority(state, job, priority)
    job.new_priority = None
    state.commands.append(JobChanged(job.id, job.priority, job.weight))


def _set_priority(state: SchedulerState, job: ScheduledJob, priority: Priority) -> None:
    state.windows.set_priority(job, priority, state.jobs.values())
    record(state, job.id, None, "changes", priority.name.lower())
    if state.guard is not None:
        state.guard.forget(job, state.now)
        request_cut(state, job)
        if priority is Priority.HIGH:
            head = job.queue[0] if job.queue else None
            begun = head if isinstance(head, JobStep) and head.launched else None
            state.guard.promoted(job, begun, state.now)


def request_cut(state: SchedulerState, job: ScheduledJob) -> None:
    """Ask the device to cut the job's programs as the guard wants them, where they are not and can be."""
    if state.guard is None:
        return
    target_s = state.guard.cutting.target_s if job.priority is Priority.LOW else None
    for program in job.programs.values():
        wanted = target_s
        if wanted is not None and program.cut_target_s is None and max(program.pieces, default=0.0) <= wanted:
            wanted = None  # its pieces are short enough
        if program.ready and program.cut_target_s != wanted:
            program.cut_target_s = wanted
            state.commands.append(CutProgram(job.id, program.id, wanted))
            kind = "cut" if wanted is not None else "uncut"
            record(state, job.id, None, kind, program.id, (wanted or 0.0) * 1e3)


def lose_launches(state: SchedulerState, launches: list[LaunchId]) -> None:
    """These launches are off the device, and no end of them will be reported."""
    if state.guard is not None:
        for launch in launches:
            state.guard.lost(launch)


def close(state: SchedulerState, job: ScheduledJob, fault: Fault, tell: Fault | None) -> None:
    """Answer everything the job has submitted with `fault` and have the device release it. The client is told at
    once with `tell`; None: the client asked for it, and is told when the memory is free."""
    record(state, job.id, None, "closing", fault.message)
    for step in job.steps():
        fail(state, job, step.id, fault)
    for transfer in job.all_transfers():
        state.commands.append(FinishTransfer(job.id, transfer.id, fault))
    job.left_bytes = job.arena_bytes()
    job.empty()
    _unload(state, job, fault, tell)
    state.windows.update(job)
    if job.arena is not None:
        refresh_arena(state, job, job.arena)


def _unload(state: SchedulerState, job: ScheduledJob, fault: Fault, tell: Fault | None) -> None:
    job.state = JobState.CLOSING
    state.windows.weigh(job, state.jobs.values())
    if state.guard is not None:
        state.guard.forget(job, state.now)
    if tell is not None:
        job.end_sent = True
        state.commands.append(EndJob(job.id, job.session, tell))
    for program in job.programs.values():  # an offer is answered, too: announced or refused
        if not program.ready:
            refuse(state, RefuseProgram(job.id, program.id, fault), fault)
    state.commands.append(UnloadJob(job.id))


def remember_name(state: SchedulerState, job: ScheduledJob) -> None:
    """The job is gone, but the history still names it."""
    if job.spec.name:
        state.departed[job.id] = job.spec.name
        if len(state.departed) > MOST_DEPARTED:
            del state.departed[next(iter(state.departed))]


# ---- The device, sessions and jobs
#
# A job's life: OPEN -> (DRAINING ->) CLOSING -> forgotten. CLOSING means that everything it submitted is answered and
# the device was asked to release it. Until the device reports that (JobReleased) the job's memory stays charged, and
# its launches stay in the window because they may still run. A client that closes its job is told (EndJob) only then,
# so that its next job finds the memory free; a job that ends for any other reason is reported at once.


def device_opened(state: SchedulerState, event: ev.DeviceOpened) -> None:
    if state.info is not None:
        return ignore(state)
    state.info, state.policy = event.info, state.policy_class(state.config, event.info)
    state.guard = state.policy.guard
    state.windows.open_device(event.info)
    return state.ledger.open_device(event.info.memory_bytes)


def reconfigured(state: SchedulerState, event: ev.Reconfigured) -> None:
    state.config = state.ledger.config = event.config


def session_opened(state: SchedulerState, event: ev.SessionOpened) -> None:
    if event.session in state.sessions:
        return ignore(state)
    state.sessions[event.session] = OpenSession(event.session, event.peer)
    return None


def session_closed(state: SchedulerState, event: ev.SessionClosed) -> None:
    session = state.sessions.pop(event.session, None)
    if session is None:
        return ignore(state)
    for job_id in sorted(session.jobs):
        job = state.jobs[job_id]
        if job.state is not JobState.CLOSING:
            fault = admission.closed(job_id, f"its session ended: {event.reason}")
            close(state, job, fault, tell=fault)
    return None


def job_requested(state: SchedulerState, event: ev.JobRequested) -> None:
    session, known = state.sessions.get(event.session), state.jobs.get(event.job)
    if known is not None and _same(known, event):
        return state.commands.append(AcceptJob(event.session, event.job, fresh=False))
    fault = _why_not(state, event, session, known)
    if session is None or fault is not None:
        fault = fault or admission.unknown_session(event.session)
        return refuse(state, RefuseJob(event.session, event.job, fault), fault)
    spec = event.spec
    job = ScheduledJob(event.job, session.id, session.peer, spec, state.now, spec.priority, spec.weight)
    state.jobs[job.id] = job
    session.jobs.add(job.id)
    state.ledger.add_job(job)
    if job.id in state.ledger.reservations.by_job:
        state.ledger.take_up(job)
    state.windows.add_job(job, state.jobs.values())
    record(state, job.id, None, "opened", job.priority.name.lower(), job.weight)
    return state.commands.append(AcceptJob(session.id, job.id, fresh=True))


def _same(job: ScheduledJob, event: ev.JobRequested) -> bool:
    return job.session == event.session and job.spec == event.spec and job.state is JobState.OPEN


def _why_not(
    state: SchedulerState, event: ev.JobRequested, session: OpenSession | None, known: ScheduledJob | None
) -> Fault | None:
    if state.leaving is not None:
        return admission.leaving(state.leaving)
    if session is None:
        return admission.unknown_session(event.session)
    if known is None:
        reservation = state.ledger.reservations.by_job.get(event.job)
        fault = state.ledger.refuse_job(session.peer, event.spec, reservation)
        return fault or (state.ledger.refuse_high(event.job) if event.spec.priority is Priority.HIGH else None)
    if known.session != event.session:
        return admission.taken(event.job)
    return admission.closing(event.job) if known.state is not JobState.OPEN else admission.changed(event.job)


def reserve_requested(state: SchedulerState, event: ev.ReserveRequested) -> None:
    session = state.sessions.get(event.session)
    fault = _why_not_reserved(state, event, session)
    if session is not None and fault is None:
        peer, ledger = session.peer, state.ledger
        for_all = state.config.access.may_operate(peer)
        made = Reservation(peer, event.priority, event.nbytes, state.now + event.lease_s, for_all)
        known = ledger.reservations.by_job.get(event.job)
        made.confirmed = known is not None and known.confirmed
        ledger.reservations.by_job[event.job] = made
        record(state, event.job, None, "reserved", event.priority.name.lower(), event.nbytes, event.lease_s)
    answer_reservation(state, event.session, event.ref, fault)


def _why_not_reserved(state: SchedulerState, event: ev.ReserveRequested, session: OpenSession | None) -> Fault | None:
    if state.leaving is not None:
        return admission.leaving(state.leaving)
    if session is None:
        return admission.unknown_session(event.session)
    if event.job in state.jobs:
        return admission.taken(event.job)
    fault = state.ledger.refuse_reservation(session.peer, event.job, event.priority, event.nbytes, event.lease_s)
    if fault is None and event.priority is Priority.HIGH:
        fault = state.ledger.refuse_high(event.job, state.jobs)
    return fault


def confirm_requested(state: SchedulerState, event: ev.ConfirmRequested) -> None:
    found, fault = _reservation(state, event.session, event.job)
    if found is None and fault is None:
        fault = admission.not_reserved(event.job)
    fault = fault or admission.refuse_lease(event.lease_s)
    if found is not None and fault is None:
        found.confirmed, found.expires = True, state.now + event.lease_s
    answer_reservation(state, event.session, event.ref, fault)


def release_requested(state: SchedulerState, event: ev.ReleaseRequested) -> None:
    found, fault = _reservation(state, event.session, event.job)
    if found is not None:
        del state.ledger.reservations.by_job[event.job]
    answer_reservation(state, event.session, event.ref, fault)


def _reservation(state: SchedulerState, session_id: SessionId, job: JobId) -> tuple[Reservation | None, Fault | None]:
    """The user's reservation for the job, if there is one; a fault if it is another user's."""
    session, found = state.sessions.get(session_id), state.ledger.reservations.by_job.get(job)
    if session is None:
        return None, admission.unknown_session(session_id)
    if found is not None and found.peer.uid != session.peer.uid:
        return None, admission.taken(job)
    return found, None


def answer_reservation(state: SchedulerState, session: SessionId, ref: int, fault: Fault | None) -> None:
    if fault is not None:
        state.refusals[fault.code] += 1
    state.commands.append(AnswerReservation(session, ref, fault))


def _pause(state: SchedulerState, job: ScheduledJob, paused: bool) -> None:
    job.paused = paused
    record(state, job.id, None, "paused" if paused else "resumed")
    if state.guard is not None:
        state.guard.paused(job, state.now)


def pause_requested(state: SchedulerState, event: ev.PauseRequested) -> None:
    job = live(state, event.job)
    if job is not None and not job.paused:
        _pause(state, job, True)
        refresh(state, job)


def resume_requested(state: SchedulerState, event: ev.ResumeRequested) -> None:
    job = live(state, event.job)
    if job is not None and job.paused:
        _pause(state, job, False)
        refresh(state, job)


def change_requested(state: SchedulerState, event: ev.ChangeRequested) -> None:
    """A weight counts from the next piece on; `finish_change` says when a priority does."""
    job = live(state, event.job)
    if job is None:
        return
    if event.weight is not None:
        state.windows.weigh(job, state.jobs.values(), event.weight)
        record(state, job.id, None, "weighs", job.weight)
    if event.priority is not None:
        job.new_priority = event.priority
        state.windows.update(job)
    finish_change(state, job)
    refresh(state, job)


def close_requested(state: SchedulerState, event: ev.CloseRequested) -> None:
    """A paused job that is to drain is resumed: to answer what was submitted, it has to run."""
    job = live(state, event.job)
    if job is None:
        return
    if not event.drain:
        close(state, job, admission.closed(job.id, event.reason), tell=None)
        return
    if job.state is JobState.OPEN:
        job.state = JobState.DRAINING
        record(state, job.id, None, "draining", event.reason)
    if job.paused:
        _pause(state, job, False)
    refresh(state, job)


def drain_requested(state: SchedulerState, event: ev.DrainRequested) -> None:
    if state.leaving is not None:
        return ignore(state)
    state.leaving = event.reason
    fault = admission.leaving(event.reason)
    for job in state.jobs.values():
        if job.state is not JobState.CLOSING:
            close(state, job, fault, tell=fault)
    return None


def job_died(state: SchedulerState, event: JobDied) -> None:
    """The device still answers the UnloadJob that follows, and only then is the job forgotten."""
    job = state.jobs.get(event.job)
    if job is None:
        return ignore(state)
    lose_launches(state, state.windows.drop_launches(job))
    if job.state is not JobState.CLOSING:
        close(state, job, event.fault, tell=event.fault)
    return None


def job_released(state: SchedulerState, event: JobReleased) -> None:
    job = state.jobs.get(event.job)
    if job is None or job.state is not JobState.CLOSING:
        return ignore(state)
    lose_launches(state, state.windows.remove_job(job))
    state.ledger.remove_job(job)
    del state.jobs[job.id]
    if job.arena is not None and job.arena.jobs:
        refresh_arena(state, job, job.arena)
    remember_name(state, job)
    if job.session in state.sessions:
        state.sessions[job.session].jobs.remove(job.id)
    record(state, job.id, None, "forgotten")
    if not job.end_sent:
        state.commands.append(EndJob(job.id, job.session, None))
    return state.commands.append(ForgetJob(job.id))


# ---- Programs


def program_offered(state: SchedulerState, event: ev.ProgramOffered) -> None:
    job = state.jobs.get(event.job)
    if job is None or event.program in job.programs:
        return ignore(state)
    opening = job.state is JobState.OPEN
    fault = state.ledger.refuse_program(job, event.footprint) if opening else admission.closing(job.id)
    if fault is not None:
        return refuse(state, RefuseProgram(job.id, event.program, fault), fault)
    key = event.content_hash or f"{job.id}/{event.program}"
    program = JobProgram(event.program, event.footprint, event.content_hash, operators=event.operators, key=key)
    if job.arena is not None:
        program.live = event.live
    job.programs[event.program] = program
    state.ledger.recharge(job)
    if job.arena is not None:
        refresh_arena(state, job, job.arena)
    return state.commands.append(AcceptProgram(job.id, event.program))


def program_ready(state: SchedulerState, event: ProgramReady) -> None:
    job = live(state, event.job)
    if job is None:
        return None
    program = job.programs.get(event.program)
    if program is None or event.cut <= program.cut or (program.ready and not event.pieces):
        return ignore(state)
    if not event.pieces:
        return _drop(state, job, program, admission.no_pieces(program.id))
    first = not program.ready
    program.cut, program.pieces = event.cut, tuple(max(0.0, seconds) for seconds in event.pieces)
    program.bounds = event.bounds or tuple(range(len(event.pieces) + 1))
    program.spans, program.gated = spans(program.key, program.bounds), event.gated
    if job.arena is not None:
        program.lease = lease_of(program.live, program.footprint.transient_bytes, program.bounds)
    if event.wave is not None:
        program.wave = WaveLease(event.wave, program.footprint.arena_bytes)
    record(state, job.id, None, "program", program.id, program.cut, len(program.pieces))
    if first:
        state.commands.append(AnnounceProgram(job.id, program.id))
    if state.guard is not None:
        state.guard.decisions.forget(job)
    request_cut(state, job)
    return refresh(state, job)


def program_dropped(state: SchedulerState, event: ev.ProgramDropped) -> None:
    job = live(state, event.job)
    if job is None:
        return None
    program = job.programs.get(event.program)
    if program is None or program.ready:
        return ignore(state)
    return _drop(state, job, program, event.fault)


def _drop(state: SchedulerState, job: ScheduledJob, program: JobProgram, fault: Fault) -> None:
    del job.programs[program.id]
    state.ledger.recharge(job)
    refuse(state, RefuseProgram(job.id, program.id, fault), fault)
    for step in job.remove_steps_of(program):
        fail(state, job, step.id, fault)
    refresh(state, job)


# ---- Steps and their pieces


def step_submitted(state: SchedulerState, event: ev.StepSubmitted) -> None:
    job = state.jobs.get(event.job)
    if job is None:
        fault = admission.unknown_job(event.job)
        return refuse(state, FailStep(event.job, event.step, fault), fault)
    if event.step <= job.last_step:
        return ignore(state)  # it came before, and was or will be answered
    job.last_step = event.step
    program = job.programs.get(event.program)
    if job.state is not JobState.OPEN:
        fault = admission.closing(job.id)
    elif program is None:
        fault = admission.unknown_program(job.id, event.program)
    elif job.inflight >= job.spec.max_inflight:
        fault = admission.too_many_steps(job.id, job.spec.max_inflight)
    else:
        record(state, job.id, event.step, "queued", job.inflight, event.program)
        step = JobStep(event.step, program, state.now, next(state.arrivals))
        if job.paused:
            step.recorded_wait = "paused"
            record(state, job.id, step.id, "waits:paused")
        job.queue.append(step)
        job.inflight += 1
        if job.priority is Priority.HIGH and state.guard is not None:
            state.guard.step_submitted(job, step, event.waited, state.now)
        return refresh(state, job)
    job.steps_failed += 1
    return refuse(state, FailStep(job.id, event.step, fault), fault)


def client_waits(state: SchedulerState, event: ev.ClientWaits) -> None:
    job, guard = live(state, event.job), state.guard
    if job is None or guard is None or job.priority is not Priority.LOW:
        return None
    step = next((step for step in job.steps() if step.id == event.step), None)
    if step is None:
        return ignore(state)
    before = [high for each in event.before if (high := guard.high_jobs.get(each)) is not None]
    if event.over:
        for high in before:
            if high.waits_for is job:
                guard.awaited_steps.remove(high)
    elif before:
        names = ", ".join(repr(high.job.spec.name or high.job.id) for high in before)
        record(state, job.id, event.step, "awaited", names)
        guard.client_waits(job, step, before)
    return None


def piece_done(state: SchedulerState, event: PieceDone) -> None:
    seconds = max(0.0, event.ended - event.started - event.suspended)
    launch = state.windows.complete(event.launch, seconds)
    if launch is None:
        return ignore(state)
    job, step = launch.job, launch.step
    state.at = job.id
    job.device_s += seconds
    job.suspended_s += event.suspended
    if state.guard is not None:
        state.guard.done(launch, event.started, event.ended, seconds, state.windows)
    if job.state is JobState.CLOSING:
        return None  # its step is answered; only its room in the window had to be given back
    if launch.piece == 0:
        step.started = event.started
    step.done += launch.pieces
    step.device_s += seconds
    record(state, job.id, step.id, "done", launch.which, seconds * 1e3)
    if step.done == len(step.pieces):
        _finish_step(state, job, step, event)
    return refresh(state, job)


def collective_ended(state: SchedulerState, event: CollectiveEnded) -> None:
    job = state.jobs.get(event.job)
    head = job.queue[0] if job is not None and job.queue else None
    if job is None or not isinstance(head, JobStep) or head.id != event.step or not head.waits_for_peers():
        return ignore(state)
    if not head.done == head.launched == event.piece:
        return ignore(state)
    head.met += 1
    seconds = max(0.0, event.ended - event.started)
    job.peers_s += seconds
    for _, sent, received in event.moved:
        job.sent_bytes += sent
        job.received_bytes += received
    record(state, job.id, head.id, "met", event.piece, seconds * 1e3)
    if state.guard is not None:
        state.guard.peers_came(job, event, state.now)
    return refresh(state, job)


def _finish_step(state: SchedulerState, job: ScheduledJob, step: JobStep, event: PieceDone) -> None:
    del job.running[step.id]
    if state.guard is not None:
        state.guard.awaited_steps.answered(job, step.id)
    job.inflight -= 1
    if event.fault is not None:
        fail(state, job, step.id, event.fault)
        return
    job.steps_done += 1
    until = event.ended if event.answered else state.now  # when the client was, or will be, answered
    times = StepTimes(max(0.0, step.started - step.submitted), step.device_s, max(0.0, until - step.submitted))
    record(state, job.id, step.id, "finished", times.queue_s * 1e3, times.device_s * 1e3, times.total_s * 1e3)
    state.commands.append(FinishStep(job.id, step.id, times, event.answered))


def piece_failed(state: SchedulerState, event: PieceFailed) -> None:
    """Part of a step may have run, so the job's state is lost, and the job with it."""
    launch = state.windows.complete(event.launch, 0.0)
    if launch is None:
        return ignore(state)
    state.at = launch.job.id
    lose_launches(state, [launch.id])
    if launch.job.state is not JobState.CLOSING:
        close(state, launch.job, event.fault, tell=event.fault)
    return None


# ---- Transfers


def transfer_requested(state: SchedulerState, event: ev.TransferRequested) -> None:
    job = state.jobs.get(event.job)
    if job is None:
        fault = admission.unknown_job(event.job)
    elif any(transfer.id == event.transfer for transfer in job.all_transfers()):
        return ignore(state)
    elif job.state is not JobState.OPEN:
        fault = admission.closing(job.id)
    elif job.transfers >= state.config.max_transfers_per_job:
        fault = admission.too_many_transfers(job.id, event.transfer, job.transfers)
    else:
        job.queue.append(JobTransfer(event.transfer, event.into_device))
        job.transfers += 1
        return refresh(state, job)
    return refuse(state, FinishTransfer(event.job, event.transfer, fault), fault)


def transfer_ended(state: SchedulerState, event: TransferEnded) -> None:
    job = state.jobs.get(event.job)
    if job is None or job.transfer is None or job.transfer.id != event.transfer:
        return ignore(state)
    job.transfer = None
    job.transfers -= 1
    record(state, job.id, None, "transferred", event.transfer, event.fault.message if event.fault else "well")
    state.commands.append(FinishTransfer(job.id, event.transfer, event.fault))
    return refresh(state, job)


def ticked(state: SchedulerState, event: ev.Tick) -> None:
    """Only the clock moved. Other Ticks that were asked for won't come: the daemon keeps only the earliest time."""
    state.wake_at = 0.0


# ---- Which event goes to which handler


HANDLERS: dict[type[Any], Callable[[SchedulerState, Any], None]] = {
    ev.DeviceOpened: device_opened,
    ev.Reconfigured: reconfigured,
    ev.SessionOpened: session_opened,
    ev.SessionClosed: session_closed,
    ev.JobRequested: job_requested,
    ev.ReserveRequested: reserve_requested,
    ev.ConfirmRequested: confirm_requested,
    ev.ReleaseRequested: release_requested,
    ev.PauseRequested: pause_requested,
    ev.ResumeRequested: resume_requested,
    ev.ChangeRequested: change_requested,
    ev.CloseRequested: close_requested,
    ev.DrainRequested: drain_requested,
    JobDied: job_died,
    JobReleased: job_released,
    ev.ProgramOffered: program_offered,
    ProgramReady: program_ready,
    ev.ProgramDropped: program_dropped,
    ev.StepSubmitted: step_submitted,
    ev.ClientWaits: client_waits,
    PieceDone: piece_done,
    PieceFailed: piece_failed,
    CollectiveEnded: collective_ended,
    ev.TransferRequested: transfer_requested,
    TransferEnded: transfer_ended,
    ev.Tick: ticked,
}


class Scheduler:
    """One device's jobs. Raises ConfigError when the configuration names no policy."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._state = SchedulerState(config)

    def handle(self, event: ev.Event, now: float) -> list[Command]:
        """Commands to carry out, in order. `now` is seconds, on the clock of PieceDone's times."""
        state = self._state
        state.now, state.cause, state.commands, state.at = now, event, [], None
        state.events += 1
        held = state.ledger.reservations
        if held.by_job:
            held.expire(now)
        HANDLERS[type(event)](state, event)
        if state.policy is not None:
            self._launch_all(state.policy)
        if held.by_job:
            self._wake_at(held.next_expiry())
        for job in state.changed_jobs:
            if job.queue:
                self._record_wait(job)
        state.changed_jobs.clear()
        return state.commands

    def _launch_all(self, policy: Policy) -> None:
        """Launch as long as the policy chooses a job, then ask to be woken if low work is held until some time."""
        state, guard = self._state, self._state.guard
        if guard is not None:
            if guard.cutting.changed:
                guard.cutting.changed = False
                for job in state.jobs.values():
                    if job.priority is Priority.LOW:
                        request_cut(state, job)
            guard.begin_event()
        low, high = state.windows.ready
        while low.size or high.size:
            choice = policy.choose(state.windows, state.now)
            if choice is None:
                break
            self._launch(policy, choice)
        if guard is not None:
            self._wake_at(guard.end_event(state.now))
            if guard.decisions.holds.started:
                self._record_holds(guard)

    def _launch(self, policy: Policy, choice: NextLaunch) -> None:
        """Launch the next piece of the job's next step."""
        state, job = self._state, choice.job
        state.at = job.id
        step, windows = job.head_step(), state.windows
        if not step.launched:
            step.begin()
        launch_id = LaunchId(next(state.launch_ids))
        limit = policy.limit(windows, job.priority)
        launch = windows.launch(launch_id, job, step, limit, choice.share, state.now)
        step.launched += launch.pieces
        if step.wave is not None:
            job.younger_last = step is not job.queue[0]
        if state.guard is not None:
            state.guard.launched(launch, windows)
        record(state, job.id, step.id, "launched", launch.which, len(step.pieces), launch_id, choice.stream, step.cut)
        last = step.launched == len(step.pieces)
        state.commands.append(
            LaunchPiece(
                launch_id, job.id, step.id, step.program.id, step.cut, launch.piece, choice.stream, choice.share,
                step.submitted if last else None, launch.pieces,
            )
        )  # fmt: skip
        if last:
            job.queue.popleft()
            job.running[step.id] = step
            windows.update(job)
            state.changed_jobs.append(job)
        elif step.wave is not None or step.lease is not None:
            windows.update(job)
        elif step.gated and step.waits_for_peers():
            windows.update(job)
            record(state, job.id, step.id, "waits:peers", step.met + 1, len(step.gated), step.launched)
        if job.arena is not None:
            refresh_arena(state, job, job.arena)

    def _wake_at(self, when: float) -> None:
        """Ask for a Tick at this time, if none comes before; inf: none is needed."""
        state = self._state
        if when < inf and not state.now < state.wake_at <= when:
            state.wake_at = max(when, state.now + SHORTEST_WAKE_S)
            state.commands.append(WakeAt(state.wake_at))

    # ---- why a step waits, for the history

    def _record_holds(self, guard: SlowdownGuard) -> None:
        """Record which low jobs are held from now on in the middle of a step."""
        state, started = self._state, guard.decisions.holds.started
        for job_id, hold in started:
            step = state.jobs[job_id].head_step()
            if step.launched:  # other steps are recorded by _record_wait
                record(state, job_id, step.id, f"waits:held:{hold.reason}", explain.HoldClause(state, hold))
        started.clear()

    def _record_wait(self, job: ScheduledJob) -> None:
        """Record why the job's next step has not begun, once for each reason."""
        state, step = self._state, job.queue[0]
        if not isinstance(step, JobStep) or step.launched or state.policy is None:
            return
        reason, detail = job.blocked(), ()  # type: str, tuple[object, ...]
        if reason == "program":
            detail = (step.program.id,)
        elif not reason:
            reason, detail = self._why_not_launched(state.policy, job)
        if reason != step.recorded_wait:
            step.recorded_wait = reason
            record(state, job.id, step.id, f"waits:{reason}", *detail)

    def _why_not_launched(self, policy: Policy, job: ScheduledJob) -> tuple[str, tuple[object, ...]]:
        state = self._state
        decision = state.guard.decisions.current(job) if state.guard is not None else None
        if decision is not None and decision.hold is not None:
            return f"held:{decision.hold.reason}", (explain.HoldClause(state, decision.hold),)
        windows, name = state.windows, "high" if job.priority is _HIGH else "low"
        limit, window = policy.limit(windows, job.priority), windows.by_class[job.priority]
        if windows.fits(job, limit) or not window.launches:
            first = windows.peek(job.priority)
            return "turn", (first.id if first is not None else "another", name)
        oldest = next(iter(window.launches.values()))
        out = (len(window.launches), limit.launches, window.seconds * 1e3, limit.seconds * 1e3)
        return "window", (name, *out, oldest.id, oldest.piece, oldest.step.id, oldest.job.id)

    # ---- after an exception of `handle`, which is a bug

    def interrupted(self) -> tuple[list[JobId], list[Command]]:
        """The jobs to blame when `handle` raised: those that contradict themselves, else the event's, if it has one.
        And the commands made before, which count. To go on, end these jobs, by JobDied, then `check_invariants`."""
        state = self._state
        state.changed_jobs.clear()
        commands, state.commands = state.commands, []
        jobs = self.contradicting()
        if not jobs:
            job = state.at or getattr(state.cause, "job", None)
            if job is None and isinstance(state.cause, (PieceDone, PieceFailed)):
                launch = report.out(state, state.cause.launch)
                job = launch.job if launch is not None else None
            jobs = [job] if job is not None else []
        return jobs, commands

    def contradicting(self) -> list[JobId]:
        """The jobs whose own records contradict each other."""
        return invariants.contradicting(self._state)

    def end_all(self, fault: Fault, now: float) -> list[Command]:
        """End every job with `fault`, whatever state it is in, and forget all but what it is charged until the device
        has released it. Returns the commands, which answer no steps: ForgetJob does, in the daemon."""
        old = self._state
        state = self._state = SchedulerState(old.config)
        state.now, state.cause, state.history, state.departed = now, old.cause, old.history, old.departed
        state.launch_ids, state.arrivals, state.leaving = old.launch_ids, old.arrivals, old.leaving
        state.events, state.ignored, state.refusals = old.events, old.ignored, old.refusals
        if old.info is not None:
            device_opened(state, ev.DeviceOpened(old.info))
        state.ledger.reservations = old.ledger.reservations
        for session in old.sessions.values():
            state.sessions[session.id] = OpenSession(session.id, session.peer)
        for was in old.jobs.values():
            job = ScheduledJob(was.id, was.session, was.peer, was.spec, now, was.priority, was.weight)
            job.state, job.programs, job.end_sent, job.last_step = JobState.CLOSING, was.programs, True, was.last_step
            state.jobs[job.id] = job
            state.ledger.add_job(job)
            state.ledger.recharge(job)
            if job.session in state.sessions:
                state.sessions[job.session].jobs.add(job.id)
            record(state, job.id, None, "closing", fault.message)
            if not was.end_sent:
                state.commands.append(EndJob(job.id, job.session, fault))
            if was.state is not JobState.CLOSING:
                state.commands.append(UnloadJob(job.id))
        return state.commands

    # ---- what can be read

    def knows(self, job: JobId) -> bool:
        """Whether the job is open, or ends and the device has not released it."""
        return job in self._state.jobs

    def refuse_high(self, job: JobId) -> Fault | None:
        """Why this job may not become high, since the high place is another's; None if it may."""
        return self._state.ledger.refuse_high(job)

    @property
    def config(self) -> SchedulerConfig:
        """The configuration in force."""
        return self._state.config

    @property
    def drained(self) -> bool:
        """Whether the daemon asked to leave, and nothing is left on the device."""
        return self._state.leaving is not None and not self._state.jobs

    def story(
        self, job: JobId, step: StepId | None = None, newest: int | None = None, hidden: Hidden = nothing_hidden
    ) -> list[str]:
        """The job's history in readable lines, `newest` of them at most: when steps were queued, why they waited, when
        their pieces ran. `hidden` names the jobs of which neither name nor operators may be shown."""
        self._state.hidden = hidden
        try:
            return explain.story(self._state, job, step, newest)
        finally:
            self._state.hidden = nothing_hidden

    def explain(self, job: JobId, hidden: Hidden = nothing_hidden) -> list[str]:
        """Sentences: why this job is slow or held now. For a job that is gone, or never was, the end of its history."""
        self._state.hidden = hidden
        try:
            known = self._state.jobs.get(job)
            return explain.explain(self._state, known) if known is not None else explain.gone(self._state, job)
        finally:
            self._state.hidden = nothing_hidden

    def advise(self, job: JobId, hidden: Hidden = nothing_hidden) -> advice.Advice:
        """How the job fares, why, and what to do about it, in brief. Raises KeyError if it is not open."""
        self._state.hidden = hidden
        try:
            return advice.advise(self._state, self._state.jobs[job])
        finally:
            self._state.hidden = nothing_hidden

    def snapshot(self) -> dict[str, Any]:
        """Plain data for status and metrics; `report.py` lists it."""
        return report.take(self._state)

    def out(self, launch: LaunchId) -> report.LaunchInfo | None:
        """The launch, while it is outstanding."""
        return report.out(self._state, launch)

    def all_out(self) -> list[report.LaunchInfo]:
        """Every outstanding launch."""
        return report.all_out(self._state)

    def held(self) -> list[report.HeldJob]:
        """Low jobs that the guard holds now."""
        return report.held(self._state)

    def banned(self) -> list[report.BannedRange]:
        """The bans in force."""
        return report.banned(self._state)

    def load(self, job: JobId) -> report.JobLoad:
        """How many steps the job has waiting and under way, and what it is charged."""
        return report.load(self._state, job)

    def operators(self, job: JobId, program: ProgramId) -> tuple[str, ...]:
        """The names of a program's operators, in captured order, where the device gives them."""
        return report.operators(self._state, job, program)

    # ---- what was learned of interference, kept over a restart of the daemon

    def interference(self) -> list[PairSlowdown]:
        """Every pair of programs of which it was measured how much the low one slows the high one."""
        guard = self._state.guard
        return interference.pairs(guard.costs) if guard is not None else []

    def learned(self) -> dict[str, int]:
        """The high programs of which something was learned, by content hash, with a number that changes with it."""
        guard = self._state.guard
        return interference.learned(guard.costs) if guard is not None else {}

    def kept(self, program: str) -> list[Kept]:
        """What was learned of a high program, as plain data."""
        guard = self._state.guard
        return interference.kept(guard.costs, program) if guard is not None else []

    def take_up(self, program: str, kept: list[Kept]) -> None:
        """Begin with what `kept` returned in an earlier daemon on the device, unless something was learned already."""
        guard = self._state.guard
        if guard is not None:
            interference.take_up(guard.costs, program, kept)

    def check_invariants(self) -> None:
        """Raise AssertionError, saying what, if the scheduler contradicts itself. Slow: for tests."""
        invariants.check(self._state)
