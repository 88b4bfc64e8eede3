"""A job that can go on over other numbers of devices, and how close it has to come to the plain loop."""

from __future__ import annotations

from collections.abc import Collection

import torch

from microbench.killed import Trial


def wide(seed: int, odd: Collection[int] = ()) -> Trial:
    """A small network with dropout in float64, on batches of 12; `odd`: of 9 in these turns."""
    draw = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(10, 16), torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(16, 4)
    ).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    def turn(index: int) -> list[tuple[str, tuple[torch.Tensor, ...]]]:
        own = draw.manual_seed(1000 * seed + index)
        count = 9 if index in odd else 12
        x = torch.randn(count, 10, generator=own, dtype=torch.float64)
        return [("step", (x, torch.randint(4, (count,), generator=own)))]

    return Trial("wide", seed, [model], [optimizer], {"step": step}, turn)


def close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Within what gangs promise in float64."""
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)
