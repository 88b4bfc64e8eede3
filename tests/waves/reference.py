"""Data-parallel waves in plain torch: what figure 9 of Wavelet (MLSys 2021) computes, one batch after the other.

Two replicas of the whole state (model, optimizer, buffers) begin bit-identical. Batch m goes to replica m mod 2, where
it gives g'_m. G_0 = g'_0 and G_m = (g'_m + g'_(m-1)) * 0.5, by one addition and one multiplication for each element.
Replica m mod 2, and no other, applies G_m with its own optimizer. No order of the waves' work can change a result:
replica m mod 2 was last written by step m - 2, and g'_(m-1) is whole before it is read.

With several ranks every rank has two replicas; it forms its own (g'_m + g'_(m-1)) * 0.5, and G_m is the mean of those
over the ranks of the wave, summed in their order. Nothing of gpumux is used here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Gradients = dict[str, Tensor]


class WaveReference:
    """`make_optimizer(model)` gives a replica's optimizer, `loss_fn(model, batch)` a batch's loss; with `ranks` above 1
    a batch is a sequence of one batch for each rank. `clip`: the largest norm of G_m that an optimizer is given.

    `model` and `optimizer` are those of the last step's replica (of rank 0), which is also the result at a drain: a
    replica that was updated one step later than the other. `gradients`: G_m of the last step by parameter, not clipped.
    """

    def __init__(
        self,
        make_model: Callable[[], nn.Module],
        make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        loss_fn: Callable[[nn.Module, Any], Tensor],
        clip: float | None = None,
        *,
        ranks: int = 1,
    ) -> None:
        first = make_model()
        self.replicas = [[copy.deepcopy(first) for _ in range(ranks)] for _ in range(2)]
        self.optimizers = [[make_optimizer(model) for model in wave] for wave in self.replicas]
        self.loss_fn, self.clip, self.ranks = loss_fn, clip, ranks
        self.steps = 0  # m of the next batch
        self.previous: list[Gradients] = []  # g'_(m-1) by rank
        self.gradients: Gradients = {}

    @property
    def model(self) -> nn.Module:
        return self.replicas[max(self.steps - 1, 0) % 2][0]

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.optimizers[max(self.steps - 1, 0) % 2][0]

    def step(self, batch: Any) -> Tensor:
        """Train on batch m. Returns its loss, with several ranks the mean of theirs."""
        wave, batches = self.steps % 2, batch if self.ranks > 1 else [batch]
        losses, now = [], []
        for model, each in zip(self.replicas[wave], batches, strict=True):
            model.zero_grad()
            loss = self.loss_fn(model, each)
            loss.backward()
            losses.append(loss.detach())
            now.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        local = now
        if self.previous:
            both = zip(now, self.previous, strict=True)
            local = [{name: (g + before[name]) * 0.5 for name, g in gradients.items()} for gradients, before in both]
        total = {name: g.clone() for name, g in local[0].items()}
        for other in local[1:]:
            for name, g in other.items():
                total[name] += g
        self.gradients = {name: g / self.ranks for name, g in total.items()} if self.ranks > 1 else total
        for model, optimizer in zip(self.replicas[wave], self.optimizers[wave], strict=True):
            for name, parameter in model.named_parameters():
                parameter.grad = self.gradients[name].clone() if name in self.gradients else None
            if self.clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), self.clip)
            optimizer.step()
        self.previous, self.steps = now, self.steps + 1
        return torch.stack(losses).mean() if self.ranks > 1 else losses[0]

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on: both replicas and both optimizers of every rank, g'_(m-1) and m."""
        return copy.deepcopy(
            {
                "replicas": [[model.state_dict() for model in wave] for wave in self.replicas],
                "optimizers": [[optimizer.state_dict() for optimizer in wave] for wave in self.optimizers],
                "previous": self.previous,
                "steps": self.steps,
            }
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        state = copy.deepcopy(state)  # load_state_dict of an optimizer keeps the tensors it is given
        for kind in ("replicas", "optimizers"):
            for wave, saved in zip(getattr(self, kind), state[kind], strict=True):
                for each, its in zip(wave, saved, strict=True):
                    each.load_state_dict(its)
        self.previous, self.steps = state["previous"], state["steps"]
