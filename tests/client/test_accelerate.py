"""Loops around Accelerate's accelerator, plainly and as jobs, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gpumux import client
from gpumux.capture.state import whole_optimizer, wrapped_optimizer
from tests.client.parity import assert_same

pytest.importorskip("accelerate", reason="the extra `test` brings it")

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_thread")]


@contextmanager
def accelerator(**options: Any) -> Iterator[Any]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    try:
        yield Accelerator(cpu=True, **options)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def train(endpoint: str | None, *, batches: int = 5, inside: bool = False, **options: Any) -> list[Any]:
    """Two epochs: losses, learning rates, the counter of accumulated batches, and the end's state. `inside`: the step
    advances the schedule."""
    torch.manual_seed(0)
    with accelerator(**options) as one:
        model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 0.9**i)
        data = TensorDataset(torch.randn(6 * batches, 8), torch.randint(0, 4, (6 * batches,)))
        model, optimizer, loader, schedule = one.prepare(model, optimizer, DataLoader(data, batch_size=6), schedule)

        def step(x: Tensor, y: Tensor) -> Tensor:
            with one.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                one.backward(loss)
                if one.sync_gradients:
                    one.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                if inside:
                    schedule.step()
                optimizer.zero_grad()
            return loss

        run, job = step, None
        if endpoint is not None:
            job = client.submit(step, example=data[:6], model=model, optimizer=optimizer, endpoint=endpoint)
            run = job.step
        seen: list[Any] = []
        for _ in range(2):
            for x, y in loader:
                seen.append(run(x, y).item())
                if not inside:
                    schedule.step()
                seen += [optimizer.param_groups[0]["lr"], one.step, one.sync_gradients]
            seen.append(copy.deepcopy(optimizer.state_dict()))
        if job is not None:
            job.close()
        return [*seen, copy.deepcopy(one.unwrap_model(model).state_dict()), torch.get_rng_state()]


@pytest.mark.every(6)
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("batches", [4, 5], ids=["four batches", "five batches"])
def test_accumulated_batches(count: int, batches: int, endpoint: str) -> None:
    """Where the last batches of an epoch are too few, Accelerate steps the optimizer all the same."""
    options = {"gradient_accumulation_steps": count, "batches": batches}
    assert_same(train(endpoint, **options), train(None, **options), "run")


@pytest.mark.parametrize("count", [1, 2])
def test_a_schedule_in_the_step(count: int, endpoint: str) -> None:
    options = {"gradient_accumulation_steps": count, "inside": True}
    assert_same(train(endpoint, **options), train(None, **options), "run")


def test_a_half_type(endpoint: str) -> None:
    options = {"gradient_accumulation_steps": 2, "mixed_precision": "bf16"}
    assert_same(train(endpoint, **options), train(None, **options), "run")


def test_the_optimizer_inside_is_the_jobs() -> None:
    with accelerator() as one:
        plain = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
        wrapped = one.prepare(plain)
        assert wrapped_optimizer(wrapped) is plain
        assert whole_optimizer(wrapped) is plain
        assert whole_optimizer(plain) is plain


def test_an_optimizer_around_another_with_state_of_its_own_is_no_mere_wrapper() -> None:
    class Lookahead(torch.optim.Optimizer):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer
            super().__init__(optimizer.param_groups, {})

    outer = Lookahead(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    assert whole_optimizer(outer) is outer
