"""Recurrent layers train what serial training trains: on a CPU torch makes them of products and pointwise operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.fuse.rules.found import by
from tests.fuse.serial import Config, batches, check, steady

nn = torch.nn
LENGTH = 3


class Recurrent(nn.Module):
    """A layer with learnt initial states."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.layer = kind(4, 5, batch_first=True, **options)
        ways = 2 if self.layer.bidirectional else 1
        sizes = [self.layer.proj_size or 5] + [5] * (kind is nn.LSTM)
        self.start = nn.ParameterList([nn.Parameter(torch.randn(ways * self.layer.num_layers, 1, n)) for n in sizes])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        start = [s.expand(-1, x.shape[0], -1).contiguous() for s in self.start]
        out, end = self.layer(x, tuple(start) if len(start) > 1 else start[0])
        return torch.cat([out.flatten(), *[e.flatten() for e in (end if isinstance(end, tuple) else (end,))]])


CASES: dict[str, tuple[type[nn.RNNBase], dict[str, Any]]] = {
    "lstm": (nn.LSTM, {"num_layers": 2, "dropout": 0.3, "bidirectional": True}),
    "lstm, projected": (nn.LSTM, {"proj_size": 2, "bias": False}),
    "gru": (nn.GRU, {"num_layers": 2, "dropout": 0.3}),
    "rnn": (nn.RNN, {"bidirectional": True}),
    "rnn of relu": (nn.RNN, {"nonlinearity": "relu", "bias": False}),
}


@pytest.mark.every(5)
@pytest.mark.parametrize("per_model", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_layers(case: str, per_model: bool):
    kind, options = CASES[case]
    array = check(steady(lambda: Recurrent(kind, **options)), batches(2, LENGTH, 4), per_model=per_model)
    assert by(array, "per-model") == ({"bernoulli_.float"} if "dropout" in options else set())


def test_an_lstm_through_onednn_runs_once_a_model():
    """In single precision. The serial loops of the other tests run in double precision, which oneDNN does not take."""

    def factory(config: Config) -> Any:
        step, model, optimizer = steady(lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True))(config)
        model.float()
        return step, model, optimizer

    data = [(x.float(),) for (x,) in batches(2, LENGTH, 4)]
    for choose in ("fused", "per-model", "measured"):
        array = check(factory, data, tolerance=1e-5, choose=choose)
        assert by(array, "per-model") >= {"mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"}


def test_cells():
    class Cells(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.gru, self.rnn = nn.LSTMCell(4, 5), nn.GRUCell(5, 5), nn.RNNCell(5, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = c = g = r = x.new_zeros(x.shape[0], 5)
            for t in range(LENGTH):
                h, c = self.lstm(x[:, t], (h, c))
                g = self.gru(h, g)
                r = self.rnn(g, r)
            return torch.cat([c, g, r], 1)

    array = check(steady(Cells), batches(2, LENGTH, 4))
    assert by(array, "per-model") == set()
