"""Launches on their way: when each began and ended, without ever waiting for the GPU.

A launch is a *flight*: an event before it, its work, an event behind it, and a number that the GPU stores in
page-locked memory (`Ring`). Streams are in order, so only the oldest flight of each is looked at, and one that was
queued behind another of its own stream needs no event of its own before it: it begins when that one ends. The GPU's
clock is tied to the host's by an *anchor*: an event recorded on a stream of its own at a known host time, at most
ANCHOR_S old, because the driver gives times between events as single-precision milliseconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from operator import itemgetter
from typing import Generic, NamedTuple, TypeVar

from gpumux.device.cuda.driver import Driver
from gpumux.errors import DeviceLost, GpumuxError, JobFailed

# ---- Places in page-locked memory where the GPU says that a launch is over. Pure: it is given the memory.
#
# A launch takes a number that no earlier launch had, and the place that the number gives; the GPU stores the number
# there when the launch's stream reaches it, and the host compares, at the price of reading its own memory. Launches of
# several streams end in any order: a number whose place is still taken is left out.


LAST = 0xFFFFFFFF  # numbers are 32 bits; 0 means nothing was ever here


class Ring:
    """`memory` is an array of 32-bit unsigned numbers, a place each, zeroed here."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory.cast("B").cast("I")
        self._places = len(self._memory)
        for place in range(self._places):
            self._memory[place] = 0
        self._taken = bytearray(self._places)
        self._outstanding = 0
        self._number = 0

    def __len__(self) -> int:
        """Places taken."""
        return self._outstanding

    def take(self) -> int | None:
        """A number whose place is free; None when all are taken."""
        if self._outstanding == self._places:
            return None
        number, taken, places = self._number, self._taken, self._places
        number = 1 if number == LAST else number + 1
        while taken[number % places]:
            number = 1 if number == LAST else number + 1
        taken[number % places] = 1
        self._outstanding += 1
        self._number = number
        return number

    def offset(self, number: int) -> int:
        """Bytes from the memory's start to the number's place."""
        return number % self._places * 4

    def reached(self, number: int) -> bool:
        return self._memory[number % self._places] == number

    def give(self, number: int) -> None:
        """Free the place. Raises ValueError when it is not taken: the next launch there would end at once."""
        place = number % self._places
        if not self._taken[place]:
            raise ValueError(f"place {place} is not taken")
        self._taken[place] = 0
        self._outstanding -= 1


# ----


ANCHOR_S = 1.0
PLACES = 4096  # flights in the air at most; windows keep them to a handful
POLL_S = 2e-3  # a flight expected later than this need not be looked at yet
LATE_S = 0.05  # a flight this late may never land: the driver is asked, and again after as long
T = TypeVar("T")


@dataclass(slots=True)
class _Anchor:
    event: int
    host_s: float
    users: int = 0
    reached: bool = False


@dataclass(slots=True)
class _Flight(Generic[T]):
    """`start` 0: it was queued behind the flight before it on its stream."""

    what: T
    start: int
    end: int
    stores: int  # what the GPU stores when it is over (`Ring`)
    anchor: _Anchor
    launched: float
    expected: float
    number: int


class Landed(NamedTuple, Generic[T]):
    """`error`: what became of it can't be told, for its events failed; the times mean nothing then."""

    what: T
    started: float
    ended: float
    error: GpumuxError | None = None


