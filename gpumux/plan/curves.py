"""DeepPool's figures for any model: what GPUs, networks and amplification limits are worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from gpumux.plan.baselines import SampleEfficiency, Scaled, scaled
from gpumux.plan.plan import Plan
from gpumux.plan.question import Question

LIMITS = (1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, inf)
BANDWIDTHS = tuple(gbps * 1e9 / 8 for gbps in (10, 25, 50, 100, 200, 400, 1000, 2400, 4800))


def over_limits(question: Question, limits: Sequence[float] = LIMITS) -> list[tuple[float, Plan | None]]:
    """Each amplification limit with its plan, None where there is none: iteration time against GPU time."""
    return [(limit, replace(question, limit=limit).answer()) for limit in limits]


@dataclass(frozen=True)
class OperatingPoint:
    """A foreground job and background jobs on one cluster (figure 10). `speedup`: the foreground's over one GPU with the
    same batch; `throughput`: samples a second of all, each background job on one GPU as fast as alone, so it is what sharing
    could give at best."""

    name: str
    speedup: float
    throughput: float


def background_batch(question: Question) -> int:
    """Samples of one iteration of a background job: a GPU's part of the foreground's, but no fewer than were timed."""
    timed = max(layer.times[0].samples for layer in question.graph.layers)
    return max(timed, question.batch // question.gpus)


def operating_points(question: Question, plans: Sequence[Plan]) -> list[OperatingPoint]:
    """The plans with all idle GPU time given to background jobs; then the cluster parted into data-parallel foreground
    GPUs and background ones, for each count."""
    batch, gpus, share = question.batch, question.gpus, background_batch(question)
    alone = replace(question, batch=share, gpus=1, counts=(1,)).data_parallel(1)
    background = share / alone.seconds  # samples a second of one GPU
    found = []
    for each in plans:
        idle = each.idle / each.seconds  # GPUs' worth of it
        found.append(OperatingPoint(f"limit {each.limit:g}", each.speedup, batch / each.seconds + idle * background))
    for count in question.counts:
        foreground = question.data_parallel(count)
        total = batch / foreground.seconds + (gpus - count) * background
        found.append(OperatingPoint(f"partition {count}", foreground.speedup, total))
    return found


def over_sizes(question: Question, efficiency: SampleEfficiency) -> list[Scaled]:
    """Every strategy on a cluster of each of the question's counts (figures 1 and 2)."""
    return [each for gpus in question.counts for each in scaled(question, gpus, efficiency)]


def over_networks(
    question: Question, efficiency: SampleEfficiency, bandwidths: Sequence[float] = BANDWIDTHS
) -> list[tuple[float, Scaled]]:
    """Every strategy on the largest count at every bandwidth in bytes a second, the network's latency as it is (figure 3)."""
    return [
        (bandwidth, each)
        for bandwidth in bandwidths
        for each in scaled(
            replace(question, network=replace(question.network, bandwidth=bandwidth)), question.counts[-1], efficiency
        )
    ]


def layer_speedups(question: Question) -> list[list[float]]:
    """comp(i, 1) / comp(i, g) of each layer and count, nothing but computation (figure 5). A layer without any has 1."""
    found = []
    for layer in question.graph.layers:
        one = layer.at(question.batch).seconds
        each = [layer.at(question.batch // count).seconds for count in question.counts]
        found.append([one / seconds if seconds else 1.0 for seconds in each])
    return found
