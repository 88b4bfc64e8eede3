"""Programs on a real GPU: captured runs beside runs operator by operator, clients without a GPU, and a big low job
that is admitted while a high one runs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpumux import client
from gpumux.device.base import ProgramProfiled
from gpumux.program.ir import Op, Program, Storage, TensorRef, View
from gpumux.program.profile import loads
from gpumux.types import Priority, ProgramReady
from microbench.daemon import running_daemon
from tests.device.harness import Driver, floats
from tests.program import samples


def test_captured_pieces_do_what_operators_one_by_one_did_bit_for_bit(driver: Driver) -> None:
    job = driver.open()
    program = job.load(samples.sgd_linear(64, 16), [64])
    batch = torch.Generator().manual_seed(3)
    x, y = (torch.randn(*size, generator=batch) for size in ((64, 16), (64,)))
    start = torch.randn(16, generator=batch)

    def step() -> tuple[bytes, bytes]:
        job.transfer([0], [64], bytes(start.numpy().tobytes()))
        job.put(program, 0, x.numpy().tobytes())
        job.put(program, 1, y.numpy().tobytes())
        job.step(program, [0.1])
        return job.get(program, 0, 4), job.transfer([0], [64])[:64]

    first = step()  # warms up, operator by operator
    assert step() == first  # timed
    driver.until(ProgramReady, job.job)
    for _ in range(12):  # as graphs, through the next cut
        assert step() == first


def test_captured_dropout_draws_anew_each_step_and_the_same_again_in_another_run(driver: Driver) -> None:
    def masks() -> list[bytes]:
        job = driver.open()
        program = job.load(samples.dropout())
        drawn = []
        for _ in range(12):  # operator by operator, then as graphs
            job.put(program, 0, floats(*[1.0] * 64))
            job.step(program)
            first, again, other = (job.get(program, position, 256) for position in range(3))
            assert first == again
            assert first != other
            drawn.append(first)
        driver.until(ProgramReady, job.job)
        return drawn

    drawn = masks()
    assert len(set(drawn)) == len(drawn)
    assert masks() == drawn


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(12, 64), nn.GELU(), nn.Linear(64, 10)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (3, 2, 2)), nn.Conv2d(3, 8, 2), nn.Flatten(), nn.Linear(8, 10)
    ),
    "norm": lambda: nn.Sequential(nn.Linear(12, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 10)),
}


@pytest.mark.parametrize("name", MODELS)
def test_inference_equals_the_plain_run_on_the_gpu_bit_for_bit(name: str, endpoint: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    batches = [torch.randn(8, 12) for _ in range(14)]

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(x)

    with client.submit(step, example=(batches[0],), model=model, endpoint=endpoint) as job:
        got = [job.step(x).result() for x in batches]
    model.cuda()
    for x, result in zip(batches, got, strict=True):
        assert torch.equal(result, step(x.cuda()).cpu())


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_training_is_what_it_is_in_the_plain_run_on_the_gpu(name: str, endpoint: str) -> None:
    """In float64 and to a tolerance: numbers that change from step to step are read from memory, which rounds once
    more."""

    def make(device: str) -> tuple[nn.Module, Any, Callable[..., torch.Tensor]]:
        torch.manual_seed(0)
        model = MODELS["linear"]().double().to(device)
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-2)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        return model, optimizer, step

    draw = torch.Generator().manual_seed(5)
    data = [
        (torch.randn(8, 12, generator=draw).double(), torch.randint(0, 10, (8,), generator=draw)) for _ in range(14)
    ]
    model, optimizer, step = make("cpu")
    with client.submit(step, example=data[0], model=model, optimizer=optimizer, endpoint=endpoint) as job:
        got = [float(job.step(*batch)) for batch in data]
        job.sync()
    reference, _, plain = make("cuda")
    want = [float(plain(x.cuda(), y.cuda())) for x, y in data]
    assert got == pytest.approx(want, rel=1e-9)
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b.cpu(), rtol=1e-8, atol=1e-10)


@pytest.fixture(scope="module")
def cpu_endpoint() -> Iterator[str]:
    with running_daemon() as daemon:
        yield daemon.endpoint


@pytest.mark.parametrize("where", ["endpoint", "cpu_endpoint"])
@pytest.mark.parametrize("options", [{}, {"capturable": True}], ids=["default", "capturable"])
def test_a_model_that_lives_on_the_gpu_is_trained_by_any_daemon(
    where: str, options: dict[str, bool], request: pytest.FixtureRequest
) -> None:
    """What lies on the GPU stays there: parameters, the optimizer's state, results. The second half of the steps runs
    in a second job, which starts from the state that the first brought home."""

    def make() -> tuple[nn.Module, Any, Callable[..., torch.Tensor]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 10)).double().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            x, y = x.to("cuda", non_blocking=True), y.cuda()
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y) + torch.zeros((), device="cuda", dtype=x.dtype)
            loss.backward()
            optimizer.step()
            return loss

        return model, optimizer, step

    draw = torch.Generator().manual_seed(5)
    data = [
        (torch.randn(8, 12, generator=draw).double(), torch.randint(0, 10, (8,), generator=draw)) for _ in range(12)
    ]
    model, optimizer, step = make()
    addresses = [p.data_ptr() for p in model.parameters()]
    got: list[torch.Tensor] = []
    for half in (data[:6], data[6:]):
        batch = [(x.cuda(), y) for x, y in half]  # some of a batch may lie there, too
        with client.submit(
            step, example=batch[0], model=model, optimizer=optimizer, endpoint=request.getfixturevalue(where)
        ) as job:
            got += [job.step(*b).result() for b in batch]
            assert job.stats()["exactness"] == "equivalent"
            job.sync()
    assert [p.data_ptr() for p in model.parameters()] == addresses
    assert all(result.is_cuda for result in got)
    assert all(state["exp_avg"].is_cuda for state in optimizer.state.values())
    assert all(state["step"].is_cuda == bool(options) for state in optimizer.state.values())
    reference, _, plain = make()
    want = [float(plain(x, y)) for x, y in data]
    assert [float(result) for result in got] == pytest.approx(want, rel=1e-8)
    for a, b in zip(model.state_dict().values(), reference.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)
    step(*data[0])  # the plain loop goes on from there


def test_a_client_whose_model_is_on_the_cpu_makes_no_context(endpoint: str) -> None:
    """In a process of its own, as this one has one. The step names the GPU all the same."""
    script = f"""
