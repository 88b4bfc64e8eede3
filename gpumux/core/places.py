"""At which moment of a high step, and on which share of the device, a low piece costs least.

A launch that can't be called back costs what it takes from the operators it happens to meet, so the same low piece may
cost next to nothing or more than a step may lose, by when it begins. High steps repeat: a launch that begins together with
a high piece (`START`) meets the same operators every time, and costs the same again. So each high piece, with each share, is a
*place* for each low piece. Where the high job pauses between its steps, so is the end of the step, as if one more piece
began there. What launches cost there is measured; where there was none yet it is expected to be in the
proportion in which other low pieces' costs there differ from what they cost elsewhere, and taken to be better than that, as
otherwise nobody would find out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import inf
from typing import TYPE_CHECKING, Final

from gpumux.core.bans import PROBE_EVERY
from gpumux.core.cells import CREDIBLE, FORGET, Spot
from gpumux.core.queue import Span

if TYPE_CHECKING:
    from gpumux.core.pairs import Pair

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
    """What a launch at a moment of a high step, or at its end, is taken to do. `cost`: high seconds it is expected to cost; `upper`: what
    a step seldom loses more of; `score`: low seconds that stand for both cost and time; `tried`: it was measured."""

    __slots__ = ("cost", "score", "share", "tried", "upper")

    def __init__(self, share: float, cost: float, upper: float, score: float, tried: bool) -> None:
        self.share, self.cost, self.upper, self.score, self.tried = share, cost, upper, score, tried


class Plan:
    """Of one low piece: the best share at each moment of each high piece (`at[3 * piece + moment]`) and at the end of the step (the last
    of `at`), if any will do, the best of those that were tried (`tried`), and the least score and cost of all."""

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
        """By high piece, places that a timer has to mark and that are worth waiting for: the moment, what each takes of what a step
        may lose (-inf: it was never tried) and costs."""
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
        """The least that a launch at a place behind `index` takes of what the step may lose: -inf where it was never tried, inf
        where there is none in this step."""
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
        """A launch at `spot`, the `count`-th there, cost so many seconds. Where launches are often is where they cost little: so that
        this does not pass for what they cost anywhere, each place counts about once. `moved`: what is known of it is no longer what it was."""
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
        """Where the low piece of so many seconds may begin at the price (low seconds for a high second), no step losing more than
        `limit`, as of the high job's step `step`. `daring`: places may be tried where a step might: CAREFUL, IF_STUCK, ALWAYS.
        `from_idle`: nothing runs before the high step begins that could mark that moment. `refs`: seconds of its pieces, alone; `pause`:
        those for which it is idle after each step, 0.0 if it is not."""
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
        """By place, the best share of those with which launches of the low piece were seen to cost no step more than `limit`.
        `pauses`: the end of the step is one of the places."""
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
        """Put what may be better into `at`: where there was none yet, or long ago, and one may be made as a step is not expected
        to lose more than `feared`. `left`: where none of those that were tried will do, seconds from each high piece to the end
        of the step."""
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
