"""All that a daemon's router listens on, opened together and closed in the right order."""

from __future__ import annotations

import select
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import zmq

from gpumux.errors import AccessDenied
from gpumux.model import Peer, SessionId
from gpumux.wire.curve import ServerCurve
from gpumux.wire.endpoint import check_distinct, ensure_runtime_dir, parse, side_channel
from gpumux.wire.gatekeeper import Gatekeeper
from gpumux.wire.lanes import Lanes
from gpumux.wire.limits import Limits
from gpumux.wire.listening import Listening
from gpumux.wire.lock import EndpointLock, remove_stale
from gpumux.wire.sidechannel import SideChannel

Route = tuple[int, bytes]  # which listening socket, routing id
_POLLIN = int(zmq.POLLIN)


class Sockets:
    """ZeroMQ's sockets, the side channel, the step lanes. Raises what Router says."""

    side: SideChannel

    def __init__(
        self,
        endpoints: Sequence[str],
        runtime_dir: Path,
        limits: Limits,
        curve: ServerCurve | None,
        introduced: Callable[[SessionId], bool],
    ) -> None:
        self.listening: list[Listening] = []
        self.gatekeeper: Gatekeeper | None = None
        self.touched = True  # a ZeroMQ socket was used since `unread` said no
        self._side_lock: EndpointLock | None = None
        parsed = [parse(text) for text in endpoints]
        path = side_channel(parsed, runtime_dir)
        check_distinct(parsed, path)
        self.lanes = Lanes(limits.max_control_bytes)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        try:
            if curve is not None:
                self.gatekeeper = Gatekeeper(self._context, curve.clients)
            for endpoint in parsed:
                self.listening.append(Listening(self._context, endpoint, limits, curve))
            ensure_runtime_dir(path.parent)
            self._side_lock = EndpointLock(path)
            remove_stale(path)
            self.side = SideChannel(path, introduced)
        except BaseException:
            self._close_rest()
            raise
        self._zmq = [listening.socket for listening in self.listening]
        if self.gatekeeper is not None:
            self._zmq.append(self.gatekeeper.socket)

    def fds(self) -> list[zmq.Socket[bytes] | int]:
        """See Router.fds."""
        return [*self._zmq, self.side.fileno(), self.lanes.fileno()]

    def descriptors(self) -> list[int]:
        """The same as bare descriptors, but for the lanes: their epoll may serve as the loop's own, and
        what it reports of descriptors that nobody else registered is for `receive_lanes`."""
        return [*(int(sock.getsockopt(zmq.FD)) for sock in self._zmq), self.side.fileno()]

    @property
    def lane_epoll(self) -> select.epoll:
        return self.lanes.epoll

    def named(self, peer: Peer, key: str) -> Peer:
        """The tcp peer that holds `key`, with the name of its key's file. Raises AccessDenied if that was removed since it
        connected."""
        found = self.gatekeeper.names.get(key) if self.gatekeeper is not None else None
        if found is None:
            raise AccessDenied("your key is no longer among those this daemon lets in", "ask its operator")
        return replace(peer, key=found)

    def unread(self) -> bool:
        """Whether a ZeroMQ socket has something. Who sleeps on ZeroMQ's bare descriptors, which signal
        changes and not levels, asks before each sleep; it costs nothing while no socket was used."""
        if not self.touched:
            return False
        self.touched = any(int(sock.getsockopt(zmq.EVENTS)) & _POLLIN for sock in self._zmq)
        return self.touched

    @property
    def refused_connections(self) -> int:
        """How many were shut down because somebody had too many."""
        return sum(at.connections.refused for at in self.listening if at.connections is not None)

    def limit(self, limits: Limits) -> None:
        """What counts for connections from now on."""
        for listening in self.listening:
            if listening.connections is not None:
                listening.connections.limits = limits

    def send(self, route: Route, parts: Sequence[bytes | memoryview]) -> str:
        """Hand a message to ZeroMQ; what failed, "" when nothing did."""
        self.touched = True
        return self.listening[route[0]].send(route[1], parts)

    def close(self) -> None:
        """Waits half a second at most for what is still to be sent. Idempotent."""
        if self._zmq:
            self._zmq = []
            self.side.close()
            self._close_rest()

    def _close_rest(self) -> None:
        self.lanes.close()
        if self.gatekeeper is not None:
            self.gatekeeper.close()
        for listening in self.listening:
            listening.close()
        self._context.term()  # the sockets are closed when this returns, so their files may go
        for listening in self.listening:
            listening.release()
        if self._side_lock is not None:
            self._side_lock.close()
