"""Costs of a layer on a number of GPUs: comp, comm and sync of DeepPool's section 4.1. Single values serve the
published search, tables ours."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite, lcm
from operator import add, itemgetter
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from gpumux.errors import ConfigError
from gpumux.plan.graph import LayerGraph
from gpumux.plan.layers import Timing

# ---- Moving samples and gradients between GPUs: DeepPool's network model (section 4.1), per-GPU bandwidth and a
# propagation delay, full bisection.


class SumCost(NamedTuple):
    """What an all-reduce among so many GPUs takes: `delay` seconds, and `a_byte` seconds for each byte of gradients."""

    gpus: int
    delay: float
    a_byte: float


@dataclass(frozen=True, slots=True)
class Network:
    """`bandwidth`: bytes a second that one GPU sends and, at the same time, receives. `latency`: seconds until the
    first byte arrives, software included. `sums`: measured all-reduces, by rising number of GPUs; without any, the cost
    of an all-reduce follows from bandwidth and latency. Raises ConfigError for invalid values."""

    name: str
    bandwidth: float
    latency: float
    source: str = "given"
    sums: tuple[SumCost, ...] = ()

    def __post_init__(self) -> None:
        if not (isfinite(self.bandwidth) and self.bandwidth > 0):
            raise ConfigError(f"a network of {self.bandwidth} bytes/s", "give more than 0")
        if not (isfinite(self.latency) and self.latency >= 0):
            raise ConfigError(f"a network latency of {self.latency} s", "give 0 or more")
        sizes = [each.gpus for each in self.sums]
        if sizes != sorted(set(sizes)) or any(gpus < 2 for gpus in sizes):
            raise ConfigError(f"all-reduces among {sizes} GPUs", "give each number once, rising, from 2 up")
        if not all(isfinite(term) and term >= 0 for each in self.sums for term in each[1:]):
            raise ConfigError("an all-reduce that takes less than no time", "give seconds of 0 or more")

    def seconds(self, nbytes: float) -> float:
        """One transfer in which the busiest GPU sends or receives `nbytes`; 0 for 0 bytes."""
        return nbytes / self.bandwidth + self.latency if nbytes else 0.0

    def all_reduce(self, nbytes: float, gpus: int) -> float:
        """Sum `nbytes` of gradients over `gpus`: as measured, or by reduce-scatter and all-gather, each of which moves
        (gpus - 1)/gpus of them through every GPU. 0 on one GPU. Raises ConfigError for more GPUs than were measured."""
        if not self.sums:
            return 2 * self.seconds((gpus - 1) / gpus * nbytes)
        if gpus == 1 or not nbytes:
            return 0.0
        _, delay, a_byte = self.sum_cost(gpus)
        return a_byte * nbytes + delay

    def sum_cost(self, gpus: int) -> SumCost:
        """The terms of an all-reduce among 2 or more GPUs. Between two measured numbers of GPUs they lie on a straight
        line. Raises ConfigError outside of what was measured."""
        if not self.sums:
            return SumCost(gpus, 2 * self.latency, 2 * (gpus - 1) / gpus / self.bandwidth)
        place = bisect_left(self.sums, (gpus,))
        if place < len(self.sums) and self.sums[place].gpus == gpus:
            return self.sums[place]
        if place in (0, len(self.sums)):
            raise ConfigError(
                f"network {self.name} was measured among {', '.join(str(each.gpus) for each in self.sums)} ranks, and"
                f" this is about {gpus} GPUs",
                f"measure it there (gpumux plan network --ranks {gpus}), plan for {self.sums[-1].gpus} or fewer, or"
                " give --bandwidth and --latency",
            )
        low, high = self.sums[place - 1], self.sums[place]
        share = (gpus - low.gpus) / (high.gpus - low.gpus)
        return SumCost(
            gpus, low.delay + share * (high.delay - low.delay), low.a_byte + share * (high.a_byte - low.a_byte)
        )


def moved_share(source: int, target: int) -> float:
    """The part of a batch that the busiest GPU sends or receives when samples spread evenly over `source` GPUs are
    spread evenly over `target`, and the smaller set is part of the larger. A GPU in both sets keeps what it can, a new
    one receives its whole share, and one that leaves sends all it had."""
    few, many = min(source, target), max(source, target)
    return max(1 / few - 1 / many, 1 / many) if few != many else 0.0


def away_share(source: int, target: int) -> float:
    """As `moved_share`, for disjoint sets of GPUs: everything moves."""
    return 1 / min(source, target)


PRESETS = {
    network.name: network
    for network in (
        Network("nvswitch", 300e9, 10e-6, "NVIDIA A100: NVLink 600 GB/s both ways together; the latency is a guess"),
        Network("200g", 25e9, 10e-6, "200 Gb/s a GPU (ConnectX-6); the latency is a guess"),
        Network("25g", 3.125e9, 20e-6, "25 Gb/s a GPU; the latency is a guess"),
    )
}


def preset(name: str) -> Network:
    """The preset called `name`. Raises ConfigError for another."""
    if name not in PRESETS:
        raise ConfigError(
            f"no network is called {name!r}",
            f"use one of {', '.join(PRESETS)}, a file that `gpumux plan network` wrote, or --bandwidth and --latency",
        )
    return PRESETS[name]


# ---- The costs of layers.


Array = npt.NDArray[np.float64]

TOLERANCE = 1e-9  # relative: how far rounding may carry a layer over the amplification limit


class Costs(Protocol):
    """Costs in seconds. Layers are indices, `g` and `h` numbers of GPUs out of `counts` (rising). comm(i, g, g) and
    sync(i, 1) are 0. moved(i, g, h) >= comm(i, g, h)."""

    @property
    def counts(self) -> Sequence[int]: ...

    def comp(self, layer: int, g: int) -> float:
        """Forward and backward of the layer's part of the batch; also for g = 1 if `counts` lack it."""

    def sync(self, layer: int, g: int) -> float:
        """Time by which summing the layer's gradients over g GPUs delays the step."""

    def comm(self, layer: int, g: int, h: int) -> float:
        """Moving the layer's output from g GPUs to h, and its gradient back; one set is part of the other."""

    def moved(self, layer: int, g: int, h: int) -> float:
        """As `comm`, if the two sets are disjoint."""

    def tables(self) -> Tables:
        """All costs as arrays."""


