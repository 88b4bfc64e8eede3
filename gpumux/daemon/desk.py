"""What the daemon's parts share: the books, the way to the core, and the way back to a client.

`feed` queues an event; the loop hands it to the core when the part that fed it has returned, so
nothing here re-enters anything. Replies leave at once: ZeroMQ batches them on its own thread.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from gpumux.access import Access
from gpumux.config import Config
from gpumux.core.events import Event
from gpumux.core.machine import Core
from gpumux.daemon.books import Books, JobRecord, SessionRecord
from gpumux.daemon.checking import CheckQueue
from gpumux.daemon.segments import Segments, SharedSegment
from gpumux.daemon.sight import Sight
from gpumux.daemon.turns import Turns
from gpumux.device.contract import Device
from gpumux.errors import GpumuxError
from gpumux.metrics.registry import Metrics
from gpumux.model import Fault
from gpumux.wire.messages import Message, Refusal
from gpumux.wire.router import Router

log = logging.getLogger("gpumux.daemon")

AT_ONCE_S: Final = 20e-6  # a wait that is over so soon found something that had come before it


class Desk:
    """One a daemon. Used on the loop's thread only."""

    def __init__(
        self,
        config: Config,
        router: Router,
        device: Device,
        segments: Segments,
        metrics: Metrics,
        core: Core,
        device_checks: int,
    ) -> None:
        self.config = config
        self.router = router
        self.device = device
        self.segments = segments
        self.metrics = metrics
        self.core = core
        self.books = Books()
        self.sight = Sight(self.books, lambda: Access(self.config.rules))
        self.turns = Turns()
        self.checks = CheckQueue(device, device_checks)
        self.unexpected = 0  # well-formed messages that made no sense and could not be answered
        self.events: deque[Event] = deque()
        self.feed = self.events.append
        self.waited = 0.0  # seconds for which what is heard of in this turn of the loop was there before, on average
        self._looked = 0.0
        self.catch_up: Callable[[JobRecord], None] = _nothing_new  # hear what the device has answered; set by the loop
        self.recall: Callable[[], None] = _nothing_lent  # before the device is asked for what is no core event

    def looks(self, now: float, busy_until: float) -> None:
        """The loop looks who has something for it, having been busy until then with what it found when it last did."""
        self.waited = 0.5 * (now - self._looked) if now - busy_until < AT_ONCE_S else 0.0
        self._looked = now

    def reply(self, session: SessionRecord, message: Message, frames: Sequence[bytes] = ()) -> None:
        """Send to a client. One that takes nothing loses the reply, which is counted, and its session."""
        if session.id in self.books.sessions and not self.router.send(session.id, message, frames):
            self.metrics.dropped_replies.inc()

    def hand_over(self, session: SessionRecord, segment: SharedSegment) -> int:
        """Pass a segment's descriptor to the client; the number the message about it names."""
        self.router.send_segment(session.id, segment.number, segment.fd, segment.nbytes)
        return segment.number

    def refuse(self, session: SessionRecord, ref: int, error: GpumuxError | Fault) -> None:
        """Answer request `ref` with a typed error, and count it."""
        self.metrics.rejected(error.code)
        log.info("session %s: request %d refused (%s): %s", session.id, ref, error.code, error.message)
        self.reply(session, Refusal(ref, error.code, error.message, error.remedy))


def as_fault(error: GpumuxError) -> Fault:
    return Fault(error.code, error.message, error.remedy)


def _nothing_new(job: JobRecord) -> None:
    """Of a device that leaves all answers to us."""


def _nothing_lent() -> None:
    """To a device that reads no lanes."""
