"""DeepPool's search as published (section 4.2): Algorithm 1 on chains, and its reduction of branch-join blocks to one
edge.

The paper's names are kept: S[i][g], the shortest time to complete layers 1..i with g GPUs for i, and T[i][g], the time
spent on layer i on that path. Open points of the text follow the authors' program (parallelizationPlanner.py of
DeepPoolML/DeepPool at 7f823f2): a joining layer's T includes the transfers from all its branches, and layer 0 costs
nothing, since the input is loaded where it is needed. The search is exact only if the limit excludes nothing: it keeps
only the fastest path to each state, and a slower one may be the only one that can be continued under the limit. It may
also exceed the limit, since the first count tried is always admitted. See docs/planning.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from operator import add

import numpy as np
import numpy.typing as npt

from gpumux.plan.costs import TOLERANCE, Array, Costs, ProfiledCosts
from gpumux.plan.graph import Block, Chain, LayerGraph
from gpumux.plan.plan import Placement, Rules


@dataclass
class _State:
    """One layer on one number of GPUs, and the path to it."""

    s: float
    t: float
    came_from: int | None = None  # GPUs of the layer before, or of the branching layer
    merged: _Merged | None = None  # for a joining layer, the block before it


@dataclass
class _Merged:
    """A block reduced to the edge from the branching layer (on one count) to the joining one (on one count). `ends`:
    for each branch, the count of its last layer (None: it is empty)."""

    tr: float
    incoming: float
    ends: list[int | None]
    away: list[bool]
    searches: list[_Search]


@dataclass
class _Search:
    """A linear search's tables: for each layer of the chain, its states by count."""

    layers: list[int] = field(default_factory=list)
    states: list[dict[int, _State]] = field(default_factory=list)
    blocks: dict[int, Block] = field(default_factory=dict)  # by position of the joining layer


