"""Recurrent layers, each equal to the plain loop bit for bit. torch runs an LSTM through oneDNN, and makes the other
layers of products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from microbench.daemon import running_daemon
from tests.client.parity import Work, batches, check, simple_loop, values
from tests.onednn import skip_without_bfloat16_lstm

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}
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
    """A recurrent layer and a linear one. The result holds the final states, too. With these sizes oneDNN's kernels for
    training and for inference round differently."""

    def __init__(self, kind: Any = nn.LSTM, **options: Any) -> None:
        super().__init__()
        self.layer = kind(33, 33, **options)
        self.out = nn.Linear((options.get("proj_size") or 33) * (2 if options.get("bidirectional") else 1), 10)

    def forward(self, x: torch.Tensor, start: Any = None) -> tuple[torch.Tensor, list[torch.Tensor]]:
        out, end = self.layer(x, start)
        last = out[:, -1] if self.layer.batch_first else out[-1]
        return self.out(last), [*end] if isinstance(end, tuple) else [end]


def trained(kind: Any = nn.LSTM, optimizer: str = "adam", dtype: torch.dtype = torch.float32, **options: Any) -> Work:
    model = Tagger(kind, **options).to(dtype)
    opt = OPTIMIZERS[optimizer](model.parameters())
    data = [(x.to(dtype), y) for x, y in batches((4, 3, 33))]
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


@pytest.mark.every(5)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("options", LAYERS)
def test_an_lstm(options: str, optimizer: str, endpoint: str) -> None:
    check(lambda: trained(optimizer=optimizer, **LAYERS[options]), endpoint)


@pytest.mark.every(3)
@pytest.mark.parametrize("options", ["plain", "no bias", "all"])
def test_an_lstm_in_bfloat16(options: str, endpoint: str) -> None:
    check(lambda: trained(dtype=torch.bfloat16, **LAYERS[options]), endpoint)


@pytest.mark.every(6)
@pytest.mark.parametrize("options", ["plain", "no bias", "all"])
@pytest.mark.parametrize("kind", ["gru", "rnn"])
def test_layers_that_torch_makes_of_products(kind: str, options: str, endpoint: str) -> None:
    check(lambda: trained(KINDS[kind], **LAYERS[options]), endpoint)


@pytest.mark.extended
def test_an_lstm_with_two_threads() -> None:
    with running_daemon(threads=2) as daemon:
        check(lambda: trained(bidirectional=True), daemon.endpoint, threads=2)


Forward = Callable[[Tagger, torch.Tensor], torch.Tensor]


def in_autocast(model: Tagger, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(x)[0]


def recomputed(model: Tagger, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = checkpoint(lambda x: model(x)[0], x, use_reentrant=False)
    return out


def without_gradients_of_the_layer(model: Tagger, x: torch.Tensor) -> torch.Tensor:
    model.layer.requires_grad_(False)
    return model(x)[0]


def of_one_sample(model: Tagger, x: torch.Tensor) -> torch.Tensor:
    out, _ = model.layer(x[:, 0])
    return model.out(out[-1:]).expand(x.shape[1], -1)


def from_one_state_for_both(model: Tagger, x: torch.Tensor) -> torch.Tensor:
    start = model.layer.weight_hh_l0[:4].tanh()[None].contiguous()
    return model(x, (start, start))[0]


def twice(model: Tagger, x: torch.Tensor) -> torch.Tensor:
    _, (h, c) = model.layer(x)
    return model(x.flip(0), (h, c))[0]


FORWARDS: dict[str, Forward] = {
    "autocast": in_autocast,
    "recomputed": recomputed,
    "frozen": without_gradients_of_the_layer,
    "one sample": of_one_sample,
    "one state": from_one_state_for_both,
    "twice": twice,
}


@pytest.mark.every(3)
@pytest.mark.parametrize("forward", FORWARDS)
def test_ways_to_use_an_lstm(forward: str, endpoint: str) -> None:
    if forward == "autocast":
        skip_without_bfloat16_lstm()

    def make() -> Work:
        model = Tagger()
        opt = OPTIMIZERS["adam"](model.parameters())
        data = batches((4, 3, 33))
        run = FORWARDS[forward]

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            opt.zero_grad()
            loss = F.cross_entropy(run(model, x.transpose(0, 1)).float(), y)
            loss.backward()
            opt.step()
            return loss

        return Work([model], [opt], [(step, data[0])], simple_loop(data))

    check(make, endpoint)


def test_gradients_of_an_lstms_gradients(endpoint: str) -> None:
    def make() -> Work:
        model = Tagger()
        opt = OPTIMIZERS["momentum"](model.parameters())
        data = batches((4, 3, 33))

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            opt.zero_grad()
            loss = F.cross_entropy(model(x.transpose(0, 1))[0], y)
            grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            (loss + sum(grad.square().sum() for grad in grads)).backward()
            opt.step()
            return loss

        return Work([model], [opt], [(step, data[0])], simple_loop(data, 8))

    check(make, endpoint)


def test_a_state_that_goes_from_step_to_step(endpoint: str) -> None:
    """Returned and given again, as in truncated backpropagation through time."""

    def make() -> Work:
        model = Tagger(num_layers=2)
        opt = OPTIMIZERS["adam"](model.parameters())
        data = batches((4, 3, 33))
        zeros = torch.zeros(2, 4, 33)

        def step(x: torch.Tensor, y: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> Any:
            opt.zero_grad()
            out, states = model(x.transpose(0, 1), (h, c))
            loss = F.cross_entropy(out, y)
            loss.backward()
            opt.step()
            return loss, *[state.detach() for state in states]

        def loop(step: Any) -> list[Any]:
            h = c = zeros
            results = []
            for i in range(20):
                ((loss, h, c),) = values([step(*data[i % 3], h, c)])
                results.append((loss, h, c))
            return results

        return Work([model], [opt], [(step, (*data[0], zeros, zeros))], loop)

    check(make, endpoint)


def test_a_state_that_a_module_keeps(endpoint: str) -> None:
    class Remembering(Tagger):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("h", torch.zeros(1, 4, 33))
            self.register_buffer("c", torch.zeros(1, 4, 33))

        def remember(self, x: torch.Tensor) -> torch.Tensor:
            out, (h, c) = self(x, (self.h, self.c))
            self.h, self.c = h.detach(), c.detach()
            return out

    def make() -> Work:
        model = Remembering()
        opt = OPTIMIZERS["adam"](model.parameters())
        data = batches((4, 3, 33))

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            opt.zero_grad()
            loss = F.cross_entropy(model.remember(x.transpose(0, 1)), y)
            loss.backward()
            opt.step()
            return loss

        return Work([model], [opt], [(step, data[0])], simple_loop(data))

    check(make, endpoint)
