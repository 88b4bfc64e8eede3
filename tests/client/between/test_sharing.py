"""Tensors that a step made to share memory: optimizer state, gradients, buffers of modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpumux import errors
from tests.client.between.support import DATA, Script, X, made, momentum, same, whole, without_update, without_zeroing

STEPS = 5


class Square(nn.Module):
    """Two layers of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(6, 6)
        self.two = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        return self.two(torch.tanh(self.one(x)))[:, :3]


class OfAll(torch.optim.Optimizer):
    """Steps with all parameters at hand."""

    def __init__(self, model: Any) -> None:
        super().__init__(model.parameters(), {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.all([p for group in self.param_groups for p in group["params"] if p.grad is not None])

    def all(self, params: list[Any]) -> None:
        raise NotImplementedError


class KeepsGradient(OfAll):
    """An optimizer whose state holds the gradient itself."""

    def kept(self, p: Any) -> Any:
        return p.grad

    def all(self, params: list[Any]) -> None:
        for p in params:
            state = self.state[p]
            if "last" in state:
                p.add_(state["last"], alpha=-0.02)
            p.add_(p.grad, alpha=-0.05)
            state["last"] = self.kept(p)


class KeepsDetached(KeepsGradient):
    def kept(self, p: Any) -> Any:
        return p.grad.detach()


class KeepsWindow(KeepsGradient):
    """Of which a part is enough."""

    def kept(self, p: Any) -> Any:
        return p.grad[1:]

    def all(self, params: list[Any]) -> None:
        for p in params:
            state = self.state[p]
            if "last" in state:
                p[1:].add_(state["last"], alpha=-0.02)
            p.add_(p.grad, alpha=-0.05)
            state["last"] = self.kept(p)


class FlatState(OfAll):
    """One buffer, made in the first step, and views of it."""

    def all(self, params: list[Any]) -> None:
        if not self.state[params[0]]:
            flat, at = torch.zeros(sum(p.numel() for p in params)), 0
            for p in params:
                self.state[p]["buffer"] = flat[at : at + p.numel()].view_as(p)
                at += p.numel()
            self.state[params[0]]["flat"] = flat
        self.state[params[0]]["flat"].mul_(0.9)
        for p in params:
            p.add_(self.state[p]["buffer"].add_(p.grad), alpha=-0.05)


class OneForAll(OfAll):
    """One tensor in the state of all parameters."""

    def all(self, params: list[Any]) -> None:
        if not self.state[params[0]]:
            mean = torch.zeros(3)
            for p in params:
                self.state[p]["mean"] = mean
        for p in params:
            self.state[p]["mean"].mul_(0.9).add_(p.grad.norm())
            p.add_(p.grad / (1 + self.state[p]["mean"][0]), alpha=-0.05)


class PassesOn(OfAll):
    """The newest entry becomes the previous one, in the same memory."""

    def all(self, params: list[Any]) -> None:
        for p in params:
            state = self.state[p]
            if "new" in state:
                state["old"] = state["new"]
                p.add_(state["old"], alpha=-0.02)
            state["new"] = p.grad.clone()
            p.add_(p.grad, alpha=-0.05)


class SharesAtTimes(OfAll):
    """Two entries are one tensor in every second step, and two in the others."""

    def all(self, params: list[Any]) -> None:
        for p in params:
            state = self.state[p]
            if "a" in state:
                state["a"].mul_(0.5)
                p.add_(state["b"], alpha=-0.02)
            p.add_(p.grad, alpha=-0.05)
            together = "one" not in state
            state["a"] = p.grad.clone()
            state["b"] = state["a"] if together else p.grad.clone()
            if together:
                state["one"] = None
            else:
                del state["one"]


def zeros_first(model: Any, optimizer: Any) -> Callable[..., Any]:
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def zeros_last(model: Any, optimizer: Any) -> Callable[..., Any]:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def nothing(s: Script, i: int) -> None:
    pass


def read(s: Script, i: int) -> list[Any]:
    return [tensor.clone() for state in s.optimizer.state.values() for tensor in state.values() if tensor is not None]


def read_model_at_times(s: Script, i: int) -> list[Any]:
    return [p.sum().item() for p in s.model.parameters()] if i % 2 else []


def no_gradients(s: Script, i: int) -> None:
    s.optimizer.zero_grad()


def no_gradients_at_times(s: Script, i: int) -> None:
    if i % 2:
        s.optimizer.zero_grad()


def zero_gradients(s: Script, i: int) -> None:
    """The state, too, where it holds them."""
    s.optimizer.zero_grad(set_to_none=False)


def given(s: Script, i: int) -> None:
    for p in s.model.parameters():
        p.grad = torch.full_like(p, 0.1)


def backward_here(s: Script, i: int) -> None:
    F.cross_entropy(s.model(X), DATA[9][1]).backward()


def loaded(s: Script, i: int) -> None:
    if s.job is not None:
        s.job.load_state()


def each(act: Callable[[Script, int], Any]) -> Callable[[Script], Any]:
    def script(s: Script) -> Any:
        out: list[Any] = []
        for i in range(STEPS):
            out += s.train(1, i)
            out += act(s, i) or []
        return [*out, *(p.detach().clone() for p in s.model.parameters())]

    return script


ACTS = [
    nothing,
    read,
    read_model_at_times,
    no_gradients,
    no_gradients_at_times,
    zero_gradients,
    given,
    backward_here,
    loaded,
]
KEEPERS = [KeepsGradient, KeepsDetached, KeepsWindow]
OPTIMIZERS = [FlatState, OneForAll, PassesOn, SharesAtTimes]


STYLES = [whole, zeros_first, zeros_last]


@pytest.mark.every(11)
@pytest.mark.parametrize(
    ("step", "act"),
    [*((without_zeroing, act) for act in ACTS), *((step, read) for step in STYLES), (whole, backward_here)],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("optimize", OPTIMIZERS, ids=lambda f: f.__name__)
def test_state_that_a_step_made_to_share_memory(optimize: Any, act: Any, step: Any, endpoint: str) -> None:
    same(each(act), endpoint, make=Square, optimize=optimize, step=step)


@pytest.mark.parametrize("optimize", KEEPERS, ids=lambda f: f.__name__)
def test_state_that_keeps_gradients_which_the_step_clears(optimize: Any, endpoint: str) -> None:
    same(each(read), endpoint, make=Square, optimize=optimize, step=zeros_last)


def accumulate_then_apply(s: Script) -> Any:
    """`apply` leaves the gradients to the optimizer's state alone."""

    def apply() -> None:
        s.optimizer.step()
        s.optimizer.zero_grad()

    update = apply if s.job is None else s.job.add(apply, example=())
    out: list[Any] = []
    for i in range(6):
        out += s.train(1, i)
        if i == 2:
            out += [p.grad.clone() for p in s.model.parameters()]
        if i % 2:
            update()
        if i == 3:
            out += [state["last"].clone() for state in s.optimizer.state.values()]
    return out


@pytest.mark.every(3)
@pytest.mark.parametrize("optimize", KEEPERS, ids=lambda f: f.__name__)
def test_gradients_that_a_step_leaves_to_the_optimizer_s_state(optimize: Any, endpoint: str) -> None:
    same(accumulate_then_apply, endpoint, make=Square, optimize=optimize, step=without_update)


class KeepsCopy(KeepsGradient):
    """As the refusal of the others says."""

    def kept(self, p: Any) -> Any:
        return p.grad.clone()


@pytest.mark.covering
@pytest.mark.parametrize("step", [whole, without_zeroing, zeros_first], ids=lambda f: f.__name__)
@pytest.mark.parametrize("optimize", KEEPERS, ids=lambda f: f.__name__)
def test_state_that_keeps_gradients_which_are_there_between_steps_is_refused(
    optimize: Any, step: Any, endpoint: str
) -> None:
    """A `p.grad.zero_()` of the script would write to the optimizer's state, and a step to the script's tensor."""
    with (
        pytest.raises(errors.CaptureError, match=r"last shares memory with the gradient of one\.weight") as refused,
        made(endpoint, Square, optimize, step),
    ):
        raise AssertionError("refused before")
    assert "p.grad.clone()" in refused.value.remedy
    same(each(zero_gradients), endpoint, make=Square, optimize=KeepsCopy, step=step)


def test_state_that_the_script_made_to_keep_gradients_is_refused(endpoint: str) -> None:
    with made(endpoint, Square, KeepsGradient, zeros_last) as s:
        before = s.train(1)
        backward_here(s, 0)
        s.optimizer.step()
        with pytest.raises(errors.CaptureError, match="shares memory with the gradient") as refused:
            s.job.load_state()
        assert "clone" in refused.value.remedy
        s.optimizer.zero_grad()  # the gradients are the state's alone
        s.job.load_state()
        assert before[0] != s.train(1)[0]


def backward_and_step_here(s: Script) -> Any:
    """Before the first step the state exists already and holds the gradient."""
    backward_here(s, 0)
    s.optimizer.step()
    if s.job is not None:
        s.job.load_state()
    out = s.train(1)
    backward_here(s, 1)
    return out + s.train(2, 1)


@pytest.mark.covering
@pytest.mark.parametrize("step", [without_zeroing, zeros_last], ids=lambda f: f.__name__)
@pytest.mark.parametrize("optimize", OPTIMIZERS, ids=lambda f: f.__name__)
def test_state_that_the_script_made_to_share_memory(optimize: Any, step: Any, endpoint: str) -> None:
    same(backward_and_step_here, endpoint, make=Square, optimize=optimize, step=step)


def gives(change: Callable[[Any], None]) -> Any:
    def body(model: Any, optimizer: Any) -> Callable[..., Any]:
        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            change(model)
            optimizer.step()
            return loss

        return step

    return body


def one_for_two(model: Any) -> None:
    model.two.weight.grad = model.one.weight.grad


def windows(model: Any) -> None:
    flat, at = torch.cat([p.grad.reshape(-1) for p in model.parameters()]), 0
    for p in model.parameters():
        p.grad = flat[at : at + p.numel()].view_as(p)
        at += p.numel()


def overlapping_windows(model: Any) -> None:
    flat = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    model.one.weight.grad = flat[:36].view(6, 6)
    model.two.weight.grad = flat[6:42].view(6, 6)


def the_parameter_itself(model: Any) -> None:
    model.one.bias.grad = model.one.bias.data


def halved(s: Script, i: int) -> None:
    s.model.one.weight.grad.mul_(0.5)


def read_gradients(s: Script, i: int) -> list[Any]:
    return [p.grad.clone() for p in s.model.parameters()]


@pytest.mark.covering
@pytest.mark.parametrize("act", [nothing, halved, read_gradients, read_model_at_times], ids=lambda f: f.__name__)
@pytest.mark.parametrize("change", [one_for_two, windows, overlapping_windows, the_parameter_itself])
def test_gradients_that_a_step_made_to_share_memory(change: Any, act: Any, endpoint: str) -> None:
    if act is halved and change is the_parameter_itself:
        act = nothing  # a write to other state, which is refused
    same(each(act), endpoint, make=Square, optimize=momentum, step=gives(change))


class Buffers(nn.Module):
    def __init__(self, change: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.register_buffer("a", torch.zeros(3))
        self.register_buffer("b", torch.zeros(3))
        self.change = change

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        return y + self.change(self, y.detach().mean(0))


def one_for_both(m: Any, mean: Tensor) -> Any:
    m.a.add_(mean)
    out = m.b.clone()
    m.a = m.b = m.a * 0.5
    return out


def the_other(m: Any, mean: Tensor) -> Any:
    m.a.add_(mean)
    m.b = m.a
    return m.b


def window_of_parameter(m: Any, mean: Tensor) -> Any:
    m.a = m.linear.bias.detach()
    return m.a


@pytest.mark.parametrize("change", [one_for_both, the_other, window_of_parameter], ids=lambda f: f.__name__)
def test_buffers_that_a_step_makes_to_share_memory_are_refused(change: Any, endpoint: str) -> None:
    with (
        pytest.raises(errors.CaptureError, match=r"replaces the buffer [ab] .* shares memory with .*clone") as found,
        made(endpoint, lambda: Buffers(change), momentum),
    ):
        pass
    assert ".clone()" in found.value.remedy


def passed_on(m: Any, mean: Tensor) -> Any:
    m.b = m.a
    m.a = m.a * 0.9 + mean
    return m.b


def swapped(m: Any, mean: Tensor) -> Any:
    m.a, m.b = m.b, m.a
    m.a.add_(mean)
    return m.b


def itself(m: Any, mean: Tensor) -> Any:
    m.a = m.a.detach()
    m.a.add_(mean)
    return m.a


@pytest.mark.every(3)
@pytest.mark.parametrize("change", [passed_on, swapped, itself], ids=lambda f: f.__name__)
def test_buffers_that_change_places_share_nothing(change: Any, endpoint: str) -> None:
    same(each(read_model_at_times), endpoint, make=lambda: Buffers(change), optimize=momentum)


# ---- tensors that a step replaces while the script holds the old ones


class HoldsFirst(nn.Module):
    """A buffer that each step replaces, and its first tensor, held in the way `how`."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.register_buffer("most", torch.zeros(3))
        first = self.most
        self.first: Any = {"attribute": first, "list": [first], "window": first[:2], "copy": first.clone()}.get(how)
        self.closure = (lambda: first) if how == "closure" else None
        if how == "copy":
            self.register_buffer("own", self.first)
            del self.first

    def at_first(self) -> Any:
        if self.closure is not None:
            return self.closure()
        if "own" in self._buffers:
            return self.own
        return self.first[0] if isinstance(self.first, list) else self.first

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        moved = (self.most.sum() - self.at_first().sum()).abs()
        self.most = torch.maximum(self.most, y.detach().amax(0))
        return y * (1 + moved)


@pytest.mark.parametrize("how", ["attribute", "list", "window", "closure"])
def test_m21_a_step_that_reads_what_a_buffer_was_before_it_was_replaced_is_refused(how: str, endpoint: str) -> None:
    """The variable and the buffer are one tensor at first, and two from the first step on."""
    with (
        pytest.raises(errors.CaptureError, match=r"first.* holds the tensor of most, which the step replaces") as found,
        made(endpoint, lambda: HoldsFirst(how), momentum),
    ):
        raise AssertionError("refused before")
    assert ".clone()" in found.value.remedy


def holds_gradient(model: Any, optimizer: Any) -> Callable[..., Any]:
    first = model.weight.grad

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y) + first.sum()
        loss.backward()
        optimizer.step()
        return loss

    return step


def holds_moment(model: Any, optimizer: Any) -> Callable[..., Any]:
    first = optimizer.state[model.weight]["norm"]

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y) + first.sum()
        loss.backward()
        optimizer.step()
        return loss

    return step


@pytest.mark.parametrize("step", [holds_gradient, holds_moment], ids=lambda f: f.__name__)
def test_m21_a_step_that_reads_a_gradient_or_state_from_before_it_was_replaced_is_refused(
    step: Any, endpoint: str
) -> None:
    def stepped(model: Any) -> Any:
        optimizer = Replaces(model)
        F.cross_entropy(model(X), DATA[9][1]).backward()
        optimizer.step()
        for state in optimizer.state.values():
            state["norm"] = state["norm"].reshape(1)  # one of no dimension is a number of the client's
        return optimizer

    with (
        pytest.raises(errors.CaptureError, match=r"first holds the tensor of .*weight.*, which the step replaces"),
        made(endpoint, lambda: nn.Linear(6, 3), stepped, step),
    ):
        raise AssertionError("refused before")


def returning(model: Any, optimizer: Any) -> Callable[..., Any]:
    step = whole(model, optimizer)
    return lambda x, y: (step(x, y), model.one.weight)


def test_m22_a_parameter_that_the_step_returns_is_a_copy_of_that_step(endpoint: str) -> None:
    """So is what a plain step returns when it is cloned at once."""

    with made(endpoint, Square, momentum, returning) as s:
        ours = [step.result()[1] for step in [s.step(*DATA[i]) for i in range(3)]]
    with made(None, Square, momentum, returning) as s:
        plain = [s.step(*DATA[i])[1].detach().clone() for i in range(3)]
    assert all(map(torch.equal, ours, plain))
    assert not torch.equal(ours[0], ours[2])


def test_what_a_buffer_was_is_kept_in_a_buffer_of_its_own(endpoint: str) -> None:
    same(lambda s: s.train(4), endpoint, make=lambda: HoldsFirst("copy"), optimize=momentum)


class Keeps(nn.Module):
    """Buffers that each step replaces: with `first`, written in place before; `often`, in every second step."""

    def __init__(self, first: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.first = first
        self.register_buffer("most", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        if not self.training:
            return y + self.mean
        if self.first:
            self.mean.add_(1.0)
        self.most = torch.maximum(self.most, y.detach().max())
        self.mean = self.mean * 0.9 + y.detach().mean(0) * 0.1
        return y / (1 + self.most) + self.mean


class Replaces(OfAll):
    """State of one dimension and of none."""

    def all(self, params: list[Any]) -> None:
        for p in params:
            state = self.state[p]
            p.add_(p.grad, alpha=-0.05)
            state["norm"] = p.grad.norm() + state.get("norm", 0.0)
            state["last"] = p.grad.clone()


class Leaves(OfAll):
    """State that is there in every second step only, and is written in place."""

    def all(self, params: list[Any]) -> None:
        for p in params:
            state = self.state[p]
            p.add_(p.grad, alpha=-0.05)
            if "sum" in state and "second" in state:
                p.add_(state.pop("sum"), alpha=-0.05)
                del state["second"]
            elif "sum" in state:
                state["sum"].add_(p.grad)
                state["second"] = None
            else:
                state["sum"] = p.grad.clone()


def buffers_of(s: Script) -> list[Tensor]:
    return list(s.model.buffers())


def state_of(s: Script) -> list[Any]:
    return [t for state in s.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]


def held(what: Callable[[Script], list[Any]], at_once: Callable[[int], bool]) -> Callable[[Script], Any]:
    """Holds the present tensors after every step; reads them `at_once`, and all at the end."""

    def script(s: Script) -> Any:
        out: list[Any] = []
        found: list[Any] = []
        for i in range(7):
            out += s.train(1, i)
            found += what(s)
            if at_once(i):
                out += [tensor.clone() for tensor in found]
        return [*out, *(tensor.clone() for tensor in found), [a is b for a in found for b in found]]

    return script


def always(i: int) -> bool:
    return True


def same_or_stale(script: Callable[[Script], Any], endpoint: str, **how: Any) -> bool:
    """Whether the script ran to its end."""
    try:
        same(script, endpoint, **how)
    except errors.StaleState as error:
        assert error.remedy, "says what helps"  # noqa: PT017
        return False
    return True


@pytest.mark.parametrize("first", [False, True])
def test_m20_a_buffer_that_is_replaced_and_read_before(first: bool, endpoint: str) -> None:
    ran = same_or_stale(held(buffers_of, always), endpoint, make=lambda: Keeps(first), optimize=momentum)
    assert ran is not first  # its values when the step replaced it were never fetched


@pytest.mark.parametrize("at_once", [lambda i: False, lambda i: i % 2 == 0, lambda i: i == 3])
def test_m20_a_buffer_that_is_replaced_while_it_is_behind(at_once: Any, endpoint: str) -> None:
    assert not same_or_stale(held(buffers_of, at_once), endpoint, make=Keeps, optimize=momentum)


def test_a_window_onto_a_buffer_that_is_replaced(endpoint: str) -> None:
    def script(s: Script) -> Any:
        window = s.model.mean[1:]
        out = [*s.train(1), window.clone()]
        window = s.model.mean[1:]
        return [*out, *s.train(2, 1), window.clone(), s.model.mean.clone(), *s.train(2, 3)]

    same(script, endpoint, make=Keeps, optimize=momentum)


def test_a_model_whose_buffers_are_replaced_goes_on(endpoint: str) -> None:
    """Evaluated locally, pushed by load_state, averaged: with the present buffers."""

    def script(s: Script) -> Any:
        out: list[Any] = []
        for i in range(6):
            out += s.train(1, i)
            if i % 2:
                s.model.eval()
                out.append(s.model(X).sum().item())
                s.model.train()
            if i == 3:
                with torch.no_grad():
                    s.model.mean.mul_(0.5)
                if s.job is not None:
                    s.job.load_state()
        return out

    same(script, endpoint, make=Keeps, optimize=momentum)


@pytest.mark.every(7)
@pytest.mark.parametrize("optimize", [Replaces, PassesOn, SharesAtTimes, KeepsGradient, KeepsDetached, KeepsWindow])
@pytest.mark.parametrize("at_once", [lambda i: False, always, lambda i: i == 3])
def test_state_that_is_replaced_and_read_before(at_once: Any, optimize: Any, endpoint: str) -> None:
    """All ways to read the state fetch it."""
    script = held(state_of, at_once)
    how = {"make": Square, "optimize": optimize, "step": zeros_last if optimize in KEEPERS else whole}
    if optimize is SharesAtTimes:  # half of values that were never fetched
        assert same_or_stale(script, endpoint, **how) is False
    else:
        same(script, endpoint, **how)


def test_state_that_is_replaced_while_it_is_behind(endpoint: str) -> None:
    """Written in place by a step, and dropped by the next."""

    def script(when: int) -> Callable[[Script], Any]:
        def run(s: Script) -> Any:
            out = s.train(1)
            found = state_of(s)
            for i in range(1, 6):
                out += s.train(1, i)
                if i == when:
                    out += [tensor.clone() for tensor in found]
            return [*out, *(tensor.clone() for tensor in found)]

        return run

    assert same_or_stale(script(1), endpoint, make=Square, optimize=Leaves)
    assert not same_or_stale(script(3), endpoint, make=Square, optimize=Leaves)


class SharedCounter(torch.optim.Optimizer):
    """One tensor counts for all parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if "step" not in self.state[p]:
                first = next((state["step"] for state in self.state.values() if "step" in state), None)
                self.state[p]["step"] = torch.tensor(0.0) if first is None else first
            self.state[p]["step"] += 1
            p.add_(p.grad, alpha=-0.05 / float(self.state[p]["step"]) ** 0.5)


@pytest.mark.parametrize("before", [False, True], ids=["made by the step", "made before"])
def test_a_counter_that_several_parameters_share_is_refused(before: bool, endpoint: str) -> None:
    def make(model: Any) -> torch.optim.Optimizer:
        optimizer = SharedCounter(model.parameters())
        if before:
            count = torch.tensor(0.0)
            for p in model.parameters():
                optimizer.state[p]["step"] = count
        return optimizer

    with pytest.raises(errors.CaptureError, match="one tensor") as refused, made(endpoint, optimize=make) as s:
        s.train(2)
    assert "clone" in refused.value.remedy
