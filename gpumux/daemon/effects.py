"""Scheduler commands to effects (`CommandRunner`), and device events to the scheduler (`Completions`).

The effects of a command are calls of the device, shared memory, and answers to clients.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from gpumux.daemon.context import DaemonContext, as_fault, log
from gpumux.daemon.fusion.jobs import JobFusion
from gpumux.daemon.records import JobRecord, ProgramRecord, SessionRecord, StepRecord, aligned_total
from gpumux.daemon.requests import move, start_load
from gpumux.daemon.segments import SharedSegment
from gpumux.device import base as dev
from gpumux.device.base import AnswerForm, Answering, Launch, ProcessGroups, Regrading, SegmentHandle
from gpumux.errors import DaemonGone, GpumuxError, JobClosed, ProgramError
from gpumux.program.codec import outline
from gpumux.scheduler import events as cmd
from gpumux.scheduler import events as ev
from gpumux.types import (
    CollectiveEnded,
    Fault,
    JobDied,
    JobReleased,
    PieceDone,
    PieceFailed,
    ProgramReady,
    TransferEnded,
)
from gpumux.wire import messages as msg
from gpumux.wire.codec import step_done_form

# Codes of ends that the job did not cause: its client left, it was closed, the daemon leaves.
_NOT_ITS_FAULT = (JobClosed.code, DaemonGone.code)
_CLOSED = Fault(JobClosed.code, "the job was closed", "open a new one")


class CommandRunner:
    """Carries out commands; `handlers` has one method for each class of command.

    The scheduler may still send commands for a job that ended while it handled the same event. EndJob and ForgetJob
    have answered all open requests of the job, so such a command finds no record and does nothing. `forgotten` is
    called with each job after ForgetJob.
    """

    def __init__(self, context: DaemonContext, forgotten: Callable[[JobRecord], None]) -> None:
        self._context = context
        self._records = context.records
        self._device = context.device
        self._answering = context.device if isinstance(context.device, Answering) else None
        self.wake_at: float | None = None
        self._forgotten = forgotten
        self.handlers: dict[type, Callable[[Any], None]] = {  # by class of command
            cmd.LaunchPiece: self._launch,
            cmd.FinishStep: self._finish_step,
            cmd.FailStep: self._fail_step,
            cmd.WakeAt: self._wake_at,
            cmd.AcceptJob: self._accept_job,
            cmd.RefuseJob: self._refuse_job,
            cmd.AcceptProgram: self._accept_program,
            cmd.RefuseProgram: self._refuse_program,
            cmd.AnnounceProgram: self._announce_program,
            cmd.CutProgram: self._cut_program,
            cmd.StartTransfer: self._start_transfer,
            cmd.FinishTransfer: self._finish_transfer,
            cmd.UnloadJob: self._unload_job,
            cmd.EndJob: self._end_job,
            cmd.JobChanged: self._job_changed,
            cmd.ForgetJob: self._forget_job,
            cmd.AnswerReservation: self._answer_reservation,
        }

    # ---- steps

    def _launch(self, c: cmd.LaunchPiece) -> None:
        job = self._records.jobs[c.job]
        self._context.metrics.launched(job.spec.priority)
        step = job.steps[c.step]
        submitted = c.submitted if job.device_answers or self._share_channel(job) else None
        self._device.launch(
            Launch(
                c.launch, c.job, c.step, c.program, c.cut, c.piece, step.slot, step.scalars, c.stream, c.share,
                submitted, c.pieces,
            )
        )  # fmt: skip

    def _share_channel(self, job: JobRecord) -> bool:
        """Let the device answer the job's steps, if it can and the client has a channel."""
        channel = self._context.router.channel_of(job.session.id) if self._answering is not None else None
        if self._answering is None or channel is None:
            return False
        self._answering.answer_on(job.id, channel, AnswerForm(*step_done_form(job.id)))
        job.device_answers = True
        return True

    def _finish_step(self, c: cmd.FinishStep) -> None:
        job = self._records.jobs[c.job]
        step = self._take_step(job, c.step)
        times = c.times
        self._context.metrics.step_done(job.spec.priority, times)
        if c.answered:
            return
        frames = _results(step) if job.session.inline else ()
        done = msg.StepDone(c.job, c.step, times.queue_s, times.device_s, times.total_s, len(frames))
        answer = done if step.group is None else msg.GroupStepDone(*done, *step.group)
        self._context.reply(job.session, answer, frames)

    def _fail_step(self, c: cmd.FailStep) -> None:
        job = self._records.jobs.get(c.job)
        if job is None or c.step not in job.steps:
            return
        self._take_step(job, c.step)
        fault = c.fault
        log.info("job %s: step %d failed (%s): %s", job.short, c.step, fault.code, fault.message)
        self._context.reply(job.session, msg.StepFailed(c.job, c.step, fault.code, fault.message, fault.remedy))
        self._context.metrics.step_failed(fault.code)

    def _take_step(self, job: JobRecord, step: Any) -> StepRecord:
        """Remove an answered step, which frees its slot."""
        record = job.steps.pop(step)
        del record.program.busy[record.slot]
        return record

    def _wake_at(self, c: cmd.WakeAt) -> None:
        self.wake_at = c.when if self.wake_at is None else min(self.wake_at, c.when)

    # ---- jobs

    def _accept_job(self, c: cmd.AcceptJob) -> None:
        session = self._records.sessions.get(c.session)
        asked = self._records.opening.pop((c.session, c.job), None)
        if session is None or asked is None:
            return  # the client is gone; the scheduler hears of it next
        ref, spec = asked
        if c.fresh:
            job = self._records.add_job(c.job, session, spec)
            self._device.open_job(c.job, spec)
            if spec.gang is not None and isinstance(self._device, ProcessGroups):
                self._device.join(c.job, spec.gang)
            self._context.metrics.job_opened(spec.priority)
            log.info(
                "job %s: %r opened by uid %d, priority %s", job.short, spec.name, session.peer.uid, spec.priority.name
            )
        self._context.reply(session, msg.JobOpened(ref, c.job))

    def _refuse_job(self, c: cmd.RefuseJob) -> None:
        session = self._records.sessions.get(c.session)
        asked = self._records.opening.pop((c.session, c.job), None)
        if session is not None and asked is not None:
            self._context.refuse(session, asked[0], c.fault)

    def _answer_reservation(self, c: cmd.AnswerReservation) -> None:
        session = self._records.sessions.get(c.session)
        if session is None:
            return
        if c.fault is None:
            self._context.reply(session, msg.Done(c.ref))
        else:
            self._context.refuse(session, c.ref, c.fault)

    def _unload_job(self, c: cmd.UnloadJob) -> None:
        job = self._records.jobs.get(c.job)
        if job is not None:
            job.unloading = True
        self._context.checks.forget(c.job)
        self._device.unload(c.job)

    def _end_job(self, c: cmd.EndJob) -> None:
        job = self._records.jobs.get(c.job)
        if job is None:
            return
        job.over = True
        fault = c.fault or _closed(job)
        if c.fault is not None:
            if fault.code not in _NOT_ITS_FAULT:
                self._context.metrics.job_failed(fault.code)
            level = logging.INFO if fault.code in _NOT_ITS_FAULT else logging.WARNING
            log.log(level, "job %s: ended (%s): %s", job.short, fault.code, fault.message)
        else:
            log.info("job %s: closed", job.short)
        if fault.code:
            job.session.ended(c.job, fault)
        self._refuse_waiting(job, fault)
        self._context.reply(job.session, msg.JobEnded(c.job, fault.code, fault.message, fault.remedy))

    def _job_changed(self, c: cmd.JobChanged) -> None:
        job = self._records.jobs[c.job]
        if isinstance(self._device, Regrading) and job.spec.priority is not c.priority:
            self._device.regrade(c.job, c.priority)
        job.spec = replace(job.spec, priority=c.priority, weight=c.weight)
        log.info("job %s: priority %s, weight %g from now on", job.short, c.priority.name, c.weight)
        while job.changes:
            session, ref = job.changes.popleft()
            self._context.reply(session, msg.Done(ref))

    def _refuse_waiting(self, job: JobRecord, fault: Fault) -> None:
        """Refuse the requests of an ended job that have no answer yet."""
        ended = fault if fault.code else _CLOSED
        job.waiting.clear()
        job.loading = None
        for waiting in (job.profiles, job.changes):
            self._refuse_all(waiting, ended)
        for program in [program for program in job.programs.values() if not program.announced]:
            self._drop_program(job, program)
            self._context.refuse(job.session, program.ref, ended)
        for number in [number for number, transfer in job.transfers.items() if not transfer.asked]:
            self._finish_transfer(cmd.FinishTransfer(job.id, number, ended))

    def _refuse_all(self, waiting: deque[tuple[SessionRecord, int]], fault: Fault) -> None:
        while waiting:
            session, ref = waiting.popleft()
            self._context.refuse(session, ref, fault)

    def _forget_job(self, c: cmd.ForgetJob) -> None:
        job = self._records.jobs.get(c.job)
        if job is None:
            return
        for step in list(job.steps):  # a later command for these steps would find no job
            self._fail_step(cmd.FailStep(c.job, step, _CLOSED))
        self._refuse_waiting(job, _CLOSED)
        for transfer in list(job.transfers):
            self._finish_transfer(cmd.FinishTransfer(c.job, transfer, _CLOSED))
        self._records.forget_job(c.job)
        self._forgotten(job)
        log.debug("job %s: nothing of it is left", job.short)

    # ---- programs

    def _accept_program(self, c: cmd.AcceptProgram) -> None:
        job = self._records.jobs[c.job]
        program = job.programs[c.program]
        try:
            self._context.segments.create(
                job.session.peer.uid,
                job.session.id,
                program.slots * program.slot_bytes,
                f"data-{job.short}-{program.id}",
                lambda made: self._load(job, program, made),
            )
        except GpumuxError as error:
            self._context.feed(ev.ProgramDropped(c.job, c.program, as_fault(error)))

    def _load(self, job: JobRecord, program: ProgramRecord, made: SharedSegment | GpumuxError) -> None:
        """Have the device load the program, now that its data segment is made, or drop it if that failed."""
        if isinstance(made, GpumuxError):
            self._context.feed(ev.ProgramDropped(job.id, program.id, as_fault(made)))
            return
        if job.unloading or job.programs.get(program.id) is not program:
            made.close()  # the job ended meanwhile
            return
        program.segment = made
        self._device.load_program(
            job.id,
            program.id,
            program.encoded,
            program.new_buffers,
            program.binding,
            SegmentHandle(made.fd, made.nbytes),
            program.slots,
        )

    def _refuse_program(self, c: cmd.RefuseProgram) -> None:
        job = self._records.jobs.get(c.job)
        program = job.programs.get(c.program) if job is not None else None
        if job is None or program is None or program.announced:
            return
        self._drop_program(job, program)
        log.info("job %s: program %d refused (%s): %s", job.short, c.program, c.fault.code, c.fault.message)
        self._context.refuse(job.session, program.ref, c.fault)
        self._next_load(job, program)

    def _drop_program(self, job: JobRecord, program: ProgramRecord) -> None:
        del job.programs[program.id]
        if program.segment is not None:
            program.segment.close()

    def _announce_program(self, c: cmd.AnnounceProgram) -> None:
        job = self._records.jobs[c.job]
        program = job.programs[c.program]
        program.announced = True
        program.encoded = b""
        job.buffers.extend(program.new_buffers)
        self._context.metrics.programs_loaded.inc()
        assert program.segment is not None  # made before the device was asked to load
        number = 0 if job.session.inline else self._context.hand_over(job.session, program.segment)
        self._context.reply(
            job.session,
            msg.ProgramLoaded(program.ref, c.job, c.program, number, program.slots, program.slot_bytes, []),
        )
        self._next_load(job, program)

    def _cut_program(self, c: cmd.CutProgram) -> None:
        self._device.cut(c.job, c.program, c.target_s)

    def _next_load(self, job: JobRecord, program: ProgramRecord) -> None:
        if job.loading is program:
            job.loading = None
            start_load(self._context, job)

    # ---- transfers

    def _start_transfer(self, c: cmd.StartTransfer) -> None:
        job = self._records.jobs[c.job]
        transfer = job.transfers[c.transfer]
        transfer.due = True
        if transfer.refused:
            no_room = Fault("admission_refused", "there was no memory to stage it", "transfer fewer buffers at a time")
            self._context.feed(TransferEnded(c.job, c.transfer, no_room))
        else:
            move(self._context, job, c.transfer, transfer)

    def _finish_transfer(self, c: cmd.FinishTransfer) -> None:
        job = self._records.jobs.get(c.job)
        transfer = job.transfers.pop(c.transfer, None) if job is not None else None
        if job is None or transfer is None or transfer.refused:
            return  # a refusal was its answer
        if transfer.then is not None:
            transfer.then(c.fault)
            return
        transfer.refused = True  # for a segment still in the making
        fault = c.fault or Fault("", "", "")
        frames: tuple[bytes, ...] = ()
        segment = transfer.segment
        if segment is None:  # the job ended before there was one
            self._context.refuse(job.session, transfer.ref, fault)
            return
        if c.fault is None:
            self._context.metrics.transferred(transfer.push, transfer.nbytes)
            if job.session.inline and not transfer.push:
                frames = (segment.read(0, transfer.nbytes),)
        segment.close()
        self._context.reply(
            job.session,
            msg.TransferDone(c.job, c.transfer, fault.code, fault.message, fault.remedy, len(frames)),
            frames,
        )


