"""Shortest paths through layers that stand one behind the other."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from operator import add

import numpy as np
import numpy.typing as npt

from gpumux.plan.costs import Array
from gpumux.plan.rules import Rules

FEW = 6  # counts: with so few, calls into numpy would take longer than what they do
CHUNK = 1 << 18  # elements of the edges held at once: memory stays linear in layers, whatever the counts


def shortest(rules: Rules) -> tuple[float, list[int]]:
    """Seconds, and each layer's count (an index), of the shortest path through all layers. For 2 to FEW counts, and costs
    that follow the network model. A count is reached best from itself, which takes no transfer, or from the count that is done
    soonest; where the smallest transfer from any other would come too late, nothing else is looked at."""
    tables = rules.tables
    work, room = np.where(rules.room < 0, inf, tables.work).tolist(), rules.room.tolist()
    shares, delay = tables.share.tolist(), tables.delay
    least = 1 / tables.counts[-1]  # no transfer moves a smaller part of the samples
    stay = list(range(len(shares)))
    now, ways = work[0], []
    for nbytes, own, most in zip(tables.output.tolist(), work[1:], room[1:], strict=False):
        then, way = list(map(add, now, own)), stay.copy()
        wait = delay if nbytes else 0.0
        floor = nbytes * least + wait  # rounded as each transfer, and so above none
        soonest, second = sorted(now)[:2]
        reached, others = soonest + floor, second + floor
        quickest = now.index(soonest)
        share = shares[quickest]
        for h in stay:
            if now[h] > reached and own[h] < inf:
                comm = nbytes * share[h] + wait
                arrival = soonest + comm
                if arrival <= others and comm <= most[h]:
                    if arrival < now[h]:
                        then[h], way[h] = arrival + own[h], quickest
                else:
                    best = now[h]
                    for g, other in enumerate(now):
                        comm = nbytes * shares[g][h] + wait
                        if other + comm < best and comm <= most[h] and g != h:
                            best, way[h] = other + comm, g
                    then[h] = best + own[h]
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
