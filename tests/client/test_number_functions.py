"""Functions of numbers that change (numpy's, `float`, `int`): one Program for all values, and the plain loop's bits."""

from __future__ import annotations

import importlib.util
import linecache
import numbers
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import pytest
import torch

from gpumux import client, errors
from gpumux.capture.symbols import NUMPY

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))
VALUES = [0.5, 1.0, 0.0, -0.0, 2.0, 3.0, -1.5, float("inf"), float("nan"), 1e-300, 0.1, 7, 1234.5]
STEPS = 40

RAMPS = """
import argparse
import numpy as np

def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--consistency", type=float, default=100.0)
    return parser

def sigmoid_rampup(current: float, length: float) -> float:
    current = np.clip(current, 0.0, length)
    phase = 1.0 - current / length
    return float(np.exp(-5.0 * phase * phase))

def linear_rampup(current, length):
    return float(np.clip(current / length, 0.0, 1.0))

def cosine_rampdown(current, length):
    return float(0.5 * (np.cos(np.pi * current / length) + 1))

def fraction(current, length):
    return float(current) / float(max(1, length))
"""
TIMES = """
def scale(n):
    return float(n) * 2
"""
ASKS = """
def scale(n, length=20):
    assert isinstance(0.5, float) and isinstance(0.5, (int, float)) and not isinstance("0.5", float)
    assert isinstance(float(n), float) and not isinstance(n, float)
    return float(n) / length + float("0.25") + float()
"""
WHOLE = """
def place(n):
    return int(n) % 7

def rounded(n):
    return int(n * -0.7) + int(n / 3)

def of_much(n: int, sizes: list[int] = ()) -> int:
    assert isinstance(3, int) and isinstance(3, (int, float)) and not isinstance("3", int)
    more = list(map(int, ["1", "2"]))
    assert isinstance(int(n), int) and not isinstance(int(n) / 2, int)
    return int(n) + int("3") + int("ff", 16) + int() + int(2.9) + int(b"7", base=8) + sum(more)
"""
WHOLE_TYPES = """
def place(n):
    return int(n) % 7 + (2 if type(3) is int else 3)
"""
TYPES = """
def scale(n):
    return float(n) * (2.0 if type(0.5) is float else 3.0)
"""
OF_ITS_OWN = """
def float(n):
    return n * 0.25

def scale(n):
    return float(n)
"""


@pytest.fixture
def written(tmp_path: Path) -> Iterator[Callable[[str], ModuleType]]:
    """A module of the user's with this source."""
    made: list[str] = []

    def write(source: str) -> ModuleType:
        name = f"ramps_of_{tmp_path.name}_{len(made)}"
        (path := tmp_path / f"{name}.py").write_text(source)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        made.append(name)
        spec.loader.exec_module(module)
        return module

    yield write
    for name in made:
        del sys.modules[name]


def programs(weight: Callable[[int], Any], endpoint: str, steps: int = STEPS) -> int:
    """Of a job whose step weighs its result by a counter of the script. Each result is the plain step's."""
    counter = 0

    def step(x: torch.Tensor) -> torch.Tensor:
        return x.double() * weight(counter)

    with client.submit(step, example=(X,), endpoint=endpoint) as job:
        for counter in range(steps):
            assert torch.equal(job.step(X).result(), step(X)), counter
        return len(job._remote.programs)


@pytest.mark.parametrize("ramp", ["sigmoid_rampup", "linear_rampup", "cosine_rampdown", "fraction"])
def test_a_ramp_has_one_program_for_each_decision(
    ramp: str, written: Callable[[str], ModuleType], endpoint: str
) -> None:
    function = getattr(written(RAMPS), ramp)
    # the first; one for a value, by which it is seen that it is read; then one below the end of the ramp and one above
    assert programs(lambda n: function(n, 20), endpoint) <= 5


@pytest.mark.parametrize("source", [TYPES, OF_ITS_OWN])
def test_float_is_what_it_is_in_a_module_that_does_more_with_it(
    source: str, written: Callable[[str], ModuleType], endpoint: str
) -> None:
    programs(written(source).scale, endpoint, 8)


def test_float_in_a_module_that_asks_what_is_one(written: Callable[[str], ModuleType], endpoint: str) -> None:
    assert programs(written(ASKS).scale, endpoint) <= 3


@pytest.mark.parametrize("function", ["place", "rounded", "of_much"])
def test_int_of_a_number_is_one_program_for_all_values(
    function: str, written: Callable[[str], ModuleType], endpoint: str
) -> None:
    module = written(WHOLE)
    assert programs(getattr(module, function), endpoint) <= 3
    assert "int" not in vars(module)


def test_int_is_what_it_is_in_a_module_that_does_more_with_it(
    written: Callable[[str], ModuleType], endpoint: str
) -> None:
    programs(written(WHOLE_TYPES).place, endpoint, 8)