def _results(step: StepRecord) -> tuple[bytes, ...]:
    """The results of an answered step, for a client without shared memory."""
    program = step.program
    assert program.outline is not None  # set when an inline session's program was checked
    assert program.segment is not None
    base = step.slot * program.slot_bytes
    places = zip(program.outline.layout.results, program.outline.result_bytes, strict=True)
    return tuple(program.segment.read(base + offset, nbytes) for offset, nbytes in places)


def _closed(job: JobRecord) -> Fault:
    """The fault of a job that was closed on request: empty for its own client, else it says which user stopped it."""
    if not job.stopped_by:
        return Fault("", "", "")
    return Fault("", f"{job.stopped_by} stopped the job (gpumux jobs stop)", "ask why, then submit it again")


# ---- Device events for the scheduler: as they are, or with the daemon's own work in between.


MAX_SCALARS = 28_000  # of 9 bytes each: what fits a Step (wire/limits.py, max_control_bytes)
_SCALARS: dict[str, type] = {"float": float, "int": int}


class Completions:
    """Handles device events; `handlers` has one method for each class of event. The scheduler takes most unchanged."""

    def __init__(self, context: DaemonContext, fusion: JobFusion) -> None:
        self._context = context
        self._records = context.records
        self._fusion = fusion
        feed = context.feed
        self.handlers: dict[type, Callable[[Any], None]] = {
            PieceDone: feed,
            PieceFailed: feed,
            ProgramReady: feed,
            CollectiveEnded: feed,
            TransferEnded: feed,
            JobDied: feed,
            JobReleased: feed,
            dev.ProgramChecked: self._checked,
            dev.ProgramRefused: self._refused,
            dev.ProgramProfiled: self._profiled,
            dev.FusedProgramMade: fusion.made,
            dev.FusedProgramProven: fusion.proven,
            dev.FusedProgramRefused: fusion.refused,
        }

    def _program(self, event: Any) -> tuple[JobRecord, ProgramRecord] | None:
        """The records an event is about, or None when the job ended while the device was at it."""
        job = self._records.jobs.get(event.job)
        program = job.programs.get(event.program) if job is not None else None
        return (job, program) if job is not None and program is not None and not job.over else None

    def _checked(self, event: dev.ProgramChecked) -> None:
        self._context.checks.ended(event.job, event.program)
        found = self._program(event)
        if found is None:
            self._fusion.checked(event)  # of a group, which has no record
            return
        job, program = found
        program.slot_bytes = event.footprint.slot_bytes
        program.scalars = tuple(_SCALARS[kind] for kind in event.scalars)
        # Buffers of the job's earlier programs are charged already.
        state_bytes = aligned_total(program.new_buffers)
        # The device reports the bytes of one slot, the scheduler charges the whole data segment.
        slot_bytes = program.slots * program.slot_bytes
        footprint = replace(event.footprint, state_bytes=state_bytes, slot_bytes=slot_bytes)
        try:
            _check_scalars(len(event.scalars))
            if job.session.inline:
                program.outline = outline(program.encoded)
        except GpumuxError as error:
            self._drop(job, program, as_fault(error))
            return
        program.offered = True
        job.waves = job.waves or footprint.arena_bytes > 0
        log.info(
            "job %s: program %d checked, %d operators, %s",
            job.short,
            program.id,
            len(event.operators),
            event.content_hash,
        )
        self._records.program_names.add(event.content_hash, job.session.peer.uid, job.spec.name)
        live = event.live if job.spec.arena is not None else ()
        self._context.feed(ev.ProgramOffered(job.id, program.id, footprint, event.content_hash, event.operators, live))

    def _refused(self, event: dev.ProgramRefused) -> None:
        self._context.checks.ended(event.job, event.program)
        found = self._program(event)
        if found is None:
            self._fusion.not_loaded(event)
            return
        job, program = found
        if program.offered:
            self._context.feed(ev.ProgramDropped(event.job, event.program, event.fault))
        else:
            self._drop(job, program, event.fault)

    def _profiled(self, event: dev.ProgramProfiled) -> None:
        """Answer the oldest request for a profile: devices answer in order."""
        job = self._records.jobs.get(event.job)
        if job is None or not job.profiles:
            return  # the job ended, and the request was refused then
        session, ref = job.profiles.popleft()
        if event.fault is not None:
            self._context.refuse(session, ref, event.fault)
        else:
            self._context.reply(session, msg.JobProfile(ref, event.job, event.program, 1), [event.text])

    def _drop(self, job: JobRecord, program: ProgramRecord, fault: Fault) -> None:
        """Refuse a program the scheduler has not heard of."""
        del job.programs[program.id]
        self._context.refuse(job.session, program.ref, fault)
        if job.loading is program:
            job.loading = None
            start_load(self._context, job)


def _check_scalars(count: int) -> None:
    if count > MAX_SCALARS:
        raise ProgramError(
            f"the program takes {count} host scalars with every step, and {MAX_SCALARS} fit",
            "give parameters one learning rate and one step count between them, as optimizers with foreach do",
        )
