"""Structure: faults of hostile Programs, one rule at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from gpumux.errors import ProgramError
from gpumux.program.ir import (
    STREAM_BYTES,
    Collective,
    Numerics,
    Op,
    Program,
    ProgramBuilder,
    ProgramLimits,
    ScalarRef,
    Span,
    Storage,
    Tag,
    TensorRef,
    View,
    Wave,
    slot_layout,
)
from gpumux.program.memory import Interval, intervals
from gpumux.program.validate import const_bytes, state_slots, validate, written_storages
from tests.program import samples
from tests.program.strategies import programs

ADD = samples.add_one()
OP = ADD.ops[0]
CONST = Program((Storage("const", 3, 0),), (View(0, "uint8", (3,), (1,)),), (), (), (0,), consts=(b"abc",))


@settings(deadline=None, max_examples=20)
@given(programs())
def test_well_formed_programs_pass(program):
    validate(program)
    assert slot_layout(program).nbytes > 0
    assert sum(state_slots(program)) == sum(s.nbytes for s in program.storages if s.kind == "state")
    assert const_bytes(program) == sum(map(len, program.consts))


@pytest.mark.parametrize("name", samples.ALL)
def test_samples_pass(name):
    validate(samples.ALL[name]())


def with_view(**changes: object) -> Program:
    return replace(ADD, views=(ADD.views[0], replace(ADD.views[1], **changes)))


def with_op(**changes: object) -> Program:
    return replace(ADD, ops=(replace(OP, **changes),))


def with_storages(*storages: Storage) -> Program:
    return replace(ADD, storages=storages)


def with_spans(*spans: Span, layers: tuple[str, ...] = ("a",)) -> Program:
    return replace(ADD, layers=layers, spans=spans)


def with_generator(**changes: object) -> Program:
    """A Program that is given a generator's state, with changes to the view of that state."""
    made = samples.given_generator()
    views = list(made.views)
    views[-1] = replace(views[-1], **changes)
    return replace(made, views=tuple(views))


DRAWING = samples.given_generator()

# Two operators on two views of temps, and a sum between them.
EXCHANGED = replace(
    ADD,
    storages=(*ADD.storages, Storage("temp", 16)),
    views=(
        *ADD.views,
        View(2, "float32", (4,), (1,)),
        View(1, "bool", (4,), (1,)),
        View(1, "float32", (4,), (0,)),
    ),
    ops=(*ADD.ops, replace(ADD.ops[0], outs=(2,))),
    collectives=(Collective(1, "all_reduce", 0, (0, 1), (1,)),),
    ranks=3,
)


def with_collective(**changes: Any) -> Program:
    return replace(EXCHANGED, collectives=(replace(EXCHANGED.collectives[0], **changes),))


def with_exchange(**changes: Any) -> Program:
    return with_collective(kind="exchange", **{"views": (), **changes})


