"""Bit for bit: operator by operator, as graphs in any cut, and torch called directly."""

from __future__ import annotations

import dataclasses
import random
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumux.device.run.graph import expressible
from gpumux.errors import JobFailed, ProgramError
from gpumux.program import onednn_lstm
from gpumux.program.check import check
from gpumux.program.codec import encode
from gpumux.program.ir import (
    Complex,
    Op,
    Program,
    ProgramBuilder,
    ScalarRef,
    Storage,
    Tag,
    TensorRef,
    View,
)
from tests.device.cpu.support import SEED, Bench, as_in_an_executor  # noqa: F401
from tests.program import samples

T = TensorRef

pytestmark = pytest.mark.usefixtures("as_in_an_executor")


def both_ways(
    program: Program, state: list[bytes], inputs: list[bytes], scalars: tuple[float | int, ...], bounds: tuple[int, ...]
) -> None:
    """Three steps by operators and three as graphs must leave the same bytes everywhere."""
    check(encode(program))
    slow, fast = Bench(program, state, inputs), Bench(program, state, inputs)
    with pytest.MonkeyPatch.context() as monkey:
        torch.default_generator.manual_seed(SEED)
        outcomes = []
        for _ in range(3):
            slow.step(scalars)
            outcomes.append(slow.outcome())
        fast.cut(bounds, monkey)
        torch.default_generator.manual_seed(SEED)
        for wanted in outcomes:
            fast.step(scalars)
            assert fast.outcome() == wanted


# ---- random programs -------------------------------------------------------------------------------

Drawn = tuple[Program, tuple[int, ...]]


@st.composite
def programs(draw: st.DrawFn) -> Drawn:
    """Straight lines of operators of every argument kind, over float32[4,4] state, inputs and
    temporaries, in place and not, some on transposed or reinterpreted windows; and a cut."""
    d = samples._Draft()
    mats = [d.tensor("state", (4, 4), slot=0), d.tensor("state", (4, 4), slot=1), d.tensor("input", (4, 4), slot=0)]
    fixed = len(mats)

    def temp(size: tuple[int, ...] = (4, 4), dtype: str = "float32") -> int:
        return d.tensor("temp", size, dtype)

    def any_mat() -> int:
        chosen = draw(st.sampled_from(mats))
        return d.alias(chosen, (4, 4), (1, 4)) if draw(st.booleans()) else chosen

    def made(view: int) -> None:
        mats.append(view)

    def outs(target: str, *args: object, out: tuple[object, ...], **kw: object) -> None:
        d.ops.append(Op(target, args, tuple(sorted(kw.items())), out))  # type: ignore[arg-type]

    float32, draws = Tag("dtype", "float32"), 0
    for _ in range(draw(st.integers(1, 14))):
        a, b = draw(st.sampled_from(mats)), any_mat()  # the first operand decides the layout of the result
        match draw(st.integers(0, 15)):
            case 0:
                d.op("aten.add.Tensor", T(a), T(b), out=(x := temp()), kwargs=(("alpha", 0.5),))
                made(x)
            case 1:
                d.op("aten.mm.default", T(mats[0]), T(mats[1]), out=(x := temp()))
                made(x)
            case 2:
                target = draw(st.sampled_from(mats[:2] + mats[fixed:]))
                d.op("aten.mul_.Scalar", T(target), ScalarRef(0), out=target)
            case 3:
                target = draw(st.sampled_from(mats[:2] + mats[fixed:]))
                d.op("aten.clamp_.default", T(target), None, ScalarRef(1), out=target)
            case 4:
                x, y = temp((4,)), temp((4,), "int64")
                outs("aten.max.dim", T(mats[0]), 1, out=(x, y))
                d.op("aten.full.default", (4, 4), True, out=(z := temp()), kwargs=(("dtype", float32),))
                made(z)
            case 5:
                targets = mats[:2]
                outs("aten._foreach_add_.Scalar", tuple(T(m) for m in targets), ScalarRef(0), out=())
            case 6:
                pair = (temp(), temp())
                scalars = (0.25, ScalarRef(0))
                outs("aten._foreach_mul.ScalarList", (T(mats[0]), T(mats[1])), scalars, out=(pair,))
                mats.extend(pair)
            case 7:
                d.op("aten.bernoulli.p", T(mats[0]), 0.5, out=(x := temp()), random=draws)
                draws += 1
                made(x)
            case 8:
                mask = temp((4, 4), "bool")
                d.op("aten.gt.Scalar", T(mats[0]), 0.0, out=mask)
                d.op("aten.where.self", T(mask), T(mats[0]), T(mats[1]), out=(x := temp()))
                made(x)
            case 9:
                d.op("aten.sum.dim_IntList", T(mats[0]), (), out=(total := temp(())))
                d.op("aten.mul.Tensor", T(mats[1]), T(total), out=(x := temp()))
                made(x)
            case 10:
                d.op("aten._to_copy.default", T(mats[0]), out=temp((4, 4), "bfloat16"),
                     kwargs=(("dtype", Tag("dtype", "bfloat16")),))  # fmt: skip
            case 11:
                base = d.views[mats[0]]
                d.views.append(View(base.storage, "int32", base.size, base.stride, base.offset))
                d.op("aten.add.Scalar", T(len(d.views) - 1), 1, out=temp((4, 4), "int32"))
                fresh = mats[-1]
                if d.storages[d.views[fresh].storage].kind == "temp":
                    v = d.views[fresh]
                    d.views.append(View(v.storage, "int32", v.size, v.stride, v.offset))
                    d.op("aten.bitwise_not.default", T(len(d.views) - 1), out=temp((4, 4), "int32"))
            case 12:
                x, mean, rstd = temp(), temp((4, 1)), temp((4, 1))
                outs("aten.native_layer_norm.default", T(mats[0]), (4,), None, None, 1e-5, out=(x, mean, rstd))
                made(x)
            case 13:
                d.op(
                    "aten.div.Tensor_mode",
                    T(mats[0]),
                    T(mats[2]),
                    out=(x := temp()),
                    kwargs=(("rounding_mode", "floor"),),
                )
                made(x)
            case 14:
                z = temp((4, 4), "complex64")
                d.op("aten.mul.Scalar", T(mats[0]), Complex(0.0, 1.0), out=z)
                d.op("aten.abs.default", T(z), out=(x := temp()))
                made(x)
            case 15:
                d.op("aten.copy_.default", T(mats[0]), T(mats[-1]), out=mats[0])
    inner = draw(st.sets(st.integers(1, len(d.ops)), max_size=4)) - {len(d.ops)}
    result = (mats[-1], d.alias(mats[1], (4, 4), (1, 4)))
    program = d.program(inputs=(mats[2],), results=result, scalars=("float", "int"))
    return program, (0, *sorted(inner), len(d.ops))


