"""Training steps of a wanted number of operators and seconds, for the benchmarks. Imports torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

CLASSES = 10


@dataclass(frozen=True)
class Workload:
    """One training step over a model of its own. `batch(i)` gives the i-th batch, a few in turn."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[..., Tensor]
    batches: tuple[tuple[Tensor, Tensor], ...]

    def batch(self, index: int) -> tuple[Tensor, Tensor]:
        return self.batches[index % len(self.batches)]


def mlp(name: str, *, layers: int, width: int, batch: int, adam: bool, seed: int = 0) -> Workload:
    """A residual MLP: `layers` decides how many operators there are, `batch` how long they take."""
    torch.manual_seed(seed)
    model = _Residual(layers, width)
    if adam:
        optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    draws = torch.Generator().manual_seed(seed)
    batches = tuple(
        (torch.randn(batch, width, generator=draws), torch.randint(0, CLASSES, (batch,), generator=draws))
        for _ in range(8)
    )

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return Workload(name, model, optimizer, step, batches)


class _Residual(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + 0.1 * torch.relu(layer(x))
        logits: Tensor = self.head(x)
        return logits


def sized(name: str, *, layers: int, width: int, adam: bool, seconds: float) -> Callable[[], Workload]:
    """A maker of equal workloads whose plain step takes about `seconds` here and now: the batch is
    grown until it does."""
    batch = 8
    while (took := step_seconds(mlp(name, layers=layers, width=width, batch=batch, adam=adam))) < 0.9 * seconds:
        batch = max(batch + 8, min(2 * batch, int(batch * seconds / took) // 8 * 8))
    return lambda: mlp(name, layers=layers, width=width, batch=batch, adam=adam)


def step_seconds(workload: Workload, steps: int = 10) -> float:
    """The least seconds a plain step took, after a warm-up: what else runs here only adds to it."""
    times = []
    for index in range(steps + 3):
        began = time.perf_counter()
        workload.step(*workload.batch(index))
        times.append(time.perf_counter() - began)
    return min(times[3:])


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 0 if func.is_view else 1
        return func(*args, **(kwargs or {}))


def operators(workload: Workload) -> int:
    """How many operators a step calls, pure views aside. The first step is not counted."""
    workload.step(*workload.batch(0))
    with _Counter() as counter:
        workload.step(*workload.batch(1))
    calls: int = counter.calls
    return calls
