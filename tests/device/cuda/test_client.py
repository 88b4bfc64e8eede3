"""A client without a GPU and a daemon that has one (of host memory): programs traced here run there. What is traced
on the CPU is carried out in other forms there, so results are close, not equal bit for bit."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpumux import client
from gpumux.capture import state
from gpumux.capture import step as variants
from gpumux.capture.batch.checks import BatchCheck
from gpumux.capture.lower import Lowered
from gpumux.errors import GpumuxError, JobFailed
from tests.client.parity import Work, batches, plain, simple_loop, through
from tests.client.workload_jobs import near_the_reference
from tests.device.cuda.serving import START_S, close, serving


def training(make_optimizer: Callable[..., Any], steps: int = 12, schedule: bool = False) -> Callable[[], Work]:
    def make() -> Work:
        model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 10)).double()
        optimizer = make_optimizer(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9) if schedule else None
        data = [(x.double(), y) for x, y in batches((8, 12))]

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        return Work(
            [model], [optimizer], [(step, data[0])], simple_loop(data, steps, scheduler.step if scheduler else None)
        )

    return make


optim = torch.optim


@pytest.mark.parametrize(
    ("make_optimizer", "tolerance"),
    [
        (lambda p: optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3), 1e-9),
        (lambda p: optim.AdamW(p, lr=1e-2), 1e-9),
        (lambda p: optim.Adam(p, lr=1e-2, foreach=False), 1e-9),
        (lambda p: optim.AdamW(p, lr=1e-2, fused=True), 1e-6),
        (lambda p: optim.Adam(p, lr=1e-2, fused=True, amsgrad=True), 1e-6),
        (lambda p: optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3, nesterov=True, fused=True), 1e-6),
    ],
    ids=["sgd", "adamw", "adam-single", "adamw-fused", "adam-fused", "sgd-fused"],
)
@pytest.mark.every(6)
def test_training_with_a_schedule_is_what_it_is_on_the_cpu(
    make_optimizer: Any, tolerance: float, endpoint: str
) -> None:
    """Through all cuts: 12 steps, with a learning rate that changes under captured pieces. A fused optimizer computes
    with float32 numbers."""
    make = training(make_optimizer, schedule=True)
    want, want_state = plain(make)
    got, got_state = through(make, endpoint)
    close(want, got, tolerance)
    close(want_state, got_state, tolerance)


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda p: optim.AdamW(p, lr=1e-2, fused=True),
        lambda p: optim.Adam(p, lr=1e-2, fused=True, amsgrad=True, weight_decay=1e-2, maximize=True),
        lambda p: optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3, nesterov=True, fused=True),
        lambda p: optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    ],
    ids=["adamw", "adam", "nesterov", "sgd"],
)
def test_a_fused_optimizer_whose_momentum_cycles(make_optimizer: Any, endpoint: str) -> None:
    """torch's kernels read the learning rate in memory, and no other number."""

    def make() -> Work:
        work = training(make_optimizer, steps=0)()
        (model,), (optimizer,), ((step, example),) = work.models, work.optimizers, work.functions
        schedule = optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=20)
        data = [(x.double(), y) for x, y in batches((8, 12))]

        def loop(run: Any) -> Any:
            out = []
            for i in range(12):
                out.append(run(*data[i % len(data)]))
                optimizer.param_groups[0]["weight_decay"] = 0.01 * (i % 3)
                schedule.step()
            return out

        return Work([model], [optimizer], [(step, example)], loop)

    want, want_state = plain(make)
    got, got_state = through(make, endpoint)
    close(want, got, 1e-6)
    close(want_state, got_state, 1e-6)


