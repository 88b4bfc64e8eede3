"""DeepPool's figures for any model: what GPUs, networks and amplification limits are worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from gpumux.errors import ConfigError
from gpumux.plan import deeppool, optimal
from gpumux.plan.baselines import SampleEfficiency, Scaled, data_parallel, scaled
from gpumux.plan.costs import ProfiledCosts
from gpumux.plan.graph import Graph
from gpumux.plan.network import Network
from gpumux.plan.plan import Plan, evaluate

ALGORITHMS = {"optimal": optimal.search, "deeppool": deeppool.search}
LIMITS = (1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, inf)
BANDWIDTHS = tuple(gbps * 1e9 / 8 for gbps in (10, 25, 50, 100, 200, 400, 1000, 2400, 4800))


def plan(
    graph: Graph,
    *,
    batch: int,
    gpus: int,
    counts: tuple[int, ...],
    network: Network,
    limit: float = inf,
    overlap: float = 0.0,
    algorithm: str = "optimal",
) -> Plan:
    """The plan that `algorithm` finds. Raises ConfigError for counts that the cluster has not or the batch can't be divided
    among, and for algorithms that do not exist."""
    if algorithm not in ALGORITHMS:
        raise ConfigError(f"no algorithm is called {algorithm!r}", f"use one of {', '.join(ALGORITHMS)}")
    if counts and max(counts) > gpus:
        raise ConfigError(f"a count of {max(counts)}", f"the cluster has {gpus} GPUs")
    costs = ProfiledCosts(graph, batch, counts, network, overlap)
    placement = ALGORITHMS[algorithm](graph, costs, limit, gpus)
    return evaluate(graph, costs, placement, gpus=gpus, batch=batch, limit=limit, algorithm=algorithm)


def over_limits(base: Plan, costs: ProfiledCosts, limits: Sequence[float] = LIMITS) -> list[Plan]:
    """The optimal plan for each amplification limit, on `base`'s cluster: iteration time against GPU time."""
    return [
        evaluate(
            base.graph,
            costs,
            optimal.search(base.graph, costs, limit, base.gpus),
            gpus=base.gpus,
            batch=base.batch,
            limit=limit,
            algorithm="optimal",
        )
        for limit in limits
    ]


@dataclass(frozen=True)
class OperatingPoint:
    """A foreground job and background jobs on one cluster (figure 10). `speedup`: the foreground's over one GPU with the
    same batch; `throughput`: samples a second of all, each background job on one GPU with `gpus`-th of the batch and as fast
    as alone, so it is what sharing could give at best."""

    name: str
    speedup: float
    throughput: float


def operating_points(plans: Sequence[Plan], costs: ProfiledCosts) -> list[OperatingPoint]:
    """The plans with all idle GPU time given to background jobs; then the cluster parted into data-parallel foreground
    GPUs and background ones, for each count."""
    graph, batch, gpus = costs.graph, costs.batch, plans[0].gpus
    share = max(1, batch // gpus)
    background = share / data_parallel(graph, share, 1, costs.network).seconds  # samples a second of one GPU
    found = []
    for each in plans:
        idle = each.idle / each.seconds  # GPUs' worth of it
        found.append(OperatingPoint(f"limit {each.limit:g}", each.speedup, batch / each.seconds + idle * background))
    for count in costs.counts:
        alone = data_parallel(graph, batch, count, costs.network, costs.overlap)
        total = batch / alone.seconds + (gpus - count) * background
        found.append(OperatingPoint(f"partition {count}", alone.speedup, total))
    return found


def over_sizes(
    graph: Graph,
    reference: int,
    sizes: Sequence[int],
    network: Network,
    efficiency: SampleEfficiency,
    limit: float = inf,
) -> list[Scaled]:
    """Every strategy on every cluster (figures 1 and 2)."""
    return [each for gpus in sizes for each in scaled(graph, reference, gpus, network, efficiency, limit)]


def over_networks(
    graph: Graph,
    reference: int,
    gpus: int,
    network: Network,
    efficiency: SampleEfficiency,
    limit: float = inf,
    bandwidths: Sequence[float] = BANDWIDTHS,
) -> list[tuple[float, Scaled]]:
    """Every strategy at every bandwidth in bytes a second, the network's latency as it is (figure 3)."""
    return [
        (bandwidth, each)
        for bandwidth in bandwidths
        for each in scaled(graph, reference, gpus, replace(network, bandwidth=bandwidth), efficiency, limit)
    ]


def layer_speedups(graph: Graph, batch: int, counts: Sequence[int]) -> list[list[float]]:
    """comp(i, 1) / comp(i, g) of each layer and count, nothing but computation (figure 5). A layer without any has 1."""
    found = []
    for layer in graph.layers:
        one = layer.at(batch).seconds
        each = [layer.at(batch // count).seconds for count in counts]
        found.append([one / seconds if seconds else 1.0 for seconds in each])
    return found
