"""Every optimizer, 20 steps and more, equal to the plain loop bit for bit."""

from __future__ import annotations

import math
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpumux import client, errors
from tests.client.parity import Work, batches, check, simple_loop


class Custom(torch.optim.Optimizer):
    """Written as users write them: a Python counter in its state, math.sqrt, new tensors each step."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "beta": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["count"] = 0
                    state["m"] = torch.zeros_like(p)
                state["count"] += 1
                state["m"] = group["beta"] * state["m"] + p.grad
                correction = math.sqrt(1.0 - 0.99 ** state["count"])
                p.data.add_(state["m"], alpha=-group["lr"] * correction)


class Cached(torch.optim.Optimizer):
    """Numbers of a step are computed for its first parameter, and kept in the group for the others: [count, decay,
    size] in turn, as AdaBelief and the first RAdam do it."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "cached": [[None, None, None] for _ in range(3)]})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["m"] = torch.zeros_like(p.data)
                state["step"] += 1
                cached = group["cached"][state["step"] % 3]
                if state["step"] == cached[0]:
                    decay, size = cached[1], cached[2]
                else:
                    cached[0] = state["step"]
                    decay = cached[1] = 0.9 ** state["step"]
                    size = cached[2] = math.sqrt(1.0 - decay) if decay < 0.6 else 1.0 - decay
                state["m"].mul_(decay).add_(p.grad.data)
                p.data.add_(state["m"], alpha=-group["lr"] * size)


optim = torch.optim
OPTIMIZERS = {
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "sgd-momentum": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "sgd-nesterov": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "sgd-dampening": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.3),
    "sgd-foreach": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, foreach=True),
    "sgd-fused": lambda p: optim.SGD(p, lr=0.05, fused=True),
    "sgd-fused-nesterov": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, fused=True),
    "adagrad-fused": lambda p: optim.Adagrad(p, lr=0.05, lr_decay=1e-3, fused=True),
    "adam": lambda p: optim.Adam(p, lr=1e-2),
    "adam-amsgrad": lambda p: optim.Adam(p, lr=1e-2, amsgrad=True),
    "adam-foreach": lambda p: optim.Adam(p, lr=1e-2, foreach=True),
    "adam-fused": lambda p: optim.Adam(p, lr=1e-2, fused=True),
    "adamw": lambda p: optim.AdamW(p, lr=1e-2),
    "adadelta": lambda p: optim.Adadelta(p, lr=0.5),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.05, lr_decay=1e-3),
    "rmsprop": lambda p: optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "nadam": lambda p: optim.NAdam(p, lr=1e-2),
    "radam": lambda p: optim.RAdam(p, lr=1e-2),
    "adamax": lambda p: optim.Adamax(p),
    "rprop": lambda p: optim.Rprop(p, lr=1e-3),
    "asgd": lambda p: optim.ASGD(p, lr=0.05),
    "asgd-averaging": lambda p: optim.ASGD(p, lr=0.05, t0=9, lambd=1e-2, alpha=0.6, foreach=True),
    "custom": Custom,
    "cached": Cached,
}


def work(optimizer: Any, dtype: torch.dtype = torch.float32) -> Work:
    model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 10)).to(dtype)
    opt = optimizer(model.parameters())
    data = [(x.to(dtype), y) for x, y in batches((8, 12))]

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        return loss

    return Work([model], [opt], [(step, data[0])], simple_loop(data, 22))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.every(4)
def test_equal_to_the_plain_loop(name: str, endpoint: str) -> None:
    results = check(lambda: work(OPTIMIZERS[name]), endpoint)
    assert results[-1] != results[0]


@pytest.mark.every(3)
@pytest.mark.parametrize("name", ["sgd-momentum", "sgd-nesterov", "sgd-dampening", "adadelta", "rmsprop", "adamw"])
def test_equal_to_the_plain_loop_in_a_half_type(name: str, endpoint: str) -> None:
    """A number that an operator takes is not rounded to the tensor's type first, as momentum was."""
    check(lambda: work(OPTIMIZERS[name], torch.bfloat16), endpoint)


class InTurn:
    """Schedulers of three kinds, one after the other: a job is captured once for all of them."""

    TURN = 8  # steps

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._steps = 0

    def step(self) -> None:
        if self._steps % self.TURN == 0:
            self._now = self._kinds[self._steps // self.TURN](self._optimizer)
        else:
            self._now.step()
        self._steps += 1

    _kinds = (
        lambda o: optim.lr_scheduler.CosineAnnealingLR(o, 10),
        lambda o: optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=30),  # moves momentum as well
        lambda o: optim.lr_scheduler.StepLR(o, 3, 0.1),
    )


