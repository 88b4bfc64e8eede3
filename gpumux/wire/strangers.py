"""Messages outside any session, metered by user."""

from __future__ import annotations

from gpumux.wire.limits import Limits, Meter


class Strangers:
    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._meters: dict[int, Meter] = {}  # by uid

    def allow(self, uid: int, now: float) -> bool:
        """A message came; whether this user may still send some."""
        meter = self._meters.get(uid)
        if meter is None:
            meter = self._meters[uid] = Meter(self._limits.strangers_per_s, self._limits.burst_strangers, now)
        return meter.spend(1, now)

    def forget(self, now: float) -> None:
        """Drop users who have been quiet for long."""
        for uid in [uid for uid, meter in self._meters.items() if meter.is_full(now)]:
            del self._meters[uid]
