"""Checksums of storages, which show writes that leave no other trace.

A write through `p.data`, a numpy array or a DLPack capsule changes no version counter of the parameter. Between a fetch
and the next step the local bytes must stay what the daemon holds, so their sums are noted after the fetch and compared
at the step.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

_ROW = 1024  # words of eight bytes


class Checksums:
    """Noted checksums of storages."""

    def __init__(self) -> None:
        self._noted: dict[int, tuple[torch.UntypedStorage, tuple[torch.Tensor, ...]]] = {}

    def note(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Note the present sums of these storages."""
        for storage in storages:
            self._noted[storage._cdata] = (storage, sums(storage))

    def note_more(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Note the present sums of those of these storages that are not noted yet."""
        self.note([storage for storage in storages if storage._cdata not in self._noted])

    def renew(self) -> None:
        """Note the present sums of all noted storages."""
        self.note([storage for storage, _ in self._noted.values()])

    def replace(self, old: torch.UntypedStorage, new: torch.UntypedStorage) -> None:
        """Note the sums of another storage in the place of one."""
        self._noted.pop(old._cdata, None)
        self.note([new])

    def forget(self) -> None:
        self._noted.clear()

    def changed(self) -> bool:
        """Whether the bytes of a noted storage have changed."""
        return any(self.differs(storage) for storage, _ in self._noted.values())

    def differs(self, storage: torch.UntypedStorage) -> bool:
        """Whether this storage is noted and its bytes have changed."""
        found = self._noted.get(storage._cdata)
        if found is None:
            return False
        before, now = found[1], sums(found[0])
        return len(before) != len(now) or not all(map(torch.equal, before, now))


def sums(storage: torch.UntypedStorage) -> tuple[torch.Tensor, ...]:
    """The sums of a storage's 8-byte words by row and by column, and the remaining bytes that fill no row. A changed
    word changes both sums. So do two words that are swapped, because they can share a row or a column, but not both."""
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))
    whole = flat.numel() // (8 * _ROW) * (8 * _ROW)
    rest = flat[whole:].clone()
    if not whole or flat.data_ptr() % 8:
        return (rest,) if not whole else (flat.clone(),)
    rows = flat[:whole].view(torch.int64).view(-1, _ROW)
    return rows.sum(1), rows.sum(0), rest
