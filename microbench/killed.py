"""Real training jobs to kill daemons under: the same loop with gpumux and without. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Call = tuple[str, tuple[Tensor, ...]]


@dataclass(frozen=True)
class Trial:
    """A job: `functions` by name, the first of which is submitted and the others added, and `turn(i)`, what turn i
    calls, in order. `between(i)` is what the user's loop does after turn i (a learning-rate schedule)."""

    name: str
    seed: int
    models: Sequence[nn.Module]
    optimizers: Sequence[torch.optim.Optimizer]
    functions: dict[str, Callable[..., Any]]
    turn: Callable[[int], list[Call]]
    between: Callable[[int], None] = field(default=lambda i: None)

    def state(self) -> list[Tensor]:
        """Every tensor of the trained state."""
        found: list[Tensor] = []
        for module in self.models:
            found += [t.detach().clone() for t in module.state_dict().values()]
        for optimizer in self.optimizers:
            for entry in optimizer.state_dict()["state"].values():
                found += [
                    v.clone() if isinstance(v, Tensor) else torch.tensor(v) for v in entry.values() if v is not None
                ]
        return found


def _images(i: int, count: int = 16) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(i)
    return torch.randn(count, 1, 12, 12, generator=draws), torch.randint(0, 10, (count,), generator=draws)


def _rows(i: int, width: int, count: int = 32) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(1_000_003 + i)
    return torch.randn(count, width, generator=draws), torch.randint(0, 10, (count,), generator=draws)


def dropout_adam(seed: int) -> Trial:
    """Dropout draws from the job's generator; Adam counts steps."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return Trial(
        "dropout, Adam", seed, [model], [optimizer], {"step": step}, lambda i: [("step", _rows(i, 64))]
    )  # fmt: skip


def conv_sgd(seed: int) -> Trial:
    """Running statistics, momentum, a learning-rate schedule, and an evaluation now and then."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.BatchNorm2d(16),
        nn.ReLU(), nn.Flatten(), nn.Linear(16 * 5 * 5, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, dampening=0.1, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 25, gamma=0.97)

    def step(x: Tensor, y: Tensor) -> Tensor:
        model.train()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    def evaluate(x: Tensor, y: Tensor) -> Tensor:
        model.eval()
        with torch.no_grad():
            hits: Tensor = model(x).argmax(1) == y
            return hits.float().mean()

    def turn(i: int) -> list[Call]:
        calls: list[Call] = [("step", _images(i))]
        return [*calls, ("evaluate", _images(-i - 1))] if i % 7 == 0 else calls

    return Trial(
        "convolutions, SGD", seed, [model], [optimizer], {"step": step, "evaluate": evaluate}, turn,
        lambda i: schedule.step(),
    )  # fmt: skip


def gan(seed: int) -> Trial:
    """Two models, two optimizers, two steps; noise is drawn in the step."""
    torch.manual_seed(seed)
    maker = nn.Sequential(nn.Linear(8, 32), nn.LeakyReLU(0.2), nn.Linear(32, 16))
    critic = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    makes = torch.optim.RMSprop(maker.parameters(), lr=1e-3)
    judges = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.99))

    def judge(real: Tensor) -> Tensor:
        judges.zero_grad()
        fake = maker(torch.randn(real.shape[0], 8)).detach()
        loss = F.softplus(-critic(real)).mean() + F.softplus(critic(fake)).mean()
        loss.backward()
        judges.step()
        return loss

    def make(real: Tensor) -> Tensor:
        makes.zero_grad()
        loss = F.softplus(-critic(maker(torch.randn(real.shape[0], 8)))).mean()
        loss.backward()
        makes.step()
        return loss

    def turn(i: int) -> list[Call]:
        real = _rows(i, 16)[0]
        return [("judge", (real,)), ("make", (real,))]

    return Trial("GAN, two optimizers", seed, [maker, critic], [makes, judges], {"judge": judge, "make": make}, turn)


def accumulate_adamw(seed: int) -> Trial:
    """Gradients that outlive a step: two batches, then the update, with clipping."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.LayerNorm(96), nn.Linear(96, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.02)

    def accumulate(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y) / 2
        loss.backward()
        return loss

    def update() -> Tensor:
        norm: Tensor = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return norm

    def turn(i: int) -> list[Call]:
        return [("accumulate", _rows(2 * i, 48)), ("accumulate", _rows(2 * i + 1, 48)), ("update", ())]

    return Trial(
        "accumulation, AdamW", seed, [model], [optimizer], {"accumulate": accumulate, "update": update}, turn
    )  # fmt: skip


TRIALS: tuple[Callable[[int], Trial], ...] = (dropout_adam, conv_sgd, gan, accumulate_adamw)


def plain(trial: Trial, turns: int) -> list[Tensor]:
    """Run `turns` turns in this process, with no daemon: every result, in order."""
    torch.manual_seed(trial.seed)
    results = []
    for i in range(turns):
        for name, batch in trial.turn(i):
            results.append(trial.functions[name](*batch).detach().clone())
        trial.between(i)
    return results
