"""Traces that a later step of equal code takes over: what it runs is what it would run if it were traced anew."""

from __future__ import annotations

import gc
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gpumux import client
from gpumux.capture.symbols import ConstantScalars
from gpumux.capture.tracer import Tracer
from gpumux.capture.watch import reuse
from gpumux.fuse.member import Member

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


@pytest.mark.parametrize("job", [False, True])
def test_what_differs_is_traced_anew(job: bool, monkeypatch: pytest.MonkeyPatch):
    """Whatever was captured before, a step runs what it would run alone."""
    batch = {"double precision": (X.double(), Y.double())}
    expected = {name: anew(make, monkeypatch, batch.get(name, (X, Y)), job=job) for name, make in OTHERS.items()}
    plain = anew(build, monkeypatch, job=job)
    for name, make in OTHERS.items():
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
        step, model, optimizer = build(make=torch.optim.AdamW, lr=0.1 * (number + 1), weight_decay=0.1 * number)
        member = Member("m", step, model, optimizer, max_variants=None, twice=number == 0)
        before = len(traces)
        assert member.choose((X, Y), {}).program.lowered.program.ops
        member.release()
        assert len(traces) - before == (2, 1, 0, 0)[number]  # without weight decay the step takes another path
    del traces[:]
    programs(build(make=torch.optim.AdamW, lr=0.1, weight_decay=0.1))
    assert traces
