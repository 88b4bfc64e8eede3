"""Lists, dictionaries and sets that the script makes anew, with the same content or with other numbers and tensors, are
no other variant of the step. Those that the step writes into are."""

from __future__ import annotations

import collections
import copy
import random
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.client.parity import Work, check
from tests.client.python_changes import DATA, net


def counting(
    traces: list[int], counts: list[list[int]], steps: int, turn: Callable[[Any, int], Any]
) -> Callable[[Any], list[Any]]:
    """A loop of these turns, which adds to `counts` how many traces there were after each."""

    def loop(run: Any) -> list[Any]:
        out, count = [], []
        for i in range(steps):
            out.append(turn(run, i))
            count.append(len(traces))
        counts.append(count)
        return out

    return loop


def ordered(i: int) -> Any:
    return collections.OrderedDict(a=0.5, b=1.0)


# name -> (what the script makes before step i, what the step reads of it)
MADE: dict[str, tuple[Callable[[int], Any], Callable[[Any], Any]]] = {
    "list": (lambda i: [0.5, 1.0], lambda held: held[0]),
    "names": (lambda i: ["a", "b"], lambda held: 0.5 if "b" in held else 1.0),
    "dict": (lambda i: {"a": 0.5, "b": 1.0}, lambda held: held["a"]),
    "ordered": (ordered, lambda held: held["a"]),
    "set": (lambda i: {3, 5}, lambda held: 0.5 * len(held)),
    "frozen set": (lambda i: frozenset((3, i - i)), lambda held: 0.5 * len(held)),
    "slice": (lambda i: slice(0, 2 + i - i), lambda held: 0.5 * held.stop),
    "range": (lambda i: range(1, 3 + i - i), lambda held: 0.5 * len(held)),
    "deque": (lambda i: collections.deque([0.5, 1.0], maxlen=2), lambda held: held[-1]),
    "nested": (lambda i: {"a": [0.5, {"b": (1.0, [2.0])}]}, lambda held: held["a"][1]["b"][1][0]),
    "in a tuple": (lambda i: ([0.5], {"a": 2.0}), lambda held: held[0][0] * held[1]["a"]),
    "other numbers": (lambda i: {"a": [0.5 + 0.1 * i]}, lambda held: held["a"][0]),
    "a count": (lambda i: [i], lambda held: held[0] + 1),
}


def on_the_model(model: Any, made: Any) -> Any:
    model.it = made
    return model


HOLDERS: dict[str, Callable[[Any, Any], Any]] = {
    "a closure": lambda model, made: None,
    "an attribute": lambda model, made: types.SimpleNamespace(it=made),
    "an attribute of the model": on_the_model,
}


@pytest.mark.every(7)
@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("kind", MADE)
def test_made_anew_before_each_step(kind: str, holder: str, traces: list[int], endpoint: str) -> None:
    make_it, use = MADE[kind]
    counts: list[list[int]] = []

    def make() -> Work:
        model, held = net(), make_it(0)
        owner: Any = HOLDERS[holder](model, held)
        opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y) * use(held if owner is None else owner.it)
            loss.backward()
            opt.step()
            return loss

        def turn(run: Any, i: int) -> Any:
            nonlocal held
            if owner is None:
                held = make_it(i)
            else:
                owner.it = make_it(i)
            return run(*DATA[i % 3])

        return Work([model], [opt], [(step, DATA[0])], counting(traces, counts, 7, turn))

    check(make, endpoint)
    captured = counts[-1]
    assert captured[0] > 0, "the traces were counted"
    assert captured[2:] == [captured[2]] * 5, "nothing is traced once a number was seen to change"


