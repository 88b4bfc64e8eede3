"""When a low launch may run: beside which part of a high step it would begin, at which moment to make it, what it costs
if a high step arrives meanwhile, and when one may be explored that should be held."""

from __future__ import annotations

from math import inf
from typing import Final

from gpumux.scheduler.guard.bans import Ban
from gpumux.scheduler.guard.budget import VIOLATION_RATE
from gpumux.scheduler.guard.costs import (
    AFTER_START,
    EXPLORE_NEVER,
    LATER,
    MIDDLE,
    MIN_SAMPLES,
    MOMENTS,
    PROBE_EVERY,
    START,
    LaunchCost,
    LaunchKind,
    LaunchPlan,
    LowCosts,
    RangeCost,
)
from gpumux.scheduler.guard.decisions import Hold, LaunchDecision
from gpumux.scheduler.guard.device_view import DeviceView, RunningPiece
from gpumux.scheduler.guard.high_job import (
    ENOUGH_INTERVALS,
    HELD_LONG_STEPS,
    LEARNING_STEPS,
    OVERLAPPING,
    RARELY,
    HighJob,
    InterArrivals,
)
from gpumux.scheduler.jobs import LowKey, Span

# ---- Exploration: launches that should be held, made to find out what they cost.


TOO_COSTLY: Final = 1.25  # times what a step may lose: a piece that cost more wherever it was launched


def may_explore_unknown(high: HighJob) -> bool:
    """Whether a launch of which nothing is known may be made: while the job is new, and later one a step as long as a
    violation is left to lose by it."""
    return high.steps < LEARNING_STEPS or (high.budget.violations_left >= 1.0 and high.explored_step < high.steps)


def may_explore_now(high: HighJob) -> bool:
    """Whether a new job bears one launch that should be held: one a step, and not where it has lost what it may."""
    return high.budget.balance > 0.0 and high.explored_step < high.steps


def may_probe(high: HighJob, ban: Ban, now: float) -> bool:
    """Whether one launch is made to find out if what it was banned from still suffers."""
    return may_explore_unknown(high) and ban.until <= now and not ban.probing


def may_explore(
    high: HighJob,
    plan: LaunchPlan | None,
    low_costs: LowCosts,
    kind: LaunchKind,
    ban: Ban | None,
    now: float,
    exposed: float = 1.0,
) -> bool:
    """Whether one launch that should be held is made to find out what it costs.

    That is so where a ban has expired; and for unknown costs while the job is new, while low work does not get to run,
    or long after they were measured. `plan` says where the low piece may begin, beside high work; `exposed` is the part
    of the launch that runs beside high work.
    """
    budget, learning = high.budget, high.learns(low_costs.placement)
    if not learning and (budget.violations_left < 1.0 or high.explored_step >= high.steps):
        return False  # one a step: a single violation must not pay for a launch of every low job
    if ban is not None:
        return ban.until <= now and not ban.probing
    if learning and not may_explore_now(high):
        return False
    last_launch_step = low_costs.placement.last_launch_step
    if plan is not None:
        high_piece, moment, _ = kind
        if moment in MOMENTS:
            option = plan.at[3 * high_piece + moment]
            if option is None or option.tried or option.share != low_costs.share:
                return False
            held_steps = float(high.steps - last_launch_step)
            if not learning:  # violations left limit for how long it can be explored
                held_steps = min(held_steps, (budget.violations_left - 1.0) / VIOLATION_RATE)
            if option.score > plan.score and held_steps < 2 * HELD_LONG_STEPS:
                return False
            return high.exploration(low_costs.placement) != EXPLORE_NEVER
        if plan.score < inf:
            return False
    stale = high.steps - PROBE_EVERY
    known, alike = low_costs.launches.get(kind), low_costs.lows.get(kind[2])
    if known is not None and known.last_step > stale:
        return False
    measured = alike is not None and alike.count >= MIN_SAMPLES and alike.last_step > stale
    if measured and alike is not None and exposed * alike.peak > TOO_COSTLY * budget.limit:
        return False
    held_long = high.steps - last_launch_step >= HELD_LONG_STEPS
    return learning or held_long or high.steps - high.probed_step >= PROBE_EVERY


# ---- Between a high job's steps: what an arrival would lose by a launch, and how long to wait for a better moment.
#
# While a job stays idle, the chance that it gets a step within the next seconds only rises, until one of its earlier
# pauses has passed without a step. So the decision about a launch that has to wait may change right after such a pause,
# and at no other time: when to reconsider is computed, not polled.


