"""Waiting for sockets and descriptors at once, a third of the cost of zmq.Poller.

ZeroMQ's descriptor signals changes, not levels: it may stay silent while messages wait, so a socket's
events are looked at before every sleep. It may also signal when there is nothing to read; whoever
reads then finds nothing.
"""

from __future__ import annotations

import select
from collections.abc import Iterable, Sequence

import zmq

IN = select.EPOLLIN


class Waiter:
    """Over ZeroMQ sockets, which never change, and plain descriptors in named groups, which may."""

    def __init__(self, sockets: Sequence[zmq.Socket[bytes]]) -> None:
        self._epoll = select.epoll()
        self._sockets = tuple(sockets)
        self._groups: dict[int, str] = {}
        self.follow("sockets", [_number(sock, zmq.FD) for sock in self._sockets])

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
        """The groups that may have something ("sockets" for ZeroMQ's), after `seconds` at most."""
        for sock in self._sockets:
            if _number(sock, zmq.EVENTS) & zmq.POLLIN:
                return self._look(0.0) | {"sockets"}
        return self._look(seconds)

    def _look(self, seconds: float) -> set[str]:
        groups = self._groups
        return {groups[fd] for fd, _ in self._epoll.poll(seconds) if fd in groups}

    def close(self) -> None:
        self._epoll.close()


def _number(sock: zmq.Socket[bytes], option: int) -> int:
    value = sock.getsockopt(option)
    assert isinstance(value, int)  # these options are numbers
    return value