class _Searcher:
    def __init__(self, costs: Costs, limit: float) -> None:
        self.costs, self.limit = costs, limit

    def amp(self, layer: int, g: int, seconds: float) -> float:
        """Amp(i, g) of section 4.2, from T(i, g)."""
        single = self.costs.comp(layer, 1)
        if not single:
            return inf if seconds * g > 0 else 0.0
        return seconds * g / single

    def linear(self, chain: Chain, fork: int | None, start: dict[int, _State] | None, gpus: int) -> _Search:
        """Algorithm 1 over a chain that follows `fork` in the states `start` (None: at the beginning). gpus: the GPUs
        that the branches of a block share."""
        found = _Search()
        layer, states, block = fork, start, None
        for each in chain:
            if isinstance(each, Block):
                block = each
                continue
            if layer is None or states is None:
                states = {g: self._first(each, g) for g in self.costs.counts}
            elif block is not None:
                found.blocks[len(found.layers)] = block
                states, block = self._join(block, layer, states, each, gpus), None
            else:
                states = {g: self._step(layer, states, each, g) for g in self.costs.counts}
            layer = each
            found.layers.append(each)
            found.states.append(states)
        return found

    def _first(self, layer: int, g: int) -> _State:
        seconds = self.costs.comp(layer, g) + self.costs.sync(layer, g)
        return _State(seconds, seconds)

    def _step(self, before: int, states: dict[int, _State], layer: int, g: int) -> _State:
        """The body of Algorithm 1: the best path to `layer` on g GPUs."""
        best_h, best_s, best_t = self._best(before, states, layer, g)
        own = self.costs.comp(layer, g) + self.costs.sync(layer, g)
        return _State(best_s + own, best_t + own, best_h)

    def _best(self, before: int, states: dict[int, _State], layer: int, g: int) -> tuple[int | None, float, float]:
        """Algorithm 1's innermost loop: (count of the layer before, bestS, bestT)."""
        best_amp = best_s = best_t = inf
        best_h = None
        for h, state in states.items():
            amp = self.amp(before, h, state.t)
            if amp <= max(best_amp, self.limit * (1 + TOLERANCE)):
                comm = self.costs.comm(before, h, g)
                if state.s + comm <= best_s:
                    best_s, best_t, best_h = state.s + comm, comm, h
                    best_amp = min(best_amp, amp)
        return best_h, best_s, best_t

    def _join(self, block: Block, fork: int, states: dict[int, _State], join: int, gpus: int) -> dict[int, _State]:
        """As `_step` over all counts of the joining layer, with tr instead of comm."""
        merged = {}
        for h, state in states.items():
            start = {h: _State(0.0, state.t)}
            searches = [self.linear(branch, fork, start, self.costs.counts[-1]) for branch in block.branches]
            for g in self.costs.counts:
                merged[h, g] = self._merge(fork, h, searches, join, g, gpus)
        joined = {}
        for g in self.costs.counts:
            best_amp = best_s = inf
            best = _State(inf, inf)
            own = self.costs.comp(join, g) + self.costs.sync(join, g)
            for h, state in states.items():
                amp = self.amp(fork, h, state.t)
                edge = merged[h, g]
                if amp <= max(best_amp, self.limit * (1 + TOLERANCE)) and state.s + edge.tr <= best_s:
                    best_s = state.s + edge.tr
                    best_amp = min(best_amp, amp)
                    best = _State(best_s + own, edge.incoming + own, h, edge)
            joined[g] = best
        return joined

    def _merge(self, fork: int, h: int, searches: list[_Search], join: int, g: int, gpus: int) -> _Merged:
        """Merge a block. The critical branch is the longest. Each other branch runs in parallel with it, on GPUs of its
        own, if the moves of its samples don't make it longer and it keeps the limit and finds enough GPUs. Else it runs
        after the critical one."""
        ends: list[int | None] = []
        times, transfers = [], []
        for search in searches:
            if search.layers:
                last = search.layers[-1]
                x, seconds, comm = self._best(last, search.states[-1], join, g)
                assert x is not None
            else:
                x, comm = None, self.costs.comm(fork, h, g)
                seconds = comm
            ends.append(x)
            times.append(seconds)
            transfers.append(comm)
        critical = max(range(len(times)), key=lambda i: times[i])
        away = [False] * len(times)
        total, incoming = times[critical], sum(transfers)
        home_gpus = self._widest(searches[critical], ends[critical])
        left = gpus - home_gpus
        own = self.costs.comp(join, g) + self.costs.sync(join, g)
        for i in sorted(range(len(times)), key=lambda i: -times[i]):
            if i == critical:
                continue
            x = ends[i]
            need = self._widest(searches[i], x)
            if x is not None and need <= left:
                there, back = self._moved(searches[i], fork, h, x, join, g)
                more = there.more + back.more
                kept = self.amp(there.layer, there.gpus, there.seconds) <= self.limit * (1 + TOLERANCE)
                kept = kept and self.amp(join, g, incoming + back.more + own) <= self.limit * (1 + TOLERANCE)
                if kept and times[i] + more <= times[critical]:
                    away[i] = True
                    left -= need
                    incoming += back.more
                    continue
            if need > home_gpus:  # at home it must fit beside the branches that are away
                if need - home_gpus > left:  # then no branch goes away
                    return _Merged(sum(times), sum(transfers), ends, [False] * len(times), searches)
                left -= need - home_gpus
                home_gpus = need
            total += times[i]
        return _Merged(total, incoming, ends, away, searches)

    def _moved(self, search: _Search, fork: int, h: int, x: int, join: int, g: int) -> tuple[_Transfer, _Transfer]:
        """The extra time of the transfers at a branch's ends if it is away, with T of its first layer then."""
        path = _path(search, x)
        first, last = search.layers[0], search.layers[-1]
        costs, on = self.costs, path[0]
        there = costs.moved(fork, h, on) - costs.comm(fork, h, on)
        back = costs.moved(last, x, g) - costs.comm(last, x, g)
        return (
            _Transfer(there, first, on, search.states[0][on].t + there),
            _Transfer(back, last, x, 0.0),
        )

    def _widest(self, search: _Search, x: int | None) -> int:
        """GPUs that the branch's best path to count `x` of its last layer needs at once."""
        if x is None:
            return 0
        path = _path(search, x)
        found = max(path)
        for place in search.blocks:
            found = max(found, self._block_width(search, place, path[place]))
        return min(count for count in self.costs.counts if count >= found)

    def _block_width(self, search: _Search, place: int, g: int) -> int:
        merged = search.states[place][g].merged
        assert merged is not None
        home, away = 0, 0
        for inner, end, moved in zip(merged.searches, merged.ends, merged.away, strict=True):
            need = self._widest(inner, end)
            home, away = (home, away + need) if moved else (max(home, need), away)
        return home + away


