"""Optimizers over stacked parameters [B, ...], each model with hyper-parameters of its own. Many parameters at once, as
torch's own `foreach` implementations have it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class Stacked:
    """What these optimizers share: a column of one value a model for each parameter, to broadcast over it."""

    def __init__(self, params: Iterable[Tensor], configs: Sequence[Mapping[str, Any]], lr: float) -> None:
        self.params = list(params)
        self.lr = torch.tensor([config.get("lr", lr) for config in configs], dtype=torch.float64)
        decay = torch.tensor([config.get("weight_decay", 0.0) for config in configs], dtype=torch.float64)
        self._decay = self.spread(decay) if decay.any() else None

    def spread(self, values: Tensor) -> list[Tensor]:
        like = self.params[0]
        column = values.to(like.device, like.dtype)
        return [column.view(-1, *[1] * (p.dim() - 1)) for p in self.params]

    def zeros(self) -> list[Tensor]:
        return [torch.zeros_like(p) for p in self.params]

    def zero_grad(self) -> None:
        for p in self.params:
            p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """After a backward pass."""
        self.apply([torch.zeros_like(p) if p.grad is None else p.grad for p in self.params])

    @torch.no_grad()
    def apply(self, grads: Sequence[Tensor]) -> None:
        """Update every parameter; `grads` in their order."""
        if self._decay is not None:
            grads = torch._foreach_add(list(grads), torch._foreach_mul(self.params, self._decay))
        self.update(list(grads))

    def update(self, grads: list[Tensor]) -> None:
        raise NotImplementedError


class Adam(Stacked):
    """torch.optim.Adam for B models at once."""

    def __init__(self, params: Iterable[Tensor], configs: Sequence[Mapping[str, Any]], lr: float = 1e-3) -> None:
        super().__init__(params, configs, lr)
        self._betas = torch.tensor([config.get("betas", (0.9, 0.999)) for config in configs], dtype=torch.float64)
        beta1, self._beta2 = self._betas[:, 0], self.spread(self._betas[:, 1])
        self._rest1, self._rest2 = self.spread(1 - beta1), self.spread(1 - self._betas[:, 1])
        self._mean, self._square = self.zeros(), self.zeros()
        self._steps = 0

    def update(self, grads: list[Tensor]) -> None:
        self._steps += 1
        torch._foreach_lerp_(self._mean, grads, self._rest1)
        torch._foreach_mul_(self._square, self._beta2)
        squares = torch._foreach_mul(grads, grads)
        torch._foreach_mul_(squares, self._rest2)
        torch._foreach_add_(self._square, squares)
        # In float64: torch corrects the bias with Python's numbers, and float32 would differ from them.
        correct1, correct2 = (1 - self._betas**self._steps).unbind(1)
        below = torch._foreach_sqrt(self._square)
        torch._foreach_div_(below, self.spread(correct2.sqrt()))
        torch._foreach_add_(below, 1e-8)
        change = torch._foreach_div(self._mean, below)
        torch._foreach_mul_(change, self.spread(self.lr / correct1))
        torch._foreach_sub_(self.params, change)


class Adadelta(Stacked):
    """torch.optim.Adadelta for B models at once."""

    RHO, EPS = 0.9, 1e-6

    def __init__(self, params: Iterable[Tensor], configs: Sequence[Mapping[str, Any]], lr: float = 1.0) -> None:
        super().__init__(params, configs, lr)
        self._square, self._moved = self.zeros(), self.zeros()

    def update(self, grads: list[Tensor]) -> None:
        torch._foreach_mul_(self._square, self.RHO)
        torch._foreach_addcmul_(self._square, grads, grads, 1 - self.RHO)
        below = torch._foreach_add(self._square, self.EPS)
        torch._foreach_sqrt_(below)
        change = torch._foreach_add(self._moved, self.EPS)
        torch._foreach_sqrt_(change)
        torch._foreach_div_(change, below)
        torch._foreach_mul_(change, grads)
        torch._foreach_mul_(self._moved, self.RHO)
        torch._foreach_addcmul_(self._moved, change, change, 1 - self.RHO)
        torch._foreach_mul_(change, self.spread(self.lr))
        torch._foreach_sub_(self.params, change)


def fused(kind: type[torch.optim.Optimizer]) -> type[Stacked]:
    """The stacked form of an optimizer. Raises KeyError where there is none."""
    return {torch.optim.Adam: Adam, torch.optim.Adadelta: Adadelta}[kind]
