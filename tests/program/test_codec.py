"""The encoding: exact, canonical, frozen, and closed to all other bytes."""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import replace

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpumux.errors import ProgramError
from gpumux.program.codec import content_hash, decode, encode
from gpumux.program.ir import (
    DEFAULT,
    Complex,
    Label,
    Numerics,
    Op,
    Program,
    ProgramLimits,
    ScalarRef,
    Span,
    Storage,
    Tag,
    TensorRef,
    View,
    Wave,
    labels,
    spans,
)
from gpumux.program.memory import plan
from gpumux.program.validate import describe, validate
from tests.program import samples
from tests.program.strategies import programs

HEADER = 10  # bytes before the body


def body_of(data: bytes) -> list:
    length = struct.unpack_from(">4sHI", data)[2]
    return msgpack.unpackb(data[HEADER : HEADER + length])


def framed(body: object, consts: bytes = b"", version: int = 1) -> bytes:
    packed = body if isinstance(body, bytes) else msgpack.packb(body)
    return struct.pack(">4sHI", b"gpux", version, len(packed)) + packed + consts


def exact(value: object) -> object:
    """A form that distinguishes 1 from 1.0 from True, and compares NaN and -0.0 by their bits."""
    if isinstance(value, float):
        return struct.pack(">d", value)
    if isinstance(value, tuple):
        return tuple(map(exact, value))
    if hasattr(value, "__slots__"):
        return (type(value), *[exact(getattr(value, name)) for name in value.__slots__])
    return (type(value), value)


@settings(deadline=None, max_examples=40)
@given(programs())
def test_round_trip_is_exact(program):
    data = encode(program)
    assert exact(decode(data)) == exact(program)
    assert encode(decode(data)) == data
    assert content_hash(encode(program)) == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("name", samples.ALL)
def test_samples_round_trip_and_hash_by_content(name):
    program = samples.ALL[name]()
    assert decode(encode(program)) == program == samples.ALL[name]()
    assert content_hash(encode(program)) == content_hash(encode(samples.ALL[name]()))
    others = [content_hash(encode(f())) for other, f in samples.ALL.items() if other != name]
    assert content_hash(encode(program)) not in others


def test_known_answer():
    """Version 1 of the encoding, frozen: a change here is a new version, not an edit of this test."""
    b = (Storage("input", 8, 0), Storage("const", 2, 0), Storage("temp", 8), Storage("state", 4, 0))
    views = (View(0, "float32", (2,), (1,)), View(2, "float32", (1, 2), (2, 1), 0), View(3, "int32", (), ()))
    program = Program(
        storages=b,
        views=views,
        ops=(
            Op(
                "aten.x.default",
                (TensorRef(0), ScalarRef(0), (1, -2), (TensorRef(0), TensorRef(2)), (), None, True, 1.5, "s", 1 << 40),
                (("alpha", Complex(1.0, -0.0)), ("dtype", Tag("dtype", "int8"))),
                (1, None, (1,)),
                0,
            ),
        ),
        inputs=(0,),
        results=(1,),
        scalars=("float", "int"),
        consts=(b"\x00\xff",),
        numerics=Numerics(deterministic=True),
    )
    assert encode(program).hex() == KNOWN


KNOWN = (
    "677075780001000000b79ca46174656ea363707595a768696768657374c3c2c3a7666c6f6174333294930108009302020093"
    "0308ff9300040093ae6174656e2e782e64656661756c74a5616c706861a56474797065939500080002019702080001020201"
    "930304009195009a920100920200930001fe930500029100c0c3cb3ff8000000000000a173cf000001000000000094019304"
    "cb3ff0000000000000cb800000000000000002930300a4696e74389301c09101009100910192000191029000ff"
)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.0, 5e-324, 1.7976931348623157e308, 0.1])
def test_floats_are_exact(value):
    program = Program((), (), (Op("aten.x.default", (value,)),), (), ())
    (back,) = decode(encode(program)).ops[0].args
    assert struct.pack(">d", back) == struct.pack(">d", value)


@pytest.mark.parametrize("value", [1 << 63, -(1 << 63) - 1, 1 << 64, 1 << 100])
def test_integers_beyond_64_bits_are_refused(value):
    for arg in (value, (value, 1)):
        with pytest.raises(ProgramError, match="64 bits"):
            encode(Program((), (), (Op("aten.x.default", (arg,)),), (), ()))
    if value == 1 << 63:  # msgpack can say this one, so the reader has to refuse it too
        good = body_of(encode(Program((), (), (Op("aten.x.default", (1,)),), (), ())))
        good[6][0][1] = [value]
        with pytest.raises(ProgramError, match="64 bits"):
            decode(framed(good))


def test_arguments_of_other_types_are_refused():
    for arg in ([1], {"a": 1}, b"x", object(), 1j):
        with pytest.raises(ProgramError):
            encode(Program((), (), (Op("aten.x.default", (arg,)),), (), ()))


def test_equal_looking_numbers_hash_apart():
    hashes = {content_hash(encode(Program((), (), (Op("aten.x.default", (v,)),), (), ()))) for v in (1, 1.0, True)}
    assert len(hashes) == 3


