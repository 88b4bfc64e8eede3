"""Jobs on the fake GPU, their Programs, and the fake behind a device."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from gpumux.device.base import Launch
from gpumux.device.cuda.device import CudaDevice
from gpumux.program.ir import Op, Program, ScalarRef, Storage, TensorRef, View
from gpumux.types import LaunchId, Priority, ProgramId, ProgramReady, StepId
from tests.device.cuda.fake import FakeCompute, FakeDriver
from tests.device.harness import Driver, LoadedJob, floats, numbers


def gpu_of(device: CudaDevice) -> FakeDriver:
    assert isinstance(device._driver, FakeDriver)
    return device._driver


def compute_of(device: CudaDevice) -> FakeCompute:
    compute = device._engine._compute
    assert isinstance(compute, FakeCompute)
    return compute


def chain(length: int = 40) -> Program:
    """input 0: float32[4] -> result 0: the input plus `length` times scalar 0, in that many operators."""
    kinds = ["input", *["temp"] * length]
    storages = tuple(Storage(kind, 16, 0 if kind == "input" else -1) for kind in kinds)
    views = tuple(View(i, "float32", (4,), (1,)) for i in range(length + 1))
    ops = tuple(Op("aten.add.Scalar", (TensorRef(i), ScalarRef(0)), (), (i + 1,)) for i in range(length))
    return Program(storages, views, ops, (0,), (length,), ("float",))


def crossing(length: int = 40) -> Program:
    """input 0: float32[4] -> result 0: it plus `length` times scalar 0. Every second temporary is also used at the very
    end, so that many cross every boundary; one is written in place far from its birth."""
    kinds = ["input", *["temp"] * (length + 1)]
    storages = tuple(Storage(kind, 16, 0 if kind == "input" else -1) for kind in kinds)
    views = tuple(View(i, "float32", (4,), (1,)) for i in range(length + 2))
    ops = [Op("aten.add.Scalar", (TensorRef(i), ScalarRef(0)), (), (i + 1,)) for i in range(length)]
    ops.append(Op("aten.clone.default", (TensorRef(length),), (), (length + 1,)))
    for i in range(2, length, 2):
        ops.append(Op("aten.add_.Tensor", (TensorRef(length + 1), TensorRef(i)), (), (length + 1,)))
        ops.append(Op("aten.sub_.Tensor", (TensorRef(length + 1), TensorRef(i)), (), (length + 1,)))
    ops.append(Op("aten.add_.Tensor", (TensorRef(2), TensorRef(2)), (), (2,)))
    ops.append(Op("aten.sub_.Tensor", (TensorRef(length + 1), TensorRef(2)), (), (length + 1,)))
    return Program(storages, views, tuple(ops), (0,), (length + 1,), ("float",))


def crossed(given: Sequence[float], value: float) -> list[float]:
    """The result of `crossing()` for an input and a scalar."""
    return [x + 40 * value - 2 * (x + 2 * value) for x in given]


def captured(
    driver: Driver, program: Program, buffers: list[int] | None = None, *, fine: bool = False, **options: object
) -> tuple[LoadedJob, int]:
    """A job whose program runs as graphs; `fine`: one for each operator."""
    job = driver.open(**options)
    number = job.load(program, buffers or [])
    if fine:
        driver.device._jobs[job.job].programs[number].cuts.aim(1e-9)
    for _ in range(2):
        job.step(number, [1.0] * len(program.scalars))
    driver.until(ProgramReady, job.job)
    return job, number


LENGTH = 40


def in_pieces(driver: Driver, shared: CudaDevice, priority: Priority = Priority.HIGH) -> tuple[LoadedJob, int]:
    """A job whose program runs as a graph for each operator."""
    job = driver.open(priority=priority)
    number = job.load(chain(LENGTH))
    shared._jobs[job.job].programs[number].cuts.aim(1e-9)
    for _ in range(2):
        job.step(number, [1.0])
    driver.until(ProgramReady, job.job)
    assert len(job.pieces[number]) == LENGTH
    return job, number


def check(job: LoadedJob, number: int, value: float) -> None:
    job.put(number, 0, floats(1, 2, 3, 4))
    job.step(number, [value])
    assert numbers(job.get(number, 0, 16)) == pytest.approx([x + LENGTH * value for x in (1, 2, 3, 4)])


_numbers = itertools.count(1 << 40)


def cut_fine(device: CudaDevice, job: LoadedJob, number: ProgramId) -> None:
    """Have the program cut into many pieces."""
    device._jobs[job.job].programs[number].cuts.aim(1e-9)


def step(driver: Driver, job: LoadedJob, number: ProgramId, value: float, shares: list[float]) -> None:
    """Run one step to its end, its pieces on these shares in turn."""
    for launch in launched(driver, job, number, value, shares):
        driver.done(launch)


def launched(driver: Driver, job: LoadedJob, number: ProgramId, value: float, shares: list[float]) -> list[LaunchId]:
    launches = []
    job.steps += 1
    for piece in range(len(job.pieces[number])):
        launch = LaunchId(next(_numbers))
        share = shares[piece % len(shares)]
        driver.device.launch(
            Launch(launch, job.job, StepId(job.steps), number, job.cut[number], piece, 0, (value,), 0, share)
        )
        launches.append(launch)
    return launches


def ready(driver: Driver, device: CudaDevice, made: Program) -> tuple[LoadedJob, ProgramId]:
    job = driver.open()
    number = job.load(made)
    cut_fine(device, job, number)
    for _ in range(2):
        job.step(number, [1.0])
    driver.until(ProgramReady, job.job)
    assert len(job.pieces[number]) > 10
    return job, number
