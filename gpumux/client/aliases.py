"""Finds the tensors of a script that lie over a job's storages: `p.data`, detached views, windows onto a flat buffer."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Container, Sequence

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_use_count = torch._C._storage_Use_Count


class Aliases:
    """A storage counts its references: tensors, and one for Python's own handle of it. Where there are more than those known,
    tensors are looked for among all objects of the process: a tenth of a second. What has no Python object (a DLPack capsule, a
    graph that autograd keeps) is not found, and is reason to look again, as a tensor may have come in the place of another."""

    def __init__(self) -> None:
        self._found: list[weakref.ref[torch.Tensor]] = []

    def of(self, tensors: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, int]]:
        """Tensors over the storages of `tensors`, other than these, each with the `_cdata` of the storage. Needs torch functions
        to be off."""
        mine = set(map(id, tensors))
        storages = {s._cdata: s for s in (t.untyped_storage() for t in tensors)}
        known: dict[int, int] = dict.fromkeys(storages, 1)  # the handle in `storages`
        for tensor in {id(t): t for t in tensors}.values():
            known[tensor.untyped_storage()._cdata] += 1
        alive = [
            (t, key)
            for r in self._found
            if (t := r()) is not None and id(t) not in mine and (key := _over(t, storages))
        ]
        for _, key in alive:
            known[key] += 1
        if any(_use_count(key) > known[key] for key in storages):
            alive = search(storages, mine)
        self._found = [weakref.ref(t) for t, _ in alive]
        return alive


def search(storages: Container[int], mine: Container[int] = ()) -> list[tuple[torch.Tensor, int]]:
    """All tensors over these storages that Python objects hold, but those whose ids are in `mine`, each with the `_cdata` of its
    storage. Needs torch functions to be off."""
    return [
        (thing, key)
        for thing in gc.get_objects()
        if issubclass(type(thing), torch.Tensor) and id(thing) not in mine and (key := _over(thing, storages))
    ]


def _over(tensor: torch.Tensor, storages: Container[int]) -> int:
    """Which of these the tensor lies over, itself or with its values (of a sparse or nested one); 0 for none."""
    if is_traceable_wrapper_subclass(tensor):
        inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        return next((key for part in inner if (key := _over(part, storages))), 0)
    try:
        if tensor.layout is not torch.strided:
            tensor = tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()
        key = tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # a tensor without a storage
        return 0
    return key if key in storages else 0
