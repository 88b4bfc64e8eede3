"""Values that Python could change between two steps are followed or refused, in every place where code finds them.

Each case trains a few steps, changes one thing, and trains on; plain and through the daemon must agree
bit for bit.
"""

from __future__ import annotations

import enum
import functools
import os
import types
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.client.parity import Work, check
from tests.client.python_changes import held, net, work

SCALE = 1.0
ACTIVATION: Callable[[torch.Tensor], torch.Tensor] = F.relu


class Mode(enum.Enum):
    A = 1
    B = 2


@dataclass
class Config:
    scale: float = 1.0


class Net(nn.Module):
    gain = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.body = net()
        self.act: Callable[[torch.Tensor], torch.Tensor] = F.relu
        self.mode = Mode.A
        self.config = Config()

    def helper(self, out: torch.Tensor) -> torch.Tensor:
        return out * SCALE

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.act(self.helper(self.body(x))) * self.gain * self.config.scale
        return out if self.mode is Mode.A else -out


def set_global(value: float) -> None:
    global SCALE
    SCALE = value


def in_module(change: Callable[[Net], None]) -> Callable[[], Work]:
    def make() -> Work:
        set_global(1.0)
        Net.gain = 1.0
        model = Net()
        return work(model, lambda x, y: F.cross_entropy(model(x), y), lambda: change(model))

    return make


def rebound() -> Work:
    model, config = net(), Config(1.0)

    def change() -> None:
        nonlocal config
        config = Config(2.0)

    return work(model, lambda x, y: F.cross_entropy(model(x), y) * config.scale, change)


def through_partial() -> Work:
    model, config = net(), Config()

    def loss(config: Config, x: torch.Tensor, y: torch.Tensor, *, extra: Config = config) -> torch.Tensor:
        return F.cross_entropy(model(x), y) * config.scale * extra.scale

    return work(model, functools.partial(loss, config), lambda: setattr(config, "scale", 2.0))


def callable_object() -> Work:
    model = net()

    class Loss:
        def __init__(self) -> None:
            self.scale = 1.0
            self.calls_outside = 0

        def __call__(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(model(x), y) * self.scale

    loss = Loss()

    def change() -> None:
        loss.calls_outside += 1  # the step does not read it
        loss.scale = 3.0

    return work(model, loss, change)


def decorated() -> Work:
    model, factor = net(), [1.0]

    def scaled(fn: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(fn)
        def inner(*args: Any) -> torch.Tensor:
            return fn(*args) * factor[0]

        return inner

    @scaled
    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), y)

    return work(model, loss, lambda: factor.__setitem__(0, 2.0))


def environment() -> Work:
    model = net()
    os.environ["MY_SCALE"] = "1"
    return work(
        model, lambda x, y: F.cross_entropy(model(x), y) * float(os.environ["MY_SCALE"]),
        lambda: os.environ.__setitem__("MY_SCALE", "2"),
    )  # fmt: skip


def parameter_hook() -> Work:
    model, scale = net(), Config()
    model[0].weight.register_hook(lambda g: g * scale.scale)
    return work(model, lambda x, y: F.cross_entropy(model(x), y), lambda: setattr(scale, "scale", 0.5))


def added_hook() -> Work:
    model = net()
    return work(
        model, lambda x, y: F.cross_entropy(model(x), y),
        lambda: model[0].register_forward_hook(lambda m, i, o: o * 2) and None,
    )  # fmt: skip


def optimizer_attribute() -> Work:
    class Mine(torch.optim.SGD):
        factor = 1.0

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(p.grad, alpha=-group["lr"] * self.factor)

    model = net()
    optimizer = Mine(model.parameters(), lr=0.1)
    return work(model, lambda x, y: F.cross_entropy(model(x), y), lambda: setattr(optimizer, "factor", 2.0), optimizer)


def groups_with_everything() -> Work:
    model = net()
    optimizer = torch.optim.AdamW(
        [
            {"params": model[0].parameters(), "lr": 0.01, "weight_decay": 0},
            {"params": model[2].parameters(), "betas": (0.8, 0.99)},
        ],
        lr=0.1,
    )

    def change() -> None:
        optimizer.param_groups[0]["weight_decay"] = 0.1
        optimizer.param_groups[0]["lr"] = 0
        optimizer.param_groups[1]["maximize"] = True
        optimizer.param_groups[1]["betas"] = (0.7, 0.9)

    return work(model, lambda x, y: F.cross_entropy(model(x), y), change, optimizer)


def nan_learning_rate() -> Work:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return work(
        model, lambda x, y: F.cross_entropy(model(x), y),
        lambda: optimizer.param_groups[0].__setitem__("lr", float("nan")), optimizer,
    )  # fmt: skip


CASES: dict[str, Callable[[], Work]] = {
    "global read in a helper method": in_module(lambda m: set_global(2.0)),
    "function attribute": in_module(lambda m: setattr(m, "act", torch.tanh)),
    "enum attribute": in_module(lambda m: setattr(m, "mode", Mode.B)),
    "configuration object's field": in_module(lambda m: setattr(m.config, "scale", 2.0)),
    "configuration object replaced": in_module(lambda m: setattr(m, "config", Config(3.0))),
    "class attribute": in_module(lambda m: setattr(Net, "gain", 2.0)),
    "attribute that hides the class's": in_module(lambda m: setattr(m, "gain", 2.0)),
    "submodule replaced by its like": in_module(lambda m: m.body.__setitem__(1, nn.Tanh())),
    "list element": held(lambda: [1.0, 2.0], lambda t: t[0], lambda t: t.__setitem__(0, 3.0)),
    "deque": held(lambda: deque([1.0]), lambda t: t[0], lambda t: t.__setitem__(0, 3.0)),
    "numpy array": held(lambda: numpy.ones(2), lambda t: float(t[0]), lambda t: t.__setitem__(0, 3.0)),
    "tuple of dicts": held(lambda: ({"a": 1.0},), lambda t: t[0]["a"], lambda t: t[0].__setitem__("a", 3.0)),
    "deep dictionary": held(
        lambda: {"a": {"b": {"c": {"d": {"e": 1.0}}}}}, lambda t: t["a"]["b"]["c"]["d"]["e"],
        lambda t: t["a"]["b"]["c"]["d"].__setitem__("e", 3.0),
    ),
    "lambda in a dictionary": held(
        lambda: {"f": lambda: 1.0}, lambda t: t["f"](), lambda t: t.__setitem__("f", lambda: 3.0)
    ),
    "namespace": held(lambda: types.SimpleNamespace(a=1.0), lambda t: t.a, lambda t: setattr(t, "a", 3.0)),
    "integer that becomes a float": held(lambda: [1], lambda t: t[0], lambda t: t.__setitem__(0, 1.0)),
    "closure variable rebound": rebound,
    "partial and keyword defaults": through_partial,
    "callable object": callable_object,
    "decorator's closure": decorated,
    "environment variable": environment,
    "closure of a parameter's hook": parameter_hook,
    "hook added later": added_hook,
    "optimizer's attribute": optimizer_attribute,
    "groups, betas, flags and zero": groups_with_everything,
    "learning rate of nan": nan_learning_rate,
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.every(2)
def test_a_change_is_followed(case: str, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SCALE", "1")
    monkeypatch.setattr(Net, "gain", 1.0)
    check(CASES[case], endpoint)
