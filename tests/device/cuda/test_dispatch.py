"""What the CUDA device does with its GPU, on one of host memory that proceeds only when `advance` is called."""

from __future__ import annotations

import ctypes
import itertools
import re
import threading
from collections.abc import Callable
from itertools import pairwise
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpumux.device.base import ProgramRefused
from gpumux.device.cuda import engine
from gpumux.device.cuda.device import QUEUES, WORKSPACES, CudaDevice
from gpumux.device.cuda.driver import fault
from gpumux.device.cuda.jobs import Capture, CudaJob
from gpumux.device.cuda.operators import FORMS
from gpumux.device.cuda.program import HOST_S
from gpumux.errors import DeviceLost, JobFailed
from gpumux.program.ir import Op, Program, ProgramBuilder, ScalarRef, Storage, TensorRef, View, slot_layout
from gpumux.types import JobDied, JobReleased, Priority, ProgramReady
from tests.device.cuda.fake import MEMORY, FakeCompute, fake_device, poll_wait
from tests.device.cuda.running import captured, chain, compute_of, crossed, crossing, gpu_of
from tests.device.harness import Case, Driver, floats, numbers
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


def test_steps_that_are_out_at_once_read_the_numbers_of_their_own(driver: Driver, shared: CudaDevice) -> None:
    """Which the host writes before the GPU has copied those of the step before."""
    job, number = captured(driver, chain(1))
    gpu = gpu_of(shared)
    gpu.auto = False
    gpu.log.clear()
    for slot in (0, 1):
        job.put(number, 0, floats(1, 2, 3, 4), slot)
    launches = [launch for slot, value in ((0, 1.0), (1, 100.0)) for launch in job.launch(number, [value], slot)]
    assert len([call for call, _ in gpu.log if call == "graph"]) == 2
    gpu.auto = True
    for launch in launches:
        driver.done(launch)
    assert [numbers(job.get(number, 0, 16, slot)) for slot in (0, 1)] == [(2, 3, 4, 5), (101, 102, 103, 104)]


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


def test_batches_of_one_high_job_hold_up_no_copy_of_another(driver: Driver, shared: CudaDevice) -> None:
    """Four steps of the first are out at once, so that its third batch waits for the first to be taken."""
    (first, a), (second, b) = (captured(driver, samples.add_one(), priority=Priority.HIGH) for _ in range(2))
    gpu = gpu_of(shared)
    gpu.auto = False
    waiting = [launch for slot in (0, 1, 0, 1) for launch in first.launch(a, slot=slot, stream=1)]
    gpu.log.clear()
    (urgent,) = second.launch(b, stream=1)
    (copy,) = [stream for call, stream in gpu.log if call == "copy_in"]
    assert len(gpu.streams[copy].work) == len([call for call, stream in gpu.log if stream == copy])  # nothing before it
    gpu.auto = True
    for launch in (urgent, *waiting):
        driver.done(launch)


def test_times_of_a_jobs_pieces_follow_each_other(driver: Driver) -> None:
    job, number = captured(driver, chain())
    began = monotonic()
    done = [event for _ in range(5) for event in job.step(number, [1.0])]
    assert began <= done[0].started
    assert done[-1].ended <= monotonic()
    for earlier, later in pairwise(done):
        assert earlier.started <= earlier.ended <= later.started


def test_a_step_begins_when_its_batch_has_come_and_not_when_the_step_before_ended(
    driver: Driver, shared: CudaDevice
) -> None:
    """So an event is recorded between its batch and its first piece, and none before a piece that is queued behind
    another of its step. Two pieces of a job are out at a time."""
    job, number = captured(driver, chain(2), fine=True)
    gpu, goes_on = gpu_of(shared), threading.Event()
    gpu.log.clear()
    launches = [launch for slot in (0, 1) for launch in job.launch(number, [1.0], slot)]
    stream = shared._jobs[job.job].stream
    work = gpu.streams[stream].work
    work.insert(len(work) - 1, goes_on.is_set)  # the second piece stays unfinished
    driver.done(launches[0])
    calls = [call for call, on in gpu.log if on == stream]
    fed = ["wait", "copy_within", "record"]  # its stage is filled; it is taken
    first, second = ["record", "graph", "record", "write_value"], ["graph", "copy_out", "record", "write_value"]
    goes_on.set()
    for launch in launches[1:]:
        driver.done(launch)
    assert calls == [*fed, *first, *second, *fed, *first]


