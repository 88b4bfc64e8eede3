"""Support: which operators of an array ran in which way."""

from __future__ import annotations

from gpumux import fuse
from tests.fuse.serial import ways


def by(array: fuse.Array, *ways_of: str) -> set[str]:
    """The operators of which at least one ran in one of these ways, without "aten." and ".default"."""
    found = ways(array)
    return {t.removeprefix("aten.").removesuffix(".default") for t, how in found.items() if how & set(ways_of)}
