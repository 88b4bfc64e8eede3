"""Model-parallel waves on real daemons: a job whose samples rotate over its ranks."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpumux import client
from gpumux.burst.placement import rotated


@pytest.mark.extended
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.extended)])
def test_a_rotation_over_daemons_trains_what_plain_torch_trains(ranks: int, endpoints: list[str]) -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)]
    plain = nn.Sequential(*layers, nn.Linear(6, 3)).double()
    mine = copy.deepcopy(plain)
    data = [(torch.randn(8, 6, dtype=torch.float64), torch.randint(0, 3, (8,))) for _ in range(3)]

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    first, second = (torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (plain, mine))
    wanted = [train(plain, first, *batch).detach() for batch in data]

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return train(mine, second, x, y)

    each = 4 // ranks
    placement = rotated([[str(c * each + i) for i in range(each)] for c in range(ranks)])
    with client.submit(
        step, example=data[0], model=mine, optimizer=second, plan=placement, endpoints=endpoints[:ranks]
    ) as job:
        given = [job.step(*batch).result() for batch in data]
        assert len(job.stats()["ranks"]) == ranks
    for a, b in zip([*wanted, *plain.parameters()], [*given, *mine.parameters()], strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=1e-10)
