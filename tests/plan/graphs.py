"""Random small graphs with whole-number costs, so that sums are exact, and a search that tries every plan."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import product
from math import inf
from random import Random

import numpy as np
import numpy.typing as npt

from gpumux.errors import ConfigError
from gpumux.plan.costs import Costs, GivenCosts
from gpumux.plan.graph import Block, Chain, LayerGraph, blocks
from gpumux.plan.layers import LayerProfile, Timing
from gpumux.plan.plan import BurstPlan, Placement, evaluate
from gpumux.program.saved_plan import MOST_GPUS


def layer(name: str, *inputs: str, seconds: float = 1.0, **rest: object) -> LayerProfile:
    fields = {"output_bytes": 8, "parameter_bytes": 4, "times": (Timing(1, seconds, 2 * seconds),)} | rest
    return LayerProfile(name, "Linear", inputs, **fields)  # type: ignore[arg-type]


def chain_graph(length: int) -> LayerGraph:
    return LayerGraph("chain", "none", tuple(layer(f"l{i}") for i in range(length)), tuple(range(length)))


def random_chain(random: Random, most: int) -> LayerGraph:
    return chain_graph(random.randint(1, most))


def random_graph(random: Random, most: int) -> LayerGraph:
    """A few layers and blocks, some of them nested; `most` layers at the most."""
    left, numbers = [most - 2], [0]  # the first branching and joining layers are there in any case

    def layers(least: int) -> list[int | Block]:
        found: list[int | Block] = []
        for _ in range(random.randint(least, 2)):
            if left[0] > 0:
                left[0] -= 1
                found.append(-1)
                if left[0] >= 2 and random.random() < 0.35:
                    left[0] -= 1  # the joining layer
                    found += block()
        return found

    def block() -> list[int | Block]:
        number, numbers[0] = numbers[0], numbers[0] + 1
        branches: list[Chain] = [tuple(layers(1)) for _ in range(random.randint(1, 3))]
        branches = [branch for branch in branches if branch]
        if len(branches) < 2 or random.random() < 0.3:
            branches.append(())
        if len(branches) < 2:
            return []
        return [Block(number, tuple(branches)), -1]

    chain = [-1, *block(), *layers(0)]
    count = 0

    def numbered(chain: Chain) -> Chain:
        nonlocal count
        found: list[int | Block] = []
        for each in chain:
            if isinstance(each, Block):
                found.append(Block(each.number, tuple(numbered(branch) for branch in each.branches)))
            else:
                found.append(count)
                count += 1
        return tuple(found)

    made = numbered(tuple(chain))
    return LayerGraph("random", "none", tuple(layer(f"l{i}") for i in range(count)), made)


def random_costs(random: Random, layers: int, counts: tuple[int, ...], *, scale: int = 20) -> GivenCosts:
    n = len(counts)
    single = np.array([float(random.choice((0, random.randint(1, scale), 4 * scale))) for _ in range(layers)])
    compute = np.array(
        [[max(1.0, one // g) * random.choice((1, 1, 2)) if one else 0.0 for g in counts] for one in single]
    )
    gradients = np.array([[float(random.choice((0, 0, random.randint(0, 4)))) for _ in counts] for _ in range(layers)])
    between = np.array([[[float(random.randint(0, 6)) for _ in counts] for _ in counts] for _ in range(layers)])
    between[:, range(n), range(n)] = 0.0
    apart = between + np.array([[[float(random.randint(0, 4)) for _ in counts] for _ in counts] for _ in range(layers)])
    if counts[0] == 1:
        compute[:, 0], gradients[:, 0] = single, 0.0
    return GivenCosts(counts, compute, gradients, single, between, apart)


Seconds = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]


class Amounts:
    """Costs of a graph's layers, as arrays by layer and the index of a count. sizes: sizes of sets of GPUs."""

    def __init__(self, graph: LayerGraph, costs: Costs) -> None:
        layers, counts = range(len(graph.layers)), costs.counts
        self.graph, self.counts, self.sizes = graph, np.array(counts), np.array((0, *counts, 10**6))
        self.own = np.array([[costs.comp(i, g) + costs.sync(i, g) for g in counts] for i in layers])
        self.single = np.array([costs.comp(i, 1) for i in layers])
        self.comm, self.moved = (
            np.array([[[move(i, g, h) for h in counts] for g in counts] for i in layers])
            for move in (costs.comm, costs.moved)
        )

    def keep(self, walk: Walk, limit: float, gpus: int) -> npt.NDArray[np.bool_]:
        """Masks of the placements that fit, and that keep the amplification limit."""
        good: npt.NDArray[np.bool_] = walk.wide <= gpus
        return good & (walk.spent * walk.gpus <= limit * self.single[:, None]).all(0) if limit < inf else good


