"""Programs to bytes and back (the form is described below, "Programs as bytes"). Input to `decode` may be hostile."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, cast, get_args

import msgpack

from gpumux.errors import ProgramError
from gpumux.program.ir import (
    DEFAULT,
    IR_VERSION,
    ITEM_BYTES,
    Arg,
    Collective,
    CollectiveKind,
    Complex,
    Numerics,
    Op,
    Out,
    Program,
    ProgramLimits,
    ScalarRef,
    SlotLayout,
    Span,
    Storage,
    StorageKind,
    Tag,
    TensorRef,
    View,
    Wave,
    slot_layout,
)

# ---- Program to bytes, and the tables that both directions share.


HEADER = struct.Struct(">4sHI")
# Versions of the encoding: without layers, with layers, also with a generator, also with a conv_precision, for one of
# several ranks, for one of two waves.
PLAIN, LAYERED, DRAWING, CONVOLVING, RANKED, WAVING = 1, 2, 3, 4, 5, 6
CONV_PRECISION = Numerics().conv_precision  # of Programs of earlier versions
MAGIC = b"gpux"

# Wire numbers. Append only: a number never changes its meaning.
STORAGE_KINDS: tuple[StorageKind, ...] = ("state", "input", "const", "temp")
DTYPES = (
    "bool", "uint8", "int8", "int16", "int32", "int64",
    "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
)  # fmt: skip
TAG_KINDS: tuple[Literal["dtype", "layout", "memory_format", "device"], ...] = (
    "dtype", "layout", "memory_format", "device",
)  # fmt: skip
COLLECTIVE_KINDS: tuple[CollectiveKind, ...] = ("all_reduce", "exchange")
SCALAR_KINDS: tuple[Literal["float", "int"], ...] = ("float", "int")
TUPLE, TENSOR, SCALAR, TAG, COMPLEX, TENSORS = range(6)  # first entry of a tagged argument

_STORAGE_CODE = {kind: code for code, kind in enumerate(STORAGE_KINDS)}
_DTYPE_CODE = {name: code for code, name in enumerate(DTYPES)}
_TAG_CODE = {kind: code for code, kind in enumerate(TAG_KINDS)}
_COLLECTIVE_CODE = {kind: code for code, kind in enumerate(COLLECTIVE_KINDS)}
_SCALAR_CODE = {kind: code for code, kind in enumerate(SCALAR_KINDS)}
assert set(DTYPES) == set(ITEM_BYTES)
assert set(STORAGE_KINDS) == set(get_args(StorageKind))

INT64 = range(-(1 << 63), 1 << 63)


def malformed(what: str) -> ProgramError:
    return ProgramError(f"malformed Program: {what}", "send one made by gpumux.program.codec.encode")


def encode(program: Program) -> bytes:
    """The canonical bytes of `program`. Raises ProgramError if the encoding can't express it."""
    if program.version != IR_VERSION:
        raise malformed(f"version {program.version!r}, this gpumux writes {IR_VERSION}")
    body = _body(program)
    return b"".join([HEADER.pack(MAGIC, _version(program), len(body)), body, *program.consts])


def content_hash(encoded: bytes) -> str:
    """sha256 of a Program's canonical bytes, as 64 hex digits."""
    return hashlib.sha256(encoded).hexdigest()


def _version(program: Program) -> int:
    """The lowest version that can express the Program: without new features its bytes and hash stay the same."""
    if program.wave is not None:
        return WAVING
    if program.ranks != 1 or program.rank or program.collectives:
        return RANKED
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
            [_encode_collective(c) for c in program.collectives],
        ]
        if version >= LAYERED:
            body += [program.layers, [(s.first, s.count, s.layer, int(s.backward)) for s in program.spans]]
        if version >= DRAWING:
            body.append(program.generator)
        if version >= RANKED:
            body += [program.rank, program.ranks]
        if program.wave is not None:
            body += [program.wave.lane, program.wave.tail]
        packed: bytes = msgpack.packb(body)
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as e:
        raise ProgramError(f"this Program can't be encoded: {type(e).__name__}: {e}") from e
    if len(packed) >= 1 << 32:
        raise ProgramError("this Program can't be encoded: its body is larger than 4 GiB")
    return packed


