"""The whole check: good Programs pass, hostile ones reach only allowed operators on their own buffers."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from gpumux.errors import ProgramError
from gpumux.program.check import check
from gpumux.program.codec import content_hash, encode
from gpumux.program.ir import (
    Complex,
    Numerics,
    Op,
    Program,
    ProgramBuilder,
    ProgramLimits,
    Storage,
    Tag,
    TensorRef,
    View,
    slot_layout,
)
from gpumux.program.memory import first_fit, footprint
from tests.program import samples
from tests.program.strategies import programs


def refused(program: Program, match: str | None = None, **rest: object) -> ProgramError:
    with pytest.raises(ProgramError, match=match) as error:
        check(encode(program), **rest)
    return error.value


def one_op(
    target: str,
    *args: object,
    out: tuple[str, tuple[int, ...]] | None = ("float32", (4,)),
    prepare: Callable[[ProgramBuilder], object] = lambda b: None,
    **kwargs: object,
) -> Program:
    """One operator over input 0, float32[4]; `x` in `args` stands for it."""
    b = ProgramBuilder()
    x = b.input("float32", (4,))
    prepare(b)
    given = [x if a == "x" else a for a in args]
    outs = () if out is None else (b.add_tensor("temp", *out),)
    b.add_op(target, *given, kwargs=kwargs, outs=outs)
    return b.build()


@pytest.mark.parametrize("name", samples.ALL)
def test_samples_pass(name):
    program = samples.ALL[name]()
    encoded = encode(program)
    report = check(encoded)
    assert report.program == program
    assert report.content_hash == content_hash(encoded) == hashlib.sha256(encoded).hexdigest()
    assert report.footprint.slot_bytes == slot_layout(program).nbytes
    assert report.footprint == footprint(program, first_fit(program))


def test_footprints_are_what_the_samples_need():
    report = check(encode(samples.sgd_linear()))
    assert report.footprint.state_bytes == 64  # 12 bytes of weights, rounded up
    assert report.footprint.transient_bytes == 3 * 64
    b = ProgramBuilder()
    b.add_const(b"x" * 65)
    b.state("float32", (16,))
    x = b.input("float32", (1000,))
    b.add_op("aten.add.Scalar", x, 1, outs=(None,))  # its result is not used, yet it takes memory
    report = check(encode(b.build()))
    assert report.footprint.state_bytes == 64 + 128
    assert report.footprint.transient_bytes == 4032


def test_hazards_are_noted():
    assert "integer division" in check(encode(samples.crash_div())).notes[0]
    assert check(encode(samples.crash_maxpool())).notes == ()
    (note,) = check(encode(samples.crash_maxpool(derived=True))).notes
    assert "can't be checked ahead" in note


def test_the_process_is_left_as_it_was():
    before = torch.get_default_dtype(), torch.is_grad_enabled()
    program = replace(samples.add_one(), numerics=Numerics(default_dtype="float64"))
    check(encode(program))
    refused(one_op("aten.add.Scalar", "x", 1, out=("float32", (5,))))
    assert (torch.get_default_dtype(), torch.is_grad_enabled()) == before
    assert type(torch.empty(1)) is torch.Tensor


def test_the_default_dtype_is_the_programs():
    def full(dtype: str) -> Program:
        b = ProgramBuilder(numerics=Numerics(default_dtype="float64"))
        b.call("aten.full.default", (3,), 1.5, dtype=dtype, size=(3,), kwargs={"device": Tag("device", "")})
        return b.build()

    check(encode(full("float64")))
    refused(full("float32"), "bytes")


def test_a_cuda_program_is_checked_without_a_gpu():
    b = ProgramBuilder(device="cuda")
    x = b.input("float32", (4, 4))
    b.result(b.call("aten.mm.default", x, x, size=(4, 4)))
    check(encode(b.build()))
    on_host = ProgramBuilder(device="cuda")
    on_host.call("aten.full.default", (3,), 1.5, size=(3,))  # without a device torch makes it on the host
    refused(on_host.build(), "device is cpu, declared is cuda")


# ---- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target",
    [
        "aten.from_file.default",
        "aten.set_.source_Storage_storage_offset",
        "aten.resize_.default",
        "aten.add.out",
        "aten._local_scalar_dense.default",
        "prims.device_put.default",
        "profiler._record_function_enter_new.default",
        "torch.load.default",
        "aten.__class__.__base__",
        "builtins.eval.default",
    ],
)
def test_operators_off_the_list_are_refused_by_name(target):
    error = refused(one_op(target, "x"))
    assert target in error.message
    assert "operator 0" in error.message
    assert "allow_ops" in error.remedy


def test_an_added_operator_is_resolved_and_nothing_else():
    program = one_op("prims.neg.default", "x")
    refused(program, "allow-list")
    assert check(encode(program), extra_ops=("prims.neg.default",)).program == program
    for odd in ("no.such.operator", "torch.load", "aten.add", "os", "aten.add.Tensor.__call__"):
        refused(one_op(odd, "x"), "has no operator", extra_ops=(odd,))


# ---- arguments -----------------------------------------------------------------------------------

TENSOR = TensorRef(0)
WRONG_ARGUMENTS = {
    "a number for a tensor": one_op("aten.add.Tensor", "x", 1.0),
    "a host scalar for a tensor": one_op("aten.mul.Tensor", "x", samples.ScalarRef(0), prepare=lambda b: b.scalar()),
    "a tensor for a number": one_op("aten.add.Scalar", "x", "x"),
    "a string for a number": one_op("aten.add.Scalar", "x", "1"),
    "a string for a tensor": one_op("aten.neg.default", "x.data"),
    "nothing for a tensor": one_op("aten.neg.default", None),
    "a list for a tensor": one_op("aten.neg.default", (TENSOR,)),
    "a tensor for a list": one_op("aten.cat.default", "x"),
    "a list with a number": one_op("aten.cat.default", (TENSOR, 1)),
    "a float for an int": one_op("aten.cumsum.default", "x", 0.0),
    "a bool for an int": one_op("aten.cumsum.default", "x", False),
    "a host scalar for an int": one_op(
        "aten.cumsum.default", "x", samples.ScalarRef(0), prepare=lambda b: b.scalar("int")
    ),
    "an int for a bool": one_op("aten.gelu_backward.default", "x", "x", approximate=1),
    "a complex number for a float": one_op("aten.bernoulli.p", "x", Complex(0.5, 0.0)),
    "a dtype for a layout": one_op("aten.zeros_like.default", "x", layout=Tag("dtype", "float32")),
    "a string for a dtype": one_op("aten.zeros_like.default", "x", dtype="float32"),
    "a number for a dtype": one_op("aten.zeros_like.default", "x", dtype=6),
    "a string for a device": one_op("aten.zeros_like.default", "x", device="cpu"),
    "pinned memory": one_op("aten.zeros_like.default", "x", pin_memory=True),
    "too many": one_op("aten.neg.default", "x", "x"),
    "too few": one_op("aten.add.Tensor", "x"),
    "a required keyword missing": one_op("aten.div.Tensor_mode", "x", "x"),
    "an unknown keyword": one_op("aten.neg.default", "x", out=("float32", (4,)), other=1),
    "a positional argument by keyword": one_op("aten.add.Tensor", "x", other=TENSOR),
    "an output by keyword": one_op("aten.add.Tensor", "x", "x", out_=TENSOR),
    "a host scalar that sets a size": one_op(
        "aten.arange.default", samples.ScalarRef(0), prepare=lambda b: b.scalar("int")
    ),
}


@pytest.mark.parametrize("what", WRONG_ARGUMENTS)
def test_arguments_that_do_not_fit_the_schema_are_refused(what):
    program = WRONG_ARGUMENTS[what]
    if program.ops[0].target in ("aten.bernoulli.p",):
        program = replace(program, ops=(replace(program.ops[0], random=0),))
    error = refused(
        program, "argument .* takes|takes [0-9]|is missing|no keyword-only|pinned|would change the output's size"
    )
    assert f"operator 0, {program.ops[0].target}" in error.message


def test_a_number_for_a_tensor_names_the_way_out():
    assert ".Scalar overload" in refused(WRONG_ARGUMENTS["a number for a tensor"]).remedy


def test_generators_cant_be_given():
    for value in (None, 1, "cpu", TENSOR):
        program = one_op("aten.bernoulli.default", "x", generator=value)
        program = replace(program, ops=(replace(program.ops[0], random=0),))
        if value is None:
            check(encode(program))
        else:
            refused(program, "generator")


def test_good_arguments_of_every_kind_pass():
    b = ProgramBuilder()
    x = b.input("float32", (1, 2, 8, 8))
    w = b.state("float32", (4, 2, 3, 3))
    rate = b.scalar()
    y = b.call(
        "aten.convolution.default", x, w, None, (1, 1), (1, 1), (1, 1), False, (0, 0), 1, size=(1, 4, 8, 8)
    )  # fmt: skip
    y = b.call("aten.gelu.default", y, kwargs={"approximate": "tanh"}, size=(1, 4, 8, 8))
    half = {"dtype": Tag("dtype", "bfloat16"), "memory_format": Tag("memory_format", "preserve_format")}
    h = b.call("aten._to_copy.default", y, kwargs=half, dtype="bfloat16", size=(1, 4, 8, 8))
    b.call("aten.mul.Scalar", h, rate, dtype="bfloat16", size=(1, 4, 8, 8))
    lists = [b.add_tensor("temp", "float32", (1, 4, 8, 8)) for _ in range(2)]
    b.add_op("aten._foreach_mul.ScalarList", (y, y), (rate, 2), outs=(tuple(lists),))
    b.add_op("aten._foreach_add_.Scalar", (TensorRef(lists[0]), w), 1.0)
    b.call("aten.avg_pool2d.default", y, 2, size=(1, 4, 4, 4))  # one number for int[2]
    index = b.input("int64", (3,))
    b.call("aten.index.Tensor", x, (None, None, index), size=(1, 2, 3, 8))
    b.call(
        "aten.mul.Scalar", b.call("aten.full.default", (2,), Complex(1.0, 2.0), dtype="complex64", size=(2,)), 2,
        dtype="complex64", size=(2,),
    )  # fmt: skip
    check(encode(b.build()))


# ---- outputs and aliases -------------------------------------------------------------------------


def test_declared_outputs_must_be_what_torch_returns():
    x = ("float32", (4,))
    refused(one_op("aten.neg.default", "x", out=("float32", (5,))), "16 bytes, 20 are declared")
    refused(one_op("aten.neg.default", "x", out=("int32", (4,))), "dtype is float32, declared is int32")
    refused(one_op("aten.neg.default", "x", out=("float32", (2, 2))), "size is")
    refused(one_op("aten.argmax.default", "x", out=x), "declared")
    refused(one_op("aten.neg.default", "x", out=None), "0 outputs are declared")
    refused(one_op("aten.add.Tensor", "x", TENSOR, out=("float64", (4,))), "16 bytes, 32 are declared")


def program_of(storages: list[Storage], views: list[View], ops: list[Op], **rest: object) -> Program:
    return Program(tuple(storages), tuple(views), tuple(ops), rest.pop("inputs", (0,)), (), **rest)


def test_a_temporary_larger_than_what_torch_allocates_is_refused():
    """Otherwise a later view of the output would read past the real allocation."""
    program = program_of(
        [Storage("input", 16, 0), Storage("temp", 4096)],
        [View(0, "float32", (4,), (1,)), View(1, "float32", (4,), (1,)), View(1, "float32", (1000,), (1,), 24)],
        [Op("aten.neg.default", (TensorRef(0),), (), (1,)), Op("aten.neg_.default", (TensorRef(2),), (), (2,))],
    )
    refused(program, "16 bytes, 4096 are declared")


@pytest.mark.parametrize("declared", [64, 4096])
def test_the_workspace_of_an_lstm_is_as_large_as_the_program_declares(declared: int):
    """Its size depends on the processor, and the check runs no kernel. The executor looks at it."""
    report = check(encode(samples.lstm(declared)))
    assert report.footprint.transient_bytes >= declared


def test_the_backward_pass_of_an_lstm_gets_the_workspace_of_a_layer_like_its_own():
    """The kernel reads as much as such a layer has, whatever it is given."""
    refused(samples.lstm(4096, used=4000), "not that of a forward pass of this layer")
    refused(samples.lstm(4096, widths=(3, 2)), "not that of a forward pass of this layer")
    program = samples.lstm(4096)
    backward = program.ops[1]
    bytes_of_state = TensorRef(len(program.views))
    more = (*program.views, View(2, "uint8", (192,), (1,)))
    taken = replace(backward, args=(*backward.args[:-1], bytes_of_state))
    refused(replace(program, views=more, ops=(program.ops[0], taken)), "not that of a forward pass of this layer")


@pytest.mark.parametrize(
    ("at", "value", "why"),
    [
        (10, 5, "hidden size of 5"),
        (8, (2, 2), "plain batches"),
        (9, 3, "for an LSTM"),
        (5, TensorRef(0), "states of"),
        (1, TensorRef(3), "weights of"),
    ],
)
def test_a_layer_of_an_lstm_gets_what_its_kernel_does_not_check(at: int, value: object, why: str):
    program = samples.lstm(4096)
    layer = program.ops[0]
    args = (*layer.args[:at], value, *layer.args[at + 1 :])
    refused(replace(program, ops=(replace(layer, args=args), program.ops[1])), why)


def test_wrong_strides_and_offsets_are_refused():
    for view in (View(1, "float32", (2, 2), (1, 2)), View(1, "float32", (2, 2), (2, 1), 1)):
        program = program_of(
            [Storage("input", 16, 0), Storage("temp", 20 if view.offset else 16)],
            [View(0, "float32", (2, 2), (2, 1)), view],
            [Op("aten.neg.default", (TensorRef(0),), (), (1,))],
        )
        refused(program, "stride is|bytes")


def test_in_place_operators_must_return_the_argument_itself():
    states = [Storage("input", 16, 0), Storage("state", 32, 0), Storage("temp", 16)]
    views = [
        View(0, "float32", (4,), (1,)), View(1, "float32", (4,), (1,)), View(1, "float32", (4,), (1,), 4),
        View(2, "float32", (4,), (1,)),
    ]  # fmt: skip

    def in_place(out: int) -> Program:
        return program_of(states[: 3 if out == 3 else 2], views[: 4 if out == 3 else 3],
                          [Op("aten.add_.Tensor", (TensorRef(1), TensorRef(0)), (), (out,))])  # fmt: skip

    check(encode(in_place(1)))
    refused(in_place(2), "offset is 0, declared is 4")
    refused(in_place(0), "lies on storage 1, 0 is declared")
    refused(in_place(3), "lies on storage 1, 2 is declared")


def test_new_memory_cant_be_declared_on_an_argument():
    program = program_of(
        [Storage("input", 16, 0)],
        [View(0, "float32", (4,), (1,))],
        [Op("aten.neg.default", (TensorRef(0),), (), (0,))],
    )
    refused(program, "new memory is returned")


def test_views_that_stay_operators_are_held_to_the_arguments_storage():
    def strided(size: tuple[int, ...], stride: tuple[int, ...], offset: int, view: View) -> Program:
        op = Op("aten.as_strided.default", (TensorRef(0), size, stride, offset), (), (1,))
        return program_of([Storage("input", 16, 0)], [View(0, "float32", (4,), (1,)), view], [op])

    check(encode(strided((2,), (2,), 1, View(0, "float32", (2,), (2,), 1))))
    refused(strided((2,), (2,), 1, View(0, "float32", (2,), (2,), 0)), "offset")
    refused(strided((1000,), (1,), 0, View(0, "float32", (4,), (1,), 0)), "size")
    refused(strided((1000,), (1,), 0, View(0, "float32", (1000,), (1,), 0)), "reaches byte")
    copy = program_of(
        [Storage("input", 16, 0), Storage("temp", 16)],
        [View(0, "float32", (4,), (1,)), View(1, "float32", (4,), (1,))],
        [Op("aten.alias.default", (TensorRef(0),), (), (1,))],
    )
    refused(copy, "lies on storage 0, 1 is declared")


def test_constants_cant_be_changed():
    b = ProgramBuilder()
    view = b.add_view(b.add_const(bytes(16)), "float32", (4,))
    b.add_op("aten.add_.Scalar", TensorRef(view), 1, outs=(view,))
    refused(b.build(), "changes a constant")
    b = ProgramBuilder()
    x = b.input("float32", (2, 4))
    view = b.add_view(b.add_const(bytes(16)), "float32", (4,))
    b.add_op("aten.native_batch_norm.default", x, None, None, TensorRef(view), TensorRef(view), True, 0.1, 1e-5,
             outs=(None, None, None))  # fmt: skip
    refused(b.build(), "changes a constant")


def test_lists_must_be_declared_in_full():
    def split(*outs: object) -> Program:
        b = ProgramBuilder()
        x = b.input("float32", (4,))
        views = [b.add_tensor("temp", "float32", (2,)) for _ in range(2)]
        named = {"one": (views[0],), "both": tuple(views), "flat": views[0]}
        b.add_op("aten._foreach_neg.default", (x, x), outs=(named[outs[0]],))
        return replace(b.build(), storages=b.build().storages[: 3 if outs[0] == "both" else 2],
                       views=b.build().views[: 3 if outs[0] == "both" else 2])  # fmt: skip

    refused(split("one"), "a list of 2 tensors")
    refused(split("flat"), "a list of 2 tensors")
    refused(split("both"), "bytes")


def test_an_operator_that_asks_for_too_many_outputs_is_refused_before_it_runs():
    huge = View(0, "float32", (1 << 40,), (0,))
    program = program_of(
        [Storage("input", 4, 0)], [View(0, "float32", (1,), (1,)), huge],
        [Op("aten.unbind.int", (TensorRef(1),), (), ((),))],
    )  # fmt: skip
    refused(program, "may make 1099511627776 outputs")


def test_lazy_bits_cant_hide_in_an_added_operator():
    b = ProgramBuilder()
    x = b.input("complex64", (4,))
    b.add_op("aten._conj.default", x, outs=(x.view,))
    refused(b.build(), "allow-list")
    error = refused(b.build(), "lazily", extra_ops=("aten._conj.default",))
    assert "resolve_conj" in error.remedy


# ---- shapes that kernels believe -----------------------------------------------------------------


def test_short_statistics_are_refused():
    """native_layer_norm_backward reads past short statistics; fake execution does not notice."""

    def backward(rows: int) -> Program:
        b = ProgramBuilder()
        x, g = b.input("float32", (4, 8)), b.input("float32", (4, 8))
        mean, rstd = b.input("float32", (rows, 1)), b.input("float32", (rows, 1))
        w = b.state("float32", (8,))
        outs = [b.add_tensor("temp", "float32", size) for size in ((4, 8), (8,))]
        b.add_op("aten.native_layer_norm_backward.default", g, x, (8,), mean, rstd, w, None, (True, True, False),
                 outs=(*outs, None))  # fmt: skip
        return b.build()

    check(encode(backward(4)))
    refused(backward(1), "the kernel reads 4")


def test_pooling_indices_must_match_the_gradient():
    b = ProgramBuilder()
    grad, x, indices = (
        b.input("float32", (1, 1, 2, 2)),
        b.input("float32", (1, 1, 4, 4)),
        b.input("int64", (1, 1, 1, 1)),
    )
    b.call("aten.max_pool2d_with_indices_backward.default", grad, x, (2, 2), (2, 2), (0, 0), (1, 1), False, indices,
           size=(1, 1, 4, 4))  # fmt: skip
    refused(b.build(), "differ in size")


def test_batch_norm_statistics_must_have_a_number_a_channel():
    def norm(channels: int) -> Program:
        b = ProgramBuilder()
        x = b.input("float32", (2, 3, 4))
        stats = [b.state("float32", (channels,)) for _ in range(4)]
        outs = [b.add_tensor("temp", "float32", size) for size in ((2, 3, 4), (3,), (3,))]
        b.add_op("aten.native_batch_norm.default", x, *stats, True, 0.1, 1e-5, outs=outs)
        return b.build()

    check(encode(norm(3)))
    refused(norm(2), "the kernel reads 3")


# ---- the rest ------------------------------------------------------------------------------------


def test_shapes_that_do_not_fit_are_torchs_to_refuse():
    b = ProgramBuilder()
    x, y = b.input("float32", (4, 3)), b.input("float32", (4, 3))
    b.call("aten.mm.default", x, y, size=(4, 3))
    error = refused(b.build(), "torch refuses the call")
    assert "%i0:f32[4,3]" in error.message


def test_a_refused_program_does_not_fill_the_log(caplog):
    refused(one_op("aten.div.Tensor_mode", "x", TENSOR, rounding_mode="up"), "rounding_mode")
    assert caplog.records == []
    assert not logging.getLogger("torch._subclasses.fake_tensor").disabled


def test_limits_reach_the_decoder():
    refused(samples.sgd_linear(), "malformed|limit", limits=ProgramLimits(ops=3))


def test_operators_whose_size_depends_on_data_are_refused():
    b = ProgramBuilder()
    x, mask = b.input("float32", (4,)), b.input("bool", (4,))
    b.call("aten.index.Tensor", x, (mask,), size=(2,))
    refused(b.build(), "torch refuses the call")


@settings(deadline=None, max_examples=40)
@given(programs(max_ops=6))
def test_any_well_formed_program_passes_or_is_a_program_error(program):
    encoded = encode(program)
    try:
        report = check(encoded)
    except ProgramError:
        return
    assert encode(report.program) == encoded
