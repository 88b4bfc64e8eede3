"""When a low launch would begin in a high step, and when to make one so that it begins at a moment that repeats.

The device is reached some time after the core decides, and nothing but a timer marks most moments: so the core asks to be
woken that much earlier. High steps repeat, and while low work is held they run as they do alone: when their pieces begin is
known to a few microseconds.
"""

from __future__ import annotations

from math import inf
from typing import Final

from gpumux.core.cells import Cell
from gpumux.core.lookahead import overlap_cost
from gpumux.core.places import HEARD, MID, START, Plan
from gpumux.core.scene import Running, Scene

TIMED_S: Final = 8e-6  # a launch that begins so close to a moment begins at it
HEARD_S: Final = 100e-6  # one that begins no later is launched as soon as the host has heard that the high piece began


def where(high: Running, scene: Scene, now: float, reach: float) -> tuple[int, bool, int, float]:
    """Where in the high step a launch made now would begin: the piece (one more than there are: at its end, before a pause),
    whether the step after the one that runs loses by it, START or the half of it, and the piece's end. Worked out once a look."""
    found = high.where
    if found is None:
        found = high.where = _where(high, scene, now, reach)
    return found


def _where(high: Running, scene: Scene, now: float, reach: float) -> tuple[int, bool, int, float]:
    refs, at, began = high.model.refs, high.at, high.began
    start = now + reach
    if start < scene.free_at:
        start = scene.free_at
    until, wraps = high.until + scene.pending, False
    while start > until - TIMED_S:
        if at + 1 < len(refs):
            at += 1
        elif high.more and not wraps:
            at, wraps = 0, True
        elif start - until <= TIMED_S and not (high.late or high.more):
            return len(refs), True, START, until
        else:
            break
        began, until = until, until + refs[at]
    if abs(start - began) <= TIMED_S and not (high.late and at != high.at):
        return at, wraps, START, until
    if start - began <= HEARD_S and start > began and not wraps:
        return at, wraps, HEARD, until
    if abs(2 * start - until - began) <= 2 * TIMED_S:
        return at, wraps, MID, until
    return at, wraps, 4 if 2 * (start - began) >= until - began else 3, until


def appointment(high: Running, plan: Plan, scene: Scene, now: float, reach: float) -> float:
    """When to ask again, so that the launch begins together with the next high piece where it may; inf: an event will come."""
    account, refs = high.track.account, high.model.refs
    if not plan.timed:
        return inf
    if not high.more and len(refs) not in plan.timed and account.used + scene.pending + plan.lightest > account.limit:
        return inf
    at, begins, wraps = high.at, high.until + scene.pending - refs[high.at], False
    used, limit = account.used + scene.pending, account.limit
    timed, soon = plan.timed, now + TIMED_S
    purse = inf if account.full and used <= 0.0 else account.balance + account.credit
    for _ in range(len(refs) + 1):
        for moment, upper, cost in timed.get(at, ()):
            when = (begins + 0.5 * refs[at] if moment == MID else begins) - reach
            if when > soon and used + upper <= limit and (wraps or upper == -inf or used + cost <= purse):
                return when
        if at == len(refs):
            break
        begins += refs[at]
        at += 1
        if at == len(refs):
            if wraps:
                break
            used, wraps = 0.0, True
            if high.more:
                at = 0
    return inf


def exposed(high: Running, at: int, until: float, start: float, lasts: float) -> float:
    """The part of a launch from `start` on, beside piece `at` that ends at `until`, that the high job is there to feel: the rest
    falls between its steps."""
    pause = high.track.gaps.short
    if high.more or pause <= 0.0 or lasts <= 0.0:
        return 1.0
    ends = leaves(high, at, until)
    beyond = start + lasts - ends
    if beyond <= 0.0:
        return 1.0
    felt = ends - start if ends > start else 0.0
    if beyond > pause:
        felt += beyond - pause
    return felt / lasts if felt < lasts else 1.0


def leaves(high: Running, at: int, until: float) -> float:
    """When the step is over of which piece `at` ends at `until`."""
    refs, rest = high.model.refs, 0.0
    for piece in range(at + 1, len(refs)):
        rest += refs[piece]
    return until + rest


def next_loses(high: Running, cells: list[Cell], begins: float, ends: float) -> float:
    """What the next step may lose by a launch from `begins`, while this one runs or soon after, until `ends`, of a pair with these cells: 0.0
    where such a launch meets it nearly always, as what such launches cost says that then, or never."""
    assert high.where is not None
    at, wraps, _, until = high.where
    refs = high.model.refs
    if wraps or at == len(refs):
        return 0.0
    meets = min(high.track.may_meet(ends - leaves(high, at, until)), ends - begins)
    return overlap_cost(refs, cells, 0, refs[0], False, 0.0, meets).upper if meets > 0.0 else 0.0
