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
    mixed = 0.5 * state.layers[0][0] + 0.25 * state.layers[1][1] + out * state.layers[0][1]
    state.layers[0][0], state.layers[0][1] = mixed.detach(), out.detach()
    state.layers[1][1] = state.layers[0][1] - state.layers[0][0]
    return mixed


def in_a_list(state: Any, out: torch.Tensor) -> torch.Tensor:
    state.layers[0][0] = (0.5 * state.layers[0][0] + out).detach()
    return out + state.layers[0][0]


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


def new_list(state: Any, out: torch.Tensor) -> None:
    state.hidden = [(0.5 * t + out).detach() for t in state.hidden]


def new_tuple(state: Any, out: torch.Tensor) -> None:
    state.pair = tuple((0.5 * t + out).detach() for t in state.pair)


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
    (
        new_tuple,
        "uses state.pair[0], a tensor that an earlier call of the step left in a new tuple",
        "stays: state[0] =",
    ),
    (new_dictionary, "the step puts a new dict of tensors into state.params", "stays: state[0] = "),
    (none_first, "state.table['h'], a tensor that an earlier call of the step left where there was none", "zeros"),
    (nothing_first, "state.table['new'], a tensor that an earlier call of the step left where there was none", "zeros"),
    (view_first, "in the place of one that shares memory with another tensor, 2.bias", ".clone()"),
]


@pytest.mark.parametrize(("leave", "message", "remedy"), REFUSED, ids=lambda one: getattr(one, "__name__", ""))
def test_what_a_step_leaves_in_a_container_and_reads_again_is_refused_by_its_cause(
    leave: Callable[..., None], message: str, remedy: str, endpoint: str
) -> None:
    model = net()
    state = types.SimpleNamespace(
        hidden=[zeros(), zeros()], pair=(zeros(), zeros()), params={"w": zeros()}, table={"h": None},
        average=model.state_dict(),
    )  # fmt: skip
    before = repr(state)

    def step(x: torch.Tensor) -> torch.Tensor:
        out = model(x)
        leave(state, out)
        return out

    with pytest.raises(errors.CaptureError) as caught:
        client.submit(step, example=DATA[0][:1], model=model, endpoint=endpoint)
    assert message in caught.value.message
    assert remedy in caught.value.remedy
    assert repr(state) == before


def test_a_dictionary_with_none_may_get_a_tensor_that_is_not_read_again(endpoint: str) -> None:
    model, kept = net(), {"out": None}

    def step(x: torch.Tensor) -> torch.Tensor:
        out = model(x)
        kept["out"] = out.detach()
        return out

    with client.submit(step, example=DATA[0][:1], model=model, endpoint=endpoint) as job:
        for x, _ in DATA:
            assert torch.equal(job.step(x).result(), model(x))
        with pytest.raises(errors.StaleState, match="kept"):
            kept["out"] + 1  # type: ignore[operator]
