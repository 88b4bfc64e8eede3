"""What a trace changes in Python is put back where its step is refused, or where only the trace showed the code."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gpumux import client, errors
from tests.client.parity import Work, check
from tests.client.python_changes import DATA, net, work

COUNTER = 0


class Held:
    shared = True

    def __init__(self) -> None:
        self.fresh = True
        self.count = 0


def delete(thing: Any) -> None:
    if hasattr(thing, "fresh"):
        del thing.fresh


def count_globally(thing: Any) -> None:
    globals()["".join(("COUN", "TER"))] += 1


def count_by_a_computed_name(thing: Any) -> None:
    name = "".join(("cou", "nt"))
    setattr(thing, name, thing.__dict__[name] + 1)


def add(thing: Any) -> None:
    setattr(thing, "".join(("oth", "er")), 3)


def change_the_class(thing: Any) -> None:
    setattr(type(thing), "".join(("sha", "red")), False)


def refused(change: Callable[[Any], None], thing: Any, endpoint: str, reads: bool = True) -> errors.GpumuxError:
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        opt.zero_grad()
        change(thing)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        return loss if not reads or loss > 100 else 2 * loss

    with pytest.raises(errors.GpumuxError) as caught:
        client.submit(step, example=DATA[0], model=model, optimizer=opt, endpoint=endpoint)
    return caught.value


@pytest.mark.parametrize("change", [delete, count_globally, count_by_a_computed_name, add, change_the_class])
@pytest.mark.parametrize("make", [Held, lambda: types.SimpleNamespace(fresh=True, count=0)])
def test_a_refused_submit_leaves_attributes_and_globals_as_they_were(
    change: Callable[[Any], None], make: Callable[[], Any], endpoint: str
) -> None:
    if change is change_the_class and make is not Held:
        pytest.skip("a class of Python's own can't be changed")
    thing = make()
    assert isinstance(refused(change, thing, endpoint), errors.DataDependent)
    assert (vars(thing), COUNTER, Held.shared) == ({"fresh": True, "count": 0}, 0, True)


@pytest.mark.parametrize(
    ("change", "name"),
    [(delete, "thing.fresh"), (count_globally, "COUNTER (0 -> 1)"), (count_by_a_computed_name, "thing.count (0 -> 1)")],
)
def test_a_change_that_later_steps_would_not_make_is_refused_by_name(
    change: Callable[[Any], None], name: str, endpoint: str
) -> None:
    thing = Held()
    error = refused(change, thing, endpoint, reads=False)
    assert isinstance(error, errors.NotRepeatable)
    assert name in error.message
    assert error.remedy
    assert (vars(thing), COUNTER) == ({"fresh": True, "count": 0}, 0)


class FirstItem:
    """Its flag, counter and class attribute are in code that nothing names."""

    every = 2.0

    def __init__(self) -> None:
        self.first = True
        self.calls = 0

    def __getitem__(self, i: int) -> float:
        factor = (3.0 if self.first else 1.0) * type(self).every
        self.first = False
        type(self).every = 1.0
        self.calls += 1
        return factor


class Turned:
    def __init__(self) -> None:
        self.on = False

    def __getitem__(self, i: int) -> float:
        self.on = not self.on
        return 2.0 if self.on else 1.0


class FlagOfClass:
    first = True

    def factor(self) -> float:
        found = 2.0 if self.first else 1.0
        self.first = False
        return found


class CounterOfClass:
    count = 0

    def factor(self) -> float:
        self.count += 1
        return float(self.count)


class LastOfClass:
    last: int | None = None

    def factor(self) -> float:
        found = 1.0 if self.last is None else 2.0
        self.last = 3
        return found


class Named:
    def __init__(self) -> None:
        self.name: str | None = None

    def factor(self) -> float:
        found = 1.0 if self.name is None else 2.0
        self.name = "used"
        return found


class OnlyFilled:
    def __init__(self) -> None:
        self.table: dict[str, float] = {}

    def factor(self) -> float:
        return self.table.setdefault("factor", 2.0)


@pytest.mark.every(3)
@pytest.mark.parametrize("kind", [FlagOfClass, CounterOfClass, LastOfClass, Named, OnlyFilled])
def test_the_first_call_does_what_it_does_in_the_plain_loop(kind: type[Any], endpoint: str) -> None:
    def make() -> Work:
        model, thing = net(), kind()
        made = work(model, lambda x, y: F.cross_entropy(model(x), y) * thing.factor(), lambda: None)
        loop = made.loop
        made.loop = lambda *run: [*loop(*run), dict(vars(thing))]
        return made

    check(make, endpoint)


def in_a_dictionary(thing: Any) -> float:
    found = 1.0 if "seen" in thing.table else 2.0
    thing.table["seen"] = 1
    return found


def in_a_set(thing: Any) -> float:
    found = 1.0 if thing.names else 2.0
    thing.names.add("seen")
    return found


def by_an_attribute(thing: Any) -> float:
    found = 1.0 if hasattr(thing, "done") else 2.0
    thing.done = True
    return found


def by_a_text(thing: Any) -> float:
    found = 1.0 if thing.name == "used" else 2.0
    thing.name = "used"
    return found


@pytest.mark.parametrize("use", [in_a_dictionary, in_a_set, by_an_attribute, by_a_text])
def test_a_first_call_of_its_own_that_no_flag_shows_is_refused(use: Callable[[Any], float], endpoint: str) -> None:
    model, thing = net(), types.SimpleNamespace(table={}, names=set(), name="new")
    before = repr(thing)

    def step(x: torch.Tensor) -> torch.Tensor:
        return model(x) * use(thing)

    with pytest.raises(errors.NotRepeatable, match="something else from then on") as caught:
        client.submit(step, example=DATA[0][:1], model=model, endpoint=endpoint)
    assert caught.value.remedy
    assert repr(thing) == before


@pytest.mark.parametrize("kind", [FirstItem, Turned])
def test_what_only_the_first_trace_shows_begins_at_its_own_value(kind: type[Any], endpoint: str) -> None:
    def make() -> Work:
        FirstItem.every = 2.0
        model, thing = net(), kind()
        made = work(model, lambda x, y: F.cross_entropy(model(x), y) * thing[0], lambda: None)
        loop = made.loop
        made.loop = lambda *run: [*loop(*run), dict(vars(thing))]
        return made

    check(make, endpoint)


def otherwise_once(thing: Any, out: torch.Tensor) -> torch.Tensor:
    if thing.mask is None:
        thing.mask, thing.size = (torch.arange(4) % 2).float(), (6, 4)
        return 2 * out
    return out * thing.mask


def beside_a_dictionary(thing: Any, out: torch.Tensor) -> torch.Tensor:
    if thing.mask is None:
        thing.mask = (torch.arange(4) % 2).float()
    return out * thing.mask * in_a_dictionary(thing)


def drawing_once(thing: Any, out: torch.Tensor) -> torch.Tensor:
    if thing.mask is None:
        thing.mask, thing.size = (torch.arange(4) % 2).float(), (6, 4)
        torch.rand(20)
    return F.dropout(out * thing.mask, 0.5)


@pytest.mark.parametrize("use", [otherwise_once, beside_a_dictionary, drawing_once])
def test_a_first_call_of_its_own_beside_a_constant_that_it_leaves_is_refused(use: Any, endpoint: str) -> None:
    model, thing = torch.nn.Linear(8, 4), types.SimpleNamespace(mask=None, size=None, table={})
    before = repr(thing)

    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(use(thing, model(x)))

    with pytest.raises(errors.NotRepeatable, match="something else from then on") as caught:
        client.submit(step, example=(torch.zeros(6, 8),), model=model, endpoint=endpoint)
    assert caught.value.remedy
    assert repr(thing) == before


def mask(rows: int) -> torch.Tensor:
    return torch.triu(torch.ones(rows, 4)) * 0.5


def window(rows: int) -> torch.Tensor:
    return torch.triu(torch.ones(4, rows + 2)).t()[1:-1, :]


@pytest.mark.parametrize("make", [mask, window])
def test_a_constant_made_again_for_another_size_is_made_as_in_the_plain_loop(make: Any, endpoint: str) -> None:
    def works() -> Work:
        model, thing = net(), types.SimpleNamespace(mask=None, size=None)
        width = model(DATA[0][0]).shape[1]

        def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            out = model(x)
            if thing.size != tuple(out.shape):
                thing.mask, thing.size = make(len(out)), tuple(out.shape)
            return F.cross_entropy(F.dropout(out * thing.mask[:, :width].sum(1, keepdim=True), 0.5), y)

        return work(model, loss, lambda: None)

    check(works, endpoint)