def _encode_collective(one: Collective) -> list[object]:
    flat = [list(chain.from_iterable(pairs)) for pairs in (one.sends, one.receives)]
    kind = _COLLECTIVE_CODE[one.kind]
    return [one.op, kind, one.sequence, one.members, one.views, float(one.scale), *flat]


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
    # Lists of tensors are long in foreach optimizers, hence they have a form of their own.
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


# ---- Bytes to Program.


_ONLY_INT, _ONLY_LIST = {int}, {list}
_LENGTHS = {PLAIN: 12, LAYERED: 14, DRAWING: 15, CONVOLVING: 15, RANKED: 17, WAVING: 19}  # of the body, by version


def decode(data: bytes, limits: ProgramLimits = DEFAULT) -> Program:
    """The Program that `encode` made `data` from. Raises ProgramError for any other bytes. Checks form only: what the
    numbers refer to is checked by `validate.validate`."""
    if len(data) < HEADER.size:
        raise malformed("shorter than its header")
    magic, version, length = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise malformed("not an encoded Program")
    if version not in _LENGTHS:
        raise ProgramError(
            f"a Program of encoding version {version}; this gpumux reads versions {PLAIN} to {WAVING}",
            "run the same gpumux version at both ends",
        )
    end = HEADER.size + length
    if length > limits.body_bytes or end > len(data):
        raise malformed(
            f"a body of {length} bytes; {len(data) - HEADER.size} follow and the limit is {limits.body_bytes}"
        )
    body = bytes(data[HEADER.size : end])
    try:
        program = _Decoder(limits).program(_unpack(body, limits), data, end, version)
    except (IndexError, ValueError) as e:
        raise ProgramError("malformed Program: an array of the wrong length, or a number past its table") from e
    return program


def _unpack(body: bytes, limits: ProgramLimits) -> Any:
    longest = max(limits.ops, limits.views, limits.storages, limits.tensors)
    try:
        value = msgpack.unpackb(
            body,
            # Lists: their declared lengths reserve address space, not memory.
            use_list=True,
            max_str_len=4 * limits.string,
            max_bin_len=0,
            max_array_len=min(longest, len(body)),
            max_map_len=0,
            max_ext_len=0,
        )
        canonical = msgpack.packb(value) == body
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as e:
        raise ProgramError(f"malformed Program: {type(e).__name__}: {e}") from e
    if not canonical:
        raise malformed("numbers or lengths are not in their shortest form")
    return value


def _index(value: int) -> int:
    if value < 0:
        raise malformed("a negative number where an index or a size belongs")
    return value


