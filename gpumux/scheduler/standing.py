"""Steps the core would launch at once if they came now, so that a device may be told beforehand.

A device that can read a job's steps itself (device.contract.Lending) saves them the way through the
daemon, as long as the answer to "may this step run now?" is known before it is asked. It is, while one
job is alone with the device: nothing else waits, runs or is about to. The core is told of each such
step afterwards, as the events it would have had, at the times they happened, and before it is told
anything else. So its accounts, the guard's and the story are those of the ordinary way, and it need
not know of the short one.
"""

from __future__ import annotations

from gpumux.scheduler.jobs import JobState
from gpumux.scheduler.state import CoreState
from gpumux.types import JobId, Priority, ProgramId

LONGEST_S = (
    0.02  # of a step: what the short way saves is nothing to a longer one, and a lane is back when its step ends
)


def standing(core: CoreState, job_id: JobId) -> dict[ProgramId, int]:
    """The job's programs whose next step is short and would be launched whole as soon as it came, each with the
    cut it would run under; empty when it might have to wait. Holds until the core's next event that is not
    of such a step."""
    job, board = core.jobs.get(job_id), core.board
    if job is None or core.policy is None or job.state is not JobState.OPEN or job.paused or job.busy():
        return {}
    if any(board.active_jobs) or any(window.launches for window in board.windows):
        return {}
    if job.priority is Priority.LOW and len(core.jobs) > 1:
        return {}  # a high job's next step may be expected, and low work held for it
    return {
        program.id: program.cut
        for program in job.programs.values()
        if len(program.pieces) == 1 and program.pieces[0] <= LONGEST_S
    }
