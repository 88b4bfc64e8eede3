"""Python code that a step reaches in other ways than by names in the user's files: nothing of it becomes constant.

Each case trains a few steps, changes one thing, and trains on; plain and through the daemon must agree
bit for bit, or the change must raise an error that names it.
"""

from __future__ import annotations

import array
import collections
import contextvars
import ctypes
import dataclasses
import gc
import importlib
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpumux import client, errors
from gpumux.capture.tracer import Tracer
from gpumux.capture.watch.fingerprint import Fingerprint
from gpumux.capture.watch.walk import Origin, of_class, of_path
from tests.client.parity import Work, check
from tests.client.python_changes import DATA, held, net, work

# ---- A user's code, wherever it lies ----------------------------------------------------------------

SOURCE = """
import torch, torch.nn.functional as F
scale = 1.0
model = torch.nn.Linear(8, 4)
def loss(x, y):
    return F.cross_entropy(model(x), y) * scale
def change():
    global scale
    scale = 3.0
"""


def trained(space: dict[str, Any]) -> Work:
    return work(space["model"], space["loss"], space["change"])


@pytest.mark.parametrize("filename", ["<stdin>", "<string>", "<ipython-input-3-abc>"])
def test_code_that_lies_in_no_file_is_watched(filename: str, endpoint: str) -> None:
    def make() -> Work:
        space: dict[str, Any] = {"__name__": "typed_in"}
        exec(compile(SOURCE, filename, "exec"), space)  # noqa: S102 - as a notebook does
        return trained(space)

    check(make, endpoint)


@pytest.mark.usefixtures("freezes")
@pytest.mark.parametrize("frozen", [False, True])
def test_a_closure_of_a_function_that_only_torch_holds(
    frozen: bool, endpoint: str, request: pytest.FixtureRequest
) -> None:
    """Found among the objects that the garbage collector lists, and those that `gc.freeze()` took off its lists."""
    scale = 1.0
    name = f"held_by_torch_{frozen}"
    library = torch.library.Library(name, "DEF")
    request.addfinalizer(library._destroy)
    library.define("scaled(Tensor x) -> Tensor")
    library.impl("scaled", lambda x: x * scale, "CompositeImplicitAutograd")
    operator = getattr(torch.ops, name).scaled
    if frozen:
        gc.freeze()
    model = nn.Linear(8, 4)
    with client.submit(
        lambda x: operator(model(x)).sum(), example=(DATA[0][0],), model=model, endpoint=endpoint
    ) as job:
        before = job.step(DATA[0][0]).item()
        scale = 2.0
        assert job.step(DATA[0][0]).item() == 2 * before


NAMES = """
import sys, torch
model = torch.nn.Linear(8, 4)
actions, scale = 0, 1.0
def of_an_attribute(batch):
    return model(batch.actions).sum()
def of_its_module(batch):
    return model(batch.actions).sum() * sys.modules[__name__].scale
def of_its_name(batch):
    return model(batch.actions).sum() * globals()["scale"] * batch.scale
"""


