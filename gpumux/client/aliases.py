"""Finds the tensors of a script that lie over a job's storages: `p.data`, detached views, windows onto a flat buffer."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Container, Sequence

import torch

_use_count = torch._C._storage_Use_Count


class Aliases:
    """A storage counts its references: tensors, and one for Python's own handle of it. Where there are more than those known,
    tensors are looked for among all objects of the process: a tenth of a second. What has no Python object (a DLPack capsule, a
    graph that autograd keeps) is not found, and is reason to look again, as a tensor may have come in the place of another."""

    def __init__(self) -> None:
        self._found: list[weakref.ref[torch.Tensor]] = []

    def of(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors over the storages of `tensors`, other than these. Needs torch functions to be off."""
        mine = set(map(id, tensors))
        storages = {s._cdata: s for s in (t.untyped_storage() for t in tensors)}
        known: dict[int, int] = dict.fromkeys(storages, 1)  # the handle in `storages`
        for tensor in {id(t): t for t in tensors}.values():
            known[tensor.untyped_storage()._cdata] += 1
        alive = [t for r in self._found if (t := r()) is not None and id(t) not in mine]
        for tensor in alive:
            key = tensor.untyped_storage()._cdata
            if key in known:
                known[key] += 1
        counts = [_use_count(key) for key in storages]
        unexplained = any(n > known[key] for n, key in zip(counts, storages, strict=True))
        if unexplained:
            alive = search(storages, mine)
        self._found = [weakref.ref(t) for t in alive]
        return [t for t in alive if t.untyped_storage()._cdata in storages]


def search(storages: Container[int], mine: Container[int] = ()) -> list[torch.Tensor]:
    """All tensors over these storages that Python objects hold, but those whose ids are in `mine`. Needs torch functions to be
    off."""
    found = []
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and id(thing) not in mine:
            try:
                if thing.untyped_storage()._cdata in storages:
                    found.append(thing)
            except (NotImplementedError, RuntimeError):  # a tensor without a storage
                continue
    return found
