"""Jobs on the fake GPU, and a look behind the device."""

from __future__ import annotations

from collections.abc import Sequence

from gpumux.device.base import Recut
from gpumux.device.cuda.device import CudaDevice
from gpumux.program.ir import Op, Program, ScalarRef, Storage, TensorRef, View
from tests.device.cuda.fake import FakeCompute, FakeDriver
from tests.device.harness import Driver, LoadedJob


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
    """What `crossing()` makes of its input with that scalar."""
    return [x + 40 * value - 2 * (x + 2 * value) for x in given]


def captured(
    driver: Driver, program: Program, buffers: list[int] | None = None, **options: object
) -> tuple[LoadedJob, int]:
    """A job whose program runs as graphs."""
    job = driver.open(**options)
    number = job.load(program, buffers or [])
    for _ in range(2):
        job.step(number, [1.0] * len(program.scalars))
    driver.until(Recut, job.job)
    return job, number
