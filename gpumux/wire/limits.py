"""Limits on the load that one client may put on the daemon's control path, and meters for them."""

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
    messages_per_poll: int = 128  # receive() returns after so many messages of a socket
    send_queue: int = 1000  # messages waiting for one client; a client that lets it fill is dropped
    receive_queue: int = 100  # messages of one client waiting in the daemon before it must wait


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


# ---- Messages outside any session.


class SessionlessLimiter:
    """Limits messages outside any session, by user."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._meters: dict[int, Meter] = {}  # by uid

    def allow(self, uid: int, now: float) -> bool:
        """Count a message. Returns False if the user has sent too many."""
        meter = self._meters.get(uid)
        if meter is None:
            meter = self._meters[uid] = Meter(self._limits.sessionless_per_s, self._limits.burst_sessionless, now)
        return meter.spend(1, now)

    def forget(self, now: float) -> None:
        """Drop meters that are full again, because their users have sent nothing for long."""
        for uid in [uid for uid, meter in self._meters.items() if meter.is_full(now)]:
            del self._meters[uid]