import torch
from gpumux import client
model = torch.nn.Linear(4, 3)
step = lambda x: model(x.to("cuda")) + torch.zeros(3, device="cuda")
with client.submit(step, example=(torch.ones(2, 4),), model=model, endpoint={endpoint!r}) as job:
    assert job.step(torch.ones(2, 4)).result().device.type == "cpu"
assert not torch.cuda.is_initialized()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def products(size: int, count: int) -> Program:
    """input 0: float32[size, size] -> its `count`-fold product with itself: work, and `count` operators to capture."""
    nbytes = 4 * size * size
    storages = tuple(Storage(kind, nbytes, 0 if kind == "input" else -1) for kind in ["input", *["temp"] * count])
    views = tuple(View(i, "float32", (size, size), (size, 1)) for i in range(count + 1))
    ops = tuple(Op("aten.mm.default", (TensorRef(i), TensorRef(0)), (), (i + 1,)) for i in range(count))
    return Program(storages, views, ops, (0,), (count,))


def test_operators_are_measured_between_the_kernels_of_captured_pieces(driver: Driver) -> None:
    """Equal products take about equally long, and together about what the pieces take without events in them."""
    job = driver.open()
    number = job.load(products(1024, 40))
    for _ in range(2):
        job.step(number)
    driver.until(ProgramReady, job.job)
    pieces = []
    for _ in range(10):
        pieces.append(sum(done.ended - done.started for done in job.step(number)))
    driver.device.profile(job.job, number)
    while not any(isinstance(event, ProgramProfiled) for event in driver.unread):
        job.step(number)
    answer = driver.until(ProgramProfiled, job.job)
    assert answer.fault is None, answer.fault
    profile = loads(answer.text.decode())
    assert "captured pieces" in profile.note
    seconds = sorted(op.seconds for op in profile.ops)
    assert seconds[-5] < 3 * seconds[5]
    assert 0.3 < profile.seconds / sorted(pieces)[len(pieces) // 2] < 3


NEAR = 20.0  # times as long as without the admission, and
AT_LEAST_S = 20e-3  # what a launch may take all the same: the operating system's own delays are in it


def test_a_high_job_goes_on_while_a_big_low_one_is_admitted(
    driver: Driver, record_property: Callable[[str, object], None]
) -> None:
    """From the low job's load to its captured pieces, no launch of the high job waits for it. How long each takes from
    the launch to the device's word that it has ended is noted, beside the same without the admission; the bound is
    wide."""
    high = driver.open(priority=Priority.HIGH)
    urgent = high.load(samples.add_one())
    for _ in range(2):
        high.step(urgent)
    driver.until(ProgramReady, high.job)
    high.put(urgent, 0, floats(1, 2, 3, 4))

    def delay() -> float:
        began = monotonic()
        for launch in high.launch(urgent, stream=int(Priority.HIGH)):
            driver.done(launch)
        return monotonic() - began

    for _ in range(200):
        delay()
    before = [delay() for _ in range(2000)]
    low = driver.open()
    number = low.try_load(products(1024, 400))

    def delays_until(kind: type) -> list[float]:
        found = []
        while not [e for e in driver.unread if isinstance(e, kind) and e.job == low.job]:
            found.append(delay())
        return found

    during = delays_until(ProgramReady)
    assert during
    loaded = driver.until(ProgramReady, low.job)
    low.pieces[number], low.cut[number] = loaded.pieces, 0
    for _ in range(2):
        low.launch(number)
    during += (captures := delays_until(ProgramReady))
    assert len(captures) >= 10
    for name, found in (("without", before), ("with", during)):
        p50, p99, most = (1e6 * share(found, part) for part in (0.5, 0.99, 1.0))
        record_property(
            f"{name} the admission", f"p50 {p50:.0f}, p99 {p99:.0f}, most {most:.0f} us, {len(found)} launches"
        )
    assert share(during, 0.99) <= max(NEAR * share(before, 0.99), AT_LEAST_S)


def share(seconds: list[float], part: float) -> float:
    """The time that this part of them stays within."""
    return sorted(seconds)[min(len(seconds) - 1, int(part * len(seconds)))]
