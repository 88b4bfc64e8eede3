"""What was learned of interference: which low programs slow which high ones down, and by how much.

`pairs` says it for people. `kept` and `take_up` keep it over a restart of the daemon: all that was measured of a high
program as plain data, by content hashes of programs, so that an equal program of any later job finds it.
"""

from __future__ import annotations

from math import inf, isfinite
from typing import Any, Final, NamedTuple, TypeAlias

from gpumux.scheduler.guard.costs import (
    MIN_SAMPLES,
    MOMENTS,
    ON_ARRIVAL,
    LaunchCost,
    LowCosts,
    RangeCost,
    RobustMean,
)
from gpumux.scheduler.guard.high_job import MEDIAN_OF, MOST_CUTS, Baseline, CostsByProgram, HighCosts
from gpumux.scheduler.jobs import LowKey, Span, spans

# ---- For people.


class RangeSlowdown(NamedTuple):
    """What the operators [first, end) of a high program take beside a low program, over alone. `solo_s`: seconds
    alone. `banned`: the low program may not run beside them now."""

    first: int
    end: int
    solo_s: float
    slowdown: float
    samples: int
    banned: bool


class PairSlowdown(NamedTuple):
    """A high program beside a low one on a share of the device. `high` and `low` are content hashes. `slowdown`: what
    the measured ranges take with the low program beside all of them, over alone; `solo_s`: the high program's step
    alone; `low_speed`: solo seconds of the low program done in a second beside it. `ranges` are those measured, of
    `cut_into` in all."""

    high: str
    low: str
    share: float
    slowdown: float
    low_speed: float
    samples: int
    solo_s: float
    cut_into: int
    ranges: list[RangeSlowdown]


def pairs(costs: CostsByProgram) -> list[PairSlowdown]:
    """Every pair of programs that was measured, those first whose high program loses most. A program that is cut in
    several ways is shown under the cut with most samples."""
    found: list[PairSlowdown] = []
    for cuts in costs.by_program():
        best: dict[LowKey, PairSlowdown] = {}
        for high in cuts:
            for key, low in high.by_low.items():
                pair = _pair(high, key, low)
                known = best.get(key)
                if pair.samples and (known is None or pair.samples >= known.samples):
                    best[key] = pair
        found += best.values()
    return sorted(found, key=_by_loss)


def _by_loss(pair: PairSlowdown) -> tuple[float, str, str, float]:
    return -pair.slowdown, pair.high, pair.low, -pair.share


def _pair(high: HighCosts, key: LowKey, low: LowCosts) -> PairSlowdown:
    ranges: list[RangeSlowdown] = []
    alone = beside = 0.0
    samples = 0
    for at, cost in enumerate(low.ranges):
        if not cost.count:
            continue
        slowdown, solo_s = 1.0 / (1.0 - max(0.0, cost.mean)), high.solo_s[at]
        banned = cost.ban is not None and not cost.ban.lifted
        if cost.ban is not None and banned:  # of the launches that led to it, and of its probes
            slowdown = max(slowdown, cost.ban.ratio)
        alone, beside, samples = alone + solo_s, beside + solo_s * slowdown, samples + cost.count
        ranges.append(RangeSlowdown(high.bounds[at], high.bounds[at + 1], solo_s, slowdown, cost.count, banned))
    whole = beside / alone if alone > 0.0 else 1.0
    step_s = high.step_seconds(False)
    return PairSlowdown(high.key, key.program, key.share, whole, low.speed, samples, step_s, len(low.ranges), ranges)


# ---- As plain data, to be kept.
#
# Lists of numbers in the order of the fields below. A later version of gpumux that measures something else gives its
# data another VERSION: what an earlier one kept is then not taken up.

VERSION: Final = 2
MOST_KEPT: Final = 16  # low programs and shares of each high program: those launched last
MOST_KINDS: Final = 256  # kinds of launches of each, the newest: packing them takes time
MOST_PIECES: Final = 100_000
MOST_COUNT: Final = 1 << 40

Kept: TypeAlias = "list[Any]"


def learned(costs: CostsByProgram) -> dict[str, int]:
    """The high programs of which something was learned, the oldest first, each with a number that changes with it."""
    found = {program: sum([high.changes for high in costs.cuts(program)]) for program in costs.programs()}
    return {program: changes for program, changes in found.items() if changes}


def kept(costs: CostsByProgram, program: str) -> list[Kept]:
    """What is known of a high program, under each of its cuts; empty if nothing is worth keeping."""
    return [_keep_cut(high) for high in costs.cuts(program) if high.step_known()]


def take_up(costs: CostsByProgram, program: str, cuts: list[Kept]) -> None:
    """Take up what `kept` gave, unless something is known of the program already. Raises ValueError, and takes nothing
    up, if it is no such data."""
    try:
        found = [_take_cut(program, each) for each in cuts]
    except (TypeError, IndexError, AttributeError) as error:
        raise ValueError(str(error)) from error
    if len(found) > MOST_CUTS:
        raise ValueError(f"{len(found)} cuts of one program")
    costs.take_up(program, found)


def _keep_cut(high: HighCosts) -> Kept:
    lows = [low for low in high.by_low.values() if low.known or low.lows]
    lows = sorted(lows, key=_last_launch)[-MOST_KEPT:]
    return [
        list(high.bounds),
        [_keep_baseline(each) for each in (*high.steps, high.first, *high.solo)],
        [_keep_low(low) for low in lows],
    ]


def _last_launch(low: LowCosts) -> int:
    return low.placement.last_launch_step


def _keep_baseline(baseline: Baseline) -> Kept:
    return [baseline.value, baseline.count, baseline.noise, baseline.late]


