"""Putting a Program together piece by piece."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Literal

from gpumux.program.ir import (
    ITEM_BYTES,
    Arg,
    Gate,
    Numerics,
    Op,
    Out,
    Program,
    ScalarRef,
    Storage,
    StorageKind,
    TensorRef,
    View,
)  # fmt: skip


def contiguous_strides(size: Iterable[int]) -> tuple[int, ...]:
    """Row-major strides in elements, as torch gives a new tensor (a size of 0 counts as 1)."""
    strides: list[int] = []
    step = 1
    for n in reversed(tuple(size)):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


class ProgramBuilder:
    """Collects the parts; `build` freezes them. It checks nothing: `validate` does, on what was built."""

    def __init__(self, device: str = "cpu", numerics: Numerics | None = None) -> None:
        self.device = device
        self.numerics = numerics or Numerics()
        self._storages: list[Storage] = []
        self._views: list[View] = []
        self._view_index: dict[View, int] = {}
        self._ops: list[Op] = []
        self._inputs: list[int] = []
        self._results: list[int] = []
        self._scalars: list[Literal["float", "int"]] = []
        self._consts: list[bytes] = []
        self._const_storage: dict[bytes, int] = {}
        self._gates: list[Gate] = []

    def add_storage(self, kind: StorageKind, nbytes: int) -> int:
        """A new storage -> its index. State and input slots are numbered in the order of the calls."""
        slot = -1 if kind == "temp" else sum(1 for s in self._storages if s.kind == kind)
        self._storages.append(Storage(kind, nbytes, slot))
        return len(self._storages) - 1

    def add_const(self, data: bytes) -> int:
        """A constant storage holding `data` -> its index. Equal bytes are kept once."""
        found = self._const_storage.get(data)
        if found is None:
            found = self._const_storage[data] = self.add_storage("const", len(data))
            self._consts.append(data)
        return found

    def add_view(
        self,
        storage: int,
        dtype: str,
        size: Iterable[int],
        stride: Iterable[int] | None = None,
        offset: int = 0,
    ) -> int:
        """A view -> its index; the same view again is the same index. `stride` None: row-major."""
        size = tuple(size)
        view = View(storage, dtype, size, contiguous_strides(size) if stride is None else tuple(stride), offset)
        found = self._view_index.get(view)
        if found is None:
            found = self._view_index[view] = len(self._views)
            self._views.append(view)
        return found

    def add_tensor(self, kind: StorageKind, dtype: str, size: Iterable[int]) -> int:
        """A dense row-major tensor on a storage of its own -> its view's index."""
        size = tuple(size)
        return self.add_view(self.add_storage(kind, prod(size) * ITEM_BYTES[dtype]), dtype, size)

    def add_op(
        self,
        target: str,
        *args: Arg,
        kwargs: Mapping[str, Arg] | None = None,
        outs: Iterable[Out] = (),
        random: int | None = None,
        stream: int | None = None,
    ) -> int:
        """An operator call -> its position."""
        self._ops.append(Op(target, args, tuple(sorted((kwargs or {}).items())), tuple(outs), random, stream))
        return len(self._ops) - 1

    def call(
        self,
        target: str,
        *args: Arg,
        dtype: str = "float32",
        size: Iterable[int],
        kwargs: Mapping[str, Arg] | None = None,
        random: int | None = None,
        stream: int | None = None,
    ) -> TensorRef:
        """An operator whose one output is a new dense tensor -> that tensor."""
        out = self.add_tensor("temp", dtype, size)
        self.add_op(target, *args, kwargs=kwargs, outs=(out,), random=random, stream=stream)
        return TensorRef(out)

    def input(self, dtype: str, size: Iterable[int]) -> TensorRef:
        """The next tensor of the batch, dense and row-major."""
        return self.input_view(self.add_tensor("input", dtype, size))

    def input_view(self, view: int) -> TensorRef:
        """Take `view`, on an input storage, as the next tensor of the batch."""
        self._inputs.append(view)
        return TensorRef(view)

    def state(self, dtype: str, size: Iterable[int]) -> TensorRef:
        """A dense row-major tensor in the next state slot."""
        return TensorRef(self.add_tensor("state", dtype, size))

    def scalar(self, kind: Literal["float", "int"] = "float") -> ScalarRef:
        """The next host scalar."""
        self._scalars.append(kind)
        return ScalarRef(len(self._scalars) - 1)

    def result(self, view: int | TensorRef) -> int:
        """Copy this view out when the step ends -> its position among the results."""
        self._results.append(view.view if isinstance(view, TensorRef) else view)
        return len(self._results) - 1

    def gate(self, op: int, kind: Literal["wait", "signal"], name: str) -> None:
        self._gates.append(Gate(op, kind, name))

    def view(self, index: int) -> View:
        return self._views[index]

    def build(self) -> Program:
        return Program(
            tuple(self._storages), tuple(self._views), tuple(self._ops), tuple(self._inputs), tuple(self._results),
            tuple(self._scalars), tuple(self._consts), tuple(self._gates), self.numerics, self.device,
        )  # fmt: skip
