"""When a launch may run between a high job's steps: what an arrival would lose by it, and how long to wait for a better
moment.

While a job stays away, the chance that it comes within the next so many seconds only rises, until one of
the gaps it took before has passed without it. So a launch that has to wait may have another answer right
after such a gap, and at no other time: the wait is computed, not polled.
"""

from __future__ import annotations

from math import inf
from typing import Final

from gpumux.scheduler.guard.answers import Answer, Hold
from gpumux.scheduler.guard.arrivals import MANY, Gaps, overlap_cost
from gpumux.scheduler.guard.attribution import OVERLAPPING
from gpumux.scheduler.guard.budget import TOKEN_RATE
from gpumux.scheduler.guard.costs import (
    CAREFUL,
    CREDIBLE,
    HEARD,
    MID,
    MOMENTS,
    PROBE_EVERY,
    START,
    Ban,
    Cell,
    Pair,
    Plan,
    Spot,
)
from gpumux.scheduler.guard.high_job import LEARNING_STEPS, RARE, STARVED, Track
from gpumux.scheduler.guard.scene import Running, Scene
from gpumux.scheduler.jobs import PairKey, Span

# ---- When a low launch may be made that should not be, to find out what it costs.


HOPELESS: Final = 1.25  # times what a step may lose: a piece that costs more wherever it was tried is not tried again


def may_risk(track: Track) -> bool:
    """Whether a launch of which nothing is known may be made: while the job is new, and later one a step as long as
    there is a token to lose by it. So programs nobody knows may be as many as they like."""
    return track.steps < LEARNING_STEPS or (track.account.tokens >= 1.0 and track.explored_step < track.steps)


def may_look(track: Track) -> bool:
    """Whether it is the time to let out one launch that should not be made while the job is new: one a step, and not
    where the job has lost what it may."""
    return track.account.balance > 0.0 and track.explored_step < track.steps


def may_try(
    track: Track, plan: Plan | None, pair: Pair, spot: Spot, ban: Ban | None, now: float, felt: float = 1.0
) -> bool:
    """Whether one launch is let out where it should not, to find out what it costs: where a ban has expired,
    and what is not known while the job is new, or low work starves, or long after it was known. `plan`: where the low
    piece may begin, beside high work; `felt`: the part of the launch that high work is there to feel."""
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


# ----


PLENTY: Final = 128  # gaps there have to be for the shortest to tell anything where they are not relied on
SPOILS: Final = 0.05  # an arrival less probable is no reason to keep the device free for a calibration
ASIDE_S: Final = 50e-6  # after the moment a step is expected, which should not find the core busy
AHEAD: Final = 16  # moments weighed: then it is time to look again


def between(
    track: Track, key: PairKey, span: Span, answer: Answer, scene: Scene, end: float, soonest: float, now: float
) -> Hold | None:
    """Why a launch of the low program that is `span` and runs until `end` has to wait for an idle job's next step,
    which is not expected before `soonest` (`foreseen`)."""
    gaps, since, model = track.gaps, track.idle_since, track.model
    if model is None or since == inf:
        return None
    waited, seconds, behind = now - since, end - now, track.behind
    if behind >= len(gaps.sorted):
        return None
    if track.calibrating and gaps.within(behind, waited, seconds) > SPOILS:
        clear = wait(gaps, behind, seconds, 0.0, inf, 0.0, 0.0, SPOILS)
        return Hold("calibration", track.job.id, -1, None, since + clear)
    if answer.gaps is None:
        answer.gaps = [model]
    else:
        answer.gaps.append(model)
    delay = model.delay(key, span)
    if delay is not None:
        known, mean = delay.upper if delay.upper > delay.worst else delay.worst, delay.mean
        if mean < 0.0:
            mean = 0.0
        # Where it was seen seldom, another one may reach further into the step.
        worst = max(known, OVERLAPPING * seconds) if delay.count < CREDIBLE and not may_risk(track) else known
        few = worst > known
    elif may_risk(track):
        answer.exploring = track
        return None
    else:
        known, few = 0.0, True
        worst = mean = OVERLAPPING * seconds
    account = track.account
    if scene.free_at > now and scene.free_at > soonest:
        pair = model.pair(key)
        if (alike := pair.lows.get(span)) is not None:  # it would begin after the step only
            worst = max(worst, alike.upper, pair.places.of(span).worst)
    # A launch that is over so soon after the step came can't delay it by much more.
    most = OVERLAPPING * (end - soonest) if soonest > now else inf  # as `outlasted` says
    expected = mean if mean < most else most
    if expected > answer.expected:
        answer.expected = expected
    room, budget = account.limit - scene.pending, account.balance + account.credit
    # As `bearable` says, without a look at the chance where it makes no difference.
    if (worst <= room or most <= room) and expected <= budget:
        if worst > room:
            answer.trusting = True
        return None
    rare = RARE if track.surprise.trusts(key.low) else 0.0
    chance = gaps.within(behind, waited, seconds)
    if (chance <= rare or worst <= room or most <= room) and chance * expected <= budget:
        if worst > room:
            answer.trusting = True
        return None
    if scene.low_out:  # would it have to wait with nothing before it, too?
        seconds -= scene.free_at - now
        asked, room, reach = now + seconds, room + scene.pending, OVERLAPPING * seconds
        worst = reach if few and reach > known else known
        if delay is None:
            mean = reach
        chance, most = gaps.within(behind, waited, seconds), outlasted(asked, soonest, now)
        if asked < soonest or bearable(chance, most, mean, worst, room, budget, rare):
            return _gap(track, inf, rare)  # until what is out has ended
    return _gap(track, since + wait(gaps, behind, seconds, mean, worst, room, budget, rare), rare)


