"""Blocks of branches as tables of least times, and shortest paths through the branches of many blocks at once.

Paths start at each count of the layer that branches, at home and away, for each number of GPUs that a branch may have
at most (its cap). Arrays have own counts first, so that the minimum over them runs along whole rows, and many branches
side by side: a single block of four branches is too little work for a call into numpy.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, combinations, count, pairwise, product
from math import inf
from operator import itemgetter
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from gpumux.errors import ConfigError
from gpumux.plan.costs import Array
from gpumux.plan.graph import BlockLevel, LayerGraph
from gpumux.plan.plan import Rules

# ---- Ways to share GPUs among the branches of a block.


MAX_SPLITS = 20_000
HOME, AWAY = 0, 1

Indices: TypeAlias = npt.NDArray[np.intp]


class Split(NamedTuple):
    """One way to share GPUs: for each branch whether it is HOME or AWAY, and how many it may use at most, as an index
    into the counts (0 for an empty branch, which uses none)."""

    modes: tuple[int, ...]
    caps: tuple[int, ...]


class Splits(NamedTuple):
    """Several splits: lists of their modes and caps."""

    modes: list[tuple[int, ...]]
    caps: list[tuple[int, ...]]


def splits(branches: int, empty: tuple[int, ...], gpus: int, counts: tuple[int, ...]) -> Splits:
    """Every split of `gpus` in which no branch could have more. At least one branch is at home, since moving one back
    there costs nothing. Those in `empty` always are, and use no GPU. Raises ConfigError for too many splits."""
    found = Splits([], [])
    movable = [i for i in range(branches) if i not in empty]
    for away_count in range(branches):
        for away in combinations(movable, away_count):
            home_empty = len(away) == len(movable)  # no branch at home uses a GPU
            parts = _parts(away_count + (not home_empty), gpus, counts)
            if len(found.caps) + len(parts) > MAX_SPLITS:
                raise ConfigError(
                    f"a block of {branches} branches over {len(counts)} GPU counts has too many ways to run",
                    "let the counts be powers of two",
                )
            modes, places = [HOME] * branches, [0] * branches
            for place, i in enumerate(away, 1):
                modes[i], places[i] = AWAY, place
            found.modes.extend([tuple(modes)] * len(parts))
            found.caps.extend(map(itemgetter(*places), [(0, *part) for part in parts] if home_empty else parts))
    return found


@lru_cache(maxsize=256)
def _parts(number: int, gpus: int, counts: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Tuples of counts (as indices) that use at most `gpus` in all, and in which none could be the next larger
    count."""
    larger = (*counts[1:], inf)
    found: list[tuple[int, ...]] = []

    def visit(chosen: tuple[int, ...], left: int) -> None:
        if len(found) > MAX_SPLITS:
            return
        if len(chosen) == number:
            if not any(larger[each] - counts[each] <= left for each in chosen):
                found.append(chosen)
        elif len(chosen) + 1 == number:  # the last one takes the rest
            last = bisect_right(counts, left) - 1
            if last >= 0:
                visit((*chosen, last), left - counts[last])
        else:
            for each in range(bisect_right(counts, left)):
                visit((*chosen, each), left - counts[each])

    visit((), gpus)
    return tuple(found)


class Table(NamedTuple):
    """Splits of several numbers of GPUs, and `modes` and `caps` [branches, splits] of each number."""

    splits: tuple[Splits, ...]
    modes: tuple[Indices, ...]
    caps: tuple[Indices, ...]


@lru_cache(maxsize=256)
def splits_table(branches: int, empty: tuple[int, ...], limits: tuple[int, ...], counts: tuple[int, ...]) -> Table:
    """The splits of each of `limits` GPUs (see `splits`), for two branches or more."""
    found = tuple([splits(branches, empty, gpus, counts) for gpus in limits])
    modes, caps = ([_array(some, branches) for some in each] for each in zip(*found, strict=True))
    return Table(found, tuple(modes), tuple(caps))


