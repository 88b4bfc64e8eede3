"""Classifies the values of a step by how they depend on the batch, from the traces of the whole batch and of a part.

A value is the same for all parts, or depends on the batch's size, or is per sample (a dimension k times as long), or is
a part's *share* of a reduction over the batch, or is known only after all parts. Linear operators on shares stay in a
part; other operators that read a share run once, on the sum. A share that is needed together with samples is refused
(`x - x.mean(0)`), unless it is computed from the batch and buffers alone. Then it is computed on the whole batch before
the parts, as are the counts of labels and masks that a loss is divided by.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import IntEnum
from math import prod
from typing import Any

from gpumux.capture.recorder import RawOp, TraceRecord
from gpumux.capture.tracer import RawTrace
from gpumux.capture.values.machine import PATTERN_ONLY, outs_of
from gpumux.errors import NotSplittable
from gpumux.program import onednn_lstm
from gpumux.program.ir import Arg, ScalarRef, Tag, TensorRef, View

# ---- pairs of the same operator in the two traces


UNSCALED = -1  # the two views have the same size
OTHER = -2  # the sizes differ, but not by the number of parts in one dimension

REMEDY = (
    "submit the step without microbatches, or make the loss an average over samples that do not depend on each other"
)
_AHEAD = "do so before the step is called and give it the result as its batch, or submit the step without microbatches"
_IN_TWO = (
    "let the step end with what changes the state and make the rest a step of its own (job.add), or submit the step"
    " without microbatches"
)


@dataclass(frozen=True, slots=True)
class OperatorPair:
    """One operator in both traces. `refs`, `outs`: its arguments and results as (view of the whole trace, view of the
    part's). `same`: whether the calls are equal in every number and view."""

    full: RawOp
    part: RawOp
    refs: tuple[tuple[int, int], ...]
    outs: tuple[tuple[int, int], ...]
    same: bool

    @property
    def name(self) -> str:
        """`convolution_backward` of `aten.convolution_backward.default`."""
        return self.full.target.split(".")[1]


def refs_of(value: Any) -> Iterator[int]:
    """The views in an argument, or in a tuple of arguments, in order."""
    if isinstance(value, TensorRef):
        yield value.view
    elif isinstance(value, tuple):
        for item in value:
            yield from refs_of(item)


def call_refs(op: RawOp) -> list[int]:
    return [*refs_of(op.args), *refs_of(tuple(a for _, a in op.kwargs))]


def _plain(value: Any, record: TraceRecord) -> Any:
    """An argument with views instead of their numbers, to compare it across traces."""
    if isinstance(value, TensorRef):
        return record.views[value.view]
    if isinstance(value, tuple):
        return tuple(_plain(v, record) for v in value)
    return (type(value), value)


def _call(op: RawOp, record: TraceRecord) -> Any:
    views = tuple(record.views[v] for v in outs_of(op.outs))
    return (op.target, _plain(op.args, record), tuple((k, _plain(v, record)) for k, v in op.kwargs), views)


def scaled(full: View, part: View, count: int) -> int:
    """The dimension in which `full` is `count` times as long as `part`; UNSCALED or OTHER."""
    if len(full.size) != len(part.size):
        return OTHER
    differ = [d for d, (a, b) in enumerate(zip(full.size, part.size, strict=True)) if a != b]
    if not differ:
        return UNSCALED
    only = differ[0]
    return only if len(differ) == 1 and full.size[only] == count * part.size[only] else OTHER


def elements(view: View) -> int:
    return prod(view.size)


def pair_up(full: RawTrace, part: RawTrace) -> list[OperatorPair]:
    """The pairs of operators of both traces. Raises NotSplittable if the traces run different operators."""
    a, b = full.record, part.record
    pairs: list[OperatorPair] = []
    for x, y in zip(a.ops, b.ops, strict=False):
        x, y = _filled(x, a), _filled(y, b)
        pair = _pair(x, y, a, b)
        if pair is None:
            raise _other_way(x.where, f"{x.target} on the whole batch, {y.target} on a part")
        pairs.append(pair)
    if len(a.ops) != len(b.ops):
        extra = max(a.ops, b.ops, key=len)[len(pairs)]
        raise _other_way(extra.where, f"{len(a.ops)} operators on the whole batch, {len(b.ops)} on a part")
    kinds = [[(s.kind, s.key if s.kind in ("state", "input") else None) for s in r.storages] for r in (a, b)]
    formulas = [[str(e) for e in r.scalars] for r in (a, b)]
    guards = [{(str(g.expr), g.value) for g in t.guards} for t in (full, part)]
    if kinds[0] != kinds[1] or formulas[0] != formulas[1] or guards[0] != guards[1]:
        raise _other_way("the step", "what it uses or decides by depends on the batch's size")
    if full.gradients.keys() != part.gradients.keys() or full.result_spec != part.result_spec:
        raise _other_way("the step", "what it returns or leaves behind depends on the batch's size")
    return pairs


def _filled(op: RawOp, record: TraceRecord) -> RawOp:
    """`op`, or what makes the same number without reading a tensor for its type: a backward pass begins with a one of
    the loss's type, and must not wait until the loss of the whole batch is known."""
    out = op.outs[0] if len(op.outs) == 1 else None
    number = _NUMBERS_LIKE.get(op.target)
    if number is None or not isinstance(out, int) or record.views[out].size:
        return op
    dtype = (("dtype", Tag("dtype", record.views[out].dtype)),)
    return replace(op, target=_FILL, args=((), number), kwargs=dtype, reads=frozenset())


def _pair(x: RawOp, y: RawOp, a: TraceRecord, b: TraceRecord) -> OperatorPair | None:
    refs, others = call_refs(x), call_refs(y)
    outs, other_outs = list(outs_of(x.outs)), list(outs_of(y.outs))
    if (
        x.target != y.target
        or [k for k, _ in x.kwargs] != [k for k, _ in y.kwargs]
        or [a.views[v].storage for v in refs] != [b.views[v].storage for v in others]
        or [a.views[v].storage for v in outs] != [b.views[v].storage for v in other_outs]
        or _scalars(x) != _scalars(y)
        or x.random != y.random
    ):
        return None
    return OperatorPair(
        x,
        y,
        tuple(zip(refs, others, strict=True)),
        tuple(zip(outs, other_outs, strict=True)),
        x.target != _FILL and _call(x, a) == _call(y, b),  # the gradient of the loss follows what parts divide by
    )


def _scalars(op: RawOp) -> list[int]:
    def found(value: Arg) -> Iterator[int]:
        if isinstance(value, ScalarRef):
            yield value.index
        elif isinstance(value, tuple):
            for item in value:
                yield from found(item)

    return [i for value in (*op.args, *(v for _, v in op.kwargs)) for i in found(value)]


def numbers_of(op: RawOp) -> list[float]:
    """The plain numbers among an operator's arguments: no sizes, no tensors."""
    return [a for a in (*op.args, *(v for _, v in op.kwargs)) if isinstance(a, (int, float))]


def _other_way(where: str, why: str) -> NotSplittable:
    return NotSplittable(
        f"{where} does something else on a part of the batch than on all of it: {why}",
        "use fewer microbatches (a part of one sample often takes another way), or submit the step without them",
    )


# ---- properties of single operators


# Operators that map shares of a sum to shares of a sum. They may stay within a part, so that fewer shares are
# accumulated. All others that read a share run once, on the sum.
_LINEAR = [
    "add", "sub", "neg", "mul", "div", "sum", "mean", "clone", "copy", "_to_copy", "view", "_unsafe_view", "reshape",
    "expand", "t", "transpose", "permute", "cat", "stack", "squeeze", "unsqueeze",
]  # fmt: skip
LINEAR = frozenset(
    form for name in _LINEAR for form in (name, f"{name}_", f"_foreach_{name}", f"_foreach_{name}_")
)  # fmt: skip
DIVISIONS = frozenset(("div", "div_"))
PRODUCTS = frozenset(("mul", "mul_", "_foreach_mul", "_foreach_mul_"))
EMBEDDING_BACKWARD = "embedding_dense_backward"

# Over ranks also these: functions of weights alone (learned positions, of which a batch takes some; a product of two)
# have them in their backward pass. The first argument of _PLACES is a gradient.
_PLACES = frozenset((EMBEDDING_BACKWARD, "slice_backward", "select_backward", "diagonal_backward", "unfold_backward"))
_TIMES_WEIGHTS = frozenset(("mm", "bmm", "mv"))
LINEAR_OVER_RANKS = LINEAR | _PLACES | _TIMES_WEIGHTS

BATCH_NORMS = frozenset(
    ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "_native_batch_norm_legit",
     "_native_batch_norm_legit_no_training", "_batch_norm_with_update", "batch_norm_with_update")
)  # fmt: skip

