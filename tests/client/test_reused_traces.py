"""Traces that a later step of equal code takes over: what it runs is what it would run if it were traced anew."""

from __future__ import annotations

import gc
import logging
import math
import os
import sys
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager, nullcontext
from dataclasses import dataclass
from decimal import Decimal, localcontext
from enum import Enum
from functools import partial
from typing import Any, ClassVar

import numpy
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gpumux import client
from gpumux.capture import step as capture_step
from gpumux.capture.symbols import ConstantScalars
from gpumux.capture.tracer import Tracer
from gpumux.capture.watch import reuse, walk
from gpumux.errors import CaptureError
from gpumux.fuse.member import Member
from microbench.real_models import RECIPES
from microbench.real_models import build as real_model

SCALE = 1.0  # read by name in `step` below


@pytest.fixture(autouse=True)
def traces(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """One entry for each trace made. Nothing is kept before and after."""
    made: list[str] = []
    plain = Tracer._trace

    def counted(self: Tracer, fn: Any, *args: Any, **kwargs: Any) -> Any:
        made.append(getattr(fn, "__qualname__", "step"))
        return plain(self, fn, *args, **kwargs)

    monkeypatch.setattr(Tracer, "_trace", counted)
    reuse.kept_traces.clear()
    yield made
    reuse.kept_traces.clear()


class Config:
    def __init__(self, **fields: Any) -> None:
        self.power, self.name, self.sizes = 1, "relu", [4, 8]
        self.__dict__.update(fields)


class Slotted:
    __slots__ = ("factor",)

    def __init__(self, factor: float) -> None:
        self.factor = factor


class Block(nn.Module):
    gain = 1.0

    def __init__(
        self, act: Callable[[Tensor], Tensor] = F.relu, depth: int = 2, p: float = 0.0, width: int = 8
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4 if i == 0 else width, width) for i in range(depth))
        self.out = nn.Linear(width, 1)
        self.drop = nn.Dropout(p)
        self.act = act
        self.config = Config()
        self.scale_1 = 1.0
        self.number = 1
        self.extra: Any = None

    def shift(self, x: Tensor) -> Tensor:
        return x + 1

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.drop(self.act(layer(x)))
        if self.extra is not None:
            x = x * self.extra.factor
        x = self.shift(x) * self.gain * getattr(self, f"scale_{self.number}")
        return self.out(x**self.config.power)


Built = tuple[Callable[..., Any], nn.Module, torch.optim.Optimizer]


def build(
    model: nn.Module | None = None, weight: Any = 1.0, flags: Any = None, make: Any = None, more: Any = None,
    **options: Any,
) -> Built:  # fmt: skip
    """A step that reads what it is given, with a model and an optimizer of its own."""
    torch.manual_seed(0)
    model = model or Block()
    make = make or torch.optim.SGD
    optimizer = make(model.parameters(), **({"lr": 0.1} | options))
    flags = flags if flags is not None else {"square": True}

    def step(x: Tensor, y: Tensor, power: int = 2, *, sign: int = 1) -> Tensor:
        optimizer.zero_grad()
        error = model(x) - y
        loss = (error**power if flags.get("square") else error.abs()).mean() * weight * SCALE * sign
        if more is not None:
            loss = loss * float(more.mean() if hasattr(more, "mean") else len(more))
        loss.backward()
        optimizer.step()
        return loss

    return step, model, optimizer


X, Y = torch.ones(2, 4), torch.zeros(2, 1)


def programs(built: Built, batch: tuple[Any, ...] = (X, Y), *, within: Any = nullcontext, job: bool = False) -> Any:
    """What the step runs first and second. `job`: as a job's step, whose Programs have hyperparameters in them."""
    step, model, optimizer = built
    member = Member("m", step, model, optimizer, max_variants=None)
    if job:
        member._function._constants = ConstantScalars()
    found = []
    try:
        with within():
            state = member.state
            for _ in range(2):
                choice = member.choose_from(state, batch, {}) or member.choose_from(state, batch, {})
                assert choice is not None
                lowered = choice.program.lowered
                found.append((lowered.program, lowered.binding, choice.values, lowered.results))
                state = choice.after(member.state.keep)
    finally:
        member.release()
    return found