def test_int_decides_what_a_step_computes(written: Callable[[str], ModuleType], endpoint: str) -> None:
    """That int(n) may be replaced is found in a trace that used the value, and no trace is compared with that one."""
    place = written(WHOLE).place
    x = torch.arange(80.0).reshape(20, 4)
    counter = 0

    def step(factor: torch.Tensor) -> torch.Tensor:
        return x[place(counter) : place(counter) + 4] * factor

    with client.submit(step, example=(X[0, :4],), endpoint=endpoint) as job:
        for counter in range(10):
            assert torch.equal(job.step(X[1, :4]).result(), step(X[1, :4])), counter
        assert len(job._remote.programs) <= 3


def test_float_of_a_function_without_a_source(endpoint: str) -> None:
    made: dict[str, Any] = {"__name__": "a module that is nowhere"}
    exec(TIMES, made)  # noqa: S102 - as a notebook runs its cells
    programs(made["scale"], endpoint, 8)


def test_float_in_torchs_own_code_has_the_very_value(endpoint: str) -> None:
    """Which its functions may need as a plain number."""
    path, name = str(Path(torch.__file__).parent / "made_for_a_test.py"), "torch.made_for_a_test"
    module = ModuleType(name)
    module.__file__ = path
    linecache.cache[path] = len(TIMES), None, TIMES.splitlines(keepends=True), path
    exec(compile(TIMES, path, "exec"), vars(module))  # noqa: S102
    sys.modules[name] = module
    try:
        assert programs(module.scale, endpoint, 8) == 8
    finally:
        del sys.modules[name], linecache.cache[path]


@pytest.mark.parametrize(
    "weight",
    [
        lambda n: sum([0.1 * n * k**0.5 for k in range(20)]),  # Python 3.12 and later: not one after another
        lambda n: sum([1e16, 0.1 * n, -1e16, 1]),
        lambda n: sum((k * n for k in range(5)), 0.25),
        lambda n: sum([]) + n,
        lambda n: sum([n, 2, X.sum(), 0.5 * n], 1.5),
        lambda n: sum([[n], [2]], [])[0],  # noqa: RUF017
    ],
)
def test_a_sum_of_numbers_is_what_python_sums(weight: Callable[[Any], Any], endpoint: str) -> None:
    assert programs(lambda n: weight(n), endpoint, 12) <= 2


def test_a_function_of_numpys_of_a_counter(endpoint: str) -> None:
    assert programs(numpy.sqrt, endpoint) <= 3


def test_float_is_the_type_again_after_a_trace(written: Callable[[str], ModuleType], endpoint: str) -> None:
    module = written(RAMPS)
    programs(lambda n: module.fraction(n, 20), endpoint, 8)
    assert "float" not in vars(module)
    assert module.options().parse_args(["--consistency", "2.5"]).consistency == 2.5


@pytest.mark.every(5)
@pytest.mark.parametrize("name", [name for name in NUMPY if getattr(getattr(numpy, name), "nin", 0) == 1])
def test_a_function_of_numpys_has_its_own_bits(name: str, endpoint: str) -> None:
    function = getattr(numpy, name)
    with (
        numpy.errstate(all="ignore"),
        client.submit(lambda x, a: x * function(a), example=(X, 0.25), endpoint=endpoint) as job,
    ):
        for value in VALUES:
            plain = X * function(value)
            torch.testing.assert_close(job.step(X, value).result(), plain, rtol=0, atol=0, equal_nan=True)
        assert len(job._remote.programs) <= 4, "of a float, of an integer, and of each as a number of each step"


@pytest.mark.parametrize(
    "weight",
    [
        # a product, a root: Python's power may differ from them
        lambda n: numpy.power(0.1 * n, 2) * numpy.power(0.3 * n + 0.1, 0.5),
        lambda n: numpy.clip(n, 0.0, 20.0) // 3,  # a float, also of a whole number
        lambda n: numpy.minimum(1.0, n / 20),
        lambda n: numpy.round(n / 3, 1) + numpy.floor(n / 3),
        lambda n: 1.0 / numpy.maximum(0.0, n - 3) if n > 3 else numpy.float64(0.3) * n,
    ],
)
def test_numpys_functions_of_several_numbers_are_one_program_for_each_decision(
    weight: Callable[[Any], Any], endpoint: str
) -> None:
    assert programs(lambda n: weight(n), endpoint) <= 4


@pytest.mark.parametrize(
    "weight",
    [
        lambda n: numpy.float32(0.1) * n,  # rounded to float32
        lambda n: numpy.float32(0.1) * numpy.exp(-n),  # not rounded
        lambda n: float((numpy.array([0.1, 0.2], dtype=numpy.float32) * n)[1]),
        lambda n: numpy.int32(3) * n,
        lambda n: numpy.mean([0.1 * n * k**0.5 for k in range(20)]),  # in another order than Python's sum
        lambda n: numpy.dot([0.1 * n * k**0.5 for k in range(20)], [0.1 * k for k in range(20)]),
        lambda n: numpy.float64(0.97) ** n,
    ],
)
def test_other_types_and_arrays_of_numpy_have_their_own_bits(weight: Callable[[Any], Any], endpoint: str) -> None:
    programs(lambda n: weight(n), endpoint, 20)


