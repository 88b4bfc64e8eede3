"""What the device is doing, as far as a low launch made now is concerned: seen once, asked about by many."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Reversible
from dataclasses import dataclass
from itertools import islice
from math import inf
from typing import NamedTuple

from gpumux.core.board import Board, Launch
from gpumux.core.estimates import HighModel
from gpumux.core.lookahead import LATE
from gpumux.core.track import Track
from gpumux.model import JobId, Priority

_LOW, _HIGH = Priority.LOW, Priority.HIGH
MAX_IDLE = 4  # idle high jobs whose next step is looked out for: those idle for the shortest time


@dataclass(slots=True)
class Running:
    """A high job's piece on the device, and what follows it."""

    track: Track
    model: HighModel
    at: int
    began: float
    until: float
    more: bool
    late: float  # seconds it has run over its estimate


class Idle(NamedTuple):
    """A high job between steps, for `waited` seconds `since` then; its next is not expected before `soonest`."""

    track: Track
    since: float
    waited: float
    soonest: float


class Scene:
    """`running` and `idle` high jobs, when the low launches that are out should be over (`free_at`), and
    what high seconds they are still expected to cost (`pending`)."""

    __slots__ = ("calm", "free_at", "idle", "low_out", "pending", "running")

    def __init__(
        self,
        board: Board,
        tracks: Mapping[JobId, Track],
        idle: dict[JobId, Track],
        recent: Iterable[Launch],
        now: float,
    ) -> None:
        self.running = _running(board, tracks, now)
        self.idle = _idle(idle.values(), now) if idle else []
        # Until then no high step is expected.
        self.calm = min([each.soonest for each in self.idle], default=inf) if not self.running else 0.0
        self.free_at, self.pending = now, 0.0
        low = board.windows[_LOW].launches
        self.low_out = bool(low)
        for out in low.values():
            if out.due > self.free_at:
                self.free_at = out.due
            if out.expected > out.blamed:
                self.pending += out.expected - out.blamed
        if self.running:  # what ended beside a piece that still runs has cost what nobody saw yet
            began = min([high.began for high in self.running])
            for over in recent:
                if over.ended > began and over.expected > over.blamed:
                    self.pending += over.expected - over.blamed


def _running(board: Board, tracks: Mapping[JobId, Track], now: float) -> list[Running]:
    """The oldest piece of each high job on the device, with when it should be over."""
    found: list[Running] = []
    for launch in board.windows[_HIGH].launches.values():
        job, model, track = launch.job, launch.step.model, tracks.get(launch.job.id)
        if track is None or model is None or (found and found[0].track is track):
            continue  # closing, or seen already: its pieces run in order
        began = track.ended if track.ended > launch.at else launch.at
        solo = model.refs[launch.piece]
        late = now - began - solo
        until = began + solo if late < 0.0 else now + LATE * solo
        found.append(Running(track, model, launch.piece, began, until, job.inflight > 1, late if late > 0.0 else 0.0))
    return found


def _idle(tracks: Reversible[Track], now: float) -> list[Idle]:
    """Those idle for no longer than they usually are, newest first."""
    found: list[Idle] = []
    for track in islice(reversed(tracks), MAX_IDLE):
        since, gaps = track.idle_since, track.gaps
        if since is None or track.job.paused:
            continue
        waited = now - since
        if waited <= gaps.longest:
            if track.soonest <= now:
                track.soonest = since + gaps.soonest(waited)
            found.append(Idle(track, since, waited, track.soonest))
    return found