BROKEN = {
    "a generator's view missing": replace(DRAWING, generator=len(DRAWING.views)),
    "a generator's view -1": replace(DRAWING, generator=-1),
    "a generator's state that is not bytes": with_generator(dtype="int8"),
    "a generator's state of two dimensions": with_generator(size=(2, 8), stride=(8, 1)),
    "a generator's state with gaps": with_generator(size=(8,), stride=(2,)),
    "a generator's state of nothing": with_generator(size=(0,)),
    "a generator's state that is too long": samples.given_generator(state_bytes=8193),
    "a generator's state in a temporary": replace(DRAWING, generator=1),
    "an operator that reads a generator's state": replace(
        DRAWING, ops=(*DRAWING.ops, Op("aten.add.Scalar", (TensorRef(len(DRAWING.views) - 1), 1), (), (None,)))
    ),
    "a span past the last operator": with_spans(Span(0, 2, 0)),
    "a span of nothing": with_spans(Span(0, 0, 0)),
    "a span before the first operator": with_spans(Span(-1, 1, 0)),
    "spans that overlap": with_spans(Span(0, 1, 0), Span(0, 1, 0, True)),
    "a span of no layer": with_spans(Span(0, 1, 1)),
    "a span of layer -1": with_spans(Span(0, 1, -1)),
    "a layer that nothing is of": with_spans(Span(0, 1, 0), layers=("a", "b")),
    "a span without layers": with_spans(Span(0, 1, 0), layers=()),
    "layers without spans": with_spans(),
    "a layer without a name": with_spans(Span(0, 1, 0), layers=("",)),
    "a layer with a long name": with_spans(Span(0, 1, 0), layers=("a" * 257,)),
    "view past its storage": with_view(size=(5,)),
    "view offset past its storage": with_view(offset=1),
    "view stride past its storage": with_view(stride=(2,)),
    "view on no storage": with_view(storage=2),
    "view on storage -1": with_view(storage=-1),
    "negative size": with_view(size=(-1,)),
    "negative stride": with_view(stride=(-1,), offset=3),
    "negative offset": with_view(offset=-1),
    "ranks differ": with_view(stride=(1, 1)),
    "unknown dtype": with_view(dtype="float8"),
    "expanded beyond all bounds": with_view(size=(1 << 40, 1 << 40), stride=(0, 0)),
    "a huge stride": with_view(size=(1,), stride=(1 << 62,)),
    "empty but of huge size": with_view(size=(0, 1 << 62), stride=(1, 1)),
    "argument view missing": with_op(args=(TensorRef(9), 1)),
    "argument view -1": with_op(args=(TensorRef(-1), 1)),
    "argument nested view missing": with_op(args=((1, (TensorRef(9),)),)),
    "keyword view missing": with_op(kwargs=(("other", TensorRef(9)),)),
    "output view missing": with_op(outs=(7,)),
    "output nested view missing": with_op(outs=((7,),)),
    "scalar missing": with_op(args=(TensorRef(0), ScalarRef(0))),
    "scalar -1": with_op(args=(TensorRef(0), ScalarRef(-1))),
    "keywords unsorted": with_op(kwargs=(("b", 1), ("a", 1))),
    "keyword twice": with_op(kwargs=(("a", 1), ("a", 2))),
    "another device": with_op(kwargs=(("device", Tag("device", "cuda:1")),)),
    "a dtype of its own": with_op(kwargs=(("dtype", Tag("dtype", "qint8")),)),
    "a sparse layout": with_op(kwargs=(("layout", Tag("layout", "sparse_coo")),)),
    "a memory format of its own": with_op(kwargs=(("memory_format", Tag("memory_format", "x")),)),
    "a tag of unknown kind": with_op(kwargs=(("x", Tag("generator", "")),)),
    "used before it is made": with_op(args=(TensorRef(1), 1)),
    "never made": with_op(outs=(None,)),
    "input count": replace(ADD, inputs=()),
    "input view missing": replace(ADD, inputs=(4,)),
    "input view -1": replace(ADD, inputs=(-1,)),
    "input on a temporary": replace(ADD, inputs=(1,)),
    "input away from its start": replace(ADD, views=(*ADD.views, View(0, "float32", (3,), (1,), 1)), inputs=(2,)),
    "input slot": with_storages(Storage("input", 16, 1), ADD.storages[1]),
    "input slot twice": with_storages(Storage("input", 16, 0), Storage("input", 16, 0)),
    "state slot missing": with_storages(*ADD.storages, Storage("state", 4, 1)),
    "state slot -1": with_storages(*ADD.storages, Storage("state", 4)),
    "temporary with a slot": with_storages(ADD.storages[0], Storage("temp", 16, 0)),
    "storage of unknown kind": with_storages(*ADD.storages, Storage("shared", 4, 0)),
    "storage of negative size": with_storages(*ADD.storages, Storage("state", -4, 0)),
    "storage too large": with_storages(*ADD.storages, Storage("state", 1 << 47, 0)),
    "constant missing": replace(CONST, consts=()),
    "constant of another size": replace(CONST, consts=(b"ab",)),
    "constant without storage": replace(CONST, consts=(b"abc", b"d")),
    "result missing": replace(ADD, results=(5,)),
    "result -1": replace(ADD, results=(-1,)),
    "unknown precision": replace(ADD, numerics=Numerics(matmul_precision="lowest")),
    "unknown default dtype": replace(ADD, numerics=Numerics(default_dtype="int8")),
    "unknown precision of convolutions": replace(ADD, numerics=Numerics(conv_precision="fp8")),
    "a flag that is none": replace(ADD, numerics=Numerics(deterministic=1)),
    "unknown device": replace(ADD, device="xla"),
    "unknown kind": replace(ADD, kind="cuda"),
    "unknown scalar kind": replace(ADD, scalars=("complex",)),
    "random slot of an operator that draws nothing": with_op(random=0),
    "rank past the last": replace(ADD, rank=2, ranks=2),
    "no ranks": replace(ADD, ranks=0),
    "too many ranks": replace(ADD, ranks=4097),
    "collective before the first operator": with_collective(op=0),
    "collective behind the last operator": with_collective(op=2),
    "collective of unknown kind": with_collective(kind="broadcast"),
    "collective of one member": with_collective(members=(0,)),
    "collective of others": with_collective(members=(1, 2)),
    "collective with members out of order": with_collective(members=(1, 0)),
    "collective with a member twice": with_collective(members=(0, 0, 1)),
    "collective with a rank past the last": with_collective(members=(0, 3)),
    "sum of nothing": with_collective(views=()),
    "sum of a missing view": with_collective(views=(9,)),
    "sum of an input": with_collective(views=(0,)),
    "sum of what is not made yet": with_collective(views=(2,)),
    "sum that sends": with_collective(sends=((1, 0),)),
    "sum with an infinite scale": with_collective(scale=float("inf")),
    "sum of booleans": with_collective(views=(3,)),
    "exchange with itself": with_exchange(sends=((0, 0),)),
    "exchange with a stranger": with_exchange(sends=((2, 0),)),
    "exchange of nothing": with_exchange(),
    "exchange that sums": with_exchange(sends=((1, 0),), views=(1,)),
    "exchange that sends a missing view": with_exchange(sends=((1, -1),)),
    "exchange into an input": with_exchange(receives=((1, 0),)),
    "exchange into elements on each other": with_exchange(receives=((1, 4),)),
    "a wave of no lane": replace(EXCHANGED, collectives=(), ranks=1, wave=Wave(2, 1)),
    "a wave that is all tail": replace(EXCHANGED, collectives=(), ranks=1, wave=Wave(0, 0)),
    "a wave without a tail": replace(EXCHANGED, collectives=(), ranks=1, wave=Wave(1, 2)),
    "a wave that draws from the job's generator": replace(
        samples.dropout(8), ops=(*samples.dropout(8).ops, replace(samples.dropout(8).ops[0], random=1)), wave=Wave(0, 1)
    ),
    "collectives out of order": replace(EXCHANGED, collectives=EXCHANGED.collectives * 2),
}


