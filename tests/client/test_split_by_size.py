"""A batch in parts where sizes, counts and whole numbers of the state decide: a split step computes what the whole one
does, or is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpumux import client, errors
from gpumux.capture.microbatch.split import TOLERANCE
from tests.client.parity import Work, simple_loop
from tests.client.test_hidden_factors import CLASSES, SIZE, TwoHeads, classes, large, refused, scaled, work
from tests.client.test_microbatches import check

Loss = Callable[[TwoHeads, torch.Tensor, torch.Tensor], Any]


def of_each(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(m.scores(x), y, reduction="none")


def masked(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
    held = y > 2
    return (of_each(m, x, y) * held).sum() / held.sum().clamp(min=1)


def masked_by_floats(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
    held = (y > 2).to(x.dtype)
    return (of_each(m, x, y) * held).sum() / held.sum()


def smoothed(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
    return F.cross_entropy(m.scores(x), y, weight=torch.arange(1.0, CLASSES + 1), label_smoothing=0.1)


def share_that_is_right(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
    scores, held = m.scores(x), y > 2
    return F.cross_entropy(scores, y), ((scores.argmax(1) == y) & held).float().sum() / held.sum()


@pytest.mark.covering
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("loss_of", [masked, masked_by_floats, smoothed, share_that_is_right])
def test_a_mean_over_what_counts_is_taken_in_every_type(loss_of: Loss, dtype: torch.dtype, endpoint: str) -> None:
    def make() -> Work:
        torch.manual_seed(0)
        model = TwoHeads()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
                result = loss_of(model, x, y)
            (result[0] if isinstance(result, tuple) else result).backward()
            optimizer.step()
            return result

        data = [(torch.randn(SIZE, 5), classes(i)) for i in range(4)]
        return Work([model], [optimizer], [(step, data[0])], simple_loop(data, 4), {"microbatches": 2})

    check(make, endpoint, 1e-9 if dtype == torch.float64 else TOLERANCE[str(dtype).removeprefix("torch.")])


def labels_changed_between(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
    scores, labels = m.scores(x), y.clone()
    first = F.cross_entropy(scores, labels)
    first.backward(retain_graph=True)
    labels.masked_fill_(labels > 2, -100)
    return F.cross_entropy(scores, labels), first


def weights_of_the_batch(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
    found = F.one_hot(y, CLASSES).sum(0)
    weight = (len(y) / (CLASSES * found.clamp(min=1))).to(x.dtype)
    return F.cross_entropy(m.scores(x), y, weight=weight)


def weights_by_size(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
    return F.cross_entropy(m.scores(x), y, weight=torch.arange(1.0, CLASSES + 1).to(x.dtype) * len(x))


@pytest.mark.parametrize("loss_of", [labels_changed_between, weights_of_the_batch, weights_by_size])
def test_what_a_loss_counts_is_made_before_the_parts_and_in_order(loss_of: Loss, endpoint: str) -> None:
    check(lambda: work(loss_of, classes), endpoint)


def noise_by_size(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
    return F.cross_entropy(m.scores(x + torch.zeros_like(x).normal_(float(len(x)), 0.0)), y)


def drawn_by_size(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
    return (of_each(m, x, y) * torch.empty(len(x)).uniform_(len(x), len(x) + 1.0)).mean()


@pytest.mark.parametrize("loss_of", [noise_by_size, drawn_by_size])
def test_draws_by_the_size_are_refused(loss_of: Loss, endpoint: str) -> None:
    assert "draws numbers that depend on how many" in refused(loss_of, classes, endpoint).message


def beside(value: Callable[[TwoHeads, torch.Tensor, torch.Tensor], torch.Tensor]) -> Loss:
    """A loss, and a value of the scores beside it."""

    def loss_of(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
        scores = m.scores(x)
        return F.cross_entropy(scores, y), value(m, scores.detach(), y)

    return loss_of


REDUCTIONS = {
    "all": lambda m, s, y: (s.abs() < 50).all().double(),
    "any of each": lambda m, s, y: (s > 1.5).any(0).double().sum(),
    "largest": lambda m, s, y: (s.argmax(1) == 3).double().max() * 100,
    "largest of zeros": lambda m, s, y: F.relu(0.1 * s[:, 0] + y - 5).max() * 2,
    "norm of zeros": lambda m, s, y: F.relu(0.1 * s[:, 0] + y - 5).norm() * 2,
}


@pytest.mark.parametrize("what", REDUCTIONS)
def test_a_reduction_that_is_no_sum_is_refused_whatever_follows_it(what: str, endpoint: str) -> None:
    assert "neither the sum nor the mean" in refused(beside(REDUCTIONS[what]), classes, endpoint).message


@pytest.mark.parametrize(
    "held",
    [
        lambda n: torch.arange(SIZE) < n,
        lambda n: torch.arange(SIZE) - n < 0,
    ],
    ids=["compared", "subtracted"],
)
def test_positions_in_the_batch_that_are_compared_are_refused(held: Any, endpoint: str) -> None:
    model = nn.Linear(5, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (F.cross_entropy(model(x), y, reduction="none") * held(count)).sum() / SIZE
        loss.backward()
        optimizer.step()
        return loss

    example = torch.randn(SIZE, 5), torch.arange(SIZE) % CLASSES, torch.tensor(SIZE)
    with pytest.raises(errors.NotSplittable):
        client.submit(step, example=example, model=model, optimizer=optimizer, microbatches=2, endpoint=endpoint)


class Counting(TwoHeads):
    """Whole numbers that are zero at first: how many samples were right, and which row of a table a sample takes."""

    count: torch.Tensor
    rows: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("rows", torch.zeros(SIZE, dtype=torch.long))
        self.table = nn.Embedding(2, 1)


def counted_before(m: Counting, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    scores = m.scores(x)
    m.count = m.count + (scores.argmax(1) == y).sum()
    return F.cross_entropy(scores, y)


def row_of_each_place(m: Counting, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(m.scores(x), y) + (m.table(m.rows[: len(x)])[:, 0] * x[:, 0]).mean()


def counting(loss_of: Callable[[Counting, torch.Tensor, torch.Tensor], torch.Tensor]) -> Work:
    torch.manual_seed(0)
    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        return loss

    data = [(torch.randn(SIZE, 5), classes(i)) for i in range(4)]
    return Work([model], [optimizer], [(step, data[0])], simple_loop(data, 4), {"microbatches": 2})


def test_a_count_in_the_state_that_is_zero_at_first_goes_on(endpoint: str) -> None:
    check(lambda: counting(counted_before), endpoint)


def test_indices_in_the_state_that_are_zero_at_first_hide_nothing(endpoint: str) -> None:
    one = counting(row_of_each_place)
    ((step, example),) = one.functions
    with pytest.raises(errors.NotSplittable):
        client.submit(
            step, example=example, model=one.models, optimizer=one.optimizers, microbatches=2, endpoint=endpoint
        )


def clamped(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
    return (m(x)[1].square() + y).clamp(max=3.0 * len(x)).mean()


def remainder(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
    return (m(x)[1] * (y % len(y))).mean()


def compared(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
    return (m(x)[1].square() * (y < len(y) // 2 + 1)).mean()


def to_a_power(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
    return (0.1 * scaled(m, x, y)).pow(len(x) // 2).mean()


def huber(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
    return F.huber_loss(m(x)[1], y.to(x.dtype), delta=float(len(x)))


@pytest.mark.parametrize("loss_of", [clamped, remainder, compared, to_a_power, huber])
def test_bounds_and_exponents_by_the_size_are_refused(loss_of: Loss, endpoint: str) -> None:
    assert "depends on how many samples" in refused(loss_of, large, endpoint).message


def product_added(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
    return torch.addcmul(m(x)[1].square() / len(x), scaled(m, x, y), x[:, 0]).sum()


def interpolated(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
    return torch.lerp(m(x)[1].square() / len(x), scaled(m, x, y), 0.5).sum()


def scattered(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
    return (m(x)[0].square() / len(x)).scatter_add(1, y[:, None] * 0, scaled(m, x, y)[:, None]).sum()


def difference(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
    return F.mse_loss(m(x)[1] / len(x), scaled(m, x, y), reduction="sum")


def with_alpha(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
    return m(x)[0].square().sum().add(scaled(m, x, y).sum(), alpha=1 / len(x))


def test_a_factor_by_the_size_is_applied_once_the_sum_is_whole(endpoint: str) -> None:
    check(lambda: work(with_alpha, large), endpoint)


@pytest.mark.parametrize("loss_of", [product_added, interpolated, scattered, difference])
def test_values_of_other_factors_are_not_added_by_whatever_operator(loss_of: Loss, endpoint: str) -> None:
    assert "adds a sum over the batch and a mean" in refused(loss_of, large, endpoint).message


def gradients_of_each(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
    scores = m.scores(x)
    loss = F.cross_entropy(scores, y)
    (gradients,) = torch.autograd.grad(loss, scores, retain_graph=True)
    return loss, gradients, gradients.square().sum(1)


def a_quotient_of_means(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
    scores = m.scores(x)
    return F.cross_entropy(scores, y), scores.detach().square().mean() / scores.detach().abs().mean()


@pytest.mark.parametrize("loss_of", [gradients_of_each, a_quotient_of_means])
def test_values_that_are_larger_in_parts_are_returned_as_those_of_the_batch(loss_of: Loss, endpoint: str) -> None:
    """Gradients of a mean for each sample are as many times as large as there are parts."""
    check(lambda: work(loss_of, classes), endpoint)
