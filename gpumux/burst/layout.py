"""Where the operators of a step run and where its values lie, before anything is written: ranks of each operator, ranks
that need each value whole, ranks that hold each of the job's buffers.

Per-sample operators run on the ranks of their layer. Values computed from the batch alone, or from its size, are made
again wherever they are used, which moves nothing. What does not depend on the batch is computed on every rank that
needs it. A parameter lies on the ranks of its layer and wherever else a layer uses it (tied weights); its gradient and
its optimizer state lie with it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpumux.burst.placement import RankPlacement
from gpumux.capture.microbatch.classify import OperatorPair, RunLevel, SplitPlan, ValueKind, call_refs, refs_of
from gpumux.capture.recorder import RawOp
from gpumux.capture.state import StateTable
from gpumux.capture.tracer import RawTrace
from gpumux.capture.values.machine import PATTERN_ONLY, outs_of

Ranks = tuple[int, ...]  # in the order of the parts of the batch that they hold

_WHOLE: Ranks = ()  # instead of the ranks of shares that were summed


@dataclass(slots=True)
class Layout:
    """`on`: the ranks of each operator of a part that reads samples or shares, None for those made wherever they are
    used, whose ranks are in `copies`. `homes`: ranks, rising, of each of the job's buffers that the step touches."""

    on: list[Ranks | None]
    copies: dict[int, set[Ranks]] = field(default_factory=dict)  # operator -> where its results are used
    # Operators on shares that lie on different ranks: the shares are summed first, and then they run on whole values.
    mixed: set[int] = field(default_factory=set)
    summed: set[int] = field(default_factory=set)  # the storages of those shares
    homes: dict[int, Ranks] = field(default_factory=dict)  # job buffer -> ranks


class Kinds:
    """The kind of each storage at the present operator of a walk over the whole trace."""

    def __init__(self, full: RawTrace, split: Collection[int]) -> None:
        self._now = [
            ValueKind.DATA if s.kind == "input" and s.key in split else ValueKind.SAME for s in full.record.storages
        ]
        self._views = full.record.views

    def __getitem__(self, storage: int) -> ValueKind:
        return self._now[storage]

    def after(self, pair: OperatorPair, outs: Iterable[tuple[int, int, ValueKind]]) -> None:
        """Go on to the next operator."""
        given = {self._views[a].storage for a, _ in pair.refs}
        for view, _, kind in outs:
            storage = self._views[view].storage
            self._now[storage] = max(kind, self._now[storage]) if storage in given else kind


