"""At which moment of a high step, and on which share of the device, a low piece costs least.

A launch that can't be called back costs what it takes from the operators it happens to meet, so the same low piece may
cost next to nothing or more than a step may lose, by when it begins. High steps repeat: a launch that begins together
with a high piece (`START`) meets the same operators every time, and costs the same again. So each high piece, with each
share, is a *place* for each low piece. Where the high job pauses between its steps, so is the end of the step, as if
one more piece began there. What launches cost there is measured; where there was none yet it is expected to be in the
proportion in which other low pieces' costs there differ from what they cost elsewhere, and taken to be better than
that, as otherwise nobody would find out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf
from typing import Final, Literal, TypeAlias

from gpumux.scheduler.guard.baseline import Baseline
from gpumux.scheduler.jobs import PairKey, Span
from gpumux.types import JobId

# ---- Bans: "while these operators of that program run, this low job may not", measured and expiring.
#
# A ban ends in one of two ways: it expires and a single launch, the probe, finds that the pair no longer
# hurts, or the controller finds the loss worth the gain after all. A probe that hurts makes the next
# ban twice as long, up to a bound: what stopped hurting is to be found out some day.


FIRST_STEPS: Final = 64  # how long a first ban lasts, in solo steps of the high job
LONGEST_STEPS: Final = 1024
# Whatever the steps' length, a ban lasts between these.
SHORTEST_S: Final = 10e-3
LONGEST_S: Final = 120.0
PROBE_EVERY: Final = 250  # steps of the high job after which what low work was found to cost is looked at again

Why: TypeAlias = Literal["tail", "price"]


@dataclass(slots=True, eq=False)
class Ban:
    """`operators` are [start, end) of the high program, whose key is `program`; `ratio` is shared over solo time of
    that range; `why`: one launch beside it costs more than a step may lose (tail), or other ranges give more low work
    for the same loss (price). Times are seconds on the core's clock."""

    high: JobId
    low: JobId
    operators: tuple[int, int]
    share: float
    ratio: float
    samples: int
    why: Why
    since: float
    until: float
    failures: int = 0
    probing: bool = False
    program: str = ""
    lifted: bool = False


class Bans:
    """All of a device's bans."""

    def __init__(self) -> None:
        self.active: list[Ban] = []
        self.total = 0
        self.probes = 0

    def impose(self, ban: Ban, step_seconds: float) -> None:
        ban.until = ban.since + _length(0, step_seconds)
        self.active.append(ban)
        self.total += 1

    def lengthen(self, ban: Ban, now: float, step_seconds: float) -> None:
        """Its probe failed."""
        ban.probing = False
        ban.failures += 1
        ban.until = now + _length(ban.failures, step_seconds)

    def lift(self, ban: Ban) -> None:
        if not ban.lifted:
            ban.lifted = True
            self.active.remove(ban)

    def forget(self, job: JobId) -> bool:
        """The job is gone. What concerns it stays measured, but is nobody's ban. True if there were any."""
        gone = [ban for ban in self.active if job in (ban.high, ban.low)]
        for ban in gone:
            self.lift(ban)
        return bool(gone)


def _length(failures: int, step_seconds: float) -> float:
    steps = min(FIRST_STEPS << min(failures, 8), LONGEST_STEPS)
    return min(max(steps * step_seconds, SHORTEST_S), LONGEST_S)


# ---- One measured quantity each: excess of a range, cost of a kind of launch. Robust to single outliers.


MEMORY: Final = 10  # samples an estimate is the running mean of
CLIP: Final = 3.0  # deviations: what a sample may differ and still count in full
CREDIBLE: Final = 3  # samples before an estimate may ban
FLOOR_S: Final = 5e-6  # what launches of one kind may cost more or less, and it means nothing
RATE_FLOOR: Final = 0.02  # the same of a second beside low work
FIRST_SPREAD: Final = 0.15  # of what a first launch cost: how far the next may be off
TIMED_SPREAD: Final = 0.02  # the same of one that began together with a high piece, as the next will
FORGET: Final = 0.98
# Of what it costs: what a launch that repeats counts against a limit whose margin is for what is not known.
SURE: Final = 0.94


# A launch as it repeats: the high piece it was made beside (GAP: none, and a step came while it was out), whether
# together with it (`places.START`) or in which half of it, and the low piece's span (queue.Span). Made for every
# question: no class.
Spot: TypeAlias = tuple[int, int, Span]

GAP: Final = -1