def test_nothing_is_freed_while_a_launch_is_out(driver: Driver, shared: CudaDevice) -> None:
    """The fake's graphs fail when they are dropped, or run after it, with a launch out."""
    job, number = captured(driver, samples.counter(), [4])
    gpu = gpu_of(shared)
    gpu.auto = False
    job.launch(number, [1.0])
    shared.unload(job.job)
    ended = [event for _ in range(20) for event in shared.poll()]
    assert not [event for event in ended if isinstance(event, JobReleased)]
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
    recut = driver.until(ProgramReady, job.job)
    assert recut.cut == 2
    assert shared._jobs[job.job].capture_stream != stream
    gpu = gpu_of(shared)
    assert gpu.streams[shared._jobs[job.job].capture_stream].priority == -5
    gpu.log.clear()
    for launch in job.launch(number, [1.0], stream=1):
        driver.done(launch)
    assert {gpu.streams[s].priority for call, s in gpu.log if call == "copy_in"} == {-5}  # before those of low jobs
    assert numbers(job.transfer([0], [4])[:4]) == (4.0,)


def test_graphs_are_captured_and_dropped_when_nothing_of_the_job_is_in_flight(
    driver: Driver, shared: CudaDevice
) -> None:
    """Two steps are out; the first ends, after which its program is to be captured anew."""
    job, number = captured(driver, samples.add_one())
    gpu, goes_on, held = gpu_of(shared), threading.Event(), shared._jobs[job.job]
    launches = [launch for slot in (0, 1) for launch in job.launch(number, slot=slot)]
    work = gpu.streams[held.stream].work
    work.insert(len(work) - 1, goes_on.is_set)  # the second step stays unfinished
    shared.regrade(job.job, Priority.HIGH)
    driver.done(launches[0])
    waiting = [type(command) for command in held.backlog]
    assert (held.in_flight, held.busy, waiting) == (1, False, [Capture])
    goes_on.set()
    driver.done(launches[1])
    assert driver.until(ProgramReady, job.job).cut == 2


@pytest.mark.parametrize("order", [(1,), (0, 2), (0, 0, 2), (0, 1, 1), (40,)])
def test_a_piece_out_of_its_order_ends_the_job_and_no_other(
    order: tuple[int, ...], driver: Driver, shared: CudaDevice
) -> None:
    """It would read what lies where temporaries are to be."""
    other, kept = captured(driver, samples.counter(), [4])
    job, number = captured(driver, chain(), fine=True)
    pieces = job.pieces_of_step(number, [1.0])
    for piece in order:
        shared.launch(pieces[0]._replace(piece=piece))
    lost = driver.wait_for(lambda e: isinstance(e, JobDied) and e.job == job.job)
    assert re.search("is out of order|no piece 40", lost.fault.message)  # type: ignore[union-attr]
    other.step(kept, [1.0])


def test_a_program_is_loaded_when_its_memory_is_zeroed(driver: Driver, shared: CudaDevice) -> None:
    """Which the GPU does on a stream of its own: steps and transfers run on others."""
    gpu, job = gpu_of(shared), driver.open()
    gpu.log.clear()
    job.load(samples.counter(), [4])
    assert ("record", shared._jobs[job.job].capture_stream) in gpu.log  # and the worker waited for it


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
    assert not [event for event in driver.unread if isinstance(event, ProgramReady) and event.job == job.job]