def tensors(i: int, rows: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(i)
    return torch.rand(rows, 1, generator=draw), torch.rand(4, generator=draw)


# name -> (what the script makes of two tensors before each step, the tensors in it)
OF_TENSORS: dict[str, tuple[Callable[..., Any], Callable[[Any], Any]]] = {
    "list": (lambda a, b: [a, b], lambda held: held),
    "dict": (lambda a, b: {"a": a, "b": b}, lambda held: (held["a"], held["b"])),
    "ordered": (lambda a, b: collections.OrderedDict(a=a, b=b), lambda held: held.values()),
    "nested": (lambda a, b: {"a": [a, {"b": {"c": b}}]}, lambda held: (held["a"][0], held["a"][1]["b"]["c"])),
    "several": (lambda a, b: {"a": {"rows": a}, "b": [b]}, lambda held: (held["a"]["rows"], held["b"][0])),
    "beside a number": (lambda a, b: {"a": a, "b": b, "c": [0.5]}, lambda held: (held["a"] * held["c"][0], held["b"])),
}


@pytest.mark.parametrize("last", [False, True], ids=["of one shape", "a smaller last batch"])
@pytest.mark.parametrize("kind", OF_TENSORS)
@pytest.mark.every(5)
def test_made_anew_with_other_tensors(kind: str, last: bool, traces: list[int], endpoint: str) -> None:
    """As by `self.inputs = {...}` before each step, which captured it again each time."""
    make_it, use = OF_TENSORS[kind]
    counts: list[list[int]] = []

    def make() -> Work:
        model, held = net(), types.SimpleNamespace(it=make_it(*tensors(0)))
        opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            opt.zero_grad()
            rows, columns = use(held.it)
            loss = F.cross_entropy(model(x) * rows * columns, y)
            loss.backward()
            opt.step()
            return loss

        def turn(run: Any, i: int) -> Any:
            rows = 5 if last and i % 3 == 2 else 6
            held.it = make_it(*tensors(i, rows))
            return run(*[t[:rows] for t in DATA[i % 3]])

        return Work([model], [opt], [(step, DATA[0])], counting(traces, counts, 9, turn))

    check(make, endpoint)
    captured = counts[-1]
    assert captured[0] > 0, "the traces were counted"
    assert captured[2:] == [captured[2]] * 7, "nothing is traced again"
    assert (captured[2] > captured[1]) == last


def test_a_dictionary_with_a_tensor_that_comes_and_goes(endpoint: str) -> None:
    """And that two variables share at times, of which one gets another one."""

    def make() -> Work:
        model, held = net(), types.SimpleNamespace(it={"a": tensors(0)[0]})
        held.same = held.it
        opt = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            opt.zero_grad()
            out = model(x) if held.it is None else model(x) * held.it["a"]
            loss = F.cross_entropy(out + held.same["a"], y)
            loss.backward()
            opt.step()
            return loss

        def loop(run: Any) -> list[Any]:
            out = []
            for i in range(8):
                out.append(run(*DATA[i % 3]))
                made = {"a": tensors(i + 1)[0]}
                held.it, held.same = [(made, made), (None, made), (held.it, made), (made, held.same)][i % 4]
            return out

        return Work([model], [opt], [(step, DATA[0])], loop)

    check(make, endpoint)


def test_a_container_that_was_made_anew_is_watched(endpoint: str) -> None:
    def make() -> Work:
        model, held = net(), types.SimpleNamespace(weights=[1.0, 0.5], names={"a": [1, 2]})
        opt = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y) * held.weights[1] * len(held.names["a"])
            loss.backward()
            opt.step()
            return loss

        def loop(run: Any) -> list[Any]:
            out = [run(*DATA[0])]
            held.weights, held.names = [1.0, 0.5], {"a": [1, 2]}
            out.append(run(*DATA[1]))
            held.weights[1] = 0.25
            out.append(run(*DATA[2]))
            held.names["a"].append(3)
            out.append(run(*DATA[0]))
            held.weights, held.names = [1.0, 0.75], {"a": [1, 2, 3]}
            out.append(run(*DATA[1]))
            held.names["a"] = [1]
            return [*out, run(*DATA[2])]

        return Work([model], [opt], [(step, DATA[0])], loop)

    check(make, endpoint)


