"""Low jobs that don't get to run: for how long, and whether their pieces' length is the reason."""

from __future__ import annotations

from gpumux.core.interference import Guard
from gpumux.core.queue import Job
from gpumux.core.track import STARVED

LONG = frozenset(("tail", "next", "gap", "ban"))


def starved_steps(guard: Guard, job: Job) -> int:
    """Steps of the high job that holds this low one since it was last launched."""
    hold = guard.holds.newest.get(job.id)
    track = guard.tracks.get(hold.high) if hold is not None else None
    if hold is None or track is None or track.solo_step() <= 0.0:
        return 0
    return int((guard.seen - hold.since) / track.solo_step())


def too_long(guard: Guard, job: Job) -> tuple[float, float] | None:
    """(seconds of its next piece, seconds that would fit) for a low job whose pieces hinder it from running."""
    hold = guard.holds.newest.get(job.id)
    if hold is None or hold.reason not in LONG or job.blocked() or starved_steps(guard, job) < STARVED:
        return None
    track = guard.tracks.get(hold.high)
    if track is None or track.model is None:
        return None
    step, seconds = job.head_step(), job.next_seconds()
    spans = step.spans if step.launched else step.program.spans
    pair = track.model.pairs.get(step.program.whole)
    known = pair.lows.get(spans[step.launched]) if pair is not None else None
    fits = track.gaps.short
    if known is not None and known.peak > 0.0:  # what it costs is about in proportion to its length
        fits = max(fits, seconds * track.account.limit / known.upper)
    return (seconds, fits) if fits < seconds else None