@pytest.mark.parametrize("failing", [{0}, {1}, {0, 1, 2}, {3, 4}, set(range(40)), set(range(999))], ids=len)
def test_pieces_that_cant_be_captured_stay_operator_by_operator(
    failing: set[int], driver: Driver, shared: CudaDevice, caplog: pytest.LogCaptureFixture
) -> None:
    """Whichever pieces those are, steps compute the same in any order, and the log says once why they are slower."""
    compute, gpu = compute_of(shared), gpu_of(shared)
    job = driver.open()
    number = job.load(crossing())
    shared._jobs[job.job].programs[number].cuts.aim(1e-9)  # a piece for each operator
    captures = itertools.count()

    def fail() -> None:
        if next(captures) in failing:
            raise JobFailed("a piece can't be captured: CUDA error: operation not permitted when stream is capturing")

    def step(value: float, slot: int) -> tuple[float, ...]:
        job.put(number, 0, floats(1, 2, 3, 4), slot)
        job.step(number, [value], slot=slot)
        return numbers(job.get(number, 0, 16, slot))

    compute.before_capture = fail
    try:
        for value in (0.25, 4.0):
            assert step(value, 0) == pytest.approx(crossed((1, 2, 3, 4), value))
        driver.until(ProgramReady, job.job)
    finally:
        compute.before_capture = lambda: None
    cut = shared._jobs[job.job].programs[number]._graphs[1]
    assert set(cut.uncaptured) == {n for n in failing if n < len(job.pieces[number])}
    assert len(job.pieces[number]) >= 5
    gpu.log.clear()
    for slot, value in enumerate((0.5, -2.0, 3.0)):
        assert step(value, slot % 2) == pytest.approx(crossed((1, 2, 3, 4), value))
    graphs = len([call for call, _ in gpu.log if call == "graph"])
    assert graphs == 3 * (len(job.pieces[number]) - len(cut.uncaptured))
    said = [record for record in caplog.records if "stay operator by operator" in record.message]
    assert len(said) == 1
    assert said[0].exc_info is not None


@pytest.mark.parametrize("why", ["its size", "its draw"])
def test_a_piece_leaves_the_program_as_it_was_if_what_it_leaves_is_not_known_beforehand(
    why: str, driver: Driver, shared: CudaDevice
) -> None:
    """As with what cuDNN's recurrent layers keep for their backward, and with a mask that is drawn again."""
    compute, tried = compute_of(shared), threading.Event()
    job = driver.open()
    number = job.load(chain() if why == "its size" else samples.dropout())
    loaded = shared._jobs[job.job].programs[number]
    loaded.cuts.aim(1e-9)
    if why == "its size":
        loaded._runner.unsized = frozenset({1})  # the temporary of its first piece

    def fail() -> None:
        tried.set()
        raise JobFailed("a piece can't be captured")

    def step() -> None:
        if why == "its size":
            job.put(number, 0, floats(1, 2, 3, 4))
            job.step(number, [1.0])
            assert numbers(job.get(number, 0, 16)) == (41, 42, 43, 44)
            return
        job.put(number, 0, floats(*[1.0] * 64))
        job.step(number)
        first, again, other = (job.get(number, position, 256) for position in range(3))
        assert first == again
        assert first != other

    compute.before_capture = fail
    try:
        for _ in range(2):
            step()
        while not tried.is_set() or shared._jobs[job.job].busy:
            driver.poll()
    finally:
        compute.before_capture = lambda: None
    for _ in range(3):
        step()
    assert job.cut[number] == 0


def test_a_failure_of_all_of_a_capture_leaves_the_program_as_it_was(
    driver: Driver, shared: CudaDevice, caplog: pytest.LogCaptureFixture
) -> None:
    compute = compute_of(shared)
    other, kept = captured(driver, samples.counter(), [4])
    job = driver.open()
    number = job.load(chain())
    job.step(number, [1.0])
    tried = threading.Event()

    def fail() -> None:
        tried.set()
        raise RuntimeError("an unexpected error")

    compute.before_capture = fail
    try:
        job.step(number, [1.0])
        while not tried.is_set() or shared._jobs[job.job].busy:
            driver.poll()
    finally:
        compute.before_capture = lambda: None
    for _ in range(3):
        job.put(number, 0, floats(1, 2, 3, 4))
        job.step(number, [1.0])
        assert numbers(job.get(number, 0, 16)) == (41, 42, 43, 44)
    assert job.cut[number] == 0
    assert [record.exc_info is not None for record in caplog.records if "Capture of job" in record.message] == [True]
    other.step(kept, [1.0])


