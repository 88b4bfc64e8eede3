"""What a layer costs on so many GPUs: comp, comm and sync of DeepPool's section 4.1, one at a time for the published search
and as tables for ours."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import lcm
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from gpumux.errors import ConfigError
from gpumux.plan.graph import Graph
from gpumux.plan.network import Network, away_share, moved_share

Array = npt.NDArray[np.float64]

TOLERANCE = 1e-9  # relative: by how much rounding may carry a layer over the amplification limit


class Costs(Protocol):
    """Seconds, all of them. Layers are indices, `g` and `h` numbers of GPUs out of `counts` (rising). Zero on the same
    GPUs: comm(i, g, g); sync(i, 1). And moved(i, g, h) >= comm(i, g, h)."""

    @property
    def counts(self) -> Sequence[int]: ...

    def comp(self, layer: int, g: int) -> float:
        """Forward and backward of the layer's part of the batch; also for g = 1 where counts do not have it."""

    def sync(self, layer: int, g: int) -> float:
        """Summing the gradients of the layer's parameters over g GPUs, as far as it delays the step."""

    def comm(self, layer: int, g: int, h: int) -> float:
        """Moving the layer's output from g GPUs to h, and its gradient back, one set being part of the other."""

    def moved(self, layer: int, g: int, h: int) -> float:
        """The same where the h GPUs are others than the g."""

    def tables(self) -> Tables:
        """All of it as arrays."""


@dataclass(frozen=True)
class Tables:
    """`work` [layers, counts]: comp + sync. `single` [layers]: comp on one GPU. A layer's comm [counts, counts] is
    `output[layer] * share + delay` where `share` is not 0, and moved the same with `away`; `given` and `given_away`
    [layers, counts, counts] replace both where they are not None."""

    counts: tuple[int, ...]
    work: Array
    single: Array
    output: Array
    share: Array
    away: Array
    delay: float
    given: Array | None = None
    given_away: Array | None = None

    def comm(self, layers: slice | Sequence[int]) -> Array:
        """comm of these layers: [layers, counts, counts], from row to column."""
        if self.given is not None:
            return self.given[layers]
        return self._seconds(self.output[layers], self.share)

    def transfers(self, layers: Sequence[int]) -> Array:
        """comm and moved of these layers: [layers, 2, counts, counts]."""
        if self.given is not None and self.given_away is not None:
            return np.stack((self.given[layers], self.given_away[layers]), 1)
        return np.stack((self.comm(layers), self._seconds(self.output[layers], self.away)), 1)

    def _seconds(self, output: Array, share: Array) -> Array:
        nbytes = output[:, None, None] * share
        return nbytes + self.delay * (nbytes > 0)  # scaled to seconds already: a comparison, not a unit


@dataclass(frozen=True)
class ProfiledCosts:
    """A graph's layers under a network. `batch`: samples of one iteration over all GPUs, which every count must divide.
    `overlap`: the part of a layer's backward time that hides its gradients' sync, 0 as in the paper, 1 at most: a
    layer's gradients are sent while its own (or as long a) backward pass still runs. Raises ConfigError."""

    graph: Graph
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

    def tables(self) -> Tables:
        pattern = _pattern(self.counts)
        both = self._both()
        return Tables(
            self.counts,
            both[:, :-1],
            both[:, -1],
            self.graph.output_bytes * (2 * self.batch / self.network.bandwidth),
            pattern.share,
            pattern.away,
            2 * self.network.latency,
        )

    def _both(self) -> Array:
        """[layers, counts + 1]: comp + sync on each count, then comp on one GPU."""
        timed = self.graph.timed
        if timed is None:
            layers = range(len(self.graph.layers))
            rows = [[*(self.comp(i, g) + self.sync(i, g) for g in self.counts), self.comp(i, 1)] for i in layers]
            return np.array(rows)
        weights = _weights(timed.batches, self.batch, self.counts, self.network, self.overlap)
        if weights is None:
            self.comp(0, self.counts[-1])  # says what is wrong
        assert weights is not None
        always, exposed = weights
        both: Array = timed.linear @ always
        if exposed is not None:
            both += np.maximum(0.0, timed.linear @ exposed)
        return both


class _Pattern(NamedTuple):
    """`share` and `away` of Tables."""

    share: Array
    away: Array


@lru_cache(maxsize=64)
def _pattern(counts: tuple[int, ...]) -> _Pattern:
    each = np.array(counts, dtype=np.float64)
    few, many = np.minimum.outer(each, each), np.maximum.outer(each, each)
    share = np.maximum(1 / few - 1 / many, 1 / many)
    share[few == many] = 0.0
    return _Pattern(share, 1 / few)


@lru_cache(maxsize=64)
def _weights(
    batches: tuple[int, ...], batch: int, counts: tuple[int, ...], network: Network, overlap: float
) -> tuple[Array, Array | None] | None:
    """What makes up comp + sync on each count, and comp on one GPU, of what Timed.linear has of a layer: a sum; and where
    syncs overlap, a second one that counts where it is above 0. None where a count's part of `batch` is below all
    batches that were timed."""
    k = len(batches)
    both, sync = np.zeros((2, 2 * k + 2, len(counts) + 1))
    for column, count in enumerate((*counts, 1)):
        samples = batch // count
        place = bisect_left(batches, samples)
        if place == k:
            both[place - 1, column] = samples / batches[-1]
        elif batches[place] == samples:
            both[place, column] = 1.0
        elif place == 0:
            return None
        else:
            share = (samples - batches[place - 1]) / (batches[place] - batches[place - 1])
            both[place - 1 : place + 1, column] = 1.0 - share, share
        if count > 1:
            sync[-2:, column] = 2 * (count - 1) / count / network.bandwidth, 2 * network.latency
            sync[k : 2 * k, column] = -overlap * both[:k, column]
    return (both, sync) if overlap else (both + sync, None)


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
    """Costs measured layer by layer, as arrays: `compute` and `gradients` [layers, counts], `single` [layers], `between`
    and `apart` (comm and moved) [layers, counts, counts]. Raises ConfigError unless what Costs promises holds."""

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
                "a transfer to the same GPUs that takes time, or one to other GPUs that takes less than to some of the same",
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
        return Tables(self.counts, work, self.single, none, none, none, 0.0, self.between, self.apart)
