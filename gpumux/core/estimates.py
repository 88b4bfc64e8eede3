"""What low work costs high work: measured, by range of the high program's operators.

A *model* belongs to one high program under one cut: solo estimates of its pieces and of its whole
step. In it a *pair* stands for one low program on one share of the device, with a *cell* for each
piece: excess high seconds for each second of overlap, and how fast the low work runs there. A new
cut inherits what its ranges of operators overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import inf
from typing import Final, TypeAlias

from gpumux.core.bans import Ban
from gpumux.core.baseline import Baseline
from gpumux.core.cells import FLOOR_S, GAP, TIMED_SPREAD, Cell, Launched, Spot
from gpumux.core.places import MOMENTS, Places
from gpumux.core.queue import PairKey, Span

LEAST_HARM: Final = 0.25
MOST_HARM: Final = 1.0 / LEAST_HARM
MOVED: Final = 0.05  # of what a launch may cost: a change that plans are made anew for
# Low programs and shares remembered of a high program (256 on three shares): the oldest go first.
MOST_PAIRS: Final = 768
MOST_PLACES: Final = 4096  # kinds of launches remembered of one of them
LEAST_EXPOSED: Final = 0.3  # of a launch: what is felt of less says little of the whole
BEST_EVERY: Final = 4  # steps for which the best place known stays that
KNOWN: Final = 3  # ranges of a pair that are measured before the rest is taken to be like them
MAX_RATE: Final = 0.95  # excess seconds of an overlapped second: all but all of it


class Pair:
    """One low program, on one share of the device, beside one high program. The look-ahead walks through `cells`."""

    __slots__ = (
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

    def __init__(self, key: PairKey, pieces: int, places: Places) -> None:
        self.key, self.share = key, key.share
        self.places = places  # of all shares
        self.cells = [Cell() for _ in range(pieces)]
        self.lows: dict[Span, Launched] = {}  # wherever they were made, by low span
        self.caught: dict[Span, Launched] = {}  # of `launches`, those that a step came during, by low span
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
        cell.rate, cell.most = max(0.0, cell.mean), max(0.0, cell.upper)
        self.any_ban = any(each.ban is not None for each in self.cells)

    def harm(self, low: Span) -> float:
        """What a second of the launch of span `low` costs over what one of any launch does."""
        known = self.lows.get(low)
        if known is None or self.rate <= 0.0:
            return 1.0
        harm = known.rate / self.rate
        return LEAST_HARM if harm < LEAST_HARM else MOST_HARM if harm > MOST_HARM else harm

    def believes(self, spot: Spot, peak: float, doubts: int, much: float) -> bool:
        """Whether a launch that was blamed for `peak` in a step is to be learned from. One that seems to have cost `much` is not,
        until `doubts` of its kind have in a row: steps are that late without low work, too."""
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
        cell, upper = launched.cell, launched.upper
        mean = cell.mean
        launched.add(cost, peak, rate, seconds, step)
        if piece != GAP and (exposed >= LEAST_EXPOSED or piece < len(self.cells)):
            moved = abs(cell.mean - mean) + abs(launched.upper - upper) > MOVED * upper + FLOOR_S
            whole = exposed if exposed > LEAST_EXPOSED else LEAST_EXPOSED
            anywhere = self.lows.get(low)
            if anywhere is None:
                anywhere = self.lows[low] = Launched()
            anywhere.add(cost / whole, peak / whole, rate, seconds, step)
            self.rate += 0.1 * (rate - self.rate) if self.rate else rate
            self.typical.add(rate)
            self.places.learn(spot, self.effects, cost, cell.count, moved)

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
            if launched.cell.mean < found and launched.seen >= since:
                found = launched.cell.mean
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


Bounds: TypeAlias = "tuple[int, ...]"


class HighModel:
    """What is known of one high program under one cut."""

    __slots__ = ("beside", "bounds", "first", "fresh", "key", "pairs", "places", "refs", "solo", "steps", "total")

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
        places = self.places.get(key.low)
        if places is None:
            places = self.places[key.low] = Places()
        found = self.pairs[key] = Pair(key, len(self.refs), places)
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
            heir.lows, heir.rate, heir.typical = pair.lows, pair.rate, pair.typical
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
