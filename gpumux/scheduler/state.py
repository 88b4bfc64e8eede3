"""Everything the scheduler knows, and the few changes that several handlers share.

Handlers (`scheduler.py`) are functions over a SchedulerState. They append to `commands` what is to be done, and to
`history` what happened; both belong to the event that is being handled.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from itertools import count
from typing import Final, TypeAlias

from gpumux.scheduler import admission
from gpumux.scheduler.admission import AdmissionLedger
from gpumux.scheduler.config import SchedulerConfig
from gpumux.scheduler.events import (
    Command,
    CutProgram,
    EndJob,
    Event,
    FailStep,
    FinishTransfer,
    JobChanged,
    RefuseJob,
    RefuseProgram,
    StartTransfer,
    Tick,
    UnloadJob,
)
from gpumux.scheduler.guard.guard import SlowdownGuard
from gpumux.scheduler.jobs import JobState, JobStep, JobTransfer, OpenSession, ScheduledJob
from gpumux.scheduler.policy import Policy, policy_named
from gpumux.scheduler.windows import Windows
from gpumux.types import DeviceInfo, Fault, JobId, LaunchId, Priority, SessionId, StepId

MOST_DEPARTED: Final = 1024  # names: a few for each job there can be
# What happened to a job: when, the job, its step, what (one of explain.TEMPLATES) with its details, and the event that
# led to it. Appended as things happen, and put into words only when they are read (explain.story). Records outlive
# jobs, since a job that failed is the one to explain.
Record: TypeAlias = "tuple[float, JobId, StepId | None, str, tuple[object, ...], Event]"
Hidden = Callable[[JobId], str | None]  # what to call a job whose name the reader may not know; None: it may


def nothing_hidden(job: JobId) -> str | None:
    """The reader may know every name."""
    return None  # explicit, since mypyc takes the end of a function with a result for unreachable


class SchedulerState:
    """Raises ConfigError when the configuration names no policy."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.policy_class = policy_named(config.policy)
        self.policy: Policy | None = None  # from DeviceOpened on
        self.guard: SlowdownGuard | None = None  # the policy's, if it has one
        self.info: DeviceInfo | None = None
        self.leaving: str | None = None  # why, once the daemon is about to leave
        self.sessions: dict[SessionId, OpenSession] = {}
        self.jobs: dict[JobId, ScheduledJob] = {}
        self.windows = Windows(self.policy_class.order)
        self.ledger = AdmissionLedger(config)
        self.history: deque[Record] = deque(maxlen=config.story_records)  # the oldest records are forgotten first
        self.departed: dict[JobId, str] = {}  # names of the newest jobs that are gone, since the history names them
        self.events = 0
        self.ignored: Counter[str] = Counter()  # by event: it was late, or came twice
        self.refusals: Counter[str] = Counter()  # by fault code
        self.arrivals = count()
        self.launch_ids = count(1)
        self.hidden: Hidden = nothing_hidden  # while something is put into words
        self.wake_at = 0.0  # the newest time that a Tick was asked for and that has not come
        # Of the event that is being handled:
        self.now = 0.0
        self.cause: Event = Tick()
        self.commands: list[Command] = []
        self.changed_jobs: list[ScheduledJob] = []  # jobs that may wait for another reason now

    def begin(self, event: Event, now: float) -> None:
        """An event is to be handled."""
        self.now, self.cause, self.commands = now, event, []
        self.events += 1

    def ignore(self) -> None:
        """The event is late or came before; it changes nothing."""
        self.ignored[type(self.cause).__name__] += 1

    def record(self, job: JobId, step: StepId | None, kind: str, *detail: object) -> None:
        """Add a record to the history; `kind` is one of explain.TEMPLATES."""
        self.history.append((self.now, job, step, kind, detail, self.cause))

    def live(self, job_id: JobId) -> ScheduledJob | None:
        """The job, unless it is unknown or closing; then the event is ignored."""
        job = self.jobs.get(job_id)
        if job is None or job.state is JobState.CLOSING:
            self.ignore()
            return None
        return job

    def refuse(self, command: RefuseJob | RefuseProgram | FailStep | FinishTransfer, fault: Fault) -> None:
        """Refuse something that was not accepted yet."""
        self.refusals[fault.code] += 1
        step = command.step if isinstance(command, FailStep) else None
        self.record(command.job, step, "refused", fault.message)
        self.commands.append(command)

    def fail(self, job: ScheduledJob, step: StepId, fault: Fault) -> None:
        """Fail a step that was accepted."""
        job.steps_failed += 1
        self.record(job.id, step, "failed", fault.code, fault.message)
        self.commands.append(FailStep(job.id, step, fault))

    def refresh(self, job: ScheduledJob) -> None:
        """After a change to the job: start what needs no window, and update the ready queue."""
        if job.new_priority is not None:
            self.finish_change(job)
        self.changed_jobs.append(job)
        head = job.queue[0] if job.queue else None
        if isinstance(head, JobTransfer):
            if not job.running and job.transfer is None and not job.paused:
                job.transfer = head
                job.queue.popleft()
                self.record(job.id, None, "transfer", head.id)
                self.commands.append(StartTransfer(job.id, head.id, head.into_device))
        elif job.state is JobState.DRAINING and not job.busy():
            self._unload(job, admission.closing(job.id), None)
        self.windows.update(job)

    def finish_change(self, job: ScheduledJob) -> None:
        """Change the job's class if that was asked for and is possible; say so once no change is left.

        A class is changed while no piece of the job is out: then each class's window holds launches of its own jobs
        alone, and the guard never sees one part of a step in each class. So a job that is to change its class launches
        nothing until its pieces have ended, changes, and goes on where it was.
        """
        priority = job.new_priority
        if priority is not None and priority is not job.priority:
            if job.outstanding:
                return
            self._set_priority(job, priority)
        job.new_priority = None
        self.commands.append(JobChanged(job.id, job.priority, job.weight))

    def _set_priority(self, job: ScheduledJob, priority: Priority) -> None:
        self.windows.set_priority(job, priority)
        self.record(job.id, None, "changes", priority.name.lower())
        if self.guard is not None:
            self.guard.forget(job, self.now)
            self.request_cut(job)
            if priority is Priority.HIGH:
                head = job.queue[0] if job.queue else None
                begun = head if isinstance(head, JobStep) and head.launched else None
                self.guard.promoted(job, begun, self.now)

    def request_cut(self, job: ScheduledJob) -> None:
        """Ask the device to cut the job's programs as the guard wants them, where they are not and can be."""
        if self.guard is None:
            return
        target_s = self.guard.cutting.target_s if job.priority is Priority.LOW else None
        for program in job.programs.values():
            wanted = target_s
            if wanted is not None and program.cut_target_s is None and max(program.pieces, default=0.0) <= wanted:
                wanted = None  # its pieces are short enough
            if program.ready and program.cut_target_s != wanted:
                program.cut_target_s = wanted
                self.commands.append(CutProgram(job.id, program.id, wanted))
                kind = "cut" if wanted is not None else "uncut"
                self.record(job.id, None, kind, program.id, (wanted or 0.0) * 1e3)

    def lose_launches(self, launches: list[LaunchId]) -> None:
        """These launches are off the device, and no end of them will be reported."""
        if self.guard is not None:
            for launch in launches:
                self.guard.lost(launch)

    def close(self, job: ScheduledJob, fault: Fault, tell: Fault | None) -> None:
        """Answer everything the job has submitted with `fault` and have the device release it. The client is told at
        once with `tell`; None: the client asked for it, and is told when the memory is free."""
        self.record(job.id, None, "closing", fault.message)
        for step in job.steps():
            self.fail(job, step.id, fault)
        for transfer in job.all_transfers():
            self.commands.append(FinishTransfer(job.id, transfer.id, fault))
        job.empty()
        self._unload(job, fault, tell)
        self.windows.update(job)

    def _unload(self, job: ScheduledJob, fault: Fault, tell: Fault | None) -> None:
        job.state = JobState.CLOSING
        if self.guard is not None:
            self.guard.forget(job, self.now)
        if tell is not None:
            job.end_sent = True
            self.commands.append(EndJob(job.id, job.session, tell))
        for program in job.programs.values():  # an offer is answered, too: announced or refused
            if not program.ready:
                self.refuse(RefuseProgram(job.id, program.id, fault), fault)
        self.commands.append(UnloadJob(job.id))

    def remember_name(self, job: ScheduledJob) -> None:
        """The job is gone, but the history still names it."""
        if job.spec.name:
            self.departed[job.id] = job.spec.name
            if len(self.departed) > MOST_DEPARTED:
                del self.departed[next(iter(self.departed))]
