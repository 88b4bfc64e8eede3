"""Fake execution: what every operator would return, without memory and without running a kernel.

Imports torch, and changes its default dtype while it runs: for a process of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from gpumux.errors import ProgramError
from gpumux.program import schemas
from gpumux.program.ir import ITEM_BYTES, Arg, Complex, Op, Out, Program, ScalarRef, Tag, TensorRef, View, aligned
from gpumux.program.metafix import fake_call

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}
# torch logs a traceback whenever a shape rule fails: a bad Program would fill the daemon's log with them.
_TORCH_LOG = logging.getLogger("torch._subclasses.fake_tensor")
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

# Operators that make one output for every row of a dimension: an expanded view could ask for 2**40.
_LIST_MAKERS = frozenset(
    f"aten.{name}"
    for name in ("unbind.int", "unbind_copy.int", "split.Tensor", "split_copy.Tensor", "unsafe_split.Tensor")
)
_LONGEST_LIST = 65_536


class FakeRun:
    """Runs the operators of a Program in order. Fake storages stand for the Program's: those of state,
    inputs and constants from the start, temporaries from the operator that makes them."""

    def __init__(self, program: Program) -> None:
        self._program = program
        # Fallback kernels would run real ones on real memory where torch has no shape rule.
        self._mode = FakeTensorMode(allow_fallback_kernels=False)
        self._tensors: dict[int, torch.Tensor] = {}  # by view
        self._bases: dict[int, torch.Tensor] = {}  # by storage; keeps the fake storage alive
        self._owner: dict[int, int] = {}  # identity of a fake storage -> the Program's storage
        self.unseen_bytes = 0  # the most that one operator returns and the Program drops unnamed

    @contextmanager
    def active(self) -> Iterator[None]:
        """Fake mode with the Program's default dtype, no autograd and no log; the process's own come back."""
        before = torch.get_default_dtype()
        quiet, _TORCH_LOG.disabled = _TORCH_LOG.disabled, True
        torch.set_default_dtype(DTYPES[self._program.numerics.default_dtype])
        try:
            with torch.no_grad(), self._mode:
                yield
        finally:
            torch.set_default_dtype(before)
            _TORCH_LOG.disabled = quiet

    def run(self, op: Op, schema: schemas.Schema) -> None:
        """Runs one operator inside `active` and holds its outputs against the declared ones."""
        args = [self._value(arg) for arg in op.args]
        kwargs = {name: self._value(arg) for name, arg in op.kwargs}
        self._bounded(op)
        try:
            returned = fake_call(schema.overload, tuple(args), kwargs, self._program.device)
        except ProgramError:
            raise
        except Exception as e:
            raise ProgramError(f"torch refuses the call: {type(e).__name__}: {str(e)[:500]}") from e
        returns = (returned,) if len(schema.returns) == 1 else tuple(returned or ())
        if len(returns) != len(op.outs):
            raise ProgramError(f"it returns {len(returns)} values, {len(op.outs)} are declared")
        unseen = 0
        for position, (kind, out, value) in enumerate(zip(schema.returns, op.outs, returns, strict=True)):
            unseen += self._output(f"output {position}", kind, out, value)
        self.unseen_bytes = max(self.unseen_bytes, unseen)

    # ---- arguments -------------------------------------------------------------------------------

    def _value(self, arg: Arg) -> Any:
        if isinstance(arg, TensorRef):
            return self._tensor(arg.view)
        if isinstance(arg, tuple):
            return [self._value(item) for item in arg]
        if isinstance(arg, ScalarRef):
            return 0.5 if self._program.scalars[arg.index] == "float" else 1
        if isinstance(arg, Complex):
            return complex(arg.re, arg.im)
        return self._constant(arg) if isinstance(arg, Tag) else arg

    def _constant(self, tag: Tag) -> Any:
        if tag.kind == "dtype":
            return DTYPES[tag.name]
        return torch.device(self._program.device) if tag.kind == "device" else getattr(torch, tag.name)

    def _tensor(self, index: int) -> torch.Tensor:
        found = self._tensors.get(index)
        if found is None:
            found = self._tensors[index] = self._window(self._program.views[index])
        return found

    def _window(self, view: View) -> torch.Tensor:
        tensor = torch.empty(0, dtype=DTYPES[view.dtype], device=self._program.device)
        return tensor.set_(self._base(view.storage).untyped_storage(), view.offset, view.size, view.stride)

    def _base(self, storage: int) -> torch.Tensor:
        found = self._bases.get(storage)
        if found is None:
            nbytes = self._program.storages[storage].nbytes
            found = torch.empty(nbytes, dtype=torch.uint8, device=self._program.device)
            self._adopt(storage, found)
        return found

    def _adopt(self, storage: int, base: torch.Tensor) -> None:
        self._bases[storage] = base
        self._owner[base.untyped_storage()._cdata] = storage

    def _bounded(self, op: Op) -> None:
        first = op.args[0] if op.args else None
        if op.target in _LIST_MAKERS and isinstance(first, TensorRef):
            longest = max(self._program.views[first.view].size, default=0)
            if longest > _LONGEST_LIST:
                raise ProgramError(f"it may make {longest} outputs; the limit is {_LONGEST_LIST}")

    # ---- outputs ---------------------------------------------------------------------------------

    def _output(self, where: str, kind: str, out: Out, value: Any) -> int:
        """Bytes that `value` holds and the Program does not name."""
        if kind == "List[Tensor]":
            if out is None:
                return sum(self._single(where, None, item) for item in value)
            if not isinstance(out, tuple) or len(out) != len(value):
                raise ProgramError(f"{where}: a list of {len(value)} tensors is not declared as one")
            return sum(self._single(where, view, item) for view, item in zip(out, value, strict=True))
        if isinstance(out, tuple):
            raise ProgramError(f"{where}: a list is declared where one value is returned")
        return self._single(where, out, value)

    def _single(self, where: str, out: int | None, value: Any) -> int:
        if not isinstance(value, FakeTensor):
            if out is not None:
                raise ProgramError(f"{where}: a tensor is declared, {type(value).__name__} is returned")
            return 0
        owner = self._owner.get(value.untyped_storage()._cdata)
        if out is None:
            return aligned(value.untyped_storage().nbytes()) if owner is None else 0
        view = self._program.views[out]
        if owner is None:
            self._birth(where, view.storage, value)
        elif owner != view.storage:
            raise ProgramError(f"{where}: it lies on storage {owner}, {view.storage} is declared")
        self._compare(where, view, value)
        self._tensors.setdefault(out, value)
        return 0

    def _birth(self, where: str, storage: int, value: FakeTensor) -> None:
        declared = self._program.storages[storage]
        if declared.kind != "temp" or storage in self._bases:
            raise ProgramError(f"{where}: new memory is returned, but storage {storage} exists already")
        nbytes = value.untyped_storage().nbytes()
        if nbytes != declared.nbytes:
            raise ProgramError(f"{where}: storage {storage} has {nbytes} bytes, {declared.nbytes} are declared")
        self._adopt(storage, value)

    def _compare(self, where: str, view: View, value: FakeTensor) -> None:
        if value.layout != torch.strided or value.is_conj() or value.is_neg():
            raise ProgramError(
                f"{where}: a tensor that is not strided, or lazily conjugated or negated",
                "make the tensor plain in the step: resolve_conj(), resolve_neg() or to_dense()",
            )
        got = (
            _NAMES.get(value.dtype, str(value.dtype)),
            tuple(value.shape),
            value.stride(),
            value.storage_offset(),
            value.device.type,
        )
        declared = (view.dtype, view.size, view.stride, view.offset, self._program.device)
        for what, a, b in zip(("dtype", "size", "stride", "offset", "device"), got, declared, strict=True):
            if a != b:
                raise ProgramError(f"{where}: its {what} is {a}, declared is {b}")
