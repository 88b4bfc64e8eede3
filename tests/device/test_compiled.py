"""Programs that are compiled: the same bits on every way they are run, near those of the plain run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from gpumux.device import inductor
from gpumux.device.base import ProgramRefused
from gpumux.device.cpu.device import CpuDevice
from gpumux.device.cuda.device import CudaDevice
from gpumux.device.run.operands import Liveness
from gpumux.program.cut import units
from gpumux.program.ir import Op, Program, ScalarRef, Storage, TensorRef, View, contiguous_strides
from gpumux.types import ProgramReady
from tests.compiler import COMPILER
from tests.device.cuda.fake import fake_device, poll_wait
from tests.device.harness import Case, Driver, select_wait
from tests.program import samples

compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="there is no C++ compiler on this machine"
)
ROWS, COLUMNS, LENGTH = 32, 8, 20


def program() -> Program:
    """input 0: float32[rows, columns]; state 0: float32[columns]; scalar 0 -> result 0: float32[columns].

    Two units with a draw between them; the state is read through two views and written twice."""
    size = (ROWS, COLUMNS)
    views = [
        View(0, "float32", size, contiguous_strides(size)), View(1, "float32", (COLUMNS,), (1,)),
        View(1, "float32", (COLUMNS // 2,), (2,), 1),
    ]  # fmt: skip
    storages = [Storage("input", 4 * ROWS * COLUMNS, 0), Storage("state", 4 * COLUMNS, 0)]
    ops: list[Op] = []

    def op(target: str, *args: object, shape: tuple[int, ...] = size, random: int | None = None) -> int:
        storages.append(Storage("temp", 4 * torch.Size(shape).numel()))
        views.append(View(len(storages) - 1, "float32", shape, contiguous_strides(shape)))
        ops.append(Op(f"aten.{target}", args, (), (len(views) - 1,), random))  # type: ignore[arg-type]
        return len(views) - 1

    x = op("add.Tensor", TensorRef(0), TensorRef(1))
    for index in range(LENGTH):
        x = op("tanh.default", TensorRef(x)) if index % 2 else op("mul.Tensor", TensorRef(x), TensorRef(1))
    drawn = op("bernoulli.p", TensorRef(x), 0.5, random=0)
    x = op("mul.Tensor", TensorRef(x), TensorRef(drawn))
    total = op("sum.dim_IntList", TensorRef(x), (0,), shape=(COLUMNS,))
    scaled = op("mul.Scalar", TensorRef(total), ScalarRef(0), shape=(COLUMNS,))
    ops.append(Op("aten.add_.Tensor", (TensorRef(1), TensorRef(scaled)), (), (1,)))
    ops.append(Op("aten.mul_.Scalar", (TensorRef(2), 0.5), (), (2,)))
    return Program(tuple(storages), tuple(views), tuple(ops), (0,), (total,), ("float",), kind="compiled")


@pytest.fixture(scope="module", autouse=True)
def code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One folder for what is compiled here: each unit is compiled once."""
    folder = tmp_path_factory.mktemp("code")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        for name, value in COMPILER.items():
            patch.setenv(name, value)
        with suppress(ImportError):
            from tqdm import tqdm

            patch.setattr(tqdm, "monitor_interval", 0)  # inductor's progress bars would start a thread for good
        yield folder


@pytest.fixture(scope="module")
def gpu(code: Path) -> Iterator[CudaDevice]:
    device = fake_device()
    device.open()
    yield device
    device.close()


def driver_of(gpu: CudaDevice) -> Driver:
    return Driver(Case("cuda", lambda: gpu, lambda: gpu, wait=poll_wait), gpu)


SEED, STEPS = 3, 12
BATCH = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1))
START = torch.randn(COLUMNS, generator=torch.Generator().manual_seed(2))


def run(driver: Driver, made: Program) -> list[bytes]:
    """What each step returned, and the state in the end."""
    job = driver.open(seed=SEED)
    number = job.load(made, [4 * COLUMNS])
    job.transfer([0], [4 * COLUMNS], START.numpy().tobytes())
    seen = []
    cuts = set()
    for step in range(STEPS):
        job.put(number, 0, BATCH.numpy().tobytes())
        job.step(number, [0.1 + step])
        seen.append(job.get(number, 0, 4 * COLUMNS))
        if step == 1:
            driver.until(ProgramReady, job.job)
        cuts.add(job.cut[number])
    assert {0, 1} <= cuts
    assert max(len(job.pieces[number]), 1) <= len(units(made))
    return [*seen, job.transfer([0], [4 * COLUMNS])[: 4 * COLUMNS]]