@pytest.fixture
def of_names(monkeypatch: pytest.MonkeyPatch) -> Any:
    module: Any = types.ModuleType("names_of_a_test")
    exec(compile(NAMES, "<stdin>", "exec"), vars(module))  # noqa: S102
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_a_global_with_the_name_of_an_attribute_is_not_watched(
    of_names: Any, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in scripts that collect `actions` and train on `samples.actions`: each step was captured anew."""
    batch = types.SimpleNamespace(actions=DATA[0][0])
    with client.submit(of_names.of_an_attribute, example=(batch,), model=of_names.model, endpoint=endpoint) as job:
        job.step(batch)
        monkeypatch.setattr(Tracer, "trace", None)
        for i in range(3):
            of_names.actions = numpy.full(2, i)
            job.step(batch)


@pytest.mark.parametrize("way", ["of_its_module", "of_its_name"])
def test_a_global_that_is_also_an_attribute_is_followed(of_names: Any, endpoint: str, way: str) -> None:
    batch = types.SimpleNamespace(actions=DATA[0][0], scale=1.0)
    with client.submit(getattr(of_names, way), example=(batch,), model=of_names.model, endpoint=endpoint) as job:
        before = job.step(batch)
        of_names.scale = 2.0
        assert job.step(batch).item() == 2 * before.item()


def test_code_of_an_installed_package_is_watched(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "lib" / "site-packages" / "my_training"
    place.mkdir(parents=True)
    (place / "__init__.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(place.parent))

    def make() -> Work:
        sys.modules.pop("my_training", None)
        return trained(vars(importlib.import_module("my_training")))

    check(make, endpoint)
    sys.modules.pop("my_training", None)


def test_whose_code_is_told_by_whole_folder_names() -> None:
    import gpumux

    here = str(Path(gpumux.__file__).parent)
    assert of_path(here + "/client/job.py") is Origin.LIBRARY
    assert of_path(here + "_train.py") is Origin.OWN
    assert of_path(here + "_models/net.py") is Origin.OWN
    assert of_path(torch.__file__) is Origin.LIBRARY
    assert of_path(str(Path(torch.__file__).parent) + "vision/models.py") is not Origin.LIBRARY
    assert of_path("/usr/lib/python3/dist-packages/mine/net.py") is Origin.INSTALLED
    assert of_path("<frozen importlib._bootstrap>") is Origin.LIBRARY


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_classes_of_torch_that_are_written_in_c_are_a_librarys() -> None:
    """peft's code leads to the placements of tensors, whose methods in C no watch can see."""
    from torch.distributed.tensor import Shard

    assert {of_class(base) for base in Shard.__mro__ if base.__module__.startswith("torch")} == {Origin.LIBRARY}


def test_errors_name_a_line_of_code_that_lies_in_no_file(endpoint: str) -> None:
    space: dict[str, Any] = {}
    exec(compile("def step(x):\n    return x if x.sum() > 0 else -x\n", "<stdin>", "exec"), space)  # noqa: S102
    with pytest.raises(errors.DataDependent, match="<stdin>:2"):
        client.submit(space["step"], example=(DATA[0][0],), endpoint=endpoint)


# ---- Tensors that Python decides by -----------------------------------------------------------------


def parameter_appears() -> Work:
    model, extra = net(), None

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        value = F.cross_entropy(model(x), y)
        return value if extra is None else value + extra.pow(2).sum()

    def change() -> None:
        nonlocal extra
        extra = model[0].weight

    return work(model, loss, change)


def parameter_changes() -> Work:
    model = net()
    chosen = model[0].weight

    def change() -> None:
        nonlocal chosen
        chosen = model[2].weight

    return work(model, lambda x, y: F.cross_entropy(model(x), y) + chosen.pow(2).sum(), change)


def parameter_in_list() -> Work:
    model = net()
    chosen = [model[0].weight]
    return work(
        model, lambda x, y: F.cross_entropy(model(x), y) + chosen[0].pow(2).sum(),
        lambda: chosen.__setitem__(0, model[2].weight),
    )  # fmt: skip


def parameter_in_dictionary() -> Work:
    model = net()
    chosen: dict[str, torch.Tensor] = {}

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        value = F.cross_entropy(model(x), y)
        return value + chosen["r"].pow(2).sum() if "r" in chosen else value

    return work(model, loss, lambda: chosen.__setitem__("r", model[2].weight))


def attribute_appears() -> Work:
    model, config = net(), Plain()

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        value = F.cross_entropy(model(x), y)
        return value * config.extra if hasattr(config, "extra") else value

    return work(model, loss, lambda: setattr(config, "extra", 2.0))


class Plain:
    pass


# ---- Hooks -------------------------------------------------------------------------------------------


def first_parameter_hook() -> Work:
    model = net()
    return work(
        model, lambda x, y: F.cross_entropy(model(x), y),
        lambda: model[0].weight.register_hook(lambda g: g * 0.1) and None,
    )  # fmt: skip


def another_parameter_hook() -> Work:
    model = net()
    model[0].weight.register_hook(lambda g: g * 0.1)
    return work(
        model, lambda x, y: F.cross_entropy(model(x), y),
        lambda: model[2].weight.register_hook(lambda g: g * 0.1) and None,
    )  # fmt: skip


def accumulate_hook() -> Work:
    model = net()

    def halve(p: torch.Tensor) -> None:
        assert p.grad is not None
        p.grad.mul_(0.5)

    return work(
        model, lambda x, y: F.cross_entropy(model(x), y),
        lambda: model[0].weight.register_post_accumulate_grad_hook(halve) and None,
    )  # fmt: skip


def optimizer_hook() -> Work:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def halve(optimizer: Any, args: Any, kwargs: Any) -> None:
        for p in model.parameters():
            p.grad.mul_(0.5)

    return work(
        model, lambda x, y: F.cross_entropy(model(x), y), lambda: optimizer.register_step_pre_hook(halve) and None,
        optimizer,
    )  # fmt: skip


# ---- Methods that Python calls by itself ---------------------------------------------------------------------


class Schedule:
    def __init__(self) -> None:
        self.scale = 1.0

    def __getitem__(self, _: int) -> float:
        return self.scale

    def __mul__(self, other: Any) -> Any:
        return other * self.scale

    def __float__(self) -> float:
        return self.scale

    def __enter__(self) -> float:
        return self.scale

    def __exit__(self, *_: object) -> None:
        pass

    def hidden(self) -> float:
        return self.scale


def entered(schedule: Schedule) -> float:
    with schedule as scale:
        return scale


class Meta(type):
    @property
    def scale(cls) -> float:
        return cls.current  # type: ignore[attr-defined, no-any-return]


class Shared(metaclass=Meta):
    current = 1.0


FACTOR = 1.0


def set_factor(value: float) -> None:
    global FACTOR
    FACTOR = value


class InContext(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.factor = FACTOR

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * ctx.factor


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * FACTOR


def autograd_function(kind: Any) -> Callable[[], Work]:
    def make() -> Work:
        set_factor(1.0)
        model = net()
        return work(model, lambda x, y: F.cross_entropy(kind.apply(model(x)), y), lambda: set_factor(0.5))

    return make


def functional_gradient() -> Work:
    set_factor(1.0)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    params = list(model.parameters())

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        value = F.cross_entropy(InBackward.apply(model(x)), y)
        for p, g in zip(params, torch.autograd.grad(value, params), strict=True):
            p.grad = g
        optimizer.step()
        return value

    def loop(run: Any) -> list[Any]:
        out = [run(*DATA[i]) for i in range(3)]
        set_factor(0.5)
        return out + [run(*DATA[i]) for i in range(3)]

    return Work([model], [optimizer], [(step, DATA[0])], loop)


def scale_of(t: Any) -> None:
    t.scale = 3.0


# ---- Containers and handles of libraries -------------------------------------------------------------


class Table(dict):  # type: ignore[type-arg]
    pass


class Row(list):  # type: ignore[type-arg]
    pass


class Own(collections.UserDict):  # type: ignore[type-arg]
    pass


def with_scale(thing: Any) -> Any:
    thing.scale = 1.0
    return thing


def first_is_three(t: Any) -> None:
    t[0] = 3.0


def value_is_three(t: Any) -> None:
    t.value = 3.0


def a_is_three(t: Any) -> None:
    t["a"] = 3.0


VARIABLE: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)


ELSEWHERE: list[Any] = []  # what only a library's object leads to


def elsewhere(thing: Any) -> Any:
    ELSEWHERE[:] = [thing]
    return thing


class Scaled(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "sched": {"scale": 1.0}, "tags": [1.0, 2.0]})
        self.table = [1.0]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for g in self.param_groups:
            factor = g["lr"] * g["sched"]["scale"] * g["tags"][0] * self.table[0] * self.defaults["lr"]
            for p in g["params"]:
                p.add_(p.grad, alpha=-factor)


