"""The daemon's messages to its clients, by lane or by ZeroMQ, in the order they were sent.

While an answer waits for room on a full lane, everything later for that session waits behind it. A
client that lets `send_queue` messages wait is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from gpumux.wire.lane import FROM_DAEMON, PACKET
from gpumux.wire.limits import Limits
from gpumux.wire.listen import FULL, Sockets
from gpumux.wire.messages import Message
from gpumux.wire.sessions import SessionRecord

GONE = "the client is gone"


class Delivery:
    def __init__(self, sockets: Sockets, limits: Limits) -> None:
        self._sockets = sockets
        self._lanes = sockets.lanes
        self._most_held = limits.send_queue

    def send(self, record: SessionRecord, msg: Message, parts: Sequence[bytes | memoryview]) -> str:
        """`parts` are the frames of `msg`. What failed, "" when nothing did."""
        # A device may write to the lane, too (Router.answering_lane), so no message may take two packets.
        by_lane = record.steps_on_lane and type(msg) in FROM_DAEMON and len(parts) == 1 and len(parts[0]) <= PACKET
        if not record.held:
            return self._hand_over(record, parts, by_lane)
        record.held.append((parts, by_lane))
        return FULL if len(record.held) > self._most_held else ""

    def _hand_over(self, record: SessionRecord, parts: Sequence[bytes | memoryview], by_lane: bool) -> str:
        lane = record.lane
        if not by_lane or lane is None:
            return self._sockets.send(record.route, parts)
        try:
            if not lane.send(parts[0]):
                record.held.append(((), True))  # stands for what waits in the lane itself
                self._lanes.watch(record)
        except OSError:
            return GONE
        return ""

    def flush(self, record: SessionRecord) -> str:
        """A lane that was full has room: send what waits. What failed, "" when nothing did."""
        lane = record.lane
        try:
            if lane is None or not lane.flush():
                return ""
        except OSError:
            return GONE
        waiting, record.held = record.held, deque()
        self._lanes.watch(record)
        waiting.popleft()
        while waiting and not record.held:
            failure = self._hand_over(record, *waiting.popleft())
            if failure:
                return failure
        record.held.extend(waiting)
        return ""
