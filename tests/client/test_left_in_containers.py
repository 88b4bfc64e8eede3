"""Tensors that a step leaves in lists and dictionaries that stay are state; new containers of tensors are refused."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gpumux import client, errors
from tests.client.parity import Work, check
from tests.client.python_changes import DATA, net


def zeros() -> torch.Tensor:
    return torch.zeros(6, 4)


def in_lists(state: Any, out: torch.Tensor) -> torch.Tensor:
    mixed: torch.Tensor = 0.5 * state.layers[0][0] + 0.25 * state.layers[1][1] + out * state.layers[0][1]
    state.layers[0][0], state.layers[0][1] = mixed.detach(), out.detach()
    state.layers[1][1] = state.layers[0][1] - state.layers[0][0]
    return mixed


def in_a_list(state: Any, out: torch.Tensor) -> torch.Tensor:
    state.layers[0][0] = (0.5 * state.layers[0][0] + out).detach()
    found: torch.Tensor = out + state.layers[0][0]
    return found


@pytest.mark.parametrize("use", [in_lists, in_a_list])
def test_tensors_that_a_step_puts_into_lists_that_stay_are_state(
    use: Callable[..., torch.Tensor], endpoint: str
) -> None:
    def make() -> Work:
        model, state = net(), types.SimpleNamespace(layers=[[zeros(), zeros()], [zeros(), zeros()]])
        opt = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            opt.zero_grad()
            loss = F.cross_entropy(use(state, model(x)), y)
            loss.backward()
            opt.step()
            return loss

        def loop(run: Any) -> list[Any]:
            out: list[Any] = []
            for i in range(8):
                out.append(run(*DATA[i % 3]))
                if i == 3:
                    out.append([t.clone() for layer in state.layers for t in layer])
                if i == 5:
                    state.layers[0][0] = torch.ones(6, 4)  # a new beginning
            return [*out, [t.clone() for layer in state.layers for t in layer]]

        return Work([model], [opt], [(step, DATA[0])], loop)

    check(make, endpoint)


def into_a_tuple(state: Any, out: torch.Tensor) -> torch.Tensor:
    h, c = state.pair
    state.pair = ((0.5 * h + out).detach(), (c + state.pair[0]).detach())
    found: torch.Tensor = out + h * c
    return found


def into_one_item(state: Any, out: torch.Tensor) -> torch.Tensor:
    h, c = state.pair
    state.pair = (h, (0.5 * c + out).detach())
    found: torch.Tensor = out + h * c
    return found


def into_a_nested_tuple(state: Any, out: torch.Tensor) -> torch.Tensor:
    (h, c), g, factor = state.nested
    state.nested = ((out.detach(), (0.5 * c + h).detach()), (g + out).detach(), factor)
    found: torch.Tensor = out * factor + h * c - g
    return found


def into_a_tuple_of_a_list(state: Any, out: torch.Tensor) -> torch.Tensor:
    h, c = state.layers[0]
    state.layers[0] = (out.detach(), (0.5 * c + h).detach())
    found: torch.Tensor = out + h * c
    return found


def stay(state: Any) -> None:
    """The script leaves what steps put there."""


def begin_anew(state: Any) -> None:
    state.pair, state.nested = (torch.ones(6, 4), zeros()), ((zeros(), torch.ones(6, 4)), zeros(), 0.25)
    state.layers[0] = (zeros(), torch.ones(6, 4))


def swap(state: Any) -> None:
    state.pair, state.layers[0] = state.pair[::-1], state.layers[0][::-1]
    state.nested = (state.nested[0][::-1], *state.nested[1:])


def write(state: Any) -> None:
    for t in (state.pair[1], state.nested[1], state.layers[0][1]):
        t.mul_(0.5)


@pytest.mark.covering
@pytest.mark.parametrize("between", [stay, begin_anew, swap, write])
@pytest.mark.parametrize("use", [into_a_tuple, into_one_item, into_a_nested_tuple, into_a_tuple_of_a_list])
def test_tensors_that_a_step_puts_into_a_new_tuple_are_state(
    use: Callable[..., torch.Tensor], between: Callable[[Any], None], endpoint: str
) -> None:
    def make() -> Work:
        model = net()
        state = types.SimpleNamespace(
            pair=(zeros(), zeros()), nested=((zeros(), zeros()), zeros(), 0.5), layers=[(zeros(), zeros())]
        )
        opt = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            opt.zero_grad()
            loss = F.cross_entropy(use(state, model(x)), y)
            loss.backward()
            opt.step()
            return loss

        def loop(run: Any) -> list[Any]:
            out: list[Any] = []
            for i in range(7):
                out.append(run(*DATA[i % 3]))
                if i in (2, 4):
                    between(state)
            held = [*state.pair, *state.nested[0], state.nested[1], *state.layers[0]]
            return [*out, [t.clone() for t in held]]

        return Work([model], [opt], [(step, DATA[0])], loop)

    check(make, endpoint)


def test_a_tuple_that_the_script_kept_stays_as_it_was(endpoint: str) -> None:
    model, state = net(), types.SimpleNamespace(pair=(zeros(), zeros()))

    def step(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model(x)
        state.pair = ((state.pair[0] + out).detach(), (state.pair[1] - out).detach())
        return out

    with client.submit(step, example=DATA[0][:1], model=model, endpoint=endpoint) as job:
        job.step(DATA[0][0]).result()
        read = state.pair
        before = [t.clone() for t in read]
        job.step(DATA[0][0]).result()
        assert all(torch.equal(a, b) for a, b in zip(read, before, strict=True))
        assert not torch.equal(state.pair[0], before[0])
        job.step(DATA[0][0]).result()
        unread = state.pair
        job.step(DATA[0][0]).result()
        with pytest.raises(errors.StaleState, match="replaced by a step"):
            unread[1].sum()


def new_list(state: Any, out: torch.Tensor) -> None:
    state.hidden = [(0.5 * t + out).detach() for t in state.hidden]


def one_twice(state: Any, out: torch.Tensor) -> None:
    state.twice = tuple((0.5 * t + out).detach() for t in state.twice)


def another_kind(state: Any, out: torch.Tensor) -> None:
    state.pair = ((state.pair[0] + out).detach(), (state.pair[1] + out).detach().double())


def longer(state: Any, out: torch.Tensor) -> None:
    state.single = ((state.single[0] + out).detach(), out.detach())


def new_dictionary(state: Any, out: torch.Tensor) -> None:
    state.params = {k: state.params[k] - out.detach() for k in state.params}


def none_first(state: Any, out: torch.Tensor) -> None:
    state.table["h"] = out.detach() if state.table["h"] is None else (0.5 * state.table["h"] + out).detach()


def nothing_first(state: Any, out: torch.Tensor) -> None:
    state.table["new"] = out.detach() if "new" not in state.table else (0.5 * state.table["new"] + out).detach()


def view_first(state: Any, out: torch.Tensor) -> None:
    state.average["2.bias"] = 0.5 * state.average["2.bias"] + out.detach()[0]


REFUSED = [
    (new_list, "the step puts a new list of tensors into state.hidden", "stays: state[0] = "),
    (one_twice, "state.twice[0], a tensor that an earlier call of the step put in the place of one that", ".clone()"),
    (
        another_kind,
        "state.pair[1], a tensor that an earlier call of the step put in the place of one of shape",
        "shape",
    ),
    (longer, "the step puts a new tuple of tensors into state.single", "stays: state[0] = "),
    (new_dictionary, "the step puts a new dict of tensors into state.params", "stays: state[0] = "),
    (none_first, "state.table['h'], a tensor that an earlier call of the step left where there was none", "zeros"),
    (nothing_first, "state.table['new'], a tensor that an earlier call of the step left where there was none", "zeros"),
    (view_first, "in the place of one that shares memory with another tensor, 2.bias", ".clone()"),
]


@pytest.mark.parametrize(("leave", "message", "remedy"), REFUSED, ids=lambda one: getattr(one, "__name__", ""))
def test_what_a_step_leaves_in_a_container_and_reads_again_is_refused_by_its_cause(
    leave: Callable[..., None], message: str, remedy: str, endpoint: str
) -> None:
    model, zero = net(), zeros()
    state = types.SimpleNamespace(
        hidden=[zeros(), zeros()], pair=(zeros(), zeros()), twice=(zero, zero), single=(zeros(),),
        params={"w": zeros()}, table={"h": None}, average=model.state_dict(),
    )  # fmt: skip
    before = repr(state)

    def step(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model(x)
        leave(state, out)
        return out

    with pytest.raises(errors.CaptureError) as caught:
        client.submit(step, example=DATA[0][:1], model=model, endpoint=endpoint)
    assert message in caught.value.message
    assert remedy in caught.value.remedy
    assert repr(state) == before


def test_a_dictionary_with_none_may_get_a_tensor_that_is_not_read_again(endpoint: str) -> None:
    model = net()
    kept: dict[str, torch.Tensor | None] = {"out": None}

    def step(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model(x)
        kept["out"] = out.detach()
        return out

    with client.submit(step, example=DATA[0][:1], model=model, endpoint=endpoint) as job:
        for x, _ in DATA:
            assert torch.equal(job.step(x).result(), model(x))
        with pytest.raises(errors.StaleState, match="kept"):
            kept["out"] + 1  # type: ignore[operator]
