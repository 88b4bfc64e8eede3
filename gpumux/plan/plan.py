"""A plan: the number of GPUs of each layer, and the times that follow from it under a graph's costs.

Time (DeepPool, section 4.1): layers run one after the other; layer i takes T(i) = comm into it + comp + sync. Between a
layer that branches and the one that joins, each branch is either at home or away. Branches at home run one after the
other on the first GPUs. A branch that is away runs at the same time on GPUs of its own, and all its samples move there
and back. The block takes as long as the home branches together or the longest branch away, whichever is more, the
transfers into the joining layer included. A joining layer's T includes the transfers from all its branches. Home and
each branch that is away get a set of GPUs whose size is one of the considered counts, and all sets in use at once fit
into the cluster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf, isfinite, isinf
from typing import NamedTuple

import numpy as np

from gpumux.errors import ConfigError
from gpumux.plan.costs import TOLERANCE, Array, Costs, Tables
from gpumux.plan.graph import Block, Chain, LayerGraph, members
from gpumux.program.saved_plan import PlanRow


@dataclass(frozen=True)
class Placement:
    """`gpus`: the number of GPUs of each layer, by index. `away`: (block's number, branch) of the branches away."""

    gpus: tuple[int, ...]
    away: frozenset[tuple[int, int]] = frozenset()


@dataclass(frozen=True)
class BurstPlan:
    """The times of a placement. times: T(i), seconds. amplification: T(i) * GPUs / comp(i, 1), None if that is 0/0.
    limit: the amplification limit it was made for. width: the most GPUs set apart at once."""

    graph: LayerGraph
    placement: Placement
    algorithm: str
    gpus: int
    batch: int
    limit: float
    seconds: float
    times: tuple[float, ...]
    amplification: tuple[float | None, ...]
    rows: tuple[PlanRow, ...]
    width: int
    single_seconds: float  # one iteration on one GPU

    @property
    def gpu_seconds(self) -> float:
        """GPU-seconds that layers hold: T(i) times their GPUs, as the amplification counts them."""
        return sum(t * g for t, g in zip(self.times, self.placement.gpus, strict=True))

    @property
    def busy(self) -> float:
        """GPU-seconds in which a GPU runs a layer or moves its samples."""
        return sum(row.seconds * row.gpus for row in self.rows)

    @property
    def idle(self) -> float:
        """GPU-seconds of the cluster that other jobs can use in each iteration."""
        return max(0.0, self.gpus * self.seconds - self.busy)  # rounding may go below zero

    @property
    def speedup(self) -> float:
        """Speed-up over the same batch on one GPU."""
        return self.single_seconds / self.seconds if self.seconds else inf

    def over_limit(self) -> tuple[int, ...]:
        """Layers above the amplification limit."""
        return tuple(i for i, a in enumerate(self.amplification) if a is not None and a > self.limit * (1 + TOLERANCE))

    def figures(self) -> dict[str, object]:
        """Seconds and GPU-seconds of an iteration, as plain data."""
        names = [layer.name for layer in self.graph.layers]
        return {
            "model": self.graph.name,
            "device": self.graph.device,
            "algorithm": self.algorithm,
            "gpus": self.gpus,
            "global_batch": self.batch,
            "amplification_limit": self.limit if isfinite(self.limit) else None,
            "iteration_s": self.seconds,
            "single_gpu_s": self.single_seconds,
            "speedup": self.speedup,
            "gpu_s": self.gpu_seconds,
            "busy_gpu_s": self.busy,
            "idle_gpu_s": self.idle,
            "most_gpus": self.width,
            "over_limit": [names[i] for i in self.over_limit()],
            "notes": list(self.graph.notes),
            "layers": [
                {"name": names[i], "gpus": self.placement.gpus[i], "seconds": self.times[i],
                 "amplification": self.amplification[i]}
                for i in members(self.graph.chain)
            ],
            "away": sorted(f"block {block} branch {branch}" for block, branch in self.placement.away),
            "timeline": [
                {"layer": names[row.layer], "transfer": row.transfer, "start_s": row.start, "comm_s": row.comm,
                 "comp_s": row.comp, "sync_s": row.sync, "first_gpu": row.first, "gpus": row.gpus,
                 "after": list(row.after)}
                for row in self.rows
            ],
        }  # fmt: skip


def evaluate(
    graph: LayerGraph,
    costs: Costs,
    placement: Placement,
    *,
    gpus: int,
    batch: int,
    limit: float = inf,
    algorithm: str = "given",
) -> BurstPlan:
    """The times of a placement by the model above. Raises ConfigError if a layer's count is not among the costs', or
    more than `gpus` are in use at once."""
    if len(placement.gpus) != len(graph.layers) or not set(placement.gpus) <= set(costs.counts):
        raise ConfigError(f"GPU counts {sorted(set(placement.gpus))}", f"one of {tuple(costs.counts)} for each layer")
    run = _Run(costs, placement)
    seconds = run.chain(graph.chain, None, False, _Ready(0.0, ()), 0).at
    width = _width(graph.chain, placement, costs.counts)
    if width > gpus:
        raise ConfigError(f"a plan that uses {width} GPUs at once", f"the cluster has {gpus}")
    singles = [costs.comp(i, 1) for i in range(len(graph.layers))]
    times = tuple(run.times[i] for i in range(len(graph.layers)))
    return BurstPlan(
        graph,
        placement,
        algorithm,
        gpus,
        batch,
        limit,
        seconds,
        times,
        tuple(_amplification(t, g, one) for t, g, one in zip(times, placement.gpus, singles, strict=True)),
        _in_order(run.rows),
        width,
        sum(singles),
    )


def _amplification(seconds: float, gpus: int, single: float) -> float | None:
    if single > 0:
        return seconds * gpus / single
    return inf if seconds > 0 else None


def _width(chain: Chain, placement: Placement, counts: Sequence[int]) -> int:
    """Number of GPUs that a chain needs at once: its widest layer, or a block's home and away branches together."""
    found = 0
    for each in chain:
        if isinstance(each, Block):
            home, away = _sets(each, placement, counts)
            found = max(found, home + sum(away.values()))
        else:
            found = max(found, placement.gpus[each])
    return found


def _sets(block: Block, placement: Placement, counts: Sequence[int]) -> tuple[int, Mapping[int, int]]:
    """Number of GPUs set apart for the home branches together, and for each branch that is away."""
    home, away = 0, {}
    for i, branch in enumerate(block.branches):
        needed = _width(branch, placement, counts)
        size = min((count for count in counts if count >= needed), default=None) if needed else 0
        if size is None:
            raise ConfigError(f"a branch that uses {needed} GPUs at once", f"sets have one of {tuple(counts)} GPUs")
        if (block.number, i) in placement.away:
            away[i] = size
        else:
            home = max(home, size)
    return home, away


class _Ready(NamedTuple):
    """A moment of the walk: the time, and the rows of which the last one ends then."""

    at: float
    after: tuple[int, ...]


class _Run:
    """Walks a graph once and records what runs when and where, and after what."""

    def __init__(self, costs: Costs, placement: Placement) -> None:
        self.costs, self.placement = costs, placement
        self.rows: list[PlanRow] = []
        self.times: dict[int, float] = {}

    def chain(self, chain: Chain, fork: int | None, away: bool, ready: _Ready, first: int) -> _Ready:
        """Run a chain with samples of layer `fork`, on GPUs from `first` on; returns its end."""
        last, incoming = fork, None
        for place, each in enumerate(chain):
            if isinstance(each, Block):
                assert last is not None
                following = chain[place + 1]
                assert isinstance(following, int)
                ready, incoming = self.block(each, last, following, ready, first)
                continue
            g = self.placement.gpus[each]
            comm = 0.0
            if incoming is None and last is not None:
                move = self.costs.moved if away and last == fork else self.costs.comm
                comm = move(last, self.placement.gpus[last], g)
            comp, sync = self.costs.comp(each, g), self.costs.sync(each, g)
            row = PlanRow(each, ready.at, comm, comp, sync, first, g, after=ready.after)
            self.times[each] = row.seconds + (incoming or 0.0)
            ready, last, incoming = self.add(row), each, None
        return ready

    def add(self, row: PlanRow) -> _Ready:
        """Record a row; returns its end."""
        self.rows.append(row)
        return _Ready(row.end, (len(self.rows) - 1,))

    def block(self, block: Block, fork: int, join: int, ready: _Ready, first: int) -> tuple[_Ready, float]:
        """(when all of the block is at the joining layer, seconds of transfers into that layer)."""
        home, away = _sets(block, self.placement, self.costs.counts)
        at_home, incoming, place = ready, 0.0, first + home
        ends = []
        for i, branch in enumerate(block.branches):
            moved = i in away
            at, begins = (place, ready) if moved else (first, at_home)
            done = self.chain(branch, fork, moved, begins, at)
            last = branch[-1] if branch else fork
            assert isinstance(last, int)
            move = self.costs.moved if moved else self.costs.comm
            g = self.placement.gpus[last]
            comm = move(last, g, self.placement.gpus[join])
            on = g if branch else min(g, home)  # an away branch may by now run where a skip's samples are
            if comm:
                done = self.add(PlanRow(last, done.at, comm, 0.0, 0.0, at, on, transfer=True, after=done.after))
            incoming += comm
            ends.append(done)
            if moved:
                place += away[i]
            else:
                at_home = done
        after = {each: None for end in ends for each in end.after}  # a set in order
        return _Ready(max(ready.at, *(end.at for end in ends)), tuple(after)), incoming


def _in_order(rows: Sequence[PlanRow]) -> tuple[PlanRow, ...]:
    """Rows by start and GPU. Those that take no time come before those that start with them and may wait for them."""

    def key(place: int) -> tuple[float, int, int, float]:
        row = rows[place]
        return (row.start, 1, row.first, row.end) if row.end > row.start else (row.start, 0, 0, row.end)

    order = sorted(range(len(rows)), key=key)
    places = {old: new for new, old in enumerate(order)}
    return tuple([replace(rows[old], after=tuple(sorted(places[each] for each in rows[old].after))) for old in order])


# ---- The edges between layers under the amplification limit: T(i) depends on the counts of layer i and of the layers
# that its input comes from, so the limit removes edges and nothing else.


@dataclass(frozen=True, slots=True)
class Rules:
    """`room` [layers, counts]: seconds that transfers into a layer may take; below 0 if the layer alone exceeds the
    limit."""

    tables: Tables
    room: Array

    def edges(self, before: slice | Sequence[int], behind: slice | Sequence[int]) -> Array:
        """Seconds from each layer to the next, [pairs, counts behind, counts before]: the transfer and the next layer
        itself; inf if the limit forbids it."""
        comm = self.tables.comm(before).transpose(0, 2, 1)
        edges: Array = comm + self.tables.work[behind][:, :, None]
        edges[comm > self.room[behind][:, :, None]] = inf
        return edges

    def transfers(self, before: Sequence[int], behind: Sequence[int]) -> tuple[Array, Array]:
        """Transfers into or out of branches, [pairs, modes, counts before, counts behind]: with inf if the limit
        forbids the transfer alone, and unlimited."""
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
