"""Numbers to try a split on: the job's state and the example batch, or others like them."""

from __future__ import annotations

import torch

from gpumux.client.ledger import Record
from gpumux.client.microbatch.machine import Inconclusive, Machine
from gpumux.client.microbatch.pairs import call_refs
from gpumux.client.state import StateTable, byte_view


class Loader:
    """Fills a Machine with state and batch. Invented numbers keep a proof from resting on what happens to be
    zero (a last layer that starts there, an example batch of zeros)."""

    def __init__(self, record: Record, table: StateTable, tensors: list[torch.Tensor], split: set[int]) -> None:
        self._record = record
        self._table = table
        self._tensors = tensors
        self._split = split
        self._params = {place.buffer for p in table.params if (place := table.place(p)) is not None}

    def __call__(self, machine: Machine, invented: bool) -> None:
        draw = torch.Generator().manual_seed(1)
        order: dict[int, torch.Tensor] = {}
        for index, storage in enumerate(self._record.storages):
            if storage.kind == "state":
                machine.hold(index, self._state(index, storage.key, draw, invented))
            elif storage.kind == "input":
                machine.hold(index, self._input(storage.key, draw, invented, order))

    def _state(self, index: int, buffer: int, draw: torch.Generator, invented: bool) -> torch.Tensor:
        known = self._table.buffers[buffer]
        flat = torch.zeros(known.nbytes, dtype=torch.uint8)
        for storage, start in known.home if known.filled else ():
            flat[start : start + storage.nbytes()].copy_(byte_view(storage))
        typed = flat.view(self._dtype(index))
        if not typed.is_floating_point() or not typed.numel():
            return typed
        if not known.filled:
            return 0.01 * torch.randn(typed.shape, generator=draw, dtype=torch.float32).to(typed.dtype)
        if not invented:
            return typed
        wide = typed.double()
        typed = wide * (1 + 0.1 * torch.rand(wide.shape, generator=draw, dtype=wide.dtype))  # variances stay positive
        if buffer in self._params:
            typed += (
                0.1 * (float(wide.std(correction=0)) or 0.5) * torch.randn(wide.shape, generator=draw, dtype=wide.dtype)
            )
        return typed.to(flat.view(self._dtype(index)).dtype)

    def _dtype(self, index: int) -> torch.dtype:
        found = {
            self._record.views[v].dtype
            for op in self._record.ops
            for v in call_refs(op)
            if self._record.views[v].storage == index
        }
        if len(found) > 1:
            raise Inconclusive(f"state is read as {' and '.join(sorted(found))}")
        dtype: torch.dtype = getattr(torch, found.pop() if found else "uint8")
        return dtype

    def _input(
        self, position: int, draw: torch.Generator, invented: bool, order: dict[int, torch.Tensor]
    ) -> torch.Tensor:
        """The batch tensor as elements of its storage, in the strides it has."""
        given = self._tensors[position].detach().cpu()
        if invented and given.is_floating_point():
            given = _others(given, draw)
        elif position in self._split:  # other samples meet: the same order for all
            length = given.shape[0]
            if length not in order:
                order[length] = torch.randperm(length, generator=draw)
            given = given[order[length]]
        like = self._tensors[position]
        span = 1 + sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True)) if like.numel() else 0
        flat = torch.zeros(span, dtype=like.dtype)
        if span:
            flat.as_strided(like.shape, like.stride()).copy_(given)
        return flat


def _others(given: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    """Numbers of the same range: between 0 and 1, or about as spread."""
    if not given.numel():
        return given
    wide = given.double()
    if float(wide.min()) >= 0 and float(wide.max()) <= 1:
        return torch.rand(given.shape, generator=draw).to(given.dtype)
    spread = float(wide.std(correction=0)) or 1.0
    return (float(wide.mean()) + spread * torch.randn(given.shape, generator=draw)).to(given.dtype)