def _keep_low(low: LowCosts) -> Kept:
    launches = list(low.launches.items())[-MOST_KINDS:]
    return [
        low.key.program,
        low.key.share,
        int(low.placement.explored),
        low.speed,
        _keep_mean(low.typical),
        [[at, *_keep_mean(cost)] for at, cost in enumerate(low.ranges) if cost.count],
        [[*_bounds(span), *_keep_launch(cost)] for span, cost in list(low.lows.items())[-MOST_KINDS:]],
        [[piece, moment, *_bounds(span), *_keep_launch(cost)] for (piece, moment, span), cost in launches],
        [[index, effect] for index, effect in low.effects.items()],
        [
            [*_bounds(span), int(of.learned), of.base, of.worst]
            for span, of in list(low.placement.pieces.items())[-MOST_KINDS:]
        ],
    ]


def _bounds(span: Span) -> list[int]:
    """The operators of the span."""
    return [int(each) for each in span.partition(" ")[0].split("-")]


def _keep_mean(mean: RobustMean) -> Kept:
    return [mean.count, mean.mean, mean.deviation, mean.newest, mean.second, mean.third]


def _keep_launch(cost: LaunchCost) -> Kept:
    return [cost.peak, cost.upper, cost.worst, cost.seconds, cost.last_peak, *_keep_mean(cost)]


# ---- And taken up again. Every number is looked at, since a file may be damaged. Costs count as few samples: where the
# device is slower or faster than it was, what is measured now soon outweighs them.


def _number(value: object, least: float = -inf) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not isfinite(value) or value < least:
        raise ValueError(f"{value!r} is no number of {least} or more")
    return float(value)


def _count(value: object, least: int = 0, most: int = MOST_COUNT) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{value!r} is no whole number from {least} to {most}")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{value!r} is no name")
    return value


def _span(program: str, first: object, end: object) -> Span:
    return spans(program, (_count(first), _count(end)))[0]


def _take_cut(program: str, data: Kept) -> HighCosts:
    bounds, baselines, lows = data
    found = tuple([_count(each) for each in bounds])
    pieces = len(found) - 1
    if not 1 <= pieces <= MOST_PIECES or any(found[at] >= found[at + 1] for at in range(pieces)):
        raise ValueError("these bounds cut nothing")
    if len(baselines) != 3 + pieces or len(lows) > MOST_KEPT or pieces * len(lows) > MOST_PIECES:
        raise ValueError("another number of pieces, or too many low programs")
    taken = [_take_baseline(each) for each in baselines]
    high = HighCosts(program, found, [each.value for each in taken[3:]])
    high.steps, high.first, high.solo = taken[:2], taken[2], taken[3:]
    for each in lows:
        _take_low(high, each)
    return high


def _take_baseline(data: Kept) -> Baseline:
    value, count, noise, late = data
    baseline = Baseline()
    baseline.value, baseline.count = _number(value, 0.0), _count(count)
    baseline.noise, baseline.late = _number(noise, 0.0), _number(late, 0.0)
    baseline.known = baseline.count > 1
    baseline.samples = [baseline.value] * min(baseline.count, MEDIAN_OF)
    return baseline


def _take_low(high: HighCosts, data: Kept) -> None:
    program, share, explored, speed, typical, ranges, lows, launches, effects, placed = data
    key = LowKey(_text(program), _number(share, 0.0))
    if not 0.0 < key.share <= 1.0:
        raise ValueError(f"a share of {share}")
    low = high.beside(key)
    low.placement.explored = bool(_count(explored, 0, 1))
    low.speed = _number(speed, 0.0)
    _take_mean(low.typical, typical, 0)
    pieces = len(low.ranges)
    for at, *mean in ranges:
        cost: RangeCost = low.ranges[_count(at, 0, pieces - 1)]
        _take_mean(cost, mean, 1)
        if not cost.mean < 1.0:
            raise ValueError(f"a range that loses {cost.mean} of its time")
        cost.publish()
        low.known += 1
    for first, end, *launch in lows:
        low.lows[_span(key.program, first, end)] = _take_launch(LaunchCost(), launch)
    if max(len(lows), len(launches), len(placed)) > MOST_KINDS:
        raise ValueError("too many kinds of launches of one low program")
    for at, moment, first, end, *launch in launches:
        piece, when, span = _count(at, ON_ARRIVAL, pieces), _count(moment), _span(key.program, first, end)
        low.launches[piece, when, span] = _take_launch(LaunchCost(when in MOMENTS), launch)
    for index, effect in effects:
        low.effects[_count(index, 0, 3 * pieces + 2)] = _number(effect, 0.0)
    for first, end, learned, base, worst in placed:
        of = low.placement.of(_span(key.program, first, end))
        of.learned, of.base, of.worst = bool(_count(learned, 0, 1)), _number(base, 0.0), _number(worst, 0.0)
    high.mark_updated(low)


def _take_mean(mean: RobustMean, data: Kept, least: int) -> None:
    count, value, deviation, newest, second, third = data
    mean.count = min(_count(count, least), MIN_SAMPLES)
    mean.mean, mean.deviation = _number(value), _number(deviation, 0.0)
    mean.newest, mean.second, mean.third = _number(newest), _number(second), _number(third)


def _take_launch(cost: LaunchCost, data: Kept) -> LaunchCost:
    peak, upper, worst, seconds, last_peak, *mean = data
    _take_mean(cost, mean, 1)
    cost.peak, cost.upper, cost.worst = _number(peak, 0.0), _number(upper), _number(worst)
    cost.seconds, cost.last_peak = _number(seconds, 0.0), _number(last_peak)
    return cost
