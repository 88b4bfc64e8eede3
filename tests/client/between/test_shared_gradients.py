"""Row G3 of docs/plain-loop.md, "Between two steps": gradients that share memory, and gradients that are removed and
restored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpumux import client, errors
from tests.client.between.support import (
    Script,
    X,
    batches,
    made,
    momentum,
    same,
    whole,
    without_update,
    without_zeroing,
)

STEPS = 5


def linear() -> nn.Module:
    return nn.Linear(6, 3)


class Flat(nn.Linear):
    """A model whose gradients are views of one buffer, as in some libraries."""

    def __init__(self, window: Callable[[Tensor], Tensor] = lambda flat: flat) -> None:
        super().__init__(6, 3)
        flat, at = torch.zeros(21), 0
        for p in self.parameters():
            p.grad = window(flat)[at : at + p.numel()].view_as(p)
            at += p.numel()
        self.__dict__["flat"] = flat  # no buffer of the module


def flat_by_data() -> nn.Module:
    """Views with version counters of their own."""
    return Flat(lambda flat: flat.data)


def each(act: Callable[[Script, int], Any], step: Any = without_zeroing, make: Any = linear) -> Callable[[Script], Any]:
    """A script that calls `act` after every step, and returns its results."""

    def script(s: Script) -> Any:
        out: list[Any] = []
        for i in range(STEPS):
            out += s.train(1, i)
            found = act(s, i)
            out += found if isinstance(found, list) else []
        return [*out, *(p.grad.clone() for p in s.model.parameters())]

    return script


def halved(s: Script, i: int) -> None:
    s.model.flat.mul_(0.5)


def zeroed_at_times(s: Script, i: int) -> None:
    if i % 2:
        s.model.flat.zero_()


def read(s: Script, i: int) -> list[Any]:
    return [s.model.flat.clone(), s.model.flat.norm()]


def read_at_times(s: Script, i: int) -> list[Any]:
    return read(s, i) if i in (1, 2, 4) else []


def window_written(s: Script, i: int) -> None:
    s.model.flat[2:9].add_(0.25)


def one_read_other_written(s: Script, i: int) -> list[Any]:
    out = [s.model.bias.grad.clone()]
    s.model.flat[:3] = 0.125
    return out


@pytest.mark.every(3)
@pytest.mark.parametrize("make", [Flat, flat_by_data])
@pytest.mark.parametrize(
    "act",
    [halved, zeroed_at_times, read, read_at_times, window_written, one_read_other_written],
    ids=lambda f: f.__name__,
)
def test_g3_the_buffer_that_gradients_are_windows_onto(act: Any, make: Any, endpoint: str) -> None:
    same(each(act), endpoint, make=make, step=without_zeroing, optimize=momentum)


def refused(script: Callable[[Script], Any], endpoint: str, **how: Any) -> None:
    """Not the plain run's bits, but an error with a remedy."""
    with pytest.raises((errors.StaleGradient, errors.LocalWrite)) as error:
        same(script, endpoint, **how)
    assert error.value.remedy


def test_g3_cleared_gradients_leave_the_flat_buffer_as_it_was(endpoint: str) -> None:
    """If its values are known; otherwise reading it raises an error."""

    def act(s: Script, i: int) -> list[Any]:
        out = [s.model.flat.clone()]
        if i == 1:
            s.optimizer.zero_grad()
        return out

    same(each(act), endpoint, make=Flat, step=without_zeroing, optimize=momentum)


def test_g3_cleared_while_the_flat_buffer_is_behind(endpoint: str) -> None:
    def script(s: Script) -> Any:
        out: list[Any] = s.train(2)
        s.optimizer.zero_grad()
        out += s.train(2, 2)
        if s.job is not None:
            with pytest.raises(errors.StaleGradient):
                s.model.flat.sum()
        return [*out, *(p.grad.clone() for p in s.model.parameters())]

    same(script, endpoint, make=Flat, step=without_zeroing, optimize=momentum)