def test_a_list_in_a_tuple_that_a_module_of_torch_holds(endpoint: str) -> None:
    def make() -> Work:
        model: Any = net()
        model.scales = (2.0, [1.0, 0.5])
        opt = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y) * model.scales[1][1]
            loss.backward()
            opt.step()
            return loss

        def loop(run: Any) -> list[Any]:
            out = [run(*DATA[0])]
            model.scales[1][1] = 0.25
            return [*out, run(*DATA[1])]

        return Work([model], [opt], [(step, DATA[0])], loop)

    check(make, endpoint)


def test_a_set_with_another_order(endpoint: str) -> None:
    def make() -> Work:
        model, held = net(), {0, 8}
        opt = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            opt.zero_grad()
            factor = 1.0
            for number in held:
                factor = 0.5 * factor + number
            loss = F.cross_entropy(model(x), y) * factor
            loss.backward()
            opt.step()
            return loss

        def loop(run: Any) -> list[Any]:
            nonlocal held
            out = [run(*DATA[0])]
            held = {8, 0}
            assert list(held) == [8, 0]
            return [*out, run(*DATA[1])]

        return Work([model], [opt], [(step, DATA[0])], loop)

    check(make, endpoint)


def test_one_of_two_variables_with_the_same_list_gets_another(endpoint: str) -> None:
    def make() -> Work:
        model, first = net(), [1.0, 0.5]
        second = first
        opt = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y) * first[0] * second[1]
            loss.backward()
            opt.step()
            return loss

        def loop(run: Any) -> list[Any]:
            nonlocal first, second
            out = [run(*DATA[0])]
            first = [1.0, 0.5]
            out.append(run(*DATA[1]))
            second[1] = 0.25
            out.append(run(*DATA[2]))
            first[0] = 2.0
            out.append(run(*DATA[0]))
            first = second = [1.0, 0.5]
            out.append(run(*DATA[1]))
            first[1] = 3.0
            return [*out, run(*DATA[2])]

        return Work([model], [opt], [(step, DATA[0])], loop)

    check(make, endpoint)


def test_whether_two_variables_hold_the_same_list(endpoint: str) -> None:
    def make() -> Work:
        model, held = net(), types.SimpleNamespace(made_for=None, weights=[0.5], scale=0.0)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            opt.zero_grad()
            known = held.made_for is held.weights
            loss = F.cross_entropy(model(x), y) * (held.weights[0] if known else 2.0)
            loss.backward()
            opt.step()
            return loss

        def loop(run: Any) -> list[Any]:
            out = [run(*DATA[0])]
            held.made_for = held.weights
            out.append(run(*DATA[1]))
            held.weights = [0.5]
            out.append(run(*DATA[2]))
            held.made_for = held.weights
            return [*out, run(*DATA[0])]

        return Work([model], [opt], [(step, DATA[0])], loop)

    check(make, endpoint)


def test_a_variable_that_holds_the_other_one_of_two_equal_lists(endpoint: str) -> None:
    def make() -> Work:
        model, held = net(), types.SimpleNamespace(first=[0.5], second=[0.5])
        held.present = held.first
        opt = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y) * (held.first[0] if held.present is held.first else 2 * held.second[0])
            loss.backward()
            opt.step()
            return loss

        def loop(run: Any) -> list[Any]:
            out = [run(*DATA[0])]
            held.first, held.second = [0.5], [0.5]
            held.present = held.second
            return [*out, run(*DATA[1])]

        return Work([model], [opt], [(step, DATA[0])], loop)

    check(make, endpoint)


class Held:
    pass


class Net(torch.nn.Sequential):
    pass


def counts_in_a_list(held: Any) -> None:
    held.it[0] += 1


def counts_in_a_dict(held: Any) -> None:
    held.it["n"] = held.it.get("n", 0) + 1


def turns(held: Any) -> None:
    held.it["on"] = not held.it["on"]


