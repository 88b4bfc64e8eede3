"""A model that lives on a GPU, traced on the CPU: twins of its memory stand in for it.

Tracing runs the step's Python over fake tensors of the CPU (trace.py), and autograd wants parameters where gradients
come from. So for the length of a trace the job's own tensors are CPU tensors of the same sizes, strides and identity,
over memory that nobody touches: a storage of the GPU's has one twin, for good, and a tensor that was found by its
storage is found by its twin's as well. Nothing is copied, and the GPU does nothing.
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
    """Whether tensors there have to be traced as something else."""
    return device.type == "cuda"


def over(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    """`like`'s window, onto another storage."""
    base = torch.empty(0, dtype=like.dtype, device=storage.device)
    return base.set_(storage, like.storage_offset(), like.size(), like.stride())


class Twins:
    """By storage. Keeps both alive: their addresses are their names."""

    def __init__(self) -> None:
        self._twin: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}  # (real, twin), by the real one
        self._real: dict[int, int] = {}  # by the twin's

    def real(self, storage: int) -> int:
        """The storage a twin stands for; any other is itself."""
        return self._real.get(storage, storage)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same window onto the twin of the tensor's storage. A twin is its own."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._real:
            return tensor
        found = self._twin.get(storage._cdata)
        if found is None:
            # Not torch.empty, which fills what it gives while deterministic algorithms are asked for.
            found = self._twin[storage._cdata] = (storage, torch.UntypedStorage(storage.nbytes()))
            self._real[found[1]._cdata] = storage._cdata
        with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
            return over(found[1], tensor)

    @contextmanager
    def standing_in(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Inside, each of the tensors is its twin, by whatever reference it is found. They have no gradients then."""
        grads = [tensor.grad if tensor.is_leaf else None for tensor in tensors]
        homes: list[tuple[torch.Tensor, torch.Tensor]] = []
        try:
            for tensor in tensors:
                home = tensor.data
                if tensor.is_leaf:
                    tensor.grad = None  # of another device than the tensor will be
                tensor.data = self.of(home)
                homes.append((tensor, home))
            yield
        finally:
            for tensor, home in homes:
                if tensor.is_leaf:
                    tensor.grad = None
                tensor.data = home
            for tensor, grad in zip(tensors, grads, strict=True):
                if grad is not None:
                    tensor.grad = grad


# ---- Device names inside a step mean the job's device.
#
# A step says `x.to("cuda")` or `torch.zeros(3, device="cuda")` because that is where it runs without gpumux. It is
# traced on the CPU, and the Program names no device (ir.Tag). So while it is traced, such names are turned into the
# tracing device's before torch sees them, and nothing of the step makes a context on a GPU. Tensors say that they lie
# on the tracing device.


_NAME = re.compile(r"cuda(?::(\d+))?$")


class DeviceNames(TorchFunctionMode):
    """`home`: where the local model lies, if there is one; `here`: where steps are traced."""

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
        """Whether this names a GPU. Raises CaptureError when it is another one than the model's."""
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
    """For the length of a trace. `gpu`: whether one is concerned at all."""
    if not gpu:
        yield
        return
    with torch.device(here), DeviceNames(home, here):  # the first in case of torch.set_default_device("cuda")
        yield