NORM_BACKWARD = "native_batch_norm_backward"

_NUMBERS_LIKE = {"aten.ones_like.default": 1.0, "aten.zeros_like.default": 0.0}
_FILL = "aten.full.default"

# Operators that compute each element along a dimension from others there, and the position of that dimension among
# their arguments.
ALONG = {
    "cumsum": 1, "cumprod": 1, "logcumsumexp": 1, "cummax": 1, "cummin": 1, "_softmax": 1, "_log_softmax": 1, "sort": 1,
    "flip": 1, "roll": 2,
}  # fmt: skip

# Losses that divide by the number (or weight) of the labels that are not ignored; that of the whole batch must be used.
# `reduction` is argument 3 forward and 4 backward, `total_weight` is return 1 forward and argument 6 backward.
NLL_FORWARD = frozenset(("nll_loss_forward", "nll_loss2d_forward"))
NLL_BACKWARD = frozenset(("nll_loss_backward", "nll_loss2d_backward"))
MEAN, SUM = 1, 2


# ---- the result of the classification


class ValueKind(IntEnum):
    """How a value depends on the batch."""

    SAME = 0  # not at all
    SIZE = 1  # on the batch's size
    DATA = 2  # per sample, computed from the batch, constants and buffers alone
    SAMPLE = 3  # per sample
    SHARE = 4  # a part's share of a value reduced over the batch
    LATE = 5  # known only after all parts