@pytest.mark.parametrize(
    ("made", "write", "read"),
    [
        (lambda: [0, 1], counts_in_a_list, lambda it: it[0]),
        (lambda: {"n": 0}, counts_in_a_dict, lambda it: it["n"]),
        (lambda: {"on": False}, turns, lambda it: 1 + it["on"]),
        (lambda: collections.deque([0, 2]), counts_in_a_list, lambda it: it[0]),
    ],
    ids=["list", "dict", "flag", "deque"],
)
def test_a_container_that_the_step_writes_into(
    made: Callable[[], Any], write: Callable[[Any], None], read: Callable[[Any], Any], endpoint: str
) -> None:
    def make() -> Work:
        model, held = net(), types.SimpleNamespace(it=made())
        opt = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            write(held)
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y) * read(held.it)
            loss.backward()
            opt.step()
            return loss

        def loop(run: Any) -> list[Any]:
            out: list[Any] = []
            for _ in range(3):
                before = held.it
                for i in range(3):
                    out += [run(*DATA[i]), copy.copy(held.it)]
                held.it = made()
                out.append(copy.copy(before))
            return out

        return Work([model], [opt], [(step, DATA[0])], loop)

    check(make, endpoint)


def test_a_list_with_tensors(endpoint: str) -> None:
    """Made anew with the same ones; then one of them, and its values, are others."""

    def make() -> Work:
        model = net()
        masks = [torch.ones(4), torch.full((4,), 0.5)]
        opt = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            opt.zero_grad()
            loss = F.cross_entropy(model(x) * masks[0] * masks[1], y)
            loss.backward()
            opt.step()
            return loss

        def loop(run: Any) -> list[Any]:
            nonlocal masks
            out = [run(*DATA[0])]
            masks = list(masks)
            out.append(run(*DATA[1]))
            masks[1] = torch.full((4,), 0.25)
            out.append(run(*DATA[2]))
            masks = [masks[1], masks[0]]
            out.append(run(*DATA[0]))
            masks[0].mul_(2.0)
            return [*out, run(*DATA[1])]

        return Work([model], [opt], [(step, DATA[0])], loop)

    check(make, endpoint)


def test_what_the_script_puts_into_a_list_that_the_step_does_not_read_any_more(endpoint: str) -> None:
    def make() -> Work:
        model, totals = net(), [torch.zeros(())]
        opt = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            totals[0].add_(loss.detach())
            (loss * totals[0]).backward()
            opt.step()
            return loss

        def loop(run: Any) -> list[Any]:
            nonlocal totals
            out, before = [run(*DATA[0])], totals
            totals = list(totals)
            out.append(run(*DATA[1]))
            before[0] = torch.full((), 9.0)
            out.append(run(*DATA[2]))
            return [*out, before[0].clone(), totals[0].clone()]

        return Work([model], [opt], [(step, DATA[0])], loop)

    check(make, endpoint)


def test_the_dictionary_of_a_functions_defaults_is_another(endpoint: str) -> None:
    def make() -> Work:
        model = net()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)

        def scaled(value: torch.Tensor, *, by: float = 1.0) -> torch.Tensor:
            return value * by

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            opt.zero_grad()
            loss = scaled(F.cross_entropy(model(x), y))
            loss.backward()
            opt.step()
            return loss

        def loop(run: Any) -> list[Any]:
            out = [run(*DATA[0])]
            scaled.__kwdefaults__ = {"by": 1.0}
            out.append(run(*DATA[1]))
            scaled.__kwdefaults__["by"] = 0.25
            out.append(run(*DATA[2]))
            scaled.__kwdefaults__ = {"by": 2.0}
            return [*out, run(*DATA[0])]

        return Work([model], [opt], [(step, DATA[0])], loop)

    check(make, endpoint)


