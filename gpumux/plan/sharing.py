"""A branch-join block as an edge between its two ends: the least time from each count of the branching layer to each count
of the joining one, over the ways to run its branches one after the other or side by side.

Who runs where: some branches stay at home, on the same first GPUs one after the other; each of the others gets GPUs of
its own. A way to share the GPUs (`Split`) says how many each may use. More never hurts, so only splits count in which nobody
could have more. For each of them a branch is a shortest path that stays within its GPUs (gpumux/plan/branches.py). Blocks
with as many branches are worked out together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count, product
from math import inf
from typing import NamedTuple

import numpy as np

from gpumux.plan.branches import Paths
from gpumux.plan.costs import Array
from gpumux.plan.graph import Graph, Level
from gpumux.plan.rules import Rules
from gpumux.plan.splits import AWAY, HOME, Indices, Split, Table, tabled

CHUNK = 1 << 17  # elements at once


class _Found(NamedTuple):
    """The best way between two counts: its split, and the count (an index) of each branch's last layer."""

    seconds: float
    split: Split
    ends: tuple[int, ...]


def tables(graph: Graph, rules: Rules, gpus: int) -> dict[int, BlockTable]:
    """Every block's table, by number: of those inside of others within each count of GPUs, of the rest within `gpus`.
    Raises ConfigError for a block that can run in too many ways."""
    found: dict[int, BlockTable] = {}
    for level in graph.levels:
        for table in _Level(level, rules, found, gpus).tables():
            found[table.site.block.number] = table
    return found


