"""Optimizers whose groups hold tensors that they count in, and steps that measure in inference mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpumux import client, errors
from tests.client.parity import Work, batches, check, simple_loop

DATA = batches((6, 8), classes=4)


class Counting(torch.optim.Optimizer):
    """Counts in a tensor of its group, made at the first step, as timm's Lamb does, and decays its rate, a tensor."""

    def __init__(self, params: Any, lr: float | Tensor = 0.1, anew: bool = False) -> None:
        super().__init__(params, {"lr": lr, "anew": anew})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if "count" not in group:
                group["count"] = torch.tensor(0.0)
            group["count"].add_(1)
            if isinstance(group["lr"], Tensor):
                if group["anew"]:
                    group["lr"] = group["lr"] * 0.5
                else:
                    group["lr"].mul_(0.5)
            rate = group["lr"].item() if isinstance(group["lr"], Tensor) else group["lr"]
            for p in group["params"]:
                p.sub_(p.grad, alpha=rate / (1 - 0.9 ** group["count"].item()))


def work(**options: Any) -> tuple[Work, Counting]:
    model = nn.Linear(8, 4)
    optimizer = Counting(model.parameters(), **options)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Work([model], [optimizer], [(step, DATA[0])], simple_loop(DATA, 6)), optimizer


@pytest.mark.parametrize("options", [{}, {"lr": 0.2}, {"lr": 0.2, "anew": True}])
def test_an_optimizer_counts_in_a_tensor_of_its_group(options: dict[str, Any], endpoint: str) -> None:
    def make() -> Work:
        own = dict(options) | ({"lr": torch.tensor(options["lr"])} if "lr" in options else {})
        made, optimizer = work(**own)
        rate = own.get("lr", torch.zeros(()))

        def loop(run: Any) -> list[Any]:
            found = [run(*DATA[i % 3]) for i in range(4)]
            group = optimizer.param_groups[0]
            return [*found, group["count"].clone(), group["lr"], rate.clone(), run(*DATA[0]), group["count"].clone()]

        made.loop = loop
        return made

    check(make, endpoint)


def test_a_tensor_of_a_group_that_the_daemon_computes_is_refused(endpoint: str) -> None:
    made, optimizer = work(lr=torch.tensor(0.1))
    plain = made.functions[0][0]

    def step(x: Tensor, y: Tensor) -> Any:
        optimizer.param_groups[0]["lr"] = x.sum()
        return plain(x, y)

    with pytest.raises(errors.CaptureError):
        client.submit(step, example=DATA[0], model=made.models[0], optimizer=optimizer, endpoint=endpoint)


def accuracy(logits: Tensor, target: Tensor, topk: tuple[int, ...]) -> list[Tensor]:
    """As torchvision's reference scripts have it."""
    with torch.inference_mode():
        _, found = logits.topk(max(topk), 1, True, True)
        correct = found.t().eq(target[None])
        return [correct[:k].flatten().sum(dtype=torch.float32) * (100.0 / target.size(0)) for k in topk]


def test_a_step_measures_in_inference_mode(endpoint: str) -> None:
    def make() -> Work:
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(x: Tensor, y: Tensor) -> Any:
            out = model(x)
            loss = F.cross_entropy(out, y, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.inference_mode():
                after = F.cross_entropy(model(x.reshape(-1, 8)), y)
            return [loss, after, *accuracy(out, y, (1, 2))]

        return Work([model], [optimizer], [(step, DATA[0])], simple_loop(DATA, 4))

    check(make, endpoint)
