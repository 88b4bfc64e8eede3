"""Finds the plan of least iteration time under the amplification limit, exactly.

Amp(i, g) depends only on the layer's own count and on the counts that its input comes from. The limit therefore forbids
edges between states (layer, count), not whole paths, and a shortest path over the remaining edges is the optimum.
DeepPool's Algorithm 1 instead tests the one path that it kept to each state. Blocks (gpumux/plan/branches.py) become
edges too. On chains of L layers and n counts this takes O(L n^2) time and O(L n) memory.

Why it is exact with blocks. Fix the counts of the branching and of the joining layer. (a) For a given split of the
GPUs, a branch by itself is a chain again, without the edges into counts above its share. (b) More GPUs for a branch
never hurt, since it has more paths. So only those splits need a look in which no branch could have more. At least
one branch is at home, since moving one back there costs nothing. (c) Branches then meet in two places: the block's
time, which is a sum at home and a maximum over those away and only grows with each branch's time; and the joining
layer's limit, which bounds the sum of all transfers into it. Treating each branch's last count and each transfer as
independent gives a lower bound. If the fastest choices keep the limit together, the bound is exact; if not even the
smallest transfers do, there is no path. Two branches are tried in all pairs. (d) The search runs over lower bounds. If
the shortest path leads through a bound that may be too low, that bound is made exact, by trying the branches' last
counts with bounds, and the search is repeated. Once the path leads through none, its length is exact, and every other
path's length is at least its bound, which is no less. Only finitely many bounds can be raised, so the search ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, isinf, isnan

import numpy as np

from gpumux.errors import ConfigError
from gpumux.plan import branches, deeppool
from gpumux.plan.branches import BlockTable
from gpumux.plan.costs import Array, Costs, ProfiledCosts, Tables
from gpumux.plan.graph import Block, Chain, LayerGraph
from gpumux.plan.plan import Placement, Rules, rules


def search(graph: LayerGraph, costs: Costs, limit: float, gpus: int) -> Placement:
    """The optimum. limit: 1 or more (inf: none); below 1 not even one GPU would do. Raises ConfigError if no plan keeps
    the limit, which is only possible with counts that leave out 1."""
    found = find(graph, costs, limit, gpus)
    if found is None:
        raise no_plan(costs.counts)
    return found


def find(graph: LayerGraph, costs: Costs, limit: float, gpus: int) -> Placement | None:
    """The optimum as in `search`, or None if no plan keeps the limit. Raises ConfigError for a limit below 1."""
    if isnan(limit) or limit < 1:
        raise ConfigError(f"an amplification limit of {limit}", "give 1 or more: one GPU alone has 1")
    plain = Block not in map(type, graph.chain)
    if plain and isinstance(costs, ProfiledCosts) and 2 <= len(costs.counts) <= deeppool.FEW:
        seconds, found = deeppool.shortest(costs, limit)
        return None if isinf(seconds) else Placement(tuple([costs.counts[g] for g in found]))
    return _Search(costs.tables(), limit, gpus).run(graph)


def no_plan(counts: Sequence[int]) -> ConfigError:
    """The error for counts over which no plan keeps the limit."""
    return ConfigError(
        f"no plan over {_some(counts)} GPUs keeps the amplification limit",
        "raise the limit, or let 1 be among the counts",
    )


class _Search:
    def __init__(self, tables: Tables, limit: float, gpus: int) -> None:
        self.tables, self.gpus = tables, gpus
        self.rules = rules(tables, limit)

    def run(self, graph: LayerGraph) -> Placement | None:
        """Find shortest paths over blocks' lower bounds, make the bounds on the path exact, and repeat until the path
        has no inexact one. It is the shortest then, since no bound is above the true time."""
        chain = graph.chain
        tables = branches.tables(graph, self.rules, self.gpus)
        first = chain[0]
        assert isinstance(first, int)
        start = self.tables.work[first] + np.where(self.rules.room[first] >= 0, 0.0, inf)
        steps = self._steps(chain, tables)
        changed = 0
        while True:
            reached = start if changed == 0 else steps[changed - 1].reached
            for step in steps[changed:]:
                reached = step.run(reached)
            last = int(reached.argmin())
            if isinf(reached[last]):
                return None
            doubtful, count = len(steps), last
            for at in range(len(steps) - 1, -1, -1):
                count, settled = steps[at].back(count)
                doubtful = doubtful if settled else at
            if doubtful == len(steps):
                return self._placement(graph, steps, last)
            changed = doubtful

    def _placement(self, graph: LayerGraph, steps: Sequence[deeppool.Run | _Joined], last: int) -> Placement:
        counts = self.tables.counts
        placed: dict[int, int] = {}
        away: set[tuple[int, int]] = set()
        end = graph.chain[-1]
        assert isinstance(end, int)
        placed[end] = last
        for step in reversed(steps):
            last = step.collect(last, placed, away)
        return Placement(tuple([counts[placed[i]] for i in range(len(graph.layers))]), frozenset(away))

    def _steps(self, chain: Chain, tables: Mapping[int, BlockTable]) -> list[deeppool.Run | _Joined]:
        found: list[deeppool.Run | _Joined] = []
        place = 0
        while place + 1 < len(chain):
            end = place
            while end + 1 < len(chain) and not isinstance(chain[end + 1], Block):
                end += 1
            if end > place:
                layers = [each for each in chain[place : end + 1] if isinstance(each, int)]
                found.append(deeppool.Run(layers, self.rules))
                place = end
            else:
                fork, block, join = chain[place : place + 3]
                assert isinstance(fork, int)
                assert isinstance(block, Block)
                assert isinstance(join, int)
                found.append(_Joined(tables[block.number], self.rules))
                place += 2
        return found


class _Joined:
    """A block between two layers of the model's own chain."""

    def __init__(self, table: BlockTable, rules: Rules) -> None:
        self.table, self.rules = table, rules
        _, self.fork, self.join, _ = table.site
        self.reached: Array
        self.ways: list[int]

    def run(self, reached: Array) -> Array:
        """The end of each count of the joining layer, given `reached`, the end of each count of the branching layer."""
        bounds = reached[:, None] + self.table.lower[0]
        self.ways = bounds.argmin(0).tolist()
        self.reached = bounds.min(0) + self.rules.tables.work[self.join]
        return self.reached

    def back(self, last: int) -> tuple[int, bool]:
        """(count of the branching layer, whether its bound was exact); the bound is exact from now on."""
        g = self.ways[last]
        before = float(self.table.lower[0, g, last])
        return g, self.table.exact(0, g, last) <= before

    def collect(self, last: int, placed: dict[int, int], away: set[tuple[int, int]]) -> int:
        g = self.ways[last]
        placed[self.fork] = g
        self.table.collect(0, g, last, placed, away)
        return g


def _some(counts: Sequence[int]) -> str:
    return ", ".join(map(str, counts)) if len(counts) <= 12 else f"{counts[0]}, {counts[1]} ... {counts[-1]}"
