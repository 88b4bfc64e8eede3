"""A model in which the layer of an operator is hard to find: branches, a skip connection, a rectifier that is used
twice, operators of the model itself."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Residual(nn.Module):
    def __init__(self, wide: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(wide, wide, 3, padding=1), nn.Conv2d(wide, wide, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.relu(self.second(self.relu(self.first(x))) + x)
        return found


class Branching(nn.Module):
    """[N, 3, H, W] -> [N, 5]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.left, self.right = nn.Conv2d(8, 4, 1), nn.Conv2d(8, 4, 3, padding=1)
        self.blocks = nn.Sequential(Residual(8), Residual(8))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = torch.cat((self.left(x), self.right(x)), 1)
        x = self.blocks(x)
        found: Tensor = self.head(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))
        return found


def branching() -> Branching:
    return Branching()
