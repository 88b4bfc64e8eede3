"""Hyper-parameter tuning over arrays of models: HFHT (HFTA, appendix E) on unchanged models.

Start with `run.py`, then `sweep.py` (the loop) and `trainer.py` (what schedulers implement). `cli` and users import it;
it may import `client`, `fuse`, `simulate` (pictures) and `program`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpumux.tune.run import tune

__all__ = ["tune"]


def __getattr__(name: str) -> Any:
    # torch takes seconds to import
    if name in __all__:
        return getattr(importlib.import_module("gpumux.tune.run"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
