"""A fused Program whose every state slot is the line of a whole array, of which it may use one model's part.

In a daemon a job's buffers are the array's lines (memory.py). Where models are only partly alike, a Program has state of
one model alone: it lies in the line of all, where that model's is, so that every Program of the job finds it there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

from gpumux.errors import NotFusible
from gpumux.program.ir import ITEM_BYTES, Program, Storage

Part: TypeAlias = "tuple[int, int, int]"  # number of the line, its bytes, the byte at which the slot's begin


def on_lines(program: Program, parts: Sequence[Part]) -> Program:
    """`program` with `parts[i]` for state slot i. Slots of one line become one storage; lines are numbered from 0, each used
    at least once. Raises NotFusible where a tensor can't begin where its part does."""
    storages: list[Storage] = []
    moved: list[tuple[int, int]] = []  # of each storage: ours, and its first byte there
    found: dict[int, int] = {}
    for storage in program.storages:
        line, nbytes, start = parts[storage.slot] if storage.kind == "state" else (-1, storage.nbytes, 0)
        at = found.get(line) if line >= 0 else None
        if at is None:
            at = len(storages)
            storages.append(Storage(storage.kind, nbytes, line if line >= 0 else storage.slot))
            if line >= 0:
                found[line] = at
        moved.append((at, start))
    views = []
    for view in program.views:
        at, start = moved[view.storage]
        elements, rest = divmod(start, ITEM_BYTES[view.dtype])
        if rest:
            raise NotFusible(
                f"a model's part of a tensor of {view.dtype} would begin amid an element, at byte {start}",
                "use fuse.Array, which runs in this process",
            )
        views.append(replace(view, storage=at, offset=view.offset + elements))
    return replace(program, storages=tuple(storages), views=tuple(views))
