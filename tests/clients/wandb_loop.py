"""A loop that logs for Weights & Biases, offline: python -m tests.clients.wandb_loop DIRECTORY [ENDPOINT]. Prints its
losses as JSON."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from typing import Any

import torch
import wandb  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

from gpumux import client


def main(directory: str, endpoint: str = "") -> list[float]:
    model = torch.nn.Linear(8, 1)
    torch.nn.init.constant_(model.weight, 0.1)
    torch.nn.init.zeros_(model.bias)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train_step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    batches = torch.randn(5, 16, 8, generator=torch.Generator().manual_seed(0))
    losses = []
    with ExitStack() as stack:
        run = stack.enter_context(wandb.init(project="gpumux", dir=directory, mode="offline"))
        step: Any = train_step
        if endpoint:
            job = stack.enter_context(
                client.submit(train_step, example=(batches[0],), model=model, optimizer=optimizer, endpoint=endpoint)
            )
            step = job.step
        for i, x in enumerate(batches):
            loss = step(x)
            run.log({"loss": loss.item()}, step=i)
            losses.append(loss.item())
        if endpoint:
            job.sync()
    return losses


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(main(*sys.argv[1:])))
