"""How the B copies of one storage lie in memory, and what a view of one of them becomes.

A storage of the template Program (what one model has) becomes, in the fused Program, one or more of

    shared     one storage like the template's: its content is the same for every model
    stacked    one storage B times as large, interleaved in blocks of k bytes: byte q*k + r of model b lies at
               q*(B*k) + b*k + r. With k the storage's size the models follow each other ([B, N, ...]); with k the
               bytes of one sample they alternate within each sample ([N, B, C, ...]), which is what grouped
               convolutions and two-dimensional norms take without a copy
    split      B storages like the template's

Views are free in a Program, so a batched operand is a view with one more dimension, of stride k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gpumux.program.ir import ITEM_BYTES, View


@dataclass(frozen=True, slots=True)
class Batched:
    """A view with a model dimension: `size` and `stride` are those of the template's dimensions, `step` is the
    stride from model to model; elements."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    step: int


def stack_view(view: View, block: int, models: int) -> Batched | None:
    """What `view`, on a storage of the template, is on one stacked in blocks of `block` bytes. None where no strides
    say it: a dimension that runs through blocks without stepping in whole ones."""
    item = ITEM_BYTES[view.dtype]
    if block <= 0 or block % item:
        return None
    k = block // item
    if 0 in view.size:
        return Batched(view.size, view.stride, 0, k)
    row, inside = divmod(view.offset, k)
    strides = []
    for n, s in zip(view.size, view.stride, strict=True):
        if n > 1 and s % k:
            inside += (n - 1) * s
            strides.append(s)
        else:
            strides.append(s * models if n > 1 else s)
    if inside >= k:
        return None
    return Batched(view.size, tuple(strides), row * k * models + view.offset % k, k)


def recognise(view: View, nbytes: int, made: Batched, models: int) -> int | None:
    """The block of the stacked storage on which the template's `view` (of a storage of `nbytes`) is `made`; None
    where there is none."""
    item = ITEM_BYTES[view.dtype]
    block = nbytes if models == 1 else made.step * item
    if block <= 0 or nbytes % block:
        return None
    expected = stack_view(view, block, models)
    if expected is None or made.size != view.size or expected.offset != made.offset:
        return None
    for n, a, b in zip(view.size, expected.stride, made.stride, strict=True):
        if n > 1 and a != b:
            return None
    return block


@dataclass(slots=True)
class Home:
    """Where a template storage's content is in the fused Program: storages there. Several at once, when a copy in
    another form was made; a write leaves the one that was written."""

    nbytes: int
    dtype: str = "uint8"  # of the first view on it
    shared: int | None = None
    stacked: dict[int, int] = field(default_factory=dict)  # block -> storage
    split: tuple[int, ...] | None = None
    parts: dict[int, int] = field(default_factory=dict)  # model -> storage, while not all have theirs

    @property
    def known(self) -> bool:
        return self.shared is not None or bool(self.stacked) or self.split is not None

    @property
    def alike(self) -> bool:
        """Whether the content is the same for every model."""
        return self.shared is not None

    def only_shared(self) -> None:
        self.stacked, self.split = {}, None

    def only_stacked(self, block: int) -> None:
        """The copy stacked in blocks of `block` bytes was written: the others are old."""
        self.shared, self.split = None, None
        self.stacked = {block: self.stacked[block]}

    def only_split(self, storages: Sequence[int]) -> None:
        self.shared, self.stacked, self.split = None, {}, tuple(storages)

    def copy(self) -> Home:
        return Home(self.nbytes, self.dtype, self.shared, dict(self.stacked), self.split, dict(self.parts))
