"""A batch in parts whose example hides how parts make up the whole: a mask that holds nowhere, labels that never occur,
a coefficient that begins at zero. Later batches show it, so the first must not be enough for a guess."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpumux import client, errors
from tests.client.parity import Work, simple_loop
from tests.client.test_microbatches import check

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]
SIZE, CLASSES = 8, 6


class TwoHeads(nn.Module):
    """Scores, and a number for each sample from a head of its own. `weight` begins at zero."""

    weight: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.other = nn.Linear(5, CLASSES), nn.Linear(5, 1)
        self.register_buffer("weight", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.scores(x), self.other(x)[:, 0]


def work(loss_of: Callable[[TwoHeads, torch.Tensor, torch.Tensor], Any], labels: Callable[[int], torch.Tensor]) -> Work:
    torch.manual_seed(0)
    model = TwoHeads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        result = loss_of(model, x, y)
        loss = result[0] if isinstance(result, tuple) else result
        loss.backward()
        optimizer.step()
        model.weight.add_(0.1)
        return result

    data = [(torch.randn(SIZE, 5), labels(i)) for i in range(4)]
    return Work([model], [optimizer], [(step, data[0])], simple_loop(data, 4), {"microbatches": 2})


def classes(i: int) -> torch.Tensor:
    return torch.arange(SIZE) * (i + 1) % CLASSES


def empty_mask_first(i: int) -> torch.Tensor:
    return torch.arange(SIZE) % 3 < i


def sides(i: int) -> torch.Tensor:
    return torch.where(torch.arange(SIZE) % (i + 2) == 0, 1.0, -1.0).to(torch.get_default_dtype())


def cosine(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
    return F.cosine_embedding_loss(m.scores(x), m.scores(x.flip(1)), y)


def masked_mean(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
    return (m(x)[1].square() * y).mean()


def masked_sum(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
    return (m(x)[1].square() * y).sum()


def annealed(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
    return m.weight * m(x)[1].square().mean() + F.cross_entropy(m(x)[0], y)


def with_hits(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
    scores = m(x)[0]
    return F.cross_entropy(scores, y, reduction="sum"), ((scores.argmax(1) == y) & (y > 4)).double().mean()


@pytest.mark.parametrize(
    ("loss_of", "labels"),
    [(cosine, sides), (masked_mean, empty_mask_first), (masked_sum, empty_mask_first), (annealed, classes)],
    ids=["labels compared for equality", "mean of an empty mask", "sum of an empty mask", "a coefficient of zero"],
)
def test_what_is_zero_in_the_example_has_the_right_factor(loss_of: Any, labels: Any, endpoint: str) -> None:
    check(lambda: work(loss_of, labels), endpoint)


def test_a_mean_beside_a_summed_loss_has_its_own_factor_though_nothing_counts_in_the_example(endpoint: str) -> None:
    """No sample of the example has a label that is counted."""
    check(lambda: work(with_hits, lambda i: torch.arange(SIZE) * i % CLASSES), endpoint)


def refused(loss_of: Any, labels: Any, endpoint: str) -> errors.NotSplittable:
    one = work(loss_of, labels)
    ((step, example),) = one.functions
    with pytest.raises(errors.NotSplittable) as error:
        client.submit(
            step, example=example, model=one.models, optimizer=one.optimizers, microbatches=2, endpoint=endpoint
        )
    return error.value


def test_a_mean_added_to_a_sum_has_its_own_factor_though_it_is_zero_in_the_example(endpoint: str) -> None:
    def margin(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
        scores, one = m(x)
        return F.cross_entropy(scores, y, reduction="sum") + F.relu(one.tanh() - 0.9 + 4 * m.weight).mean()

    check(lambda: work(margin, classes), endpoint)


def test_a_factor_of_zero_in_the_code_hides_nothing(endpoint: str) -> None:
    def switched_off(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
        scores, one = m(x)
        return F.cross_entropy(scores, y) + 0.0 * one.square().mean()

    check(lambda: work(switched_off, classes), endpoint)


@pytest.mark.parametrize("mixing", [torch.softmax, torch.cumsum], ids=["softmax", "cumsum"])
def test_samples_are_seen_to_mix_though_all_are_the_same_in_the_example(mixing: Any, endpoint: str) -> None:
    def weighted(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
        return (F.cross_entropy(m(x)[0], y * 0, reduction="none") * mixing(y.double(), 0)).mean()

    assert "mixes samples" in refused(weighted, lambda i: torch.full((SIZE,), i + 1), endpoint).message


def penalty(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
    scores = m.scores(x)
    return F.cross_entropy(scores, y) + F.relu(scores.abs() - 50).sum()


def from_a_step_on(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
    scores, one = m(x)
    return F.cross_entropy(scores, y) + torch.where(m.weight > 0.15, one.square(), 0.0).sum()


def never_negative(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
    scores, one = m(x)
    off = one.square() - 90
    return F.cross_entropy(scores, y) + torch.maximum(off, torch.zeros_like(off)).sum()


def test_gradients_of_a_sum_and_a_mean_that_meet_in_one_sample_are_refused(endpoint: str) -> None:
    assert "adds a sum over the batch and a mean" in refused(penalty, classes, endpoint).message


@pytest.mark.parametrize("loss_of", [from_a_step_on, never_negative])
def test_a_sum_of_another_head_is_added_to_a_mean_once_both_are_whole(loss_of: Any, endpoint: str) -> None:
    check(lambda: work(loss_of, classes), endpoint)


def ranking(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
    """The bias of the scores has a gradient of exactly zero."""
    return -F.logsigmoid(m(x)[1] - m(x.flip(1))[1]).mean()


def of_one_class(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
    scores, one = m(x)
    return F.cross_entropy(scores, y) + F.cross_entropy(one[:, None], y * 0)


def idle_expert(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
    scores, one = m(x)
    gates = F.one_hot(y.clamp(max=1), 3).to(x.dtype)
    return F.cross_entropy(scores, y) + (one.square() * gates[:, 2]).mean()


def dead(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
    scores, one = m(x)
    return F.cross_entropy(scores, y) + F.relu(one - 100).mean()


@pytest.mark.parametrize("loss_of", [ranking, of_one_class, idle_expert, dead])
def test_what_is_always_zero_hides_no_factor_and_is_taken(loss_of: Any, endpoint: str) -> None:
    check(lambda: work(loss_of, classes), endpoint)


def test_an_index_that_can_not_vary_hides_no_other_mixing(endpoint: str) -> None:
    """A table of one row takes no other index, so the lengths are varied by themselves."""
    table = nn.Embedding(1, 5)

    def step(x: torch.Tensor, kind: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return ((table(kind) * x).sum(1) * lengths.double().softmax(0)).sum()

    example = torch.randn(SIZE, 5), torch.zeros(SIZE, dtype=torch.long), torch.full((SIZE,), 7)
    with pytest.raises(errors.NotSplittable, match="mixes samples"):
        client.submit(step, example=example, model=table, microbatches=2, endpoint=endpoint)


def test_results_that_do_not_show_their_order_are_not_put_together(endpoint: str) -> None:
    """Time before batch, flattened: parts alternate, which a mask that holds nowhere does not show."""
    model = nn.Linear(5, 1)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return y.t().flatten() == 9

    example = torch.randn(4, 5), torch.zeros(4, 3, dtype=torch.long)
    with pytest.raises(errors.NotSplittable, match="can't be put together"):
        client.submit(step, example=example, model=model, microbatches=2, endpoint=endpoint)


def ignored(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
    """A second loss over labels that the example lacks."""
    scores = m.scores(x)
    special = torch.where(y == 5, y, -100)
    return F.cross_entropy(scores, y) + F.cross_entropy(scores, special, reduction="sum")


def test_a_loss_over_labels_that_the_example_lacks_is_refused_beside_a_mean(endpoint: str) -> None:
    refused(ignored, lambda i: torch.zeros(SIZE, dtype=torch.long) + (i > 0) * 5, endpoint)


def consistent(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
    scores = m.scores(x)
    return F.cross_entropy(scores, y) + F.mse_loss(scores, scores.detach())


def test_a_fused_loss_that_is_always_zero_is_taken(endpoint: str) -> None:
    check(lambda: work(consistent, classes), endpoint)


# ---- what the batches after the example show


def large(i: int) -> torch.Tensor:
    """Labels that the losses below take for a scale: 0 in the example."""
    return torch.full((SIZE,), 10 * i)


def scaled(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
    """Numbers that are zero until labels are large, however the model and the labels of the example are varied."""
    return F.relu(0.1 * m(x)[1] + y - 5)


def by_a_constant(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
    return scaled(m, x, y).sum() / torch.tensor(float(x.shape[0]))


def by_a_filled_tensor(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
    return scaled(m, x, y).sum() / torch.full((), float(x.shape[0]))


def by_a_count(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
    return scaled(m, x, y).sum() / (y >= 0).sum() + m(x)[0].square().mean()


def one_minus_a_mean(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
    return 1 - F.cosine_similarity(m.scores(x), m.scores(x.flip(1))).mean() + scaled(m, x, y).mean()


def switched(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
    return torch.where(m.weight > 0.15, m(x)[1].square().sum(), m(x)[0].square().mean())


def gradients_squared(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(scaled(m, x, y).mean(), x, create_graph=True)
    return (gradient * gradient).sum()


def gradients_to_a_power(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(scaled(m, x, y).mean(), x, create_graph=True)
    return gradient.pow(2).sum()


def where_none(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
    return torch.where(y > 5, scaled(m, x, y), torch.zeros_like(x[:, 0])).mean() + m(x)[0].square().mean()


def one_after_the_other(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
    both = torch.zeros(2)
    both[0], both[1] = m(x)[0].square().mean(), scaled(m, x, y).mean()
    return both.sum()


def from_zero_on(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
    total = torch.zeros(())
    for each in (m(x)[0].square(), scaled(m, x, y)):
        total = total + each.sum()
    return total


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "loss_of",
    [
        by_a_constant,
        by_a_filled_tensor,
        by_a_count,
        one_minus_a_mean,
        switched,
        gradients_squared,
        gradients_to_a_power,
        where_none,
        one_after_the_other,
        from_zero_on,
    ],
)
def test_a_loss_that_later_batches_show_is_as_in_the_plain_loop(loss_of: Any, endpoint: str) -> None:
    check(lambda: work(loss_of, large), endpoint)


def tiny(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
    scores, one = m(x)
    return F.cross_entropy(scores, y) + (one - 40).exp().clamp(max=1.0).sum()


def filled(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
    scores, one = m(x)
    both = torch.zeros(2)
    with torch.no_grad():
        both[0], both[1] = F.cross_entropy(scores, y, reduction="sum"), one.square().mean()
    return F.cross_entropy(scores, y), both


def filled_up(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
    scores, one = m(x)
    both = torch.ones(2)
    with torch.no_grad():
        both[0] = one.square().sum()
    return F.cross_entropy(scores, y), both


def regularised(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
    return F.cross_entropy(m(x)[0], y, reduction="sum") + 0.01 * m.scores.weight.abs().sum()


def regularised_later(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
    later = torch.where(m.weight > 0.15, 1.0, 0.0)
    return F.cross_entropy(m(x)[0], y, reduction="sum") + later * m.scores.weight.abs().sum()


def by_rank(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
    return (F.cross_entropy(m(x)[0], y, reduction="none") * (y.argsort().argsort() < 100)).mean()


def up_to_a_number(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
    return (F.cross_entropy(m(x)[0], y, reduction="none") * (y.cumsum(0) < 100)).mean()


def hooked(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """A loss whose gradients are changed one by one, which happens only where they are large."""

    def loss_of(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
        scores = m.scores(x)
        scores.register_hook(change)
        return F.cross_entropy(scores, y)

    return loss_of


def largest(m: TwoHeads, x: torch.Tensor, y: torch.Tensor) -> Any:
    """Only one sample has a number, so that the largest of all is the sum over parts."""
    scores, one = m(x)
    return F.cross_entropy(scores, y), (one.detach().sigmoid() * (y == 1)).amax()


@pytest.mark.every(3)
@pytest.mark.parametrize("loss_of", [tiny, filled, filled_up, regularised, regularised_later])
def test_what_is_added_to_a_sum_otherwise_than_in_parts_is_added_once_it_is_whole(loss_of: Any, endpoint: str) -> None:
    check(lambda: work(loss_of, classes), endpoint)


@pytest.mark.parametrize(
    ("loss_of", "why"),
    [
        (by_rank, "mixes samples"),
        (up_to_a_number, "mixes samples"),
        (hooked(lambda g: g.clamp(-9.0, 9.0)), "clamp is not linear"),
        (hooked(lambda g: torch.where(g.abs() > 9.0, 0.0, g)), "gt is not linear"),
        (hooked(lambda g: (g * 1e-6).tanh()), "tanh is not linear"),
        (largest, "neither the sum nor the mean"),
    ],
)
def test_what_later_batches_would_show_to_be_wrong_is_refused(loss_of: Any, why: str, endpoint: str) -> None:
    assert why in refused(loss_of, lambda i: torch.arange(SIZE) % CLASSES * (torch.arange(SIZE) < 2), endpoint).message


def test_gradients_divided_by_how_often_an_index_occurs_are_refused(endpoint: str) -> None:
    """No index of the example occurs twice."""
    table = nn.Embedding(SIZE, 5, scale_grad_by_freq=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)

    def step(kind: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = table(kind).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    example = (torch.arange(SIZE),)
    with pytest.raises(errors.NotSplittable, match="how often each index occurs"):
        client.submit(step, example=example, model=table, optimizer=optimizer, microbatches=2, endpoint=endpoint)