class _Layouts:
    def __init__(
        self,
        full: RawTrace,
        pairs: list[OperatorPair],
        plan: SplitPlan,
        *,
        placement: RankPlacement,
        split: Collection[int],
        homes: Mapping[int, Ranks],
    ) -> None:
        self.kinds = Kinds(full, split)
        self.full, self.record, self.pairs, self.plan, self.placement = full, full.record, pairs, plan, placement
        self.before = homes
        self.free = [False] * len(pairs)
        self.layout = Layout([None] * len(pairs))
        self._of: dict[int, Ranks] = {}  # storage of samples or shares -> ranks of the operator that wrote it last
        self._seen: dict[int, set[Ranks]] = {}  # the same storage -> where it has been read since, and so lies as well
        self.needed: dict[int, set[int]] = {}  # storage that is the same everywhere -> ranks that need it
        self.everywhere = tuple(range(placement.ranks))
        self.first = next(iter(placement.layers.values()), placement.default or (0,))

    # ---- forward: the ranks of each operator ---------------------------------------------------------

    def forward(self) -> None:
        made: set[int] = set()  # storages that only draws, which all ranks make, and free operators have written
        for j, (pair, level) in enumerate(zip(self.pairs, self.plan.levels, strict=True)):
            if level is RunLevel.PART and pair.full.random is not None:
                made |= pair.full.writes
            elif level is RunLevel.PART and self._is_free(j, pair, made):
                self.free[j] = True
                made |= pair.full.writes
            elif level is RunLevel.PART:
                made -= pair.full.writes
                ranks = self._ranks(j, pair)
                self.layout.on[j] = ranks
                self._of.update(dict.fromkeys(pair.full.writes, ranks))
                for storage in pair.full.reads if pair.name not in PATTERN_ONLY else ():
                    self._seen.setdefault(storage, set()).add(ranks)
                self._seen.update({storage: {ranks} for storage in pair.full.writes})
            self.kinds.after(pair, self.plan.outs[j])

    def _is_free(self, j: int, pair: OperatorPair, made: Collection[int]) -> bool:
        """Whether the operator computes something from the batch, its size and numbers drawn alone, or only makes
        room."""
        kinds = {kind for *_, kind in self.plan.outs[j]}
        if j in self.plan.norms or not kinds <= {ValueKind.SIZE, ValueKind.DATA, ValueKind.SAMPLE}:
            return False
        if pair.name in PATTERN_ONLY:
            return True
        # What is computed from parameters is computed where they lie.
        common = ValueKind.SAMPLE not in kinds
        return all(s in made or self._is_common(s, common) for s in pair.full.reads)

    def _is_common(self, storage: int, same: bool) -> bool:
        """Whether any rank can have a value without another one's samples. `same`: or a value that is the same
        everywhere."""
        given = self.record.storages[storage].kind in ("input", "const")
        return given or (same and self.kinds[storage] is ValueKind.SAME)

    def _ranks(self, j: int, pair: OperatorPair) -> Ranks:
        """The ranks of an operator: of its layer, or where the fewest bytes are missing of what it reads."""
        shares = [s for s in pair.full.reads if self.kinds[s] is ValueKind.SHARE]
        if shares and pair.name not in PATTERN_ONLY:
            places = {self._of.get(s, _WHOLE) for s in shares}
            if len(places) == 1 and places != {_WHOLE}:
                return places.pop()
            self.layout.mixed.add(j)
            self.layout.summed |= {s for s in shares if self._of.get(s, _WHOLE) != _WHOLE}
            return _WHOLE
        label = pair.full.label
        planned = self.placement.of(label.layer) if label is not None else None
        if planned is not None:
            return planned
        given = [s for s in pair.full.reads if s in self._of]
        if not given:
            return self.first
        sizes = {s: self.record.storages[s].nbytes for s in given}
        by_size = sorted(given, key=lambda s: (-sizes[s], s))
        possible = dict.fromkeys(self._of[s] for s in by_size)
        return min(possible, key=lambda ranks: sum(sizes[s] for s in given if ranks not in self._seen[s]))

    # ---- backward: what is needed where --------------------------------------------------------------

    def backward(self, returned: Collection[int]) -> None:
        # storage of free operators -> where it is used
        wanted = {self.record.views[view].storage: {self.first} for view in returned}
        for j in reversed(range(len(self.pairs))):
            pair, level = self.pairs[j], self.plan.levels[j]
            reads = () if pair.name in PATTERN_ONLY else pair.full.reads
            if level is RunLevel.ONCE:
                if not self._reduces(pair):
                    self._need(reads, set[int]().union(*(self.needed.get(s, ()) for s in pair.full.writes)))
            elif level is RunLevel.PART:
                on = self.layout.on[j]
                places = {on} if on is not None else set[Ranks]()
                if self.free[j]:
                    places = set[Ranks]().union(*(wanted.get(s, ()) for s in pair.full.writes))
                    self.layout.copies[j] = places
                if pair.full.random is not None:
                    self._need(reads, self.everywhere)
                    continue
                for ranks_there in places:
                    self._need(reads, ranks_there)
                    for storage in reads:
                        wanted.setdefault(storage, set()).add(ranks_there)

    def _reduces(self, pair: OperatorPair) -> bool:
        """Whether an operator's results are much smaller than what it reads: then they are sent instead."""
        given, made = (
            sum(self.record.storages[s].nbytes for s in each) for each in (pair.full.reads, pair.full.writes)
        )
        return 4 * made < given

    def _need(self, storages: Iterable[int], ranks: Iterable[int]) -> None:
        found = set(ranks)
        for storage in storages:
            self.needed.setdefault(storage, set()).update(found)

    # ---- buffers -------------------------------------------------------------------------------------

    def homes(self, table: StateTable) -> None:
        """Decide the ranks of each buffer of the job."""
        found: dict[int, set[int]] = {}
        of_parameter: dict[int, set[int]] = {}
        for i, (name, param) in enumerate(zip(table.param_names, table.params, strict=True)):
            place = table.place(param)
            if place is None:
                continue
            planned = self.placement.of(name.rpartition(".")[0] or None) or ()
            storage = self.record.state_storage.get(place.buffer)
            ranks = {*planned, *(self.needed.get(storage, ()) if storage is not None else ())}
            of_parameter[i] = found.setdefault(place.buffer, set())
            of_parameter[i] |= ranks
        for i, buffer in self.full.entry.of_parameters():
            found.setdefault(buffer, set()).update(of_parameter.get(i, ()))
        for buffer, storage in self.record.state_storage.items():
            found.setdefault(buffer, set()).update(self.needed.get(storage, ()))
        for buffer in found:
            found[buffer].update(self.before.get(buffer, ()))
        self._beside_others(found)
        self.layout.homes = {buffer: tuple(sorted(ranks)) or self.everywhere for buffer, ranks in found.items()}

    def _beside_others(self, found: dict[int, set[int]]) -> None:
        """Put buffers that no layer uses (a moving average of the weights) where what is written to them is."""
        lies = {storage: found[buffer] for buffer, storage in self.record.state_storage.items() if found.get(buffer)}
        for pair, level in zip(self.pairs, self.plan.levels, strict=True):
            for views in entries_of(pair.full) if level is not RunLevel.PART else ():
                storages = {self.record.views[v].storage for v in views}
                sizes = {s: self.record.storages[s].nbytes for s in storages}
                places = [lies[s] for s in sorted(storages) if s in lies and sizes[s] == max(sizes.values())]
                if places:
                    lies.update({s: places[0] for s in storages & pair.full.writes if s not in lies})
        for buffer, storage in self.record.state_storage.items():
            found[buffer] |= lies.get(storage, set())


def entries_of(op: RawOp) -> list[list[int]]:
    """The views of an operator's arguments and results: of each entry, if it is one over lists of tensors."""
    lists = [arg for arg in (*op.args, *op.outs) if isinstance(arg, tuple) and arg]
    if op.target.startswith(("aten._foreach_", "aten._fused_")) and lists:
        length = len(lists[0])
        same = [each for each in lists if len(each) == length]
        return [[v for each in same for v in _views(each[e])] for e in range(length)]
    return [[*call_refs(op), *outs_of(op.outs)]]


def _views(arg: Any) -> list[int]:
    return [arg] if type(arg) is int else list(refs_of(arg))


def lay_out(
    full: RawTrace,
    pairs: list[OperatorPair],
    plan: SplitPlan,
    placement: RankPlacement,
    split: Collection[int],
    table: StateTable,
    returned: Collection[int],
    homes: Mapping[int, Ranks],
) -> Layout:
    """Where the operators and buffers of a step are, under a placement. `split`: positions of the batch tensors that
    are cut into parts. `returned`: views that the step returns. `homes`: the ranks that have each buffer by the job's
    other steps."""
    found = _Layouts(full, pairs, plan, placement=placement, split=split, homes=homes)
    found.forward()
    found.backward(returned)
    found.homes(table)
    return found.layout
