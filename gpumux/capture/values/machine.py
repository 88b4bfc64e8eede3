"""Runs recorded operators on real numbers in this process.

In `wide` mode every floating-point number is a float64, whatever the step uses. Then the difference between two orders
of summation is far below any error that matters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch

from gpumux.capture.recorder import RawOp, TraceRecord
from gpumux.program import onednn_lstm
from gpumux.program.ir import ITEM_BYTES, Complex, Out, ScalarRef, Tag, TensorRef, View

# Operators that use a tensor argument only as a pattern and do not read its values.
PATTERN_ONLY = frozenset(
    ("zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones", "new_empty", "new_full",
     "new_empty_strided")
)  # fmt: skip

# Operators whose result has no defined values, so that there is nothing to compare.
UNDEFINED = frozenset(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"))


def outs_of(outs: tuple[Out, ...]) -> Iterator[int]:
    for out in outs:
        if isinstance(out, tuple):
            yield from out
        elif out is not None:
            yield out


_WIDE = {"float16": "float64", "bfloat16": "float64", "float32": "float64", "complex64": "complex128"}


_DRAWN = 65_537  # a prime, so that numbers repeat at no row of a tensor


def filled(shape: Sequence[int], draw: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """A tensor of the numbers that `draw` gives, so many at most, which repeat: to draw as many as a model has would
    take seconds."""
    count = prod(shape)
    drawn = draw(min(count, _DRAWN))
    if count <= _DRAWN:
        return drawn.view(*shape)
    made = torch.empty(count, dtype=drawn.dtype)
    for piece in made.split(_DRAWN):
        piece.copy_(drawn[: len(piece)])
    return made.view(*shape)


class Inconclusive(Exception):
    """These numbers prove nothing, or torch refuses an operator."""


class Machine:
    """Runs the operators of a record on real tensors, by storage and view."""

    def __init__(self, record: TraceRecord, wide: bool) -> None:
        self._record = record
        self._wide = wide
        self._held: dict[int, torch.Tensor] = {}
        self._drawn: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._scalars: dict[int, float] = {}
        self._generator = torch.Generator().manual_seed(0)
        for index, storage in enumerate(record.storages):
            if storage.kind == "const":
                self.const(index)

    # ---- memory --------------------------------------------------------------------------------------

    def dtype(self, name: str) -> torch.dtype:
        found: torch.dtype = getattr(torch, _WIDE.get(name, name) if self._wide else name)
        return found

    def const(self, index: int) -> None:
        storage = self._record.storages[index]
        flat = torch.frombuffer(bytearray(storage.key), dtype=getattr(torch, storage.dtype)) if storage.key else None
        self.hold(index, torch.empty(0) if flat is None else flat)

    def hold(self, index: int, flat: torch.Tensor) -> None:
        """Set the elements of storage `index`, from its start."""
        name = str(flat.dtype).removeprefix("torch.")
        self._held[index] = flat.to(self.dtype(name))

    def set_scalars(self, values: dict[int, float]) -> None:
        """Compute with other values of these host scalars than those of the trace."""
        self._scalars = values

    def forget(self, index: int) -> None:
        self._held.pop(index, None)

    def take(self, other: Machine, index: int) -> None:
        """Share the memory of another machine's storage `index`."""
        self._held[index] = other._held[index]

    def own(self, index: int) -> None:
        """Copy the elements of storage `index`, so that no other machine shares them."""
        self._held[index] = self._held[index].clone()

    @contextmanager
    def restored(self, indices: Collection[int]) -> Iterator[None]:
        """In the block these storages are copies, and what becomes of them is undone at its end."""
        before = {index: self._held.get(index) for index in indices}
        try:
            for index, held in before.items():
                if held is not None:
                    self._held[index] = torch.empty(0, dtype=held.dtype).set_(held.untyped_storage().clone())
            yield
        finally:
            for index, held in before.items():
                if held is None:
                    self.forget(index)
                else:
                    self._held[index] = held

    def flat(self, index: int) -> torch.Tensor:
        """All elements of storage `index`."""
        held = self._held[index]
        return torch.empty(0, dtype=held.dtype).set_(held.untyped_storage())

    def tensor(self, index: int) -> torch.Tensor:
        return self._window(self._record.views[index])

    def __contains__(self, index: int) -> bool:
        return index in self._held

    def _window(self, view: View) -> torch.Tensor:
        base = self._held.get(view.storage)
        if base is None and self._record.storages[view.storage].kind == "const":  # a constant that belongs to a part
            self.const(view.storage)
            base = self._held[view.storage]
        assert base is not None, "an operator made it before"
        dtype = self.dtype(view.dtype)
        if self._wide and base.dtype != dtype and base.numel():
            raise Inconclusive(f"memory is read as {base.dtype} and as {dtype}")
        return torch.empty(0, dtype=dtype).set_(base.untyped_storage(), view.offset, view.size, view.stride)

    def _born(self, view: View, made: torch.Tensor) -> None:
        fits = (
            made.dtype == self.dtype(view.dtype)
            and made.stride() == view.stride
            and made.storage_offset() == view.offset
        )
        count = self._record.storages[view.storage].nbytes // ITEM_BYTES[view.dtype]
        if fits and made.untyped_storage().nbytes() >= count * made.element_size():
            self._held[view.storage] = made
            return
        self._held[view.storage] = torch.zeros(count, dtype=self.dtype(view.dtype))
        self._window(view).copy_(made)

    # ---- operators -----------------------------------------------------------------------------------

    def run(self, op: RawOp) -> None:
        """Run one operator. Raises Inconclusive if torch refuses it."""
        _, name, overload = op.target.split(".")
        call = getattr(getattr(torch.ops.aten, name), overload)
        kwargs = {k: self._value(v) for k, v in op.kwargs}
        if op.random is not None and any(a.name == "generator" for a in call._schema.arguments):
            kwargs["generator"] = self._generator
        try:
            with onednn_lstm.as_captured(op):
                returned = call(*[self._value(a) for a in op.args], **kwargs)
        except Exception as error:
            raise Inconclusive(f"{op.where}: {name} raises {type(error).__name__}: {str(error)[:200]}") from error
        self._keep(op, returned, name)

    def draw(self, op: RawOp, part: int = 0) -> None:
        """Run a drawing operator. Operators with one random slot draw the same numbers."""
        assert op.random is not None
        again = self._drawn.get((op.random, part))
        made = list(outs_of(op.outs))
        if again is None:
            with torch.random.fork_rng(devices=[]):  # for the few operators that take no generator
                self.run(op)
            self._drawn[op.random, part] = [self.tensor(v).clone() for v in made]
        else:
            self.put(op, again)

    def put(self, op: RawOp, values: Sequence[torch.Tensor]) -> None:
        """Set the operator's results to `values`."""
        for index, value in zip(outs_of(op.outs), values, strict=True):
            view = self._record.views[index]
            if view.storage not in self._held:
                self._born(view, value.clone())
            else:
                self._window(view).copy_(value)

    def _keep(self, op: RawOp, returned: Any, name: str) -> None:
        values = returned if isinstance(returned, (tuple, list)) and len(op.outs) != 1 else (returned,)
        for out, value in zip(op.outs, values, strict=False):
            pairs = zip(out, value, strict=True) if isinstance(out, tuple) else [(out, value)]
            for index, tensor in pairs:
                if index is None:
                    continue
                view = self._record.views[index]
                if view.storage not in op.reads:
                    self._born(view, torch.zeros_like(tensor) if name in UNDEFINED else tensor)

    def _value(self, arg: Any) -> Any:
        if isinstance(arg, TensorRef):
            return self.tensor(arg.view)
        if isinstance(arg, tuple):
            return [self._value(a) for a in arg]
        if isinstance(arg, ScalarRef):
            return self._scalars.get(arg.index, self._record.scalars[arg.index].value)
        if isinstance(arg, Complex):
            return complex(arg.re, arg.im)
        if isinstance(arg, Tag):
            if arg.kind == "dtype":
                return self.dtype(arg.name)
            return torch.device("cpu") if arg.kind == "device" else getattr(torch, arg.name)
        return arg
