"""Train a convolutional network (batch norm, dropout) on handwritten digits.

python -m clients.digits_cnn --priority high
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from clients.common import parser, run
from clients.data import digits
from clients.models.cnn import cnn
from clients.supervised import fit


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    model = cnn(args.size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    def count_correct(x: Tensor, y: Tensor) -> Tensor:
        model.eval()
        with torch.no_grad():
            correct: Tensor = (model(x).argmax(1) == y).sum()
        model.train()
        return correct

    fit(args, "digits-cnn", digits(), model, optimizer, train_step, count_correct)


def main(argv: Sequence[str] | None = None) -> int:
    return run(train, parser("Train a convolutional network on handwritten digits.", epochs=6), argv)


if __name__ == "__main__":
    sys.exit(main())
