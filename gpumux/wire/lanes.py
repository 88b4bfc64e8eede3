"""The daemon's ends of the step lanes, watched together."""

from __future__ import annotations

import select

from gpumux.errors import ProtocolError
from gpumux.wire.codec import decode_step
from gpumux.wire.lane import FROM_CLIENT, Lane, pair
from gpumux.wire.messages import Message
from gpumux.wire.sessions import SessionRecord

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