class _Level:
    """Blocks that can be worked out together."""

    def __init__(self, level: Level, rules: Rules, known: Mapping[int, BlockTable], gpus: int) -> None:
        self.level, self.rules, self.known, self.gpus = level, rules, known, gpus
        inside = [number for way in level.ways for number in way.blocks if number is not None]
        exact = {number: known[number].resolved() for number in inside}
        rows = any(len(site.block.branches) != 2 for site in level.sites)
        self.paths = Paths(level, rules, exact, rows=rows) if level.ways else None
        self.ways = {(way.site, way.branch): i for i, way in enumerate(level.ways)}

    def tables(self) -> list[BlockTable]:
        counts = self.rules.tables.counts
        kinds: dict[tuple[int, tuple[int, ...], bool], list[int]] = {}
        for at, site in enumerate(self.level.sites):
            branches = site.block.branches
            empty = tuple([i for i, branch in enumerate(branches) if not branch])
            kinds.setdefault((len(branches), empty, site.inner), []).append(at)
        found = []
        for (k, empty, inner), places in kinds.items():
            table = tabled(k, empty, counts if inner else (self.gpus,), counts)
            work = k * len(counts) ** 2 * max([len(some.caps) for some in table.splits])
            size = max(1, CHUNK // max(1, work))
            for at in range(0, len(places), size):
                group = _Group(self, places[at : at + size], empty, table)
                if k == 2:
                    group.pairs()
                else:
                    group.relaxed()
                found += [BlockTable(group, i) for i in range(len(group.sites))]
        return found


class _Group:
    """Blocks with as many branches. `times` [splits, blocks, fork's counts, join's] for each number of GPUs: no way under a
    split is quicker; `lower` [numbers, blocks, fork's counts, join's] the least of them, inf where there is none; `sure`
    where that is exact."""

    def __init__(self, level: _Level, places: Sequence[int], empty: tuple[int, ...], table: Table) -> None:
        self.rules, self.paths, self.known = level.rules, level.paths, level.known
        self.empty, self.table = empty, table
        self.sites = [level.level.sites[at] for at in places]
        self.k = len(self.sites[0].block.branches)
        self.ways = [[level.ways.get((at, i), -1) for at in places] for i in range(self.k)]
        self.numbers = np.array(self.ways)  # [branches, blocks]
        self.filled = [i for i in range(self.k) if i not in empty] if empty else slice(None)
        n = len(self.rules.tables.counts)
        self.room = self.rules.room[[site.join for site in self.sites]]  # [blocks, join's counts]
        self.lower = np.full((len(table.splits), len(places), n, n), inf)
        self.sure = np.ones(self.lower.shape, dtype=bool)
        self.times: list[Array] = []
        # transfers of empty branches, as Rules has them, [blocks, modes, fork's counts, join's]
        self.skips: tuple[Array, Array] | None = None
        if empty:
            self.skips = self.rules.transfers([site.fork for site in self.sites], [site.join for site in self.sites])

    def relaxed(self) -> None:
        """As if the joining layer's limit held for each transfer alone; `sure` where it holds for all together."""
        n, b = self.lower.shape[2], len(self.sites)
        rows, first = self._rows()  # first [branches, blocks]: where each branch's rows begin
        cells = np.arange(b)[:, None], np.arange(n * n)
        room = np.repeat(self.room[:, None], n, 1).reshape(b, n * n)
        for at, (modes, caps) in enumerate(zip(self.table.modes, self.table.caps, strict=True)):
            if not modes.size:  # no count is as small as this
                self.times.append(np.zeros((0, b, n, n)))
                continue
            here = (modes * n + caps)[:, :, None] + first[:, None]
            times = rows[0].take(here * (modes == HOME)[:, :, None], 0).sum(0)
            np.maximum(times, rows[0].take(here * (modes == AWAY)[:, :, None], 0).max(0), out=times)
            times[rows[2].take(here, 0).sum(0) > room] = inf  # not even with the smallest transfer of each branch
            self.times.append(times.reshape(-1, b, n, n))
            best = times.argmin(0)  # [blocks, fork's counts * join's]
            self.lower[at] = times[best, *cells].reshape(b, n, n)
            moved = rows[1][here[:, best, cells[0]], cells[1]].sum(0)
            self.sure[at] = (moved <= room).reshape(b, n, n)

    def _rows(self) -> tuple[Array, Indices]:
        """Rows as Paths has them, with some for empty branches behind, and the first one of each block's branches."""
        n, b = self.lower.shape[2], len(self.sites)
        first = self.numbers * (2 * n) + 1
        if not self.empty or self.skips is None:
            assert self.paths is not None
            return self.paths.rows, first
        rows = np.zeros((3, 1, n * n)) if self.paths is None else self.paths.rows
        skips = np.full((3, b, 2 * n, n * n), inf)
        allowed, moved = (each[:, HOME].reshape(b, 1, n * n) for each in self.skips)
        skips[0, :, :n], skips[1, :, :n], skips[2, :, :n] = allowed, moved, moved
        for i in self.empty:
            first[i] = rows.shape[1] + 2 * n * np.arange(b)
        return np.concatenate((rows, skips.reshape(3, -1, n * n)), 1), first

    def pairs(self) -> None:
        """Blocks of two branches, exact: over all pairs of their last counts that keep the joining layer's limit together."""
        modes, caps = (np.concatenate(each, 1) for each in (self.table.modes, self.table.caps))
        n, b, count = self.lower.shape[2], len(self.sites), modes.shape[1]
        # own counts (x of one branch, y of the other), join's counts, blocks, fork's counts, splits
        (first, into), (second, in_too) = (self._ends(i, modes[i], caps[i]) for i in range(2))
        together = np.flatnonzero((modes == HOME).all(0))
        times = np.empty((n, b, n, count))  # join's counts, blocks, fork's counts, splits
        room = self.room.T[:, :, None, None]
        size = first.shape[0] * second.shape[0] * b * n
        step = max(1, min(count, CHUNK // size))
        wide = max(1, min(n, CHUNK // (size * step)))
        for at, h in product(range(0, count, step), range(0, n, wide)):
            some, joins = slice(at, at + step), slice(h, h + wide)
            x, y = first[:, None, joins, ..., some], second[None, :, joins, ..., some]
            both = np.maximum(x, y)
            home = together[(together >= at) & (together < at + step)] - at
            both[..., home] = x[..., home] + y[..., home]
            moved = into[:, None, joins, ..., some] + in_too[None, :, joins, ..., some]
            both += np.where(moved > room[joins], inf, 0.0)
            both.min((0, 1), out=times[joins, ..., some])
        place = 0
        for at, found in enumerate(self.table.splits):
            self.times.append(times[..., place : place + len(found.caps)].transpose(3, 1, 2, 0))
            if found.caps:
                self.times[at].min(0, out=self.lower[at])
            place += len(found.caps)

    def _ends(self, branch: int, modes: Indices, caps: Indices) -> tuple[Array, Array]:
        """Of each block's branch, seconds and the transfer at its end, [own counts, join's counts, blocks, fork's counts or 1,
        splits]; an empty one has one own count."""
        if branch in self.empty:
            assert self.skips is not None
            allowed, moved = (each[:, HOME].transpose(2, 0, 1)[None, ..., None] for each in self.skips)
            shape = (*allowed.shape[:4], len(modes))
            return np.broadcast_to(allowed, shape), np.broadcast_to(moved, shape)
        assert self.paths is not None
        ways = self.ways[branch]
        last = self.paths.last[:, ways].transpose(0, 1, 4, 2, 3)[..., modes, caps][:, None]
        return (
            last + self.paths.allowed[:, :, ways][:, :, :, None, modes],
            self.paths.moved[:, :, ways][:, :, :, None, modes],
        )


def _rising(values: Array) -> Iterator[int]:
    """Indices, of the smallest value first; mostly nobody asks for a second one."""
    if values.size:
        yield int(values.argmin())
        yield from values.argsort(kind="stable").tolist()[1:]


def _choices(seconds: Sequence[float], moved: Sequence[float]) -> list[tuple[float, float, int]]:
    """(seconds, transfer, last count) of a branch, the quickest first, each with a smaller transfer than those before."""
    found: list[tuple[float, float, int]] = []
    for each in sorted(zip(seconds, moved, count(), strict=False)):
        if each[0] < inf and (not found or each[1] < found[-1][1]):
            found.append(each)
    return found


class BlockTable:
    """A block within each of several numbers of GPUs. `lower` [numbers, fork's counts, join's counts]: no way is quicker;
    inf where there is none."""

    def __init__(self, group: _Group, at: int) -> None:
        self.group, self.at, self.site = group, at, group.sites[at]
        self.lower, self._sure = group.lower[:, at], group.sure[:, at]
        self._found: dict[tuple[int, int, int], _Found] = {}

    def exact(self, limit: int, g: int, h: int) -> float:
        """The least seconds from count g to count h (indices) within the `limit`-th number of GPUs; inf: no way. `lower`
        has it from now on."""
        if not self._sure[limit, g, h]:
            self.lower[limit, g, h] = self._at(limit, g, h).seconds
            self._sure[limit, g, h] = True
        return float(self.lower[limit, g, h])

    def resolved(self) -> Array:
        """`lower`, made exact everywhere."""
        for limit, g, h in np.argwhere(np.isfinite(self.lower) & ~self._sure).tolist():
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
        times = self.group.times[limit][:, self.at, g, h]
        modes, caps = self.group.table.splits[limit]
        for index in _rising(times):
            if times[index] >= found.seconds:
                break
            split = Split(modes[index], caps[index])
            seconds, ends = self._within(split, self._options(limit, index, g, h), h, found.seconds)
            if seconds < found.seconds:
                found = _Found(seconds, split, ends)
        return found

    def _options(self, limit: int, index: int, g: int, h: int) -> list[tuple[list[float], list[float]]]:
        """Of each branch under a split, for each count of its last layer (for an empty one, once), the seconds and the
        transfer at the end."""
        group = self.group
        some, at = group.filled, self.at
        found: list[tuple[list[float], list[float]]] = []
        if group.paths is not None:
            modes, caps = group.table.modes[limit][some, index], group.table.caps[limit][some, index]
            found += group.paths.options(group.numbers[some, at], modes, caps, g, h)
        if group.skips is not None:
            allowed, moved = ([float(each[at, HOME, g, h])] for each in group.skips)
            for i in group.empty:
                found.insert(i, (allowed, moved))
        return found

    def _within(
        self, split: Split, options: Sequence[tuple[list[float], list[float]]], h: int, below: float
    ) -> tuple[float, tuple[int, ...]]:
        """The least seconds under `split`, less than `below`, such that all transfers into the joining layer keep its limit
        together; (inf, ()) where there are none. Tries each branch's last counts, those that are neither slower nor transfer more."""
        room = float(self.group.room[self.at, h])
        quickest = [min(seconds) for seconds, _ in options]
        ends = tuple([seconds.index(each) for (seconds, _), each in zip(options, quickest, strict=True)])
        if sum([moved[end] for (_, moved), end in zip(options, ends, strict=True)]) <= room:  # mostly so
            at_home = sum([each for each, mode in zip(quickest, split.modes, strict=True) if mode == HOME])
            away = max([each for each, mode in zip(quickest, split.modes, strict=True) if mode == AWAY], default=0.0)
            return max(at_home, away), ends
        choices = [_choices(*each) for each in options]
        least = [0.0]  # transfers of all branches from here on, at the least
        for each in reversed(choices):
            least.append(least[-1] + (each[-1][1] if each else inf))
        least.reverse()
        best: tuple[float, tuple[int, ...]] = (inf, ())

        def visit(at: int, home: float, away: float, used: float, ends: tuple[int, ...]) -> None:
            nonlocal best
            if max(home, away) >= min(best[0], below) or used + least[at] > room:
                return
            if at == len(choices):
                best = (max(home, away), ends)
                return
            for seconds, transfer, x in choices[at]:
                if split.modes[at] == HOME:
                    visit(at + 1, home + seconds, away, used + transfer, (*ends, x))
                else:
                    visit(at + 1, home, max(away, seconds), used + transfer, (*ends, x))

        visit(0, 0.0, 0.0, 0.0, ())
        return best

    # ---- the way back

    def collect(self, limit: int, g: int, h: int, placed: dict[int, int], away: set[tuple[int, int]]) -> None:
        """Note the counts (indices) of the block's layers, and the branches that are away, between counts g and h."""
        _, split, ends = self._at(limit, g, h)
        for i, (mode, cap, end) in enumerate(zip(split.modes, split.caps, ends, strict=True)):
            at, paths = self.group.ways[i][self.at], self.group.paths
            if at < 0 or paths is None:
                continue
            if mode == AWAY:
                away.add((self.site.block.number, i))
            way = paths.ways[at]
            placed[way.layers[-1]] = end
            for step in range(len(way.layers) - 1, 0, -1):
                before = paths.back(at, step, mode, cap, g, end)
                number = way.blocks[step]
                if number is not None:
                    self.group.known[number].collect(cap, before, end, placed, away)
                end = placed[way.layers[step - 1]] = before
