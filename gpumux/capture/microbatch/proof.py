"""Proof of a split: the whole step and its parts run on real numbers and are compared.

Every per-sample value must equal the parts' values laid side by side, and every accumulated value their sum or mean.
Each operator is compared by itself; NotSplittable names the first that differs.

Of a value that is zero it can't be seen by which factor parts make it up. The example may have a mask that holds
nowhere, or a coefficient that begins at zero; so the numbers are varied, and where a value is zero with all of them,
its factor follows from those of what it is computed from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from math import isfinite, prod
from typing import Any, Protocol

import torch

from gpumux.capture.microbatch.classify import (
    MEAN,
    NORM_BACKWARD,
    NOT_SUMS,
    REMEDY,
    OperatorPair,
    RunLevel,
    SplitPlan,
    ValueKind,
    scaled,
)
from gpumux.capture.microbatch.emit import PartEmitter
from gpumux.capture.recorder import RawOp
from gpumux.capture.values.machine import UNDEFINED, Inconclusive, Machine, outs_of
from gpumux.errors import NotSplittable
from gpumux.program.ir import View

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
    return float(torch.linalg.vector_norm(values, float("inf")))


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


# Operators that add values, or put them side by side.
_SUMS = frozenset(("add", "sub", "rsub", "cat", "stack", "where", "maximum", "minimum"))


class Numbers(Enum):
    """What a proof runs on, in the order in which it is tried."""

    VARIED = "made-up numbers, among them the example's; masks and labels that are not the same for all samples"
    MADE_UP = "made-up numbers, and the example's masks and labels"
    EXAMPLE = "the job's state and the example batch"


class Load(Protocol):
    """Fills state and batch."""

    @property
    def alike(self) -> Sequence[int]:
        """Positions of the masks, labels and indices of the batch that are the same for all samples."""

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


def reduction_of(op: RawOp) -> Any:
    """The argument of a loss that says how it is reduced: 0 not at all, MEAN, 2 by a sum; None if it has none."""
    _, name, overload = op.target.split(".")
    for i, argument in enumerate(getattr(getattr(torch.ops.aten, name), overload)._schema.arguments):
        if argument.name == "reduction":
            return op.args[i] if i < len(op.args) else dict(op.kwargs).get("reduction", argument.default_value)
    return None


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
    NotSplittable."""
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
        self._unseen: set[int] = set()  # storages that are zero, whose ratios are not seen
        self._zero_shares: dict[int, str] = {}  # shares that are zero and have no ratio, and what made each
        self._draw: torch.Generator | None = None  # of masks

    def run(self, load: Load, numbers: Numbers, only: int | None = None) -> Proof:
        load(self.machine, numbers, only)
        if numbers is Numbers.VARIED:
            self._draw = torch.Generator().manual_seed(3)
        last = self._last_uses()
        for j, pair, level in operators(self.pairs, self.plan):
            self._whole(with_given_statistics(pair.full) if j in self.plan.norms else pair.full)
            if level is RunLevel.PART:
                self._in_parts(j, pair)
                self._compare(j, pair)
            for storage in last.get(j, ()):
                for one in (storage, *self._own.get(storage, ())):
                    self.machine.forget(one)
        return self._finish()

    def _last_uses(self) -> dict[int, list[int]]:
        """The storages that are not used after each operator."""
        kept = self.plan.shares | {self.record.views[a].storage for a, _ in self.results}
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

    def _whole(self, op: RawOp) -> None:
        if op.random is not None:
            self.machine.draw(op)
        else:
            self.machine.run(op)

    def _in_parts(self, j: int, pair: OperatorPair) -> None:
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

    def _compare(self, j: int, pair: OperatorPair) -> None:
        if pair.name in UNDEFINED or pair.full.random is not None:
            return
        for a, b, kind in self.plan.outs[j]:
            storage = self.record.views[a].storage
            if kind in (ValueKind.SAMPLE, ValueKind.DATA):
                whole, parts = self._values(a, b)
                match = self._along(a, b, whole, parts)
                if match is not None and not self._fits_any_order(whole, parts):
                    self._samples[j, a] = match
                    self._note(pair, storage, match.ratio)
                    self._vary(storage, a, b, whole, parts)
                elif match is not None:
                    continue
                elif not (whole.is_floating_point() or whole.is_complex()):
                    continue  # positions differ in a part and in the batch; the values picked by them are compared
                else:
                    raise NotSplittable(
                        f"{pair.full.where}: {pair.name} mixes samples: for parts of the batch it gives other values",
                        REMEDY,
                    )
            elif kind is ValueKind.SHARE and storage in self.plan.shares:
                self._share(storage, a, b, pair)
            elif kind in (ValueKind.SIZE, ValueKind.SHARE) and storage in self.machine:  # see with_given_statistics
                self._note_other(pair, kind, a, b)

    def _values(self, a: int, b: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        views = [self.emitter.part_view(b, part) for part in self.parts]
        return self.machine.tensor(a), [self.machine.tensor(v) for v in views]

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
        if whole.is_complex() or not whole.numel() or (whole.is_floating_point() and bool(whole.any())):
            return False
        longest = max(n for n, m in zip(whole.shape, parts[0].shape, strict=True) if n != m)
        return longest > self.emitter.samples and bool((whole == whole.flatten()[0]).all())

    # Of a value that is zero the ratio can't be seen. It follows from those of what it is computed from: products have
    # the product of their factors' (a backward pass is linear in gradients), sums the one that all they add have.

    def _note(self, pair: OperatorPair, storage: int, ratio: float | None) -> None:
        """Note the ratio of what an operator made; None: it is zero. Raises NotSplittable where values of different
        ratios are added, which shows only while none of them is zero."""
        given = self._given(pair)
        self._ratios[storage] = self._structural(pair, given) if ratio is None else ratio
        unseen = any(s in self._unseen for s in given)
        if pair.name.rstrip("_") in _SUMS and unseen and len(set(given.values())) > 1:
            raise NotSplittable(
                f"{pair.full.where}: {pair.name} adds a sum over the batch and a mean, or what follows from them",
                REMEDY,
            )
        self._unseen.discard(storage)
        if ratio is None:
            self._unseen.add(storage)

    def _given(self, pair: OperatorPair) -> dict[int, float | None]:
        """The ratios of what an operator reads of the batch, by storage."""
        storages = [self.record.views[view].storage for view, _ in pair.refs]
        return {s: self._ratios[s] for s in storages if s in self._ratios}

    def _structural(self, pair: OperatorPair, given: dict[int, float | None]) -> float | None:
        ratios = list(given.values())
        name = pair.name.rstrip("_")
        known = [r for r in ratios if r is not None]
        if len(known) < len(ratios):
            return None
        if "loss" in name:
            reduction = reduction_of(pair.full)
            return None if reduction is None else prod(known) / (len(self.parts) if reduction == MEAN else 1)
        if name in _SUMS:
            return known[0] if len(set(known)) == 1 else 1.0 if not known else None
        found = prod(known)
        numbers = [
            (a, b)
            for a, b in zip(pair.full.args, pair.part.args, strict=False)
            if isinstance(a, (int, float)) and isinstance(b, (int, float)) and a != b and a and b
        ]
        if name == "div" and numbers:
            found *= numbers[0][1] / numbers[0][0]
        elif name == "mul" and numbers:
            found *= numbers[0][0] / numbers[0][1]
        elif name == "mean" and not any(self._is_of_samples(view) for view in outs_of(pair.full.outs)):
            found /= len(self.parts)
        return found

    def _is_of_samples(self, view: int) -> bool:
        return self.plan.kinds[self.record.views[view].storage] in (ValueKind.SAMPLE, ValueKind.DATA)

    def _note_other(self, pair: OperatorPair, kind: ValueKind, a: int, b: int) -> None:
        """Note the ratio of a value that depends on the batch's size alone, or of a share that is not summed."""
        whole, parts = self._values(a, b)
        if whole.is_floating_point():
            if kind is ValueKind.SHARE:
                match = total(whole, parts, self.tolerance, 0.0)
                ratio = match.ratio if match is not None else 1.0
            else:
                one, other = largest_of(whole), largest_of(parts[0])
                ratio = one / other if one and other else None
            self._note(pair, self.record.views[a].storage, ratio)

    def _vary(self, storage: int, a: int, b: int, whole: torch.Tensor, parts: list[torch.Tensor]) -> None:
        """Have a mask that is the same for all samples hold for about half of its elements."""
        fixed = whole.dtype != torch.bool or self.record.storages[storage].kind != "temp" or 0 in whole.stride()
        if self._draw is None or fixed or whole.numel() < 2 or not bool((whole == whole.flatten()[0]).all()):
            return
        dim = scaled(self.record.views[a], self._of_part(b, 0), len(parts))
        drawn = torch.rand(whole.shape, generator=self._draw) < 0.5
        whole.copy_(drawn)
        for piece, part in zip(parts, drawn.tensor_split(len(parts), dim), strict=True):
            piece.copy_(part)

    def _share(self, storage: int, a: int, b: int, pair: OperatorPair) -> None:
        whole, parts = self._values(a, b)
        self._zero_shares.pop(storage, None)
        if self._spread and whole.numel() > _SPREAD:
            some = [_spread(t) for t in (whole, *parts)]
            match = total(some[0], some[1:], self.tolerance, 0.0)
            if match is not None and match.ratio is not None:
                self._matches[storage] = match
                self._note(pair, storage, match.ratio)
                return
        if not all(isfinite(largest_of(t)) for t in (whole, *parts)):
            raise Inconclusive(f"{pair.full.where}: {pair.name} gives infinities")
        inputs = [self.machine.tensor(v) for v, _ in pair.refs if self.record.views[v].storage in self.machine]
        largest = max((largest_of(t) for t in inputs if t.is_floating_point()), default=0.0)
        match = total(whole, parts, self.tolerance, _NOISE * largest)
        if match is None or (match.ratio is None and pair.name in NOT_SUMS):
            raise NotSplittable(
                f"{pair.full.where}: what {pair.name} gives for the batch is neither the sum nor the mean of what it"
                " gives for parts of it",
                REMEDY,
            )
        self._note(pair, storage, match.ratio)
        if match.ratio is None and self._is_float(storage):
            match = Match(self._ratios[storage])
            if match.ratio is None and not any(largest_of(t) for t in (whole, *parts)):
                self._zero_shares[storage] = f"{pair.full.where}: what {pair.name} makes of the batch"
        self._matches[storage] = match

    def _finish(self) -> Proof:
        proof = Proof(samples=self._samples)
        for a, b in self.results:
            whole, parts = self._values(a, b)
            match = self._along(a, b, whole, parts)
            if match is None or match.inner != 1 or self._fits_any_order(whole, parts):
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
        return self.record.storages[storage].dtype.startswith(("float", "bfloat", "complex"))
