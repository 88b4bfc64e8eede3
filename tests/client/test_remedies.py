"""What an error says to write instead is that of the idiom at its line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from gpumux import client, errors

X, Y = torch.randn(6, 4), torch.randint(0, 3, (6,))
EDGES = torch.randint(0, 6, (2, 9))


def by_size(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    nodes = int(y.max()) + 1
    return torch.zeros(nodes, 3).index_add(0, y, model(x)).sum()


def by_one_hot(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) * F.one_hot(y)).sum()


def over_a_loader(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return sum((model(batch).sum() for batch in DataLoader(x, batch_size=2, shuffle=True)), torch.zeros(()))


def without_loops(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    edge_index = EDGES + 0 * y[0]
    edge_index = edge_index[:, edge_index[0] != edge_index[1]]
    return torch.zeros(6, 3).index_add(0, edge_index[1], model(x)[edge_index[0]]).sum()


def by_a_factor(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    rate = model(x).detach().mean()
    return x.add(x, alpha=rate).sum()


def by_a_skip_list(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The mask of ColBERT's documents."""
    mask = torch.tensor([[float(token not in (1, 2))] for token in y.cpu().tolist()])
    return (model(x) * mask).sum()


@pytest.mark.parametrize(
    ("loss", "remedy"),
    [
        (by_a_skip_list, "read the batch before the step"),
        (by_size, "num_nodes="),
        (by_one_hot, "num_classes="),
        (over_a_loader, "run the loop over the DataLoader around it"),
        (without_loops, "add the self-loops before the step"),
        (by_a_factor, "p.add_(rate * update)"),
    ],
)
def test_a_remedy_is_that_of_the_idiom(loss: Callable[..., Tensor], remedy: str, endpoint: str) -> None:
    model = nn.Linear(4, 3)

    def step(x: Tensor, y: Tensor) -> Any:
        return loss(model, x, y)

    with pytest.raises(errors.DataDependent) as caught:
        client.submit(step, example=(X, Y), model=model, endpoint=endpoint)
    assert remedy in caught.value.remedy
    assert __file__ in caught.value.message


def test_a_tensor_that_a_method_left_is_named_as_its_own(endpoint: str) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model, self.loss = nn.Linear(4, 3), torch.zeros(6)

        def step(self, x: Tensor, y: Tensor) -> Tensor:
            self.loss = F.cross_entropy(self.model(x), y)
            return self.loss * 2

    trainer = Trainer()
    with client.submit(trainer.step, example=(X, Y), model=trainer.model, endpoint=endpoint) as job:
        job.step(X, Y).result()
        with pytest.raises(errors.StaleState, match=r"^self\.loss was set by a step"):
            trainer.loss.item()


def test_texts_that_a_step_takes_from_its_batch_are_set_in_the_loop(endpoint: str) -> None:
    class Trainer:
        paths: list[str] | None = None

        def step(self, x: Tensor, paths: list[str]) -> Tensor:
            self.paths = paths
            return x * 2

    trainer = Trainer()
    with (
        pytest.raises(errors.NotRepeatable, match="set these in the loop") as caught,
        client.submit(trainer.step, example=(X, ["0.png"]), endpoint=endpoint) as job,
    ):
        job.step(X, ["1.png"]).result()
    assert "self.paths" in caught.value.message


class Drawn(Tensor):
    """As the inputs of BigGAN's generator are: a class of one's own, which draws into itself."""


@pytest.mark.parametrize("use", [lambda z: z[:2], lambda z: z * 2], ids=["a part", "a product"])
def test_a_tensor_of_a_class_of_ones_own_in_a_variable_is_named(use: Callable[[Tensor], Tensor], endpoint: str) -> None:
    z = torch.randn(6, 4).as_subclass(Drawn)
    with pytest.raises(errors.CaptureError, match="a tensor of the class Drawn") as caught:
        client.submit(lambda x: x.sum() + use(z).sum(), example=(X,), endpoint=endpoint)
    assert "as_subclass(torch.Tensor)" in caught.value.remedy
    assert __file__ in caught.value.message


def test_an_attribute_that_the_step_makes_is_given_a_first_value(endpoint: str) -> None:
    """As SphereFace's annealing: a counter, and what is computed of it in a new attribute."""

    class Head(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.lamb = max(5.0, 1000.0 / (1 + 0.1 * self.calls))
            return super().forward(x) / self.lamb

    model = Head(4, 3)
    model.calls = 0

    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x).sum()
        return loss

    with pytest.raises(errors.NotRepeatable) as caught:
        client.submit(step, example=(X,), model=model, endpoint=endpoint)
    assert "self.lamb = 0.0" in caught.value.remedy
    model.lamb, model.calls = 0.0, 0
    with client.submit(step, example=(X,), model=model, endpoint=endpoint) as job:
        got = [(job.step(X).item(), model.lamb) for _ in range(3)]
    model.calls = 0
    assert got == [(step(X).item(), model.lamb) for _ in range(3)]


def test_an_optimizer_in_the_place_of_another_is_submitted_again(endpoint: str) -> None:
    model = nn.Linear(4, 3)
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters())

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).sum()
        loss.backward()
        optimizer.step()
        return loss

    with client.submit(step, example=(X,), model=model, optimizer=optimizer, endpoint=endpoint) as job:
        job.step(X)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with pytest.raises(errors.CaptureError) as caught:
            job.step(X)
        assert "close the job and submit the step again" in caught.value.remedy


def test_the_warning_of_many_captures_compares_with_a_batch_of_the_same_shape(
    endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A flag that changes at each epoch, and a smaller last batch: the flag is what differs."""
    model, flags = nn.Linear(4, 3), {"mode": "0"}

    def step(x: Tensor) -> Tensor:
        return model(x).sum() * len(flags["mode"])

    with client.submit(step, example=(X,), model=model, endpoint=endpoint) as job:
        for epoch in range(3):
            flags["mode"] = "0" * (epoch + 1)
            job.step(X)
            job.step(X[:2])
    said = [r.getMessage() for r in caplog.records if "combination of batch shapes" in r.getMessage()]
    assert len(said) == 1
    assert "flags['mode']" in said[0]
    assert "Pad batches" not in said[0]
