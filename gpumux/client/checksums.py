"""Sums over the bytes of storages: they show writes that leave no other trace.

A write through `p.data`, a numpy array or a DLPack capsule changes no version counter of the parameter. Between a fetch and the
next step the local bytes must stay what the daemon holds, so they are summed after the one and compared at the other.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

_ROW = 1024  # words of eight bytes


class Checksums:
    """The sums of some storages, as they were when last noted."""

    def __init__(self) -> None:
        self._noted: dict[int, tuple[torch.UntypedStorage, tuple[torch.Tensor, ...]]] = {}

    def note(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """From now on these storages are watched, as they are now."""
        for storage in storages:
            self._noted[storage._cdata] = (storage, sums(storage))

    def forget(self) -> None:
        self._noted.clear()

    def changed(self) -> bool:
        """Whether the bytes of a noted storage are others now."""
        return any(
            len(before) != len(now := sums(storage)) or not all(map(torch.equal, before, now))
            for storage, before in self._noted.values()
        )


def sums(storage: torch.UntypedStorage) -> tuple[torch.Tensor, ...]:
    """The storage as rows of words, added up by row and by column, and the bytes that fill no row. A word that changes shows
    in both, and so do two that change places: they share a row or a column, not both."""
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))
    whole = flat.numel() // (8 * _ROW) * (8 * _ROW)
    rest = flat[whole:].clone()
    if not whole or flat.data_ptr() % 8:
        return (rest,) if not whole else (flat.clone(),)
    rows = flat[:whole].view(torch.int64).view(-1, _ROW)
    return rows.sum(1), rows.sum(0), rest
