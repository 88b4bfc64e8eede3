"""Dimensions of size 1 have any stride, so merged with the model dimension they are views where others are copies:
every rule trains what serial training trains where its dimensions are 1."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuse.serial import batches, check, steady

nn, F = torch.nn, torch.nn.functional
SIZE = st.integers(1, 2)
STEPS = 2


def loss(out: torch.Tensor) -> torch.Tensor:
    """Its gradient has the layout of the layer's result, merged a view of the models side by side."""
    return F.mse_loss(out, torch.ones_like(out))


class Of(nn.Module):
    """A function of a layer's result, and of a parameter as large as it."""

    def __init__(self, first: nn.Module, function: Callable[..., torch.Tensor], *size: int) -> None:
        super().__init__()
        self.first, self.function = first, function
        self.weight = nn.Parameter(torch.randn(*size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.first(x), self.weight)


def spatial(channels: int, space: int) -> dict[str, Callable[[], nn.Module]]:
    def conv(to: int = channels) -> nn.Module:
        return nn.Conv2d(channels, to, 1)

    return {
        "batch norm first": lambda: nn.Sequential(nn.BatchNorm2d(channels), conv()),
        "batch norm": lambda: nn.Sequential(conv(), nn.BatchNorm2d(channels)),
        "batch norm to one channel": lambda: nn.Sequential(conv(1), nn.BatchNorm2d(1, affine=False)),
        "group norm": lambda: nn.Sequential(conv(), nn.GroupNorm(1, channels)),
        "instance norm": lambda: nn.Sequential(conv(), nn.InstanceNorm2d(channels, affine=True)),
        "layer norm": lambda: nn.Sequential(conv(), nn.LayerNorm([space, space])),
        "convolution": lambda: nn.Conv2d(channels, 1, 3, padding=1),
        "depthwise": lambda: nn.Conv2d(channels, channels, 3, padding=1, groups=channels),
        "transposed": lambda: nn.ConvTranspose2d(channels, 1, 2),
        "weight norm": lambda: nn.utils.parametrizations.weight_norm(conv()),
        "pooling": lambda: nn.Sequential(conv(), nn.MaxPool2d(2, 1, 1), nn.AvgPool2d(2, 1, 1)),
        "adaptive pooling": lambda: nn.Sequential(conv(), nn.AdaptiveAvgPool2d(1)),
        "upsampling": lambda: nn.Sequential(nn.Upsample(scale_factor=2), conv()),
        "padding": lambda: nn.Sequential(conv(), nn.ReplicationPad2d(1)),
        "one slope a channel": lambda: nn.Sequential(conv(), nn.PReLU(channels)),
    }


def flat(features: int) -> dict[str, Callable[[], nn.Module]]:
    def linear(to: int = features) -> nn.Module:
        return nn.Linear(features, to)

    return {
        "linear": lambda: nn.Sequential(linear(1), nn.Tanh()),
        "batch norm": lambda: nn.Sequential(linear(), nn.BatchNorm1d(features)),
        "batch norm to one feature": lambda: nn.Sequential(linear(1), nn.BatchNorm1d(1)),
        "layer norm": lambda: nn.Sequential(linear(), nn.LayerNorm(features)),
        "bilinear": lambda: Of(linear(), lambda x, w: F.bilinear(x, x, w), 1, features, features),
        "mv": lambda: Of(linear(), torch.mv, features),
        "bmm": lambda: Of(linear(), lambda x, w: x.unsqueeze(1) @ w.expand(len(x), *w.shape), features, 1),
        "dot": lambda: Of(linear(), lambda x, w: torch.dot(x[0], w) + x.sum(1), features),
        "softmax": lambda: nn.Sequential(linear(), nn.LogSoftmax(1)),
    }


@settings(max_examples=4, deadline=None, derandomize=True)
@given(SIZE, SIZE, SIZE)
@pytest.mark.parametrize("kind", list(spatial(1, 1)))
@pytest.mark.every(3)
def test_layers_over_space(kind: str, samples: int, channels: int, space: int):
    if kind == "instance norm":
        space += 1  # torch refuses one value a channel
    if "norm" in kind:
        samples += 1
    check(steady(spatial(channels, space)[kind], loss=loss), batches(samples, channels, space, space, count=STEPS))


@settings(max_examples=4, deadline=None, derandomize=True)
@given(SIZE, SIZE)
@pytest.mark.parametrize("kind", list(flat(1)))
@pytest.mark.every(6)
def test_layers_of_features(kind: str, samples: int, features: int):
    if "norm" in kind:
        samples += 1
    check(steady(flat(features)[kind], loss=loss), batches(samples, features, count=STEPS))


@pytest.mark.every(3)
@settings(max_examples=4, deadline=None, derandomize=True)
@given(SIZE, SIZE)
@pytest.mark.parametrize("function", [F.cross_entropy, F.nll_loss, F.multi_margin_loss])
def test_losses_of_classes(function: Callable[..., torch.Tensor], samples: int, classes: int):
    factory = steady(lambda: nn.Linear(2, classes), loss=function)
    check(factory, batches(samples, 2, classes=classes, count=STEPS))


@settings(max_examples=4, deadline=None, derandomize=True)
@given(SIZE, SIZE, SIZE)
def test_attention_and_embeddings(samples: int, words: int, width: int):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(1, width)
            self.project = nn.Linear(width, 3 * width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.project(x + self.embed(torch.zeros(x.shape[:2], dtype=torch.int64))).chunk(3, -1)
            return F.scaled_dot_product_attention(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1))

    check(steady(Model, loss=loss), batches(samples, words, width, count=STEPS))
