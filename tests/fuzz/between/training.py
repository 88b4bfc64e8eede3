"""Small models, optimizers and steps that sequences of operations are run with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.client.between.support import whole, without_update, without_zeroing

CLASSES = 3
BATCH = 4
WORDS = 11


class Tied(nn.Module):
    """One weight is used twice, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x).tanh()).tanh())


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.embedding(x).mean(1)))


class Spectral(nn.Module):
    """A parametrization whose buffers each forward pass in training writes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(6, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())


class Replacing(nn.Module):
    """A step replaces one of its buffers, and writes the other one."""

    most: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, CLASSES)
        self.register_buffer("most", torch.zeros(6))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.most = torch.maximum(self.most, x.amax(0))
            self.count += 1
        return self.body(x / (1 + self.most))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "norm": lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES)),
    "tied": Tied,
    "words": Words,
    "dropout": lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, CLASSES)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 3, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, CLASSES)
    ),
    "replacing": Replacing,
    "spectral": Spectral,
}


class Own(torch.optim.Optimizer):
    """An optimizer as people write it: momentum, a counter that is a plain number, state made at the first step."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                state["mean"].mul_(0.9).add_(p.grad, alpha=0.1)
                p.add_(state["mean"].sign(), alpha=-group["lr"])


class Keeping(Own):
    """Keeps the gradient itself in its state, for the difference to the next one."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                change = p.grad - state["last"] if "last" in state else p.grad
                p.add_(p.grad + 0.5 * change, alpha=-group["lr"])
                state["last"] = p.grad


def _two_groups(model: nn.Module) -> torch.optim.Optimizer:
    first, *rest = model.parameters()
    return torch.optim.SGD([{"params": [first], "lr": 0.01}, {"params": rest}], lr=0.05, momentum=0.9, nesterov=True)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9),
    "groups": _two_groups,
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.02),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.02, amsgrad=True),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01, centered=True),
    "own": lambda m: Own(m.parameters()),
    "nadam": lambda m: torch.optim.NAdam(m.parameters(), lr=0.01),  # with a product in a tensor of no dimension
    "asgd": lambda m: torch.optim.ASGD(m.parameters(), lr=0.01, t0=2),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.05, lr_decay=0.1),  # whose state is there at first
    "fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True),
}
KEEPING = {"keeping": lambda m: Keeping(m.parameters())}  # most steps with it are refused


def batch(model: str, index: int) -> tuple[Tensor, Tensor]:
    """From a generator of its own, so that torch's stays where the script has it."""
    generator = torch.Generator().manual_seed(index)
    labels = torch.randint(0, CLASSES, (BATCH,), generator=generator)
    if model == "words":
        return torch.randint(0, WORDS, (BATCH, 5), generator=generator), labels
    return torch.randn(BATCH, 6, generator=generator), labels


STEPS = {"whole": whole, "without_zeroing": without_zeroing, "without_update": without_update}


def updating(optimizer: Any) -> Callable[[], None]:
    """The function added beside a step: the update alone."""

    def update() -> None:
        optimizer.step()

    return update


def predicting(model: Any) -> Callable[[Tensor], Tensor]:
    """The other one."""

    def predict(x: Tensor) -> Tensor:
        with torch.no_grad():
            return model(x)

    return predict
