"""Client messages to scheduler events: permissions, checks of the numbers, and records.

A handler either feeds events or answers; it raises GpumuxError to refuse, which the dispatcher sends
back under the request's `ref`. Nothing a client sends reaches the scheduler or the device unchecked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from gpumux.access import refuse_gang, refuse_priority, refuse_weight
from gpumux.daemon.context import DaemonContext, as_fault, log, with_short_ids
from gpumux.daemon.records import JobRecord, ProgramRecord, SessionRecord, StepRecord, TransferRecord, aligned_total
from gpumux.daemon.report import job_stats
from gpumux.daemon.segments import SharedSegment
from gpumux.daemon.snapshots.requests import SnapshotRequests
from gpumux.daemon.tracing import Tracing
from gpumux.device.base import UNGANGED, ProcessGroups, Regrading, SegmentHandle
from gpumux.errors import (
    AdmissionRefused,
    GpumuxError,
    JobClosed,
    NotOwner,
    ProgramError,
    ProtocolError,
    UnknownJob,
    from_code,
)
from gpumux.program.ir import ALIGN
from gpumux.scheduler import admission
from gpumux.scheduler import events as ev
from gpumux.types import Fault, Gang, JobId, JobSpec, Priority, ProgramId, StepId, TransferEnded, TransferId
from gpumux.wire import messages as msg
from gpumux.wire.listen import check_descriptors

# ---- Messages that change nothing: status, explanations, profiles, recordings.


MAX_PROFILES = 4  # unanswered requests for profiles of one job
STORY_LINES = 60  # newest lines of history in an answer to ExplainJob


Interference = Callable[[SessionRecord, str], dict[str, Any]]


class Questions:
    """Answers requests for information. `report` makes the whole body of GetStatus; `context.permissions` decides what
    a session sees of it. `interference` makes the body of an answer to GetInterference for a session."""

    def __init__(
        self, context: DaemonContext, report: Callable[[], dict[str, Any]], interference: Interference, tracing: Tracing
    ) -> None:
        self._context = context
        self._interference = interference
        self._records = context.records
        self._report = report
        self._tracing = tracing
        self._governed = context.permissions.governed
        self.handlers: dict[type, Callable[[SessionRecord, Any, Sequence[bytes]], None]] = {
            msg.JobStats: self._stats,
            msg.GetStatus: self._status,
            msg.ExplainJob: self._explain,
            msg.GetInterference: self._pairs,
            msg.ProfileJob: self._profile,
            msg.RecordTrace: self._trace,
        }

    def _stats(self, session: SessionRecord, m: msg.JobStats, frames: Sequence[bytes]) -> None:
        job = self._records.jobs.get(JobId(m.job))
        if job is None:  # any session may look
            raise UnknownJob(f"there is no job {m.job[:40]!r}", "`gpumux jobs` lists them")
        body = self._context.permissions.shown(session, self._report())
        self._context.reply(session, msg.Report(m.ref, job_stats(body, job.short)))

    def _status(self, session: SessionRecord, m: msg.GetStatus, frames: Sequence[bytes]) -> None:
        self._context.reply(session, msg.Report(m.ref, self._context.permissions.shown(session, self._report())))

    def _explain(self, session: SessionRecord, m: msg.ExplainJob, frames: Sequence[bytes]) -> None:
        """Explain a job's state. Only a session that may change the job may ask: the answer names its operators."""
        job = self._governed(session, m.job)
        scheduler, permissions = self._context.scheduler, self._context.permissions
        hidden = permissions.hidden(session)
        sentences = [permissions.redact(session, line) for line in scheduler.explain(job.id, hidden)]
        story = [
            permissions.redact(session, line) for line in scheduler.story(job.id, newest=STORY_LINES, hidden=hidden)
        ]
        found = scheduler.advise(job.id, hidden)
        shorts = {known.id: known.short for known in self._context.records.jobs.values()}

        def brief(text: str) -> str:
            return permissions.redact(session, with_short_ids(text, shorts))

        body = {
            "job": job.id,
            "short": job.short,
            "verdict": brief(found.verdict),
            "causes": [brief(cause) for cause in found.causes],
            "remedies": [{"text": brief(each.text), "command": brief(each.command)} for each in found.remedies],
            "fusion": next((each["fusion"] for each in self._report()["jobs"] if each["short"] == job.short), None),
            "sentences": sentences,
            "story": story,
        }
        self._context.reply(session, msg.Report(m.ref, body))

    def _pairs(self, session: SessionRecord, m: msg.GetInterference, frames: Sequence[bytes]) -> None:
        self._context.reply(session, msg.Report(m.ref, self._interference(session, m.program)))

    def _profile(self, session: SessionRecord, m: msg.ProfileJob, frames: Sequence[bytes]) -> None:
        """Have the device profile a program. Only a session that may change the job may ask: the answer holds shapes
        and operators."""
        job = self._governed(session, m.job)
        loaded = {program.id: program for program in job.programs.values() if program.announced}
        if job.unloading or not loaded:
            raise JobClosed(f"job {job.short} runs no program", "profile a job that has run two steps")
        if len(job.profiles) >= MAX_PROFILES:
            raise AdmissionRefused(f"{len(job.profiles)} profiles of it are under way", "wait for one to end")
        most = max(loaded.values(), key=lambda program: (program.steps, -program.id)).id
        number = most if m.program is None else ProgramId(m.program)
        if number not in loaded:
            raise ProgramError(f"job {job.short} has no program {m.program}", f"it has {sorted(loaded)}")
        job.profiles.append((session, m.ref))
        self._context.device.profile(job.id, number)

    def _trace(self, session: SessionRecord, m: msg.RecordTrace, frames: Sequence[bytes]) -> None:
        """Record a trace. Any session may see when the device runs each user's work; only sessions that may change a
        job see its operators."""
        self._tracing.ask(session, m.ref, m.seconds, lambda job: self._context.permissions.governs(session, job))


