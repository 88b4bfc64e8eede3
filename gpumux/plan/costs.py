"""What a layer costs on so many GPUs: comp, comm and sync of DeepPool's section 4.1, one at a time for the published search
and as tables for ours."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
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
                _divisors_remedy(self.batch, self.counts[-1]),
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
        samples = [self.batch // count for count in self.counts]
        nbytes = self.graph.parameter_bytes[:, None] * pattern.others
        sync = nbytes * (2 / self.network.bandwidth)
        if self.network.latency:
            sync += (nbytes > 0) * (2 * self.network.latency)
        if self.overlap:
            sync = np.maximum(0.0, sync - self.overlap * self._times(samples, backward=True))
        comp = self._times((*samples, self.batch), backward=False)
        return Tables(
            counts=self.counts,
            work=comp[:, :-1] + sync,
            single=comp[:, -1],
            output=self.graph.output_bytes * (2 * self.batch / self.network.bandwidth),
            share=pattern.share,
            away=pattern.away,
            delay=2 * self.network.latency,
        )

    def _times(self, samples: Sequence[int], *, backward: bool) -> Array:
        """Seconds [layers, samples] of the backward pass, or of both, as LayerProfile.at has them."""
        timed = self.graph.timed
        if timed is None:
            timings = [[layer.at(each) for each in samples] for layer in self.graph.layers]
            return np.array([[t.backward if backward else t.seconds for t in row] for row in timings])
        weights = _weights(timed.batches, tuple(samples))
        if weights is None:
            self.graph.layers[0].at(min(samples))  # says what is wrong
        assert weights is not None
        found: Array = (timed.backward if backward else timed.both) @ weights
        return found


class _Pattern(NamedTuple):
    """What of a network's costs depends on the counts alone: `others` [counts], the part of the gradients that an
    all-reduce moves through a GPU, twice; `share` and `away` of Tables."""

    others: Array
    share: Array
    away: Array


@lru_cache(maxsize=64)
def _pattern(counts: tuple[int, ...]) -> _Pattern:
    each = np.array(counts, dtype=np.float64)
    few, many = np.minimum.outer(each, each), np.maximum.outer(each, each)
    share = np.maximum(1 / few - 1 / many, 1 / many)
    share[few == many] = 0.0
    return _Pattern((each - 1) / each, share, 1 / few)


@lru_cache(maxsize=64)
def _weights(batches: tuple[int, ...], samples: tuple[int, ...]) -> Array | None:
    """[batches, samples]: how much of each timed batch makes up one of `samples` (see LayerProfile.at). None where one is
    below all batches."""
    found = np.zeros((len(batches), len(samples)))
    for column, each in enumerate(samples):
        place = bisect_left(batches, each)
        if place == len(batches):
            found[-1, column] = each / batches[-1]
        elif batches[place] == each:
            found[place, column] = 1.0
        elif place == 0:
            return None
        else:
            share = (each - batches[place - 1]) / (batches[place] - batches[place - 1])
            found[place - 1 : place + 1, column] = 1.0 - share, share
    return found


def powers_of_two(gpus: int) -> tuple[int, ...]:
    """1, 2, 4 ... up to `gpus`. Raises ConfigError for less than 1."""
    if gpus < 1:
        raise ConfigError(f"{gpus} GPUs", "give 1 or more")
    return tuple(1 << i for i in range(gpus.bit_length()))


def divisors(batch: int, gpus: int) -> tuple[int, ...]:
    """Every number of GPUs up to `gpus` among which the batch divides."""
    return tuple(count for count in range(1, min(batch, gpus) + 1) if batch % count == 0)


def _divisors_remedy(batch: int, gpus: int) -> str:
    fitting = ",".join(map(str, divisors(batch, gpus)))
    return f"give a batch that is a multiple of {gpus}, or --counts {fitting}"


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