class Walk:
    """Any number of placements of a graph at once, computed from the definitions in docs/planning.md, independently of
    the package. `chosen` [layers, placements]: indices of counts. Branches in `away` are away in all placements."""

    def __init__(self, amounts: Amounts, chosen: Numbers, away: Collection[tuple[int, int]]) -> None:
        self.amounts, self.chosen, self.away = amounts, chosen, away
        self.gpus = amounts.counts[chosen]
        self.own = amounts.own[np.arange(len(chosen))[:, None], chosen]
        self.spent = self.own.copy()
        self.total, self.wide, _ = self.chain(amounts.graph.chain, None, False)

    def chain(self, chain: Chain, fork: int | None, away: bool) -> tuple[Seconds, Numbers, int | None]:
        """(seconds without the transfer into the next layer, most GPUs, last layer)"""
        total, wide = np.zeros(self.chosen.shape[1]), np.zeros(self.chosen.shape[1], dtype=np.int64)
        last, joining = fork, False
        for place, each in enumerate(chain):
            if isinstance(each, int):
                if last is not None and not joining:
                    total = total + self.transfer(last, each, away and place == 0)
                total, wide = total + self.own[each], np.maximum(wide, self.gpus[each])
                last, joining = each, False
                continue
            join = chain[place + 1]
            assert isinstance(join, int)
            assert isinstance(last, int)
            seconds, needed = self.block(each, last, join)
            total, wide, joining = total + seconds, np.maximum(wide, needed), True
        return total, wide, last

    def block(self, block: Block, fork: int, join: int) -> tuple[Seconds, Numbers]:
        """(seconds, GPUs that home and the branches away need together)"""
        home, longest, at_home, elsewhere = 0.0, 0.0, 0, 0
        for i, branch in enumerate(block.branches):
            is_away = (block.number, i) in self.away
            seconds, needed, end = self.chain(branch, fork, is_away)
            assert end is not None
            seconds = seconds + self.transfer(end, join, is_away)
            needed = self.amounts.sizes[np.searchsorted(self.amounts.sizes, needed)]
            if is_away:
                longest, elsewhere = np.maximum(longest, seconds), elsewhere + needed
            else:
                home, at_home = home + seconds, np.maximum(at_home, needed)
        return np.maximum(home, longest), at_home + elsewhere

    def transfer(self, before: int, behind: int, away: bool) -> Seconds:
        """Noted as time of the layer behind, too."""
        seconds: Seconds = (self.amounts.moved if away else self.amounts.comm)[
            before, self.chosen[before], self.chosen[behind]
        ]
        self.spent[behind] += seconds
        return seconds


def times(amounts: Amounts, placement: Placement) -> tuple[float, list[float], int]:
    """(iteration, T of each layer, most GPUs at once)"""
    chosen = np.searchsorted(amounts.counts, placement.gpus)[:, None]
    walk = Walk(amounts, chosen, placement.away)
    return float(walk.total[0]), walk.spent[:, 0].tolist(), int(walk.wide[0])


def brute_force(amounts: Amounts, limit: float, gpus: int) -> float:
    """The least iteration time of all plans that keep the limit and fit."""
    graph, layers = amounts.graph, len(amounts.graph.layers)
    movable = [(block.number, i) for block in blocks(graph.chain) for i, branch in enumerate(block.branches) if branch]
    every = np.indices((len(amounts.counts),) * layers).reshape(layers, -1)
    best = inf
    for subset in product((False, True), repeat=len(movable)):
        walk = Walk(amounts, every, [each for each, chosen in zip(movable, subset, strict=True) if chosen])
        best = min(best, float(walk.total[amounts.keep(walk, limit, gpus)].min(initial=inf)))
    return best


def random_plan(random: Random, graph: LayerGraph, costs: GivenCosts) -> BurstPlan:
    """Any number of GPUs for each layer, and any branches that have layers away, on as large a cluster as it takes."""
    movable = [(block.number, i) for block in blocks(graph.chain) for i, branch in enumerate(block.branches) if branch]
    for _ in range(100):
        away = frozenset(each for each in movable if random.random() < 0.4)
        placement = Placement(tuple(random.choice(costs.counts) for _ in graph.layers), away)
        try:
            found = evaluate(graph, costs, placement, gpus=MOST_GPUS, batch=costs.counts[-1])
        except ConfigError:  # a branch with branches away needs more GPUs than a set may have
            continue
        return replace(found, gpus=found.width)
    raise AssertionError("no placement fits")
