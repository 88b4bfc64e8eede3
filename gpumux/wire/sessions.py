"""What the router knows about a session, and what it tells the loop about one."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import zmq

import gpumux
from gpumux.errors import AdmissionRefused, ProtocolError
from gpumux.model import Peer, SessionId
from gpumux.wire.lane import Lane
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
