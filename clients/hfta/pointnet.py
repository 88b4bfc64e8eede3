"""HFTA's tuning of PointNet, classification: clients/hfta/pointnet.toml has its space."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from clients.hfta import tasks
from clients.models.workloads import Made

NAME = "pointnet_cls"

direction = "maximize"
hyperparameters = tasks.learning_rate


def factory(config: tasks.Config) -> Made:
    return tasks.build(NAME, config, feature_transform=config["feature_transform"])


def batches(config: tasks.Config, start: int) -> Iterator[tuple[Tensor, ...]]:
    return tasks.training_batches(NAME, config["batch_size"], start)


def score(model: nn.Module, config: tasks.Config) -> float:
    x, labels = tasks.samples(NAME, training=False)
    answers, _ = model(x)
    return tasks.share_right(answers, labels)
