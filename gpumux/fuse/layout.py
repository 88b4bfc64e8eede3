"""Where the content of the template's storages is in the fused Program, and how it is brought into another form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from gpumux.errors import NotFusible
from gpumux.fuse.emit import Declined, FusionEmitter
from gpumux.fuse.template import Source, Template, Varying
from gpumux.program.ir import ITEM_BYTES, ScalarRef, View

# ---- How the B copies of one storage lie in memory, and what a view of one of them becomes.
#
# A storage of the template Program (of one model) becomes, in the fused Program, one or more of
#
#     shared     one storage like the template's: its content is the same for every model
#     stacked    one storage B times as large, interleaved in blocks of k bytes: byte q*k + r of model b lies at
#                q*(B*k) + b*k + r. If k is the storage's size, models follow each other ([B, N, ...]). If k is the
#                size of one sample, they alternate within each sample ([N, B, C, ...]), which grouped convolutions
#                and two-dimensional norms take without a copy
#     split      B storages like the template's
#
# Views are free in a Program, so a batched operand is a view with one more dimension, of stride k.


@dataclass(frozen=True, slots=True)
class Batched:
    """A view with a model dimension, in elements. `size` and `stride` are those of the template's dimensions, `step`
    is the stride from model to model."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    step: int


def stack_view(view: View, block: int, models: int) -> Batched | None:
    """`view`, a view of a template storage, on a storage stacked in blocks of `block` bytes. None if no strides
    express it: a dimension crosses blocks without stepping in whole ones."""
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
    """The block size, in bytes, of a stacked storage on which the template's `view` (of a storage of `nbytes`) is
    `made`; None if there is none."""
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
class StoragePlacement:
    """The storages of the fused Program that hold a template storage's content. There are several after a copy in
    another form; a write invalidates all but the written one."""

    nbytes: int
    dtype: str = "uint8"  # of the first view on it
    shared: int | None = None
    stacked: dict[int, int] = field(default_factory=dict)  # block -> storage
    split: tuple[int, ...] | None = None
    parts: dict[int, int] = field(default_factory=dict)  # model -> storage, until every model has one

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
        """Drop all copies but the one stacked in blocks of `block` bytes, which was written."""
        self.shared, self.split = None, None
        self.stacked = {block: self.stacked[block]}

    def only_split(self, storages: Sequence[int]) -> None:
        self.shared, self.stacked, self.split = None, {}, tuple(storages)

    def copy(self) -> StoragePlacement:
        return StoragePlacement(self.nbytes, self.dtype, self.shared, dict(self.stacked), self.split, dict(self.parts))


# ---- All placements, and the operations that read, merge and write them.


_TABLE_ROOM = 1 << 16  # rows of a table of scalars, at most


