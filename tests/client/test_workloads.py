"""What a training step may hold, each equal to the plain loop bit for bit over 20 steps or more."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.client.parity import Work, batches, check, simple_loop


def conv_net(dropout: float = 0.2) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(54, 10),
    )


def classify(model: nn.Module, opt: Any, data: Any, **options: Any) -> Work:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        return loss

    return Work([model], [opt], [(step, data[0])], simple_loop(data), options)


def test_batch_norm_dropout_and_clipping_of_a_list_held_elsewhere(endpoint: str) -> None:
    def make() -> Work:
        model = conv_net()
        opt = torch.optim.Adam(model.parameters())
        held = list(model.parameters())  # reached by the closure, not through the module
        data = batches((8, 1, 8, 8))

        def step(x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
            opt.zero_grad(set_to_none=False)
            out = model(x)
            loss = F.cross_entropy(out, y)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(held, 0.5)
            opt.step()
            return {
                "loss": loss,
                "more": [norm, (out.argmax(1) == y).sum()],
                "name": "conv",
                "lr": opt.param_groups[0]["lr"],
            }

        return Work([model], [opt], [(step, data[0])], simple_loop(data))

    results = check(make, endpoint)
    assert results[0]["name"] == "conv"
    assert results[0]["lr"] == 1e-3


def test_autocast(endpoint: str) -> None:
    def make() -> Work:
        model = conv_net()
        opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        data = batches((8, 1, 8, 8))

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            return loss

        return Work([model], [opt], [(step, data[0])], simple_loop(data))

    check(make, endpoint)


def test_tied_weights_and_a_frozen_embedding(endpoint: str) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(20, 16)
            self.position = nn.Embedding(5, 16)
            self.position.weight.requires_grad_(False)
            self.head = nn.Linear(16, 20, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.embed(x) + self.position(torch.arange(x.shape[1]))
            return self.head(torch.tanh(h))

    def make() -> Work:
        model = Tied()
        opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        data = batches((4, 5), classes=20, integer=True)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            opt.zero_grad()
            loss = F.cross_entropy(model(x).flatten(0, 1), x.flatten())
            loss.backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.1)
            opt.step()
            return loss

        return Work([model], [opt], [(step, data[0])], simple_loop(data))

    check(make, endpoint)


def test_parameters_that_are_views_of_one_flat_buffer(endpoint: str) -> None:
    def make() -> Work:
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 10))
        flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        at = 0
        for p in model.parameters():
            p.data = flat[at : at + p.numel()].view_as(p)
            at += p.numel()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        data = batches((8, 6))

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            with torch.no_grad():
                model[0].bias.data.as_strided((flat.numel(),), (1,), 0).mul_(0.999)  # decay all of it at once
            return loss

        return Work([model], [opt], [(step, data[0])], simple_loop(data))

    check(make, endpoint)


def test_checkpointed_dropout_reuses_its_draws(endpoint: str) -> None:
    def make() -> Work:
        first = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Dropout(0.5))
        second = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.3), nn.GELU())
        head = nn.Linear(32, 10)
        model = nn.ModuleList([first, second, head])
        opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
        data = batches((8, 12))

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            opt.zero_grad()
            h = checkpoint(first, x, use_reentrant=False)
            h = F.dropout(checkpoint(second, h, use_reentrant=False), 0.1)
            loss = F.cross_entropy(head(h), y)
            loss.backward()
            opt.step()
            return loss

        return Work([model], [opt], [(step, data[0])], simple_loop(data))

    check(make, endpoint)


def test_reentrant_checkpointing(endpoint: str) -> None:
    def make() -> Work:
        body = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Dropout(0.5))
        model = nn.ModuleList([nn.Linear(12, 12), body, nn.Linear(32, 10)])
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        data = batches((8, 12))

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            opt.zero_grad()
            h = checkpoint(body, model[0](x), use_reentrant=True)
            loss = F.cross_entropy(model[2](h), y)
            loss.backward()
            opt.step()
            return loss

        return Work([model], [opt], [(step, data[0])], simple_loop(data))

    check(make, endpoint)


class Scaled(torch.autograd.Function):
    """A custom function made of aten operators."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return torch.sin(x) * factor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad * torch.cos(x) * ctx.factor * 0.9, None  # not the true gradient, on purpose


