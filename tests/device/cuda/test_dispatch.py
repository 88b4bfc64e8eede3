"""What the CUDA device does with its GPU, on one of host memory that gets on only when it is told to."""

from __future__ import annotations

import threading
from itertools import pairwise
from time import monotonic

import pytest

from gpumux.device.contract import JobLost, JobUnloaded, Recut
from gpumux.device.cuda.device import QUEUES, WORKSPACES, CudaDevice
from gpumux.device.cuda.feeding import FORMS
from gpumux.errors import DeviceLost
from gpumux.model import Priority
from gpumux.program.ir import Op, Program, ScalarRef, Storage, TensorRef, View
from tests.device.cuda.fake import fake_device, poll_wait
from tests.device.cuda.running import captured, chain, compute_of, gpu_of
from tests.device.harness import Case, Driver
from tests.device.test_contract import floats, numbers
from tests.program import samples


def test_opening_asks_for_all_hardware_queues_and_for_products_that_repeat(shared: CudaDevice) -> None:
    import os

    assert os.environ[QUEUES]
    assert os.environ[WORKSPACES] in (":4096:8", ":16:8")  # what torch takes for deterministic


def test_pieces_are_captured_in_order_and_not_run_meanwhile(driver: Driver, shared: CudaDevice) -> None:
    before = len(compute_of(shared).graphs)
    job, number = captured(driver, samples.counter(), [4])
    assert len(compute_of(shared).graphs) > before
    assert numbers(job.transfer([0], [4])[:4]) == (2.0,)  # two steps ran, and the capture added nothing
    job.step(number, [5.0])
    assert numbers(job.transfer([0], [4])[:4]) == (7.0,)


def test_captured_pieces_read_the_steps_own_numbers(driver: Driver) -> None:
    job, number = captured(driver, chain())
    pieces = len(job.pieces[number])
    assert pieces >= 1
    for step, value in enumerate((0.5, -2.0, 3.0, 0.25)):
        job.put(number, 0, floats(1, 2, 3, 4), step % 2)
        job.step(number, [value], slot=step % 2)
        got = numbers(job.get(number, 0, 16, step % 2))
        assert got == pytest.approx([x + 40 * value for x in (1, 2, 3, 4)])


def test_the_next_batch_is_copied_while_a_step_runs_and_takes_nothing_from_it(
    driver: Driver, shared: CudaDevice
) -> None:
    job, number = captured(driver, chain())
    gpu = gpu_of(shared)
    gpu.auto = False
    gpu.log.clear()
    for slot, first in enumerate((10.0, 20.0)):
        job.put(number, 0, floats(first, 0, 0, 0), slot)
    launches = [launch for slot in (0, 1) for launch in job.launch(number, [1.0], slot)]
    copies = [stream for call, stream in gpu.log if call == "copy_in"]
    graphs = [stream for call, stream in gpu.log if call == "graph"]
    assert copies  # both were given to the GPU at once, on a stream that runs nothing else
    assert not set(copies) & set(graphs)
    gpu.auto = True
    for launch in launches:
        driver.done(launch)
    assert [numbers(job.get(number, 0, 4, slot)) for slot in (0, 1)] == [(50.0,), (60.0,)]


def test_a_low_jobs_batches_hold_up_no_copy_of_a_high_one(driver: Driver, shared: CudaDevice) -> None:
    """Four low steps are out at once, so that a third batch waits for the first to be taken."""
    low, a = captured(driver, samples.add_one())
    high, b = captured(driver, samples.add_one(), priority=Priority.HIGH)
    gpu = gpu_of(shared)
    gpu.auto = False
    low_launches = [launch for slot in (0, 1, 0, 1) for launch in low.launch(a, slot=slot)]
    gpu.log.clear()
    (urgent,) = high.launch(b, stream=1)
    (copy,) = [stream for call, stream in gpu.log if call == "copy_in"]
    assert gpu.streams[copy].priority == -5
    assert len(gpu.streams[copy].work) == len([call for call, stream in gpu.log if stream == copy])  # nothing before it
    gpu.auto = True
    driver.done(urgent)
    for launch in low_launches:
        driver.done(launch)


def test_times_of_a_jobs_pieces_follow_each_other(driver: Driver) -> None:
    job, number = captured(driver, chain())
    began = monotonic()
    done = [event for _ in range(5) for event in job.step(number, [1.0])]
    assert began <= done[0].started
    assert done[-1].ended <= monotonic()
    for earlier, later in pairwise(done):
        assert earlier.started <= earlier.ended <= later.started


def test_nothing_is_freed_while_a_launch_is_out(driver: Driver, shared: CudaDevice) -> None:
    """The fake's graphs fail when they are dropped, or run after it, with a launch out."""
    job, number = captured(driver, samples.counter(), [4])
    gpu = gpu_of(shared)
    gpu.auto = False
    job.launch(number, [1.0])
    shared.unload(job.job)
    ended = [event for _ in range(20) for event in shared.poll()]
    assert not [event for event in ended if isinstance(event, JobUnloaded)]
    assert job.job in shared.memory().by_job
    gpu.auto = True
    driver.unload(job.job)
    assert job.job not in shared.memory().by_job


