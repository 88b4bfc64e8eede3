"""Shortest paths through the branches of many blocks at once, from each count of the layer that branches, at home and away, for
each number of GPUs that a branch may have at most (its cap).

Arrays have own counts first, so that the minimum over them runs along whole rows, and branches side by side: what a block
of four branches takes by itself is too little work for a call into numpy to pay.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from math import inf

import numpy as np

from gpumux.plan.costs import Array
from gpumux.plan.graph import Level
from gpumux.plan.rules import Rules
from gpumux.plan.splits import Indices

CHUNK = 1 << 15  # elements at once: the processor's caches hold them


class Paths:
    """`last` [own counts, ways, modes, caps, fork's counts]: seconds to the end of each way's last layer. `allowed` and
    `moved` [own counts, join's counts, ways, modes]: the transfer from there to the joining layer, inf where the limit
    forbids it; and as it is. `rows` [3, 1 + ways * modes * caps, fork's counts * join's], if wanted: over the last layer's
    counts, the least seconds, the least transfer at the end that takes so long, and the least transfer; of row 0, nothing.
    `inner`: seconds between the ends of blocks inside, by number, [caps, counts, counts]."""

    def __init__(self, level: Level, rules: Rules, inner: Mapping[int, Array], *, rows: bool) -> None:
        self.ways, self.rules, self.inner = level.ways, rules, inner
        n = len(rules.tables.counts)
        each = np.arange(n)
        self.blocked = np.where(each[:, None] > each, inf, 0.0)[:, None, None, :, None]  # own counts above the cap
        joins = [level.sites[way.site].join for way in self.ways]
        allowed, moved = rules.transfers([way.layers[-1] for way in self.ways], joins)
        self.allowed, self.moved = allowed.transpose(2, 3, 0, 1), moved.transpose(2, 3, 0, 1)
        self.last = np.empty((n, len(self.ways), 2, n, n))
        self.size = max(1, CHUNK // (2 * n**4))
        self._edges = self._neighbours()
        starts = self._entries(level)
        self._states = [self._run(at, starts[:, at : at + self.size]) for at in range(0, len(self.ways), self.size)]
        self.rows = np.zeros((3, 1 + 2 * n * len(self.ways), n * n)) if rows else np.zeros((3, 0, 0))
        if rows:
            figures = self.rows[:, 1:].reshape(3, len(self.ways), 2, n, n, n)
            for at in range(0, len(self.ways), self.size):
                self._quickest(slice(at, at + self.size), figures[:, at : at + self.size])

    def _entries(self, level: Level) -> Array:
        """Seconds to the end of each way's first layer, [own counts, ways, modes, fork's counts]."""
        first = [way.layers[0] for way in self.ways]
        allowed, _ = self.rules.transfers([level.sites[way.site].fork for way in self.ways], first)
        found: Array = (allowed + self.rules.tables.work[first][:, None, None]).transpose(3, 0, 1, 2)
        return found

    def _neighbours(self) -> list[Array]:
        """For each step but the first, edges of the ways that are that long: [counts before, counts behind, ways]."""
        before: list[int] = []
        behind: list[int] = []
        ends = [0]
        for step in range(1, len(self.ways[0].layers)):
            active = [way.layers for way in self.ways if len(way.layers) > step]
            before += [layers[step - 1] for layers in active]
            behind += [layers[step] for layers in active]
            ends.append(len(before))
        if not before:
            return []
        edges = self.rules.edges(before, behind).transpose(2, 1, 0)
        return [edges[:, :, start:end] for start, end in pairwise(ends)]

    def _run(self, at: int, entries: Array) -> list[Array]:
        """The states after each step of `size` ways from `at` on, [own counts, ways, modes, caps, fork's counts]."""
        ways = self.ways[at : at + self.size]
        state = entries[:, :, :, None] + self.blocked
        states = [state]
        active = len(ways)
        for step in range(1, len(ways[0].layers) + 1):
            before = active
            while active and len(ways[active - 1].layers) <= step:
                active -= 1
            self.last[:, at + active : at + before] = state[:, active:before]
            if active:
                edges = self._step(step, at, active)
                state = np.minimum.reduce(state[:, None, :active] + edges, 0) + self.blocked
                states.append(state)
        return states

    def _step(self, step: int, at: int, active: int) -> Array:
        """[counts before, counts behind, ways, 1, caps or 1, 1]."""
        edges: Array = self._edges[step - 1][:, :, at : at + active, None]
        inside = [(i, way) for i, way in enumerate(self.ways[at : at + active]) if way.blocks[step] is not None]
        if inside:
            edges = np.repeat(edges, len(self.blocked), 3)
            for i, way in inside:
                edges[:, :, i] = self._inside(step, way.layers, way.blocks).transpose(1, 2, 0)
        return edges[:, :, :, None, :, None]

    def _inside(self, step: int, layers: Sequence[int], blocks: Sequence[int | None]) -> Array:
        """Across a block inside and the layer behind it, [caps, counts before, counts behind]."""
        number = blocks[step]
        assert number is not None
        found: Array = self.inner[number] + self.rules.tables.work[layers[step]]
        return found

    def _quickest(self, some: slice, out: Array) -> None:
        """Into `out` [3, ways, modes, caps, fork's counts, join's] what `rows` has."""
        # own counts, join's counts, ways, modes, caps, fork's counts
        seconds = self.last[:, None, some] + self.allowed[:, :, some, :, None, None]
        moved = self.moved[:, :, some, :, None, None]
        least = seconds.min(0)
        order = (1, 2, 3, 4, 0)
        out[0] = least.transpose(order)
        out[1] = np.where(seconds == least, moved, inf).min(0).transpose(order)
        out[2] = np.where(seconds < inf, moved, inf).min(0).transpose(order)

    # ---- of one way

    def options(
        self, ways: Indices, modes: Indices, caps: Indices, g: int, h: int
    ) -> Iterable[tuple[list[float], list[float]]]:
        """Of several ways, for each count of the last layer, seconds from count g of the fork to count h of the join, without
        the join's own; and of these the transfer at the end."""
        seconds = self.last[:, ways, modes, caps, g] + self.allowed[:, h, ways, modes]
        return zip(seconds.T.tolist(), self.moved[:, h, ways, modes].T.tolist(), strict=True)

    def back(self, way: int, step: int, mode: int, cap: int, g: int, count: int) -> int:
        """The count of the layer before, where the way's layer number `step` has `count`."""
        chunk, i = divmod(way, self.size)
        before = self._states[chunk][step - 1][:, i, mode, cap, g]
        layers, blocks = self.ways[way].layers, self.ways[way].blocks
        if blocks[step] is None:
            edges = self._edges[step - 1][:, count, way]
        else:
            edges = self._inside(step, layers, blocks)[cap, :, count]
        return int((before + edges).argmin())