class RunLevel(IntEnum):
    """When an operator runs: once before the parts, in each part, or once after the parts."""

    ONCE = 0
    PART = 1
    TAIL = 2


@dataclass(frozen=True, slots=True)
class Setting:
    """`split`: positions of the batch tensors that are cut into parts. `fixed`: job buffers without parameters.
    `gradients`: job buffers of gradients that exist before the step. `norms`: whether parts may have batch norms with
    statistics of their own, for which the caller provides (plan.norms). `once`: operators on shares that have to run
    once, on the sums, as a proof has found. `spread`: whether parts run on ranks of their own, where a sum is an
    exchange: all of the backward pass that is linear stays in the parts, so that the ranks sum gradients alone."""

    split: set[int]
    fixed: set[int]
    gradients: set[int]
    norms: bool = False
    once: frozenset[int] = frozenset()
    spread: bool = False


@dataclass(slots=True)
class SplitPlan:
    """How a step is split. `levels`: by operator. `kinds`: by storage, at the end of the step. `whole`, `late`:
    operators of parts that also run on the whole batch, before the parts or in the tail. `shares`: storages that the
    parts add up. `losses`: storage of the total weight of each mean over labels -> its forward operator. `counts`:
    storages of numbers computed from the batch alone (the number of valid tokens); inside a part a division by one
    divides by an even share of it."""

    levels: list[RunLevel]
    kinds: list[ValueKind]
    outs: list[list[tuple[int, int, ValueKind]]]  # by operator: (whole view, part view, kind) of its results
    whole: set[int] = field(default_factory=set)
    late: set[int] = field(default_factory=set)
    shares: set[int] = field(default_factory=set)
    losses: dict[int, int] = field(default_factory=dict)
    counts: set[int] = field(default_factory=set)
    divided: dict[int, int] = field(default_factory=dict)  # division inside a part -> storage of its count
    norms: set[int] = field(default_factory=set)  # batch norms in training mode, forward and backward


