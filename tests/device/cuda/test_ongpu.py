"""Steps traced as a GPU runs them, carried out by a daemon that has one (of host memory, with a GPU's kernels written out)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from gpumux.client.ongpu import as_on_a_gpu
from gpumux.client.patches import RngTape
from tests.client.parity import Work, batches, plain, simple_loop, through
from tests.device.cuda.kernels import of_a_gpu
from tests.device.cuda.test_client import close, serving

STEPS = 4  # two operator by operator, then captured pieces


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with serving() as (endpoint, _):
        yield endpoint


def training(
    net: Callable[[], nn.Module],
    shape: tuple[int, ...] = (4, 3, 16),
    dtype: torch.dtype = torch.float64,
    momentum: float = 0.9,
) -> Callable[[], Work]:
    def make() -> Work:
        model = net().to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
        data = [(x.to(dtype), y) for x, y in batches(shape)]

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        return Work([model], [optimizer], [(step, data[0])], simple_loop(data, STEPS))

    return make


class Recurrent(nn.Module):
    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.layers = kind(16, 12, 2, **options)
        self.out = nn.Linear(12 * (2 if options.get("bidirectional") else 1), 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layers(x)[0]
        return self.out(out.mean(1) if self.layers.batch_first else out.mean(0)[:1].expand(x.shape[0], -1))


class Cells(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.lstm, self.gru, self.out = nn.LSTMCell(16, 12, bias), nn.GRUCell(12, 12, bias), nn.Linear(12, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = c = g = x.new_zeros(x.shape[0], 12)
        for row in x.unbind(1):
            h, c = self.lstm(row, (h, c))
            g = self.gru(h, g)
        return self.out(g)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.bare = nn.RMSNorm(16), nn.RMSNorm((3, 16), elementwise_affine=False)
        self.out = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.bare(self.norm(x) + x).mean(1))


class Sampled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.at, self.out = nn.Linear(16, 2), nn.Linear(3, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grid = self.at(x).tanh().unsqueeze(2)
        return self.out(F.grid_sample(x.unsqueeze(1), grid, align_corners=True).flatten(1))


NETS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: Recurrent(nn.LSTM, batch_first=True),
    "lstm, time first": lambda: Recurrent(nn.LSTM),
    "lstm both ways": lambda: Recurrent(nn.LSTM, batch_first=True, bidirectional=True, bias=False),
    "gru": lambda: Recurrent(nn.GRU, batch_first=True),
    "rnn": lambda: Recurrent(nn.RNN, batch_first=True, nonlinearity="relu"),
    "cells": Cells,
    "cells without bias": lambda: Cells(False),
    "rms norm": Normed,
    "grid sample": Sampled,
}


@pytest.mark.parametrize("name", NETS)
def test_training_is_what_it_is_on_the_cpu(name: str, endpoint: str) -> None:
    make = training(NETS[name])
    want, want_state = plain(make)
    got, got_state = through(make, endpoint)
    close(want, got, 1e-9)
    close(want_state, got_state, 1e-9)


class Dropping(nn.Module):
    def __init__(self, recomputed: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 10)
        self.recomputed = recomputed

    def block(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(torch.tanh(self.second(F.dropout(x, 0.3))), 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.first(x))
        x = checkpoint(self.block, x, use_reentrant=False) if self.recomputed else self.block(x)
        return self.out(x.mean(1))


DROPPING: dict[str, Callable[[], nn.Module]] = {
    "dropout": Dropping,
    "dropout, recomputed": lambda: Dropping(True),
    "between layers": lambda: Recurrent(nn.GRU, batch_first=True, dropout=0.4),
}


@pytest.mark.parametrize("name", DROPPING)
def test_masks_are_those_of_a_run_that_drops_as_a_gpu_does(name: str, endpoint: str) -> None:
    """The reference draws with the same operators, in the same order, from a generator of the same seed; whatever it
    computes beside that is the CPU's."""
    make = training(DROPPING[name])
    with of_a_gpu(), as_on_a_gpu(RngTape(), True):
        want, want_state = plain(make)
    got, got_state = through(make, endpoint)
    close(want, got, 1e-9)
    close(want_state, got_state, 1e-9)
    assert len({float(loss) for loss in want}) == STEPS


class Attending(nn.Module):
    def __init__(self, mask: str = "", dropout: float = 0.0, heads: int = 2) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 10)
        self.mask, self.dropout, self.heads = mask, dropout, heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mask = None
        if self.mask:
            allowed = torch.ones(8, 8, dtype=torch.bool, device=x.device).tril()
            mask = allowed if self.mask == "bool" else torch.zeros(8, 8, device=x.device).masked_fill(~allowed, -1e9)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=self.dropout if self.training else 0.0)
        return self.out(out.transpose(1, 2).flatten(2).mean(1))


@pytest.mark.parametrize(
    ("mask", "dropout", "heads"),
    [("bool", 0.0, 2), ("float", 0.0, 1), ("", 0.3, 2), ("bool", 0.2, 2), ("bool", 0.2, 4)],
)
def test_attention_with_a_mask_or_dropout_goes_through_the_fused_operator(
    mask: str, dropout: float, heads: int, endpoint: str
) -> None:
    """In float32, as no fused kernel takes float64. Four heads leave rows of 4, which none takes either."""
    make = training(lambda: Attending(mask, dropout, heads), (4, 8, 16), torch.float32, momentum=0.0)
    with of_a_gpu(), as_on_a_gpu(RngTape(), True):
        want, want_state = plain(make)
    got, got_state = through(make, endpoint)
    close(want, got, 1e-5)
    close(want_state, got_state, 1e-5)
    if not dropout:
        without, _ = plain(make)
        close(without, got, 1e-5)