def test_high_work_goes_to_a_stream_of_the_greatest_priority(driver: Driver, shared: CudaDevice) -> None:
    low, a = captured(driver, samples.counter(), [4])
    high, b = captured(driver, samples.counter(), [4], priority=Priority.HIGH)
    gpu = gpu_of(shared)
    gpu.auto = False
    gpu.log.clear()
    first = low.launch(a, [1.0], stream=0)[0]
    second = high.launch(b, [1.0], stream=1)[0]
    streams = [stream for call, stream in gpu.log if call == "graph"]
    assert [gpu.streams[stream].priority for stream in streams] == [0, -5]
    gpu.auto = True
    driver.done(second)
    driver.done(first)


def test_a_job_that_becomes_important_is_captured_anew_at_that_priority(driver: Driver, shared: CudaDevice) -> None:
    job, number = captured(driver, samples.counter(), [4])
    stream = shared._jobs[job.job].capture_stream
    shared.regrade(job.job, Priority.HIGH)
    job.step(number, [1.0])
    recut = driver.until(Recut, job.job)
    assert recut.cut == 2
    assert shared._jobs[job.job].capture_stream != stream
    gpu = gpu_of(shared)
    assert gpu.streams[shared._jobs[job.job].capture_stream].priority == -5
    copies = shared._jobs[job.job].programs[number].operands.copies
    assert gpu.streams[copies].priority == -5  # its batches come in before those of low jobs
    job.step(number, [1.0])
    assert numbers(job.transfer([0], [4])[:4]) == (4.0,)


def test_unloading_during_a_capture_gives_everything_back(driver: Driver, shared: CudaDevice) -> None:
    compute = compute_of(shared)
    at_it, go_on = threading.Event(), threading.Event()

    def stop_here() -> None:
        at_it.set()
        assert go_on.wait(60)

    free = shared.memory().free_bytes
    job = driver.open()
    number = job.load(chain())
    job.step(number, [1.0])
    compute.before_capture = stop_here
    try:
        job.step(number, [1.0])
        while not at_it.is_set():
            driver.poll()
        shared.unload(job.job)  # while the worker is in the middle of it
    finally:
        compute.before_capture = lambda: None
        go_on.set()
    driver.unload(job.job)
    assert shared.memory().free_bytes == free
    assert all(graph.dropped for graph in compute.graphs[-1:])
    assert not [event for event in driver.unread if isinstance(event, Recut) and event.job == job.job]


def test_a_capture_that_fails_ends_its_job_alone(driver: Driver, shared: CudaDevice) -> None:
    compute = compute_of(shared)
    other, kept = captured(driver, samples.counter(), [4])
    job = driver.open()
    number = job.load(chain())
    job.step(number, [1.0])

    def fail() -> None:
        raise RuntimeError("this can't be captured")

    compute.before_capture = fail
    try:
        job.step(number, [1.0])
        lost = driver.wait_for(lambda e: isinstance(e, JobLost) and e.job == job.job)
    finally:
        compute.before_capture = lambda: None
    assert isinstance(lost, JobLost)
    assert "can't be captured" in lost.fault.message
    other.step(kept, [1.0])


def test_a_number_no_form_can_read_is_refused_at_load(driver: Driver) -> None:
    x, y = View(0, "float32", (4,), (1,)), View(1, "float32", (4,), (1,))
    op = Op("aten.leaky_relu.default", (TensorRef(0), ScalarRef(0)), (), (1,))
    assert op.target not in FORMS
    program = Program((Storage("input", 16, 0), Storage("temp", 16)), (x, y), (op,), (0,), (1,), ("float",))
    job = driver.open()
    held = driver.device.memory().by_job[job.job]
    job.try_load(program)
    refused = driver.wait_for(lambda e: getattr(e, "job", None) == job.job)
    assert "leaky_relu" in refused.fault.message  # type: ignore[union-attr]
    assert "tensor argument" in refused.fault.remedy  # type: ignore[union-attr]
    assert driver.device.memory().by_job[job.job] == held


def test_memory_goes_back_to_the_driver_only_while_nothing_runs(driver: Driver, shared: CudaDevice) -> None:
    compute = compute_of(shared)
    job, _ = captured(driver, samples.counter(), [4])
    before = compute.trims
    driver.unload(job.job)
    deadline = monotonic() + 60
    while compute.trims == before and monotonic() < deadline:
        driver.poll()
    assert compute.trims > before


def test_a_sticky_error_ends_the_device_and_closing_it_still_works() -> None:
    device = fake_device()
    device.open()
    try:
        driver = Driver(Case("cuda", lambda: device, lambda: device, wait=poll_wait), device)
        job, number = captured(driver, samples.counter(), [4])
        gpu_of(device).break_with("CUDA_ERROR_ILLEGAL_ADDRESS")
        job.launch(number, [1.0])
        with pytest.raises(DeviceLost, match="out of its bounds"):
            device.poll()
        with pytest.raises(DeviceLost):
            device.poll()
    finally:
        device.close()
    for data in job.data.values():
        data.close()
    assert device.poll() == []


def test_dropout_draws_again_what_recomputation_needs_and_then_goes_on(driver: Driver) -> None:
    job, number = captured(driver, samples.dropout())
    seen = []
    for _ in range(3):
        job.put(number, 0, floats(*[1.0] * 64))
        job.step(number)
        first, again, other = (job.get(number, position, 256) for position in range(3))
        assert first == again
        assert first != other
        seen.append(first)
    assert len(set(seen)) == 3
