"""Which operators run once, which for each part, and which when all parts have run.

Values are classed by storage, walking both traces together. A refusal names the first operator that
would need a value reduced over the whole batch to go on with single samples.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from gpumux.client.ledger import Record
from gpumux.client.microbatch.pairs import OTHER, REMEDY, UNSCALED, Pair, elements, scaled
from gpumux.client.microbatch.tables import (
    BATCH_NORMS,
    DIVISIONS,
    LINEAR,
    MEAN,
    NLL_BACKWARD,
    NLL_FORWARD,
    PATTERN_ONLY,
    PRODUCTS,
)  # fmt: skip
from gpumux.errors import NotSplittable
from gpumux.program.ir import TensorRef


class Kind(IntEnum):
    SAME = 0  # depends on nothing of the batch
    SIZE = 1  # depends on the batch's size
    DATA = 2  # per sample, made of the batch, constants and buffers alone
    SAMPLE = 3  # per sample
    SHARE = 4  # a part's share of a value reduced over the batch
    LATE = 5  # known when all parts have run


class Level(IntEnum):
    ONCE = 0
    PART = 1
    TAIL = 2


@dataclass(slots=True)
class Plan:
    """`whole`, `late`: operators of parts that also run on the whole batch, first of all or in the tail.
    `shares`: storages the parts add up. `losses`: forward of each mean over labels, by operator.
    `counts`: storages of numbers of the batch alone (how many tokens count); a division by one inside a part
    divides by the part's even share of it. `kinds` are the storages' at the end."""

    levels: list[Level]
    kinds: list[Kind]
    outs: list[list[tuple[int, int, Kind]]]  # by operator: (whole view, part view, kind) of what it makes or changes
    whole: set[int] = field(default_factory=set)
    late: set[int] = field(default_factory=set)
    shares: set[int] = field(default_factory=set)
    losses: dict[int, int] = field(default_factory=dict)
    counts: set[int] = field(default_factory=set)
    divided: dict[int, int] = field(default_factory=dict)  # division inside a part -> storage of its count


def classify(
    pairs: list[Pair], full: Record, part: Record, count: int, split: set[int], fixed: set[int], exits: list[int],
    results: list[int],
) -> Plan:  # fmt: skip
    """`split`: positions of the batch tensors that are cut in parts. `fixed`: job buffers without parameters.
    `exits`, `results`: views of the whole trace that outlive the step, that it returns. Raises NotSplittable."""
    forced: set[int] = set()
    border = len(pairs)
    while True:
        walk = _Walk(pairs, full, part, count, split, fixed, forced, border)
        walk.run()
        if walk.force - forced:
            forced |= walk.force
        elif walk.border < border:
            border = walk.border
        else:
            break
    for view in exits:
        walk.need(full.views[view].storage, len(pairs), "the step")
    for view in results:
        storage = full.views[view].storage
        if walk.kinds[storage] not in (Kind.SAMPLE, Kind.DATA):
            walk.need(storage, len(pairs), "the step")
    return walk.plan


def _training(norm: Pair) -> bool:
    return any(arg is True for arg in norm.full.args)


def _writes(pair: Pair) -> frozenset[int]:
    """Storages made or changed. Batch norm's hidden writes happen in training mode only."""
    if pair.name in BATCH_NORMS and not _training(pair):
        return pair.full.writes - pair.full.reads
    return pair.full.writes


