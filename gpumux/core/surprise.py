"""Whether the gaps there were tell when a high job's next step comes.

Low work that is taken to be over before the next step, or to be met by one so seldom that it does not count, runs at the risk
of being wrong. Steps that come at about the same time prove that right; of steps that come at random (a server's requests) there
is always a gap that none came after so far. So what steps lose *because they came while low work was out* is counted by itself:
as for all steps, so many may lose too much (tokens), and on average they may lose the credit. What they lose later, beside
work that was let out with them there, is none of it. A few too many are held against the programs they were lost to: one of short
pieces does not wait for what another one's long pieces did.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from gpumux.core.baseline import KEEP

TOKENS: Final = 1.0  # steps that may lose too much on arrival, to begin with
TOKEN_RATE: Final = 0.006  # and for each step: no more than of all (controller.py)
MOST_OWED: Final = 4.0  # so that a disturbance is forgotten after some hundred steps
FEW: Final = 1.5  # tokens owed by single programs; beyond that no program is trusted
MOSTLY: Final = 0.5  # of what a step lost: so much on arrival, and that was why


class Surprise:
    """`trusted`: for any low program the gaps there were are relied on."""

    __slots__ = ("_blamed", "_few", "mean", "often", "tokens", "trusted")

    def __init__(self) -> None:
        self.tokens = TOKENS
        self.mean = 0.0  # seconds that steps lose on arrival
        self.often = 0.0  # the same, where a step counts for no more than it may lose
        self.trusted = True
        self._few = True
        self._blamed: set[str] = set()  # programs, since tokens are owed

    def trusts(self, program: str) -> bool:
        """Whether they are relied on for that low program."""
        return self.trusted or (self._few and program not in self._blamed)

    def step(self, lost: float, to: Iterable[str], excess: float, most: float, credit: float, noise: float) -> None:
        """A step lost `excess` seconds, of which `lost` on arrival, to these low programs. `most`: what it may lose, and no more
        than `credit` on average; `noise`: how probable it is that a step loses more by what is not low work's doing."""
        tokens = self.tokens + TOKEN_RATE
        if lost > 0.0:
            tokens += noise
            if excess > most and lost > MOSTLY * excess:
                tokens -= 1.0
                self._blamed.update(to)
        self.tokens = TOKENS if tokens > TOKENS else -MOST_OWED if tokens < -MOST_OWED else tokens
        mean = self.mean = KEEP * self.mean + (1.0 - KEEP) * lost
        self.often = KEEP * self.often + (1.0 - KEEP) * (lost if lost < most else most)
        self._few = tokens >= -FEW and mean <= credit
        self.trusted = tokens >= 0.0 and self._few
        if self.trusted and self._blamed:
            self._blamed.clear()