def test_custom_autograd_function(endpoint: str) -> None:
    def make() -> Work:
        model = nn.Linear(12, 10)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        data = batches((8, 12))

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            opt.zero_grad()
            loss = F.cross_entropy(Scaled.apply(model(x), 2.0), y)
            loss.backward()
            opt.step()
            return loss

        return Work([model], [opt], [(step, data[0])], simple_loop(data))

    check(make, endpoint)


def test_two_models_and_two_optimizers_in_one_step(endpoint: str) -> None:
    def make() -> Work:
        a, b = nn.Linear(12, 16), nn.Linear(16, 10)
        oa, ob = torch.optim.Adam(a.parameters(), lr=1e-2), torch.optim.SGD(b.parameters(), lr=0.1, momentum=0.9)
        data = batches((8, 12))

        def step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            for o in (oa, ob):
                o.zero_grad()
            h = F.relu(a(x))
            loss = F.cross_entropy(b(h), y)
            loss.backward()
            for o in (oa, ob):
                o.step()
            return loss, h.mean()

        return Work([a, b], [oa, ob], [(step, data[0])], simple_loop(data))

    check(make, endpoint)


def test_gradient_accumulation(endpoint: str) -> None:
    def make() -> Work:
        model = conv_net(0.1)
        opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        data = batches((4, 1, 8, 8))

        def accumulate(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = F.cross_entropy(model(x), y) / 3
            loss.backward()
            return loss

        def apply() -> torch.Tensor:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
            return norm

        def loop(step: Any, update: Any) -> list[Any]:
            out = []
            for i in range(24):
                out.append(step(*data[i % 3]))
                if i % 3 == 2:
                    out.append(update())
            return out

        return Work([model], [opt], [(accumulate, data[0]), (apply, ())], loop)

    check(make, endpoint)


def test_evaluation_between_training_steps(endpoint: str) -> None:
    def make() -> Work:
        model = conv_net()
        opt = torch.optim.Adam(model.parameters())
        data = batches((8, 1, 8, 8))

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            return loss

        def evaluate(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            model.eval()
            with torch.no_grad():
                right = (model(x).argmax(1) == y).float().mean()
            model.train()
            return right

        def loop(train: Any, test: Any) -> list[Any]:
            out = [test(*data[0])]
            for i in range(20):
                out.append(train(*data[i % 3]))
                if i % 5 == 4:
                    out.append(test(*data[0]))
            return out

        return Work([model], [opt], [(step, data[0]), (evaluate, data[0])], loop)

    check(make, endpoint)


def test_a_gan_with_two_steps_over_one_state(endpoint: str) -> None:
    def make() -> Work:
        g = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
        d = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
        og, od = torch.optim.Adam(g.parameters(), lr=1e-3), torch.optim.Adam(d.parameters(), lr=1e-3)
        data = batches((8, 8))
        example = (data[0][0],)

        def discriminate(real: torch.Tensor) -> torch.Tensor:
            od.zero_grad()
            fake = g(torch.randn(real.shape[0], 4)).detach()
            loss = F.softplus(-d(real)).mean() + F.softplus(d(fake)).mean()
            loss.backward()
            od.step()
            return loss

        def generate(real: torch.Tensor) -> torch.Tensor:
            og.zero_grad()
            for p in d.parameters():
                p.requires_grad_(False)
            loss = F.softplus(-d(g(torch.randn(real.shape[0], 4)))).mean()
            loss.backward()
            og.step()
            for p in d.parameters():
                p.requires_grad_(True)
            return loss

        def loop(first: Any, second: Any) -> list[Any]:
            return [f(data[i % 3][0]) for i in range(20) for f in (first, second)]

        return Work([g, d], [og, od], [(discriminate, example), (generate, example)], loop)

    check(make, endpoint)


def test_inference_under_no_grad(endpoint: str) -> None:
    def make() -> Work:
        model = conv_net().eval()
        data = batches((8, 1, 8, 8))

        @torch.no_grad()
        def infer(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return F.softmax(model(x), 1).topk(3)

        def loop(step: Any) -> list[Any]:
            return [step(data[i % 3][0]) for i in range(20)]

        return Work([model], [], [(infer, (data[0][0],))], loop)

    check(make, endpoint)


def test_random_draws_of_every_kind(endpoint: str) -> None:
    def make() -> Work:
        model = nn.Linear(12, 10)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        data = batches((8, 12))

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            opt.zero_grad()
            x = x + 0.1 * torch.randn_like(x) + torch.rand(x.shape[1])
            x = x[torch.randperm(x.shape[0])] * torch.bernoulli(torch.full((12,), 0.7))
            loss = F.cross_entropy(F.rrelu(model(x), training=True) + torch.empty(10).uniform_(-1, 1), y)
            loss.backward()
            opt.step()
            return loss

        return Work([model], [opt], [(step, data[0])], simple_loop(data))

    check(make, endpoint)


def test_channels_last_input_and_model(endpoint: str) -> None:
    def make() -> Work:
        model = conv_net().to(memory_format=torch.channels_last)
        data = [(x.to(memory_format=torch.channels_last), y) for x, y in batches((8, 1, 8, 8))]
        return classify(model, torch.optim.Adam(model.parameters()), data)

    check(make, endpoint)


def test_double_precision_and_a_batch_as_nested_containers(endpoint: str) -> None:
    def make() -> Work:
        model = nn.Linear(12, 10).double()
        opt = torch.optim.Adam(model.parameters())
        data = [({"x": x.double(), "scale": 0.5}, [y]) for x, y in batches((8, 12))]

        def step(batch: dict[str, Any], labels: list[torch.Tensor]) -> torch.Tensor:
            opt.zero_grad()
            loss = F.cross_entropy(model(batch["x"]) * batch["scale"], labels[0])
            loss.backward()
            opt.step()
            return loss

        return Work([model], [opt], [(step, data[0])], simple_loop(data))

    check(make, endpoint)


def test_a_recurrent_network(endpoint: str) -> None:
    def make() -> Work:
        model = nn.ModuleList(
            [nn.GRU(6, 12, batch_first=True), nn.RNN(12, 8, num_layers=2, dropout=0.2), nn.Linear(8, 10)]
        )
        opt = torch.optim.Adam(model.parameters())
        data = batches((4, 5, 6))

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            opt.zero_grad()
            h, _ = model[0](x)
            h, _ = model[1](h.transpose(0, 1))
            loss = F.cross_entropy(model[2](h[-1]), y)
            loss.backward()
            opt.step()
            return loss

        return Work([model], [opt], [(step, data[0])], simple_loop(data))

    check(make, endpoint)


def test_a_buffer_that_is_replaced_instead_of_written(endpoint: str) -> None:
    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(12, 10)
            self.register_buffer("mean", torch.zeros(10))
            self.seen: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.layer(x)
            self.mean = 0.9 * self.mean + 0.1 * out.detach().mean(0)
            self.seen = out.detach()  # left for debugging, never read
            return out - self.mean

    def make() -> Work:
        model = Running()
        return classify(model, torch.optim.SGD(model.parameters(), lr=0.1), batches((8, 12)))

    check(make, endpoint)


def test_an_lstm_without_onednn(endpoint: str) -> None:
    def make() -> Work:
        model = nn.ModuleList([nn.LSTM(6, 12), nn.Linear(12, 10)])
        opt = torch.optim.Adam(model.parameters())
        data = batches((4, 5, 6))

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            opt.zero_grad()
            h, _ = model[0](x.transpose(0, 1))
            loss = F.cross_entropy(model[1](h[-1]), y)
            loss.backward()
            opt.step()
            return loss

        return Work([model], [opt], [(step, data[0])], simple_loop(data))

    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False
    try:
        check(make, endpoint)
    finally:
        torch.backends.mkldnn.enabled = before