# ---- ChangeJob: another priority or weight for a job that is open.
#
# The answer is sent when the scheduler reports that the change is in force (JobChanged, in effects.py), or when the job
# ends before.


MAX_CHANGES = 16  # changes of one job that are not in force yet


class Changes:
    """Handles ChangeJob."""

    def __init__(self, context: DaemonContext) -> None:
        self._context = context
        self.handlers: dict[type, Callable[[SessionRecord, Any, Sequence[bytes]], None]] = {msg.ChangeJob: self._change}

    def _change(self, session: SessionRecord, m: msg.ChangeJob, frames: Sequence[bytes]) -> None:
        record = self._context.permissions.governed(session, m.job)
        if record.unloading or record.over:
            raise JobClosed(f"job {record.short} is closing", "nothing of it can be changed any more")
        if m.priority is None and m.weight is None:
            raise ProtocolError("a ChangeJob that changes nothing", "give a priority or a weight")
        if m.priority not in (None, Priority.LOW, Priority.HIGH):
            raise ProtocolError(f"priority {m.priority}", "use 0 (low) or 1 (high)")
        if len(record.changes) >= MAX_CHANGES:
            raise AdmissionRefused(f"{len(record.changes)} changes of the job are under way", "wait for one to end")
        priority = None if m.priority is None else Priority(m.priority)
        fault = self._refuses(session, priority, m.weight)
        if fault is None and priority is Priority.HIGH and record.waves:
            fault = admission.high_waves(record.id)
        if fault is None and priority is Priority.HIGH and record.spec.arena is not None:
            fault = admission.high_in_arena(record.id)
        if fault is None and priority is Priority.HIGH:
            fault = self._context.scheduler.refuse_high(record.id)
        if fault is not None:
            self._context.refuse(session, m.ref, fault)
            return
        asking = "its client" if record.session is session else f"user {session.peer.uid}"
        log.info("job %s: %s asks for priority %s, weight %s", record.short, asking, m.priority, m.weight)
        record.changes.append((session, m.ref))
        self._context.feed(ev.ChangeRequested(record.id, priority, m.weight))

    def _refuses(self, session: SessionRecord, priority: Priority | None, weight: float | None) -> Fault | None:
        """The fault if the session may not give a job this priority or weight, else None. An operator may give any that
        is valid."""
        rule = self._context.permissions.rule(session)
        fault = None
        if weight is not None:
            fault = admission.refuse_weight(weight) or refuse_weight(rule, weight)
        if fault is None and priority is not None:
            fault = refuse_priority(rule, priority)
            if fault is None and isinstance(self._context.device, Regrading):
                fault = self._context.device.may_regrade(priority)
        return fault


