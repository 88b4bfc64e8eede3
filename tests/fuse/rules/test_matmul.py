"""Products beyond those of linear layers train what serial training trains."""

from __future__ import annotations

import pytest
import torch

from tests.fuse.rules.found import by
from tests.fuse.serial import batches, check, steady

nn = torch.nn


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.both = nn.Linear(5, 4), nn.Linear(5, 3), nn.Bilinear(4, 3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.first(x), self.second(x)
        outer = torch.einsum("ni,nj->ij", a, b)
        return torch.cat(
            [self.both(a, b).flatten(), outer.flatten(), torch.outer(a[0], b[0]).flatten(), (a @ outer[:, 0])]
        )


@pytest.mark.parametrize("per_model", [False, True])
def test_products(per_model: bool):
    array = check(steady(Products), batches(4, 5), per_model=per_model)
    assert "_trilinear" in by(array, "rule")
    assert by(array, "per-model") == set()
