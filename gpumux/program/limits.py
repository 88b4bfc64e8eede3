"""How large a Program may be. A hostile client meets these before anything is allocated for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper bounds, inclusive. Sizes in bytes; `body_bytes` is the encoding without its constants."""

    ops: int = 200_000
    views: int = 1_000_000
    storages: int = 500_000
    names: int = 4_096  # distinct operator targets and keyword names
    layers: int = 4_096  # names of the user's layers
    tensors: int = 65_536  # inputs, results, constants, host scalars, gates: of each
    const_bytes: int = 64 << 20
    body_bytes: int = 32 << 20
    string: int = 256  # characters of any one string
    depth: int = 4  # tuples within tuples in one argument
    dims: int = 64  # of one view; torch has the same bound
    storage_bytes: int = 1 << 46  # of one storage, and of one view laid out densely


DEFAULT = Limits()
