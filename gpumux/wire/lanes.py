"""The daemon's ends of the step lanes, watched together."""

from __future__ import annotations

import select

from gpumux.wire.lane import Lane, pair
from gpumux.wire.sessions import SessionRecord

LANES_A_PASS = 128  # lanes looked at in one pass, one message of each

_IN = select.EPOLLIN
_OUT = select.EPOLLOUT


class Lanes:
    """`fileno()` turns readable when `ready` has something."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._epoll = select.epoll()
        self._poll = self._epoll.poll
        self._records: dict[int, SessionRecord] = {}

    def fileno(self) -> int:
        return self._epoll.fileno()

    def open(self, record: SessionRecord) -> int:
        """Make the session's lane; the client's end of it, the caller's to pass on and to close.
        Raises OSError when there are no descriptors left."""
        ours, theirs = pair()
        record.lane = Lane(ours, self._max_bytes)
        self._records[ours.fileno()] = record
        self._epoll.register(ours, _IN)
        return theirs.detach()

    def ready(self) -> list[tuple[SessionRecord, bool, bool]]:
        """Sessions whose lanes have something, in turn: may be read, may be written to again."""
        records = self._records
        return [(records[fd], bool(events & ~_OUT), bool(events & _OUT)) for fd, events in self._poll(0, LANES_A_PASS)]

    def watch(self, lane: Lane, *, writable: bool) -> None:
        """Whether `ready` should say when a lane that was full can take more."""
        self._epoll.modify(lane.fileno(), _IN | _OUT if writable else _IN)

    def close_lane(self, record: SessionRecord) -> None:
        """Idempotent."""
        lane, record.lane = record.lane, None
        if lane is not None:
            del self._records[lane.fileno()]
            self._epoll.unregister(lane.fileno())
            lane.close()

    def close(self) -> None:
        for record in list(self._records.values()):
            self.close_lane(record)
        self._epoll.close()