@pytest.mark.extended
def test_a_job_over_one_daemon_named_as_several_would_be_runs_and_two_are_refused(endpoint: str) -> None:
    def loop(endpoints: list[str] | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(12, 10).double()
        optimizer = optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        data = [(x.double(), y) for x, y in batches((8, 12))]
        if endpoints is None:
            return [*(step(*batch).detach() for batch in data), *model.parameters()]
        with client.submit(step, example=data[0], model=model, optimizer=optimizer, endpoints=endpoints) as job:
            found = [job.step(*batch).result() for batch in data]
            job.sync()
        return [*found, *model.parameters()]

    close(loop(None), loop([endpoint]), 1e-9)
    with serving() as (other, _), pytest.raises(GpumuxError, match="not proven"):
        loop([endpoint, other])


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> list[Lowered]:
    """What is captured, in order."""
    made: list[Lowered] = []
    lower = variants.lower

    def noted(*args: Any, **options: Any) -> Lowered:
        made.append(lower(*args, **options))
        return made[-1]

    monkeypatch.setattr(variants, "lower", noted)
    return made


def test_hyperparameters_that_never_change_are_written_into_the_program(endpoint: str, lowered: list[Lowered]) -> None:
    """All but the learning rate, and what the step count makes."""
    make = training(lambda p: optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3), schedule=True)
    through(make, endpoint)
    assert len(lowered) == 2  # the first step, and all others
    assert all(len(made.program.scalars) == 1 for made in lowered)


def changing(key: str, value: Callable[[int], float]) -> Callable[[], Work]:
    """One of SGD's hyperparameters is another from step 5 on."""

    def make() -> Work:
        work = training(lambda p: optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3), steps=0)()
        (model,), (optimizer,), ((step, example),) = work.models, work.optimizers, work.functions
        data = [(x.double(), y) for x, y in batches((8, 12))]

        def loop(run: Any) -> Any:
            out = []
            for i in range(12):
                if i >= 5:
                    optimizer.param_groups[0][key] = value(i)
                out.append(run(*data[i % len(data)]))
            return out

        return Work([model], [optimizer], [(step, example)], loop)

    return make


def test_one_that_changes_is_a_number_of_each_step_from_then_on(endpoint: str, lowered: list[Lowered]) -> None:
    """Its step is made into one Program more, and not traced again; others stay as they are."""
    make = changing("momentum", lambda i: 0.9 - 0.05 * (i % 3))
    want, want_state = plain(make)
    lowered.clear()
    got, got_state = through(make, endpoint)
    close(want, got, 1e-9)
    close(want_state, got_state, 1e-9)
    assert [len(made.program.scalars) for made in lowered] == [1, 1, 2]


def test_one_that_becomes_no_number_is_computed_with(endpoint: str) -> None:
    """A NaN equals nothing, also what a Program was made with."""
    make = changing("momentum", lambda i: math.nan)
    want, _ = plain(make)
    got, got_state = through(make, endpoint)
    assert [math.isnan(loss) for loss in got] == [math.isnan(loss) for loss in want]
    assert any(map(math.isnan, got))
    assert all(tensor.isnan().all() for tensor in got_state[0].values())


def test_convolutions_norms_attention_and_pooling_move(endpoint: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
            self.mix, self.out = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), nn.Linear(8, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)
            return self.out(self.mix(x.flatten(2).transpose(1, 2)).mean(1))

    def make() -> Work:
        model = Net().double()
        optimizer = optim.SGD(model.parameters(), lr=0.05)
        data = [(x.double(), y) for x, y in batches((4, 1, 8, 8))]

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        return Work([model], [optimizer], [(step, data[0])], simple_loop(data, 5))

    want, want_state = plain(make)
    got, got_state = through(make, endpoint)
    close(want, got, 1e-9)
    close(want_state, got_state, 1e-9)


def test_a_workload_is_as_near_its_reference_run_as_the_job_says(endpoint: str) -> None:
    """What tests/gpu asks of all workloads, of a real GPU."""
    near_the_reference("digits_transformer", endpoint, dtype=torch.float64)


def test_many_tensors_at_once_is_the_default_as_it_is_on_a_gpu(endpoint: str, lowered: list[Lowered]) -> None:
    through(training(lambda p: optim.Adam(p, lr=1e-2), steps=3), endpoint)
    assert lowered
    assert all(any("_foreach_addcdiv_" in op.target for op in made.program.ops) for made in lowered)


