"""Operator times from captured pieces with events between operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import monotonic

import pytest

from gpumux.device.base import ProgramProfiled
from gpumux.device.cuda import profiling
from gpumux.device.cuda.cuts import STEPS, InstrumentedCut
from gpumux.device.cuda.device import CudaDevice
from gpumux.errors import JobFailed
from gpumux.program.profile import StepProfile, loads
from gpumux.types import JobDied, JobId, Priority, ProgramId, ProgramReady
from tests.device.cuda.fake import FakeDriver
from tests.device.cuda.running import captured, chain, compute_of, crossed, crossing, gpu_of
from tests.device.harness import Driver, LoadedJob, floats, numbers
from tests.program import samples


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests wait for steps, however long they take here."""
    monkeypatch.setattr(profiling, "WAIT_S", 1e6)


def profiled(driver: Driver, job: JobId) -> StepProfile:
    answer = driver.until(ProgramProfiled, job)
    assert answer.fault is None, answer.fault
    return loads(answer.text.decode())


def steps_until_profiled(driver: Driver, job: LoadedJob, number: ProgramId) -> tuple[StepProfile, int]:
    """Step as a client does until there is an answer; how many steps that took. Times are read while others run."""
    steps = 0
    while not any(isinstance(event, ProgramProfiled) for event in driver.unread):
        job.step(number, [1.0])
        steps += 1
    return profiled(driver, job.job), steps


def test_steps_that_run_anyway_are_measured_and_nothing_else_runs(
    driver: Driver,
    shared: CudaDevice,
    patient: None,
) -> None:
    job, number = captured(driver, samples.counter(), [4])
    plain = len(compute_of(shared).graphs)
    shared.profile(job.job, number)
    profile, steps = steps_until_profiled(driver, job, number)
    assert steps >= STEPS
    assert "captured pieces" in profile.note
    assert f"median of {STEPS} steps" in profile.note
    assert len(profile.ops) == len(job.programs[number].ops)
    assert numbers(job.transfer([0], [4])[:4]) == (2.0 + steps,)
    instrumented_cuts = compute_of(shared).graphs[plain:]
    assert instrumented_cuts
    driver.unload(job.job)
    assert all(graph.dropped for graph in instrumented_cuts)


def test_a_step_runs_through_the_instrumented_graphs_from_end_to_end_or_not_at_all(
    driver: Driver,
    shared: CudaDevice,
    patient: None,
) -> None:
    """With the next step launched before it has ended, of several pieces each."""
    job, number = captured(driver, chain())
    gpu = gpu_of(shared)
    shared.profile(job.job, number)
    loaded = shared._jobs[job.job].programs[number]
    while loaded.instrumented is None:
        driver.poll()
    gpu.auto = False
    for slot in (0, 1):
        job.put(number, 0, floats(1, 2, 3, 4), slot)
    launches = [launch for slot in (0, 1) for launch in job.launch(number, [0.5], slot)]
    assert loaded.instrumented.step == job.steps - 2
    gpu.auto = True
    for launch in launches:
        driver.done(launch)
    for slot in (0, 1):
        assert numbers(job.get(number, 0, 16, slot)) == pytest.approx([21, 22, 23, 24])


def test_a_step_that_a_new_cut_meets_midway_ends_through_the_graphs_it_began_with(
    driver: Driver,
    shared: CudaDevice,
    patient: None,
) -> None:
    """What crosses from piece to piece lies elsewhere in the instrumented graphs than in the others."""
    job, number = captured(driver, crossing())
    loaded = shared._jobs[job.job].programs[number]
    launch = shared.launch
    for slot in (0, 1):
        job.put(number, 0, floats(1, 2, 3, 4), slot)
    first, second = (job.pieces_of_step(number, [0.5 + slot], slot) for slot in (0, 1))
    for piece in first[:-1]:
        launch(piece)
        driver.done(piece.launch)
    shared.profile(job.job, number)
    while loaded.instrumented is None:
        driver.poll()
    shared.regrade(job.job, Priority.HIGH)  # captured anew when a step has ended
    gpu_of(shared).auto = False
    launch(first[-1])
    launch(second[0])
    instrumented = loaded.instrumented
    assert instrumented.step == second[0].step
    gpu_of(shared).auto = True
    driver.done(second[0].launch)
    driver.until(ProgramReady, job.job)
    assert loaded.instrumented is not instrumented
    for piece in second[1:]:
        launch(piece)
        driver.done(piece.launch)
    for slot in (0, 1):
        assert numbers(job.get(number, 0, 16, slot)) == pytest.approx(crossed([1, 2, 3, 4], 0.5 + slot))
    assert "captured pieces" in steps_until_profiled(driver, job, number)[0].note
    assert all(graph.dropped for graph in instrumented.graphs if graph is not None)


