"""Proof of a split: the whole step and its parts run on real numbers and are compared.

Every per-sample value must equal the parts' values laid side by side, and every accumulated value their sum or mean.
Each operator is compared by itself; NotSplittable names the first that differs.

Of a value that is zero it can't be seen by which factor parts make it up. The example may have a mask that holds
nowhere, or a coefficient that begins at zero; so the numbers are varied, and an operator whose arguments or results
are zero all the same, or that may treat factors otherwise than products and sums do, is tried by itself (trial.py).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import product
from math import isfinite, prod
from typing import Any, Protocol

import torch

from gpumux.capture.microbatch.classify import (
    LINEAR,
    LINEAR_OVER_RANKS,
    NLL_BACKWARD,
    NORM_BACKWARD,
    REMEDY,
    OperatorPair,
    RunLevel,
    SplitPlan,
    ValueKind,
    numbers_of,
    scaled,
)
from gpumux.capture.microbatch.emit import PartEmitter
from gpumux.capture.microbatch.trial import Layout, OperatorTrial, SampleLayout, ShareLayout, side_by_side
from gpumux.capture.recorder import RawOp, TraceRecord
from gpumux.capture.values.machine import PATTERN_ONLY, UNDEFINED, Inconclusive, Machine, outs_of
from gpumux.errors import NotSplittable
from gpumux.program.ir import ITEM_BYTES, ScalarRef, TensorRef, View

# ---- comparing a value of the whole batch with those of the parts


_POWERS = range(-3, 4)  # a mean loss makes a part's per-sample gradients `count` times as large


@dataclass(frozen=True, slots=True)
class Match:
    """How a whole value is made of the parts' values. `ratio`: whole = ratio x combined parts; None if all is zero, so
    that any ratio fits. `inner`: 1 if the parts lie one after the other, else the number of times that they
    alternate."""

    ratio: float | None
    inner: int = 1


def along(whole: torch.Tensor, parts: Sequence[torch.Tensor], dim: int, tolerance: float) -> Match | None:
    """The match of per-sample values, with the parts side by side along `dim`, or alternating within it (time before
    batch, flattened)."""
    length = parts[0].shape[dim]
    for inner in (n for n in range(1, length + 1) if length % n == 0):
        split = [p.unflatten(dim, (inner, length // inner)) for p in parts]
        joined = torch.cat(split, dim + 1).flatten(dim, dim + 1)
        ratio = _ratio(whole, joined, len(parts), tolerance)
        if ratio is not None:
            return Match(None if ratio == 0 else ratio, inner)
    return None


def total(whole: torch.Tensor, parts: Sequence[torch.Tensor], tolerance: float, noise: float) -> Match | None:
    """The match of a value reduced over the batch: the sum of the parts' values times a power of their number.
    `noise`: magnitudes up to it are rounding errors (of a gradient that is zero in exact arithmetic)."""
    if whole.dtype == torch.bool:
        return None
    stacked = torch.stack([p.to(torch.float64) if not p.is_complex() else p for p in parts])
    scale = max((largest_of(p) for p in parts), default=0.0)
    if scale <= noise and whole.numel() and largest_of(whole) <= noise:
        return Match(None)
    ratio = _ratio(whole, stacked.sum(0), len(parts), tolerance, scale)
    if ratio is None or (not whole.is_floating_point() and not whole.is_complex() and ratio not in (0, 1)):
        return None
    return Match(None if ratio == 0 else ratio)


def largest_of(values: torch.Tensor) -> float:
    """The largest magnitude, in one pass: nan or infinity if there is one, 0 if there are no elements."""
    if not values.numel():
        return 0.0
    if not (values.is_floating_point() or values.is_complex()):
        return float(values.to(torch.float64).abs().max())
    if values.is_complex():
        return float(torch.linalg.vector_norm(values, float("inf")))
    least, most = torch.aminmax(values)  # a norm takes four times as long
    return max(abs(float(least)), abs(float(most)))


_BLOCK = 1 << 17  # elements: two blocks of float64 stay in a core's cache


def largest_difference(a: torch.Tensor, b: torch.Tensor, factor: float = 1.0) -> float:
    """The largest magnitude of a - factor * b, of two floating-point tensors of one shape. Works in blocks: a whole
    difference would take fresh memory from the system, which costs more than the arithmetic."""
    if a.numel() <= _BLOCK or not (a.is_contiguous() and b.is_contiguous()):
        return largest_of(torch.sub(a, b, alpha=factor))
    room = torch.empty(_BLOCK, dtype=torch.result_type(a, b))
    found = 0.0
    for one, other in zip(a.view(-1).split(_BLOCK), b.view(-1).split(_BLOCK), strict=True):
        largest = largest_of(torch.sub(one, other, alpha=factor, out=room[: one.numel()]))
        if not largest <= found:  # also if it is nan
            found = largest
            if not isfinite(found):
                break
    return found


def _ratio(whole: torch.Tensor, made: torch.Tensor, count: int, tolerance: float, scale: float = 0.0) -> float | None:
    """The power of `count` that `made` must be multiplied by; 0 if both are zero; None if there is no match."""
    if whole.dtype == torch.bool or made.dtype == torch.bool:
        return 1.0 if torch.equal(whole.to(made.dtype), made) else None
    if not (whole.is_floating_point() or whole.is_complex()):
        return 1.0 if torch.equal(whole.to(torch.float64), made.to(torch.float64)) else None
    whole = whole.to(made.dtype)
    biggest, largest = largest_of(made), largest_of(whole)
    if not isfinite(biggest + largest):  # masks contain infinities
        finite = torch.isfinite(whole)
        if not torch.equal(finite, torch.isfinite(made)):
            return None
        if not torch.equal(whole[~finite].nan_to_num(), made[~finite].nan_to_num()):
            return None
        whole, made = whole[finite], made[finite]
        biggest, largest = largest_of(made), largest_of(whole)
    if biggest == 0.0 and largest == 0.0:
        return 0.0
    for power in _POWERS:
        ratio = float(count) ** power
        bound = tolerance * max(largest, ratio * biggest, ratio * scale)
        if largest_difference(whole, made, ratio) <= bound:
            return ratio
    return None


# ---- the proof


_OF_PARTS = (ValueKind.SAMPLE, ValueKind.DATA, ValueKind.SHARE)
_DRAWN = frozenset(("bool", "uint8", "int8", "int16", "int32", "int64"))  # beside floating-point numbers


def _is_float(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat", "complex"))


def _is_one_number(values: torch.Tensor) -> bool:
    """Whether all elements of a tensor that has some are the same: of floating-point numbers, zero."""
    one = values.new_zeros(()) if values.is_floating_point() else values[(0,) * values.dim()]
    corner = values[tuple([slice(0, 8)] * values.dim())]  # shows it of most tensors
    return not bool((corner != one).any()) and not bool((values != one).any())


def _is_zero(values: torch.Tensor) -> bool:
    """Whether a tensor has no other elements than zeros, or is a mask that is the same everywhere."""
    if not values.numel():
        return True
    return _is_one_number(values) and (values.dtype == torch.bool or not bool(values.any()))


def _agreed(seen: Match, tried: Match | None) -> Match | None:
    """The match of a result on the step's numbers, and of what the operator makes of other numbers."""
    if tried is None or tried.ratio is None:
        return tried
    return tried if seen.ratio in (None, tried.ratio) and seen.inner in (1, tried.inner) else None


