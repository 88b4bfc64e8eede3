"""Optimizers over lists, and by masks, train each model with its own numbers as if it were alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.fuse.rules.found import by
from tests.fuse.serial import Config, batches, check, training

nn = torch.nn
O = torch.optim  # noqa: E741

EACH: dict[str, Callable[[Any, Config], torch.optim.Optimizer]] = {
    "sgd": lambda p, c: O.SGD(p, lr=c.lr, foreach=True),
    "adagrad": lambda p, c: O.Adagrad(p, lr=c.lr, foreach=True),
    "rprop, one by one": lambda p, c: O.Rprop(p, lr=c.lr),
}  # fmt: skip


def net() -> nn.Module:
    return nn.Sequential(nn.ConvTranspose1d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(18, 4))


@pytest.mark.parametrize("name", EACH)
def test_operators_over_lists(name: str):
    array = check(training(net, EACH[name], nn.CrossEntropyLoss()), batches(6, 2, 5, classes=4))
    assert by(array, "per-model") == set()


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("what", ["norm", "value"])
def test_clipping_is_of_each_model(what: str, foreach: bool):
    """By the norm of its own gradients: in the first model nothing is clipped, in the last all is."""

    def factory(config: Config) -> Any:
        torch.manual_seed(config.seed)
        model = net().double()
        optimizer = O.Adam(model.parameters(), lr=config.lr)
        limit = (100.0, 0.5, 0.01)[config.seed]

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            if what == "norm":
                nn.utils.clip_grad_norm_(model.parameters(), limit, foreach=foreach)
            else:
                nn.utils.clip_grad_value_(model.parameters(), limit, foreach=foreach)
            optimizer.step()
            return loss

        return step, model, optimizer

    array = check(factory, batches(6, 2, 5, classes=4))
    assert by(array, "per-model") == set()
