"""The builder and the listing."""

from __future__ import annotations

from gpumux.program.codec import content_hash, encode
from gpumux.program.ir import Collective, Complex, ProgramBuilder, ScalarRef, Tag, contiguous_strides
from gpumux.program.validate import describe, describe_op, validate
from tests.program import samples


def test_builder_makes_what_a_hand_makes():
    b = ProgramBuilder()
    x = b.input("float32", (4,))
    b.result(b.call("aten.add.Scalar", x, 1, size=(4,)))
    assert b.build() == samples.add_one()

    b = ProgramBuilder()
    total = b.state("float32", (1,))
    b.add_op("aten.add_.Scalar", total, b.scalar(), outs=(total.view,))
    b.result(total)
    assert content_hash(encode(b.build())) == content_hash(encode(samples.counter()))


def test_views_and_constants_are_kept_once():
    b = ProgramBuilder()
    one, two = b.add_const(b"abcd"), b.add_const(b"efgh")
    assert b.add_const(b"abcd") == one != two
    assert b.add_view(one, "int32", (1,)) == b.add_view(one, "int32", [1], (1,), 0)
    assert b.add_view(two, "int32", (1,)) != b.add_view(one, "int32", (1,))
    program = b.build()
    assert program.consts == (b"abcd", b"efgh")
    validate(program)


def test_contiguous_strides():
    assert contiguous_strides((2, 3, 4)) == (12, 4, 1)
    assert contiguous_strides(()) == ()
    assert contiguous_strides((2, 0, 3)) == (3, 3, 1)


def test_a_listing_says_everything():
    b = ProgramBuilder(ranks=2)
    x = b.input("float32", (2, 3))
    t = b.add_view(0, "float32", (3, 2), (1, 3))
    k = b.scalar("int")
    parts = [b.add_tensor("temp", "bfloat16", (1,)) for _ in range(2)]
    kwargs = {"dtype": Tag("dtype", "int8"), "device": Tag("device", ""), "z": Complex(1.0, -2.0)}
    b.add_op("aten.x.default", x, (1, None), ScalarRef(k.index), "s", kwargs=kwargs, outs=(tuple(parts), None, t))
    b.add_op("aten.y.default", random=3)
    b.collective(Collective(1, "all_reduce", 0, (0, 1), (0,)))
    b.result(parts[0])
    program = b.build()
    text = describe(program)
    assert (
        describe_op(program, 0)
        == "    0  [%1:bf16[1], %2:bf16[1]], _, %i0:f32[3,2]/1,3@0 = aten.x.default(%i0:f32[2,3], [1, None], scalar0,"
        " 's', device=device, dtype=dtype:int8, z=(1.0-2.0j))"
    )
    assert "() = aten.y.default() random 3" in text
    assert "all_reduce 0 with ranks 0, 1" in text
    assert "result 0: %1:bf16[1]" in text
    assert "... 1 more" in describe(program, limit=1)
