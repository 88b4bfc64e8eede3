"""Recurrent layers, each equal to the plain loop bit for bit: an LSTM through oneDNN, which other layers do not use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.client.parity import Work, batches, check

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}
# Training and inference round differently for some of these sizes.
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False},
    "both ways": {"bidirectional": True},
    "both ways without bias": {"bidirectional": True, "bias": False},
    "two layers": {"num_layers": 2},
    "dropout between layers": {"num_layers": 2, "dropout": 0.3},
    "projected": {"proj_size": 5},
    "all": {"num_layers": 2, "dropout": 0.3, "bidirectional": True, "batch_first": True},
}
KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}


class Tagger(nn.Module):
    """A recurrent layer and a linear one. The result holds the final states, too."""

    def __init__(self, kind: Any = nn.LSTM, **options: Any) -> None:
        super().__init__()
        self.layer = kind(7, 33, **options)
        self.out = nn.Linear((options.get("proj_size") or 33) * (2 if options.get("bidirectional") else 1), 10)

    def forward(self, x: torch.Tensor, start: Any = None) -> tuple[torch.Tensor, list[torch.Tensor]]:
        out, end = self.layer(x, start)
        return self.out(out[:, -1] if self.layer.batch_first else out[-1]), list(end) if isinstance(end, tuple) else [
            end
        ]


def work(kind: Any = nn.LSTM, optimizer: str = "adam", dtype: torch.dtype = torch.float32, **options: Any) -> Work:
    model = Tagger(kind, **options).to(dtype)
    opt = OPTIMIZERS[optimizer](model.parameters())
    data = [(x.to(dtype), y) for x, y in batches((4, 3, 7))]
    first = bool(options.get("batch_first"))

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        opt.zero_grad()
        out, states = model(x if first else x.transpose(0, 1))
        loss = F.cross_entropy(out, y) + sum(state.square().mean() for state in states)
        loss.backward()
        opt.step()
        return loss, states

    def evaluate(x: torch.Tensor, y: torch.Tensor) -> Any:
        model.eval()
        with torch.no_grad():
            out, states = model(x if first else x.transpose(0, 1))
        with_gradients, _ = model(x if first else x.transpose(0, 1))
        model.train()
        return out, states, with_gradients, F.cross_entropy(out, y)

    def loop(step: Any, evaluate: Any) -> list[Any]:
        results = []
        for i in range(20):
            results.append(step(*data[i % 3]))
            if i % 5 == 4:
                results.append(evaluate(*data[0]))
        return results

    return Work([model], [opt], [(step, data[0]), (evaluate, data[0])], loop)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("options", LAYERS)
def test_an_lstm(options: str, optimizer: str, endpoint: str) -> None:
    check(lambda: work(optimizer=optimizer, **LAYERS[options]), endpoint)


@pytest.mark.parametrize("options", ["plain", "no bias", "all"])
def test_an_lstm_in_bfloat16(options: str, endpoint: str) -> None:
    check(lambda: work(dtype=torch.bfloat16, **LAYERS[options]), endpoint)


@pytest.mark.parametrize("options", ["plain", "no bias", "all"])
@pytest.mark.parametrize("kind", ["gru", "rnn"])
def test_layers_that_torch_makes_of_products(kind: str, options: str, endpoint: str) -> None:
    check(lambda: work(KINDS[kind], **LAYERS[options]), endpoint)