def test_a_step_that_names_the_gpu_runs_on_the_daemons_and_is_equivalent(endpoint: str) -> None:
    """The client's model lies on the CPU, and nothing here could make a context."""
    model = nn.Linear(12, 3).double()

    def step(x: torch.Tensor) -> torch.Tensor:
        x = x.to("cuda", torch.float64)
        return model(x) + torch.arange(3, device=torch.device("cuda", 0)).cuda()

    batch = torch.arange(24.0).reshape(2, 12)
    with client.submit(step, example=(batch,), model=model, endpoint=endpoint) as job:
        got = job.step(batch).result()
        stats = job.stats()
    torch.testing.assert_close(got, model(batch.double()) + torch.arange(3))
    assert stats["exactness"] == "equivalent"
    assert "traced on the CPU" in stats["because"][0]


def test_a_model_that_lives_on_a_gpu_trains_there_and_comes_home(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors of the CPU are taken for tensors of the client's GPU. The optimizer counts its steps on the device."""
    make = training(lambda p: optim.Adam(p, lr=1e-2), steps=6)
    want, want_state = plain(make)
    monkeypatch.setattr(state, "elsewhere", lambda device: True)
    got, got_state = through(training(lambda p: optim.Adam(p, lr=1e-2, capturable=True), steps=6), endpoint)
    close(want, got, 1e-5)
    for a, b in zip(want_state[0].values(), got_state[0].values(), strict=True):
        close(a, b, 1e-5)
    assert float(got_state[1]["state"][0]["step"]) == 6


def test_dropout_draws_from_the_jobs_own_stream_and_goes_on(endpoint: str) -> None:
    def run() -> list[float]:
        model = nn.Dropout(0.5)

        def step(x: torch.Tensor) -> torch.Tensor:
            return model(x).sum()

        with client.submit(step, example=(torch.ones(64),), model=model, seed=5, endpoint=endpoint) as job:
            return [float(job.step(torch.ones(64))) for _ in range(8)]

    first = run()
    assert first == run()
    assert len(set(first)) > 2


def test_a_label_out_of_range_fails_its_job_alone(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BatchCheck, "run", lambda *_: None)  # a client that does not look

    def submit() -> client.Job:
        model = nn.Linear(4, 3)
        return client.submit(lambda x, y: F.cross_entropy(model(x), y), example=good, model=model, endpoint=endpoint)

    good = (torch.ones(2, 4), torch.tensor([0, 2]))
    with submit() as other:
        job = submit()
        for _ in range(4):
            job.step(*good).result()
        with pytest.raises(JobFailed, match="index 7"):
            job.step(good[0], torch.tensor([0, 7])).result()
        with suppress(GpumuxError):
            job.close(drain=False)
        other.step(*good).result()


def test_a_lost_gpu_is_told_to_its_clients_and_ends_the_daemon() -> None:
    model = nn.Linear(4, 3)
    with serving(code=74) as (endpoint, daemon):
        job = client.submit(lambda x: model(x).sum(), example=(torch.ones(2, 4),), model=model, endpoint=endpoint)
        job.step(torch.ones(2, 4)).result()
        daemon.send_signal(signal.SIGUSR1)
        with pytest.raises(GpumuxError, match="context is lost"):  # noqa: PT012  any step may be the one that hears of it
            for _ in range(1_000_000):
                job.step(torch.ones(2, 4)).result()
        with suppress(GpumuxError):
            job.close(drain=False)
        assert daemon.wait(START_S) == 74


def test_a_slice_at_a_place_that_changes_is_one_program(endpoint: str, lowered: list[Lowered]) -> None:
    def make() -> Work:
        model = nn.Linear(4, 3).double()
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        data, bank = torch.randn(60, 4, dtype=torch.float64), torch.zeros(60, 3, dtype=torch.float64)

        def step(i: int) -> torch.Tensor:
            found = model(data[i : i + 5])
            loss = (found**2).mean() + (found @ bank.t()).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            bank[i : i + 5] = found.detach()
            return loss

        return Work([model], [optimizer], [(step, (0,))], lambda run: [run(5 * i % 55) for i in range(14)])

    want, want_state = plain(make)
    lowered.clear()
    got, got_state = through(make, endpoint)
    close(want, got, 1e-9)
    close(want_state, got_state, 1e-9)
    assert len(lowered) <= 4
