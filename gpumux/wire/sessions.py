"""The router's record of a session, and the events about sessions that it reports to the loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import gpumux
from gpumux.errors import AdmissionRefused, ProtocolError
from gpumux.types import Peer, SessionId
from gpumux.wire.channel import DaemonChannel
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


@dataclass(slots=True, eq=False)
class RouterSession:
    """The router's record of an open session. `heard` and `sent`: times of the newest messages."""

    id: SessionId
    peer: Peer
    name: str  # the peer_name that each frame of the session must have
    route: tuple[int, bytes]  # which listening socket, routing id
    welcome: Welcome
    allowance: Allowance
    heard: float
    sent: float
    inline: bool  # its tensors travel as frames; it has no channel
    channel: DaemonChannel | None = None  # once its client has opened it
    unsent: deque[Unsent] = field(default_factory=deque)

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
    ) -> RouterSession:
        return cls(session, peer, name, route, welcome, Allowance(limits, now), now, now, not welcome.channel)


def check_hello(hello: Hello, peer: Peer, over_ipc: bool, others: Sequence[Peer], limits: Limits) -> None:
    """Raise ProtocolError or AdmissionRefused if this session may not begin. `others`: the peers of all open
    sessions."""
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
