"""Mistakes that a split over ranks could make, as changes of the ranks' operators and of their Programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gpumux.burst.placement import RankPlacement
from gpumux.burst.proof import Lockstep
from gpumux.capture.recorder import RawCollective, RawOp
from gpumux.program.ir import Collective, Program, ScalarRef, TensorRef, View

# A small VGG's layers, so that samples are moved both ways, scaled, and gradients summed over four ranks and two.
PLACEMENT = RankPlacement(4, {"0": (0, 1, 2, 3), "3": (0, 1), "7": (2,), "10": (1, 3)})


# ---- changes of a rank's operators, before the proof


def _edit(run: Lockstep, rank: int, at: int, *ops: RawOp) -> None:
    """Replace one operator of a rank by others."""
    here = run.at[rank]
    assert isinstance(here, list)
    run.traces.ops[rank][at : at + 1] = ops
    here[at : at + 1] = [here[at]] * len(ops)


def _places(run: Lockstep, rank: int, wanted: Callable[[RawOp], bool]) -> list[int]:
    return [at for at, op in enumerate(run.traces.ops[rank]) if wanted(op)]


def _is(kind: str) -> Callable[[RawOp], bool]:
    return lambda op: op.collective is not None and op.collective.kind == kind


def _of(op: RawOp) -> RawCollective:
    assert op.collective is not None
    return op.collective


def _shifted(run: Lockstep, view: int) -> int:
    """The view one sample further."""
    v = run.traces.record.views[view]
    run.traces.record.views.append(replace(v, offset=v.offset + v.stride[0]))
    return len(run.traces.record.views) - 1


def drop_a_rescale(run: Lockstep) -> None:
    rank, at = next((r, at) for r in range(4) for at in _places(run, r, lambda op: op.target == "aten.mul_.Scalar"))
    _edit(run, rank, at)


def miscount_samples(run: Lockstep) -> None:
    """The number of samples that a part's loss is divided by, on all ranks."""
    for rank, ops in enumerate(run.traces.ops):
        for at in _places(run, rank, lambda op: op.target == "aten.mul.Scalar"):
            _edit(run, rank, at, replace(ops[at], args=(ops[at].args[0], 3.0)))


def misscale_a_sum(run: Lockstep) -> None:
    for rank, ops in enumerate(run.traces.ops):
        for at in _places(run, rank, _is("all_reduce"))[:1]:
            one = _of(ops[at])
            _edit(run, rank, at, replace(ops[at], collective=one._replace(scale=one.scale * 2)))


def drop_a_sum_on_one_rank(run: Lockstep) -> None:
    _edit(run, 0, _places(run, 0, _is("all_reduce"))[0])


def drop_a_sum(run: Lockstep) -> None:
    gone = _of(run.traces.ops[0][_places(run, 0, _is("all_reduce"))[0]]).sequence
    for rank in range(len(run.traces.ops)):
        for at in _places(run, rank, lambda op: op.collective is not None and _of(op).sequence == gone):
            _edit(run, rank, at)


def swap_sums_on_one_rank(run: Lockstep) -> None:
    """What two places of one sum are, which have one size, is exchanged on one rank."""
    views = run.traces.record.views
    for rank, ops in enumerate(run.traces.ops):
        for at in _places(run, rank, _is("all_reduce")):
            one = _of(ops[at])
            for a, first in enumerate(one.views):
                for b in range(a):
                    if views[first].size == views[one.views[b]].size:
                        mixed = list(one.views)
                        mixed[a], mixed[b] = mixed[b], mixed[a]
                        _edit(run, rank, at, replace(ops[at], collective=one._replace(views=tuple(mixed))))
                        return
    raise AssertionError("no two values of one size are summed together")


def swap_collectives_on_one_rank(run: Lockstep) -> None:
    a, b = _places(run, 0, lambda op: op.collective is not None)[:2]
    ops = run.traces.ops[0]
    ops[a], ops[b] = ops[b], ops[a]


def send_to_another_rank(run: Lockstep) -> None:
    for rank, ops in enumerate(run.traces.ops):
        for at in _places(run, rank, lambda op: op.collective is not None and bool(_of(op).sends)):
            one = _of(ops[at])
            target, view = one.sends[0]
            other = next((r for r in one.members if r not in (rank, target)), None)
            if other is not None:
                _edit(run, rank, at, replace(ops[at], collective=one._replace(sends=((other, view), *one.sends[1:]))))
                return
    raise AssertionError("every exchange has two members")


