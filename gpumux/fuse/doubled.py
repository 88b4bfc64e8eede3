"""A Program in float64 instead of float32: what rounding makes of two orders of summation is then far below what a wrong
operator does, also where a step is discontinuous (a maximum, a ReLU) or divides by next to nothing (Adam)."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

from gpumux.program.ir import Arg, Program, Tag

_FROM, _TO = "float32", "float64"


def doubled(program: Program) -> Program | None:
    """The Program with float64 wherever it has float32; None where memory of float32 is also read as another type."""
    dtypes: dict[int, set[str]] = {}
    for view in program.views:
        dtypes.setdefault(view.storage, set()).add(view.dtype)
    changed = {storage for storage, found in dtypes.items() if _FROM in found}
    if any(len(dtypes[storage]) > 1 for storage in changed):
        return None
    storages, consts = list(program.storages), list(program.consts)
    for index in changed:
        storage = storages[index]
        storages[index] = replace(storage, nbytes=2 * storage.nbytes)
        if storage.kind == "const":
            consts[storage.slot] = array("d", array("f", consts[storage.slot])).tobytes()
    views = tuple(replace(v, dtype=_TO) if v.dtype == _FROM else v for v in program.views)
    ops = tuple(
        replace(op, args=_wider(op.args), kwargs=tuple((name, _wider(value)) for name, value in op.kwargs))
        for op in program.ops
    )
    return replace(program, storages=tuple(storages), views=views, ops=ops, consts=tuple(consts))


def _wider(arg: Arg) -> Any:
    if isinstance(arg, tuple):
        return tuple(map(_wider, arg))
    return Tag("dtype", _TO) if arg == Tag("dtype", _FROM) else arg
