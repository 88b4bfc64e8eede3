"""Whose piece next. A policy is two methods; windows, queues and fairness are the board's.

    fifo      one stream, arrival order over all jobs, as good as no window: what sharing a device
              without any of this looks like
    streams   the device's stream priorities alone, behind deep windows
    paced     stream priorities and short windows: what is already out can't be called back, so
              little is let out, and less of the low class while a high job is active
    guarded   paced, and low work only where it costs no high job more than that job allows
              (`scheduler/guard/guard.py`)

`choose` returns the next job and how its piece is launched, or None when nothing may be launched
now; the machine calls it until it says None. It must not pass over a class's first job because a
later one would fit: that is how jobs with long pieces starve. It may because the guard holds it.
"""

from __future__ import annotations

from math import inf
from typing import ClassVar, Final, Protocol

from gpumux.errors import ConfigError
from gpumux.scheduler.config import CoreConfig
from gpumux.scheduler.fair_queue import Order
from gpumux.scheduler.guard.cutting import DEFAULT_TARGET_S
from gpumux.scheduler.guard.guard import Guard
from gpumux.scheduler.jobs import Job
from gpumux.scheduler.windows import Board, Limit
from gpumux.types import DeviceInfo, Priority

_LOW: Final = Priority.LOW
_HIGH: Final = Priority.HIGH
_LOW_STREAM: Final = int(_LOW)
_HIGH_STREAM: Final = int(_HIGH)
_BY_RANK: Final = (_HIGH, _LOW)  # looked up once: an enum's members cost a call each time
DEEP: Final = 1024  # launches; more than max_inflight lets a handful of jobs have
BY_TURN: Final = 3  # low jobs the guard is asked about, by turn: one that is held must not hold up the others


class Choice:
    """The job whose next piece is launched, the stream's priority, and the part of the device's
    multiprocessors the piece may use."""

    __slots__ = ("job", "share", "stream")

    def __init__(self, job: Job, stream: int, share: float = 1.0) -> None:
        self.job, self.stream, self.share = job, stream, share


class Policy(Protocol):
    """`order` says how the board sorts ready jobs within a class; `guard` is told what happens."""

    order: ClassVar[Order]

    @property
    def guard(self) -> Guard | None: ...

    def __init__(self, config: CoreConfig, info: DeviceInfo) -> None: ...

    def limit(self, board: Board, priority: Priority) -> Limit:
        """What the class may have outstanding now. No launch is made beyond it."""

    def choose(self, board: Board, now: float) -> Choice | None:
        """Whose next piece is launched at `now`, and how. Changes nothing: it may be asked twice."""


class Fifo:
    order: ClassVar[Order] = "arrival"
    guard: Guard | None = None

    def __init__(self, config: CoreConfig, info: DeviceInfo) -> None:
        self._limit = Limit(DEEP, inf)

    def limit(self, board: Board, priority: Priority) -> Limit:
        return self._limit

    def choose(self, board: Board, now: float) -> Choice | None:
        ready = [job for job in (board.first(p) for p in Priority) if job is not None]
        if not ready:
            return None
        job = min(ready, key=lambda j: j.head_step().arrival)
        return Choice(job, 0) if board.fits(job, self._limit) else None


class Streams:
    order: ClassVar[Order] = "fair"
    guard: Guard | None = None

    def __init__(self, config: CoreConfig, info: DeviceInfo) -> None:
        self._limit = Limit(DEEP, inf)

    def limit(self, board: Board, priority: Priority) -> Limit:
        return self._limit

    def choose(self, board: Board, now: float) -> Choice | None:
        for priority in _BY_RANK:
            job = board.first(priority)
            if job is not None and board.fits(job, self._limit):
                return Choice(job, int(priority))
        return None


class Paced:
    order: ClassVar[Order] = "fair"
    guard: Guard | None = None

    def __init__(self, config: CoreConfig, info: DeviceInfo) -> None:
        def window(launches: int, seconds: float | None, priority: Priority) -> Limit:
            target = info.piece_target_s.get(priority.name.lower(), DEFAULT_TARGET_S)
            return Limit(launches, 2 * launches * target if seconds is None else seconds)

        self._high = window(config.high_launches, config.high_window_s, Priority.HIGH)
        self._low = window(config.low_launches, config.low_window_s, Priority.LOW)
        self._low_idle = window(config.low_idle_launches, config.low_idle_window_s, Priority.LOW)

    def limit(self, board: Board, priority: Priority) -> Limit:
        if priority is _HIGH:
            return self._high
        return self._low if board.active(_HIGH) else self._low_idle

    def choose(self, board: Board, now: float) -> Choice | None:
        for priority in _BY_RANK:
            job = board.first(priority)
            if job is not None and board.fits(job, self.limit(board, priority)):
                return Choice(job, int(priority))
        return None


class Guarded(Paced):
    def __init__(self, config: CoreConfig, info: DeviceInfo) -> None:
        super().__init__(config, info)
        self.guard = self._guard = Guard(config, info)
        self._high_launches, self._idle_launches = self._high.launches, self._low_idle.launches
        self._beside = [Limit(n, n * self._low.seconds / self._low.launches) for n in range(self._guard.wide + 1)]

    def limit(self, board: Board, priority: Priority) -> Limit:
        if priority is _HIGH:
            return self._high
        return self._beside[self._guard.width] if board.active(_HIGH) else self._low_idle

    def choose(self, board: Board, now: float) -> Choice | None:
        # Asked after every event and after every launch: what needs no look at a job comes first.
        ready, high, low = board.low_ready, board.high_ready, board.low
        if high.size and len(board.high.launches) < self._high_launches:
            job = high.first()
            if job is not None and board.fits(job, self._high):
                return Choice(job, _HIGH_STREAM)
        guard, none_out = self._guard, not low.launches
        room = guard.width if board.active_jobs[_HIGH_STREAM] else self._idle_launches
        if not ready.size or len(low.launches) >= room:
            return None
        rest = guard.rest
        others_matter = none_out and ready.size > 1  # where the device would be left without low work
        if rest is not None and not (others_matter and rest.partial) and rest.lasts(ready, guard.low_version, now):
            guard.resting = True
            return None
        first = ready.first()
        if first is None or not (none_out or board.fits(first, self.limit(board, _LOW))):
            return None
        share = guard.admit(first, board, now)
        if share:
            return Choice(first, _LOW_STREAM, share)
        if guard.awaited.jobs:  # no high job loses by these, which the others wait behind
            for job in guard.awaited.jobs:
                if job.entry and job is not first and (none_out or board.fits(job, self.limit(board, _LOW))):
                    share = guard.admit(job, board, now)
                    if share:
                        return Choice(job, _LOW_STREAM, share)
        if others_matter and not guard.holds_all(first):
            others = ready.following()
            if ready.size > BY_TURN:
                # Who is held keeps its turn, perhaps for ever: one more is asked out of turn, and not always the same.
                more = ready.another(first, others)
                if more is not None:
                    others.append(more)
            for job in others:
                share = guard.admit(job, board, now)
                if share:
                    return Choice(job, _LOW_STREAM, share)
        guard.asked, guard.entered, guard.partial = first, ready.entered, not none_out
        return None


POLICIES: dict[str, type[Policy]] = {"fifo": Fifo, "streams": Streams, "paced": Paced, "guarded": Guarded}


def policy_named(name: str) -> type[Policy]:
    """The policy's class. Raises ConfigError for a name that is none."""
    if name not in POLICIES:
        raise ConfigError(f"there is no policy {name!r}", f"choose one of {', '.join(sorted(POLICIES))}")
    return POLICIES[name]