def _gap(track: Track, until: float, rare: float) -> Hold:
    hold = Hold("gap", track.job.id, -1, None, until)
    hold.foreseen = rare > 0.0
    return hold


def foreseen(track: Track, key: PairKey) -> float:
    """The idle job's next step is not expected before this, as far as the low program may rely on its gaps."""
    gaps, since = track.gaps, track.idle_since
    if not gaps.erratic:
        return track.soonest
    if track.surprise.trusts(key.low):
        return since + gaps.soonest(track.behind)
    return since + (0.5 * gaps.sorted[0] if len(gaps.sorted) >= PLENTY else 0.0)  # so soon none came by far


def bearable(
    chance: float, most: float, mean: float, worst: float, room: float, budget: float, rare: float = RARE
) -> bool:
    """Whether a launch may run that costs a step which comes during it, with probability `chance`, `mean` seconds,
    `worst` at worst, but no more than `most`. `room`: seconds a step may still lose; `budget`: seconds the job can pay
    on average. An arrival that is no more probable than `rare` counts for the budget only."""
    if chance > rare and (worst if worst < most else most) > room:
        return False
    return chance * (mean if mean < most else most) <= budget


def outlasted(end: float, soonest: float, now: float) -> float:
    """Seconds that a launch which is over at `end` can delay a step that won't come before `soonest`."""
    return OVERLAPPING * (end - soonest) if soonest > now else inf


def wait(
    gaps: Gaps,
    first: int,
    seconds: float,
    mean: float,
    worst: float,
    room: float,
    budget: float,
    rare: float = RARE,
) -> float:
    """How long a job that has been away for longer than `first` of its gaps has to have been so to be asked about
    again: until a launch of `seconds` is bearable right after a gap has passed, or there is so much to look at that it
    is left for then. After `gaps.longest` it is bearable, whatever it costs."""
    known, count, longest = gaps.sorted, len(gaps.sorted), gaps.longest + ASIDE_S
    if first >= count or (rare <= 0.0 and worst > room):
        return longest
    apart = 0.0
    if budget < 0.0 or (worst > room and rare * count < 1.0):  # only where the next arrival is far enough away
        apart = seconds + ASIDE_S
        if budget >= 0.0 and room > 0.0:
            apart -= room / OVERLAPPING
        if gaps.denser(first, apart):
            return longest
    looked, longer = 0, known[first]
    for behind in range(first + 1, count):  # this is `bearable` and `outlasted`, written out: calls would cost most
        at, coming = longer, known[behind]
        longer = coming
        if coming - at < apart:
            continue
        at += ASIDE_S
        if at >= gaps.longest:
            break
        if coming <= at:  # that one has passed by then, too
            continue
        if looked == AHEAD:
            return at
        looked += 1
        end, left = at + seconds, count - behind
        if left < MANY:
            coming *= 0.5
        if end < coming:
            return at
        most = OVERLAPPING * (end - coming) if coming > at else inf
        expected, bears = mean if mean < most else most, worst <= room or most <= room
        if bears and expected <= budget:
            return at
        chance = gaps.within(behind, at, seconds)
        if (bears or chance <= rare) and chance * expected <= budget:
            return at
    return longest


# ---- When a low launch would begin in a high step, and when to make one so that it begins at a moment that repeats.
#
# The device is reached some time after the core decides, and nothing but a timer marks most moments: so the core asks
# to be woken that much earlier. High steps repeat, and while low work is held they run as they do alone: when their
# pieces begin is known to a few microseconds.


TIMED_S: Final = 8e-6  # a launch that begins so close to a moment begins at it
HEARD_S: Final = 100e-6  # one that begins no later is launched as soon as the host has heard that the high piece began


def where(high: Running, scene: Scene, now: float, reach: float) -> tuple[int, bool, int, float]:
    """Where in the high step a launch made now would begin: the piece (one more than there are: at its end, before a
    pause), whether the step after the one that runs loses by it, START or the half of it, and the piece's end. Worked
    out once a look."""
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
    """When to ask again, so that the launch begins together with the next high piece where it may; inf: an event will
    come."""
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
    """The part of a launch from `start` on, beside piece `at` that ends at `until`, that the high job is there to feel:
    the rest falls between its steps."""
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
    """What the next step may lose by a launch from `begins`, while this one runs or soon after, until `ends`, of a pair
    with these cells: 0.0 where such a launch meets it nearly always, as what such launches cost says that then, or
    never."""
    assert high.where is not None
    at, wraps, _, until = high.where
    refs = high.model.refs
    if wraps or at == len(refs):
        return 0.0
    meets = min(high.track.may_meet(ends - leaves(high, at, until)), ends - begins)
    return overlap_cost(refs, cells, 0, refs[0], False, 0.0, meets).upper if meets > 0.0 else 0.0
