"""Proof of a step split over ranks: all ranks run in lockstep with the whole step on real numbers, in float64.

What is compared, and with what: every per-sample value that a rank computes, with its samples of the whole step's;
every sum over ranks, with the whole value (a learning rate of zero would hide a wrong gradient from the state); at the
end every buffer and result. The first that differs is named.

A step has several traces: an optimizer makes its state in the first step, and reads it in later ones. What the layers
compute is the same in all of them, and proven once. In further traces the optimizer is proven by itself, on made-up
gradients of which each rank has a share.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from math import isfinite
from typing import Any

import torch

from gpumux.burst.layout import Ranks
from gpumux.burst.numbering import Numbering, Unknown, covers, run_in_parts
from gpumux.capture.microbatch.classify import OperatorPair, RunLevel, SplitPlan, ValueKind, scaled
from gpumux.capture.microbatch.emit import PartEmitter
from gpumux.capture.microbatch.proof import (
    Load,
    Match,
    Numbers,
    Proof,
    described,
    largest_difference,
    largest_of,
    with_given_statistics,
)
from gpumux.capture.recorder import RankResult, RankTraces, RawCollective, RawOp, TraceRecord
from gpumux.capture.values.machine import UNDEFINED, Inconclusive, Machine, filled
from gpumux.errors import NotSplittable
from gpumux.program.ir import ITEM_BYTES

REMEDY = "give the layers around it the same ranks in the plan, or submit the step to one daemon"

# How far a value may be from the whole step's, relative to its largest element, and relative to the largest of others
# (where it is zero in exact arithmetic): in float64, and in the step's own types where torch has no float64 kernel.
_BOUNDS = {True: (1e-8, 1e-11), False: (1e-3, 1e-5)}


@dataclass(frozen=True, slots=True)
class Written:
    """A part of a per-sample result, as operator `j` made it on a rank. `view`: of the whole step; `mine`: of the
    rank; `match`: how the whole is made of such parts."""

    rank: int
    parts: int
    part: int
    view: int
    mine: int
    match: Match


@dataclass(frozen=True, slots=True)
class Tail:
    """The operators of the whole step from `begin` on, behind all that parts run: those of an optimizer. By storage,
    `shares`: the ranks that have shares of a value there, and by how much their sum is multiplied; `home`: the ranks
    that have a whole value."""

    begin: int
    shares: Mapping[int, tuple[Ranks, float]]
    home: Mapping[int, frozenset[int]]


@dataclass(slots=True)
class Proven:
    """What is known of a job's steps. Proofs: `splits` of parts, by what the proof is about, `layers` of ranks.
    `homes`: the ranks that have each of the job's buffers."""

    splits: dict[Any, Proof] = field(default_factory=dict)
    layers: set[str] = field(default_factory=set)
    homes: dict[int, Ranks] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts that are proven, and how they were written. `ratios`: by what the sum of shares is multiplied, by storage.
    `returned`: by view of the whole step, the part's view of a per-sample result in which the parts' lie side by side,
    as they are."""

    plan: SplitPlan
    make: Callable[[], PartEmitter]
    ratios: Mapping[int, float]
    returned: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Lockstep:
    """What is run. `at`: by rank, the operator of the whole step that each of the rank's operators is for. `written`:
    by operator of the whole step, what the ranks make for it. `kept`: storages of the whole step whose values outlive
    it, on every rank that `traces.held` names."""

    pairs: Sequence[OperatorPair]
    traces: RankTraces
    at: Sequence[Sequence[int]]
    written: Mapping[int, Sequence[Written]]
    results: Sequence[int]
    kept: frozenset[int]
    tail: Tail
    # Batch norms of which each rank has statistics of its own: no value after them is the whole step's. They are
    # compared with the running statistics in their place.
    norms: frozenset[int] = frozenset()
    parts: Parts | None = None  # those that all ranks may run, and nothing else


def prove_ranks(run: Lockstep, load: Load, proven: Proven) -> None:
    """Raises NotSplittable unless all ranks together compute what the whole step does. Nothing is run if the numbers of
    what they compute show it; layers that are among those proven are not run again."""
    if run.parts is not None and _ByNumbers(run, run.parts).prove():
        return
    reason, layers = "", _layers(run)
    for wide in (True, False):
        for numbers in Numbers:
            try:
                with torch.no_grad():
                    _Run(run, wide, partial(load, numbers=numbers)).run(layers in proven.layers)
            except Inconclusive as error:
                reason = reason or str(error)
            else:
                proven.layers.add(layers)
                return
    raise NotSplittable(f"whether the step can be split over ranks could not be tried out: {reason}", REMEDY)


def _layers(run: Lockstep) -> str:
    """A digest of all that comes before the tail, and of what the ranks hold then."""
    record, end = run.traces.record, run.tail.begin
    whole = [described(record, pair.full) for pair in run.pairs[:end]]
    ranks = [
        [(j, described(record, op)) for op, j in zip(ops, at, strict=True) if j < end]
        for ops, at in zip(run.traces.ops, run.at, strict=True)
    ]
    views = record.views
    written = [
        [(one.rank, one.parts, one.part, views[one.view], views[one.mine], one.match) for one in places]
        for j, places in sorted(run.written.items())
        if j < end
    ]
    used = frozenset[int]().union(*(pair.full.reads | pair.full.writes for pair in run.pairs[:end]))
    state = [(b, ranks) for b, ranks in run.traces.homes.items() if record.state_storage.get(b) in used]
    home = [(s, sorted(ranks)) for s, ranks in run.tail.home.items() if s in used]
    held = sorted(run.tail.shares.items()), sorted(home), sorted(state), sorted(run.norms)
    return hashlib.sha256(repr((whole, ranks, written, held)).encode()).hexdigest()


def _needed_by_the_tail(run: Lockstep) -> set[int] | None:
    """The temporaries that the tail reads, which are made up in the place of what the layers leave. None if others than
    gradients and losses are among them: the tail runs on what the layers leave then."""
    record, tail = run.traces.record, run.tail
    tails = [
        [op for op, j in zip(ops, at, strict=True) if j >= tail.begin]
        for ops, at in zip(run.traces.ops, run.at, strict=True)
    ]
    whole = [pair.full for pair in run.pairs[tail.begin :]]
    needed = set[int]().union(*(_given(record, ops) for ops in (whole, *tails)))
    dtypes = [storage.dtype for storage in record.storages]
    known = {s for s in (*tail.shares, *tail.home) if dtypes[s].startswith("float")}
    known |= {s for s in tail.shares if dtypes[s].startswith("int")}  # counts: not indices, which have bounds
    return needed if needed <= known else None


def _given(record: TraceRecord, ops: Sequence[RawOp]) -> set[int]:
    """The temporaries that these operators read and do not make."""
    made, found = set[int](), set[int]()
    for op in ops:
        reads = op.reads
        if op.collective is not None and op.collective.kind == "exchange":
            reads = frozenset(record.views[view].storage for _, view in op.collective.sends)
        found |= {s for s in reads - made if record.storages[s].kind == "temp"}
        made |= op.writes
    return found


class _ByNumbers:
    """All ranks beside the whole step and its proven parts, by the numbers of what they compute (numbering.py). Each
    rank has all layers; what ranks sum is what the parts were proven to make up the whole step's value of."""

    def __init__(self, run: Lockstep, parts: Parts) -> None:
        self._run, self._traces, self._record, self._parts = run, run.traces, run.traces.record, parts
        self._emitter, known = parts.make(), dict[Any, int]()
        self._whole = Numbering(self._emitter.record, known, lambda storage: True)
        everyone = range(len(self._traces.ops))
        self._ranks = [Numbering(self._record, known, partial(_is_given, run, rank)) for rank in everyone]
        self._next = [0 for _ in everyone]
        self._sums: dict[int, tuple[list[int], int]] = {}  # by storage of shares: the parts' numbers, and the whole's
        self._summed: set[int] = set()

    def prove(self) -> bool:
        """Whether the ranks compute what the whole step does. What is not shown so may be shown by computing it."""
        plan, pairs = self._parts.plan, self._run.pairs
        if plan.norms or self._emitter.count != len(self._ranks):  # the proof ran norms by other statistics
            return False
        try:
            for j, pair in enumerate(pairs):
                self._whole.run(pair.full)
                if plan.levels[j] is RunLevel.PART:
                    run_in_parts(self._whole, self._emitter, j, pair)
                    self._note_shares(pair.full.writes & plan.shares)
                if not self._run_ranks(j):
                    return False
            return self._run_ranks(len(pairs)) and self._is_all() and self._leaves_the_same()
        except Unknown:
            return False

    def _note_shares(self, storages: frozenset[int]) -> None:
        if storages & self._summed:  # the proof tells how the parts make up what all of them have written
            raise Unknown
        for storage in storages:
            shares = [self._whole.of(self._emitter.storage(storage, part)) for part in range(self._emitter.count)]
            self._sums[storage] = sorted(shares), self._whole.of(storage)

    def _run_ranks(self, j: int) -> bool:
        """Run what the ranks have for operator `j`. False if they exchange anything but sums of shares."""
        while True:
            waiting: list[RawCollective] = []
            for rank, ops in enumerate(self._traces.ops):
                while self._next[rank] < len(ops) and self._run.at[rank][self._next[rank]] == j:
                    op = ops[self._next[rank]]
                    if op.collective is not None:
                        waiting.append(op.collective)
                        break
                    self._ranks[rank].run(op)
                    self._next[rank] += 1
            if not waiting:
                return True
            if any(one != waiting[0] for one in waiting) or not self._is_sum(waiting[0]):
                return False
            self._next = [at + 1 for at in self._next]

    def _is_sum(self, one: RawCollective) -> bool:
        if one.kind != "all_reduce" or one.members != tuple(range(len(self._ranks))):
            return False
        for view in one.views:
            storage = self._record.views[view].storage
            parts, whole = self._sums.get(storage, ([], 0))
            shares = sorted(rank.of(storage) for rank in self._ranks)
            if not covers(self._record, view) or shares != parts or self._parts.ratios.get(storage) != one.scale:
                return False
            for rank in self._ranks:
                rank.set(storage, whole)
            self._summed.add(storage)
        return True

    def _is_all(self) -> bool:
        return all(at == len(ops) for at, ops in zip(self._next, self._traces.ops, strict=True))

    def _leaves_the_same(self) -> bool:
        """Whether all that outlives the step, and what it returns, is the whole step's."""
        for rank, held in enumerate(self._traces.held):
            own = {s for b, s in self._record.state_storage.items() if rank in self._traces.homes.get(b, ())}
            if any(self._ranks[rank].of(s) != self._whole.of(s) for s in (held & self._run.kept) | own):
                return False
        return all(
            self._returns(view, result) for view, result in zip(self._run.results, self._traces.results, strict=True)
        )

    def _returns(self, whole: int, result: RankResult) -> bool:
        """Whether a result is the whole step's, or put together of the ranks' values as it is of the parts'."""
        emitter, views = self._emitter, self._record.views
        mine = [whole]
        if result.dim is not None:
            if whole not in self._parts.returned:
                return False
            mine = [emitter.part_view(self._parts.returned[whole], i) for i in range(emitter.count)]
            if scaled(emitter.record.views[whole], emitter.record.views[mine[0]], emitter.count) != result.dim:
                return False
        if len(mine) != len(result.views):
            return False
        for rank, given, part in zip(result.ranks, result.views, mine, strict=True):
            a, b = views[given], emitter.record.views[part]
            if replace(a, storage=b.storage) != b or self._ranks[rank].of(a.storage) != self._whole.of(b.storage):
                return False
        return True