class _Decoder:
    """Turns msgpack's lists into the intermediate form. An index past a wire table is an IndexError,
    which `decode` converts; `_nat` keeps negative ones from counting from the end."""

    def __init__(self, limits: ProgramLimits) -> None:
        self._limits = limits
        self._names: list[str] = []
        self._refs: dict[int, TensorRef] = {}
        self._named = 0  # number of names used so far

    def program(self, body: Any, data: bytes, at: int, version: int) -> Program:
        limits = self._limits
        body = self._list(body, _LENGTHS[version], exact=True)
        kind, device, numerics, storages, names, views, ops, inputs, results, scalars, lengths, collectives, *rest = (
            body
        )
        layers, spans = rest[:2] or ([], [])
        rank, ranks = (self._nat(rest[3]), self._nat(rest[4])) if version >= RANKED else (0, 1)
        if collectives and version < RANKED:
            raise malformed("collectives in a version without ranks")
        if version == RANKED and not collectives and (rank, ranks) == (0, 1):
            raise malformed("a version for several ranks, and one rank")
        if version == LAYERED and not layers:
            raise malformed("a version for layers, and no layer")
        if kind != "aten" and kind != "compiled":
            raise malformed(f"the kind {kind!r}")
        self._names = [self._text(name) for name in self._list(names, limits.names)]
        program = Program(
            storages=self._storages(storages),
            views=self._views(views),
            ops=tuple([self._op(op) for op in self._list(ops, limits.ops)]),
            inputs=self._nats(inputs, limits.tensors),
            results=self._nats(results, limits.tensors),
            scalars=tuple([SCALAR_KINDS[code] for code in self._nats(scalars, limits.tensors)]),
            consts=self._consts(self._nats(lengths, limits.tensors), data, at),
            collectives=tuple([self._collective(c) for c in self._list(collectives, limits.tensors)]),
            numerics=self._numerics(numerics, version),
            device=self._text(device),
            kind=kind,
            layers=tuple([self._text(name) for name in self._list(layers, limits.layers)]),
            spans=self._spans(spans),
            generator=self._generator(rest, version),
            rank=rank,
            ranks=ranks,
            wave=Wave(self._nat(rest[5]), self._nat(rest[6])) if version == WAVING else None,
        )
        if self._named != len(self._names) or len(set(self._names)) != len(self._names):
            raise malformed("the table of names has unused or repeated entries")
        return program

    def _list(self, value: Any, limit: int, exact: bool = False) -> list[Any]:
        if type(value) is not list:
            raise malformed(f"a {type(value).__name__} where an array belongs")
        if len(value) > limit or (exact and len(value) != limit):
            raise malformed(f"an array of {len(value)}, {'not' if exact else 'more than'} {limit}")
        return value

    def _text(self, value: Any) -> str:
        if isinstance(value, str) and len(value) <= self._limits.string:
            return value
        raise malformed(f"a string of at most {self._limits.string} characters is missing")

    def _nat(self, value: Any) -> int:
        if type(value) is not int or value < 0:
            raise malformed(f"{value!r:.40} where a number from 0 belongs")
        return value

    def _flag(self, value: Any) -> bool:
        if type(value) is not bool:
            raise malformed(f"{value!r:.40} where true or false belongs")
        return value

    def _nats(self, value: Any, limit: int) -> tuple[int, ...]:
        items = self._list(value, limit)
        if items and (set(map(type, items)) != _ONLY_INT or min(items) < 0):
            raise malformed("something else where only numbers from 0 belong")
        return tuple(items)

    def _name(self, value: Any) -> str:
        if self._nat(value) > self._named:
            raise malformed("the table of names is not in order of first use")
        self._named = max(self._named, value + 1)
        name: str = self._names[value]
        return name

    def _consts(self, lengths: tuple[int, ...], data: bytes, at: int) -> tuple[bytes, ...]:
        if sum(lengths) > self._limits.const_bytes:
            raise malformed(f"{sum(lengths)} bytes of constants; the limit is {self._limits.const_bytes}")
        if sum(lengths) != len(data) - at:
            raise malformed(f"{len(data) - at} bytes of constants, {sum(lengths)} announced")
        consts = []
        for length in lengths:
            consts.append(bytes(data[at : at + length]))
            at += length
        return tuple(consts)

    def _generator(self, rest: list[Any], version: int) -> int | None:
        if version < DRAWING or (version >= CONVOLVING and rest[2] is None):
            return None
        return self._nat(rest[2])

    def _numerics(self, value: Any, version: int) -> Numerics:
        length = 5 if version < CONVOLVING else 6
        precision, deterministic, flush, mkldnn, dtype, *conv = self._list(value, length, exact=True)
        flags = (self._flag(deterministic), self._flag(flush), self._flag(mkldnn))
        if version == CONVOLVING and conv[0] == CONV_PRECISION:
            raise malformed("a version for another precision of convolutions, and the usual one")
        return Numerics(self._text(precision), *flags, self._text(dtype), *map(self._text, conv))

    def _storages(self, value: Any) -> tuple[Storage, ...]:
        rows = self._table(value, self._limits.storages, lowest=-1)
        return tuple([Storage(STORAGE_KINDS[_index(code)], _index(nbytes), slot) for code, nbytes, slot in rows])

    def _views(self, value: Any) -> tuple[View, ...]:
        rows = self._table(value, self._limits.views, lowest=0)
        views = []
        for row in rows:
            end = (len(row) + 3) // 2
            views.append(View(row[0], DTYPES[row[1]], tuple(row[3:end]), tuple(row[end:]), row[2]))
            if len(row) % 2 == 0 or len(row) > 3 + 2 * self._limits.dims:
                raise malformed("a view whose sizes and strides differ in number, or of too many dimensions")
        return tuple(views)

    def _spans(self, value: Any) -> tuple[Span, ...]:
        rows = self._table(value, self._limits.ops, lowest=0)
        return tuple([Span(first, count, layer, (False, True)[code]) for first, count, layer, code in rows])

    def _table(self, value: Any, limit: int, lowest: int) -> list[list[int]]:
        """Rows of integers, checked in bulk: these tables are the longest parts of a Program."""
        rows = self._list(value, limit)
        if rows and set(map(type, rows)) != _ONLY_LIST:
            raise malformed("a row that is not an array")
        if not set(map(type, chain.from_iterable(rows))) <= _ONLY_INT:
            raise malformed("a row with something else than integers")
        if min(chain.from_iterable(rows), default=0) < lowest:
            raise malformed("a row with a negative number")
        return rows

    def _collective(self, value: Any) -> Collective:
        op, code, sequence, members, views, scale, sends, receives = self._list(value, 8, exact=True)
        if type(scale) is not float:
            raise malformed("a collective whose scale is no float")
        return Collective(
            self._nat(op), COLLECTIVE_KINDS[self._nat(code)], self._nat(sequence),
            self._nats(members, self._limits.ranks), self._nats(views, self._limits.tensors), scale,
            self._pairs(sends), self._pairs(receives),
        )  # fmt: skip

    def _pairs(self, value: Any) -> tuple[tuple[int, int], ...]:
        flat = self._nats(value, 2 * self._limits.tensors)
        if len(flat) % 2:
            raise malformed("a rank without a view")
        return tuple(zip(flat[::2], flat[1::2], strict=True))

    def _op(self, value: Any) -> Op:
        row = self._list(value, 6)
        if len(row) < 5:
            raise malformed("an operator of fewer than five parts")
        target, args, kwargs, outs, random, *stream = row
        name = self._name(target)
        flat = self._list(kwargs, 2 * self._limits.names)
        if len(flat) % 2:
            raise malformed("a keyword without a value")
        return Op(
            name,
            self._args(args, 0),
            tuple([(self._name(k), self._args([v], 0)[0]) for k, v in zip(flat[::2], flat[1::2], strict=True)]),
            tuple([self._out(o) for o in self._list(outs, self._limits.views)]),
            None if random is None else self._nat(random),
            self._nat(stream[0]) if stream else None,
        )

    def _out(self, value: Any) -> Out:
        if value is None:
            return None
        return self._nat(value) if type(value) is int else self._nats(value, self._limits.views)

    def _args(self, values: Any, depth: int) -> tuple[Arg, ...]:
        values = self._list(values, self._limits.views)
        if set(map(type, values)) <= _ONLY_INT:  # sizes, strides, paddings: most tuples
            if values and max(values) >= INT64.stop:
                raise malformed("an integer that does not fit in 64 bits")
            return tuple(values)
        return tuple(
            [v if v is None else self._tagged(v, depth) if type(v) is list else self._plain(v) for v in values]
        )

    def _plain(self, value: Any) -> Arg:
        kind = type(value)
        if kind is str:
            return self._text(value)
        if value is None or kind is bool or kind is float or (kind is int and value in INT64):
            return value  # type: ignore[no-any-return]
        raise malformed(f"an argument of type {kind.__name__}, or an integer that does not fit in 64 bits")

    def _tagged(self, value: list[Any], depth: int) -> Arg:
        tag, size = self._nat(value[0]), len(value)
        if tag == TENSOR and size == 2:
            return self._tensor(value[1])
        if tag == TENSORS and size > 1:
            return tuple([self._tensor(view) for view in value[1:]])
        if tag == TUPLE:
            return self._tuple(value[1:], depth)
        if tag == SCALAR and size == 2:
            return ScalarRef(self._nat(value[1]))
        if tag == TAG and size == 3:
            return Tag(TAG_KINDS[self._nat(value[1])], self._text(value[2]))
        if tag == COMPLEX and size == 3 and type(value[1]) is type(value[2]) is float:
            return Complex(value[1], value[2])
        raise malformed(f"an argument tagged {tag} with {size - 1} fields")

    def _tensor(self, view: Any) -> TensorRef:
        # A view is named a few times on average; one frozen object is shared.
        if type(view) is not int or view < 0:
            raise malformed("a tensor that is not a view's number")
        ref = self._refs.get(view)
        if ref is None:
            ref = self._refs[view] = TensorRef(view)
        return ref

    def _tuple(self, values: list[Any], depth: int) -> Arg:
        if depth >= self._limits.depth:
            raise malformed(f"tuples nested deeper than {self._limits.depth}")
        items = self._args(values, depth + 1)
        if items and all(type(item) is TensorRef for item in items):
            raise malformed("a list of tensors not written as one")
        return items


