"""A session's background thread: it keeps the session alive, and closes what one leaves that nobody closed.

The collector finds a dropped session at any moment, in any thread, under any lock. Closing a ZeroMQ
context there could wait for ever, so the collector only leaves word, and the thread does the work.
"""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from gpumux.client.connection import Connection
from gpumux.wire.dataplane import Segment
from gpumux.wire.descriptors import DescriptorInbox

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Belongings:
    """What must be closed when a session is gone; none of it refers to the session."""

    connection: Connection
    inbox: DescriptorInbox | None
    segments: dict[int, Segment]

    def close(self) -> None:
        """Say goodbye, then close everything. Only for a session that no thread uses any more."""
        if self.connection.working:
            self.connection.say_goodbye()
        if self.inbox is not None:
            self.inbox.close()
        for segment in self.segments.values():
            segment.close()
        self.connection.close(linger=self.connection.working)


class Keeper:
    """Calls `beat(session)` every `interval` seconds until it returns false. It holds the session
    weakly: one that goes without `end` is closed."""

    def __init__(self, session: T, beat: Callable[[T], bool], interval: float, belongings: Belongings) -> None:
        # What the thread does when it ends. SimpleQueue, because the collector may interrupt a `put` or
        # `get` of the same thread: an Event's lock would then be waited for by its own holder.
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_keep, args=(weakref.ref(session), beat, interval, self._orders), name="gpumux-session", daemon=True
        )
        self._dropped = weakref.finalize(session, _leave_word, self._orders, os.getpid(), belongings)
        self._dropped.atexit = False  # the daemon notices a process that ends
        self._thread.start()

    def end(self) -> None:
        """The session is closed by its owner: end the thread, and wait for that unless it is the caller."""
        self._dropped.detach()
        self._orders.put(_nothing)
        if self._thread is not threading.current_thread():
            self._thread.join()


def _keep(
    ref: weakref.ref[T], beat: Callable[[T], bool], interval: float, orders: queue.SimpleQueue[Callable[[], None]]
) -> None:
    pause: float | None = interval
    while True:
        try:
            last = orders.get(timeout=pause)
        except queue.Empty:
            session = ref()
            if session is not None and not beat(session):
                pause = None  # nothing to do until it is closed or dropped
            del session
        else:
            last()
            return


def _nothing() -> None:
    return None


def _leave_word(orders: queue.SimpleQueue[Callable[[], None]], owner: int, belongings: Belongings) -> None:
    if os.getpid() == owner:  # a fork has no such thread, and the sockets are its parent's
        orders.put(belongings.close)
