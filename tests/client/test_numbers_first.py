"""Numbers where an operator's first tensor stands, deep copies, and tensors that are made into others (`out=`)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gpumux import client
from gpumux.errors import CaptureError, UnsupportedOperator
from tests.client.parity import Work, check

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(7))
OF_A_NUMBER: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "div": lambda a, x: torch.div(a, 1.0 + x.abs()),
    "div, rounded": lambda a, x: torch.div(a, x, rounding_mode="floor"),
    "mul": torch.mul,
    "add": torch.add,
    "add, with a factor": lambda a, x: torch.add(a, x, alpha=2),
    "sub": torch.sub,
    "floor_divide": torch.floor_divide,
    "remainder": torch.remainder,
    "pow": lambda a, x: torch.pow(a, x.float()),
}


def results(step: Callable[..., Any], data: list[Any], endpoint: str) -> None:
    """The step's results over these batches are the plain ones, bit for bit."""
    wanted = [step(*each) for each in data]
    with client.submit(step, example=data[0], endpoint=endpoint) as job:
        for each, want in zip(data, wanted, strict=True):
            got = job.step(*each).result()
            assert got.dtype == want.dtype
            assert torch.equal(got, want)


@pytest.mark.covering
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("name", OF_A_NUMBER)
def test_a_number_comes_first(name: str, dtype: torch.dtype, endpoint: str):
    """Constant, and from step to step another one."""
    operator = OF_A_NUMBER[name]
    x = (10 * X).to(dtype) + (X == 0)
    results(lambda x: operator(7, x), [(x,)], endpoint)
    results(lambda x, a: operator(a, x), [(x, 0.3), (x, 1.7), (x, 2.9)], endpoint)


def test_of_a_half_type_it_is_refused(endpoint: str):
    with pytest.raises(UnsupportedOperator, match="takes a number where it wants a tensor"):
        client.submit(lambda x: torch.floor_divide(0.3, x), example=(X.bfloat16(),), endpoint=endpoint)


class FromCopies(torch.optim.Optimizer):
    """Its state begins with deep copies, as in accelerated SGD."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    data = p.data
                    both = copy.deepcopy([data, p.grad.data, data])
                    assert both[0] is both[2]
                    assert not both[0].requires_grad
                    state["slow"], state["first"] = both[:2]
                state["slow"].lerp_(p.data, 0.1)
                p.data.add_(p.grad.data + state["first"] + (p.data - state["slow"]), alpha=-group["lr"])


def test_an_optimizer_whose_state_begins_with_deep_copies(endpoint: str):
    def make() -> Work:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last), nn.Flatten(), nn.Linear(27, 2))
        optimizer = FromCopies(model.parameters())
        data = torch.randn(6, 5, 2, 4, 4)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        return Work([model], [optimizer], [(step, (data[0],))], lambda call: [call(x) for x in data])

    check(make, endpoint)


def test_deep_copies_that_are_not_made(endpoint: str):
    with pytest.raises(CaptureError, match="do not lie side by side"):
        client.submit(lambda x: copy.deepcopy(x[:, ::2]), example=(X,), endpoint=endpoint)
    w = torch.randn(4, requires_grad=True)
    with pytest.raises(CaptureError, match="RuntimeError"):  # torch's own, of a tensor that has a history
        client.submit(lambda x: copy.deepcopy(x * w), example=(X,), endpoint=endpoint)


MADE: dict[str, Callable[[torch.Tensor], Any]] = {
    "eye": lambda out: torch.eye(3, out=out),
    "zeros": lambda out: torch.zeros(3, 3, out=out),
    "full": lambda out: torch.full((3, 3), 2.5, out=out),
    "ones": lambda out: torch.ones(3, 3, out=out),
}


@pytest.mark.parametrize("name", MADE)
def test_what_is_made_without_tensors_is_made_into_another(name: str, endpoint: str):
    def step(x: torch.Tensor) -> torch.Tensor:
        into = torch.empty(3, 3)
        assert MADE[name](into) is into
        return into @ x

    results(step, [(X,)], endpoint)
