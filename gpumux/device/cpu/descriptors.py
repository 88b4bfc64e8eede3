"""Descriptors that travel with a command to an executor."""

from __future__ import annotations

import os
from collections.abc import Sequence


class Descriptors:
    """Descriptors of a command under way, ours to close exactly once: sent, or never to be sent."""

    def __init__(self, fds: Sequence[int]) -> None:
        self.fds = tuple(fds)

    def close(self) -> None:
        fds, self.fds = self.fds, ()
        for fd in fds:
            os.close(fd)
