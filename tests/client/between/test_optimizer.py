"""Rows O1 to O9 of docs/plain-loop.md, "Between two steps": what a script does to the optimizer."""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpumux import client, errors
from tests.client.between.support import DATA, Script, X, Y, adam, made, momentum, network, same, without_zeroing


@pytest.mark.covering
@pytest.mark.parametrize("optimize", [adam, momentum])
@pytest.mark.parametrize(
    "zero",
    [
        lambda s: s.optimizer.zero_grad(),
        lambda s: s.model.zero_grad(),
        lambda s: s.optimizer.zero_grad(set_to_none=False),
        lambda s: s.model.zero_grad(set_to_none=False),
        lambda s: [p.grad.detach_().zero_() for p in s.model.parameters() if p.grad is not None],
    ],
    ids=["optimizer", "model", "optimizer to zeros", "model to zeros", "by hand"],
)
def test_o1_the_classic_loop_zeroes_outside_the_step(zero: Any, optimize: Any, endpoint: str) -> None:
    def script(s: Script) -> Any:
        losses = []
        for x, y in DATA:
            zero(s)
            losses.append(s.step(x, y).item())
        return losses

    same(script, endpoint, optimize=optimize, step=without_zeroing)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_o1_every_third_step_only(set_to_none: bool, endpoint: str) -> None:
    def script(s: Script) -> Any:
        losses = []
        for i, (x, y) in enumerate(DATA):
            if i % 3 == 0:
                s.optimizer.zero_grad(set_to_none=set_to_none)
            losses.append(s.step(x, y).item())
        return losses

    same(script, endpoint, optimize=momentum, step=without_zeroing)


def accumulating(model: Any, optimizer: Any) -> Any:
    def backward(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return backward


@pytest.mark.parametrize("set_to_none", [True, False])
def test_o1_gradients_accumulated_over_some_calls(set_to_none: bool, endpoint: str) -> None:
    def script(s: Script) -> Any:
        def apply() -> None:
            s.optimizer.step()

        update = apply if s.job is None else s.job.add(apply, example=())
        losses = []
        for i, (x, y) in enumerate(DATA):
            if i % 4 == 0:
                s.optimizer.zero_grad(set_to_none=set_to_none)
            losses.append(s.step(x, y).item())
            if i % 4 == 3:
                update()
        return losses

    same(script, endpoint, optimize=adam, step=accumulating)


def test_o1_clearing_asks_the_daemon_for_nothing(endpoint: str) -> None:
    with made(endpoint, step=without_zeroing) as s:
        assert s.job is not None
        s.train(2)
        calls: list[Any] = []
        s.job._session.call = lambda *a, **k: calls.append(a)  # type: ignore[method-assign, assignment]
        try:
            s.optimizer.zero_grad()
            s.model.zero_grad()
            assert s.model[0].weight.grad is None
        finally:
            del s.job._session.call
        assert not calls
        s.train(1)


def test_o1_a_loop_that_zeroes_in_the_step_may_zero_outside_too(endpoint: str) -> None:
    def script(s: Script) -> Any:
        out = s.train(2)
        s.optimizer.zero_grad()
        return out + s.train(3, 2)

    same(script, endpoint)


def test_o2_a_step_outside_is_noticed(endpoint: str) -> None:
    def script(s: Script) -> Any:
        s.train(2)
        s.optimizer.zero_grad()
        F.cross_entropy(s.model(X), Y).backward()
        s.optimizer.step()
        if s.job is not None:
            with pytest.raises(errors.LocalWrite):
                s.step(*DATA[2])
            s.job.load_state()
        return s.train(2, 2)

    same(script, endpoint)


def test_o2_a_step_on_gradients_that_were_not_kept_names_the_remedy(endpoint: str) -> None:
    with made(endpoint) as s:
        s.train(1)
        with pytest.raises(errors.StaleGradient, match="return it from the step"):
            s.optimizer.step()


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
    ],
    ids=["StepLR", "OneCycleLR", "ReduceLROnPlateau"],
)
def test_o3_schedules(schedule: Any, endpoint: str) -> None:
    def script(s: Script) -> Any:
        made = schedule(s.optimizer)
        out = []
        for x, y in DATA[:8]:
            loss = s.step(x, y)
            plateau = isinstance(made, torch.optim.lr_scheduler.ReduceLROnPlateau)
            made.step(loss.item()) if plateau else made.step()
            out += [loss.item(), s.optimizer.param_groups[0]["lr"]]
        s.optimizer.param_groups[0]["lr"] = 0.01
        s.optimizer.param_groups[0]["weight_decay"] = 0.0
        return out + s.train(2, 8)

    same(script, endpoint, optimize=lambda m: torch.optim.AdamW(_groups(m), lr=0.05))