ENOUGH_TO_DISTRUST: Final = 128  # known pauses for the shortest to count where arrivals are not relied on
SPOILS: Final = 0.05  # an arrival less probable is no reason to keep the device free for a calibration
AFTER_ARRIVAL_S: Final = 50e-6  # after the moment a step is expected, which should not find the scheduler busy
MOST_LOOKAHEAD: Final = 16  # moments examined before reconsidering
# How probable too large a loss may be where steps come at random:
RISK: Final = 0.05  # for each violation that may be lost by it, where that is less than one
UNKNOWN_RISK: Final = 0.1  # the same by a launch of which nothing is known
MOST_RISK: Final = 0.5  # where one may
RESERVED: Final = 0.5  # violations that are for what goes wrong in other ways


def expected_arrival(high: HighJob) -> float:
    """The idle job's next step is not expected before this."""
    arrivals, since = high.arrivals, high.idle_since
    if not arrivals.unpredictable:
        return high.earliest_arrival
    return since + (0.5 * arrivals.sorted[0] if len(arrivals.sorted) >= ENOUGH_TO_DISTRUST else 0.0)


def hold_for_arrival(
    high: HighJob,
    key: LowKey,
    span: Span,
    decision: LaunchDecision,
    view: DeviceView,
    end: float,
    earliest: float,
) -> Hold | None:
    """Why a launch of the low piece `span`, over at `end`, has to wait for an idle job's next step, which is not
    expected before `earliest`; None: it has not. Notes in `decision` what the launch is expected to cost."""
    arrivals, since, costs, now = high.arrivals, high.idle_since, high.costs, view.now
    if costs is None or since == inf:
        return None
    idle_s, seconds, passed = now - since, end - now, high.passed
    if passed >= len(arrivals.sorted):
        return None
    if (reason := high.holds_all()) and arrivals.chance_within(passed, idle_s, seconds) > SPOILS:
        clear = time_until_bearable(
            arrivals, passed, seconds, mean=0.0, worst=inf, room=0.0, affordable=0.0, rare=SPOILS
        )
        return Hold(reason, high.job.id, until=since + clear)
    if decision.idle_costs is None:
        decision.idle_costs = []
    decision.idle_costs.append(costs)
    known = costs.arrival_cost(key, span)
    if arrivals.at_random:
        return _hold_at_random(high, known, decision, view, seconds)
    if known is not None:
        seen_worst, mean = max(known.upper, known.worst), max(0.0, known.mean)
        # Where there were few such launches, another one may reach further into the step.
        few = known.count < MIN_SAMPLES and not may_explore_unknown(high) and OVERLAPPING * seconds > seen_worst
        worst = OVERLAPPING * seconds if few else seen_worst
    elif may_explore_unknown(high):
        decision.exploring = high
        return None
    else:
        seen_worst, few = 0.0, True
        worst = mean = OVERLAPPING * seconds
    budget = high.budget
    if view.free_at > now and view.free_at > earliest:  # it may begin after the step does
        low_costs = costs.beside(key)
        if (alike := low_costs.lows.get(span)) is not None:
            worst = max(worst, alike.upper, low_costs.placement.of(span).worst)
    most = most_delay(end, earliest, now)
    decision.expected = max(decision.expected, min(mean, most))
    room, affordable = budget.limit - view.pending, budget.balance + budget.credit
    rare = RARELY if high.trust.trusted else 0.0
    if bearable(arrivals.chance_within(passed, idle_s, seconds), most, mean, worst, room, affordable, rare):
        if worst > room:
            decision.relies_on_arrivals = True
        return None
    if view.low_out:  # would it have to wait with nothing before it, too?
        seconds -= view.free_at - now
        end, room, reach = now + seconds, room + view.pending, OVERLAPPING * seconds
        worst = max(reach, seen_worst) if few else seen_worst
        if known is None:
            mean = reach
        chance, most = arrivals.chance_within(passed, idle_s, seconds), most_delay(end, earliest, now)
        if end < earliest or bearable(chance, most, mean, worst, room, affordable, rare):
            return _gap(high, inf, rare)  # until what is out has ended
    wait = time_until_bearable(
        arrivals, passed, seconds, mean=mean, worst=worst, room=room, affordable=affordable, rare=rare
    )
    return _gap(high, since + wait, rare)


# Where steps come at random, no moment is better than another: a launch that is held would be held for all of the
# pause, and with it all that the low job has after it. So launches are made that may cost a step too much, as long as
# few of those that were made did. Such a launch is out alone, since a step that comes meets all that are out.


