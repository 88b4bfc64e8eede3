"""Errors end at the user's line: frames of gpumux and torch are left out, unless all are asked for."""

from __future__ import annotations

import copy
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpumux import client, errors
from gpumux.capture.source import VARIABLE, fold
from gpumux.client.local_model import LocalModel
from tests.threads import one_thread

X = torch.randn(3, 4)
ROOT = str(Path(__file__).parents[2])


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        found = self.layer(x)
        return found * 2 if found.sum() > 0 else found  # the user's line


def functions(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def failed(step: Any, endpoint: str, **given: Any) -> errors.GpumuxError:
    with pytest.raises(errors.GpumuxError) as caught:
        client.submit(step, example=X, endpoint=endpoint, **given)
    return caught.value


def test_a_refusal_ends_at_the_line_it_is_about(endpoint: str) -> None:
    model = Branches()

    def step(x: Tensor) -> Tensor:
        return model(x).sum()

    error = failed(step, endpoint, model=model)
    assert isinstance(error, errors.DataDependent)
    assert functions(error) == ["failed", "step", "forward"]
    last = traceback.extract_tb(error.__traceback__)[-1]
    assert last.line is not None
    assert "# the user's line" in last.line
    assert last.filename == __file__


def test_an_error_of_the_step_ends_at_its_line_and_shows_no_frames_of_torch(endpoint: str) -> None:
    def step(x: Tensor) -> Tensor:
        return x @ x

    error = failed(step, endpoint)
    assert functions(error) == ["failed", "step"]
    shown = "".join(traceback.format_exception(error))
    assert "direct cause" not in shown
    assert "recorder.py" not in shown
    assert "RuntimeError" in error.message


def test_a_bad_argument_ends_at_the_call(endpoint: str) -> None:
    assert functions(failed(lambda x: x, endpoint, model=3)) == ["failed"]


def test_errors_of_step_and_add_are_folded_too(endpoint: str) -> None:
    model = Branches()
    with one_thread(), client.submit(lambda x: model.layer(x), example=X, model=model, endpoint=endpoint) as job:
        with pytest.raises(errors.GpumuxError) as caught:
            job.step("a text", 3, X)
        assert functions(caught.value)[0] == "test_errors_of_step_and_add_are_folded_too"
        assert not any(
            "gpumux" in frame.filename.split("/")[-2] for frame in traceback.extract_tb(caught.value.__traceback__)
        )
        with pytest.raises(errors.DataDependent) as caught:
            job.add(lambda x: model(x), example=X)
        assert functions(caught.value)[-1] == "forward"


def test_all_frames_are_shown_where_asked_for(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "full")
    error = failed(lambda x: x @ x, endpoint)
    assert "_trace" in functions(error)
    assert isinstance(error.__cause__, RuntimeError)


def test_errors_of_others_are_left_alone() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.ones(2) @ torch.ones(3)
    before = caught.value.__traceback__
    fold(caught.value)
    assert caught.value.__traceback__ is before


def test_an_error_of_a_result_ends_at_the_line_that_wants_it(endpoint: str) -> None:
    model = nn.Linear(4, 2)

    def step(x: Tensor) -> Tensor:
        return torch.linalg.cholesky(model(x).T @ model(x) + torch.eye(2)).sum()

    with one_thread(), client.submit(step, example=X, model=model, endpoint=endpoint) as job:
        future = job.step(X * float("nan"))
        for _ in range(2):
            for want in (future.item, future.result, lambda: float(future), lambda: 1 + future, future.mean):
                with pytest.raises(errors.BadValue) as caught:
                    want()
                name = "test_an_error_of_a_result_ends_at_the_line_that_wants_it"
                assert functions(caught.value) in ([name], [name, "<lambda>"])


def test_an_error_of_a_call_ends_at_the_call(endpoint: str) -> None:
    model = nn.Linear(4, 2)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(x), y)

    y = torch.tensor([0, 1, 1])
    with one_thread(), client.submit(loss, example=(X, y), model=model, endpoint=endpoint) as job:
        evaluate = job.add(loss, example=(X, y))
        for step in (job.step, evaluate):
            with pytest.raises(errors.BadBatch) as caught:
                step(X, y + 9)
            assert functions(caught.value) == ["test_an_error_of_a_call_ends_at_the_call"]


def test_an_error_of_a_read_between_steps_ends_at_the_line_that_reads(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(self: LocalModel, parts: Any) -> None:
        raise errors.DaemonGone("the daemon is gone", "start it")

    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    reads = {
        "tensor": lambda: model.weight.sum(),
        "module": lambda: model(X),
        "function that asks no torch function": lambda: torch.tensor(model.bias),
        "copy": lambda: copy.deepcopy(model.weight),
        "text": lambda: repr(model.weight),
        "optimizer": lambda: optimizer.state[model.weight],
    }
    with one_thread(), client.submit(step, example=X, model=model, optimizer=optimizer, endpoint=endpoint) as job:
        job.step(X)
        with monkeypatch.context() as broken:
            broken.setattr(LocalModel, "_bring", gone)
            for read in reads.values():
                with pytest.raises(errors.StaleState, match="start it") as caught:
                    read()
                frames = traceback.extract_tb(caught.value.__traceback__)
                assert not [frame for frame in frames if "/gpumux/" in frame.filename.removeprefix(ROOT)]
                assert "direct cause" not in "".join(traceback.format_exception(caught.value))