def optimizer_change(change: Callable[[Any], None]) -> Callable[[], Work]:
    def make() -> Work:
        model = net()
        optimizer = Scaled(model.parameters())
        return work(model, lambda x, y: F.cross_entropy(model(x), y), lambda: change(optimizer), optimizer)

    return make


def attribute_by_string() -> Work:
    model, config = net(), with_scale(Plain())
    return work(model, lambda x, y: F.cross_entropy(model(x), y) * getattr(config, "scale"), lambda: scale_of(config))


def method_by_computed_name() -> Work:
    model, schedule = net(), Schedule()
    name = "".join(["hid", "den"])
    return work(
        model, lambda x, y: F.cross_entropy(model(x), y) * getattr(schedule, name)(), lambda: scale_of(schedule)
    )


class Other:
    def scale(self) -> float:
        return 3.0


def with_k() -> Any:
    def function() -> float:
        return function.k  # type: ignore[attr-defined, no-any-return]

    function.k = 1.0  # type: ignore[attr-defined]
    return function


def other_code(fn: Any) -> None:
    """As IPython's autoreload does with the functions of a module that was edited."""
    fn.__code__ = (lambda: 3.0).__code__


def other_default(fn: Any) -> None:
    fn.__defaults__ = (3.0,)


def one() -> Any:
    def function() -> float:
        return 1.0

    return function