def anew(make: Callable[[], Built], monkeypatch: pytest.MonkeyPatch, *args: Any, **options: Any) -> Any:
    """What the step runs if nothing is kept."""
    with monkeypatch.context() as patch:
        patch.setattr(reuse.kept_traces, "_cases", OrderedDict())
        return programs(make(), *args, **options)


def test_equal_code_is_traced_once(traces: list[str]):
    first = programs(build())
    assert len(traces) == 3  # the first step twice, or both phases and one of them again
    assert programs(build()) == first
    assert len(traces) == 3


@pytest.mark.parametrize("name", RECIPES)
def test_a_real_model_is_traced_once(name: str, traces: list[str]):
    """Libraries as large as transformers reach far more than the models of the other tests."""
    first, second, third = (real_model(name, "tiny") for _ in range(3))
    ran = programs((first.step, first.model, first.optimizer), first.batch(0))
    assert traces
    del traces[:]
    assert programs((second.step, second.model, second.optimizer), second.batch(0)) == ran
    # Some note in their configuration, in their first call, which kind of loss they have. The first of all did so
    # before it was known what is to be watched.
    assert len(traces) <= 1
    if traces:
        del traces[:]
        assert programs((third.step, third.model, third.optimizer), third.batch(0)) == ran
        assert traces == []


class Noting(Block):
    """In its first call of all it notes in its configuration of what kind it is, as transformers' classifiers do."""

    def __init__(self, first: float = 1.0, kind: str | None = None) -> None:
        super().__init__()
        self.first = first
        self.config = Config(kind=kind)

    def forward(self, x: Tensor) -> Tensor:
        factor = self.first if self.config.kind is None else 1.0
        self.config.kind = "one"
        return super().forward(x) if factor == 1.0 else super().forward(x) * factor


def test_a_first_call_that_notes_something_is_kept_with_what_it_notes(
    traces: list[str], monkeypatch: pytest.MonkeyPatch
):
    programs(build(Noting()), job=True)
    del traces[:]
    model = Noting()
    found = programs(build(model, lr=0.5), job=True)
    assert traces == []
    assert model.config.kind == "one"
    assert found == anew(lambda: build(Noting(), lr=0.5), monkeypatch, job=True)


def test_what_a_kept_first_call_noted_is_put_back_if_the_step_is_refused(monkeypatch: pytest.MonkeyPatch):
    def refused(*args: Any) -> None:
        raise CaptureError("refused", "")

    programs(build(Noting()))
    model = Noting()
    member = Member("m", *build(model), max_variants=None)
    with monkeypatch.context() as patch:
        patch.setattr(capture_step, "refuse_held", refused)
        with pytest.raises(CaptureError, match="refused"):
            member.choose((X, Y), {})
    assert model.config.kind is None
    assert member.choose((X, Y), {}).program.lowered.program.ops
    assert model.config.kind == "one"
    member.choose((X, Y), {})
    assert len(member._function._cases) == 1
    member.release()


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_a_model_that_does_something_else_in_its_first_call_does_so(kept: int, monkeypatch: pytest.MonkeyPatch):
    later = programs(build(Noting(2.0, "one")))  # what such a model does from the second call on
    for _ in range(kept):
        found = programs(build(Noting(2.0)))
        assert found == anew(lambda: build(Noting(2.0)), monkeypatch)
        assert found[0][0] != later[0][0]


def by_the_rate(lr: float) -> Built:
    """Its first call does the same as later ones at one learning rate."""
    _, model, optimizer = build(lr=lr)
    config = Config(kind=None)

    def step(x: Tensor, y: Tensor) -> Tensor:
        factor = optimizer.param_groups[0]["lr"] * 10 if config.kind is None else 1.0
        config.kind = "one"
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean() * factor
        loss.backward()
        optimizer.step()
        return loss

    return step, model, optimizer


def test_a_first_call_that_does_the_same_for_some_numbers_alone_is_kept_for_those(monkeypatch: pytest.MonkeyPatch):
    for lr in (0.1, 0.1, 0.1, 0.5, 0.5, 0.1):
        assert programs(by_the_rate(lr)) == anew(lambda lr=lr: by_the_rate(lr), monkeypatch), lr


class Counting(Block):
    """Holds in its configuration what no kept first call can put there."""

    def __init__(self) -> None:
        super().__init__()
        self.config = Config(kind=None)

    def forward(self, x: Tensor) -> Tensor:
        if self.config.kind is None:
            self.config.kind = ["one", 2]
        return super().forward(x) * self.config.kind[1]


