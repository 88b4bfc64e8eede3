"""What the device is doing, as far as a low launch made now is concerned: seen once, asked about by many."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Final

from gpumux.scheduler.guard.arrivals import LATE
from gpumux.scheduler.guard.costs import HighModel, Plan
from gpumux.scheduler.guard.high_job import Track
from gpumux.scheduler.windows import Board, Launch
from gpumux.types import LaunchId, Priority

_LOW: Final = Priority.LOW
_HIGH: Final = Priority.HIGH
MAX_IDLE: Final = 4  # idle high jobs whose next step is looked out for: those idle for the shortest time


class Running:
    """A high job's piece on the device, and what follows it. `late`: seconds it has run over its estimate."""

    __slots__ = ("asked", "at", "began", "late", "model", "more", "plan", "track", "until", "where")

    def __init__(
        self, track: Track, model: HighModel, at: int, began: float, until: float, more: bool, late: float
    ) -> None:
        self.track, self.model = track, model
        self.at, self.began, self.until, self.more, self.late = at, began, until, more, late
        # Of this look, as soon as somebody asks:
        self.where: tuple[int, bool, int, float] | None = None  # a launch made now would begin: moments.where
        self.asked: object = None  # the piece whose plan is kept
        self.plan: Plan | None = None


class Scene:
    """`running` and `idle` high jobs, when the low launches that are out should be over (`free_at`), and
    what high seconds they are still expected to cost (`pending`), all as of the last look. Until `calm` no high step is
    expected."""

    __slots__ = (
        "_idle",
        "_leaves",
        "_nobody",
        "_recent",
        "_soonest",
        "_until",
        "calm",
        "free_at",
        "idle",
        "low_out",
        "pending",
        "running",
    )

    def __init__(self, idle: list[Track], recent: Iterable[Launch]) -> None:
        self._idle, self._recent = idle, recent
        self.running: list[Running] = []
        self._nobody = self.running
        self.idle: list[Track] = []
        self._leaves = 0.0  # until then `idle` is what it is
        self._soonest = inf  # of those idle
        self._until = 0.0  # they are to be looked at anew
        self.calm = self.free_at = self.pending = 0.0
        self.low_out = False

    def left(self, track: Track) -> None:
        """A high job became idle. So one that is so for longer may be looked out for no more: nobody is held for its
        sake."""
        idle = self._idle
        idle.append(track)
        if len(idle) > MAX_IDLE:
            idle[len(idle) - 1 - MAX_IDLE].changed()
        self.changed()

    def came(self, track: Track) -> None:
        """It is idle no longer. Who comes often is found near the end."""
        idle = self._idle
        for at in range(len(idle) - 1, -1, -1):
            if idle[at] is track:
                del idle[at]
                break
        self.changed()

    def changed(self) -> None:
        """A high job became idle, is so no longer, or does not count any more."""
        self._until = self._leaves = 0.0

    def look(self, board: Board, now: float) -> None:
        lows, highs = board.low, board.high
        if now >= self._until:
            self._look_at_idle(now)
        if highs.launches:
            self.running, self.calm = _running(highs.launches, now), 0.0
        else:
            self.running, self.calm = self._nobody, self._soonest
        free_at, pending = now, 0.0
        for out in lows.launches.values():
            if out.due > free_at:
                free_at = out.due
            if out.expected > out.blamed:
                pending += out.expected - out.blamed
        if self.running:  # what ended beside a piece that still runs has cost what nobody saw yet
            began = self.running[0].began
            for high in self.running:
                if high.began < began:
                    began = high.began
            for over in self._recent:
                if over.ended > began and over.expected > over.blamed:
                    pending += over.expected - over.blamed
        self.free_at, self.pending, self.low_out = free_at, pending, bool(lows.launches)

    def _look_at_idle(self, now: float) -> None:
        """When the next step of one of them is expected. Gaps pass all the time, but few jobs come or leave."""
        if now >= self._leaves:
            self._find_idle(now)
        soonest = inf
        for track in self.idle:
            comes = track.soonest
            if comes <= now:
                since, gaps = track.idle_since, track.gaps
                track.behind = gaps.passed(now - since, track.behind)
                comes = track.soonest = since + (0.0 if gaps.erratic else gaps.soonest(track.behind))
            if comes < soonest:
                soonest = comes
        self._soonest, self._until = soonest, soonest if soonest < self._leaves else self._leaves

    def _find_idle(self, now: float) -> None:
        """Those idle for no longer than they usually are, newest first."""
        self.idle, self._leaves = [], inf
        count = len(self._idle)
        for at in range(count - 1, max(count - MAX_IDLE, 0) - 1, -1):
            track = self._idle[at]
            if track.idle_since == inf or track.job.paused:
                continue
            leaves = track.idle_since + track.gaps.longest
            if now <= leaves:
                self.idle.append(track)
                if leaves < self._leaves:
                    self._leaves = leaves


def _running(launches: dict[LaunchId, Launch], now: float) -> list[Running]:
    """The oldest piece of each high job on the device, with when it should be over."""
    found: list[Running] = []
    for launch in launches.values():
        job, model, track = launch.job, launch.step.model, launch.job.track
        if track is None or model is None or (found and found[0].track is track):
            continue  # closing, or seen already: its pieces run in order
        began = track.ended if track.ended > launch.at else launch.at
        solo = model.refs[launch.piece]
        late = now - began - solo
        until = began + solo if late < 0.0 else now + LATE * solo
        found.append(Running(track, model, launch.piece, began, until, job.inflight > 1, late if late > 0.0 else 0.0))
    return found