def _is_given(run: Lockstep, rank: int, storage: int) -> bool:
    """Whether a rank has a storage of state or batch."""
    one = run.traces.record.storages[storage]
    everyone = range(len(run.traces.ops))
    return one.kind == "input" or (one.kind == "state" and rank in run.traces.homes.get(one.key, everyone))


class _Run:
    def __init__(self, run: Lockstep, wide: bool, load: Callable[[Machine], None]) -> None:
        self._run, self._traces, self._record = run, run.traces, run.traces.record
        self._relative, self._absolute = _BOUNDS[wide]
        self._largest = 0.0  # of all gradients and other sums, in the end also of all that outlives the step
        self._whole = Machine(self._record, wide)
        self._fill = load
        self._ranks = [Machine(self._record, wide) for _ in self._traces.ops]
        # By rank: storages whose values are known to be the whole step's.
        self._follows = [{*self._given_to(rank), *self._of_kind("const")} for rank in range(len(self._ranks))]
        kept = set(run.kept) | {self._record.views[v].storage for v in run.results}
        kept |= {self._record.views[v].storage for result in self._traces.results for v in result.views}
        whole = [(pair.full, j) for j, pair in enumerate(run.pairs)]
        ranks = [list(zip(*each, strict=True)) for each in zip(self._traces.ops, run.at, strict=True)]
        self._dead = [_last_uses(each, self._record, kept) for each in (whole, *ranks)]
        self._next = [0] * len(ranks)
        self._layers_run = True
        self._not_run = frozenset[int]()  # storages that operators write which are not run
        self._drawn = torch.Generator().manual_seed(2)

    def _of_kind(self, *kinds: str) -> list[int]:
        return [index for index, storage in enumerate(self._record.storages) if storage.kind in kinds]

    def _given_to(self, rank: int) -> list[int]:
        """The storages of state and batch that a rank has."""
        return [index for index in range(len(self._record.storages)) if _is_given(self._run, rank, index)]

    def _load(self) -> None:
        self._fill(self._whole)
        for rank, machine in enumerate(self._ranks):
            for index in self._given_to(rank):
                machine.take(self._whole, index)

    def run(self, proven: bool) -> None:
        """`proven`: the layers are, and are run only if the tail needs what can't be made up."""
        begin, end = self._run.tail.begin, len(self._run.pairs)
        needed = _needed_by_the_tail(self._run)
        if proven and needed is not None:
            self._layers_run = False
            self._next = [sum(j < begin for j in at) for at in self._run.at]
        else:
            self._load()
            self._run_pairs(0, begin, self._last_uses_of(needed or ()))
        following = None
        if needed is not None:
            known = [follows | self._left_whole(rank, needed) for rank, follows in enumerate(self._follows)]
            following = follow_to_the_end(self._run, self._next, known)
        if following is not None:
            self._follows, self._not_run = following.follows, following.written
        else:
            if not self._layers_run:
                self._load()
            self._make_up(needed or ())
            self._run_pairs(begin, end, {})
            self._all_ranks(end, None)
        self._finish()

    def _run_pairs(self, begin: int, end: int, left: Mapping[int, Sequence[int]]) -> None:
        """`left`: by operator, the storages that the tail reads, and none of the layers after that operator."""
        for j, pair in enumerate(self._run.pairs[begin:end], begin):
            self._all_ranks(j, pair.full)
            self._run_whole(j, pair.full)
            self._all_ranks(j, None)
            for written in self._run.written.get(j, ()):
                self._compare_part(pair, written)
            for storage in left.get(j, ()):
                self._compare_left(storage)
            self._forget(left.get(j, ()))
            for machine, dead in zip((self._whole, *self._ranks), self._dead, strict=True):
                for storage in dead.get(j, ()):
                    machine.forget(storage)

    # ---- an optimizer by itself --------------------------------------------------------------------------

    def _left_whole(self, rank: int, needed: Collection[int]) -> set[int]:
        """The whole values that the layers leave on a rank for the tail."""
        shares, home = self._run.tail.shares, self._run.tail.home
        ranks = {s: shares[s][0] if s in shares else home[s] for s in needed}
        return {s for s, there in ranks.items() if rank in there and (s not in shares or len(there) == 1)}

    def _last_uses_of(self, storages: Collection[int]) -> dict[int, list[int]]:
        """Of these storages, those that no layer uses after each operator."""
        begin, used = self._run.tail.begin, dict[int, int]()
        whole = ((pair.full, j) for j, pair in enumerate(self._run.pairs[:begin]))
        ranks = (zip(*each, strict=True) for each in zip(self._traces.ops, self._run.at, strict=True))
        for op, j in chain(whole, *ranks):
            if j < begin:
                for storage in (op.reads | op.writes).intersection(storages):
                    used[storage] = max(j, used.get(storage, 0))
        found: dict[int, list[int]] = {}
        for storage, j in used.items():
            found.setdefault(j, []).append(storage)
        return found

    def _make_up(self, storages: Collection[int]) -> None:
        """A value for the whole step, and for ranks shares of it, or the value itself."""
        for index in sorted(storages):
            ranks, factor = self._run.tail.shares.get(index, ((), 1.0))
            self._whole.hold(index, self._numbers(index))
            if len(ranks) < 2:
                for rank in ranks or self._run.tail.home[index]:
                    self._follow(rank, index)
                continue
            left = self._whole.flat(index).clone()
            if factor != 1.0:
                left /= factor
            for rank in ranks[1:]:
                share = self._numbers(index)
                self._ranks[rank].hold(index, share)
                left -= share
            self._ranks[ranks[0]].hold(index, left)

    def _numbers(self, index: int) -> torch.Tensor:
        """Made-up numbers for all of a storage."""
        storage = self._record.storages[index]
        count = storage.nbytes // ITEM_BYTES[storage.dtype]
        made = filled((count,), lambda n: torch.randn(n, generator=self._drawn).mul_(10))
        return made.to(self._whole.dtype(storage.dtype))

    # ---- ranks beside the whole step ---------------------------------------------------------------------
    #
    # An operator of the whole step that a rank runs as it is, on values that are known to be the whole step's, gives
    # the whole step's results: it is run once for all. So an optimizer's memory and time do not grow with the ranks.

    def _run_whole(self, j: int, op: RawOp) -> None:
        following = []
        for rank, follows in enumerate(self._follows):
            if self._is_next(rank, op):
                following.append(rank)
            else:
                for storage in op.writes & follows:
                    self._part_from(rank, storage)
        self._run_one(self._whole, op, j)
        for rank in following:
            self._next[rank] += 1
            for storage in op.writes:
                if storage in self._whole:  # a batch norm by given statistics leaves none
                    self._follow(rank, storage)

    def _run_one(self, machine: Machine, op: RawOp, j: int) -> None:
        if op.random is not None:
            machine.draw(op)
        else:
            machine.run(with_given_statistics(op, self._run.pairs[j].full) if j in self._run.norms else op)

    def _is_next(self, rank: int, op: RawOp) -> bool:
        """Whether a rank is about to run an operator of the whole step on the whole step's values."""
        ops, at = self._traces.ops[rank], self._next[rank]
        return at < len(ops) and ops[at] is op and op.random is None and op.reads <= self._follows[rank]

    def _follow(self, rank: int, storage: int) -> None:
        self._ranks[rank].take(self._whole, storage)
        self._follows[rank].add(storage)

    def _part_from(self, rank: int, storage: int) -> None:
        """Give a rank memory of its own for a value that it or the whole step is about to change alone."""
        if storage in self._follows[rank]:
            self._follows[rank].discard(storage)
            self._ranks[rank].own(storage)

    def _all_ranks(self, j: int, whole: RawOp | None) -> None:
        """Run the operators of all ranks that stand for operator `j`, and their collectives in order: as far as they
        come before `whole` has run, or to their end."""
        waiting = dict(self._until_collectives(j, range(len(self._ranks)), whole))
        while waiting:
            sequence = min(one.sequence for one, _ in waiting.values())
            members = {rank: one for rank, (one, _) in waiting.items() if one.sequence == sequence}
            expected = next(iter(members.values())).members
            where = next(where for rank, (_, where) in waiting.items() if rank in members)
            if tuple(sorted(members)) != expected:
                if whole is not None and any(self._is_next(rank, whole) for rank in expected):
                    return
                raise _apart(where, f"ranks {sorted(members)} meet for a collective of ranks {list(expected)}")
            self._collective(members, where)
            for rank in members:
                self._next[rank] += 1
                del waiting[rank]
            waiting.update(self._until_collectives(j, list(members), whole))

    def _until_collectives(
        self, j: int, ranks: Sequence[int], whole: RawOp | None
    ) -> Iterator[tuple[int, tuple[RawCollective, str]]]:
        for rank in ranks:
            ops, at = self._traces.ops[rank], self._run.at[rank]
            while self._next[rank] < len(ops) and at[self._next[rank]] == j:
                op = ops[self._next[rank]]
                if op.collective is not None:
                    yield rank, (op.collective, op.where)
                    break
                if whole is not None and self._is_next(rank, whole):
                    break
                for storage in op.writes:
                    self._part_from(rank, storage)
                self._run_one(self._ranks[rank], op, j)
                self._next[rank] += 1

    # ---- collectives -------------------------------------------------------------------------------------

    def _collective(self, members: Mapping[int, RawCollective], where: str) -> None:
        if next(iter(members.values())).kind == "all_reduce":
            for views in zip(*(members[rank].views for rank in sorted(members)), strict=True):
                self._sum(members, dict(zip(sorted(members), views, strict=True)), where)
            return
        mail: dict[tuple[int, int], list[tuple[int, torch.Tensor]]] = {}
        for rank, one in members.items():
            for target, view in one.sends:
                mail.setdefault((rank, target), []).append((view, self._ranks[rank].tensor(view).clone()))
        for rank, one in members.items():
            for source, view in one.receives:
                sent = mail.get((source, rank))
                if not sent or sent[0][1].shape != self._record.views[view].size:
                    raise _apart(where, f"rank {rank} awaits other values than rank {source} sends")
                given, value = sent.pop(0)
                storage = self._record.views[view].storage
                self._part_from(rank, storage)
                self._receive(self._ranks[rank], view, value)
                if given == view and covers(self._record, view) and storage in self._follows[source]:
                    self._follow(rank, storage)
        if any(mail.values()):
            raise _apart(where, "a rank sends what no other awaits")

    def _sum(self, members: Mapping[int, RawCollective], views: Mapping[int, int], where: str) -> None:
        parts = [self._ranks[rank].tensor(view) for rank, view in views.items()]
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        for rank, view in views.items():
            storage = self._record.views[view].storage
            self._part_from(rank, storage)
            value = self._ranks[rank].tensor(view)
            value.copy_(total * members[rank].scale)
            if storage not in self._whole:  # statistics of a batch norm, which the whole step has no tensor for
                continue
            self._compare_sum(view, value, where, rank)
            if covers(self._record, view):
                self._follow(rank, storage)

    def _receive(self, machine: Machine, view: int, value: torch.Tensor) -> None:
        v = self._record.views[view]
        if v.storage not in machine:
            count = self._record.storages[v.storage].nbytes // ITEM_BYTES[v.dtype]
            machine.hold(v.storage, torch.zeros(count, dtype=getattr(torch, v.dtype)))
        machine.tensor(view).copy_(value)

    def _forget(self, storages: Collection[int]) -> None:
        for machine in (self._whole, *self._ranks):
            for storage in storages:
                machine.forget(storage)

    # ---- comparing -----------------------------------------------------------------------------------

    def _compare_part(self, pair: OperatorPair, written: Written) -> None:
        view, mine = self._record.views[written.view], self._record.views[written.mine]
        if pair.name in UNDEFINED or pair.full.random is not None:
            return
        whole, part = self._whole.tensor(written.view), self._ranks[written.rank].tensor(written.mine)
        dim, count, inner = scaled(view, mine, written.parts), written.parts, written.match.inner
        if count > 1:
            length = part.shape[dim] // inner
            outer = whole.unflatten(dim, (inner, length * count)).narrow(dim + 1, written.part * length, length)
            whole = outer.flatten(dim, dim + 1)
        ratio = 1.0 if written.match.ratio is None else written.match.ratio
        if not self._alike(whole, part if ratio == 1.0 else part * ratio, 0.0):
            raise _differs(f"{pair.name} at {pair.full.where}", written.rank)
        if written.mine == written.view and covers(self._record, written.view):
            self._follow(written.rank, view.storage)

    def _compare_sum(self, view: int, total: torch.Tensor, where: str, rank: int) -> None:
        self._compare_total(self._record.views[view].storage, self._whole.tensor(view), total, where, rank)

    def _compare_left(self, storage: int) -> None:
        """Compare what the layers leave for the tail."""
        if storage not in self._whole:
            return
        one = self._record.storages[storage]
        count = one.nbytes // ITEM_BYTES[one.dtype]  # an operator may have allocated more
        whole = self._whole.flat(storage)[:count]
        ranks, factor = self._run.tail.shares.get(storage, ((), 1.0))
        if len(ranks) > 1:
            total = self._ranks[ranks[0]].flat(storage)[:count].clone()
            for rank in ranks[1:]:
                total += self._ranks[rank].flat(storage)[:count]
            total = total if factor == 1.0 else total * factor  # counts are whole numbers
            self._compare_total(storage, whole, total, "the sum over ranks", ranks[0])
            return
        for rank in ranks or self._run.tail.home[storage]:
            if storage not in self._follows[rank]:
                mine = self._ranks[rank].flat(storage)[:count]
                self._compare_total(storage, whole, mine, "the layers", rank)

    def _compare_total(
        self, storage: int, whole: torch.Tensor, total: torch.Tensor, where: str, rank: int
    ) -> None:  # fmt: skip
        if total.is_floating_point() and total.numel():
            self._largest = max(self._largest, largest_of(whole))
        if not self._alike(whole, total, self._largest):
            made = next((pair for pair in reversed(self._run.pairs) if storage in pair.full.writes), None)
            of = "" if made is None else f" of what {made.name} at {made.full.where} makes"
            raise _differs(f"{where}{of}", rank)

    def _finish(self) -> None:
        values = [self._whole.flat(each) for each in self._run.kept - self._not_run if each in self._whole]
        largest = [largest_of(each) for each in values if each.is_floating_point()]
        self._largest = max(self._largest, *largest, 0.0)
        for rank, held in enumerate(self._traces.held):
            own = {s for b, s in self._record.state_storage.items() if rank in self._traces.homes.get(b, ())}
            for storage in sorted(((held & self._run.kept) | own) - self._follows[rank]):
                if storage not in self._whole and not self._layers_run:
                    continue  # the layers made it, and nothing has changed it since
                whole, mine = self._whole.flat(storage), self._ranks[rank].flat(storage)
                if not self._alike(whole, mine, self._largest):
                    raise _differs(self._last_writer(storage), rank)
        for view, result in zip(self._run.results, self._traces.results, strict=True):
            storage = self._record.views[view].storage
            if storage in self._not_run or (storage not in self._whole and not self._layers_run):
                continue
            parts = [self._ranks[rank].tensor(v) for rank, v in zip(result.ranks, result.views, strict=True)]
            given = parts[0] if result.dim is None else torch.cat(parts, result.dim)
            if not self._alike(self._whole.tensor(view), given, self._largest):
                raise _differs(f"{self._last_writer(storage)}, which the step returns", None)

    def _last_writer(self, storage: int) -> str:
        pair = next((pair for pair in reversed(self._run.pairs) if storage in pair.full.writes), None)
        return "the step" if pair is None else f"{pair.name} at {pair.full.where}"

    def _alike(self, whole: torch.Tensor, given: torch.Tensor, largest: float) -> bool:
        if whole.shape != given.shape:
            return False
        if not (whole.is_floating_point() or whole.is_complex()) or not whole.numel():
            return torch.equal(whole, given)
        size = largest_of(whole)
        if not isfinite(size):  # masks contain infinities
            finite = torch.isfinite(whole)
            if not torch.equal(whole[~finite].nan_to_num(), given[~finite].nan_to_num()):
                return False
            whole, given = whole[finite], given[finite]
            size = largest_of(whole)
        return largest_difference(whole, given) <= self._relative * size + self._absolute * largest


