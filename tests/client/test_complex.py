"""Complex tensors: conjugates, which torch keeps as flags of views, and products with complex numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gpumux import client
from tests.client.parity import Work, check

LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a product with a number": lambda a, b: (a * 1j).abs().pow(2).mean() + (b.real * (2 + 1j)).abs().mean(),
    "a number by a tensor": lambda a, b: torch.exp(1j * a.real).sub(b / (1 + 2j)).abs().mean(),
    "the imaginary part of a conjugate": lambda a, b: a.conj().imag.sum(),
    "a part of it": lambda a, b: a.conj().imag[:, :3].sum() + b.mH[1:].imag.mean(),
    "of a conjugate that is laid out anew": lambda a, b: a.conj().T.contiguous().imag.mean(),
    "of a conjugate of a conjugate": lambda a, b: a.conj().conj().imag.sum(),
    "of a resolved conjugate": lambda a, b: a.conj().resolve_conj().imag.mean() + torch.resolve_conj(b).imag.sum(),
    "of a copy of a conjugate": lambda a, b: a.conj().clone().imag.mean(),
    "the real part of a conjugate": lambda a, b: a.conj().real.mean() + b.conj().real.pow(2).sum(),
    "a product of matrices": lambda a, b: (a @ b.mH).abs().mean() + (a.mH @ b).imag.sum(),
}


def work(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Work]:
    """A step that returns the loss and its gradients."""

    def make() -> Work:
        parts = nn.Linear(24, 34)

        def step(x: Tensor) -> tuple[Tensor, ...]:
            parts.zero_grad()
            a, b = torch.complex(parts.weight + x, parts.weight - x).chunk(2)
            found = loss(a, b)
            found.backward()
            return found, *(p.grad for p in parts.parameters() if p.grad is not None)

        data = [torch.randn(24, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
        return Work([parts], [], [(step, (data[0],))], lambda run: [run(x) for x in data])

    return make


@pytest.mark.parametrize("name", LOSSES)
def test_complex_losses_have_the_plain_loops_bits(name: str, endpoint: str) -> None:
    check(work(LOSSES[name]), endpoint)


def test_complex_numbers_are_arguments_of_operators(endpoint: str) -> None:
    x = torch.randn(3, 4)

    def step(x: Tensor) -> Tensor:
        return torch.view_as_real((x * 1j + (2 - 1j)) / (1 + 1j))

    with client.submit(step, example=x, endpoint=endpoint) as job:
        assert torch.equal(job.step(x).result(), step(x))
