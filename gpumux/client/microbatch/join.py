"""The trace of a split step, put together from those of the whole batch and of a part."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from gpumux.client.ledger import RawOp
from gpumux.client.microbatch.emit import Emitter
from gpumux.client.microbatch.pairs import REMEDY, Pair
from gpumux.client.microbatch.proof import Proof
from gpumux.client.microbatch.values import Level, Plan
from gpumux.client.trace import RawTrace, TensorResult
from gpumux.errors import NotSplittable
from gpumux.program.ir import ITEM_BYTES, TensorRef, extent


def join(full: RawTrace, part: RawTrace, pairs: list[Pair], plan: Plan, emitter: Emitter, proof: Proof) -> RawTrace:
    """Once, then part by part, then the tail. `emitter` must write what plan.shares names in place."""
    levels = list(enumerate(plan.levels))
    sums = {s: _birth(emitter, pairs, plan, s) for s in plan.shares}
    ready = _last_touch(pairs, plan)
    parts: list[RawOp] = []
    for i in range(emitter.count):
        for j, level in levels:
            if level is not Level.PART:
                continue
            parts += [replace(op, random=_slot(op, i)) for op in emitter.emit(j, i)]
            if i:
                parts += [_add(emitter, sums[s], i, pairs[j].full.where) for s in ready.get(j, ())]
    once = [pairs[j].full for j, level in levels if level is Level.ONCE or j in plan.whole] + emitter.extras
    tail = _scaled(emitter, sums, proof)
    results = list(full.results)
    for position, (whole, mine) in enumerate(zip(full.results, part.results, strict=True)):
        if isinstance(whole, TensorResult) and (whole.view, mine.view) in proof.joined:
            ops, view = _side_by_side(emitter, whole.view, mine.view, proof.joined[whole.view, mine.view])
            tail += ops
            results[position] = TensorResult(view)
    tail += [pairs[j].full for j, level in levels if level is Level.TAIL or j in plan.late]
    emitter.record.ops = _renumbered([*once, *parts, *tail])
    return replace(full, record=emitter.record, results=results)


_PARTS_APART = 1 << 32


def _slot(op: RawOp, part: int) -> int | None:
    """A number of its own for each part's draws; recomputation within a part still shares one."""
    return None if op.random is None else op.random + (part + 1) * _PARTS_APART


def _renumbered(ops: list[RawOp]) -> list[RawOp]:
    slots: dict[int, int] = {}
    return [op if op.random is None else replace(op, random=slots.setdefault(op.random, len(slots))) for op in ops]


def _birth(emitter: Emitter, pairs: list[Pair], plan: Plan, storage: int) -> tuple[int, int]:
    """(whole view, part view) that covers all of a storage of shares."""
    views = emitter.record.views
    for pair, level in zip(pairs, plan.levels, strict=True):
        if level is not Level.PART or storage not in pair.full.writes - pair.full.reads:
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


def _last_touch(pairs: list[Pair], plan: Plan) -> dict[int, list[int]]:
    last: dict[int, int] = {}
    for j, (pair, level) in enumerate(zip(pairs, plan.levels, strict=True)):
        if level is Level.PART:
            last.update(dict.fromkeys((pair.full.reads | pair.full.writes) & plan.shares, j))
    found: dict[int, list[int]] = {}
    for storage in sorted(last):
        found.setdefault(last[storage], []).append(storage)
    return found


def _add(emitter: Emitter, views: tuple[int, int], part: int, where: str) -> RawOp:
    target, source = TensorRef(views[0]), TensorRef(emitter.part_view(views[1], part))
    return emitter.call("add_.Tensor", (target, source), views[0], where)


def _scaled(emitter: Emitter, sums: dict[int, tuple[int, int]], proof: Proof) -> list[RawOp]:
    """Sums turned into means, all of one type in one operator."""
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


def _side_by_side(emitter: Emitter, whole: int, mine: int, ratio: float) -> tuple[list[RawOp], int]:
    views = emitter.record.views
    a, b = views[whole], views[emitter.part_view(mine, 0)]
    dim = next(d for d, (m, n) in enumerate(zip(a.size, b.size, strict=True)) if m != n)
    out = emitter.fresh(a.dtype, a.size)
    parts = tuple(TensorRef(emitter.part_view(mine, i)) for i in range(emitter.count))
    ops = [emitter.call("cat.default", (parts, dim), out, "the step")]
    if ratio != 1.0:
        ops.append(emitter.call("mul_.Scalar", (TensorRef(out), ratio), out, "the step"))
    return ops, out
