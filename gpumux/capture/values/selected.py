"""`x[mask] = y[mask]` and `x[mask] += 1`, with one mask of bools.

How many values `y[mask]` has depends on the data, so no operator of a trace can make it. Written into `x[mask]` it is
`torch.where(mask, y, x)`, whose shape is known. So a tensor under a mask is a placeholder in a trace: written so it is
that, a number that is added to it or multiplied with it in place is so with all of `y`, which gives each value the same
bits, and whatever else is done with it raises the error that the index itself would have raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gpumux.capture.swapping import here, swapped
from gpumux.errors import DataDependent


class Selected(torch.Tensor):
    """The placeholder for `source[mask]`. `error`: what the index raised."""

    _source: torch.Tensor
    _mask: torch.Tensor
    _versions: tuple[int, int]
    _error: DataDependent

    @staticmethod
    def of(source: torch.Tensor, mask: torch.Tensor, error: DataDependent) -> Selected:
        made: Selected = torch.Tensor._make_wrapper_subclass(Selected, (0,), dtype=source.dtype, device=source.device)
        made._source, made._mask, made._error = source, mask, error
        made._versions = source._version, mask._version
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__setitem__ or func is _SET:
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
        """Whether `target[mask]` takes these values one for one, and both are as they were."""
        return (
            mask is self._mask
            and (self._source._version, mask._version) == self._versions
            and (target.shape, target.dtype) == (self._source.shape, self._source.dtype)
        )


_GET, _SET = torch.Tensor.__getitem__, torch.Tensor.__setitem__
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


@contextmanager
def placeholders_under_masks() -> Iterator[None]:
    """Inside, for the length of a trace, a tensor under a mask whose values are not known is a `Selected`."""

    def get(self: torch.Tensor, index: Any) -> Any:
        try:
            return _GET(self, index)
        except DataDependent as error:
            if not isinstance(index, torch.Tensor) or index.dtype != torch.bool or not index.dim():
                raise
            if index.shape != self.shape[: index.dim()] or self.is_inference() or index.is_inference():
                raise
            return Selected.of(self, index, error)

    with swapped([(torch.Tensor, "__getitem__", here(_GET, get))]):
        yield
