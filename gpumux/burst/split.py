"""One step as operators of several ranks, from the traces of the whole batch and of each part that ranks hold.

The walk goes once over the whole trace. An operator of a part is written for each rank of its layer, over the rank's
part of the batch; what a rank has in another layout, or not at all, is moved first. An operator that needs a value
reduced over the batch runs after the ranks' shares of it were summed, on every rank that holds what it changes. Since
there is one walk, all ranks meet the collectives in one order.

Per-sample gradients of a mean are larger in a part than in the whole batch, by a power of the number of parts. The
proof of each split (capture/microbatch/proof.py) has measured that power for every value; where a value crosses
between different numbers of ranks it is scaled. Random numbers are drawn for the whole batch on every rank, which then
takes its part: each sample draws what it draws alone, and generators stay in step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log, prod
from typing import Any

import torch

from gpumux.burst.layout import Kinds, Layout, Ranks, lay_out
from gpumux.burst.norms import BatchNorm, Statistics, Sum, SyncNorm, values_of_a_channel, without_running
from gpumux.burst.numbering import DRAWS, FILLS
from gpumux.burst.placement import RankPlacement
from gpumux.burst.proof import REMEDY, Lockstep, Parts, Proven, Tail, parts_written, prove_ranks
from gpumux.capture.microbatch.classify import (
    OperatorPair,
    RunLevel,
    Setting,
    SplitPlan,
    ValueKind,
    classify,
    pair_up,
    refs_of,
    scaled,
)
from gpumux.capture.microbatch.emit import PartEmitter
from gpumux.capture.microbatch.proof import Match, Proof, prove_once
from gpumux.capture.microbatch.split import Loader, exits, fixed, split_positions, with_operators_once
from gpumux.capture.recorder import RankResult, RankTraces, RawCollective, RawOp, RawStorage, TraceRecord
from gpumux.capture.state import StateTable
from gpumux.capture.tracer import RawTrace, TensorResult
from gpumux.capture.values.machine import PATTERN_ONLY, outs_of
from gpumux.errors import NotSplittable
from gpumux.hostmemory import freed_is_reused
from gpumux.program.ir import ITEM_BYTES, Tag, TensorRef, View, contiguous_strides, extent

EXCHANGED = "collective"  # target of a RawOp that is one


def split_over_ranks(
    full: RawTrace,
    parts: Mapping[int, RawTrace],
    tensors: list[torch.Tensor],
    placement: RankPlacement,
    table: StateTable,
    batch_norm: BatchNorm = "refuse",
    proven: Proven | None = None,
) -> RankTraces:
    """The operators of each rank. `parts`: the trace of the first of g parts of the batch, for each number of ranks g
    above 1 that a layer has, and at least for one g. `batch_norm`: see norms.py. `proven`: what is
    known of the job's other steps, to which is added: the phases of an optimizer differ behind the gradients alone.
    Raises NotSplittable."""
    known = proven or Proven()
    try:
        with freed_is_reused():  # the proofs take some times the memory of a step
            return with_operators_once(
                lambda once: _split(full, parts, tensors, placement, table, batch_norm, known, once)
            )
    except NotSplittable as error:
        message, remedy = (_of_ranks(text) for text in (error.message, error.remedy))
        raise NotSplittable(message, remedy) from error


def _of_ranks(text: str) -> str:
    """What the analysis of microbatches says, in the words of ranks."""
    for theirs, ours in (
        ("use fewer microbatches", "give the layers fewer ranks"), ("without microbatches", "to one daemon"),
        ("submit the step without them", "submit the step to one daemon"), ("microbatches", "parts"),
    ):  # fmt: skip
        text = text.replace(theirs, ours)
    return text


def _split(
    full: RawTrace,
    parts: Mapping[int, RawTrace],
    tensors: list[torch.Tensor],
    placement: RankPlacement,
    table: StateTable,
    batch_norm: BatchNorm,
    proven: Proven,
    once: frozenset[int],
) -> RankTraces:
    cuts = {g: split_positions(tensors, g, over_ranks=True) for g in parts}
    gradients = {place.buffer for _, place in full.entry.gradients}
    returned = [
        (i, a.view, tuple(part.results[i].view for part in parts.values()))
        for i, a in enumerate(full.results)
        if isinstance(a, TensorResult)
    ]
    classified: dict[int, tuple[list[OperatorPair], SplitPlan]] = {}
    for g, part in parts.items():
        setting = Setting(cuts[g], fixed(table), gradients, norms=True, once=once, spread=True)
        pairs = pair_up(full, part)
        plan = classify(pairs, full.record, part.record, g, setting, exits(full), [a for _, a, _ in returned])
        classified[g] = pairs, plan
    if batch_norm == "refuse":
        _refuse_batch_norms(classified)
    _refuse_different({g: plan for g, (_, plan) in classified.items()})
    some = next(iter(parts))
    pairs, plan = classified[some]
    cut = cuts[some]
    layout = lay_out(full, pairs, plan, placement, cut, table, [a for _, a, _ in returned], proven.homes)
    splits: dict[int, _Split] = {}
    for at, (g, part) in enumerate(parts.items()):
        pairs, plan = classified[g]
        plan.shares |= layout.summed
        joined = [(a, b[at]) for _, a, b in returned if _per_sample(full, plan, a)]
        make = _maker(pairs, full, part, plan, g, cuts[g])
        load, records = Loader(full.record, table, tensors, cuts[g]), (full.record, part.record)
        proof = prove_once(proven.splits, records, pairs, plan, make, load, joined, spread=True)
        side_by_side = {a: b for a, b in joined if proof.joined[a, b] == 1.0}
        splits[g] = _Split(g, part.record, pairs, plan, proof, Parts(plan, make, proof.ratios, side_by_side))
    walk = _Walk(full, splits, layout, placement=placement, cut=cut, batch_norm=batch_norm)
    traces = walk.run([(a, dict(zip(parts, b, strict=True))) for _, a, b in returned])
    lockstep = walk.lockstep(traces, [a for _, a, _ in returned])
    prove_ranks(lockstep, Loader(full.record, table, tensors, cut), proven)
    return traces


def _refuse_batch_norms(classified: Mapping[int, tuple[list[OperatorPair], SplitPlan]]) -> None:
    for pairs, plan in classified.values():
        for j in sorted(plan.norms):
            raise NotSplittable(
                f"{pairs[j].full.where}: batch norm in training mode uses the mean and variance of the whole batch, and"
                " ranks have parts of it",
                "choose batch_norm='sync' (statistics over the ranks: what one device computes, with two exchanges a"
                " layer and one in its backward pass) or 'rank' (each rank's own, as DistributedDataParallel)",
            )


def _maker(
    pairs: list[OperatorPair], full: RawTrace, part: RawTrace, plan: SplitPlan, count: int, cut: set[int]
) -> Callable[[], PartEmitter]:
    return lambda: PartEmitter(pairs, full.record, part.record, plan, count=count, split=cut)


def _per_sample(full: RawTrace, plan: SplitPlan, view: int) -> bool:
    storage = full.record.views[view].storage
    return plan.kinds[storage] in _SAMPLES and full.record.storages[storage].kind == "temp"


_SAMPLES = (ValueKind.SAMPLE, ValueKind.DATA)
_MOVED = (*_SAMPLES, ValueKind.SIZE)


@dataclass(frozen=True, slots=True)
class _Split:
    count: int
    record: TraceRecord
    pairs: list[OperatorPair]
    plan: SplitPlan
    proof: Proof
    parts: Parts


def _refuse_different(plans: Mapping[int, SplitPlan]) -> None:
    """Raises NotSplittable if parts of different sizes are split in different ways."""
    what = {g: (p.levels, p.kinds, p.whole, p.late, p.shares, p.losses, p.counts, p.divided) for g, p in plans.items()}
    one, *others = what
    different = next((g for g in others if what[g] != what[one]), None)
    if different is not None:
        raise NotSplittable(
            f"the step is split in another way into {different} parts than into {one}",
            "give the layers of the plan equal numbers of ranks, or a larger batch (a part of one sample often takes"
            " another way)",
        )


class _RankEmitter(PartEmitter):
    """Writes the operators of parts for ranks, each of which has a memory of its own: values that are summed over ranks
    lie on the whole trace's storages."""

    def storage(self, storage: int, part: int) -> int:
        return storage if storage in self._shared else super().storage(storage, part)


