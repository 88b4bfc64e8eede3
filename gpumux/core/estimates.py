"""What low work costs high work: measured, by range of the high program's operators.

A *model* belongs to one high program under one cut: solo estimates of its pieces and of its whole
step. In it a *pair* stands for one low program on one share of the device, with a *cell* for each
piece: excess high seconds for each second of overlap, and how fast the low work runs there. A new
cut inherits what its ranges of operators overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, TypeAlias

from gpumux.core.bans import Ban
from gpumux.core.baseline import Baseline
from gpumux.core.cells import Cell, Launched
from gpumux.core.pairs import Pair
from gpumux.core.places import Places
from gpumux.core.queue import PairKey, Span

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
        # What `delay` found for low pieces on the whole device, until more is known of one: a single look, where the way there
        # through all that is known of its pair is ten, and none of these is near.
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
