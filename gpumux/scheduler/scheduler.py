"""The core: `handle(event, now)` takes one thing that happened and returns what to do about it.

Pure: no clock, no sockets, no threads. A handler does the bookkeeping of its event,
then the policy launches whatever there is room for. A submitted step is answered
exactly once, by FinishStep or FailStep. Events about jobs, launches or transfers that are over are
late, not wrong: they are counted in the snapshot and change nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any, Final

from gpumux.scheduler import admission, explain, invariants, report, standing
from gpumux.scheduler import events as ev
from gpumux.scheduler import state as regrade
from gpumux.scheduler.config import CoreConfig
from gpumux.scheduler.events import (
    AcceptJob,
    AcceptProgram,
    AnnounceProgram,
    CloseJob,
    Command,
    FailStep,
    FinishStep,
    FinishTransfer,
    ForgetJob,
    LaunchPiece,
    RefuseJob,
    RefuseProgram,
    WakeAt,
)
from gpumux.scheduler.guard import cutting
from gpumux.scheduler.guard.guard import Guard
from gpumux.scheduler.jobs import Job, JobState, Program, Session, Step, Transfer, spans
from gpumux.scheduler.policy import Policy
from gpumux.scheduler.state import CoreState, Hidden, nothing_hidden
from gpumux.types import Fault, JobId, LaunchId, Priority, ProgramId, StepId, StepTimes

# ---- Handlers for programs, steps, pieces and transfers: what jobs ask for, and how it goes.


# ---- programs


def program_offered(core: CoreState, event: ev.ProgramOffered) -> None:
    job = core.jobs.get(event.job)
    if job is None or event.program in job.programs:
        return core.ignore()
    opening = job.state is JobState.OPEN
    fault = core.ledger.refuse_program(job, event.footprint) if opening else admission.closing(job.id)
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
        return _drop(core, job, program, admission.no_pieces(program.id))
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
        fault = admission.unknown_job(event.job)
        return core.refuse(FailStep(event.job, event.step, fault), fault)
    if event.step <= job.last_step:
        return core.ignore()  # said twice: it has its answer, or will
    job.last_step = event.step
    program = job.programs.get(event.program)
    if job.state is not JobState.OPEN:
        fault = admission.closing(job.id)
    elif program is None:
        fault = admission.unknown_program(job.id, event.program)
    elif job.inflight >= job.spec.max_inflight:
        fault = admission.too_many_steps(job.id, job.spec.max_inflight)
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
        fault = admission.unknown_job(event.job)
    elif any(transfer.id == event.transfer for transfer in job.all_transfers()):
        return core.ignore()
    elif job.state is not JobState.OPEN:
        fault = admission.closing(job.id)
    elif job.transfers >= core.config.max_transfers_per_job:
        fault = admission.too_many_transfers(job.id, event.transfer, job.transfers)
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


# ---- Handlers for the device, sessions and jobs: who is here, and how it ends.
#
# A job's life: OPEN -> (DRAINING ->) CLOSING -> forgotten. CLOSING means that all it had submitted is
# answered and the device was asked to let go of it. Until the device says so (JobReleased) its memory
# stays charged, and its launches stay in the window because they may still be running. A client that
# closes its job hears of it (CloseJob) only then, so that its next job finds the memory free; a job
# that ends for any other reason hears of it at once.


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
            fault = admission.closed(job_id, f"its session ended: {event.reason}")
            core.close(job, fault, tell=fault)
    return None


def job_requested(core: CoreState, event: ev.JobRequested) -> None:
    session, known = core.sessions.get(event.session), core.jobs.get(event.job)
    if known is not None and _same(known, event):
        return core.out.append(AcceptJob(event.session, event.job, fresh=False))
    fault = _why_not(core, event, session, known)
    if session is None or fault is not None:
        fault = fault or admission.unknown_session(event.session)
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
        return admission.leaving(core.leaving)
    if session is None:
        return admission.unknown_session(event.session)
    if known is None:
        return core.ledger.refuse_job(session.peer, event.spec)
    if known.session != event.session:
        return admission.taken(event.job)
    return admission.closing(event.job) if known.state is not JobState.OPEN else admission.changed(event.job)


def _pause(core: CoreState, job: Job, paused: bool) -> None:
    job.paused = paused
    core.tell(job.id, None, "paused" if paused else "resumed")
    if core.guard is not None:
        core.guard.paused(job, core.now)


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
        core.close(job, admission.closed(job.id, event.reason), tell=None)
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
    fault = admission.leaving(event.reason)
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
    core.depart(job)
    if job.session in core.sessions:
        core.sessions[job.session].jobs.remove(job.id)
    core.tell(job.id, None, "forgotten")
    if not job.told:
        core.out.append(CloseJob(job.id, job.session, None))
    return core.out.append(ForgetJob(job.id))


# ----


_HANDLERS: dict[type[Any], Callable[[CoreState, Any], None]] = {
    ev.DeviceOpened: device_opened,
    ev.Reconfigured: reconfigured,
    ev.SessionOpened: session_opened,
    ev.SessionClosed: session_closed,
    ev.JobRequested: job_requested,
    ev.PauseRequested: pause_requested,
    ev.ResumeRequested: resume_requested,
    ev.ChangeRequested: regrade.change_requested,
    ev.CloseRequested: close_requested,
    ev.DrainRequested: drain_requested,
    ev.JobDied: job_died,
    ev.JobReleased: job_released,
    ev.ProgramOffered: program_offered,
    ev.ProgramReady: program_ready,
    ev.ProgramDropped: program_dropped,
    ev.StepSubmitted: step_submitted,
    ev.ClientWaits: client_waits,
    ev.PieceDone: piece_done,
    ev.PieceFailed: piece_failed,
    ev.TransferRequested: transfer_requested,
    ev.TransferEnded: transfer_ended,
    ev.Tick: lambda core, event: core.ticked(),  # only the clock moved; the policy is asked again below
}

SHORTEST_WAKE_S: Final = 20e-6  # sooner is as good as now


class Core:
    """One device's jobs. Raises ConfigError when the configuration names no policy."""

    def __init__(self, config: CoreConfig) -> None:
        self._state = CoreState(config)

    def handle(self, event: ev.Event, now: float) -> list[Command]:
        """Commands to carry out, in order. `now` is seconds, on the clock of PieceDone's times."""
        state = self._state
        state.now, state.cause, state.out = now, event, []
        state.events += 1
        _HANDLERS[type(event)](state, event)
        policy = state.policy
        if policy is not None:
            guard = policy.guard
            if guard is not None:
                if guard.cutting.changed:
                    cutting.ask_all(state)
                guard.resting, guard.asked = False, None
                if guard.answers:
                    guard.answers.clear()
            low, high = state.board.ready
            while (low.size or high.size) and (choice := policy.choose(state.board, now)) is not None:
                self._launch(policy, choice.job, choice.stream, choice.share)
            if guard is not None:
                if guard.answers:
                    self._settle(guard)
                elif guard.resting:
                    self._wake(guard.rest.until if guard.rest is not None else inf)
                elif guard.holds.reason:
                    guard.holds.note("", now)
        if state.touched:
            for job in state.touched:
                if job.queue:
                    self._explain(job)
            state.touched.clear()
        return state.out

    @property
    def config(self) -> CoreConfig:
        """What is in force now."""
        return self._state.config

    @property
    def drained(self) -> bool:
        """The daemon asked to leave, and nothing is left on the device."""
        return self._state.leaving is not None and not self._state.jobs

    def story(
        self, job: JobId, step: StepId | None = None, newest: int | None = None, hidden: Hidden = nothing_hidden
    ) -> list[str]:
        """Readable lines, `newest` of them at most: when the step was queued, why it waited, when its pieces ran."""
        self._state.hidden = hidden
        try:
            return self._state.log.tell(job, step, newest)
        finally:
            self._state.hidden = nothing_hidden

    def explain(self, job: JobId, hidden: Hidden = nothing_hidden) -> list[str]:
        """Sentences: why this job is slow or held now. Of a job that is gone, or never was, what the story knows.
        `hidden` names the jobs of which neither name nor operators are to be told."""
        self._state.hidden = hidden
        try:
            return self._explained(job)
        finally:
            self._state.hidden = nothing_hidden

    def _explained(self, job: JobId) -> list[str]:
        known = self._state.jobs.get(job)
        if known is not None:
            return explain.explain(self._state, known)
        last = self._state.log.tell(job)[-1:]
        return [f"There is no job {job}.", *[f"The last that is known of it: {line}" for line in last]]

    def standing(self, job: JobId) -> dict[ProgramId, int]:
        """Programs of the job, by cut, whose next step would be launched whole and at once (scheduler/standing.py)."""
        return standing.standing(self._state, job)

    def snapshot(self) -> dict[str, Any]:
        """Plain data for status and metrics; `scheduler/report.py` lists it."""
        return report.take(self._state)

    def out(self, launch: LaunchId) -> report.Out | None:
        """What the launch is, while it is outstanding."""
        return report.out(self._state, launch)

    def all_out(self) -> list[report.Out]:
        """Every outstanding launch."""
        return report.all_out(self._state)

    def held(self) -> list[report.Held]:
        """Low jobs that the guard holds back now."""
        return report.held(self._state)

    def banned(self) -> list[report.Banned]:
        """The bans in force."""
        return report.banned(self._state)

    def operators(self, job: JobId, program: ProgramId) -> tuple[str, ...]:
        """The names of a program's operators, in captured order, where the device says them."""
        return report.operators(self._state, job, program)

    def check_invariants(self) -> None:
        """Raise AssertionError, saying what, if the core contradicts itself. Slow: for tests."""
        invariants.check(self._state)

    def _launch(self, policy: Policy, job: Job, stream: int, share: float) -> None:
        state, step = self._state, job.head_step()
        if not step.launched:
            program = step.program
            step.cut, step.pieces, step.bounds, step.spans = program.cut, program.pieces, program.bounds, program.spans
        piece, launch = step.launched, LaunchId(next(state.launch_ids))
        made = state.board.occupy(launch, job, step, policy.limit(state.board, job.priority), share)
        step.launched += 1
        if policy.guard is not None:
            policy.guard.launched(made, state.board, state.now)
        told = (piece, len(step.pieces), launch, stream, step.cut)
        state.log.add((state.now, job.id, step.id, "launched", told, state.cause))
        last = step.launched == len(step.pieces)
        submitted = step.submitted if last else None
        state.out.append(
            LaunchPiece(launch, job.id, step.id, step.program.id, step.cut, piece, stream, share, submitted)
        )
        if last:
            job.queue.popleft()
            job.running[step.id] = step
            state.board.update(job)
            state.touched.append(job)

    def _settle(self, guard: Guard) -> None:
        """Ask to be woken where the guard holds low work and no event is sure to come."""
        state, when = self._state, guard.settled(self._state.now)
        if guard.holds.fresh:
            for job_id, hold in guard.holds.fresh:
                step = state.jobs[job_id].head_step()
                if step.launched:  # a step that has not begun is explained below
                    state.tell(job_id, step.id, f"waits:held:{hold.reason}", explain.Clause(state, hold))
            guard.holds.fresh.clear()
        self._wake(when)

    def _wake(self, when: float) -> None:
        state = self._state
        if when < inf and not state.now < state.wake <= when:
            soon = state.now + SHORTEST_WAKE_S
            state.wake = when if when > soon else soon
            # What a NamedTuple's constructor, a function of the interpreter, does: the guard asks after one event in
            # ten.
            state.out.append(tuple.__new__(WakeAt, (state.wake,)))

    def _explain(self, job: Job) -> None:
        """Tell the story why the job's next step has not begun, once for each reason."""
        state, step = self._state, job.queue[0]
        if not isinstance(step, Step) or step.launched or state.policy is None:
            return
        reason, detail = job.blocked(), ()  # type: str, tuple[object, ...]
        if reason == "program":
            detail = (step.program.id,)
        elif not reason:
            reason, detail = self._why_not_now(state.policy, job)
        if reason != step.noted:
            step.noted = reason
            state.tell(job.id, step.id, f"waits:{reason}", *detail)

    def _why_not_now(self, policy: Policy, job: Job) -> tuple[str, tuple[object, ...]]:
        answer = policy.guard.answer(job, self._state.now) if policy.guard is not None else None
        if answer is not None and answer.hold is not None:
            return f"held:{answer.hold.reason}", (explain.Clause(self._state, answer.hold),)
        board, name = self._state.board, job.priority.name.lower()
        limit, window = policy.limit(board, job.priority), board.windows[job.priority]
        if board.fits(job, limit) or not window.launches:
            first = board.first(job.priority)
            return "turn", (first.id if first is not None else "another", name)
        holder = next(iter(window.launches.values()))
        held = (holder.id, holder.piece, holder.step.id, holder.job.id)
        return "window", (name, len(window.launches), limit.launches, window.seconds * 1e3, limit.seconds * 1e3, *held)