def training(norm: OperatorPair) -> bool:
    return any(arg is True for arg in norm.full.args)


def writes(pair: OperatorPair) -> frozenset[int]:
    """Storages that an operator makes or changes. Batch norm writes running statistics only in training mode."""
    if pair.name in BATCH_NORMS and not training(pair):
        return pair.full.writes - pair.full.reads
    return pair.full.writes


class Values:
    """The kinds of storages at the present operator of a walk over both traces."""

    def __init__(
        self,
        pairs: list[OperatorPair],
        full: TraceRecord,
        part: TraceRecord,
        *,
        count: int,
        setting: Setting,
        forced: set[int],
        border: int,
    ) -> None:
        self.pairs = pairs
        self.full = full
        self.part = part
        self.count = count
        self.setting = setting
        self.forced = forced
        self.force: set[int] = set()
        self.limit = border
        self.border = border  # index of the first operator that uses sums of shares
        kinds = [
            ValueKind.DATA if s.kind == "input" and s.key in setting.split else ValueKind.SAME for s in full.storages
        ]
        self.kinds = kinds
        # Computed from the batch, constants and buffers alone; reductions of these can be computed before the parts.
        self.pure = [
            s.kind in ("input", "const") or (s.kind == "state" and s.key in setting.fixed) for s in full.storages
        ]
        # What a forward pass leaves for the backward pass of the same part, in a layout and size of its own.
        made = [onednn_lstm.workspace_view(pair.full) for pair in pairs]
        self._opaque = {full.views[view].storage for view in made if view is not None}
        self.plan = SplitPlan([], kinds, [])
        self.norms: set[int] = set()  # storages of statistics that batch norms leave for their backward passes
        self._writers: dict[int, list[int]] = {}
        self.part_read: set[int] = set()
        self.part_wrote: set[int] = set()
        self.tail: set[int] = set()  # storages that the tail has read or written
        self.causes: dict[
            int, OperatorPair
        ] = {}  # storage written by the tail -> the first operator of its chain in the tail

    # ---- values that are needed whole ----------------------------------------------------------------

    def need(self, storage: int, before: int, where: str) -> None:
        """Make the whole value of `storage` available to the tail, or to the state after the step."""
        kind = self.kinds[storage]
        if kind is ValueKind.SHARE:
            self.plan.shares.add(storage)
        elif kind is ValueKind.SIZE:
            for j in self._writers.get(storage, ()):
                if j < before and j not in self.plan.late:
                    self.plan.late.add(j)
                    for view, _ in self.pairs[j].refs:
                        self.need(self.full.views[view].storage, j, self.pairs[j].full.where)
        elif kind in (ValueKind.SAMPLE, ValueKind.DATA) and self.full.storages[storage].kind != "input":
            raise NotSplittable(
                f"{where} keeps values of single samples beyond the step's forward and backward", REMEDY
            )

    def chain(self, storage: int, before: int, where: str) -> None:
        """Have `storage` computed on the whole batch before the parts."""
        if self.kinds[storage] is ValueKind.SAME:
            return
        for j in self._writers.get(storage, ()):
            if j >= before or j in self.plan.whole:
                continue
            self.plan.whole.add(j)
            for view, _ in self.pairs[j].refs:
                inner = self.full.views[view].storage
                if self.kinds[inner] not in (ValueKind.SAME, ValueKind.SIZE, ValueKind.DATA):
                    raise NotSplittable(f"{where} counts what the step works out itself over the whole batch", REMEDY)
                self.chain(inner, j, where)

    def note_loss(self, j: int, pair: OperatorPair) -> None:
        """Note a mean over labels: the number of valid labels in the whole batch is computed before the parts."""
        target = pair.full.args[1]
        assert isinstance(target, TensorRef)
        if self.kind(target.view) not in (ValueKind.DATA, ValueKind.SAME):
            raise self.refuse(pair, "averages over labels that the step works out itself")
        self.chain(self.full.views[target.view].storage, j, pair.full.where)
        weight = pair.full.args[2]
        if isinstance(weight, TensorRef):
            if self.kind(weight.view) not in (ValueKind.SAME, ValueKind.SIZE):
                raise self.refuse(pair, "weighs labels by what the step works out of samples")
            self.chain(self.full.views[weight.view].storage, j, pair.full.where)
        total = self.full.views[pair.outs[1][0]].storage
        self.plan.losses[total] = j

    def note_division(self, j: int, pair: OperatorPair) -> None:
        """Note a division of a part's sum by a count of the whole batch, which makes it a mean like other shares."""
        if pair.name not in DIVISIONS or len(pair.refs) != 2:
            return
        (a, b), (divisor, _) = pair.refs
        reduced = scaled(self.full.views[a], self.part.views[b], self.count) == UNSCALED
        storage = self.full.views[divisor].storage
        if reduced and storage in self.plan.counts and not self.full.views[divisor].size:
            self.plan.divided[j] = storage

    def apply(self, j: int, pair: OperatorPair, level: RunLevel, outs: list[tuple[int, int, ValueKind]]) -> None:
        """Note the results of operator `j` and their kinds."""
        reads = {self.full.views[a].storage for a, _ in pair.refs}
        changed = self.changed(pair)
        if level is RunLevel.PART:
            self.part_read |= reads
            self.part_wrote |= writes(pair)
            for storage in changed:
                self.force |= {i for i in self._writers.get(storage, ()) if self.plan.levels[i] is RunLevel.ONCE}
        elif level is RunLevel.TAIL:
            self.tail |= reads | writes(pair)
        pure = all(self.pure[s] for s in reads) and pair.full.random is None
        counts = level is RunLevel.ONCE and bool(reads & self.plan.counts) and pure
        for view, _, kind in outs:
            storage = self.full.views[view].storage
            self.kinds[storage] = max(kind, self.kinds[storage]) if storage in changed else kind
            self.pure[storage] = pure
            if counts and not self.full.views[view].size:
                self.plan.counts.add(storage)
        for storage in writes(pair):
            self._writers.setdefault(storage, []).append(j)

    # ---- helpers -------------------------------------------------------------------------------------

    def kind(self, view: int) -> ValueKind:
        return self.kinds[self.full.views[view].storage]

    def scaled(self, a: int, b: int) -> int:
        """As the function, for views `a` of the whole trace and `b` of the part's."""
        view = self.full.views[a]
        return 0 if view.storage in self._opaque else scaled(view, self.part.views[b], self.count)

    def has(self, pair: OperatorPair, kind: ValueKind) -> bool:
        return any(self.kind(a) is kind for a, _ in pair.refs)

    def arguments(self, pair: OperatorPair) -> list[ValueKind]:
        """The kinds of an operator's arguments. Raises NotSplittable if it does not read samples part by part."""
        found: list[ValueKind] = []
        refs = pair.refs
        if pair.name in NLL_BACKWARD:  # total_weight is known before the parts or not read, see note_loss
            total = self.full.views[refs[-1][0]].storage
            if pair.full.args[4] != MEAN or total in self.plan.losses:
                refs = refs[:-1]
        for a, b in refs:
            kind = self.kind(a)
            if kind in (ValueKind.DATA, ValueKind.SAMPLE):
                how = self.scaled(a, b)
                if how == OTHER:
                    raise self.refuse(pair, "relates samples of the batch to each other")
                if how == UNSCALED:
                    if elements(self.full.views[a]) and pair.name not in PATTERN_ONLY:
                        raise self.refuse(pair, "picks certain samples out of the batch")
                    kind = ValueKind.SIZE
            found.append(kind)
        return found

    def outs(self, pair: OperatorPair, unscaled: ValueKind, along: ValueKind) -> list[tuple[int, int, ValueKind]]:
        """(whole view, part view, kind) of an operator's results. Their kind is `unscaled` if a part's result has the
        size of the whole's, else `along`."""
        found = []
        changed = self.changed(pair)
        written = [(a, b) for a, b in pair.refs if self.full.views[a].storage in changed]
        for a, b in dict.fromkeys([*pair.outs, *written]):
            if self.full.views[a].storage not in writes(pair):
                continue
            how = self.scaled(a, b)
            if how == OTHER and along is not ValueKind.LATE:
                raise self.refuse(pair, "relates samples of the batch to each other")
            empty = how == UNSCALED and unscaled is ValueKind.SHARE and not elements(self.full.views[a])
            found.append((a, b, ValueKind.SIZE if empty else unscaled if how == UNSCALED else along))
        return found

    def changed(self, pair: OperatorPair) -> set[int]:
        """Storages that the operator changes in place."""
        return {self.full.views[a].storage for a, _ in pair.refs} & writes(pair)

    def changes_state(self, pair: OperatorPair) -> bool:
        return any(self.full.storages[s].kind == "state" for s in self.changed(pair))

    def refuse(self, pair: OperatorPair, why: str, remedy: str = REMEDY) -> NotSplittable:
        return NotSplittable(f"{pair.full.where}: {pair.name} {why}", remedy)


