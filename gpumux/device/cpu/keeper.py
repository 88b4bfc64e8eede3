"""Keeps a warm process running and listens to it, whatever becomes of it. No torch."""

from __future__ import annotations

import select
from collections.abc import Sequence
from typing import Protocol

from gpumux.device.cpu.warm import WarmProcess


class Owner(Protocol):
    """Who is told what the warm process has to say."""

    def child_exited(self, token: int, status: int | str) -> None: ...

    def can_fork(self, warm: WarmProcess) -> None:
        """It is there and has room for requests."""

    def warm_lost(self, how: str) -> None:
        """It died, and the kernel killed its children with it."""


class Keeper:
    """`warm` is None before `start`, after `close`, and when a new one would not become ready either."""

    def __init__(self, epoll: select.epoll, owner: Owner, operators: Sequence[str] = ()) -> None:
        self.warm: WarmProcess | None = None
        self._epoll = epoll
        self._owner = owner
        self._operators = operators
        self._writes = False

    def start(self) -> None:
        self.warm = WarmProcess(self._operators)
        self._writes = False
        self._epoll.register(self.warm.channel.fileno(), select.EPOLLIN)

    def watch(self) -> None:
        """After requests: listen for room to send what did not go yet."""
        if self.warm is not None and self.warm.wants_write != self._writes:
            self._writes = self.warm.wants_write
            mask = select.EPOLLIN | (select.EPOLLOUT if self._writes else 0)
            self._epoll.modify(self.warm.channel.fileno(), mask)

    def hear(self) -> None:
        """Send what waits, and pass on what it says."""
        if self.warm is None:
            return
        self.warm.flush()
        try:
            for token, status in self.warm.receive():
                self._owner.child_exited(token, status)
            self._owner.can_fork(self.warm)
        except EOFError:
            self._lose(self.warm)

    def kill(self, token: int) -> None:
        if self.warm is not None:
            self.warm.kill(token)
            self.watch()

    def close(self) -> None:
        if self.warm is not None:
            self.warm.close()
            self.warm = None

    def _lose(self, warm: WarmProcess) -> None:
        how = f"ended with the process that started it, which {warm.close()}"
        self.warm = None
        # One that never got as far as being ready would not the next time either.
        if warm.facts is not None:
            self.start()
        self._owner.warm_lost(how)
