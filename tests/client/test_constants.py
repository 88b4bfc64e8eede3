"""Python may read tensors that a step makes from constants and sizes alone, and no others."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from gpumux import client, errors
from tests.client.parity import Work, batches, check, simple_loop

DATA = batches((6, 8), classes=4)


def rates(x: Tensor) -> list[float]:
    return [rate.item() for rate in torch.linspace(0, 0.3, x.shape[0])]


def causal(x: Tensor) -> bool:
    size = x.shape[0]
    mask = torch.full((size, size), float("-inf")).triu(1)
    return bool((mask == nn.Transformer.generate_square_subsequent_mask(size)).all())


def written(x: Tensor) -> float:
    table = torch.zeros(3, 3)
    table[1:, ::2] = 2.0
    table.t().mul_(torch.arange(3.0))
    return float(table.sum())


READS: list[Callable[[Tensor], Any]] = [
    rates, causal, written,
    lambda x: torch.arange(x.shape[0]).tolist(),
    lambda x: torch.equal(torch.eye(3), torch.ones(3).diag()),
    lambda x: int(torch.arange(x.shape[1]).numpy()[3]),
    lambda x: torch.tensor([1.0, 4.0])[1].sqrt().item(),
    lambda x: torch.zeros_like(x).sum().item(),
]  # fmt: skip


@pytest.mark.parametrize("read", READS)
def test_what_is_made_of_constants_and_sizes_is_evaluated(read: Callable[[Tensor], Any], endpoint: str) -> None:
    def make() -> Work:
        model = nn.Linear(8, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor, y: Tensor) -> Any:
            optimizer.zero_grad()
            known = read(x)
            scale = float(known[-1] if isinstance(known, list) else known) + 1
            loss = nn.functional.cross_entropy(model(x), y) * scale
            loss.backward()
            optimizer.step()
            return loss, known

        return Work([model], [optimizer], [(step, DATA[0])], simple_loop(DATA, 6))

    check(make, endpoint)


OTHERS: dict[str, Callable[[Tensor, nn.Linear, Any], Tensor]] = {
    "the batch": lambda x, model, optimizer: torch.ones(3) * x.amax(),
    "the batch, written into a constant": lambda x, model, optimizer: torch.zeros(8).copy_(x[0]),
    "a parameter": lambda x, model, optimizer: model.bias,
    "a draw": lambda x, model, optimizer: torch.rand(3),
    "a learning rate": lambda x, model, optimizer: torch.full((3,), optimizer.param_groups[0]["lr"]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_depends_on_anything_else_is_not(name: str, endpoint: str) -> None:
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        found: Tensor = model(x).sum() * OTHERS[name](x, model, optimizer).sum().item()
        found.backward()
        optimizer.step()
        return found

    with pytest.raises(errors.DataDependent):
        client.submit(step, example=DATA[0], model=model, optimizer=optimizer, endpoint=endpoint)


def others(z: Tensor) -> Tensor:
    """The similarities of each row with all but itself, as contrastive losses choose them."""
    mask = ~torch.eye(len(z), dtype=torch.bool)
    return (z @ z.t())[mask].view(len(z), -1).logsumexp(1)


def written_at_a_mask(z: Tensor) -> Tensor:
    found = z @ z.t()
    found[torch.eye(len(z), dtype=torch.bool)] = -1e9
    return found.softmax(1)


def groups_of_one_size(z: Tensor) -> Tensor:
    """As DINO finds the crops that go through the model together."""
    ends = torch.cumsum(torch.unique_consecutive(torch.tensor([8, 8, 4, 4, 4, 2]), return_counts=True)[1], 0)
    start, found = 0, []
    for end in ends:
        found.append(z[start:end].prod())
        start = end
    return torch.stack(found)


def pairs(z: Tensor) -> Tensor:
    rows, columns = torch.ones(len(z), len(z)).triu(1).nonzero(as_tuple=True)
    return (z @ z.t())[rows, columns]


SHAPED: list[Callable[[Tensor], Tensor]] = [
    others, written_at_a_mask, groups_of_one_size, pairs,
    lambda z: z[:, torch.tensor([True, False, True, False])],
    lambda z: z[torch.tensor([True, False, True, False, True, True]), torch.tensor([1, 0, 2, 0])],
    lambda z: z.repeat_interleave(torch.tensor([0, 2, 1, 3, 1, 1]), dim=0),
    lambda z: z[torch.zeros(6, dtype=torch.bool)].sum() + z,
    lambda z: torch.masked_select(torch.arange(4.0), torch.tensor([True, False, False, True])) * z[:, :2],
]  # fmt: skip


@pytest.mark.parametrize("read", SHAPED)
def test_shapes_that_constants_decide_are_known(read: Callable[[Tensor], Tensor], endpoint: str) -> None:
    def make() -> Work:
        model = nn.Linear(8, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            z = model(x)
            loss = nn.functional.cross_entropy(z, y) + read(z).mean()
            loss.backward()
            optimizer.step()
            return loss

        return Work([model], [optimizer], [(step, DATA[0])], simple_loop(DATA, 6))

    check(make, endpoint)


@pytest.mark.parametrize("name", ["the batch", "a parameter", "a draw"])
def test_a_mask_of_anything_else_chooses_nothing(name: str, endpoint: str) -> None:
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        mask = (OTHERS[name](x, model, optimizer) > 0)[:3]
        found: Tensor = model(x)[:3][mask].sum()
        found.backward()
        optimizer.step()
        return found

    with pytest.raises(errors.DataDependent):
        client.submit(step, example=DATA[0], model=model, optimizer=optimizer, endpoint=endpoint)


def test_the_content_at_the_time_of_the_reading_counts(endpoint: str) -> None:
    def make() -> Work:
        model = nn.Linear(8, 4)

        def step(x: Tensor, y: Tensor) -> Any:
            count = torch.zeros(2)
            before = count[0].item()
            count += 1
            after = count[0].item()
            count += x.mean()
            return model(x).sum(), before, after

        return Work([model], [], [(step, DATA[0])], simple_loop(DATA, 2))

    check(make, endpoint)


def test_a_window_made_at_every_step_is_the_same_each_time(endpoint: str) -> None:
    """As HiFi-GAN's loss makes it. torch's first fake hann_window has one element more in memory than the later ones,
    which come from a cache."""

    def make() -> Work:
        model = nn.Linear(8, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        windows: dict[str, Tensor] = {}

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            windows["hann"] = torch.hann_window(4)
            loss = (model(x) @ windows["hann"]).pow(2).mean()
            loss.backward()
            optimizer.step()
            return loss

        return Work([model], [optimizer], [(step, DATA[0])], simple_loop(DATA, 3))

    FakeTensorMode.cache_clear()
    check(make, endpoint)


class Ready(nn.Module):
    """Its mask is made at the first use, which a flag marks."""

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


def test_a_constant_that_a_flag_guards_is_there_in_later_steps(endpoint: str) -> None:
    def make() -> Work:
        model = Ready()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        def loop(run: Any) -> list[Any]:
            found = [run(*DATA[i % 3]) for i in range(3)]
            return [*found, model.mask.clone(), *(run(*DATA[i % 3]) for i in range(3))]

        return Work([model], [optimizer], [(step, DATA[0])], loop)

    check(make, endpoint)


def test_constants_that_share_memory_are_not_copied_apart(endpoint: str) -> None:
    class Held:
        whole: Tensor | None = None
        part: Tensor

    model, held = nn.Linear(8, 4), Held()

    def step(x: Tensor, y: Tensor) -> Tensor:
        if held.whole is None:
            held.whole = torch.arange(8).float()
            held.part = held.whole[:4]
        found: Tensor = model(x) * held.part
        return found

    with pytest.raises(errors.UnknownTensor, match=r"held\.part"):
        client.submit(step, example=DATA[0], model=model, endpoint=endpoint)


def test_one_constant_under_two_names_stays_one(endpoint: str) -> None:
    def make() -> Work:
        model, held = nn.Linear(8, 4), dict[str, Tensor]()

        def step(x: Tensor, y: Tensor) -> Tensor:
            held["a"] = held["b"] = torch.arange(4).float()
            found: Tensor = model(x) * held["a"]
            return found

        def loop(run: Any) -> list[Any]:
            found: list[Any] = []
            for i in range(3):
                found.append(run(*DATA[i]))
                held["a"].add_(1.0)
                found.append(held["b"].clone())
            return found

        return Work([model], [], [(step, DATA[0])], loop)

    check(make, endpoint)


def test_a_constant_that_each_step_leaves_is_the_scripts_to_write(endpoint: str) -> None:
    def make() -> Work:
        model, held = nn.Linear(8, 4), {"mask": torch.ones(4)}

        def step(x: Tensor, y: Tensor) -> Tensor:
            found: Tensor = model(x) * held["mask"]
            held["mask"] = (torch.arange(4) % 2).float()
            return found

        def loop(run: Any) -> list[Any]:
            found: list[Any] = []
            for i in range(6):
                found += [run(*DATA[i % 3]), held["mask"].clone()]
                if i == 2:
                    held["mask"].fill_(3.0)
                if i == 4:
                    held["mask"] = torch.full((4,), 2.0)
            return found

        return Work([model], [], [(step, DATA[0])], loop)

    check(make, endpoint)


@pytest.mark.parametrize("first", [None, torch.zeros(2)], ids=["nothing", "another shape"])
def test_a_first_step_that_reads_what_was_there_before_the_constant_does_so(
    first: Tensor | None, endpoint: str
) -> None:
    def make() -> Work:
        model = nn.Linear(8, 4)
        held = {"last": first if first is None else first.clone()}

        def step(x: Tensor, y: Tensor) -> Tensor:
            found: Tensor = model(x)
            if held["last"] is not None:
                found = found + held["last"].sum()
            held["last"] = torch.arange(4).float()
            return found

        return Work([model], [], [(step, DATA[0])], simple_loop(DATA, 2))

    check(make, endpoint)


def test_a_constant_is_made_anew_for_another_length(endpoint: str) -> None:
    def make() -> Work:
        model = nn.Linear(8, 4)
        held: dict[str, Any] = {"mask": None, "shape": ()}

        def step(x: Tensor, y: Tensor) -> Tensor:
            if held["shape"] != tuple(x.shape):
                held["mask"], held["shape"] = torch.arange(len(x)).float()[:, None], tuple(x.shape)
            found: Tensor = model(x) * held["mask"]
            return found

        def loop(run: Any) -> list[Any]:
            x, y = DATA[0]
            return [run(x[:n], y[:n]) for n in (6, 6, 4, 4, 6)]

        return Work([model], [], [(step, DATA[0])], loop)

    check(make, endpoint)


@pytest.mark.parametrize("where", ["an attribute", "a dictionary", "a closure"])
def test_constants_in_a_tuple_made_at_the_first_use(where: str, endpoint: str) -> None:
    """As lit-gpt keeps the cosines and sines of its rotary embeddings."""

    def make() -> Work:
        model, held, table, pair = nn.Linear(8, 4), SimpleNamespace(pair=None), {"pair": None}, None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def get() -> Any:
            return {"an attribute": held.pair, "a dictionary": table["pair"], "a closure": pair}[where]

        def put(value: Any) -> None:
            nonlocal pair
            if where == "an attribute":
                held.pair = value
            elif where == "a dictionary":
                table["pair"] = value
            else:
                pair = value

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            if get() is None:
                angles = torch.arange(4).float()
                put((angles.cos(), 2, angles.sin()))
            cos, times, sin = get()
            out = model(x)
            loss = nn.functional.cross_entropy(out * cos + times * out.flip(1) * sin, y)
            loss.backward()
            optimizer.step()
            return loss

        def loop(run: Any) -> list[Any]:
            found: list[Any] = []
            for i in range(7):
                found += [run(*DATA[i % 3]), [t.clone() for t in get()[::2]], get()[1]]
                if i == 2:
                    put(None)
                if i == 4:
                    get()[0].mul_(0.5)
                if i == 5:
                    put((get()[2], 3, get()[0]))
            return found

        return Work([model], [optimizer], [(step, DATA[0])], loop)

    check(make, endpoint)


@pytest.mark.parametrize("second", [lambda first, x: first[:2], lambda first, x: x.mean()], ids=["a view", "data"])
def test_a_tuple_that_can_not_be_filled_as_a_whole(second: Callable[[Tensor, Tensor], Tensor], endpoint: str) -> None:
    model, held = nn.Linear(8, 4), SimpleNamespace(pair=None)

    def step(x: Tensor, y: Tensor) -> Tensor:
        if held.pair is None:
            first = torch.arange(4).float()
            held.pair = (first, second(first, x))
        found: Tensor = model(x) * held.pair[0] + held.pair[1].sum()
        return found

    with pytest.raises((errors.UnknownTensor, errors.NotRepeatable)):
        client.submit(step, example=DATA[0], model=model, endpoint=endpoint)
    assert held.pair is None