# ---- The edge of an encoded Program: where its inputs and results lie, without its operators.
#
# A daemon that moves tensors inline has to know a slot's layout. Decoding a large Program takes tens of
# milliseconds, which a dispatch loop doesn't have; this skips the operators at C speed. It is meant for
# bytes that `codec.decode` takes (the device has checked them by then) and checks only what it reads.


@dataclass(frozen=True, slots=True)
class Outline:
    """Offsets are in `layout`; sizes are the bytes of each input (its storage) and result (packed)."""

    layout: SlotLayout
    input_bytes: tuple[int, ...]
    result_bytes: tuple[int, ...]
    scalars: int


def outline(encoded: bytes) -> Outline:
    """The outline of an encoded Program. Raises ProgramError for other bytes."""
    try:
        return _read(encoded)
    except (ValueError, TypeError, LookupError, ArithmeticError, struct.error, msgpack.UnpackException) as error:
        raise ProgramError(f"malformed Program: {type(error).__name__}") from error


def _read(encoded: bytes) -> Outline:
    _, _, length = HEADER.unpack_from(encoded)
    if len(encoded) < HEADER.size + length:
        raise ValueError("shorter than it says")
    reader = msgpack.Unpacker(max_buffer_size=max(length, 1))
    reader.feed(memoryview(encoded)[HEADER.size : HEADER.size + length])
    reader.read_array_header()
    for _ in ("kind", "device", "numerics"):
        reader.skip()
    storages = reader.unpack()
    reader.skip()  # names
    views = reader.unpack()
    reader.skip()  # operators
    inputs, results, scalars = reader.unpack(), reader.unpack(), reader.unpack()
    if any(code >= len(SCALAR_KINDS) for code in scalars):
        raise ValueError("a scalar of no kind")
    edge = Program(
        tuple(Storage(STORAGE_KINDS[code], nbytes, slot) for code, nbytes, slot in storages),
        tuple(_view(views[index]) for index in [*inputs, *results]),
        (),
        tuple(range(len(inputs))),
        tuple(range(len(inputs), len(inputs) + len(results))),
    )
    return Outline(
        slot_layout(edge),
        tuple(edge.storages[edge.views[i].storage].nbytes for i in edge.inputs),
        tuple(_packed(edge.views[i]) for i in edge.results),
        len(scalars),
    )