def test_a_job_that_stands_still_is_told_the_times_of_its_timed_step(
    driver: Driver,
    shared: CudaDevice,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(profiling, "WAIT_S", 0.0)
    job, number = captured(driver, samples.counter(), [4])
    shared.profile(job.job, number)
    assert "one by one" in profiled(driver, job.job).note
    job.step(number, [1.0])


def test_a_request_that_has_waited_for_long_is_not_answered_while_a_step_runs_through_the_instrumented_graphs(
    driver: Driver,
    shared: CudaDevice,
    patient: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The step is one of those it waits for: its times are there when it has ended."""
    job, number = captured(driver, samples.counter(), [4])
    shared.profile(job.job, number)
    loaded = shared._jobs[job.job].programs[number]
    while loaded.instrumented is None:
        driver.poll()
    instrumented = loaded.instrumented
    gpu_of(shared).auto = False
    launches = job.launch(number, [1.0])
    assert instrumented.step is not None
    monkeypatch.setattr(shared._profiles, "_clock", lambda: monotonic() + 2 * profiling.WAIT_S)
    wrote: list[int] = []
    write = shared._profiles._write
    monkeypatch.setattr(shared._profiles, "_write", lambda of: (wrote.append(instrumented.steps), write(of))[1])
    for _ in range(3):
        driver.poll()
    gpu_of(shared).auto = True
    for launch in launches:
        driver.done(launch)
    while instrumented.step is not None:  # its times are being read; the request would wait again
        driver.poll()
    monkeypatch.setattr(shared._profiles, "_clock", lambda: monotonic() + 4 * profiling.WAIT_S)
    assert "median of 1 steps" in profiled(driver, job.job).note
    assert wrote == [1]


def test_requests_are_answered_in_order_through_another_cut(
    driver: Driver,
    shared: CudaDevice,
    patient: None,
) -> None:
    job, number = captured(driver, samples.counter(), [4])
    for asked in (number, number):
        shared.profile(job.job, asked)
    job.step(number, [1.0])
    shared.regrade(job.job, Priority.HIGH)  # captured anew: what was measured was another cut's
    for _ in range(2):
        assert "captured pieces" in steps_until_profiled(driver, job, number)[0].note
    driver.until(ProgramReady, job.job)
    assert not shared._jobs[job.job].profiling


@pytest.mark.parametrize("lost", [False, True])
def test_a_job_that_ends_leaves_no_request_behind(
    driver: Driver,
    shared: CudaDevice,
    patient: None,
    lost: bool,
) -> None:
    job, number = captured(driver, samples.counter(), [4])
    shared.profile(job.job, number)
    job.step(number, [1.0])
    if lost:
        job.launch(number, [])
        answer = driver.wait_for(lambda e: isinstance(e, ProgramProfiled) and e.job == job.job)
        assert isinstance(answer, ProgramProfiled)
        assert answer.fault is not None
        driver.wait_for(lambda e: isinstance(e, JobDied) and e.job == job.job)
    driver.unload(job.job)
    assert not [event for event in driver.unread if isinstance(event, ProgramProfiled) and event.job == job.job]


def test_where_no_twin_can_be_captured_the_first_steps_times_are_told_and_the_note_says_so(
    driver: Driver, shared: CudaDevice
) -> None:
    job, number = captured(driver, samples.counter(), [4])
    compute = compute_of(shared)

    def fail() -> None:
        raise RuntimeError("no room for it")

    compute.before_capture = fail
    try:
        shared.profile(job.job, number)
        profile = profiled(driver, job.job)
    finally:
        compute.before_capture = lambda: None
    assert "launched one by one" in profile.note
    job.step(number, [1.0])


def test_a_program_that_runs_operator_by_operator_is_measured_all_the_same(driver: Driver, shared: CudaDevice) -> None:
    compute = compute_of(shared)
    job = driver.open()
    number = job.load(samples.counter(), [4])

    def fail() -> None:
        raise RuntimeError("an unexpected error")

    compute.before_capture = fail
    try:
        for _ in range(3):
            job.step(number, [1.0])
    finally:
        compute.before_capture = lambda: None
    assert job.cut[number] == 0
    shared.profile(job.job, number)
    assert "launched one by one" in profiled(driver, job.job).note


def test_times_that_cant_be_read_fail_their_request_alone(
    driver: Driver, shared: CudaDevice, patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, number = captured(driver, samples.counter(), [4])

    def fail(self: InstrumentedCut) -> None:
        raise JobFailed("cuEventElapsedTime failed: CUDA_ERROR_INVALID_HANDLE")

    monkeypatch.setattr(InstrumentedCut, "read", fail)
    shared.profile(job.job, number)
    while not any(isinstance(event, ProgramProfiled) for event in driver.unread):
        job.step(number, [1.0])
    answer = driver.until(ProgramProfiled, job.job)
    assert answer.fault is not None
    assert "INVALID_HANDLE" in answer.fault.message
    job.step(number, [1.0])


@pytest.fixture
def marked() -> Iterator[Callable[[list[float]], InstrumentedCut]]:
    """An instrumented cut of one piece whose events were reached at given times."""
    gpu = FakeDriver(auto=False)

    def make(at: list[float]) -> InstrumentedCut:
        events = [gpu.event(timed=True) for _ in at]
        return InstrumentedCut(1, [None], [events], gpu)

    def set_times(instrumented: InstrumentedCut, at: list[float]) -> None:
        for event, when in zip(instrumented._marks[0], at, strict=True):
            gpu.events[event].at = when

    make.set_times = set_times  # type: ignore[attr-defined]
    yield make
    assert not gpu.events


def test_what_the_events_cost_is_taken_off_and_the_median_counts(
    marked: Callable[[list[float]], InstrumentedCut],
) -> None:
    instrumented = marked([0.0] * 4)
    for step, slow in enumerate((1.0, 1.0, 5.0, 1.0, 9.0)):
        instrumented.begins(step, 1)
        assert instrumented.runs(step)
        for cut in (1, 0):
            instrumented.begins(step + 100, cut)  # another step meanwhile
            assert not instrumented.runs(step + 100)
        marked.set_times(instrumented, [0.0, 2e-6, 2e-6 + slow * 12e-6, 3e-6 + slow * 12e-6])  # type: ignore[attr-defined]
        instrumented.read()
    assert instrumented.complete
    instrumented.begins(7, 1)
    assert not instrumented.runs(7)
    first, second = instrumented.op_s()
    assert first == pytest.approx(10e-6)
    assert second == pytest.approx(0.5e-6)  # less than an event: at least the resolution
    instrumented.drop()
    instrumented.read()  # asked for before, done after: nothing


def test_an_instrumented_cut_is_dropped_when_it_has_measured(driver: Driver, shared: CudaDevice, patient: None) -> None:
    """And not when the job ends."""
    job, number = captured(driver, samples.counter(), [4])
    plain = len(compute_of(shared).graphs)
    shared.profile(job.job, number)
    steps_until_profiled(driver, job, number)
    instrumented_cuts = compute_of(shared).graphs[plain:]
    for _ in range(2):
        job.step(number, [1.0])
    assert instrumented_cuts
    assert all(graph.dropped for graph in instrumented_cuts)
    assert numbers(job.transfer([0], [4])[:4])
