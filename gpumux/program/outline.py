"""The edge of an encoded Program: its inputs, results and scalars, without its operators.

A daemon that moves tensors inline has to know where they lie in a slot. Decoding a large Program
takes tens of milliseconds, which a dispatch loop doesn't have; this skips the operators at C speed.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpumux.program.ir import ITEM_BYTES, SlotLayout


@dataclass(frozen=True, slots=True)
class Outline:
    """Offsets are in `layout`; sizes are the bytes each input and (packed) result takes."""

    layout: SlotLayout
    input_bytes: tuple[int, ...]
    result_bytes: tuple[int, ...]
    scalars: tuple[str, ...]


_ = ITEM_BYTES
