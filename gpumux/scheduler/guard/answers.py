"""What the guard said of a low piece, and how long that stands."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Final

from gpumux.scheduler.guard.costs import Ban, HighModel, Pair, Spot
from gpumux.scheduler.jobs import Job, Step
from gpumux.types import JobId

if TYPE_CHECKING:
    from gpumux.scheduler.fair_queue import ReadyQueue
    from gpumux.scheduler.guard.high_job import Track, Turn
    from gpumux.scheduler.guard.scene import Running


# ---- Who is held, why and since when; and how long the low class was held in all, by reason.
#
# calibration   a step without low work is wanted, to know what steps take alone
# learning      nothing is known yet of this low work beside that high job: one launch at a time
# ban           it would run into a range it is banned from
# price         other ranges give more low work for what the high job may lose
# budget        the high job has lost what it may lose on average
# tail          the step that runs may not lose more
# next          it would outlast that step, and the next one, which may have come by then, may not lose so much
# gap           it would still run when the high job's next step is expected


REASONS: Final = ("calibration", "learning", "ban", "price", "budget", "tail", "next", "gap")


class Hold:
    """Why a low job may not launch now: for the sake of which high job, which of its pieces (-1: none in
    particular), by which ban, and when to ask again at the latest (inf: something will happen before)."""

    __slots__ = ("ban", "begun", "foreseen", "high", "piece", "reason", "since", "until")

    def __init__(self, reason: str, high: JobId, piece: int, ban: Ban | None, until: float) -> None:
        self.reason, self.high, self.piece, self.ban, self.until = reason, high, piece, ban, until
        self.since = 0.0  # the job is held, whatever for; and for this reason since `begun`
        self.begun = 0.0
        self.foreseen = True  # where it is a gap's end: the next step is expected then, and not at any time


class Holds:
    __slots__ = ("_asked", "_seconds", "fresh", "newest", "reason")

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(REASONS, 0.0)
        self.newest: dict[JobId, Hold] = {}  # of those held now, who is for longest first
        self.fresh: list[tuple[JobId, Hold]] = []  # who was not held before the event
        self.reason = ""  # of the low job whose turn it is
        self._asked = 0.0

    def note(self, reason: str, now: float) -> None:
        """After an event: why the low job is held whose turn it is; "": nobody is."""
        before = self.reason
        if reason == before:
            return
        if before:
            self._seconds[before] += now - self._asked
        self.reason, self._asked = reason, now

    def seconds(self, now: float) -> dict[str, float]:
        """By reason, in which low work was ready and had room, but was held."""
        found = dict(self._seconds)
        if self.reason:
            found[self.reason] += now - self._asked
        return found

    def hold(self, job: Job, hold: Hold, now: float) -> None:
        """The job is held now, for this reason."""
        old, job.hold = job.hold, hold
        self.newest[job.id] = hold
        if old is None:
            hold.since = hold.begun = now
            self.fresh.append((job.id, hold))
            return
        hold.since = old.since
        if old.reason == hold.reason:
            hold.begun = old.begun
        else:
            self._count(job, old, now)
            hold.begun = now

    def freed(self, job: Job, now: float) -> None:
        """The job was launched, or has nothing to launch."""
        old = job.hold
        if old is not None:
            job.hold = None
            del self.newest[job.id]
            self._count(job, old, now)

    def of(self, job: Job, now: float) -> dict[str, float]:
        """Seconds for which the low job was held since it opened, by reason, the longest first."""
        found = dict(job.held_s)
        hold = job.hold
        if hold is not None:
            found[hold.reason] = found.get(hold.reason, 0.0) + now - hold.begun
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def _count(self, job: Job, hold: Hold, now: float) -> None:
        job.held_s[hold.reason] = job.held_s.get(hold.reason, 0.0) + (now - hold.begun)


# ----


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
        """The same where nothing is known of the piece and nothing may be risked, which is so for the rest of the high
        step."""
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
    """Everybody who could launch was asked, and is held: `first`, whose turn it is, and others. `until`: one of them is
    to be asked again; `low`: the low class's version."""

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
        """Whether nobody has to be asked again: neither those nor anybody who was not ready then. `low`: the low
        class's version."""
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
