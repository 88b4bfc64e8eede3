"""Baselines of burst-parallel plans: data parallelism, and the scaling strategies of DeepPool's section 2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite

from gpumux.errors import ConfigError
from gpumux.plan.graph import LayerGraph
from gpumux.plan.query import PlanQuery


@dataclass(frozen=True)
class SampleEfficiency:
    """The number of iterations to an accuracy at a global batch, relative to a very large batch: 1 + critical / batch
    (McCandlish et al., "An Empirical Model of Large-Batch Training", equation 2.11). Far below the `critical` batch,
    twice the batch halves the iterations; far above it, a larger batch saves none. inf: doubling always halves them.
    Raises ConfigError below 0."""

    critical: float

    def __post_init__(self) -> None:
        if not self.critical > 0:
            raise ConfigError(f"a critical batch of {self.critical}", "give more than 0 samples")

    def iterations(self, batch: int) -> float:
        """Iterations at a batch, in one arbitrary unit for all batches."""
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


def scaled(query: PlanQuery, gpus: int, efficiency: SampleEfficiency) -> list[Scaled]:
    """The paper's strategies that are possible on a cluster of `gpus`; the query's batch is the reference. Weak: as
    many samples a GPU. Strong: as many in all. Batch-optimal: the batch with the least time to accuracy, from one
    sample a GPU to weak scaling's (by powers of two). Burst: strong scaling under the query's algorithm and limit,
    over those of its counts that the cluster has."""
    reference, graph = query.batch, query.graph
    one = replace(query, gpus=gpus, counts=(gpus,), batch=reference * gpus)
    base = replace(query, gpus=1, counts=(1,)).data_parallel(1).seconds * efficiency.iterations(reference)

    def scaled_from(strategy: str, batch: int, seconds: float) -> Scaled:
        return Scaled(strategy, gpus, batch, seconds, base / (seconds * efficiency.iterations(batch)))

    def parallel(strategy: str, batch: int) -> Scaled:
        return scaled_from(strategy, batch, replace(one, batch=batch).data_parallel(gpus).seconds)

    smallest = _smallest(graph)
    found = [parallel("weak", reference * gpus)]
    if reference % gpus == 0 and reference // gpus >= smallest:
        found.append(parallel("strong", reference))
    tried = [
        parallel("batch-optimal", batch) for batch in _batches(gpus, reference * gpus) if batch // gpus >= smallest
    ]
    found.append(max(tried, key=lambda each: each.speedup))
    counts = tuple([g for g in query.counts if g <= gpus and reference // g >= smallest])
    burst = replace(query, gpus=gpus, counts=counts).answer() if counts else None
    if burst is not None:
        found.append(scaled_from("burst", reference, burst.seconds))
    return found


def _smallest(graph: LayerGraph) -> int:
    return max(layer.times[0].samples for layer in graph.layers)


def _batches(least: int, most: int) -> Sequence[int]:
    found = [least]
    while found[-1] * 2 <= most:
        found.append(found[-1] * 2)
    if found[-1] != most:
        found.append(most)
    return found