_WIDE_TOLERANCE = 1e-8  # float64: the difference between two orders of summation
_NARROW_TOLERANCE = 1e-3  # the step's own types, if it can't be run in float64
_NOISE = 1e-12


def with_given_statistics(op: RawOp, of: RawOp | None = None) -> RawOp:
    """A batch norm by its running statistics, which are the same for all parts, in place of the batch's. `of`: the
    operator whose running statistics those are, where it is another."""
    if op.target == "aten.native_batch_norm.default":
        writes = op.writes - op.reads
        args = (*op.args[:3], *(of or op).args[3:5], False, *op.args[6:])
        return replace(op, args=args, outs=(op.outs[0], None, None), writes=writes)
    if op.target == f"aten.{NORM_BACKWARD}.default":
        return replace(op, args=(*op.args[:5], None, None, False, *op.args[8:]))
    return op


_SUM_AND_MEAN = "adds a sum over the batch and a mean, or what follows from them"
_ADDING = frozenset(("add", "sub", "rsub", "cat", "stack"))

# Operators that give c times as much for c times an argument, whatever the others are, as backward passes do.
_LINEAR_IN_EACH = (LINEAR - {form for name in _ADDING for form in (name, f"{name}_", f"_foreach_{name}")}) | {
    "mm", "bmm", "mv", "dot", "convolution", "select", "slice", "constant_pad_nd", "tril", "triu",
}  # fmt: skip

# Operators whose numbers are bounds, exponents or divisors, not factors.
_WITH_BOUNDS = frozenset(
    ("clamp", "clamp_min", "clamp_max", "threshold", "gt", "ge", "lt", "le", "eq", "ne", "pow", "remainder", "fmod",
     "huber_loss", "smooth_l1_loss", "hardtanh", "hardshrink", "softshrink", "softplus")
)  # fmt: skip


# Operators that pick values by their positions.
_PICKING = frozenset(("index", "gather", "index_select", "take", "take_along_dim", "embedding"))


class Numbers(Enum):
    """What a proof runs on, in the order in which it is tried."""

    VARIED = "made-up numbers, among them the example's; masks and labels that are not the same for most samples"
    MADE_UP = "made-up numbers, and the example's masks and labels"
    EXAMPLE = "the job's state and the example batch"


class RunsOnce(NotSplittable):
    """What linear operators make of shares is not the share of what they make of sums: a sum and a mean are added, or
    what is the same for all parts is added to a sum. `operators` have to run once, on sums (Setting.once)."""

    def __init__(self, first: NotSplittable, operators: frozenset[int]) -> None:
        super().__init__(first.message, first.remedy)
        self.operators = operators


class Load(Protocol):
    """Fills state and batch."""

    @property
    def alike(self) -> Sequence[int]:
        """Positions of the masks, labels and indices of the batch that are the same for most samples."""

    def __call__(self, machine: Machine, numbers: Numbers, only: int | None = None) -> None:
        """`only`: of those, the one that is varied; None: all."""


