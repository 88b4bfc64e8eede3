"""Limits on the load that one client may put on the daemon's control path. The router measures it (router.py)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits for clients. With the defaults, which are those of the configuration (gpumux/config.py), an honest client
    stays far below every limit. Sizes are bytes, times seconds."""

    max_message_bytes: int = 256 << 20  # of any one frame; a larger one ends its connection
    max_control_bytes: int = 256 << 10  # of a message's first frame
    messages_per_s: float = 20_000.0  # sustained, a session
    burst_messages: float = 20_000.0
    bytes_per_s: float = float(1 << 30)  # sustained, a session
    burst_bytes: float = float(4 << 30)
    sessionless_per_s: float = 1_000.0  # messages outside any session, a user
    burst_sessionless: float = 2_000.0
    max_sessions: int = 256
    max_sessions_per_user: int = 128
    heartbeat_s: float = 2.0
    lease_s: float = 10.0
    send_queue: int = 1000  # messages waiting for one client; a client that lets it fill is dropped
    receive_queue: int = 100  # messages of one client waiting in the daemon before it must wait