@pytest.mark.parametrize("of_model", [False, True], ids=["an object", "a model"])
def test_the_dictionary_of_an_objects_attributes_is_another(of_model: bool, endpoint: str) -> None:
    def make() -> Work:
        model: Any = Net(net())
        held: Any = model if of_model else Held()
        held.scale, held.names, held.mask = 1.0, ["a"], torch.ones(4)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            opt.zero_grad()
            loss = F.cross_entropy(model(x) * held.mask, y) * held.scale * len(held.names)
            loss.backward()
            opt.step()
            return loss

        def loop(run: Any) -> list[Any]:
            out = [run(*DATA[0])]
            held.__dict__ = dict(vars(held))
            out.append(run(*DATA[1]))
            held.scale = 0.25
            out.append(run(*DATA[2]))
            held.names = ["a", "b"]
            out.append(run(*DATA[0]))
            held.__dict__ = {**vars(held), "mask": torch.full((4,), 0.5)}
            out.append(run(*DATA[1]))
            held.mask.mul_(3.0)
            return [*out, run(*DATA[2])]

        return Work([model], [opt], [(step, DATA[0])], loop)

    check(make, endpoint)


def without_hooks(model: Any) -> None:
    model[0]._forward_hooks = collections.OrderedDict()


def with_another_buffer(model: Any) -> None:
    model._buffers = {"scale": torch.full((), 2.0)}


def with_another_child(model: Any) -> None:
    model._modules = {**model._modules, "1": torch.nn.Tanh()}


@pytest.mark.parametrize("change", [without_hooks, with_another_buffer, with_another_child])
def test_a_module_gets_another_dictionary(change: Callable[[Any], None], endpoint: str) -> None:
    """As of hooks, by which scripts drop them all."""

    def make() -> Work:
        model: Any = net()
        model.register_buffer("scale", torch.ones(()))
        model[0].register_forward_hook(lambda module, inputs, output: output * 2)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y) * model.scale
            loss.backward()
            opt.step()
            return loss

        def loop(run: Any) -> list[Any]:
            out = [run(*DATA[0]), run(*DATA[1])]
            change(model)
            return [*out, run(*DATA[0]), run(*DATA[1])]

        return Work([model], [opt], [(step, DATA[0])], loop)

    check(make, endpoint)


# ---- at random


def _paths(value: Any) -> Iterator[tuple[Any, Any]]:
    """(holder, key) of all containers."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if not isinstance(value, set) else ()
    for key in keys:
        if isinstance(value[key], (list, dict, set, collections.deque)):
            yield value, key
            yield from _paths(value[key])


def _factor(value: Any) -> Any:
    if isinstance(value, dict):
        return sum(0.5 * _factor(item) + len(key) for key, item in value.items())
    if isinstance(value, set):
        return 0.25 * len(value)
    if isinstance(value, (list, collections.deque)):
        return sum((i + 1) * _factor(item) for i, item in enumerate(value))
    return value


def _change(draw: random.Random, tree: dict[str, Any]) -> None:
    """Makes a container anew, with the same or another number, changes one in place, or has two variables share it."""
    places = list(_paths(tree))
    holder, key = draw.choice(places)
    old = holder[key]
    what = draw.randrange(6)
    if what == 0:
        holder[key] = copy.copy(old)
    elif what == 1:
        tree.update(copy.deepcopy(tree))
    elif what == 2:
        holder[key] = copy.deepcopy(old)
    elif what == 3:
        other, name = draw.choice(places)
        inside = [h[k] for h, k in _paths(other[name])]
        if holder is not other[name] and not any(one is holder for one in inside):
            holder[key] = other[name]
    elif isinstance(old, set):
        old.add(len(old))
    else:
        if what == 4:
            old = holder[key] = copy.copy(old)
        numbers = [k for k in (old if isinstance(old, dict) else range(len(old))) if isinstance(old[k], float)]
        if numbers:
            old[draw.choice(numbers)] += 0.5


def _tensors_in(value: Any) -> Iterator[tuple[Any, Any]]:
    """(holder, key) of all tensors."""
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        if isinstance(value[key], torch.Tensor):
            yield value, key
        elif isinstance(value[key], (list, dict)):
            yield from _tensors_in(value[key])


def _with_others(value: Any, draw: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A copy of a container and all within, with other tensors."""
    if isinstance(value, dict):
        return type(value)((key, _with_others(item, draw)) for key, item in value.items())
    if isinstance(value, list):
        return [_with_others(item, draw) for item in value]
    return draw(value) if isinstance(value, torch.Tensor) else value


