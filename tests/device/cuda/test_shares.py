"""Low jobs on parts of the GPU: each piece is captured for every share, and each of a step's may run on another."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from gpumux.device.cuda.device import CudaDevice
from gpumux.device.cuda.launches import LaunchTracker
from gpumux.device.cuda.streams import DEFAULT_SHARES, RUN_STREAMS, Partitions
from gpumux.types import Priority
from tests.device.cuda.fake import FakeDriver, fake_device
from tests.device.cuda.running import captured, compute_of, crossed, crossing, gpu_of, launched, ready, step
from tests.device.harness import Driver, floats, numbers
from tests.program import samples


@pytest.fixture(scope="module")
def shared() -> Iterator[CudaDevice]:
    device = fake_device(shares=DEFAULT_SHARES)
    info = device.open()
    assert info.shares == (1.0, 72 / 132, 40 / 132)  # as many multiprocessors as can be set apart
    yield device
    device.close()
    gpu = gpu_of(device)
    assert [gpu.streams, gpu.events, gpu.pinned, gpu.registered, gpu.partitions] == [{}] * 5


def test_pieces_on_any_shares_in_any_order_compute_the_same(driver: Driver, shared: CudaDevice) -> None:
    job, number = ready(driver, shared, crossing())
    whole, half, quarter = shared._partitions.shares
    for shares in ([whole], [half], [quarter], [whole, half], [half, quarter, whole], [quarter, whole]):
        for value in (0.5, -2.0):
            job.put(number, 0, floats(1, 2, 3, 4))
            step(driver, job, number, value, shares)
            assert numbers(job.get(number, 0, 16)) == pytest.approx(crossed((1, 2, 3, 4), value)), shares


def test_a_confined_piece_runs_in_its_partition_behind_what_the_job_runs_elsewhere(
    driver: Driver, shared: CudaDevice
) -> None:
    """The fake's graphs fail when they are launched elsewhere than they were captured."""
    job, number = ready(driver, shared, crossing())
    _, half, quarter = shared._partitions.shares
    gpu = gpu_of(shared)
    gpu.log.clear()
    step(driver, job, number, 1.0, [1.0, half, quarter])
    seen = [gpu.partitions.get(gpu.streams[stream].partition, 132) for call, stream in gpu.log if call == "graph"]
    assert seen[:6] == [132, 72, 40, 132, 72, 40]
    assert len([call for call, _ in gpu.log if call == "wait"]) >= len(seen) - 1  # one between two streams


def test_a_piece_that_waits_for_one_elsewhere_begins_when_that_has_ended(driver: Driver, shared: CudaDevice) -> None:
    """And not when the piece of another job has, behind which it is queued on its stream."""
    jobs = [ready(driver, shared, crossing()) for _ in range(RUN_STREAMS + 1)]
    half = shared._partitions.shares[1]
    gpu = gpu_of(shared)
    gpu.log.clear()
    launches = [launch for job, number in jobs[1:] for launch in launched(driver, job, number, 1.0, [half])]
    job, number = jobs[0]
    launches += launched(driver, job, number, 1.0, [1.0, half])
    calls = [call for call, stream in gpu.log if stream == shared._jobs[job.job].stream]
    assert calls.count("graph") > 2  # of both jobs
    assert calls[-5:] == ["wait", "record", "graph", "record", "write_value"]
    for launch in launches:
        driver.done(launch)


def test_high_jobs_are_captured_for_the_whole_alone_and_run_there(driver: Driver, shared: CudaDevice) -> None:
    before = len(compute_of(shared).graphs)
    job, number = captured(driver, samples.counter(), [4], priority=Priority.HIGH)
    graphs = compute_of(shared).graphs[before:]
    assert {graph.partition for graph in graphs} == {0}
    step(driver, job, number, 3.0, [0.25])  # a share that was never there, and was not captured for
    assert numbers(job.transfer([0], [4])[:4]) == (5.0,)


def test_a_step_whose_operators_are_measured_runs_on_the_whole(driver: Driver, shared: CudaDevice) -> None:
    job, number = ready(driver, shared, crossing())
    half = shared._partitions.shares[1]
    shared.profile(job.job, number)
    loaded = shared._jobs[job.job].programs[number]
    while loaded.instrumented is None:
        driver.poll()
    gpu = gpu_of(shared)
    gpu.log.clear()
    step(driver, job, number, 1.0, [half])
    assert {gpu.streams[stream].partition for call, stream in gpu.log if call == "graph"} == {0}


def test_memory_for_all_shares_is_given_back(driver: Driver, shared: CudaDevice) -> None:
    before = len(compute_of(shared).graphs)
    job, _ = ready(driver, shared, crossing())
    graphs = compute_of(shared).graphs[before:]
    assert len({graph.partition for graph in graphs}) == 3
    driver.unload(job.job)
    assert all(graph.dropped for graph in graphs)


@pytest.mark.parametrize("old_driver", [False, True])
def test_where_there_is_no_such_thing_the_whole_is_all_there_is(
    old_driver: bool, caplog: pytest.LogCaptureFixture
) -> None:
    from dataclasses import replace

    gpu = FakeDriver()
    gpu.green = False
    facts = gpu.open(0)
    facts = replace(facts, driver_version=12020) if old_driver else facts
    with caplog.at_level(logging.WARNING):
        partitions = Partitions(gpu, facts, DEFAULT_SHARES, 0)
    assert partitions.shares == (1.0,)
    assert not partitions.pools
    assert "can't be confined" in caplog.text
    partitions.close()
    assert not gpu.streams


def test_shares_that_round_to_the_same_or_to_all_are_one() -> None:
    gpu = FakeDriver()
    partitions = Partitions(gpu, gpu.open(0), (0.5, 0.51, 0.999), 0)
    assert partitions.shares == (1.0, 72 / 132)
    partitions.close()
    assert not gpu.partitions


def test_unless_asked_for_nothing_is_confined() -> None:
    gpu = FakeDriver()
    assert Partitions(gpu, gpu.open(0), (), 0).shares == (1.0,)
    assert not gpu.partitions


@pytest.mark.parametrize("first", ["early", "late"])
def test_launches_of_one_job_on_two_streams_complete_in_order(first: str) -> None:
    """Whichever stream is looked at first, before anything has ended, and though all is over at the second look."""
    gpu = FakeDriver(auto=False)
    tracker: LaunchTracker[str] = LaunchTracker(gpu, lambda: 100.0, -5)
    early, late = gpu.stream(0), gpu.stream(0)
    tracker.launch("before", late if first == "late" else early, 0.0, lambda: None)
    tracker.launch("between", early if first == "late" else late, 0.0, lambda: None)
    tracker.launch("first", early, 0.0, lambda: None)
    event = gpu.event(timed=False)
    gpu.record(event, early)
    gpu.wait(late, event)
    tracker.launch("second", late, 0.0, lambda: None)

    class Memory:
        """The page-locked memory; between two looks at it the GPU does all it has."""

        looks = 0

        def __getitem__(self, place: int) -> int:
            self.looks += 1
            if self.looks == 2:
                gpu.advance()
            return stored[place]

    stored = tracker._stored
    tracker._stored = Memory()  # type: ignore[assignment]
    order = [completed.what for _ in range(3) for completed in tracker.completed()]
    assert order.index("first") < order.index("second")
    assert sorted(order) == ["before", "between", "first", "second"]
    gpu.destroy_event(event)
    for stream in (early, late):
        gpu.destroy_stream(stream)
    tracker.close()
