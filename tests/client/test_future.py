"""A step's future is used as the value that the step returned."""

from __future__ import annotations

import copy
import io
import numbers
import operator
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import nn

from gpumux import client
from gpumux.client.future import ContainerFuture, NumberFuture, StepFuture, TensorFuture
from gpumux.errors import CaptureError, JobFailed, NoGraph
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

    future: StepFuture
    if isinstance(value, torch.Tensor):
        future = TensorFuture(wait, 0, value, value.device)
    else:
        future = (NumberFuture if isinstance(value, (bool, int, float)) else ContainerFuture)(wait, 0)
    return future


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("as_tensor", [True, False])
def test_it_compares_as_its_value(number: Any, as_tensor: bool) -> None:
    value = torch.tensor(number) if as_tensor else number
    for compare in COMPARISONS:
        for other in OTHERS:
            found = compare(future_of(value), other)
            assert isinstance(found, (bool, torch.Tensor))
            assert bool(found) == bool(compare(value, other)), (compare, value, other)
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
            assert torch.equal(found, compare(torch.tensor(number), torch.tensor(other)))


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


ASKED: dict[str, Callable[[Any], Any]] = {
    "bool": bool, "==": lambda f: f == 1.0, "!=": lambda f: f != 1.0, "<": lambda f: f < 1.0, "<=": lambda f: f <= 1.0,
    ">": lambda f: f > 1.0, ">=": lambda f: f >= 1.0, "float": float, "int": int, "index": operator.index,
    "complex": complex, "format": lambda f: f"{f:.3f}", "str": str, "len": len, "list": list, "[0]": lambda f: f[0],
    "['loss']": lambda f: f["loss"], "in": lambda f: 1.0 in f, "+": lambda f: f + 1, "1 -": lambda f: 1 - f,
    "@": lambda f: f @ torch.ones(3), "-": operator.neg, "abs": abs, "~": operator.invert, "shape": lambda f: f.shape,
    "mean": lambda f: f.mean(), "numpy": lambda f: f.numpy(), "tolist": lambda f: f.tolist(),
    "detach": lambda f: f.detach(), "keys": lambda f: list(f.keys()), "loss": lambda f: f.loss,
    "unpacked": lambda f: (lambda a, b: (a, b))(*f), "asarray": numpy.asarray, "torch.mean": torch.mean,
    "torch.stack": lambda f: torch.stack([f, f]), "torch.add": lambda f: torch.add(torch.ones(3), f),
    "torch.where": lambda f: torch.where(torch.tensor(True), f, 0.0), "isfinite": torch.isfinite, "repr": repr,
    "in a dict": lambda f: str({"loss": f}), "deepcopy": lambda f: copy.deepcopy({"loss": f}), "copy": copy.copy,
    "pickle": lambda f: pickle.loads(pickle.dumps({"loss": f})),  # noqa: S301
    "_asdict": lambda f: f._asdict(),
    "Number": lambda f: isinstance(f, numbers.Number), "is_tensor": torch.is_tensor,
    "isinstance": lambda f: [isinstance(f, kind) for kind in (tuple, dict, list, str)],
    "hasattr": lambda f: hasattr(f, "item") or isinstance(f, (int, float)),
}  # fmt: skip
NEVER_WAITS = ("Number", "is_tensor", "isinstance", "hasattr")  # for the result of a step that returns one tensor
SHOWS_A_FAILURE = ("repr", "in a dict")

ASKED_OF_TENSORS: dict[str, Callable[[Any], Any]] = {
    "torch.tensor": lambda f: torch.tensor([f, f]), "nested": lambda f: torch.tensor([[f], [f]]),
    "as_tensor": lambda f: torch.as_tensor(f, dtype=torch.float64), "new_tensor": lambda f: torch.ones(2).new_tensor(f),
    "full": lambda f: torch.full((2,), f), "arange": torch.arange, "torch.Tensor": lambda f: torch.Tensor([f, f]),
    "FloatTensor": lambda f: torch.FloatTensor([f]), "alpha": lambda f: torch.add(torch.ones(2), 1, alpha=f),
    "add_": lambda f: torch.ones(3).add_(f), "[index]": lambda f: torch.arange(5)[f],
    "numpy.array": lambda f: numpy.array([f, f]), "element_size": lambda f: f.element_size(),
    "data_ptr": lambda f: f.data_ptr() != 0, "no torch functions": lambda f: without_torch_functions(f),
    "numpy.exp": lambda f: numpy.exp(f.numpy()), "to": lambda f: f.to(torch.float64), "T": lambda f: f.reshape(1, -1).T,
}  # fmt: skip


