"""Frames to events: the daemon's end of the control channel.

A session is one client connection after its Hello. It is bound to the routing id *and* to the peer that the kernel (or
CURVE) names: ZeroMQ lets a client choose its routing id, so a frame belongs to a session only if both agree. An error
of a client ends its own session and nothing else:

    a malformed message, or one only daemons send     Refusal, session over
    too many messages or bytes                        Refusal, session over, connection cut
    too many connections                              the newest cut
    a grant that was released                         session over
    a full send queue, a vanished connection          session over
    silence for lease_s                               session over
    a closed channel                                  session over
    frames outside a session                          Refusal; too many: connection cut

A local client's steps, their answers and descriptors go by its channel (wire/channel.py), all other messages by ZeroMQ.
A message on the channel is delivered before any later ZeroMQ message, in both directions. A ZeroMQ message that finds
the channel unread is held until as much has been read as was there, one message in each pass: a client that fills its
channel delays no other client's messages. While an answer waits for room on a full channel, all later messages of that
session wait behind it. A client that lets `send_queue` messages wait is dropped.

The router handles Hello, Heartbeat and Goodbye, and passes all other messages on. It reads no clock: `now` (seconds,
any monotonic clock) comes with each call. In every turn a loop calls `receive(now)` and then `expire(now)`, and waits
on `fds()` until `next_deadline(now)`.
"""

from __future__ import annotations

import errno
import os
import secrets
import select
import socket
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import zmq

import gpumux
from gpumux.errors import AccessDenied, AdmissionRefused, DaemonGone, GpumuxError, ProtocolError
from gpumux.types import Peer, SessionId
from gpumux.wire.channel import FROM_DAEMON, PACKET, DaemonChannel, decode_packet
from gpumux.wire.codec import decode, encode
from gpumux.wire.connections import RESERVED, RESERVED_SESSIONS, SLACK, Connection
from gpumux.wire.grants import TOKEN, GrantDirectory, holder
from gpumux.wire.limits import Limits
from gpumux.wire.listen import FULL, TRUSTED, Listening, Route, Sockets, check_descriptors
from gpumux.wire.messages import (
    FROM_CLIENT,
    PROTOCOL_VERSION,
    Goodbye,
    GrantedHello,
    Heartbeat,
    Hello,
    Leaving,
    Message,
    OpenChannel,
    Refusal,
    SegmentPassed,
    Step,
    StepFailed,
    Welcome,
)
from gpumux.wire.peers import ServerCurve, cut, identify, peer_name, with_groups

ROLES = ("client", "control")
_POLLIN = int(zmq.POLLIN)
_OUT, _IN = int(select.EPOLLOUT), int(select.EPOLLIN)
_ACCEPT_EVERY = 8  # busy passes between checks for new channels, which are less urgent than steps
CHANNELS_A_PASS = 128  # channels read in one pass, one message of each
_ROUNDS = 2  # after so many all connections have been read from: the first may have begun before
MAX_DESCRIPTORS = 64  # descriptors that wait for one client to read
_SHORT = 4000  # characters of a text that has to fit a packet

GOODBYE = "the client said goodbye"  # the reason in Closed of a session that ended well
GONE = "the client is gone"
TAKES_NO_DESCRIPTORS = "the client does not take its descriptors"

# ---- Events about sessions, which the router reports to the loop.


@dataclass(frozen=True, slots=True)
class Opened:
    """A session began. `inline`: its tensors travel as frames, never in segments."""

    session: SessionId
    peer: Peer
    hello: Hello
    inline: bool


class Incoming(NamedTuple):
    """A message of an open session, checked field by field, not yet interpreted."""

    session: SessionId
    peer: Peer
    message: Message
    frames: list[bytes]


@dataclass(frozen=True, slots=True)
class Closed:
    """A session has ended, by either side. No other arrival of it follows."""

    session: SessionId
    peer: Peer
    reason: str


Arrival = Opened | Incoming | Closed


class Unsent(NamedTuple):
    """A message that waits for room on a session's channel, or behind one that does. `fd`: its descriptor, which this
    record owns; -1 without."""

    parts: Sequence[bytes | memoryview]
    by_channel: bool
    fd: int


