"""When a launch may run between a high job's steps: what an arrival would lose by it, and how long to wait for a better moment.

While a job stays away, the chance that it comes within the next so many seconds only rises, until one of
the gaps it took before has passed without it. So a launch that has to wait may have another answer right
after such a gap, and at no other time: the wait is computed, not polled.
"""

from __future__ import annotations

from math import inf
from typing import Final

from gpumux.core.answers import Answer
from gpumux.core.blame import OVERLAPPING
from gpumux.core.cells import CREDIBLE
from gpumux.core.holds import Hold
from gpumux.core.lookahead import MANY, Gaps
from gpumux.core.queue import PairKey, Span
from gpumux.core.scene import Scene
from gpumux.core.track import RARE, Track
from gpumux.core.trying import may_risk

PLENTY: Final = 128  # gaps there have to be for the shortest to tell anything where they are not relied on
SPOILS: Final = 0.05  # an arrival less probable is no reason to keep the device free for a calibration
ASIDE_S: Final = 50e-6  # after the moment a step is expected, which should not find the core busy
AHEAD: Final = 16  # moments weighed: then it is time to look again


def between(
    track: Track, key: PairKey, span: Span, answer: Answer, scene: Scene, end: float, soonest: float, now: float
) -> Hold | None:
    """Why a launch of the low program that is `span` and runs until `end` has to wait for an idle job's next step, which is not
    expected before `soonest` (`foreseen`)."""
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
    """Whether a launch may run that costs a step which comes during it, with probability `chance`, `mean` seconds, `worst` at
    worst, but no more than `most`. `room`: seconds a step may still lose; `budget`: seconds the job can pay on average. An
    arrival that is no more probable than `rare` counts for the budget only."""
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
    """How long a job that has been away for longer than `first` of its gaps has to have been so to be asked about again: until a
    launch of `seconds` is bearable right after a gap has passed, or there is so much to look at that it is left for then. After
    `gaps.longest` it is bearable, whatever it costs."""
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