@dataclass(frozen=True, slots=True)
class _Following:
    """`written`: what the sums and operators of such a tail write. `follows`: by rank, the storages that have the whole
    step's values in the end."""

    written: frozenset[int]
    follows: list[set[int]]


def follow_to_the_end(run: Lockstep, begun: Sequence[int], known: Sequence[set[int]]) -> _Following | None:
    """Whether in the rest of the step each rank sums shares that are known to make up the whole step's values, and runs
    the whole step's operators on those. It needs to be run on no numbers then: an optimizer over gradients' sums is
    such, where each rank has all of a parameter or nothing. `begun`: by rank, its first operator of the tail. `known`:
    by rank, the storages that have the whole step's values there. None if it is another."""
    traces, views, shares = run.traces, run.traces.record.views, run.tail.shares
    at, follows, written = list(begun), [set(each) for each in known], set[int]()

    def is_next(rank: int, op: RawOp) -> bool:
        ops = traces.ops[rank]
        return at[rank] < len(ops) and ops[at[rank]] is op and op.random is None and op.reads <= follows[rank]

    def sums(j: int, whole: RawOp | None) -> bool:
        """Take the ranks' sums for operator `j`. False if a rank does anything else."""
        while True:
            waiting: dict[int, RawCollective] = {}
            for rank, ops in enumerate(traces.ops):
                if at[rank] < len(ops) and run.at[rank][at[rank]] == j and not (whole and is_next(rank, whole)):
                    one = ops[at[rank]].collective
                    if one is None:
                        return False
                    waiting[rank] = one
            if not waiting:
                return True
            first = min(waiting.values(), key=lambda one: one.sequence)
            members = [rank for rank, one in waiting.items() if one.sequence == first.sequence]
            summed = {views[view].storage for view in first.views}
            of_shares = all(shares.get(storage) == (first.members, first.scale) for storage in summed)
            if (
                first.kind != "all_reduce"
                or tuple(members) != first.members
                or any(waiting[rank] != first for rank in members)
                or not of_shares
                or summed & written
                or len(summed) < len(first.views)
                or not all(covers(traces.record, view) for view in first.views)
            ):
                return False
            written.update(summed)
            for rank in members:
                follows[rank] |= summed
                at[rank] += 1

    for j, pair in enumerate(run.pairs[run.tail.begin :], run.tail.begin):
        op = pair.full
        if j in run.written or not sums(j, op):
            return None
        following = {rank for rank in range(len(at)) if is_next(rank, op)}
        if any(op.writes & each for rank, each in enumerate(follows) if rank not in following):
            return None
        written |= op.writes
        for rank in following:
            at[rank] += 1
            follows[rank] |= op.writes
        if not sums(j, None):
            return None
    if not sums(len(run.pairs), None) or any(i < len(ops) for i, ops in zip(at, traces.ops, strict=True)):
        return None
    for rank, held in enumerate(traces.held):
        own = {s for b, s in traces.record.state_storage.items() if rank in traces.homes.get(b, ())}
        if (((held & run.kept) | own) - follows[rank]) & written:
            return None
    for view, result in zip(run.results, traces.results, strict=True):
        mine = {views[v].storage for v in result.views}
        given = {views[view].storage} | mine
        alike = result.dim is None and all(views[v] == views[view] for v in result.views)
        if given & written and not (alike and all(mine <= follows[rank] for rank in result.ranks)):
            return None
    return _Following(frozenset(written), follows)