class HeldMessage(NamedTuple):
    """A message by ZeroMQ that came while its session's channel held others. `mark`: bytes that were read from the
    channel when those have been."""

    parts: list[bytes]
    mark: int


# ---- What one client may send in a while.


class Meter:
    """A token bucket: `rate` tokens a second, at most `burst` saved up. Starts full."""

    __slots__ = ("_at", "_burst", "_rate", "_tokens")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate = rate
        self._burst = burst
        self._tokens = burst
        self._at = now

    def spend(self, tokens: float, now: float) -> bool:
        """Take `tokens`. Takes none and returns False if there are too few."""
        have = min(self._tokens + (now - self._at) * self._rate, self._burst)
        self._at = now
        if have < tokens:
            self._tokens = have
            return False
        self._tokens = have - tokens
        return True

    def is_full(self, now: float) -> bool:
        return self._tokens + (now - self._at) * self._rate >= self._burst


class Allowance:
    """The messages and bytes that a session may still send: two meters in one, since every message counts for both."""

    __slots__ = ("_at", "_bytes", "_limits", "_messages")

    def __init__(self, limits: Limits, now: float) -> None:
        self._limits = limits
        self._messages = limits.burst_messages
        self._bytes = limits.burst_bytes
        self._at = now

    def spend(self, size: int, now: float) -> bool:
        """Count a message of `size` bytes. Returns False if it exceeds the allowance."""
        limits, passed = self._limits, now - self._at
        self._at = now
        messages = self._messages + passed * limits.messages_per_s
        if messages > limits.burst_messages:
            messages = limits.burst_messages
        held = self._bytes + passed * limits.bytes_per_s
        if held > limits.burst_bytes:
            held = limits.burst_bytes
        enough = messages >= 1 and held >= size
        self._messages, self._bytes = (messages - 1, held - size) if enough else (messages, held)
        return enough


class UserMeters:
    """A meter for each user. `make`: a full one of this user, at a time."""

    def __init__(self, make: Callable[[int, float], Meter]) -> None:
        self._make = make
        self._meters: dict[int, Meter] = {}  # by uid

    def spend(self, uid: int, now: float) -> bool:
        """Take one of the user's tokens. Returns False if there is none."""
        meter = self._meters.get(uid)
        if meter is None:
            meter = self._meters[uid] = self._make(uid, now)
        return meter.spend(1, now)

    def tidy(self, now: float) -> None:
        """Drop meters that are full again, because their users have taken nothing for long."""
        for uid in [uid for uid, meter in self._meters.items() if meter.is_full(now)]:
            del self._meters[uid]


# ---- Open sessions.


@dataclass(slots=True, eq=False)
class RouterSession:
    """The router's record of an open session. `heard` and `sent`: times of the newest messages."""

    id: SessionId
    peer: Peer
    process: Peer  # the same as the kernel or CURVE names it: the holder of a grant is a user of its own
    name: str  # the peer_name that each frame of the session must have
    route: tuple[int, bytes]  # which listening socket, routing id
    welcome: Welcome
    allowance: Allowance
    heard: float
    sent: float
    inline: bool  # its tensors travel as frames; it has no channel
    connection: Connection | None = None  # of ZeroMQ
    channel: DaemonChannel | None = None  # once its client has opened it
    unsent: deque[Unsent] = field(default_factory=deque)
    held: deque[HeldMessage] = field(default_factory=deque)
    overdue: int = -1  # how often all connections had been read from when it was found silent; -1: it was not

    @classmethod
    def begin(
        cls,
        session: SessionId,
        peer: Peer,
        process: Peer,
        name: str,
        route: tuple[int, bytes],
        welcome: Welcome,
        limits: Limits,
        now: float,
    ) -> RouterSession:
        return cls(session, peer, process, name, route, welcome, Allowance(limits, now), now, now, not welcome.channel)

    def may_deliver(self) -> bool:
        """Whether the next held message waits for nothing on the channel."""
        if not self.held or self.channel is None:
            return False
        return self.channel.taken >= self.held[0].mark or not self.channel.unread()


