"""A step's kernels cut into pieces, by what each takes alone on one GPU."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from gpumux.device.sim.kernel import Kernel, solo_seconds
from gpumux.device.sim.spec import GpuSpec
from gpumux.model import Priority
from gpumux.program.cut import cut

TARGET_S = {Priority.HIGH: 400e-6, Priority.LOW: 300e-6}  # how long a piece should run (DESIGN 6)
MIN_HIGH_S = 250e-6  # shorter high pieces are merged (DESIGN 6)


@dataclass(frozen=True)
class Pieces:
    """A step cut on one GPU: piece i is kernels [bounds[i], bounds[i + 1]) and takes `seconds[i]` alone."""

    bounds: tuple[int, ...]
    seconds: tuple[float, ...]
    kernels: tuple[tuple[Kernel, ...], ...]

    @property
    def step_s(self) -> float:
        return sum(self.seconds)


def cut_kernels(
    kernels: Sequence[Kernel],
    spec: GpuSpec,
    priority: Priority,
    target_s: float | None = None,
    gates: Collection[int] = (),
) -> Pieces:
    """Pieces of near `target_s`: None is the priority's own, inf one piece. A piece begins at every kernel in
    `gates`. No kernels at all are one empty piece."""
    seconds = [solo_seconds(kernel, spec) + spec.node_gap_s for kernel in kernels]
    target = TARGET_S[priority] if target_s is None else target_s
    if target == inf:
        return recut(kernels, (0, len(seconds)), spec)
    minimum = None if priority is Priority.LOW else min(MIN_HIGH_S, target)
    return recut(kernels, cut(seconds, target, min_s=minimum, gates=sorted(gates)), spec)


def recut(kernels: Sequence[Kernel], bounds: tuple[int, ...], spec: GpuSpec) -> Pieces:
    """Pieces of these kernels under given boundaries."""
    parts = tuple([tuple(kernels[a:b]) for a, b in pairwise(bounds)])
    return Pieces(bounds, tuple([piece_seconds(part, spec) for part in parts]), parts)


def piece_seconds(kernels: Sequence[Kernel], spec: GpuSpec, share: float = 1.0) -> float:
    """What a launch of these kernels takes alone on the device, or on a share of it, its gaps included."""
    gaps = spec.launch_gap_s + max(len(kernels) - 1, 0) * spec.node_gap_s
    return gaps + sum([solo_seconds(kernel, spec, share) for kernel in kernels])