class Placements:
    """The StoragePlacement of each template storage. values: present host scalars of each model, to infer shapes."""

    def __init__(self, template: Template, emitter: FusionEmitter, values: Sequence[Sequence[float | int]]) -> None:
        self.template = template
        self.emitter = emitter
        self.models = template.models
        self._values = values
        self._placements = [StoragePlacement(s.nbytes) for s in template.program.storages]
        # Copies of the placements handed out since `save`: copying all of them would be slow.
        self._before: dict[int, StoragePlacement] = {}
        self._owner: dict[int, int] = {}  # fused storage -> the template storage whose content it holds
        self.scalar_sources: list[tuple[int, int]] = []  # for each fused scalar: (model, its index there)
        self.scalar_values: list[float | int] = []
        self._scalar_ids: dict[tuple[int, int], int] = {}
        self.tables: dict[str, tuple[int, list[tuple[Source, ...]]]] = {}  # dtype -> (storage, rows)
        self.notes: dict[Any, Any] = {}  # values that one operator's rule leaves for another's, such as its backward

    def of(self, view: View) -> StoragePlacement:
        return self.of_storage(view.storage)

    def of_storage(self, storage: int) -> StoragePlacement:
        if storage not in self._before:
            self._before[storage] = self._placements[storage].copy()
        return self._placements[storage]

    # ---- reading -----------------------------------------------------------------------------------

    def one(self, view: View) -> torch.Tensor:
        placement = self.of(view)
        assert placement.shared is not None
        return self.emitter.window(placement.shared, view.dtype, view.size, view.stride, view.offset)

    def all(self, view: View) -> torch.Tensor:
        placement = self.of(view)
        found = self._stacked(view)
        if found is None and placement.shared is not None:
            return self.one(view).unsqueeze(0).expand(self.models, *view.size)
        if found is None:
            self._make_model_major(view.storage)
            found = self._stacked(view)
        if found is None:
            # It is cuDNN's, and its kernel alone knows the size.
            raise Declined("a tensor of no declared bytes can't be stacked")
        return found

    def one_of(self, view: View, model: int) -> torch.Tensor:
        placement = self.of(view)
        if placement.shared is not None:
            return self.one(view)
        if placement.split is not None:
            return self.emitter.window(placement.split[model], view.dtype, view.size, view.stride, view.offset)
        if model in placement.parts:
            return self.emitter.window(placement.parts[model], view.dtype, view.size, view.stride, view.offset)
        at = stack_view(view, placement.nbytes, self.models) if placement.nbytes in placement.stacked else None
        if at is None:
            return self.all(view).select(0, model)
        storage = placement.stacked[placement.nbytes]
        return self.emitter.window(storage, view.dtype, at.size, at.stride, at.offset + model * at.step)

    def _stacked(self, view: View) -> torch.Tensor | None:
        for block, storage in self.of(view).stacked.items():
            at = stack_view(view, block, self.models)
            if at is not None:
                return self._window(storage, view.dtype, at)
        return None

    def _window(self, storage: int, dtype: str, at: Batched) -> torch.Tensor:
        return self.emitter.window(storage, dtype, (self.models, *at.size), (at.step, *at.stride), at.offset)

    # ---- merging -----------------------------------------------------------------------------------

    def mergeable(self, view: View, dim: int) -> bool:
        return self._merge(self._stacked_as(view, dim), dim) is not None

    def merged(self, view: View, dim: int) -> torch.Tensor:
        found = self._merge(self._stacked_as(view, dim), dim)
        if found is not None:
            return found
        self._restack(view, view.size[dim] * view.stride[dim] * ITEM_BYTES[view.dtype])
        found = self._merge(self._stacked_as(view, dim), dim)
        if found is not None:
            return found
        return self.all(view).movedim(0, dim).flatten(dim, dim + 1)  # a copy, made by torch

    def _stacked_as(self, view: View, dim: int) -> torch.Tensor | None:
        """A form in which the model dimension and `dim` are adjacent."""
        for block, storage in self.of(view).stacked.items():
            at = stack_view(view, block, self.models)
            if at is not None and (view.size[dim] == 1 or at.step == view.size[dim] * at.stride[dim]):
                return self._window(storage, view.dtype, at)
        return None

    def _merge(self, stacked: torch.Tensor | None, dim: int) -> torch.Tensor | None:
        return None if stacked is None else stacked.movedim(0, dim).flatten(dim, dim + 1)

    def _restack(self, view: View, block: int) -> None:
        """Make a copy in blocks of `block` bytes, and keep it for later operators."""
        placement = self.of(view)
        if (
            block <= 0
            or placement.nbytes % block
            or block in placement.stacked
            or stack_view(view, block, self.models) is None
        ):
            return
        item = ITEM_BYTES[placement.dtype]
        if block % item:
            return
        with self.emitter:
            rows = self._flat(view.storage).reshape(self.models, placement.nbytes // block, block // item)
            made = rows.transpose(0, 1).clone(memory_format=torch.contiguous_format)
        self._keep(view.storage, block, made)

    def _flat(self, storage: int) -> torch.Tensor:
        """The whole content as [B, elements], in the dtype of the storage's first view."""
        placement = self.of_storage(storage)
        count = placement.nbytes // ITEM_BYTES[placement.dtype]
        return self.all(View(storage, placement.dtype, (count,), (1,)))

    def _make_model_major(self, storage: int) -> None:
        """Make the model-major copy from any existing form."""
        placement = self.of_storage(storage)
        item = ITEM_BYTES[placement.dtype]
        count = placement.nbytes // item
        with self.emitter:
            if placement.stacked:
                block, at = next(iter(placement.stacked.items()))
                k = block // item
                rows = self.emitter.window(at, placement.dtype, (count // k, self.models, k), (self.models * k, k, 1))
                made = rows.transpose(0, 1).clone(memory_format=torch.contiguous_format)
            elif placement.split is not None:
                made = torch.cat([self.emitter.window(s, placement.dtype, (count,), (1,)) for s in placement.split])
            elif placement.shared is not None:
                one = self.emitter.window(placement.shared, placement.dtype, (count,), (1,))
                made = one.expand(self.models, count).clone(memory_format=torch.contiguous_format)
            else:
                raise NotFusible("a tensor is used before it is made", "report this as a bug with the step's code")
        self._keep(storage, placement.nbytes, made)

    def _keep(self, storage: int, block: int, made: torch.Tensor) -> None:
        at = self.emitter.storage_of(made)
        self.of_storage(storage).stacked[block] = at
        self._owner[at] = storage

    # ---- writing -----------------------------------------------------------------------------------

    def write_all(self, view: View) -> torch.Tensor:
        """All models' tensors, stacked, to be written. Invalidates all other copies."""
        placement = self.of(view)
        for block in sorted(placement.stacked, key=lambda k: k != placement.nbytes):
            at = stack_view(view, block, self.models)
            if at is not None:
                placement.only_stacked(block)
                return self._window(placement.stacked[block], view.dtype, at)
        self._make_model_major(view.storage)
        placement.only_stacked(placement.nbytes)
        return self.write_all(view)

    def write_each(self, view: View) -> None:
        """Prepare for a write to each model's tensor by itself."""
        placement = self.of(view)
        if placement.split is not None:
            placement.only_split(placement.split)
        elif placement.known or not placement.parts:
            self.write_all(view)

    def use_template_layout(self, view: View) -> None:
        """Bring every model's tensor into the template's own layout: kernels may draw in the order of memory."""
        placement = self.of(view)
        if placement.shared is None and placement.split is None and placement.nbytes not in placement.stacked:
            self._make_model_major(view.storage)

    # ---- results -----------------------------------------------------------------------------------

    def _new_storage(self, view: View) -> StoragePlacement:
        placement = self.of(view)
        placement.dtype = view.dtype
        return placement

    def put_one(self, view: View, made: torch.Tensor) -> None:
        """Set `made` as the content of a new storage at `view`, the same for all models."""
        at = self._temp_of(made)
        fits = self.emitter.storages[at].nbytes == self.of(view).nbytes and made.storage_offset() == view.offset
        if not fits or _strides(made.shape, made.stride()) != _strides(view.size, view.stride):
            raise Declined(f"a result laid out as {tuple(made.stride())}, not {view.stride}")
        self._new_storage(view).shared = at
        self._owner[at] = view.storage

    def put_each(self, view: View, made: Sequence[torch.Tensor]) -> None:
        storages = []
        for tensor in made:
            at = self._temp_of(tensor)
            if _strides(tensor.shape, tensor.stride()) != _strides(view.size, view.stride):
                raise Declined(f"a result laid out as {tuple(tensor.stride())}, not {view.stride}")
            storages.append(at)
            self._owner[at] = view.storage
        self._new_storage(view).split = tuple(storages)

    def put_part(self, view: View, model: int, made: torch.Tensor) -> None:
        """Set one model's content of a storage that each model fills with an operator of its own."""
        at = self._temp_of(made)
        if _strides(made.shape, made.stride()) != _strides(view.size, view.stride):
            raise Declined(f"a result laid out as {tuple(made.stride())}, not {view.stride}")
        self._owner[at] = view.storage
        placement = self._new_storage(view)
        placement.parts[model] = at
        if len(placement.parts) == self.models:
            placement.split, placement.parts = tuple(placement.parts[b] for b in range(self.models)), {}

    def put_all(self, view: View, made: torch.Tensor) -> None:
        """Set `made`, of size [B, *size], as all models' content of a new storage at `view`. Any strides are taken; a
        layout that is no form of the template's storage is copied."""
        if tuple(made.shape) != (self.models, *view.size) or made.dtype != getattr(torch, view.dtype):
            raise Declined(
                f"a result of {tuple(made.shape)} {made.dtype}, not {(self.models, *view.size)} {view.dtype}"
            )
        placement = self._new_storage(view)
        at = self.emitter.storage_of(made)
        block = None
        if (
            at not in self._owner
            and self._is_temp(at)
            and self.emitter.storages[at].nbytes == placement.nbytes * self.models
        ):
            batched = Batched(view.size, tuple(made.stride())[1:], int(made.storage_offset()), made.stride(0))
            block = recognise(view, placement.nbytes, batched, self.models)
        if block is None:
            made, block = self._in_template_layout(view, made), placement.nbytes
        self._keep(view.storage, block, made)

    def _in_template_layout(self, view: View, made: torch.Tensor) -> torch.Tensor:
        """A model-major copy with the template's strides."""
        order = sorted(range(len(view.size)), key=lambda d: (-view.stride[d], d))
        dense = _strides([view.size[d] for d in order], [view.stride[d] for d in order])
        count = prod(view.size)
        with self.emitter:
            if count * ITEM_BYTES[view.dtype] == self.of(view).nbytes and view.offset == 0 and _is_dense(dense):
                return made.permute(0, *[1 + d for d in order]).clone(memory_format=torch.contiguous_format)
            elements = self.of(view).nbytes // ITEM_BYTES[view.dtype]
            flat = torch.empty(self.models, elements, dtype=made.dtype, device=made.device)
            at = stack_view(view, self.of(view).nbytes, self.models)
            if at is None:
                raise Declined("a result whose strides can't be stacked")
            self._window(self.emitter.storage_of(flat), view.dtype, at).copy_(made)
            return flat

    def _is_temp(self, storage: int) -> bool:
        return self.emitter.storages[storage].kind == "temp"

    def _temp_of(self, made: torch.Tensor) -> int:
        at = self.emitter.storage_of(made)
        if at in self._owner or not self._is_temp(at):
            raise Declined("a result in memory that is something else's")
        return at

    def place(self, storage: int, at: int, stacked: bool, dtype: str) -> None:
        """Register content that exists before the step: state, inputs, constants."""
        placement = self.of_storage(storage)
        placement.dtype = dtype
        if stacked:
            placement.stacked[placement.nbytes] = at
        else:
            placement.shared = at
        self._owner[at] = storage

    # ---- numbers -----------------------------------------------------------------------------------

    def scalar(self, ref: ScalarRef, model: int) -> ScalarRef:
        """The fused Program's scalar for a scalar of one model's Program."""
        key = (model, ref.index)
        found = self._scalar_ids.get(key)
        if found is None:
            found = self._scalar_ids[key] = len(self.scalar_sources)
            self.scalar_sources.append(key)
            value = self._values[model][ref.index]
            self.scalar_values.append(value)
            self.emitter.scalars.append("float" if isinstance(value, float) else "int")
        return ScalarRef(found)

    def source(self, source: Source, model: int) -> Any:
        return self.scalar(source, model) if isinstance(source, ScalarRef) else source

    def vector(self, varying: Varying, dtype: torch.dtype) -> torch.Tensor:
        """Numbers that differ between models as a tensor [B] of `dtype`, a row of the table of that type."""
        if dtype not in (torch.float32, torch.float64):
            raise Declined(f"numbers that differ between models on tensors of {dtype}")
        name = str(dtype).removeprefix("torch.")
        if name not in self.tables:
            room = _TABLE_ROOM * self.models * ITEM_BYTES[name]
            self.tables[name] = (self.emitter.add_storage("input", 0, -1, room), [])
        storage, rows = self.tables[name]
        if varying.values not in rows:
            rows.append(varying.values)
        return self.emitter.window(storage, name, (self.models,), (1,), rows.index(varying.values) * self.models)

    # ---- trying ------------------------------------------------------------------------------------

    def save(self) -> Any:
        """A snapshot for `restore`, valid until the next `save`."""
        self._before = {}
        return (
            self.emitter.mark(), dict(self._owner), len(self.scalar_sources),
            {k: (s, list(rows)) for k, (s, rows) in self.tables.items()}, dict(self.notes),
        )  # fmt: skip

    def restore(self, saved: Any) -> None:
        mark, owner, scalars, tables, notes = saved
        self.emitter.back(mark)
        for storage, placement in self._before.items():
            self._placements[storage] = placement
        self._before = {}
        self._owner, self.tables, self.notes = owner, tables, notes
        for key in self.scalar_sources[scalars:]:
            del self._scalar_ids[key]
        del self.scalar_sources[scalars:], self.scalar_values[scalars:], self.emitter.scalars[scalars:]


def _strides(size: Sequence[int], stride: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Sizes and strides of the dimensions with more than one element: no other strides matter."""
    return () if 0 in size else tuple((n, s) for n, s in zip(size, stride, strict=True) if n > 1)


def _is_dense(dims: Sequence[tuple[int, int]]) -> bool:
    expected = 1
    for n, s in reversed(dims):
        if s != expected:
            return False
        expected *= n
    return True
