"""Handlers for a job's priority and weight at run time.

A weight counts from the next piece on. A priority is taken while nothing of the job is out: each class's window then
holds launches of its own jobs alone, and the guard's view of a step is not torn. So a job that is to change its class
launches nothing until what is out has ended, which is as long as its window, changes, and goes on where it was.
JobChanged says that it is done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpumux.core import cutting
from gpumux.core import events as ev
from gpumux.core.commands import JobChanged
from gpumux.core.queue import Job, Step
from gpumux.model import Priority

if TYPE_CHECKING:
    from gpumux.core.state import CoreState


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
