"""Reads and writes at indices train what serial training trains."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.fuse.rules.found import by
from tests.fuse.serial import batches, check, steady

nn = torch.nn
F = torch.nn.functional
Tensor = torch.Tensor


class Through(nn.Module):
    """A layer, followed by an operation on its output."""

    def __init__(self, then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.then = nn.Linear(5, 6), then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.first(x))


def order(y: Tensor) -> Tensor:
    return y.detach().argsort(1)


CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "gather and scatter": lambda y: torch.zeros_like(y).scatter(1, order(y), y.gather(1, order(y))),
    "adding": lambda y: torch.zeros_like(y).scatter_add(1, order(y) % 3, y).index_add(0, torch.tensor([0, 0, 1, 3]), y),
    "in place": lambda y: (
        y.new_zeros(y.shape).scatter_(1, order(y)[:, :2], 0.5).index_copy_(0, torch.tensor([2]), y[:1]) + y
    ),
    "take": lambda y: y.take(torch.tensor([[0, -1], [7, 7]])),
    "chosen by each": lambda y: y[torch.arange(4), y.detach().argmax(1)] + y.take(order(y)[:, 0]),
    "products in a row": lambda y: y.cumprod(1) + y.cumsum(0),
    "windows": lambda y: y.unfold(1, 3, 2).tanh().unfold(-3, 2, 1),
    "blanks": lambda y: y.masked_fill(y > 0, float("nan")).nan_to_num(0.5) + y,
    "sorted": lambda y: y.sort(1)[0].cumsum(1)[:, :2] + y.topk(2, 1)[0],
}


@pytest.mark.parametrize("case", CASES)
def test_indices(case: str):
    array = check(steady(lambda: Through(CASES[case])), batches(4, 5))
    assert by(array, "per-model") == set()


def test_what_a_mask_counts_runs_once_a_model_and_says_why():
    def masked(y: Tensor) -> Tensor:
        return torch.zeros_like(y).masked_scatter(y > 0, y).sum() + F.pdist(y)

    array = check(steady(lambda: Through(masked)), batches(4, 5))
    assert by(array, "per-model") == {f"masked_scatter{e}" for e in ("", "_backward")} | {
        "_pdist_forward",
        "_pdist_backward",
    }
    assert "what the mask says" in str(array.plan())
