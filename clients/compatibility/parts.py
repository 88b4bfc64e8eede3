"""What many idioms train: a small classifier, its batches, and the usual step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

Batches = list[tuple[Tensor, Tensor]]


def batches_of(count: int = 5, size: int = 6) -> Batches:
    return [(torch.randn(size, 8), torch.randint(0, 4, (size,))) for _ in range(count)]


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def classifier() -> tuple[nn.Sequential, torch.optim.Optimizer, Batches]:
    model = network()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), batches_of()


def usual_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor, Tensor], Tensor]:
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step
