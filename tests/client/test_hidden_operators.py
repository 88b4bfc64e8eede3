"""A batch in parts whose numbers hide what an operator does: zeros come of them, or a term is zero at first. What it
does is seen on numbers that are drawn for it (gpumux/capture/microbatch/trial.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.client.test_hidden_factors import CLASSES, TwoHeads, classes, refused, work
from tests.client.test_microbatches import check

Value = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def far(scores: torch.Tensor) -> torch.Tensor:
    """Zeros, as long as scores are small."""
    return F.relu(scores - 50)


def beside(value: Value) -> Any:
    """A loss, and a value of the scores and the labels beside it."""

    def loss_of(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
        scores = m.scores(x)
        return F.cross_entropy(scores, y), value(scores.detach(), y)

    return loss_of


NO_SUMS: dict[str, Value] = {
    "topk": lambda s, y: far(s).topk(1, 0)[0].sum(),
    "max_pool1d": lambda s, y: F.max_pool1d(far(s).t()[None], len(s)).sum(),
    "avg_pool1d": lambda s, y: F.avg_pool1d(far(s).t()[None], len(s) // 2).sum(),
    "scatter_reduce": lambda s, y: torch.zeros(CLASSES).scatter_reduce(0, y, far(s)[:, 0], "amax").sum(),
}


@pytest.mark.parametrize("what", NO_SUMS)
def test_what_is_no_sum_is_refused_though_it_is_zero(what: str, endpoint: str) -> None:
    assert "neither the sum nor the mean" in refused(beside(NO_SUMS[what]), classes, endpoint).message


MIXING: dict[str, Value] = {
    "halves": lambda s, y: F.relu(far(s)[: len(s) // 2] - far(s)[len(s) // 2 :]).sum(),
    "a view": lambda s, y: far(s)[:, 0].view(2, -1).prod(0).sum(),
    "labels in a view": lambda s, y: (y.view(2, -1) == 9).all(0).double().sum(),
    "a mask of halves": lambda s, y: ((y[: len(y) // 2] == y[len(y) // 2 :] + 100) * s[: len(y) // 2, 0]).mean(),
}


@pytest.mark.parametrize("what", MIXING)
def test_samples_are_seen_to_mix_though_all_is_zero(what: str, endpoint: str) -> None:
    assert "mixes samples" in refused(beside(MIXING[what]), classes, endpoint).message


def regulariser(m: TwoHeads) -> torch.Tensor:
    """Zero, until the weight is larger."""
    return torch.where(m.weight > 0.15, 1.0, 0.0) * m.scores.weight.abs().sum()


def filled(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
    penalty = x.new_zeros(())
    penalty += regulariser(m)
    return F.cross_entropy(m.scores(x), y, reduction="sum") + penalty


def scattered(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
    base = F.relu(m.weight - 0.15).expand(CLASSES).clone()
    return base.scatter_add(0, y, F.cross_entropy(m.scores(x), y, reduction="none")).sum()


def hooked(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
    scores = m.scores(x)
    scores.register_hook(lambda gradient: gradient + F.relu(m.weight - 0.15))
    return F.cross_entropy(scores, y)


@pytest.mark.parametrize("loss_of", [scattered, hooked])
def test_a_term_that_is_the_same_for_all_parts_is_refused_though_it_is_zero_at_first(
    loss_of: Any, endpoint: str
) -> None:
    refused(loss_of, classes, endpoint)


@pytest.mark.parametrize(
    "loss_of",
    [
        filled,
        beside(lambda s, y: torch.div(far(s).sum(), 3, rounding_mode="floor")),
        beside(lambda s, y: (s.argmax(1) == y).sum() + 1),
    ],
    ids=["a regulariser that is zero at first", "a rounded quotient", "one more"],
)
def test_what_parts_can_not_add_up_is_computed_once_their_sums_are_whole(loss_of: Any, endpoint: str) -> None:
    check(lambda: work(loss_of, classes), endpoint)


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda m, x, y: F.cross_entropy(m.scores(x), y) + far(m.scores(x)).mean(),
        lambda m, x, y: F.cross_entropy(m.scores(x), y, reduction="sum") + far(m.scores(x)).sum(),
        beside(lambda s, y: (far(s).sum(1) * (s.argmax(1) == y)).sum()),
        beside(lambda s, y: ((s.argmax(1) == y) & (y == 9)).sum()),
    ],
    ids=["a mean", "a sum", "a sum of products", "a count"],
)
def test_zeros_of_which_the_factor_is_that_of_the_rest_are_taken(loss_of: Any, endpoint: str) -> None:
    check(lambda: work(loss_of, classes), endpoint)