def test_a_received_temporary_counts_as_made():
    received = replace(EXCHANGED.collectives[0], kind="exchange", views=(), receives=((1, 5),))
    program = replace(
        EXCHANGED,
        storages=(*EXCHANGED.storages, Storage("temp", 16)),
        views=(*EXCHANGED.views, View(3, "float32", (4,), (1,))),
        collectives=(received,),
    )
    validate(program)
    lives = intervals(program)
    assert lives[3] == Interval(1, 1)
    with pytest.raises(ProgramError, match="no operator makes"):
        validate(replace(program, collectives=()))


def test_what_is_sent_lives_until_it_is_sent():
    assert intervals(with_exchange(sends=((1, 1),)))[1] == Interval(0, 2)


@pytest.mark.parametrize("what", BROKEN)
def test_broken_structure_is_refused(what):
    with pytest.raises(ProgramError) as error:
        validate(BROKEN[what])
    assert error.value.message
    assert error.value.remedy


def test_an_operator_may_not_return_storage_it_was_not_given():
    b = ProgramBuilder()
    mine, other = b.state("float32", (4,)), b.state("float32", (4,))
    b.add_op("aten.add_.Scalar", mine, 1, outs=(other.view,))
    with pytest.raises(ProgramError, match="not given"):
        validate(b.build())


