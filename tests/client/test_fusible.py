"""submit(..., fusible=True): what is refused, and two jobs of one script that the daemon runs as one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gpumux import client
from gpumux.errors import ConfigError

MOST_STEPS = 20_000  # until a group is there: settle_s, and a Program that is made and proven


@pytest.mark.parametrize(
    "other",
    [
        {"priority": "high"},
        {"memory": "shared"},
        {"compile": True},
        {"waves": 2},
        {"endpoints": ["ipc:///a", "ipc:///b"]},
    ],
    ids=lambda other: next(iter(other)),
)
def test_what_does_not_go_together_is_refused_before_anything_happens(other: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="fusible"):
        client.submit(lambda x: x, example=(torch.ones(1),), fusible=True, **{"endpoint": None, **other})


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_fusible_is_true_or_false(value: Any) -> None:
    with pytest.raises(ConfigError, match="fusible"):
        client.submit(lambda x: x, example=(torch.ones(1),), fusible=value, endpoint="ipc:///nowhere")


def line(seed: int) -> tuple[Callable[..., Any], torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(16, 4, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * (seed + 1), momentum=0.9)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x[:, :4])
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, model, optimizer


@pytest.mark.extended
@pytest.mark.usefixtures("one_thread")
def test_two_jobs_run_as_one_and_each_learns_what_it_would_alone(endpoint: str) -> None:
    plain, submitted = [line(seed) for seed in range(2)], [line(seed) for seed in range(2)]
    batches = [torch.randn(8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in range(8)]
    jobs = [
        client.submit(step, example=(batches[0],), model=model, optimizer=optimizer, endpoint=endpoint, fusible=True)
        for step, model, optimizer in submitted
    ]
    worst, taken = 0.0, 0
    try:
        while not (taken % 100 == 0 and jobs[0].stats()["fusion"]["steps"]):  # type: ignore[index]
            assert taken < MOST_STEPS, jobs[0].stats()["fusion"]
            batch = batches[taken % len(batches)]
            for (step, _, _), future in zip(plain, [job.step(batch) for job in jobs], strict=True):
                want = float(step(batch))
                worst = max(worst, abs(float(future) - want) / max(want, 1e-3))
            taken += 1
            threading.Event().wait(0.005)  # the process that makes the fused Program has a low priority
        told = jobs[1].stats()
        assert told["exactness"] == "equivalent"
        assert any("equal jobs" in reason for reason in told["because"])
    finally:
        for job in jobs:
            job.close()
    assert worst < 1e-9
    for (_, alone, _), (_, fused, _) in zip(plain, submitted, strict=True):
        assert torch.allclose(alone.weight, fused.weight, rtol=1e-9, atol=1e-12)
