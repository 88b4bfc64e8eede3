"""Handlers for programs, steps, pieces and transfers: what jobs ask for, and how it goes."""

from __future__ import annotations

from gpumux.core import cutting, faults
from gpumux.core import events as ev
from gpumux.core.commands import AcceptProgram, AnnounceProgram, FailStep, FinishStep, FinishTransfer, RefuseProgram
from gpumux.core.queue import Job, JobState, Program, Step, Transfer, spans
from gpumux.core.state import CoreState
from gpumux.model import Fault, Priority, StepTimes

# ---- programs


def program_offered(core: CoreState, event: ev.ProgramOffered) -> None:
    job = core.jobs.get(event.job)
    if job is None or event.program in job.programs:
        return core.ignore()
    opening = job.state is JobState.OPEN
    fault = core.ledger.refuse_program(job, event.footprint) if opening else faults.closing(job.id)
    if fault is not None:
        return core.refuse(RefuseProgram(job.id, event.program, fault), fault)
    key = event.content_hash or f"{job.id}/{event.program}"
    program = Program(event.program, event.footprint, event.content_hash, operators=event.operators, key=key)
    job.programs[event.program] = program
    core.ledger.recharge(job)
    return core.out.append(AcceptProgram(job.id, event.program))


def program_ready(core: CoreState, event: ev.ProgramReady) -> None:
    job = core.live(event.job)
    if job is None:
        return None
    program = job.programs.get(event.program)
    if program is None or event.cut <= program.cut or (program.ready and not event.pieces):
        return core.ignore()
    if not event.pieces:
        return _drop(core, job, program, faults.no_pieces(program.id))
    first = not program.ready
    program.cut, program.pieces = event.cut, tuple(max(0.0, seconds) for seconds in event.pieces)
    program.bounds = event.bounds or tuple(range(len(event.pieces) + 1))
    program.spans = spans(program.key, program.bounds)
    core.tell(job.id, None, "program", program.id, program.cut, len(program.pieces))
    if first:
        core.out.append(AnnounceProgram(job.id, program.id))
    if core.guard is not None:
        core.guard.recut(job)
    cutting.ask(core, job)
    return core.refresh(job)


def program_dropped(core: CoreState, event: ev.ProgramDropped) -> None:
    job = core.live(event.job)
    if job is None:
        return None
    program = job.programs.get(event.program)
    if program is None or program.ready:
        return core.ignore()
    return _drop(core, job, program, event.fault)


def _drop(core: CoreState, job: Job, program: Program, fault: Fault) -> None:
    del job.programs[program.id]
    core.ledger.recharge(job)
    core.refuse(RefuseProgram(job.id, program.id, fault), fault)
    for step in job.remove_steps_of(program):
        core.fail(job, step.id, fault)
    core.refresh(job)


# ---- steps


def step_submitted(core: CoreState, event: ev.StepSubmitted) -> None:
    job = core.jobs.get(event.job)
    if job is None:
        fault = faults.unknown_job(event.job)
        return core.refuse(FailStep(event.job, event.step, fault), fault)
    if event.step <= job.last_step:
        return core.ignore()  # said twice: it has its answer, or will
    job.last_step = event.step
    program = job.programs.get(event.program)
    if job.state is not JobState.OPEN:
        fault = faults.closing(job.id)
    elif program is None:
        fault = faults.unknown_program(job.id, event.program)
    elif job.inflight >= job.spec.max_inflight:
        fault = faults.too_many_steps(job.id, job.spec.max_inflight)
    else:
        core.log.add((core.now, job.id, event.step, "queued", (job.inflight, event.program), event))
        step = Step(event.step, program, core.now, next(core.arrivals))
        if job.paused:
            step.noted = "paused"
            core.tell(job.id, step.id, "waits:paused")
        job.queue.append(step)
        job.inflight += 1
        if job.priority is Priority.HIGH and core.guard is not None:
            core.guard.submitted(job, step, event.waited, core.now)
        return core.refresh(job)
    job.steps_failed += 1
    return core.refuse(FailStep(job.id, event.step, fault), fault)