def _hold_at_random(
    high: HighJob, known: LaunchCost | None, decision: LaunchDecision, view: DeviceView, seconds: float
) -> Hold | None:
    """Why a launch that is over in so many seconds has to wait, where the steps of an idle job come at random; None: it
    has not. `known`: what launches of the low piece cost."""
    arrivals, budget, idle_s = high.arrivals, high.budget, view.now - high.idle_since
    worst = mean = OVERLAPPING * seconds  # if the step loses all that the launches last
    if view.low_out and worst > budget.limit:
        return _gap(high, inf, 0.0)
    if known is None and may_explore_unknown(high):
        decision.exploring = high
        return None
    risk = UNKNOWN_RISK
    if known is not None:
        worst, mean, risk = min(worst, worst_on_arrival(known)), max(0.0, known.mean), RISK
    decision.expected = max(decision.expected, mean)
    too_much = arrivals.chance_within(high.passed, idle_s, too_early(seconds, worst, budget.limit))
    spare = budget.violations_left - RESERVED
    if too_much <= (MOST_RISK if spare >= 1.0 else risk * max(0.0, spare)):
        chance = arrivals.chance_within(high.passed, idle_s, seconds)
        if chance * mean <= budget.balance + budget.credit:
            decision.relies_on_arrivals = worst > budget.limit
            return None
    until = inf if view.low_out else high.idle_since + arrivals.longest + AFTER_ARRIVAL_S
    return _gap(high, until, 0.0)


def worst_on_arrival(known: LaunchCost) -> float:
    """The most that a step may lose by a launch during which it comes. It comes at any moment of the launch, so the
    most of n samples falls short of that by an n-th of itself on average."""
    return max(known.upper, known.worst * (1.0 + 1.0 / known.count))


def too_early(seconds: float, worst: float, room: float) -> float:
    """The first seconds of a launch of so many, in which a step that comes loses more than `room`: what it loses is
    about in proportion to what is left of the launch, `worst` if that is all of it."""
    if worst <= room:
        return 0.0
    return seconds * (1.0 - room / worst) if room > 0.0 else seconds


def _gap(high: HighJob, until: float, rare: float) -> Hold:
    hold = Hold("gap", high.job.id, until=until)
    hold.arrival_expected = rare > 0.0
    return hold


def bearable(
    chance: float, most: float, mean: float, worst: float, room: float, affordable: float, rare: float = RARELY
) -> bool:
    """Whether a launch may be made during which a step comes with probability `chance`, and then loses `mean` seconds,
    `worst` at worst, but no more than `most`. `room`: seconds a step may still lose; `affordable`: seconds the job can
    pay on average. An arrival no more probable than `rare` counts for the average only."""
    if chance > rare and min(worst, most) > room:
        return False
    return chance * min(mean, most) <= affordable


def most_delay(end: float, earliest: float, now: float) -> float:
    """Seconds by which a launch that is over at `end` can delay a step that does not come before `earliest`."""
    return OVERLAPPING * (end - earliest) if earliest > now else inf


def time_until_bearable(
    arrivals: InterArrivals,
    passed: int,
    seconds: float,
    *,
    mean: float,
    worst: float,
    room: float,
    affordable: float,
    rare: float = RARELY,
) -> float:
    """How long a job has to have been idle for a launch of `seconds` to be reconsidered. It has been idle for longer
    than `passed` of its known pauses.

    That is when the launch is bearable right after such a pause has passed, or after MOST_LOOKAHEAD of them. After
    `arrivals.longest` it is bearable whatever it costs.
    """
    known, count, longest = arrivals.sorted, len(arrivals.sorted), arrivals.longest + AFTER_ARRIVAL_S
    if passed >= count or (rare <= 0.0 and worst > room):
        return longest
    apart = 0.0
    if affordable < 0.0 or (worst > room and rare * count < 1.0):  # only where the next arrival is far enough away
        apart = seconds + AFTER_ARRIVAL_S
        if affordable >= 0.0 and room > 0.0:
            apart -= room / OVERLAPPING
    looked, coming = 0, known[passed]
    for behind in range(passed + 1, count):
        before, coming = coming, known[behind]
        if coming - before < apart:
            continue
        at = before + AFTER_ARRIVAL_S
        if at >= arrivals.longest:
            break
        if coming <= at:  # that one has passed by then, too
            continue
        if looked == MOST_LOOKAHEAD:
            return at
        looked += 1
        end = at + seconds
        earliest = coming if count - behind >= ENOUGH_INTERVALS else 0.5 * coming
        if end < earliest:
            return at
        most = most_delay(end, earliest, at)
        chance = arrivals.chance_within(behind, at, seconds)
        if bearable(chance, most, mean, worst, room, affordable, rare):
            return at
    return longest


# ---- While a high step runs: where in it a launch would begin, and when to make one that begins at a chosen moment.
#
# The device begins with a launch some time after it was made, and only a timer marks most moments, so the guard asks to
# be woken that much earlier. High steps repeat, and while low work is held they run as they do alone: when their pieces
# begin is known to a few microseconds.


TIMED_S: Final = 8e-6  # a launch that begins so close to a moment begins at it
AFTER_START_S: Final = 100e-6  # one that begins no later was made as soon as the high piece was reported to have begun


