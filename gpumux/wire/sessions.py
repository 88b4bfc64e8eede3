"""What the router knows about a session, and what it tells the loop about one."""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import zmq

import gpumux
from gpumux.errors import AdmissionRefused, ProtocolError
from gpumux.types import Peer, SessionId
from gpumux.wire.codec import decode_step
from gpumux.wire.lane import FROM_CLIENT, Lane, pair
from gpumux.wire.limits import Allowance, Limits
from gpumux.wire.messages import PROTOCOL_VERSION, Hello, Message, Welcome

ROLES = ("client", "control")


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
    """A session is over, whoever ended it. Nothing of it follows."""

    session: SessionId
    peer: Peer
    reason: str


Arrival = Opened | Incoming | Closed
Late = tuple[zmq.Frame, list[bytes]]
Held = tuple[Sequence[bytes | memoryview], bool]  # a message's frames, whether it goes by the lane


@dataclass(slots=True, eq=False)
class SessionRecord:
    id: SessionId
    peer: Peer
    name: str  # the peer_name of every frame that may speak for it
    route: tuple[int, bytes]  # which listening socket, routing id
    welcome: Welcome
    allowance: Allowance
    heard: float
    sent: float
    lane: Lane | None = None
    steps_on_lane: bool = False  # the client uses it, so steps are answered there
    held: deque[Held] = field(default_factory=deque)  # what waits behind a full lane
    lent: bool = False  # somebody else reads the lane
    hung: bool = False  # the client closed the lane while it was lent
    later: list[Late] = field(default_factory=list)  # what came by ZeroMQ meanwhile, behind what the lane holds

    @classmethod
    def begin(
        cls,
        session: SessionId,
        peer: Peer,
        name: str,
        route: tuple[int, bytes],
        welcome: Welcome,
        limits: Limits,
        now: float,
    ) -> SessionRecord:
        return cls(session, peer, name, route, welcome, Allowance(limits, now), heard=now, sent=now)


def check_hello(hello: Hello, peer: Peer, over_ipc: bool, others: Sequence[Peer], limits: Limits) -> None:
    """Raises ProtocolError or AdmissionRefused when no session may begin. `others`: the peers of
    the sessions that exist."""
    if hello.role not in ROLES:
        raise ProtocolError(f"the role {hello.role!r} is unknown", f"use one of {', '.join(ROLES)}")
    if not over_ipc and not hello.inline:
        raise ProtocolError("descriptors can't travel over tcp", "say inline, or use the ipc endpoint")
    if len(others) >= limits.max_sessions:
        raise AdmissionRefused(f"{limits.max_sessions} sessions are open already", "close some clients")
    if sum(other.uid == peer.uid for other in others) >= limits.max_sessions_per_user:
        raise AdmissionRefused(
            f"{limits.max_sessions_per_user} sessions of this user are open already", "close some clients"
        )


def make_welcome(
    session: SessionId, side_channel: str, nonce: bytes, limits: Limits, device: dict[str, Any]
) -> Welcome:
    return Welcome(
        protocol=PROTOCOL_VERSION,
        gpumux_version=gpumux.__version__,
        session=session,
        side_channel=side_channel,
        nonce=nonce,
        heartbeat_s=limits.heartbeat_s,
        lease_s=limits.lease_s,
        max_message_bytes=limits.max_message_bytes,
        device=device,
    )


# ---- The daemon's ends of the step lanes, watched together.


LANES_A_PASS = 128  # lanes looked at in one pass, one message of each

_IN = select.EPOLLIN
OUT = int(select.EPOLLOUT)  # in a pair of `poll`: the lane can take more


def decode_lane(packet: bytes, max_bytes: int) -> Message:
    """The message a client sent on its lane. Raises ProtocolError for all that has no place there."""
    message = decode_step(packet, max_bytes)
    if type(message) not in FROM_CLIENT:
        raise ProtocolError(f"a {type(message).__name__} on the step lane", "send it by ZeroMQ")
    return message


class Lanes:
    """`epoll` watches them. It may watch other descriptors for its user, too."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.epoll = select.epoll()
        self.records: dict[int, SessionRecord] = {}  # by descriptor of the daemon's end

    def fileno(self) -> int:
        return self.epoll.fileno()

    def open(self, record: SessionRecord) -> int:
        """Make the session's lane; the client's end of it, the caller's to pass on and to close.
        Raises OSError when there are no descriptors left."""
        ours, theirs = pair()
        record.lane = Lane(ours, self._max_bytes)
        self.records[ours.fileno()] = record
        self.epoll.register(ours, _IN)
        return theirs.detach()

    def poll(self) -> list[tuple[int, int]]:
        """(descriptor, events) of what is ready, lanes in turn."""
        return self.epoll.poll(0, LANES_A_PASS)

    def watch(self, record: SessionRecord) -> None:
        """Have `poll` say what there is to do about the lane: to read it unless it is lent, to send what is held."""
        if record.lane is not None and not record.hung:
            self.epoll.modify(record.lane.fileno(), (0 if record.lent else _IN) | (OUT if record.held else 0))

    def lend(self, record: SessionRecord) -> bool:
        """Watch the lane for its end alone: somebody else reads it. False where it can't be lent."""
        lane = record.lane
        if lane is None or record.held or not lane.between:
            return False
        record.lent = True
        self.watch(record)
        return True

    def take_back(self, record: SessionRecord, packet: bytes) -> None:
        """The lane is ours again; `packet`, unless empty, is the next one on it."""
        record.lent = False
        if record.lane is not None and packet:
            record.lane.restore(packet)
        self.watch(record)

    def hang_up(self, record: SessionRecord) -> None:
        """The client closed a lane that is lent: don't say so again."""
        if not record.hung and record.lane is not None:
            record.hung = True
            self.epoll.unregister(record.lane.fileno())

    def close_lane(self, record: SessionRecord) -> None:
        """Idempotent."""
        lane, record.lane = record.lane, None
        if lane is not None:
            del self.records[lane.fileno()]
            if not record.hung:
                self.epoll.unregister(lane.fileno())
            lane.shut_down()  # for who holds it besides us, too
            lane.close()

    def close(self) -> None:
        for record in list(self.records.values()):
            self.close_lane(record)
        self.epoll.close()
