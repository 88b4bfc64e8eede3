"""What a step raises while it is captured, and where: a CaptureError that the script catches as its own exception."""

from __future__ import annotations

import errno
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpumux import client
from gpumux.errors import CaptureError, DataDependent, GpumuxError, from_code, raised_in_step


class TooShort(ValueError):
    """With a text and a signature of its own."""

    def __init__(self, *, rows: int) -> None:
        super().__init__(rows)
        self.rows = rows

    def __str__(self) -> str:
        return f"only {self.rows} rows"


class Closed(type):
    """A metaclass that makes no subclasses."""

    def __new__(cls, name: str, bases: Any, given: dict[str, Any]) -> Any:
        if any(isinstance(base, Closed) for base in bases):
            raise TypeError("no subclasses")
        return super().__new__(cls, name, bases, given)


class Odd(Exception, metaclass=Closed):
    pass


def _raises(step: Callable[[Tensor], Tensor], kind: type[Exception], endpoint: str) -> Any:
    """The error of a second batch, of one row, of a job that goes on afterwards."""
    model, x = nn.Linear(4, 2), torch.randn(3, 4)

    def whole(x: Tensor) -> Tensor:
        return model(step(x)).sum()

    with client.submit(whole, example=(x,), model=model, endpoint=endpoint) as job:
        before = job.step(x).item()
        with pytest.raises(kind) as caught:
            job.step(x[:1])
        assert job.step(x).item() == before
    return caught.value


RAISED: list[Callable[[], Exception]] = [
    lambda: ValueError("a batch of 1"), lambda: KeyError("loss"), lambda: AssertionError(), lambda: TooShort(rows=1),
    lambda: OSError(errno.ENOENT, "no such file", "data.pt"), lambda: StopIteration(3),
    lambda: UnicodeDecodeError("utf-8", b"x", 0, 1, "odd"), lambda: ZeroDivisionError("division by zero"),
    lambda: TypeError("a Linear has no such thing"), lambda: AttributeError("gone", name="gone", obj=None),
]  # fmt: skip


@pytest.mark.parametrize("make", RAISED, ids=lambda make: type(make()).__name__)
def test_an_exception_of_the_steps_own_keeps_its_kind_and_text(make: Callable[[], Exception], endpoint: str) -> None:
    wanted = make()

    def step(x: Tensor) -> Tensor:
        if len(x) < 2:
            raise wanted
        return x

    found = _raises(step, type(wanted), endpoint)
    assert isinstance(found, CaptureError)
    assert str(found) == str(wanted)
    assert found.args == wanted.args
    assert found.remedy
    assert "while it was captured, at" in found.message
    assert __file__ in found.__notes__[0]
    for name in ("errno", "filename", "value", "reason", "rows", "start"):
        assert getattr(found, name, None) == getattr(wanted, name, None)


def test_torchs_refusal_of_a_batch_keeps_its_kind(endpoint: str) -> None:
    found = _raises(lambda x: x if len(x) > 1 else x[:, :3], RuntimeError, endpoint)
    assert isinstance(found, CaptureError)


def test_a_kind_that_has_no_subclasses_is_a_capture_error(endpoint: str) -> None:
    def step(x: Tensor) -> Tensor:
        if len(x) < 2:
            raise Odd("as it is")
        return x

    assert type(_raises(step, CaptureError, endpoint)) is CaptureError


def test_what_only_a_capture_raises_is_no_error_of_the_steps(endpoint: str) -> None:
    """A script that leaves out what raises RuntimeError would leave out batches that the plain loop runs."""

    def numpy(x: Tensor) -> Tensor:
        return x if len(x) > 1 else torch.from_numpy(x.numpy() + 1.0)

    def value(x: Tensor) -> Tensor:
        return x if len(x) > 1 else x * x.sum().item()

    def shape(x: Tensor) -> Tensor:
        return x if len(x) > 1 else x.expand(3, 4)[x[0].repeat(3)[:3] > -100.0]

    for step in (numpy, value, shape):
        found = _raises(step, CaptureError, endpoint)
        assert not isinstance(found, (RuntimeError, ValueError, TypeError)), found
    assert isinstance(_raises(value, CaptureError, endpoint), DataDependent)


def test_what_the_plain_step_does_before_it_raises_is_warned_of(
    endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    norm, model = nn.BatchNorm1d(4), nn.Linear(4, 2)

    def step(x: Tensor) -> Tensor:
        out = model(nn.functional.dropout(norm(x)))
        return out.sum() if x.shape[1] == 4 and len(x) != 2 else out.view(7)

    x = torch.randn(3, 4)
    with client.submit(step, example=(x,), model=nn.ModuleList([norm, model]), endpoint=endpoint) as job:
        job.step(x)
        drawn = torch.get_rng_state()
        with (
            caplog.at_level(logging.WARNING, "gpumux.client"),
            pytest.raises(RuntimeError, match=r"the plain step first changed state .* and drew random numbers"),
        ):
            job.step(x[:2])
        assert torch.equal(torch.get_rng_state(), drawn)
    assert "the job is as before the call" in caplog.text
    assert norm.num_batches_tracked == 1


def test_it_crosses_processes_as_a_capture_error() -> None:
    error = raised_in_step(ValueError("a batch of 1"), "the step raised ValueError", "run it once without gpumux")
    assert isinstance(error, ValueError)
    again = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert type(again) is CaptureError
    assert again.message == "the step raised ValueError: a batch of 1"
    assert type(from_code(error.code, error.message)) is CaptureError
    assert isinstance(error, GpumuxError)
