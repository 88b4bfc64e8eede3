"""How finely low programs are cut.

Every piece costs a launch and an event, so pieces are as long as the device likes them. Beside a high job whose steps
are short that is too long: a piece that is launched can't be called back, and one that a step can't bear wherever it
begins is never launched, nor is what comes behind it. So while such a job steps, low programs are cut finer; when none
has for a while, as they were.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Final

from gpumux.scheduler.events import CutProgram
from gpumux.scheduler.guard.budget import TAIL
from gpumux.scheduler.guard.high_job import Track
from gpumux.scheduler.jobs import Job
from gpumux.types import JobId, Priority

if TYPE_CHECKING:
    from gpumux.scheduler.state import CoreState


DEFAULT_TARGET_S: Final = 500e-6  # a piece, where the device names no target
PIECES: Final = 2.0  # of the usual length that a step should be able to lose: else they are too long
FINER: Final = 3.0  # times shorter than usual
FINEST: Final = 10.0  # the same where steps come when none was expected
DEAR: Final = 0.25  # or where what they lose by coming then is more than this part of what they may lose on average
AWAY_S: Final = 10.0  # after its newest step a high job is served so long: a cut is work for the device


class Cutting:
    """`usual_s`: seconds of a low piece as the device makes them; `finest`: no gap tells when steps come, so that any
    piece may be met, or too much is lost by those that are met."""

    __slots__ = ("changed", "finest", "high", "until", "usual_s")

    def __init__(self, usual_s: float) -> None:
        self.usual_s = usual_s
        self.high: JobId | None = None  # the newest for whom low programs are cut finer
        self.finest = False
        self.changed = False  # since the device was asked
        self.until = inf  # somebody is served, unless another step comes

    @property
    def target_s(self) -> float | None:
        """How long low pieces should be; None: as the device likes them."""
        if self.high is None:
            return None
        return self.usual_s / (FINEST if self.finest else FINER)

    def stepped(self, track: Track, solo_s: float, ended: float) -> None:
        """A step of a high job ended, of which the next should take `solo_s` alone."""
        if track.calibrating or TAIL * track.account.slack * solo_s >= PIECES * self.usual_s:
            return
        surprise = track.surprise
        finest = self.finest or not surprise.trusted or surprise.often > DEAR * track.account.credit
        self.changed = self.changed or self.high is None or finest is not self.finest
        self.high, self.finest, self.until = track.job.id, finest, ended + AWAY_S

    def over(self) -> None:
        """It is later than `until`: without a step for so long, nobody is served any more."""
        self.high, self.finest, self.changed, self.until = None, False, True, inf


def ask(core: CoreState, job: Job) -> None:
    """Have the job's programs cut as they should be, where they are not and can be."""
    if core.guard is None:
        return
    target_s = core.guard.cutting.target_s if job.priority is Priority.LOW else None
    for program in job.programs.values():
        wanted = target_s
        if wanted is not None and program.asked_s is None and max(program.pieces, default=0.0) <= wanted:
            wanted = None  # they are no longer than that
        if program.ready and program.asked_s != wanted:
            program.asked_s = wanted
            core.out.append(CutProgram(job.id, program.id, wanted))
            core.tell(job.id, None, "cut" if wanted is not None else "uncut", program.id, (wanted or 0.0) * 1e3)


def ask_all(core: CoreState) -> None:
    """Whom it was finer for, if anybody, is another one."""
    assert core.guard is not None
    core.guard.cutting.changed = False
    for job in core.jobs.values():
        if job.priority is Priority.LOW:
            ask(core, job)
