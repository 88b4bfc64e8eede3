"""Training with data-parallel waves beside synchronous training on digits: loss and accuracy by epoch, over many seeds.

Waves run by the plain-torch reference (tests/waves/reference.py). At equal numbers of samples they are compared with
synchronous training on batches twice as large, which the waves' averaged gradients are meant to equal, and on batches
of the same size. Also, for a quadratic: the least learning rate times curvature that diverges, from the eigenvalues of
one step. Run from the repository's root; needs scikit-learn.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from gpumux.errors import ConfigError
from gpumux.pictures import check
from microbench import charts, common
from tests.waves.reference import WaveReference

WAYS = {
    "waves": "two waves",
    "doubled": "synchronous, batch doubled",
    "single": "synchronous, same batch",
}
RATES, MOMENTA = (0.05, 0.1, 0.3), (0.0, 0.9)
BATCH, TRAINED = 32, 1408  # of 1,797 samples
Score = tuple[float, float]  # loss and accuracy on the samples left out


@cache
def digits() -> tuple[Tensor, Tensor]:
    data = load_digits()
    return torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)


def model() -> nn.Module:
    """50,826 parameters."""
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


class Synchronous:
    """The plain loop, with the two members of WaveReference that are used here."""

    def __init__(
        self, make_model: Callable[[], nn.Module], make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    ) -> None:
        self.model = make_model()
        self._optimizer = make_optimizer(self.model)

    def step(self, batch: tuple[Tensor, Tensor]) -> None:
        self._optimizer.zero_grad()
        loss_of(self.model, batch).backward()
        self._optimizer.step()


def train(way: str, rate: float, momentum: float, seed: int, epochs: int) -> list[Score]:
    """Scores after each epoch. A seed gives the same split, start and order of samples in all ways."""
    xs, ys = digits()
    order = torch.Generator().manual_seed(seed)
    split = torch.randperm(len(xs), generator=order)
    mine, left_out = split[:TRAINED], split[TRAINED:]
    torch.manual_seed(seed)

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)

    run: WaveReference | Synchronous
    run = WaveReference(model, optimizer, loss_of) if way == "waves" else Synchronous(model, optimizer)
    size = 2 * BATCH if way == "doubled" else BATCH
    scores = []
    for _ in range(epochs):
        epoch = mine[torch.randperm(TRAINED, generator=order)]
        for at in range(0, TRAINED, size):
            picked = epoch[at : at + size]
            run.step((xs[picked], ys[picked]))
        with torch.no_grad():
            out = run.model(xs[left_out])
        right = (out.argmax(1) == ys[left_out]).double().mean().item()
        scores.append((F.cross_entropy(out, ys[left_out]).item(), right))
    return scores


def summary(runs: Sequence[Sequence[Score]]) -> dict[str, list[list[float | None]]]:
    """By epoch, over the seeds: [mean, lowest, highest]; None where a loss is no number."""
    found: dict[str, list[list[float | None]]] = {"loss": [], "accuracy": []}
    for epoch in zip(*runs, strict=True):
        for name, values in zip(found, zip(*epoch, strict=True), strict=True):
            three = (statistics.fmean(values), min(values), max(values))
            found[name].append([round(v, 4) if math.isfinite(v) else None for v in three])
    return found


# ---- A quadratic: how one step changes positions, velocities and the last gradient is a matrix.


def growth(rate: float, momentum: float, way: str) -> float:
    """What the largest part of a quadratic's state is multiplied by in a step, in the end. `rate`: learning rate times
    curvature."""
    if way != "waves":
        return _radius([[1 - rate, -rate * momentum], [1.0, momentum]])
    # (position and velocity of the replica whose turn it is, those of the other, the last gradient)
    velocity = np.array([0.5, momentum, 0.0, 0.0, 0.5])
    position = np.array([1.0, 0.0, 0.0, 0.0, 0.0]) - rate * velocity
    return _radius([[0, 0, 1, 0, 0], [0, 0, 0, 1, 0], position, velocity, [1, 0, 0, 0, 0]])


def _radius(matrix: Sequence[Any]) -> float:
    return float(np.abs(np.linalg.eigvals(np.array(matrix, dtype=float))).max())


def least_diverging(momentum: float, way: str) -> float:
    """The least learning rate times curvature, to three digits behind the point, at which a quadratic diverges."""
    return next(i / 1000 for i in range(1, 6000) if growth(i / 1000, momentum, way) > 1 + 1e-6)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = common.parser(__doc__)
    arguments.add_argument("--seeds", type=int, default=10)
    arguments.add_argument("--epochs", type=int, default=15)
    arguments.add_argument("--picture", type=common.new_file, metavar="FILE.svg", help="draw the curves (.svg or .png)")
    args = arguments.parse_args(argv)
    if args.seeds < 1 or args.epochs < 1:
        arguments.error("give at least one seed and one epoch")
    if args.picture:
        try:
            check(args.picture)
        except ConfigError as error:
            print(f"{error.message}: {error.remedy}", file=sys.stderr)
            return 78
    torch.set_num_threads(1)  # matrices this small gain nothing from more
    cells = measure(args)
    print(common.table(("momentum, rate", *WAYS), rows(cells)))
    quadratic = [
        {"momentum": momentum, **{way: least_diverging(momentum, way) for way in ("waves", "doubled")}}
        for momentum in MOMENTA
    ]
    for each in quadratic:
        print(
            f"quadratic, momentum {each['momentum']:g}: diverges from learning rate times curvature"
            f" {each['waves']:.2f} with waves, {each['doubled']:.2f} synchronously"
        )
    result = {"batch": BATCH, "seeds": args.seeds, "epochs": args.epochs, "cells": cells, "quadratic": quadratic}
    common.report("wave_curves", args.out, result)
    if args.picture:
        draw(args.picture, cells, args.seeds)
    return 0


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    cells = []
    for momentum in MOMENTA:
        for rate in RATES:
            for way in WAYS:
                runs = [train(way, rate, momentum, seed, args.epochs) for seed in range(args.seeds)]
                cells.append({"momentum": momentum, "rate": rate, "way": way, **summary(runs)})
    return cells


def rows(cells: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Accuracy in percent after the last epoch: mean, lowest and highest."""
    found: dict[tuple[float, float], list[str]] = {}
    for cell in cells:
        mean, low, high = (100 * each for each in cell["accuracy"][-1])
        found.setdefault((cell["momentum"], cell["rate"]), []).append(f"{mean:.1f} ({low:.1f} to {high:.1f})")
    return [[f"{momentum:g}, {rate:g}", *texts] for (momentum, rate), texts in found.items()]


def draw(path: Path, cells: Sequence[dict[str, Any]], seeds: int) -> None:
    panels: dict[tuple[float, float], dict[str, list[tuple[float, float, float, float]]]] = {}
    for cell in cells:
        points = [
            (float(epoch), 100 * m, 100 * low, 100 * high) for epoch, (m, low, high) in enumerate(cell["accuracy"], 1)
        ]
        panels.setdefault((cell["momentum"], cell["rate"]), {})[cell["way"]] = points
    charts.curves(
        path,
        f"digits: accuracy on samples left out, at equal numbers of samples (mean and range of {seeds} seeds)",
        [charts.Panel(f"momentum {m:g}, learning rate {rate:g}", each) for (m, rate), each in panels.items()],
        WAYS,
        ("epoch", "accuracy (%)"),
        columns=len(RATES),
        doubling=False,
        bottom=None,
    )


if __name__ == "__main__":
    raise SystemExit(main())
