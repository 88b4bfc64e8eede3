"""What stands where a step left a tensor in an attribute, a variable or a container: the values are in the daemon, and were not returned.

It says what the tensor is like. Whatever asks for more gets StaleState, which names the place and the remedy; what stood there
before the step would be an old value, and nobody would notice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from gpumux.errors import StaleState

_TENSOR: Any = torch.Tensor
_DESCRIBES = frozenset(
    (
        *(
            getattr(_TENSOR, name).__get__
            for name in (
                "device", "dtype", "is_cpu", "is_cuda", "is_meta", "is_mps", "is_nested", "is_quantized", "is_sparse", "is_xpu",
                "itemsize", "layout", "nbytes", "ndim", "requires_grad", "shape",
            )
        ),
        *(
            getattr(_TENSOR, name)
            for name in (
                "__hash__", "__len__", "dim", "element_size", "get_device", "is_complex", "is_conj", "is_contiguous",
                "is_floating_point", "is_inference", "is_neg", "is_signed", "ndimension", "nelement", "numel", "size", "stride",
            )
        ),
        torch.is_complex, torch.is_floating_point, torch.numel, torch.is_signed,
    )
)  # fmt: skip


class Unreturned(torch.Tensor):
    """`_place`: the name the user knows it by. Copies and pickles are the like."""

    _place: str

    @staticmethod
    def at(
        place: str, size: Any, stride: Any, dtype: torch.dtype, device: torch.device, requires_grad: bool
    ) -> Unreturned:
        made: Unreturned = torch.Tensor._make_wrapper_subclass(
            Unreturned, size, strides=stride, dtype=dtype, device=device, requires_grad=requires_grad
        )
        made._place = place
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _DESCRIBES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise _unreturned((args, kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise _unreturned((args, kwargs))

    def __deepcopy__(self, memo: Any) -> Any:
        return Unreturned.at(*self._like())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Unreturned.at, self._like()

    def _like(self) -> tuple[Any, ...]:
        size, stride = tuple(self.shape), tuple(self.stride())
        return self._place, size, stride, self.dtype, self.device, self.requires_grad

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"<{self._place} as a step left it, size {tuple(self.shape)}: not returned>"


UNRETURNED = (FakeTensor, Unreturned)  # what traces and steps leave behind


def _unreturned(given: Any) -> StaleState:
    place = next((one._place for one in _found(given)), "this tensor")
    return StaleState(
        f"{place} was set by a step that ran in the daemon, and its values are not here",
        f"return it from the step (return loss, {place}) and take it from the result; a value that steps go on from belongs in a "
        "buffer of the model (register_buffer)",
    )


def _found(value: Any) -> Iterator[Unreturned]:
    if isinstance(value, Unreturned):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _found(item)
    elif isinstance(value, dict):
        yield from _found(list(value.values()))


def unreturned(place: str, value: Any, home: torch.device | None, number: Callable[[Any], bool]) -> Any:
    """`value`, in which a trace's tensors and numbers are replaced. `home`: where the job's tensors lie."""
    if isinstance(value, FakeTensor):
        like = (tuple(value.shape), tuple(value.stride()), value.dtype, home or value.device, value.requires_grad)
        return Unreturned.at(place, *like)
    if number(value):
        dtype = value.dtype if isinstance(value, torch.Tensor) else torch.float64
        return Unreturned.at(place, (), (), dtype, torch.device("cpu"), False)
    if isinstance(value, dict):
        return _alike(value, {k: unreturned(f"{place}[{k!r}]", v, home, number) for k, v in value.items()})
    if isinstance(value, (tuple, list)):
        return _alike(value, [unreturned(f"{place}[{i}]", v, home, number) for i, v in enumerate(value)])
    return value


def _alike(old: Any, new: Any) -> Any:
    make: Callable[..., Any] = type(old)
    return make(*new) if hasattr(old, "_fields") else make(new) if make in (list, tuple, dict) else new
