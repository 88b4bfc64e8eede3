"""The state of an array: each buffer of the models' tables B times, one model after another."""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Callable
from typing import TypeAlias
from weakref import WeakKeyDictionary

import torch

from gpumux.client.state import StateTable, byte_view
from gpumux.errors import NotFusible

Key: TypeAlias = "tuple[str, int, int]"  # name, bytes of one model, how many of that name and size came before
STREAM: Key = ("random generator", 0, 0)


_keys: WeakKeyDictionary[StateTable, tuple[list[Key], Counter[tuple[str, int]]]] = WeakKeyDictionary()


def keys_of(table: StateTable) -> list[Key]:
    """What names each buffer in every model's table, though they may have found theirs in another order."""
    keys, seen = _keys.setdefault(table, ([], Counter()))  # kept, since buffers are only ever added
    for buffer in table.buffers[len(keys) :]:
        named = buffer.name, buffer.nbytes
        keys.append((*named, seen[named]))
        seen[named] += 1
    return keys


def key_of(table: StateTable, index: int) -> Key:
    return keys_of(table)[index]


class Memory:
    """`lines[key]` is a line of bytes; model b's are the b-th of B equal parts."""

    def __init__(self, models: int) -> None:
        self.models = models
        self.lines: dict[Key, torch.Tensor] = {}
        self._maps: dict[Key, mmap.mmap] = {}

    def line(self, key: Key, nbytes: int) -> tuple[torch.Tensor, bool]:
        """The line of a key, and whether it is new (zeros)."""
        found = self.lines.get(key)
        if found is not None:
            return found, False
        return self._new(key, nbytes * self.models), True

    def _new(self, key: Key, nbytes: int) -> torch.Tensor:
        """Zeros on a page boundary, given back when nobody holds them."""
        try:
            self._maps[key] = mmap.mmap(-1, max(1, nbytes))
        except (OSError, MemoryError) as error:
            raise NotFusible(
                f"there is no memory for {nbytes} bytes of state ({error})", "put fewer models into one array"
            ) from error
        made = self.lines[key] = torch.frombuffer(self._maps[key], dtype=torch.uint8)[:nbytes]
        return made

    def run(self, key: Key, first: int, count: int) -> torch.Tensor:
        """`count` models' parts from model `first` on, as the start of a storage of its own."""
        nbytes = self.lines[key].numel() // self.models
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._maps[key], dtype=torch.uint8, count=nbytes * count, offset=nbytes * first)

    def part(self, key: Key, model: int) -> torch.Tensor:
        line = self.lines[key]
        nbytes = line.numel() // self.models
        return line[model * nbytes : (model + 1) * nbytes]

    def push(self, key: Key, model: int, table: StateTable, index: int) -> None:
        """Copy the local bytes of a buffer in, where they mean something."""
        buffer = table.buffers[index]
        if buffer.filled:
            part = self.part(key, model)
            for storage, start in buffer.home:
                part[start : start + storage.nbytes()].copy_(byte_view(storage))

    def pull(self, model: int, table: StateTable) -> Callable[[Callable[[int, torch.Tensor], None]], None]:
        """As `localstate` takes it: hands each buffer that is here to a function."""

        def pull(write: Callable[[int, torch.Tensor], None]) -> None:
            for index in range(len(table.buffers)):
                key = key_of(table, index)
                if key in self.lines:
                    write(index, self.part(key, model))

        return pull

    def without(self, model: int) -> Memory:
        """Another Memory, of one model fewer."""
        made = Memory(self.models - 1)
        for key, line in self.lines.items():
            rows = line.view(self.models, -1)
            made._new(key, line.numel() // self.models * made.models)
            made.lines[key].view(made.models, -1).copy_(torch.cat([rows[:model], rows[model + 1 :]]))
        return made

    def with_one(self) -> Memory:
        """Another Memory, with a model of zeros at its end."""
        made = Memory(self.models + 1)
        for key, line in self.lines.items():
            made._new(key, line.numel() // self.models * made.models)
            made.lines[key][: line.numel()].copy_(line)
        return made