LAYERS = replace(samples.add_one(), layers=("features.0",), spans=(Span(0, 1, 0, True),))


def test_layers_make_another_version_and_nothing_else():
    """A Program without them keeps the encoding of earlier versions, for every reader."""
    plain, data = encode(samples.add_one()), encode(LAYERS)
    assert (plain[5], data[5]) == (1, 2)
    assert body_of(data) == [*body_of(plain), ["features.0"], [[0, 1, 0, 1]]]
    assert decode(data) == LAYERS
    assert content_hash(encode(LAYERS)) != content_hash(encode(samples.add_one()))
    assert "'features.0', backward, 1 ops" in describe(LAYERS)
    assert labels(LAYERS) == [Label("features.0", True)]


def test_a_precision_of_convolutions_makes_another_version_and_nothing_else():
    plain, data = encode(samples.add_one()), encode(samples.full_precision())
    assert (plain[5], data[5]) == (1, 4)
    settings, body = body_of(plain)[2], body_of(plain)
    body[2] = [*settings, "ieee"]
    assert body_of(data) == [*body, [], [], None]
    assert decode(data) == samples.full_precision()
    drawing = replace(samples.given_generator(), numerics=Numerics(conv_precision="ieee"))
    assert decode(encode(drawing)) == drawing
    assert body_of(encode(drawing))[-1] == drawing.generator


@pytest.mark.parametrize(
    ("conv", "generator"),
    [(["tf32"], None), ([], None), (["ieee", 1], None), ([7], None), (["ieee"], -1), (["ieee"], "a")],
)
def test_ill_formed_precisions_are_program_errors(conv, generator):
    body = body_of(encode(samples.full_precision()))
    body[2], body[-1] = [*body[2][:5], *conv], generator
    with pytest.raises(ProgramError):
        decode(framed(body, version=4))


def test_a_wave_makes_another_version_with_its_lane_and_tail():
    plain = replace(samples.add_one(), ops=samples.add_one().ops * 2)
    wave = replace(plain, wave=Wave(1, 1))
    data = encode(wave)
    assert data[5] == 6
    assert body_of(data)[-4:] == [0, 1, 1, 1]
    assert decode(data) == wave
    assert content_hash(data) != content_hash(encode(replace(plain, wave=Wave(0, 1))))
    for entries in ([-1, 1], [0, -1], [0, "a"], [0], [0, 1, 2]):
        with pytest.raises(ProgramError):
            decode(framed([*body_of(data)[:-2], *entries], version=6))


def test_earlier_versions_have_no_precision_of_convolutions():
    for sample in (samples.add_one, samples.layered, samples.given_generator):
        data = encode(sample())
        body = body_of(data)
        body[2].append("ieee")
        with pytest.raises(ProgramError, match="an array of 6"):
            decode(framed(body, version=data[5]))


@pytest.mark.parametrize(
    ("layers", "rows"),
    [([], []), ([], [[0, 1, 0, 0]]), ("a", [[0, 1, 0, 0]]), ([7], [[0, 1, 0, 0]]), (["a" * 257], [[0, 1, 0, 0]]),
     (["a"], [[0, 1, 0, 2]]), (["a"], [[0, 1, 0]]), (["a"], [[0, 1, -1, 0]]), (["a"], [[0, 1, 0, False]]), (["a"], 7)],
)  # fmt: skip
def test_ill_formed_layers_are_program_errors(layers, rows):
    body = [*body_of(encode(samples.add_one())), layers, rows]
    with pytest.raises(ProgramError):
        decode(framed(body, version=2))
    with pytest.raises(ProgramError):
        decode(framed(body))


def test_what_no_program_can_hold_is_left_out_of_the_layers():
    many = [Label(f"l{i}") for i in range(DEFAULT.layers + 2)]
    layers, found = spans([None, Label("a" * 257), Label("b"), Label("b"), Label("b", True), *many], 3)
    assert (len(layers), layers[:2]) == (DEFAULT.layers, ("b", "l0"))
    assert found[:2] == (Span(5, 2, 0), Span(7, 1, 0, True))


def test_a_newer_version_is_named():
    data = bytearray(encode(samples.add_one()))
    data[5] = 7
    with pytest.raises(ProgramError, match="version 7"):
        decode(bytes(data))
    with pytest.raises(ProgramError, match="version"):
        encode(replace(samples.add_one(), version=2))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"gpux",
        b"GPUX\0\1\0\0\0\0",
        framed(b""),
        framed(b"\xc0"),
        framed([]),
        framed([None] * 12),
        framed({}),
        framed(b"\x91" * 5000),
        framed(b"\xdd\xff\xff\xff\xff"),
        framed(b"\xc6\xff\xff\xff\xff"),
        framed(b"\xd4\x01\x00"),
        framed([*body_of(encode(samples.empty())), 0]),
        framed(body_of(encode(samples.empty())), b"trailing"),
        encode(samples.add_one())[:-1],
        encode(samples.add_one()) + b"\0",
    ],
)
def test_other_bytes_are_program_errors(data):
    with pytest.raises(ProgramError):
        decode(data)


