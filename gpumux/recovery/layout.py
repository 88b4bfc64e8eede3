"""How a job's state lies in a segment: its buffers end to end, each on 64 bytes, as in transfers; then its generator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpumux.model import GENERATOR_BYTES
from gpumux.program.ir import aligned


def places(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(offset, bytes) of each buffer."""
    at = 0
    for nbytes in sizes:
        yield at, nbytes
        at += aligned(nbytes)


def staged_bytes(sizes: Sequence[int]) -> int:
    """Bytes of a segment for buffers of these sizes and the generator."""
    return sum(map(aligned, sizes)) + GENERATOR_BYTES
