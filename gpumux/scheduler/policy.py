"""Policies: which job's piece is launched next. A policy is one method or two; windows, queues and fairness are
`windows.py`.

    fifo      one stream, arrival order over all jobs, windows so deep that they hardly limit: a device shared
              without any scheduling
    streams   the device's stream priorities alone, behind deep windows
    paced     stream priorities and short windows: what is out can't be called back, so little is
              launched, and less of the low class while a high job is active
    guarded   paced, and low work only where it costs no high job more than that job allows
              (`scheduler/guard/guard.py`)

`choose` returns the next job and how its piece is launched, or None when nothing may be launched
now; the scheduler calls it until it returns None. It must not pass over a class's first job because
a later one would fit: jobs with long pieces would starve. It may where the guard holds the first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import inf
from typing import ClassVar, Final

from gpumux.errors import ConfigError
from gpumux.scheduler.config import SchedulerConfig
from gpumux.scheduler.guard.guard import SlowdownGuard
from gpumux.scheduler.guard.learning import DEFAULT_TARGET_S
from gpumux.scheduler.jobs import ScheduledJob
from gpumux.scheduler.windows import Limit, Order, ReadyQueue, Windows
from gpumux.types import DeviceInfo, Priority

_LOW: Final = Priority.LOW
_HIGH: Final = Priority.HIGH
_LOW_STREAM: Final = int(_LOW)
_HIGH_STREAM: Final = int(_HIGH)
_BY_RANK: Final = (_HIGH, _LOW)
DEEP: Final = 1024  # launches; more than max_inflight allows a handful of jobs


class NextLaunch:
    """The job whose next piece is launched, the stream's priority, and the share of the device's multiprocessors the
    piece may use."""

    __slots__ = ("job", "share", "stream")

    def __init__(self, job: ScheduledJob, stream: int, share: float = 1.0) -> None:
        self.job, self.stream, self.share = job, stream, share


class Policy(ABC):
    """`order` is that of ready jobs within a class; `guard`, if there is one, follows all launches."""

    order: ClassVar[Order]
    holds_low_work: ClassVar[bool] = False  # for high jobs: clients then report their waits
    guard: SlowdownGuard | None = None

    def __init__(self, config: SchedulerConfig, info: DeviceInfo) -> None:
        """Makes the policy for the device that `info` describes."""
        self._limit = Limit(DEEP, inf)

    def limit(self, windows: Windows, priority: Priority) -> Limit:
        """What the class may have outstanding now: no launch is made beyond it. A policy that does not say is hardly
        limited."""
        return self._limit

    @abstractmethod
    def choose(self, windows: Windows, now: float) -> NextLaunch | None:
        """The next launch at `now`, or None. Called again it gives the same answer."""


class Fifo(Policy):
    order: ClassVar[Order] = "arrival"

    def choose(self, windows: Windows, now: float) -> NextLaunch | None:
        ready = [job for job in (windows.peek(p) for p in Priority) if job is not None]
        if not ready:
            return None
        job = min(ready, key=lambda j: j.head_step().arrival)
        return NextLaunch(job, 0) if windows.fits(job, self._limit) else None


class StreamPriorities(Policy):
    order: ClassVar[Order] = "fair"

    def choose(self, windows: Windows, now: float) -> NextLaunch | None:
        for priority in _BY_RANK:
            job = windows.peek(priority)
            if job is not None and windows.fits(job, self._limit):
                return NextLaunch(job, int(priority))
        return None


class Paced(Policy):
    order: ClassVar[Order] = "fair"

    def __init__(self, config: SchedulerConfig, info: DeviceInfo) -> None:
        super().__init__(config, info)

        def window(launches: int, seconds: float | None, priority: Priority) -> Limit:
            target = info.piece_target_s.get(priority.name.lower(), DEFAULT_TARGET_S)
            return Limit(launches, 2 * launches * target if seconds is None else seconds)

        self._high = window(config.high_launches, config.high_window_s, Priority.HIGH)
        self._low = window(config.low_launches, config.low_window_s, Priority.LOW)
        self._low_idle = window(config.low_idle_launches, config.low_idle_window_s, Priority.LOW)
        seconds = max(self._low_idle.seconds, self._low_idle.launches * info.run_s)
        self._low_runs = self._low_idle._replace(seconds=config.low_idle_window_s or seconds)

    def limit(self, windows: Windows, priority: Priority) -> Limit:
        if priority is _HIGH:
            return self._high
        return self._low_runs if windows.in_runs else self._low if windows.active(_HIGH) else self._low_idle

    def choose(self, windows: Windows, now: float) -> NextLaunch | None:
        for priority in _BY_RANK:
            job = windows.peek(priority)
            if job is not None and windows.fits(job, self.limit(windows, priority)):
                return NextLaunch(job, int(priority))
        return None


class Guarded(Paced):
    """The low window beside a high job is as wide as the guard makes it, and the guard may hold low jobs."""

    holds_low_work = True

    def __init__(self, config: SchedulerConfig, info: DeviceInfo) -> None:
        super().__init__(config, info)
        self.guard = self._guard = SlowdownGuard(config, info)
        per_launch = self._low.seconds / self._low.launches
        self._beside = [Limit(n, n * per_launch) for n in range(self._guard.low_window.wide + 1)]

    def limit(self, windows: Windows, priority: Priority) -> Limit:
        if priority is _HIGH:
            return self._high
        if windows.in_runs:
            return self._low_runs
        return self._beside[self._guard.low_window.width] if windows.active(_HIGH) else self._low_idle

    def choose(self, windows: Windows, now: float) -> NextLaunch | None:
        if windows.high_ready.size and len(windows.high.launches) < self._high.launches:
            job = windows.high_ready.peek()
            if job is not None and windows.fits(job, self._high):
                return NextLaunch(job, _HIGH_STREAM)
        ready, limit = windows.low_ready, self.limit(windows, _LOW)
        if not ready.size or len(windows.low.launches) >= limit.launches:
            return None
        decisions = self._guard.decisions
        others_matter = not windows.low.launches and ready.size > 1  # else the device is left without low work
        first = ready.peek()
        if first is None or not windows.fits(first, limit):
            return None
        chosen = self._first_admitted([first, *self._awaited(windows, first, limit)], windows, now)
        if chosen is None and others_matter and not decisions.holds_all(first):
            chosen = self._first_admitted(self._others(ready, first), windows, now)
        return chosen

    def _first_admitted(self, jobs: list[ScheduledJob], windows: Windows, now: float) -> NextLaunch | None:
        for job in jobs:
            share = self._guard.admit(job, windows, now)
            if share:
                return NextLaunch(job, _LOW_STREAM, share)
        return None

    def _awaited(self, windows: Windows, first: ScheduledJob, limit: Limit) -> list[ScheduledJob]:
        """Low jobs that a client waits for before it steps its high jobs again: no high job loses by them."""
        awaited = self._guard.awaited_steps.jobs
        return [job for job in awaited if job.ready_entry and job is not first and windows.fits(job, limit)]

    def _others(self, ready: ReadyQueue, first: ScheduledJob) -> list[ScheduledJob]:
        """Low jobs that may be launched while the first is held and the device would be left without low work: the next
        two, and one more out of turn, since a held job keeps its turn for as long as it is held."""
        others = ready.next_two()
        if ready.size > 1 + len(others):
            more = ready.peek_other(first, others)
            if more is not None:
                others.append(more)
        return others


POLICIES: dict[str, type[Policy]] = {"fifo": Fifo, "streams": StreamPriorities, "paced": Paced, "guarded": Guarded}


def policy_named(name: str) -> type[Policy]:
    """The policy's class. Raises ConfigError for a name that is none."""
    if name not in POLICIES:
        raise ConfigError(f"there is no policy {name!r}", f"choose one of {', '.join(sorted(POLICIES))}")
    return POLICIES[name]