@pytest.mark.parametrize("fetch", [False, True], ids=["behind", "fetched"])
@pytest.mark.parametrize("window", [False, True], ids=["itself", "window"])
def test_g3_a_gradient_given_to_its_own_parameter(fetch: bool, window: bool, endpoint: str) -> None:
    def act(s: Script, i: int) -> None:
        for p in s.model.parameters():
            if fetch:
                p.sum()
            p.grad = p.grad.view_as(p) if window else p.grad

    same(each(act), endpoint, make=linear, step=without_zeroing, optimize=momentum)


@pytest.mark.parametrize("make", [linear, Flat])
def test_g3_put_away_and_put_back_when_its_values_are_here(make: Any, endpoint: str) -> None:
    kept: list[Any] = []

    def act(s: Script, i: int) -> None:
        if i == 1:
            kept[:] = [p.grad for p in s.model.parameters()]
            assert all(g.isfinite().all() for g in kept)
            s.optimizer.zero_grad()
        if i == 3:
            for p, g in zip(s.model.parameters(), kept, strict=True):
                p.grad = g

    same(each(act), endpoint, make=make, step=without_zeroing, optimize=momentum)


def test_g3_put_away_while_it_is_behind_and_put_back_is_refused(endpoint: str) -> None:
    with made(endpoint, linear, momentum, without_zeroing) as s:
        s.train(2)
        away = s.model.weight.grad
        s.model.weight.grad = None
        s.train(1, 2)
        s.model.weight.grad = away
        with pytest.raises(errors.StaleGradient):
            s.train(1, 3)
        s.model.weight.grad = None
        s.train(1, 4)


@pytest.mark.parametrize("fetch", [False, True], ids=["behind", "fetched"])
def test_g3_put_back_before_the_next_step(fetch: bool, endpoint: str) -> None:
    def act(s: Script, i: int) -> None:
        away = [p.grad for p in s.model.parameters()]
        s.optimizer.zero_grad()
        if fetch:
            s.model.weight.sum()
        for p, g in zip(s.model.parameters(), away, strict=True):
            p.grad = g

    same(each(act), endpoint, make=linear, step=without_zeroing, optimize=momentum)


class Square(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x))[:, :3]


@pytest.mark.parametrize("fetch", [False, True], ids=["behind", "fetched"])
def test_g3_gradients_that_change_places(fetch: bool, endpoint: str) -> None:
    def act(s: Script, i: int) -> None:
        one, two = s.model.one.weight, s.model.two.weight
        if fetch:
            one.sum()
        one.grad, two.grad = two.grad, one.grad

    refused(each(act), endpoint, make=Square, step=without_zeroing, optimize=momentum)


@pytest.mark.parametrize(
    "give",
    [
        lambda s: setattr(s.model.one.weight, "grad", s.model.two.weight.data[:]),
        lambda s: setattr(s.model.one.weight, "grad", s.model.one.weight.data),
        lambda s: setattr(s.model.one.weight, "grad", s.model.two.weight.grad),
        lambda s: setattr(s.model.one.weight, "grad", s.optimizer.state[s.model.one.weight]["momentum_buffer"]),
    ],
    ids=["parameter", "its own", "another's gradient", "momentum"],
)
def test_g3_memory_of_the_job_as_a_gradient_is_refused(give: Any, endpoint: str) -> None:
    """In the plain loop a step would add to it in place."""
    with made(endpoint, Square, momentum, without_zeroing) as s:
        s.train(2)
        give(s)
        with pytest.raises(errors.LocalWrite) as refused:
            s.train(1, 2)
        assert "clone" in str(refused.value)
        s.model.one.weight.grad = None
        s.train(1, 2)


def windows_of(memory: Tensor, s: Script) -> None:
    at = 0
    for p in s.model.parameters():
        p.grad = memory[at : at + p.numel()].view_as(p)
        at += p.numel()


def test_g3_windows_given_later_go_on_from_their_values(endpoint: str) -> None:
    def act(s: Script, i: int) -> None:
        if i == 2:
            windows_of(torch.linspace(-1, 1, 21), s)

    same(each(act), endpoint, make=linear, step=without_zeroing, optimize=momentum)


