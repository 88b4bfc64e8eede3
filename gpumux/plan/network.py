"""What moving samples and gradients between GPUs takes: DeepPool's network model (section 4.1), per-GPU bandwidth and a
propagation delay, full bisection."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from gpumux.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Network:
    """`bandwidth`: bytes a second that one GPU sends and, at the same time, receives. `latency`: seconds until the first
    byte arrives, software included. Raises ConfigError for values that make no sense."""

    name: str
    bandwidth: float
    latency: float
    source: str = "given"

    def __post_init__(self) -> None:
        if not (isfinite(self.bandwidth) and self.bandwidth > 0):
            raise ConfigError(f"a network of {self.bandwidth} bytes/s", "give more than 0")
        if not (isfinite(self.latency) and self.latency >= 0):
            raise ConfigError(f"a network latency of {self.latency} s", "give 0 or more")

    def seconds(self, nbytes: float) -> float:
        """One transfer in which the busiest GPU sends or receives `nbytes`; nothing takes no time."""
        return nbytes / self.bandwidth + self.latency if nbytes else 0.0

    def all_reduce(self, nbytes: float, gpus: int) -> float:
        """Sum `nbytes` of gradients over `gpus`: reduce-scatter and all-gather, each of which moves (gpus - 1)/gpus of
        them through every GPU. Nothing on one GPU."""
        return 2 * self.seconds((gpus - 1) / gpus * nbytes)


def moved_share(source: int, target: int) -> float:
    """The part of a batch that the busiest GPU sends or receives when samples that lie evenly on `source` GPUs get spread
    evenly over `target`, where the smaller set is part of the larger: a GPU of both keeps what it can, one that is new
    receives its whole share, one that leaves sends all it had."""
    few, many = min(source, target), max(source, target)
    return max(1 / few - 1 / many, 1 / many) if few != many else 0.0


def away_share(source: int, target: int) -> float:
    """The same where no GPU is in both sets: everything moves."""
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
            f"no network is called {name!r}", f"use one of {', '.join(PRESETS)}, or give --bandwidth and --latency"
        )
    return PRESETS[name]