@dataclass(frozen=True)
class Tables:
    """`work` [layers, counts]: comp + sync. `single` [layers]: comp on one GPU. A layer's comm and moved [2, counts,
    counts] are `output[layer] * shares + delay`, or 0 if its share of the output is 0. `given` [layers, 2, counts,
    counts] replaces both if it is not None."""

    counts: tuple[int, ...]
    work: Array
    single: Array
    output: Array
    shares: Array
    delay: float
    given: Array | None = None

    def comm(self, layers: slice | Sequence[int]) -> Array:
        """comm of these layers: [layers, counts, counts], from row to column."""
        if self.given is not None:
            return self.given[layers, 0]
        return self._seconds(self.output[layers][:, None, None] * self.shares[0])

    def transfers(self, layers: Sequence[int]) -> Array:
        """comm and moved of these layers: [layers, 2, counts, counts]."""
        if self.given is not None:
            return self.given[layers]
        return self._seconds(self.output[layers][:, None, None, None] * self.shares)

    def _seconds(self, sent: Array) -> Array:
        return sent + self.delay * (sent > 0)  # `sent` is in seconds already


@dataclass(frozen=True)
class ProfiledCosts:
    """A graph's layers under a network. `batch`: samples of one iteration over all GPUs, which every count must divide.
    `overlap`: the part of a layer's backward time that hides its gradients' sync, from 0, as in the paper, to 1: a
    layer's gradients are sent while its own (or as long a) backward pass still runs. Raises ConfigError."""

    graph: LayerGraph
    batch: int
    counts: tuple[int, ...]
    network: Network
    overlap: float = 0.0

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ConfigError(f"a global batch of {self.batch}", "give 1 or more")
        if not self.counts or list(self.counts) != sorted(set(self.counts)) or self.counts[0] < 1:
            raise ConfigError(f"GPU counts {self.counts}", "give whole numbers from 1 up, rising")
        if not 0.0 <= self.overlap <= 1.0:
            raise ConfigError(f"an overlap of {self.overlap}", "give a share from 0 to 1")
        wrong = [count for count in self.counts if self.batch % count]
        if wrong:
            raise ConfigError(
                f"a global batch of {self.batch} does not divide among {wrong[0]} GPUs",
                _divisors_remedy(self.batch, self.counts),
            )
        if self.counts[-1] > 1:
            self.network.sum_cost(self.counts[-1])

    def comp(self, layer: int, g: int) -> float:
        return self.graph.layers[layer].at(self.batch // g).seconds

    def sync(self, layer: int, g: int) -> float:
        profile = self.graph.layers[layer]
        seconds = self.network.all_reduce(profile.parameter_bytes, g)
        if self.overlap:
            seconds = max(0.0, seconds - self.overlap * profile.at(self.batch // g).backward)
        return seconds

    def comm(self, layer: int, g: int, h: int) -> float:
        nbytes = self.batch * self.graph.layers[layer].output_bytes * moved_share(g, h)
        return 2 * self.network.seconds(nbytes)

    def moved(self, layer: int, g: int, h: int) -> float:
        nbytes = self.batch * self.graph.layers[layer].output_bytes * away_share(g, h)
        return 2 * self.network.seconds(nbytes)

    def columns(self) -> tuple[list[list[float]], list[float]]:
        """comp + sync of every layer on each count, [counts, layers]; and comp on one GPU, [layers]. Equal to `comp`
        and `sync` except for rounding, and faster: computed for all layers at once."""
        times = [layer.times for layer in self.graph.layers]
        sizes = [layer.parameter_bytes for layer in self.graph.layers]
        overlap = self.overlap
        found = []
        for g in self.counts:
            forward, backward = self._timings(times, self.batch // g)
            if g == 1:
                found.append(list(map(add, forward, backward)))
                continue
            _, delay, a_byte = self.network.sum_cost(g)
            if not overlap:
                found.append([ahead + back + (a_byte * size + delay if size else 0.0)
                              for ahead, back, size in zip(forward, backward, sizes, strict=True)])  # fmt: skip
            else:
                found.append([ahead + back + (max(0.0, a_byte * size + delay - overlap * back) if size else 0.0)
                              for ahead, back, size in zip(forward, backward, sizes, strict=True)])  # fmt: skip
        if self.counts[0] == 1:
            return found, found[0]
        return found, list(map(add, *self._timings(times, self.batch)))

    def _timings(self, times: Sequence[tuple[Timing, ...]], samples: int) -> tuple[Sequence[float], Sequence[float]]:
        """Seconds of every layer's forward and backward pass for so many samples (see LayerProfile.at). Most layers
        were timed at the same batches, including this one: the position found in the first layer is tried for all."""
        place = bisect_left(times[0], (samples,))
        largest = place == len(times[0])  # or more
        try:
            found, forward, backward = zip(*map(itemgetter(-1 if largest else place), times), strict=True)
        except IndexError:
            found = ()
        if found.count(times[0][-1].samples if largest else samples) < len(times):
            _, forward, backward = zip(*[layer.at(samples) for layer in self.graph.layers], strict=True)
        elif largest:
            share = samples / found[0]
            return [each * share for each in forward], [each * share for each in backward]
        return forward, backward

    def tables(self) -> Tables:
        work, single = self.columns()
        return Tables(
            self.counts,
            np.array(work).T,
            np.array(single),
            np.array([float(layer.output_bytes) for layer in self.graph.layers]) * self.scale,
            _shares(self.counts),
            2 * self.network.latency,
        )

    @property
    def scale(self) -> float:
        """Seconds to move all samples' outputs there and the gradients back, for each of a layer's `output_bytes`."""
        return 2 * self.batch / self.network.bandwidth


@lru_cache(maxsize=64)
def _shares(counts: tuple[int, ...]) -> Array:
    """moved_share and away_share from each count to each, [2, counts, counts]."""
    inverse = 1 / np.array(counts, dtype=np.float64)
    away = np.maximum.outer(inverse, inverse)
    least = np.minimum.outer(inverse, inverse)
    moved = np.maximum(away - least, least)
    moved[away == least] = 0.0
    return np.stack((moved, away))


def powers_of_two(gpus: int) -> tuple[int, ...]:
    """1, 2, 4 ... up to `gpus`. Raises ConfigError for less than 1."""
    if gpus < 1:
        raise ConfigError(f"{gpus} GPUs", "give 1 or more")
    return tuple(1 << i for i in range(gpus.bit_length()))


def divisors(batch: int, gpus: int) -> tuple[int, ...]:
    """Every number of GPUs up to `gpus` among which the batch divides."""
    return tuple(count for count in range(1, min(batch, gpus) + 1) if batch % count == 0)


def _divisors_remedy(batch: int, counts: Sequence[int]) -> str:
    fitting = ",".join(map(str, divisors(batch, counts[-1])))
    return f"give a batch that is a multiple of {lcm(*counts)}, or --counts {fitting}"


@dataclass(frozen=True)
class GivenCosts:
    """Costs measured layer by layer, as arrays: `compute` and `gradients` [layers, counts], `single` [layers],
    `between` and `apart` (comm and moved) [layers, counts, counts]. Raises ConfigError unless what Costs promises
    holds."""

    counts: tuple[int, ...]
    compute: Array
    gradients: Array
    single: Array
    between: Array
    apart: Array

    def __post_init__(self) -> None:
        layers, n = len(self.single), len(self.counts)
        shapes = [(layers, n), (layers, n), (layers, n, n), (layers, n, n)]
        arrays = [self.compute, self.gradients, self.between, self.apart]
        if [each.shape for each in arrays] != shapes or any((each < 0).any() for each in (*arrays, self.single)):
            raise ConfigError("costs of the wrong shape, or below 0", "give one for each layer and number of GPUs")
        if (self.between.diagonal(axis1=1, axis2=2) != 0).any() or (self.apart < self.between).any():
            raise ConfigError(
                "a transfer to the same GPUs that takes time, or one to other GPUs that takes less than to some of the"
                " same",
                "comm(i, g, g) is 0, and moved is at least comm",
            )
        if self.counts[0] == 1 and ((self.gradients[:, 0] != 0).any() or (self.compute[:, 0] != self.single).any()):
            raise ConfigError("one GPU alone that syncs, or differs from itself", "sync(i, 1) is 0, comp(i, 1) is one")

    def comp(self, layer: int, g: int) -> float:
        return float(self.single[layer] if g == 1 else self.compute[layer, self.counts.index(g)])

    def sync(self, layer: int, g: int) -> float:
        return float(self.gradients[layer, self.counts.index(g)])

    def comm(self, layer: int, g: int, h: int) -> float:
        return float(self.between[layer, self.counts.index(g), self.counts.index(h)])

    def moved(self, layer: int, g: int, h: int) -> float:
        return float(self.apart[layer, self.counts.index(g), self.counts.index(h)])

    def tables(self) -> Tables:
        none = np.zeros(0)
        work = self.compute + self.gradients
        return Tables(self.counts, work, self.single, none, none, 0.0, np.stack((self.between, self.apart), 1))