def send_other_samples(run: Lockstep) -> None:
    for rank, ops in enumerate(run.traces.ops):
        for at in _places(run, rank, lambda op: op.collective is not None and bool(_of(op).sends)):
            one = _of(ops[at])
            target, view = one.sends[0]
            v = run.traces.record.views[view]
            if v.size[0] * v.stride[0] * 8 < run.traces.record.storages[v.storage].nbytes and v.offset == 0:
                sends = ((target, _shifted(run, view)), *one.sends[1:])
                _edit(run, rank, at, replace(ops[at], collective=one._replace(sends=sends)))
                return
    raise AssertionError("every value is sent whole")


def drop_an_update_on_one_rank(run: Lockstep) -> None:
    _edit(run, 1, _places(run, 1, lambda op: op.by_optimizer)[-1])


def update_with_another_number_on_one_rank(run: Lockstep) -> None:
    for at in _places(run, 1, lambda op: op.by_optimizer):
        op = run.traces.ops[1][at]
        numbers = [(name, 0.123) for name, value in op.kwargs if isinstance(value, (float, ScalarRef))]
        if numbers:
            return _edit(run, 1, at, replace(op, kwargs=(*dict(dict(op.kwargs) | dict(numbers)).items(),)))
    raise AssertionError("the optimizer's operators have no numbers")


def sum_after_the_update(run: Lockstep) -> None:
    """On all ranks."""
    for rank, ops in enumerate(run.traces.ops):
        update = _places(run, rank, lambda op: op.by_optimizer)[-1]
        sums = [at for at in _places(run, rank, _is("all_reduce")) if at < update]
        moved = [ops[at] for at in sums]
        _edit(run, rank, update, ops[update], *moved)
        for at in reversed(sums):
            _edit(run, rank, at)


def sum_what_is_summed(run: Lockstep) -> None:
    """On all ranks. A second mean would change nothing."""
    for rank, ops in enumerate(run.traces.ops):
        at = _places(run, rank, _is("all_reduce"))[0]
        again = replace(ops[at], collective=_of(ops[at])._replace(sequence=1000, scale=1.0))
        _edit(run, rank, at, ops[at], again)


# ---- of the layers of two ranks that run the same operators, each on its part of the batch


def _as_on_rank_0(run: Lockstep, wanted: Callable[[RawOp], bool]) -> None:
    """Rank 1 runs the first of these operators on what rank 0 is given."""
    at = _places(run, 0, wanted)[0]
    mine, other = run.traces.ops[1][at], run.traces.ops[0][at]
    assert mine.args != other.args
    read = {run.traces.record.views[ref.view].storage for ref in other.args if isinstance(ref, TensorRef)}
    _edit(run, 1, at, replace(mine, args=other.args, reads=frozenset(read)))


def read_the_batch_of_another_rank(run: Lockstep) -> None:
    _as_on_rank_0(run, lambda op: op.target == "aten.embedding.default")


def mask_the_samples_of_another_rank(run: Lockstep) -> None:
    """Rank 1 takes its piece of the mask where rank 0 takes it."""
    at = _places(run, 0, lambda op: op.target == "aten.copy_.default")[0]
    mine, other = run.traces.ops[1][at], run.traces.ops[0][at]
    assert mine.args[1] != other.args[1]
    _edit(run, 1, at, replace(mine, args=(mine.args[0], other.args[1])))


def compute_with_another_number(run: Lockstep) -> None:
    at = next(at for at in _places(run, 1, lambda op: op.target == "aten.mul.Scalar"))
    op = run.traces.ops[1][at]
    _edit(run, 1, at, replace(op, args=(op.args[0], 0.123)))


def drop_an_operator_in_place(run: Lockstep) -> None:
    _edit(run, 1, _places(run, 1, lambda op: op.target == "aten.div_.Scalar")[0])


def draw_other_numbers(run: Lockstep) -> None:
    """Rank 1 draws its second mask in the place of the first."""
    first, second = _places(run, 1, lambda op: op.random is not None)[:2]
    _edit(run, 1, first, replace(run.traces.ops[1][first], random=run.traces.ops[1][second].random))