def _groups(model: Any) -> list[dict[str, Any]]:
    """With the entries that a scheduler would add, which must exist before the job is submitted."""
    known = {"initial_lr": 0.1 / 25, "max_lr": 0.1, "min_lr": 0.1 / 25 / 1e4}
    return [{"params": list(model.parameters()), **known}]


def test_o4_groups(endpoint: str) -> None:
    def script(s: Script) -> Any:
        out = s.train(1)
        s.optimizer.add_param_group({"params": list(s.model[3].parameters()), "lr": 0.01})
        out += s.train(2, 1)
        s.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})  # a parameter without a gradient
        out += s.train(1, 3)
        del s.optimizer.param_groups[1:]
        return out + s.train(1, 4)

    same(script, endpoint, optimize=lambda m: torch.optim.SGD(m[0].parameters(), lr=0.1), max_variants=8)


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "read",
    [
        lambda s: s.optimizer.state[s.model[0].weight]["exp_avg"],
        lambda s: s.optimizer.state[s.model[0].weight]["step"],
        lambda s: s.optimizer.state.get(s.model[0].weight)["exp_avg_sq"].norm(),
        lambda s: [entry["exp_avg"] for entry in s.optimizer.state.values()],
        lambda s: len(s.optimizer.state),
        lambda s: s.model[0].weight in s.optimizer.state,
        lambda s: [list(entry) for _, entry in s.optimizer.state.items()],
        lambda s: list(dict(s.optimizer.state).values()),
        lambda s: list({**s.optimizer.state}.values()),
        lambda s: s.optimizer.state_dict(),
        lambda s: copy.deepcopy(s.optimizer).state_dict(),
        lambda s: list(copy.deepcopy(s.optimizer.state).values()),
        lambda s: pickle.loads(pickle.dumps(s.optimizer)).state_dict(),  # noqa: S301 - our own bytes
        lambda s: repr(s.optimizer.state)[:200],
        lambda s: bool(s.optimizer.state),
    ],
    ids=[
        "moment", "step", "get", "values", "len", "in", "items", "dict", "**", "state_dict", "deepcopy",
        "deepcopy of the state", "pickle", "repr", "bool",
    ],
)  # fmt: skip
def test_o5_reading_the_state_that_the_daemon_made(read: Any, endpoint: str) -> None:
    def script(s: Script) -> Any:
        out = []
        for i in range(3):
            s.train(2, 2 * i)
            out.append(read(s))
        return out

    same(script, endpoint)


@pytest.mark.parametrize(
    "read",
    [
        lambda entry, moment, count, state: moment.sum(),
        lambda entry, moment, count, state: count + 0,
        lambda entry, moment, count, state: count.item(),
        lambda entry, moment, count, state: entry["exp_avg_sq"].sum(),
        lambda entry, moment, count, state: [e["exp_avg"].clone() for e in state.values()],
        lambda entry, moment, count, state: [int(e["step"]) for e in state.values()],
    ],
    ids=["moment", "counter", "counter's item", "entry", "state", "counters in the state"],
)
def test_o5_what_was_found_there_before_is_up_to_date_later(read: Any, endpoint: str) -> None:
    """Each reference is the first that is read after a step, so that no other read has fetched the state for it."""

    def script(s: Script) -> Any:
        s.train(1)
        state = s.optimizer.state
        entry = state[s.model[0].weight]
        held = entry, entry["exp_avg"], entry["step"], state
        out = []
        for i in range(1, 4):
            s.train(1, i)
            out.append(read(*held))
        return out

    same(script, endpoint)


def test_o5_the_state_is_of_its_own_type_again(endpoint: str) -> None:
    with made(endpoint) as s:
        before = s.optimizer.state
        s.train(1)
        state = s.optimizer.state
        assert isinstance(state, defaultdict)
        assert len(state) == 6
        assert s.optimizer.state is before
        assert type(before) is defaultdict
        s.train(1)
    assert s.optimizer.state is before