@given(drawn=programs(), seed=st.integers(0, 2**16))
@settings(max_examples=60)
def test_graphs_leave_the_same_bits_as_single_operators(drawn: Drawn, seed: int) -> None:
    program, bounds = drawn
    rng = random.Random(seed)

    def matrix() -> bytes:
        return struct.pack("16f", *(rng.uniform(-2, 2) for _ in range(16)))

    both_ways(program, [matrix(), matrix()], [matrix()], (0.75, 1), bounds)


@pytest.mark.parametrize("bounds", [(0, 8), (0, 1, 2, 3, 4, 5, 6, 7, 8), (0, 3, 8)])
def test_a_training_step_equals_torch_called_directly(bounds: tuple[int, ...]) -> None:
    program = samples.sgd_linear()
    x, y = torch.randn(8, 3), torch.randn(8)
    w, losses = torch.zeros(3), []
    for _ in range(3):
        error = torch.mv(x, w) - y
        losses.append((error * error).mean())
        w = w - torch.mv(x.t(), error) * (2.0 / 8) * 0.1
    raw = [x.numpy().tobytes(), y.numpy().tobytes()]
    both_ways(program, [bytes(12)], raw, (0.1,), bounds)
    bench = Bench(program, [bytes(12)], raw)
    with pytest.MonkeyPatch.context() as monkey:
        bench.cut(bounds, monkey)
        for loss in losses:
            bench.step((0.1,))
            at = bench.layout.results[0]
            assert bench.memory[at : at + 4] == loss.numpy().tobytes()
    assert bench.buffers[0].numpy().tobytes() == w.numpy().tobytes()


@pytest.mark.parametrize("bounds", [(0, 6), (0, 1, 2, 3, 4, 5, 6)])
def test_a_random_slot_named_again_repeats_its_draws_and_disturbs_nothing_else(bounds: tuple[int, ...]) -> None:
    program, x = samples.dropout(), torch.rand(64)
    raw = x.numpy().tobytes()
    both_ways(program, [], [raw], (), bounds)
    torch.default_generator.manual_seed(SEED)
    direct = [x * torch.bernoulli(x, 0.5) for _ in range(4)]
    bench = Bench(program, [], [raw])
    with pytest.MonkeyPatch.context() as monkey:
        bench.cut(bounds, monkey)
        for first, second in (direct[:2], direct[2:]):
            bench.step(())
            got = [bench.memory[at : at + 256] for at in bench.layout.results]
            assert got == [t.numpy().tobytes() for t in (first, first, second)]


