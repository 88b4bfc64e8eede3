"""Training of nn.EmbeddingBag, whose backward torch records as one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gpumux import client, errors
from tests.client.parity import Work, check

TOKENS = torch.randint(0, 9, (12,), generator=torch.Generator().manual_seed(1))
OFFSETS = torch.tensor([0, 3, 3, 9])
WEIGHTS = torch.rand(12, generator=torch.Generator().manual_seed(2))

BAGS: dict[str, tuple[Callable[[], nn.EmbeddingBag], tuple[Any, ...]]] = {
    "sums": (lambda: nn.EmbeddingBag(9, 5, mode="sum"), (TOKENS, OFFSETS)),
    "means": (lambda: nn.EmbeddingBag(9, 5, mode="mean"), (TOKENS, OFFSETS)),
    "maxima": (lambda: nn.EmbeddingBag(9, 5, mode="max"), (TOKENS, OFFSETS)),
    "of equal lengths": (lambda: nn.EmbeddingBag(9, 5), (TOKENS.view(3, 4),)),
    "sums of equal lengths": (lambda: nn.EmbeddingBag(9, 8, mode="sum"), (TOKENS.view(3, 4),)),
    "weighted": (lambda: nn.EmbeddingBag(9, 5, mode="sum"), (TOKENS, OFFSETS, WEIGHTS)),
    "padded": (lambda: nn.EmbeddingBag(9, 5, mode="mean", padding_idx=0), (TOKENS, OFFSETS)),
    "sums, padded": (lambda: nn.EmbeddingBag(9, 5, mode="sum", padding_idx=2), (TOKENS, OFFSETS)),
    "with the last offset": (
        lambda: nn.EmbeddingBag(9, 5, mode="sum", include_last_offset=True), (TOKENS, torch.tensor([0, 3, 3, 9, 12])),
    ),
    "by frequency": (lambda: nn.EmbeddingBag(9, 5, mode="sum", scale_grad_by_freq=True), (TOKENS, OFFSETS)),
    "of int32": (lambda: nn.EmbeddingBag(9, 5, mode="sum"), (TOKENS.int(), OFFSETS.int())),
    "in float64": (lambda: nn.EmbeddingBag(9, 5, mode="sum").double(), (TOKENS, OFFSETS)),
    "of a longer table": (lambda: nn.EmbeddingBag(1000, 64, mode="sum"), (TOKENS * 100, OFFSETS)),
    "empty": (lambda: nn.EmbeddingBag(9, 5, mode="sum"), (TOKENS[:0], torch.zeros(3, dtype=torch.long))),
}  # fmt: skip


@pytest.mark.parametrize("name", BAGS)
@pytest.mark.every(3)
def test_bags_are_trained_as_in_the_plain_loop(name: str, endpoint: str) -> None:
    module, given = BAGS[name]

    def make() -> Work:
        torch.manual_seed(0)
        bag = module()
        optimizer = torch.optim.Adam(bag.parameters(), lr=0.1)

        def step(*batch: Any) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = bag(*batch).pow(2).sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Work([bag], [optimizer], [(step, given)], lambda run: [run(*given) for _ in range(4)])

    check(make, endpoint)


def test_weights_of_the_tokens_are_trained(endpoint: str) -> None:
    def make() -> Work:
        torch.manual_seed(0)
        bag, scores = nn.EmbeddingBag(9, 5, mode="sum"), nn.Embedding(9, 1)

        def step(tokens: torch.Tensor, offsets: torch.Tensor) -> Any:
            loss = bag(tokens, offsets, scores(tokens).squeeze(1)).pow(2).sum()
            return torch.autograd.grad(loss, [bag.weight, scores.weight])

        return Work([bag, scores], [], [(step, (TOKENS, OFFSETS))], lambda run: [run(TOKENS, OFFSETS)])

    check(make, endpoint)


@pytest.mark.parametrize("batch", [(TOKENS + 1, OFFSETS), (TOKENS, OFFSETS + 9)], ids=["a token", "an offset"])
def test_a_number_out_of_range_costs_its_step(batch: tuple[Any, ...], endpoint: str) -> None:
    bag = nn.EmbeddingBag(9, 5, mode="sum")
    assert int((TOKENS + 1).max()) == 9

    def step(tokens: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = bag(tokens, offsets).sum()
        loss.backward()
        return loss.detach()

    with client.submit(step, example=(TOKENS, OFFSETS), model=bag, endpoint=endpoint) as job:
        before = job.step(TOKENS, OFFSETS).result()
        with pytest.raises(errors.BadBatch, match="_embedding_bag"):
            job.step(*batch)
        assert torch.equal(job.step(TOKENS, OFFSETS).result(), before)
