"""HFTA's tuning of MobileNet, V2 and V3-Large: clients/hfta/mobilenet.toml has its space."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from clients.hfta import tasks
from clients.models.workloads import Made

NAME = "mobilenet_v3"

direction = "maximize"
hyperparameters = tasks.learning_rate


def factory(config: tasks.Config) -> Made:
    return tasks.build(NAME, config, version=config["version"])


def batches(config: tasks.Config, start: int) -> Iterator[tuple[Tensor, ...]]:
    return tasks.training_batches(NAME, config["batch_size"], start)


def score(model: nn.Module, config: tasks.Config) -> float:
    x, labels = tasks.samples(NAME, training=False)
    return tasks.share_right(model(x), labels)