@pytest.mark.covering
@pytest.mark.parametrize("write", [Tensor.zero_, torch.zero_, lambda t: t.mul_(0.5), lambda t: t.fill_(0.0)])
@pytest.mark.parametrize("then", ["train", "read", "end"])
def test_g3_memory_given_as_windows_can_not_be_written_once_a_step_added(then: str, write: Any, endpoint: str) -> None:
    """The job has a copy of it, which the write would miss."""

    def script(s: Script) -> Any:
        memory = torch.ones(21)
        out: list[Any] = s.train(1)
        windows_of(memory, s)
        out += s.train(1, 1)
        write(memory)
        return out + (s.train(2, 2) if then == "train" else [s.model.weight.grad.sum()] if then == "read" else [])

    refused(script, endpoint, make=linear, step=without_zeroing, optimize=momentum)


@pytest.mark.parametrize("way", ["windows", "one for two", "one window for two", "row", "by data"])
def test_g3_what_the_script_holds_of_memory_it_gave_is_never_silently_old(way: str, endpoint: str) -> None:
    """A step adds to it in the plain loop."""

    def script(s: Script) -> Any:
        memory = torch.ones(21) if way == "windows" else torch.ones(6, 6) if way == "one for two" else torch.ones(2, 18)
        s.train(2)
        if way == "windows":
            windows_of(memory, s)
        elif way == "one for two":
            s.model.one.weight.grad = s.model.two.weight.grad = memory
        elif way == "one window for two":
            memory = torch.ones(2, 36)
            s.model.one.weight.grad, s.model.two.weight.grad = memory[0].view(6, 6), memory[0].view(6, 6)
        elif way == "row":
            s.model.weight.grad = memory[1].view(3, 6)
        else:
            memory = memory[0].view(3, 6).clone()
            s.model.weight.grad.data = memory
        out = s.train(2, 2)
        return [*out, memory.clone()]

    make = Square if "two" in way else linear
    right = same if way == "by data" else refused
    right(script, endpoint, make=make, step=without_zeroing, optimize=momentum)


def test_g3_memory_given_and_replaced_by_the_step_keeps_its_values(endpoint: str) -> None:
    """As in methods for several tasks, which set gradients as parts of one long vector."""

    def whole(model: Any, optimizer: Any) -> Any:
        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        return step

    def script(s: Script) -> Any:
        def apply() -> None:
            s.optimizer.step()

        update = apply if s.job is None else s.job.add(apply, example=())
        out: list[Any] = []
        for i in range(4):
            out += s.train(1, i)
            vector = torch.cat([p.grad.reshape(-1) for p in s.model.parameters()]) * 0.5
            windows_of(vector, s)
            update()
            out.append(vector.clone())
        return out

    same(script, endpoint, make=linear, step=whole, optimize=momentum)


def test_g3_what_shares_memory_with_a_gradient_given_before_is_refused(endpoint: str) -> None:
    with made(endpoint, Square, momentum, without_zeroing) as s:
        s.train(2)
        memory = torch.ones(2, 36)
        s.model.one.weight.grad = memory[0].view(6, 6)
        s.train(1, 2)
        with pytest.raises(errors.StaleGradient):  # a step added to it
            s.model.two.weight.grad = memory[0].view(6, 6)
        memory = torch.ones(2, 36)
        s.model.one.weight.grad = memory[0].view(6, 6)
        s.job.sync()  # the job takes it, and no step has run
        s.model.two.weight.grad = memory[0].view(6, 6)
        with pytest.raises(errors.LocalWrite, match="clone"):
            s.train(1, 3)


def test_g3_memory_given_and_written_between_two_steps_that_only_read_it(endpoint: str) -> None:
    def script(s: Script) -> Any:
        def apply() -> None:
            s.optimizer.step()

        update = apply if s.job is None else s.job.add(apply, example=())
        out: list[Any] = s.train(1)
        vector = torch.linspace(-1, 1, 21)
        windows_of(vector, s)
        update()
        vector.mul_(0.5)
        update()
        vector.data.mul_(0.5)
        update()
        return [*out, vector.clone(), *(p.grad.clone() for p in s.model.parameters())]

    same(script, endpoint, make=linear, step=without_update, optimize=momentum)


