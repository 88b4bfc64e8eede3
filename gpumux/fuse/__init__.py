"""Horizontal fusion: many models of one kind train as one (papers: HFTA, MLSys'21)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpumux.fuse.array import Array as Array

__all__ = ["Array"]


def __getattr__(name: str) -> Any:
    if name == "Array":  # torch takes seconds to import
        from gpumux.fuse.array import Array

        return Array
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