def with_default() -> Any:
    def function(k: float = 1.0) -> float:
        return k

    return function


def replaceable() -> Any:
    class Owner:
        def scale(self) -> float:
            return 1.0

    return Owner()


def replace_method(owner: Any, value: float = 3.0) -> None:
    type(owner).scale = lambda self: value


def by_import() -> Any:
    module = types.ModuleType("settings_of_a_test")
    module.scale = 1.0  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module

    def function() -> float:
        from settings_of_a_test import scale  # type: ignore[import-not-found]

        return scale  # type: ignore[no-any-return]

    return function


def parameter_attribute() -> Work:
    model = net()
    weight: Any = model[0].weight
    weight.scale = 1.0
    return work(model, lambda x, y: F.cross_entropy(model(x), y) * model[0].weight.scale, lambda: scale_of(weight))


@dataclasses.dataclass
class Settings:
    scale: float = 1.0


@dataclasses.dataclass(slots=True)
class SlottedSettings:
    scale: float = 1.0


def typed_in(source: str, name: str | None = "typed_in") -> Callable[[], Any]:
    """What makes the class `Typed` of this source, as it is if it was typed in or made by exec."""

    def make() -> Any:
        space: dict[str, Any] = {} if name is None else {"__name__": name}
        exec(source, space)  # noqa: S102
        return space["Typed"]

    return make


