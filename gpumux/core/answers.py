"""What the guard said of a low piece, and how long that stands."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Final

from gpumux.core.bans import Ban
from gpumux.core.cells import Spot
from gpumux.core.estimates import HighModel
from gpumux.core.holds import Hold
from gpumux.core.pairs import Pair
from gpumux.core.queue import Job, Step

if TYPE_CHECKING:
    from gpumux.core.fairness import ReadyQueue
    from gpumux.core.scene import Running
    from gpumux.core.track import Track, Turn

ANY: Final = -1  # version of the low class where what is out of it makes no difference
NO_NEED: Final = -inf


class Answer:
    """Whether one piece may be launched, and what is to be noted when it is. Seconds."""

    # One is made for every question, and few of these are ever another than here.
    exposed = 1.0  # part of the launch that high work is there to feel
    expected = 0.0  # excess high seconds
    beside: list[Running] | None = None  # high jobs that run
    spots: list[tuple[Pair, Spot]] | None = None  # where it would begin, beside those
    gaps: list[HighModel] | None = None  # of idle jobs, one of whose steps may come during it
    probe: Ban | None = None
    probed: Track | None = None
    exploring: Track | None = None
    trusting = False  # it relies on when idle jobs usually come
    unknown = False  # the piece has never run beside a high job that runs
    hold: Hold | None = None
    # A held launch stays so as long as these do:
    job: Job | None = None
    step: Step | None = None
    track: Track | None = None  # of the job it is held for
    turn: Turn | None = None  # of that track's
    seen = 0  # by that count
    low_seen = ANY  # the low class's, where what is out made a difference
    need = NO_NEED  # Track.awaited
    soonest = 0.0  # until then that track's next step is not expected sooner than when this was said

    def __init__(self, share: float, seconds: float) -> None:
        self.share = share
        self.seconds = seconds  # the launch is predicted to take

    def held(self, hold: Hold, track: Track) -> Answer:
        self.hold, self.track = hold, track
        self.turn, self.seen = track.turn, track.turn.count
        return self

    def refused(self, reason: str, track: Track, piece: int, ban: Ban | None = None, until: float = inf) -> Answer:
        """The same, in the words of a Hold."""
        return self.held(Hold(reason, track.job.id, piece, ban, until), track)

    def untried(self, track: Track, piece: int) -> Answer:
        """The same where nothing is known of the piece and nothing may be risked, which is so for the rest of the high step."""
        self.refused("learning", track, piece)
        self.turn, self.seen, self.need = track.whole, track.whole.count, inf
        return self

    def stands(self, low_version: int, now: float) -> bool:
        """Whether what held the piece does so still. Low launches that ended since may only have made it easier."""
        turn, hold = self.turn, self.hold
        assert turn is not None
        assert hold is not None
        seen = self.low_seen
        return now < hold.until and turn.count == self.seen and seen in (ANY, low_version)


class Rest:
    """Everybody who could launch was asked, and is held: `first`, whose turn it is, and others. `until`: one of them is to be asked
    again; `low`: the low class's version."""

    __slots__ = ("_entered", "_first", "_low", "_low_seen", "_others", "_seen", "_step", "_turn", "partial", "until")

    def __init__(self, first: Job, entered: int, low: int) -> None:
        self._others: list[Answer] = []
        self.begin(first, entered, low)

    def begin(self, first: Job, entered: int, low: int) -> None:
        """It is the next one."""
        self._first, self._step, self._entered, self._low, self.until = first, first.queue[0], entered, low, inf
        self._low_seen = ANY
        self.partial = False  # only the first was asked, as low work was out: once none is, others matter
        self._turn: Turn | None = None  # what they are held by: most often one and the same for all
        self._seen = 0
        if self._others:
            self._others.clear()

    def add(self, answer: Answer) -> None:
        """One of them is held so."""
        if self._turn is None:
            self._turn, self._seen = answer.turn, answer.seen
        elif answer.turn is not self._turn or answer.seen != self._seen:
            self._others.append(answer)
        if answer.low_seen != ANY:
            self._low_seen = answer.low_seen

    def lasts(self, ready: ReadyQueue, low: int, now: float) -> bool:
        """Whether nobody has to be asked again: neither those nor anybody who was not ready then. `low`: the low class's version."""
        first = self._first
        if now >= self.until or ready.entered != self._entered or not first.entry:
            return False
        if low != self._low and (self._low_seen != ANY or ready.first() is not first):
            return False
        if not first.queue or first.queue[0] is not self._step:
            return False
        if self._turn is not None and self._turn.count != self._seen:
            return False
        for answer in self._others:
            other = answer.turn
            if other is None or other.count != answer.seen:
                return False
        return True
