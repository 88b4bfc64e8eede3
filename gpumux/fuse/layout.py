"""The content of the template's storages in the fused Program, and how it is brought into another form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from gpumux.errors import NotFusible
from gpumux.fuse.emit import Declined, Emitter
from gpumux.fuse.template import Source, Template, Varying
from gpumux.program.ir import ITEM_BYTES, ScalarRef, View

# ---- How the B copies of one storage lie in memory, and what a view of one of them becomes.
#
# A storage of the template Program (what one model has) becomes, in the fused Program, one or more of
#
#     shared     one storage like the template's: its content is the same for every model
#     stacked    one storage B times as large, interleaved in blocks of k bytes: byte q*k + r of model b lies at
#                q*(B*k) + b*k + r. With k the storage's size the models follow each other ([B, N, ...]); with k the
#                bytes of one sample they alternate within each sample ([N, B, C, ...]), which is what grouped
#                convolutions and two-dimensional norms take without a copy
#     split      B storages like the template's
#
# Views are free in a Program, so a batched operand is a view with one more dimension, of stride k.


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


# ----


_TABLE_ROOM = 1 << 16  # rows of a table of scalars, at most


class Homes:
    """One Home for each storage of the template. `values`: per model, the host scalars now (only to run shapes)."""

    def __init__(self, template: Template, emitter: Emitter, values: Sequence[Sequence[float | int]]) -> None:
        self.template = template
        self.emitter = emitter
        self.models = template.models
        self._values = values
        self._homes = [Home(s.nbytes) for s in template.program.storages]
        self._before: dict[int, Home] = {}  # what was handed out since `save`, as it was then: few of thousands
        self._owner: dict[int, int] = {}  # fused storage -> template storage whose content it is
        self.scalar_sources: list[tuple[int, int]] = []  # of each fused scalar: (model, its index there)
        self.scalar_values: list[float | int] = []
        self._scalar_ids: dict[tuple[int, int], int] = {}
        self.tables: dict[str, tuple[int, list[tuple[Source, ...]]]] = {}  # dtype -> (storage, rows)
        self.notes: dict[
            Any, Any
        ] = {}  # what the rule of one operator leaves for that of another, such as its backward

    def of(self, view: View) -> Home:
        return self.home(view.storage)

    def home(self, storage: int) -> Home:
        if storage not in self._before:
            self._before[storage] = self._homes[storage].copy()
        return self._homes[storage]

    # ---- reading -----------------------------------------------------------------------------------

    def one(self, view: View) -> torch.Tensor:
        home = self.of(view)
        assert home.shared is not None
        return self.emitter.window(home.shared, view.dtype, view.size, view.stride, view.offset)

    def all(self, view: View) -> torch.Tensor:
        home = self.of(view)
        found = self._stacked(view)
        if found is None and home.shared is not None:
            return self.one(view).unsqueeze(0).expand(self.models, *view.size)
        if found is None:
            self._whole(view.storage)
            found = self._stacked(view)
        assert found is not None
        return found

    def one_of(self, view: View, model: int) -> torch.Tensor:
        home = self.of(view)
        if home.shared is not None:
            return self.one(view)
        if home.split is not None:
            return self.emitter.window(home.split[model], view.dtype, view.size, view.stride, view.offset)
        if model in home.parts:
            return self.emitter.window(home.parts[model], view.dtype, view.size, view.stride, view.offset)
        stacked = self._stacked(view, whole=True)
        return (self.all(view) if stacked is None else stacked).select(0, model)

    def _stacked(self, view: View, whole: bool = False) -> torch.Tensor | None:
        home = self.of(view)
        for block, storage in home.stacked.items():
            if whole and block != home.nbytes:
                continue
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
        """A form in which models and `dim` are neighbours."""
        for block, storage in self.of(view).stacked.items():
            at = stack_view(view, block, self.models)
            if at is not None and (view.size[dim] == 1 or at.step == view.size[dim] * at.stride[dim]):
                return self._window(storage, view.dtype, at)
        return None

    def _merge(self, stacked: torch.Tensor | None, dim: int) -> torch.Tensor | None:
        return None if stacked is None else stacked.movedim(0, dim).flatten(dim, dim + 1)

    def _restack(self, view: View, block: int) -> None:
        """A copy in blocks of `block` bytes, kept for whoever wants it next."""
        home = self.of(view)
        if block <= 0 or home.nbytes % block or block in home.stacked or stack_view(view, block, self.models) is None:
            return
        item = ITEM_BYTES[home.dtype]
        if block % item:
            return
        with self.emitter:
            rows = self._flat(view.storage).reshape(self.models, home.nbytes // block, block // item)
            made = rows.transpose(0, 1).clone(memory_format=torch.contiguous_format)
        self._keep(view.storage, block, made)

    def _flat(self, storage: int) -> torch.Tensor:
        """The whole content as [B, elements], elements of the type it was born with."""
        home = self.home(storage)
        count = home.nbytes // ITEM_BYTES[home.dtype]
        return self.all(View(storage, home.dtype, (count,), (1,)))

    def _whole(self, storage: int) -> None:
        """Make the model-major copy, from whatever there is."""
        home = self.home(storage)
        item = ITEM_BYTES[home.dtype]
        count = home.nbytes // item
        with self.emitter:
            if home.stacked:
                block, at = next(iter(home.stacked.items()))
                k = block // item
                rows = self.emitter.window(at, home.dtype, (count // k, self.models, k), (self.models * k, k, 1))
                made = rows.transpose(0, 1).clone(memory_format=torch.contiguous_format)
            elif home.split is not None:
                made = torch.cat([self.emitter.window(s, home.dtype, (count,), (1,)) for s in home.split])
            elif home.shared is not None:
                one = self.emitter.window(home.shared, home.dtype, (count,), (1,))
                made = one.expand(self.models, count).clone(memory_format=torch.contiguous_format)
            else:
                raise NotFusible("a tensor is used before it is made", "report this as a bug with the step's code")
        self._keep(storage, home.nbytes, made)

    def _keep(self, storage: int, block: int, made: torch.Tensor) -> None:
        at = self.emitter.storage_of(made)
        self.home(storage).stacked[block] = at
        self._owner[at] = storage

    # ---- writing -----------------------------------------------------------------------------------

    def own(self, view: View) -> torch.Tensor:
        """All models' tensors, to be written: stacked, and no other copy is valid any more."""
        home = self.of(view)
        for block in sorted(home.stacked, key=lambda k: k != home.nbytes):
            at = stack_view(view, block, self.models)
            if at is not None:
                home.only_stacked(block)
                return self._window(home.stacked[block], view.dtype, at)
        self._whole(view.storage)
        home.only_stacked(home.nbytes)
        return self.own(view)

    def own_each(self, view: View) -> None:
        """Every model's tensor is about to be written by itself."""
        home = self.of(view)
        if home.split is not None:
            home.only_split(home.split)
        elif home.known or not home.parts:
            self.own(view)

    def exact(self, view: View) -> None:
        """Bring every model's tensor into the template's own layout: kernels may draw in the order of memory."""
        home = self.of(view)
        if home.shared is None and home.split is None and home.nbytes not in home.stacked:
            self._whole(view.storage)

    # ---- results -----------------------------------------------------------------------------------

    def _born(self, view: View) -> Home:
        home = self.of(view)
        home.dtype = view.dtype
        return home

    def put_one(self, view: View, made: torch.Tensor) -> None:
        """`made` is what all models have at `view`, whose storage is born here."""
        at = self._fresh(made)
        fits = self.emitter.storages[at].nbytes == self.of(view).nbytes and made.storage_offset() == view.offset
        if not fits or _strides(made.shape, made.stride()) != _strides(view.size, view.stride):
            raise Declined(f"a result laid out as {tuple(made.stride())}, not {view.stride}")
        self._born(view).shared = at
        self._owner[at] = view.storage

    def put_each(self, view: View, made: Sequence[torch.Tensor]) -> None:
        storages = []
        for tensor in made:
            at = self._fresh(tensor)
            if _strides(tensor.shape, tensor.stride()) != _strides(view.size, view.stride):
                raise Declined(f"a result laid out as {tuple(tensor.stride())}, not {view.stride}")
            storages.append(at)
            self._owner[at] = view.storage
        self._born(view).split = tuple(storages)

    def put_part(self, view: View, model: int, made: torch.Tensor) -> None:
        """One model's, of a storage that each model makes by an operator of its own."""
        at = self._fresh(made)
        if _strides(made.shape, made.stride()) != _strides(view.size, view.stride):
            raise Declined(f"a result laid out as {tuple(made.stride())}, not {view.stride}")
        self._owner[at] = view.storage
        home = self._born(view)
        home.parts[model] = at
        if len(home.parts) == self.models:
            home.split, home.parts = tuple(home.parts[b] for b in range(self.models)), {}

    def put_all(self, view: View, made: torch.Tensor) -> None:
        """`made`, of size [B, *size], is what the models have at `view`, whose storage is born here. It may be laid
        out in any way; one that is no form of the template's storage is copied."""
        if tuple(made.shape) != (self.models, *view.size) or made.dtype != getattr(torch, view.dtype):
            raise Declined(
                f"a result of {tuple(made.shape)} {made.dtype}, not {(self.models, *view.size)} {view.dtype}"
            )
        home = self._born(view)
        at = self.emitter.storage_of(made)
        block = None
        if (
            at not in self._owner
            and self._is_temp(at)
            and self.emitter.storages[at].nbytes == home.nbytes * self.models
        ):
            batched = Batched(view.size, tuple(made.stride())[1:], int(made.storage_offset()), made.stride(0))
            block = recognise(view, home.nbytes, batched, self.models)
        if block is None:
            made, block = self._relaid(view, made), home.nbytes
        self._keep(view.storage, block, made)

    def _relaid(self, view: View, made: torch.Tensor) -> torch.Tensor:
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

    def _fresh(self, made: torch.Tensor) -> int:
        at = self.emitter.storage_of(made)
        if at in self._owner or not self._is_temp(at):
            raise Declined("a result in memory that is something else's")
        return at

    def place(self, storage: int, at: int, stacked: bool, dtype: str) -> None:
        """Content that is there before the step: state, inputs, constants."""
        home = self.home(storage)
        home.dtype = dtype
        if stacked:
            home.stacked[home.nbytes] = at
        else:
            home.shared = at
        self._owner[at] = storage

    # ---- numbers -----------------------------------------------------------------------------------

    def scalar(self, ref: ScalarRef, model: int) -> ScalarRef:
        """A scalar of one model's Program, as one of the fused Program."""
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
        """[B], of `dtype`."""
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
        """Where things stand, for `restore`: of the last call alone."""
        self._before = {}
        return (
            self.emitter.mark(), dict(self._owner), len(self.scalar_sources),
            {k: (s, list(rows)) for k, (s, rows) in self.tables.items()}, dict(self.notes),
        )  # fmt: skip

    def restore(self, saved: Any) -> None:
        mark, owner, scalars, tables, notes = saved
        self.emitter.back(mark)
        for storage, home in self._before.items():
            self._homes[storage] = home
        self._before = {}
        self._owner, self.tables, self.notes = owner, tables, notes
        for key in self.scalar_sources[scalars:]:
            del self._scalar_ids[key]
        del self.scalar_sources[scalars:], self.scalar_values[scalars:], self.emitter.scalars[scalars:]


def _strides(size: Sequence[int], stride: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """What strides say: those of dimensions of more than one element."""
    return () if 0 in size else tuple((n, s) for n, s in zip(size, stride, strict=True) if n > 1)


def _is_dense(dims: Sequence[tuple[int, int]]) -> bool:
    expected = 1
    for n, s in reversed(dims):
        if s != expected:
            return False
        expected *= n
    return True
