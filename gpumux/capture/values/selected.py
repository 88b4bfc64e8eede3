"""`x[mask] = y[mask]` and `x[mask] += 1`, with one mask of bools.

How many values `y[mask]` has depends on the data, so no operator of a trace can make it. Written into `x[mask]` it is
`torch.where(mask, y, x)`, whose shape is known. So a tensor under a mask is a placeholder in a trace: written so it is
that, a number that is added to it or multiplied with it in place is so with all of `y`, which gives each value the same
bits, and whatever else is done with it raises the error that the index itself would have raised.

The placeholder is what the operator gives, in the dispatch mode that records. `torch.Tensor.__getitem__` can't be
replaced for the length of a trace: a class that once had a `__getitem__` of its own is a sequence to C for good, and
`torch.tensor([a, b])` of two scalars then asks each for its length and fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from gpumux.errors import DataDependent


class Selected(torch.Tensor):
    """The placeholder for `source[mask]`. `error`: what the index raised."""

    _source: torch.Tensor
    _mask: torch.Tensor
    _versions: tuple[int, int]
    _error: DataDependent

    @staticmethod
    def of(func: Any, args: Any, error: DataDependent) -> Selected:
        """The result of an operator that raised `error`. Raises it where the operator is no `source[mask]`. Inside of
        `torch.func`'s transforms and of a backward pass it is not the script's Python that gets the result."""
        transforms = torch._C._functorch.peek_interpreter_stack() is not None
        if func is not torch.ops.aten.index.Tensor or transforms or torch._C._current_graph_task_id() != -1:
            raise error
        source, (mask, *others) = args
        if others or mask is None or mask.dtype != torch.bool or not mask.dim():
            raise error
        if mask.shape != source.shape[: mask.dim()] or source.is_inference() or mask.is_inference():
            raise error
        made: Selected = torch.Tensor._make_wrapper_subclass(Selected, (0,), dtype=source.dtype, device=source.device)
        made._source, made._mask, made._error = source, mask, error
        made._versions = source._version, mask._version
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _SET:
            target, mask, value = args
            if type(value) is cls and type(target) is not cls and value._fits(target, mask):
                shape = (*mask.shape, *(1,) * (target.dim() - mask.dim()))
                target.copy_(torch.where(mask.view(shape), value._source, target))
                return None
        alone = func in _WITH_A_NUMBER and len(args) == 2 and not kwargs
        if alone and type(args[0]) is cls and args[0]._takes(func, args[1]):
            return args[0]
        raise next(leaf for leaf in _leaves((args, kwargs)) if type(leaf) is cls)._error

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise next(leaf for leaf in _leaves((args, kwargs)) if type(leaf) is cls)._error

    def _takes(self, func: Any, number: Any) -> bool:
        """Whether this number was added to the values or multiplied with them, in place."""
        source = self._source
        if (source._version, self._mask._version) != self._versions or isinstance(number, torch.Tensor):
            return False
        result = _WITH_A_NUMBER[func](source, number)
        if result.dtype != source.dtype:
            return False
        self._source, self._versions = result, (result._version, self._mask._version)
        return True

    def _fits(self, target: torch.Tensor, mask: Any) -> bool:
        """Whether `target[mask]` takes these values one for one, both are as they were, and gradients go where those of
        the values would: an operator between may have run under `torch.no_grad()`."""
        with torch._C.DisableTorchFunctionSubclass():
            linked = self.requires_grad
        return (
            mask is self._mask
            and (linked == self._source.requires_grad or not torch.is_grad_enabled())
            and (self._source._version, mask._version) == self._versions
            and (target.shape, target.dtype) == (self._source.shape, self._source.dtype)
        )


_SET = torch.Tensor.__setitem__
_WITH_A_NUMBER: dict[Any, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    torch.Tensor.add_: torch.add, torch.Tensor.sub_: torch.sub, torch.Tensor.mul_: torch.mul,
    torch.Tensor.div_: torch.div,
}  # fmt: skip


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for one in value:
            yield from _leaves(one)
    elif isinstance(value, dict):
        yield from _leaves(list(value.values()))
    else:
        yield value