def test_a_first_call_that_makes_objects_is_made_by_each(monkeypatch: pytest.MonkeyPatch):
    models = [Counting() for _ in range(3)]
    for model in models:
        assert programs(build(model)) == anew(lambda: build(Counting()), monkeypatch)
        assert model.config.kind == ["one", 2]
    assert len({id(model.config.kind) for model in models}) == len(models)


def test_the_learning_rate_is_a_number_of_each_step(traces: list[str], monkeypatch: pytest.MonkeyPatch):
    programs(build(make=torch.optim.AdamW), job=True)
    del traces[:]
    other = lambda: build(make=torch.optim.AdamW, lr=0.5)  # noqa: E731
    found = programs(other(), job=True)
    assert traces == []
    assert found == anew(other, monkeypatch, job=True)


@contextmanager
def swapped(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def changed(change: Callable[[Block], object], **options: Any) -> Callable[[], Built]:
    def make() -> Built:
        model = Block(**options)
        change(model)
        return build(model)

    return make


def frozen(model: Block) -> None:
    model.layers[0].weight.requires_grad_(False)


def tied(model: Block) -> None:
    model.layers[1].bias = model.layers[0].bias  # type: ignore[assignment]


def hooked(model: Block) -> None:
    model.layers[0].register_forward_hook(lambda module, args, out: out * 2)


def parameter_hooked(model: Block) -> None:
    model.out.weight.register_hook(lambda grad: grad * 2)


def own_forward(model: Block) -> None:
    model.layers[0].forward = lambda x: F.linear(x, model.layers[0].weight)  # type: ignore[method-assign]


def own_shift(model: Block) -> None:
    model.shift = types.MethodType(lambda self, x: x - 1, model)  # type: ignore[method-assign]


def grouped() -> Built:
    step, model, optimizer = build()
    parameters = optimizer.param_groups[0]["params"]
    optimizer.param_groups[0]["params"] = parameters[:1]
    optimizer.add_param_group({"params": parameters[1:], "lr": 0.2})
    return step, model, optimizer


# What differs from `build()` in one thing each.
OTHERS: dict[str, Callable[[], Built]] = {
    "a number in a closure": lambda: build(weight=2.0),
    "a number of another type": lambda: build(weight=1),
    "a flag in a dictionary": lambda: build(flags={"square": False}),
    "a dictionary without the entry": lambda: build(flags={}),
    "an array": lambda: build(more=numpy.full(2, 3.0)),
    "another array": lambda: build(more=numpy.full(2, 4.0)),
    "a list": lambda: build(more=[1, 2, 3]),
    "a longer list": lambda: build(more=[1, 2, 3, 4]),
    "a set": lambda: build(more={1, 2}),
    "another function": lambda: build(Block(act=torch.tanh)),
    "a lambda": lambda: build(Block(act=lambda x: x * 2)),
    "another lambda": lambda: build(Block(act=lambda x: x * 3)),
    "a module for a function": lambda: build(Block(act=nn.ReLU())),
    "a module's number": lambda: build(Block(act=nn.LeakyReLU(0.2))),
    "another number of a module": lambda: build(Block(act=nn.LeakyReLU(0.3))),
    "more layers": lambda: build(Block(depth=3)),
    "wider layers": lambda: build(Block(width=6)),
    "dropout": lambda: build(Block(p=0.5)),
    "more dropout": lambda: build(Block(p=0.25)),
    "no dropout in evaluation": changed(lambda model: model.eval(), p=0.5),
    "one module in evaluation": changed(lambda model: model.drop.eval(), p=0.5),
    "a frozen parameter": changed(frozen),
    "another tensor for a parameter": changed(tied),
    "a hook": changed(hooked),
    "a parameter's hook": changed(parameter_hooked),
    "a forward of an instance": changed(own_forward),
    "a method of an instance": changed(own_shift),
    "an attribute read by a computed name": changed(lambda model: setattr(model, "scale_1", 2.0)),
    "another name that is computed": changed(lambda model: model.__dict__.update(number=2, scale_2=5.0)),
    "a number of a configuration": changed(lambda model: setattr(model.config, "power", 2)),
    "an attribute that hides the class's": changed(lambda model: setattr(model, "gain", 2.0)),
    "an object of C": changed(lambda model: setattr(model, "extra", Slotted(2.0))),
    "another object of C": changed(lambda model: setattr(model, "extra", Slotted(3.0))),
    "double precision": changed(lambda model: model.double()),
    "momentum": lambda: build(momentum=0.9),
    "more momentum": lambda: build(momentum=0.8),
    "Nesterov's momentum": lambda: build(momentum=0.9, nesterov=True),
    "weight decay": lambda: build(weight_decay=0.1),
    "a whole learning rate": lambda: build(lr=1),
    "a whole learning rate with momentum": lambda: build(lr=1, momentum=0.9),
    "maximize": lambda: build(maximize=True),
    "foreach": lambda: build(foreach=True),
    "another optimizer": lambda: build(make=torch.optim.Adam),
    "amsgrad": lambda: build(make=torch.optim.Adam, amsgrad=True),
    "other betas": lambda: build(make=torch.optim.Adam, betas=(0.5, 0.9)),
    "two groups": grouped,
}


@pytest.mark.every(5)
@pytest.mark.parametrize("first", range(3))
@pytest.mark.parametrize("job", [False, True])
def test_what_differs_is_traced_anew(job: bool, first: int, monkeypatch: pytest.MonkeyPatch):
    """Whatever was captured before, a step runs what it would run alone."""
    batch = {"double precision": (X.double(), Y.double())}
    others = dict(list(OTHERS.items())[first::3])
    expected = {name: anew(make, monkeypatch, batch.get(name, (X, Y)), job=job) for name, make in others.items()}
    plain = anew(build, monkeypatch, job=job)
    for name, make in others.items():
        assert programs(build(), job=job) == plain, name
        for _ in range(2):
            assert programs(make(), batch.get(name, (X, Y)), job=job) == expected[name], name


@contextmanager
def global_number() -> Iterator[None]:
    global SCALE
    before, SCALE = SCALE, 3.0
    try:
        yield
    finally:
        SCALE = before


WITHIN: dict[str, Callable[[], Any]] = {
    "a global number": global_number,
    "a class's number": lambda: swapped(Block, "gain", 2.0),
    "a class's method": lambda: swapped(Block, "shift", lambda self, x: x * 7),
    "a function of torch": lambda: swapped(F, "linear", lambda x, weight, bias=None: x @ weight.T),
    "a method of a library's module": lambda: swapped(nn.Linear, "forward", lambda self, x: x @ self.weight.T),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False),
    "a global hook": lambda: hooked_globally(),
}


