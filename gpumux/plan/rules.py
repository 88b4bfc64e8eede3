"""What the amplification limit leaves of the edges between layers: T(i) depends on the counts of layer i and of those its
input comes from, so the limit forbids edges and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf, isinf

import numpy as np

from gpumux.plan.costs import TOLERANCE, Array, Tables


@dataclass(frozen=True, slots=True)
class Rules:
    """`room` [layers, counts]: seconds that transfers into a layer may take; below 0 where the layer alone is above the
    limit."""

    tables: Tables
    room: Array

    def edges(self, before: slice | Sequence[int], behind: slice | Sequence[int]) -> Array:
        """Seconds from each layer to the one behind it, [pairs, counts behind, counts before]: the transfer and the layer
        behind itself, inf where the limit forbids it."""
        comm = self.tables.comm(before).transpose(0, 2, 1)
        edges: Array = comm + self.tables.work[behind][:, :, None]
        edges[comm > self.room[behind][:, :, None]] = inf
        return edges

    def transfers(self, before: Sequence[int], behind: Sequence[int]) -> tuple[Array, Array]:
        """Transfers into or out of branches, [pairs, modes, counts before, counts behind]: inf where the limit forbids it
        by itself; and as they are."""
        transfers = self.tables.transfers(before)
        room = self.room[behind][:, None, None]
        return np.where(transfers > room, inf, transfers), transfers


def rules(tables: Tables, limit: float) -> Rules:
    """`limit` is 1 or more, inf for none."""
    if isinf(limit):
        return Rules(tables, np.full(tables.work.shape, inf))
    room = tables.single[:, None] * (_inverse(tables.counts) * (limit * (1 + TOLERANCE)))
    room -= tables.work
    return Rules(tables, room)


@lru_cache(maxsize=64)
def _inverse(counts: tuple[int, ...]) -> Array:
    return 1 / np.array(counts, dtype=np.float64)
