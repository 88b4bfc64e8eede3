"""Models with batch norms."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.burst.subjects import Built, Subject, build_inception


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1),
        nn.BatchNorm2d(4, momentum=0.3), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip


def images() -> tuple[torch.Tensor, torch.Tensor]:
    return 3 + torch.randn(8, 1, 8, 8), torch.randint(0, 10, (8,))


def flat() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, affine=False), nn.Tanh(), nn.Linear(8, 10))


def twice() -> nn.Module:
    # A bias before a batch norm has a gradient of zero in exact arithmetic, and Adam divides its rounding by itself.
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


def build_twice(model: nn.Module) -> Built:
    """A discriminator, whose batch norm sees two batches in each step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.softplus(-model(x)).mean() + F.softplus(model(x.flip(1) + 1)).mean()
        loss.backward()
        optimizer.step()
        return loss

    return [model], [optimizer], [step]


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 6), torch.randint(0, 10, (8,))


NORMED = {
    subject.name: subject
    for subject in (
        Subject("convolutions", convolutions, build_inception, images, ("0", "1", "3", "4", "7")),
        Subject("flat", flat, build_inception, rows, ("0", "1", "3")),
        Subject("twice", twice, build_twice, rows, ("0", "1", "3")),
    )
}