@contextmanager
def hooked_globally() -> Iterator[None]:
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, out: out * 2 if isinstance(module, nn.Linear) else out
    )
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("name", WITHIN)
def test_what_differs_around_a_step_is_traced_anew(name: str, monkeypatch: pytest.MonkeyPatch):
    plain = programs(build())
    inside = anew(build, monkeypatch, within=WITHIN[name])
    assert inside != plain
    assert programs(build(), within=WITHIN[name]) == inside
    assert programs(build()) == plain


def test_an_argument_of_another_kind_is_traced_anew(monkeypatch: pytest.MonkeyPatch):
    for batch in ((X, Y), (X[:1], Y[:1]), (X, Y, 2), (X, Y, 3), (X.T.contiguous().T, Y)):
        assert programs(build(), batch) == anew(build, monkeypatch, batch)


def test_a_default_of_the_step_is_read(monkeypatch: pytest.MonkeyPatch):
    def cubed() -> Built:
        made = build()
        made[0].__defaults__ = (3,)
        return made

    def negative() -> Built:
        made = build()
        made[0].__kwdefaults__ = {"sign": -1}
        return made

    for make in (build, cubed, negative, build):
        assert programs(make()) == anew(make, monkeypatch)


@settings(max_examples=8, deadline=None)
@given(st.lists(st.tuples(
    st.sampled_from([F.relu, torch.tanh, F.gelu]), st.integers(1, 2), st.sampled_from([0.0, 0.5]), st.integers(3, 4),
    st.sampled_from([1.0, 2.0]), st.sampled_from([torch.optim.SGD, torch.optim.Adam]), st.booleans(),
), min_size=2, max_size=5))  # fmt: skip
def test_any_models_in_any_order_run_what_each_would_alone(drawn: list[Any]):
    reuse.kept_traces.clear()

    def make(act: Any, depth: int, p: float, width: int, weight: float, optimizer: Any, training: bool) -> Built:
        return build(Block(act, depth, p, width).train(training), weight, make=optimizer)

    found = [programs(make(*one)) for one in drawn]
    for one, what in zip(drawn, found, strict=True):
        reuse.kept_traces.clear()
        assert programs(make(*one)) == what