def test_random_streams_are_drawn_from_as_if_each_were_alone() -> None:
    """Two models' dropout, one generator each in the state, and one draw from the job's own between them."""
    generators = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    states = [bytes(g.get_state().numpy()) for g in generators]
    builder, x = ProgramBuilder(), torch.rand(64)
    batch = builder.input("float32", (64,))
    streams = [builder.state("uint8", (len(state),)).view for state in states]
    sources = [streams[0], streams[1], None, streams[0], streams[0]]
    slots = [0, 1, 2, 0, 3]  # the fourth draws the first one's numbers again
    for source, slot in zip(sources, slots, strict=True):
        builder.result(builder.call("aten.bernoulli.p", batch, 0.5, size=(64,), random=slot, stream=source))
    program, raw = builder.build(), x.numpy().tobytes()
    for bounds in ((0, 5), (0, 1, 2, 3, 4, 5)):
        both_ways(program, states, [raw], (), bounds)
        bench = Bench(program, states, [raw])
        own = torch.Generator().manual_seed(SEED)
        with pytest.MonkeyPatch.context() as monkey:
            bench.cut(bounds, monkey)
            alone = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
            for _ in range(3):
                bench.step(())
                first, other = (torch.bernoulli(x, 0.5, generator=g) for g in alone)
                third = torch.bernoulli(x, 0.5, generator=own)
                wanted = [first, other, third, first, torch.bernoulli(x, 0.5, generator=alone[0])]
                got = [bench.memory[at : at + 256] for at in bench.layout.results]
                assert got == [t.numpy().tobytes() for t in wanted]
            assert [b.numpy().tobytes() for b in bench.buffers] == [g.get_state().numpy().tobytes() for g in alone]


@pytest.mark.parametrize("bounds", [(0, 6), (0, 1, 2, 3, 4, 5, 6)])
def test_a_generator_that_comes_with_the_step_is_drawn_from_and_leaves_as_it_stands_then(
    bounds: tuple[int, ...],
) -> None:
    program, x = samples.given_generator(), torch.rand(64)
    given = torch.Generator().manual_seed(12345)
    before = given.get_state().numpy().tobytes()
    bench = Bench(program, [], [x.numpy().tobytes(), before])
    with pytest.MonkeyPatch.context() as monkey:
        bench.cut(bounds, monkey)
        torch.default_generator.manual_seed(SEED)  # where something else left it
        bench.step(())
        first, third = (x * torch.bernoulli(x, 0.5, generator=given) for _ in range(2))
        *masks, state = bench.layout.results
        got = [bench.memory[at : at + 256] for at in masks]
        assert got == [t.numpy().tobytes() for t in (first, first, third)]
        after = given.get_state().numpy().tobytes()
        assert bench.memory[state : state + len(after)] == after != before


def test_bytes_that_are_no_generator_for_a_step_fail_it() -> None:
    bench = Bench(samples.given_generator(), [], [bytes(256), b"\xff" * 5056])
    with pytest.raises(JobFailed, match="no state of this torch build's generator"):
        bench.step(())


def test_bytes_that_are_no_generator_fail_the_step() -> None:
    builder = ProgramBuilder()
    batch, stream = builder.input("float32", (4,)), builder.state("uint8", (5056,)).view
    builder.result(builder.call("aten.bernoulli.p", batch, 0.5, size=(4,), random=0, stream=stream))
    bench = Bench(builder.build(), [bytes(5056)], [bytes(16)])
    with pytest.raises(JobFailed, match=r"aten\.bernoulli\.p"):
        bench.step(())
    with pytest.MonkeyPatch.context() as monkey:
        bench.cut((0, 1), monkey)
        with pytest.raises(JobFailed, match=r"aten\.bernoulli\.p"):
            bench.step(())


def test_draws_from_streams_are_part_of_a_graph() -> None:
    """Unless the generator must be moved around the operator: one that takes none, or draws an earlier one's numbers
    again."""
    builder = ProgramBuilder()
    batch, stream = builder.input("float32", (4,)), builder.state("uint8", (5056,)).view
    for slot in (0, 1, 1):
        builder.result(builder.call("aten.bernoulli.p", batch, 0.5, size=(4,), random=slot, stream=stream))
    builder.result(builder.call("aten.rand.default", (4,), dtype="float32", size=(4,), random=2, stream=stream))
    bench = Bench(builder.build(), [bytes(5056)], [bytes(16)])
    with pytest.MonkeyPatch.context() as monkey:
        bench.cut((0, 4), monkey)
    (piece,) = bench.loaded._pieces[bench.loaded.newest]
    assert [type(stretch).__name__ for stretch in piece.stretches] == ["GraphStretch", "PythonStretch"]