OF_EQUAL_LAYERS = (
    read_the_batch_of_another_rank, mask_the_samples_of_another_rank, compute_with_another_number,
    drop_an_operator_in_place, draw_other_numbers, misscale_a_sum, drop_a_sum_on_one_rank, drop_a_sum,
    swap_sums_on_one_rank,
)  # fmt: skip

OF_OPTIMIZERS = (
    drop_an_update_on_one_rank, update_with_another_number_on_one_rank, sum_after_the_update, sum_what_is_summed,
)  # fmt: skip

OF_OPERATORS = (
    drop_a_rescale, miscount_samples, misscale_a_sum, drop_a_sum_on_one_rank, drop_a_sum,
    swap_collectives_on_one_rank, send_to_another_rank, send_other_samples,
)  # fmt: skip


# ---- changes of Programs


def _collectives(program: Program, change: Callable[[Collective], Collective | None]) -> Program:
    return replace(program, collectives=tuple([new for one in program.collectives if (new := change(one))]))


def _first(program: Program, kind: str) -> int:
    return next((one.sequence for one in program.collectives if one.kind == kind), -1)


def without_a_rescale(rank: int, program: Program) -> Program:
    at = next((at for at, op in enumerate(program.ops) if op.target == "aten.mul_.Scalar"), None)
    if at is None:
        return program
    ops = list(program.ops)
    first, _ = ops[at].args
    ops[at] = replace(ops[at], args=(first, 1.0))
    return replace(program, ops=tuple(ops))


def with_another_count(rank: int, program: Program) -> Program:
    ops = [replace(op, args=(op.args[0], 3.0)) if op.target == "aten.mul.Scalar" else op for op in program.ops]
    return replace(program, ops=tuple(ops))


def without_a_sum_on_one_rank(rank: int, program: Program) -> Program:
    gone = _first(program, "all_reduce") if rank == 0 else -1
    return _collectives(program, lambda one: None if one.sequence == gone else one)


def without_sums(rank: int, program: Program) -> Program:
    return _collectives(program, lambda one: None if one.kind == "all_reduce" else one)


def with_another_scale(rank: int, program: Program) -> Program:
    return _collectives(program, lambda one: replace(one, scale=2 * one.scale) if one.kind == "all_reduce" else one)


def with_another_scale_on_one_rank(rank: int, program: Program) -> Program:
    return with_another_scale(rank, program) if rank == 1 else program


def with_swapped_collectives(rank: int, program: Program) -> Program:
    if rank:
        return program
    a, b, *others = program.collectives
    return replace(program, collectives=(replace(b, op=a.op), replace(a, op=b.op), *others))


def with_swapped_numbers(rank: int, program: Program) -> Program:
    if rank:
        return program
    a, b, *others = program.collectives
    return replace(program, collectives=(replace(a, sequence=b.sequence), replace(b, sequence=a.sequence), *others))


def with_another_target(rank: int, program: Program) -> Program:
    done = rank > 1

    def change(one: Collective) -> Collective:
        nonlocal done
        for target, view in () if done else one.sends[:1]:
            other = next((r for r in one.members if r not in (rank, target)), None)
            if other is not None:
                done = True
                return replace(one, sends=((other, view), *one.sends[1:]))
        return one

    return _collectives(program, change)


def with_other_samples(rank: int, program: Program) -> Program:
    views = list(program.views)
    done = False

    def change(one: Collective) -> Collective:
        nonlocal done
        for target, view in () if done else one.sends[:1]:
            v: View = views[view]
            if v.offset == 0 and v.size[0] * v.stride[0] * 8 < program.storages[v.storage].nbytes:
                done = True
                views.append(replace(v, offset=v.stride[0]))
                return replace(one, sends=((target, len(views) - 1), *one.sends[1:]))
        return one

    changed = _collectives(program, change)
    return replace(changed, views=tuple(views))


OF_PROGRAMS = (
    without_a_rescale, with_another_count, without_a_sum_on_one_rank, without_sums, with_another_scale,
    with_another_scale_on_one_rank, with_swapped_collectives, with_swapped_numbers, with_another_target,
    with_other_samples,
)  # fmt: skip