def _change_tensors(draw: random.Random, held: Any, made: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Makes containers anew, with the same tensors or others, gives tensors other places, or writes them."""
    holder, key = draw.choice(list(_paths(held.tree)))
    one, other = draw.sample(list(_tensors_in(held.tree)), 2)
    what = draw.randrange(9)
    if what == 0:
        holder[key] = copy.copy(holder[key])
    elif what == 1:
        holder[key] = _with_others(holder[key], made)
    elif what == 2:
        held.tree = _with_others(held.tree, made)
    elif what == 3:
        held.tree = copy.deepcopy(held.tree)
    elif what == 4:
        one[0][one[1]] = made(one[0][one[1]])
    elif what == 5:
        one[0][one[1]].mul_(1.5)
    elif what == 6:
        one[0][one[1]], other[0][other[1]] = other[0][other[1]], one[0][one[1]]
    elif what == 7:
        held.state = {"count": torch.full((), 3.0), "last": torch.full((), 0.5)}
    else:
        held.state = dict(held.state)


@pytest.mark.every(11)
@pytest.mark.parametrize("seed", range(24))
def test_random_changes_of_containers_with_tensors(seed: int, endpoint: str) -> None:
    """Of those that the step reads, and of one with tensors that it writes and replaces."""

    def make() -> Work:
        draw, model = random.Random(seed), net()
        values = torch.Generator().manual_seed(seed)

        def made(like: torch.Tensor) -> torch.Tensor:
            return torch.rand(like.shape, generator=values)

        one, four = torch.zeros(()), torch.zeros(4)
        tree = {"a": [one, {"b": 0.5, "c": [four]}], "d": collections.OrderedDict(g={"h": four, "i": one}, n=one)}
        held = types.SimpleNamespace(tree=_with_others(tree, made))
        held.state = {"count": torch.zeros(()), "last": torch.zeros(())}
        opt = torch.optim.SGD(model.parameters(), lr=0.001)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            opt.zero_grad()
            factor = sum((i + 1) * holder[key].mean() for i, (holder, key) in enumerate(_tensors_in(held.tree)))
            held.state["count"].add_(1.0)
            loss = F.cross_entropy(model(x), y) * factor * held.state["count"] + held.state["last"]
            held.state["last"] = loss.detach()
            loss.backward()
            opt.step()
            return loss.detach()

        def loop(run: Any) -> list[Any]:
            out = []
            for i in range(10):
                out.append(run(*DATA[i % 3]))
                for _ in range(draw.randrange(1, 3)):
                    _change_tensors(draw, held, made)
            return [*out, held.tree, {key: value.clone() for key, value in held.state.items()}]

        return Work([model], [opt], [(step, DATA[0])], loop)

    check(make, endpoint)


@pytest.mark.every(11)
@pytest.mark.parametrize("seed", range(24))
def test_random_changes_of_nested_containers(seed: int, endpoint: str) -> None:
    def make() -> Work:
        draw, model = random.Random(seed), net()
        tree: dict[str, Any] = {"a": [1.0, {"b": 0.5, "c": [2.0]}], "d": {1, 2}, "f": {"g": {"h": 1.5}}}
        tree["e"] = collections.deque([[1.0], 0.5])
        opt = torch.optim.SGD(model.parameters(), lr=0.001)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y) * _factor(tree)
            loss.backward()
            opt.step()
            return loss

        def loop(run: Any) -> list[Any]:
            out = []
            for i in range(12):
                out.append(run(*DATA[i % 3]))
                _change(draw, tree)
            return [*out, repr(tree)]

        return Work([model], [opt], [(step, DATA[0])], loop)

    check(make, endpoint)
