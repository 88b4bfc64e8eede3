"""What low work costs high work: measured, by range of the high program's operators.

A *model* belongs to one high program under one cut: solo estimates of its pieces and of its whole
step. In it a *pair* stands for one low program on one share of the device, with a *cell* for each
piece: excess high seconds for each second of overlap, and how fast the low work runs there. A new
cut inherits what its ranges of operators overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias

from gpumux.core.bans import Ban
from gpumux.core.baseline import Baseline
from gpumux.core.board import PairKey

MEMORY = 10  # samples an estimate is the running mean of
CLIP = 3.0  # deviations: what a sample may differ and still count in full
CREDIBLE = 3  # samples before an estimate may ban
MAX_RATE = 0.95  # excess seconds of an overlapped second: all but all of it


class Cell:
    """A running mean that one outlier can't move far, with its deviation and the newest three samples."""

    __slots__ = ("ban", "count", "deviation", "mean", "newest", "speed")

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self.deviation = 0.0
        self.newest: tuple[float, ...] = ()
        self.speed = 0.0  # solo seconds of low work done in a second; 0.0: not known
        self.ban: Ban | None = None

    @property
    def upper(self) -> float:
        """What is seldom exceeded."""
        return self.mean + 2 * self.deviation

    @property
    def median(self) -> float:
        """Of the newest three samples: what at least two of them say."""
        return sorted(self.newest)[len(self.newest) // 2] if self.newest else 0.0

    def add(self, rate: float, weight: float = 1.0) -> None:
        self.newest = (*self.newest[-2:], rate)
        self.count += 1
        if self.count <= CREDIBLE:
            self.mean = self.median
            self.deviation = sum([abs(x - self.mean) for x in self.newest]) / self.count
            return
        part = weight / min(self.count, MEMORY)
        bound = CLIP * self.deviation + 0.02
        off = max(-bound, min(bound, rate - self.mean))
        self.mean += part * off
        self.deviation += part * (min(abs(rate - self.mean), 2 * bound) - self.deviation)

    def restart(self) -> None:
        """Forget the samples, but not the ban: what was known is no longer so."""
        self.count, self.newest, self.mean, self.deviation = 0, (), 0.0, 0.0


class Pair:
    """One low program beside one high program. `rates` and `uppers` are the cells' figures in the form
    the look-ahead adds up (a banned range costs infinity)."""

    __slots__ = ("arrival", "cells", "key", "known", "rates", "seen", "speed", "uppers")

    def __init__(self, key: PairKey, pieces: int) -> None:
        self.key = key
        self.cells = [Cell() for _ in range(pieces)]
        self.rates = [0.0] * pieces
        self.uppers = [0.0] * pieces
        self.arrival = Cell()  # excess seconds of a step that arrives while this low work is out
        self.speed = key.share  # solo seconds of low work done in a second beside this program
        self.known = 0  # cells that have a sample
        self.seen = 0  # the high job's step in which it was last beside it

    def add(self, piece: int, rate: float, weight: float) -> None:
        cell = self.cells[piece]
        if not cell.count:
            self.known += 1
        cell.add(min(rate, MAX_RATE), weight)
        if cell.ban is None:
            self.rates[piece], self.uppers[piece] = max(0.0, cell.mean), max(0.0, cell.upper)

    def restate(self, piece: int, banned: float) -> None:
        """Put the cell's figures where the look-ahead reads them; `banned` is what a banned range costs."""
        cell = self.cells[piece]
        free = cell.ban is None
        self.rates[piece] = max(0.0, cell.mean) if free else banned
        self.uppers[piece] = max(0.0, cell.upper) if free else banned

    def prior(self) -> float:
        """What an unknown range may cost: the mean of those known."""
        known = [cell.mean for cell in self.cells if cell.count]
        return max(0.0, sum(known) / len(known)) if known else 0.0


Bounds: TypeAlias = "tuple[int, ...]"


class HighModel:
    """What is known of one high program under one cut."""

    __slots__ = ("beside", "bounds", "key", "pairs", "refs", "solo", "step", "total")

    def __init__(self, key: str, bounds: Bounds, predicted: Sequence[float]) -> None:
        self.key = key
        self.bounds = bounds
        self.refs = list(predicted)  # the best guess of each piece's seconds without low work
        self.total = sum(predicted)
        self.solo = [Baseline() for _ in predicted]
        self.beside = [Baseline() for _ in predicted]  # beside other high jobs, no low ones
        self.step = Baseline()
        self.pairs: dict[PairKey, Pair] = {}

    def pair(self, key: PairKey) -> Pair:
        found = self.pairs.get(key)
        if found is None:
            found = self.pairs[key] = Pair(key, len(self.refs))
        return found

    def learn(self, piece: int, seconds: float, beside: bool) -> bool:
        """A span without low work. True when it shows that the piece's work changed."""
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

    def recut(self, bounds: Bounds, predicted: Sequence[float]) -> HighModel:
        """The same program under another cut: what was learned of its operators is kept."""
        made = HighModel(self.key, bounds, predicted)
        sources = [_overlapping(self.bounds, start, end) for start, end in pairwise(bounds)]
        for key, pair in self.pairs.items():
            heir = made.pair(key)
            heir.speed, heir.arrival = pair.speed, pair.arrival
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
    cell, total = heir.cells[piece], sum(share for _, share in sampled)
    main = max(sampled, key=lambda part: part[1])[0]
    cell.count, cell.newest, cell.speed = main.count, main.newest, main.speed
    cell.mean = sum(old.mean * share for old, share in sampled) / total
    cell.deviation = sum(old.deviation * share for old, share in sampled) / total
    # A range that was banned stays so where most of it lies.
    bans = [old.ban for old, share in sampled if old.ban is not None and share >= 0.5]
    cell.ban = bans[0] if bans else None
    heir.known += 1
    heir.restate(piece, float("inf"))
