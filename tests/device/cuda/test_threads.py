"""The worker's order of work, and launches on their way, each by itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest

from gpumux.device.cuda.driver import fault
from gpumux.device.cuda.launches import ANCHOR_S, LATE_S, POLL_S, Flights
from gpumux.device.cuda.worker import PENDING, Worker
from gpumux.errors import DeviceLost, JobFailed
from tests.device.cuda.fake import FakeDriver


def finish(worker: Worker, bell: threading.Event, count: list[Any], wanted: int) -> None:
    while len(count) < wanted:
        assert bell.wait(60)
        bell.clear()
        worker.finished()


def test_important_work_comes_first_and_between_the_parts_of_other_work() -> None:
    bell, gate, done = threading.Event(), threading.Event(), []
    worker = Worker(nullcontext, bell.set)
    order: list[str] = []
    parts = iter(range(3))

    def long() -> object:
        assert gate.wait(60)
        order.append("part")
        return PENDING if next(parts) < 2 else "long"

    def note(name: str) -> Callable[[], str]:
        return lambda: order.append(name) or name  # type: ignore[func-returns-value]

    def told(value: Any, error: BaseException | None) -> None:
        done.append((value, error))

    worker.submit(long, told, 0)
    while worker._tasks:
        pass  # until the thread has taken it
    worker.submit(note("low"), told, 0)
    worker.submit(note("high"), told, 1)
    gate.set()
    finish(worker, bell, done, 3)
    assert order == ["part", "high", "part", "part", "low"]  # work of one class keeps its order
    assert [value for value, _ in done] == ["high", "long", "low"]
    assert worker.close(60)


def test_what_work_raises_is_told_and_the_thread_goes_on() -> None:
    bell, done = threading.Event(), []
    worker = Worker(nullcontext, bell.set)

    def fail() -> None:
        raise ValueError("no")

    worker.submit(fail, lambda value, error: done.append(error), 0)
    worker.submit(lambda: 5, lambda value, error: done.append(value), 0)
    finish(worker, bell, done, 2)
    assert isinstance(done[0], ValueError)
    assert done[1] == 5
    assert worker.close(60)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("no such thing"), "ValueError: no such thing"),
        (DeviceLost("the context is lost"), "^the context is lost$"),
        (JobFailed("no stream", "free some"), "no stream"),
    ],
)
def test_a_thread_that_cant_begin_is_the_end_of_the_device(
    error: Exception, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    bell = threading.Event()

    @contextmanager
    def inside() -> Iterator[None]:
        raise error
        yield

    worker = Worker(inside, bell.set)
    assert bell.wait(60)
    with pytest.raises(DeviceLost, match=text):
        worker.finished()
    assert worker.close(60)
    assert [record.exc_info[1] for record in caplog.records if record.exc_info] == [error]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_flights_land_when_the_gpu_says_so_in_the_order_of_their_stream(clock: Clock) -> None:
    driver = FakeDriver(auto=False)
    flights: Flights[str] = Flights(driver, clock, -5)
    stream, other = driver.stream(0), driver.stream(-5)
    ran: list[str] = []
    for name, where in (("a", stream), ("b", stream), ("c", other)):
        flights.launch(name, where, 1e-3, lambda name=name: driver.enqueue(name, where, lambda: ran.append(name)))
    assert len(flights) == 3
    assert flights.landed() == []
    assert flights.due() == pytest.approx(100.0 + 1e-3 - POLL_S)
    driver.advance()
    clock.now = 200.0
    landed = flights.landed()
    assert ran == ["c", "a", "b"]
    assert sorted(flight.what for flight in landed) == ["a", "b", "c"]
    times = {flight.what: flight for flight in landed}
    assert 100.0 <= times["a"].started <= times["a"].ended <= times["b"].started <= times["b"].ended <= 200.0
    assert flights.landed() == []
    assert flights.due() > 1e9
    for handle in (stream, other):
        driver.destroy_stream(handle)
    flights.close()
    assert not driver.events
    assert not driver.streams
    assert not driver.pinned


@pytest.mark.parametrize(
    ("ended", "waits", "events"),
    [(False, False, 3), (False, True, 4), (True, False, 4)],
    ids=["queued", "waits", "idle"],
)
def test_a_flight_queued_behind_another_begins_when_that_one_ends(
    clock: Clock, ended: bool, waits: bool, events: int
) -> None:
    """Its stream does nothing in between, so there is no event before it."""
    driver = FakeDriver(auto=False)
    flights: Flights[int] = Flights(driver, clock, -5)
    stream = driver.stream(0)
    flights.launch(1, stream, 1e-3, lambda: None)
    if ended:
        driver.advance()
    flights.launch(2, stream, 1e-3, lambda: None, waits=waits)
    assert len(driver.events) == 1 + events  # the anchor's
    driver.advance()
    clock.now = 200.0
    first, second = flights.landed()
    assert first.ended <= second.started <= second.ended
    assert (first.ended == second.started) is (not ended and not waits)
    driver.destroy_stream(stream)
    flights.close()
    assert not driver.events


def test_too_many_flights_are_refused_and_a_launch_that_fails_leaves_nothing(clock: Clock) -> None:
    driver = FakeDriver(auto=False)
    flights: Flights[int] = Flights(driver, clock, -5, places=2)
    stream = driver.stream(0)

    def fail() -> None:
        raise JobFailed("the work")

    with pytest.raises(JobFailed, match="the work"):
        flights.launch(0, stream, 0.0, fail)
    for number in (1, 2):
        flights.launch(number, stream, 0.0, lambda: None)
    with pytest.raises(JobFailed, match="outstanding"):
        flights.launch(3, stream, 0.0, lambda: None)
    driver.advance()
    assert [flight.what for flight in flights.landed()] == [1, 2]
    flights.launch(4, stream, 0.0, lambda: None)
    driver.advance()
    assert [flight.what for flight in flights.landed()] == [4]
    driver.destroy_stream(stream)
    flights.close()
    assert not driver.events


def test_a_flight_that_never_lands_is_found_out_though_nothing_more_is_launched(clock: Clock) -> None:
    """A kernel that ends the context stores nothing in the ring, nor does anything behind it."""
    driver = FakeDriver(auto=False)
    flights: Flights[int] = Flights(driver, clock, -5)
    stream = driver.stream(0)
    flights.launch(1, stream, 1e-3, lambda: None)
    driver.break_with("CUDA_ERROR_ASSERT")
    assert flights.landed() == []  # it may take as long as it was expected to
    clock.now += 1e-3 + 2 * LATE_S
    with pytest.raises(DeviceLost, match="CUDA_ERROR_ASSERT"):
        flights.landed()
    assert flights.landed() == []  # asked now and then, not all the time
    driver.broken = ""
    driver.advance()
    assert [flight.what for flight in flights.landed()] == [1]
    driver.destroy_stream(stream)
    flights.close()


class Failing(FakeDriver):
    """Whose events fail when they are asked for times, those in `bad`."""

    def __init__(self) -> None:
        super().__init__(auto=False)
        self.bad: set[int] = set()
        self.said = "CUDA_ERROR_INVALID_HANDLE"
        self.slow = False

    def elapsed(self, start: int, end: int) -> float:
        if {start, end} & self.bad:
            raise fault(self.said, "cuEventElapsedTime", "the fake was told so")
        return super().elapsed(start, end)

    def reached(self, event: int) -> bool:
        if event in self.bad:
            if not self.slow:
                raise fault(self.said, "cuEventQuery", "the fake was told so")
            return False
        return super().reached(event)


def test_an_event_that_fails_is_its_flights_own_failure(clock: Clock) -> None:
    driver = Failing()
    flights: Flights[int] = Flights(driver, clock, -5)
    streams = [driver.stream(0), driver.stream(0)]
    flights.launch(1, streams[0], 0.0, lambda: None)
    driver.bad = set(driver.events) - {flights._anchor.event}  # type: ignore[union-attr]
    flights.launch(2, streams[1], 0.0, lambda: None)
    driver.advance()
    failed, landed = flights.landed()
    assert isinstance(failed.error, JobFailed)
    assert "INVALID_HANDLE" in failed.error.message
    assert landed.error is None
    assert len(flights) == 0
    assert not driver.bad & set(driver.events)  # no later launch meets them
    flights.launch(3, streams[0], 0.0, lambda: None)
    driver.advance()
    assert [(flight.what, flight.error) for flight in flights.landed()] == [(3, None)]
    for stream in streams:
        driver.destroy_stream(stream)
    flights.close()
    assert not driver.events


def test_an_event_that_the_driver_is_not_done_with_is_asked_again(clock: Clock) -> None:
    driver = Failing()
    driver.said, driver.slow = "CUDA_ERROR_NOT_READY", True
    flights: Flights[int] = Flights(driver, clock, -5)
    stream = driver.stream(0)
    flights.launch(1, stream, 0.0, lambda: None)
    driver.bad = set(driver.events) - {flights._anchor.event}  # type: ignore[union-attr]
    driver.advance()
    assert flights.landed() == []
    driver.bad = set()
    assert [(flight.what, flight.error) for flight in flights.landed()] == [(1, None)]
    driver.destroy_stream(stream)
    flights.close()


def test_a_late_flight_whose_event_fails_is_its_own_failure(clock: Clock) -> None:
    driver = Failing()
    flights: Flights[int] = Flights(driver, clock, -5)
    stream = driver.stream(0)
    flights.launch(1, stream, 0.0, lambda: None)
    driver.bad = set(driver.events) - {flights._anchor.event}  # type: ignore[union-attr]
    clock.now += 2 * LATE_S
    (failed,) = flights.landed()
    assert isinstance(failed.error, JobFailed)
    assert flights.landed() == []
    driver.drain(stream)
    driver.destroy_stream(stream)
    flights.close()


def test_the_gpus_clock_is_tied_to_ours_again_and_again(clock: Clock) -> None:
    driver = FakeDriver(auto=False)
    flights: Flights[int] = Flights(driver, clock, -5)
    stream = driver.stream(0)
    handles = set()
    for number in range(5):
        flights.launch(number, stream, 0.0, lambda: None)
        driver.advance()
        (landed,) = flights.landed()
        assert landed.started >= clock.now
        handles |= set(driver.events)
        clock.now += 2 * ANCHOR_S
    assert len(driver.events) <= 5  # old anchors' events are used again
    driver.destroy_stream(stream)
    flights.close()
    assert not driver.events
