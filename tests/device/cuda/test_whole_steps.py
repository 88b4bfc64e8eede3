"""A high job that is alone on the device runs each step as one graph, and in pieces while there is another job."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpumux.device.cuda.cuts import SETTLE_STEPS
from gpumux.device.cuda.device import CudaDevice
from gpumux.errors import JobFailed
from gpumux.types import Priority, ProgramReady
from tests.device.cuda.running import LENGTH, check, compute_of, gpu_of, in_pieces
from tests.device.harness import Driver, LoadedJob, floats, numbers


def settle(job: LoadedJob, number: int) -> None:
    for _ in range(SETTLE_STEPS + 1):
        job.step(number, [1.0])


def test_alone_it_is_whole_and_beside_another_in_pieces_without_a_capture(driver: Driver, shared: CudaDevice) -> None:
    job, number = in_pieces(driver, shared)
    settle(job, number)
    assert len(driver.until(ProgramReady, job.job).pieces) == 1
    captures = len(compute_of(shared).captures)
    check(job, number, 0.5)
    for _ in range(2):
        other = driver.open()
        assert len(driver.until(ProgramReady, job.job).pieces) == LENGTH  # before its next step
        check(job, number, 0.25)
        driver.unload(other.job)
        assert len(job.pieces[number]) == LENGTH
        check(job, number, -1.0)
        assert len(driver.until(ProgramReady, job.job).pieces) == 1
        check(job, number, 2.0)
    assert len(compute_of(shared).captures) == captures


def test_a_step_goes_on_in_the_cut_it_began_with(driver: Driver, shared: CudaDevice) -> None:
    job, number = in_pieces(driver, shared)
    settle(job, number)
    driver.until(ProgramReady, job.job)
    job.step(number, [1.0])
    gpu = gpu_of(shared)
    gpu.auto = False
    job.put(number, 0, floats(1, 2, 3, 4))
    (launch,) = job.launch(number, [3.0])
    driver.open()
    driver.until(ProgramReady, job.job)
    gpu.auto = True
    driver.done(launch)
    assert numbers(job.get(number, 0, 16)) == pytest.approx([x + LENGTH * 3.0 for x in (1, 2, 3, 4)])
    check(job, number, 0.5)


def test_low_jobs_and_those_with_company_stay_in_pieces(driver: Driver, shared: CudaDevice) -> None:
    low, number = in_pieces(driver, shared, Priority.LOW)
    settle(low, number)
    high, other = in_pieces(driver, shared)
    settle(high, other)
    assert not [event for event in driver.unread if isinstance(event, ProgramReady)]
    assert len(low.pieces[number]) == len(high.pieces[other]) == LENGTH


def test_one_that_becomes_low_is_captured_anew_in_pieces(driver: Driver, shared: CudaDevice) -> None:
    job, number = in_pieces(driver, shared)
    settle(job, number)
    driver.until(ProgramReady, job.job)
    shared.regrade(job.job, Priority.LOW)
    job.step(number, [1.0])
    assert len(driver.until(ProgramReady, job.job).pieces) == LENGTH
    settle(job, number)
    check(job, number, 0.5)
    assert len(job.pieces[number]) == LENGTH


@pytest.mark.parametrize("comes", [False, True], ids=["alone", "another comes"])
def test_steps_that_wait_behind_a_new_capture_find_their_cut(comes: bool, driver: Driver, shared: CudaDevice) -> None:
    """A capture waits until they are over; their ends meanwhile make no further cut."""
    job, number = in_pieces(driver, shared)
    settle(job, number)
    driver.until(ProgramReady, job.job)
    job.step(number, [1.0])
    gpu = gpu_of(shared)
    gpu.auto = False
    waiting = [job.launch(number, [1.0], slot=i % 2)[0] for i in range(4)]
    shared.regrade(job.job, Priority.LOW)
    gpu.auto = True
    driver.done(waiting[0])
    if comes:
        driver.open()
    for launch in waiting[1:]:
        driver.done(launch)
    check(job, number, 0.5)


def failing(at: int) -> Callable[[], None]:
    """Fails the capture with this number."""
    left = at

    def before() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise JobFailed("not as a whole")

    return before


def test_what_cant_be_captured_as_a_whole_stays_in_pieces_and_is_not_tried_again(
    driver: Driver, shared: CudaDevice
) -> None:
    compute = compute_of(shared)
    job, number = in_pieces(driver, shared)
    compute.before_capture = failing(1)
    try:
        settle(job, number)
        job.step(number, [1.0])  # after what was to be captured
        captures = len(compute.captures)
        settle(job, number)
        check(job, number, 0.5)
    finally:
        compute.before_capture = lambda: None
    assert len(compute.captures) == captures
    assert len(job.pieces[number]) == LENGTH


def test_nothing_is_left_of_either_cut(driver: Driver, shared: CudaDevice) -> None:
    compute, free = compute_of(shared), shared.memory().free_bytes
    before = len(compute.graphs)
    job, number = in_pieces(driver, shared)
    settle(job, number)
    driver.until(ProgramReady, job.job)
    check(job, number, 0.5)
    driver.unload(job.job)
    assert all(graph.dropped for graph in compute.graphs[before:])
    assert shared.memory().free_bytes == free