class Flights(Generic[T]):
    """`clock` is the device's clock; `priority` that of the anchors' stream: the greatest there is."""

    def __init__(self, driver: Driver, clock: Callable[[], float], priority: int, places: int = PLACES) -> None:
        self._driver, self._clock = driver, clock
        self._memory = driver.pin(places * 4)
        self._address = self._memory.device_address
        self._ring = Ring(self._memory.view())
        self._stream = driver.stream(priority)
        self._air: dict[int, deque[_Flight[T]]] = {}  # by stream, oldest first
        self._events: list[int] = []  # free, timed
        self._anchor: _Anchor | None = None
        self._old: list[_Anchor] = []
        self._number = 0  # of the last flight
        self._ended: dict[int, float] = {}  # the last end told, by stream
        self._asked = 0.0  # when the driver was asked last whether the GPU still runs

    def __len__(self) -> int:
        return len(self._ring)

    def launch(self, what: T, stream: int, expected_s: float, work: Callable[[], None], *, waits: bool = True) -> None:
        """Give the stream `work`, with the times taken around it. `waits`: the stream has been told to wait for
        something since its last flight, or `work` does, which is no time of this flight's. Raises what `work` does, and
        JobFailed when there are PLACES flights in the air already."""
        ring = self._ring
        stores = ring.take()
        if stores is None:
            raise JobFailed(f"{PLACES} launches are outstanding", "this is a bug in the daemon: report it")
        driver, launched = self._driver, self._clock()
        anchor = self._anchor
        if anchor is None or launched - anchor.host_s > ANCHOR_S:
            anchor = self._anchored()
        queue = self._air.get(stream)
        if queue is None:
            queue = self._air[stream] = deque()
        start, end = 0, self._event()
        try:
            if waits or not queue or ring.reached(queue[-1].stores):
                start = self._event()
                driver.record(start, stream)
            work()
            driver.record(end, stream)
            driver.write_value(self._address + ring.offset(stores), stores, stream)
        except BaseException:
            ring.give(stores)  # what it stores, if it still does, is no later launch's number
            self._events += [event for event in (start, end) if event]
            raise
        anchor.users += 1
        self._number += 1
        queue.append(_Flight(what, start, end, stores, anchor, launched, launched + expected_s, self._number))

    def landed(self) -> list[Landed[T]]:
        """Flights that are over, each told once; those that ran one after the other, on whatever streams, in order.
        Raises DeviceLost when a kernel has ended the context: nothing is stored in the ring any more then."""
        found: list[tuple[int, Landed[T]]] = []
        more = True
        while (
            more
        ):  # a stream that waited for another: what it waited for is over, too, but may have been looked at before
            more = False
            for stream, flights in self._air.items():
                while flights and self._ring.reached(flights[0].stores):
                    flight = flights[0]
                    landed = self._land(flight, stream)
                    if landed is None:
                        break  # it can't be told when it was; next time
                    flights.popleft()
                    found.append((flight.number, landed))
                    more = len(self._air) > 1
        if not found:
            found = self._ask_after_the_late()
        if len(found) > 1:
            found.sort(key=itemgetter(0))
        return [landed for _, landed in found]

    def due(self) -> float:
        """When to look next: a little before the first is expected to be over; inf when none is in the air."""
        first = min([flights[0].expected for flights in self._air.values() if flights], default=inf)
        return first - POLL_S

    def close(self) -> None:
        """Nothing is in the air any more, or nobody will ask."""
        for flight in [flight for flights in self._air.values() for flight in flights]:
            self._events += [event for event in (flight.start, flight.end) if event]
        anchors = [*self._old, *([self._anchor] if self._anchor else [])]
        for event in [*self._events, *[anchor.event for anchor in anchors]]:
            self._driver.destroy_event(event)
        self._air.clear()
        self._driver.destroy_stream(self._stream)
        self._driver.unpin(self._memory)

    def _ask_after_the_late(self) -> list[tuple[int, Landed[T]]]:
        """Those the driver says an error of."""
        now, failed = self._clock(), []
        for stream, flights in self._air.items():
            if flights and now > max(flights[0].expected, self._asked) + LATE_S:
                self._asked = now
                try:
                    self._driver.reached(flights[0].end)
                except DeviceLost:
                    raise
                except GpumuxError as error:
                    flight = flights.popleft()
                    failed.append((flight.number, self._failed(flight, stream, error)))
        return failed

    def _land(self, flight: _Flight[T], stream: int) -> Landed[T] | None:
        """None where the driver is not done yet with an event that tells its times. Their errors are its own."""
        elapsed, anchor = self._driver.elapsed, flight.anchor
        try:
            if not anchor.reached:
                anchor.reached = self._driver.reached(anchor.event)
                if not anchor.reached:
                    return None
            started = anchor.host_s + elapsed(anchor.event, flight.start) if flight.start else -inf
            ended = anchor.host_s + elapsed(anchor.event, flight.end)
        except DeviceLost:
            raise
        except GpumuxError as error:
            return None if self._under_way(flight) else self._failed(flight, stream, error)
        # Anchors differ by microseconds: nothing begins before it was launched, or before what it waited for ended.
        started = max(started, flight.launched, self._ended.get(stream, -inf))
        ended = max(started, min(ended, self._clock()))
        self._ended[stream] = ended
        self._ring.give(flight.stores)
        if flight.start:
            self._events.append(flight.start)
        self._events.append(flight.end)
        anchor.users -= 1
        return Landed(flight.what, started, ended)

    def _under_way(self, flight: _Flight[T]) -> bool:
        """Whether the driver is not done yet with one of its events, though the GPU has stored its number."""
        try:
            return not all(self._driver.reached(event) for event in (flight.start, flight.end) if event)
        except DeviceLost:
            raise
        except GpumuxError:
            return False

    def _failed(self, flight: _Flight[T], stream: int, error: GpumuxError) -> Landed[T]:
        self._ended[stream] = self._clock()  # at the latest: what is queued behind it begins no earlier
        self._ring.give(flight.stores)  # what it stores, if it still does, is no later launch's number
        flight.anchor.users -= 1
        for event in filter(None, (flight.start, flight.end)):  # no other launch is to meet the same error
            try:
                self._driver.destroy_event(event)
            except DeviceLost:
                raise
            except GpumuxError:
                pass  # there is nothing to destroy, then
        return Landed(flight.what, flight.launched, flight.launched, error)

    def _event(self) -> int:
        return self._events.pop() if self._events else self._driver.event(timed=True)

    def _anchored(self) -> _Anchor:
        """A new one."""
        if self._anchor is not None:
            self._old.append(self._anchor)
        unused = [anchor for anchor in self._old if anchor.users == 0]
        self._old = [anchor for anchor in self._old if anchor.users]
        self._events += [anchor.event for anchor in unused]
        event = self._event()
        self._driver.record(event, self._stream)
        made = self._anchor = _Anchor(event, self._clock())
        return made
