"""Waiting for many descriptors at once, a third of the cost of zmq.Poller."""

from __future__ import annotations

import select
from collections.abc import Iterable

IN = select.EPOLLIN


class Waiter:
    """Watches descriptors in named groups, which may change, through an epoll that may watch others."""

    def __init__(self, epoll: select.epoll) -> None:
        self._epoll = epoll
        self._groups: dict[int, str] = {}

    def follow(self, group: str, fds: Iterable[int]) -> None:
        """Watch exactly `fds` under this name from now on. They stay open while they are watched."""
        wanted = set(fds)
        watched = {fd for fd, name in self._groups.items() if name == group}
        for fd in watched - wanted:
            del self._groups[fd]
            self._epoll.unregister(fd)
        for fd in wanted - watched:
            self._epoll.register(fd, IN)
            self._groups[fd] = group

    def wait(self, seconds: float) -> tuple[set[str], list[tuple[int, int]]]:
        """After `seconds` at most: the groups that may have something, and (descriptor, events) of
        those that others watch."""
        groups: set[str] = set()
        others: list[tuple[int, int]] = []
        for event in self._epoll.poll(seconds):
            name = self._groups.get(event[0])
            if name is None:
                others.append(event)
            else:
                groups.add(name)
        return groups, others
