"""Waiting for many descriptors at once, a third of the cost of zmq.Poller."""

from __future__ import annotations

import select
from collections.abc import Iterable

IN = select.EPOLLIN


class Waiter:
    """Watches descriptors in named groups, which may change."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._groups: dict[int, str] = {}

    def follow(self, group: str, fds: Iterable[int]) -> None:
        """Watch exactly `fds` under this name from now on."""
        wanted = set(fds)
        watched = {fd for fd, name in self._groups.items() if name == group}
        for fd in watched - wanted:
            del self._groups[fd]
            try:
                self._epoll.unregister(fd)
            except OSError:
                pass  # closed by its owner, which takes it out of the set
        for fd in wanted - watched:
            self._epoll.register(fd, IN)
            self._groups[fd] = group

    def wait(self, seconds: float) -> set[str]:
        """The groups that may have something, after `seconds` at most."""
        groups = self._groups
        return {groups[fd] for fd, _ in self._epoll.poll(seconds) if fd in groups}

    def close(self) -> None:
        self._epoll.close()