def _view(row: list[int]) -> View:
    end = (len(row) + 3) // 2
    return View(row[0], DTYPES[row[1]], tuple(row[3:end]), tuple(row[end:]), row[2])


def _packed(view: View) -> int:
    count = ITEM_BYTES[view.dtype]
    for n in view.size:
        count *= n
    return count


# ---- Programs as bytes: a versioned, canonical, strict encoding (docs/protocol.md, "Programs").
#
#     "gpux"  u16 version  u32 body length  body (msgpack)  constants, back to back
#
# The body is one array: kind, device, numerics, storages, names, views, ops, inputs, results, scalars, constant
# lengths, collectives (none before version 5). Version 2 adds layers and spans, which a Program of version 1 does not
# have. Version 3 adds the view of the generator's state; layers and spans may be empty. Version 4 adds a further entry
# of the numerics, the precision of convolutions; the generator may be nil. Version 5 adds the rank and the number of
# ranks, version 6 the lane and the tail of a wave. Names (operator targets, keyword names) are listed once, in order of
# first use; operators name them by index. Arguments are msgpack's own nil, bool, int, float and string, or a small
# array that starts with a tag (`TUPLE` ...).
#
# One Program has one encoding: `decode` refuses bytes that `encode` would not have made, so the hash of
# the bytes is the hash of the Program. It is finer than `==`, which takes 1, 1.0 and True for equal.
# Constants stay outside the body so that msgpack only ever parses a few megabytes, whose worst case in
# Python objects is bounded.


__all__ = ["DEFAULT", "ProgramLimits", "content_hash", "decode", "encode"]
