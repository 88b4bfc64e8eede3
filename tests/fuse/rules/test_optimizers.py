"""Optimizers over lists, and by masks, train each model with its own numbers as if it were alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.fuse.rules.found import by
from tests.fuse.serial import Config, batches, check, configs, training

nn = torch.nn
O = torch.optim  # noqa: E741


def net() -> nn.Module:
    return nn.Sequential(nn.ConvTranspose1d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(18, 4))


# What each optimizer of torch is called with, once or more often: its several ways through its Python.
EVERY: dict[str, list[dict[str, Any]]] = {
    "ASGD": [{"t0": 2, "weight_decay": 0.1}, {"foreach": True}],
    "Adadelta": [{"weight_decay": 0.1}, {"foreach": True}],
    "Adagrad": [{"foreach": True, "lr_decay": 0.1}, {"fused": True}],
    "Adam": [{"maximize": True}, {"foreach": True, "amsgrad": True, "weight_decay": 0.1}, {"fused": True}],
    "AdamW": [{"amsgrad": True}, {"foreach": True}, {"fused": True}],
    "Adamax": [{"foreach": True, "weight_decay": 0.1}],
    "Muon": [{"weight_decay": 0.1}],
    "NAdam": [{"weight_decay": 0.1, "decoupled_weight_decay": True}, {"foreach": True}],
    "RAdam": [{"weight_decay": 0.1, "decoupled_weight_decay": True}, {"foreach": True}],
    "RMSprop": [{"centered": True, "momentum": 0.9}, {"foreach": True, "weight_decay": 0.1}],
    "Rprop": [{"maximize": True}, {"foreach": True}],
    "SGD": [{"momentum": 0.9, "nesterov": True}, {"foreach": True, "weight_decay": 0.1, "momentum": 0.9},
            {"fused": True}],
}  # fmt: skip
# They decide in Python by what tensors hold, or take sparse gradients alone; nothing of them can be captured.
REFUSED = {"Adafactor", "LBFGS", "SparseAdam"}


def test_every_optimizer_of_torch_is_tried_or_refused():
    found = {
        n for n, c in vars(O).items() if isinstance(c, type) and issubclass(c, O.Optimizer) and c is not O.Optimizer
    }
    assert found - {"Muon"} == (EVERY.keys() | REFUSED) - {"Muon"}  # the oldest torch has no Muon


def flat() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 3, bias=False), nn.Tanh(), nn.Linear(3, 4, bias=False))


@pytest.mark.parametrize(
    ("name", "options"), [(name, options) for name, each in EVERY.items() for options in each],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value)),
)  # fmt: skip
@pytest.mark.every(6)
def test_every_optimizer_trains_each_model_as_if_alone(name: str, options: dict[str, Any]):
    """Without a bias: Muon takes matrices alone."""
    kind = getattr(O, name, None)
    if kind is None:
        pytest.skip(f"this torch has no {name}")
    factory = training(flat, lambda p, c: kind(p, lr=c.lr, **options), nn.CrossEntropyLoss())
    array = check(factory, batches(6, 5, classes=4), given=configs(2))
    together = {t for t in by(array, "per-model") if not t.startswith("_fused_")}
    assert together == set()
    assert bool(by(array, "per-model")) == ("fused" in options)


@pytest.mark.every(2)
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("what", ["norm", "value"])
def test_clipping_is_of_each_model(what: str, foreach: bool):
    """By the norm of its own gradients: in the first model nothing is clipped, in the last all is."""

    def factory(config: Config) -> Any:
        torch.manual_seed(config.seed)
        model = net().double()
        optimizer = O.Adam(model.parameters(), lr=config.lr)
        limit = (100.0, 0.5, 0.01)[config.seed]

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            if what == "norm":
                nn.utils.clip_grad_norm_(model.parameters(), limit, foreach=foreach)
            else:
                nn.utils.clip_grad_value_(model.parameters(), limit, foreach=foreach)
            optimizer.step()
            return loss

        return step, model, optimizer

    array = check(factory, batches(6, 2, 5, classes=4))
    assert by(array, "per-model") == set()
