"""What `gpumux tune` needs to know to tune a classifier of handwritten digits.

    gpumux tune clients.digits_sweep:factory --space clients/digits_sweep.toml --trials 16 --steps 400

The factory makes a model, its optimizer and the step that trains it, from a configuration of clients/digits_sweep.toml.
Infusible: the kind of model, the optimizer's class, the batch size. Fusible: all that changes numbers only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import count
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clients.data import Digits, digits
from clients.models.cnn import cnn
from clients.models.transformer import transformer

Config = Mapping[str, Any]


def mlp(size: str) -> nn.Module:
    """One hidden layer, whatever the size."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 10))


MODELS: dict[str, Callable[[str], nn.Module]] = {"cnn": cnn, "mlp": mlp, "transformer": transformer}
DTYPE = torch.float32

direction = "maximize"


def factory(config: Config) -> tuple[Callable[[Tensor, Tensor], Tensor], nn.Module, torch.optim.Optimizer]:
    model = MODELS[config["model"]]("tiny").to(DTYPE)
    optimizer = optimizer_of(model, config)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step, model, optimizer


def optimizer_of(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    lr, decay = config["lr"], config["weight_decay"]
    if config["optimizer"] == "sgd":
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=config["momentum"], weight_decay=decay)
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=(config["beta1"], 0.999), weight_decay=decay)


def batches(config: Config, start: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Training batches from step `start` on: every pass over the data in an order of its own."""
    data, size = _data(), config["batch_size"]
    per_pass = data.steps_per_epoch(size)
    for k in count(start):
        chosen = _order(k // per_pass)[k % per_pass * size :][:size]
        yield data.x_train[chosen].to(DTYPE), data.y_train[chosen]


def score(model: nn.Module, config: Config) -> float:
    """Share of the test images that are classified rightly."""
    data = _data()
    return float((model(data.x_test.to(DTYPE)).argmax(1) == data.y_test).double().mean())


def hyperparameters(config: Config, k: int) -> dict[str, float]:
    """The learning rate falls by `decay` every 100 steps."""
    return {"lr": config["lr"] * config["decay"] ** (k // 100)}


@cache
def _data() -> Digits:
    return digits()


@cache
def _order(number: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(number).permutation(len(_data().x_train)))