def without_torch_functions(value: Any) -> Any:
    """What parts of torch do that were handed a tensor's subclass."""
    with torch._C.DisableTorchFunctionSubclass():
        return value.sum(), torch.mul(value, 2), value.reshape(-1), value.to(torch.float64)


class Output(dict[str, Any]):
    """A structured result, with its keys as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError as gone:
            raise AttributeError(name) from gone


@pytest.mark.covering
@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(0.25), torch.tensor([0.5, 1.0, 2.0]), torch.tensor(3), torch.tensor(True), torch.zeros(0), 0.5, 2,
        {"loss": torch.tensor(1.0)}, Output(loss=torch.tensor(1.0)), (1.0, torch.tensor(2.0)), [torch.ones(2)], None,
        "text",
    ],
    ids=lambda value: type(value).__name__ + str(getattr(value, "shape", "")),
)  # fmt: skip
def test_it_does_what_its_value_does(value: Any, asked: str) -> None:
    """The same result, or an error of the same kind."""
    found = []
    for one in (value, future_of(value)):
        try:
            found.append(ASKED[asked](one))
        except Exception as error:  # noqa: BLE001 - of whatever kind the value raises
            found.append(type(error))
    plain, ours = found
    if isinstance(plain, type):
        assert issubclass(ours, plain), f"{ours} for {plain}"
    else:
        assert type(ours) is type(plain)
        assert repr(ours) == repr(plain)


TENSORS = [torch.tensor(0.25), torch.tensor([0.5, 1.0, 2.0]), torch.tensor(3), torch.tensor(True), torch.zeros(0)]


@pytest.mark.parametrize("asked", ASKED_OF_TENSORS)
@pytest.mark.parametrize("value", TENSORS, ids=str)
def test_torch_and_numpy_take_a_tensor_for_one(value: torch.Tensor, asked: str) -> None:
    found = []
    for one in (value, future_of(value)):
        try:
            found.append(repr(ASKED_OF_TENSORS[asked](one)))
        except Exception as error:  # noqa: BLE001 - of whatever kind the value raises
            found.append(type(error).__name__)
    assert found[0] == found[1]


@pytest.mark.parametrize("asked", [one for one in ASKED if one not in NEVER_WAITS + SHOWS_A_FAILURE])
def test_a_step_that_failed_raises_what_it_failed_with(asked: str) -> None:
    for future in (future_of(torch.tensor(0.0)), future_of((0.0,))):
        future._fail(JobFailed("it crashed", "mend it"))
        with pytest.raises(JobFailed, match="it crashed"):
            ASKED[asked](future)


def test_what_a_failed_step_returned_is_not_known() -> None:
    future = future_of((0.0,))
    future._fail(JobFailed("it crashed", "mend it"))
    with pytest.raises(JobFailed, match="it crashed"):
        isinstance(future, tuple)


def test_what_no_number_is_compared_with_is_another_thing() -> None:
    """Without waiting, because code that looks for None or a sentinel means the object."""
    future = future_of((torch.zeros(3),))
    for other in (None, "text", object()):
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


@pytest.mark.parametrize("by", [operator.iadd, operator.isub, operator.imul, operator.itruediv])
@pytest.mark.parametrize("other", [2.0, torch.tensor(3.0), future_of(torch.tensor(4.0))])
def test_a_sum_that_begins_with_a_step_goes_into_its_result(by: Callable[[Any, Any], Any], other: Any) -> None:
    """As in the plain loop, where both names are one tensor."""
    loss, first = torch.tensor(5.0), future_of(torch.tensor(5.0))
    total = by(loss, other.result() if isinstance(other, StepFuture) else other)
    ours = by(first, other)
    assert ours is first.result()
    assert total is loss
    assert torch.equal(first.result(), loss)
    assert by(future_of(5.0), 2.0) == by(5.0, 2.0)


@pytest.mark.parametrize("value", [torch.tensor(1.0), (torch.tensor(1.0),), 1.0])
def test_backward_says_where_it_belongs(value: Any) -> None:
    future = future_of(value)
    with pytest.raises(NoGraph, match=r"call loss\.backward\(\), and optimizer\.step\(\), inside the step") as caught:
        future.backward(retain_graph=True)
    assert [entry.path for entry in caught.traceback] == [Path(__file__)]
    assert not future.done(), "nothing is waited for"


def test_protocols_are_not_asked_of_the_value() -> None:
    """Looking whether a future has them would wait for it."""
    future = future_of((torch.tensor(1.0),))
    for name in ("_repr_png_", "__dlpack__", "__cuda_array_interface__", "__array_interface__"):
        assert not hasattr(future, name)
    assert not future.done()


def test_the_repr_of_a_step_that_failed_says_so_and_raises_nothing() -> None:
    future = future_of(torch.tensor(1.0))
    future._fail(JobFailed("it crashed", "mend it"))
    assert repr([future]) == "[<StepFuture failed: it crashed>]"


def test_only_a_tensor_waits_as_a_tensor() -> None:
    """A history of results pickles and copies as values, of which none keeps the job."""
    kept = copy.deepcopy({"loss": [future_of(torch.tensor(1.0))], "counts": future_of({"seen": torch.tensor(3)})})
    assert type(kept["loss"][0]) is torch.Tensor  # type: ignore[index]
    assert type(kept["counts"]) is dict


def test_it_is_saved_and_loaded_as_its_value() -> None:
    file = io.BytesIO()
    torch.save({"loss": future_of(torch.tensor(0.25)), "best": future_of(0.5)}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(loaded["loss"]) is torch.Tensor
    assert loaded == {"loss": torch.tensor(0.25), "best": 0.5}


def test_what_the_value_has_not_it_has_not() -> None:
    with pytest.raises(AttributeError, match=r"the step returns a Tensor, which has no attribute 'nothing'$"):
        future_of(torch.tensor(1.0)).nothing


def test_a_step_takes_the_result_of_another(endpoint: str) -> None:
    model, x = nn.Linear(6, 6), torch.randn(4, 6)
    wanted = model(model(x))
    with client.submit(lambda x: model(x), example=(x,), model=model, endpoint=endpoint) as job:
        assert torch.equal(job.step(job.step(x)), wanted)
        assert torch.equal(job.step(x=job.step(x)), wanted)


def test_a_structured_result_of_a_step(endpoint: str) -> None:
    model, x = nn.Linear(6, 3), torch.randn(4, 6)

    def step(x: torch.Tensor) -> Any:
        out = model(x)
        return {"loss": out.square().mean(), "out": out}, out.argmax(1)

    with client.submit(step, example=(x,), model=model, endpoint=endpoint) as job:
        named, best = job.step(x)
        assert torch.equal(named["out"], model(x))
        assert torch.equal(best, model(x).argmax(1))
        assert f"{job.step(x)[0]['loss']:.4f}" == f"{named['loss']:.4f}"


class Pair(NamedTuple):
    loss: torch.Tensor
    number: int


@dataclass(frozen=True)
class Found:
    loss: torch.Tensor
    parts: dict[str, Any]
    name: str = "found"
    more: Any = None

    def __post_init__(self) -> None:
        assert isinstance(self.loss, torch.Tensor), "made once, by the step"


def test_a_structured_result_is_matched_by_its_kind(endpoint: str) -> None:
    def matched(found: Any) -> str:
        match found:
            case {"loss": loss, **others}:
                return f"mapping {loss:.3f} {sorted(others)}"
            case (loss, number):
                return f"sequence {loss:.3f} {number}"
            case torch.Tensor() as loss:
                return f"tensor {loss:.3f}"
            case _:
                return "nothing"

    results: list[Callable[[torch.Tensor], Any]] = [
        lambda x: {"loss": x.sum(), "number": 2}, lambda x: (x.sum(), 2), lambda x: [x.sum(), 2],
        lambda x: Pair(x.sum(), 2), lambda x: x.sum(),
    ]  # fmt: skip
    x = torch.ones(3)
    for step in results:
        with client.submit(step, example=x, endpoint=endpoint) as job:
            found = matched(job.step(x))
            assert found == matched(step(x)) != "nothing"


def test_a_step_returns_dataclasses(endpoint: str) -> None:
    """Also one within another, and frozen ones."""
    model, x = nn.Linear(6, 3), torch.randn(4, 6)

    def step(x: torch.Tensor) -> Any:
        out = model(x)
        inner = Found(out.sum(), {"out": out}, more=[1, 2.5, None])
        return Found(out.square().mean(), {"inner": (inner, out.argmax(1))})

    plain = step(x)
    with client.submit(step, example=(x,), model=model, endpoint=endpoint) as job:
        found = job.step(x)
        assert found.name == "found"
        inner, best = found.parts["inner"]
        result = found.result()
    assert type(result) is Found
    assert torch.equal(result.loss, plain.loss.detach())
    assert torch.equal(best, plain.parts["inner"][1])
    assert type(inner) is Found
    assert inner.more == [1, 2.5, None]
    assert torch.equal(inner.parts["out"], model(x))


def test_what_a_dataclass_holds_is_refused_by_its_type(endpoint: str) -> None:
    model, x = nn.Linear(6, 3), torch.randn(4, 6)

    def step(x: torch.Tensor) -> Any:
        return Found(model(x), {"of": object()})

    with pytest.raises(CaptureError, match="the step returns a object"):
        client.submit(step, example=(x,), model=model, endpoint=endpoint)


def test_a_number_that_the_step_computes_is_a_number(endpoint: str) -> None:
    model, x = nn.Linear(6, 3), torch.randn(4, 6)
    with client.submit(lambda x: model(x).shape[0] / 8, example=(x,), model=model, endpoint=endpoint) as job:
        found = job.step(x)
        assert isinstance(found, numbers.Number)
        assert not isinstance(found, torch.Tensor)
        assert found == 0.5


def test_a_logger_takes_it() -> None:
    summary = pytest.importorskip("torch.utils.tensorboard.summary")
    assert summary.scalar("loss", future_of(torch.tensor(0.25))).value[0].simple_value == 0.25


def test_a_notebook_shows_the_value_and_where_the_time_went() -> None:
    future = TensorFuture(lambda predicate, timeout, step: predicate(), 7, torch.empty(()), torch.device("cpu"))
    future._finish(torch.tensor(0.25), StepTimes(0.001, 0.0025, 0.004))
    shown = future._repr_html_()
    for text in ("gpumux step 7", "tensor(0.2500)", "1.000 ms", "2.500 ms", "4.000 ms"):
        assert text in shown
    assert "&lt;script&gt;" in future_of({"<script>": 1})._repr_html_()
    future = future_of(0.5)
    future._fail(JobFailed("the job's process died"))
    assert "StepFuture failed: the job&#x27;s process died" in future._repr_html_()


@pytest.mark.parametrize("value", [torch.tensor(0.25), 0.5, SimpleNamespace(logits=1)])
def test_completion_knows_the_future_and_what_is_answered_and_does_not_wait(value: Any) -> None:
    future = future_of(value)
    assert {"result", "done", "times", "item"} <= set(dir(future))
    assert "logits" not in dir(future)
    assert not future._done
    future.result()
    assert {"result", "done", "times"} | {name for name in dir(value) if not name.startswith("_")} <= set(dir(future))


def test_results_lie_as_those_of_the_step(endpoint: str) -> None:
    # Kernels choose their order of summation by strides.
    x = torch.randn(64, 20, 4)

    def step(x: torch.Tensor) -> Any:
        y = x * 2
        return y[..., -1], y.transpose(0, 1), y[::2], y[:, :1].expand(64, 3, 4), y[:0, 0], y.sum()

    with client.submit(step, example=(x,), endpoint=endpoint) as job:
        got = job.step(x).result()
    for one, other in zip(got, step(x), strict=True):
        assert one.stride() == other.stride()
        assert torch.equal(one.mean(), other.mean()) or not other.numel()