def reference(made: Program) -> list[bytes]:
    """The units, compiled and called here, one after the other."""
    live, state = Liveness.of(made), START.clone()
    found = units(made, inductor.uncompilable(made, live))
    assert [unit.compiled for unit in found] == [True, False, True]
    compiled = [inductor.compile_unit(made, live, u, torch.device("cpu"), lambda _: True) for u in found]
    persistent = {0: BATCH, 1: state}
    seen = []
    generator = torch.Generator().manual_seed(SEED)
    for step in range(STEPS):
        temps: dict[int, torch.Tensor] = {}
        numbers = [torch.tensor([0.1 + step], dtype=torch.float64), torch.tensor([0]), torch.tensor([0.1 + step])]
        for unit, maker in zip(found, compiled, strict=True):
            if not unit.compiled:
                drawing = made.ops[unit.start]
                (source,) = [a.view for a in drawing.args if isinstance(a, TensorRef)]
                out = drawing.outs[0]
                assert isinstance(out, int)
                like = temps[made.views[source].storage]
                temps[made.views[out].storage] = torch.bernoulli(like, 0.5, generator=generator)
                continue
            assert maker is not None
            given = [persistent[view.storage] for view in maker.bases]
            given += (numbers if maker.numbers else []) + [temps[s] for s in maker.live_in]
            made_here = inductor.run(maker, made, live, given, lambda call, args: call(*args))
            temps |= dict(zip(maker.live_out, made_here, strict=True))
        seen.append(temps[made.views[made.results[0]].storage].numpy().tobytes())
    return [*seen, state.numpy().tobytes()]


@compiler
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, on importing inductor
@pytest.mark.extended
def test_every_way_of_running_a_compiled_program_gives_the_same_bits(gpu: CudaDevice) -> None:
    """Called here, on the CPU device and on the CUDA device over host memory, through all their cuts."""
    made = program()
    want = reference(made)
    device = CpuDevice(threads=1)
    device.open()
    try:
        driver = Driver(Case("cpu", lambda: device, lambda: device, wait=select_wait), device)
        got = run(driver, made)
        plain = run(driver, Program(**{**{n: getattr(made, n) for n in made.__slots__}, "kind": "aten"}))
        driver.finish()
    finally:
        device.close()
    assert got == want
    for a, b in zip(plain, want, strict=True):
        torch.testing.assert_close(
            torch.frombuffer(bytearray(a), dtype=torch.float32), torch.frombuffer(bytearray(b), dtype=torch.float32),
            rtol=1e-4, atol=1e-5,
        )  # fmt: skip
    driver = driver_of(gpu)
    assert run(driver, made) == want
    driver.finish()


def test_without_a_compiler_the_refusal_says_what_to_install(gpu: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its load is refused, and the job's memory is as it was."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    driver = driver_of(gpu)
    job = driver.open()
    held = gpu.memory().by_job[job.job]
    job.try_load(program(), [4 * COLUMNS])
    answer = driver.until(ProgramReady | ProgramRefused, job.job)
    assert isinstance(answer, ProgramRefused)
    assert "no-such-compiler" in answer.fault.message
    assert "install" in answer.fault.remedy
    assert "compile=True" in answer.fault.remedy
    assert gpu.memory().by_job[job.job] == held
    driver.finish()


def test_what_cant_be_compiled_is_left_as_it_is() -> None:
    """A number that no form reads from memory, a storage that is seen in two types, and an LSTM through oneDNN."""
    x, y = View(0, "float32", (4,), (1,)), View(1, "float32", (4,), (1,))
    number = Op("aten.leaky_relu.default", (TensorRef(0), ScalarRef(0)), (), (1,))
    made = Program((Storage("input", 16, 0), Storage("temp", 16)), (x, y), (number,), (0,), (1,), ("float",))
    assert inductor.uncompilable(made, Liveness.of(made)) == {0}
    as_int = View(0, "int32", (4,), (1,))
    both = Op("aten.add.Tensor", (TensorRef(0), TensorRef(2)), (), (1,))
    made = Program((Storage("input", 16, 0), Storage("temp", 16)), (x, y, as_int), (both,), (0,), (1,))
    assert inductor.uncompilable(made, Liveness.of(made)) == {0}
    made = samples.lstm(4096)
    assert inductor.uncompilable(made, Liveness.of(made)) == {0, 1}, "the compiler does not know the workspace"
