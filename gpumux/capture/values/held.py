"""The values of the model's state by which a step's Python decides: a flag in a buffer, a mask, a frozen scale.

Such a value is known while a step is traced if no step of the job writes it, because the local model has it as well. It
becomes part of the trace, and each later call compares the local bytes: other ones need another variant. A buffer whose
value was read can't be written by a step, unless it counts, or is a flag: then it is a number of each step, which the
client computes (Outside.count).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from functools import partial
from typing import NamedTuple

import torch
import torch.utils._pytree as pytree

from gpumux.capture.outside.tensors import COUNTER
from gpumux.capture.recorder import Recorder, TraceRecord
from gpumux.capture.side_effects import LeftNumbers
from gpumux.capture.state import StateTable, byte_view, raw_bytes
from gpumux.capture.symbols import Expr, Number
from gpumux.capture.values.constants import constant_value
from gpumux.errors import CaptureError, DataDependent

# Of a buffer, as its bytes are compared at each call, and of a tensor of no model, as masks of attention are.
MOST_BYTES = 1 << 16
MOST_BYTES_OUTSIDE = 1 << 22


def counts(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds one whole number or flag, in memory of its own."""
    whole = tensor.numel() == 1 and tensor.untyped_storage().nbytes() == tensor.nbytes
    return whole and tensor.dtype in (torch.int64, torch.bool, torch.uint8) and tensor.device.type == "cpu"


class ReadValue(NamedTuple):
    """A buffer's bytes when they were read. `error`: what is raised if a step writes the buffer."""

    data: bytes
    error: DataDependent


class HeldValues:
    """The buffers of one job whose values its steps' Python read, and those that its steps write. None is both."""

    def __init__(self, table: StateTable, *, replicas: bool) -> None:
        """`replicas`: the job has its state twice, and so two values of each number in it."""
        self._table = table
        self._replicas = replicas
        self._written: set[int] = set()
        self._read: dict[int, DataDependent] = {}
        self._used: set[int] = set()

    def note(self, used: Set[int], written: Set[int], read: Mapping[int, ReadValue]) -> list[torch.Tensor]:
        """A step uses and writes these buffers, and its Python has read those in `read`. Returns the tensors that must
        be numbers of each step, after which it is traced anew. Raises DataDependent."""
        readers = self._read | {buffer: one.error for buffer, one in read.items()}
        both = sorted((self._written | written) & readers.keys())
        if both:
            counters = [self.counter(buffer) for buffer in both]
            found = [tensor for tensor in counters if tensor is not None]
            if len(found) == len(both):
                return found
            error = readers[both[0]]
            raise DataDependent(error.message, error.remedy)
        self._used |= used
        self._written |= written
        self._read = readers
        return []

    def counter(self, buffer: int) -> torch.Tensor | None:
        """The tensor on a buffer if it may be a number of each step. No earlier Program may use it, as it would not see
        how the number changes."""
        if buffer in self._used or self._replicas:
            return None
        there = [
            t for _, t in self._table.tensors if (found := self._table.lookup(t)) is not None and found[0] == buffer
        ]
        return there[0] if len(there) == 1 and counts(there[0]) else None

    def same(self, read: Mapping[int, bytes]) -> bool:
        """Whether these buffers hold the same bytes now."""
        return all(self._bytes(buffer) == data for buffer, data in read.items())

    def content(self, buffer: int) -> bytes | None:
        """The bytes of a buffer of the models, or of a tensor of no model that steps only read. None for those that
        steps write, and for large ones and those on a GPU, whose comparison at each call would take too long."""
        table = self._table
        home, size = table.buffers[buffer].home, table.buffers[buffer].nbytes
        outside = self._outside(buffer)
        most = MOST_BYTES_OUTSIDE if outside else MOST_BYTES
        if table.twins is not None or len(home) != 1 or not 0 < size <= most or buffer in self._written:
            return None
        return self._bytes(buffer) if outside or table.of_models(buffer) else None

    def _outside(self, buffer: int) -> bool:
        """Whether nothing but tensors of no model lies on a buffer, which no step trains or counts."""
        table = self._table
        there = [t for _, t in table.only_read if (found := table.lookup(t)) is not None and found[0] == buffer]
        others = [t for _, t in [*table.tensors, *table.written]]
        if any((found := table.lookup(t)) is not None and found[0] == buffer for t in others):
            return False
        return bool(there) and not any(t.requires_grad or counts(t) for t in there)

    def _bytes(self, buffer: int) -> bytes:
        memory = byte_view(self._table.buffers[buffer].home[0][0])
        return bytes(raw_bytes(memory))


class ReadValues:
    """The values of state that one trace reads."""

    def __init__(self, held: HeldValues, *, gpu: bool) -> None:
        """`gpu`: whether steps run on a GPU, whose operators may give other bits than those of the CPU."""
        self._held = held
        self._gpu = gpu
        self.found: dict[int, ReadValue] = {}

    def value(self, record: TraceRecord, view: int, error: DataDependent) -> torch.Tensor | None:
        """The value of a view that is made from constants and from such state alone, None for any other. `error`: what
        reading another value raises."""
        if self._gpu and record.storages[record.views[view].storage].kind != "state":
            return None
        used: dict[int, ReadValue] = {}

        def content(storage: int) -> torch.Tensor | None:
            buffer = record.storages[storage].key
            data = self._held.content(buffer)
            if data is None or any(storage in op.writes for op in record.ops):
                return None
            used[buffer] = ReadValue(data, error)
            return torch.frombuffer(bytearray(data), dtype=torch.uint8)

        value = constant_value(record, view, content)
        if value is not None:
            self.found = used | self.found
        return value


# ---- Tensors that are numbers of each step (Outside.count)


def open_counters(table: StateTable, recorder: Recorder) -> list[Expr]:
    """Symbols for these tensors in a trace."""
    found = []
    for i, (_, tensor) in enumerate(table.counters):
        found.append(recorder.scope.var(f"{COUNTER}{i}", int(tensor)))
        recorder.host[tensor.untyped_storage()._cdata] = found[-1]
    return found


def counted(
    table: StateTable, recorder: Recorder, before: Sequence[Expr], replaced: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> list[LeftNumbers]:
    """What the trace left in these tensors. `before`: what `open_counters` gave. `replaced`: (old, new) of tensors in
    whose places the step put new ones. Raises CaptureError for what is no number of the client's."""
    news = {id(old): new for old, new in replaced}
    found = []
    for old, (name, tensor) in zip(before, table.counters, strict=True):
        last = news.get(id(tensor), tensor)
        if not recorder.is_host(last):
            raise CaptureError(
                f"the step writes into {name}, by whose value its Python decides, what only the daemon computes (values"
                " of tensors, or operators besides + - * // % on whole numbers)",
                "count by whole numbers: counter += 1, counter[0] = (n + 1) % k",
            )
        new = recorder.host[last.untyped_storage()._cdata]
        if new is not old:
            found.append(LeftNumbers(partial(fill, tensor), (new,), pytree.tree_structure(0)))
    return found


def fill(tensor: torch.Tensor, value: Number) -> None:
    """Have a local tensor hold a number."""
    with torch.no_grad():
        tensor.fill_(value)
