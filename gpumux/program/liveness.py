"""When each storage is alive. Aliases need no special care: views of one storage are one storage."""

from __future__ import annotations

from dataclasses import dataclass

from gpumux.program.ir import Program
from gpumux.program.validate import op_args, out_views, tensor_refs


@dataclass(frozen=True, slots=True)
class Interval:
    """Operators `birth` to `last`, both inclusive, during which a temporary holds memory. `last` is
    the number of operators for what the results read, after the last of them has run."""

    birth: int
    last: int


def intervals(program: Program) -> tuple[Interval | None, ...]:
    """One entry a storage: its interval, or None for state, inputs and constants, which live through
    the whole step. The Program must have passed `validate`."""
    birth: dict[int, int] = {}
    last: dict[int, int] = {}
    for index, op in enumerate(program.ops):
        used = [program.views[ref.view].storage for ref in tensor_refs(op_args(op))]
        used += [program.views[view].storage for view in out_views(op.outs)]
        for storage in used:
            birth.setdefault(storage, index)
            last[storage] = index
    for view in program.results:
        last[program.views[view].storage] = len(program.ops)
    return tuple(
        [
            Interval(birth[index], last[index]) if storage.kind == "temp" else None
            for index, storage in enumerate(program.storages)
        ]
    )