def _array(rows: list[tuple[int, ...]], branches: int) -> Indices:
    return np.fromiter(chain.from_iterable(rows), np.intp, len(rows) * branches).reshape(-1, branches).T


# ---- Shortest paths through branches.


CHUNK = 1 << 15  # elements at once, so that they fit into the processor's caches


class Paths:
    """`last` [own counts, ways, modes, caps, fork's counts]: seconds to the end of each way's last layer. `allowed` and
    `moved` [own counts, join's counts, ways, modes]: the transfer from there to the joining layer, with inf if the
    limit forbids it; and without the limit. `rows` [3, 1 + ways * modes * caps, fork's counts * join's], if wanted:
    minima over the last layer's counts of the seconds, of the final transfer among those that take so long, and of the
    transfer; row 0 is zero. `inner`: seconds between the ends of blocks inside, by number, [caps, counts, counts]."""

    def __init__(self, level: BlockLevel, rules: Rules, inner: Mapping[int, Array], *, rows: bool) -> None:
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

    def _entries(self, level: BlockLevel) -> Array:
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
        """Write `rows` of some ways into `out` [3, ways, modes, caps, fork's counts, join's]."""
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
        """For several ways and each count of the last layer: seconds from count g of the fork to count h of the join,
        without the join's own; and the final transfer's part of them."""
        seconds = self.last[:, ways, modes, caps, g] + self.allowed[:, h, ways, modes]
        return zip(seconds.T.tolist(), self.moved[:, h, ways, modes].T.tolist(), strict=True)

    def back(self, way: int, step: int, mode: int, cap: int, g: int, count: int) -> int:
        """The count of the previous layer, if the way's layer number `step` has `count`."""
        chunk, i = divmod(way, self.size)
        before = self._states[chunk][step - 1][:, i, mode, cap, g]
        layers, blocks = self.ways[way].layers, self.ways[way].blocks
        if blocks[step] is None:
            edges = self._edges[step - 1][:, count, way]
        else:
            edges = self._inside(step, layers, blocks)[cap, :, count]
        return int((before + edges).argmin())


# ---- A branch-join block as an edge between its two ends: the least time from each count of the branching layer to
# each count of the joining one, over the ways to run its branches one after the other or side by side.
#
# Some branches stay at home, on the same first GPUs one after the other; each of the others gets GPUs of its own. A way
# to share the GPUs (`Split`) gives the most that each may use. More GPUs never hurt, so only splits are tried in which
# no branch could have more. Under each split a branch is a shortest path that stays within its GPUs. Blocks with
# equally many branches are computed together.


SHARED_CHUNK = 1 << 17  # elements at once


class _Found(NamedTuple):
    """The best way between two counts: its split, and the count (an index) of each branch's last layer."""

    seconds: float
    split: Split
    ends: tuple[int, ...]


def tables(graph: LayerGraph, rules: Rules, gpus: int) -> dict[int, BlockTable]:
    """Every block's table, by number: for blocks inside of others within each count of GPUs, for the rest within
    `gpus`. Raises ConfigError for a block that can run in too many ways."""
    found: dict[int, BlockTable] = {}
    for level in graph.levels:
        for table in _Level(level, rules, found, gpus).tables():
            found[table.site.block.number] = table
    return found


