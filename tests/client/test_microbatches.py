"""`microbatches=k`: a split step stays within the stated tolerance of the whole one, or is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import nn

from gpumux import client
from tests.client.parity import Work, batches, plain, simple_loop, through


def assert_close(a: Any, b: Any, what: str, tolerance: float) -> None:
    """Equal structure, and every tensor within `tolerance` of its largest element."""
    la, sa = pytree.tree_flatten_with_path(a)
    lb, sb = pytree.tree_flatten_with_path(b)
    assert str(sa) == str(sb), f"{what}: another structure"
    for (path, x), (_, y) in zip(la, lb, strict=True):
        where = f"{what}{pytree.keystr(path)}"
        if isinstance(x, torch.Tensor):
            assert (x.dtype, x.shape) == (y.dtype, y.shape), where
            if x.is_floating_point() and x.numel():
                off = float((x.double() - y.double()).abs().max()) / max(float(x.double().abs().max()), 1e-12)
                assert off <= tolerance, f"{where} is off by {off}"
            else:
                assert torch.equal(x, y), where
        else:
            assert x == y or repr(x) == repr(y), f"{where}: {x!r} is not {y!r}"


def check(make: Callable[[], Work], endpoint: str, tolerance: float = 1e-9) -> list[Any]:
    """The plain loop on whole batches, and the split one. In float64, where nothing but the order of sums differs."""
    before = torch.get_default_dtype()
    if tolerance < 1e-6:
        torch.set_default_dtype(torch.float64)
    try:
        want, want_states = plain(make)
        got, got_states = through(make, endpoint)
    finally:
        torch.set_default_dtype(before)
    assert_close(want, got, "results", tolerance)
    assert_close(want_states, got_states, "state", tolerance)
    return got


def data_of(*shapes: tuple[int, ...], **options: Any) -> list[tuple[torch.Tensor, ...]]:
    return [
        tuple(t.to(torch.get_default_dtype()) if t.is_floating_point() else t for t in batch)
        for batch in batches(*shapes, **options)
    ]


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 10))


def classify(model: nn.Module, opt: Any, data: Any, each: Any = None, **options: Any) -> Work:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        return loss

    return Work([model], [opt], [(step, data[0])], simple_loop(data, 12, each), {"microbatches": 4, **options})


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5, foreach=False),
        lambda p: torch.optim.Adam(p, lr=1e-2),
        lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True, foreach=False),
        lambda p: torch.optim.RMSprop(p, lr=1e-2, centered=True),
    ],
    ids=["sgd", "nesterov", "dampening", "adam", "amsgrad", "rmsprop"],
)
def test_optimizers(optimizer: Any, endpoint: str) -> None:
    def make() -> Work:
        model = mlp()
        return classify(model, optimizer(model.parameters()), data_of((8, 12)))

    check(make, endpoint)
