"""Rows G1 to G6 of docs/plain-loop.md, "Between two steps": what a script does to gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpumux import errors
from tests.client.between.support import (
    DATA,
    Script,
    X,
    Y,
    adam,
    assert_equal,
    detached,
    made,
    momentum,
    network,
    same,
    whole,
    without_update,
    without_zeroing,
)
from tests.client.parity import Work, check


def zeroing_last(model: Any, optimizer: Any) -> Any:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "read",
    [
        lambda m: m[0].weight.grad,
        lambda m: [p.grad.norm() for p in m.parameters()],
        lambda m: torch.nn.utils.get_total_norm([p.grad for p in m.parameters()]),
        lambda m: torch.histc(m[3].bias.grad, 4),
        lambda m: m[0].weight.grad is None,
        lambda m: repr(m[3].bias.grad),
    ],
)
def test_g1_a_gradient_that_the_job_keeps(read: Any, endpoint: str) -> None:
    def script(s: Script) -> Any:
        out = []
        for i in range(4):
            s.optimizer.zero_grad()
            s.train(1, i)
            out.append(detached(read(s.model)))
            s.model[0].weight.sum()  # the parameters are plain from here, and say the same
            out.append(read(s.model))  # and what was read stays what it was, though later steps make other gradients
        return out

    same(script, endpoint, step=without_zeroing)


def test_g1_a_gradient_that_is_held_and_read_when_there_is_another(endpoint: str) -> None:
    with made(endpoint, step=without_zeroing) as s:
        s.train(1)
        grad = s.model[0].weight.grad
        s.optimizer.zero_grad()
        s.train(1, 1)
        with pytest.raises(errors.StaleGradient):
            grad.sum()
        s.model[0].weight.grad.sum()


def test_g1_a_gradient_that_is_held_while_steps_add_to_it(endpoint: str) -> None:
    def script(s: Script) -> Any:
        s.train(1)
        grad = s.model[0].weight.grad
        out = [grad.sum()]
        s.train(1, 1)
        return [*out, grad.sum(), grad is s.model[0].weight.grad]

    same(script, endpoint, step=without_zeroing)


@pytest.mark.parametrize("plain", [False, True])
def test_g1_a_gradient_that_is_not_kept_names_the_remedy(plain: bool, endpoint: str) -> None:
    with made(endpoint) as s:
        s.train(1)
        if plain:
            s.model[0].weight.sum()
        grad = s.model[0].weight.grad
        assert grad is not None, "in the plain loop there is one"
        assert grad.shape == (8, 6)
        for read in (
            grad.norm, lambda: grad + 1, lambda: grad.tolist(), grad.clone, lambda: grad.data, grad.numpy,
            lambda: torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0),
        ):  # fmt: skip
            with pytest.raises(errors.StaleGradient, match="return it from the step"):
                read()
        s.train(1)
    with pytest.raises(errors.StaleGradient):  # nor after the job
        s.model[0].weight.grad.norm()
    s.optimizer.zero_grad()
    F.cross_entropy(s.model(X), Y).backward()
    assert s.model[0].weight.grad.isfinite().all()


def test_g1_the_remedy(endpoint: str) -> None:
    def returning(model: Any, optimizer: Any) -> Any:
        def step(x: Tensor, y: Tensor) -> Any:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss, model[0].weight.grad, torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])

        return step

    same(lambda s: [s.step(*DATA[i]) for i in range(3)], endpoint, step=returning)


def test_g1_none_where_the_step_ends_without_gradients(endpoint: str) -> None:
    def script(s: Script) -> Any:
        s.train(2)
        out = [p.grad is None for p in s.model.parameters()]
        s.model[0].weight.sum()
        return out + [p.grad is None for p in s.model.parameters()]

    assert all(same(script, endpoint, step=zeroing_last))


@pytest.mark.parametrize("plain", [False, True])
def test_g2_cleared_one_by_one(plain: bool, endpoint: str) -> None:
    def script(s: Script) -> Any:
        out = []
        for i in range(6):
            for p in list(s.model.parameters())[:: 1 + i % 2]:
                p.grad = None
            out += s.train(1, i)
            if plain:
                s.model[0].weight.sum()
        s.model[0].weight.grad = None
        return out

    same(script, endpoint, step=without_zeroing, optimize=momentum, max_variants=8)


@pytest.mark.parametrize("step", [without_zeroing, zeroing_last, whole])
@pytest.mark.parametrize(
    "change",
    [
        lambda s: setattr(s.model[0].weight, "grad", torch.full((8, 6), 0.5)),
        lambda s: [setattr(p, "grad", torch.full_like(p, 0.25)) for p in s.model.parameters()],
    ],
    ids=["one", "all"],
)
def test_g3_gradients_that_the_script_sets(change: Any, step: Any, endpoint: str) -> None:
    def script(s: Script) -> Any:
        out = s.train(2)
        change(s)
        out += s.train(2, 2)
        s.model[0].weight.sum()
        change(s)
        return out + s.train(1, 4)

    same(script, endpoint, step=step, optimize=momentum)


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "change",
    [
        lambda s: torch.nn.utils.clip_grad_norm_(s.model.parameters(), 0.01),
        lambda s: torch.nn.utils.clip_grad_value_(s.model.parameters(), 0.01),
        lambda s: [p.grad.mul_(0.5) for p in s.model.parameters()],
        lambda s: s.model[0].weight.grad.data.clamp_(-0.001, 0.001),
        lambda s: s.model[0].weight.grad.zero_(),
    ],
    ids=["clipped by norm", "clipped by value", "scaled", "by data", "one zeroed"],
)
def test_g3_gradients_changed_in_place_between_backward_and_update(change: Any, endpoint: str) -> None:
    def script(s: Script) -> Any:
        def apply() -> None:
            s.optimizer.step()
            s.optimizer.zero_grad()

        update = apply if s.job is None else s.job.add(apply, example=())
        out = []
        for i in range(4):
            out += s.train(1, i)
            change(s)
            update()
        return out

    same(script, endpoint, step=without_update, optimize=adam)


def test_g3_a_tensor_that_is_given_is_the_gradient_that_steps_add_to(endpoint: str) -> None:
    def script(s: Script) -> Any:
        mine, out = torch.ones(8, 6), []
        for i in range(5):
            s.train(1, i)
            if i == 1:
                s.model[0].weight.grad = mine
            if i == 3:
                out.append(mine.clone())
                mine.mul_(0.5)
        return [*out, mine.clone(), s.model[0].weight.grad.clone()]

    same(script, endpoint, step=without_zeroing)


def test_g3_a_tensor_that_is_given_keeps_its_values_where_the_step_makes_another(endpoint: str) -> None:
    def script(s: Script) -> Any:
        given = [torch.full((8, 6), float(i)) for i in range(4)]
        for i, mine in enumerate(given):
            s.model[0].weight.grad = mine
            s.train(1, i)
        return given

    same(script, endpoint, step=whole)


def test_g3_what_was_the_gradient_before_is_not_silently_another(endpoint: str) -> None:
    """The daemon had the old gradient's values and has the new one's now."""
    with made(endpoint, step=without_zeroing) as s:
        s.train(1)
        first = torch.ones(8, 6)
        s.model[0].weight.grad = first
        s.train(1, 1)
        s.model[0].weight.grad = torch.zeros(8, 6)
        s.train(1, 2)
        with pytest.raises(errors.StaleGradient):
            first.sum()


def with_flat_gradients() -> Any:
    """All gradients are windows onto one buffer, as some libraries keep them."""
    model = network()
    flat, at = torch.zeros(sum(p.numel() for p in model.parameters())), 0
    for p in model.parameters():
        p.grad = flat[at : at + p.numel()].view_as(p)
        at += p.numel()
    return model


@pytest.mark.parametrize("read", [False, True], ids=["behind", "fetched"])
def test_g3_one_of_the_gradients_in_a_flat_buffer_is_replaced(read: bool, endpoint: str) -> None:
    """The other gradients, in the same memory, stay as in the daemon."""

    def script(s: Script) -> Any:
        out: list[Any] = []
        for i in range(5):
            s.train(1, i)
            if i == 2:
                if read:
                    out.append(s.model[3].weight.grad.clone())
                s.model[0].weight.grad = torch.ones(8, 6)
            if i == 3:
                s.model[3].bias.grad.mul_(2)
        return [*out, *(p.grad.clone() for p in s.model.parameters())]

    same(script, endpoint, make=with_flat_gradients, step=without_zeroing)


def test_g4_a_backward_pass_on_the_local_model(endpoint: str) -> None:
    def script(s: Script) -> Any:
        s.train(2)
        s.model.eval()
        loss = F.cross_entropy(s.model(X), Y)
        out = list(torch.autograd.grad(loss, list(s.model.parameters())))
        s.optimizer.zero_grad()
        F.cross_entropy(s.model(X), Y).backward()
        out += [p.grad.clone() for p in s.model.parameters()]
        s.model.train()
        return out + s.train(2, 2)  # on from what was left behind, where the step does not zero it

    for step in (whole, zeroing_last, without_zeroing):
        same(script, endpoint, step=step)


def test_g4_a_graph_from_before_a_step_is_refused_by_autograd(endpoint: str) -> None:
    for at in (None, endpoint):
        with made(at) as s:
            s.train(1)
            s.model.eval()
            loss = F.cross_entropy(s.model(X), Y)
            s.model.train()
            s.train(1, 1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


def _weights_alone(model: Any) -> Tensor:
    """A graph that saves no tensor, so that autograd allows backward() after a step."""
    return sum((p * 0.25).sum() for p in model.parameters())  # type: ignore[return-value]


@pytest.mark.parametrize("read", [False, True], ids=["stepped on", "read"])
def test_g4_a_graph_that_saved_nothing_adds_to_no_gradient_of_a_step(read: bool, endpoint: str) -> None:
    def script(s: Script) -> Any:
        out: list[Any] = []
        for i in range(4):
            penalty = _weights_alone(s.model)
            s.train(1, i)
            penalty.backward()
            if i == 2:
                _weights_alone(s.model).backward()
            if read:
                out += [p.grad.clone() for p in s.model.parameters()]
        return out

    same(script, endpoint, step=zeroing_last)


def test_g4_a_graph_that_saved_nothing_adds_to_gradients_that_were_zeroed(endpoint: str) -> None:
    def script(s: Script) -> Any:
        for i in range(3):
            penalty = _weights_alone(s.model)
            s.train(1, i)
            s.optimizer.zero_grad(set_to_none=i != 1)
            penalty.backward()
        return s.train(1, 3)

    same(script, endpoint, step=without_zeroing)


def test_g4_a_graph_that_saved_nothing_adds_to_gradients_that_were_kept(endpoint: str) -> None:
    def script(s: Script) -> Any:
        s.train(1)
        penalty = _weights_alone(s.model)
        s.train(1, 1)
        if s.job is not None:
            s.job.sync()
        penalty.backward()
        return s.train(2, 2)

    same(script, endpoint, step=without_zeroing)


def test_g4_what_can_not_be_added_is_said_and_the_job_goes_on(endpoint: str) -> None:
    with made(endpoint, step=without_zeroing) as s:
        s.train(1)
        penalty = _weights_alone(s.model)
        s.train(1, 1)
        penalty.backward()
        with pytest.raises(
            errors.StaleGradient, match=r"the gradient of 0\.weight, which the daemon has.*job\.sync\(\)"
        ):
            s.step(*DATA[2])
        ours = s.train(2, 2)
    with made(None, step=without_zeroing) as plain:
        assert ours == plain.train(4)[2:]


def test_g4_what_is_added_to_a_gradient_that_was_not_kept_can_not_be_read(endpoint: str) -> None:
    with made(endpoint) as s:
        penalty = _weights_alone(s.model)
        s.train(1)
        penalty.backward()
        with pytest.raises(errors.StaleGradient):
            s.model[0].weight.grad.sum()
        ours = s.train(2, 1)
    with made(None) as plain:
        assert ours == plain.train(3)[1:]


def test_g4_a_penalty_on_the_local_model_adds_to_gradients_that_were_kept(endpoint: str) -> None:
    def script(s: Script) -> Any:
        out: list[Any] = []
        for i in range(4):
            s.train(1, i)
            for _ in range(1 + i % 2):
                (s.model[0].weight.square().sum() * 0.01).backward()
            if i == 2:
                out.append(s.model[0].weight.grad.clone())
            out += s.train(1, i)
        return out

    same(script, endpoint, step=without_zeroing)


def read_without_gradients(s: Script) -> None:
    with torch.no_grad():
        s.model[0].weight.sum()


def written(s: Script) -> None:
    with torch.no_grad():
        s.model[0].weight.mul_(0.9)


def loaded(s: Script) -> None:
    s.model.load_state_dict({key: value * 0.5 for key, value in s.model.state_dict().items()})


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (read_without_gradients, "nothing"),
        *((first, then) for first in (read_without_gradients, written, loaded) for then in ("step", "read")),
    ],
)
def test_g4_a_penalty_after_the_parameters_were_fetched_without_gradients(first: Any, then: str, endpoint: str) -> None:
    """Autograd reads the parameters without fetching, and adds to the present gradients."""

    def script(s: Script) -> Any:
        out: list[Any] = s.train(1)
        first(s)
        (s.model[0].weight.square().sum() * 0.01).backward()
        if then == "read":
            out.append(s.model[0].weight.grad.sum())
        elif then == "step":
            if s.job is not None and first is not read_without_gradients:
                with pytest.raises(errors.LocalWrite):
                    s.step(*DATA[1])
                s.job.load_state()
            out += s.train(2, 1)
        return out

    same(script, endpoint, step=without_zeroing)


def test_g5_gradients_left_from_step_to_step(endpoint: str) -> None:
    same(lambda s: s.train(5), endpoint, step=without_zeroing)


def test_g6_a_hook_on_a_parameter(endpoint: str) -> None:
    def script(s: Script) -> Any:
        out = s.train(2)
        handle = s.model[0].weight.register_hook(lambda grad: grad * 2)
        out += s.train(2, 2)
        handle.remove()
        return out + s.train(1, 4)

    same(script, endpoint)


@pytest.mark.parametrize("read", [lambda m: m[3].weight.grad.norm(), lambda m: m[3].weight.norm(), lambda m: m(X)])
def test_g3_what_the_script_gave_outlives_a_read_of_something_else(read: Any, endpoint: str) -> None:
    def script(s: Script) -> Any:
        s.train(2)
        s.model[0].weight.grad = None
        s.model[0].bias.grad = torch.ones(8)
        s.model[1].zero_grad(set_to_none=False)
        s.model.eval()
        out = [read(s.model), s.model[0].weight.grad is None, s.model[0].bias.grad, s.model[1].weight.grad]
        s.model.train()
        out += s.train(1, 2)
        return [*out, *detached([p.grad for p in s.model.parameters()])]

    same(script, endpoint, step=without_zeroing)


@pytest.mark.parametrize("push", [False, True])
def test_g3_what_the_script_gave_outlives_the_job(push: bool, endpoint: str) -> None:
    found = []
    for at in (None, endpoint):
        with made(at, step=without_zeroing) as s:
            s.train(2)
            s.model[0].weight.grad = None
            s.model[0].bias.grad = torch.ones(8)
            s.model[1].zero_grad(set_to_none=False)
            if push and s.job is not None:
                s.job.load_state()
        found.append(detached([p.grad for p in s.model.parameters()]))
    assert_equal(found[1], found[0])


def gradients_only(model: Any, optimizer: Any) -> Any:
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return step


def test_g3_a_step_that_only_makes_gradients_replaces_what_the_script_gave(endpoint: str) -> None:
    with made(endpoint, lambda: torch.nn.Linear(6, 3), momentum, gradients_only) as s:
        s.train(1)
        s.model.weight.grad = torch.ones(3, 6)
        s.train(1, 1)
        with pytest.raises(errors.StaleGradient):
            s.model.weight.grad.sum()
        s.model.weight.grad = torch.zeros(3, 6)
        assert s.model.weight.grad.sum() == 0


def test_g3_zeros_in_memory_that_gradients_share(endpoint: str) -> None:
    def script(s: Script) -> Any:
        s.train(2)
        s.model.weight.grad.zero_()
        s.train(1, 2)
        return detached([p.grad for p in s.model.parameters()])

    def flat() -> Any:
        model = torch.nn.Linear(6, 3)
        memory = torch.zeros(21)
        model.weight.grad, model.bias.grad = memory[:18].view(3, 6), memory[18:]
        return model

    same(script, endpoint, make=flat, step=without_zeroing)


def test_g5_a_gradient_that_there_was_not_while_the_model_was_read_is_there_again(endpoint: str) -> None:
    def make() -> Work:
        torch.manual_seed(0)
        model: Any = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 3))
        optimizer = torch.optim.RMSprop(model.parameters(), lr=0.05)
        count = 0

        def step(x: Tensor) -> Tensor:
            nonlocal count
            loss: Tensor = model(x).pow(2).mean()
            loss.backward()
            count += 1
            if count % 3 == 0:
                norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
                optimizer.step()
                optimizer.zero_grad()
                return torch.stack(norms).sum()
            return loss.detach()

        def loop(run: Any) -> list[Any]:
            found = []
            for i in range(12):
                found.append(run(torch.full((4, 6), 0.1 * i)))
                model[0].weight.requires_grad_(not 2 <= i < 6)
                if i == 4:
                    found.append(model[1].weight.sum())
            return found

        return Work([model], [optimizer], [(step, (torch.zeros(4, 6),))], loop)

    check(make, endpoint)