CASES: dict[str, Callable[[], Work]] = {
    "attribute of a function": held(with_k, lambda t: t(), lambda t: setattr(t, "k", 3.0)),
    "code of a function": held(one, lambda t: t(), other_code),
    "default of a function": held(with_default, lambda t: t(), other_default),
    "method of a class": held(replaceable, lambda t: t.scale(), replace_method),
    "class of an object": held(replaceable, lambda t: t.scale(), lambda t: setattr(t, "__class__", Other)),
    "order of an OrderedDict": held(
        lambda: collections.OrderedDict(a=1.0, b=3.0), lambda t: next(iter(t.values())), lambda t: t.move_to_end("a")
    ),
    "list in an array of objects": held(
        lambda: numpy.array([[1.0], None], dtype=object), lambda t: t[0][0], lambda t: first_is_three(t[0])
    ),
    "of this thread": held(lambda: with_scale(threading.local()), lambda t: t.scale, scale_of),
    "module imported in a function": held(
        by_import, lambda t: t(), lambda t: setattr(sys.modules["settings_of_a_test"], "scale", 3.0)
    ),
    "attribute of a parameter": parameter_attribute,
    "dataclasses.asdict": held(Settings, lambda t: dataclasses.asdict(t)["sca" + "le"], scale_of),
    "dataclasses.astuple, with slots": held(SlottedSettings, lambda t: dataclasses.astuple(t)[0], scale_of),
    "field of a dataclass": held(
        lambda: dataclasses.make_dataclass("One", [("scale", float, dataclasses.field(default=1.0))]),
        lambda t: t.__dataclass_fields__["scale"].default,
        lambda t: setattr(t.__dataclass_fields__["scale"], "default", 3.0),
    ),
    "None becomes a parameter": parameter_appears,
    "a parameter becomes another": parameter_changes,
    "a parameter in a list": parameter_in_list,
    "a dictionary gains a parameter": parameter_in_dictionary,
    "an attribute appears": attribute_appears,
    "first hook of a parameter": first_parameter_hook,
    "hook of another parameter": another_parameter_hook,
    "hook after accumulation": accumulate_hook,
    "hook of the optimizer": optimizer_hook,
    "__getitem__": held(Schedule, lambda t: t[0], scale_of),
    "__mul__": held(Schedule, lambda t: t * 1.0, scale_of),
    "__float__": held(Schedule, float, scale_of),
    "__enter__": held(Schedule, entered, scale_of),
    "property of a metaclass": held(lambda: Shared, lambda t: t.scale, lambda t: setattr(t, "current", 3.0)),
    "setup_context": autograd_function(InContext),
    "backward": autograd_function(InBackward),
    "backward by autograd.grad": functional_gradient,
    "attribute of a dict's subclass": held(lambda: with_scale(Table()), lambda t: t.scale, scale_of),
    "attribute of a list's subclass": held(lambda: with_scale(Row()), lambda t: t.scale, scale_of),
    "array": held(lambda: array.array("d", [1.0]), lambda t: t[0], first_is_three),
    "bytearray": held(lambda: bytearray(b"\x01"), lambda t: t[0], lambda t: t.__setitem__(0, 3)),
    "memoryview": held(lambda: memoryview(bytearray(b"\x01")), lambda t: t[0], lambda t: t.__setitem__(0, 3)),
    "number of C": held(lambda: ctypes.c_double(1.0), lambda t: t.value, value_is_three),
    "UserDict": held(lambda: collections.UserDict(a=1.0), lambda t: t["a"], a_is_three),
    "subclass of UserDict": held(lambda: Own(a=1.0), lambda t: t["a"], a_is_three),
    "ChainMap": held(lambda: collections.ChainMap({"a": 1.0}), lambda t: t["a"], a_is_three),
    "mapping proxy": held(
        lambda: types.MappingProxyType(elsewhere({"a": 1.0})), lambda t: t["a"], lambda t: a_is_three(ELSEWHERE[0])
    ),
    "weak reference": held(
        lambda: weakref.ref(elsewhere(Schedule())), lambda t: t().scale, lambda t: scale_of(ELSEWHERE[0])
    ),
    "dictionary in an optimizer's group": optimizer_change(lambda o: o.param_groups[0]["sched"].update(scale=3.0)),
    "list in an optimizer's group": optimizer_change(lambda o: first_is_three(o.param_groups[0]["tags"])),
    "list of an optimizer": optimizer_change(lambda o: first_is_three(o.table)),
    "an optimizer's defaults": optimizer_change(lambda o: o.defaults.update(lr=0.3)),
    "class of no module": held(typed_in("class Typed:\n    scale = 1.0"), lambda t: t.scale, scale_of),
    "class that exec makes": held(typed_in("class Typed:\n    scale = 1.0", None), lambda t: t.scale, scale_of),
    "metaclass of no module": held(
        typed_in("class Kind(type):\n    scale = 1.0\nclass Typed(metaclass=Kind): ..."), lambda t: t.scale,
        lambda t: scale_of(type(t)),
    ),
    "types.new_class": held(lambda: with_scale(types.new_class("New")), lambda t: t().scale, scale_of),
    "make_dataclass": held(
        lambda: dataclasses.make_dataclass("Made", [("scale", float, 1.0)])(), lambda t: t.scale, scale_of
    ),
    "getattr of a string": attribute_by_string,
    "getattr of a computed name": method_by_computed_name,
}  # fmt: skip