def launch_position(running: RunningPiece, view: DeviceView) -> tuple[int, bool, int, float]:
    """Where in the high step a launch made now would begin: the piece (one more than there are: at the step's end,
    before a pause), whether only the next step loses by it, the moment, and the piece's end."""
    found = running.position
    if found is None:
        found = running.position = _position(running, view)
    return found


def _position(running: RunningPiece, view: DeviceView) -> tuple[int, bool, int, float]:
    solo_s, at, began = running.costs.solo_s, running.at, running.began
    start = max(view.now + view.launch_delay, view.free_at)
    until, next_step = running.until + view.pending, False
    while start > until - TIMED_S:
        if at + 1 < len(solo_s):
            at += 1
        elif running.more and not next_step:
            at, next_step = 0, True
        elif start - until <= TIMED_S and not (running.late or running.more):
            return len(solo_s), True, START, until
        else:
            break
        began, until = until, until + solo_s[at]
    if abs(start - began) <= TIMED_S and not (running.late and at != running.at):
        return at, next_step, START, until
    if start - began <= AFTER_START_S and start > began and not next_step:
        return at, next_step, AFTER_START, until
    return at, next_step, MIDDLE if abs(2 * start - until - began) <= 2 * TIMED_S else LATER, until


def next_timed_launch(running: RunningPiece, plan: LaunchPlan, view: DeviceView) -> float:
    """When to reconsider the launch so that it begins at a moment of the plan that only a timer marks; inf: an event
    will come before there is one."""
    budget, solo_s = running.high.budget, running.costs.solo_s
    if not plan.timed:
        return inf
    used, limit = budget.used + view.pending, budget.limit
    at, begins, next_step = running.at, running.until + view.pending - solo_s[running.at], False
    soon = view.now + TIMED_S
    affordable = inf if budget.full and used <= 0.0 else budget.balance + budget.credit
    for _ in range(len(solo_s) + 1):
        for moment, upper, cost in plan.timed.get(at, ()):
            when = (begins + 0.5 * solo_s[at] if moment == MIDDLE else begins) - view.launch_delay
            bears = used + upper <= limit and (next_step or upper == -inf or used + cost <= affordable)
            if when > soon and bears:
                return when
        if at == len(solo_s):
            break
        begins += solo_s[at]
        at += 1
        if at == len(solo_s):
            if next_step:
                break
            used, next_step = 0.0, True
            if running.more:
                at = 0
    return inf


def exposed_part(running: RunningPiece, at: int, until: float, start: float, lasts: float) -> float:
    """The part of a launch from `start` on, beside piece `at` that ends at `until`, that runs beside high work. The
    rest falls between the job's steps."""
    pause = running.high.arrivals.short
    if running.more or pause <= 0.0 or lasts <= 0.0:
        return 1.0
    ends = until + sum(running.costs.solo_s[at + 1 :])
    beyond = start + lasts - ends
    if beyond <= 0.0:
        return 1.0
    exposed = max(0.0, ends - start)
    if beyond > pause:
        exposed += beyond - pause
    return exposed / lasts if exposed < lasts else 1.0


# ---- What a launch costs the pieces of the step that runs.
#
# High steps repeat, so the pieces after the one that runs are known, and their solo times say when they start. Low work
# beside them only makes them start later, so a forecast from solo times errs on the side of the high job.


class OverlapCost:
    """Expected excess high seconds of one launch, what a step seldom loses more of, the piece that loses most (-1: none
    does), and the first banned piece it would overlap (-1: none)."""

    __slots__ = ("banned", "expected", "piece", "upper")

    def __init__(self, expected: float, upper: float, piece: int, banned: int) -> None:
        self.expected, self.upper, self.piece, self.banned = expected, upper, piece, banned


def overlap_cost(
    solo_s: list[float],
    ranges: list[RangeCost],
    at: int,
    runs_until: float,
    more: bool,
    start: float,
    end: float,
) -> OverlapCost:
    """What low work over [start, end) costs a job whose piece `at` runs until `runs_until` and whose pieces follow each
    other; after the last comes the first again if `more` steps are queued."""
    expected = upper = 0.0
    piece, reached = at, runs_until
    dear, dearest, banned = -1, 0.0, -1
    while True:
        if reached > start:
            seconds = min(reached, end) - start
            range_cost = ranges[piece]
            cost = seconds * range_cost.rate
            expected += cost
            upper += seconds * range_cost.upper_rate
            if banned < 0 and range_cost.ban is not None:
                banned = piece
            if cost > dearest:
                dear, dearest = piece, cost
            start = reached
            if reached >= end:
                break
        piece += 1
        if piece == len(solo_s):
            if not more:
                break
            piece, more = 0, False
        reached += solo_s[piece]
    return OverlapCost(expected, upper, dear, banned)
