"""Random small graphs with whole-number costs, so that sums are exact, and a search that tries every plan."""

from __future__ import annotations

from itertools import product
from math import inf
from random import Random

import numpy as np

from gpumux.plan.costs import Costs, GivenCosts
from gpumux.plan.graph import Block, Chain, Graph, blocks
from gpumux.plan.layers import LayerProfile, Timing
from gpumux.plan.plan import Placement


def layer(name: str, *inputs: str, seconds: float = 1.0, **rest: object) -> LayerProfile:
    fields = {"output_bytes": 8, "parameter_bytes": 4, "times": (Timing(1, seconds, 2 * seconds),)} | rest
    return LayerProfile(name, "Linear", inputs, **fields)  # type: ignore[arg-type]


def chain_graph(length: int) -> Graph:
    return Graph("chain", "none", tuple(layer(f"l{i}") for i in range(length)), tuple(range(length)))


def random_chain(random: Random, most: int) -> Graph:
    return chain_graph(random.randint(1, most))


def random_graph(random: Random, most: int) -> Graph:
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
    return Graph("random", "none", tuple(layer(f"l{i}") for i in range(count)), made)


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


def times(graph: Graph, costs: Costs, placement: Placement) -> tuple[float, list[float], int]:
    """(iteration, T of each layer, most GPUs at once), from the definitions in docs/planning.md, written down once more."""
    gpus = placement.gpus
    spent = [costs.comp(i, gpus[i]) + costs.sync(i, gpus[i]) for i in range(len(gpus))]

    def walk(chain: Chain, fork: int | None, moved: bool) -> tuple[float, int, int | None]:
        """(seconds without the way into what follows, most GPUs, last layer)"""
        total, wide, last = 0.0, 0, fork
        joining = False
        for place, each in enumerate(chain):
            if isinstance(each, int):
                if last is not None and not joining:
                    comm = (costs.moved if moved and place == 0 else costs.comm)(last, gpus[last], gpus[each])
                    spent[each] += comm
                    total += comm
                total += costs.comp(each, gpus[each]) + costs.sync(each, gpus[each])
                wide, last, joining = max(wide, gpus[each]), each, False
                continue
            join = chain[place + 1]
            assert isinstance(join, int)
            assert isinstance(last, int)
            home, away, at_home, elsewhere = 0.0, 0.0, 0, 0
            for i, branch in enumerate(each.branches):
                is_away = (each.number, i) in placement.away
                seconds, need, end = walk(branch, last, is_away) if branch else (0.0, 0, last)
                assert end is not None
                comm = (costs.moved if is_away else costs.comm)(end, gpus[end], gpus[join])
                spent[join] += comm
                need = min(
                    (c for c in (0, *costs.counts) if c >= need), default=10**6
                )  # sets have one of the counts' sizes
                if is_away:
                    away, elsewhere = max(away, seconds + comm), elsewhere + need
                else:
                    home, at_home = home + seconds + comm, max(at_home, need)
            total += max(home, away)
            wide, joining = max(wide, at_home + elsewhere), True
        return total, wide, last

    total, wide, _ = walk(graph.chain, None, False)
    return total, spent, wide


def keeps(costs: Costs, placement: Placement, spent: list[float], limit: float) -> bool:
    return limit == inf or all(
        t * g <= limit * costs.comp(i, 1) for i, (t, g) in enumerate(zip(spent, placement.gpus, strict=True))
    )


def brute_force(graph: Graph, costs: Costs, limit: float, gpus: int) -> float:
    """The least iteration time of all plans that keep the limit and fit."""
    movable = [(block.number, i) for block in blocks(graph.chain) for i, branch in enumerate(block.branches) if branch]
    best = inf
    for subset in product((False, True), repeat=len(movable)):
        away = frozenset(each for each, chosen in zip(movable, subset, strict=True) if chosen)
        for counts in product(costs.counts, repeat=len(graph.layers)):
            placement = Placement(counts, away)
            total, spent, wide = times(graph, costs, placement)
            if total < best and wide <= gpus and keeps(costs, placement, spent, limit):
                best = total
    return best
