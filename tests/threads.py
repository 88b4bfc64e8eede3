"""How many threads torch has in a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch


@contextmanager
def with_threads(count: int) -> Iterator[None]:
    """Torch has `count` threads in here, and as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def one_thread() -> AbstractContextManager[None]:
    """Torch has one thread in here, as the daemons of tests have."""
    return with_threads(1)