@pytest.mark.covering
@pytest.mark.parametrize(
    "write",
    [
        lambda s: s.optimizer.state[s.model[0].weight]["exp_avg"].zero_(),
        lambda s: s.optimizer.state[s.model[0].weight]["exp_avg"].data.mul_(0.5),
        lambda s: s.optimizer.state[s.model[0].weight].__setitem__("exp_avg", torch.ones(8, 6)),
        lambda s: s.optimizer.state.clear(),
        lambda s: setattr(s.optimizer, "state", defaultdict(dict)),
        lambda s: s.optimizer.load_state_dict(adam(s.model).state_dict()),
        lambda s: s.optimizer.state[s.model[0].weight]["step"].fill_(100.0),
    ],
    ids=["in place", "by data", "replaced", "cleared", "the whole", "load_state_dict", "counter"],
)
@pytest.mark.parametrize(
    "then",
    [lambda s: None, lambda s: s.model(X), lambda s: s.model[0].weight.grad is None, lambda s: s.model[0].weight.sum()],
    ids=["at once", "model called", "gradient looked at", "parameter read"],
)
def test_o6_writing_it_is_noticed_and_load_state_answers_it(then: Any, write: Any, endpoint: str) -> None:
    def script(s: Script) -> Any:
        s.train(2)
        write(s)
        then(s)
        if s.job is not None:
            with pytest.raises(errors.LocalWrite, match=r"job\.load_state\(\)"):
                s.step(*DATA[2])
            s.job.load_state()
        return s.train(2, 2)

    same(script, endpoint)


@pytest.mark.covering
@pytest.mark.parametrize(
    "write",
    [
        lambda entry: entry.clear(),
        lambda entry: entry.__setitem__("step", torch.tensor(0.0)),
        lambda entry: entry.update(exp_avg=torch.ones(8, 6)),
    ],
    ids=["cleared", "counter replaced", "moment replaced"],
)
@pytest.mark.parametrize("then", ["train", "read", "model"])
def test_o6_an_entry_that_the_script_holds_is_written_while_it_is_behind(then: str, write: Any, endpoint: str) -> None:
    """By a reference to the dictionary, without reading `optimizer.state`."""

    def script(s: Script) -> Any:
        out: list[Any] = s.train(2)
        entry = s.optimizer.state[s.model[0].weight]
        out += s.train(1, 2)
        write(entry)
        if then == "model":
            out.append(s.model(X).sum())
        if s.job is not None:
            with pytest.raises(errors.LocalWrite, match=r"job\.load_state\(\)"):
                s.optimizer.state.keys() if then == "read" else s.step(*DATA[3])
            s.job.load_state()
        return out + s.train(2, 3)

    same(script, endpoint)


def test_o6_a_load_state_that_fails_leaves_the_scripts_entries(endpoint: str) -> None:
    """Here a backward pass should have added to a gradient that is in the daemon."""
    with made(endpoint, step=without_zeroing) as s:
        weight = s.model[0].weight
        s.train(2)
        entry = s.optimizer.state[weight]
        twice = (2 * weight).sum()
        s.train(1, 2)
        mine = entry["exp_avg"] = torch.ones(8, 6)
        twice.backward()
        with pytest.raises(errors.StaleGradient):
            s.job.load_state()
        assert entry["exp_avg"] is mine


@pytest.mark.parametrize(
    "write",
    [
        lambda o, p: o.state.clear(),
        lambda o, p: o.state.pop(p),
        lambda o, p: o.state.__setitem__(p, {}),
        lambda o, p: o.load_state_dict(copy.deepcopy(o.state_dict())),
    ],
    ids=["cleared", "popped", "emptied", "loaded"],
)
def test_o6_what_load_state_takes_away_keeps_its_values(write: Any, endpoint: str) -> None:
    """By the script's own reference to state that later steps replace."""

    def script(s: Script) -> Any:
        out: list[Any] = s.train(2)
        weight = s.model[0].weight
        moment, gradient = s.optimizer.state[weight]["exp_avg"], s.model[0].weight.grad
        write(s.optimizer, weight)
        weight.grad = None
        if s.job is not None:
            s.job.load_state()
        return [*out, *s.train(2, 2), moment.clone(), gradient.clone()]

    same(script, endpoint, step=without_zeroing)


def by_variable(model: Any, optimizer: Any) -> Any:
    state = optimizer.state
    weight = model[0].weight

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if weight in state:
            loss = loss + state[weight]["momentum_buffer"].square().sum()
        loss.backward()
        optimizer.step()
        return loss

    return step


def by_the_optimizer(model: Any, optimizer: Any) -> Any:
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if model[0].weight in optimizer.state:
            loss = loss + optimizer.state[model[0].weight]["momentum_buffer"].square().sum()
        loss.backward()
        optimizer.step()
        return loss

    return step


