"""The slots that batches go to: `Job.collate` stacks samples directly into one, so that step() copies nothing.

A data loader stacks samples into a batch, which is one copy, and step() copies the batch into shared memory, which is
another. A `collate_fn` that stacks into a free slot of the job saves one of them. The right slot depends on the
Program that the coming step will run. The guess is the Program of the newest step with such a batch. If the guess is
wrong, or no slot is free, step() copies the batch: a wrong guess costs only a copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree

from gpumux.client.recovery import Recovery
from gpumux.client.remote import Remote, RemoteProgram
from gpumux.program.ir import contiguous_strides

Form = tuple[tuple[torch.dtype, tuple[int, ...]], ...]  # (dtype, shape) of each tensor of a batch


@dataclass(slots=True)
class _Lent:
    """A slot into which a batch is being collated. `back` returns the slot when its tensors are dropped unused."""

    program: RemoteProgram
    slot: int
    back: Any


class BatchSlots:
    """Chooses the slot of each batch of a job, and lends free ones to `collate`."""

    def __init__(self, remote: Remote, recovery: Recovery) -> None:
        self._remote = remote
        self._recovery = recovery
        self._newest: dict[Form, int] = {}  # Program that ran a batch of this form
        self._lent: dict[int, _Lent] = {}  # by the address of its first tensor

    def collate(self, samples: Sequence[Any]) -> Any:
        """Job.collate()."""
        if self._recovery.session.forked:
            return _stacked(None, samples)
        with self._recovery.lock:
            self._recovery.ensure_open()
            return _stacked(self, samples)

    def pick(self, number: int, tensors: Sequence[torch.Tensor]) -> tuple[RemoteProgram, int, bool]:
        """Program `number`, a slot of it, and whether this batch lies in it already."""
        self._newest[tuple([(t.dtype, tuple(t.shape)) for t in tensors])] = number
        slot = self._claim(self._remote.programs[number], tensors)
        if slot is not None:
            return self._remote.programs[number], slot, True
        # All others may be under way, while one waits for its batch to come back.
        while not self._remote.programs[number].free:
            self._recovery.wait(lambda: bool(self._remote.programs[number].free), None)
            self._recovery.check_open()
        program = self._remote.programs[number]
        return program, program.free.pop(), False

    def take(self, form: Form) -> list[torch.Tensor] | None:
        """Take a free slot for a batch of this form. Returns tensors over its inputs, to be filled and given to the
        next step, or None if the batch can't lie in a slot. Waits for a step to free one if needed."""
        program = self._remote.programs.get(self._newest.get(form, -1))
        if program is None or program.inline or not form or any(0 in size for _, size in form):
            return None
        views = [program.program.views[v] for v in program.program.inputs[: len(form)]]
        if any(view.stride != contiguous_strides(view.size) for view in views):
            return None
        lent = sum(other.program is program for other in self._lent.values())
        if lent + 1 >= len(program.slots):  # one slot stays for batches that step() copies
            return None
        self._recovery.wait(lambda: bool(program.free), None)
        if self._remote.programs.get(program.number) is not program:
            return None  # the job was recovered meanwhile
        slot = program.free.pop()
        made = [target.detach() for target in program.slots[slot].inputs[: len(form)]]
        address = made[0].data_ptr()
        back = weakref.finalize(made[0], self._dropped, address)
        back.atexit = False
        self._lent[address] = _Lent(program, slot, back)
        return made

    def _claim(self, program: RemoteProgram, tensors: Sequence[torch.Tensor]) -> int | None:
        """The slot that this batch fills already, None if it lies in no slot."""
        lent = self._lent.get(tensors[0].data_ptr()) if tensors else None
        if lent is None or lent.program is not program:
            return None
        inputs = program.slots[lent.slot].inputs[: len(tensors)]
        if any(a.data_ptr() != b.data_ptr() or a.stride() != b.stride() for a, b in zip(tensors, inputs, strict=True)):
            return None
        lent.back.detach()
        del self._lent[tensors[0].data_ptr()]
        return lent.slot

    def _dropped(self, address: int) -> None:
        lent = self._lent.pop(address, None)
        if lent is not None:
            lent.program.free.add(lent.slot)


def _stacked(slots: BatchSlots | None, samples: Sequence[Any]) -> Any:
    """As torch's default_collate, into a slot where there is one. Samples are pytrees of tensors, numpy arrays and
    numbers, all alike."""
    from torch.utils.data import default_collate

    leaves, spec = pytree.tree_flatten(samples[0])
    columns: list[list[Any]] = [[] for _ in leaves]
    for sample in samples:
        found, other = pytree.tree_flatten(sample)
        if other != spec:
            return default_collate(list(samples))  # says what is wrong with them
        for column, leaf in zip(columns, found, strict=True):
            column.append(leaf)
    form = tuple([_form(column) for column in columns])
    made = slots.take(form) if slots is not None and None not in form else None  # type: ignore[arg-type]
    if made is None:
        return default_collate(list(samples))
    for target, column in zip(made, columns, strict=True):
        if isinstance(column[0], (bool, int, float)):
            target.copy_(torch.tensor(column))
        else:
            torch.stack([torch.as_tensor(leaf) for leaf in column], out=target)
    return pytree.tree_unflatten(made, spec)


_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}  # as default_collate has them


def _form(column: list[Any]) -> tuple[torch.dtype, tuple[int, ...]] | None:
    """The dtype and shape of the stacked column; None if it can't be stacked."""
    first = column[0]
    kind = _NUMBERS.get(type(first))
    if kind is not None:
        return (kind, (len(column),)) if all(type(leaf) is type(first) for leaf in column) else None
    if not (isinstance(first, torch.Tensor) or type(first).__module__ == "numpy"):
        return None
    tensors = [torch.as_tensor(leaf) for leaf in column]
    shape = tuple(tensors[0].shape)
    same = all(t.dtype == tensors[0].dtype and tuple(t.shape) == shape and not t.requires_grad for t in tensors)
    return (tensors[0].dtype, (len(column), *shape)) if same else None
