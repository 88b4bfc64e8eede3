"""When a low launch may be made that should not be, to find out what it costs."""

from __future__ import annotations

from math import inf
from typing import Final

from gpumux.core.bans import PROBE_EVERY, Ban
from gpumux.core.cells import CREDIBLE, Spot
from gpumux.core.controller import TOKEN_RATE
from gpumux.core.pairs import Pair
from gpumux.core.places import CAREFUL, MOMENTS, Plan
from gpumux.core.track import LEARNING_STEPS, STARVED, Track

HOPELESS: Final = 1.25  # times what a step may lose: a piece that costs more wherever it was tried is not tried again


def may_risk(track: Track) -> bool:
    """Whether a launch of which nothing is known may be made: while the job is new, and later one a step as long as there is a
    token to lose by it. So programs nobody knows may be as many as they like."""
    return track.steps < LEARNING_STEPS or (track.account.tokens >= 1.0 and track.explored_step < track.steps)


def may_look(track: Track) -> bool:
    """Whether it is the time to let out one launch that should not be made while the job is new: one a step, and not where the
    job has lost what it may."""
    return track.account.balance > 0.0 and track.explored_step < track.steps


def may_try(
    track: Track, plan: Plan | None, pair: Pair, spot: Spot, ban: Ban | None, now: float, felt: float = 1.0
) -> bool:
    """Whether one launch is let out where it should not, to find out what it costs: where a ban has expired,
    and what is not known while the job is new, or low work starves, or long after it was known. `plan`: where the low piece may
    begin, beside high work; `felt`: the part of the launch that high work is there to feel."""
    learning = track.steps < LEARNING_STEPS
    if not learning and (track.account.tokens < 1.0 or track.explored_step >= track.steps):
        return False  # one a step, or a token would buy as many tries as there are low jobs
    if ban is not None:
        return ban.until <= now and not ban.probing
    if learning and not may_look(track):
        return False
    fed = pair.places.fed
    if plan is not None:
        high_piece, moment, _ = spot
        if moment in MOMENTS:
            place = plan.at[3 * high_piece + moment]
            if place is None or place.tried or place.share != pair.share:
                return False
            waits = float(track.steps - fed)
            if not learning:  # it can be tried for so long only
                waits = min(waits, (track.account.tokens - 1.0) / TOKEN_RATE)
            patient = waits < 2 * STARVED
            return track.daring(fed) != CAREFUL and not (patient and place.score > plan.score)
        if plan.score < inf:
            return False
    fresh = track.steps - PROBE_EVERY
    known, alike = pair.launches.get(spot), pair.lows.get(spot[2])
    if known is not None and known.seen > fresh:
        return False
    if alike is not None and alike.count >= CREDIBLE and alike.seen > fresh:
        hopeless = felt * alike.peak > HOPELESS * track.account.limit
        if hopeless:
            return False
    return learning or track.steps - fed >= STARVED or track.steps - track.probed >= PROBE_EVERY
