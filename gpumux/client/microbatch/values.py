"""What each value of a step is to the batch, and who else needs it: the ground that `classify` walks on."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from gpumux.client.ledger import Record
from gpumux.client.microbatch.pairs import OTHER, REMEDY, UNSCALED, Pair, elements, scaled
from gpumux.client.microbatch.tables import BATCH_NORMS, DIVISIONS, MEAN, NLL_BACKWARD, PATTERN_ONLY
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


@dataclass(frozen=True, slots=True)
class Setting:
    """`split`: positions of the batch tensors that are cut in parts. `fixed`: job buffers without parameters.
    `gradients`: job buffers of gradients that exist before the step."""

    split: set[int]
    fixed: set[int]
    gradients: set[int]


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


def training(norm: Pair) -> bool:
    return any(arg is True for arg in norm.full.args)


def writes(pair: Pair) -> frozenset[int]:
    """Storages made or changed. Batch norm's hidden writes happen in training mode only."""
    if pair.name in BATCH_NORMS and not training(pair):
        return pair.full.writes - pair.full.reads
    return pair.full.writes


class Values:
    """Kinds by storage, as of the operator that a walk over both traces has come to."""

    def __init__(
        self, pairs: list[Pair], full: Record, part: Record, count: int, setting: Setting, forced: set[int], border: int
    ) -> None:
        self.pairs = pairs
        self.full = full
        self.part = part
        self.count = count
        self.setting = setting
        self.forced = forced
        self.force: set[int] = set()
        self.limit = border
        self.border = border  # from here on shares are used summed up
        kinds = [Kind.DATA if s.kind == "input" and s.key in setting.split else Kind.SAME for s in full.storages]
        self.kinds = kinds
        # Made of the batch, constants and buffers alone: what is reduced of it over the batch is cheap to know ahead.
        self.pure = [
            s.kind in ("input", "const") or (s.kind == "state" and s.key in setting.fixed) for s in full.storages
        ]
        self.plan = Plan([], kinds, [])
        self._writers: dict[int, list[int]] = {}
        self.part_read: set[int] = set()
        self.part_wrote: set[int] = set()
        self.tail: set[int] = set()  # storages the tail read or wrote so far
        self.causes: dict[int, Pair] = {}  # storage written by the tail -> the operator that made it wait for all parts

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

    def chain(self, storage: int, before: int, where: str) -> None:
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
                self.chain(inner, j, where)

    def note_loss(self, j: int, pair: Pair) -> None:
        """A mean over labels: how many labels count in the whole batch must be known beforehand."""
        target = pair.full.args[1]
        assert isinstance(target, TensorRef)
        if self.kind(target.view) not in (Kind.DATA, Kind.SAME):
            raise self.refuse(pair, "averages over labels that the step works out itself")
        self.chain(self.full.views[target.view].storage, j, pair.full.where)
        total = self.full.views[pair.outs[1][0]].storage
        self.plan.losses[total] = j

    def note_division(self, j: int, pair: Pair) -> None:
        """A sum over the part, by how many count in the batch: then a mean, like others it may be added to."""
        if pair.name not in DIVISIONS or len(pair.refs) != 2:
            return
        (a, b), (divisor, _) = pair.refs
        reduced = scaled(self.full.views[a], self.part.views[b], self.count) == UNSCALED
        storage = self.full.views[divisor].storage
        if reduced and storage in self.plan.counts and not self.full.views[divisor].size:
            self.plan.divided[j] = storage

    def apply(self, j: int, pair: Pair, level: Level, outs: list[tuple[int, int, Kind]]) -> None:
        """Operator `j` has run: what it made is of these kinds from now on."""
        reads = {self.full.views[a].storage for a, _ in pair.refs}
        changed = self.changed(pair)
        if level is Level.PART:
            self.part_read |= reads
            self.part_wrote |= writes(pair)
            for storage in changed:
                self.force |= {i for i in self._writers.get(storage, ()) if self.plan.levels[i] is Level.ONCE}
        elif level is Level.TAIL:
            self.tail |= reads | writes(pair)
        pure = all(self.pure[s] for s in reads) and pair.full.random is None
        counts = level is Level.ONCE and bool(reads & self.plan.counts) and pure
        for view, _, kind in outs:
            storage = self.full.views[view].storage
            self.kinds[storage] = max(kind, self.kinds[storage]) if storage in changed else kind
            self.pure[storage] = pure
            if counts and not self.full.views[view].size:
                self.plan.counts.add(storage)
        for storage in writes(pair):
            self._writers.setdefault(storage, []).append(j)

    # ---- helpers -------------------------------------------------------------------------------------

    def kind(self, view: int) -> Kind:
        return self.kinds[self.full.views[view].storage]

    def has(self, pair: Pair, kind: Kind) -> bool:
        return any(self.kind(a) is kind for a, _ in pair.refs)

    def arguments(self, pair: Pair) -> list[Kind]:
        """Kinds of what the operator reads. Raises NotSplittable for samples read other than part by part."""
        found: list[Kind] = []
        refs = pair.refs
        if pair.name in NLL_BACKWARD:  # total_weight: known, or not read, see note_loss
            total = self.full.views[refs[-1][0]].storage
            if pair.full.args[4] != MEAN or total in self.plan.losses:
                refs = refs[:-1]
        for a, b in refs:
            kind = self.kind(a)
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

    def outs(self, pair: Pair, unscaled: Kind, along: Kind) -> list[tuple[int, int, Kind]]:
        """What the operator makes or changes: `unscaled` where a part's is as large as the whole's."""
        found = []
        changed = self.changed(pair)
        written = [(a, b) for a, b in pair.refs if self.full.views[a].storage in changed]
        for a, b in dict.fromkeys([*pair.outs, *written]):
            if self.full.views[a].storage not in writes(pair):
                continue
            how = scaled(self.full.views[a], self.part.views[b], self.count)
            if how == OTHER and along is not Kind.LATE:
                raise self.refuse(pair, "relates samples of the batch to each other")
            empty = how == UNSCALED and unscaled is Kind.SHARE and not elements(self.full.views[a])
            found.append((a, b, Kind.SIZE if empty else unscaled if how == UNSCALED else along))
        return found

    def changed(self, pair: Pair) -> set[int]:
        """Storages that existed before and are written."""
        return {self.full.views[a].storage for a, _ in pair.refs} & writes(pair)

    def changes_state(self, pair: Pair) -> bool:
        return any(self.full.storages[s].kind == "state" for s in self.changed(pair))

    def refuse(self, pair: Pair, why: str) -> NotSplittable:
        return NotSplittable(f"{pair.full.where}: {pair.name} {why}", REMEDY)
