"""Tracing on the CPU for a model on a GPU: CPU twins of its storages, and the meaning of device names.

Tracing runs the step's Python over fake tensors of the CPU (tracer.py), and autograd wants parameters on the device of
their gradients. So for the length of a trace the job's own tensors are CPU tensors of the same sizes, strides and
identity, over memory that is never read or written. A storage of the GPU has one twin for good, and tensors are found
by their storage or by its twin. Nothing is copied, and the GPU does nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from gpumux.capture.source import user_line
from gpumux.errors import CaptureError


def elsewhere(device: torch.device) -> bool:
    """Whether tensors on this device need twins to be traced."""
    return device.type == "cuda"


def over(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    """A tensor with the layout of `like` over another storage."""
    base = torch.empty(0, dtype=like.dtype, device=storage.device)
    return base.set_(storage, like.storage_offset(), like.size(), like.stride())


class Twins:
    """The twins of storages. Keeps both alive, because their addresses identify them."""

    def __init__(self) -> None:
        self._twin: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}  # (real, twin), by the real one
        self._real: dict[int, int] = {}  # by the twin's

    def real(self, storage: int) -> int:
        """The storage that a twin belongs to; any other storage itself. Storages are given by address (`_cdata`)."""
        return self._real.get(storage, storage)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the same layout over the twin of the tensor's storage. A twin is its own twin."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._real:
            return tensor
        found = self._twin.get(storage._cdata)
        if found is None:
            # Not torch.empty, which fills its memory while deterministic algorithms are on.
            found = self._twin[storage._cdata] = (storage, torch.UntypedStorage(storage.nbytes()))
            self._real[found[1]._cdata] = storage._cdata
        with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
            return over(found[1], tensor)

    @contextmanager
    def in_place_of(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Inside, each of the tensors has the memory of its twin and no gradient."""
        grads = [tensor.grad if tensor.is_leaf else None for tensor in tensors]
        originals: list[tuple[torch.Tensor, torch.Tensor]] = []
        try:
            for tensor in tensors:
                original = tensor.data
                if tensor.is_leaf:
                    tensor.grad = None  # it is on another device than the twin
                tensor.data = self.of(original)
                originals.append((tensor, original))
            yield
        finally:
            for tensor, original in originals:
                if tensor.is_leaf:
                    tensor.grad = None
                tensor.data = original
            for tensor, grad in zip(tensors, grads, strict=True):
                if grad is not None:
                    tensor.grad = grad


# ---- device names inside a step, which mean the job's device
#
# A step contains `x.to("cuda")` or `torch.zeros(3, device="cuda")` because it runs on a GPU without gpumux. It is
# traced on the CPU, and the Program names no device (ir.Tag). So during the trace such names are replaced by the
# tracing device before torch gets them, and the step creates no context on a GPU. The device of a traced tensor is the
# tracing device.


_NAME = re.compile(r"cuda(?::(\d+))?$")


class DeviceNames(TorchFunctionMode):
    """Replaces names of GPUs by the tracing device. `home`: the device of the local model, None without one; `here`:
    the tracing device."""

    def __init__(self, home: torch.device | None, here: torch.device) -> None:
        super().__init__()
        self._index = home.index if home is not None else None
        self._here = here

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            self._meant(args[1] if len(args) > 1 else kwargs.get("device"))
            return args[0]
        args = tuple(self._here if isinstance(a, torch.device) and self._meant(a) else a for a in args)
        if func is torch.Tensor.to and len(args) > 1 and self._meant(args[1]):
            args = (args[0], self._here, *args[2:])
        if self._meant(kwargs.get("device")):
            kwargs["device"] = self._here
        return func(*args, **kwargs)

    def _meant(self, named: Any) -> bool:
        """Whether `named` names a GPU. Raises CaptureError if it is another one than the model's."""
        index: int | None
        if isinstance(named, torch.device):
            is_gpu, index = named.type == "cuda", named.index
        elif isinstance(named, str):
            found = _NAME.match(named)
            is_gpu, index = found is not None, int(found[1]) if found and found[1] else None
        else:
            is_gpu = isinstance(named, int) and not isinstance(named, bool)
            index = named if is_gpu else None
        if index is not None and self._index is not None and index != self._index:
            raise CaptureError(
                f"{user_line()} places a tensor on GPU {index}, and the model lies on GPU {self._index}",
                "keep a step on one GPU: each job runs on one device",
            )
        return is_gpu


@contextmanager
def names_of_devices(gpu: bool, home: torch.device | None, here: torch.device) -> Iterator[None]:
    """Replace device names for the length of a trace. `gpu`: whether the model or the daemon uses a GPU; if not, do
    nothing."""
    if not gpu:
        yield
        return
    with torch.device(here), DeviceNames(home, here):  # torch.device overrides torch.set_default_device("cuda")
        yield