class Mean:
    """A running mean that one outlier can't move far, with its deviation and the newest three samples."""

    # Attributes, not tuples and lists: each of those is memory of its own that a decision has to fetch.
    __slots__ = ("count", "deviation", "floor", "mean", "newest", "second", "third")

    def __init__(self, floor: float) -> None:
        self.floor = floor  # a difference that means nothing
        self.count = 0
        self.mean = 0.0
        self.deviation = 0.0
        self.newest = self.second = self.third = 0.0  # samples, as far as there were so many

    @property
    def bound(self) -> float:
        """What is seldom exceeded."""
        return self.mean + 2 * self.deviation

    @property
    def median(self) -> float:
        """Of the newest three samples: what at least two of them say."""
        known = sorted([self.newest, self.second, self.third][: self.count])
        return known[len(known) // 2] if known else 0.0

    def add(self, sample: float, weight: float = 1.0) -> None:
        self.count = count = self.count + 1
        self.third, self.second, self.newest = self.second, self.newest, sample
        # For every high piece beside low work: comparisons cost a third of what calls of min, max and sorted do.
        if count <= CREDIBLE:
            self._begin(count, sample)
            return
        part, mean, deviation = weight / (count if count < MEMORY else MEMORY), self.mean, self.deviation
        bound = CLIP * deviation + self.floor + 0.1 * (mean if mean > 0.0 else -mean)
        off = sample - mean
        if off > bound:
            off = bound
        elif off < -bound:
            off = -bound
        mean += part * off
        off, bound = sample - mean, 2.0 * bound
        if off < 0.0:
            off = -off
        if off > bound:
            off = bound
        self.mean, self.deviation = mean, deviation + part * (off - deviation)

    def _begin(self, count: int, sample: float) -> None:
        """One of the first three samples: the mean is their median."""
        if count == 1:
            self.mean, self.deviation = sample, 0.0
            return
        first = self.second if count == 2 else self.third
        low, high = (first, sample) if first < sample else (sample, first)
        if count == 2:
            self.mean, self.deviation = high, (high - low) / 2
            return
        second = self.second
        middle = low if second < low else high if second > high else second
        self.mean = middle
        self.deviation = (abs(first - middle) + abs(second - middle) + abs(sample - middle)) / 3


class Cell(Mean):
    """What a range of a high program loses in a second beside low work. `rate` and `most` are what the look-ahead takes
    that to be, expected and at worst; where there is no sample, what other ranges lose."""

    __slots__ = ("ban", "most", "rate", "speed")

    def __init__(self) -> None:
        super().__init__(RATE_FLOOR)
        self.rate = self.most = 0.0
        self.speed = 0.0  # solo seconds of low work done in a second; 0.0: not known
        self.ban: Ban | None = None

    def to_judge(self, slack: float) -> bool:
        """Whether what the range costs may be a reason to ban low work, or a ban to end."""
        if self.ban is not None:
            return self.ban.probing
        return self.count >= CREDIBLE and self.mean * (1.0 + slack) > slack

    def restart(self) -> None:
        """Forget the samples, but not the ban: what was known is no longer so."""
        self.count, self.mean, self.deviation = 0, 0.0, 0.0


class Launched:
    """What launches of one kind cost: high seconds in all, and in the step that lost most by one."""

    __slots__ = (
        "_cost", "count", "first", "index", "last", "mean", "peak", "rate", "seconds", "seen", "upper", "worst",
    )  # fmt: skip

    def __init__(self, first: float = FIRST_SPREAD, index: int = -1) -> None:
        # What every question reads comes first, and so lies together where this is compiled.
        self.count = 0
        self.mean = 0.0  # of what they cost in all
        self.upper = 0.0  # what a step seldom loses more of
        self.worst = 0.0  # the largest peak, slowly forgotten: what a launch at another place may do
        self.index = index  # 3 * high piece + moment, where the moment repeats (places.MOMENTS)
        self.seen = 0  # the high job's step when it was last seen
        self.first = first
        self.peak = self.last = 0.0
        self._cost = Mean(FLOOR_S)
        self.rate = 0.0  # high seconds lost in a second of it
        self.seconds = 0.0  # a launch took

    @property
    def bound(self) -> float:
        """What they seldom cost more than in all."""
        return self._cost.bound

    def add(self, cost: float, peak: float, rate: float, seconds: float, step: int) -> None:
        whole = self._cost
        whole.add(cost)
        self.mean, self.count = whole.mean, whole.count
        count, known, last = whole.count, self.peak, self.last
        part = 1.0 / count if count < 5 else 0.2
        felt = peak if peak > 0.0 else 0.0
        if count > CREDIBLE:
            # One that was delayed from outside is no reason to give a place up: it takes two in a row.
            bound = 2.0 * (known if known > last else last) + FLOOR_S
            if felt > bound:
                felt = bound
        self.last = peak
        self.peak = known = known + part * (felt - known)
        faded = FORGET * self.worst
        self.worst = peak if peak > faded else faded
        self.rate += part * (rate - self.rate)
        self.seconds += part * (seconds - self.seconds)
        self.seen = step
        upper = known + (2 * whole.deviation if count > 1 else self.first * known)
        self.upper = SURE * upper if count >= CREDIBLE and self.index >= 0 else upper

    def promises(self, limit: float) -> bool:
        """Whether it would be within the limit if it were sure that it costs what it did."""
        return self.index >= 0 and self.count < CREDIBLE and SURE * self.peak <= limit


# ----


START: Final = 0  # the moment of a launch that begins together with a high piece
HEARD: Final = 1  # as soon as the host has heard that it began
MID: Final = 2  # when half of it is over
MOMENTS: Final = (START, HEARD, MID)  # that repeat closely: what a launch then costs it costs again
HOPE: Final = 0.4  # of what it is expected to cost: a place that was never tried
# Low seconds that a second of waiting for a slow launch to end is worth, where cost is what counts.
WORTH_S: Final = 0.1
UNTRIED: Final = 2.5  # times what it is expected to cost: what a launch at a place that was never tried may do
WORSE: Final = 1.5  # times the most it did elsewhere: the same
LEAST_BASE_S: Final = 5e-6  # a piece that costs less anywhere says nothing about places
MOST_EFFECT: Final = 4.0
CAREFUL: Final = 0
IF_STUCK: Final = 1
ALWAYS: Final = 2
REPLAN: Final = 16  # steps after which a plan is made anew if the price or the limit is another one
OLD: Final = 64  # after which it is in any case: what is known of other low pieces tells of places, too
MOVED: Final = 0.05


class Place:
    """What a launch at a moment of a high step, or at its end, is taken to do. `cost`: high seconds it is expected to
    cost; `upper`: what a step seldom loses more of; `score`: low seconds that stand for both cost and time; `tried`: it
    was measured."""

    __slots__ = ("cost", "score", "share", "tried", "upper")

    def __init__(self, share: float, cost: float, upper: float, score: float, tried: bool) -> None:
        self.share, self.cost, self.upper, self.score, self.tried = share, cost, upper, score, tried


class Plan:
    """Of one low piece: the best share at each moment of each high piece (`at[3 * piece + moment]`) and at the end of
    the step (the last of `at`), if any will do, the best of those that were tried (`tried`), and the least score and
    cost of all."""

    __slots__ = (
        "_lightest", "_limit", "_price", "_rest", "_seconds", "_timed", "at", "cost", "made", "score", "tried", "version",
    )  # fmt: skip

    def __init__(
        self, at: list[Place | None], tried: list[Place | None], seconds: float, version: int, made: int, price: float,
        limit: float,
    ) -> None:  # fmt: skip
        score = cost = inf
        for place in at:
            if place is not None:
                if place.score < score:
                    score = place.score
                if place.cost < cost:
                    cost = place.cost
        self.at, self.tried, self.score, self.cost = at, tried, score, cost
        self.version, self.made, self._seconds, self._price, self._limit = version, made, seconds, price, limit
        self._rest: list[float] | None = None
        self._timed: dict[int, list[tuple[int, float, float]]] | None = None
        self._lightest = inf

    @property
    def timed(self) -> dict[int, list[tuple[int, float, float]]]:
        """By high piece, places that a timer has to mark and that are worth waiting for: the moment, what each takes of
        what a step may lose (-inf: it was never tried) and costs."""
        found = self._timed
        if found is None:
            found, end = {}, len(self.at) // 3
            for index, place in enumerate(self.at):
                if place is not None and index % 3 != HEARD and place.score - self.score <= self._seconds:
                    takes = place.upper if place.tried else -inf
                    found.setdefault(index // 3, []).append((index % 3, takes, place.cost))
                    if takes < self._lightest and index // 3 < end:
                        self._lightest = takes
            self._timed = found
        return found

    @property
    def lightest(self) -> float:
        """The least that one of these takes, the end of the step aside: what is launched there the next step loses."""
        return self._lightest if self.timed else inf

    def outdated(self, step: int, price: float, limit: float) -> bool:
        """Whether it is to be made anew for another reason than what was learned of the low piece."""
        age = step - self.made
        if age < REPLAN:
            return False
        return age >= OLD or abs(price - self._price) > MOVED * price or abs(limit - self._limit) > MOVED * limit

    def rest(self, index: int) -> float:
        """The least that a launch at a place behind `index` takes of what the step may lose: -inf where it was never
        tried, inf where there is none in this step."""
        least = self._rest
        if least is None:
            least, lightest = [inf], inf
            for place in reversed(self.at):
                if place is not None and len(least) > 1:  # not the end of the step, which comes with a timer
                    lightest = min(lightest, place.upper if place.tried else -inf)
                least.append(lightest)
            least.reverse()
            self._rest = least
        return least[index + 1]


class Kind:
    """Of launches of one low piece, wherever they began and on whatever share."""

    __slots__ = ("base", "learned", "plans", "version", "worst")

    def __init__(self) -> None:
        self.learned = False  # there was one
        self.base = 0.0  # what they cost
        self.worst = 0.0  # the most one did, slowly forgotten
        self.version = 0  # of what plans are made of
        self.plans: list[Plan | None] = [None] * (2 * (ALWAYS + 1))  # by whether a step may come from idle, and daring


class Places:
    """Of one low program beside one high program under one cut. `pairs`: one for each share, the whole device first."""

    __slots__ = ("_kinds", "fed", "pairs")

    def __init__(self) -> None:
        self.pairs: list[Pair] = []
        self.fed = 0  # the high job's step in which the low program was last launched, on whatever share
        self._kinds: dict[Span, Kind] = {}

    def of(self, low: Span) -> Kind:
        """What is known of launches of the low piece."""
        found = self._kinds.get(low)
        if found is None:
            found = self._kinds[low] = Kind()
        return found

    def learn(self, spot: Spot, effects: dict[int, float], cost: float, count: int, moved: bool) -> None:
        """A launch at `spot`, the `count`-th there, cost so many seconds. Where launches are often is where they cost
        little: so that this does not pass for what they cost anywhere, each place counts about once. `moved`: what is
        known of it is no longer what it was."""
        fresh = 1.0 / count
        if cost < 0.0:
            cost = 0.0
        piece, moment, low = spot
        kind = self.of(low)
        base = kind.base
        if not kind.learned:
            kind.learned, kind.base = True, cost
        else:
            if base > LEAST_BASE_S and moment in MOMENTS:
                at, effect = 3 * piece + moment, cost / base
                known = effects.get(at, 1.0)
                effects[at] = known + 0.4 * fresh * ((effect if effect < MOST_EFFECT else MOST_EFFECT) - known)
            kind.base = base + 0.15 * fresh * (cost - base)
        faded = FORGET**fresh * kind.worst
        kind.worst = cost if cost > faded else faded
        if moved or count <= CREDIBLE:
            kind.version += 1

    def expected(self, low: Span, piece: int, moment: int, effects: dict[int, float]) -> float:
        """What a launch is expected to cost that never began there."""
        return self.of(low).base * effects.get(3 * piece + moment, 1.0)

    def feared(self, low: Span, expected: float) -> float:
        """What it may cost there."""
        return max(UNTRIED * expected, WORSE * self.of(low).worst)

    def plan(
        self, low: Span, seconds: float, price: float, limit: float, step: int, daring: int, from_idle: bool,
        refs: Sequence[float], pause: float,
    ) -> Plan:  # fmt: skip
        """Where the low piece of so many seconds may begin at the price (low seconds for a high second), no step losing
        more than `limit`, as of the high job's step `step`. `daring`: places may be tried where a step might: CAREFUL,
        IF_STUCK, ALWAYS. `from_idle`: nothing runs before the high step begins that could mark that moment. `refs`:
        seconds of its pieces, alone; `pause`: those for which it is idle after each step, 0.0 if it is not."""
        kind, way = self.of(low), daring + (ALWAYS + 1 if from_idle else 0)
        plan = kind.plans[way]
        if (
            plan is not None
            and plan.version == kind.version
            and (step - plan.made < REPLAN or not plan.outdated(step, price, limit))
        ):
            return plan
        fear, found = WORSE * kind.worst, self._tried(low, limit, price, seconds, pause > 0.0)
        stuck = fear > limit and found.count(None) == len(found)
        dare = daring == ALWAYS or (daring == IF_STUCK and stuck)
        at: list[Place | None] = found
        if dare or fear <= limit:
            at = list(found)
            left = [*accumulate(reversed(refs))][::-1] if stuck else ()
            self._hope(at, low, price, inf if dare else limit, limit, step, seconds, left, from_idle)
        if pause > 0.0:
            at = list(at)
            for place in self._at_end(low, price, inf if dare else limit, limit, step, seconds, pause):
                other = at[-1]
                if other is None or place.score < other.score:
                    at[-1] = place
        plan = kind.plans[way] = Plan(at, found, seconds, kind.version, step, price, limit)
        return plan

    def _tried(self, low: Span, limit: float, price: float, seconds: float, pauses: bool) -> list[Place | None]:
        """By place, the best share of those with which launches of the low piece were seen to cost no step more than
        `limit`. `pauses`: the end of the step is one of the places."""
        count = 3 * len(self.pairs[0].cells)
        found: list[Place | None] = [None] * (count + 1)
        for pair in self.pairs:
            share = pair.share
            time = WORTH_S * seconds / share
            for known in pair.spots.get(low, ()):
                index, upper = known.index, known.upper
                if upper <= limit and (0 <= index < count or (pauses and index == count)):
                    mean = known.mean
                    cost = mean if mean > 0.0 else 0.0
                    score, other = price * cost + time, found[index]
                    if other is None or score < other.score:
                        found[index] = Place(share, cost, upper, score, True)
        return found

    def _hope(
        self, at: list[Place | None], low: Span, price: float, feared: float, limit: float, step: int, seconds: float,
        left: Sequence[float], from_idle: bool,
    ) -> None:  # fmt: skip
        """Put what may be better into `at`: where there was none yet, or long ago, and one may be made as a step is not
        expected to lose more than `feared`. `left`: where none of those that were tried will do, seconds from each high
        piece to the end of the step."""
        kind = self.of(low)
        base, fear = kind.base, WORSE * kind.worst
        moments = MOMENTS if left else (START, HEARD)  # what only a timer marks is looked at where the others won't do
        for pair in self.pairs:
            share, pieces = pair.share, len(pair.cells)
            effects, seen = pair.effects, pair.seen(low)
            likely = (
                fear <= feared and UNTRIED * base <= feared
            )  # as `feared` says, where nothing is known of the place itself
            usual = Place(share, HOPE * base, base, price * HOPE * base, False)
            for piece in range(pieces):
                for moment in moments:
                    if from_idle and not piece and moment == START:
                        continue
                    index = 3 * piece + moment
                    other, known = at[index], seen.get(index)
                    effect = effects.get(index, 1.0) if effects else 1.0
                    if known is None and effect == 1.0 and not left:
                        if likely and (other is None or usual.score < other.score):
                            at[index] = usual
                        continue
                    cost, hope = base * effect, HOPE  # as `expected` says
                    if known is not None:
                        if known.upper <= limit:
                            continue
                        if known.promises(limit):
                            if other is None or other.score > 0.0:
                                at[index] = Place(share, known.mean, known.peak, 0.0, False)
                            continue
                        if step - known.seen < PROBE_EVERY:
                            continue
                        cost, hope = max(cost, known.mean), 1.0
                    if fear > feared or UNTRIED * cost > feared:  # as `feared` says
                        continue
                    rank = price * hope * cost
                    if left:  # what counts is what one step loses: one that goes on in the next takes less of each
                        beyond = left[piece + 1] if piece + 1 < len(left) else 0.0
                        ends = 0.5 * (left[piece] + beyond) if moment == MID else left[piece]
                        here = min(1.0, ends * share / seconds)
                        rank *= max(here, 1.0 - here)
                    if other is None or rank < other.score:
                        at[index] = Place(share, hope * cost, cost, rank, False)

    def _at_end(
        self, low: Span, price: float, feared: float, limit: float, step: int, seconds: float, pause: float
    ) -> Iterator[Place]:
        """The same of the end of the step: the next one loses by what lasts longer than the pause."""
        for pair in self.pairs:
            share, end = pair.share, len(pair.cells)
            known = pair.seen(low).get(3 * end + START)
            felt = max(0.0, 1.0 - pause * share / seconds) if seconds > 0.0 else 0.0
            cost, hope = felt * self.expected(low, end, START, pair.effects), HOPE
            if known is not None:
                if known.upper <= limit or (step - known.seen < PROBE_EVERY and not known.promises(limit)):
                    continue
                cost, hope = max(cost, known.mean), 1.0
            if max(UNTRIED * cost, WORSE * felt * self.of(low).worst) <= feared:
                yield Place(share, hope * cost, cost, price * hope * cost, False)


# ---- One low program beside one high program, on one share of the device: what each of its launches was seen to cost.


LEAST_HARM: Final = 0.25
MOST_HARM: Final = 1.0 / LEAST_HARM
MOST_PLACES: Final = 4096  # kinds of launches remembered of one of them
LEAST_EXPOSED: Final = 0.3  # of a launch: what is felt of less says little of the whole
BEST_EVERY: Final = 4  # steps for which the best place known stays that
MAX_RATE: Final = 0.95  # excess seconds of an overlapped second: all but all of it


class Pair:
    """One low program, on one share of the device, beside one high program. The look-ahead walks through `cells`."""

    __slots__ = (
        "_felt",
        "any_ban",
        "bests",
        "caught",
        "cells",
        "doubted",
        "effects",
        "fresh",
        "key",
        "known",
        "launches",
        "lows",
        "places",
        "rate",
        "share",
        "speed",
        "spots",
        "timed",
        "typical",
    )

    def __init__(self, key: PairKey, pieces: int, places: Places, felt: dict[Span, Launched]) -> None:
        self.key, self.share = key, key.share
        self.places = places  # of all shares
        self.cells = [Cell() for _ in range(pieces)]
        self.lows: dict[Span, Launched] = {}  # wherever they were made, by low span
        self.caught: dict[Span, Launched] = {}  # of `launches`, those that a step came during, by low span
        self._felt = felt  # its model's
        self.launches: dict[Spot, Launched] = {}
        self.speed = key.share  # solo seconds of low work done in a second beside this program
        self.known = 0  # cells that have a sample
        self.any_ban = False
        self.fresh = False  # it is among the model's `fresh`
        self.rate = 0.0  # high seconds lost in a second of any launch
        # By 3 * piece + moment: what launches cost there over what they do elsewhere.
        self.effects: dict[int, float] = {}
        self.spots: dict[Span, list[Launched]] = {}  # of `launches` beside a piece, by low span
        self.timed: dict[Span, dict[int, Launched]] = {}  # those that repeat, by low span and 3 * piece + moment
        self.bests: dict[Span, tuple[int, float]] = {}  # see `best`
        self.doubted: dict[Span, int] = {}  # launches in a row that were not believed to cost so much, by low span
        self.typical = Cell()  # the same, where one outlier counts for little: what people are told

    def add(self, piece: int, rate: float, weight: float) -> Cell:
        """A second of the range beside low work cost `rate`. The cell that learned it."""
        cell = self.cells[piece]
        if not cell.count:
            self.known += 1
        cell.add(rate if rate < MAX_RATE else MAX_RATE, weight)
        mean = cell.mean  # as `restate` does, but for bans
        upper = mean + 2 * cell.deviation
        cell.rate, cell.most = mean if mean > 0.0 else 0.0, upper if upper > 0.0 else 0.0
        return cell

    def restate(self, piece: int) -> None:
        """Put the cell's figures where the look-ahead reads them."""
        cell = self.cells[piece]
        cell.rate, cell.most = max(0.0, cell.mean), max(0.0, cell.bound)
        self.any_ban = any(each.ban is not None for each in self.cells)

    def harm(self, low: Span) -> float:
        """What a second of the launch of span `low` costs over what one of any launch does."""
        known = self.lows.get(low)
        if known is None or self.rate <= 0.0:
            return 1.0
        harm = known.rate / self.rate
        return LEAST_HARM if harm < LEAST_HARM else MOST_HARM if harm > MOST_HARM else harm

    def believes(self, spot: Spot, peak: float, doubts: int, much: float) -> bool:
        """Whether a launch that was blamed for `peak` in a step is to be learned from. One that seems to have cost
        `much` is not, until `doubts` of its kind have in a row: steps are that late without low work, too."""
        low = spot[2]
        if peak <= much:
            self.doubted.pop(low, None)
            return True
        seen = self.doubted.get(low, 0) + 1
        self.doubted[low] = seen if seen < doubts else 0
        return seen >= doubts

    def learn(self, spot: Spot, cost: float, peak: float, seconds: float, step: int, exposed: float) -> None:
        """A launch of `seconds`, `exposed` of them beside the high job, was blamed for `cost`, `peak` in one step."""
        rate = cost / seconds if seconds > 0.0 and cost > 0.0 else 0.0
        piece, moment, low = spot
        launched = self.launches.get(spot)
        if launched is None:
            if len(self.launches) >= MOST_PLACES:  # `lows` still knows
                self.launches.clear()
                self.caught.clear()
                self._felt.clear()
                self.spots.clear()
                self.timed.clear()
            timed = piece != GAP and moment in MOMENTS
            launched = Launched(TIMED_SPREAD, 3 * piece + moment) if timed else Launched()
            self.launches[spot] = launched
            if piece != GAP:
                self.spots.setdefault(low, []).append(launched)
                if timed:
                    self.timed.setdefault(low, {})[launched.index] = launched
            else:
                self.caught[low] = launched
                self._felt.pop(low, None)
        mean, upper = launched.mean, launched.upper
        launched.add(cost, peak, rate, seconds, step)
        if piece != GAP and (exposed >= LEAST_EXPOSED or piece < len(self.cells)):
            moved = abs(launched.mean - mean) + abs(launched.upper - upper) > MOVED * upper + FLOOR_S
            whole = exposed if exposed > LEAST_EXPOSED else LEAST_EXPOSED
            anywhere = self.lows.get(low)
            if anywhere is None:
                anywhere = self.lows[low] = Launched()
                self._felt.pop(low, None)
            anywhere.add(cost / whole, peak / whole, rate, seconds, step)
            self.rate += 0.1 * (rate - self.rate) if self.rate else rate
            self.typical.add(rate)
            self.places.learn(spot, self.effects, cost, launched.count, moved)

    def seen(self, low: Span) -> dict[int, Launched]:
        """Launches of span `low` at moments that repeat, by 3 * piece + moment."""
        found = self.timed.get(low)
        return found if found is not None else {}

    def best(self, low: Span, since: int) -> float:
        """The least that launches of span `low` were found to cost since step `since`; inf: nothing known."""
        at, found = self.bests.get(low, (-(1 << 30), inf))
        if 0 <= since - at < BEST_EVERY:
            return found
        found = inf
        for launched in self.spots.get(low, ()):
            if launched.mean < found and launched.seen >= since:
                found = launched.mean
        found = max(0.0, found)
        self.bests[low] = (since, found)
        return found

    def elsewhere(self, piece: int) -> float:
        """What the other ranges cost: the median of those known; 0.0 where there are none."""
        known = sorted([max(0.0, c.mean) for i, c in enumerate(self.cells) if c.count and i != piece])
        return known[len(known) // 2] if known else 0.0

    def prior(self) -> float:
        """What an unknown range may cost: the mean of those known."""
        known = [cell.mean for cell in self.cells if cell.count]
        return max(0.0, sum(known) / len(known)) if known else 0.0


# ---- What low work costs high work: measured, by range of the high program's operators.
#
# A *model* belongs to one high program under one cut: solo estimates of its pieces and of its whole
# step. In it a *pair* stands for one low program on one share of the device, with a *cell* for each
# piece: excess high seconds for each second of overlap, and how fast the low work runs there. A new
# cut inherits what its ranges of operators overlap.


# Low programs and shares remembered of a high program (256 on three shares): the oldest go first.
MOST_PAIRS: Final = 768
KNOWN: Final = 3  # ranges of a pair that are measured before the rest is taken to be like them
UNKNOWN: Final = Launched()  # stands for no launch at all

Bounds: TypeAlias = "tuple[int, ...]"


class HighModel:
    """What is known of one high program under one cut."""

    __slots__ = (
        "_felt",
        "beside",
        "bounds",
        "first",
        "fresh",
        "key",
        "pairs",
        "places",
        "refs",
        "solo",
        "steps",
        "total",
    )

    def __init__(self, key: str, bounds: Bounds, predicted: Sequence[float]) -> None:
        self.key = key
        self.bounds = bounds
        self.refs = list(predicted)  # the best guess of each piece's seconds without low work
        self.total = sum(predicted)
        self.solo = [Baseline() for _ in predicted]
        self.beside = [Baseline() for _ in predicted]  # beside other high jobs, no low ones
        self.first = Baseline()  # its first piece when the job was idle: nothing hides its launch
        self.steps = [Baseline(), Baseline()]  # whole: behind the step before, and from idle
        self.pairs: dict[PairKey, Pair] = {}
        self.fresh: list[Pair] = []  # those that something was learned of since `guess`
        self.places: dict[str, Places] = {}  # by low program
        # What `delay` found for low pieces on the whole device, until more is known of one: a single look, where the
        # way there through all that is known of its pair is ten, and none of these is near.
        self._felt: dict[Span, Launched] = {}

    def delay(self, key: PairKey, span: Span) -> Launched | None:
        """What is known of launches of the low piece that a step comes during, or else of any; None: nothing."""
        found = self._felt.get(span) if key.share == 1.0 else None
        if found is None:
            pair = self.pair(key)
            found = pair.caught.get(span) or pair.lows.get(span) or UNKNOWN
            if key.share == 1.0:
                self._felt[span] = found
        return None if found is UNKNOWN else found

    def pair(self, key: PairKey) -> Pair:
        of = self.places.get(key.low)
        if of is not None:
            for pair in of.pairs:  # one for each share: a dict of them would be slower
                if pair.share == key.share:
                    return pair
        return self._new(key)

    def _new(self, key: PairKey) -> Pair:
        if len(self.pairs) >= MOST_PAIRS:
            oldest = next(iter(self.pairs)).low
            self.pairs = {other: pair for other, pair in self.pairs.items() if other.low != oldest}
            self.places.pop(oldest, None)
            self._felt.clear()
        places = self.places.get(key.low)
        if places is None:
            places = self.places[key.low] = Places()
        found = self.pairs[key] = Pair(key, len(self.refs), places, self._felt)
        places.pairs.append(found)
        return found

    def guess(self) -> None:
        """Take ranges that a pair never met to cost what those did that it met."""
        for pair in self.fresh:
            pair.fresh = False
            if KNOWN <= pair.known < len(pair.cells):
                prior = pair.prior()
                for cell in pair.cells:
                    if not cell.count:
                        cell.rate = cell.most = prior
        self.fresh.clear()

    def never(self, low: str, span: Span) -> bool:
        """Whether no launch of the low program's operators was ever seen beside it, on any share."""
        places = self.places.get(low)
        if places is None:
            return True
        for pair in places.pairs:
            if span in pair.lows or span in pair.spots:  # `lows` alone is what another cut knew of it
                return False
        return not places.of(span).learned

    def step_known(self) -> bool:
        return self.steps[0].known or self.steps[1].known

    def step_seconds(self, idle: bool) -> float:
        """What its step takes without low work; `idle`: the job was, when it came."""
        at = 1 if idle else 0
        baseline = self.steps[at]
        if not baseline.known:
            baseline = self.steps[1 - at]
        return baseline.value if baseline.known else self.total

    def reference(self, piece: int, beside: bool, idle: bool) -> Baseline:
        """What a span of the piece is to be compared with."""
        if beside:
            return self.beside[piece]
        if idle and piece == 0 and self.first.known:
            return self.first
        return self.solo[piece]

    def learn(self, piece: int, seconds: float, beside: bool, idle: bool) -> bool:
        """A span without low work. True when it shows that the piece's work changed."""
        if idle and piece == 0 and not beside:
            changed = self.first.add(seconds)
            if self.solo[0].known:
                return changed
        if beside:
            baseline = self.beside[piece]
            changed = baseline.add(seconds)
            if self.solo[piece].known:
                return changed
        else:
            baseline = self.solo[piece]
            changed = baseline.add(seconds)
        self.total += baseline.value - self.refs[piece]
        self.refs[piece] = baseline.value
        return changed

    def bans(self) -> set[Ban]:
        """Those in force under this cut."""
        return {cell.ban for pair in self.pairs.values() if pair.any_ban for cell in pair.cells if cell.ban is not None}

    def unban(self) -> None:
        """Free what lifted bans still mark."""
        for pair in self.pairs.values():
            if pair.any_ban:
                for piece, cell in enumerate(pair.cells):
                    if cell.ban is not None and cell.ban.lifted:
                        cell.ban = None
                        pair.restate(piece)

    def recut(self, bounds: Bounds, predicted: Sequence[float]) -> HighModel:
        """The same program under another cut: what was learned of its operators is kept."""
        made = HighModel(self.key, bounds, predicted)
        sources = [_overlapping(self.bounds, start, end) for start, end in pairwise(bounds)]
        for key, pair in self.pairs.items():
            heir = made.pair(key)
            heir.speed, heir.fresh = pair.speed, True
            made.fresh.append(heir)
            heir.lows, heir.rate, heir.typical = pair.lows.copy(), pair.rate, pair.typical
            for piece, parts in enumerate(sources):
                _inherit(heir, piece, [(pair.cells[old], share) for old, share in parts])
        return made


def _overlapping(bounds: Bounds, start: int, end: int) -> list[tuple[int, float]]:
    """Pieces under `bounds` that share operators with [start, end), and how much of each."""
    found = []
    for piece, (low, high) in enumerate(pairwise(bounds)):
        common = min(end, high) - max(start, low)
        if common > 0:
            found.append((piece, common / (high - low)))
    return found


def _inherit(heir: Pair, piece: int, parts: list[tuple[Cell, float]]) -> None:
    sampled = [(cell, share) for cell, share in parts if cell.count]
    if not sampled:
        return
    cell, total = heir.cells[piece], sum([share for _, share in sampled])
    main = max(sampled, key=lambda part: part[1])[0]
    cell.count, cell.speed = main.count, main.speed
    cell.newest, cell.second, cell.third = main.newest, main.second, main.third
    cell.mean = sum([old.mean * share for old, share in sampled]) / total
    cell.deviation = sum([old.deviation * share for old, share in sampled]) / total
    # A range that was banned stays so where most of it lies.
    bans = [old.ban for old, share in sampled if old.ban is not None and share >= 0.5]
    cell.ban = bans[0] if bans else None
    heir.known += 1
    heir.restate(piece)
