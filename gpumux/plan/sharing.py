"""A branch-join block as an edge between its two ends: the least time from each count of the branching layer to each count
of the joining one, over the ways to run its branches one after the other or side by side.

Who runs where: some branches stay at home, on the same first GPUs one after the other; each of the others gets GPUs of
its own. A way to share the GPUs (`Split`) says how many each may use. More never hurts, so only splits count in which nobody
could have more. For each of them a branch is a shortest path that stays within its GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from math import inf
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpumux.plan.costs import Array, Tables
from gpumux.plan.graph import Block, Chain, Pairs
from gpumux.plan.splits import AWAY, HOME, Split, tabled

MAX_PREPARED = 1 << 22  # elements
PAIRWISE = 1 << 18  # elements at once


@dataclass(frozen=True)
class Rules:
    """`room` [layers, counts]: seconds that transfers into a layer may take, by the amplification limit; below 0 where the
    layer alone is above it."""

    tables: Tables
    room: Array
    prepared: dict[tuple[int, int], Array] = field(default_factory=dict)
    entered: dict[tuple[int, int], Array] = field(default_factory=dict)
    left: dict[tuple[int, int], tuple[Array, Array]] = field(default_factory=dict)

    def prepare(self, found: Pairs) -> None:
        """Work out what blocks need of their layers together: that is quicker than one at a time."""
        pairs, entries, exits = found
        if (len(pairs) + 2 * len(entries) + 2 * len(exits)) * self.room.shape[1] ** 2 > MAX_PREPARED:
            return
        if pairs:
            before, behind = (list(each) for each in zip(*pairs, strict=True))
            self.prepared.update(zip(pairs, self.edges(before, behind), strict=True))
        if entries:
            self.entered.update(zip(entries, self._enter(entries), strict=True))
        if exits:
            self.left.update(zip(exits, zip(*self._leave(exits), strict=True), strict=True))

    def enter(self, fork: int, first: int) -> Array:
        """Seconds from the branching layer to the end of a branch's first one, [modes, counts, counts]."""
        found = self.entered.get((fork, first))
        return self._enter([(fork, first)])[0] if found is None else found

    def leave(self, last: int, join: int) -> tuple[Array, Array]:
        """Transfers into a joining layer, [modes, counts, counts]: inf where the limit forbids it; and as they are."""
        found = self.left.get((last, join))
        if found is None:
            allowed, transfers = self._leave([(last, join)])
            found = allowed[0], transfers[0]
        return found

    def _enter(self, pairs: Sequence[tuple[int, int]]) -> Array:
        allowed, _ = self._leave(pairs)
        return allowed + self.tables.work[[first for _, first in pairs]][:, None, None]

    def _leave(self, pairs: Sequence[tuple[int, int]]) -> tuple[Array, Array]:
        transfers = self.tables.transfers([before for before, _ in pairs])
        room = self.room[[behind for _, behind in pairs]][:, None, None]
        return np.where(transfers > room, inf, transfers), transfers

    def edge(self, before: int, behind: int) -> Array:
        """The edges between two layers, [counts behind, counts before]."""
        found = self.prepared.get((before, behind))
        return self.edges([before], [behind])[0] if found is None else found

    def edges(self, before: slice | Sequence[int], behind: slice | Sequence[int]) -> Array:
        """Seconds from each layer to the one behind it, [pairs, counts behind, counts before]: the transfer and the layer
        behind itself, inf where the limit forbids it."""
        comm = self.tables.comm(before).transpose(0, 2, 1)
        edges: Array = comm + self.tables.work[behind][:, :, None]
        edges[comm > self.room[behind][:, :, None]] = inf
        return edges


class _Found(NamedTuple):
    """The best way between two counts: its split, and the count (an index) of each branch's last layer."""

    seconds: float
    split: Split
    ends: tuple[int, ...]


@lru_cache(maxsize=64)
def _places(k: int, n: int) -> tuple[npt.NDArray[np.intp], ...]:
    """Indices that broadcast over [branches, caps, modes, fork's counts, join's counts]: of branches, modes and both counts."""
    counts = np.arange(n)
    return np.arange(k), np.arange(2)[:, None, None], counts[:, None], counts