def _last_uses(ops: Sequence[tuple[RawOp, int]], record: TraceRecord, kept: set[int]) -> dict[int, list[int]]:
    """The temporary storages that nothing uses after each operator of the whole step."""
    used: dict[int, int] = {}
    for op, j in ops:
        used.update(dict.fromkeys(op.reads | op.writes, j))
    found: dict[int, list[int]] = {}
    for storage, j in used.items():
        if storage not in kept and record.storages[storage].kind == "temp":
            found.setdefault(j, []).append(storage)
    return found


def _differs(what: str, rank: int | None) -> NotSplittable:
    on = "" if rank is None else f" on rank {rank}"
    return NotSplittable(
        f"split over ranks, the step gives other values than in one piece, first{on} after {what}", REMEDY
    )


def _apart(where: str, why: str) -> NotSplittable:
    return NotSplittable(f"the ranks do not fit together before {where}: {why}", REMEDY)


def parts_written(
    j: int, places: Sequence[tuple[int, int, int]], plans: Mapping[int, tuple[SplitPlan, Proof]],
    view_of: Callable[[int, int, int], int],
) -> list[Written]:  # fmt: skip
    """What ranks make of operator `j`'s per-sample results. `places`: (rank, number of parts, part)."""
    found = []
    for rank, parts, part in places:
        plan, proof = plans[parts] if parts > 1 else next(iter(plans.values()))
        for a, b, kind in plan.outs[j]:
            match = proof.samples.get((j, a))
            if kind in (ValueKind.SAMPLE, ValueKind.DATA) and match is not None:
                mine = a if parts == 1 else view_of(parts, b, part)
                found.append(Written(rank, parts, part, a, mine, match if parts > 1 else Match(1.0)))
    return found
