"""Makes the trace of a split step from those of the whole batch and of a part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, Protocol, TypeVar

import numpy
import torch

from gpumux.capture.batch.arrays import tensor_over
from gpumux.capture.batch.containers import flatten, unflatten
from gpumux.capture.lower import Lowered
from gpumux.capture.microbatch.classify import (
    REMEDY,
    OperatorPair,
    RunLevel,
    Setting,
    SplitPlan,
    ValueKind,
    call_refs,
    classify,
    pair_up,
    scaled,
)
from gpumux.capture.microbatch.emit import PartEmitter
from gpumux.capture.microbatch.proof import Numbers, Proof, RunsOnce, is_mostly_alike, prove_once
from gpumux.capture.recorder import RawOp, TraceRecord
from gpumux.capture.state import StateTable, byte_view
from gpumux.capture.structure import thaw
from gpumux.capture.tracer import DeviceExit, RawTrace, SkippedStep, TensorResult, ValueCheck
from gpumux.capture.values.machine import Inconclusive, Machine, filled
from gpumux.errors import ConfigError, NotSplittable
from gpumux.hostmemory import freed_is_reused
from gpumux.program.ir import ITEM_BYTES, TensorRef, extent


class RankSplitter(Protocol):
    """Splits steps over ranks (burst/ranks.py)."""

    @property
    def ranks(self) -> int: ...

    @property
    def counts(self) -> Sequence[int]:
        """In how many parts the batch is traced, each above 1."""

    @property
    def further_counts(self) -> Sequence[int]:
        """In how many parts it is traced as well, if it can be."""

    def split(self, full: RawTrace, parts: dict[int, RawTrace], tensors: list[torch.Tensor], table: StateTable) -> Any:
        """What becomes RawTrace.ranks: the traces of all ranks, from those of the first of so many parts. Raises
        NotSplittable."""

    def programs(self, raw: RawTrace, table: StateTable, keep: frozenset[int], whole: Lowered) -> Any:
        """What the ranks run of a trace that was split. `whole`: its Program for one device. Raises NotSplittable."""


def join(
    full: RawTrace, part: RawTrace, pairs: list[OperatorPair], plan: SplitPlan, emitter: PartEmitter, proof: Proof
) -> RawTrace:
    """The split trace: operators that run once, then the parts, then the tail. `emitter` must use the storages in
    plan.shares in place."""
    levels = list(enumerate(plan.levels))
    sums = {s: _birth(emitter, pairs, plan, s) for s in plan.shares}
    ready = _last_touch(pairs, plan)
    parts: list[RawOp] = []
    once: list[tuple[int, RawOp]] = []  # with the place of the operator that it is, or is for
    for i in range(emitter.count):
        for j, level in levels:
            if level is RunLevel.ONCE or j in plan.whole:
                once += [(j, pairs[j].full)] if i == 0 else []
            if level is not RunLevel.PART:
                continue
            before = len(emitter.extras)
            emitted = emitter.emit(j, i)
            once += [(j, extra) for extra in emitter.extras[before:]]
            parts += [replace(op, random=_slot(op, i)) for op in emitted]
            if i:
                parts += [_add(emitter, sums[s], i, pairs[j].full.where) for s in ready.get(j, ())]
    tail = _scaled(emitter, sums, proof)
    results = list(full.results)
    for position, (whole, mine) in enumerate(zip(full.results, part.results, strict=True)):
        if isinstance(whole, TensorResult) and (whole.view, mine.view) in proof.joined:
            ops, view = _side_by_side(emitter, whole.view, mine.view, proof.joined[whole.view, mine.view])
            tail += ops
            results[position] = TensorResult(view)
    late = _not_yet_run(pairs, plan)
    tail += [pairs[j].full for j, level in levels if level is RunLevel.TAIL or j in late]
    before_parts = [op for _, op in sorted(once, key=lambda each: each[0])]  # what changes labels comes after their use
    emitter.record.ops = _renumbered([*before_parts, *parts, *tail])
    return replace(full, record=emitter.record, results=results)


def _not_yet_run(pairs: list[OperatorPair], plan: SplitPlan) -> set[int]:
    """Operators that the tail has to run on the whole batch, since they did not run on it before the parts. Raises
    NotSplittable if one that did has been followed by a change in place that the tail is not to see."""
    both = plan.late & plan.whole
    kept = {storage for j in both for storage in pairs[j].full.writes}
    for j in sorted(plan.whole - plan.late):
        if kept & pairs[j].full.writes:
            raise NotSplittable(
                f"{pairs[j].full.where}: {pairs[j].name} changes in place, before the parts of the batch run, what is"
                " needed unchanged after them",
                REMEDY,
            )
    return plan.late - both


_PARTS_APART = 1 << 32


def _slot(op: RawOp, part: int) -> int | None:
    """The random slot of a draw in a part. Each part has slots of its own; recomputation within a part shares one."""
    return None if op.random is None else op.random + (part + 1) * _PARTS_APART


def _renumbered(ops: list[RawOp]) -> list[RawOp]:
    slots: dict[int, int] = {}
    return [op if op.random is None else replace(op, random=slots.setdefault(op.random, len(slots))) for op in ops]


def _birth(emitter: PartEmitter, pairs: list[OperatorPair], plan: SplitPlan, storage: int) -> tuple[int, int]:
    """(whole view, part view) over the whole of a storage of shares."""
    views = emitter.record.views
    for pair, level in zip(pairs, plan.levels, strict=True):
        if level is not RunLevel.PART or storage not in pair.full.writes - pair.full.reads:
            continue
        for a, b in pair.outs:
            view = views[a]
            if view.storage == storage:
                dense = (
                    prod(view.size) * ITEM_BYTES[view.dtype] == extent(view) == emitter.record.storages[storage].nbytes
                )
                if dense:
                    return a, b
                raise NotSplittable(f"{pair.full.where}: {pair.name} gives a value that is not dense in memory", REMEDY)
    raise AssertionError("shares are born in a part")


def _last_touch(pairs: list[OperatorPair], plan: SplitPlan) -> dict[int, list[int]]:
    last: dict[int, int] = {}
    for j, (pair, level) in enumerate(zip(pairs, plan.levels, strict=True)):
        if level is RunLevel.PART:
            last.update(dict.fromkeys((pair.full.reads | pair.full.writes) & plan.shares, j))
    found: dict[int, list[int]] = {}
    for storage in sorted(last):
        found.setdefault(last[storage], []).append(storage)
    return found


def _add(emitter: PartEmitter, views: tuple[int, int], part: int, where: str) -> RawOp:
    target, source = TensorRef(views[0]), TensorRef(emitter.part_view(views[1], part))
    return emitter.call("add_.Tensor", (target, source), views[0], where)


def _scaled(emitter: PartEmitter, sums: dict[int, tuple[int, int]], proof: Proof) -> list[RawOp]:
    """Operators that turn sums into means, one for all sums of one type."""
    groups: dict[tuple[float, str], list[int]] = {}
    for storage in sorted(sums):
        ratio, view = proof.ratios[storage], sums[storage][0]
        if ratio != 1.0:
            groups.setdefault((ratio, emitter.record.views[view].dtype), []).append(view)
    made = []
    for (ratio, _), views in groups.items():
        storages = frozenset(emitter.record.views[v].storage for v in views)
        refs = tuple(TensorRef(v) for v in views)
        made.append(RawOp("aten._foreach_mul_.Scalar", (refs, ratio), (), (), storages, storages, None, "the step"))
    return made


def _side_by_side(emitter: PartEmitter, whole: int, mine: int, ratio: float) -> tuple[list[RawOp], int]:
    views = emitter.record.views
    a, b = views[whole], views[emitter.part_view(mine, 0)]
    dim = next(d for d, (m, n) in enumerate(zip(a.size, b.size, strict=True)) if m != n)
    out = emitter.fresh(a.dtype, a.size)
    parts = tuple(TensorRef(emitter.part_view(mine, i)) for i in range(emitter.count))
    ops = [emitter.call("cat.default", (parts, dim), out, "the step")]
    if ratio != 1.0:
        ops.append(emitter.call("mul_.Scalar", (TensorRef(out), ratio), out, "the step"))
    return ops, out


# ---- numbers for the proof: the job's state and the example batch, or made-up ones like them


class Loader:
    """Fills a Machine with state and batch. Made-up numbers are needed because a proof must not rest on values that
    happen to be zero or all the same: a last layer or a coefficient that starts at zero, an example of zeros, a mask
    that holds for no sample."""

    def __init__(self, record: TraceRecord, table: StateTable, tensors: list[torch.Tensor], split: set[int]) -> None:
        self._record = record
        self._table = table
        self._tensors = tensors
        self._split = split
        self._params = {place.buffer for p in table.params if (place := table.place(p)) is not None}
        self._dtypes: dict[int, set[str]] = {}  # in which each storage is read
        for op in record.ops:
            for v in call_refs(op):
                self._dtypes.setdefault(record.views[v].storage, set()).add(record.views[v].dtype)

    @property
    def alike(self) -> list[int]:
        """See proof.Load."""
        found = [(i, t) for i, t in enumerate(self._tensors) if i in self._split and not t.is_floating_point()]
        return [i for i, t in found if is_mostly_alike(t)]

    def __call__(self, machine: Machine, numbers: Numbers, only: int | None = None) -> None:
        draw = torch.Generator().manual_seed(1)
        made_up = numbers is not Numbers.EXAMPLE
        order: dict[int, torch.Tensor] = {}
        for index, storage in enumerate(self._record.storages):
            if storage.kind == "state":
                varied = numbers is Numbers.VARIED and only is None
                machine.hold(index, self._state(index, storage.key, draw, made_up, varied))
            elif storage.kind == "input":
                machine.hold(index, self._input(storage.key, draw, numbers, order, only))
        if made_up:
            zeros = [i for i, expr in enumerate(self._record.scalars) if type(expr.value) is float and not expr.value]
            machine.set_scalars(dict.fromkeys(zeros, 0.1))

    def _state(self, index: int, buffer: int, draw: torch.Generator, made_up: bool, varied: bool) -> torch.Tensor:
        known = self._table.buffers[buffer]
        flat = torch.zeros(known.nbytes, dtype=torch.uint8)
        for storage, start in known.home if known.filled else ():
            flat[start : start + storage.nbytes()].copy_(byte_view(storage))
        typed = flat.view(self._dtype(index))
        if not typed.numel():
            return typed
        if not typed.is_floating_point():  # counts, tables of indices
            whole = known.filled and typed.dtype in (torch.int32, torch.int64)
            return _varied(typed, draw) if varied and whole else typed
        if not known.filled:
            return filled(typed.shape, lambda n: torch.randn(n, generator=draw).mul_(0.01)).to(typed.dtype)
        if not made_up:
            return typed
        drawn = filled(typed.shape, partial(torch.rand, generator=draw))
        if buffer not in self._params and not bool(typed.any()):
            return drawn.mul_(0.1).add_(0.05).to(typed.dtype)
        made = drawn.mul_(0.1).add_(1.0).mul_(typed)  # variances stay positive
        if buffer in self._params:
            spread = float(typed.std(correction=0)) or 0.5
            made += filled(typed.shape, lambda n: torch.randn(n, generator=draw).mul_(0.1 * spread))
        return made.to(typed.dtype)

    def _dtype(self, index: int) -> torch.dtype:
        found = self._dtypes.get(index, {"uint8"})
        if len(found) > 1:
            raise Inconclusive(f"state is read as {' and '.join(sorted(found))}")
        dtype: torch.dtype = getattr(torch, next(iter(found)))
        return dtype

    def _input(
        self,
        position: int,
        draw: torch.Generator,
        numbers: Numbers,
        order: dict[int, torch.Tensor],
        only: int | None,
    ) -> torch.Tensor:
        """The elements of the storage of a batch tensor, with its strides."""
        example = values = self._tensors[position].detach().cpu()
        if position in self._split:  # permuted samples, in the same order for all tensors
            length = values.shape[0]
            if length not in order:
                order[length] = torch.randperm(length, generator=draw)
            values = values[order[length]]
        if example.is_floating_point() and numbers is not Numbers.EXAMPLE:
            made = _others(example, draw)
            some = numbers is Numbers.VARIED and position in self._split
            values = torch.where(torch.rand(values.shape, generator=draw) < 0.5, values, made) if some else made
        elif numbers is Numbers.VARIED and position in self._split and only in (None, position):
            values = _varied(values, draw)
        like = self._tensors[position]
        span = 1 + sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True)) if like.numel() else 0
        flat = torch.zeros(span, dtype=like.dtype)
        if span:
            into = flat.as_strided(like.shape, like.stride())
            for dim, stride in enumerate(like.stride()):
                if stride == 0:  # expanded: all along it are one element
                    into, values = into.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
            into.copy_(values)
        return flat


def _varied(values: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    """Masks, labels and indices that are not the same for most samples. Where there is one number only, next to it,
    smaller if it is positive, is another; else the others are among those that there are."""
    if not is_mostly_alike(values):
        return values
    some = torch.rand(values.shape, generator=draw) < 0.5
    if values.dtype == torch.bool:
        return some
    found = values.unique()
    if len(found) == 1:
        one = int(found)
        other = one - 1 if one > 0 else one + 1
        return torch.where(some, values, other) if values.numel() > 1 else torch.full_like(values, other)
    return torch.where(some, values, found[torch.randint(len(found), values.shape, generator=draw)])


def _others(values: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    """Made-up numbers of a similar range: from 0 to 1 if all are, else with the same mean and spread."""
    if not values.numel():
        return values
    wide = values.double()
    if float(wide.min()) >= 0 and float(wide.max()) <= 1:
        return torch.rand(values.shape, generator=draw).to(values.dtype)
    spread = float(wide.std(correction=0)) or 1.0
    made = float(wide.mean()) + spread * torch.randn(values.shape, generator=draw)
    if float(wide.min()) > 0:  # of which a logarithm may be taken
        made = made.abs().add_(float(wide.min()))
    return made.to(values.dtype)


# ---- splitting a step


T = TypeVar("T")

# How far a split step's gradients and results may be from the whole step's, by dtype, relative to the largest element
# of the tensor. In exact arithmetic they are equal.
TOLERANCE = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}
MOST = 4096


def check_microbatches(count: Any) -> None:
    """Raises ConfigError for anything but a whole number from 1 to MOST."""
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MOST:
        raise ConfigError(f"microbatches is {count!r}", f"use a whole number from 1 to {MOST}")


def split_positions(tensors: list[torch.Tensor], count: int, over_ranks: bool = False) -> set[int]:
    """The positions of the tensors of a batch that are cut along dimension 0: those as long as the first one. Raises
    NotSplittable if `count` does not divide the length. `over_ranks`: the parts are those of ranks. A step without a
    batch (an update after accumulated gradients) has none."""
    sized = [t for t in tensors if t.dim()]
    if not sized and over_ranks:
        return set()
    if not sized:
        raise NotSplittable(
            f"the batch holds no tensor with a batch dimension to cut in {count} parts",
            "pass the batch as tensors with their samples along dimension 0, or submit without microbatches",
        )
    size = sized[0].shape[0]
    if size % count or size == 0:
        if over_ranks:
            raise NotSplittable(
                f"a batch of {size} samples can't be cut into {count} equal parts for ranks",
                f"use a batch size that {count} divides, as all numbers of ranks in the plan must, and drop_last=True"
                " in the loader",
            )
        raise NotSplittable(
            f"{count} microbatches do not divide a batch of {size} samples",
            "use a number that divides the batch size, and drop_last=True in the loader",
        )
    return {i for i, t in enumerate(tensors) if t.dim() and t.shape[0] == size}


_SPLIT = (torch.Tensor, numpy.ndarray)


def _tensor(leaf: Any) -> torch.Tensor:
    return leaf if isinstance(leaf, torch.Tensor) else tensor_over(leaf)


def first_part(args: Any, kwargs: Any, count: int, over_ranks: bool = False) -> tuple[Any, Any]:
    """The step's arguments with the first of `count` parts of the batch. Raises NotSplittable, as split_positions."""
    leaves, spec = flatten((args, kwargs), hiding=True)
    split = split_positions([_tensor(leaf) for leaf in leaves if isinstance(leaf, _SPLIT)], count, over_ranks)
    position = 0
    parts: dict[int, Any] = {}  # a tensor that is given twice is one tensor in the part as well
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, _SPLIT):
            if position in split:
                leaves[i] = parts.setdefault(id(leaf), leaf[: leaf.shape[0] // count])
            position += 1
    first_args, first_kwargs = unflatten(leaves, spec)
    return first_args, first_kwargs


def refuse_effects(raw: RawTrace, name: str, whole: str) -> None:
    """Raises NotSplittable for a step that does what parts of its batch can't do. `name`: of the step; `whole`: how it
    is submitted in one piece."""
    if any(isinstance(what, SkippedStep) for what in raw.further):
        raise NotSplittable(f"{name} steps an optimizer under a GradScaler", f"submit it {whole}, or use bfloat16")
    checks = [what.wrong for what in raw.further if isinstance(what, ValueCheck)]
    if checks:
        raise NotSplittable(
            f"{name} checks values of the whole batch ({checks[0]})",
            f"turn the checks off: validate_args=False, or submit it {whole}",
        )
    if raw.moved_data:
        raise NotSplittable(
            f"{name} sets .data of a tensor of the model",
            "write into it in place under torch.no_grad(): p.copy_(new)",
        )
    if raw.further or raw.on_batch:
        raise NotSplittable(
            f"{name} changes its batch (in place, or by requires_grad_())",
            f"begin the step with x = x.clone(), or submit it {whole}",
        )


def split(
    full: RawTrace, part: RawTrace, tensors: list[torch.Tensor], count: int, table: StateTable, known: dict[Any, Proof]
) -> RawTrace:
    """The trace that runs `count` parts of the batch one after the other. `known`: the proofs of the job's other steps,
    to which its own is added. Raises NotSplittable."""
    pairs = pair_up(full, part)
    cut = split_positions(tensors, count)
    returned = [
        (a.view, b.view) for a, b in zip(full.results, part.results, strict=True) if isinstance(a, TensorResult)
    ]
    gradients = {place.buffer for _, place in full.entry.gradients}

    def split_with(once: frozenset[int]) -> RawTrace:
        setting = Setting(cut, fixed(table), gradients, once=once)
        plan = classify(pairs, full.record, part.record, count, setting, exits(full), [a for a, _ in returned])

        def emitter(shared: set[int] | None = None) -> PartEmitter:
            return PartEmitter(pairs, full.record, part.record, plan, count=count, split=cut, shared=shared)

        joined = [(a, b) for a, b in returned if _per_sample(full, plan.kinds, a)]
        for a, b in joined:
            if scaled(full.record.views[a], part.record.views[b], count) < 0:
                raise NotSplittable(
                    f"the step returns certain samples of the batch (shape {full.record.views[a].size})",
                    "return per-sample values of the whole batch, sums, or means, or submit without microbatches",
                )
        load = Loader(full.record, table, tensors, cut)
        proof = prove_once(known, (full.record, part.record), pairs, plan, emitter, load, joined)
        return join(full, part, pairs, plan, emitter(plan.shares), proof)

    with freed_is_reused():  # the proof takes some times the memory of a step
        return with_operators_once(split_with)


def with_operators_once(split_with: Callable[[frozenset[int]], T]) -> T:
    """What `split_with` gives, called with the operators that have to run once on sums until its proof finds no more of
    them. Raises NotSplittable, with the reason that was found first."""
    once: frozenset[int] = frozenset()
    first: RunsOnce | None = None
    while True:
        try:
            return split_with(once)
        except RunsOnce as error:
            first = first or error
            if error.operators <= once:
                raise
            once |= error.operators
        except NotSplittable as error:
            if first is None:
                raise
            raise NotSplittable(first.message, first.remedy) from error


def _per_sample(full: RawTrace, kinds: list[ValueKind], view: int) -> bool:
    """Whether each part has its own samples of a result. A result that lies on the batch itself is whole."""
    storage = full.record.views[view].storage
    return kinds[storage] in (ValueKind.SAMPLE, ValueKind.DATA) and full.record.storages[storage].kind == "temp"


def exits(full: RawTrace) -> list[int]:
    """Views of all tensors that the step leaves in gradients, optimizers and buffers."""
    found = [*full.gradients.values(), *(view for _, view in full.replaced)]

    def leaf(value: Any) -> None:
        if isinstance(value, DeviceExit):
            found.append(value.view)

    for frozen in full.optimizers:
        for _, tree in frozen:
            thaw(tree, leaf)
    return found


def fixed(table: StateTable) -> set[int]:
    """Job buffers that hold no parameter."""
    params = {place.buffer for p in table.params if (place := table.place(p)) is not None}
    return set(range(len(table.buffers))) - params