def test_a_temporary_is_made_once():
    b = ProgramBuilder()
    x = b.input("float32", (4,))
    y = b.call("aten.add.Scalar", x, 1, size=(4,))
    b.add_op("aten.add.Scalar", x, 2, outs=(y.view,))
    with pytest.raises(ProgramError, match="not given"):
        validate(b.build())


def random_ops(*slots: tuple[str, int | None]) -> Program:
    b = ProgramBuilder()
    x = b.input("float32", (4,))
    for target, slot in slots:
        b.call(target, x, size=(4,), random=slot)
    return b.build()


def test_random_slots():
    draw, other = "aten.bernoulli.default", "aten.rand_like.default"
    validate(random_ops((draw, 0), (draw, 0), (other, 1), (draw, 0)))
    for slots in ([(draw, None)], [(draw, 1)], [(draw, 0), (other, 0)], [(draw, 0), (draw, 2)], [(draw, -1)]):
        with pytest.raises(ProgramError, match="random"):
            validate(random_ops(*slots))


def streamed(size: int = 16, dtype: str = "uint8", slot: int | None = 0, stream: int = 1) -> Program:
    b = ProgramBuilder()
    x = b.input("float32", (4,))
    b.add_tensor("state", dtype, (size,))
    b.add_view(0, "uint8", (16,))
    b.call("aten.bernoulli.p" if slot is not None else "aten.neg.default", x, size=(4,), random=slot, stream=stream)
    return b.build()


def test_a_random_stream_is_a_line_of_bytes_in_the_state():
    validate(streamed())
    assert written_storages(streamed()) == {1}
    for wrong in (
        streamed(size=STREAM_BYTES + 1), streamed(size=0), streamed(dtype="int8"), streamed(slot=None),
        streamed(stream=9), streamed(stream=-1), streamed(stream=0), streamed(stream=2),
    ):  # fmt: skip
        with pytest.raises(ProgramError, match="random stream"):
            validate(wrong)


def test_a_slot_is_drawn_from_one_stream():
    b = ProgramBuilder()
    x = b.input("float32", (4,))
    streams = [b.state("uint8", (16,)).view for _ in range(2)]
    for stream in (*streams, streams[0]):
        b.call("aten.bernoulli.p", x, 0.5, size=(4,), random=0 if stream == streams[0] else 1, stream=stream)
    validate(b.build())
    b.call("aten.bernoulli.p", x, 0.5, size=(4,), random=0, stream=streams[1])
    with pytest.raises(ProgramError, match="another random stream"):
        validate(b.build())


def test_counts_are_limited():
    step = samples.sgd_linear()
    for limits in (
        ProgramLimits(ops=3),
        ProgramLimits(views=3),
        ProgramLimits(storages=3),
        ProgramLimits(tensors=1),
        ProgramLimits(dims=1),
    ):
        with pytest.raises(ProgramError, match=r"limit|at most"):
            validate(step, limits)


def test_written_storages():
    step = samples.sgd_linear()
    assert written_storages(step) == {2}
    b = ProgramBuilder()
    x = b.input("float32", (2, 3, 4))
    mean, var = b.state("float32", (3,)), b.state("float32", (3,))
    out = [b.add_tensor("temp", "float32", s) for s in ((2, 3, 4), (3,), (3,))]
    b.add_op("aten.native_batch_norm.default", x, None, None, mean, var, True, 0.1, 1e-5, outs=out)
    assert written_storages(b.build()) == {1, 2}
    b.add_op("aten._foreach_add_.Scalar", (x, mean), 1.0)
    assert written_storages(b.build()) == {0, 1, 2}
    added = Program(step.storages, step.views, (Op("lib.op.default", (TensorRef(0),)),), step.inputs, ())
    assert written_storages(added) == {0}
