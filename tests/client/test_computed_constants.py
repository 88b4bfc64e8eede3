"""Tensors that a step makes of a constant or a number, on which the daemon computes, where the step leaves them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpumux import client, errors

STEPS = 6


class Model(nn.Module):
    """Keeps something of each step."""

    count: Tensor
    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("count", torch.tensor([2]))
        self.register_buffer("last", torch.tensor(0.0))
        self.seen: Any = None
        self.average = torch.tensor(0.0)
        self.log: dict[str, Tensor] = {}
        self.kept = {"total": torch.tensor(0.0)}
        self.pair = (torch.tensor(0.0), torch.tensor(0.0))
        self.items = [torch.tensor(1.0), torch.tensor(0.0)]


def total(h: Tensor) -> Tensor:
    """A sum as scripts begin one."""
    found = torch.tensor(5.0)
    found += h.detach().mean()
    return found


def in_a_buffer(model: Model, h: Tensor) -> Tensor:
    model.last = total(h)
    return h + model.last


def in_a_variable(model: Model, h: Tensor) -> Tensor:
    h = h + model.average
    model.average = total(h)
    return h


def in_a_dictionary(model: Model, h: Tensor) -> Tensor:
    h = h + model.kept["total"]
    model.kept["total"] = torch.tensor(0.0)
    model.kept["total"] += h.detach().mean()
    model.kept["total"] *= 2
    return h


def in_a_list(model: Model, h: Tensor) -> Tensor:
    h = h + model.items[1]
    model.items[1] = total(h)
    return h


def in_a_tuple(model: Model, h: Tensor) -> Tensor:
    h = h + model.pair[0] * model.pair[1]
    model.pair = (total(h), total(h + 1))
    return h


def of_one_number(model: Model, h: Tensor) -> Tensor:
    h = h * int(model.count)
    model.count[0] = (int(model.count) + 1) % 4
    model.seen = torch.tensor(7.0)
    model.seen += 1
    return h + model.seen


def of_a_buffer_that_is_zero(model: Model, h: Tensor) -> Tensor:
    h = h * (int(model.count) + 1)
    model.count.zero_()
    model.seen = model.count + 1
    return h


def given_as_out(model: Model, h: Tensor) -> Tensor:
    first, second = torch.tensor(3.0), torch.tensor(0.0)
    torch.add(first, 1, out=first)
    torch.mul(first, 2, out=second)
    torch.neg(second, out=first)
    return h * first + second


def in_whole_views(model: Model, h: Tensor) -> Tensor:
    h = h * int(model.count)
    model.count[...] += 1
    view = model.count[...]
    view *= 2
    return h


def beyond_64_bits(model: Model, h: Tensor) -> Tensor:
    h = h * (int(model.count) % 7)
    model.count.mul_(6364136223846793005).add_(1442695040888963407)
    return h + torch.tensor(2**62) * 4


def contents(model: Model) -> list[Tensor]:
    there = [*model.state_dict().values(), model.average, model.kept["total"], *model.pair, *model.items]
    return [one.clone() for one in [*there, *([] if model.seen is None else [model.seen])]]


def run(body: Any, endpoint: str | None) -> list[Tensor]:
    torch.manual_seed(5)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    batches = [torch.randn(3, 6) for _ in range(STEPS)]

    def step(x: Tensor) -> Tensor:
        h = body(model, model.layer(x))
        loss = F.mse_loss(h, torch.ones_like(h))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    if endpoint is None:
        return [*[step(x).clone() for x in batches], *contents(model)]
    with client.submit(step, example=(batches[0],), model=model, optimizer=optimizer, endpoint=endpoint) as job:
        found = [job.step(x).result().clone() for x in batches]
        job.sync()
        return [*found, *contents(model)]


@pytest.mark.parametrize(
    "body",
    [
        in_a_buffer,
        in_a_variable,
        in_a_dictionary,
        in_a_list,
        in_a_tuple,
        of_one_number,
        of_a_buffer_that_is_zero,
        given_as_out,
        in_whole_views,
        beyond_64_bits,
    ],
    ids=lambda body: body.__name__,
)
def test_what_is_left_is_what_the_plain_step_leaves(body: Any, endpoint: str) -> None:
    want, got = run(body, None), run(body, endpoint)
    assert len(want) == len(got)
    assert [torch.equal(a, b) for a, b in zip(want, got, strict=True)] == [True] * len(want)


def test_a_counter_that_is_given_as_out_is_refused(endpoint: str) -> None:
    def body(model: Model, h: Tensor) -> Tensor:
        h = h * int(model.count)
        torch.add(model.count, 2, out=model.count)
        return h

    with pytest.raises(errors.CaptureError, match="writes into count, by whose value its Python decides"):
        run(body, endpoint)


@pytest.mark.parametrize("added", [False, True])
def test_a_constant_is_left_by_each_of_the_captures_that_make_one(added: bool, endpoint: str) -> None:
    model = Model()

    def step(x: Tensor, flag: bool) -> Tensor:
        number = torch.tensor(2.0) if flag else torch.tensor(3.0)
        if added:
            number = torch.tensor(1.0)
            number += 2 if flag else 3
        model.seen = model.log["number"] = number
        model.average = number + 1
        return model.layer(x).sum().detach()

    x = torch.randn(3, 6)
    with client.submit(step, example=(x, True), model=model, endpoint=endpoint) as job:
        for i in range(6):
            job.step(x, i % 3 == 1).result()
            found = [model.seen.item(), model.log["number"].item(), model.average.item() - 1]
            assert found == [(2.0 if i % 3 == 1 else 3.0) + added] * 3


def into_a_new_place(model: Model, h: Tensor) -> Tensor:
    model.seen = total(h)
    return h


def into_a_new_key(model: Model, h: Tensor) -> Tensor:
    model.log["total"] = total(h)
    return h


def of_a_counter(model: Model, h: Tensor) -> Tensor:
    h = h * int(model.count)
    model.count[0] = (int(model.count) + 1) % 4
    model.seen = model.count * 2
    return h


@pytest.mark.parametrize("body", [into_a_new_place, into_a_new_key, of_a_counter], ids=lambda body: body.__name__)
def test_what_is_left_where_nothing_was_is_not_read_here(body: Any, endpoint: str) -> None:
    """The constant that the tensor was made of is no value of it."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def step(x: Tensor) -> Tensor:
        loss = body(model, model.layer(x)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    x = torch.randn(3, 6)
    with client.submit(step, example=(x,), model=model, optimizer=optimizer, endpoint=endpoint) as job:
        for _ in range(3):
            job.step(x).result()
        left = model.log["total"] if model.seen is None else model.seen
        with pytest.raises(errors.StaleState, match="was set by a step that ran in the daemon"):
            left.item()
        assert left.shape == ((1,) if body is of_a_counter else ())
