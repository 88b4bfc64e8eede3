"""Shortest paths through layers that stand one behind the other."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np
import numpy.typing as npt

from gpumux.plan.costs import Array
from gpumux.plan.sharing import Rules

FEW = 6  # counts: with so few, calls into numpy would take longer than what they do
CHUNK = 1 << 18  # elements of the edges held at once: memory stays linear in layers, whatever the counts


def shortest(rules: Rules) -> tuple[float, list[int]]:
    """Seconds, and each layer's count (an index), of the shortest path through all layers. For few counts, and costs that
    follow the network model: most counts are reached best from the same count, which costs nothing, and where that
    is no slower than the quickest other way could be, nothing else is looked at."""
    tables = rules.tables
    work, room, output = tables.work.tolist(), rules.room.tolist(), tables.output.tolist()
    shares, delay = tables.share.T.tolist(), tables.delay
    now = [seconds if left >= 0 else inf for seconds, left in zip(work[0], room[0], strict=True)]
    ways, counts = [], range(len(shares))
    for nbytes, own, left in zip(output, work[1:], room[1:], strict=False):
        wait = delay if nbytes else 0.0
        soonest = sorted(zip(now, counts, strict=True))
        least = soonest[0][0] + wait
        then, way = [], []
        for h, seconds, most, best, share in zip(counts, own, left, now, shares, strict=True):
            came_from = h
            if most < 0:
                best = inf
            elif best > least:
                for other, g in soonest:
                    if other + wait >= best:
                        break
                    comm = nbytes * share[g] + wait
                    if comm <= most and other + comm < best and g != h:
                        best, came_from = other + comm, g
            then.append(best + seconds)
            way.append(came_from)
        now = then
        ways.append(way)
    seconds = min(now)
    last = now.index(seconds)
    found = [last]
    for way in reversed(ways):
        last = way[last]
        found.append(last)
    found.reverse()
    return seconds, found


class Run:
    """Layers one behind the other. `ways`: for each but the first, and each count, the count of the one before it on the
    shortest way."""

    def __init__(self, layers: Sequence[int], rules: Rules) -> None:
        self.layers, self.rules = layers, rules
        self.ways: list[npt.NDArray[np.intp]] = []
        self.reached: Array

    def run(self, reached: Array) -> Array:
        """When each count of the last layer is done, if those of the first were `reached` [counts] then."""
        layers, rules = self.layers, self.rules
        n = len(rules.tables.counts)
        self.ways = []
        chunk = max(1, CHUNK // (n * n))
        together = layers[-1] - layers[0] == len(layers) - 1  # as they mostly are: slices are quicker than lists
        for at in range(0, len(layers) - 1, chunk):
            end = min(at + chunk, len(layers) - 1)
            if together:
                before: slice | Sequence[int] = slice(layers[at], layers[end])
                behind: slice | Sequence[int] = slice(layers[at] + 1, layers[end] + 1)
            else:
                before, behind = layers[at:end], layers[at + 1 : end + 1]
            edges = rules.edges(before, behind)
            shortest = np.empty((end - at + 1, n))
            shortest[0] = reached
            for edge, now, then in zip(edges, shortest[:-1], shortest[1:], strict=True):
                np.minimum.reduce(edge + now, axis=1, out=then)
            self.ways.append((edges + shortest[:-1, None, :]).argmin(2))
            reached = shortest[-1]
        self.reached = reached
        return reached

    def back(self, last: int) -> tuple[int, bool]:
        """(count of the first layer on the shortest way to count `last`, True: these ways are exact)."""
        for ways in reversed(self.ways):
            for row in reversed(ways.tolist()):
                last = row[last]
        return last, True

    def collect(self, last: int, placed: dict[int, int], away: set[tuple[int, int]]) -> int:
        """Note the counts of all layers but the last, whose count is `last`; returns the first one's."""
        layer = len(self.layers) - 1
        for ways in reversed(self.ways):
            for row in reversed(ways.tolist()):
                last = row[last]
                layer -= 1
                placed[self.layers[layer]] = last
        return last
