"""A script that runs twice: with a plain step, and with that step in a daemon. Both must give the same bits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn

from gpumux import client
from gpumux.client.future import StepFuture
from gpumux.client.job import Job
from gpumux.errors import StaleGradient


def batches(count: int, seed: int = 5) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(seed)
    return [(torch.randn(4, 6, generator=random), torch.randint(0, 3, (4,), generator=random)) for _ in range(count)]


DATA = batches(20)
X, Y = DATA[0]


def network() -> nn.Module:
    """A model with buffers that a step changes."""
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.05)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


@dataclass
class Script:
    """The objects of a script. `step(x, y)` returns the loss; `job` is None in the plain run."""

    model: Any
    optimizer: Any
    step: Callable[..., Any] = field(default=lambda *batch: None)
    job: Job | None = None

    def train(self, count: int, start: int = 0) -> list[float]:
        losses = [self.step(*DATA[i]) for i in range(start, start + count)]
        return [loss.item() for loss in losses]

    def state(self) -> Any:
        """All state, read as a script reads it."""
        return self.model.state_dict(), self.optimizer.state_dict()


Step = Callable[[Any, Any], Callable[..., Any]]


def whole(model: Any, optimizer: Any) -> Callable[..., Any]:
    """A loop's body."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def without_zeroing(model: Any, optimizer: Any) -> Callable[..., Any]:
    """A step whose loop zeroes the gradients."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def without_update(model: Any, optimizer: Any) -> Callable[..., Any]:
    """Forward and backward alone: the optimizer's step is another function."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return step


@contextlib.contextmanager
def made(
    endpoint: str | None, make: Callable[[], Any] = network, optimize: Callable[[Any], Any] = adam, step: Step = whole,
    example: Any = (X, Y), **options: Any,
) -> Iterator[Script]:  # fmt: skip
    """A script's model, optimizer and step: plain without `endpoint`."""
    torch.manual_seed(7)
    model = make()
    optimizer = optimize(model)
    body = step(model, optimizer)
    if endpoint is None:
        yield Script(model, optimizer, body)
        return
    with client.submit(
        body, example=example, model=model, optimizer=optimizer, endpoint=endpoint, name="script", **options
    ) as job:
        yield Script(model, optimizer, job.step, job)


def same(script: Callable[[Script], Any], endpoint: str, **how: Any) -> Any:
    """Run `script` both ways. Its results, and the model, the optimizer, the gradients and the generator after it, must
    be equal bit for bit. A gradient that only lived inside the step may raise StaleGradient instead: a step that zeroes
    gradients first leaves such ones, no other."""
    may_be_stale = how.get("step", whole) not in (without_zeroing, without_update)
    found = []
    for at in (None, endpoint):
        with made(at, **how) as one:
            out = script(one)
            out = detached(out)
        left = detached((one.model.state_dict(), one.optimizer.state_dict()))
        drawn = torch.get_rng_state() if not how.keys() & {"rng", "seed"} else None
        found.append((out, left, gradients(one.model), drawn))
    assert_equal([found[1][:2], found[1][3]], [found[0][:2], found[0][3]])
    for ours, plain in zip(found[1][2], found[0][2], strict=True):
        assert (ours is None) == (plain is None)
        if not (may_be_stale and isinstance(ours, StaleGradient)):
            assert_equal(ours, plain)
    return found[0][0]


def gradients(model: Any) -> list[Any]:
    """The gradient of each parameter, or the error that reading it raises, because not all are kept."""
    found: list[Any] = []
    for p in model.parameters():
        try:
            found.append(None if p.grad is None else p.grad.detach().clone())
        except StaleGradient as error:
            found.append(error)
    return found


def detached(value: Any) -> Any:
    """A copy that shares no memory with a later state."""

    def leaf(x: Any) -> Any:
        if isinstance(x, StepFuture):
            x = x.result()
        return x.detach().clone() if isinstance(x, Tensor) else x

    return pytree.tree_map(leaf, value)


def assert_equal(ours: Any, plain: Any) -> None:
    (a, keys), (b, wanted) = pytree.tree_flatten(ours), pytree.tree_flatten(plain)
    assert keys == wanted, f"{keys}, and {wanted} in the plain run"
    for mine, theirs in zip(a, b, strict=True):
        if isinstance(theirs, Tensor):
            assert type(mine) is type(theirs)
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine, theirs), f"{mine} is {theirs} in the plain run"
            if theirs.is_floating_point():
                assert torch.equal(mine.signbit(), theirs.signbit()), f"{mine} is {theirs} in the plain run"
        else:
            assert mine == theirs, f"{mine} is {theirs} in the plain run"
