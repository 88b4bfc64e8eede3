"""Complex conjugates.

torch conjugates lazily: `x.conj()` is a view with a flag, and the imaginary part of such a view is one with a flag that
says negative, of which each operator takes a copy. In a trace both are tensors of their own, made at once. Operators
get copies of the negative ones here as well, because they round otherwise over memory with gaps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from gpumux.capture.swapping import here

aten = torch.ops.aten


class Conjugates:
    """The conjugates and negative views that the step made. `keep`: keeps a tensor's memory for the length of the
    trace. `run`: records an operator with its arguments. `lift`: makes a tensor of one that holds a constant."""

    def __init__(
        self, keep: Callable[[torch.Tensor], None], run: Callable[[Any, tuple[Any, ...], dict[str, Any]], torch.Tensor],
        lift: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:  # fmt: skip
        self._keep = keep
        self._run = run
        self._lift = lift
        self._conjugates: set[int] = set()  # storages
        self._negatives: set[int] = set()

    def conjugate(self, value: torch.Tensor | complex) -> torch.Tensor:
        """Of a tensor, or of a number (in the gradient of a product with it)."""
        if isinstance(value, complex):
            return self._lift(torch.tensor(value.conjugate(), dtype=torch.complex128))
        made = self._run(aten.conj_physical.default, (value,), {})
        if not self._has_flag(value):  # that of a conjugate has no flag in torch either
            self._note(made, self._conjugates)
        return made

    def negative(self, value: torch.Tensor) -> torch.Tensor:
        """The negative view of a tensor."""
        made = self._run(aten.neg.default, (value,), {})
        self._note(made, self._negatives)
        return made

    def copied(self, func: Any, given: Any) -> Any:
        """The arguments `given` to an operator, with copies of negative views."""
        if not self._negatives or func.is_view:
            return given
        return tree_map(
            lambda each: (
                self._run(aten.clone.default, (each,), {})
                if isinstance(each, torch.Tensor) and _storage(each) in self._negatives
                else each
            ),
            given,
        )

    def swaps(self) -> list[tuple[Any, str, Any]]:
        """What is replaced while a step is traced: functions that look at the flag."""
        return [
            (torch.Tensor, "real", property(here(torch.real, self._real), _OF_BASE.real.__set__)),
            (torch.Tensor, "imag", property(here(torch.imag, self._imag), _OF_BASE.imag.__set__)),
            (torch, "real", here(torch.real, self._real)), (torch, "imag", here(torch.imag, self._imag)),
            (torch.Tensor, "resolve_conj", here(torch.Tensor.resolve_conj, self._resolved)),
            (torch, "resolve_conj", here(torch.resolve_conj, self._resolved)),
        ]  # fmt: skip

    def _real(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self._has_flag(tensor):
            return _REAL(tensor)
        return torch.view_as_real(torch._conj(tensor)).select(-1, 0)

    def _imag(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self._has_flag(tensor):
            return _IMAG(tensor)
        return torch._neg_view(torch.view_as_real(torch._conj(tensor))).select(-1, 1)

    def _resolved(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if self._has_flag(tensor) else tensor

    def _has_flag(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is a conjugate, or a view of one."""
        return bool(self._conjugates) and _storage(tensor) in self._conjugates

    def _note(self, made: torch.Tensor, among: set[int]) -> None:
        self._keep(made)
        among.add(_storage(made))


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0


_REAL, _IMAG = torch.real, torch.imag
_OF_BASE: Any = torch._C.TensorBase
