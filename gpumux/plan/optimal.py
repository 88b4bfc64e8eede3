"""The plan of least iteration time under the amplification limit, exactly.

Amp(i, g) depends on the layer's own count and on the counts its input comes from, and on nothing else. So the limit
forbids edges between states (layer, count), and never ways; a shortest path over the edges that are left is the optimum.
DeepPool's Algorithm 1 tests instead the one way it kept to each state. Blocks (gpumux/plan/sharing.py) become edges too.
docs/planning.md has the proof. On chains of L layers and n counts this takes O(L n^2) time and O(L n) memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isinf, isnan

import numpy as np

from gpumux.errors import ConfigError
from gpumux.plan import chains
from gpumux.plan.costs import TOLERANCE, Array, Costs, Tables
from gpumux.plan.graph import Block, Graph
from gpumux.plan.plan import Placement
from gpumux.plan.sharing import BlockTable, Rules


def search(graph: Graph, costs: Costs, limit: float, gpus: int) -> Placement:
    """The optimum. `limit`: 1 or more (inf: none); with less, not even one GPU would do. Raises ConfigError where no plan
    keeps the limit, which takes counts that leave out 1."""
    if isnan(limit) or limit < 1:
        raise ConfigError(f"an amplification limit of {limit}", "give 1 or more: one GPU alone has 1")
    tables = costs.tables()
    return _Search(tables, limit, gpus).run(graph)


def rules(tables: Tables, limit: float) -> Rules:
    """What the limit leaves of each layer's time on each count for the transfers into it, [layers, counts]."""
    counts = np.array(tables.counts, dtype=np.float64)
    if isinf(limit):
        return Rules(tables, np.full(tables.work.shape, inf))
    budget = tables.single * (limit * (1 + TOLERANCE))
    return Rules(tables, budget[:, None] / counts - tables.work)


class _Search:
    def __init__(self, tables: Tables, limit: float, gpus: int) -> None:
        self.tables, self.gpus = tables, gpus
        self.rules = rules(tables, limit)
        self.steps: list[chains.Run | _Joined] = []

    def run(self, graph: Graph) -> Placement:
        if len(self.tables.counts) <= chains.FEW and self.tables.given is None and not graph.blocks:
            seconds, found = chains.shortest(self.rules)
            self._possible(seconds)
            counts = self.tables.counts
            return Placement(tuple([counts[g] for g in found]))
        return self._blocks(graph)

    def _blocks(self, graph: Graph) -> Placement:
        chain = graph.chain
        first = chain[0]
        assert isinstance(first, int)
        reached = self.tables.work[first] + np.where(self.rules.room[first] >= 0, 0.0, inf)
        place = 0
        while place + 1 < len(chain):
            end = place
            while end + 1 < len(chain) and not isinstance(chain[end + 1], Block):
                end += 1
            step: chains.Run | _Joined
            if end > place:
                layers = [each for each in chain[place : end + 1] if isinstance(each, int)]
                step = chains.Run(layers, reached, self.rules)
                place = end
            else:
                fork, block, join = chain[place : place + 3]
                assert isinstance(fork, int)
                assert isinstance(block, Block)
                assert isinstance(join, int)
                step = _Joined(block, fork, join, reached, self.rules, self.gpus)
                place += 2
            self.steps.append(step)
            reached = step.reached
        last = int(reached.argmin())
        self._possible(float(reached[last]))
        return self._placement(graph, last)

    def _possible(self, seconds: float) -> None:
        if isinf(seconds):
            raise ConfigError(
                f"no plan over {_some(self.tables.counts)} GPUs keeps the amplification limit",
                "raise the limit, or let 1 be among the counts",
            )

    def _placement(self, graph: Graph, last: int) -> Placement:
        counts = self.tables.counts
        placed: dict[int, int] = {}
        away: set[tuple[int, int]] = set()
        end = graph.chain[-1]
        assert isinstance(end, int)
        placed[end] = last
        for step in reversed(self.steps):
            last = step.collect(last, placed, away)
        return Placement(tuple(counts[placed[i]] for i in range(len(graph.layers))), frozenset(away))


class _Joined:
    """A block between two layers of the model's own chain. A block's exact time is worked out only for the pairs of counts
    whose lower bound could still be on the shortest way."""

    def __init__(self, block: Block, fork: int, join: int, reached: Array, rules: Rules, gpus: int) -> None:
        self.table = BlockTable(block, fork, join, rules, (gpus,))
        self.fork = fork
        bounds = reached[:, None] + self.table.lower[0]
        self.reached = np.full(len(reached), inf)
        self.ways = [0] * len(reached)
        for h, column in enumerate(bounds.T):
            for g in column.argsort(kind="stable"):
                if column[g] >= self.reached[h]:
                    break
                seconds = reached[g] + self.table.exact(0, int(g), h)
                if seconds < self.reached[h]:
                    self.reached[h], self.ways[h] = seconds, int(g)
        self.reached += rules.tables.work[join]

    def collect(self, last: int, placed: dict[int, int], away: set[tuple[int, int]]) -> int:
        g = self.ways[last]
        placed[self.fork] = g
        self.table.collect(0, g, last, placed, away)
        return g


def _some(counts: Sequence[int]) -> str:
    return ", ".join(map(str, counts)) if len(counts) <= 12 else f"{counts[0]}, {counts[1]} ... {counts[-1]}"