def client_waits(core: CoreState, event: ev.ClientWaits) -> None:
    job, guard = core.live(event.job), core.guard
    if job is None or guard is None or job.priority is not Priority.LOW:
        return None
    if all(step.id != event.step for step in job.steps()):
        return core.ignore()
    tracks = [track for each in event.before if (track := guard.tracks.get(each)) is not None]
    for track in tracks:
        if not event.over:
            guard.awaited.add(job, event.step, track)
        elif track.after is job:
            guard.awaited.remove(track)
    if tracks and not event.over:
        names = ", ".join(repr(track.job.spec.name or track.job.id) for track in tracks)
        core.log.add((core.now, job.id, event.step, "awaited", (names,), event))
        guard.waits(job)
    return None


def piece_done(core: CoreState, event: ev.PieceDone) -> None:
    suspended = event.suspended
    seconds = event.ended - event.started - suspended
    if seconds < 0.0:
        seconds = 0.0
    launch = core.board.vacate(event.launch, seconds)
    if launch is None:
        return core.ignore()
    job, step = launch.job, launch.step
    job.device_s += seconds
    if suspended:
        job.suspended_s += suspended
    if core.guard is not None:
        if launch.beside_high:
            core.guard.harvested += seconds
        core.guard.done(launch, event.started, event.ended, core.board)
    if job.state is JobState.CLOSING:
        return None  # its step is answered; only the room in the window was still owed
    if launch.piece == 0:
        step.started = event.started
    step.done += 1
    step.device_s += seconds
    core.log.add((core.now, job.id, step.id, "done", (launch.piece, seconds * 1e3), event))
    if step.done == len(step.pieces):
        _finish(core, job, step, event)
    return core.refresh(job)


def _finish(core: CoreState, job: Job, step: Step, event: ev.PieceDone) -> None:
    del job.running[step.id]
    if job.awaited_by is not None and core.guard is not None:
        core.guard.awaited.answered(job, step.id)
    job.inflight -= 1
    job.steps_done += 1
    until = event.ended if event.answered else core.now  # what the client was, or will be, told
    times = StepTimes(max(0.0, step.started - step.submitted), step.device_s, max(0.0, until - step.submitted))
    told = (times.queue_s * 1e3, times.device_s * 1e3, times.total_s * 1e3)
    core.log.add((core.now, job.id, step.id, "finished", told, event))
    core.out.append(FinishStep(job.id, step.id, times, event.answered))


def piece_failed(core: CoreState, event: ev.PieceFailed) -> None:
    """Part of a step may have run, so the job's state is lost, and the job with it."""
    launch = core.board.vacate(event.launch, 0.0)
    if launch is None:
        return core.ignore()
    if launch.job.state is not JobState.CLOSING:
        core.close(launch.job, event.fault, tell=event.fault)
    return None


# ---- transfers


def transfer_requested(core: CoreState, event: ev.TransferRequested) -> None:
    job = core.jobs.get(event.job)
    if job is None:
        fault = faults.unknown_job(event.job)
    elif any(transfer.id == event.transfer for transfer in job.all_transfers()):
        return core.ignore()
    elif job.state is not JobState.OPEN:
        fault = faults.closing(job.id)
    elif job.transfers >= core.config.max_transfers_per_job:
        fault = faults.too_many_transfers(job.id, event.transfer, job.transfers)
    else:
        job.queue.append(Transfer(event.transfer, event.into_device))
        job.transfers += 1
        return core.refresh(job)
    return core.refuse(FinishTransfer(event.job, event.transfer, fault), fault)


def transfer_ended(core: CoreState, event: ev.TransferEnded) -> None:
    job = core.jobs.get(event.job)
    if job is None or job.transfer is None or job.transfer.id != event.transfer:
        return core.ignore()
    job.transfer = None
    job.transfers -= 1
    core.tell(job.id, None, "transferred", event.transfer, event.fault.message if event.fault else "well")
    core.out.append(FinishTransfer(job.id, event.transfer, event.fault))
    return core.refresh(job)
