"""Steps over B models at once: of a network fused by hand, and of torch.func's vmap over gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, stack_module_state, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from clients.models.workloads import RECIPES, Workload
from gpumux.errors import ConfigError
from microbench.handfused.models import FUSED, Fused
from microbench.handfused.optim import fused

Configs = Sequence[Mapping[str, Any]]
Losses = Callable[..., Tensor]  # a batch that all models share -> [B] losses


def hand_fused(workload: Workload, configs: Configs) -> tuple[Losses, dict[str, Tensor]]:
    """A training step of a hand-written fusion, and its stacked parameters by name. Raises ConfigError for a
    workload without one."""
    if workload.name not in FUSED:
        raise ConfigError(f"{workload.name} is not fused by hand", f"use one of {', '.join(FUSED)}")
    network: Fused = FUSED[workload.name](_models(workload, configs))
    recipe = RECIPES[workload.name]
    optimizer = fused(recipe.optimizer)(network.params.values(), configs, recipe.lr)

    def step(*batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        losses = network.losses(*batch)
        losses.sum().backward()  # a sum: each model's gradient is that of its own loss (appendix C)
        optimizer.step()
        return losses.detach()

    return step, network.params


def vmapped(workload: Workload, configs: Configs, compiled: bool = False) -> tuple[Losses, dict[str, Tensor]]:
    """A training step by vmap over the models' gradients, and its stacked parameters by name. Dropout draws
    independently for each model. Attention takes its mathematical form: the CPU's own kernel has no batching rule, and
    would loop. `compiled`: with torch.compile. Raises ConfigError for a workload of several losses."""
    recipe = RECIPES[workload.name]
    if recipe.loss is None:
        raise ConfigError(f"{workload.name} has several losses", "take a workload that is one model")
    models = _models(workload, configs)
    params, buffers = cast(tuple[dict[str, Tensor], dict[str, Tensor]], stack_module_state(models))
    params = {name: value.detach() for name, value in params.items()}  # or autograd would note it all a second time
    skeleton, loss_of = models[0], recipe.loss
    optimizer = fused(recipe.optimizer)(params.values(), configs, recipe.lr)

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = skeleton

        def forward(self, *batch: Tensor) -> Tensor:
            return loss_of(self.model, *batch)

    whole = Loss()

    def one(own: dict[str, Tensor], kept: dict[str, Tensor], *batch: Tensor) -> Tensor:
        state = {f"model.{name}": value for name, value in (own | kept).items()}
        found: Tensor = functional_call(whole, state, batch, tie_weights=True)
        return found

    count = len(RECIPES[workload.name].draw(workload.size, 2, torch.Generator()))
    many = vmap(grad_and_value(one), in_dims=(0, 0, *[None] * count), randomness="different")

    if compiled:
        many = torch.compile(many)

    def step(*batch: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            grads, losses = many(params, buffers, *batch)
        optimizer.apply(list(grads.values()))
        return cast(Tensor, losses)

    return step, params


def _models(workload: Workload, configs: Configs) -> list[nn.Module]:
    return [workload.factory(config)[1] for config in configs]
