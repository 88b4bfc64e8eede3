"""The Programs of a step that two waves run in turns (Wavelet, section 3.2.3 and figure 9).

There are two replicas of the state. Step m belongs to wave m mod 2, which runs forward and backward pass over its own
replica and gets the gradients g'_m. Then it takes

    G_0 = g'_0,    G_m = (g'_m + g'_{m-1}) / 2

as gradients for all that follows: clipping, the optimizer. Only its own replica changes. Operators up to the last
backward pass can run beside the step before, of the other wave. The rest, the *tail*, waits until that one has ended,
because it needs that step's gradients: they lie in buffers that both waves share.

Over several ranks each wave sums its gradients over them (section 3.2.2). That is done at the beginning of the tail:
the tails of a job's steps run one after the other on every rank, so all ranks meet the collectives in one order,
however far their waves have come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from gpumux.capture.lower import Lowered, LoweredRank, changes_state, dense, lower
from gpumux.capture.microbatch.split import RankSplitter
from gpumux.capture.recorder import RankTraces, RawOp, RawStorage, TraceRecord
from gpumux.capture.state import Left, StateTable
from gpumux.capture.step import StepProgram
from gpumux.capture.structure import DeviceLeaf, frozen_leaves
from gpumux.capture.tracer import AfterBackward, DeviceExit, RawTrace
from gpumux.errors import NotSplittable
from gpumux.program.ir import TensorRef, View, Wave, extent

LANES = (0, 1)
_WITHOUT = "submit it without waves=2"


def adds_to_gradients() -> NotSplittable:
    """The error for a step that reads gradients of the steps before it."""
    return NotSplittable(
        "the step adds to gradients of the steps before it, which were the other wave's",
        f"let it begin with optimizer.zero_grad(), or {_WITHOUT}",
    )


@dataclass(frozen=True, slots=True)
class WavePrograms:
    """What the waves run of one captured Program. `trains`: whether it is a step of a wave. Then `lowered` has, by lane
    and whether the step is the first of all (which has no gradients of another one to take the mean with), its Program.
    A Program that changes nothing runs on the replica of the newest step, and has one by lane and False. `ranked`: the
    same over ranks (burst.ranks.RankedStep), of a job that has several."""

    trains: bool
    lowered: dict[tuple[int, bool], Lowered] = field(default_factory=dict)
    ranked: dict[tuple[int, bool], Any] = field(default_factory=dict)
    made: dict[tuple[int, bool], StepProgram] = field(default_factory=dict)  # of those, the ones in use


class WaveSplitter:
    """A RankSplitter (capture/microbatch/split.py) for two waves, on one device or on the ranks of another one's."""

    def __init__(self, over: RankSplitter | None = None) -> None:
        self._over = over

    @property
    def ranks(self) -> int:
        return 1 if self._over is None else self._over.ranks

    @property
    def counts(self) -> Sequence[int]:
        return () if self._over is None else self._over.counts

    @property
    def further_counts(self) -> Sequence[int]:
        return ()  # a job of two waves goes on over all of its ranks

    def split(
        self, full: RawTrace, parts: dict[int, RawTrace], tensors: list[torch.Tensor], table: StateTable
    ) -> dict[bool, RawTrace]:
        """The step over ranks: by whether it is the first of all, the trace that a wave runs; the same one if it is no
        step of a wave."""
        assert self._over is not None, "no step of one device is traced in parts"
        if not _trains(full):
            split = replace(full, ranks=self._over.split(full, parts, tensors, table))
            return {True: split, False: split}
        after = {count: _refuse(trace, table) for count, trace in {1: full, **parts}.items()}
        _refuse_other_gradients(full, after[1], table)
        found = {}
        for first in (True, False):
            whole = with_mean(full, after[1], table, first=first)
            some = {count: with_mean(part, after[count], table, first=first) for count, part in parts.items()}
            found[first] = replace(whole, ranks=self._over.split(whole, some, tensors, table))
        return found

    def programs(self, raw: RawTrace, table: StateTable, keep: frozenset[int], whole: Lowered) -> WavePrograms:
        """The waves' Programs. Raises NotSplittable for a step that can't be a wave's."""
        if not changes_state(whole.program):
            found = WavePrograms(False, {(lane, False): _in_lane(whole, lane, table) for lane in LANES})
            if self._over is not None and _trains(raw):
                raise NotSplittable(
                    "the step computes gradients over several ranks and keeps nothing of them",
                    f"compute what it returns of them without p.grad, by torch.autograd.grad(), or {_WITHOUT}",
                )
            if self._over is not None:
                ranked = self._over.programs(raw.ranks[False], table, keep, whole)
                found.ranked.update({(lane, False): _ranks_in_lane(ranked, lane, table) for lane in LANES})
            return found
        after = _refuse(raw, table)
        _refuse_program(raw, keep, whole)
        _refuse_other_gradients(raw, after, table)
        found = WavePrograms(True)
        for first in (True, False):
            traced = raw.ranks[first] if self._over is not None else with_mean(raw, after, table, first=first)
            lowered = lower(traced, table, keep, clients_generator=whole.program.generator is not None)
            assert lowered.program.wave is not None, "the operators behind the backward pass are its tail"
            assert lowered.scalars == whole.scalars, "the mean takes no numbers of the step"
            found.lowered.update({(lane, first): _in_lane(lowered, lane, table) for lane in LANES})
            if self._over is not None:
                ranked = self._over.programs(traced, table, keep, lowered)
                _refuse_early_collectives(ranked, traced.ranks)
                found.ranked.update({(lane, first): _ranks_in_lane(ranked, lane, table) for lane in LANES})
        return found


