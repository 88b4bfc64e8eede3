"""A module's forward that is replaced between steps, and classes out of range given to one_hot."""

from __future__ import annotations

import functools

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


def test_a_class_out_of_range_in_one_hot_by_any_name(endpoint: str) -> None:
    x, held = torch.tensor([0, 3]), [F.one_hot]
    partial = functools.partial(F.one_hot, num_classes=4)

    def step(y: torch.Tensor) -> torch.Tensor:
        from torch.nn.functional import one_hot as local

        made = [one_hot(y, 4), local(y, 4), held[0](y, 4), partial(y), torch.ops.aten.one_hot(y, 4)]
        return torch.stack(made) + (y.unsqueeze(-1) == torch.arange(4)).long()

    with client.submit(step, example=(x,), endpoint=endpoint) as job:
        assert torch.equal(job.step(x).result(timeout=60), step(x))
        with pytest.raises(BadBatch, match="out of range"):
            job.step(x + 1).result(timeout=60)


@pytest.mark.parametrize("name", ["held", "partial", "operator"])
def test_each_way_to_one_hot_is_checked(name: str, endpoint: str) -> None:
    ways = {"held": F.one_hot, "partial": functools.partial(F.one_hot), "operator": torch.ops.aten.one_hot.default}
    way, x = ways[name], torch.tensor([0, 3])
    with (
        client.submit(lambda y: way(y, 4).float(), example=(x,), endpoint=endpoint) as job,
        pytest.raises(BadBatch, match="out of range"),
    ):
        job.step(x + 1).result(timeout=60)


def test_a_comparison_with_classes_in_the_script_is_no_one_hot(endpoint: str) -> None:
    x = torch.tensor([0, 3])
    with client.submit(lambda y: (y.unsqueeze(-1) == torch.arange(4)).float(), example=(x,), endpoint=endpoint) as job:
        assert job.step(x + 1).result(timeout=60).sum() == 1
