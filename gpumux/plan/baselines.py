"""What burst-parallel plans are measured against: data parallelism, and the ways to scale it of DeepPool's section 2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite

from gpumux.errors import ConfigError
from gpumux.plan import optimal
from gpumux.plan.costs import ProfiledCosts, divisors
from gpumux.plan.graph import Graph
from gpumux.plan.network import Network
from gpumux.plan.plan import Placement, Plan, evaluate


def data_parallel(graph: Graph, batch: int, gpus: int, network: Network, overlap: float = 0.0) -> Plan:
    """Every layer on all GPUs, `batch` samples in all. Raises ConfigError where they don't divide."""
    costs = ProfiledCosts(graph, batch, (gpus,), network, overlap)
    placement = Placement((gpus,) * len(graph.layers))
    return evaluate(graph, costs, placement, gpus=gpus, batch=batch, algorithm="data-parallel")


@dataclass(frozen=True)
class SampleEfficiency:
    """How many iterations a wanted accuracy takes at a global batch, over what it takes at a very large one:
    1 + critical / batch (McCandlish et al., "An Empirical Model of Large-Batch Training", equation 2.11). Far below the
    `critical` batch, twice the batch halves the iterations; far above it, a larger batch saves none. inf: it always halves
    them. Raises ConfigError below 0."""

    critical: float

    def __post_init__(self) -> None:
        if not self.critical > 0:
            raise ConfigError(f"a critical batch of {self.critical}", "give more than 0 samples")

    def iterations(self, batch: int) -> float:
        """In the same arbitrary unit for every batch."""
        return 1 + self.critical / batch if isfinite(self.critical) else 1 / batch


@dataclass(frozen=True)
class Scaled:
    """One strategy on one cluster: the global batch it uses, an iteration's seconds, and the speed-up of the time to
    accuracy over one GPU with the reference batch."""

    strategy: str
    gpus: int
    batch: int
    iteration_s: float
    speedup: float

    @property
    def samples_a_gpu(self) -> float:
        return self.batch / self.gpus


STRATEGIES = ("weak", "strong", "batch-optimal", "burst")


def scaled(
    graph: Graph, reference: int, gpus: int, network: Network, efficiency: SampleEfficiency, limit: float = inf
) -> list[Scaled]:
    """The paper's strategies on one cluster, those that are possible there. Weak: `reference` samples a GPU. Strong:
    `reference` in all. Batch-optimal: the batch, between one sample a GPU and weak scaling's (by powers of two), that is
    quickest to accuracy. Burst: strong scaling under the optimal burst-parallel plan with powers of two, within `limit`."""
    base = data_parallel(graph, reference, 1, network).seconds * efficiency.iterations(reference)

    def told(strategy: str, batch: int, seconds: float) -> Scaled:
        return Scaled(strategy, gpus, batch, seconds, base / (seconds * efficiency.iterations(batch)))

    found = [told("weak", reference * gpus, data_parallel(graph, reference * gpus, gpus, network).seconds)]
    if reference % gpus == 0:
        found.append(told("strong", reference, data_parallel(graph, reference, gpus, network).seconds))
    tried = [
        told("batch-optimal", batch, data_parallel(graph, batch, gpus, network).seconds)
        for batch in _batches(gpus, reference * gpus)
        if batch // gpus >= _smallest(graph)
    ]
    found.append(max(tried, key=lambda each: each.speedup))
    counts = tuple(count for count in divisors(reference, gpus) if count & (count - 1) == 0)
    costs = ProfiledCosts(graph, reference, counts, network)
    placement = optimal.search(graph, costs, limit, gpus)
    burst = evaluate(graph, costs, placement, gpus=gpus, batch=reference, limit=limit)
    found.append(told("burst", reference, burst.seconds))
    return found


def _smallest(graph: Graph) -> int:
    return max(layer.times[0].samples for layer in graph.layers)


def _batches(least: int, most: int) -> Sequence[int]:
    found = [least]
    while found[-1] * 2 <= most:
        found.append(found[-1] * 2)
    if found[-1] != most:
        found.append(most)
    return found
