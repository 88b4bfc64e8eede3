"""Batches that are put together where the device reads them: no copy is left for step() to make.

A data loader stacks samples into a batch, which is one copy, and step() lays the batch into shared memory, which is another. A `collate_fn`
that stacks into a free slot of the job's makes one of both. Which slot is right depends on the Program the coming step will run;
it is taken to be the one that the newest step with such a batch ran. If it is another one after all, or no slot is free for it, the
step copies as ever: nothing depends on the guess but a copy.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree

from gpumux.client.remote import Remote, RemoteProgram
from gpumux.client.session import Session
from gpumux.program.builder import contiguous_strides

Form = tuple[tuple[torch.dtype, tuple[int, ...]], ...]


@dataclass(slots=True)
class Lent:
    """A slot that somebody fills. `back` returns it when its tensors are dropped unused."""

    program: RemoteProgram
    slot: int
    back: Any


@dataclass(slots=True)
class Slots:
    """A job's slots, as `collate` sees them. `programs`: those in the daemon, by number; `wait(predicate)` receives until it is true."""

    programs: dict[int, RemoteProgram]
    wait: Callable[[Callable[[], bool]], bool]
    _newest: dict[Form, int] = field(default_factory=dict)  # Program that ran a batch of this form
    _lent: dict[int, Lent] = field(default_factory=dict)  # by the address of its first tensor

    def ran(self, number: int, tensors: Sequence[torch.Tensor]) -> None:
        """A step with this batch runs Program `number`."""
        self._newest[tuple([(t.dtype, tuple(t.shape)) for t in tensors])] = number

    def take(self, form: Form) -> list[torch.Tensor] | None:
        """Tensors over the inputs of a free slot for a batch of this form, to be filled and given to the next step; None where
        there is none to be had. Waits for the oldest step where that will free one."""
        program = self.programs.get(self._newest.get(form, -1))
        if program is None or program.inline or not form or any(0 in size for _, size in form):
            return None
        views = [program.program.views[v] for v in program.program.inputs[: len(form)]]
        if any(view.stride != contiguous_strides(view.size) for view in views):
            return None
        lent = sum(other.program is program for other in self._lent.values())
        if lent + 1 >= len(program.slots):  # one stays for batches that come another way
            return None
        self.wait(lambda: bool(program.free))
        if self.programs.get(program.number) is not program:
            return None  # the job came back meanwhile
        slot = program.free.pop()
        made = [target.detach() for target in program.slots[slot].inputs[: len(form)]]
        address = made[0].data_ptr()
        back = weakref.finalize(made[0], self._dropped, address)
        back.atexit = False
        self._lent[address] = Lent(program, slot, back)
        return made

    def claim(self, program: RemoteProgram, tensors: Sequence[torch.Tensor]) -> int | None:
        """The slot that this batch fills already, None if it lies elsewhere."""
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


class Slotted:
    """The part of a Job that knows which slot a batch goes to."""

    _lock: threading.RLock
    _remote: Remote
    _session: Session
    _slots: Slots | None = None  # until somebody collates

    _check_open: Callable[[], None]
    _wait: Callable[[Callable[[], bool], float | None], bool]

    def collate(self, samples: Sequence[Any]) -> Any:
        """A `collate_fn` for torch.utils.data.DataLoader: stacks samples as torch's does, but straight into the shared memory
        that step() hands to the device, so that step() copies nothing. The batch is the step's once step() was called with it:
        don't read it afterwards. In worker processes (`num_workers`), over tcp, with max_inflight=1, and for the first batches of a
        shape it makes ordinary batches. Raises JobClosed, JobFailed or DaemonGone as step() does."""
        if self._session.forked:
            return stacked(None, samples)
        with self._lock:
            self._check_open()
            if self._slots is None:
                self._slots = Slots(self._remote.programs, lambda done: self._wait(done, None))
            return stacked(self._slots, samples)

    def _pick_slot(self, number: int, tensors: Sequence[torch.Tensor]) -> tuple[RemoteProgram, int, bool]:
        """Program `number`, a slot of it, and whether this batch lies in it already."""
        if self._slots is None:
            program = self._remote.programs[number]
            return program, program.free.pop(), False
        self._slots.ran(number, tensors)
        slot = self._slots.claim(self._remote.programs[number], tensors)
        if slot is not None:
            return self._remote.programs[number], slot, True
        while not self._remote.programs[
            number
        ].free:  # the others are under way, and one waits for its batch to come back
            self._wait(lambda: bool(self._remote.programs[number].free), None)
            self._check_open()
        program = self._remote.programs[number]
        return program, program.free.pop(), False


def stacked(slots: Slots | None, samples: Sequence[Any]) -> Any:
    """As torch's default_collate, into a slot where there is one. Samples are pytrees of tensors, numpy arrays and numbers, all alike."""
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
    """Of the stacked column; None where it can't be stacked."""
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
