"""What burst-parallel plans are measured against: data parallelism, and the ways to scale it of DeepPool's section
2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite

from gpumux.errors import ConfigError
from gpumux.plan.graph import Graph
from gpumux.plan.question import Question


@dataclass(frozen=True)
class SampleEfficiency:
    """How many iterations a wanted accuracy takes at a global batch, over what it takes at a very large one:
    1 + critical / batch (McCandlish et al., "An Empirical Model of Large-Batch Training", equation 2.11). Far below the
    `critical` batch, twice the batch halves the iterations; far above it, a larger batch saves none. inf: it always
    halves them. Raises ConfigError below 0."""

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


def scaled(question: Question, gpus: int, efficiency: SampleEfficiency) -> list[Scaled]:
    """The paper's strategies on a cluster of `gpus`, those that are possible there; the question's batch is the
    reference. Weak: as many samples a GPU. Strong: as many in all. Batch-optimal: the batch, between one sample a GPU
    and weak scaling's (by powers of two), that is quickest to accuracy. Burst: strong scaling under the question's
    algorithm and limit, over those of its counts that the cluster has."""
    reference, graph = question.batch, question.graph
    one = replace(question, gpus=gpus, counts=(gpus,), batch=reference * gpus)
    base = replace(question, gpus=1, counts=(1,)).data_parallel(1).seconds * efficiency.iterations(reference)

    def told(strategy: str, batch: int, seconds: float) -> Scaled:
        return Scaled(strategy, gpus, batch, seconds, base / (seconds * efficiency.iterations(batch)))

    def parallel(strategy: str, batch: int) -> Scaled:
        return told(strategy, batch, replace(one, batch=batch).data_parallel(gpus).seconds)

    smallest = _smallest(graph)
    found = [parallel("weak", reference * gpus)]
    if reference % gpus == 0 and reference // gpus >= smallest:
        found.append(parallel("strong", reference))
    tried = [
        parallel("batch-optimal", batch) for batch in _batches(gpus, reference * gpus) if batch // gpus >= smallest
    ]
    found.append(max(tried, key=lambda each: each.speedup))
    counts = tuple([g for g in question.counts if g <= gpus and reference // g >= smallest])
    burst = replace(question, gpus=gpus, counts=counts).answer() if counts else None
    if burst is not None:
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
