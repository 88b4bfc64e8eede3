"""The problem that a plan solves, as one value that every figure and curve varies, so that no option is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from gpumux.errors import ConfigError
from gpumux.plan import deeppool, optimal
from gpumux.plan.costs import Costs, Network, ProfiledCosts, divisors
from gpumux.plan.graph import LayerGraph
from gpumux.plan.plan import BurstPlan, Placement, evaluate
from gpumux.program.saved_plan import PlannedLayer, PlanNetwork, SavedPlan, SmallerPlan

ALGORITHMS: dict[str, Callable[[LayerGraph, Costs, float, int], Placement | None]] = {
    "optimal": optimal.find,
    "deeppool": deeppool.search,
}


@dataclass(frozen=True)
class PlanQuery:
    """Asks for the fastest plan for `batch` samples of a graph's model on up to `gpus` GPUs, each layer on one of
    `counts`, under an amplification limit, found by `algorithm`. overlap: see ProfiledCosts. Raises ConfigError for
    counts that exceed the cluster or don't divide the batch, for batches smaller than any that was timed, and for
    unknown algorithms."""

    graph: LayerGraph
    batch: int
    gpus: int
    counts: tuple[int, ...]
    network: Network
    limit: float = inf
    overlap: float = 0.0
    algorithm: str = "optimal"

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise ConfigError(f"no algorithm is called {self.algorithm!r}", f"use one of {', '.join(ALGORITHMS)}")
        if self.counts and max(self.counts) > self.gpus:
            raise ConfigError(f"a count of {max(self.counts)}", f"the cluster has {self.gpus} GPUs")
        self._check_times(self.costs.counts[-1])

    def _check_times(self, most: int) -> None:
        """Check that every layer was timed at batches as small as the largest count leaves."""
        smallest, name = max((layer.times[0].samples, layer.name) for layer in self.graph.layers)
        if self.batch // most >= smallest:
            return
        fitting = ",".join(str(count) for count in divisors(self.batch, most) if self.batch // count >= smallest)
        raise ConfigError(
            f"a global batch of {self.batch} on {most} GPUs is {self.batch // most} samples each, and layer {name!r}"
            f" was timed at {smallest} and more",
            f"time batches of {self.batch // most}, too (--batches of `plan profile`, one more --profile of a job),"
            f" give a batch of {smallest * most}" + (f", or --counts {fitting}" if fitting else ""),
        )

    @cached_property
    def costs(self) -> ProfiledCosts:
        return ProfiledCosts(self.graph, self.batch, self.counts, self.network, self.overlap)

    def answer(self) -> BurstPlan | None:
        """The plan; None if none keeps the limit, which is only possible with counts without 1."""
        placement = ALGORITHMS[self.algorithm](self.graph, self.costs, self.limit, self.gpus)
        return None if placement is None else self.evaluate(placement)

    def plan(self) -> BurstPlan:
        """The plan. Raises ConfigError if there is none."""
        found = self.answer()
        if found is None:
            raise optimal.no_plan(self.counts)
        return found

    def data_parallel(self, count: int) -> BurstPlan:
        """Every layer on `count` GPUs of the cluster. Raises ConfigError if they don't divide the batch."""
        costs = ProfiledCosts(self.graph, self.batch, (count,), self.network, self.overlap)
        placement = Placement((count,) * len(self.graph.layers))
        return evaluate(self.graph, costs, placement, gpus=self.gpus, batch=self.batch, algorithm="data-parallel")

    def evaluate(self, placement: Placement) -> BurstPlan:
        return evaluate(
            self.graph, self.costs, placement, gpus=self.gpus, batch=self.batch, limit=self.limit,
            algorithm=self.algorithm
        )  # fmt: skip

    def saved(self, plan: BurstPlan) -> SavedPlan:
        """One of this query's plans, its model data parallel on each count, and the plans for as many GPUs as each
        smaller count, as `gpumux plan burst --save` writes them."""
        layers = []
        for layer, g in zip(self.graph.layers, plan.placement.gpus, strict=True):
            timing = layer.at(self.batch // g)
            forward = timing.forward / timing.seconds if timing.seconds else 0.0
            layers.append(PlannedLayer(layer.name, layer.kind, layer.output_bytes, layer.parameter_bytes, forward))
        link = self.network
        return SavedPlan(
            model=self.graph.name,
            device=self.graph.device,
            algorithm=plan.algorithm,
            gpus=self.gpus,
            batch=self.batch,
            limit=plan.limit,
            network=PlanNetwork(link.name, link.bandwidth, link.latency),
            seconds=plan.seconds,
            single_seconds=plan.single_seconds,
            layers=tuple(layers),
            rows=plan.rows,
            data_parallel=tuple([self.data_parallel(count).rows for count in self.counts]),
            fewer=tuple([SmallerPlan(count, found.rows) for count, found in self._on_fewer()]),
        )

    def _on_fewer(self) -> Iterator[tuple[int, BurstPlan]]:
        for count in self.counts:
            if 1 < count < self.gpus:
                smaller = replace(self, gpus=count, counts=tuple([each for each in self.counts if each <= count]))
                found = smaller.answer()
                if found is not None:
                    yield count, found