def check_hello(hello: Hello, peer: Peer, over_ipc: bool, others: Sequence[Peer], limits: Limits) -> None:
    """Raise ProtocolError or AdmissionRefused if this session may not begin. `others`: the peers of all open
    sessions. Root and the daemon's user have RESERVED_SESSIONS that others can't take."""
    if hello.role not in ROLES:
        raise ProtocolError(f"the role {hello.role!r} is unknown", f"use one of {', '.join(ROLES)}")
    if not over_ipc and not hello.inline:
        raise ProtocolError("descriptors can't travel over tcp", "say inline, or use the ipc endpoint")
    mine = sum(other.uid == peer.uid for other in others)
    if mine >= limits.max_sessions_per_user:
        raise AdmissionRefused(
            f"{limits.max_sessions_per_user} sessions of this user are open already", "close some clients"
        )
    if peer.uid in TRUSTED and mine < RESERVED_SESSIONS:
        return
    kept = sum(min(RESERVED_SESSIONS, sum(other.uid == uid for other in others)) for uid in TRUSTED)
    if len(others) - kept >= limits.max_sessions:
        raise AdmissionRefused(f"{limits.max_sessions} sessions are open already", "close some clients")


def make_welcome(session: SessionId, channel: str, nonce: bytes, limits: Limits, device: dict[str, Any]) -> Welcome:
    return Welcome(
        protocol=PROTOCOL_VERSION,
        gpumux_version=gpumux.__version__,
        session=session,
        channel=channel,
        nonce=nonce,
        heartbeat_s=limits.heartbeat_s,
        lease_s=limits.lease_s,
        max_message_bytes=limits.max_message_bytes,
        device=device,
    )


# ---- The router.


