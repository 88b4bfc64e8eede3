"""Tensors that a step leaves where there was a number: an auxiliary loss that is 0.0 before the first forward pass."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from gpumux import client, errors
from tests.client.parity import Work, check

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.aux: Any = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.layer(x)
        self.aux = hidden.pow(2).mean()
        return hidden


def training(model: Sparse) -> Callable[..., Any]:
    def step(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).sum() + model.aux
        loss.backward()
        return loss.detach()

    return step


def test_the_steps_are_those_of_the_plain_loop_also_where_the_script_resets_the_number(endpoint: str) -> None:
    def make() -> Work:
        torch.manual_seed(0)
        model = Sparse()

        def loop(run: Callable[..., Any]) -> list[Any]:
            seen = []
            for i in range(6):
                seen.append(run(X + i))
                if i % 3 == 2:
                    model.aux = 0.0
            return seen

        return Work([model], [], [(training(model), (X,))], loop)

    check(make, endpoint)


def test_reading_what_is_there_after_a_step_names_it(endpoint: str) -> None:
    model = Sparse()
    with client.submit(training(model), example=(X,), model=model, endpoint=endpoint) as job:
        assert model.aux == 0.0
        job.step(X)
        with pytest.raises(errors.StaleState, match=r"model\.aux"):
            float(model.aux)


def test_a_variable_of_the_loop(endpoint: str) -> None:
    last: Any = 0

    def step(x: torch.Tensor) -> torch.Tensor:
        nonlocal last
        last = x.sum()
        return last * 2

    with client.submit(step, example=(X,), endpoint=endpoint) as job:
        for i in range(3):
            assert torch.equal(job.step(X + i).result(), (X + i).sum() * 2)
        with pytest.raises(errors.StaleState, match="last"):
            float(last)


def test_a_step_that_reads_the_tensor_of_the_last_call_is_refused(endpoint: str) -> None:
    total: Any = 0.0

    def step(x: torch.Tensor) -> torch.Tensor:
        nonlocal total
        total = total + x.sum()
        return x * 1

    with pytest.raises(errors.CaptureError, match=r"total.*left where there was none.*torch\.zeros"):
        client.submit(step, example=(X,), endpoint=endpoint)
    assert total == 0.0


@pytest.mark.parametrize("first", [0.0, None, torch.zeros(2)], ids=["number", "none", "tensor of another shape"])
def test_another_step_that_reads_what_was_there_does_not_go_on_with_it(first: Any, endpoint: str) -> None:
    model = Sparse()
    model.aux = first

    def evaluate(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model.layer(x).sum()
        return found if model.aux is None else found + model.aux

    with client.submit(training(model), example=(X,), model=model, endpoint=endpoint) as job:
        run = job.add(evaluate, example=(X,))
        assert torch.equal(run(X).result(), evaluate(X))
        job.step(X)
        with pytest.raises(errors.GpumuxError, match="aux"):
            run(X).result()


@pytest.mark.parametrize("first", [0.0, 0, None])
def test_a_step_that_counts_and_reads_the_tensor_of_the_last_call_is_refused(first: Any, endpoint: str) -> None:
    meter: Any = SimpleNamespace(average=first, count=0)

    def step(x: torch.Tensor) -> torch.Tensor:
        before = meter.average if meter.average is not None else 1.0
        meter.average = 0.9 * before + 0.1 * x.mean()
        meter.count += 1
        found: torch.Tensor = x.sum() * meter.average
        return found

    with pytest.raises(errors.UnknownTensor, match="step"):
        client.submit(step, example=(X,), endpoint=endpoint)
    assert (meter.average, meter.count) == (first, 0)
