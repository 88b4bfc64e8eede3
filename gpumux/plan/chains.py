"""Shortest paths through layers that stand one behind the other."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from operator import add

import numpy as np
import numpy.typing as npt

from gpumux.plan.costs import TOLERANCE, Array, ProfiledCosts
from gpumux.plan.rules import Rules

FEW = 6  # counts: with so few, calls into numpy would take longer than what they do
CHUNK = 1 << 18  # elements of the edges held at once: memory stays linear in layers, whatever the counts


def shortest(costs: ProfiledCosts, limit: float) -> tuple[float, list[int]]:
    """Seconds, and each layer's count (an index), of the shortest path through all layers under the amplification limit. For
    2 to FEW counts. A count is reached best from itself, which takes no transfer, or from the count that is done
    soonest; where the smallest transfer from any other would come too late, nothing else is looked at."""
    counts, scale, delay = costs.counts, costs.scale, 2 * costs.network.latency
    columns, single = costs.columns()
    limits = [limit * (1 + TOLERANCE) / g for g in counts]  # T on each count over comp on one GPU
    if limit < inf:
        for at in range(counts[0] == 1, len(counts)):  # one GPU alone keeps every limit
            most = limits[at]
            columns[at] = [own if own <= one * most else inf for own, one in zip(columns[at], single, strict=True)]
    shares = _shares(counts)
    least = 1 / counts[-1]  # no transfer moves a smaller part of the samples
    stay = list(range(len(counts)))
    work = list(zip(*columns, strict=True))
    now, ways = list(work[0]), []
    outputs = [layer.output_bytes * scale for layer in costs.graph.layers]
    for nbytes, own, one in zip(outputs, work[1:], single[1:], strict=False):
        then, way, rising = list(map(add, now, own)), stay, sorted(now)
        wait = delay if nbytes else 0.0
        floor = nbytes * least + wait  # rounded as each transfer, and so above none
        soonest = rising[0]
        reached = soonest + floor
        if rising[-1] > reached:
            way = stay.copy()
            quickest = now.index(soonest)
            share, others = shares[quickest], rising[1] + floor
            for h, staying in enumerate(now):
                if staying > reached and own[h] < inf:
                    comm = nbytes * share[h] + wait
                    best = soonest + comm
                    if best > others or not (comm + own[h] <= one * limits[h] or limit == inf):
                        best = staying  # perhaps from another than the quickest
                        for g, other in enumerate(now):
                            comm = nbytes * shares[g][h] + wait
                            if other + comm < best and g != h and (comm + own[h] <= one * limits[h] or limit == inf):
                                best, way[h] = other + comm, g
                        then[h] = best + own[h]
                    elif best < staying:
                        then[h], way[h] = best + own[h], quickest
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


def _shares(counts: Sequence[int]) -> list[list[float]]:
    """moved_share of any two counts."""
    found = [[0.0] * len(counts) for _ in counts]
    inverse = [1 / g for g in counts]
    for j, many in enumerate(inverse):
        for i in range(j):
            found[i][j] = found[j][i] = max(inverse[i] - many, many)
    return found


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
