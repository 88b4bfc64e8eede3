"""Embeddings train what serial training trains; padding of one model leaves the others alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpumux import fuse
from gpumux.errors import GpumuxError
from tests.fuse.rules.found import by
from tests.fuse.serial import batches, check, configs, steady

nn = torch.nn


class Words(nn.Module):
    """`tied`: the table is the last layer's weight, too."""

    def __init__(self, tied: bool = False, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4, **options)
        self.out = nn.Linear(4, 7)
        if tied:
            self.out.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.table((x * 2 + 3).long().clamp(0, 6)))


CASES: dict[str, dict[str, Any]] = {
    "plain": {}, "padding": {"padding_idx": 3}, "by frequency": {"scale_grad_by_freq": True, "padding_idx": -1},
    "tied": {"tied": True}, "short rows": {"max_norm": 0.5},
}  # fmt: skip


@pytest.mark.parametrize("per_model", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_embeddings(case: str, per_model: bool):
    array = check(steady(lambda: Words(**CASES[case])), batches(3, 5), per_model=per_model)
    expected = {"embedding", "embedding_dense_backward"} | ({"embedding_renorm_"} if case == "short rows" else set())
    assert by(array, "rule") >= expected
    assert by(array, "batched", "per-model") <= {"mean", "sum.dim_IntList"}


def test_indices_that_a_model_makes_itself():
    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.table = nn.Linear(5, 7), nn.Embedding(7, 4, padding_idx=2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores = self.first(x)
            return self.table(scores.argmax(-1)) * scores.softmax(-1).amax(-1, keepdim=True)

    array = check(steady(Chosen), batches(6, 5))
    assert by(array, "rule") >= {"embedding", "embedding_dense_backward"}


def test_sparse_gradients_are_refused():
    with pytest.raises(GpumuxError, match=r"[Ss]parse"):
        fuse.Array(steady(lambda: Words(sparse=True)), configs(), batches(3, 5)[0])