@dataclass(slots=True)
class _Samples:
    """How a per-sample value lies in memory. `view`: over all of it, of the whole trace; `parts`: of each number of
    ranks. `power`: the value of the whole batch is the number of parts to this power times those of the parts; None
    while every value seen was zero. `inner`: see proof.Match."""

    view: int
    parts: dict[int, int]
    power: int | None
    inner: int
    known: bool = True  # whether it is known how parts make up the whole


Holder = tuple[int, int, int]  # rank, number of parts, part


class _Walk:
    def __init__(
        self,
        full: RawTrace,
        splits: Mapping[int, _Split],
        layout: Layout,
        *,
        placement: RankPlacement,
        cut: Collection[int],
        batch_norm: BatchNorm,
    ) -> None:
        some = next(iter(splits.values()))
        source = full.record
        self.full, self.splits, self.layout = full, splits, layout
        self.pairs, self.plan = some.pairs, some.plan
        self.kinds = Kinds(full, cut)
        self.cut = cut
        self.everyone = frozenset(range(placement.ranks))
        self.record = TraceRecord(
            list(source.storages), list(source.views), [], source.scalars, source.inputs, source.state_storage
        )
        self.emitters = {
            g: _RankEmitter(
                s.pairs, source, s.record, s.plan, count=g, split=set(cut), shared=s.plan.shares, record=self.record
            )
            for g, s in splits.items()
        }
        self.batch_norm = batch_norm
        self.norms = {g: SyncNorm(emitter) for g, emitter in self.emitters.items()}
        self.statistics: dict[tuple[int, int], Statistics] = {}  # by storage of a saved mean, and number of ranks
        self.batch = next(iter(self.emitters.values())).samples
        self.ops: list[list[RawOp]] = [[] for _ in self.everyone]
        self.ats: list[list[int]] = [[] for _ in self.everyone]  # the operator of the whole trace that each is for
        self.written: dict[int, set[Holder]] = {}  # operator -> the parts of it that ranks run
        self.made: list[set[int]] = [set() for _ in self.everyone]  # storages that a rank has
        self.sequence = 0
        # From which operator on all is the tail of a wave's step (waves/trace.py), what ranks exchange for it too.
        self.first_of_tail = next((j for j, pair in enumerate(self.pairs) if pair.full.tail), None)
        self.to_spread: dict[int, tuple[int, int, frozenset[int], str]] = {}  # running statistics, by their storage
        self.home: dict[int, frozenset[int]] = {}  # storage -> the ranks that have it whole
        for index, storage in enumerate(source.storages):
            if storage.kind == "state":
                self.home[index] = frozenset(layout.homes.get(storage.key, self.everyone))
            elif storage.kind != "temp":
                self.home[index] = self.everyone
        self.samples: dict[int, _Samples] = {}
        self.holders: dict[int, set[Holder]] = {}  # storage of samples -> who has which part
        self.shares: dict[int, Ranks] = {}  # storage whose shares lie on these ranks
        self.tail = Tail(0, {}, {})
        self.last_touch: dict[int, int] = {}
        for j, (pair, level) in enumerate(zip(self.pairs, self.plan.levels, strict=True)):
            if level is RunLevel.PART:
                self.last_touch.update(dict.fromkeys(pair.full.reads | pair.full.writes, j))

    def run(self, returned: Sequence[tuple[int, Mapping[int, int]]]) -> RankTraces:
        """`returned`: views that the step returns, each with that of a part, by the number of parts."""
        begin = max((j for j, level in enumerate(self.plan.levels) if level is RunLevel.PART), default=-1) + 1
        for j, (pair, level) in enumerate(zip(self.pairs, self.plan.levels, strict=True)):
            self.at = j
            if j == self.first_of_tail:
                for view, source, ranks, where in self.to_spread.values():
                    self.spread(view, source, ranks, where)
            if j == begin:
                self.tail = Tail(begin, self.shares_now(), dict(self.home))
            if level is not RunLevel.PART:
                self.whole(pair.full)
            else:
                if j in self.plan.whole or j in self.plan.late:
                    self.whole(pair.full)
                if pair.full.random is not None:
                    self.draw(j, pair)
                else:
                    self.part(j, pair)
            self.kinds.after(pair, self.plan.outs[j])
        self.at = len(self.pairs)
        if begin == self.at:
            self.tail = Tail(begin, self.shares_now(), dict(self.home))
        self.sum_up([s for s in sorted(self.plan.shares) if s in self.shares])
        results = [self.result(view, of_parts) for view, of_parts in returned]
        held = [frozenset(s for s, ranks in self.home.items() if rank in ranks) for rank in sorted(self.everyone)]
        return RankTraces(self.record, self.ops, held, results, self.layout.homes)

    def shares_now(self) -> dict[int, tuple[Ranks, float]]:
        """By storage that will be summed, the ranks that have shares of it, and the factor of their sum."""
        factors = {g: split.proof.ratios for g, split in self.splits.items()}
        shares = [(s, ranks) for s, ranks in self.shares.items() if s in self.plan.shares]
        return {s: (ranks, factors[len(ranks)][s] if len(ranks) > 1 else 1.0) for s, ranks in shares}

    def lockstep(self, traces: RankTraces, returned: Sequence[int]) -> Lockstep:
        """What the proof of the split runs."""
        plans = {g: (split.plan, split.proof) for g, split in self.splits.items()}

        def view_of(parts: int, view: int, part: int) -> int:
            return self.emitters[parts].part_view(view, part)

        written = {j: parts_written(j, sorted(places), plans, view_of) for j, places in self.written.items()}
        kept = {self.record.views[v].storage for v in exits(self.full)}
        kept |= {i for i, storage in enumerate(self.record.storages) if storage.kind == "state"}
        norms = frozenset(self.plan.norms) if self.batch_norm == "rank" else frozenset[int]()
        parts = None if len(self.splits) > 1 else next(iter(self.splits.values())).parts
        return Lockstep(self.pairs, traces, self.ats, written, returned, frozenset(kept), self.tail, norms, parts)

    # ---- operators on whole values -------------------------------------------------------------------

    def whole(self, op: RawOp) -> None:
        """Write an operator on values that do not depend on the part of the batch, on the ranks that it is for."""
        for storage in sorted(op.reads):
            if storage in self.shares:
                self.sum_up([storage])
        if op.target.startswith(("aten._foreach_", "aten._fused_")):
            self.by_entry(op)
            return
        refs = [self.record.views[v].storage for v in refs_of((op.args, tuple(a for _, a in op.kwargs)))]
        ranks = self.everyone if op.random is not None else self.ranks_for(op, refs)
        self.provide([s for s in refs if not self.is_pattern(op)], ranks, op.where)
        for rank in sorted(ranks):
            self.put(rank, op)
        self.home.update(dict.fromkeys(op.writes, ranks))

    def is_pattern(self, op: RawOp) -> bool:
        return op.target.split(".")[1] in PATTERN_ONLY

    def ranks_for(self, op: RawOp, storages: Collection[int]) -> frozenset[int]:
        """The ranks that run an operator: all that have what it changes, or else those that have all it reads."""
        changed = [self.home[s] for s in storages if s in op.writes]
        if changed:
            return frozenset[int]().union(*changed)
        given = [s for s in storages if s in self.home]
        common = self.everyone.intersection(*(self.home[s] for s in given))
        if common or not given:
            return common
        return self.home[max(given, key=lambda s: (self.record.storages[s].nbytes, -s))]

    def by_entry(self, op: RawOp) -> None:
        """Write an operator over lists of tensors. Each rank has the entries whose tensors it holds."""
        length = len(next(arg for arg in op.args if isinstance(arg, tuple)))
        lists = [i for i, arg in enumerate(op.args) if isinstance(arg, tuple) and len(arg) == length]
        entries: list[list[int]] = []
        for e in range(length):
            given = [op.args[i][e] for i in lists]  # type: ignore[index]
            entries.append([self.record.views[v].storage for v in refs_of(tuple(given))])
        ranks = [self.ranks_for(op, storages) for storages in entries]
        for storages, there in zip(entries, ranks, strict=True):
            self.provide(storages, there, op.where)
        single = tuple(arg for i, arg in enumerate(op.args) if i not in lists)
        others = [self.record.views[v].storage for v in refs_of((single, tuple(a for _, a in op.kwargs)))]
        self.provide(others, frozenset[int]().union(*ranks), op.where)
        for rank in sorted(self.everyone):
            mine = [e for e in range(length) if rank in ranks[e]]
            if mine:
                self.put(rank, self.of_entries(op, mine, lists, length))
        for e, out in enumerate(_entries(op.outs, length)):
            made = {self.record.views[v].storage for v in out} | (set(entries[e]) & op.writes)
            self.home.update(dict.fromkeys(made, ranks[e]))

    def of_entries(self, op: RawOp, mine: list[int], lists: Collection[int], length: int) -> RawOp:
        if len(mine) == length:
            return op
        args = tuple(tuple(arg[e] for e in mine) if i in lists else arg for i, arg in enumerate(op.args))  # type: ignore[index]
        outs = tuple(
            tuple(out[e] for e in mine) if isinstance(out, tuple) and len(out) == length else out for out in op.outs
        )
        used = {self.record.views[v].storage for v in refs_of((args, tuple(a for _, a in op.kwargs)))}
        made = {self.record.views[v].storage for v in outs_of(outs)}
        return replace(op, args=args, outs=outs, reads=op.reads & used, writes=op.writes & (used | made))

    def provide(self, storages: Iterable[int], ranks: frozenset[int], where: str) -> None:
        """Send whole values to the ranks that lack them."""
        sent: dict[int, list[tuple[int, int]]] = {}
        received: dict[int, list[tuple[int, int]]] = {}
        for storage in dict.fromkeys(storages):
            if storage not in self.home:
                raise NotSplittable(f"{where} needs a value of the whole batch that no rank has", REMEDY)
            missing = sorted(ranks - self.home[storage])
            if not missing:
                continue
            if self.record.storages[storage].kind == "state":
                raise NotSplittable(
                    f"{where} computes with state of the job that lies on other ranks",
                    "give modules whose parameters meet outside of forward and backward (weights and a moving average"
                    " of them) the same ranks in the plan",
                )
            view, source = self.over(storage), min(self.home[storage])
            for rank in missing:
                sent.setdefault(source, []).append((rank, view))
                received.setdefault(rank, []).append((source, view))
            self.home[storage] |= frozenset(missing)
        self.exchange(sent, received, where)

    def over(self, storage: int) -> int:
        """A dense view over all of a storage."""
        s = self.record.storages[storage]
        count = s.nbytes // ITEM_BYTES[s.dtype]
        return self.view(View(storage, s.dtype, (count,), (1,)))

    def view(self, view: View) -> int:
        return next(iter(self.emitters.values())).view(view)

    # ---- collectives ---------------------------------------------------------------------------------

    def sum_up(self, wanted: list[int]) -> None:
        """Sum the shares of these values, and of all others that are complete by now, since one collective costs less
        than two."""
        if not wanted:
            return
        ready = {s for s in self.shares if s in self.plan.shares and self.last_touch[s] < self.at}
        groups: dict[tuple[Ranks, float], list[int]] = {}
        ratios = {g: split.proof.ratios for g, split in self.splits.items()}
        for storage in sorted(ready | set(wanted)):
            ranks = self.shares.pop(storage)
            self.home[storage] = frozenset(ranks)
            if len(ranks) > 1:
                groups.setdefault((tuple(sorted(ranks)), ratios[len(ranks)][storage]), []).append(storage)
        for (ranks, ratio), storages in groups.items():
            views = tuple(self.over(s) for s in storages)
            self.add_up(ranks, views, ratio, "the sum over ranks")

    def add_up(self, ranks: Ranks, views: tuple[int, ...], scale: float, where: str) -> None:
        one = RawCollective("all_reduce", self.sequence, ranks, views, scale)
        self.sequence += 1
        storages = frozenset(self.record.views[v].storage for v in views)
        for rank in ranks:
            self.add(rank, one, storages, storages, where)

    def exchange(
        self, sent: Mapping[int, list[tuple[int, int]]], received: Mapping[int, list[tuple[int, int]]], where: str
    ) -> None:
        members = tuple(sorted({*sent, *received}))
        if not members:
            return
        for rank in members:
            out, into = sent.get(rank, []), received.get(rank, [])
            one = RawCollective("exchange", self.sequence, members, sends=tuple(out), receives=tuple(into))
            storages = [frozenset(self.record.views[v].storage for _, v in each) for each in (out, into)]
            self.add(rank, one, storages[0] | storages[1], storages[1], where)
        self.sequence += 1

    def add(self, rank: int, one: RawCollective, reads: frozenset[int], writes: frozenset[int], where: str) -> None:
        self.put(rank, RawOp(EXCHANGED, (), (), (), reads, writes, None, where, collective=one))

    # ---- operators on parts of the batch ---------------------------------------------------------------

    def part(self, j: int, pair: OperatorPair) -> None:
        on = self.layout.on[j]
        pattern = pair.name in PATTERN_ONLY
        if j in self.layout.mixed:
            self.whole(pair.full)
            return
        places = sorted(self.layout.copies[j]) if on is None else [on]
        if not pattern:
            unread = self.to_spread if j in self.plan.norms else ()  # a norm in training mode reads no running ones
            common = [s for s in sorted(pair.full.reads) if self.kinds[s] is ValueKind.SAME and s not in unread]
            moved = [s for s in sorted(pair.full.reads) if self.kinds[s] in _MOVED and s in self.samples]
            for ranks in places:  # all of them first: the operator may change what another layout is taken from
                self.provide(common, frozenset(ranks), pair.full.where)
                self.gather(moved, ranks, pair.full.where)
        written: set[Holder] = set()
        for ranks in places:
            if j in self.plan.norms:
                self.norm_on(j, pair, ranks, written)
            else:
                self.part_on(j, pair, ranks, pattern, written)
        self.written[j] = written
        self.note(j, pair, on)

    def part_on(self, j: int, pair: OperatorPair, ranks: Ranks, pattern: bool, written: set[Holder]) -> None:
        g = len(ranks)
        if g == 1:
            done = j in self.plan.whole or j in self.plan.late
            done = done and all(ranks[0] in self.home[s] for s in pair.full.writes)
            if not done and (ranks[0], 1, 0) not in written:
                self.write(ranks[0], pair.full, pattern)
            written.add((ranks[0], 1, 0))
            return
        emitter = self.emitters[g]
        for i, rank in enumerate(ranks):
            if (rank, g, i) in written:
                continue
            written.add((rank, g, i))
            ops = emitter.emit(j, i)
            for extra in emitter.extras:
                self.whole(extra)
            emitter.extras.clear()
            for op in ops:
                self.write(rank, op, pattern)

    def norm_on(self, j: int, pair: OperatorPair, ranks: Ranks, written: set[Holder]) -> None:
        """Write a batch norm in training mode, or its backward pass."""
        g, running = len(ranks), pair.full.reads & pair.full.writes
        written |= {(rank, g, i) for i, rank in enumerate(ranks)}
        updated = {ranks[0]}
        if g == 1:
            self.put(ranks[0], pair.full)
        elif self.batch_norm == "rank":
            for i, rank in enumerate(ranks):
                (op,) = self.emitters[g].emit(j, i)
                self.put(rank, without_running(op, running) if i and running else op)
        else:
            ops = [self.emitters[g].emit(j, i)[0] for i in range(g)]
            forward = bool(running)
            samples = values_of_a_channel(self.full.record.views[pair.refs[0][0]])
            saved = pair.outs[1][0] if forward else pair.refs[-2][0]
            key = self.record.views[saved].storage, g
            if forward:
                stages, self.statistics[key] = self.norms[g].forward(ops, samples)
            else:
                stages = self.norms[g].backward(ops, samples, self.statistics[key])
            for stage in stages:
                if isinstance(stage, Sum):
                    self.add_up(tuple(sorted(ranks)), stage.views, stage.scale, pair.full.where)
                    continue
                for rank, mine in zip(ranks, stage, strict=True):
                    for op in mine:
                        self.put(rank, op)
            updated = set(ranks)
        for view in dict.fromkeys(a for a, _ in pair.refs):
            storage = self.record.views[view].storage
            if storage in running:
                self.spread(view, ranks[0], self.home[storage] - updated, pair.full.where)

    def spread(self, view: int, source: int, ranks: Collection[int], where: str) -> None:
        """Copy state that one rank has changed to the others that hold it."""
        if not ranks:
            return
        v = self.record.views[view]
        if self.first_of_tail is not None and self.at < self.first_of_tail:  # no step that trains reads it before
            self.to_spread[v.storage] = view, source, frozenset(ranks), where
            self.home[v.storage] -= frozenset(ranks)
            return
        self.home[v.storage] |= frozenset(ranks)
        fresh = self.emitters[next(iter(self.emitters))].fresh(v.dtype, v.size)
        sent = {source: [(rank, view) for rank in sorted(ranks)]}
        self.exchange(sent, {rank: [(source, fresh)] for rank in ranks}, where)
        for rank in sorted(ranks):
            self.put(rank, self.copy(view, fresh, where))

    def put(self, rank: int, op: RawOp) -> None:
        if self.first_of_tail is not None and self.at >= self.first_of_tail and not op.tail:
            op = replace(op, tail=True)
        self.ops[rank].append(op)
        self.ats[rank].append(self.at)
        self.made[rank] |= op.writes

    def write(self, rank: int, op: RawOp, pattern: bool) -> None:
        """Add an operator to a rank. One that reads a tensor as a pattern gets a new one where the rank has none."""
        if pattern:
            for view in list(refs_of((op.args, tuple(a for _, a in op.kwargs)))):
                storage = self.record.views[view].storage
                if self.record.storages[storage].kind == "temp" and storage not in self.made[rank]:
                    fresh = self.fresh_like(rank, view)
                    op = self.with_view(op, view, fresh)
        self.put(rank, op)

    def with_view(self, op: RawOp, old: int, new: int) -> RawOp:
        """The operator with another tensor in an argument's place."""
        gone, there = (self.record.views[v].storage for v in (old, new))
        return replace(op, args=_renamed(op.args, old, new), reads=op.reads - {gone} | {there})

    def fresh_like(self, rank: int, view: int) -> int:
        """An uninitialised tensor with the sizes and strides of a view, on a new storage."""
        v = self.record.views[view]
        self.record.storages.append(RawStorage("temp", extent(replace(v, offset=0)), None, v.dtype))
        fresh = self.view(replace(v, storage=len(self.record.storages) - 1, offset=0))
        self.put(rank, self.empty(fresh))
        return fresh

    def empty(self, view: int) -> RawOp:
        v = self.record.views[view]
        kwargs = (("dtype", Tag("dtype", v.dtype)),)
        return RawOp(
            "aten.empty_strided.default", (v.size, v.stride), kwargs, (view,), frozenset(), frozenset((v.storage,)),
            None, "the step",
        )  # fmt: skip

    def note(self, j: int, pair: OperatorPair, on: Ranks | None) -> None:
        """Note where the results of an operator of a part lie."""
        places = self.layout.copies[j] if on is None else {on}
        for a, _, kind in self.plan.outs[j]:
            storage = self.record.views[a].storage
            if kind in _MOVED:
                self.note_samples(j, a)
                self.holders[storage] = {(rank, len(ranks), i) for ranks in places for i, rank in enumerate(ranks)}
            elif kind is ValueKind.SHARE and on is not None:
                self.shares[storage] = on
                self.home.pop(storage, None)

    def note_samples(self, j: int, a: int) -> None:
        view = self.record.views[a]
        storage = view.storage
        dense = prod(view.size) * ITEM_BYTES[view.dtype] == extent(view) == self.record.storages[storage].nbytes
        match = self.matched(j, a)
        if not dense:
            old = self.samples.get(storage)
            if old is None:
                self.samples[storage] = _Samples(a, {}, None, 1, known=False)
            elif match is None or (match[0], match[1]) != (old.power, old.inner):
                old.known = False
            return
        parts = {}
        for g, split in self.splits.items():
            parts[g] = next(b for x, b, _ in split.plan.outs[j] if x == a)
        power, inner = match or (0, 1)
        self.samples[storage] = _Samples(a, parts, power, inner, known=match is not None)

    def matched(self, j: int, a: int) -> tuple[int | None, int] | None:
        """(power, inner) of a per-sample result, None if it is not known."""
        powers, inners = set[int](), {1}
        for g, split in self.splits.items():
            match: Match | None = split.proof.samples.get((j, a))
            if match is None:
                return None
            inners.add(match.inner)
            if match.ratio is not None:
                powers.add(round(log(match.ratio, g)))
        if len(powers) > 1 or len(inners) > 2:
            return None
        return next(iter(powers), None), max(inners)

    # ---- moving per-sample values --------------------------------------------------------------------

    def gather(self, storages: Sequence[int], ranks: Ranks, where: str) -> None:
        """Bring per-sample values into the layout of `ranks`, each rank its part of the batch."""
        g = len(ranks)
        sent: dict[int, list[tuple[int, int]]] = {}
        received: dict[int, list[tuple[int, int]]] = {}
        local: dict[int, list[RawOp]] = {}
        scale: list[tuple[int, int, float]] = []
        for storage in storages:
            found, holders = self.samples[storage], self.holders.get(storage, set())
            for i, rank in enumerate(ranks):
                if (rank, g, i) in holders:
                    continue
                self.refuse_unknown(storage, found, where)
                target = self.dense(storage, found, g, i)
                factors = set()
                fetched = False
                copies: list[RawOp] = []
                for holder, lo, hi in self.pieces(holders, rank, g, i):
                    piece = self.slice(storage, found, holder[1], holder[2], lo, hi)
                    into = self.slice(storage, found, g, i, lo, hi)
                    factors.add(_power(holder[1] / g, found.power))
                    if holder[0] == rank:
                        copies.append(self.copy(into, piece, where))
                    else:
                        fetched = True
                        sent.setdefault(holder[0], []).append((rank, piece))
                        received.setdefault(rank, []).append((holder[0], into))
                if not fetched and self.record.views[target].storage not in self.made[rank]:
                    copies.insert(0, self.empty(target))
                local.setdefault(rank, []).extend(copies)
                (factor,) = factors  # a value is in one layout, or in layouts of one number of parts
                if factor != 1.0 and self.record.views[target].dtype.startswith(("float", "bfloat", "complex")):
                    scale.append((rank, target, factor))
                self.holders[storage].add((rank, g, i))
        self.exchange(sent, received, where)
        for rank, ops in local.items():
            for op in ops:
                self.put(rank, op)
        for rank, target, factor in scale:
            storages_of = frozenset((self.record.views[target].storage,))
            self.put(
                rank,
                RawOp(
                    "aten.mul_.Scalar",
                    (TensorRef(target), factor),
                    (),
                    (target,),
                    storages_of,
                    storages_of,
                    None,
                    where,
                ),
            )

    def refuse_unknown(self, storage: int, found: _Samples, where: str) -> None:
        if not found.known:
            raise NotSplittable(f"{where}: it is not known how to move what it reads between ranks", REMEDY)
        if found.power is None and self.record.storages[storage].dtype.startswith(("float", "bfloat", "complex")):
            raise NotSplittable(
                f"{where}: what it reads was zero when the split was tried out, so how to scale it is not known", REMEDY
            )

    def pieces(self, holders: Collection[Holder], rank: int, g: int, i: int) -> list[tuple[Holder, int, int]]:
        """Which holders give which samples [lo, hi) of part i of g: first what the rank has itself, then the fewest
        messages. All from layouts of one number of parts, since those of another may be scaled."""
        size = self.batch // g
        lo, hi = i * size, (i + 1) * size
        best: list[tuple[Holder, int, int]] | None = None
        cost: tuple[int, int] | None = None
        for count in sorted({holder[1] for holder in holders}):
            spans = sorted(
                (h for h in holders if h[1] == count), key=lambda h: (h[2], h[0] != rank, h[0])
            )  # the rank itself first
            step = self.batch // count
            found: list[tuple[Holder, int, int]] = []
            for part in range(lo // step, -(-hi // step)):
                holder = next((h for h in spans if h[2] == part), None)
                if holder is None:
                    break
                found.append((holder, max(lo, part * step), min(hi, (part + 1) * step)))
            else:
                price = (sum(b - a for h, a, b in found if h[0] != rank), len(found))
                if cost is None or price < cost:
                    best, cost = found, price
        assert best is not None, "every sample is somewhere"
        return best

    def part_of(self, storage: int, found: _Samples, g: int, i: int) -> tuple[View, int]:
        """(the view over part i of g, its dimension of samples)."""
        whole = self.full.record.views[found.view]
        some, part = next(iter(found.parts.items()))
        dim = scaled(whole, self.splits[some].record.views[part], some)
        if g == 1:
            return whole, dim
        return self.record.views[self.emitters[g].part_view(found.parts[g], i)], dim

    def dense(self, storage: int, found: _Samples, g: int, i: int) -> int:
        return self.view(self.part_of(storage, found, g, i)[0])

    def slice(self, storage: int, found: _Samples, g: int, i: int, lo: int, hi: int) -> int:
        """The view of samples [lo, hi) of the batch in part i of g."""
        view, dim = self.part_of(storage, found, g, i)
        if dim < 0:
            raise NotSplittable("a value has no dimension of samples by which it could be moved between ranks", REMEDY)
        here = self.batch // g
        length = view.size[dim] // found.inner
        each = length // here  # elements of a sample along the dimension
        start, count = (lo - i * here) * each, (hi - lo) * each
        step = view.stride[dim]
        outer = ((found.inner, count), (length * step, step)) if found.inner > 1 else ((count,), (step,))
        size = (*view.size[:dim], *outer[0], *view.size[dim + 1 :])
        stride = (*view.stride[:dim], *outer[1], *view.stride[dim + 1 :])
        return self.view(View(view.storage, view.dtype, size, stride, view.offset + start * step))

    def copy(self, into: int, source: int, where: str) -> RawOp:
        storages = [self.record.views[v].storage for v in (into, source)]
        return RawOp(
            "aten.copy_.default", (TensorRef(into), TensorRef(source)), (), (into,), frozenset(storages),
            frozenset(storages[:1]), None, where,
        )  # fmt: skip

    # ---- random numbers ------------------------------------------------------------------------------

    def draw(self, j: int, pair: OperatorPair) -> None:
        """Draw for the whole batch on every rank."""
        op, name = pair.full, ".".join(pair.full.target.split(".")[1:])
        fills = name in FILLS
        if not fills and pair.name not in DRAWS:
            raise NotSplittable(
                f"{op.where}: {pair.name} draws random numbers as it computes, and ranks could not draw each sample's"
                " own numbers",
                "use an operator that draws first (nn.Dropout), or give all layers that draw one rank",
            )
        for rank in sorted(self.everyone):
            made = op
            for view in dict.fromkeys(refs_of(op.args)):
                storage = self.record.views[view].storage
                if self.record.storages[storage].kind != "temp":
                    continue
                if fills:
                    base = self.samples.get(storage)
                    if base is None or base.view != view:
                        raise NotSplittable(f"{op.where}: {pair.name} fills a part of a tensor", REMEDY)
                    if storage not in self.made[rank]:
                        self.put(rank, self.empty(view))
                else:
                    fresh = self.fresh_like(rank, view)
                    made = self.with_view(made, view, fresh)
            self.put(rank, made)
        for a, _, _ in self.plan.outs[j]:
            storage = self.record.views[a].storage
            self.note_samples(j, a)
            self.samples[storage].power, self.samples[storage].known = 0, True
            self.holders[storage] = {(rank, 1, 0) for rank in self.everyone}

    # ---- results -------------------------------------------------------------------------------------

    def result(self, view: int, of_parts: Mapping[int, int]) -> RankResult:
        v = self.record.views[view]
        if v.storage in self.home and not (self.kinds[v.storage] in _SAMPLES and v.storage in self.samples):
            rank = min(self.home[v.storage])
            return RankResult((rank,), (view,))
        found = self.samples[v.storage]
        holders = self.holders[v.storage]
        count = max(h[1] for h in holders)
        by_part = {h[2]: h[0] for h in sorted(holders, reverse=True) if h[1] == count}
        ranks = tuple(by_part[i] for i in range(count))
        if count == 1:
            return RankResult(ranks, (view,))
        self.refuse_unknown(v.storage, found, "the step's result")
        part_view = of_parts[count]
        dim = scaled(v, self.splits[count].record.views[part_view], count)
        views = tuple(self.emitters[count].part_view(part_view, i) for i in range(count))
        factor = _power(float(count), found.power)
        if factor != 1.0:
            views = tuple(self.scaled_copy(rank, mine, factor) for rank, mine in zip(ranks, views, strict=True))
        return RankResult(ranks, views, dim)

    def scaled_copy(self, rank: int, view: int, factor: float) -> int:
        v = self.record.views[view]
        self.record.storages.append(RawStorage("temp", prod(v.size) * ITEM_BYTES[v.dtype], None, v.dtype))
        out = self.view(View(len(self.record.storages) - 1, v.dtype, v.size, contiguous_strides(v.size)))
        storages = frozenset((v.storage,)), frozenset((len(self.record.storages) - 1,))
        self.put(
            rank, RawOp("aten.mul.Scalar", (TensorRef(view), factor), (), (out,), *storages, None, "the step's result")
        )
        return out


def _power(base: float, power: int | None) -> float:
    return 1.0 if not power else float(base**power)


def _renamed(args: Any, old: int, new: int) -> Any:
    if isinstance(args, TensorRef):
        return TensorRef(new) if args.view == old else args
    return tuple(_renamed(a, old, new) for a in args) if isinstance(args, tuple) else args


def _entries(outs: tuple[Any, ...], length: int) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(length)]
    for out in outs:
        if isinstance(out, tuple) and len(out) == length:
            for e, view in enumerate(out):
                if view is not None:
                    found[e].append(view)
    return found
