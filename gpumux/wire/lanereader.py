"""The router's part that reads step lanes, and waits for those that somebody else reads.

A lane may be lent: a device that answers steps there then takes them from it, too (device/base.py,
Lending). What the client sent to the lane comes before what it says by ZeroMQ, so such a message makes the
router ask for the lane back (`recall`) and waits until it has it, with all that follows it. That is as
long as a piece runs, at most. Heartbeats pass: they mean nothing but themselves.
"""

from __future__ import annotations

import os
import select
from collections import Counter
from collections.abc import Callable, Sequence

import zmq

from gpumux.errors import GpumuxError, ProtocolError
from gpumux.types import SessionId
from gpumux.wire.codec import encode
from gpumux.wire.delivery import GONE, Delivery
from gpumux.wire.lane import LANE_ID
from gpumux.wire.limits import Limits
from gpumux.wire.messages import Goodbye, Heartbeat
from gpumux.wire.peers import cut
from gpumux.wire.sessions import OUT, Arrival, Incoming, Lanes, SessionRecord, decode_lane
from gpumux.wire.shared_memory import SideChannel

GOODBYE = "the client said goodbye"  # the reason in Closed of a session that ended well
_ENDED = select.EPOLLHUP | select.EPOLLERR
_BEAT = bytes(encode(Heartbeat(0.0))[0][:2])  # how every one begins
_MOST_LATE = 1000  # messages that wait for one lane; a client that sends more meanwhile is dropped


class LaneReader:
    """Needs the rest of Router. `recall(session)` is to have the lane come back by `take_back`, soon."""

    limits: Limits
    counters: Counter[str]
    side: SideChannel
    recall: Callable[[SessionId], None]
    _sessions: dict[SessionId, SessionRecord]
    _arrivals: list[Arrival]
    _lanes: Lanes
    _delivery: Delivery

    def _end(self, session: SessionId, reason: str) -> None:
        raise NotImplementedError

    def _allow(self, session: SessionRecord, size: int, now: float, messages: int = 1) -> bool:
        raise NotImplementedError

    def _refuse_session(self, session: SessionId, error: GpumuxError) -> None:
        raise NotImplementedError

    def _from_session(
        self, session: SessionRecord, first: zmq.Frame, parts: list[bytes], now: float, counted: bool = False
    ) -> None:
        raise NotImplementedError

    # ---- lending

    def lend(self, session: SessionId) -> bool:
        """Leave the session's lane to somebody else, until `take_back`. False where that can't be."""
        record = self._sessions.get(session)
        return record is not None and not record.lent and self._lanes.lend(record)

    def took(self, session: SessionId, steps: int, nbytes: int, now: float) -> bool:
        """Who borrows the lane took so many steps from it; they count like any messages. Whether the session
        goes on."""
        record = self._sessions.get(session)
        return record is not None and self._allow(record, nbytes, now, steps)

    def take_back(self, session: SessionId, packet: bytes, now: float) -> None:
        """The borrower reads the lane no more. `packet`: what it took there and did not use, or b""."""
        record = self._sessions.get(session)
        if record is None or not record.lent:
            return
        self._lanes.take_back(record, packet)
        if packet:
            self._hear_lane(record, now)
        waiting, record.later = record.later, []
        for first, parts in waiting:
            if record.id in self._sessions:
                self._from_session(record, first, parts, now, counted=True)
        if record.hung:
            while record.lane is not None and self._hear_lane(record, now):
                pass  # it may have said goodbye
            self._end(record.id, GONE)

    def _may_pass(self, session: SessionRecord, parts: list[bytes]) -> bool:
        return not session.later and len(parts) == 1 and parts[0].startswith(_BEAT)

    def _wait_for_lane(self, session: SessionRecord, first: zmq.Frame, parts: list[bytes], now: float) -> None:
        if not self._allow(session, sum(map(len, parts)), now):
            cut(first, session.peer)
            return
        session.later.append((first, parts))
        if len(session.later) > _MOST_LATE:
            self.counters["flood"] += 1
            self._refuse_session(session.id, ProtocolError("too many messages at once", "wait for answers"))
        else:
            self.recall(session.id)

    def _gone(self, session: SessionId) -> None:
        """The client hung up. What it said before is on the lane."""
        record = self._sessions.get(session)
        if record is not None and record.lent:
            self._lanes.hang_up(record)
            self.recall(session)
        else:
            self._end(session, GONE)

    # ---- reading

    def _hear_lanes(self, ready: Sequence[tuple[int, int]], now: float) -> None:
        records = self._lanes.records
        for fd, events in ready:
            record = records.get(fd)
            if record is None:
                continue  # it has just been closed
            if record.lent and events & _ENDED:
                self._gone(record.id)
            elif events & OUT and (failure := self._delivery.flush(record)):
                self._end(record.id, failure)
            elif events != OUT and not record.lent:
                self._hear_lane(record, now)

    def _hear_lane(self, session: SessionRecord, now: float) -> bool:
        """Take one message from the session's lane; whether there was one and the session goes on."""
        assert session.lane is not None
        try:
            packet = session.lane.receive()
            if packet is None or not self._allow(session, len(packet), now):
                return False
            message = decode_lane(packet, self.limits.max_control_bytes)
        except EOFError:
            self._end(session.id, GONE)
            return False
        except ProtocolError as error:
            self.counters["malformed"] += 1
            self._refuse_session(session.id, error)
            return False
        if type(message) is Goodbye:
            self._end(session.id, GOODBYE)
            return False
        session.steps_on_lane = True
        self._arrivals.append(Incoming(session.id, session.peer, message, []))
        return True

    def _lay_lane(self, session: SessionId) -> bool:
        """The session's client has connected to the side channel: give it its step lane."""
        try:
            theirs = self._lanes.open(self._sessions[session])
        except OSError:
            self.counters["no_descriptors"] += 1
            return False
        try:
            return self.side.send(session, LANE_ID, 0, theirs)
        finally:
            os.close(theirs)
