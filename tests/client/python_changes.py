"""A short training loop with one change by Python between its steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.client.parity import Work, batches

DATA = batches((6, 8), classes=4)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def work(
    model: nn.Module,
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    change: Callable[[], None],
    optimizer: Any = None,
) -> Work:
    """Three steps, the change, three more."""
    opt = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        opt.zero_grad()
        value = loss(x, y)
        value.backward()
        opt.step()
        return value

    def loop(run: Any) -> list[Any]:
        out = [run(*DATA[i]) for i in range(3)]
        change()
        return out + [run(*DATA[i]) for i in range(3)]

    return Work([model], [opt], [(step, DATA[0])], loop)


def held(start: Callable[[], Any], use: Callable[[Any], float], change: Callable[[Any], None]) -> Callable[[], Work]:
    """An object in a closure, of which the step uses one number."""

    def make() -> Work:
        model, thing = net(), start()
        return work(model, lambda x, y: F.cross_entropy(model(x), y) * use(thing), lambda: change(thing))

    return make
