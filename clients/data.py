"""Scikit-learn's bundled digits: 1,797 grey 8x8 images of handwritten digits, no download."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor

TEST_SHARE = 5  # every fifth image is for testing


@dataclass(frozen=True)
class Digits:
    """Images [N, 1, 8, 8] float32 in [-1, 1], labels [N] int64."""

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor

    def batches(self, batch_size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Endless shuffled batches, all of one shape: each epoch's remainder is dropped.

        The order comes from a generator of its own. torch's default one belongs to the training
        step alone (dropout), or the run could not be compared with another bit for bit.
        """
        rng = np.random.default_rng(seed)
        while True:
            order = torch.from_numpy(rng.permutation(len(self.x_train)))
            for at in range(0, self.steps_per_epoch(batch_size) * batch_size, batch_size):
                chosen = order[at : at + batch_size]
                yield self.x_train[chosen], self.y_train[chosen]

    def steps_per_epoch(self, batch_size: int) -> int:
        return len(self.x_train) // batch_size


def digits() -> Digits:
    bundle = load_digits()
    x = torch.from_numpy(bundle.images.astype(np.float32) / 8 - 1).unsqueeze(1)
    y = torch.from_numpy(bundle.target.astype(np.int64))
    test = torch.arange(len(x)) % TEST_SHARE == 0
    return Digits(x[~test], y[~test], x[test], y[test])