def changed(program: Program, path: list[int], value: object) -> bytes:
    body = body_of(encode(program))
    at = body
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    return framed(body, b"".join(program.consts))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ([0], "cuda"),  # kind
        ([2, 1], 1),  # a flag that is a number
        ([3, 0, 0], 4),  # a storage kind past the table
        ([3, 0, 0], -1),
        ([3, 0, 1], -1),
        ([3, 0, 1], True),
        ([3, 0, 2], -2),
        ([3, 0], [1, 2]),
        ([5, 0, 1], 99),  # a dtype past the table
        ([5, 0, 2], -1),
        ([5, 0], [0, 8]),
        ([5, 0], [0, 8, 0, 4]),  # a size without its stride
        ([4], ["aten.add.Scalar", "unused"]),
        ([4], ["aten.add.Scalar", "aten.add.Scalar"]),
        ([6, 0, 0], 1),  # a name past the table
        ([6, 0, 0], -1),
        ([6, 0, 1, 0], [9, 0]),  # an unknown tag
        ([6, 0, 1, 0], [1, True]),
        ([6, 0, 1, 0], [1, -1]),
        ([6, 0, 1, 0], []),
        ([6, 0, 1, 0], [0, [1, 0]]),  # a list of tensors in the long form
        ([6, 0, 1, 0], [0, [0, [0, [0, [0, [0]]]]]]),
        ([6, 0, 1, 0], [3, 9, "x"]),
        ([6, 0, 1, 0], [4, 1, 2]),  # a complex number of integers
        ([6, 0, 1, 0], [5]),
        ([6, 0, 2], [0]),  # a keyword without a value
        ([6, 0, 3], [True]),
        ([6, 0, 4], -1),
        ([7], [-1]),
        ([9], [7]),
        ([10], [3]),  # announces constants that do not follow
    ],
)
def test_ill_formed_parts_are_program_errors(path, value):
    with pytest.raises(ProgramError):
        decode(changed(samples.add_one(), path, value))


def test_numbers_must_be_in_shortest_form():
    data = encode(samples.counter())
    body = data[HEADER:]
    long = body.replace(msgpack.packb("aten"), b"\xd9\x04aten", 1)
    assert long != body
    with pytest.raises(ProgramError, match="shortest"):
        decode(framed(long))


@pytest.mark.parametrize(
    ("limits", "program"),
    [
        (ProgramLimits(ops=2), samples.sgd_linear()),
        (ProgramLimits(views=2), samples.sgd_linear()),
        (ProgramLimits(storages=2), samples.sgd_linear()),
        (ProgramLimits(tensors=1), samples.sgd_linear()),
        (ProgramLimits(names=2), samples.sgd_linear()),
        (ProgramLimits(string=5), samples.sgd_linear()),
        (ProgramLimits(dims=1), samples.sgd_linear()),
        (ProgramLimits(body_bytes=100), samples.sgd_linear()),
        (ProgramLimits(const_bytes=2), Program((Storage("const", 3, 0),), (), (), (), (), consts=(b"abc",))),
    ],
)
def test_limits_hold(limits, program):
    assert decode(encode(program), DEFAULT) == program
    with pytest.raises(ProgramError):
        decode(encode(program), limits)


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_mutated_bytes_never_do_more_than_raise_program_error(data):
    program = data.draw(st.one_of(programs(max_ops=4), st.sampled_from([f() for f in samples.ALL.values()])))
    raw = bytearray(encode(program))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        kind = data.draw(st.sampled_from(["set", "flip", "drop", "insert"]))
        if kind == "set":
            raw[at] = data.draw(st.integers(0, 255))
        elif kind == "flip":
            raw[at] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "drop" and len(raw) > 1:
            del raw[at]
        else:
            raw.insert(at, data.draw(st.integers(0, 255)))
    _must_be_closed(bytes(raw))


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=200))
@example(b"")
def test_arbitrary_bodies_never_do_more_than_raise_program_error(noise):
    _must_be_closed(noise)
    _must_be_closed(framed(noise))


def _must_be_closed(raw: bytes) -> None:
    try:
        program = decode(raw)
    except ProgramError:
        return
    assert encode(program) == raw, "what decodes is canonical"
    try:
        validate(program)
    except ProgramError:
        return
    plan(program)
    describe(program)


def test_five_thousand_operators_stay_small():
    """Size, not time: about 60 bytes an operator, so that parsing stays a matter of milliseconds."""
    step = samples.sgd_linear()
    shift = 0
    views, storages, ops = list(step.views), list(step.storages), list(step.ops)
    while len(ops) < 5000:
        shift += 1
        ops.append(Op("aten.mul_.Scalar", (*step.ops[-1].args[:1], shift), (), step.ops[-1].outs))
    big = Program(tuple(storages), tuple(views), tuple(ops), step.inputs, step.results, step.scalars)
    data = encode(big)
    assert len(data) < 5000 * 20
    assert decode(data) == big
