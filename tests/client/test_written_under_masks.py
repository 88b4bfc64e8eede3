"""`x[mask] = y[mask]` is captured; every other use of a tensor under a mask is refused, with the line of the mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpumux import client, errors

X = torch.randn(8, 6)


def trained(run: Callable[[nn.Module, torch.optim.Optimizer], Callable[[Tensor], Any]]) -> tuple[list[Any], Any]:
    torch.manual_seed(3)
    model = nn.Linear(6, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = run(model, optimizer)
    results = [step(X + i) for i in range(3)]
    return [(loss.item(), near.detach().clone()) for loss, near in results], model


def body(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Any]:
    def step(x: Tensor) -> Any:
        optimizer.zero_grad()
        h = model(x)
        near = torch.full_like(h, 0.3) * 1
        mask = h < near
        near[mask] = h[mask]  # as a whole
        rows, doubled = h.sum(1) > 0, h * 2
        doubled[rows] = torch.tanh(h)[rows]  # by rows
        loss = (near**2).mean() + doubled.exp().mean()
        loss.backward()
        optimizer.step()
        return loss, near

    return step


def test_values_written_under_their_mask_train_as_in_the_plain_loop(endpoint: str) -> None:
    jobs = []

    def submitted(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Any]:
        step = body(model, optimizer)
        jobs.append(client.submit(step, example=(X,), model=model, optimizer=optimizer, endpoint=endpoint))
        return lambda x: jobs[0].step(x).result()

    plain, model = trained(body)
    got, local = trained(submitted)
    jobs[0].close()
    assert [loss for loss, _ in got] == [loss for loss, _ in plain]
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(got, plain, strict=True))
    assert torch.equal(local.weight, model.weight)


def test_numbers_are_added_and_multiplied_under_a_mask(endpoint: str) -> None:
    """As in distributional DQN: lower[(upper > 0) * (lower == upper)] -= 1, where the next line reads it."""

    def step(x: Tensor) -> Any:
        lower, upper = x.floor().long(), x.ceil().long()
        lower[(upper > 0) * (lower == upper)] -= 1
        upper[(lower < 3) * (lower == upper)] += 1
        scaled = x.clone().requires_grad_()
        y = scaled * 1
        y[y > 0.5] *= 0.3
        y[y < -0.5] /= 3
        y[y.sum(1) > 0] += 0.7
        y.exp().sum().backward()
        return lower, upper, y, scaled.grad

    x = torch.cat([X[:4], X[:4].round()])
    with client.submit(step, example=(x,), endpoint=endpoint) as job:
        for batch in (x, 2 * x):
            got = job.step(batch).result()
            assert all(torch.equal(one, other) for one, other in zip(got, step(batch), strict=True))


def a_number_of_another_type(h: Tensor) -> Tensor:
    g = h.long()
    g[g > 0] *= 0.5
    return g


def a_tensor_added(h: Tensor) -> Tensor:
    h[h > 0] += h[h > 0]
    return h


def by_another_mask(h: Tensor) -> Tensor:
    g = h * 1
    g[g > 0] = h[h > 0]  # as many values only if both masks are equal
    return g


def after_a_write(h: Tensor) -> Tensor:
    g, mask = h * 1, h > 0
    values = g[mask]
    g.add_(1)
    h = h * 2
    h[mask] = values
    return h


def of_another_type(h: Tensor) -> Tensor:
    g, mask = h.double(), h > 0
    g[mask] = h[mask]
    return g


@pytest.mark.parametrize(
    "use",
    [
        by_another_mask, after_a_write, of_another_type, a_number_of_another_type, a_tensor_added,
        lambda h: h[h > 0], lambda h: h[h > 0].mean(),
        lambda h: h.sum() * h[h > 0].shape[0], lambda h: h.sum() * len(h[h > 0]),
        lambda h: torch.cat([h[0], h[h > 0]]).sum(),
    ],
)  # fmt: skip
def test_another_use_is_refused_with_the_line_of_the_mask(use: Callable[[Tensor], Any], endpoint: str) -> None:
    model = nn.Linear(6, 6)
    with pytest.raises(errors.DataDependent, match="depends on the data") as caught:
        client.submit(lambda x: use(model(x)), example=(X,), model=model, endpoint=endpoint)
    assert __file__ in caught.value.message


def test_values_chosen_without_gradients_are_not_linked(endpoint: str) -> None:
    """Under `no_grad()` the plain loop's values have no gradient; as `torch.where(mask, h, near)` they would."""

    def step(x: Tensor) -> Any:
        h = model(x)
        near, mask = h * 2, h > 0
        with torch.no_grad():
            values = h[mask]
        near[mask] = values
        near.sum().backward()
        return near

    model = nn.Linear(6, 6)
    with pytest.raises(errors.DataDependent, match="depends on the data") as caught:
        client.submit(step, example=(X,), model=model, endpoint=endpoint)
    assert __file__ in caught.value.message


def test_values_under_no_grad_are_written_there(endpoint: str) -> None:
    """As farthest points are chosen: the whole loop runs without gradients."""

    def step(x: Tensor) -> Tensor:
        h = model(x)
        near = torch.zeros_like(h)
        with torch.no_grad():
            mask = h > near
            near[mask] = h[mask]
            near[near > 0.5] *= 0.3
        return (h * near).sum()

    model = nn.Linear(6, 6)
    with client.submit(step, example=(X,), model=model, endpoint=endpoint) as job:
        got = job.step(X).item()
    assert got == step(X).item()


def test_tensors_are_made_of_scalars_after_a_submit(endpoint: str) -> None:
    """A trace leaves torch.Tensor without a `__getitem__` of its own: with one it would be a sequence to C for good."""

    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x).sum()
        return loss

    model = nn.Linear(6, 6)
    with client.submit(step, example=(X,), model=model, endpoint=endpoint) as job:
        losses = [job.step(X).result(), torch.tensor(2.0)]
        assert torch.tensor(losses).tolist() == [losses[0].item(), 2.0]


def test_a_tensor_of_scalars_in_the_step_is_refused_with_its_line(endpoint: str) -> None:
    def step(x: Tensor) -> Tensor:
        return torch.tensor([row.mean() for row in model(x)])

    model = nn.Linear(6, 6)
    with pytest.raises(errors.DataDependent) as caught:
        client.submit(step, example=(X,), model=model, endpoint=endpoint)
    assert __file__ in caught.value.message
    assert "torch.stack" in (caught.value.remedy or "")
