"""A branch-join block as an edge between its two ends: the least time from each count of the branching layer to each count
of the joining one, over the ways to run its branches one after the other or side by side.

Who runs where: some branches stay at home, on the same first GPUs one after the other; each of the others gets GPUs of
its own. A way to share the GPUs (`Split`) says how many each may use. More never hurts, so only splits count in which nobody
could have more. For each of them a branch is a shortest path that stays within its GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from math import inf
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpumux.errors import ConfigError
from gpumux.plan.costs import Array, Tables
from gpumux.plan.graph import Block, Chain

MAX_SPLITS = 20_000
HOME, AWAY = 0, 1


@dataclass(frozen=True)
class Rules:
    """`room` [layers, counts]: seconds that transfers into a layer may take, by the amplification limit; below 0 where the
    layer alone is above it."""

    tables: Tables
    room: Array

    def edges(self, before: slice | Sequence[int], behind: slice | Sequence[int]) -> Array:
        """Seconds from each layer to the one behind it, [pairs, counts behind, counts before]: the transfer and the layer
        behind itself, inf where the limit forbids it."""
        comm = self.tables.comm(before).transpose(0, 2, 1)
        edges: Array = comm + self.tables.work[behind][:, :, None]
        edges[comm > self.room[behind][:, :, None]] = inf
        return edges

    def into(self, layer: int, transfer: Array) -> Array:
        """The transfers [counts before, counts] where the limit lets `layer` have them, else inf."""
        return np.where(transfer > self.room[layer], inf, transfer)


class Split(NamedTuple):
    """One way to share GPUs: for each branch whether it is HOME or AWAY, and how many it may use at most."""

    modes: tuple[int, ...]
    caps: tuple[int, ...]


@lru_cache(maxsize=256)
def splits(branches: int, empty: tuple[int, ...], gpus: int, counts: tuple[int, ...]) -> tuple[Split, ...]:
    """Every split of `gpus` in which nobody could have more. At least one branch is at home, since moving one back there
    costs nothing; those in `empty` always are, and use no GPU. Raises ConfigError where there are too many."""
    found = []
    movable = [i for i in range(branches) if i not in empty]
    for away_count in range(branches):
        for away in combinations(movable, away_count):
            home = [i for i in range(branches) if i not in away]
            for parts in _parts(1 + away_count, gpus, counts, all(i in empty for i in home)):
                caps = dict.fromkeys(home, parts[0]) | dict(zip(away, parts[1:], strict=True))
                modes = tuple(AWAY if i in away else HOME for i in range(branches))
                found.append(Split(modes, tuple(caps[i] for i in range(branches))))
                if len(found) > MAX_SPLITS:
                    raise ConfigError(
                        f"a block of {branches} branches over {len(counts)} GPU counts has too many ways to run",
                        "let the counts be powers of two",
                    )
    return tuple(found)


def _parts(number: int, gpus: int, counts: tuple[int, ...], nobody_home: bool) -> Iterator[tuple[int, ...]]:
    """Tuples of counts that together use at most `gpus`, none of which could be the next larger count. The first is home's:
    0 if nobody there needs any."""

    def rest(places: int, left: int) -> Iterator[tuple[int, ...]]:
        if places == 0:
            yield ()
            return
        for count in counts:
            if count <= left:
                for others in rest(places - 1, left - count):
                    yield (count, *others)

    first = [0] if nobody_home else [count for count in counts if count <= gpus]
    for home in first:
        for others in rest(number - 1, gpus - home):
            parts = (home, *others)
            left = gpus - sum(parts)
            larger = [min((c for c in counts if c > part), default=inf) - part for part in parts[nobody_home:]]
            if all(more > left for more in larger):
                yield parts


@dataclass
class _Branch:
    """One branch's shortest paths from each count of the branching layer. `states`: after each step, seconds
    [caps, modes, fork's counts, own counts]. `steps`: a layer, or a block and the layer that joins it."""

    chain: Chain
    steps: list[int]
    tables: list[BlockTable | None]
    states: list[Array]
    seconds: Array  # [caps, modes, fork's counts, join's counts], the transfer into the joining layer included
    ends: npt.NDArray[np.intp]  # count of the last layer, the same shape
    transfers: tuple[Array, Array]  # from the last layer (home, away): [own counts, join's counts]


class BlockTable:
    """A block between `fork` and `join`, within each of `limits` GPUs. `lower` [limits, counts, counts]: no way is quicker;
    inf where there is none."""

    def __init__(self, block: Block, fork: int, join: int, rules: Rules, limits: tuple[int, ...]) -> None:
        self.block, self.fork, self.join, self.rules = block, fork, join, rules
        counts = rules.tables.counts
        empty = tuple(i for i, branch in enumerate(block.branches) if not branch)
        self.splits = [splits(len(block.branches), empty, gpus, counts) for gpus in limits]
        self.caps = tuple(sorted({cap for found in self.splits for split in found for cap in split.caps}))
        self.blocked = np.where(np.array(counts) > np.array(self.caps)[:, None], inf, 0.0)[:, None, None, :]
        self.branches = [self._branch(chain) for chain in block.branches]
        self._found: dict[tuple[int, int, int], tuple[float, Split, tuple[int, ...]]] = {}
        self.lower = np.empty((len(limits), len(counts), len(counts)))
        self._best: list[npt.NDArray[np.intp]] = []
        self._times: list[Array] = []
        for at, found in enumerate(self.splits):
            if not found:  # no count is as small as this
                self.lower[at] = inf
                self._best.append(np.zeros(self.lower.shape[1:], dtype=np.intp))
                self._times.append(np.zeros((0, *self.lower.shape[1:])))
                continue
            times = self._split_times(found)
            best = times.argmin(0)
            self.lower[at] = np.take_along_axis(times, best[None], 0)[0]
            self._best.append(best)
            self._times.append(times)

    def _branch(self, chain: Chain) -> _Branch:
        """Shortest paths through one branch, for all caps and both modes at once."""
        rules, tables = self.rules, self.rules.tables
        ends = tables.comm([self.fork])[0], tables.moved(self.fork)
        if not chain:
            n = len(tables.counts)
            seconds = np.full((len(self.caps), 2, n, n), inf)
            seconds[:, HOME] = rules.into(self.join, ends[HOME])
            return _Branch(chain, [], [], [], seconds, np.zeros(seconds.shape, dtype=np.intp), ends)
        first = chain[0]
        assert isinstance(first, int)
        state = np.stack([rules.into(first, each) for each in ends]) + tables.work[first] + self.blocked
        steps, inner, states = [first], [None], [state]  # type: list[int], list[BlockTable | None], list[Array]
        block = None
        for each in chain[1:]:
            if isinstance(each, Block):
                block = each
                continue
            if block is None:
                edges = rules.edges([steps[-1]], [each])[0]
                state = (state[..., None, :] + edges).min(-1) + self.blocked
                inner.append(None)
            else:
                table = BlockTable(block, steps[-1], each, rules, self.caps)
                edges = table.resolved() + tables.work[each]
                state = (state[..., :, None] + edges[:, None, None]).min(-2) + self.blocked
                inner.append(table)
                block = None
            steps.append(each)
            states.append(state)
        transfers = tables.comm([steps[-1]])[0], tables.moved(steps[-1])
        last = np.stack([rules.into(self.join, each) for each in transfers])  # [modes, own, join's]
        ways = state[..., None] + last[:, None]
        best = ways.argmin(-2)
        seconds = np.take_along_axis(ways, best[..., None, :], -2)[..., 0, :]
        return _Branch(chain, steps, inner, states, seconds, best, transfers)

    def _split_times(self, found: Sequence[Split]) -> Array:
        """Seconds [splits, counts, counts] of each split, as if the joining layer's limit held for each transfer alone."""
        place = {cap: i for i, cap in enumerate(self.caps)}
        modes = np.array([split.modes for split in found])
        caps = np.array([[place[cap] for cap in split.caps] for split in found])
        shape = (len(found), *self.lower.shape[1:])
        home, away = np.zeros(shape), np.zeros(shape)
        for i, branch in enumerate(self.branches):
            seconds = branch.seconds[caps[:, i], modes[:, i]]
            moved = modes[:, i] == AWAY
            home += np.where(moved[:, None, None], 0.0, seconds)
            away = np.maximum(away, np.where(moved[:, None, None], seconds, 0.0))
        return np.maximum(home, away)

    # ---- exact, for one pair of counts

    def exact(self, limit: int, g: int, h: int) -> float:
        """The least seconds from count g to count h (indices) within the `limit`-th number of GPUs; inf: no way."""
        key = (limit, g, h)
        if key not in self._found:
            self._found[key] = self._solve(limit, g, h)
        return self._found[key][0]

    def resolved(self) -> Array:
        """`lower`, made exact everywhere."""
        for limit, g, h in np.argwhere(np.isfinite(self.lower)).tolist():
            self.lower[limit, g, h] = self.exact(limit, g, h)
        return self.lower

    def _solve(self, limit: int, g: int, h: int) -> tuple[float, Split, tuple[int, ...]]:
        """Splits by rising lower bound. Mostly the first one's paths keep the joining layer's limit together, too."""
        bound = float(self.lower[limit, g, h])
        if bound == inf:
            return inf, Split((), ()), ()
        room = self.rules.room[self.join, h]
        split = self.splits[limit][int(self._best[limit][g, h])]
        ends = self._ends(split, g, h)
        if self._incoming(split, ends, g, h) <= room:
            return bound, split, ends
        found = (inf, split, ends)
        times = self._times[limit][:, g, h]
        for index in times.argsort(kind="stable").tolist():
            if times[index] >= found[0]:
                break
            split = self.splits[limit][index]
            seconds, ends = self._within(split, g, h, room, found[0])
            if seconds < found[0]:
                found = (seconds, split, ends)
        return found

    def _ends(self, split: Split, g: int, h: int) -> tuple[int, ...]:
        return tuple(
            int(branch.ends[self.caps.index(cap), mode, g, h])
            for branch, mode, cap in zip(self.branches, split.modes, split.caps, strict=True)
        )

    def _incoming(self, split: Split, ends: Sequence[int], g: int, h: int) -> float:
        return float(
            sum(
                branch.transfers[mode][end if branch.steps else g, h]
                for branch, mode, end in zip(self.branches, split.modes, ends, strict=True)
            )
        )

    def _within(self, split: Split, g: int, h: int, room: float, below: float) -> tuple[float, tuple[int, ...]]:
        """The least seconds under `split`, less than `below`, such that all transfers together take at most `room`;
        (inf, ()) where there are none. Tries each branch's last counts, those that are neither slower nor transfer more."""
        options = []
        for branch, mode, cap in zip(self.branches, split.modes, split.caps, strict=True):
            transfer = branch.transfers[mode]
            if branch.steps:
                paths = branch.states[-1][self.caps.index(cap), mode, g]
                pairs = [(float(paths[x] + transfer[x, h]), float(transfer[x, h]), x) for x in range(len(paths))]
            else:
                pairs = [(float(transfer[g, h]), float(transfer[g, h]), 0)]
            options.append(_undominated([pair for pair in pairs if pair[0] < inf and pair[1] <= room]))
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

    # ---- the way back

    def collect(self, limit: int, g: int, h: int, placed: dict[int, int], away: set[tuple[int, int]]) -> None:
        """Note the counts (indices) of the block's layers, and the branches that are away, between counts g and h."""
        self.exact(limit, g, h)
        _, split, ends = self._found[limit, g, h]
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
                    edges = self.rules.edges([branch.steps[k - 1]], [layer])[0][end]
                    x = int((before + edges).argmin())
                else:
                    x = int((before + table.lower[at, :, end]).argmin())
                    table.collect(at, x, end, placed, away)
                end = x
                placed[branch.steps[k - 1]] = end


def _undominated(pairs: Sequence[tuple[float, float, int]]) -> list[tuple[float, float, int]]:
    """Those of (seconds, transfer, count) than which no other is both quicker and transfers less."""
    found: list[tuple[float, float, int]] = []
    for pair in sorted(pairs):
        if not found or pair[1] < found[-1][1]:
            found.append(pair)
    return found