@pytest.fixture
def untouched() -> Iterator[None]:
    Shared.current = 1.0
    yield
    Shared.current = 1.0
    set_factor(1.0)
    sys.modules.pop("settings_of_a_test", None)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.every(4)
def test_a_change_is_followed(case: str, endpoint: str, untouched: None) -> None:
    make = CASES[case]

    def fresh() -> Work:
        Shared.current = 1.0
        return make()

    check(fresh, endpoint)


def test_a_context_variable_is_followed(endpoint: str) -> None:
    def make() -> Work:
        VARIABLE.set(1.0)
        model = net()
        return work(
            model, lambda x, y: F.cross_entropy(model(x), y) * VARIABLE.get(), lambda: VARIABLE.set(3.0) and None
        )

    check(make, endpoint)


# ---- Refused -----------------------------------------------------------------------------------------


def test_a_new_tensor_of_the_same_kind_that_is_no_state_selects_nothing(endpoint: str) -> None:
    model, last = net(), torch.zeros(4)

    def step(x: torch.Tensor) -> torch.Tensor:
        assert last is not None
        return model(x)

    with client.submit(step, example=DATA[0][:1], model=model, endpoint=endpoint, max_variants=1) as job:
        for _ in range(3):
            last = job.step(DATA[0][0]).result()[0]


@pytest.mark.parametrize(
    "draw",
    [lambda it: next(it), lambda it: it.__next__(), lambda it: sum(w for w in it)],
    ids=["next", "__next__", "for"],
)
@pytest.mark.parametrize("kind", [iter, lambda values: (v for v in values)], ids=["iterator", "generator"])
def test_drawing_from_an_iterator_is_refused(draw: Any, kind: Any, endpoint: str) -> None:
    source = kind([1.0] * 100)
    with pytest.raises(errors.CaptureError, match="draws from the iterator source"):
        client.submit(lambda x: x * draw(source), example=DATA[0][:1], endpoint=endpoint)


def test_what_shows_nothing_of_its_content_is_refused_by_name() -> None:
    import sqlite3

    connection = sqlite3.connect(":memory:")
    try:
        with pytest.raises(errors.CaptureError, match=r"connection, a sqlite3\.Connection"):
            Fingerprint(lambda x: x * len(connection.execute("select 1").fetchall()), [], [], [])
    finally:
        connection.close()


def test_counting_in_a_trainer_selects_nothing(endpoint: str) -> None:
    """What the loop around the step writes is not what the step reads."""

    class Trainer:
        def __init__(self) -> None:
            self.model, self.epoch, self.history = net(), 0, []

        def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.model(x), y)

        def fit(self, run: Any) -> None:
            for _ in range(5):
                self.epoch += 1
                self.history.append(run(*DATA[0]))

    trainer = Trainer()
    with client.submit(trainer.step, example=DATA[0], model=trainer.model, endpoint=endpoint, max_variants=1) as job:
        trainer.fit(job.step)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own, importing its compiler
