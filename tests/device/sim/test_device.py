"""What the simulated device does beyond the contract (tests/device/test_contract.py)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from gpumux.device.base import Launch, ProgramProfiled
from gpumux.device.sim.cost import kernels_of, op_profiles, product, solo_seconds
from gpumux.device.sim.device import SimDevice
from gpumux.device.sim.spec import A100, H200, GpuSpec
from gpumux.program.ir import Op, Program, Storage, TensorRef, View
from gpumux.program.profile import OpProfile, StepProfile, loads
from gpumux.types import JobDied, LaunchId, PieceDone, Priority, ProgramReady, StepId
from tests.device.conftest import CLOCK
from tests.device.harness import Case, Driver
from tests.program import samples

CASE = Case("sim", wide=lambda: SimDevice(clock=CLOCK), narrow=lambda: SimDevice(clock=CLOCK), wait=CLOCK.wait)


@pytest.fixture
def driver() -> Iterator[Driver]:
    with driving(SimDevice(clock=CLOCK)) as driver:
        yield driver


@contextmanager
def driving(device: SimDevice) -> Iterator[Driver]:
    device.open()
    driver = Driver(CASE, device)
    try:
        yield driver
    finally:
        driver.finish()
        device.close()


def relu_chain(count: int, elements: int = 1 << 20) -> Program:
    """`count` rectifiers over one state tensor."""
    view = View(0, "float32", (elements,), (1,))
    op = Op("aten.relu_.default", (TensorRef(0),), outs=(0,))
    return Program((Storage("state", 4 * elements, 0),), (view,), (op,) * count, (), ())


def test_results_are_zeros_and_state_is_what_was_put_there(driver: Driver) -> None:
    job = driver.open()
    program = job.load(samples.counter(), [4])
    job.transfer([0], [4], b"\x01\x02\x03\x04")
    job.step(program, [1.0])
    assert job.get(program, 0, 4) == bytes(4)
    assert job.transfer([0], [4])[:4] == b"\x01\x02\x03\x04"


def test_state_that_was_never_written_is_zeros(driver: Driver) -> None:
    job = driver.open()
    job.load(samples.counter(), [4, 5 << 20], [0])
    assert not any(job.transfer([1], [5 << 20]))


def test_a_step_takes_what_its_kernels_and_the_launches_take(driver: Driver) -> None:
    job = driver.open()
    program = relu_chain(10)
    number = job.load(program, [4 << 20])
    kernels = kernels_of(op_profiles(program, A100), A100)
    times = job.step(number)
    alone = sum(solo_seconds(kernel, A100) for kernel in kernels)
    taken = sum(done.ended - done.started for done in times)
    assert taken == pytest.approx(alone, rel=0.1)
    assert taken > alone
    assert sum(job.pieces[number]) == pytest.approx(taken)


@pytest.mark.parametrize("priority", list(Priority))
def test_pieces_are_as_long_as_the_priority_wants(driver: Driver, priority: Priority) -> None:
    job = driver.open(priority=priority)
    number = job.load(relu_chain(600), [4 << 20])
    target = {Priority.HIGH: 400e-6, Priority.LOW: 300e-6}[priority]
    assert all(0.8 * target < piece < 1.1 * target for piece in job.pieces[number])


def profiled(seconds: float, elements: int = 1 << 20) -> StepProfile:
    shape = (elements,)
    op = OpProfile("aten.relu_.default", (shape, shape), seconds, 0, 108, 1, source="measured")
    return StepProfile("relu", "a100", (op,))


def test_a_profile_counts_more_than_the_model_and_the_first_step_shows_it() -> None:
    with driving(SimDevice(clock=CLOCK, known=[profiled(100e-6)])) as driver:
        job = driver.open()
        number = job.load(relu_chain(12), [4 << 20])
        assert sum(job.pieces[number]) < 300e-6  # the cost model's belief
        first = job.step(number)
        assert sum(done.ended - done.started for done in first) > 1200e-6
        recut = driver.until(ProgramReady, job.job)
        assert len(recut.pieces) > len(first)
        assert sum(recut.pieces) == pytest.approx(1200e-6, rel=0.05)
        driver.device.profile(job.job, number)
        told = loads(driver.until(ProgramProfiled, job.job).text.decode())
        assert told.sources() == {"measured": 12}
        assert told.device == "a100"


def test_a_launch_may_be_confined_to_a_share_the_device_offers_and_to_no_other() -> None:
    with driving(SimDevice(clock=CLOCK, known=[profiled(100e-6)])) as driver:
        job = driver.open()
        number = job.load(relu_chain(1), [4 << 20])
        job.step(number)
        seconds = {}
        for count, share in enumerate((1.0, 0.5, 0.25), 1):
            launch = Launch(LaunchId(1 << 50 | count), job.job, StepId(count), number, 0, 0, 0, (), 0, share)
            driver.device.launch(launch)
            done = driver.done(launch.launch)
            seconds[share] = done.ended - done.started
        assert seconds[0.5] == pytest.approx(2 * seconds[1.0], rel=0.05)
        assert seconds[0.25] == pytest.approx(5 * seconds[1.0], rel=0.05)  # 26 of 108: five waves
        wrong = Launch(LaunchId(1 << 51), job.job, StepId(9), number, 0, 0, 0, (), 0, 0.3)
        driver.device.launch(wrong)
        assert "share" in driver.failed(wrong.launch).fault.message
        driver.wait_for(lambda e: isinstance(e, JobDied) and e.job == job.job)


def test_a_high_launch_overtakes_low_ones_on_the_device(driver: Driver) -> None:
    low, high = driver.open(), driver.open(priority=Priority.HIGH)
    numbers = [job.load(relu_chain(100, 1 << 24), [4 << 24]) for job in (low, high)]
    behind = low.launch(numbers[0])
    urgent = high.launch(numbers[1], stream=1)
    ended = {launch: driver.done(launch).ended for launch in (*urgent, *behind)}
    assert max(ended[launch] for launch in urgent) < max(ended[launch] for launch in behind)


def test_due_says_when_and_poll_before_it_says_nothing(driver: Driver) -> None:
    job = driver.open()
    number = job.load(relu_chain(50), [4 << 20])
    driver.poll()
    job.launch(number)
    assert CLOCK.now < driver.device.due() < CLOCK.now + 1.0
    assert driver.device.poll() == []


def test_a_closed_device_is_never_due_and_has_no_descriptors() -> None:
    device = SimDevice(clock=CLOCK)
    device.open()
    device.close()
    assert device.due() == float("inf")
    assert device.filenos() == ()


def test_unloading_one_job_leaves_the_other_its_launches(driver: Driver) -> None:
    gone, kept = driver.open(), driver.open()
    number, mine = gone.load(relu_chain(50), [4 << 20]), kept.load(relu_chain(50), [4 << 20])
    gone.launch(number)
    launches = kept.launch(mine)
    driver.unload(gone.job)
    assert all(isinstance(driver.done(launch), PieceDone) for launch in launches)


# ---- the cost model


@pytest.mark.parametrize("spec", [A100, H200], ids=["a100", "h200"])
def test_a_large_product_is_bound_by_arithmetic_and_a_thin_one_by_memory(spec: GpuSpec) -> None:
    flops = spec.flops["float16"]
    large = product(8192, 8192, 8192, 3 * 2 * 8192**2, flops, spec)
    assert large.seconds == pytest.approx(2 * 8192**3 / (flops * spec.product_efficiency), rel=0.1)
    thin = product(1, 8192, 8192, 2 * 8192**2, flops, spec)
    assert thin.seconds >= 2 * 8192**2 / spec.bandwidth
    assert thin.seconds < 0.03 * large.seconds


def test_operators_of_a_program_are_modelled_by_what_they_are() -> None:
    size = 4096
    square = View(0, "float32", (size, size), (size, 1))
    mm = Op("aten.mm.default", (TensorRef(0), TensorRef(0)), outs=(1,))
    views = (square, replace(square, storage=1))
    storages = (Storage("state", 4 * size * size, 0), Storage("temp", 4 * size * size))
    program = Program(storages, views, (mm, Op("aten.relu_.default", (TensorRef(1),), outs=(1,))), (), ())
    one, two = op_profiles(program, A100)
    assert one.seconds == pytest.approx(2 * size**3 / (A100.flops["float32"] * A100.product_efficiency), rel=0.1)
    assert two.seconds == pytest.approx(8 * size * size / A100.bandwidth, rel=0.01)
    assert {one.source, two.source} == {"model"}
    allowed = replace(program, numerics=replace(program.numerics, matmul_precision="high"))
    assert op_profiles(allowed, A100)[0].seconds < 0.2 * one.seconds  # TF32


def test_nothing_of_it_imports_torch() -> None:
    code = "import sys, gpumux.device.registry as r; r.make('sim').open(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0