@dataclass
class _Transfer:
    more: float
    layer: int
    gpus: int
    seconds: float


def _path(search: _Search, x: int) -> list[int]:
    """Counts of the search's layers on the best path to count `x` of the last."""
    counts = [x]
    for states in reversed(search.states[1:]):
        before = states[counts[-1]].came_from
        assert before is not None
        counts.append(before)
    return counts[::-1]


def search(graph: LayerGraph, costs: Costs, limit: float, gpus: int) -> Placement:
    """The published algorithm's plan. The last layer's count is the fastest that keeps the limit, or, if none does,
    the one that exceeds it least."""
    searcher = _Searcher(costs, limit)
    found = searcher.linear(graph.chain, None, None, gpus)
    last = found.layers[-1]
    amps = {g: searcher.amp(last, g, state.t) for g, state in found.states[-1].items()}
    keeping = [g for g in amps if amps[g] <= limit * (1 + TOLERANCE)]
    states = found.states[-1]
    g = min(keeping, key=lambda g: states[g].s) if keeping else min(amps, key=lambda g: amps[g])
    placed: dict[int, int] = {}
    away: set[tuple[int, int]] = set()
    _collect(found, g, placed, away)
    return Placement(tuple(placed[i] for i in range(len(graph.layers))), frozenset(away))


def _collect(found: _Search, x: int, placed: dict[int, int], away: set[tuple[int, int]]) -> None:
    path = _path(found, x)
    placed.update(zip(found.layers, path, strict=True))
    for place, block in found.blocks.items():
        merged = found.states[place][path[place]].merged
        assert merged is not None
        for i, (inner, end) in enumerate(zip(merged.searches, merged.ends, strict=True)):
            if merged.away[i]:
                away.add((block.number, i))
            if end is not None:
                _collect(inner, end, placed, away)


# ---- Shortest paths through consecutive layers.


FEW = 6  # counts: for fewer, calls into numpy would take longer than their work
CHUNK = 1 << 18  # elements of the edges held at once: memory stays linear in layers, whatever the counts


def shortest(costs: ProfiledCosts, limit: float) -> tuple[float, list[int]]:
    """Seconds, and each layer's count (an index), of the shortest path through all layers under the amplification
    limit. For 2 to FEW counts. A count is reached best from itself, without a transfer, or from the count that ends
    soonest. If even the smallest transfer from another would end too late, no other is tried."""
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
        floor = nbytes * least + wait  # rounded like each transfer, and so never above one
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
                        best = staying  # another count than the fastest may be better
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
    """Consecutive layers. `ways`: for each but the first, and each count, the count of the previous one on the shortest
    path."""

    def __init__(self, layers: Sequence[int], rules: Rules) -> None:
        self.layers, self.rules = layers, rules
        self.ways: list[npt.NDArray[np.intp]] = []
        self.reached: Array

    def run(self, reached: Array) -> Array:
        """The end of each count of the last layer, given `reached` [counts], the end of each count of the first."""
        layers, rules = self.layers, self.rules
        n = len(rules.tables.counts)
        self.ways = []
        chunk = max(1, CHUNK // (n * n))
        together = layers[-1] - layers[0] == len(layers) - 1  # contiguous, as in most cases: slices are faster
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
        """(count of the first layer on the shortest path to count `last`, True: these paths are exact)."""
        for ways in reversed(self.ways):
            for row in reversed(ways.tolist()):
                last = row[last]
        return last, True

    def collect(self, last: int, placed: dict[int, int], away: set[tuple[int, int]]) -> int:
        """Record the counts of all layers but the last, whose count is `last`; returns the first one's."""
        layer = len(self.layers) - 1
        for ways in reversed(self.ways):
            for row in reversed(ways.tolist()):
                last = row[last]
                layer -= 1
                placed[self.layers[layer]] = last
        return last
