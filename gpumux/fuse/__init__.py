"""Horizontal fusion: many models of one kind train as one Program (HFTA, MLSys'21).

Start with `array.py` (what users call), then `fuse.py` (how B Programs become one). `job.py` runs an array in a daemon.
`tune` and users import it; it may import `capture`, `client`, `wire`, `device` and `program`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpumux.fuse.array import Array
    from gpumux.fuse.job import ArrayJob, submit_array


__all__ = ["Array", "ArrayJob", "submit_array"]

_HOME = {"Array": "gpumux.fuse.array", "ArrayJob": "gpumux.fuse.job", "submit_array": "gpumux.fuse.job"}


if not TYPE_CHECKING:  # a type checker would take any name from it, misspelt ones too

    def __getattr__(name: str) -> Any:
        # torch takes seconds to import
        if name in _HOME:
            return getattr(importlib.import_module(_HOME[name]), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME} - {"Any", "TYPE_CHECKING", "annotations", "importlib"})