# ---- Reserve, ConfirmReservation, ReleaseReservation: what a coordinator holds for a job that is about to come.


class Reserving:
    """Handles requests about reservations. They belong to the session's user, so another session of the same user goes
    on with them."""

    def __init__(self, context: DaemonContext) -> None:
        self._context = context
        self.handlers: dict[type, Callable[[SessionRecord, Any, Sequence[bytes]], None]] = {
            msg.Reserve: self._reserve,
            msg.ConfirmReservation: self._confirm,
            msg.ReleaseReservation: self._release,
        }

    def _reserve(self, session: SessionRecord, m: msg.Reserve, frames: Sequence[bytes]) -> None:
        if len(m.job) != 32 or not set(m.job) <= set("0123456789abcdef"):
            raise ProtocolError(f"job {m.job[:40]!r}", "choose 32 hexadecimal digits in lower case")
        if m.priority not in (Priority.LOW, Priority.HIGH):
            raise ProtocolError(f"priority {m.priority}", "use 0 (low) or 1 (high)")
        job, priority = JobId(m.job), Priority(m.priority)
        self._context.feed(ev.ReserveRequested(session.id, m.ref, job, priority, m.nbytes, m.lease_s))

    def _confirm(self, session: SessionRecord, m: msg.ConfirmReservation, frames: Sequence[bytes]) -> None:
        self._context.feed(ev.ConfirmRequested(session.id, m.ref, JobId(m.job), m.lease_s))

    def _release(self, session: SessionRecord, m: msg.ReleaseReservation, frames: Sequence[bytes]) -> None:
        self._context.feed(ev.ReleaseRequested(session.id, m.ref, JobId(m.job)))


# ---- All requests, and those about jobs, programs, steps and transfers.


Handler = Callable[[SessionRecord, Any, Sequence[bytes]], None]
# Answered by and by (QuestionQueue):
SLOW = frozenset({msg.GetStatus, msg.JobStats, msg.ExplainJob, msg.GetInterference})
OPENINGS = frozenset({msg.OpenJob, msg.OpenGangJob, msg.OpenFusibleJob})  # bounded by time (OpeningQueue)
QUEUED = SLOW | OPENINGS
MAX_TRANSFERS = 16  # transfers of one job that have not ended
MAX_UNLOADED = 128  # Programs of one user that are not loaded yet: twice the jobs that a user may have
MAX_ENCODED_BYTES = 512 << 20  # encoded bytes of one user's Programs that are not loaded yet
MAX_BUFFERS = 1_000_000  # state buffers of one job
MAX_BUFFER_BYTES = 1 << 46


