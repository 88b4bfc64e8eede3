"""What these tests say of an array: by which way its operators went."""

from __future__ import annotations

from gpumux import fuse
from tests.fuse.serial import ways


def by(array: fuse.Array, *ways_of: str) -> set[str]:
    """The operators of which at least one went one of these ways, without "aten." and ".default"."""
    found = ways(array)
    return {t.removeprefix("aten.").removesuffix(".default") for t, how in found.items() if how & set(ways_of)}