def test_a_step_that_reads_files_or_the_clock_is_traced_each_time(traces: list[str], tmp_path: Any):
    path = tmp_path / "scale"

    def make() -> Built:
        _, model, optimizer = build()

        def step(x: Tensor, y: Tensor) -> Tensor:
            with open(path) as file:
                return (model(x) - y).mean() * float(file.read())

        return step, model, optimizer

    found = []
    for scale in ("1.0", "2.0"):
        path.write_text(scale)
        found.append(programs(make()))
    assert found[0] != found[1]


def test_tensors_of_no_model_are_no_part_of_what_is_kept(traces: list[str], endpoint: str):
    """A mask in a closure may differ in every value."""
    for value in (1.0, 2.0):
        mask = torch.full((2, 1), value)
        with client.submit(lambda x, mask=mask: x * mask, example=(Y + 1,), endpoint=endpoint, priority="low") as job:
            assert torch.equal(job.step(Y + 1).result(), mask)


def test_models_are_not_kept_alive():
    step, model, optimizer = build()
    programs((step, model, optimizer))
    found = weakref.ref(model)
    assert len(reuse.kept_traces._cases) == 1
    del step, model, optimizer
    gc.collect()
    assert found() is None


def test_those_used_least_recently_make_room(traces: list[str], monkeypatch: pytest.MonkeyPatch):
    first = programs(build())
    operators = sum(case.operators for cases in reuse.kept_traces._cases.values() for case in cases)
    monkeypatch.setattr(reuse, "MOST_OPERATORS", operators + 1)
    programs(build(), (X[:1], Y[:1]))
    assert len(reuse.kept_traces._cases) == 1
    del traces[:]
    assert programs(build()) == first
    assert traces


def test_a_bounded_number_of_steps_is_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reuse, "MOST_STEPS", 2)
    for rows in (1, 2, 3):
        programs(build(), (torch.ones(rows, 4), torch.zeros(rows, 1)))
    assert len(reuse.kept_traces._cases) == 2


def test_a_few_kinds_of_one_step_are_kept(traces: list[str]):
    for power in range(reuse.MOST_ALIKE + 2):
        programs(build(weight=float(power)))
    ((_, cases),) = reuse.kept_traces._cases.items()
    assert len(cases) == reuse.MOST_ALIKE


def test_a_job_that_is_submitted_again_trains_as_the_first_did(traces: list[str], endpoint: str):
    """From the same start, with a model of its own each time, as in a sweep."""
    ends = []
    for _ in range(2):
        torch.manual_seed(0)
        step, model, optimizer = build(Block(p=0.5), make=torch.optim.Adam)
        del traces[:]
        with client.submit(
            step, example=(X, Y), model=model, optimizer=optimizer, endpoint=endpoint, priority="low", seed=1
        ) as job:
            losses = [job.step(X, Y).result().item() for _ in range(5)]
        ends.append((losses, [p.detach().clone() for p in model.parameters()]))
    assert traces == []
    assert ends[0][0] == ends[1][0]
    assert all(map(torch.equal, ends[0][1], ends[1][1]))


def test_the_same_model_goes_on_in_a_second_job(endpoint: str):
    torch.manual_seed(0)
    step, model, optimizer = build(make=torch.optim.Adam)
    plain_step, plain, _ = build(make=torch.optim.Adam)
    for _ in range(3):
        with client.submit(
            step, example=(X, Y), model=model, optimizer=optimizer, endpoint=endpoint, priority="low"
        ) as job:
            for _ in range(2):
                job.step(X, Y)
    for _ in range(6):
        plain_step(X, Y)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_models_of_an_array_are_traced_once(traces: list[str]):
    """A trace that no second one confirmed is for models of arrays alone, of which one is traced twice."""
    for number in range(4):
        step, model, optimizer = build(
            make=torch.optim.AdamW, lr=0.1 * (number + 1), weight_decay=0.1 * number, betas=(0.9 - 0.1 * number, 0.95)
        )
        member = Member("m", step, model, optimizer, max_variants=None, twice=number == 0)
        before = len(traces)
        assert member.choose((X, Y), {}).program.lowered.program.ops
        member.release()
        assert len(traces) - before == (2, 1, 0, 0)[number]  # without weight decay the step takes another path
    del traces[:]
    programs(build(make=torch.optim.AdamW, lr=0.1, weight_decay=0.1))
    assert traces


