"""What runs, is held and is banned right now, as plain tuples for who watches from outside (daemon/recording.py).

Reads and changes nothing. `core/snapshot.py` is the whole state, for status; this is cheap enough to be asked
after every event.
"""

from __future__ import annotations

from typing import NamedTuple

from gpumux.core.board import Launch
from gpumux.core.state import CoreState
from gpumux.model import JobId, LaunchId, ProgramId, StepId


class Out(NamedTuple):
    """A piece that was handed to the device and is not over: operators [first, end) of its program."""

    launch: LaunchId
    job: JobId
    step: StepId
    program: ProgramId
    piece: int
    first: int
    end: int
    share: float


class Held(NamedTuple):
    """A low job whose next piece waits for the sake of `high` since `since` (seconds), with a reason of core/holds.py."""

    job: JobId
    high: JobId
    reason: str
    since: float


class Banned(NamedTuple):
    """`low` may not run while operators [first, end) of `high` do; see core/bans.py."""

    high: JobId
    low: JobId
    first: int
    end: int
    share: float
    since: float
    ratio: float
    why: str


def out(core: CoreState, launch: LaunchId) -> Out | None:
    """The launch, if it is outstanding."""
    for window in core.board.windows:
        found = window.launches.get(launch)
        if found is not None:
            return _out(found)
    return None


def all_out(core: CoreState) -> list[Out]:
    """Every outstanding launch, oldest first within a class."""
    return [_out(launch) for window in core.board.windows for launch in window.launches.values()]


def _out(launch: Launch) -> Out:
    step, piece = launch.step, launch.piece
    first, end = step.bounds[piece], step.bounds[piece + 1]
    return Out(launch.id, launch.job.id, step.id, step.program.id, piece, first, end, launch.share)


def held(core: CoreState) -> list[Held]:
    """Low jobs that could run now, were it not for the guard. Whoever is paused has other reasons to wait."""
    if core.guard is None:
        return []
    holds, found = core.guard.holds, []
    for job_id, hold in holds.newest.items():
        job = core.jobs.get(job_id)
        if job is not None and not job.blocked():
            found.append(Held(job_id, hold.high, hold.reason, hold.since))
    return found


def banned(core: CoreState) -> list[Banned]:
    """The bans in force."""
    if core.guard is None:
        return []
    return [
        Banned(ban.high, ban.low, *ban.operators, ban.share, ban.since, ban.ratio, ban.why)
        for ban in core.guard.bans.active
    ]


def operators(core: CoreState, job_id: JobId, program: ProgramId) -> tuple[str, ...]:
    """The program's operators by name, in captured order; empty where the device does not say."""
    job = core.jobs.get(job_id)
    found = job.programs.get(program) if job is not None else None
    return found.operators if found is not None else ()