class _Level:
    """Blocks that can be computed together."""

    def __init__(self, level: BlockLevel, rules: Rules, known: Mapping[int, BlockTable], gpus: int) -> None:
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
            table = splits_table(k, empty, counts if inner else (self.gpus,), counts)
            work = k * len(counts) ** 2 * max([len(some.caps) for some in table.splits])
            size = max(1, SHARED_CHUNK // max(1, work))
            for at in range(0, len(places), size):
                group = _Group(self, places[at : at + size], empty, table)
                if k == 2:
                    group.pairs()
                else:
                    group.relaxed()
                found += [BlockTable(group, i) for i in range(len(group.sites))]
        return found


class _Group:
    """Blocks with equally many branches. `times` [splits, blocks, fork's counts, join's] for each number of GPUs: lower
    bounds under a split. `lower` [numbers, blocks, fork's counts, join's]: the least of them, inf if there is no way.
    `sure`: whether that is exact."""

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
        """Bounds as if the joining layer's limit held for each transfer alone; `sure` if it holds for all together."""
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
        """The rows of Paths, followed by rows for empty branches, and the first row of each block's branches."""
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
        """Exact times for blocks of two branches: over all pairs of their last counts that keep the joining layer's
        limit together."""
        modes, caps = (np.concatenate(each, 1) for each in (self.table.modes, self.table.caps))
        n, b, count = self.lower.shape[2], len(self.sites), modes.shape[1]
        # own counts (x of one branch, y of the other), join's counts, blocks, fork's counts, splits
        (first, into), (second, in_too) = (self._ends(i, modes[i], caps[i]) for i in range(2))
        together = np.flatnonzero((modes == HOME).all(0))
        times = np.empty((n, b, n, count))  # join's counts, blocks, fork's counts, splits
        room = self.room.T[:, :, None, None]
        size = first.shape[0] * second.shape[0] * b * n
        step = max(1, min(count, SHARED_CHUNK // size))
        wide = max(1, min(n, SHARED_CHUNK // (size * step)))
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
        """For one branch of each block, seconds and the transfer at its end, [own counts, join's counts, blocks, fork's
        counts or 1, splits]; an empty one has one own count."""
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
    """Indices in the order of their values. Lazy: in most cases only the first is used."""
    if values.size:
        yield int(values.argmin())
        yield from values.argsort(kind="stable").tolist()[1:]


def _choices(seconds: Sequence[float], moved: Sequence[float]) -> list[tuple[float, float, int]]:
    """(seconds, transfer, last count) of a branch, the fastest first, each with a smaller transfer than those
    before."""
    found: list[tuple[float, float, int]] = []
    for each in sorted(zip(seconds, moved, count(), strict=False)):
        if each[0] < inf and (not found or each[1] < found[-1][1]):
            found.append(each)
    return found


class BlockTable:
    """A block within each of several numbers of GPUs. `lower` [numbers, fork's counts, join's counts]: lower bounds of
    its time; inf if there is no way."""

    def __init__(self, group: _Group, at: int) -> None:
        self.group, self.at, self.site = group, at, group.sites[at]
        self.lower, self._sure = group.lower[:, at], group.sure[:, at]
        self._found: dict[tuple[int, int, int], _Found] = {}

    def exact(self, limit: int, g: int, h: int) -> float:
        """The least seconds from count g to count h (indices) within the `limit`-th number of GPUs; inf: no way.
        Updates `lower`."""
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
        """Try splits by rising lower bound, until no other could be faster."""
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
        """For each branch under a split and each count of its last layer (for an empty one, once): the seconds and the
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
        """The least seconds under `split`, less than `below`, such that all transfers into the joining layer keep its
        limit together; (inf, ()) if there are none. Tries combinations of the branches' last counts, leaving out those
        that are slower and transfer more than another."""
        room = float(self.group.room[self.at, h])
        quickest = [min(seconds) for seconds, _ in options]
        ends = tuple([seconds.index(each) for (seconds, _), each in zip(options, quickest, strict=True)])
        if sum([moved[end] for (_, moved), end in zip(options, ends, strict=True)]) <= room:  # the usual case
            at_home = sum([each for each, mode in zip(quickest, split.modes, strict=True) if mode == HOME])
            away = max([each for each, mode in zip(quickest, split.modes, strict=True) if mode == AWAY], default=0.0)
            return max(at_home, away), ends
        choices = [_choices(*each) for each in options]
        least = [0.0]  # lower bound of the transfers of all branches from here on
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

    # ---- reading the best path back

    def collect(self, limit: int, g: int, h: int, placed: dict[int, int], away: set[tuple[int, int]]) -> None:
        """Record the counts (indices) of the block's layers, and the branches that are away, between counts g and h."""
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
