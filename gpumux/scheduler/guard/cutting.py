"""How finely low programs are cut.

Every piece costs a launch and an event, so pieces are as long as the device makes them by itself. Beside a high job
whose steps are short that is too long: a piece can't be called back, and one that a step can't bear wherever it begins
is never launched, nor is what comes behind it. So while such a job steps, low programs are cut finer, and as before
when none has stepped for a while."""

from __future__ import annotations

from math import inf
from typing import Final

from gpumux.scheduler.guard.budget import TAIL
from gpumux.scheduler.guard.high_job import HighJob
from gpumux.types import JobId

DEFAULT_TARGET_S: Final = 500e-6  # piece length, where the device names no target
PIECES: Final = 2.0  # low pieces of the usual length that a step should be able to lose: else they are too long
FINER: Final = 3.0  # times shorter than usual
FINEST: Final = 10.0  # the same where a step may arrive while any piece is out
DEAR: Final = 0.25  # of what steps may lose on average: if they lose more on arrival, low programs are cut finest
AWAY_S: Final = 10.0  # since its newest step, until low programs are no longer cut for a high job


class Cutting:
    """The piece length wanted for low programs. `usual_s` is that which the device makes by itself."""

    __slots__ = ("changed", "finest", "high", "until", "usual_s")

    def __init__(self, usual_s: float) -> None:
        self.usual_s = usual_s
        self.high: JobId | None = None  # the newest high job for which low programs are cut finer
        self.finest = False
        self.changed = False  # since the device was asked
        self.until = inf  # low programs are cut finer until then, unless another step comes

    @property
    def target_s(self) -> float | None:
        """How long low pieces should be; None: as the device makes them by itself."""
        if self.high is None:
            return None
        return self.usual_s / (FINEST if self.finest else FINER)

    def step_ended(self, high: HighJob, solo_s: float, ended: float) -> None:
        """A step of a high job ended, and the next should take `solo_s` alone."""
        if high.calibrating or TAIL * high.budget.slack * solo_s >= PIECES * self.usual_s:
            return
        trust = high.trust
        finest = self.finest or not trust.trusted or trust.capped_loss > DEAR * high.budget.credit
        self.changed = self.changed or self.high is None or finest is not self.finest
        self.high, self.finest, self.until = high.job.id, finest, ended + AWAY_S

    def reset(self) -> None:
        """It is later than `until`: cut low programs as usual again."""
        self.high, self.finest, self.changed, self.until = None, False, True, inf