@dataclass
class _Branch:
    """One branch's shortest paths from each count of the branching layer. `states`: after each step, seconds
    [caps, modes, fork's counts, own counts]. `steps`: a layer, or a block and the layer that joins it."""

    chain: Chain
    steps: list[int]
    tables: list[BlockTable | None]
    states: list[Array]
    ways: Array  # [caps, modes, fork's counts, own counts, join's], the transfer into the joining layer included
    transfers: Array  # from the last layer: [modes, fork's counts or 1, own counts or 1, join's]


class BlockTable:
    """A block between `fork` and `join`, within each of `limits` GPUs. `lower` [limits, counts, counts]: no way is quicker;
    inf where there is none."""

    def __init__(self, block: Block, fork: int, join: int, rules: Rules, limits: tuple[int, ...]) -> None:
        self.block, self.fork, self.join, self.rules = block, fork, join, rules
        counts = rules.tables.counts
        empty = tuple(i for i, branch in enumerate(block.branches) if not branch)
        self.table = tabled(len(block.branches), empty, limits, counts)
        self.splits, self.caps, self.blocked = self.table[:3]
        self.branches = [self._branch(chain) for chain in block.branches]
        self._found: dict[tuple[int, int, int], _Found] = {}
        self._options: dict[tuple[int, int, int, int, int], list[tuple[float, float, int]]] = {}
        n, k = len(counts), len(self.branches)
        self.lower = np.full((len(limits), n, n), inf)
        self._times: list[Array] = []
        self._quickest: npt.NDArray[np.intp] | None = None  # last counts [branches, caps, modes, counts, counts]
        self.sure = np.ones(self.lower.shape, dtype=bool)  # where `lower` is exact
        if k == 2:
            self._pairs()
        else:
            self._relaxed()

    def _relaxed(self) -> None:
        """`lower`, as if the joining layer's limit held for each transfer alone; `sure` where it holds for all together."""
        n, k, caps = len(self.rules.tables.counts), len(self.branches), len(self.caps)
        ways = np.full((k, caps, 2, n, n, n), inf)
        transfers = np.empty((k, 2, n, n, n))
        for i, branch in enumerate(self.branches):
            ways[i, :, :, :, : branch.ways.shape[3]] = branch.ways  # an empty branch has but one last count
            transfers[i] = branch.transfers
        every, modes, g, h = _places(k, n)
        self._quickest = quickest = ways.argmin(4)
        possible = np.where(ways < inf, transfers[:, None], inf)
        figures = np.zeros((3, k, 2, 1 + caps, n, n))  # seconds, the transfer then, the smallest transfer
        now = figures[:, :, :, 1:].swapaxes(2, 3)
        ways.min(4, out=now[0])
        now[1] = transfers[every[:, None, None, None, None], modes, g, quickest, h]
        possible.min(4, out=now[2])
        flat: Array = figures.reshape(3, -1, n * n)
        room = np.tile(self.rules.room[self.join], n)
        columns = np.arange(n * n)
        for at, found in enumerate(self.splits):
            if not found:  # no count is as small as this
                self._times.append(np.zeros((0, n, n)))
                continue
            there, elsewhere = flat[0].take(self.table.home[at], 0), flat[0].take(self.table.away[at], 0)
            times = np.maximum(there.sum(0), elsewhere.max(0))
            moved, least = flat[1:].take(self.table.both[at], 1).sum(1)
            times[least > room] = inf  # not even with the smallest transfer of each branch
            self._times.append(times.reshape(-1, n, n))
            best = times.argmin(0)
            self.lower[at] = times[best, columns].reshape(n, n)
            self.sure[at] = (moved[best, columns] <= room).reshape(n, n)

    def _pairs(self) -> None:
        """`lower` of a block of two branches, exact: over all pairs of their last counts that keep the joining layer's limit
        together."""
        every = [split for found in self.splits for split in found]
        n, count = len(self.rules.tables.counts), len(every)
        times = np.empty((count, n, n))
        sides = []
        for i, branch in enumerate(self.branches):
            caps = [self.caps.index(split.caps[i]) for split in every]
            modes = [split.modes[i] for split in every]
            sides.append((branch.ways[caps, modes], branch.transfers[modes]))
        (first, into), (second, in_too) = sides
        together = np.array([split.modes == (HOME, HOME) for split in every])[:, None, None, None, None]
        room = self.rules.room[self.join]
        rows = max(1, PAIRWISE // n**3)
        step = max(1, rows // n)
        for at, g in product(range(0, count, step), range(0, n, min(rows, n))):
            some = slice(at, at + step), slice(g, g + min(rows, n))
            a, b = first[some][:, :, :, None], second[some][:, :, None]
            x, y = (each[some[0], some[1] if each.shape[1] > 1 else slice(None)] for each in (into, in_too))
            both = np.where(together[some[0]], a + b, np.maximum(a, b))
            both[np.broadcast_to(x[:, :, :, None] + y[:, :, None] > room, both.shape)] = inf
            times[some] = both.min((2, 3))
        place = 0
        for at, found in enumerate(self.splits):
            self._times.append(times[place : place + len(found)])
            if found:
                self._times[at].min(0, out=self.lower[at])
            place += len(found)

    def _branch(self, chain: Chain) -> _Branch:
        """Shortest paths through one branch, for all caps and both modes at once."""
        rules, tables = self.rules, self.rules.tables
        if not chain:
            n = len(tables.counts)
            allowed, transfers = rules.leave(self.fork, self.join)
            ways = np.full((len(self.caps), 2, n, 1, n), inf)
            ways[:, HOME, :, 0] = allowed[HOME]
            return _Branch(chain, [], [], [], ways, transfers[:, :, None])
        first = chain[0]
        assert isinstance(first, int)
        state = rules.enter(self.fork, first) + self.blocked
        steps, inner, states = [first], [None], [state]  # type: list[int], list[BlockTable | None], list[Array]
        block = None
        for each in chain[1:]:
            if isinstance(each, Block):
                block = each
                continue
            if block is None:
                state = np.minimum.reduce(state[..., None, :] + rules.edge(steps[-1], each), -1) + self.blocked
                inner.append(None)
            else:
                table = BlockTable(block, steps[-1], each, rules, self.caps)
                edges = table.resolved() + tables.work[each]
                state = (state[..., :, None] + edges[:, None, None]).min(-2) + self.blocked
                inner.append(table)
                block = None
            steps.append(each)
            states.append(state)
        allowed, transfers = rules.leave(steps[-1], self.join)
        return _Branch(chain, steps, inner, states, state[..., None] + allowed[:, None], transfers[:, None])

    # ---- exact, for one pair of counts

    def exact(self, limit: int, g: int, h: int) -> float:
        """The least seconds from count g to count h (indices) within the `limit`-th number of GPUs; inf: no way. `lower`
        has it from now on."""
        if not self.sure[limit, g, h]:
            self.lower[limit, g, h] = self._at(limit, g, h).seconds
            self.sure[limit, g, h] = True
        return float(self.lower[limit, g, h])

    def resolved(self) -> Array:
        """`lower`, made exact everywhere."""
        for limit, g, h in np.argwhere(np.isfinite(self.lower) & ~self.sure).tolist():
            self.exact(limit, g, h)
        return self.lower

    def _at(self, limit: int, g: int, h: int) -> _Found:
        key = (limit, g, h)
        if key not in self._found:
            self._found[key] = self._solve(limit, g, h)
        return self._found[key]

    def _solve(self, limit: int, g: int, h: int) -> _Found:
        """Tries splits by rising lower bound, until no other could be quicker."""
        found = _Found(inf, Split((), ()), ())
        times = self._times[limit][:, g, h]
        if self._quickest is not None and self.sure[limit, g, h] and len(times):
            split = self.splits[limit][int(times.argmin())]
            caps = [self.caps.index(cap) for cap in split.caps]
            ends = self._quickest[range(len(caps)), caps, split.modes, g, h].tolist()
            return _Found(float(self.lower[limit, g, h]), split, tuple(ends))
        for index in times.argsort(kind="stable").tolist():
            if times[index] >= found.seconds:
                break
            split = self.splits[limit][index]
            seconds, ends = self._within(split, g, h, found.seconds)
            if seconds < found.seconds:
                found = _Found(seconds, split, ends)
        return found

    def _within(self, split: Split, g: int, h: int, below: float) -> tuple[float, tuple[int, ...]]:
        """The least seconds under `split`, less than `below`, such that all transfers into the joining layer keep its limit
        together; (inf, ()) where there are none. Tries each branch's last counts, those that are neither slower nor transfer more."""
        room = float(self.rules.room[self.join, h])
        options = [
            self._choices(i, mode, cap, g, h) for i, (mode, cap) in enumerate(zip(split.modes, split.caps, strict=True))
        ]
        quickest = [each[0] if each else (inf, inf, 0) for each in options]
        if sum(each[1] for each in quickest) <= room:  # mostly so
            at_home = sum(each[0] for each, mode in zip(quickest, split.modes, strict=True) if mode == HOME)
            away = max((each[0] for each, mode in zip(quickest, split.modes, strict=True) if mode == AWAY), default=0.0)
            return max(at_home, away), tuple(each[2] for each in quickest)
        least = [0.0]  # transfers of all branches from here on, at the least
        for each in reversed(options):
            least.append(least[-1] + min((pair[1] for pair in each), default=inf))
        least.reverse()
        best: tuple[float, tuple[int, ...]] = (inf, ())

        def visit(at: int, home: float, away: float, used: float, ends: tuple[int, ...]) -> None:
            nonlocal best
            if max(home, away) >= min(best[0], below) or used + least[at] > room:
                return
            if at == len(options):
                best = (max(home, away), ends)
                return
            for seconds, transfer, x in options[at]:
                if split.modes[at] == HOME:
                    visit(at + 1, home + seconds, away, used + transfer, (*ends, x))
                else:
                    visit(at + 1, home, max(away, seconds), used + transfer, (*ends, x))

        visit(0, 0.0, 0.0, 0.0, ())
        return best

    def _choices(self, i: int, mode: int, cap: int, g: int, h: int) -> list[tuple[float, float, int]]:
        """(seconds, transfer, last count) of branch `i`, the quickest first, each with a smaller transfer than those before."""
        key = (i, mode, cap, g, h)
        if key not in self._options:
            branch = self.branches[i]
            ways = branch.ways[self.caps.index(cap), mode, g, :, h].tolist()
            transfers = branch.transfers[mode]
            moved = transfers[g if len(transfers) > 1 else 0, :, h].tolist()
            found: list[tuple[float, float, int]] = []
            for pair in sorted(zip(ways, moved, range(len(ways)), strict=True)):
                if pair[0] < inf and (not found or pair[1] < found[-1][1]):
                    found.append(pair)
            self._options[key] = found
        return self._options[key]

    # ---- the way back

    def collect(self, limit: int, g: int, h: int, placed: dict[int, int], away: set[tuple[int, int]]) -> None:
        """Note the counts (indices) of the block's layers, and the branches that are away, between counts g and h."""
        _, split, ends = self._at(limit, g, h)
        for i, (branch, mode, cap, end) in enumerate(zip(self.branches, split.modes, split.caps, ends, strict=True)):
            if not branch.steps:
                continue
            if mode == AWAY:
                away.add((self.block.number, i))
            at = self.caps.index(cap)
            placed[branch.steps[-1]] = end
            for k in range(len(branch.steps) - 1, 0, -1):
                before = branch.states[k - 1][at, mode, g]
                table, layer = branch.tables[k], branch.steps[k]
                if table is None:
                    x = int((before + self.rules.edge(branch.steps[k - 1], layer)[end]).argmin())
                else:
                    x = int((before + table.lower[at, :, end]).argmin())
                    table.collect(at, x, end, placed, away)
                end = x
                placed[branch.steps[k - 1]] = end
