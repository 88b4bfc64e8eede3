"""A model that lives on a GPU, traced on the CPU: twins of its memory stand in for it.

Tracing runs the step's Python over fake tensors of the CPU (trace.py), and autograd wants parameters where gradients
come from. So for the length of a trace the job's own tensors are CPU tensors of the same sizes, strides and identity,
over memory that nobody touches: a storage of the GPU's has one twin, for good, and a tensor that was found by its
storage is found by its twin's as well. Nothing is copied, and the GPU does nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


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