def test_a_hyperparameter_and_another_type_of_numpy_are_refused_with_the_line(endpoint: str) -> None:
    model = torch.nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=numpy.float64(0.1))

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean() * (numpy.float32(0.1) * optimizer.param_groups[0]["lr"])
        loss.backward()
        optimizer.step()
        return loss

    with pytest.raises(errors.CaptureError, match=r"test_number_functions.py:\d+ gives numpy.multiply a hyperparam"):
        client.submit(step, example=(X,), model=model, optimizer=optimizer, endpoint=endpoint)


def _matched(n: Any) -> float:
    match n:
        case int():
            return 2.0
        case _:
            return 3.0


class Counted(torch.nn.Module):
    """Counts its calls in a buffer."""

    count: torch.Tensor

    def __init__(self, weight: Callable[[Any], float]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 2)
        self.register_buffer("count", torch.tensor(0))
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = self.count.item()
        self.count += 1
        found: torch.Tensor = self.layer(x) * self.weight(n) * (n + 1)
        return found


@pytest.mark.parametrize(
    ("weight", "most"),
    [
        (lambda n: 2.0 if isinstance(n, int) and not isinstance(n, (bool, float)) else 3.0, 2),
        (lambda n: 2.0 if isinstance(n, numbers.Integral) else 3.0, 2),
        (lambda n: 2.0 if n.__class__ is int else 3.0, 2),
        (_matched, 2),
        (lambda n: 2.0 if type(n) is int else 3.0, 5),  # no symbol is that: a capture for each value
    ],
)
def test_a_number_of_a_tensor_is_of_the_class_that_it_has_in_the_plain_step(
    weight: Callable[[Any], float], most: int, endpoint: str
) -> None:
    model = Counted(weight)
    want = [model(X).detach() for _ in range(5)]
    model.count.zero_()
    with client.submit(lambda x: model(x).detach(), example=(X,), model=model, endpoint=endpoint) as job:
        assert all(torch.equal(job.step(X).result(), each) for each in want)
        assert len(job._remote.programs) <= most


def test_a_comparison_is_true_or_false_itself(endpoint: str) -> None:
    def weight(n: Any) -> float:
        late = n > 4
        return 2.0 if late is True else 3.0

    assert programs(weight, endpoint, 10) <= 3


class Checked(torch.optim.Optimizer):
    """Looks at the classes of its numbers."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            rate = group["lr"] if isinstance(group["lr"], float) else 3 * group["lr"]
            for p in group["params"]:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                p -= p.grad * (rate / state["step"] if isinstance(state["step"], int) else rate)


def test_so_are_hyperparameters_and_step_counts(endpoint: str) -> None:
    def run(endpoint: str | None) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = torch.nn.Linear(6, 2)
        optimizer = Checked(model.parameters(), 0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        if endpoint is None:
            return [step(X).clone() for _ in range(4)]
        with client.submit(step, example=(X,), model=model, optimizer=optimizer, endpoint=endpoint) as job:
            return [job.step(X).result().clone() for _ in range(4)]

    assert all(map(torch.equal, run(None), run(endpoint)))


class ByTypes(torch.optim.Optimizer):
    """Asks for the very type of a hyperparameter, or of its step count."""

    def __init__(self, params: Any, lr: float, asks: str) -> None:
        super().__init__(params, {"lr": lr, "asks": asks})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            rate = group["lr"]
            if group["asks"] == "rate" and type(rate) is not float:
                rate = 3 * rate
            for p in group["params"]:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                whole = group["asks"] != "count" or type(state["step"]) is int
                p -= p.grad * (rate / state["step"] if whole else rate)


@pytest.mark.parametrize(("asks", "count"), [("nothing", 2), ("rate", 4), ("count", 6)])
def test_types_of_an_optimizers_numbers(asks: str, count: int, endpoint: str) -> None:
    """What the code asks for holds. Only numbers of the kind that it asks have a capture for each value."""

    def run(submitted: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = torch.nn.Linear(6, 2)
        optimizer = ByTypes(model.parameters(), 0.1, asks)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        def train(step: Callable[[torch.Tensor], Any]) -> list[torch.Tensor]:
            losses = []
            for i in range(6):
                optimizer.param_groups[0]["lr"] = 0.1 / (1 + i // 2)
                losses.append(step(X).clone())
            return losses

        if not submitted:
            return train(step)
        with client.submit(step, example=(X,), model=model, optimizer=optimizer, endpoint=endpoint) as job:
            losses = train(job.step)
            captures = [phase for function, _, _ in job._functions for case in function._cases for phase in case.phases]
            assert len(captures) == count
            return losses

    assert all(map(torch.equal, run(submitted=False), run(submitted=True)))