def test_the_generators_position_is_set_before_a_launch_sets_it_also_after_a_capture_that_fails(
    driver: Driver, shared: CudaDevice, caplog: pytest.LogCaptureFixture
) -> None:
    """torch sets it on the capture's stream when a capture begins, and for a launch on the stream of that. Between the
    two streams there is no order, so the worker waits."""
    compute, gpu = compute_of(shared), gpu_of(shared)
    job, number = captured(driver, samples.counter(), [4])
    held = shared._jobs[job.job]

    def fail() -> None:
        raise RuntimeError("an unexpected error")

    for failing, cut in ((fail, 1), (fail, 1), (lambda: None, 2)):
        shared.regrade(job.job, Priority.HIGH)  # has it captured anew
        compute.before_capture = failing
        gpu.log.clear()
        try:
            job.step(number, [1.0])
            while held.stale or held.busy:
                driver.poll()
        finally:
            compute.before_capture = lambda: None
        assert held.programs[number].cuts.newest == cut
        assert [call for call, stream in gpu.log if stream == held.capture_stream] == ["position", "record"]
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1  # once for each job


def test_a_launch_whose_events_fail_ends_its_job_alone_and_the_log_has_the_traceback_once(
    driver: Driver, shared: CudaDevice, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, kept = captured(driver, samples.counter(), [4])
    job, number = captured(driver, chain())
    gpu = gpu_of(shared)

    def fail(start: int, end: int) -> float:
        raise fault("CUDA_ERROR_INVALID_HANDLE", "cuEventElapsedTime", "the fake was set so")

    with monkeypatch.context() as patched:
        patched.setattr(gpu, "elapsed", fail)
        job.launch(number, [1.0])
        lost = driver.wait_for(lambda e: isinstance(e, JobDied) and e.job == job.job)
    assert "INVALID_HANDLE" in lost.fault.message  # type: ignore[union-attr]
    other.step(kept, [1.0])
    (said,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert str(job.job) in said.message
    assert said.exc_info is not None
    assert said.exc_info[1].message.startswith("cuEventElapsedTime failed")  # type: ignore[union-attr]


def test_what_a_job_held_and_cant_be_given_back_does_not_end_the_device(
    driver: Driver, shared: CudaDevice, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, kept = captured(driver, samples.counter(), [4])
    job, _ = captured(driver, chain())

    def fail(released: object) -> None:
        raise JobFailed("cuEventDestroy failed: CUDA_ERROR_INVALID_HANDLE")

    with monkeypatch.context() as patched:
        patched.setattr(shared._engine, "drop_unused", fail)
        driver.unload(job.job)
    assert [record.exc_info is not None for record in caplog.records if "given back" in record.message] == [True]
    other.step(kept, [1.0])


def test_a_worker_that_cant_begin_says_why_when_the_device_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: FakeCompute) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("CUDA error: invalid device ordinal")

    monkeypatch.setattr(FakeCompute, "enter", fail)
    device = fake_device()
    with pytest.raises(DeviceLost, match="worker can't begin: RuntimeError: CUDA error: invalid device ordinal"):
        device.open()
    device.close()


def test_convolutions_are_rounded_as_the_program_says(driver: Driver, shared: CudaDevice) -> None:
    """Both step by step and where its pieces are captured; other programs in between have their own."""
    compute, before = compute_of(shared), torch.backends.cudnn.allow_tf32
    seen: list[bool] = []
    compute.before_capture = lambda: seen.append(torch.backends.cudnn.allow_tf32)
    try:
        for make, wanted in ((samples.full_precision, False), (samples.add_one, True), (samples.full_precision, False)):
            captured(driver, make())
            assert seen
            assert set(seen) == {wanted}
            seen.clear()
    finally:
        compute.before_capture = lambda: None
        torch.backends.cudnn.allow_tf32 = before


def test_first_steps_take_their_memory_where_their_graphs_will(driver: Driver, shared: CudaDevice) -> None:
    """So that a capture, which asks for the same blocks in the same order, needs no second set of temporaries."""
    compute = compute_of(shared)
    eager, captures = len(compute.eager), len(compute.captures)
    job, _ = captured(driver, chain())
    (place,) = set(compute.eager[eager:])
    assert set(compute.captures[captures:]) == {place}
    assert place == (shared._jobs[job.job].capture_stream, shared._jobs[job.job].pool)
    assert place[1] in compute.held
    driver.unload(job.job)
    assert place[1] not in compute.held


def test_operators_are_timed_behind_a_busy_gpu(driver: Driver, shared: CudaDevice) -> None:
    """Called one by one from Python they would all seem to take as long as that does. The first step waits for other
    things (kernels that are loaded), and needs no help to be the slower one."""
    compute, program = compute_of(shared), chain()
    before = len(compute.occupied)
    job, _ = captured(driver, program)
    assert sum(compute.occupied[before:]) == pytest.approx(HOST_S * len(program.ops))
    driver.unload(job.job)


def test_pieces_among_captured_ones_take_nothing_from_the_graphs_memory(driver: Driver, shared: CudaDevice) -> None:
    """What a graph has left there for a later piece lies in it, and torch holds that memory for free."""
    compute = compute_of(shared)
    job = driver.open()
    number = job.load(crossing())
    shared._jobs[job.job].programs[number].cuts.aim(1e-9)
    captures = itertools.count()

    def fail() -> None:
        if next(captures) == 2:
            raise JobFailed("a piece can't be captured")

    compute.before_capture = fail
    try:
        for _ in range(2):
            job.step(number, [1.0])
        driver.until(ProgramReady, job.job)
    finally:
        compute.before_capture = lambda: None
    before = len(compute.eager)
    job.step(number, [1.0])
    assert len(compute.eager) == before


@pytest.mark.parametrize("room", [0, 200 * 4 - 1, 200 * 4])
def test_temporary_lists_of_an_optimizers_form_are_charged(
    room: int, driver: Driver, shared: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = ProgramBuilder()
    lists = [tuple(b.state("float32", (100,)) for _ in range(2)) for _ in range(2)]
    b.add_op("aten._foreach_lerp_.Scalar", *lists, b.scalar("float"))
    program = b.build()
    buffers = [400] * 4
    job = driver.open()
    taken = sum(shared.memory().by_job.values())
    slot = 3 * slot_layout(program).nbytes
    monkeypatch.setattr(shared, "_total", taken + sum(buffers) + slot + room)
    job.try_load(program, buffers)
    answer = driver.wait_for(lambda e: isinstance(e, ProgramReady | ProgramRefused) and e.job == job.job)
    if room < 800:
        assert isinstance(answer, ProgramRefused)
        assert answer.fault.code == "admission_refused"
        assert "temporaries need 800 bytes" in answer.fault.message
    else:
        assert isinstance(answer, ProgramReady)
        assert shared._jobs[job.job].transients == {answer.program: 800}


def test_memory_that_others_left_is_given_back_before_a_first_step_that_needs_it(
    driver: Driver, shared: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = compute_of(shared)
    for free, trims in ((1 << 30, 0), (1, 1)):
        job = driver.open()
        number = job.load(chain())
        monkeypatch.setattr(gpu_of(shared), "memory", lambda free=free: (free, MEMORY))
        before = compute.trims
        job.step(number, [1.0])
        assert compute.trims == before + trims


def test_state_is_copied_without_holding_the_interpreter(
    driver: Driver, shared: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a call that lets go of its lock, chunk by chunk: the thread that launches goes on meanwhile."""
    nbytes = 10_000_000
    job = driver.open()
    b = ProgramBuilder()
    b.add_op("aten.add_.Scalar", x := b.state("uint8", (nbytes,)), 1, outs=[x.view])
    number = job.load(b.build(), [nbytes])
    moved: list[int] = []
    memmove = ctypes.memmove

    def count(target: int, source: int, size: int) -> None:
        moved.append(size)
        memmove(target, source, size)

    pattern = bytes(range(250)) * (nbytes // 250)
    with monkeypatch.context() as patched:
        counted = SimpleNamespace(memmove=count, c_char=ctypes.c_char, addressof=ctypes.addressof)
        patched.setattr(engine, "ctypes", counted)
        job.transfer([0], [nbytes], pattern)
        job.step(number)
        assert job.transfer([0], [nbytes])[:nbytes] == bytes(range(1, 251)) * (nbytes // 250)
    assert sum(moved) == 2 * nbytes
    assert max(moved) <= engine.CHUNK


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


class Trims:
    """Counts how often the device has the worker give memory back."""

    def __init__(self, device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = 0
        submit, trim = device._worker.submit, device._engine.trim

        def count(work: Callable[[], Any], done: Callable[[Any, BaseException | None], None], priority: int) -> None:
            self.asked += work == trim
            submit(work, done, priority)

        monkeypatch.setattr(device._worker, "submit", count)


def test_memory_goes_back_once_after_a_job_and_not_while_a_launch_is_out(
    driver: Driver, shared: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, number = captured(driver, samples.counter(), [4])
    leaving = driver.open()
    leaving.load(samples.counter(), [4])
    driver.poll()
    trims, goes_on = Trims(shared, monkeypatch), threading.Event()
    launches = job.launch(number, [1.0])
    gpu_of(shared).streams[shared._jobs[job.job].stream].work.appendleft(goes_on.is_set)
    driver.unload(leaving.job)
    driver.poll()
    meanwhile = trims.asked
    goes_on.set()
    for launch in launches:
        driver.done(launch)
    for _ in range(3):
        driver.poll()
    assert (meanwhile, trims.asked) == (0, 1)


def test_memory_stays_while_the_worker_captures(
    driver: Driver, shared: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two pieces of a capture it does what is urgent, here the end of another job."""
    job = driver.open()
    number = job.load(chain())
    shared._jobs[job.job].programs[number].cuts.aim(1e-9)
    leaving = driver.open()
    leaving.load(samples.counter(), [4])
    begun, gates = threading.Semaphore(0), [threading.Event(), threading.Event()]
    closed = iter(gates)

    def before() -> None:
        gate = next(closed, None)
        if gate is not None:
            begun.release()
            assert gate.wait(60)

    monkeypatch.setattr(compute_of(shared), "before_capture", before)
    for _ in range(2):
        job.step(number, [1.0])
    assert begun.acquire(timeout=60)
    trims = Trims(shared, monkeypatch)
    shared.unload(leaving.job)
    gates[0].set()
    assert begun.acquire(timeout=60)  # the second piece's capture has begun, behind the end of the other job
    driver.until(JobReleased, leaving.job)
    driver.poll()
    meanwhile = trims.asked
    gates[1].set()
    driver.until(ProgramReady, job.job)
    for _ in range(3):
        driver.poll()
    assert (meanwhile, trims.asked) == (0, 1)


def test_memory_stays_while_another_job_is_let_go_of(
    driver: Driver, shared: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (captured(driver, samples.counter(), [4])[0] for _ in range(2))
    driver.poll()
    trims, gate, release = Trims(shared, monkeypatch), threading.Event(), shared._engine.release
    held = shared._jobs[second.job]

    def slow(job: CudaJob, stream: int) -> None:
        assert job is not held or gate.wait(60)
        release(job, stream)

    monkeypatch.setattr(shared._engine, "release", slow)
    shared.unload(first.job)
    shared.unload(second.job)
    driver.until(JobReleased, first.job)
    driver.poll()
    meanwhile = trims.asked
    gate.set()
    driver.until(JobReleased, second.job)
    for _ in range(3):
        driver.poll()
    assert (meanwhile, trims.asked) == (0, 1)


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