class Router:
    """Binds `endpoints` (texts) and a socket for local channels beside the first ipc one, or in `runtime_dir` if all
    are tcp. Raises ConfigError if an endpoint can't be bound, and EndpointBusy if another daemon serves there.

    `grants`: the first endpoint is for holders of these grants alone, whatever user they run as; None: no endpoint is.

    `device` holds the facts about the device in Welcome (types.DeviceInfo as a map); set it before the first `receive`.
    `counters` counts refusals and ends of sessions by reason.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        runtime_dir: Path,
        limits: Limits | None = None,
        curve: ServerCurve | None = None,
        *,
        grants: GrantDirectory | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self._grants = grants
        self.device: dict[str, Any] = {}
        self.at: SessionId | None = None  # the session that is looked after; if a call raises, a bug, it is about it
        self.failed: Callable[[Exception], None] = _raise  # is called with a bug about a message of no session
        self.counters: Counter[str] = Counter()
        self._sessions: dict[SessionId, RouterSession] = {}
        self._routes: dict[Route, RouterSession] = {}
        self._sessionless = UserMeters(
            lambda uid, now: Meter(self.limits.sessionless_per_s, self.limits.burst_sessionless, now)
        )  # messages outside any session
        self._arrivals: list[Arrival] = []
        self._passes = 0
        self._behind = False  # the last receive() left messages in the sockets
        self._rounds = 0  # how often every connection that had a message has been read from
        self._round_at = 0  # the pass in which the last of them ended
        self._told = 0  # of these rounds, those that the sockets know of
        self._holding: dict[SessionId, RouterSession] = {}  # sessions with held messages
        self._may_deliver = False  # a held message waits for nothing any more
        self._next_check = float("-inf")
        self._by_fd: dict[int, RouterSession] = {}  # sessions with an open channel, by its descriptor
        self.sockets = Sockets(endpoints, runtime_dir, self.limits, curve, first_for_all=grants is not None)

    # ---- calls of the loop -----------------------------------------------------------------------

    @property
    def addresses(self) -> list[str]:
        """The endpoints as bound."""
        return [listening.address for listening in self.sockets.listening]

    @property
    def session_count(self) -> int:
        return len(self._sessions)

    def fds(self) -> list[zmq.Socket[bytes] | int]:
        """Sockets and descriptors to register with a zmq.Poller for POLLIN. The set never changes."""
        return self.sockets.fds()

    def receive(self, now: float) -> list[Arrival]:
        """Receive at most one message of each socket and channel, of all clients in turn. Never waits."""
        self.sockets.touched = True
        self.at = None
        if self.sockets.gatekeeper is not None:
            self.sockets.gatekeeper.process()
        self._hear_channels(self.sockets.epoll.poll(0, CHANNELS_A_PASS), now)
        for index, listening in enumerate(self.sockets.listening):
            self._receive_from(index, listening, now)
        self._behind = self.sockets.unread()
        self._passes += 1
        if not self._behind or self._passes >= self._round_at + _passes_of_a_round(self.limits):
            self._rounds, self._round_at = self._rounds + 1, self._passes
        self._deliver_held()
        if not self._arrivals or self._passes % _ACCEPT_EVERY == 0:
            self.at = None
            for session, connection in self.sockets.channels.process(now):
                self.at = session
                self._channel_opened(session, connection)
        return self._take()

    def receive_channels(self, ready: Sequence[tuple[int, int]], now: float) -> list[Arrival]:
        """Receive one message from each channel that `sockets.epoll` reports as ready. Never waits."""
        self._hear_channels(ready, now)
        self._deliver_held()
        return self._take()

    def expire(self, now: float) -> list[Arrival]:
        """End sessions that were silent for lease_s, send heartbeats that are due, and close connections that have not
        named their session."""
        self.at = None
        self._deliver_held()
        self.sockets.channels.expire(now)
        if not self._behind or self._rounds != self._told:
            self._told = self._rounds
            self.sockets.all_read()
        if now >= self._next_check:
            self._next_check = now + self.limits.heartbeat_s / 4
            for session in list(self._sessions.values()):
                self.at = session.id
                self._check_silence(session, now)
            self.at = None
            self._sessionless.tidy(now)
            if self.sockets.refused_connections:
                self.counters["connections"] = self.sockets.refused_connections
        return self._take()

    @property
    def has_news(self) -> bool:
        """Whether there are arrivals that `receive` or `expire` has not returned yet."""
        return bool(self._arrivals) or self._may_deliver

    def next_deadline(self, now: float) -> float:
        """The latest time for the next call of `expire`; `now` if arrivals wait already."""
        return now if self.has_news else min(self._next_check, self.sockets.channels.next_deadline())

    def send(self, session: SessionId, msg: Message, frames: Sequence[bytes | memoryview] = ()) -> bool:
        """Queue `msg` for the client; never waits. Returns False if the session is closed, or is closed by this
        (`Closed` then comes with the next receive or expire). Raises ProtocolError for a message that breaks the
        protocol."""
        record = self._sessions.get(session)
        if record is None:
            return False
        parts = encode(msg, frames)
        by_channel = record.channel is not None and type(msg) in FROM_DAEMON
        if by_channel and len(parts[0]) > PACKET:
            parts = _in_one_packet(msg)
        return self._send(record, parts, by_channel)

    def channel_of(self, session: SessionId) -> int | None:
        """The descriptor of the session's channel, for a device that answers steps itself; None without a channel."""
        record = self._sessions.get(session)
        return record.channel.fileno() if record is not None and record.channel is not None else None

    def send_segment(self, session: SessionId, segment: int, fd: int, nbytes: int) -> bool:
        """Pass a descriptor over the channel under the id `segment`, which a later message announces. The caller keeps
        `fd`. Returns False if the session is closed, or is closed by this."""
        record = self._sessions.get(session)
        if record is None:
            return False
        if record.channel is None:
            error = ProtocolError("this session takes no shared memory: its channel is not open", "open it first")
            self._refuse_session(session, error)
            return False
        return self._send(record, encode(SegmentPassed(segment, nbytes)), True, fd)

    def close_session(self, session: SessionId, error: GpumuxError) -> None:
        """End one session, and send its client the error."""
        self._refuse_session(session, error)

    def close(self, reason: str = "the daemon is shutting down") -> None:
        """Tell every client that the daemon leaves, then close sockets, files and locks. Waits at most half a second
        for the messages to leave. Idempotent."""
        for record in list(self._sessions.values()):
            self._put(record.route, Leaving(reason))
            self._close_channel(record)
        self._sessions.clear()
        self._routes.clear()
        self.sockets.close()

    def use_limits(self, limits: Limits) -> None:
        """Apply these limits from now on. Sessions keep the values in their Welcome."""
        self.limits = limits
        self.sockets.limit(limits)

    # ---- receiving -------------------------------------------------------------------------------

    def _receive_from(self, index: int, listening: Listening, now: float) -> None:
        """Receive one message of a socket, if there is one. libzmq takes from its connections in turn."""
        self.at = None
        sock = listening.socket
        if not int(sock.getsockopt(zmq.EVENTS)) & _POLLIN:  # cheaper than an exception
            return
        over_ipc = listening.endpoint.is_ipc
        identity = sock.recv(zmq.NOBLOCK)
        first = sock.recv(copy=False)
        parts = [first.bytes]
        if first.more:
            parts += sock.recv_multipart()
        name = peer_name(first, over_ipc)
        route = (index, identity)
        session = self._routes.get(route)
        if session is not None and session.name != name:
            # The connection of this session is gone, and another process took its routing id.
            self.counters["impostor"] += 1
            self._end(session.id, "another process took the connection's name")
            session = None
        if session is None:
            try:
                self._from_no_session(route, name, over_ipc, first, parts, now)
            except Exception as error:  # noqa: BLE001 - a bug; no session is to blame, and the message is read
                self.failed(error)
        else:
            self.at = session.id
            self._from_session(session, first, parts, now)

    def _from_session(self, session: RouterSession, first: zmq.Frame, parts: list[bytes], now: float) -> None:
        if not self._allow(session, sum(map(len, parts)), now):
            cut(first, session.process)
            return
        unread = session.channel.unread() if session.channel is not None else 0
        if session.channel is not None and (unread or session.held):
            # Messages on the channel were written before this one, so they come first.
            if len(session.held) >= self.limits.send_queue:
                self._flooded(session)
                return
            session.held.append(HeldMessage(parts, session.channel.taken + unread))
            self._holding[session.id] = session
            return
        self._deliver(session, parts)

    def _deliver_held(self) -> None:
        """Deliver the next held message of each session, if its channel has been read that far."""
        self._may_deliver = False
        for session in list(self._holding.values()):
            if not session.may_deliver():
                continue
            self.at = session.id
            self._deliver(session, session.held.popleft().parts)
            if not session.held:
                self._holding.pop(session.id, None)
            elif session.may_deliver():
                self._may_deliver = True

    def _deliver(self, session: RouterSession, parts: list[bytes]) -> None:
        try:
            message, frames = decode(parts, self.limits.max_control_bytes)
            if type(message) not in FROM_CLIENT:
                raise ProtocolError(f"{type(message).__name__} is a message for clients")
            if type(message) is OpenChannel or (type(message) is Step and not session.inline):
                raise ProtocolError(f"a {type(message).__name__} by ZeroMQ", "send it on the session's channel")
        except ProtocolError as error:
            self.counters["malformed"] += 1
            self._refuse_session(session.id, error)
            return
        if isinstance(message, Hello):
            self.send(session.id, session.welcome)  # a repeated Hello gets the same answer
        elif isinstance(message, Goodbye):
            self._end(session.id, GOODBYE)
        elif not isinstance(message, Heartbeat):
            self._arrivals.append(Incoming(session.id, session.peer, message, frames))

    def _allow(self, session: RouterSession, size: int, now: float) -> bool:
        """Count a message of `size` bytes. Ends the session, and returns False, if it sent too much."""
        session.heard = now
        if session.allowance.spend(size, now):
            return True
        self._flooded(session)
        return False

    def _flooded(self, session: RouterSession) -> None:
        self.counters["flood"] += 1
        error = ProtocolError("too many messages or bytes in a short time", "wait for answers before sending more")
        self._refuse_session(session.id, error)

    def _from_no_session(
        self, route: Route, name: str | None, over_ipc: bool, first: zmq.Frame, parts: list[bytes], now: float
    ) -> None:
        peer = identify(name, over_ipc) if name is not None else None
        if name is None or peer is None:
            self.counters["unidentified"] += 1
            return
        if not self._sessionless.spend(peer.uid, now):
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
        process = peer
        peer = self._granted(route, peer, hello, over_ipc)
        check_hello(hello, peer, over_ipc, [record.peer for record in self._sessions.values()], self.limits)
        check_descriptors()
        if peer.grant is None:
            peer = with_groups(first, peer) if over_ipc else self.sockets.named(peer, name)
        session = SessionId(secrets.token_hex(8))
        nonce, path = b"", ""
        if over_ipc and not hello.inline:
            nonce, path = self.sockets.channels.expect(session, process.uid), str(self.sockets.channels.path)
        welcome = make_welcome(session, path, nonce, self.limits, self.device)
        record = self._sessions[session] = RouterSession.begin(
            session, peer, process, name, route, welcome, self.limits, now
        )
        record.connection = self.sockets.named_by(route, first)
        self._routes[route] = record
        self._arrivals.append(Opened(session, peer, hello, hello.inline))
        self.send(session, welcome)

    def _granted(self, route: Route, peer: Peer, hello: Hello, over_ipc: bool) -> Peer:
        """The holder of the grant that was said, where grants count; the peer itself elsewhere. Raises AccessDenied for
        a grant in the wrong place, an unknown one, and none where one is needed."""
        grants = self._grants if route[0] == 0 else None
        if not isinstance(hello, GrantedHello):
            if grants is None:
                return peer
            raise AccessDenied(
                "this socket is for programs that were granted a share of the device",
                f"ask for a share in the pod or job, which sets {TOKEN}, or use another of the daemon's sockets",
            )
        if grants is None:
            raise AccessDenied(
                "grants don't count at this endpoint",
                f"use the GPUMUX_ENDPOINT that came with the grant, or unset {TOKEN} to come as the user that you are",
            )
        return holder(peer, grants.grant_of(hello.grant, int(self.device["memory_bytes"])))

    # ---- channels --------------------------------------------------------------------------------

    def _channel_opened(self, session: SessionId, connection: socket.socket) -> None:
        record = self._sessions[session]
        record.channel = DaemonChannel(connection, self.limits.max_control_bytes)
        self._by_fd[connection.fileno()] = record
        self.sockets.epoll.register(connection, _IN)

    def _hear_channels(self, ready: Sequence[tuple[int, int]], now: float) -> None:
        for fd, events in ready:
            record = self._by_fd.get(fd)
            if record is None:
                continue  # it has just been closed
            self.at = record.id
            if events & _OUT:
                self._flush(record)
            if events != _OUT and record.channel is not None:
                self._hear_channel(record, now)

    def _hear_channel(self, session: RouterSession, now: float) -> bool:
        """Take one message from the session's channel. Returns whether there was one and the session is still open."""
        assert session.channel is not None
        try:
            packet = session.channel.receive()
            if packet is None or not self._allow(session, len(packet), now):
                return False
            message = decode_packet(packet, self.limits.max_control_bytes)
        except EOFError:
            self._end(session.id, GONE)
            return False
        except ProtocolError as error:
            self.counters["malformed"] += 1
            self._refuse_session(session.id, error)
            return False
        if type(message) is Goodbye:
            self._end(session.id, GOODBYE)
            return False
        self._arrivals.append(Incoming(session.id, session.peer, message, []))
        return True

    def _close_channel(self, record: RouterSession) -> None:
        """Close the channel, and the descriptors that wait for it. Idempotent."""
        self.sockets.channels.forget(record.id)
        unsent, record.unsent = record.unsent, deque()
        for waiting in unsent:
            if waiting.fd >= 0:
                os.close(waiting.fd)
        channel, record.channel = record.channel, None
        if channel is not None:
            del self._by_fd[channel.fileno()]
            self.sockets.epoll.unregister(channel.fileno())
            channel.close()

    # ---- sending and ending ----------------------------------------------------------------------

    def _send(self, record: RouterSession, parts: Sequence[bytes | memoryview], by_channel: bool, fd: int = -1) -> bool:
        """Send a message, or queue it behind others that wait for the channel. Returns False if this ended the
        session."""
        if record.unsent:
            failure = self._enqueue(record, parts, by_channel, fd)
        else:
            failure = self._hand_over(record, parts, by_channel, fd)
        if failure:
            self.counters["unreachable"] += 1
            self._end(record.id, failure)
        return not failure

    def _hand_over(self, record: RouterSession, parts: Sequence[bytes | memoryview], by_channel: bool, fd: int) -> str:
        """Send a message while the queue is empty. Returns the failure, "" on success."""
        if not by_channel or record.channel is None:
            return self.sockets.send(record.route, parts)
        try:
            if record.channel.send(parts[0], fd):
                return ""
        except OSError as error:
            return TAKES_NO_DESCRIPTORS if error.errno == errno.ETOOMANYREFS else GONE
        self.sockets.epoll.modify(record.channel.fileno(), _IN | _OUT)
        return self._enqueue(record, parts, by_channel, fd)

    def _enqueue(self, record: RouterSession, parts: Sequence[bytes | memoryview], by_channel: bool, fd: int) -> str:
        """Queue a message. Returns the failure, "" on success."""
        if len(record.unsent) >= self.limits.send_queue:
            return FULL
        if fd >= 0 and sum(waiting.fd >= 0 for waiting in record.unsent) >= MAX_DESCRIPTORS:
            return TAKES_NO_DESCRIPTORS
        try:
            record.unsent.append(Unsent(parts, by_channel, os.dup(fd) if fd >= 0 else -1))
        except OSError:
            self.counters["no_descriptors"] += 1
            return "the daemon has no descriptors left"
        return ""

    def _flush(self, record: RouterSession) -> None:
        """Send queued messages, when the channel has room again."""
        unsent, record.unsent = record.unsent, deque()
        if record.channel is not None:
            self.sockets.epoll.modify(record.channel.fileno(), _IN)
        failure = ""
        while unsent and not failure:
            if record.unsent:  # it is full again
                record.unsent.extend(unsent)
                return
            waiting = unsent.popleft()
            failure = self._hand_over(record, *waiting)
            if waiting.fd >= 0:
                os.close(waiting.fd)
        if failure:
            record.unsent.extend(unsent)  # to be closed
            self._end(record.id, failure)

    def _put(self, route: Route, msg: Message) -> str:
        return self.sockets.send(route, encode(msg))

    def _check_silence(self, record: RouterSession, now: float) -> None:
        grant = record.peer.grant
        if grant is not None and self._grants is not None and not self._grants.holds(grant.name):
            self.counters["grant_released"] += 1
            released = AccessDenied(f"the grant {grant.name} was released", "ask for a share anew")
            self._refuse_session(record.id, released)
            return
        silent = now - record.heard >= self.limits.lease_s
        if not silent:
            record.overdue = -1
        elif record.overdue < 0:
            record.overdue = self._rounds
        # Unread messages may be heartbeats, so while the router is behind a client is silent only if all connections
        # have been read from since. Others that send all the time must not keep it for ever.
        if silent and (not self._behind or self._rounds >= record.overdue + _ROUNDS):
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
        self._holding.pop(session, None)
        record.held.clear()
        self.sockets.left(record.route, record.connection)
        self._close_channel(record)
        self._arrivals.append(Closed(session, record.peer, reason))

    def _take(self) -> list[Arrival]:
        arrivals, self._arrivals = self._arrivals, []
        return arrivals


def _raise(error: Exception) -> None:
    """The default of `Router.failed`."""
    raise error


def _passes_of_a_round(limits: Limits) -> int:
    """After so many passes a message of every connection that had one has been read. libzmq takes from them in turn,
    but for connections that end, which move another one to an earlier place."""
    return 2 * (limits.max_sessions + 3 * SLACK + 2 * RESERVED)


def _in_one_packet(msg: Message) -> list[bytes | memoryview]:
    """Shorten the texts of a StepFailed, so that it fits a packet. No other message is as long."""
    assert isinstance(msg, StepFailed)
    return encode(replace(msg, message=msg.message[:_SHORT] + " ...", remedy=msg.remedy[:_SHORT] + " ..."))
