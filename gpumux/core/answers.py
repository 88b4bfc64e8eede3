"""What the guard said of a low piece, and how long that stands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import TYPE_CHECKING

from gpumux.core.bans import Ban
from gpumux.core.cells import Spot
from gpumux.core.estimates import Pair
from gpumux.core.holds import Hold
from gpumux.core.queue import Job, Step

if TYPE_CHECKING:
    from gpumux.core.fairness import ReadyQueue
    from gpumux.core.scene import Running
    from gpumux.core.track import Track

ANY = -1  # version of the low class where what is out of it makes no difference


class Answer:
    """Whether one piece may be launched, and what is to be noted when it is. Seconds."""

    # One is made for every question, and few of these are ever another than here.
    exposed = 1.0  # part of the launch that high work is there to feel
    expected = 0.0  # excess high seconds
    beside: Sequence[Running] = ()  # high jobs that run
    probe: Ban | None = None
    probed: Track | None = None
    exploring: Track | None = None
    unknown = False  # the piece has never run beside a high job that runs
    hold: Hold | None = None
    # A held launch stays so as long as these do:
    step: Step | None = None
    track: Track | None = None  # of the job it is held for
    seen = 0  # that track's version
    low_seen = ANY  # the low class's, where what is out made a difference
    need = -inf  # Track.awaited

    def __init__(self, share: float, seconds: float) -> None:
        self.share = share
        self.seconds = seconds  # the launch is predicted to take
        self.spots: list[tuple[Pair, Spot]] = []

    def held(self, hold: Hold, track: Track) -> Answer:
        self.hold, self.track, self.seen = hold, track, track.version
        return self

    def stands(self, low_version: int, now: float) -> bool:
        """Whether what held the piece does so still. Low launches that ended since may only have made it easier."""
        track, hold = self.track, self.hold
        assert track is not None
        assert hold is not None
        seen = self.low_seen
        return now < hold.until and track.version == self.seen and seen in (ANY, low_version)


class Rest:
    """Everybody who could launch was asked, and is held."""

    __slots__ = ("_entered", "_first", "_low", "_low_seen", "_others", "_seen", "_step", "_track", "until")

    def __init__(self, first: Job, entered: int, low: int, answers: Iterable[Answer]) -> None:
        self._first, self._entered, self._low = first, entered, low
        self._step = first.queue[0]
        until, low_seen = inf, ANY
        self._track: Track | None = None  # most often it is one and the same for all
        self._seen = 0
        self._others: list[tuple[Track, int]] = []
        for answer in answers:
            track, hold = answer.track, answer.hold
            if hold is None or track is None:
                continue
            if self._track is None:
                self._track, self._seen = track, answer.seen
            elif track is not self._track or answer.seen != self._seen:
                self._others.append((track, answer.seen))
            if hold.until < until:
                until = hold.until
            if answer.low_seen != ANY:
                low_seen = answer.low_seen
        self.until, self._low_seen = until, low_seen

    def lasts(self, ready: ReadyQueue, low: int, now: float) -> bool:
        """Whether nobody has to be asked again: neither those nor anybody who was not ready then. `low`: the low class's version."""
        first = self._first
        if now >= self.until or ready.entered != self._entered or first.entry is None:
            return False
        if low != self._low and (self._low_seen != ANY or ready.first() is not first):
            return False
        if not first.queue or first.queue[0] is not self._step:
            return False
        if self._track is not None and self._track.version != self._seen:
            return False
        for track, seen in self._others:  # noqa: SIM110
            if track.version != seen:
                return False
        return True
