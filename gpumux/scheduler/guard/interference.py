"""What was learned of interference: which low programs slow which high ones down, and by how much.

`pairs` says it for people. `kept` and `take_up` keep it over a restart of the daemon: all that was measured of a high
program as plain data, by content hashes of programs, so that an equal program of any later job finds it.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple, TypeAlias

from gpumux.scheduler.guard.costs import MIN_SAMPLES, MOMENTS, LaunchCost, LowCosts, RobustMean
from gpumux.scheduler.guard.high_job import MEDIAN_OF, Baseline, CostsByProgram, HighCosts
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
# data another VERSION: what an earlier one kept is then not taken up. Damage of the file is found where it is read.

VERSION: Final = 3
MOST_KEPT: Final = 16  # low programs and shares of each high program: those launched last
MOST_KINDS: Final = 256  # kinds of launches of each, the newest: packing them takes time
MEAN: Final = ("count", "mean", "deviation", "newest", "second", "third")
LAUNCH: Final = (*MEAN, "peak", "upper", "worst", "seconds", "last_peak")
BASELINE: Final = ("value", "count", "noise", "late")
PIECE: Final = ("learned", "base", "worst")

Kept: TypeAlias = "list[Any]"


def learned(costs: CostsByProgram) -> dict[str, int]:
    """The high programs of which something was learned, the oldest first, each with a number that changes with it."""
    found = {program: sum([high.changes for high in costs.cuts(program)]) for program in costs.programs()}
    return {program: changes for program, changes in found.items() if changes}


def kept(costs: CostsByProgram, program: str) -> list[Kept]:
    """What is known of a high program, under each of its cuts; empty if nothing is worth keeping."""
    return [_keep_cut(high) for high in costs.cuts(program) if high.step_known()]


def take_up(costs: CostsByProgram, program: str, cuts: list[Kept]) -> None:
    """Take up what `kept` gave, unless something is known of the program already."""
    costs.take_up(program, [_take_cut(program, each) for each in cuts])


def _keep_cut(high: HighCosts) -> Kept:
    lows = [low for low in high.by_low.values() if low.typical.count]
    lows = sorted(lows, key=_last_launch)[-MOST_KEPT:]
    baselines = [_numbers(each, BASELINE) for each in (*high.steps, high.first, *high.solo)]
    return [list(high.bounds), baselines, [_keep_low(low) for low in lows]]


def _take_cut(program: str, data: Kept) -> HighCosts:
    bounds, baselines, lows = data
    taken = [_take_baseline(each) for each in baselines]
    high = HighCosts(program, tuple(bounds), [each.value for each in taken[3:]])
    high.steps, high.first, high.solo = taken[:2], taken[2], taken[3:]
    for each in lows:
        _take_low(high, each)
    high.changes = len(lows)
    return high


def _last_launch(low: LowCosts) -> int:
    return low.placement.last_launch_step


def _take_baseline(data: Kept) -> Baseline:
    baseline = Baseline()
    _set(baseline, BASELINE, data)
    baseline.known = baseline.count > 1
    baseline.samples = [baseline.value] * min(baseline.count, MEDIAN_OF)
    return baseline


def _keep_low(low: LowCosts) -> Kept:
    placement = low.placement
    return [
        low.key.program,
        low.key.share,
        placement.explored,
        low.speed,
        _numbers(low.typical, MEAN),
        [[at, *_numbers(cost, MEAN)] for at, cost in enumerate(low.ranges) if cost.count],
        [[*_bounds(span), *_numbers(cost, LAUNCH)] for span, cost in list(low.lows.items())[-MOST_KINDS:]],
        [
            [piece, moment, *_bounds(span), *_numbers(cost, LAUNCH)]
            for (piece, moment, span), cost in list(low.launches.items())[-MOST_KINDS:]
        ],
        list(low.effects.items()),
        [[*_bounds(span), *_numbers(of, PIECE)] for span, of in list(placement.pieces.items())[-MOST_KINDS:]],
    ]


def _take_low(high: HighCosts, data: Kept) -> None:
    """Costs count as few samples: where the device is slower or faster than it was, what is measured now soon outweighs
    them."""
    program, share, explored, speed, typical, ranges, lows, launches, effects, placed = data
    low = high.beside(LowKey(program, share))
    low.placement.explored, low.speed, low.known = explored, speed, len(ranges)
    _take_mean(low.typical, MEAN, typical)
    for at, *numbers in ranges:
        _take_mean(low.ranges[at], MEAN, numbers)
        low.ranges[at].publish()
    for first, end, *numbers in lows:
        cost = low.lows[_span(program, first, end)] = LaunchCost()
        _take_mean(cost, LAUNCH, numbers)
    for at, moment, first, end, *numbers in launches:
        cost = low.launches[at, moment, _span(program, first, end)] = LaunchCost(moment in MOMENTS)
        _take_mean(cost, LAUNCH, numbers)
    low.effects.update(effects)
    for first, end, *numbers in placed:
        _set(low.placement.of(_span(program, first, end)), PIECE, numbers)


def _take_mean(mean: RobustMean, fields: tuple[str, ...], numbers: Kept) -> None:
    _set(mean, fields, numbers)
    mean.count = min(mean.count, MIN_SAMPLES)


def _numbers(of: object, fields: tuple[str, ...]) -> Kept:
    return [getattr(of, field) for field in fields]


def _set(into: object, fields: tuple[str, ...], numbers: Kept) -> None:
    for field, number in zip(fields, numbers, strict=True):
        setattr(into, field, number)


def _bounds(span: Span) -> list[int]:
    """The operators of the span."""
    return [int(each) for each in span.partition(" ")[0].split("-")]


def _span(program: str, first: int, end: int) -> Span:
    return spans(program, (first, end))[0]