def with_mean(raw: RawTrace, after: AfterBackward, table: StateTable, *, first: bool) -> RawTrace:
    """The trace with G_m in the place of g'_m behind the last backward pass. `first`: of step 0, which only leaves its
    gradients for the other wave."""
    old = raw.record
    record = TraceRecord(
        list(old.storages), list(old.views), [], old.scalars, list(old.inputs), dict(old.state_storage)
    )  # fmt: skip
    head, tail = old.ops[: after.operators], old.ops[after.operators :]
    mean: list[RawOp] = []
    for param, gradient in after.gradients.items():
        mean += _mean_of(record, gradient, param, table, first)
    record.ops = [*head, *(replace(op, tail=True) for op in (*mean, *tail))]
    return replace(raw, record=record)


def _mean_of(record: TraceRecord, gradient: int, param: int, table: StateTable, first: bool) -> list[RawOp]:
    """Operators that replace the gradient of a parameter by G_m, and leave it for the other wave as it was."""
    name, view = table.param_names[param], record.views[gradient]
    if record.storages[view.storage].kind != "temp" or not dense(view):
        raise NotSplittable(
            f"the gradient of {name} lies in memory that it shares, or that outlives the step",
            "let each step begin with optimizer.zero_grad() and make its gradients by backward()",
        )
    nbytes = extent(replace(view, offset=0))
    buffer = table.between_waves(_left_as(param, view), f"grad.{name} of the other wave", nbytes)
    shared = record.state_storage.get(buffer)
    if shared is None:
        shared = record.state_storage[buffer] = len(record.storages)
        record.storages.append(RawStorage("state", nbytes, buffer))
    before = _view(record, replace(view, storage=shared, offset=0))
    keep = _op("copy_.default", (TensorRef(before), TensorRef(gradient)), before, record)
    if first:
        return [keep]
    record.storages.append(RawStorage("temp", nbytes, None, view.dtype))
    copy = _view(record, replace(view, storage=len(record.storages) - 1, offset=0))
    return [
        _op("clone.default", (TensorRef(before),), copy, record),
        keep,
        _op("add_.Tensor", (TensorRef(gradient), TensorRef(copy)), gradient, record),
        _op("mul_.Scalar", (TensorRef(gradient), 0.5), gradient, record),
    ]


def _left_as(param: int, view: View) -> Left:
    """What one wave leaves for the other: the gradient of a parameter, as it lies in memory."""
    return "gradient", param, view.dtype, view.size, view.stride


def _refuse_other_gradients(raw: RawTrace, after: AfterBackward, table: StateTable) -> None:
    """Raises NotSplittable if the job's other steps leave gradients of other parameters. The next one could take its
    mean with what an older step left."""
    leaves = {_left_as(param, raw.record.views[view]) for param, view in after.gradients.items()}
    other = leaves ^ table.left_between_waves if table.left_between_waves else None
    if other:
        name = table.param_names[min(left[1] for left in other)]
        raise NotSplittable(
            f"{name} has a gradient in some steps of the job, and in others none or one in another layout; waves take"
            " the mean of the gradients of two steps that follow each other",
            f"let each step compute gradients of the same parameters, or {_WITHOUT}",
        )


def _view(record: TraceRecord, view: View) -> int:
    record.views.append(view)
    return len(record.views) - 1


def _op(target: str, args: tuple[Any, ...], out: int, record: TraceRecord) -> RawOp:
    reads = frozenset(record.views[arg.view].storage for arg in args if isinstance(arg, TensorRef))
    writes = frozenset((record.views[out].storage,))
    return RawOp(f"aten.{target}", args, (), (out,), reads, writes, None, "the mean of two waves' gradients")


L = TypeVar("L", Lowered, LoweredRank)


def _in_lane(lowered: L, lane: int, table: StateTable) -> L:
    """The Program over the replica of one wave."""
    program, binding = lowered.program, lowered.binding
    if program.wave is not None:
        program = replace(program, wave=Wave(lane, program.wave.tail))
    if lane:
        binding = tuple([table.replica(buffer) for buffer in binding])
    return replace(lowered, program=program, binding=binding)


def _ranks_in_lane(ranked: Any, lane: int, table: StateTable) -> Any:
    """The Programs of all ranks (burst.ranks.RankedStep) over the replicas of one wave."""
    steps = tuple([replace(step, lowered=_in_lane(step.lowered, lane, table)) for step in ranked.ranks])
    return replace(ranked, ranks=steps)  # a buffer's replica lies where it does


