"""What a step does at its first call only, counters and flags, and state that it carries on in containers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clients.compatibility.parts import batches_of, classifier, usual_step
from clients.compatibility.suite import Train, idiom
from gpumux.errors import CaptureError, DataDependent, NotRepeatable


def _trained(train: Train, model: nn.Module) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = batches_of()
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    return [run(x, y).item() for x, y in batches], model


class _Ready(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)
        self.ready = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.mask = (torch.arange(4) % 2).float()
            self.ready = True
        found: Tensor = self.inner(x) * self.mask
        return found


@idiom("a mask made at the first use, marked by a flag: if not self.ready: self.mask = ...; self.ready = True")
def ready(train: Train) -> Any:
    return _trained(train, _Ready())


class _Counted(nn.Module):
    first = True
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        found: Tensor = self.inner(x) * (2.0 if self.first else 1.0) / self.calls
        self.first = False
        return found


@idiom("a flag and a counter with their first values in the class: first = True, calls = 0, and self.calls += 1")
def in_the_class(train: Train) -> Any:
    model = _Counted()
    found = _trained(train, model)
    return found, model.calls, model.first


class _Lazy(nn.Module):
    scale: float | None = None

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x)
        if self.scale is None:
            self.scale = x.shape[1] ** -0.5
            return found
        return found * self.scale


@idiom("a number made at the first call, which computes otherwise: if self.scale is None: self.scale = ...; return out")
def lazy_number(train: Train) -> Any:
    return _trained(train, _Lazy())


class _Sized(nn.Module):
    def __init__(self, before_submit: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)
        self.mask: Tensor | None = None
        self.scales: dict[str, float] = {}
        if before_submit:
            self.scales["output"] = 0.5

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x)
        if self.mask is None:
            self.mask = torch.triu(torch.ones(6, 4))
        if "output" not in self.scales:
            self.scales["output"] = 0.5
            return found * self.mask
        return found * self.mask * self.scales["output"]


def scales_before_submit(train: Train) -> Any:
    return _trained(train, _Sized(before_submit=True))


@idiom(
    "a dictionary filled at the first call beside a cached mask, where that call computes otherwise",
    refused=NotRepeatable,
    instead="fill it before you submit, or decide by a flag",
    changed=scales_before_submit,
)
def scales_at_the_first_call(train: Train) -> Any:
    return _trained(train, _Sized(before_submit=False))


class _Slopes(nn.Module):
    slopes: Tensor
    bias: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)
        self.register_buffer("slopes", torch.tensor([0.5, 0.25, 0.125, 0.0625]), persistent=False)
        self.register_buffer("bias", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None or self.bias.shape[0] < x.shape[0]:
            distance = -torch.arange(x.shape[0], dtype=torch.float32).unsqueeze(1)
            self.register_buffer("bias", distance * self.slopes, persistent=False)
        assert self.bias is not None
        found: Tensor = self.inner(x) + self.bias[: x.shape[0]]
        return found


@idiom("a buffer made of another one at the first use: self.register_buffer('bias', ... * self.slopes) (ALiBi)")
def buffer_at_the_first_use(train: Train) -> Any:
    model = _Slopes()
    return _trained(train, model), model.bias


class _Initialised(nn.Module):
    ready: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)
        self.register_buffer("ready", torch.tensor(True))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x)
        return found if self.ready else found * 0.1


@idiom("a flag in a buffer that says that the module is set up: if not self.initted (vector quantizers)")
def flag_in_a_buffer(train: Train) -> Any:
    return _trained(train, _Initialised())


def _carried(train: Train, state: Any, carry: Callable[[Any, Tensor], Tensor]) -> Any:
    model, optimizer, batches = classifier()

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(carry(state, model(x)), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(x, y).item() for x, y in batches], model


def _zeros() -> Tensor:
    return torch.zeros(6, 4)


def _in_lists(state: Any, out: Tensor) -> Tensor:
    for layer in state["layers"]:
        hidden = torch.tanh(out + layer[0])
        layer[0], layer[1] = hidden.detach(), (0.5 * layer[1] + hidden).detach()
        out = hidden + layer[1]
    return out


@idiom("the hidden states of two layers, carried in lists of lists: hidden[i][0] = h.detach()")
def in_lists(train: Train) -> Any:
    return _carried(train, {"layers": [[_zeros(), _zeros()], [_zeros(), _zeros()]]}, _in_lists)


def _in_a_tuple(state: Any, out: Tensor) -> Tensor:
    hidden, cell = torch.tanh(out + state["hidden"][0]), 0.5 * state["hidden"][1] + out
    state["hidden"] = (hidden.detach(), cell.detach())
    found: Tensor = hidden + cell
    return found


@idiom("a hidden state carried in a tuple: self.hidden = (h.detach(), c.detach())")
def in_a_tuple(train: Train) -> Any:
    return _carried(train, {"hidden": (_zeros(), _zeros())}, _in_a_tuple)


@dataclass
class _Holder:
    params: dict[str, Tensor]


def _functional(train: Train, update: Callable[[_Holder, dict[str, Tensor]], None]) -> Any:
    holder = _Holder({"w": torch.randn(8, 4), "b": torch.zeros(4)})
    for p in holder.params.values():
        p.requires_grad_()
    batches = batches_of()

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(x @ holder.params["w"] + holder.params["b"], y)
        gradients = torch.autograd.grad(loss, list(holder.params.values()))
        update(holder, dict(zip(holder.params, gradients, strict=True)))
        return loss.detach()

    run = train(step, batches[0])
    return [run(x, y).item() for x, y in batches], dict(holder.params)


def _into_the_dictionary(holder: _Holder, gradients: dict[str, Tensor]) -> None:
    for k in holder.params:
        holder.params[k] = (holder.params[k] - 0.1 * gradients[k]).detach().requires_grad_()


def functional_in_place(train: Train) -> Any:
    return _functional(train, _into_the_dictionary)


def _new_dictionary(holder: _Holder, gradients: dict[str, Tensor]) -> None:
    holder.params = {k: (p - 0.1 * gradients[k]).detach().requires_grad_() for k, p in holder.params.items()}


@idiom(
    "functional parameters: params = {k: params[k] - lr * g[k] for k in params}",
    refused=NotRepeatable,
    instead="into the dictionary that is there: for k in params: params[k] = ...",
    changed=functional_in_place,
)
def functional(train: Train) -> Any:
    return _functional(train, _new_dictionary)


def _scheduled(train: Train, inside: bool) -> Any:
    model, optimizer, batches = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120, growth_interval=2)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        before = scaler.get_scale() if inside else 0.0
        scaler.step(optimizer)
        scaler.update()
        if inside and scaler.get_scale() >= before:
            scheduler.step()
        return loss.detach()

    run = train(step, batches[0], model=model, optimizer=optimizer)
    found = []
    for x, y in batches * 3:
        before = scaler.get_scale()
        found.append(run(x, y).item())
        if not inside and scaler.get_scale() >= before:
            scheduler.step()
    return found, model, scheduler.last_epoch


def scheduled_outside(train: Train) -> Any:
    return _scheduled(train, inside=False)


@idiom(
    "scheduler.step() only where GradScaler took the step: if scaler.get_scale() >= before",
    refused=DataDependent,
    instead="compare scaler.get_scale() in the loop, before and after the step",
    changed=scheduled_outside,
)
def scheduled_inside(train: Train) -> Any:
    return _scheduled(train, inside=True)


@idiom("frequencies made at the first use by a function under functools.lru_cache")
def cached_function(train: Train) -> Any:
    model, optimizer, batches = classifier()

    @functools.lru_cache(maxsize=8)
    def rotation(length: int) -> tuple[Tensor, Tensor]:
        angles = torch.arange(length).float()[:, None] * 100.0 ** (-torch.arange(8).float() / 8)
        return angles.cos(), angles.sin()

    def step(x: Tensor, y: Tensor) -> Tensor:
        cos, sin = rotation(len(x))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x * cos + x.flip(1) * sin), y)
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    losses = [run(x[: 6 - i % 2], y[: 6 - i % 2]).item() for i, (x, y) in enumerate(batches)]
    return losses, rotation(3), model


@idiom("a mask from a function under functools.lru_cache, called before the step was submitted")
def cached_before(train: Train) -> Any:
    model, optimizer, batches = classifier()

    @functools.lru_cache
    def mask(width: int) -> Tensor:
        return (torch.rand(width) < 0.5).float()

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x * mask(8)), y)
        loss.backward()
        optimizer.step()
        return loss

    mask(8)
    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(x, y).item() for x, y in batches], mask(8), model


@idiom(
    "a norm of the first weights, kept by functools.lru_cache at its first use",
    refused=CaptureError,
    instead="call the function once before you submit",
)
def cached_weights(train: Train) -> Any:
    model, optimizer, batches = classifier()

    @functools.lru_cache
    def norm() -> Tensor:
        found: Tensor = next(model.parameters()).detach().norm()
        return found

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y) * norm()
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(x, y).item() for x, y in batches], model
