"""A module's forward that is replaced between steps, and classes out of range given to one_hot."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import one_hot

from gpumux import client
from gpumux.errors import BadBatch


def test_a_forward_put_on_a_module_of_torch_reaches_the_next_step(endpoint: str) -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    x = torch.ones(2, 3)
    once = model(x).detach()

    def step(x: torch.Tensor) -> torch.Tensor:
        return model(x).detach()

    with client.submit(step, example=(x,), model=model, endpoint=endpoint) as job:
        assert torch.equal(job.step(x).result(timeout=60), once)
        model.forward = lambda x: nn.Sequential.forward(model, x) * 2  # type: ignore[method-assign]
        assert torch.equal(job.step(x).result(timeout=60), once * 2)
        del model.forward
        assert torch.equal(job.step(x).result(timeout=60), once)


def test_a_class_out_of_range_in_one_hot_fails_its_step_alone(endpoint: str) -> None:
    model = nn.Linear(3, 4)
    x, good = torch.ones(2, 3), torch.tensor([0, 3])

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (model(x) - F.one_hot(y, 4) - one_hot(y, num_classes=4)).detach()

    with client.submit(step, example=(x, good), model=model, endpoint=endpoint) as job:
        expected = step(x, good)
        for wrong in (4, -1):
            with pytest.raises(BadBatch, match="out of range"):
                job.step(x, torch.tensor([0, wrong])).result(timeout=60)
        assert torch.equal(job.step(x, good).result(timeout=60), expected)


def test_a_class_out_of_range_in_a_one_hot_imported_by_its_name(endpoint: str) -> None:
    x = torch.tensor([0, 3])
    with client.submit(lambda y: one_hot(y, 4).float(), example=(x,), endpoint=endpoint) as job:
        assert torch.equal(job.step(x).result(timeout=60), one_hot(x, 4).float())
        with pytest.raises(BadBatch, match="out of range"):
            job.step(x + 1).result(timeout=60)