@pytest.mark.every(3)
@pytest.mark.parametrize("name", ["sgd-momentum", "adam", "nadam", "adam-fused", "sgd-fused-nesterov"])
def test_schedulers_feed_lifted_hyperparameters(name: str, endpoint: str) -> None:
    def make() -> Work:
        w = work(OPTIMIZERS[name])
        w.loop = simple_loop(batches((8, 12)), len(InTurn._kinds) * InTurn.TURN, InTurn(w.optimizers[0]).step)
        return w

    check(make, endpoint)


def test_a_tensor_learning_rate_is_followed(endpoint: str) -> None:
    def make() -> Work:
        w = work(lambda p: optim.SGD(p, lr=torch.tensor(0.1), foreach=False))
        data, group = batches((8, 12)), w.optimizers[0].param_groups[0]

        def slower() -> None:
            group["lr"].mul_(0.9)

        w.loop = simple_loop(data, 20, slower)
        return w

    check(make, endpoint)


def test_learning_rates_by_hand_with_numpy(endpoint: str) -> None:
    """numpy's functions give numpy.float64, which is a float but not the wire's."""

    def make() -> Work:
        w = work(lambda p: optim.Adam(p, lr=numpy.float64(0.01), betas=(numpy.float64(0.9), numpy.float64(0.99))))
        data, group = batches((8, 12)), w.optimizers[0].param_groups[0]
        turns = iter(range(20))

        def cosine() -> None:
            group["lr"] = 0.01 * (1 + numpy.cos(next(turns) / 10)) / 2

        w.loop = simple_loop(data, 20, cosine)
        return w

    check(make, endpoint)


@pytest.mark.parametrize(
    ("group", "place"),
    [
        ({"lr": numpy.float32(0.1)}, r"\['lr'\] is a numpy.float32.*Python float"),
        ({"lr": numpy.int64(1)}, r"\['lr'\] is a numpy.int64"),
        ({"betas": (0.9, numpy.float32(0.99))}, r"\['betas'\]\[1\] is a numpy.float32"),
        ({"amsgrad": numpy.bool_(True)}, r"\['amsgrad'\] is a numpy.bool.*Python bool"),
    ],
    ids=["float32", "int64", "in a tuple", "bool"],
)
def test_numpys_other_numbers_are_named(group: dict[str, Any], place: str, endpoint: str) -> None:
    """They round and overflow in ways of their own."""
    w = work(lambda p: optim.Adam(p, lr=0.01))
    w.optimizers[0].param_groups[0].update(group)
    (step, example), *_ = w.functions
    with pytest.raises(errors.CaptureError, match=place):
        client.submit(step, example=example, model=w.models[0], optimizer=w.optimizers[0], endpoint=endpoint)


def test_a_number_that_becomes_numpys_own_is_named(endpoint: str) -> None:
    w = work(lambda p: optim.SGD(p, lr=0.01))
    (step, example), *_ = w.functions
    with client.submit(step, example=example, model=w.models[0], optimizer=w.optimizers[0], endpoint=endpoint) as job:
        job.step(*example)
        w.optimizers[0].param_groups[0]["lr"] = numpy.float32(0.1)
        with pytest.raises(errors.CaptureError, match=r"numpy\.float32"):
            job.step(*example)
        w.optimizers[0].param_groups[0]["lr"] = 0.1
        job.step(*example).result()
        job.sync()


def test_an_integer_that_is_an_operators_default_may_change(endpoint: str) -> None:
    """SGD's dampening is the int 0, by which alpha is the operator's own default."""
    found = []
    for at in (None, endpoint):
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        x, y = torch.randn(4, 6), torch.tensor([0, 1, 2, 0])

        def step(x: torch.Tensor, y: torch.Tensor, model: Any = model, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        def losses(run: Any, optimizer: Any = optimizer) -> list[float]:
            out = []
            for i in range(8):
                optimizer.param_groups[0]["dampening"] = 0 if i < 3 else 0.5
                out.append(run(x, y).item())
            return out

        if at is None:
            found.append(losses(step))
        else:
            with client.submit(step, example=(x, y), model=model, optimizer=optimizer, endpoint=at) as job:
                found.append(losses(job.step))
    assert found[1] == found[0]


class CachedConstant(Cached):
    """From the second step on it leaves a constant in its group, which is no formula of a number and can't be kept."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                if self.state[p]["step"] > 1:
                    group["cached"][2][2] = "later"


def test_what_the_first_trace_kept_is_put_back_when_a_later_one_is_refused(endpoint: str) -> None:
    made = work(CachedConstant)
    (step, example), group = made.functions[0], made.optimizers[0].param_groups[0]
    with pytest.raises(errors.NotRepeatable, match=r"\['cached'\]"):
        client.submit(step, example=example, model=made.models, optimizer=made.optimizers, endpoint=endpoint)
    assert group["cached"] == [[None, None, None]] * 3
    assert not made.optimizers[0].state
