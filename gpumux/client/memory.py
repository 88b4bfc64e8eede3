"""A traced step gives no tensor other memory: `p.data = ...` is refused before it happens.

What it would get is a fake tensor's memory, of which there is none: the local tensor would have lost its values. And the daemon has no
such thing as a parameter that lies elsewhere from some operator on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from gpumux.client import blame
from gpumux.client.recorder import Recorder
from gpumux.client.state import StateTable
from gpumux.client.swapping import here, swapped
from gpumux.errors import CaptureError

_DATA: Any = torch._C.TensorBase.data
_OF_STORAGE = ("resize_", "fill_", "copy_", "__setitem__")
_REMEDY = (
    "write into the one it has, under torch.no_grad(): p.copy_(new), p.sub_(lr * p.grad); in place of vector_to_parameters(), "
    "copy_ each part of the vector"
)


@contextmanager
def memory_kept(rec: Recorder, table: StateTable, fn: Callable[..., Any]) -> Iterator[None]:
    """For the length of a trace: a tensor of the script's that would get other memory, or be swapped with another, raises
    CaptureError and is as it was."""
    tracing = threading.get_ident()

    def of_the_script(tensor: Any) -> bool:
        return isinstance(tensor, torch.Tensor) and not isinstance(tensor, FakeTensor) and not rec.is_host(tensor)

    def set_data(self: torch.Tensor, value: Any) -> None:
        if threading.get_ident() == tracing and isinstance(value, torch.Tensor) and of_the_script(self):
            ours = isinstance(value, FakeTensor) or table.lookup(value) is not None
            if ours and table.lookup(self) is not None and _window(rec.to_fake(self)) == _window(rec.to_fake(value)):
                return  # its own, as `.data` or a move to where it is gave it
            raise CaptureError(f"{blame.user_line()} sets .data of {_name(self, table, fn)} to other memory", _REMEDY)
        _DATA.__set__(self, value)

    plain_swap: Callable[[Any, Any], None] = torch.utils.swap_tensors

    def swap(one: Any, other: Any) -> None:
        for tensor in (one, other):
            if one is not other and of_the_script(tensor):
                raise CaptureError(f"{blame.user_line()} swaps {_name(tensor, table, fn)} with another tensor", _REMEDY)
        plain_swap(one, other)

    def of_storage(name: str) -> Callable[..., Any]:
        plain = getattr(torch.UntypedStorage, name)

        def method(self: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == tracing and (owner := _owner(self, table)) is not None:
                raise CaptureError(
                    f"{blame.user_line()} changes the storage of {owner} past torch's operators", _REMEDY
                )
            return plain(self, *args, **kwargs)

        return method

    swaps: list[tuple[Any, str, Any]] = [(torch.UntypedStorage, name, of_storage(name)) for name in _OF_STORAGE]
    swaps += [
        (torch.Tensor, "data", property(_DATA.__get__, set_data)),
        (torch.utils, "swap_tensors", here(plain_swap, swap)),
    ]
    with swapped(swaps):
        yield


def _owner(storage: torch.UntypedStorage, table: StateTable) -> str | None:
    """Whose it is, None where it is not of the job's state."""
    address = storage._cdata if table.twins is None else table.twins.real(storage._cdata)
    owners = (buffer.name for buffer in table.buffers for home, _ in buffer.home if home._cdata == address)
    return next(owners, None)


def _window(tensor: torch.Tensor) -> Any:
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype


def _name(tensor: torch.Tensor, table: StateTable, fn: Callable[..., Any]) -> str:
    for name, known in table.tensors:
        if known is tensor:
            return name
    place = table.lookup(tensor)
    return blame.name_of(tensor, fn) if place is None else table.buffers[place[0]].name
