"""Arrays of models as one job of a daemon on a card: each draws from a generator of its own, which captured graphs
advance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from clients.models.workloads import RECIPES, workload
from gpumux import client
from tests.fuse.serial import Config, batches, configs, relative_difference, training

SEEDS = [3, 0, 29]
STEPS = 12  # through the first step, the timed ones and the captured ones


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 4))


def alone(factory: Any, config: Config, seed: int, data: Any) -> list[torch.Tensor]:
    """The plain loop on the card, whose generator begins at the seed of the model's own."""
    _, model, optimizer = factory(config)
    model.to("cuda")
    torch.cuda.manual_seed(seed)
    losses = []
    for (x,) in data:
        optimizer.zero_grad()
        out = model(x.to("cuda"))
        loss = (out * out.detach().cos()).square().mean() + out.mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().cpu())
    return losses


def test_models_that_draw_train_as_each_does_alone(endpoint: str) -> None:
    data = batches(6, 5, count=STEPS)
    factory = training(dropping)
    with client.submit_array(factory, configs(), data[0], seeds=SEEDS, endpoint=endpoint) as array:
        losses = [array.step(*batch).result() for batch in data]
    for b, config in enumerate(configs()):
        for mine, theirs in zip(losses, alone(factory, config, SEEDS[b], data), strict=True):
            assert relative_difference(mine[b], theirs) < 1e-9


@pytest.mark.parametrize("name", RECIPES)
def test_a_workload_trains_each_model_as_an_array_of_it_alone_does(
    name: str, endpoint: str, record_property: Callable[[str, object], None]
) -> None:
    work = workload(name, dtype=torch.float64)
    given = work.configs(2)
    options: dict[str, Any] = {"example": work.batch(0), "endpoint": endpoint}
    with client.submit_array(work.factory, given, seeds=SEEDS[:2], **options) as array:
        losses = [array.step(*work.batch(i)).result() for i in range(STEPS)]
    worst = 0.0
    for b, config in enumerate(given):
        with client.submit_array(work.factory, [config], seeds=[SEEDS[b]], **options) as one:
            for i, want in enumerate(losses):
                worst = max(worst, relative_difference(one.step(*work.batch(i)).result()[0], want[b]))
    record_property("off by at most", worst)
    assert worst < 1e-6