class _Walk:
    def __init__(
        self, pairs: list[Pair], full: Record, part: Record, count: int, split: set[int], fixed: set[int],
        forced: set[int], border: int,
    ) -> None:  # fmt: skip
        self.pairs = pairs
        self.full = full
        self.part = part
        self.count = count
        self.forced = forced
        self.force: set[int] = set()
        self._limit = border
        self.border = border  # from here on shares are used summed up
        kinds = [Kind.DATA if s.kind == "input" and s.key in split else Kind.SAME for s in full.storages]
        self.kinds = kinds
        # Made of the batch, constants and buffers alone: what is reduced of it over the batch is cheap to know ahead.
        self.pure = [s.kind in ("input", "const") or (s.kind == "state" and s.key in fixed) for s in full.storages]
        self.plan = Plan([], kinds, [])
        self._writers: dict[int, list[int]] = {}
        self._part_read: set[int] = set()
        self._part_wrote: set[int] = set()
        self._tail: set[int] = set()  # storages the tail read or wrote so far

    def run(self) -> None:
        last_reduction = -1
        for j, pair in enumerate(self.pairs):
            level, outs = self._decide(j, pair)
            self.plan.levels.append(level)
            self.plan.outs.append(outs)
            self._apply(j, pair, level, outs)
            born_shares = any(k is Kind.SHARE for _, _, k in outs)
            if level is Level.PART and born_shares and not self._has(pair, Kind.SHARE):
                last_reduction = j
            if level is Level.TAIL and self._changes_state(pair) and self.border == self._limit:
                self.border = min(self._limit, last_reduction + 1)

    # ---- one operator ------------------------------------------------------------------------------

    def _decide(self, j: int, pair: Pair) -> tuple[Level, list[tuple[int, int, Kind]]]:
        kinds = self._arguments(j, pair)
        changed = self._changed(pair)
        if Kind.LATE in kinds or changed & self._tail:
            return self._tail_op(j, pair, kinds)
        if pair.name in PATTERN_ONLY:
            if set(kinds) <= {Kind.SAME} and pair.same:
                return Level.ONCE, self._outs(pair, Kind.SAME, Kind.SAME)
            return Level.PART, self._outs(pair, Kind.SIZE, Kind.SAMPLE)
        samples = Kind.SAMPLE in kinds or Kind.DATA in kinds
        if Kind.SHARE in kinds:
            return self._share_op(j, pair, kinds, samples)
        if samples:
            return self._sample_op(j, pair, kinds)
        if Kind.SIZE in kinds or not pair.same or j in self.forced:
            return self._size_op(j, pair, kinds)
        if changed & (self._part_read | self._part_wrote):  # it overwrites what a part has used already
            if self._changes_state(pair):
                return self._tail_op(j, pair, kinds)
            return self._size_op(j, pair, kinds)
        return Level.ONCE, self._outs(pair, Kind.SAME, Kind.SAME)

    def _tail_op(self, j: int, pair: Pair, kinds: list[Kind]) -> tuple[Level, list[tuple[int, int, Kind]]]:
        if Kind.SAMPLE in kinds or Kind.DATA in kinds:
            late = [self.full.storages[self.full.views[a].storage] for a, _ in pair.refs if self._kind(a) is Kind.LATE]
            if any(s.kind == "state" for s in late):
                raise self.refuse(pair, "reads state that the step has changed by then, together with single samples")
            raise self.refuse(
                pair, "uses a value that is known only when the whole batch has run, together with single samples"
            )
        for view, _ in pair.refs:
            self.need(self.full.views[view].storage, j, pair.full.where)
        return Level.TAIL, self._outs(pair, Kind.LATE, Kind.LATE)

    def _share_op(
        self, j: int, pair: Pair, kinds: list[Kind], samples: bool
    ) -> tuple[Level, list[tuple[int, int, Kind]]]:
        if samples:
            raise self.refuse(pair, "uses a value reduced over the whole batch together with single samples")
        if j >= self._limit or not self._linear(pair, kinds) or self._changes_state(pair):
            return self._tail_op(j, pair, kinds)
        outs = self._outs(pair, Kind.SHARE, Kind.SAMPLE)
        if any(kind is Kind.SAMPLE for _, _, kind in outs):
            raise self.refuse(pair, "lays a value reduced over the whole batch out over its samples")
        self._refuse_random(pair)
        self._note_division(j, pair)
        return Level.PART, outs

    def _linear(self, pair: Pair, kinds: list[Kind]) -> bool:
        if pair.name not in LINEAR:
            return False
        shares = [kind is Kind.SHARE for kind in kinds]
        if pair.name in DIVISIONS:
            return not any(shares[1:])
        return pair.name not in PRODUCTS or sum(shares) == 1

    def _sample_op(self, j: int, pair: Pair, kinds: list[Kind]) -> tuple[Level, list[tuple[int, int, Kind]]]:
        if pair.name in BATCH_NORMS:
            self._refuse_batch_norm(pair)
        if self._changes_state(pair):
            raise self.refuse(pair, "writes values of single samples into the job's state")
        pure = all(self.pure[self.full.views[a].storage] for a, _ in pair.refs)
        data = pure and pair.full.random is None and Kind.SAMPLE not in kinds
        outs = self._outs(pair, Kind.SHARE, Kind.DATA if data else Kind.SAMPLE)
        unscaled = [kind is Kind.SHARE for _, _, kind in outs]
        if data and outs and all(unscaled) and not self._changed(pair) and j not in self.forced:
            for view, _ in pair.refs:  # a number of the batch alone: worked out on all of it, beforehand
                self._chain(self.full.views[view].storage, j, pair.full.where)
            self.plan.counts |= {self.full.views[a].storage for a, _, _ in outs if not self.full.views[a].size}
            return Level.ONCE, [(a, b, Kind.SAME) for a, b, _ in outs]
        if any(unscaled):
            self._refuse_random(pair)
        if pair.name in NLL_FORWARD and pair.full.args[3] == MEAN:
            self._note_loss(j, pair)
        self._note_division(j, pair)
        return Level.PART, outs

    def _size_op(self, j: int, pair: Pair, kinds: list[Kind]) -> tuple[Level, list[tuple[int, int, Kind]]]:
        if self._changes_state(pair):
            return self._tail_op(j, pair, kinds)
        outs = self._outs(pair, Kind.SIZE, Kind.SAMPLE if pair.full.random is not None else Kind.DATA)
        if pair.full.random is not None and (pair.name == "randperm" or any(k is Kind.SIZE for _, _, k in outs)):
            raise self.refuse(pair, "draws numbers that depend on how many samples the batch has")
        self._note_division(j, pair)
        return Level.PART, outs

    def _apply(self, j: int, pair: Pair, level: Level, outs: list[tuple[int, int, Kind]]) -> None:
        reads = {self.full.views[a].storage for a, _ in pair.refs}
        changed = self._changed(pair)
        if level is Level.PART:
            self._part_read |= reads
            self._part_wrote |= _writes(pair)
            for storage in changed:
                self.force |= {i for i in self._writers.get(storage, ()) if self.plan.levels[i] is Level.ONCE}
        elif level is Level.TAIL:
            self._tail |= reads | _writes(pair)
        pure = all(self.pure[s] for s in reads) and pair.full.random is None
        counts = level is Level.ONCE and bool(reads & self.plan.counts) and pure
        for view, _, kind in outs:
            storage = self.full.views[view].storage
            self.kinds[storage] = max(kind, self.kinds[storage]) if storage in changed else kind
            self.pure[storage] = pure
            if counts and not self.full.views[view].size:
                self.plan.counts.add(storage)
        for storage in _writes(pair):
            self._writers.setdefault(storage, []).append(j)

    # ---- what the tail and the beginning need -------------------------------------------------------

    def need(self, storage: int, before: int, where: str) -> None:
        """The tail, or whoever keeps what the step leaves, reads `storage` in its whole form."""
        kind = self.kinds[storage]
        if kind is Kind.SHARE:
            self.plan.shares.add(storage)
        elif kind is Kind.SIZE:
            for j in self._writers.get(storage, ()):
                if j < before and j not in self.plan.late:
                    self.plan.late.add(j)
                    for view, _ in self.pairs[j].refs:
                        self.need(self.full.views[view].storage, j, self.pairs[j].full.where)
        elif kind in (Kind.SAMPLE, Kind.DATA) and self.full.storages[storage].kind != "input":
            raise NotSplittable(
                f"{where} keeps values of single samples beyond the step's forward and backward", REMEDY
            )

    def _chain(self, storage: int, before: int, where: str) -> None:
        """Let `storage` be worked out from the whole batch before the parts run."""
        if self.kinds[storage] is Kind.SAME:
            return
        for j in self._writers.get(storage, ()):
            if j >= before or j in self.plan.whole:
                continue
            self.plan.whole.add(j)
            for view, _ in self.pairs[j].refs:
                inner = self.full.views[view].storage
                if self.kinds[inner] not in (Kind.SAME, Kind.SIZE, Kind.DATA):
                    raise NotSplittable(f"{where} counts what the step works out itself over the whole batch", REMEDY)
                self._chain(inner, j, where)

    def _note_loss(self, j: int, pair: Pair) -> None:
        """A mean over labels: how many labels count in the whole batch must be known beforehand."""
        target = pair.full.args[1]
        assert isinstance(target, TensorRef)
        if self._kind(target.view) not in (Kind.DATA, Kind.SAME):
            raise self.refuse(pair, "averages over labels that the step works out itself")
        self._chain(self.full.views[target.view].storage, j, pair.full.where)
        total = self.full.views[pair.outs[1][0]].storage
        self.plan.losses[total] = j

    def _note_division(self, j: int, pair: Pair) -> None:
        """A sum over the part, by how many count in the batch: then a mean, like others it may be added to."""
        if pair.name not in DIVISIONS or len(pair.refs) != 2:
            return
        (a, b), (divisor, _) = pair.refs
        reduced = scaled(self.full.views[a], self.part.views[b], self.count) == UNSCALED
        storage = self.full.views[divisor].storage
        if reduced and storage in self.plan.counts and not self.full.views[divisor].size:
            self.plan.divided[j] = storage

    # ---- helpers -------------------------------------------------------------------------------------

    def _kind(self, view: int) -> Kind:
        return self.kinds[self.full.views[view].storage]

    def _has(self, pair: Pair, kind: Kind) -> bool:
        return any(self._kind(a) is kind for a, _ in pair.refs)

    def _arguments(self, j: int, pair: Pair) -> list[Kind]:
        found: list[Kind] = []
        refs = pair.refs
        if pair.name in NLL_BACKWARD:  # total_weight: known, or not read, see _note_loss
            total = self.full.views[refs[-1][0]].storage
            if pair.full.args[4] != MEAN or total in self.plan.losses:
                refs = refs[:-1]
        for a, b in refs:
            kind = self._kind(a)
            if kind in (Kind.DATA, Kind.SAMPLE):
                how = scaled(self.full.views[a], self.part.views[b], self.count)
                if how == OTHER:
                    raise self.refuse(pair, "relates samples of the batch to each other")
                if how == UNSCALED:
                    if elements(self.full.views[a]) and pair.name not in PATTERN_ONLY:
                        raise self.refuse(pair, "picks certain samples out of the batch")
                    kind = Kind.SIZE
            found.append(kind)
        return found

    def _outs(self, pair: Pair, unscaled: Kind, along: Kind) -> list[tuple[int, int, Kind]]:
        """What the operator makes or changes: `unscaled` where a part's is as large as the whole's."""
        found = []
        changed = self._changed(pair)
        written = [(a, b) for a, b in pair.refs if self.full.views[a].storage in changed]
        for a, b in dict.fromkeys([*pair.outs, *written]):
            if self.full.views[a].storage not in _writes(pair):
                continue
            how = scaled(self.full.views[a], self.part.views[b], self.count)
            if how == OTHER and along is not Kind.LATE:
                raise self.refuse(pair, "relates samples of the batch to each other")
            empty = how == UNSCALED and unscaled is Kind.SHARE and not elements(self.full.views[a])
            found.append((a, b, Kind.SIZE if empty else unscaled if how == UNSCALED else along))
        return found

    def _changed(self, pair: Pair) -> set[int]:
        """Storages that existed before and are written."""
        return {self.full.views[a].storage for a, _ in pair.refs} & _writes(pair)

    def _changes_state(self, pair: Pair) -> bool:
        return any(self.full.storages[s].kind == "state" for s in self._changed(pair))

    def _refuse_random(self, pair: Pair) -> None:
        if pair.full.random is not None:
            raise self.refuse(pair, "draws random numbers over the whole batch")

    def _refuse_batch_norm(self, pair: Pair) -> None:
        """Instance norm comes as batch norm with the samples along dimension 1; that one splits."""
        a, b = pair.refs[0]
        if _training(pair) and scaled(self.full.views[a], self.part.views[b], self.count) != 1:
            raise NotSplittable(
                f"{pair.full.where}: batch norm in training mode uses the mean and variance of the whole batch, "
                "and parts of it have others",
                "use layer, group or instance norm, or keep the batch norms in eval(), or submit without microbatches",
            )

    def refuse(self, pair: Pair, why: str) -> NotSplittable:
        return NotSplittable(f"{pair.full.where}: {pair.name} {why}", REMEDY)