def test_compiled_models_and_functions_are_refused(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = torch.distributions.Distribution
    monkeypatch.setattr(kind, "_validate_args", kind._validate_args)  # which importing torch's compiler turns off
    model = net()
    with pytest.raises(errors.CaptureError, match=r"_orig_mod.*TORCHDYNAMO_DISABLE=1"):
        client.submit(lambda x: model(x), example=DATA[0][:1], model=torch.compile(model), endpoint=endpoint)
    inside = nn.Sequential(torch.compile(net()))
    with pytest.raises(errors.CaptureError, match=r"torch\.compile"):
        client.submit(lambda x: inside(x), example=DATA[0][:1], model=inside, endpoint=endpoint)
    fast = torch.compile(lambda x: x * 2)
    with pytest.raises(errors.CaptureError, match=r"calls fast.*TORCHDYNAMO_DISABLE=1"):
        client.submit(lambda x: fast(x), example=DATA[0][:1], endpoint=endpoint)
    own = net()
    own.compile()
    with pytest.raises(errors.CaptureError, match=r"torch\.compile"):
        client.submit(lambda x: own(x), example=DATA[0][:1], model=own, endpoint=endpoint)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own, importing its compiler
def test_where_torchs_compiler_is_off_what_it_gave_back_is_captured(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = torch.distributions.Distribution
    monkeypatch.setattr(kind, "_validate_args", kind._validate_args)  # which importing torch's compiler turns off
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    model = net()
    model.compile()

    @torch.compile
    def mean(x: torch.Tensor) -> torch.Tensor:
        return model(x).mean()

    x = DATA[0][0]
    with client.submit(lambda x: mean(x), example=(x,), model=torch.compile(model), endpoint=endpoint) as job:
        got = job.step(x).result()
    assert torch.equal(got, mean(x))


@pytest.mark.parametrize("lazy", [torch.Tensor.conj, lambda t: t.conj().imag], ids=["conjugated", "negated"])
def test_state_that_is_conjugated_or_negated_by_a_flag_is_refused(lazy: Any, endpoint: str) -> None:
    model = nn.Module()
    model.register_buffer("c", lazy(torch.randn(4, dtype=torch.complex64)))
    with pytest.raises(errors.CaptureError, match=r"^c is conjugated or negated"):
        client.submit(lambda x: x * model.c, example=(torch.ones(4),), model=model, endpoint=endpoint)


def test_a_view_that_conjugates_state_by_a_flag_is_refused(endpoint: str) -> None:
    model = nn.Module()
    model.register_buffer("c", torch.randn(4, dtype=torch.complex64))
    view = model.c.conj()
    with pytest.raises(errors.CaptureError, match=r"test_python_reach\.py:\d+ uses part of the model through a view"):
        client.submit(lambda x: x * view, example=(torch.ones(4),), model=model, endpoint=endpoint)


def test_a_profiler_of_the_users_goes_on_after_a_capture(endpoint: str) -> None:
    calls: list[str] = []

    def note(frame: types.FrameType, event: str, _: Any) -> None:
        calls.append(event)

    sys.setprofile(note)
    try:
        with client.submit(lambda x: x * 2, example=DATA[0][:1], endpoint=endpoint):
            assert sys.getprofile() is note
    finally:
        sys.setprofile(None)
    assert calls


# ---- Import hooks ------------------------------------------------------------


class Hostile:
    """A placeholder like those of some libraries: every access raises an unexpected error."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name} is not to be asked")


class Finder:
    """An import finder, as observability tools put into sys.meta_path: it runs at every import."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        self.asked.append(name)


OBSERVING = """
from gpumux.capture.source import Observer
observer = Observer()
def step():
    import imported_lately
    return helper(imported_lately.factor)
def helper(x):
    return x
with observer:
    step()
"""


def test_what_an_import_runs_is_not_the_step_even_where_the_program_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imported_lately.py").write_text("def make():\n    return 3\nfactor = make()\n")
    (tmp_path / "program_of_mine.py").write_text(OBSERVING)
    monkeypatch.syspath_prepend(str(tmp_path))
    finder = Finder()
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    try:
        found = importlib.import_module("program_of_mine").observer.found
    finally:
        for name in ("program_of_mine", "imported_lately"):
            sys.modules.pop(name, None)
    names = {code.co_name for code, _ in found.values()}
    assert "imported_lately" in finder.asked
    assert names >= {"step", "helper"}
    assert not names & {"find_spec", "make", "<module>"}


def test_an_object_that_answers_nothing_is_no_error(endpoint: str) -> None:
    def make() -> Work:
        model, held_back = net(), Hostile()

        def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(model(x), y) * (1.0 if held_back is not None else 2.0)

        return work(model, loss, lambda: None)

    check(make, endpoint)