# ---- what the step's code reads in other ways


def reading(read: Callable[..., Tensor], held: Any) -> Callable[[], Built]:
    """A step with the loss `read(error, held)`, with the same code for any `held`."""

    def make() -> Built:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = read(model(x) - y, held)
            loss.backward()
            optimizer.step()
            return loss

        return step, model, optimizer

    return make


def in_order(error: Tensor, held: Any) -> Tensor:
    loss = error.mean()
    for item in held:
        loss = loss * 2 + item
    return loss


def of_size(error: Tensor, held: Any) -> Tensor:
    return error.mean() * (2 if isinstance(held, torch.Size) else 3)


def by_name(error: Tensor, held: Any) -> Tensor:
    return error.mean() * len(held.__name__)


def called(error: Tensor, held: Any) -> Tensor:
    return error.mean() * held()


def by_another_name(error: Tensor, held: Any) -> Tensor:
    return error.mean() * read_attribute(held, CONFIGURED)


read_attribute, CONFIGURED, TEMPLATE = getattr, "number", "{0.number}"


def matched(error: Tensor, held: Any) -> Tensor:
    match held:
        case Numbered(number):
            return error.mean() * number
    return error.mean()


def formatted(error: Tensor, held: Any) -> Tensor:
    return error.mean() * float(TEMPLATE.format(held))


def entry(error: Tensor, held: Any) -> Tensor:
    return error.mean() * sum(held.value)


@dataclass
class Numbered:
    number: float


class Lists(Enum):
    ONE = [1.0]  # noqa: RUF012
    TWO = [2.0]  # noqa: RUF012


def function(name: str) -> Callable[[], int]:
    def made() -> int:
        return 1

    made.__name__ = name
    return made


READ: dict[str, tuple[Callable[..., Tensor], Any, Any]] = {
    "the order of a set": (in_order, set([0, 8]), set([8, 0])),  # noqa: C405
    "the order of a frozenset": (in_order, frozenset([0, 8]), frozenset([8, 0])),
    "a size or a tuple": (of_size, torch.Size([2]), (2,)),
    "a function's name": (by_name, function("one"), function("three")),
    "a bound getattr": (called, partial(getattr, Numbered(1.0), "number"), partial(getattr, Numbered(2.0), "number")),
    "getattr by another name": (by_another_name, Numbered(1.0), Numbered(2.0)),
    "a pattern": (matched, Numbered(1.0), Numbered(2.0)),
    "a format": (formatted, Numbered(1.0), Numbered(2.0)),
    "a member of an enumeration": (entry, Lists.ONE, Lists.TWO),
}


@pytest.mark.parametrize("name", READ)
def test_what_the_code_reads_decides(name: str, monkeypatch: pytest.MonkeyPatch):
    read, first, second = READ[name]
    expected = [anew(reading(read, held), monkeypatch) for held in (first, second)]
    assert expected[0] != expected[1]
    for held, found in zip((first, second, first), (*expected, expected[0]), strict=True):
        assert programs(reading(read, held)()) == found


class Twice(nn.Module):
    def __init__(self, same: bool) -> None:
        super().__init__()
        self.register_buffer("one", torch.ones(4))
        self.register_buffer("other", self.one if same else self.one.view(4))  # type: ignore[has-type]
        self.out = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x) * (2 if self.one is self.other else 3)


def test_tensors_over_the_same_memory_are_not_one_tensor(monkeypatch: pytest.MonkeyPatch):
    for same in (True, False, True):
        assert programs(build(Twice(same))) == anew(lambda same=same: build(Twice(same)), monkeypatch)


def of_the_environment(error: Tensor, held: Any) -> Tensor:
    return error.mean() * float(variable("GPUMUX_TEST_SCALE", "1"))


