"""How other threads, and signal handlers, wake the loop."""

from __future__ import annotations

import os


class Wakeup:
    """An eventfd that makes the loop's poll return; safe from any thread and from signal handlers."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._open = True

    def set(self) -> None:
        if self._open:
            os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            pass  # nobody called since the last time

    def close(self) -> None:
        self._open = False
        os.close(self.fd)