def test_g3_data_of_every_gradient_after_every_step(endpoint: str) -> None:
    """No step is captured again for it."""

    def act(s: Script, i: int) -> None:
        for p in s.model.parameters():
            p.grad.data = p.grad.data.sign() * 0.01
        assert s.job is None or i < 2 or s.job.stats()["programs"] <= 2

    same(each(act), endpoint, make=linear, step=without_zeroing, optimize=momentum)


@pytest.mark.parametrize("then", ["read", "train"])
def test_g3_data_of_a_gradient(then: str, endpoint: str) -> None:
    def act(s: Script, i: int) -> list[Any]:
        if i == 2:
            s.model.weight.grad.data = torch.full((3, 6), 0.25)
        return [s.model.weight.grad.clone()] if then == "read" else []

    same(each(act), endpoint, make=linear, step=without_zeroing, optimize=momentum)


def test_g3_a_window_made_between_two_steps(endpoint: str) -> None:
    kept: list[Tensor] = []

    def act(s: Script, i: int) -> list[Any]:
        if i == 0:
            kept[:] = [s.model.weight.grad.view(-1)]
        if i == 2:
            kept[0].mul_(0.5)
        return [kept[0].clone()] if i != 1 else []

    same(each(act), endpoint, make=linear, step=without_zeroing, optimize=momentum)


def test_g3_a_window_of_a_gradient_that_is_made_anew(endpoint: str) -> None:
    def script(s: Script) -> Any:
        out: list[Any] = s.train(2)
        window = s.model.weight.grad.view(-1)
        s.optimizer.zero_grad()
        out += s.train(2, 2)
        return [*out, window.clone(), s.model.weight.grad.clone()]

    same(script, endpoint, make=linear, step=without_zeroing, optimize=momentum)


def test_g3_a_gradient_in_the_memory_of_a_parameter_is_refused_by_submit(endpoint: str) -> None:
    def make() -> nn.Module:
        model = linear()
        both = torch.randn(2, 18)
        model.weight.data = both[0].view(3, 6)
        model.weight.grad = both[1].view(3, 6)
        return model

    with pytest.raises(errors.CaptureError, match="clone"), made(endpoint, make, momentum, without_zeroing):
        raise AssertionError("refused before")


def zeroing_last(model: Any, optimizer: Any) -> Any:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def functional(model: Any, optimizer: Any) -> Any:
    """Gradients by torch.autograd.grad, each added to out of place."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(model(x), y)
        found = torch.autograd.grad(loss, list(model.parameters()))
        for p, g in zip(model.parameters(), found, strict=True):
            p.grad = g if p.grad is None else p.grad + g
        optimizer.step()
        return loss

    return step


def given_before_each(s: Script) -> Any:
    mine, out = torch.full((3, 6), 0.5), []
    for i in range(4):
        s.model.weight.grad = mine
        out += [*s.train(1, i), mine.clone()]
    return out


def given_once(s: Script) -> Any:
    s.train(2)
    mine = s.model.weight.grad = torch.full((3, 6), 0.5)
    return [*s.train(1, 2), mine.clone()]


def given_as_windows(s: Script) -> Any:
    s.train(2)
    memory = torch.full((21,), 0.5)
    windows_of(memory, s)
    return [*s.train(1, 2), memory.clone()]


def given_and_replaced_later(s: Script) -> Any:
    s.train(1)
    mine = s.model.weight.grad = torch.full((3, 6), 0.5)
    out: list[Any] = [*s.train(1, 1), mine.clone()]
    return [*out, *s.train(1, 2), mine.clone()]


WAYS = [given_before_each, given_once, given_as_windows, given_and_replaced_later]


@pytest.mark.covering
@pytest.mark.parametrize("step", [without_zeroing, whole, functional, zeroing_last], ids=lambda f: f.__name__)
@pytest.mark.parametrize("script", WAYS, ids=lambda f: f.__name__)
def test_g3_what_is_given_is_added_to_by_steps_that_add_in_place_alone(script: Any, step: Any, endpoint: str) -> None:
    """A step adds to it and then removes the gradient: the sum belongs in the script's tensor, but is never fetched."""
    lost = step is zeroing_last or (step is without_zeroing and script is given_as_windows)
    (refused if lost else same)(script, endpoint, make=linear, step=step, optimize=momentum)


