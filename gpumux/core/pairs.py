"""One low program beside one high program, on one share of the device: what each of its launches was seen to cost."""

from __future__ import annotations

from math import inf
from typing import Final

from gpumux.core.cells import FLOOR_S, GAP, TIMED_SPREAD, Cell, Launched, Spot
from gpumux.core.places import MOMENTS, Places
from gpumux.core.queue import PairKey, Span

LEAST_HARM: Final = 0.25
MOST_HARM: Final = 1.0 / LEAST_HARM
MOVED: Final = 0.05  # of what a launch may cost: a change that plans are made anew for
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