class Requests:
    """Handles every message that a client may send in an open session. `failed` is called when the handler of a
    session's message raises what no handler should, with the job that the message is about, if there is one."""

    def __init__(
        self,
        context: DaemonContext,
        *,
        report: Callable[[], dict[str, Any]],
        interference: Interference,
        tracing: Tracing,
        snapshot_requests: SnapshotRequests,
        failed: Callable[[SessionRecord, JobRecord | None, Exception], None],
    ) -> None:
        self._context = context
        self._failed = failed
        self._records = context.records
        self._governed = context.permissions.governed
        self._handlers: dict[type, Handler] = {
            msg.Step: self._step,
            msg.StepAwaited: self._step_awaited,
            msg.OpenJob: self._open_job,
            msg.OpenGangJob: self._open_job,
            msg.OpenFusibleJob: self._open_job,
            msg.LoadProgram: self._load_program,
            msg.OpenTransfer: self._open_transfer,
            msg.FillTransfer: self._fill_transfer,
            msg.PauseJob: self._pause,
            msg.ResumeJob: self._resume,
            msg.CloseJob: self._close,
            **Changes(context).handlers,
            **Reserving(context).handlers,
            **Questions(context, report, interference, tracing).handlers,
            **snapshot_requests.handlers(self._working),
        }

    def handle(self, session: SessionRecord, message: Any, frames: Sequence[bytes]) -> None:
        """Handle one message. An invalid message is answered or counted; nothing is raised."""
        kind = type(message)
        handler = self._handlers.get(kind)
        if handler is None:
            self._unexpected(session, f"a {kind.__name__} is not for a daemon")
            if kind in msg.CLUSTER_FROM_CLIENT and hasattr(message, "ref"):
                self._context.refuse(session, message.ref, _no_coordinator())
            return
        try:
            if kind in QUEUED:
                queue = self._context.openings if kind in OPENINGS else self._context.questions
                queue.add(session, partial(self._handle, handler, session, message, frames))
                return
        except AdmissionRefused as error:
            self._context.refuse(session, message.ref, error)
            return
        self._handle(handler, session, message, frames)

    def _handle(self, handler: Handler, session: SessionRecord, message: Any, frames: Sequence[bytes]) -> None:
        try:
            handler(session, message, frames)
        except GpumuxError as error:
            if type(message) is msg.Step:
                self._refuse_step(session, message, error)
            else:
                self._context.refuse(session, message.ref, error)
        except Exception as error:  # noqa: BLE001 - a bug, which ends what the message is about
            self._failed(session, self._records.jobs.get(JobId(getattr(message, "job", ""))), error)

    def _unexpected(self, session: SessionRecord, why: str) -> None:
        self._context.unexpected += 1
        log.info("session %s: %s", session.id, why)

    # ---- permissions

    def _own(self, session: SessionRecord, job: str) -> JobRecord:
        """Find the session's own job: only the session that opened it may send steps, programs and transfers."""
        record = self._records.jobs.get(JobId(job))
        if record is None:
            _raise_end(session, job)
            raise UnknownJob(f"there is no job {job[:40]!r}", "it ended, or was never opened; open a new one")
        if record.session is not session:
            raise NotOwner("this job belongs to another session", "submit to the job this client opened")
        return record

    def _working(self, session: SessionRecord, job: str) -> JobRecord:
        """Find the session's own job, and raise if it no longer accepts programs and transfers."""
        record = self._own(session, job)
        if record.unloading:
            _raise_end(session, job)
            raise JobClosed(f"job {record.short} is closing", "open a new one")
        return record

    # ---- jobs

    def _open_job(self, session: SessionRecord, m: msg.OpenJob | msg.OpenGangJob, frames: Sequence[bytes]) -> None:
        check_descriptors()
        job = JobId(m.job)
        record = self._records.jobs.get(job)
        if record is not None and record.session is not session:
            raise NotOwner("another session has a job with this id", "choose a fresh random id")
        if (session.id, job) in self._records.opening:
            raise ProtocolError("this job is being opened already", "wait for the answer")
        spec = _spec(m, session.peer.uid)
        if spec.gang is not None:
            self._allow_gang(spec.gang)
        self._records.opening[session.id, job] = m.ref, spec
        self._context.feed(ev.JobRequested(session.id, job, spec))

    def _allow_gang(self, gang: Gang) -> None:
        """Raise if no job may be a rank of this gang on this daemon."""
        fault = refuse_gang(gang, self._context.config.stores)
        if fault is None:
            device = self._context.device
            fault = device.may_join(gang) if isinstance(device, ProcessGroups) else UNGANGED
        if fault is not None:
            raise from_code(fault.code, fault.message, fault.remedy)

    def _pause(self, session: SessionRecord, m: msg.PauseJob, frames: Sequence[bytes]) -> None:
        record = self._governed(session, m.job)
        self._context.feed(ev.PauseRequested(record.id))
        self._context.reply(session, msg.Done(m.ref))

    def _resume(self, session: SessionRecord, m: msg.ResumeJob, frames: Sequence[bytes]) -> None:
        self._context.feed(ev.ResumeRequested(self._governed(session, m.job).id))
        self._context.reply(session, msg.Done(m.ref))

    def _close(self, session: SessionRecord, m: msg.CloseJob, frames: Sequence[bytes]) -> None:
        record = self._governed(session, m.job)
        record.closing = True
        record.finished = m.drain and record.session is session
        record.stopped_by = "" if record.session is session else f"user {session.peer.uid}"
        closer = record.stopped_by or "its client"
        log.info("job %s: close asked for by %s", record.short, closer)
        self._context.catch_up(record)  # a step that the device has answered must not fail now
        self._context.feed(ev.CloseRequested(record.id, m.drain, f"closed by {closer}"))
        self._context.reply(session, msg.Done(m.ref))

    # ---- programs

    def _load_program(self, session: SessionRecord, m: msg.LoadProgram, frames: Sequence[bytes]) -> None:
        job = self._working(session, m.job)
        check_descriptors()
        if len(frames) != 1:
            raise ProtocolError(f"LoadProgram with {len(frames)} payload frames", "send exactly one")
        if m.program in job.programs:
            raise ProgramError(f"program {m.program} exists already", "give each program of a job a new number")
        if len(job.programs) >= self._context.config.max_programs_per_job:
            raise AdmissionRefused(
                f"the job has {len(job.programs)} programs, which is the limit",
                "pad batches to fewer shapes, and compute numbers that change in the loop (the client's log says what"
                " differs); or close the job and open another, or raise max_programs_per_job",
            )
        unloaded = list(self._records.unloaded(session.peer.uid))
        if len(unloaded) >= MAX_UNLOADED:
            why = f"{len(unloaded)} of your programs wait to be checked and loaded"
            raise AdmissionRefused(why, "wait for ProgramLoaded, or Refusal")
        held = sum(len(program.encoded) for program in unloaded)
        if held + len(frames[0]) > MAX_ENCODED_BYTES:
            raise AdmissionRefused(
                f"{held} bytes of your programs wait to be loaded", "wait for ProgramLoaded before loading more"
            )
        record = ProgramRecord(
            ProgramId(m.program), m.ref, bytes(frames[0]), tuple(m.new_buffers), tuple(m.binding), job.spec.max_inflight
        )
        _check_sizes(record.new_buffers, job)
        job.programs[record.id] = record
        # One at a time: if a load fails, the buffers of the next one must not shift.
        job.waiting.append(record)
        start_load(self._context, job)

    # ---- steps

    def _step(self, session: SessionRecord, m: msg.Step, frames: Sequence[bytes], caught_up: bool = False) -> None:
        job = self._records.jobs.get(JobId(m.job))
        if job is None or job.session is not session:
            job = self._own(session, m.job)
        program = job.programs.get(ProgramId(m.program))
        if program is None or not program.announced:
            raise ProgramError(f"program {m.program} is not loaded", "wait for ProgramLoaded")
        if m.slot >= program.slots:
            raise ProtocolError(f"slot {m.slot} of {program.slots}", "use the slots ProgramLoaded gave")
        if not caught_up and (m.slot in program.busy or len(job.steps) >= job.spec.max_inflight):
            # The device may have answered a step, and its client sent the next one, before the loop read the event.
            self._context.catch_up(job)
            return self._step(session, m, frames, caught_up=True)
        if job.over:  # slots of steps that nothing will answer may still be in use
            raise JobClosed(f"job {job.short} has ended", "open a new one")
        if m.slot in program.busy:
            raise ProtocolError(f"slot {m.slot} holds an unanswered step", "wait for its answer")
        if m.step <= job.last_step:
            raise ProtocolError(f"step {m.step} after step {job.last_step}", "number steps upwards")
        if tuple(map(type, m.scalars)) != program.scalars:
            raise _wrong_scalars(m.scalars, program)
        if program.segment is None:
            raise ProgramError(f"program {m.program} has no data segment", "load it again")
        if frames or session.inline:
            self._fill_slot(program, m.slot, frames)
        step = StepId(m.step)
        job.last_step = m.step
        job.steps[step] = StepRecord(program, m.slot, tuple(m.scalars))
        program.busy[m.slot] = step
        program.steps += 1
        return self._context.feed(ev.StepSubmitted(job.id, step, program.id, self._context.waited))

    def _step_awaited(self, session: SessionRecord, m: msg.StepAwaited, frames: Sequence[bytes]) -> None:
        job = self._own(session, m.job)
        if StepId(m.step) not in job.steps:
            return  # its answer is under way
        peer = session.peer
        before = [
            other.id
            for each in m.before
            if (other := self._records.jobs.get(JobId(each))) is not None
            and other.spec.priority is Priority.HIGH
            and (other.session.peer.uid, other.session.peer.pid) == (peer.uid, peer.pid)
        ]
        if before:
            self._context.feed(ev.ClientWaits(job.id, StepId(m.step), tuple(before), m.over))

    def _fill_slot(self, program: ProgramRecord, slot: int, frames: Sequence[bytes]) -> None:
        outline = program.outline
        if outline is None or program.segment is None:
            raise ProtocolError("inline inputs on a connection with shared memory", "write them into the slot")
        if tuple(len(frame) for frame in frames) != outline.input_bytes:
            raise ProtocolError(
                f"inline inputs of {[len(frame) for frame in frames]} bytes, not {list(outline.input_bytes)}",
                "send each input's storage as one frame",
            )
        base = slot * program.slot_bytes
        for offset, frame in zip(outline.layout.inputs, frames, strict=True):
            program.segment.write(base + offset, frame)

    def _refuse_step(self, session: SessionRecord, m: msg.Step, error: GpumuxError) -> None:
        """Refuse a step that was not submitted. It gets an answer unless its number belongs to a submitted step."""
        self._context.metrics.rejected(error.code)
        job = self._records.jobs.get(JobId(m.job))
        if job is not None and job.session is session and StepId(m.step) in job.steps:
            self._unexpected(session, error.message)
            return
        self._context.reply(session, msg.StepFailed(m.job, m.step, error.code, error.message, error.remedy))

    # ---- transfers

    def _open_transfer(self, session: SessionRecord, m: msg.OpenTransfer, frames: Sequence[bytes]) -> None:
        job = self._working(session, m.job)
        check_descriptors()
        if m.transfer in job.transfers or m.transfer <= job.last_transfer:
            raise ProtocolError(f"transfer {m.transfer} after {job.last_transfer}", "number transfers upwards")
        if len(job.transfers) >= MAX_TRANSFERS:
            raise AdmissionRefused(f"{len(job.transfers)} transfers are under way", "wait for one to end")
        if len(set(m.buffers)) != len(m.buffers) or not all(b < len(job.buffers) for b in m.buffers):
            raise ProtocolError(f"the job has {len(job.buffers)} buffers", "name each of them at most once")
        nbytes = max(aligned_total([job.buffers[b] for b in m.buffers]), ALIGN)
        if session.inline and nbytes > self._context.config.max_message_bytes:
            raise AdmissionRefused(
                f"{nbytes} bytes of state don't fit one message ({self._context.config.max_message_bytes})",
                "transfer fewer buffers at a time",
            )
        transfer = TransferId(m.transfer)
        record = TransferRecord(m.ref, tuple(m.buffers), m.push, nbytes)
        job.transfers[transfer] = record
        try:
            self._context.segments.create(
                session.peer.uid,
                session.id,
                nbytes,
                f"transfer-{job.short}",
                lambda made: self._staged(job, transfer, record, made),
                touch=session.inline or not m.push,  # a local client fills it, page by page, right away
            )
        except GpumuxError:
            del job.transfers[transfer]
            raise
        job.last_transfer = m.transfer
        if not m.push:  # it is ordered with the job's steps now, though its segment may not be ready
            self._ask(job, transfer, record)

    def _staged(
        self, job: JobRecord, transfer: TransferId, record: TransferRecord, made: SharedSegment | GpumuxError
    ) -> None:
        """Continue a transfer when its staging segment is made, or refuse it if that failed."""
        if isinstance(made, GpumuxError):
            record.refused = True
            self._context.refuse(job.session, record.ref, made)
            if not record.asked:
                job.transfers.pop(transfer, None)
            elif record.due:
                self._context.feed(TransferEnded(job.id, transfer, as_fault(made)))
            return
        if job.over or record.refused:
            made.close()
            return
        record.segment = made
        number = 0 if job.session.inline else self._context.hand_over(job.session, made)
        self._context.reply(job.session, msg.TransferSegment(record.ref, job.id, transfer, number, record.nbytes))
        if record.due:
            move(self._context, job, transfer, record)

    def _fill_transfer(self, session: SessionRecord, m: msg.FillTransfer, frames: Sequence[bytes]) -> None:
        job = self._own(session, m.job)
        record = job.transfers.get(TransferId(m.transfer))
        if record is None or not record.push or record.asked or record.segment is None:
            raise ProtocolError(f"transfer {m.transfer} waits for no data", "open it with push first")
        if len(frames) != (1 if session.inline else 0):
            raise ProtocolError(f"FillTransfer with {len(frames)} payload frames", "one on TCP, none otherwise")
        if frames:
            if len(frames[0]) != record.nbytes:
                raise ProtocolError(f"{len(frames[0])} bytes, not {record.nbytes}", "send what TransferSegment said")
            record.segment.write(0, frames[0])
        self._ask(job, TransferId(m.transfer), record)

    def _ask(self, job: JobRecord, transfer: TransferId, record: TransferRecord) -> None:
        record.asked = True
        self._context.feed(ev.TransferRequested(job.id, transfer, record.push))


