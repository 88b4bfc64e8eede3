"""Train a small transformer that reads handwritten digits row by row.

python -m clients.digits_transformer --priority low
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clients.common import parser, run
from clients.data import digits
from clients.models.transformer import transformer
from clients.supervised import fit


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    model = transformer(args.size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    def count_correct(x: Tensor, y: Tensor) -> Tensor:
        model.eval()
        with torch.no_grad():
            correct: Tensor = (model(x).argmax(1) == y).sum()
        model.train()
        return correct

    fit(args, "digits-transformer", digits(), model, optimizer, train_step, count_correct)


def main(argv: Sequence[str] | None = None) -> int:
    return run(train, parser("Train a small transformer on handwritten digits.", epochs=10), argv)


if __name__ == "__main__":
    sys.exit(main())