@dataclass(slots=True)
class Proof:
    """`ratios`: the factor of the parts' sum, by storage of shares. `joined`: the match of each result that is laid
    side by side, by its views. `samples`: the match of each per-sample result of an operator, by the operator and its
    view of the whole trace; whole numbers that could not be matched, and numbers drawn, are missing. `zero`: what made
    each share that was zero, so that its factor is not known."""

    ratios: dict[int, float] = field(default_factory=dict)
    joined: dict[tuple[int, int], float] = field(default_factory=dict)
    samples: dict[tuple[int, int], Match] = field(default_factory=dict)
    zero: dict[int, str] = field(default_factory=dict)

    def learn(self, other: Proof) -> None:
        """Take what is known from another proof of the same split, and not from this one."""
        self.ratios |= {s: ratio for s, ratio in other.ratios.items() if s in self.zero and s not in other.zero}
        self.zero = {s: what for s, what in self.zero.items() if s in other.zero}
        unknown = [key for key, match in self.samples.items() if match.ratio is None]
        self.samples |= {key: other.samples[key] for key in unknown if key in other.samples}


def is_mostly_alike(values: torch.Tensor) -> bool:
    """Whether half of the elements, or more, are the same number."""
    if values.is_complex() or not values.numel():
        return False
    return 2 * int(values.unique(return_counts=True)[1].max()) >= values.numel()


def operators(pairs: Sequence[OperatorPair], plan: SplitPlan) -> list[tuple[int, OperatorPair, RunLevel]]:
    """The operators that a proof runs, with their positions: those that parts run, and what comes before the last of
    them. An optimizer only follows."""
    end = max((j for j, level in enumerate(plan.levels) if level is RunLevel.PART), default=-1) + 1
    found = enumerate(zip(pairs[:end], plan.levels[:end], strict=True))
    return [(j, pair, level) for j, (pair, level) in found if level is not RunLevel.TAIL]


def prove(
    pairs: list[OperatorPair],
    plan: SplitPlan,
    make: Callable[[], PartEmitter],
    load: Load,
    results: list[tuple[int, int]],
    spread: bool = False,
) -> Proof:
    """Prove a split on real numbers. `results`: (whole view, part view) of per-sample values that the step returns.
    `spread`: look at elements spread over a large value only, for a caller that compares all of them itself. Raises
    RunsOnce or another NotSplittable."""
    reason = ""
    for wide in (True, False):
        found: Proof | None = None
        tries: list[tuple[Numbers, int | None]] = [(numbers, None) for numbers in Numbers]
        while tries:
            numbers, only = tries.pop(0)
            try:
                with torch.no_grad():
                    one = _Run(pairs, plan, make(), wide=wide, results=results, spread=spread).run(load, numbers, only)
            except Inconclusive as error:
                reason = reason or str(error)
                if numbers is Numbers.VARIED and only is None:  # an index of one tensor may have no other value
                    tries[:0] = [(numbers, one) for one in load.alike]
                continue
            if numbers is Numbers.VARIED and only is not None and tries[0][0] is Numbers.VARIED:
                continue  # what it is varied for was seen, and others are to be varied
            if found is None:
                found = one
            else:
                found.learn(one)
            if not found.zero:
                return found
        if found is not None:
            raise NotSplittable(
                f"{next(iter(found.zero.values()))} was zero for all numbers that were tried, so it is not known how"
                " parts of the batch make it up",
                "submit with an example for which it is not zero: a mask that holds somewhere, labels that occur, a"
                " coefficient other than 0",
            )
    raise NotSplittable(f"whether the step splits could not be tried out: {reason}", REMEDY)


def described(record: TraceRecord, op: RawOp) -> Any:
    """What an operator does, and on what. Views and host scalars have other numbers in other traces."""

    def seen(arg: Any) -> Any:
        if isinstance(arg, TensorRef):
            return of_view(arg.view)
        if isinstance(arg, ScalarRef):
            return str(record.scalars[arg.index])
        return [seen(one) for one in arg] if isinstance(arg, tuple) else arg

    def of_view(view: int) -> Any:
        v = record.views[view]
        return v, record.storages[v.storage]

    one = op.collective
    if one is not None:
        moved = [[(rank, of_view(view)) for rank, view in each] for each in (one.sends, one.receives)]
        return one.kind, one.sequence, one.members, [of_view(view) for view in one.views], one.scale, moved
    outs = [
        [*map(of_view, out)] if isinstance(out, tuple) else None if out is None else of_view(out) for out in op.outs
    ]
    return op.target, seen(op.args), [(name, seen(value)) for name, value in op.kwargs], outs, op.random


def prove_once(
    known: dict[Any, Proof],
    records: tuple[TraceRecord, TraceRecord],
    pairs: list[OperatorPair],
    plan: SplitPlan,
    make: Callable[[], PartEmitter],
    load: Load,
    results: list[tuple[int, int]],
    spread: bool = False,
) -> Proof:
    """What `prove` gives, if it is not among the proofs known of a job's steps, to which it is added: the phases of an
    optimizer differ behind what is proven. `records`: of the whole step and of a part. Raises as `prove` does."""
    full, part = records
    ran = []
    for j, pair, level in operators(pairs, plan):
        # A proof names views by their numbers, which are not in a description.
        views = [(op.args, op.kwargs, op.outs) for op in (pair.full, pair.part)]
        ran.append((j, level, described(full, pair.full), described(part, pair.part), views))
    about = make().count, hashlib.sha256(repr(ran).encode()).hexdigest(), frozenset(plan.shares), tuple(results)
    if about not in known:
        known[about] = prove(pairs, plan, make, load, results, spread)
    return known[about]