def move(context: DaemonContext, job: JobRecord, transfer: TransferId, record: TransferRecord) -> None:
    """Pass a due transfer to the device, if its segment exists."""
    if record.segment is not None and not job.unloading:
        context.device.transfer(
            job.id, transfer, record.buffers, SegmentHandle(record.segment.fd, record.segment.nbytes), record.push
        )


def start_load(context: DaemonContext, job: JobRecord) -> None:
    """Have the job's next waiting program checked, unless one is loading."""
    if job.loading is None and job.waiting and not job.unloading:
        record = job.loading = job.waiting.popleft()
        context.checks.submit(job, record)


def _raise_end(session: SessionRecord, job: str) -> None:
    """Raise why a job of the session has failed, if it has. The message may have been sent before JobEnded arrived."""
    fault = session.ends.get(JobId(job))
    if fault is not None:
        raise from_code(fault.code, fault.message, fault.remedy)


def _no_coordinator() -> ProtocolError:
    return ProtocolError(
        "this is a daemon, and places no jobs on others", "name the endpoint of a coordinator (`gpumux cluster up`)"
    )


def _spec(m: msg.OpenJob | msg.OpenGangJob, uid: int) -> JobSpec:
    """Make a JobSpec of a user's message, with the types that the scheduler expects; the scheduler checks ranges."""
    if m.priority not in (Priority.LOW, Priority.HIGH):
        raise ProtocolError(f"priority {m.priority}", "use 0 (low) or 1 (high)")
    if isinstance(m, msg.OpenFusibleJob) and m.shares_memory:
        raise ProtocolError("a job that may be fused and shares memory", "open it without one of both")
    return JobSpec(
        m.name, Priority(m.priority), m.weight, m.max_slowdown, m.memory_limit, m.max_inflight, m.seed, m.models,
        Gang(m.gang, m.rank, m.ranks, m.store, m.timeout_s) if isinstance(m, msg.OpenGangJob) else None,
        uid if isinstance(m, msg.OpenJob) and m.shares_memory else None,
        uid if uid >= 0 else None,
        isinstance(m, msg.OpenFusibleJob),
    )  # fmt: skip


def _check_sizes(sizes: Sequence[int], job: JobRecord) -> None:
    if len(job.buffers) + len(sizes) > MAX_BUFFERS:
        raise AdmissionRefused(f"more than {MAX_BUFFERS} state buffers", "merge small tensors")
    if any(size < 0 or size > MAX_BUFFER_BYTES for size in sizes):
        raise ProtocolError("a state buffer of an impossible size", "sizes are bytes")


def _wrong_scalars(scalars: Sequence[float | int], program: ProgramRecord) -> ProtocolError:
    remedy = "send one for each host scalar, floats and ints as the Program declares them"
    if len(scalars) != len(program.scalars):
        return ProtocolError(f"{len(scalars)} scalars where program {program.id} takes {len(program.scalars)}", remedy)
    index = next(i for i, kind in enumerate(program.scalars) if type(scalars[i]) is not kind)
    return ProtocolError(f"scalar {index} is no {program.scalars[index].__name__}", remedy)