def test_batch_norms_hidden_write_is_not_lost() -> None:
    d = samples._Draft()
    x = d.tensor("input", (8, 3), slot=0)
    mean, var = d.tensor("state", (3,), slot=0), d.tensor("state", (3,), slot=1)
    y, save_mean, save_rstd = d.tensor("temp", (8, 3)), d.tensor("temp", (3,)), d.tensor("temp", (3,))
    args = (T(x), None, None, T(mean), T(var), True, 0.1, 1e-5)
    d.ops.append(Op("aten.native_batch_norm.default", args, (), (y, save_mean, save_rstd)))
    program = d.program(inputs=(x,), results=())
    raw = torch.randn(8, 3).numpy().tobytes()
    both_ways(program, [bytes(12), bytes(12)], [raw], (), (0, 1))
    bench = Bench(program, [bytes(12), bytes(12)], [raw])
    with pytest.MonkeyPatch.context() as monkey:
        bench.cut((0, 1), monkey)
        bench.step(())
    assert bench.buffers[0].any()


def test_what_a_graph_would_take_for_another_operator_runs_through_python() -> None:
    d = samples._Draft()
    a, b = d.tensor("input", (4,), slot=0), d.tensor("temp", (4,))
    d.op("aten.add.Tensor", T(a), T(a), out=b)
    program = d.program(inputs=(a,), results=(b,))
    assert expressible(program, {1: program.views[b]}, program.ops[0]) == ""
    unknown = Op("aten.add.Tensor", (T(a), 1.0), (), (b,))  # a graph would take it for add.Scalar
    reread = View(1, "int32", (4,), (1,))
    more = dataclasses.replace(program, views=(*program.views, reread))
    assert "read as int32" in expressible(more, {1: program.views[b]}, Op("aten.neg.default", (T(2),), (), (b,)))
    assert "aten::add.Scalar" in expressible(program, {1: program.views[b]}, unknown)


# ---- declarations that do not hold -------------------------------------------------------------------


def wrong(view: View) -> Program:
    """x.clone(), its output declared as `view` on a storage of 64 bytes."""
    x = View(0, "float32", (2, 4), (4, 1))
    op = Op("aten.clone.default", (T(0),), (), (1,))
    return Program((Storage("input", 32, 0), Storage("temp", 64)), (x, view), (op,), (0,), (1,))


@pytest.mark.parametrize(
    ("view", "what"),
    [
        (View(1, "int32", (2, 4), (4, 1)), "dtype"),
        (View(1, "float32", (4, 2), (2, 1)), "size"),
        (View(1, "float32", (2, 4), (1, 2)), "stride"),
        (View(1, "float32", (2, 4), (4, 1), 3), "storage offset"),
        (View(1, "float32", (2, 4), (4, 1)), "storage bytes"),
    ],
)
def test_an_output_that_is_not_as_declared_is_named(view: View, what: str) -> None:
    bench = Bench(wrong(view), [], [bytes(32)])
    with pytest.raises(ProgramError, match=rf"operator 0 \(aten.clone.default\) returned {what}"):
        bench.step(())


def test_an_output_that_shares_memory_undeclared_is_named() -> None:
    x = View(0, "float32", (4,), (1,))
    op = Op("aten.alias.default", (T(0),), (), (1,))
    storages = (Storage("input", 16, 0), Storage("temp", 16))
    program = Program(storages, (x, View(1, "float32", (4,), (1,))), (op,), (0,), (1,))
    with pytest.raises(ProgramError, match="returned the memory of storage 0 where the program declares 1"):
        Bench(program, [], [bytes(16)]).step(())


# ---- layers of an LSTM, which run with gradients on


def lstm_of(declared: int) -> Bench:
    program = samples.lstm(declared)
    state = [torch.linspace(-1, 1, s.nbytes // 4).numpy().tobytes() for s in program.storages if s.kind == "state"]
    return Bench(program, state, [torch.linspace(-2, 2, 30).numpy().tobytes()] * 2)


def test_an_lstm_runs_the_same_in_every_cut() -> None:
    size = onednn_lstm.workspace_bytes((5, 2, 3, 4, torch.float32, True, False))
    slow, fast = lstm_of(size), lstm_of(size)
    with pytest.MonkeyPatch.context() as monkey:
        fast.cut((0, 2), monkey)
        for _ in range(3):
            slow.step(())
            fast.step(())
            assert fast.outcome() == slow.outcome()
    assert any(slow.memory[slow.layout.results[0] :]), "there is a gradient"
    assert "gradients on" in fast.loaded.through_python["aten.mkldnn_rnn_layer.default"]


def test_an_lstm_captured_on_another_processor_says_so() -> None:
    with pytest.raises(ProgramError, match=r"mkldnn_rnn_layer\.default\) returned size") as error:
        lstm_of(64).step(())
    assert "oneDNN lays out an LSTM by the processor" in error.value.remedy
    assert "torch.backends.mkldnn.enabled = False" in error.value.remedy
