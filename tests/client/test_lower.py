"""Programs of captured steps: what they hold in memory beside the state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gpumux import client
from gpumux.capture import step as variants
from gpumux.capture.lower import Lowered
from gpumux.program.ir import Program
from gpumux.program.memory import plan

Make = Callable[[Any], torch.optim.Optimizer]


@pytest.mark.parametrize(
    "make",
    [lambda p: torch.optim.AdamW(p), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)],
    ids=["zeros", "clones of gradients"],
)
def test_what_an_optimizer_makes_in_its_first_step_is_made_where_it_is_kept(
    make: Make, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a temporary that is copied in the end it would take its memory twice."""
    programs: list[Program] = []
    lower = variants.lower

    def noted(*args: Any, **kwargs: Any) -> Lowered:
        lowered = lower(*args, **kwargs)
        programs.append(lowered.program)
        return lowered

    monkeypatch.setattr(variants, "lower", noted)
    torch.manual_seed(0)
    plain, ours = (nn.Linear(64, 64), nn.Linear(64, 64))
    ours.load_state_dict(plain.state_dict())
    x = torch.randn(4, 64)

    def step_of(model: nn.Module) -> tuple[Callable[[torch.Tensor], torch.Tensor], torch.optim.Optimizer]:
        optimizer = make(model.parameters())

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        return step, optimizer

    (step, before), (train, optimizer) = step_of(plain), step_of(ours)
    with client.submit(train, example=(x,), model=ours, optimizer=optimizer, endpoint=endpoint) as job:
        for _ in range(3):
            assert torch.equal(job.step(x).result(), step(x))
        job.sync()
    first, later = programs[:2]
    assert plan(first).peak_bytes <= plan(later).peak_bytes
    states = [[before.state[p] for p in plain.parameters()], [optimizer.state[p] for p in ours.parameters()]]
    for wanted, found in zip(*states, strict=True):
        assert all(torch.equal(wanted[key], found[key]) for key in wanted if isinstance(wanted[key], torch.Tensor))
