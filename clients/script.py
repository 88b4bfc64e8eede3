"""A training script as people write it, and what of it changes for gpumux: the lines under `if args.gpumux`.

Seeds, dropout, a default DataLoader with shuffling, the gradients zeroed in the loop, an average of the weights kept
beside it, a learning-rate schedule, an evaluation and a checkpoint after each epoch, and a start from the checkpoint
after Ctrl-C.

    python -m clients.script --out plain            # without gpumux
    python -m clients.script --out muxed --gpumux   # the same, its steps in a daemon
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset


def data(count: int, seed: int) -> TensorDataset:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 12, generator=random)
    return TensorDataset(x, (x.sum(1) > 0).long() + (x[:, 0] > 1).long())


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--gpumux", action="store_true", help="run the steps in a daemon")
    parser.add_argument("--interrupt", type=int, default=-1, help="a Ctrl-C after so many steps, to try it")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)

    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(args.dropout), nn.Linear(32, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = CosineAnnealingLR(optimizer, args.epochs)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95), use_buffers=True)
    loader = DataLoader(data(128, 1), batch_size=16, shuffle=True)
    test_x, test_y = data(64, 2).tensors

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    first, history = 0, []
    saved = args.out / "checkpoint.pt"
    if saved.exists():
        found = torch.load(saved)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        schedule.load_state_dict(found["schedule"])
        average.load_state_dict(found["average"])
        torch.set_rng_state(found["random"])
        first, history = found["epoch"], found["history"]

    step: Any = train_step
    with contextlib.ExitStack() as jobs:
        if args.gpumux:
            from gpumux import client

            example = (torch.zeros(16, 12), torch.zeros(16, dtype=torch.long))
            job = client.submit(train_step, example=example, model=model, optimizer=optimizer)
            step = jobs.enter_context(job).step

        done = 0
        for epoch in range(first, args.epochs):
            model.train()
            for x, y in loader:
                optimizer.zero_grad()
                loss = step(x, y)
                average.update_parameters(model)
                done += 1
                if done == args.interrupt:
                    os.kill(os.getpid(), signal.SIGINT)
            schedule.step()
            model.eval()
            with torch.no_grad():
                right = (model(test_x).argmax(1) == test_y).float().mean().item()
                averaged = F.cross_entropy(average(test_x), test_y).item()
            history.append((epoch, loss.item(), right, averaged))
            found = {
                "model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict(),
                "average": average.state_dict(), "random": torch.get_rng_state(), "epoch": epoch + 1,
                "history": history,
            }  # fmt: skip
            torch.save(found, saved)
            print(f"epoch {epoch}: loss {loss.item():.4f}, {right:.0%} right, {averaged:.4f} by the average")
    return {**found, "weights": [p.detach().clone() for p in model.parameters()]}


if __name__ == "__main__":
    main()
