"""Everything the core knows, and the few changes that several handlers share.

Handlers (`scheduler.py`, `scheduler.py`) are functions over a CoreState; `scheduler.py` calls them. What
they want done is appended to `out`, what happened to `log`, both under the event being handled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import count
from typing import Final

from gpumux.scheduler import admission
from gpumux.scheduler import events as ev
from gpumux.scheduler.admission import Ledger
from gpumux.scheduler.config import CoreConfig
from gpumux.scheduler.events import (
    CloseJob,
    Command,
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
from gpumux.scheduler.guard import cutting
from gpumux.scheduler.guard.guard import Guard
from gpumux.scheduler.history import Story
from gpumux.scheduler.jobs import Job, JobState, Session, Step, Transfer
from gpumux.scheduler.policy import Policy, policy_named
from gpumux.scheduler.windows import Board
from gpumux.types import DeviceInfo, Fault, JobId, Priority, SessionId, StepId

# ---- Handlers for a job's priority and weight at run time.
#
# A weight counts from the next piece on. A priority is taken while nothing of the job is out: each class's window then
# holds launches of its own jobs alone, and the guard's view of a step is not torn. So a job that is to change its class
# launches nothing until what is out has ended, which is as long as its window, changes, and goes on where it was.
# JobChanged says that it is done.


def change_requested(core: CoreState, event: ev.ChangeRequested) -> None:
    job = core.live(event.job)
    if job is None:
        return
    if event.weight is not None:
        core.board.reweigh(job, event.weight)
        core.tell(job.id, None, "weighs", event.weight)
    if event.priority is not None:
        job.wanted = event.priority
        core.board.update(job)
    finish(core, job)
    core.refresh(job)


def finish(core: CoreState, job: Job) -> None:
    """Change the job's class if it is to be changed and can be; say so once nothing is left to change."""
    wanted = job.wanted
    if wanted is not None and wanted is not job.priority:
        if job.outstanding:
            return
        _move(core, job, wanted)
    job.wanted = None
    core.out.append(JobChanged(job.id, job.priority, job.weight))


def _move(core: CoreState, job: Job, priority: Priority) -> None:
    core.board.move(job, priority)
    core.tell(job.id, None, "changes", priority.name.lower())
    if core.guard is not None:
        core.guard.forgotten(job, core.now)
        cutting.ask(core, job)
        if priority is Priority.HIGH:
            head = job.queue[0] if job.queue else None
            core.guard.promoted(job, head if isinstance(head, Step) and head.launched else None, core.now)


# ----


MOST_DEPARTED: Final = 1024  # names: a few for each job there can be
Hidden = Callable[[JobId], str | None]  # what to call a job whose name the listener may not know; None: it may


def nothing_hidden(job: JobId) -> str | None:
    """The listener may know everything."""
    return None  # said, as mypyc takes the end of a function with a result for out of reach


class CoreState:
    """Raises ConfigError when the configuration names no policy."""

    def __init__(self, config: CoreConfig) -> None:
        self.config = config
        self.policy_class = policy_named(config.policy)
        self.policy: Policy | None = None  # from DeviceOpened on
        self.guard: Guard | None = None  # the policy's, if it has one
        self.info: DeviceInfo | None = None
        self.leaving: str | None = None  # why, once the daemon is on its way out
        self.sessions: dict[SessionId, Session] = {}
        self.jobs: dict[JobId, Job] = {}
        self.board = Board(self.policy_class.order)
        self.ledger = Ledger(config)
        self.log = Story(config.story_records)
        self.departed: dict[JobId, str] = {}  # names of the newest jobs that are gone, for stories that speak of them
        self.events = 0
        self.ignored: Counter[str] = Counter()  # by event: late or said twice
        self.refusals: Counter[str] = Counter()  # by fault code
        self.arrivals = count()
        self.launch_ids = count(1)
        self.hidden: Hidden = nothing_hidden  # while something is put into words
        # Of the event being handled:
        self.wake = 0.0  # the newest time a Tick was asked for that has not come
        self.now = 0.0
        self.cause: Event = Tick()
        self.out: list[Command] = []
        self.touched: list[Job] = []  # jobs whose waiting may want explaining

    def depart(self, job: Job) -> None:
        """The job is gone, but stories still name it."""
        if job.spec.name:
            self.departed[job.id] = job.spec.name
            if len(self.departed) > MOST_DEPARTED:
                del self.departed[next(iter(self.departed))]

    def ignore(self) -> None:
        """This event is late or was said before; it changes nothing."""
        self.ignored[type(self.cause).__name__] += 1

    def ticked(self) -> None:
        """Who drives us remembers one time only, the earliest: what was asked for later is forgotten with it."""
        self.wake = 0.0

    def tell(self, job: JobId, step: StepId | None, kind: str, *detail: object) -> None:
        self.log.add((self.now, job, step, kind, detail, self.cause))

    def live(self, job_id: JobId) -> Job | None:
        """The job, unless it is unknown or closing; then the event is ignored."""
        job = self.jobs.get(job_id)
        if job is None or job.state is JobState.CLOSING:
            self.ignore()
            return None
        return job

    def refuse(self, answer: RefuseJob | RefuseProgram | FailStep | FinishTransfer, fault: Fault) -> None:
        self.refusals[fault.code] += 1
        step = answer.step if isinstance(answer, FailStep) else None
        self.tell(answer.job, step, "refused", fault.message)
        self.out.append(answer)

    def fail(self, job: Job, step: StepId, fault: Fault) -> None:
        """Answer a step that was taken into the queue."""
        job.steps_failed += 1
        self.tell(job.id, step, "failed", fault.code, fault.message)
        self.out.append(FailStep(job.id, step, fault))

    def refresh(self, job: Job) -> None:
        """After a change to the job: start what needs no window, and put it where it belongs."""
        if job.wanted is not None:
            finish(self, job)
        self.touched.append(job)
        head = job.queue[0] if job.queue else None
        if isinstance(head, Transfer):
            if not job.running and job.transfer is None and not job.paused:
                job.transfer = head
                job.queue.popleft()
                self.tell(job.id, None, "transfer", head.id)
                self.out.append(StartTransfer(job.id, head.id, head.into_device))
        elif job.state is JobState.DRAINING and not job.busy():
            self._unload(job, admission.closing(job.id), None)
        self.board.update(job)

    def close(self, job: Job, fault: Fault, tell: Fault | None) -> None:
        """Answer all the job has submitted with `fault` and have the device let go of it. The
        client is told at once with `tell`; None: it asked, and hears when the memory is free."""
        self.tell(job.id, None, "closing", fault.message)
        for step in job.steps():
            self.fail(job, step.id, fault)
        for transfer in job.all_transfers():
            self.out.append(FinishTransfer(job.id, transfer.id, fault))
        job.empty()
        self._unload(job, fault, tell)
        self.board.update(job)

    def _unload(self, job: Job, fault: Fault, tell: Fault | None) -> None:
        job.state = JobState.CLOSING
        if self.guard is not None:
            self.guard.forgotten(job, self.now)
        if tell is not None:
            job.told = True
            self.out.append(CloseJob(job.id, job.session, tell))
        for program in job.programs.values():  # an offer is answered, too: announced or refused
            if not program.ready:
                self.refuse(RefuseProgram(job.id, program.id, fault), fault)
        self.out.append(UnloadJob(job.id))
