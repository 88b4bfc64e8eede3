"""Batches that hold objects and numpy arrays."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import from_numpy

from gpumux import client, errors
from tests.client.parity import Work, check

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    scale: float = 1.0
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def doubled(self) -> torch.Tensor:
        return self.x * 2


@dataclass(slots=True)
class Slotted:
    x: torch.Tensor
    inner: Frozen | None = None


class Entries(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        return self[name]


class Ordered(OrderedDict[str, Any]):
    pass


class Tokens(UserDict[str, Any]):
    def __init__(self, data: dict[str, Any]) -> None:
        super().__init__(data)
        self.records = [object()]
        self.n = 2


OBJECTS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], Any]]] = {
    "a frozen dataclass": (lambda x: Frozen(x, 0.5, {"y": x + 1}), lambda b: b.doubled * b.scale + b.more["y"]),
    "one with slots": (lambda x: Slotted(x, Frozen(x.clone())), lambda b: b.x + b.inner.doubled),
    "a namespace in a list": (lambda x: [SimpleNamespace(x=x, flag=True)], lambda b: b[0].x if b[0].flag else None),
    "a dict's subclass": (lambda x: Entries(x=x, y=x * 3), lambda b: b.x + b["y"]),
    "an ordered dict's": (lambda x: Ordered(y=x, x=x * 3), lambda b: next(iter(b.values())) * len(b)),
    "a mapping": (lambda x: Tokens({"x": x}), lambda b: b["x"] * b.n),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_an_object_in_a_batch(name: str, endpoint: str) -> None:
    make, use = OBJECTS[name]

    def loop(step: Callable[..., Any]) -> list[Any]:
        return [step(make(x)) for x in (X, X + 1, X[:2], X[:2] * 2)]

    check(lambda: Work([], [], [(use, (make(X),))], loop), endpoint)


def test_the_result_of_a_step_in_an_object(endpoint: str) -> None:
    with client.submit(lambda b: b.x * b.scale, example=(Frozen(X),), endpoint=endpoint) as job:
        first: Any = job.step(Frozen(X, 3.0))
        assert torch.equal(job.step(Frozen(first, 2.0)).result(), X * 3 * 2)


def test_two_classes_of_one_name_are_different_batches(endpoint: str) -> None:
    def kind(factor: int) -> Any:
        @dataclass
        class Same:
            x: torch.Tensor

            def value(self) -> torch.Tensor:
                return self.x * factor

        return Same

    one, other = kind(2), kind(3)
    with client.submit(lambda b: b.value(), example=(one(X),), endpoint=endpoint) as job:
        assert torch.equal(job.step(one(X)).result(), X * 2)
        assert torch.equal(job.step(other(X)).result(), X * 3)


def test_what_is_no_value_in_a_mapping_is_refused_where_the_step_reads_it(endpoint: str) -> None:
    def step(batch: Tokens) -> Any:
        return batch["x"] * len(batch.records)

    with pytest.raises(errors.CaptureError, match=r"reads Tokens\.records of the batch") as caught:
        client.submit(step, example=(Tokens({"x": X}),), endpoint=endpoint)
    assert "outside the step" in caught.value.remedy


def test_an_object_that_holds_something_else_is_refused(endpoint: str) -> None:
    with pytest.raises(errors.CaptureError, match="holds a object"):
        client.submit(lambda b: b.x * 1, example=(SimpleNamespace(x=X, y=object()),), endpoint=endpoint)


ARRAYS: dict[str, Callable[[Any], Any]] = {
    "from_numpy": lambda a: torch.from_numpy(a) * 2,
    "as_tensor": lambda a: torch.as_tensor(a) * 2,
    "as_tensor of a type": lambda a: torch.as_tensor(a, dtype=torch.float32) * 2,
    "asarray": lambda a: torch.asarray(a) * 2,
    "tensor": lambda a: torch.tensor(a) * 2,
    "tensor of a type": lambda a: torch.tensor(a, dtype=torch.float32, device="cpu") * 2,
    "astype": lambda a: torch.from_numpy(a.astype(np.float32)) * 2,
    "its shape": lambda a: torch.from_numpy(a) * a.shape[0] + len(a) + a.ndim + a.size,
    "its type": lambda a: torch.from_numpy(a) * (2 if a.dtype == np.float64 and isinstance(a, np.ndarray) else 3),
    "a gradient": lambda a: torch.autograd.grad((t := torch.tensor(a, requires_grad=True)).pow(3).sum(), t)[0],
}


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_in_a_batch(name: str, endpoint: str) -> None:
    arrays = [
        X.double().numpy(),
        (X.double() * 3).numpy(),
        np.asfortranarray(X.double().numpy()),
        X.double().numpy()[::2],
    ]

    def loop(step: Callable[..., Any]) -> list[Any]:
        return [step(array) for array in arrays]

    check(lambda: Work([], [], [(ARRAYS[name], (arrays[0],))], loop), endpoint)


def test_an_array_given_twice(endpoint: str) -> None:
    def step(a: Any, b: Any) -> torch.Tensor:
        return torch.from_numpy(a) * torch.from_numpy(b)

    array = X.numpy()
    with client.submit(step, example=(array, array), endpoint=endpoint) as job:
        assert torch.equal(job.step(array, array).result(), X * X)
        assert torch.equal(job.step(array, array + 1).result(), X * (X + 1))


READS: dict[str, Callable[[Any], Any]] = {
    "arithmetic": lambda a: torch.from_numpy(a * 2),
    "a function that takes arrays alone": lambda a: from_numpy(a),
    "an element": lambda a: torch.tensor(float(a[0, 0])),
    "numpy's functions": lambda a: torch.from_numpy(np.flip(a, 0).copy()),
    "a method": lambda a: torch.tensor(a.mean()),
    "integers": lambda a: torch.from_numpy(a.astype(np.int64)),
    "iteration": lambda a: torch.stack([torch.from_numpy(row) for row in a]),
}


@pytest.mark.parametrize("name", READS)
def test_a_step_that_computes_with_an_array_in_python_is_refused(name: str, endpoint: str) -> None:
    with pytest.raises(errors.DataDependent, match="numpy array of the batch") as caught:
        client.submit(READS[name], example=(X.numpy(),), endpoint=endpoint)
    assert "torch.from_numpy" in caught.value.remedy


@pytest.mark.parametrize("make", [torch.FloatTensor, torch.LongTensor, torch.Tensor])
def test_an_array_given_to_a_class_of_tensors_is_refused(make: Any, endpoint: str) -> None:
    with pytest.raises(errors.DataDependent, match=r"test_batch_contents\.py:\d+ gives a numpy array") as caught:
        client.submit(lambda a: make(a) * 2, example=(X.numpy(),), endpoint=endpoint)
    assert "torch.as_tensor" in caught.value.remedy


@pytest.mark.parametrize("array", [np.array(["a"]), X.numpy()[::-1]], ids=["texts", "backwards"])
def test_an_array_that_can_be_no_tensor_is_refused(array: Any, endpoint: str) -> None:
    with pytest.raises(errors.CaptureError, match="no tensor"):
        client.submit(lambda a: torch.from_numpy(a) * 1, example=(array,), endpoint=endpoint)


def test_microbatches_of_arrays(endpoint: str) -> None:
    layer = torch.nn.Linear(6, 3)

    def step(batch: SimpleNamespace) -> Any:
        loss = layer(torch.from_numpy(batch.x)).pow(2).mean()
        loss.backward()
        return loss.detach()

    batch = SimpleNamespace(x=X.numpy())
    expected = layer(X).pow(2).mean()
    with client.submit(step, example=(batch,), model=layer, microbatches=2, endpoint=endpoint) as job:
        torch.testing.assert_close(job.step(batch).result(), expected.detach())


def test_numbers_of_numpy_are_refused_with_what_to_give(endpoint: str) -> None:
    with pytest.raises(errors.CaptureError, match=r"numpy\.int64.*int\(n\)"):
        client.submit(lambda x, n: x * n, example=(torch.ones(2), np.int64(3)), endpoint=endpoint)