def test_g3_a_gradient_that_was_read_and_that_a_step_adds_to_and_takes_away(endpoint: str) -> None:
    def script(s: Script) -> Any:
        def add(x: Tensor, y: Tensor) -> Tensor:
            loss = nn.functional.cross_entropy(s.model(x), y)
            loss.backward()
            return loss

        more = add if s.job is None else s.job.add(add, example=batches(1)[0])
        more(*batches(1)[0])
        held = s.model.weight.grad
        held.sum()
        s.train(1)
        return held.clone()

    refused(script, endpoint, make=linear, step=zeroing_last, optimize=momentum)


@pytest.mark.parametrize("then", ["given", "windows", "pushed", "cleared"])
@pytest.mark.parametrize("step", [without_zeroing, whole], ids=lambda f: f.__name__)
def test_g3_what_follows_data_of_a_gradient(then: str, step: Any, endpoint: str) -> None:
    def script(s: Script) -> Any:
        out: list[Any] = []
        s.model.weight.grad = torch.ones(3, 6)
        for i in range(3):
            out += s.train(1, i)
            s.model.weight.grad = torch.full((3, 6), 0.25)
            s.model.weight.grad.data = torch.full((3, 6), 0.5)
            if then == "given":
                s.model.weight.grad = torch.ones(3, 6)
            elif then == "windows":
                windows_of(torch.linspace(-1, 1, 21), s)
            elif then == "cleared":
                s.model.weight.grad = None
            elif s.job is not None:
                s.job.load_state()
        return out + s.train(2, 3)

    same(script, endpoint, make=linear, step=step, optimize=momentum)


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
@pytest.mark.parametrize("kind", ["sparse", "conjugated", "negated"])
def test_g3_a_gradient_of_another_layout_is_refused_and_nothing_is_lost(kind: str, endpoint: str) -> None:
    def make() -> nn.Module:
        return nn.Linear(6, 3).to(torch.complex64) if kind == "conjugated" else nn.Linear(6, 3)

    def step(model: Any, optimizer: Any) -> Any:
        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = nn.functional.cross_entropy(model(x.to(model.weight.dtype)).abs(), y)
            loss.backward()
            optimizer.step()
            return loss

        return step

    def script(s: Script) -> Any:
        out: list[Any] = s.train(2)
        if s.job is not None:
            full = torch.full((3, 6), 0.5, dtype=s.model.weight.dtype)
            odd = {"sparse": Tensor.to_sparse, "conjugated": Tensor.conj, "negated": torch._neg_view}[kind](full)
            s.model.weight.grad = odd
            with pytest.raises(errors.LocalWrite) as error:
                s.train(1)
            assert "weight.grad = value." in error.value.remedy
        s.model.weight.grad = None
        return out + s.train(1, 2)

    same(script, endpoint, make=make, step=step, optimize=momentum)


def test_g3_a_second_job_on_the_model_sets_no_gradients(endpoint: str) -> None:
    """Neither has values for those that the steps do not keep."""

    def script(s: Script) -> Any:
        out: list[Any] = s.train(2)
        if s.job is not None:
            with client.submit(lambda x: s.model(x), example=(X,), model=s.model, endpoint=endpoint) as other:
                out.append(other.step(X).result())
                out += s.train(2, 2)
        else:
            out.append(s.model(X))
            out += s.train(2, 2)
        return out

    same(script, endpoint, make=linear, step=whole, optimize=momentum)


@pytest.mark.parametrize("make", [Flat, flat_by_data])
def test_g3_others_of_a_flat_buffer_are_written_after_one_was_replaced(make: Any, endpoint: str) -> None:
    """With a step between that changes nothing, so that the fetched values are still the daemon's."""

    def script(s: Script) -> Any:
        def norms() -> Tensor:
            return sum((p.grad.norm() for p in s.model.parameters()), torch.zeros(()))

        look = norms if s.job is None else s.job.add(norms, example=())
        out: list[Any] = s.train(1)
        s.model.weight.grad = s.model.weight.grad * 0.5
        out.append(look())
        torch._foreach_mul_([p.grad for p in s.model.parameters()], 0.5)
        return [*out, look(), *s.train(1, 1), look()]

    same(script, endpoint, make=make, step=without_update, optimize=momentum)