_SPREAD = 1 << 16  # about so many elements of a large value


def _spread(values: torch.Tensor) -> torch.Tensor:
    """Elements spread evenly over a tensor, in no step with its rows."""
    return values.flatten()[:: values.numel() // _SPREAD | 1]


def _spread_samples(shape: Sequence[int], dim: int) -> tuple[slice, ...]:
    """Elements of all samples of a tensor, which lie along `dim`, spread evenly over its other dimensions."""
    surplus, found = prod(shape) // _SPREAD, [slice(None)] * len(shape)
    for other in reversed(range(len(shape))):
        if surplus > 1 and other != dim:
            step = min(surplus, shape[other]) | 1
            found[other] = slice(None, None, step)
            surplus //= step
    return tuple(found)


class _Run:
    def __init__(
        self,
        pairs: list[OperatorPair],
        plan: SplitPlan,
        emitter: PartEmitter,
        *,
        wide: bool,
        results: list[tuple[int, int]],
        spread: bool,
    ) -> None:
        self.pairs, self.plan, self.emitter, self.results = pairs, plan, emitter, results
        self._spread = spread
        self.record = emitter.record
        self.machine = Machine(self.record, wide)
        self.tolerance = _WIDE_TOLERANCE if wide else _NARROW_TOLERANCE
        self.parts = range(emitter.count)
        self._own: dict[int, set[int]] = {}  # storage of the whole -> the parts'
        self._matches: dict[int, Match] = {}
        self._samples: dict[tuple[int, int], Match] = {}
        self._ratios: dict[int, float | None] = {}  # of all that depends on the batch; None: not known
        self._always_zero: set[int] = set()
        self._zero_for_all: set[int] = set()  # of what the present operator makes, what was so of all numbers tried
        self._mixed: set[int] = set()  # whole numbers computed from samples, that parts do not give side by side
        self._once: dict[int, NotSplittable] = {}  # operators that have to run once, and why
        self._not_shared: set[int] = set()  # what they make, and what follows from it
        self._zero_shares: dict[int, str] = {}  # shares that are zero and have no ratio, and what made each
        self._zero: set[int] = set()  # storages that hold zeros alone, and may hold other numbers later
        self._laid: dict[int, SampleLayout] = {}  # by storage of per-sample values of which it is known
        self._at = 0  # the operator that runs
        self._emitted: list[RawOp] = []  # it, on the parts
        self._draw: torch.Generator | None = None  # of masks

    def run(self, load: Load, numbers: Numbers, only: int | None = None) -> Proof:
        load(self.machine, numbers, only)
        self._note_given()
        if numbers is Numbers.VARIED:
            self._draw = torch.Generator().manual_seed(3)
        last = self._last_uses()
        for j, pair, level in operators(self.pairs, self.plan):
            self._at = j
            self._whole(with_given_statistics(pair.full) if j in self.plan.norms else pair.full)
            if level is RunLevel.ONCE:
                self._note_zeros(pair)
            if level is RunLevel.PART:
                self._in_parts(j, pair)
                self._compare_or_run_once(j, pair)
            for storage in last.get(j, ()):
                for one in (storage, *self._own.get(storage, ())):
                    self.machine.forget(one)
        if self._once:
            raise RunsOnce(next(iter(self._once.values())), frozenset(self._once))
        return self._finish()

    def _note_given(self) -> None:
        """Note the ratios of what no operator makes: the batch, and constants that are made of its size."""
        for s, kind in enumerate(self.plan.kinds):
            storage = self.record.storages[s]
            if storage.kind == "input" and kind is ValueKind.DATA:
                self._ratios[s] = 1.0
            elif storage.kind == "const" and self._is_float(s):
                whole, part = (self._constant(one) for one in (s, self.emitter.storage(s, 0)))
                if not whole.any():
                    self._always_zero.add(s)
                elif not torch.equal(whole, part) and part.all() and bool((whole / part == (whole / part)[0]).all()):
                    self._ratios[s] = float((whole / part)[0])

    def _constant(self, storage: int) -> torch.Tensor:
        known = self.record.storages[storage]
        return (
            torch.frombuffer(bytearray(known.key), dtype=getattr(torch, known.dtype)) if known.key else torch.zeros(1)
        )

    def _last_uses(self) -> dict[int, list[int]]:
        """The storages that are not used after each operator. A share has been compared wherever it was changed."""
        kept = {self.record.views[a].storage for a, _ in self.results}
        kept |= {s for j in self.plan.losses.values() for s in self.pairs[j].full.reads}
        kept |= set(self.plan.divided.values())
        used: dict[int, int] = {}
        for j, pair, _ in operators(self.pairs, self.plan):
            used.update(dict.fromkeys(pair.full.reads | pair.full.writes, j))
        found: dict[int, list[int]] = {}
        for storage, j in used.items():
            if storage not in kept and self.record.storages[storage].kind == "temp":
                found.setdefault(j, []).append(storage)
        return found

    # ---- running -------------------------------------------------------------------------------------

    def _note_zeros(self, pair: OperatorPair) -> None:
        """Note what an operator that runs once makes of no other value, as zeros."""
        for view in outs_of(pair.full.outs):
            storage = self.record.views[view].storage
            made = not pair.refs or pair.name in PATTERN_ONLY
            zero = storage in self.machine and _is_zero(self.machine.flat(storage))
            if made and zero:
                self._always_zero.add(storage)
            else:
                self._always_zero.discard(storage)
            self._note_zero(storage, zero)

    def _note_zero(self, storage: int, zero: bool) -> None:
        if zero and storage not in self._always_zero:
            self._zero.add(storage)
        else:
            self._zero.discard(storage)

    def _whole(self, op: RawOp) -> None:
        if op.random is not None:
            self.machine.draw(op)
        else:
            self.machine.run(op)

    def _in_parts(self, j: int, pair: OperatorPair) -> None:
        self._emitted = []
        for part in self.parts:
            ops = self.emitter.emit(j, part)
            for extra in self.emitter.extras:
                self.machine.run(extra)
            self.emitter.extras.clear()
            for storage in pair.part.writes:
                self._own.setdefault(storage, set()).add(self.emitter.storage(storage, part))
            if pair.full.random is not None:
                self.machine.put(ops[0], self._drawn(pair, part))
                continue
            for op in ops:
                self.machine.run(with_given_statistics(op) if j in self.plan.norms else op)
            self._emitted += ops

    def _drawn(self, pair: OperatorPair, part: int) -> list[torch.Tensor]:
        """The part's piece of the numbers drawn for the whole batch."""
        found = []
        for a, b in zip(outs_of(pair.full.outs), outs_of(pair.part.outs), strict=True):
            whole = self.machine.tensor(a)
            dim = scaled(self.record.views[a], self._of_part(b, part), len(self.parts))
            assert dim >= 0, "other draws were refused"
            length = whole.shape[dim] // len(self.parts)
            found.append(whole.narrow(dim, part * length, length))
        return found

    def _of_part(self, view: int, part: int) -> View:
        return self.record.views[self.emitter.part_view(view, part)]

    # ---- comparing -----------------------------------------------------------------------------------

    def _compare_or_run_once(self, j: int, pair: OperatorPair) -> None:
        made = {self.record.views[a].storage for a, _, _ in self.plan.outs[j]}
        if self._not_shared & {self.record.views[a].storage for a, _ in pair.refs}:
            self._not_shared |= made
            return
        self._not_shared -= made
        try:
            self._compare(j, pair)
        except NotSplittable as error:
            kinds = {self.plan.kinds[self.record.views[a].storage] for a, _ in pair.refs}
            if pair.name not in LINEAR_OVER_RANKS or ValueKind.SHARE not in kinds:
                raise
            if kinds & {ValueKind.SAMPLE, ValueKind.DATA}:
                raise
            self._once[j] = error
            self._not_shared |= made

    def _compare(self, j: int, pair: OperatorPair) -> None:
        if pair.full.random is not None:
            for a, b in zip(outs_of(pair.full.outs), outs_of(pair.part.outs), strict=True):
                self._lie(a, b, Match(1.0))
        if pair.name in UNDEFINED or pair.full.random is not None:
            return
        self._check_numbers(pair)
        self._zero_for_all = set()
        tried = self._try(j, pair) if self._hides(pair) else {}
        for a, b, kind in self.plan.outs[j]:
            storage = self.record.views[a].storage
            if kind in (ValueKind.SAMPLE, ValueKind.DATA):
                whole, parts = self._values(a, b)
                match = self._along(a, b, whole, parts)
                if match is not None and a in tried:
                    match = _agreed(match, tried[a])
                if match is not None and not whole.is_floating_point() and self._picks_from_mixed(pair):
                    raise self._mixes(pair)
                if match is not None and (a in tried or not self._fits_any_order(whole, parts)):
                    self._samples[j, a] = match
                    self._note(pair, storage, match.ratio)
                    self._note_zero(storage, match.ratio is None or _is_zero(whole))
                    self._lie(a, b, match)
                    self._vary(storage, a, b, whole, parts, match.inner)
                elif match is not None:
                    continue
                elif not (whole.is_floating_point() or whole.is_complex()) and not (
                    whole.dtype == torch.bool and a in tried
                ):
                    # Positions differ in a part and in the batch; the values picked by them are compared.
                    self._mixed.add(storage)
                else:
                    raise self._mixes(pair)
            elif kind is ValueKind.SHARE and storage in self.plan.shares:
                self._share(storage, a, b, pair, tried)
            elif kind in (ValueKind.SIZE, ValueKind.SHARE) and storage in self.machine:  # see with_given_statistics
                self._note_other(pair, kind, a, b, tried)

    # ---- an operator on numbers drawn for it

    def _hides(self, pair: OperatorPair) -> bool:
        """Whether the numbers may hide what an operator does: one of its arguments or results is zero, or the same
        everywhere, or what it is given is made of parts by several factors, or by another one than 1, and it is not
        known to be linear. Close to zero, or far from it, many operators look as if they were."""
        if pair.name in PATTERN_ONLY or not pair.refs:
            return False
        if any(self.record.views[view].storage in self._zero for view, _ in pair.refs):
            return True
        if not pair.name.endswith("backward") and self._may_mix_factors(pair):
            return True
        found = [self.machine.tensor(a) for a, _, kind in self.plan.outs[self._at] if kind in _OF_PARTS]
        return any(t.numel() and not t.is_complex() and _is_one_number(t) for t in found)

    def _may_mix_factors(self, pair: OperatorPair) -> bool:
        if pair.name in _LINEAR_IN_EACH and not self._writes_a_piece(pair):
            return False
        factors, others = self._factors(pair)
        if any(self.plan.kinds[self.record.views[v].storage] is ValueKind.SHARE for v, _ in pair.refs):
            return others or len(factors) > 1
        if any(kind is ValueKind.SHARE for _, _, kind in self.plan.outs[self._at]):
            return True  # a reduction, of which few numbers may show little
        alone = pair.name.rstrip("_") in _ADDING and not others and len(factors) == 1
        return bool(factors - {1.0}) and not alone

    def _try(self, j: int, pair: OperatorPair) -> dict[int, Match | None]:
        """How an operator's results on numbers drawn for it are made of those of the parts, by the view of the whole;
        None: in no way. Without those of which these numbers show nothing either."""
        given = self._to_draw(j, pair) if j not in self.plan.norms else None
        if given is None:
            return {}
        outs = [(a, b, kind) for a, b, kind in self.plan.outs[j] if kind in _OF_PARTS]
        ops = [pair.full, *self._emitted]
        trial = OperatorTrial(self.machine, given, frozenset[int]().union(*(op.reads | op.writes for op in ops)))
        found: dict[int, Match | None] = {}
        ran = not given
        masks = any(self.record.views[v].dtype == "bool" for v, _ in pair.refs)
        bounds = [False] if pair.name in _PICKING else [True, False]
        for near, positive in product(bounds, (False, True)) if given else ():
            with suppress(Inconclusive), trial.run(pair.full, self._emitted, near=near, positive=positive):
                ran = True
                for a, b, kind in outs:
                    self._note_tried(found, a, b, kind)
            if len(found) == len(outs) and not masks:  # masks of few and of many are different
                break
        if ran:
            left = [(self.record.views[a].storage, a) for a, _, _ in outs if a not in found]
            self._zero_for_all = {storage for storage, a in left if self._is_zero_here(a)}
        return found

    def _is_zero_here(self, view: int) -> bool:
        return _is_float(self.record.views[view].dtype) and _is_zero(self.machine.tensor(view))

    def _note_tried(self, found: dict[int, Match | None], a: int, b: int, kind: ValueKind) -> None:
        whole, parts = self._values(a, b)
        if not whole.numel() or not all(isfinite(largest_of(t)) for t in (whole, *parts)):
            return
        if kind is not ValueKind.SHARE:
            match = self._along(a, b, whole, parts)
        else:
            summed = self.record.views[a].storage in self.plan.shares
            match = total(*(self._all_there(a, b) if summed else (whole, parts)), self.tolerance, 0.0)
        if match is None or not _is_one_number(whole):
            known = found.get(a, match)
            found[a] = match if known == match else None

    def _to_draw(self, j: int, pair: OperatorPair) -> list[Layout] | None:
        """The arguments of an operator that other numbers are drawn for: not for those that are always zero, nor for
        labels and weights of a loss, of which the whole batch's are known. None where one of them lies in a way that is
        not known."""
        found: dict[int, Layout] = {}
        loss = pair.name in NLL_BACKWARD or j in self.plan.losses.values()
        for view, other in pair.refs[:1] if loss else pair.refs:
            storage = self.record.views[view].storage
            kind, own = self.plan.kinds[storage], tuple(self._of_part(other, part).storage for part in self.parts)
            known = self.record.storages
            if not (_is_float(dtype := self.record.views[view].dtype) or dtype in _DRAWN):
                return None
            if storage in self._always_zero:
                continue
            if storage in self._laid:
                found[storage] = self._laid[storage]
            elif kind is ValueKind.SHARE and storage not in own:
                ratio = self._ratios.get(storage, None if _is_float(dtype) else 1.0)
                if ratio is None or known[own[0]].nbytes != known[storage].nbytes:
                    return None
                found[storage] = ShareLayout(storage, own, ratio)
            elif kind in (ValueKind.DATA, ValueKind.SAMPLE):
                if set(own) != {storage} or self.record.storages[storage].kind != "input":
                    return None
                found[storage] = storage
            elif storage in self._zero:
                one = set(own) == {storage}
                if known[own[0]].nbytes != known[storage].nbytes:
                    return None
                ratio = self._ratios.get(storage) or 1.0
                found[storage] = storage if one else ShareLayout(storage, own, ratio, alike=True)
        return list(found.values())

    def _lie(self, a: int, b: int, match: Match) -> None:
        """Note how a per-sample result lies in memory, if it is all that lies there."""
        view, storage = self.record.views[a], self.record.storages[self.record.views[a].storage]
        dim = scaled(view, self._of_part(b, 0), len(self.parts))
        self._laid.pop(view.storage, None)
        ratio = match.ratio if self._is_float(view.storage) else 1.0
        if dim >= 0 and ratio is not None and prod(view.size) * ITEM_BYTES[view.dtype] == storage.nbytes:
            parts = tuple(self.emitter.part_view(b, part) for part in self.parts)
            self._laid[view.storage] = SampleLayout(a, parts, dim, match.inner, ratio)

    def _picks_from_mixed(self, pair: OperatorPair) -> bool:
        """Whether an operator makes something of whole numbers in which samples are mixed, other than to pick values by
        them. That parts give the same, as a comparison with a number far away does, is so for these numbers only."""
        return pair.name not in _PICKING and any(self.record.views[v].storage in self._mixed for v, _ in pair.refs)

    def _refused(self, pair: OperatorPair, why: str, remedy: str = REMEDY) -> NotSplittable:
        return NotSplittable(f"{pair.full.where}: {pair.name} {why}", remedy)

    def _mixes(self, pair: OperatorPair) -> NotSplittable:
        """The error for per-sample results that are not made of those of the parts."""
        factors, _ = self._factors(pair)
        if len(factors) > 1:
            return self._refused(pair, _SUM_AND_MEAN)
        if factors - {1.0}:
            return self._refused(
                pair,
                "is not linear, and reads gradients that a mean makes larger in parts of the batch than in all of it",
            )
        return self._refused(pair, "mixes samples: for parts of the batch it gives other values")

    def _is_no_sum(self, pair: OperatorPair) -> NotSplittable:
        """The error for a result of the batch that is not made of those of the parts."""
        factors, others = self._factors(pair)
        if len(factors) > 1:
            return self._refused(pair, _SUM_AND_MEAN)
        if others and pair.name.rstrip("_") in _ADDING:
            return self._refused(
                pair,
                "adds what is the same for all parts of the batch (a regulariser, a constant) to a sum over the batch",
                "divide the sum by the batch size, or submit the step without microbatches",
            )
        return NotSplittable(
            f"{pair.full.where}: what {pair.name} gives for the batch is neither the sum nor the mean of what it gives"
            " for parts of it",
            REMEDY,
        )

    def _factors(self, pair: OperatorPair) -> tuple[set[float], bool]:
        """The factors of what an operator reads of the batch, and whether it reads other numbers besides."""
        views = [v for v, _ in pair.refs if _is_float(self.record.views[v].dtype)]
        storages = {self.record.views[v].storage for v in views} - self._always_zero
        of_parts = {s for s in storages if self.plan.kinds[s] in _OF_PARTS}
        factors = {self._ratios.get(s) or 1.0 for s in of_parts}
        return factors, bool(storages - of_parts) or bool(numbers_of(pair.full))

    def _values(self, a: int, b: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        views = [self.emitter.part_view(b, part) for part in self.parts]
        return self.machine.tensor(a), [self.machine.tensor(v) for v in views]

    def _all_there(self, a: int, b: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """All that lies where the views do."""
        storages = [self._of_part(b, part).storage for part in self.parts]
        whole, parts = self.machine.flat(self.record.views[a].storage), [self.machine.flat(s) for s in storages]
        return (whole, parts) if parts[0].shape == whole.shape else self._values(a, b)

    def _along(self, a: int, b: int, whole: torch.Tensor, parts: list[torch.Tensor]) -> Match | None:
        dim = scaled(self.record.views[a], self._of_part(b, 0), len(parts))
        if dim < 0:  # a workspace of oneDNN
            return None
        if self._spread:
            spread = _spread_samples(whole.shape, dim)
            some = along(whole[spread], [p[spread] for p in parts], dim, self.tolerance)
            if some is None or some.ratio is not None:
                return some
        return along(whole, parts, dim, self.tolerance)

    def _fits_any_order(self, whole: torch.Tensor, parts: list[torch.Tensor]) -> bool:
        """Whether these numbers do not show in which order parts lie: a mask that is true everywhere now, of more rows
        than the batch has samples."""
        if whole.is_complex() or not whole.numel() or (whole.is_floating_point() and not _is_one_number(whole)):
            return False
        longest = max(n for n, m in zip(whole.shape, parts[0].shape, strict=True) if n != m)
        return longest > self.emitter.samples and bool((whole == whole.flatten()[0]).all())

    def _note(self, pair: OperatorPair, storage: int, ratio: float | None) -> None:
        """Note the ratio of what an operator made; None: it is zero."""
        if ratio is None and (pair.name in PATTERN_ONLY or not pair.refs or storage in self._zero_for_all):
            self._ratios.pop(storage, None)  # any ratio fits
            self._always_zero.add(storage)
            return
        self._always_zero.discard(storage)
        self._ratios[storage] = ratio

    def _check_numbers(self, pair: OperatorPair) -> None:
        """Raises NotSplittable for a bound, an exponent or a divisor that the step makes of the batch's size, which an
        example of small numbers does not show."""
        differ = numbers_of(pair.full) != numbers_of(pair.part)
        if pair.name.rstrip("_") in _WITH_BOUNDS and differ:
            raise self._refused(pair, "is given a number that depends on how many samples the batch has")

    def _writes_a_piece(self, pair: OperatorPair) -> bool:
        """Whether an operator changes a part of what lies in a storage."""
        changed = pair.full.reads & pair.full.writes
        views = [self.record.views[v] for v, _ in pair.refs]
        nbytes = {s: self.record.storages[s].nbytes for s in changed}
        return any(v.storage in changed and prod(v.size) * ITEM_BYTES[v.dtype] < nbytes[v.storage] for v in views)

    def _note_other(
        self, pair: OperatorPair, kind: ValueKind, a: int, b: int, tried: dict[int, Match | None]
    ) -> None:  # fmt: skip
        """Note the ratio of a value that depends on the batch's size alone, or of a share that is not summed."""
        whole, parts = self._values(a, b)
        match: Match | None = None
        if kind is ValueKind.SHARE:
            match = self._total_of_some(whole, parts) or total(whole, parts, self.tolerance, 0.0)
            match = _agreed(match, tried[a]) if match is not None and a in tried else match
            if match is None and (a in tried or whole.dtype == torch.bool):
                raise self._is_no_sum(pair)
        if whole.is_floating_point():
            one, other = largest_of(whole), largest_of(parts[0])
            ratio = one / other if one and other else None
            if kind is ValueKind.SHARE:
                ratio = match.ratio if match is not None else 1.0
            self._note(pair, self.record.views[a].storage, ratio)
        self._note_zero(self.record.views[a].storage, _is_zero(whole))

    def _vary(
        self, storage: int, a: int, b: int, whole: torch.Tensor, parts: list[torch.Tensor], inner: int
    ) -> None:  # fmt: skip
        """Have a mask that is the same for most samples hold for about half of its elements."""
        fixed = whole.dtype != torch.bool or self.record.storages[storage].kind != "temp" or 0 in whole.stride()
        if self._draw is None or fixed or whole.numel() < 2 or not is_mostly_alike(whole):
            return
        dim = scaled(self.record.views[a], self._of_part(b, 0), len(parts))
        drawn = torch.rand(whole.shape, generator=self._draw) < 0.5
        whole.copy_(drawn)
        for piece, part in zip(parts, side_by_side(drawn, dim, inner, len(parts)), strict=True):
            piece.copy_(part)

    def _total_of_some(self, whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> Match | None:
        """The match of a large reduced value by some of its elements. None if all have to be looked at."""
        if not self._spread or whole.numel() <= _SPREAD:
            return None
        match = total(_spread(whole), [_spread(part) for part in parts], self.tolerance, 0.0)
        return None if match is None or match.ratio is None else match

    def _share(
        self, storage: int, a: int, b: int, pair: OperatorPair, tried: dict[int, Match | None]
    ) -> None:  # fmt: skip
        whole, parts = self._values(a, b)
        if self._writes_a_piece(pair):  # one factor has to fit all that lies there
            whole, parts = self._all_there(a, b)
        self._zero_shares.pop(storage, None)
        match = self._total_of_some(whole, parts)
        if match is not None:
            self._matches[storage] = match
            self._note(pair, storage, match.ratio)
            return
        if not all(isfinite(largest_of(t)) for t in (whole, *parts)):
            raise Inconclusive(f"{pair.full.where}: {pair.name} gives infinities")
        inputs = [self.machine.tensor(v) for v, _ in pair.refs if self.record.views[v].storage in self.machine]
        largest = max((largest_of(t) for t in inputs if t.is_floating_point()), default=0.0)
        match = total(whole, parts, self.tolerance, _NOISE * largest)
        if match is not None and a in tried:
            match = _agreed(match, tried[a])
        self._note_zero(storage, _is_zero(whole))
        if match is None:
            raise self._is_no_sum(pair)
        self._note(pair, storage, match.ratio)
        unknown = match.ratio is None and storage in self._ratios and self._is_float(storage)
        if unknown and not any(largest_of(t) for t in (whole, *parts)):
            self._zero_shares[storage] = f"{pair.full.where}: what {pair.name} makes of the batch"
        self._matches[storage] = match

    def _finish(self) -> Proof:
        proof = Proof(samples=self._samples)
        for a, b in self.results:
            whole, parts = self._values(a, b)
            match = self._along(a, b, whole, parts)
            laid = self._laid.get(self.record.views[a].storage)
            in_order = laid is not None and laid.inner == 1
            if match is None or match.inner != 1 or (not in_order and self._fits_any_order(whole, parts)):
                raise NotSplittable(
                    f"a result of shape {tuple(whole.shape)} can't be put together from those of parts",
                    "return per-sample values with the batch first, sums, or means, or submit without microbatches",
                )
            ratio = match.ratio if match.ratio is not None else self._ratios.get(self.record.views[a].storage)
            proof.joined[a, b] = 1.0 if ratio is None else ratio
        known = Counter(m.ratio for s, m in self._matches.items() if m.ratio is not None and self._is_float(s))
        usual = known.most_common(1)[0][0] if known else 1.0
        for storage in self.plan.shares:
            found = self._matches.get(storage)
            ratio = found.ratio if found is not None else None
            proof.ratios[storage] = ratio if ratio is not None else usual if self._is_float(storage) else 1.0
            if storage in self._zero_shares:
                proof.zero[storage] = self._zero_shares[storage]
        return proof

    def _is_float(self, storage: int) -> bool:
        return _is_float(self.record.storages[storage].dtype)