def test_o5_a_step_reads_the_state_by_the_optimizer_and_by_no_variable(endpoint: str) -> None:
    with pytest.raises(errors.CaptureError, match=r"reads state, which is the optimizer's state") as refused:
        same(lambda s: s.train(3), endpoint, step=by_variable, optimize=momentum)
    assert "optimizer.state[parameter]" in refused.value.remedy
    same(lambda s: s.train(3), endpoint, step=by_the_optimizer, optimize=momentum)


def test_o5_optimizers_that_share_a_state_dictionary_are_refused(endpoint: str) -> None:
    model = network()
    one, other = momentum(model), momentum(model)
    other.state = one.state

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        one.step()
        return loss

    with pytest.raises(errors.CaptureError, match="one state dictionary"):
        client.submit(step, example=(X, Y), model=model, optimizer=[one, other], endpoint=endpoint)


def test_o5_looking_at_the_state_of_a_parameter_that_has_none_is_no_write(endpoint: str) -> None:
    """The optimizer's defaultdict makes an empty entry."""

    def script(s: Script) -> Any:
        s.model[0].weight.requires_grad_(False)
        out: list[Any] = s.train(2)
        out.append(len(s.optimizer.state[s.model[0].weight]))
        return out + s.train(2, 2)

    same(script, endpoint, optimize=momentum)


def test_o7_another_optimizer_by_the_same_name(endpoint: str) -> None:
    model = network()
    optimizer = adam(model)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    with client.submit(step, example=(X, Y), model=model, optimizer=optimizer, endpoint=endpoint) as job:
        job.step(X, Y)
        optimizer = momentum(model)
        with pytest.raises(errors.CaptureError, match="was not given"):
            job.step(X, Y)


def test_o8_flags_that_python_branches_on(endpoint: str) -> None:
    def script(s: Script) -> Any:
        out = s.train(2)
        s.optimizer.param_groups[0]["nesterov"] = True
        out += s.train(2, 2)
        s.optimizer.param_groups[0]["maximize"] = True
        return out + s.train(2, 4)

    same(script, endpoint, optimize=momentum)


def test_o9_an_optimizer_hook(endpoint: str) -> None:
    def script(s: Script) -> Any:
        out = s.train(2)

        def halve(optimizer: Any, args: Any, kwargs: Any) -> None:
            for p in s.model.parameters():
                p.grad.mul_(0.5)

        handle = s.optimizer.register_step_pre_hook(halve)
        out += s.train(2, 2)
        handle.remove()
        return out + s.train(1, 4)

    same(script, endpoint)


@pytest.mark.parametrize(
    "read", [lambda m: m[0].weight.sum(), lambda m: m[0].weight.grad is None], ids=["model", "gradient"]
)
def test_o6_a_state_that_was_replaced_is_a_write_whatever_is_read_meanwhile(read: Any, endpoint: str) -> None:
    def script(s: Script) -> Any:
        s.train(1)
        kept = copy.deepcopy(s.optimizer.state_dict())
        s.train(1, 1)
        s.optimizer.load_state_dict(kept)
        read(s.model)
        if s.job is not None:
            with pytest.raises(errors.LocalWrite, match=r"job\.load_state\(\)"):
                s.step(*DATA[2])
            s.job.load_state()
        return s.train(2, 2)

    same(script, endpoint)


@pytest.mark.parametrize("replace", ["load_state_dict", "state"])
def test_o6_a_state_that_was_replaced_last_outlives_the_job(replace: str, endpoint: str) -> None:
    def script(s: Script) -> Any:
        s.train(1)
        kept = copy.deepcopy(s.optimizer.state_dict())
        losses = s.train(2, 1)
        if replace == "load_state_dict":
            s.optimizer.load_state_dict(kept)
        else:
            s.optimizer.state = defaultdict(dict)
        return losses

    same(script, endpoint)


def test_o6_a_state_that_was_replaced_is_not_overwritten_where_another_is_read(endpoint: str) -> None:
    torch.manual_seed(7)
    model = network()
    first, second = adam(model[0]), adam(model[3])

    def step(x: Tensor, y: Tensor) -> Tensor:
        model.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        first.step()
        second.step()
        return loss

    with client.submit(step, example=(X, Y), model=model, optimizer=[first, second], endpoint=endpoint) as job:
        job.step(X, Y)
        kept = copy.deepcopy(first.state_dict())
        job.step(X, Y)
        first.load_state_dict(kept)
        with pytest.raises(errors.LocalWrite, match=r"job\.load_state\(\)"):
            second.state_dict()
        job.load_state()
        assert [entry["step"].item() for entry in second.state.values()] == [2.0, 2.0]
        assert [entry["step"].item() for entry in first.state.values()] == [1.0, 1.0]