# ---- steps that can't be a wave's


def _trains(raw: RawTrace) -> bool:
    """Whether a trace computes gradients and changes state."""
    kinds = [storage.kind for storage in raw.record.storages]
    writes = any(kinds[storage] == "state" for op in raw.record.ops for storage in op.writes)
    return (writes or bool(raw.replaced)) and raw.after_backward is not None and bool(raw.after_backward.gradients)


def _refuse(raw: RawTrace, table: StateTable) -> AfterBackward:
    """The end of the step's backward pass. Raises NotSplittable for a trace that can't be one of a wave."""
    after = raw.after_backward
    if after is None or not after.gradients:
        raise NotSplittable(
            "the step changes state and leaves no gradients in its parameters, and waves take the mean of gradients",
            f"compute them by backward(), not by torch.autograd.grad(), or {_WITHOUT}",
        )
    if raw.entry.kept:
        raise adds_to_gradients()
    if raw.further or raw.moved_data or raw.on_batch:
        raise NotSplittable(
            "the step uses a GradScaler, checks values, sets .data, or changes its batch, which waves do not take",
            f"use bfloat16 in place of the GradScaler and write in place under torch.no_grad(), or {_WITHOUT}",
        )
    record = raw.record
    head = record.ops[: after.operators]
    for op in head:
        early = _trained(raw, table) & op.writes
        if early:
            name = table.buffers[record.storages[min(early)].key].name
            raise NotSplittable(
                f"{op.where}: {name} is updated before the step's last backward pass",
                f"call backward() once for all losses, then the optimizers, or {_WITHOUT}",
            )
    gradients = {record.views[view].storage for view in after.gradients.values()}
    if len(gradients) < len(after.gradients):
        raise NotSplittable(
            "gradients of several parameters lie in one tensor's memory", "let backward() make one for each"
        )
    made = {storage for op in head if op.in_backward for storage in op.writes - op.reads}
    for op in record.ops[after.operators :]:
        other = {s for s in op.reads & made - gradients if record.storages[s].kind == "temp"}
        if other:
            raise NotSplittable(
                f"{op.where} uses what the backward pass computed besides the gradients of the parameters",
                f"use p.grad, which is the mean of both waves' gradients then, or {_WITHOUT}",
            )
    return after


def _refuse_program(raw: RawTrace, keep: frozenset[int], whole: Lowered) -> None:
    """Raises NotSplittable for a Program that can't be one of a wave."""
    if keep:
        raise adds_to_gradients()
    draws = any(op.random is not None for op in whole.program.ops)
    if draws and whole.program.generator is None:
        raise NotSplittable(
            "the step draws from a generator of the job's own, from which both waves would draw in turns",
            "submit it without seed= and rng=, so that each step draws what the plain loop draws",
        )


def _refuse_early_collectives(ranked: Any, traces: RankTraces) -> None:
    """Raises NotSplittable if ranks wait for each other before the tail, where the other wave's step may be under way:
    one rank could wait in one wave and another in the other."""
    for rank, step in enumerate(ranked.ranks):
        program = step.lowered.program
        early = [one for one in program.collectives if program.wave is None or one.op < program.wave.tail]
        if early or program.wave is None:
            raise NotSplittable(
                f"{_needed_early(traces.ops[rank])}, so rank {rank} waits for others before the backward pass has"
                " ended, and two waves over ranks may only sum their gradients",
                "give every layer all ranks (devices= or endpoints= without plan=, batch_norm='rank'), compute means"
                f" over the batch behind backward(), or {_WITHOUT}",
            )


def _needed_early(ops: list[RawOp]) -> str:
    """Which operator of a rank uses, before the tail, what comes from the others."""
    at = next(i for i, op in enumerate(ops) if op.collective is not None and not op.tail)
    given = ops[at].writes
    for op in ops[at + 1 :]:
        if op.collective is None and op.reads & given:
            return f"{op.where}: {op.target.split('.')[1]} needs what all ranks have together"
    return f"{ops[at].where}: another rank needs what this one has"


def _trained(raw: RawTrace, table: StateTable) -> frozenset[int]:
    """Storages of the trace that hold parameters or optimizer state."""
    buffers = {place.buffer for p in table.params if (place := table.place(p)) is not None}
    for frozen in raw.entry.optimizers:
        for _, tree in frozen:
            buffers |= {leaf.place.buffer for leaf in frozen_leaves(tree) if isinstance(leaf, DeviceLeaf)}
    kept = {raw.record.state_storage[b] for b in buffers if b in raw.record.state_storage}
    for frozen in raw.optimizers:
        for _, tree in frozen:
            leaves = [leaf for leaf in frozen_leaves(tree) if isinstance(leaf, DeviceExit)]
            kept |= {raw.record.views[leaf.view].storage for leaf in leaves}
    return frozenset(kept)