variable = os.getenv
logger = logging.getLogger(__name__)


class Shared:
    table: ClassVar[dict[str, float]] = {"scale": 1.0}


@contextmanager
def put(space: Any, key: Any, value: Any) -> Iterator[None]:
    missing = object()
    before = space.get(key, missing)
    space[key] = value
    try:
        yield
    finally:
        if before is missing:
            del space[key]
        else:
            space[key] = before


@contextmanager
def level(logger: logging.Logger) -> Iterator[None]:
    before = logger.level
    logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        logger.setLevel(before)


AROUND: dict[str, tuple[Callable[..., Tensor], Callable[[], Any]]] = {
    "a library's number": (lambda error, held: error.mean() * math.pi, lambda: swapped(math, "pi", 3.0)),
    "a library's function": (
        lambda error, held: torch.special.expit(error).mean(), lambda: swapped(torch.special, "expit", lambda x: x * 3)
    ),
    "a function of a library that the code does not name": (
        lambda error, held: error.mean(),
        lambda: swapped(sys.modules["torch.optim.sgd"], "sgd", lambda *args, **options: None),
    ),
    "a method of a library's class": (
        lambda error, held: -torch.distributions.Normal(0.0, 1.0, validate_args=False).log_prob(error).mean(),
        lambda: swapped(torch.distributions.Normal, "log_prob", lambda self, x: x * 2),
    ),
    "an environment variable": (of_the_environment, lambda: put(os.environ, "GPUMUX_TEST_SCALE", "2")),
    "the working directory": (lambda error, held: error.mean() * len(os.getcwd()), lambda: chdir("/")),
    "a logger's level": (
        lambda error, held: error.mean() * (2 if logger.isEnabledFor(logging.DEBUG) else 3),
        lambda: level(logging.getLogger()),
    ),
    "decimal's precision": (
        lambda error, held: error.mean() * float(Decimal(1) / Decimal(3)), lambda: localcontext(prec=3)
    ),
    "a class's dictionary by a computed name": (
        lambda error, held: error.mean() * getattr(Shared, "ta" + held)["scale"],
        lambda: put(Shared.table, "scale", 2.0),
    ),
    "saved tensors": (
        lambda error, held: error.pow(2).mean(),
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t * 2),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", AROUND)
def test_what_the_code_finds_around_it_decides(name: str, monkeypatch: pytest.MonkeyPatch):
    read, within = AROUND[name]
    make = reading(read, "ble")
    plain, inside = anew(make, monkeypatch), anew(make, monkeypatch, within=within)
    assert inside != plain
    assert programs(make()) == plain
    assert programs(make(), within=within) == inside
    assert programs(make()) == plain


class Growing(dict):  # type: ignore[type-arg]
    def __getattr__(self, name: str) -> Any:
        return self.setdefault(name, Growing())


def test_describing_runs_no_code_of_the_user():
    held = Growing(number=1.0)
    programs(reading(lambda error, held: error.mean() * held["number"], held)())
    assert held == {"number": 1.0}


def test_a_trace_that_was_refused_is_not_kept(monkeypatch: pytest.MonkeyPatch):
    """What a script changes before it calls again must not become the description of the refused trace."""
    flags = {"square": True}

    def refused(*args: Any) -> None:
        raise CaptureError("refused", "")

    member = Member("m", *build(flags=flags), max_variants=None)
    with monkeypatch.context() as patch:
        patch.setattr(capture_step, "refuse_held", refused)
        with pytest.raises(CaptureError, match="refused"):
            member.choose((X, Y), {})
    flags["square"] = False
    member.choose((X, Y), {})
    member.release()
    other = lambda: build(flags={"square": False})  # noqa: E731
    assert programs(other()) == anew(other, monkeypatch)


class Acting(nn.Linear):
    def __init__(self, acts: bool, data: list[int]) -> None:
        super().__init__(4, 1)
        self.acts = acts
        self.__dict__["act_1"] = lambda x: x * len(data)

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, f"act_{1}")(super().forward(x)) if self.acts else super().forward(x)


def test_what_an_earlier_step_ran_need_not_be_watchable():
    data = [1]
    earlier = build(Acting(True, data))
    programs(earlier)
    data += range(walk.MOST + 1)
    programs(build(Acting(False, [1])))
