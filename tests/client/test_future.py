"""Futures of steps that return one number compare, and are true or false, like that number."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from gpumux import client
from gpumux.client.future import StepFuture
from gpumux.errors import JobFailed
from gpumux.types import StepTimes

COMPARISONS = [operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge]
NUMBERS = [0.0, 0.1, -2.5, float("nan"), float("inf"), 0, 3, True, False]
OTHERS = [0.1, 0, 1, True, 2.5, float("nan"), torch.tensor(0.1), torch.tensor([3]), numpy.float64(0.1)]


def future_of(value: Any) -> StepFuture:
    """A future that is answered only when it is waited for."""

    def wait(predicate: Callable[[], bool], timeout: float | None, step: int) -> bool:
        if timeout != 0.0:
            future._finish(value, StepTimes(0.0, 0.0, 0.0))
        return predicate()

    future = StepFuture(wait, 0)
    return future


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("as_tensor", [True, False])
def test_it_compares_as_its_value(number: Any, as_tensor: bool) -> None:
    value = torch.tensor(number) if as_tensor else number
    for compare in COMPARISONS:
        for other in OTHERS:
            found = compare(future_of(value), other)
            assert type(found) is bool
            assert found == bool(compare(value, other)), (compare, value, other)
            assert compare(other, future_of(value)) == bool(compare(other, value)), (compare, other, value)


@pytest.mark.parametrize("compare", COMPARISONS)
def test_beside_an_array_it_does_what_its_value_does(compare: Callable[[Any, Any], Any]) -> None:
    several = numpy.array([0.5, 3.0])
    assert (compare(future_of(0.5), several) == compare(0.5, several)).all()
    assert (compare(several, future_of(0.5)) == compare(several, 0.5)).all()


@pytest.mark.parametrize("number", NUMBERS)
def test_two_compare_as_their_values(number: Any) -> None:
    for compare in COMPARISONS:
        for other in NUMBERS:
            found = compare(future_of(torch.tensor(number)), future_of(torch.tensor(other)))
            assert found is bool(compare(torch.tensor(number), torch.tensor(other)))


@pytest.mark.parametrize("number", [0.1, 0.3, 1e-8])
def test_a_tensor_compares_at_its_own_precision(number: float) -> None:
    """As in the plain loop: `.item()` of float32 is another double than the number that was written."""
    loss = torch.tensor(number)
    assert loss.item() != number
    assert future_of(loss) == number


def test_beside_several_numbers_it_compares_with_each() -> None:
    several = torch.tensor([1.0, 2.0])
    assert torch.equal(future_of(torch.tensor(2.0)) == several, torch.tensor([False, True]))
    assert torch.equal(future_of(torch.tensor(2.0)) > several, torch.tensor([True, False]))


@pytest.mark.parametrize("number", [0.0, 0.5, float("nan"), 0, 7, False, True])
@pytest.mark.parametrize("as_tensor", [True, False])
def test_it_is_true_where_its_value_is(number: Any, as_tensor: bool) -> None:
    assert bool(future_of(torch.tensor(number) if as_tensor else number)) is bool(number)


def test_it_is_a_number_where_one_is_wanted() -> None:
    assert int(future_of(torch.tensor(3.7))) == 3
    assert [10, 20, 30][future_of(torch.tensor(1))] == 20
    with pytest.raises(TypeError):
        operator.index(future_of(torch.tensor(1.0)))
    assert f"{future_of(torch.tensor(0.25)):.3f}" == "0.250"
    assert min(future_of(torch.tensor(2.0)), future_of(torch.tensor(1.0))).item() == 1.0


ASKED: dict[str, Callable[[StepFuture], Any]] = {
    "bool": bool, "==": lambda f: f == 1.0, "!=": lambda f: f != 1.0, "<": lambda f: f < 1.0, "<=": lambda f: f <= 1.0,
    ">": lambda f: f > 1.0, ">=": lambda f: f >= 1.0, "float": float, "int": int, "index": operator.index,
    "format": lambda f: f"{f:.3f}",
    "== a future": lambda f: f == future_of(1.0), "a future ==": lambda f: future_of(1.0) == f,
}  # fmt: skip


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("value", [torch.zeros(3), torch.zeros(0), {"loss": torch.zeros(())}, (1.0, 2.0), None, "text"])
def test_of_any_other_value_it_says_what_to_do(value: Any, asked: str) -> None:
    with pytest.raises(TypeError, match=r"not one number; use \.result\(\)"):
        ASKED[asked](future_of(value))


@pytest.mark.parametrize("asked", ASKED)
def test_a_step_that_failed_raises_what_it_failed_with(asked: str) -> None:
    future = future_of(0.0)
    future._fail(JobFailed("it crashed", "mend it"))
    with pytest.raises(JobFailed, match="it crashed"):
        ASKED[asked](future)


def test_what_no_number_is_compared_with_is_another_thing() -> None:
    """Without waiting, because code that looks for None or a sentinel means the object."""
    future = future_of(torch.zeros(3))
    for other in (None, "text", object(), (1.0,)):
        assert not future == other  # noqa: SIM201
        assert future != other
        with pytest.raises(TypeError):
            future < other
    assert not future.done()


def test_sets_and_dicts_know_it_by_identity_and_do_not_wait() -> None:
    one, two = future_of(1.0), future_of(1.0)
    kept = {one: "one", two: "two"}
    assert kept[one] == "one"
    assert len({one, two, one}) == 2
    del kept[one]
    assert list(kept.values()) == ["two"]
    assert not one.done()
    assert not two.done()


def test_with_a_daemon_it_is_what_the_plain_loop_has(endpoint: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(6, 3), torch.randn(4, 6)

    def step(x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    loss = step(x)
    with client.submit(step, example=(x,), model=model, endpoint=endpoint) as job:
        assert job.step(x) == loss
        assert job.step(x) == job.step(x)
        assert not job.step(x) != loss.item()  # noqa: SIM202
        assert job.step(x) < loss + 1.0
        assert job.step(x)


OPERATORS = [
    operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow,
]  # fmt: skip


@pytest.mark.parametrize("by", OPERATORS)
@pytest.mark.parametrize("value", [torch.tensor(2.5), 2.5, 3])
def test_it_is_computed_with_as_its_value(by: Callable[[Any, Any], Any], value: Any) -> None:
    others: list[Any] = [0.5, 3, torch.tensor(1.5), torch.tensor([1.0, 2.0])]
    if not isinstance(value, torch.Tensor):  # torch and numpy together warn
        others += [numpy.float64(0.5), numpy.array([1.0, 2.0])]
    for other in others:
        for found, wanted in (
            (by(future_of(value), other), by(value, other)),
            (by(other, future_of(value)), by(other, value)),
        ):
            assert type(found) is type(wanted)
            assert repr(found) == repr(wanted), (by, value, other)
    assert by(future_of(value), future_of(value)) == by(value, value)


def test_a_running_loss_is_the_plain_loops() -> None:
    losses = [torch.tensor(0.1 * i) for i in range(5)]
    total: Any = 0.0
    for loss in losses:
        total += future_of(loss)
    assert torch.equal(total, sum(losses, 0.0))  # type: ignore[arg-type]
    assert torch.equal(sum(map(future_of, losses)), sum(losses))  # type: ignore[arg-type]
    assert abs(future_of(torch.tensor(-2.0))) == 2.0
    assert -future_of(torch.tensor(-2.0)) == 2.0
    assert round(future_of(torch.tensor(2.4))) == 2


def test_what_is_no_number_is_computed_with_by_name_alone() -> None:
    with pytest.raises(TypeError, match=r"\.result\(\)"):
        future_of({"loss": 1}) + 1
    with pytest.raises(TypeError):
        future_of(1.0) + "a"


def test_backward_says_where_it_belongs() -> None:
    future = future_of(torch.tensor(1.0))
    with pytest.raises(
        AttributeError, match=r"loss\.backward\(\) inside the step; \.result\(\) is the value"
    ) as caught:
        future.backward()
    assert caught.value.name == "backward"
    assert not future.done(), "nothing is waited for"


@pytest.mark.parametrize("name", ["detach", "cpu", "shape", "numpy", "mean", "grad_fn", "tolist"])
def test_what_a_tensor_has_is_asked_of_the_result(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"{name!r}, which a tensor has .* \.result\(\)\.{name}$"):
        getattr(future_of(torch.tensor(1.0)), name)


def test_what_it_has_not_it_has_not() -> None:
    future = future_of(torch.tensor(1.0))
    for name in ("backward", "detach", "shape", "nothing", "__array__", "__dlpack__", "__cuda_array_interface__"):
        assert not hasattr(future, name)
        assert getattr(future, name, None) is None
    with pytest.raises(AttributeError, match=r"no attribute 'nothing'$"):
        future.nothing
    for name in ("item", "result", "times", "done"):
        assert hasattr(future, name)
