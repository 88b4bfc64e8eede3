"""Slices at places that change from step to step: one Program for all of them, and the plain loop's bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpumux import client, errors

STEPS = 24
ROWS = 40


class Held(nn.Module):
    """A layer and a bank of features, with rows of `width` numbers."""

    bank: Tensor
    columns: Tensor

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(6, width)
        self.register_buffer("bank", torch.randn(ROWS, width))
        self.register_buffer("columns", torch.randn(width, ROWS))
        self.moving = nn.Parameter(torch.zeros(3, width), requires_grad=False)
        self.register_buffer("last", torch.zeros(3, width))


Body = Callable[[Held, Tensor, int], Any]


def run(body: Body, places: list[int], wrap: Callable[..., Any], width: int = 4) -> list[Tensor]:
    """All that steps return at these places, and what the model holds at the end. `body` gives what is added to the
    loss, or a list of that and what the step returns in its place."""
    torch.manual_seed(5)
    model = Held(width)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    batches = [torch.randn(3, 6) for _ in range(4)]

    def step(x: Tensor, place: int) -> Any:
        features = model.layer(x)
        loss = F.mse_loss(features, torch.ones_like(features))
        more = body(model, features, place)
        more, further = more if isinstance(more, list) else (more, None)
        optimizer.zero_grad()
        (loss + more).backward()
        optimizer.step()
        return more.detach() if further is None else further

    call = wrap(step, (batches[0], places[0]), model, optimizer)
    found = [torch.as_tensor(call(batches[i % 4], place)).clone() for i, place in enumerate(places)]
    return [*found, *(value.clone() for value in model.state_dict().values())]


def compared(body: Body, places: list[int], endpoint: str, width: int = 4) -> None:
    """The bits are those of the plain loop."""
    wanted = run(body, places, lambda step, example, model, optimizer: step, width)
    jobs: list[Any] = []

    def ours(step: Any, example: Any, model: Any, optimizer: Any) -> Any:
        jobs.append(client.submit(step, example=example, model=model, optimizer=optimizer, endpoint=endpoint))
        return lambda *batch: jobs[0].step(*batch).detach()

    try:
        found = run(body, places, ours, width)
    finally:
        for job in jobs:
            job.close()
    assert all(map(torch.equal, found, wanted))


def read(model: Held, features: Tensor, place: int) -> Any:
    return ((features - model.bank[place : place + 3]) ** 2).sum()


def read_labels(model: Held, features: Tensor, place: int) -> Any:
    return (features[:, 0] * ORDER[place : place + 3]).sum()


def written(model: Held, features: Tensor, place: int) -> Any:
    model.bank[place : place + 3] = features.detach()
    return (features @ model.bank.t()).logsumexp(1).mean()


def written_across(model: Held, features: Tensor, place: int) -> Any:
    model.columns[:, place : place + 3] = features.detach().t().double()
    return (features @ model.columns).logsumexp(1).mean()


def read_then_written(model: Held, features: Tensor, place: int) -> Any:
    with torch.no_grad():
        old = model.bank[place : place + 3]
        model.bank[place : place + 3] = 0.5 * old + 0.5 * features
    return model.bank[place : place + 3].sum() * features.sum()


def one_number(model: Held, features: Tensor, place: int) -> Any:
    model.bank[place : place + 2] = 0.25
    return (features @ model.bank.t()).mean()


def written_after_a_read(model: Held, features: Tensor, place: int) -> Any:
    rows = model.bank[place : place + 3]
    more = features.sum() * float(rows.shape[0]) + rows.sum()
    rows.copy_(features.detach())
    return more + (features @ model.bank.t()).mean()


ORDER = torch.arange(ROWS)
ONCE = [read, read_labels, written, written_across, read_then_written, written_after_a_read, one_number]


@pytest.mark.parametrize("body", ONCE)
def test_one_program_serves_all_places(body: Body, endpoint: str, traces: list[int]) -> None:
    compared(body, [(7 * i) % (ROWS - 3) for i in range(STEPS)], endpoint)
    assert len(traces) <= 8  # plain, with the number as a symbol, and what confirms them


def changed_in_place(model: Held, features: Tensor, place: int) -> Any:
    model.bank[place : place + 3] += features.detach()
    return (features @ model.bank.t()).mean()


def read_after_a_change(model: Held, features: Tensor, place: int) -> Any:
    rows = model.bank[place : place + 3]
    model.bank.mul_(0.9)
    return ((features - rows) ** 2).sum()


def from_a_fixed_place(model: Held, features: Tensor, place: int) -> Any:
    model.bank[place + 3 : place + 6] = model.bank[0:3]
    return (features @ model.bank.t()).mean()


def read_across(model: Held, features: Tensor, place: int) -> Any:
    return (features @ model.columns[:, place : place + 3]).sum()


def part_written(model: Held, features: Tensor, place: int) -> Any:
    rows = model.bank[place : place + 3]
    rows[1] = 2.0
    return (features @ model.bank.t()).mean()


def of_a_part(model: Held, features: Tensor, place: int) -> Any:
    rows = model.bank[place : place + 5][place % 2 : place % 2 + 3]
    rows.copy_(features.detach())
    return (features @ model.bank.t()).mean()


def moved(model: Held, features: Tensor, place: int) -> Any:
    model.bank[place : place + 3] = model.bank[place + 3 : place + 6]
    return (features @ model.bank.t()).mean()


def with_gradients(model: Held, features: Tensor, place: int) -> Any:
    return (torch.cat([model.layer.weight] * 3)[place : place + 3] ** 2).mean() + features.mean()


def gradients_written(model: Held, features: Tensor, place: int) -> Any:
    out = torch.zeros(ROWS, features.shape[1])
    out[place : place + 3] = features
    return (out * model.bank).sum()


def to_the_end(model: Held, features: Tensor, place: int) -> Any:
    return model.bank[place:].sum() * features.sum()


def beyond_the_end(model: Held, features: Tensor, place: int) -> Any:
    return model.bank[place + ROWS - 6 : place + ROWS - 3].sum() * features.sum()


def caught(model: Held, features: Tensor, place: int) -> Any:
    try:
        rows = model.bank[place : place + 3]
        rows.mul_(2.0)
    except Exception:  # noqa: BLE001 - as scripts write it
        return features.sum()
    return model.bank.sum() * features.sum()


def returned_after_a_change(model: Held, features: Tensor, place: int) -> Any:
    rows = model.bank[place : place + 3]
    more = features.sum() + rows.sum()
    model.bank.mul_(0.9)
    return [more, rows]


def kept_in_a_buffer(model: Held, features: Tensor, place: int) -> Any:
    rows = model.bank[place : place + 3]
    more = features.sum() + rows.sum()
    model.bank.mul_(0.9)
    model.last = rows.clone()
    return more


def test_a_slice_that_is_left_in_a_buffer_is_refused_as_one_at_a_fixed_place_is(endpoint: str) -> None:
    """In the plain loop they share memory."""

    def body(model: Held, features: Tensor, place: int) -> Any:
        if place:  # the first capture is one at a fixed place
            model.last = model.bank[place : place + 3]
        return model.last.sum() * features.sum()

    with pytest.raises(errors.CaptureError, match="shares memory"):
        compared(body, [0, 3, 6], endpoint)


def test_a_parameter_that_is_moved_onto_a_slice_is_no_copy_of_it(endpoint: str) -> None:
    def body(model: Held, features: Tensor, place: int) -> Any:
        if place:
            model.moving.data = model.bank[place : place + 3]
        return (model.moving * features.detach()).sum() + features.sum()

    with pytest.raises(errors.CaptureError):
        compared(body, [0, 3, 6], endpoint)


VIEWS = [
    changed_in_place, returned_after_a_change, kept_in_a_buffer, read_after_a_change,
    from_a_fixed_place, read_across, part_written, of_a_part, moved, with_gradients, gradients_written,
    to_the_end, caught,
]  # fmt: skip


@pytest.mark.parametrize("body", VIEWS)
def test_what_no_copy_can_stand_for_is_a_view_at_each_place(body: Body, endpoint: str, traces: list[int]) -> None:
    compared(body, [(i * 3) % 5 for i in range(10)], endpoint)
    assert len(traces) >= 2 * 5


def test_a_place_beyond_the_end_is_another_variant(endpoint: str) -> None:
    compared(beyond_the_end, [0, 1, 2, 5, 3, 2, 4, 6], endpoint)


def test_rows_that_begin_between_aligned_addresses_are_views(endpoint: str, traces: list[int]) -> None:
    """Kernels may round otherwise there. Every second place is aligned where a row has 24 bytes."""
    compared(read, [0, 2, 4, 6, 8, 10, 12, 14, 16], endpoint, width=6)
    aligned = len(traces)
    assert aligned <= 8
    compared(read, [0, 2, 4, 3, 5, 7, 9, 11, 13], endpoint, width=6)
    assert len(traces) - aligned >= 2 * 6


def test_another_length_is_another_variant(endpoint: str) -> None:
    lengths = {0: 3, 1: 2, 2: 3}
    compared(
        lambda model, features, place: model.bank[place : place + lengths[place % 3]].sum() * features.sum(),
        [0, 1, 2, 3, 4, 5, 6], endpoint,
    )  # fmt: skip
