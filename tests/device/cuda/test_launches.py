"""Launches in flight: their times and ends, failures and reuse of their records."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumux.device.cuda import launches
from gpumux.device.cuda.driver import Pinned, fault
from gpumux.device.cuda.launches import ANCHOR_S, LATE_S, POLL_S, LaunchTracker
from gpumux.errors import DeviceLost, JobFailed
from tests.device.cuda.fake import FakeDriver


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_launches_complete_when_the_gpu_says_so_in_the_order_of_their_stream(clock: Clock) -> None:
    driver = FakeDriver(auto=False)
    tracker: LaunchTracker[str] = LaunchTracker(driver, clock, -5)
    stream, other = driver.stream(0), driver.stream(-5)
    ran: list[str] = []
    for name, where in (("a", stream), ("b", stream), ("c", other)):
        tracker.launch(name, where, 1e-3, lambda name=name: driver.enqueue(name, where, lambda: ran.append(name)))
    assert len(tracker) == 3
    assert tracker.completed() == []
    assert tracker.due() == pytest.approx(100.0 + 1e-3 - POLL_S)
    driver.advance()
    clock.now = 200.0
    completed = tracker.completed()
    assert ran == ["c", "a", "b"]
    assert sorted(launch.what for launch in completed) == ["a", "b", "c"]
    times = {launch.what: launch for launch in completed}
    assert 100.0 <= times["a"].started <= times["a"].ended <= times["b"].started <= times["b"].ended <= 200.0
    assert tracker.completed() == []
    assert tracker.due() > 1e9
    for handle in (stream, other):
        driver.destroy_stream(handle)
    tracker.close()
    assert not driver.events
    assert not driver.streams
    assert not driver.pinned


@pytest.mark.parametrize(
    ("ended", "waits", "before"),
    [(False, False, 0), (False, True, 1), (True, False, 1)],
    ids=["queued", "waits", "idle"],
)
def test_a_launch_queued_behind_another_begins_when_that_one_ends(
    clock: Clock, ended: bool, waits: bool, before: int
) -> None:
    """Its stream does nothing in between, so there is no event before it."""
    driver = FakeDriver(auto=False)
    tracker: LaunchTracker[int] = LaunchTracker(driver, clock, -5)
    stream = driver.stream(0)
    tracker.launch(1, stream, 1e-3, lambda: None)
    if ended:
        driver.advance()
    driver.log.clear()
    tracker.launch(2, stream, 1e-3, lambda: None, waits=waits)
    assert [call for call, _ in driver.log] == ["record"] * (before + 1) + ["write_value"]
    driver.advance()
    clock.now = 200.0
    first, second = tracker.completed()
    assert first.ended <= second.started <= second.ended
    assert (first.ended == second.started) is (not ended and not waits)
    driver.destroy_stream(stream)
    tracker.close()
    assert not driver.events


def test_too_many_launches_are_refused_and_one_that_fails_leaves_nothing(clock: Clock) -> None:
    driver = FakeDriver(auto=False)
    tracker: LaunchTracker[int] = LaunchTracker(driver, clock, -5, max_in_flight=2)
    stream = driver.stream(0)

    def fail() -> None:
        raise JobFailed("the work")

    with pytest.raises(JobFailed, match="the work"):
        tracker.launch(0, stream, 0.0, fail)
    for number in (1, 2):
        tracker.launch(number, stream, 0.0, lambda: None)
    with pytest.raises(JobFailed, match="outstanding"):
        tracker.launch(3, stream, 0.0, lambda: None)
    driver.advance()
    assert [launch.what for launch in tracker.completed()] == [1, 2]
    tracker.launch(4, stream, 0.0, lambda: None)
    driver.advance()
    assert [launch.what for launch in tracker.completed()] == [4]
    driver.destroy_stream(stream)
    tracker.close()
    assert not driver.events


class UsedBefore(FakeDriver):
    """A driver whose page-locked memory is not zeroed."""

    def pin(self, nbytes: int) -> Pinned:
        memory = super().pin(nbytes)
        memory.view().cast("I")[:] = memoryview(array("I", [1] * (nbytes // 4)))
        return memory


def test_what_lay_in_the_memory_before_ends_no_launch(clock: Clock) -> None:
    driver = UsedBefore(auto=False)
    tracker: LaunchTracker[int] = LaunchTracker(driver, clock, -5, max_in_flight=4)
    stream = driver.stream(0)
    tracker.launch(1, stream, 0.0, lambda: None)
    driver.advance(1)  # the anchor
    assert tracker.completed() == []
    driver.advance()
    assert [launch.what for launch in tracker.completed()] == [1]
    driver.destroy_stream(stream)
    tracker.close()


def test_numbers_begin_again_after_the_last_of_32_bits(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "MAX_NUMBER", 3)
    driver = FakeDriver(auto=False)
    tracker: LaunchTracker[int] = LaunchTracker(driver, clock, -5)
    stream = driver.stream(0)
    for number in range(9):
        tracker.launch(number, stream, 0.0, lambda: None)
        assert tracker.completed() == []
        driver.advance()
        assert [launch.what for launch in tracker.completed()] == [number]
        assert tracker._stored[0] <= 3
    driver.destroy_stream(stream)
    tracker.close()


@given(st.lists(st.integers(0, 6), max_size=60))
def test_each_launch_is_reported_once_when_its_own_stream_has_come_to_it(choices: list[int]) -> None:
    """0 and 1 launch on one of two streams, 2 to 5 let the GPU do so many things, 6 all; 4 to 6 look as well."""
    driver, clock = FakeDriver(auto=False), Clock()
    tracker: LaunchTracker[int] = LaunchTracker(driver, clock, -5, max_in_flight=4)
    streams = [driver.stream(0), driver.stream(-1)]
    launched, ran, reported = 0, set(), []
    for choice in choices:
        if choice > 1:
            driver.advance(choice if choice < 6 else 1 << 30)
            if choice > 3:
                found = [launch.what for launch in tracker.completed()]
                assert found == sorted(found)
                reported += found
        elif len(tracker) == 4:
            with pytest.raises(JobFailed):
                tracker.launch(-1, streams[choice], 0.0, lambda: None)
        else:

            def work(number: int = launched, stream: int = streams[choice]) -> None:
                driver.enqueue("kernel", stream, lambda: ran.add(number))

            tracker.launch(launched, streams[choice], 0.0, work)
            launched += 1
        assert ran >= set(reported)
        assert len(tracker) == launched - len(reported)
    driver.advance()
    reported += [launch.what for launch in tracker.completed()]
    assert sorted(reported) == list(range(launched))
    for stream in streams:
        driver.destroy_stream(stream)
    tracker.close()
    assert not driver.events


def test_a_launch_that_never_completes_is_found_though_nothing_more_is_launched(clock: Clock) -> None:
    """A kernel that ends the context stores nothing in the ring, nor does anything behind it."""
    driver = FakeDriver(auto=False)
    tracker: LaunchTracker[int] = LaunchTracker(driver, clock, -5)
    stream = driver.stream(0)
    tracker.launch(1, stream, 1e-3, lambda: None)
    driver.break_with("CUDA_ERROR_ASSERT")
    assert tracker.completed() == []  # it may take as long as it was expected to
    clock.now += 1e-3 + 2 * LATE_S
    with pytest.raises(DeviceLost, match="CUDA_ERROR_ASSERT"):
        tracker.completed()
    assert tracker.completed() == []  # asked now and then, not all the time
    driver.broken = ""
    driver.advance()
    assert [launch.what for launch in tracker.completed()] == [1]
    driver.destroy_stream(stream)
    tracker.close()


class Failing(FakeDriver):
    """A driver whose events in `bad` fail when they are read."""

    def __init__(self) -> None:
        super().__init__(auto=False)
        self.bad: set[int] = set()
        self.said = "CUDA_ERROR_INVALID_HANDLE"
        self.slow = False

    def elapsed(self, start: int, end: int) -> float:
        if {start, end} & self.bad:
            raise fault(self.said, "cuEventElapsedTime", "the fake was set so")
        return super().elapsed(start, end)

    def reached(self, event: int) -> bool:
        if event in self.bad:
            if not self.slow:
                raise fault(self.said, "cuEventQuery", "the fake was set so")
            return False
        return super().reached(event)


def test_an_event_that_fails_is_its_launchs_own_failure(clock: Clock) -> None:
    driver = Failing()
    tracker: LaunchTracker[int] = LaunchTracker(driver, clock, -5)
    streams = [driver.stream(0), driver.stream(0)]
    tracker.launch(1, streams[0], 0.0, lambda: None)
    driver.bad = set(driver.events) - {tracker._anchor.event}
    tracker.launch(2, streams[1], 0.0, lambda: None)
    driver.advance()
    failed, completed = tracker.completed()
    assert isinstance(failed.error, JobFailed)
    assert "INVALID_HANDLE" in failed.error.message
    assert completed.error is None
    assert len(tracker) == 0
    assert not driver.bad & set(driver.events)  # no later launch meets them
    tracker.launch(3, streams[0], 0.0, lambda: None)
    driver.advance()
    assert [(launch.what, launch.error) for launch in tracker.completed()] == [(3, None)]
    for stream in streams:
        driver.destroy_stream(stream)
    tracker.close()
    assert not driver.events


def test_an_event_that_the_driver_is_not_done_with_is_queried_again(clock: Clock) -> None:
    driver = Failing()
    driver.said, driver.slow = "CUDA_ERROR_NOT_READY", True
    tracker: LaunchTracker[int] = LaunchTracker(driver, clock, -5)
    stream = driver.stream(0)
    tracker.launch(1, stream, 0.0, lambda: None)
    driver.bad = set(driver.events) - {tracker._anchor.event}
    driver.advance()
    assert tracker.completed() == []
    driver.bad = set()
    assert [(launch.what, launch.error) for launch in tracker.completed()] == [(1, None)]
    driver.destroy_stream(stream)
    tracker.close()


def test_a_late_launch_whose_event_fails_is_its_own_failure(clock: Clock) -> None:
    driver = Failing()
    tracker: LaunchTracker[int] = LaunchTracker(driver, clock, -5)
    stream = driver.stream(0)
    tracker.launch(1, stream, 0.0, lambda: None)
    driver.bad = set(driver.events) - {tracker._anchor.event}
    clock.now += 2 * LATE_S
    (failed,) = tracker.completed()
    assert isinstance(failed.error, JobFailed)
    assert tracker.completed() == []
    driver.bad = set()
    other = driver.stream(0)
    tracker.launch(2, other, 0.0, lambda: None)
    driver.drain(other)
    driver.drain(stream)  # what the failed one stores after all is not where the other's number is
    assert [(launch.what, launch.error) for launch in tracker.completed()] == [(2, None)]
    for each in (stream, other):
        driver.destroy_stream(each)
    tracker.close()
    assert not driver.events


class Forward(FakeDriver):
    """A driver that asserts that no time is negative."""

    def elapsed(self, start: int, end: int) -> float:
        seconds = super().elapsed(start, end)
        assert seconds >= 0.0
        return seconds


def test_a_launch_in_flight_keeps_the_anchor_it_was_launched_with(clock: Clock) -> None:
    driver = Forward(auto=False)
    tracker: LaunchTracker[int] = LaunchTracker(driver, clock, -5)
    streams = [driver.stream(0), driver.stream(0)]
    tracker.launch(1, streams[0], 0.0, lambda: None)
    driver.advance()
    clock.now += 2 * ANCHOR_S
    tracker.launch(2, streams[1], 0.0, lambda: None)
    driver.advance()
    assert [launch.what for launch in tracker.completed()] == [1, 2]
    for stream in streams:
        driver.destroy_stream(stream)
    tracker.close()
    assert not driver.events


def test_the_gpus_clock_is_tied_to_ours_again_and_again(clock: Clock) -> None:
    driver = FakeDriver(auto=False)
    tracker: LaunchTracker[int] = LaunchTracker(driver, clock, -5)
    stream = driver.stream(0)
    handles = set()
    for number in range(5):
        tracker.launch(number, stream, 0.0, lambda: None)
        driver.advance()
        (completed,) = tracker.completed()
        assert completed.started >= clock.now
        handles |= set(driver.events)
        clock.now += 2 * ANCHOR_S
    assert len(driver.events) <= 5  # old anchors' events are used again
    driver.destroy_stream(stream)
    tracker.close()
    assert not driver.events
