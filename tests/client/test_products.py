"""Gradients of products, which torch computes by the values of the factors; whole numbers divided by a number; and
layouts on which a matrix product's last bits depend."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from gpumux import client
from gpumux.errors import CaptureError
from tests.client.parity import Work, check

PRODUCTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "of all": lambda x: x.prod(),
    "of all, by the function": lambda x: torch.prod(x),
    "of a dimension": lambda x: x.prod(1),
    "of the last dimension, kept": lambda x: torch.prod(x, dim=-1, keepdim=True),
    "of transposed ones": lambda x: x.transpose(0, 1).prod(0),
    "of one factor": lambda x: x[:, :1].prod(1),
    "running": lambda x: x.cumprod(1),
}


def factors(zeros: int) -> torch.Tensor:
    x = 1.0 + torch.rand(4, 5, generator=torch.Generator().manual_seed(zeros))
    x.view(-1)[: 6 * zeros : 6] = 0.0
    return x


def work(value: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], Work]:
    """A step that returns the gradient of the factors, over batches with no zero, one and two."""

    def make() -> Work:
        scale = nn.Linear(1, 5, bias=False)

        def step(x: torch.Tensor) -> torch.Tensor:
            scale.weight.grad = None
            value(x * scale.weight.view(5)).sum().backward()
            assert scale.weight.grad is not None
            return scale.weight.grad

        data = [factors(zeros) for zeros in (0, 1, 2, 0)]
        return Work([scale], [], [(step, (data[0],))], lambda run: [run(x) for x in data])

    return make


@pytest.mark.parametrize("name", PRODUCTS)
def test_the_gradient_of_a_product_has_the_plain_loops_bits(name: str, endpoint: str):
    check(work(PRODUCTS[name]), endpoint)


@pytest.mark.parametrize("value", [lambda x: x.prod(1, dtype=torch.float64), torch.prod], ids=["type", "name"])
def test_a_product_that_is_not_seen_is_refused(value: Callable[[torch.Tensor], torch.Tensor], endpoint: str):
    make = work(value)()
    (step, example), *_ = make.functions
    with pytest.raises(CaptureError, match="gradient of a product"):
        client.submit(step, example=example, model=make.models[0], endpoint=endpoint)


def test_a_product_without_a_gradient_is_of_any_type(endpoint: str):
    def step(x: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.prod(), torch.prod(x, 1, dtype=torch.float64), n.prod(), n.prod(0, keepdim=True)

    x, n = factors(0), torch.arange(1, 7).view(2, 3)
    with client.submit(step, example=(x, n), endpoint=endpoint) as job:
        for got, want in zip(job.step(x, n).result(), step(x, n), strict=True):
            assert got.dtype == want.dtype
            assert torch.equal(got, want)


def test_whole_numbers_are_divided_by_a_number(endpoint: str):
    """As the positions of tokens are by the number of experts for each."""

    def step(n: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return n // 2, n // -3, torch.floor_divide(n, 2), x // 0.3, x // 2

    n, x = torch.arange(-4, 5), torch.linspace(-2.0, 2.0, 9)
    with client.submit(step, example=(n, x), endpoint=endpoint) as job:
        for got, want in zip(job.step(n, x).result(), step(n, x), strict=True):
            assert got.dtype == want.dtype
            assert torch.equal(got, want)


def test_pooling_by_attention_has_the_plain_loops_bits(endpoint: str):
    """The gradient of einsum is viewed in its own shape, which gives a dimension of one element another stride, by
    which BLAS chooses its way to multiply (the head of a Compact Convolutional Transformer)."""

    def make() -> Work:
        model = nn.ModuleDict({"score": nn.Linear(32, 1), "out": nn.Linear(32, 10)})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            weights = model["score"](x).softmax(dim=1)
            pooled = torch.einsum("b n i, b n d -> b d", weights, x)
            loss = nn.functional.cross_entropy(model["out"](pooled), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss

        g = torch.Generator().manual_seed(3)
        data = [(torch.randn(2, 64, 32, generator=g), torch.randint(0, 10, (2,), generator=g)) for _ in range(20)]
        return Work([model], [optimizer], [(step, data[0])], lambda run: [run(*batch) for batch in data])

    check(make, endpoint)
