"""What HFTA's tuning tasks share: table 11's settings, the schedule of learning rates, and drawn data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Any

import torch
from torch import Tensor

from clients.models.workloads import RECIPES, Made, workload

Config = Mapping[str, Any]
SIZE = "tiny"
STEPS_PER_EPOCH = 4  # of any batch size: an epoch of the paper has hundreds
SAMPLES = 256  # of each set of data, for training and for the score


@dataclass(frozen=True)
class Settings:
    """A column of table 11. `most_epochs` is Hyperband's R, `eta` its inverse of the share that goes on, `skip_last`
    the rounds left out at the end of a bracket; `sets` and `epochs` are of random search."""

    most_epochs: int
    eta: int
    skip_last: int
    sets: int
    epochs: int

    def budget(self, algorithm: str) -> dict[str, Any]:
        """As keywords of `gpumux.tune.tune`."""
        if algorithm == "random":
            return {"algorithm": algorithm, "trials": self.sets, "steps": self.epochs * STEPS_PER_EPOCH}
        return {
            "algorithm": algorithm, "steps": self.most_epochs * STEPS_PER_EPOCH, "min_steps": STEPS_PER_EPOCH,
            "eta": self.eta, "skip_last": self.skip_last,
        }  # fmt: skip


SETTINGS = {"pointnet": Settings(250, 5, 1, 60, 25), "mobilenet": Settings(81, 3, 2, 50, 20)}


def build(name: str, config: Config, **options: Any) -> Made:
    """Step, model and optimizer of a workload with a set of table 12's. `options` are the model's own. The weights come
    from the seed that torch has."""
    return workload(name, SIZE, config["batch_size"]).factory(
        {
            "lr": config["lr"],
            "betas": (config["beta1"], config["beta2"]),
            "weight_decay": config["weight_decay"],
            "seed": torch.initial_seed(),
            **options,
        }
    )


def learning_rate(config: Config, k: int) -> dict[str, float]:
    """At step k: it falls by the factor `decay` every `period` epochs."""
    return {"lr": config["lr"] * config["decay"] ** (k // (config["period"] * STEPS_PER_EPOCH))}


def training_batches(name: str, batch_size: int, start: int) -> Iterator[tuple[Tensor, ...]]:
    """Batches from step `start` on: every pass over the data in an order of its own."""
    data = samples(name, training=True)
    per_pass = SAMPLES // batch_size
    for k in count(start):
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(k // per_pass))
        chosen = order[k % per_pass * batch_size :][:batch_size]
        yield tuple(x[chosen] for x in data)


@cache
def samples(name: str, *, training: bool) -> tuple[Tensor, ...]:
    """SAMPLES samples of a workload, those for training other than those for the score."""
    return RECIPES[name].draw(SIZE, SAMPLES, torch.Generator().manual_seed(int(training)))


def share_right(answers: Tensor, labels: Tensor) -> float:
    """Of answers [N, classes], the share whose largest is at the label."""
    return float((answers.argmax(1) == labels).double().mean())
