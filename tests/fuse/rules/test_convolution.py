"""Convolutions of all dimensions, fused as groups or side by side, train what serial training trains."""

from __future__ import annotations

import pytest
import torch

from tests.fuse.rules.found import by
from tests.fuse.serial import batches, check, steady

nn = torch.nn

SPACE = {1: (9,), 2: (7, 6), 3: (5, 4, 5)}


def stack(dim: int, transposed: bool) -> nn.Sequential:
    """The first layer sees the common batch, the others the model's own activations; with and without groups and
    biases."""
    kind = getattr(nn, f"Conv{'Transpose' if transposed else ''}{dim}d")
    return nn.Sequential(
        kind(4, 6, 3, padding=1), nn.Tanh(), kind(6, 4, 2, stride=2, groups=2, bias=False), nn.Tanh(),
        kind(4, 3, 2, dilation=2, padding=2),
    )  # fmt: skip


@pytest.mark.covering
@pytest.mark.parametrize("per_model", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dim", SPACE)
def test_convolutions(dim: int, transposed: bool, per_model: bool):
    array = check(steady(lambda: stack(dim, transposed)), batches(2, 4, *SPACE[dim]), per_model=per_model)
    assert by(array, "rule") >= {"convolution", "convolution_backward"}
    assert by(array, "batched", "per-model") == {"mean"}


@pytest.mark.parametrize("transposed", [False, True])
def test_a_first_layer_with_groups(transposed: bool):
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    array = check(steady(lambda: kind(4, 8, 3, groups=4)), batches(2, 4, 5, 5))
    assert by(array, "batched", "per-model") == {"mean"}


def test_one_input_for_all_is_not_copied():
    """The filters are concatenated: the input stays one tensor, and only the convolution touches it."""
    array = check(steady(lambda: nn.Conv2d(3, 4, 3)), batches(2, 3, 6, 6))
    program = array.programs[0]
    sizes = [
        [program.views[ref.view].size for ref in op.args[:2]]
        for op in program.ops if op.target == "aten.convolution.default"
    ]  # fmt: skip
    assert sizes == [[(2, 3, 6, 6), (12, 3, 3, 3)]]
    assert not any(op.target == "aten.clone.default" for op in program.ops)


def test_the_gradient_of_an_input_that_all_models_share():
    """The gradient differs between models: with concatenated filters it would be their sum."""

    class Penalty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Conv2d(3, 4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.detach().requires_grad_()
            out = self.inner(x).square().sum()
            (grad,) = torch.autograd.grad(out, x)
            return self.inner(x + grad.detach() * 0.01)

    array = check(steady(Penalty), batches(2, 3, 6, 6))
    assert by(array, "rule") >= {"convolution", "convolution_backward"}
