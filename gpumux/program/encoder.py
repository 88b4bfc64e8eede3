"""Program to bytes (codec.py says how they look), and the tables both directions share."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from typing import Any, Literal, cast, get_args

import msgpack

from gpumux.errors import ProgramError
from gpumux.program.ir import (
    IR_VERSION,
    ITEM_BYTES,
    Arg,
    Complex,
    Numerics,
    Op,
    Program,
    ScalarRef,
    StorageKind,
    Tag,
    TensorRef,
)

HEADER = struct.Struct(">4sHI")
# Versions of the encoding: without layers, with them, with a generator (and layers), with a conv_precision (and all of
# these).
PLAIN, LAYERED, DRAWING, CONVOLVING = 1, 2, 3, 4
CONV_PRECISION = Numerics().conv_precision  # of Programs of the versions before
MAGIC = b"gpux"

# Wire numbers. Append only: a number once given never changes its meaning.
STORAGE_KINDS: tuple[StorageKind, ...] = ("state", "input", "const", "temp")
DTYPES = (
    "bool", "uint8", "int8", "int16", "int32", "int64",
    "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
)  # fmt: skip
TAG_KINDS: tuple[Literal["dtype", "layout", "memory_format", "device"], ...] = (
    "dtype", "layout", "memory_format", "device",
)  # fmt: skip
GATE_KINDS: tuple[Literal["wait", "signal"], ...] = ("wait", "signal")
SCALAR_KINDS: tuple[Literal["float", "int"], ...] = ("float", "int")
TUPLE, TENSOR, SCALAR, TAG, COMPLEX, TENSORS = range(6)  # first entry of a tagged argument

_STORAGE_CODE = {kind: code for code, kind in enumerate(STORAGE_KINDS)}
_DTYPE_CODE = {name: code for code, name in enumerate(DTYPES)}
_TAG_CODE = {kind: code for code, kind in enumerate(TAG_KINDS)}
_GATE_CODE = {kind: code for code, kind in enumerate(GATE_KINDS)}
_SCALAR_CODE = {kind: code for code, kind in enumerate(SCALAR_KINDS)}
assert set(DTYPES) == set(ITEM_BYTES)
assert set(STORAGE_KINDS) == set(get_args(StorageKind))

INT64 = range(-(1 << 63), 1 << 63)


def malformed(what: str) -> ProgramError:
    return ProgramError(f"malformed Program: {what}", "send one made by gpumux.program.codec.encode")


def encode(program: Program) -> bytes:
    """The canonical bytes of `program`. Raises ProgramError for what the encoding can't say."""
    return b"".join(_parts(program))


def content_hash(program: Program) -> str:
    """sha256 of the canonical encoding, as 64 hex digits."""
    digest = hashlib.sha256()
    for part in _parts(program):
        digest.update(part)
    return digest.hexdigest()


def _parts(program: Program) -> list[bytes]:
    if program.version != IR_VERSION:
        raise malformed(f"version {program.version!r}, this gpumux writes {IR_VERSION}")
    body = _body(program)
    return [HEADER.pack(MAGIC, _version(program), len(body)), body, *program.consts]


def _version(program: Program) -> int:
    """The first that can say all of it: a Program without anything new keeps its bytes and its hash."""
    if program.numerics.conv_precision != CONV_PRECISION:
        return CONVOLVING
    if program.generator is not None:
        return DRAWING
    return LAYERED if program.layers or program.spans else PLAIN


def _body(program: Program) -> bytes:
    names: dict[str, int] = {}
    n = program.numerics
    version = _version(program)
    settings = [n.matmul_precision, n.deterministic, n.flush_denormal, n.mkldnn, n.default_dtype]
    try:
        # Operators first: they fill the table of names.
        ops = [_encode_op(op, names) for op in program.ops]
        body: list[object] = [
            program.kind,
            program.device,
            settings if version < CONVOLVING else [*settings, n.conv_precision],
            [(_STORAGE_CODE[s.kind], s.nbytes, s.slot) for s in program.storages],
            list(names),
            [(v.storage, _DTYPE_CODE[v.dtype], v.offset, *v.size, *v.stride) for v in program.views],
            ops,
            program.inputs,
            program.results,
            [_SCALAR_CODE[kind] for kind in program.scalars],
            [len(data) for data in program.consts],
            [(g.op, _GATE_CODE[g.kind], g.name) for g in program.gates],
        ]
        if version >= LAYERED:
            body += [program.layers, [(s.first, s.count, s.layer, int(s.backward)) for s in program.spans]]
        if version >= DRAWING:
            body.append(program.generator)
        packed: bytes = msgpack.packb(body)
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as e:
        raise ProgramError(f"this Program can't be encoded: {type(e).__name__}: {e}") from e
    if len(packed) >= 1 << 32:
        raise ProgramError("this Program can't be encoded: its body is larger than 4 GiB")
    return packed


def _encode_op(op: Op, names: dict[str, int]) -> list[object]:
    target = names.setdefault(op.target, len(names))
    args = [_encode_arg(a) for a in op.args]
    kwargs: list[object] = []
    for name, value in op.kwargs:
        kwargs += (names.setdefault(name, len(names)), _encode_arg(value))
    call: list[object] = [target, args, kwargs, op.outs, op.random]
    return call if op.stream is None else [*call, op.stream]


def _encode_int(value: int) -> int:
    if value not in INT64:
        raise ProgramError(f"the integer {value} does not fit in 64 bits", "keep integer arguments within int64")
    return value


def _encode_tuple(items: tuple[Arg, ...]) -> list[object]:
    # Lists of tensors are long in foreach optimizers, hence a form of their own.
    if items and set(map(type, items)) == {TensorRef}:
        return [TENSORS, *[item.view for item in cast("tuple[TensorRef, ...]", items)]]
    return [TUPLE, *map(_encode_arg, items)]


_ENCODERS: dict[type, Callable[[Any], object]] = {
    bool: lambda a: a,
    float: lambda a: a,
    str: lambda a: a,
    type(None): lambda a: a,
    int: _encode_int,
    tuple: _encode_tuple,
    TensorRef: lambda a: (TENSOR, a.view),
    ScalarRef: lambda a: (SCALAR, a.index),
    Tag: lambda a: (TAG, _TAG_CODE[a.kind], a.name),
    Complex: lambda a: (COMPLEX, float(a.re), float(a.im)),
}


def _encode_arg(arg: Arg) -> object:
    encoder = _ENCODERS.get(type(arg))
    if encoder is None:
        raise ProgramError(f"an argument of type {type(arg).__name__} can't be part of a Program")
    return encoder(arg)
