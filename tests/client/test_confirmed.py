"""Every trace is confirmed by another one: by that of the optimizer's next phase where this shows the same."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpumux import client, errors
from gpumux.client import Job
from tests.threads import one_thread

X, Y = torch.randn(6, 4), torch.randn(6, 3)


class Own(torch.optim.Adam):
    """An optimizer with a step of its own."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["mean"] = state["mean"] * 0.9 + p.grad if state else p.grad.clone()
            p -= 0.1 * state["mean"]


def loop(
    optimizer: Callable[..., torch.optim.Optimizer], before: Callable[[Tensor], Tensor] = lambda x: x
) -> tuple[Callable[..., Tensor], nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    made = optimizer(model.parameters(), lr=0.01)

    def step(x: Tensor, y: Tensor) -> Tensor:
        made.zero_grad()
        loss = nn.functional.mse_loss(model(before(x)), y)
        loss.backward()
        made.step()
        return loss

    return step, model, made


def opened(given: tuple[Callable[..., Any], nn.Module, torch.optim.Optimizer], endpoint: str) -> Job:
    step, model, optimizer = given
    return client.submit(step, example=(X, Y), model=model, optimizer=optimizer, endpoint=endpoint)


@pytest.mark.parametrize(
    ("optimizer", "number"),
    [(torch.optim.Adam, 2), (torch.optim.SGD, 2), (Own, 4)],
    ids=["two phases of torch's own", "one phase", "two phases of another's"],
)
def test_a_phase_of_a_known_optimizer_is_traced_once(
    optimizer: Any, number: int, traces: list[int], endpoint: str
) -> None:
    with one_thread(), opened(loop(optimizer), endpoint) as job:
        assert len(traces) == number
        plain, _, _ = loop(optimizer)
        assert [job.step(X, Y).result().item() for _ in range(4)] == [plain(X, Y).item() for _ in range(4)]


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.SGD])
def test_a_step_that_another_call_changes_unseen_is_refused(optimizer: Any, endpoint: str) -> None:
    with pytest.raises(errors.NotRepeatable, match="does not do the same thing twice"):
        opened(loop(optimizer, lambda x: x * time.perf_counter()), endpoint)


def test_another_order_of_equal_layers_is_another_step(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "thread_time", itertools.count().__next__)
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    optimizer = torch.optim.Adam(model.parameters())

    def step(x: Tensor, y: Tensor) -> Tensor:
        first = int(time.thread_time()) % 2
        optimizer.zero_grad()
        loss = (model[1 - first](model[first](x))[:, :3] - y).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    with pytest.raises(errors.NotRepeatable):
        opened((step, model, optimizer), endpoint)


def test_a_phase_that_comes_later_is_traced_once(traces: list[int], endpoint: str) -> None:
    with one_thread(), opened(loop(torch.optim.RAdam), endpoint) as job:
        before = len(traces)
        plain, _, _ = loop(torch.optim.RAdam)
        for _ in range(8):  # the sixth step rectifies
            assert job.step(X, Y).result().item() == plain(X, Y).item()
        assert len(traces) == before + 1