# ---- deciding when each operator runs
#
# Values are classified by storage in a walk over both traces. A refusal names the first operator that needs a value
# reduced over the whole batch together with single samples.


def classify(
    pairs: list[OperatorPair],
    full: TraceRecord,
    part: TraceRecord,
    count: int,
    setting: Setting,
    exits: list[int],
    results: list[int],
) -> SplitPlan:
    """Classify the values and operators of a step. `exits`: views of the whole trace that outlive the step; `results`:
    views that it returns. Raises NotSplittable."""
    forced: set[int] = set()
    border = len(pairs)
    while True:
        walk = _Walk(pairs, full, part, count=count, setting=setting, forced=forced, border=border)
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
        if walk.kinds[storage] not in (ValueKind.SAMPLE, ValueKind.DATA):
            walk.need(storage, len(pairs), "the step")
    return walk.plan


class _Walk(Values):
    def run(self) -> None:
        last_reduction = -1
        for j, pair in enumerate(self.pairs):
            level, outs = self._decide(j, pair)
            self.plan.levels.append(level)
            self.plan.outs.append(outs)
            self.apply(j, pair, level, outs)
            born_shares = any(k is ValueKind.SHARE for _, _, k in outs)
            of_samples = not self.has(pair, ValueKind.SHARE)
            if level is RunLevel.PART and born_shares and (of_samples or self._spread_backward(pair)):
                last_reduction = j
            if level is RunLevel.TAIL and self._updates(pair) and self.border == self.limit:
                self.border = min(self.limit, last_reduction + 1)

    def _updates(self, pair: OperatorPair) -> bool:
        """Whether an operator changes state other than accumulated gradients, so that the backward passes are over."""
        changed = [self.full.storages[s] for s in self.changed(pair)]
        return any(s.kind == "state" and s.key not in self.setting.gradients for s in changed)

    # ---- one operator ------------------------------------------------------------------------------

    def _decide(self, j: int, pair: OperatorPair) -> tuple[RunLevel, list[tuple[int, int, ValueKind]]]:
        kinds = self.arguments(pair)
        changed = self.changed(pair)
        if pair.full.random is not None and numbers_of(pair.full) != numbers_of(pair.part):
            raise self.refuse(pair, "draws numbers that depend on how many samples the batch has", _AHEAD)
        if ValueKind.LATE in kinds or changed & self.tail:
            return self._tail_op(j, pair, kinds)
        if pair.name in PATTERN_ONLY:
            if set(kinds) <= {ValueKind.SAME} and pair.same:
                return RunLevel.ONCE, self.outs(pair, ValueKind.SAME, ValueKind.SAME)
            return RunLevel.PART, self.outs(pair, ValueKind.SIZE, ValueKind.SAMPLE)
        samples = ValueKind.SAMPLE in kinds or ValueKind.DATA in kinds
        if ValueKind.SHARE in kinds:
            return self._share_op(j, pair, kinds, samples)
        if samples:
            return self._sample_op(j, pair, kinds)
        if ValueKind.SIZE in kinds or not pair.same or j in self.forced:
            return self._size_op(j, pair, kinds)
        if changed & (self.part_read | self.part_wrote):  # it overwrites a value that a part has used
            if self.changes_state(pair):
                return self._tail_op(j, pair, kinds)
            return self._size_op(j, pair, kinds)
        return RunLevel.ONCE, self.outs(pair, ValueKind.SAME, ValueKind.SAME)

    def _tail_op(
        self, j: int, pair: OperatorPair, kinds: list[ValueKind]
    ) -> tuple[RunLevel, list[tuple[int, int, ValueKind]]]:
        if ValueKind.SAMPLE in kinds or ValueKind.DATA in kinds:
            late = [self.full.views[a].storage for a, _ in pair.refs if self.kind(a) is ValueKind.LATE]
            if not late:
                raise self.refuse(
                    pair, "changes a value after the whole batch has used it, together with single samples"
                )
            if any(self.full.storages[s].kind == "state" for s in late):
                raise self.refuse(
                    pair, "reads state that the step has changed by then, together with single samples", _IN_TWO
                )
            cause = self.causes[late[0]]
            raise self.refuse(
                pair,
                f"uses, together with single samples, what {cause.name} at {cause.full.where} makes of the whole batch",
            )
        known = [self.causes[s] for a, _ in pair.refs if (s := self.full.views[a].storage) in self.causes]
        self.causes.update(dict.fromkeys(writes(pair), known[0] if known else pair))
        for view, _ in pair.refs:
            self.need(self.full.views[view].storage, j, pair.full.where)
        return RunLevel.TAIL, self.outs(pair, ValueKind.LATE, ValueKind.LATE)

    def _share_op(
        self, j: int, pair: OperatorPair, kinds: list[ValueKind], samples: bool
    ) -> tuple[RunLevel, list[tuple[int, int, ValueKind]]]:
        if samples:
            raise self.refuse(pair, "uses a value reduced over the whole batch together with single samples")
        once = j >= self.limit or j in self.setting.once
        if once or not self._linear(pair, kinds) or self.changes_state(pair):
            return self._tail_op(j, pair, kinds)
        outs = self.outs(pair, ValueKind.SHARE, ValueKind.SAMPLE)
        if any(kind is ValueKind.SAMPLE for _, _, kind in outs):
            raise self.refuse(pair, "lays a value reduced over the whole batch out over its samples")
        self._refuse_random(pair)
        self.note_division(j, pair)
        return RunLevel.PART, outs

    def _spread_backward(self, pair: OperatorPair) -> bool:
        """Whether an operator is one of a backward pass on ranks of their own."""
        return self.setting.spread and pair.full.in_backward

    def _linear(self, pair: OperatorPair, kinds: list[ValueKind]) -> bool:
        if pair.name not in (LINEAR_OVER_RANKS if self.setting.spread else LINEAR):
            return False
        shares = [kind is ValueKind.SHARE for kind in kinds]
        if pair.name in DIVISIONS or pair.name in _PLACES:
            return not any(shares[1:])
        return pair.name not in PRODUCTS | _TIMES_WEIGHTS or sum(shares) == 1

    def _sample_op(
        self, j: int, pair: OperatorPair, kinds: list[ValueKind]
    ) -> tuple[RunLevel, list[tuple[int, int, ValueKind]]]:
        if self._is_batch_norm(pair):
            return self._batch_norm(j, pair)
        if pair.name == NORM_BACKWARD and self.norms & {self.full.views[a].storage for a, _ in pair.refs}:
            self.plan.norms.add(j)
        if self.changes_state(pair):
            raise self.refuse(pair, "writes values of single samples into the job's state")
        pure = all(self.pure[self.full.views[a].storage] for a, _ in pair.refs)
        if self._runs_along_samples(pair):
            raise self.refuse(pair, "mixes samples of the batch", _AHEAD if pure else REMEDY)
        if pair.name == EMBEDDING_BACKWARD and pair.full.args[4]:
            raise self.refuse(pair, "divides by how often each index occurs in the batch (scale_grad_by_freq)")
        data = pure and pair.full.random is None and ValueKind.SAMPLE not in kinds
        outs = self.outs(pair, ValueKind.SHARE, ValueKind.DATA if data else ValueKind.SAMPLE)
        unscaled = [kind is ValueKind.SHARE for _, _, kind in outs]
        if data and outs and all(unscaled) and not self.changed(pair) and j not in self.forced:
            for view, _ in pair.refs:  # a number of the batch alone, computed before the parts
                self.chain(self.full.views[view].storage, j, pair.full.where)
            self.plan.counts |= {self.full.views[a].storage for a, _, _ in outs if not self.full.views[a].size}
            return RunLevel.ONCE, [(a, b, ValueKind.SAME) for a, b, _ in outs]
        if any(unscaled):
            self._refuse_random(pair)
        if pair.name in NLL_FORWARD and pair.full.args[3] == MEAN:
            self.note_loss(j, pair)
        self.note_division(j, pair)
        return RunLevel.PART, outs

    def _runs_along_samples(self, pair: OperatorPair) -> bool:
        at = ALONG.get(pair.name)
        if at is None or at >= len(pair.full.args):
            return False
        a, b = pair.refs[0]
        dims = pair.full.args[at]
        rank = len(self.full.views[a].size)
        return self.scaled(a, b) in {
            d % rank for d in (dims if isinstance(dims, tuple) else (dims,)) if isinstance(d, int)
        }

    def _size_op(
        self, j: int, pair: OperatorPair, kinds: list[ValueKind]
    ) -> tuple[RunLevel, list[tuple[int, int, ValueKind]]]:
        if self.changes_state(pair):
            return self._tail_op(j, pair, kinds)
        outs = self.outs(pair, ValueKind.SIZE, ValueKind.SAMPLE if pair.full.random is not None else ValueKind.DATA)
        if pair.full.random is not None and (pair.name == "randperm" or any(k is ValueKind.SIZE for _, _, k in outs)):
            raise self.refuse(pair, "draws numbers that depend on how many samples the batch has", _AHEAD)
        self.note_division(j, pair)
        return RunLevel.PART, outs

    def _refuse_random(self, pair: OperatorPair) -> None:
        if pair.full.random is not None:
            raise self.refuse(pair, "draws random numbers over the whole batch")

    def _is_batch_norm(self, pair: OperatorPair) -> bool:
        """Whether an operator is a batch norm in training mode, and no instance norm, which is recorded as batch norm
        with the samples along dimension 1."""
        if pair.name not in BATCH_NORMS or not training(pair):
            return False
        a, b = pair.refs[0]
        return scaled(self.full.views[a], self.part.views[b], self.count) != 1

    def _batch_norm(self, j: int, pair: OperatorPair) -> tuple[RunLevel, list[tuple[int, int, ValueKind]]]:
        """A batch norm whose statistics stay with their part. The running ones are known after it as before it."""
        if not self.setting.norms:
            raise NotSplittable(
                f"{pair.full.where}: batch norm in training mode uses the mean and variance of the whole batch, "
                "and parts of it have others",
                "use layer, group or instance norm, or keep the batch norms in eval(), or submit without microbatches",
            )
        if pair.name != "native_batch_norm" or pair.full.args[3] is None:
            raise self.refuse(pair, "normalises by the statistics of the batch and keeps no running ones")
        (y, *_), (mine, *_) = pair.full.outs, pair.part.outs
        assert isinstance(y, int)
        assert isinstance(mine, int)
        saved = [(a, b, ValueKind.SIZE) for a, b in pair.outs[1:]]
        self.plan.norms.add(j)
        self.norms |= {self.full.views[a].storage for a, *_ in saved}
        return RunLevel.PART, [(y, mine, ValueKind.SAMPLE), *saved]
