"""The edge of an encoded Program: where its inputs and results lie, without its operators.

A daemon that moves tensors inline has to know a slot's layout. Decoding a large Program takes tens of
milliseconds, which a dispatch loop doesn't have; this skips the operators at C speed. It is meant for
bytes that `codec.decode` takes (the device has checked them by then) and checks no more than it reads.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import msgpack

from gpumux.errors import ProgramError
from gpumux.program.encoder import DTYPES, HEADER, SCALAR_KINDS, STORAGE_KINDS
from gpumux.program.ir import ITEM_BYTES, Program, SlotLayout, Storage, View, slot_layout


@dataclass(frozen=True, slots=True)
class Outline:
    """Offsets are in `layout`; sizes are the bytes each input (its storage) and result (packed) takes."""

    layout: SlotLayout
    input_bytes: tuple[int, ...]
    result_bytes: tuple[int, ...]
    scalars: int


def outline(encoded: bytes) -> Outline:
    """Raises ProgramError when the bytes are no encoded Program."""
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
