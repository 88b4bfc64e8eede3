"""Jobs whose steps the daemon compiles, on a real GPU: captured Triton kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpumux import client


def make(device: str) -> tuple[nn.Module, Any, Callable[..., torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3), nn.GELU(), nn.Flatten(), nn.LayerNorm(288), nn.Linear(288, 10)
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return model, optimizer, step


def test_a_compiled_job_repeats_bit_for_bit_and_is_near_the_plain_run(endpoint: str) -> None:
    draw = torch.Generator().manual_seed(5)
    data = [(torch.randn(16, 64, generator=draw), torch.randint(0, 10, (16,), generator=draw)) for _ in range(14)]
    runs = []
    for _ in range(2):
        model, optimizer, step = make("cpu")
        with client.submit(
            step, example=data[0], model=model, optimizer=optimizer, endpoint=endpoint, compile=True
        ) as job:
            losses = [job.step(*batch).result() for batch in data]
            stats = job.stats()
            job.sync()
        runs.append([*losses, *[p.detach().clone() for p in model.parameters()]])
    assert stats["exactness"] == "equivalent"
    assert any("compiles" in reason for reason in stats["because"])
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)
    _, _, plain = make("cuda")
    want = [float(plain(x.cuda(), y.cuda())) for x, y in data]
    assert [float(loss) for loss in runs[0][: len(data)]] == pytest.approx(want, rel=2e-2)
