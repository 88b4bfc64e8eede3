"""The core: `handle(event, now)` takes one thing that happened and returns what to do about it.

Pure: no clock, no sockets, no threads. A handler does the bookkeeping of its event (`lifecycle.py`,
`work.py`), then the policy launches whatever there is room for. A submitted step is answered
exactly once, by FinishStep or FailStep. Events about jobs, launches or transfers that are over are
late, not wrong: they are counted in the snapshot and change nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any, Final

from gpumux.core import cutting, explain, invariants, lifecycle, regrade, snapshot, standing, view, work
from gpumux.core import events as ev
from gpumux.core.commands import Command, LaunchPiece, WakeAt
from gpumux.core.config import CoreConfig as CoreConfig
from gpumux.core.interference import Guard
from gpumux.core.policy import Policy
from gpumux.core.queue import Job, Step
from gpumux.core.state import CoreState, Hidden, nothing_hidden
from gpumux.model import JobId, LaunchId, ProgramId, StepId

_HANDLERS: dict[type[Any], Callable[[CoreState, Any], None]] = {
    ev.DeviceOpened: lifecycle.device_opened,
    ev.Reconfigured: lifecycle.reconfigured,
    ev.SessionOpened: lifecycle.session_opened,
    ev.SessionClosed: lifecycle.session_closed,
    ev.JobRequested: lifecycle.job_requested,
    ev.PauseRequested: lifecycle.pause_requested,
    ev.ResumeRequested: lifecycle.resume_requested,
    ev.ChangeRequested: regrade.change_requested,
    ev.CloseRequested: lifecycle.close_requested,
    ev.DrainRequested: lifecycle.drain_requested,
    ev.JobDied: lifecycle.job_died,
    ev.JobReleased: lifecycle.job_released,
    ev.ProgramOffered: work.program_offered,
    ev.ProgramReady: work.program_ready,
    ev.ProgramDropped: work.program_dropped,
    ev.StepSubmitted: work.step_submitted,
    ev.ClientWaits: work.client_waits,
    ev.PieceDone: work.piece_done,
    ev.PieceFailed: work.piece_failed,
    ev.TransferRequested: work.transfer_requested,
    ev.TransferEnded: work.transfer_ended,
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
        """Programs of the job, by cut, whose next step would be launched whole and at once (core/standing.py)."""
        return standing.standing(self._state, job)

    def snapshot(self) -> dict[str, Any]:
        """Plain data for status and metrics; `core/snapshot.py` lists it."""
        return snapshot.take(self._state)

    def out(self, launch: LaunchId) -> view.Out | None:
        """What the launch is, while it is outstanding."""
        return view.out(self._state, launch)

    def all_out(self) -> list[view.Out]:
        """Every outstanding launch."""
        return view.all_out(self._state)

    def held(self) -> list[view.Held]:
        """Low jobs that the guard holds back now."""
        return view.held(self._state)

    def banned(self) -> list[view.Banned]:
        """The bans in force."""
        return view.banned(self._state)

    def operators(self, job: JobId, program: ProgramId) -> tuple[str, ...]:
        """The names of a program's operators, in captured order, where the device says them."""
        return view.operators(self._state, job, program)

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
            # What a NamedTuple's constructor, a function of the interpreter, does: the guard asks after one event in ten.
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
