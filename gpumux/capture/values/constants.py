"""The values of tensors that a step makes from constants and sizes alone, such as nn.Transformer's masks.

Python may read such a value while a step is traced, since it is the same in every step: the operators that made it are
run once, on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils._python_dispatch import _disable_current_modes

from gpumux.capture.recorder import RawOp, TraceRecord
from gpumux.capture.values.machine import PATTERN_ONLY, Inconclusive, Machine
from gpumux.program.ir import Arg, ScalarRef

MOST_BYTES = 1 << 30  # of all tensors that are made for one value


# The bytes of a storage of state whose value is known, None for any other.
Known = Callable[[int], "torch.Tensor | None"]


def constant_value(record: TraceRecord, view: int, known: Known = lambda storage: None) -> torch.Tensor | None:
    """The value that a view has now. None if it depends on the batch, on state that is not `known`, on draws or on
    numbers that change, or if it can't be computed here."""
    made = _made_by(record, record.views[view].storage, known)
    if made is None:
        return None
    ops, memory = made
    with _disable_current_modes(), torch.no_grad(), torch.autocast("cpu", enabled=False):
        machine = Machine(record, wide=False)
        for storage, content in memory.items():
            machine.hold(storage, content)
        try:
            for op in ops:
                for storage in op.reads:
                    if storage not in machine:  # a pattern
                        machine.hold(storage, torch.empty(record.storages[storage].nbytes, dtype=torch.uint8))
                machine.run(op)
        except Inconclusive:
            return None
        return machine.tensor(view).clone()


def _made_by(
    record: TraceRecord, storage: int, known: Known
) -> tuple[list[RawOp], dict[int, torch.Tensor]] | None:  # fmt: skip
    """The operators that a storage's present content is made by, and the content of the state that they read. None if
    they read anything else but constants."""
    needed = {storage}
    found: list[RawOp] = []
    for op in reversed(record.ops):
        if op.writes & needed:
            if op.random is not None or _varies(op.args) or _varies(tuple(value for _, value in op.kwargs)):
                return None
            pattern = op.target.split(".")[1] in PATTERN_ONLY
            needed |= op.writes if pattern else op.reads | op.writes
            found.append(op)
    storages = {index: record.storages[index] for index in needed}
    if any(one.kind not in ("temp", "const", "state") for one in storages.values()):
        return None
    if sum(one.nbytes for one in storages.values()) > MOST_BYTES:
        return None
    memory = {}
    for index, one in storages.items():
        if one.kind == "state":
            content = known(index)
            if content is None:
                return None
            memory[index] = content
    return found[::-1], memory


def _varies(value: Arg) -> bool:
    """Whether a number that changes from step to step is among arguments."""
    return isinstance(value, ScalarRef) or (isinstance(value, tuple) and any(map(_varies, value)))
