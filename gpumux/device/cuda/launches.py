"""Launches in flight: when each began and ended, found out without waiting for the GPU.

A launch is an event before its work, the work, an event behind it, and a number that the GPU stores in page-locked
memory. The host reads that number as it reads its own memory. A stream runs in order, so only its oldest launch is
looked at, and a launch that is queued behind another of its stream has no event before it: it begins when that one
ends. The GPU's clock is tied to the host's by an *anchor*: an event recorded on a stream of its own at a known host
time. The driver gives times between events as single-precision milliseconds, so an anchor is at most ANCHOR_S old.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar

from gpumux.device.cuda.driver import Driver
from gpumux.errors import DeviceLost, GpumuxError, JobFailed

ANCHOR_S = 1.0
MAX_IN_FLIGHT = 4096  # the scheduler's windows keep them to a handful
POLL_S = 2e-3  # a launch expected later than this need not be looked at yet
LATE_S = 0.05  # a launch this late may never complete: the driver is queried, and again after as long
MAX_NUMBER = 0xFFFFFFFF  # the GPU stores numbers of 32 bits
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Anchor:
    event: int
    host_s: float = -inf
    reached: bool = False


@dataclass(slots=True, eq=False)
class _LaunchRecord:
    """A record of one launch at a time, used again for later ones, so that a launch makes no events and no objects.
    `place`: index of its number in page-locked memory; each use has another number, one higher than the last."""

    place: int
    address: int  # of the place, on the GPU
    start: int
    end: int
    number: int = 0
    starts: bool = False  # it has an event before it; else it was queued behind another launch of its stream
    launched: float = 0.0
    expected: float = 0.0
    order: int = 0  # among all launches
    anchor: _Anchor | None = None
    what: Any = None

    @property
    def events(self) -> tuple[int, int]:
        return self.start, self.end


@dataclass(slots=True, eq=False)
class _Queue:
    """The launches of one stream, oldest first. `ended`: the last end that was reported."""

    records: deque[_LaunchRecord] = field(default_factory=deque)
    ended: float = -inf


class CompletedLaunch(NamedTuple, Generic[T]):
    """A launch that has ended. `error`: its events failed, so the times mean nothing. `order`: among all launches."""

    what: T
    started: float
    ended: float
    error: GpumuxError | None
    order: int


class LaunchTracker(Generic[T]):
    """Launches in flight on all streams. `clock` is the device's clock; `priority` that of the anchors' stream: the
    greatest there is."""

    def __init__(
        self, driver: Driver, clock: Callable[[], float], priority: int, max_in_flight: int = MAX_IN_FLIGHT
    ) -> None:
        self._driver, self._clock = driver, clock
        self._memory = driver.pin(max_in_flight * 4)
        self._stored = self._memory.view().cast("I")
        for place in range(max_in_flight):
            self._stored[place] = 0
        self._stream = driver.stream(priority)
        self._queues: dict[int, _Queue] = {}  # by stream
        self._places, self._places_used = max_in_flight, 0
        self._made: list[_LaunchRecord] = []
        self._free: list[_LaunchRecord] = []
        self._in_flight = 0
        self._anchors: list[_Anchor] = []
        self._anchor = _Anchor(0)  # the newest
        self._launched = 0  # the order of the last one
        self._queried = 0.0  # when the driver was last asked whether the GPU still runs

    def __len__(self) -> int:
        return self._in_flight

    def launch(self, what: T, stream: int, expected_s: float, work: Callable[[], None], *, waits: bool = True) -> None:
        """Give `work` to the stream, with the times taken around it. `waits`: the stream has been made to wait for
        something since its last launch, or `work` makes it wait; that time does not count as this launch's. Raises what
        `work` raises, and JobFailed when MAX_IN_FLIGHT launches are in flight."""
        driver, launched = self._driver, self._clock()
        anchor = self._anchor
        if launched - anchor.host_s > ANCHOR_S:
            anchor = self._new_anchor()
        queue = self._queues.get(stream)
        if queue is None:
            queue = self._queues[stream] = _Queue()
        records = queue.records
        record = self._free.pop() if self._free else self._new_record()
        record.number = number = record.number + 1 & MAX_NUMBER
        try:
            record.starts = starts = waits or not records or self._stored[records[-1].place] == records[-1].number
            if starts:
                driver.record(record.start, stream)
            work()
            driver.record(record.end, stream)
            driver.write_value(record.address, number, stream)
        except BaseException:
            self._free.append(record)
            raise
        self._in_flight += 1
        self._launched = record.order = self._launched + 1
        record.what, record.anchor, record.launched, record.expected = what, anchor, launched, launched + expected_s
        records.append(record)

    def completed(self) -> list[CompletedLaunch[T]]:
        """Launches that have ended since the last call, in the order they were launched in. Raises DeviceLost when a
        kernel has ended the context: the GPU stores no numbers any more then."""
        found: list[CompletedLaunch[T]] = []
        stored, now, more = self._stored, self._clock(), True
        while more:
            # A stream may have waited for another that was looked at before it: look at that one again.
            more = False
            for queue in self._queues.values():
                records = queue.records
                while records and stored[records[0].place] == records[0].number:
                    completed = self._complete(queue, now)
                    if completed is None:
                        break  # its times are not known yet; next time
                    found.append(completed)
                    more = len(self._queues) > 1
        if not found:
            return self._query_late(now)
        if len(found) > 1:
            found.sort(key=attrgetter("order"))
        return found

    def due(self) -> float:
        """When to look next: a little before the first launch is expected to end; inf when none is in flight."""
        first = min([queue.records[0].expected for queue in self._queues.values() if queue.records], default=inf)
        return first - POLL_S

    def close(self) -> None:
        """Give everything back. Nothing is in flight any more, or its end does not matter."""
        for event in [event for record in self._made for event in record.events]:
            self._driver.destroy_event(event)
        for anchor in self._anchors:
            self._driver.destroy_event(anchor.event)
        self._queues.clear()
        self._driver.destroy_stream(self._stream)
        self._driver.unpin(self._memory)

    def _new_record(self) -> _LaunchRecord:
        place = self._places_used
        if place == self._places:
            raise JobFailed(f"{place} launches are outstanding", "this is a bug in the daemon: report it")
        events = self._driver.event(timed=True), self._driver.event(timed=True)
        self._places_used += 1
        made = _LaunchRecord(place, self._memory.device_address + 4 * place, *events)
        self._made.append(made)
        return made

    def _query_late(self, now: float) -> list[CompletedLaunch[T]]:
        """Late launches for whose last event the driver reports an error."""
        failed = []
        for queue in self._queues.values():
            if queue.records and now > max(queue.records[0].expected, self._queried) + LATE_S:
                self._queried = now
                try:
                    self._driver.reached(queue.records[0].end)
                except DeviceLost:
                    raise
                except GpumuxError as error:
                    failed.append(self._fail(queue, error))
        return failed

    def _complete(self, queue: _Queue, now: float) -> CompletedLaunch[T] | None:
        """Take the oldest launch of the queue, which has ended. None when the driver is not done yet with an event that
        gives its times. An error of those events is this launch's own."""
        record = queue.records[0]
        elapsed, anchor = self._driver.elapsed, record.anchor
        assert anchor is not None
        # Anchors differ by microseconds: no launch begins before it was launched, or before the one ahead of it ended.
        started = max(record.launched, queue.ended)
        try:
            if not anchor.reached:
                anchor.reached = self._driver.reached(anchor.event)
                if not anchor.reached:
                    return None
            if record.starts:
                started = max(started, anchor.host_s + elapsed(anchor.event, record.start))
            ended = max(started, min(now, anchor.host_s + elapsed(anchor.event, record.end)))
        except DeviceLost:
            raise
        except GpumuxError as error:
            return None if self._under_way(record) else self._fail(queue, error)
        queue.ended = ended
        what, record.what = record.what, None
        queue.records.popleft()
        self._in_flight -= 1
        self._free.append(record)
        return CompletedLaunch(what, started, ended, None, record.order)

    def _under_way(self, record: _LaunchRecord) -> bool:
        """Whether the driver is not done yet with one of its events, though the GPU has stored its number."""
        try:
            return not all(self._driver.reached(event) for event in record.events)
        except DeviceLost:
            raise
        except GpumuxError:
            return False

    def _fail(self, queue: _Queue, error: GpumuxError) -> CompletedLaunch[T]:
        """Take the oldest launch of the queue, whose events failed. Its record is not used again: a later launch would
        meet the same error, and the GPU may still store its number."""
        record = queue.records.popleft()
        queue.ended = self._clock()  # at the latest: what is queued behind it begins no earlier
        self._in_flight -= 1
        self._made.remove(record)
        for event in record.events:
            try:
                self._driver.destroy_event(event)
            except DeviceLost:
                raise
            except GpumuxError:
                pass  # there is nothing to destroy, then
        return CompletedLaunch(record.what, record.launched, record.launched, error, record.order)

    def _new_anchor(self) -> _Anchor:
        """An anchor of now. It takes the event of an older anchor, if no launch in flight refers to that one."""
        used = [record.anchor for queue in self._queues.values() for record in queue.records]
        anchor = next((anchor for anchor in self._anchors if anchor not in used), None)
        if anchor is None:
            anchor = _Anchor(self._driver.event(timed=True))
            self._anchors.append(anchor)
        anchor.reached = False
        self._driver.record(anchor.event, self._stream)
        anchor.host_s = self._clock()
        self._anchor = anchor
        return anchor
