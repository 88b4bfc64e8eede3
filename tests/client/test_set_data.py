"""Steps that set `.data` of a parameter or buffer: what the rest of the step, the state after it and the next step see.
What is refused stands in test_refusals.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpumux import client, errors
from tests.client.parity import Work, batches, check

Body = Callable[[Any, Any, Any], Any]


OUTSIDE = torch.tensor([1.0, 2.0, 3.0])


def set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    tensor.data = value


def restored(m: Any, o: Any, x: Any) -> Any:
    """Weights put aside for a pass and back."""
    old = [p.data for p in m.parameters()]
    for p in m.parameters():
        p.data = p.data + 0.1
    found = m(x).sum()
    for p, value in zip(m.parameters(), old, strict=True):
        p.data = value
    return found.detach()


def written_later(m: Any, o: Any, x: Any) -> Any:
    value = m[0].weight.detach() * 0.5
    m[0].weight.data = value
    value.add_(1)
    with torch.no_grad():
        m[0].weight.mul_(2)
    return value.sum()


def the_old_memory(m: Any, o: Any, x: Any) -> Any:
    old = m[0].weight.detach()
    m[0].weight.data = m[0].weight.detach() * 0.5
    old.add_(100)  # of no effect
    return old.sum() + m[0].weight.detach().sum()


def twice(m: Any, o: Any, x: Any) -> None:
    m[0].bias.data = m[0].bias.data * 2
    first = m[0].bias.data
    m[0].bias.data = first + 1
    first.zero_()


def in_a_graph(m: Any, o: Any, x: Any) -> Any:
    """Backward uses a parameter's value of then, as torch keeps it."""
    out = m[2](m[0](x))
    m[2].weight.data = m[2].weight.data * 3
    return torch.autograd.grad(out.sum(), m[0].weight)[0]


def vector(m: Any, o: Any, x: Any) -> None:
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(m.parameters()) * 0.9, m.parameters())


def kept_by_the_optimizer(m: Any, o: Any, x: Any) -> None:
    for p in m.parameters():
        o.state[p]["before"] = p.data.clone()
        p.data = p.data * 0.5
    m(x).sum()
    for p in m.parameters():
        p.data = o.state[p]["before"]


def a_row_kept(m: Any, o: Any, x: Any) -> None:
    value = m[0].weight.detach() * 0.9
    m[0].weight.data = value
    o.state[m[0].weight]["row"] = value[2]


def returned(m: Any, o: Any, x: Any) -> Any:
    m[0].weight.data = m[0].weight.data.clamp(-0.2, 0.2)
    return m[0].weight, m[0].weight.data * 1


BODIES: dict[str, Body] = {
    "a parameter": lambda m, o, x: set_data(m[0].weight, m[0].weight.data * 0.9),
    "by its gradient": lambda m, o, x: set_data(m[0].weight, m[0].weight - 0.1 * m[0].weight.grad),
    "a buffer": lambda m, o, x: set_data(m[1].running_mean, m[1].running_mean * 0.5),
    "a constant": lambda m, o, x: set_data(m[0].bias, torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])),
    "of a tensor outside": lambda m, o, x: set_data(m[0].bias, torch.cat([OUTSIDE, OUTSIDE]) * 0.5),
    "zeros": lambda m, o, x: set_data(m[0].bias, torch.zeros_like(m[0].bias)),
    "of another parameter": lambda m, o, x: set_data(m[0].bias, m[1].bias.data * 1),
    "with random numbers": lambda m, o, x: set_data(m[0].bias, m[0].bias.data + torch.randn(6)),
    "vector_to_parameters": vector,
    "restored": restored,
    "written later": written_later,
    "the old memory": the_old_memory,
    "twice": twice,
    "in a graph": in_a_graph,
    "kept by the optimizer": kept_by_the_optimizer,
    "a row of it kept": a_row_kept,
    "returned": returned,
}


@pytest.mark.every(10)
@pytest.mark.parametrize("where", ["before", "between", "after"])
@pytest.mark.parametrize("name", BODIES)
def test_a_step_that_sets_data(name: str, where: str, endpoint: str) -> None:
    body, data = BODIES[name], batches((5, 6), classes=3)

    def make() -> Work:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            found = body(model, optimizer, x) if where == "before" and name != "by its gradient" else None
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            if where == "between":
                found = body(model, optimizer, x)
            optimizer.step()
            if where == "after":
                found = body(model, optimizer, x)
            return loss.detach(), found

        def loop(run: Callable[..., Any]) -> list[Any]:
            seen: list[Any] = []
            for i in range(6):
                seen.append(run(*data[i % 3]))
                if i == 3:
                    seen += [{k: v.clone() for k, v in model.state_dict().items()}, model[0](data[0][0])]
            return seen

        return Work([model], [optimizer], [(step, data[0])], loop)

    check(make, endpoint)


def test_a_weight_in_another_layout(endpoint: str) -> None:
    data = batches((2, 3, 5, 5), classes=2)

    def make() -> Work:
        torch.manual_seed(0)
        model: Any = nn.Conv2d(3, 2, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            model.weight.data = model.weight.data * 0.5
            return model(x).sum().detach()

        return Work([model], [], [(step, data[0])], lambda run: [run(*each) for each in data])

    check(make, endpoint)


def test_microbatches_refuse_it(endpoint: str) -> None:
    layer = nn.Linear(6, 3)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = layer(x).pow(2).mean()
        loss.backward()
        layer.weight.data = layer.weight.data * 0.5
        return loss

    with pytest.raises(errors.NotSplittable, match=r"sets \.data") as caught:
        client.submit(step, example=(torch.ones(4, 6),), model=layer, microbatches=2, endpoint=endpoint)
    assert "copy_" in caught.value.remedy
