"""Frames to events: the daemon's end of the control channel.

A session is one client connection after its Hello. It is bound to the routing id *and* to the peer
the kernel (or CURVE) names: ZeroMQ lets a client choose its routing id, so a frame is taken for a
session's only if both agree. Everything a client does wrong ends its own session and nothing else:

    a malformed message, or one only daemons send     Refusal, session over
    too many messages or bytes                        Refusal, session over, connection cut
    too many connections                              the newest cut
    a full send queue, a vanished connection          session over
    silence for lease_s                               session over
    a closed side channel or step lane                session over
    frames outside a session                          Refusal; too many: connection cut

What a client wrote to its step lane is handed on before any later ZeroMQ message of it (wire/lane.py);
the other direction is delivery.py's.

The router knows Hello, Heartbeat and Goodbye; all other messages are handed on untouched. It reads
no clock: `now` (seconds, any monotonic clock) comes with each call. A loop calls, every turn,
`receive(now)` and then `expire(now)`, and waits on `fds()` until `next_deadline(now)`.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zmq

from gpumux.errors import DaemonGone, GpumuxError, ProtocolError
from gpumux.types import Peer, SessionId
from gpumux.wire.codec import decode, encode
from gpumux.wire.delivery import Delivery
from gpumux.wire.lanereader import GOODBYE, LaneReader
from gpumux.wire.limits import Limits, Strangers
from gpumux.wire.listen import Listening, Route, Sockets, check_descriptors
from gpumux.wire.messages import FROM_CLIENT, Goodbye, Heartbeat, Hello, Leaving, Message, Refusal
from gpumux.wire.peers import ServerCurve, cut, identify, peer_name, with_groups
from gpumux.wire.sessions import Arrival, Closed, Incoming, Opened, SessionRecord, check_hello, make_welcome

__all__ = ["GOODBYE", "Arrival", "Closed", "Incoming", "Opened", "Router"]

_POLLIN = int(zmq.POLLIN)
_SIDE_EVERY = 8  # busy passes between looks at the side channel, where nothing is as urgent as a step


class Router(LaneReader):
    """Binds `endpoints` (texts) and a side channel beside the first ipc one (`runtime_dir`: where it
    goes when all are tcp). Raises ConfigError for what
    can't be bound and EndpointBusy where another daemon serves.

    `device` is what Welcome tells clients about the device (model.DeviceInfo as a map); set it
    before the first `receive`. `counters` counts what was refused or ended, by reason.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        runtime_dir: Path,
        limits: Limits | None = None,
        curve: ServerCurve | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self.device: dict[str, Any] = {}
        self.counters: Counter[str] = Counter()
        self._sessions: dict[SessionId, SessionRecord] = {}
        self._routes: dict[Route, SessionRecord] = {}
        self._strangers = Strangers(self.limits)
        self._arrivals: list[Arrival] = []
        self._passes = 0
        self._behind = False  # the last receive() stopped before the sockets were empty
        self._next_check = float("-inf")
        self.sockets = Sockets(endpoints, runtime_dir, self.limits, curve, self._lay_lane)
        self._delivery = Delivery(self.sockets, self.limits)
        self._lanes = self.sockets.lanes
        self.recall: Callable[[SessionId], None] = _nobody
        self.side = self.sockets.side

    # ---- what the loop calls ---------------------------------------------------------------------

    @property
    def addresses(self) -> list[str]:
        """The endpoints as bound."""
        return [listening.address for listening in self.sockets.listening]

    @property
    def session_count(self) -> int:
        return len(self._sessions)

    def fds(self) -> list[zmq.Socket[bytes] | int]:
        """What to register with a zmq.Poller for POLLIN. The set never changes."""
        return self.sockets.fds()

    def receive(self, now: float) -> list[Arrival]:
        """What came in, a bounded number of messages, clients in turn. Never waits."""
        self.sockets.touched = True
        if self.sockets.gatekeeper is not None:
            self.sockets.gatekeeper.process()
        self._behind = False
        self._hear_lanes(self._lanes.poll(), now)
        for index, listening in enumerate(self.sockets.listening):
            self._drain(index, listening, now)
        self._passes += 1
        if not self._arrivals or self._passes % _SIDE_EVERY == 0:
            for session in self.side.process(now):
                self._gone(session)
        return self._take()

    def receive_lanes(self, ready: Sequence[tuple[int, int]], now: float) -> list[Arrival]:
        """What came in on step lanes, one message of each that `lane_epoll` says is ready. Never waits."""
        self._hear_lanes(ready, now)
        return self._take()

    def expire(self, now: float) -> list[Arrival]:
        """End sessions that were silent for lease_s, send heartbeats that are due, close
        side-channel connections that never said who they are."""
        self.side.expire(now)
        if now >= self._next_check:
            self._next_check = now + self.limits.heartbeat_s / 4
            for session in list(self._sessions.values()):
                self._check_silence(session, now)
            self._strangers.forget(now)
            if self.sockets.refused_connections:
                self.counters["connections"] = self.sockets.refused_connections
        return self._take()

    @property
    def has_news(self) -> bool:
        """Whether something arrived, or ended, that nobody has taken yet."""
        return bool(self._arrivals)

    def next_deadline(self, now: float) -> float:
        """When `expire` wants to be called, at the latest; `now` when events wait already."""
        return now if self._arrivals else min(self._next_check, self.side.next_deadline())

    def send(self, session: SessionId, msg: Message, frames: Sequence[bytes | memoryview] = ()) -> bool:
        """Queue `msg` for the client; never waits. False when the session is, or thereby becomes,
        closed (`Closed` then comes with the next receive or expire). Raises ProtocolError for a
        message that does not fit the protocol."""
        record = self._sessions.get(session)
        if record is None:
            return False
        failure = self._delivery.send(record, msg, encode(msg, frames))
        if failure:
            self.counters["unreachable"] += 1
            self._end(session, failure)
        return not failure

    def answering_lane(self, session: SessionId) -> int | None:
        """The session's step lane, if its steps are answered there, for who may answer in our place."""
        record = self._sessions.get(session)
        return record.lane.fileno() if record is not None and record.lane and record.steps_on_lane else None

    def send_segment(self, session: SessionId, segment: int, fd: int, nbytes: int) -> bool:
        """Pass a descriptor over the side channel under the id `segment`, to be announced by a
        message after it. The caller keeps `fd`. False when the session is or becomes closed."""
        if session not in self._sessions:
            return False
        if not self.side.send(session, segment, nbytes, fd):
            self._end(session, "the client does not take its descriptors")
            return False
        return True

    def close_session(self, session: SessionId, error: GpumuxError) -> None:
        """End one session from this side, telling the client why."""
        self._refuse_session(session, error)

    def close(self, reason: str = "the daemon is shutting down") -> None:
        """Tell every client that the daemon leaves, then close sockets, files and locks. Waits half
        a second at most for the goodbyes. Idempotent."""
        for record in list(self._sessions.values()):
            self._put(record.route, Leaving(reason))
            self.side.forget(record.id)
        self._sessions.clear()
        self._routes.clear()
        self.sockets.close()

    def use_limits(self, limits: Limits) -> None:
        """What counts from now on. Sessions keep what their Welcome said."""
        self.limits = limits
        self.sockets.limit(limits)

    # ---- receiving -------------------------------------------------------------------------------

    def _drain(self, index: int, listening: Listening, now: float) -> None:
        sock = listening.socket
        over_ipc = listening.endpoint.is_ipc
        for _ in range(self.limits.messages_per_poll):
            if not int(sock.getsockopt(zmq.EVENTS)) & _POLLIN:  # cheaper than an exception
                return
            identity = sock.recv(zmq.NOBLOCK)
            first = sock.recv(copy=False)
            parts = [first.bytes]
            if first.more:
                parts += sock.recv_multipart()
            name = peer_name(first, over_ipc)
            route = (index, identity)
            session = self._routes.get(route)
            if session is not None and session.name != name:
                # The connection this session came by is gone, and somebody else took its name.
                self.counters["impostor"] += 1
                self._end(session.id, "another process took the connection's name")
                session = None
            if session is None:
                self._from_stranger(route, name, over_ipc, first, parts, now)
            else:
                self._from_session(session, first, parts, now)
        self._behind = True

    def _from_session(
        self, session: SessionRecord, first: zmq.Frame, parts: list[bytes], now: float, counted: bool = False
    ) -> None:
        if session.lent and not self._may_pass(session, parts):
            self._wait_for_lane(session, first, parts, now)
            return
        while session.lane is not None and not session.lent and self._hear_lane(session, now):
            pass  # it was written before this message, so it comes first
        if session.id not in self._sessions:
            return
        if not (counted or self._allow(session, sum(map(len, parts)), now)):
            cut(first, session.peer)
            return
        try:
            message, frames = decode(parts, self.limits.max_control_bytes)
            if type(message) not in FROM_CLIENT:
                raise ProtocolError(f"{type(message).__name__} is a message for clients")
        except ProtocolError as error:
            self.counters["malformed"] += 1
            self._refuse_session(session.id, error)
            return
        if isinstance(message, Hello):
            self.send(session.id, session.welcome)  # asked again: the same answer
        elif isinstance(message, Goodbye):
            self._end(session.id, GOODBYE)
        elif not isinstance(message, Heartbeat):
            self._arrivals.append(Incoming(session.id, session.peer, message, frames))

    def _allow(self, session: SessionRecord, size: int, now: float, messages: int = 1) -> bool:
        """A message of `size` bytes came, or several of so many in all. A session that sends too much is over."""
        session.heard = now
        if session.allowance.spend(size, now, messages):
            return True
        self.counters["flood"] += 1
        error = ProtocolError("too many messages or bytes in a short time", "wait for answers before sending more")
        self._refuse_session(session.id, error)
        return False

    def _from_stranger(
        self, route: Route, name: str | None, over_ipc: bool, first: zmq.Frame, parts: list[bytes], now: float
    ) -> None:
        peer = identify(name, over_ipc) if name is not None else None
        if name is None or peer is None:
            self.counters["unidentified"] += 1
            return
        if not self._strangers.allow(peer.uid, now):
            self.counters["flood"] += 1
            cut(first, peer)
            return
        try:
            message, _ = decode(parts, self.limits.max_control_bytes)
            if not isinstance(message, Hello):
                raise DaemonGone("this connection has no session: it ended, or never began", "connect again")
            self._open_session(route, name, peer, message, first, over_ipc, now)
        except GpumuxError as error:
            self.counters[f"stranger_{error.code}"] += 1
            self._put(route, Refusal(0, error.code, error.message, error.remedy))

    def _open_session(
        self, route: Route, name: str, peer: Peer, hello: Hello, first: zmq.Frame, over_ipc: bool, now: float
    ) -> None:
        check_hello(hello, peer, over_ipc, [record.peer for record in self._sessions.values()], self.limits)
        check_descriptors()
        peer = with_groups(first, peer) if over_ipc else self.sockets.named(peer, name)
        session = SessionId(secrets.token_hex(8))
        nonce, path = (self.side.expect(session, peer.uid), str(self.side.path)) if over_ipc else (b"", "")
        welcome = make_welcome(session, path, nonce, self.limits, self.device)
        record = self._sessions[session] = SessionRecord.begin(session, peer, name, route, welcome, self.limits, now)
        self._routes[route] = record
        self._arrivals.append(Opened(session, peer, hello, hello.inline))
        self.send(session, welcome)

    # ---- sending and ending ----------------------------------------------------------------------

    def _put(self, route: Route, msg: Message) -> str:
        return self.sockets.send(route, encode(msg))

    def _check_silence(self, record: SessionRecord, now: float) -> None:
        # Messages that wait unread may be the very heartbeats: then nobody has been silent.
        if now - record.heard >= self.limits.lease_s and not self._behind:
            self.counters["expired"] += 1
            error = DaemonGone(f"nothing was heard from this client for {self.limits.lease_s:g} s", "connect again")
            self._refuse_session(record.id, error)
        elif now - record.sent >= self.limits.heartbeat_s:
            record.sent = now
            self.send(record.id, Heartbeat(now))

    def _refuse_session(self, session: SessionId, error: GpumuxError) -> None:
        record = self._sessions.get(session)
        if record is not None:
            self._put(record.route, Refusal(0, error.code, error.message, error.remedy))
            self._end(session, error.message)

    def _end(self, session: SessionId, reason: str) -> None:
        record = self._sessions.pop(session, None)
        if record is None:
            return
        self._routes.pop(record.route, None)
        self._lanes.close_lane(record)
        self.side.forget(session)
        self._arrivals.append(Closed(session, record.peer, reason))

    def _take(self) -> list[Arrival]:
        arrivals, self._arrivals = self._arrivals, []
        return arrivals


def _nobody(session: SessionId) -> None:
    """Nobody borrows lanes."""
