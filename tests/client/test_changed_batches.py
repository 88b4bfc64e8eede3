"""Steps that write into tensors of their batch, make them require grad, or leave gradients on them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpumux import client, errors
from tests.client.parity import Work, check

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))


def scale(x: torch.Tensor) -> torch.Tensor:
    x.div_(3).add_(1)
    return x.sum()


def check_loop(step: Callable[..., Any], make: Callable[[], Any], endpoint: str, count: int = 3) -> None:
    """Calls with the same batch again and again; what it holds is looked at after each."""

    def loop(run: Callable[..., Any]) -> list[Any]:
        batch = make()
        seen = []
        for _ in range(count):
            result = run(*batch)
            seen.append((result, [torch.as_tensor(each).detach().clone() for each in batch]))
        return [
            each.detach() if isinstance(each, torch.Tensor) else each for pair in seen for each in (pair[0], *pair[1])
        ]

    check(lambda: Work([], [], [(step, make())], loop), endpoint)


WRITTEN: dict[str, tuple[Callable[..., Any], Callable[[], Any]]] = {
    "scaled": (scale, lambda: (X.clone(),)),
    "not contiguous": (scale, lambda: (X.clone().t(),)),
    "a slice with gaps": (scale, lambda: (torch.zeros(8, 12)[::2, ::2].copy_(X),)),
    "a view of it": (lambda x: x[1:].mul_(2).sum(), lambda: (X.clone(),)),
    "read before": (lambda x: (x * 2, x.zero_())[0], lambda: (X.clone(),)),
    "returned": (lambda x: x.mul_(2), lambda: (X.clone(),)),
    "one of two": (lambda x, y: x.add_(y).sum(), lambda: (X.clone(), X * 2)),
    "one given twice": (lambda x, y: x.mul_(2) + y, lambda: (x := X.clone(), x)),
    "an array": (lambda a: torch.from_numpy(a).mul_(2).sum(), lambda: (X.clone().numpy(),)),
    "an array, by another": (lambda a: torch.as_tensor(a).mul_(2).sum(), lambda: (X.clone().numpy(),)),
    "no copy of an array": (lambda a: torch.tensor(a).mul_(2).sum(), lambda: (X.clone().numpy(),)),
    "numbers of a table": (
        lambda i: (i.clamp_(max=3), F.embedding(i, torch.arange(8.0).view(4, 2)))[1],
        lambda: (torch.arange(9),),
    ),
    "empty": (lambda x: x.mul_(2).sum(), lambda: (torch.zeros(0, 3),)),
    "with random numbers": (lambda x: x.add_(torch.randn_like(x)).sum(), lambda: (X.clone(),)),
    "bytes": (lambda x: x.bitwise_not_().sum(), lambda: (torch.arange(10, dtype=torch.uint8),)),
    "another type's view": (lambda x: x.view(torch.int32).add_(1).sum(), lambda: (X.clone(),)),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("name", WRITTEN)
def test_what_a_step_writes_into_its_batch_is_in_the_scripts_tensor(name: str, endpoint: str) -> None:
    check_loop(*WRITTEN[name], endpoint)


def test_other_tensors_over_the_memory_see_it_as_well(endpoint: str) -> None:
    def loop(run: Callable[..., Any]) -> list[Any]:
        data = torch.arange(24.0).view(6, 4)
        results = [run(data[i : i + 2]) for _ in range(2) for i in range(0, 6, 2)]
        return [*results, data]

    check(lambda: Work([], [], [(scale, (torch.zeros(2, 4),))], loop), endpoint)


def test_a_tensor_of_an_inference_mode(endpoint: str) -> None:
    with torch.inference_mode():
        x = X.clone()
    with client.submit(scale, example=(X,), endpoint=endpoint) as job:
        job.step(x).result()
        assert torch.equal(x, X / 3 + 1)


def test_two_steps_of_a_job_see_each_others_writes(endpoint: str) -> None:
    with client.submit(scale, example=(X,), endpoint=endpoint) as job:
        double = job.add(lambda x: x.mul_(2).sum(), example=(X,))
        x = X.clone()
        first, second, third = job.step(x), double(x), job.step(x)
        assert torch.equal(third.result(), ((X / 3 + 1) * 2 / 3 + 1).sum())
        assert torch.equal(first.result(), (X / 3 + 1).sum())
        assert second.result() == ((X / 3 + 1) * 2).sum()


def test_the_result_of_a_step_written_by_the_next(endpoint: str) -> None:
    with client.submit(lambda x: x * 1, example=(X,), endpoint=endpoint) as job:
        write = job.add(lambda x: x.add_(1).sum(), example=(X,))
        out = job.step(X)
        write(out)
        assert torch.equal(out.result(), X + 1)


def test_a_collated_batch(endpoint: str) -> None:
    with client.submit(scale, example=(X,), max_inflight=3, endpoint=endpoint) as job:
        for i in range(6):
            batch = job.collate(list(X + i))
            assert torch.equal(job.step(batch).result(), ((X + i) / 3 + 1).sum())
            del batch


@pytest.mark.extended
def test_a_compiled_step(endpoint: str) -> None:
    x = X.clone()
    with client.submit(scale, example=(X,), compile=True, endpoint=endpoint) as job:
        for expected in (X / 3 + 1, (X / 3 + 1) / 3 + 1):
            result = job.step(x).result()
            torch.testing.assert_close(x, expected)
            torch.testing.assert_close(result, expected.sum())


def test_a_step_in_which_a_check_fails(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # torch.compile turns checks off for the whole process, and another test may have called it.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)

    model = torch.nn.Linear(1, 1)

    def step(x: torch.Tensor) -> torch.Tensor:
        x.sub_(1)
        return torch.distributions.Normal(0.0, x * (1 + 0 * model.bias)).log_prob(
            torch.ones(())
        )  # the daemon's check: it needs the bias

    x = torch.full((3,), 0.5)
    with client.submit(step, example=(x,), model=model, endpoint=endpoint) as job:
        with pytest.raises(errors.BadValue):
            job.step(x).result()
        assert torch.equal(x, torch.full((3,), -0.5))


def test_without_a_step_the_batch_stays(endpoint: str) -> None:
    x = X.clone()
    client.submit(scale, example=(x,), endpoint=endpoint).close()
    assert torch.equal(x, X)


REFUSED: dict[str, tuple[Callable[..., Any], Callable[[], Any], str]] = {
    "an expanded tensor": (scale, lambda: (X[:1].expand(4, 6),), "share memory"),
    "overlapping tensors": (
        lambda x, y: x.add_(1) + y,
        lambda: ((x := X.clone())[:3], x[1:]),
        "shares memory with tensor 1",
    ),
    "an array's memory twice": (
        lambda x, y: torch.from_numpy(x).add_(1) + y,
        lambda: ((x := X.clone()).numpy(), x),
        "shares memory with",
    ),
    "transposed in place": (lambda x: x.t_().sum(), lambda: (X.clone(),), "changes the shape of tensor 0"),
    "a view that is kept": (lambda x: x.unsqueeze_(0).sum(), lambda: (X.clone(),), "changes the shape"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_write_that_would_differ_is_refused(name: str, endpoint: str) -> None:
    step, make, word = REFUSED[name]
    with pytest.raises(errors.CaptureError, match=word) as caught:
        client.submit(step, example=make(), endpoint=endpoint)
    assert caught.value.remedy
    assert "changes the shape" not in word or __file__ in caught.value.message


def test_setting_data_of_the_batch_is_refused(endpoint: str) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        x.data = x / 255
        return x.sum()

    with pytest.raises(errors.CaptureError, match=r"sets its \.data"):
        client.submit(step, example=(X,), endpoint=endpoint)


def test_writing_a_trained_value_into_the_batch_is_refused(endpoint: str) -> None:
    layer = nn.Linear(6, 6)

    def step(x: torch.Tensor) -> torch.Tensor:
        return x.copy_(layer(x)).sum()

    with pytest.raises(errors.CaptureError, match="part of a graph"):
        client.submit(step, example=(X.clone(),), model=layer, endpoint=endpoint)


def test_overlapping_tensors_are_refused_at_a_later_call_too(endpoint: str) -> None:
    with client.submit(lambda x, y: x.add_(1) + y, example=(X.clone(), X.clone()), endpoint=endpoint) as job:
        x = X.clone()
        job.step(x, X)
        with pytest.raises(errors.CaptureError, match="shares memory with tensor 1"):
            job.step(x, x.view(4, 6))
        assert torch.equal(x, X + 1)


def test_writing_into_memory_that_the_job_holds_is_refused(endpoint: str) -> None:
    data = torch.arange(24.0).view(6, 4)

    def step(x: torch.Tensor) -> torch.Tensor:
        x.div_(2)
        return (x - data.mean(0)).sum()

    with client.submit(step, example=(torch.ones(2, 4),), endpoint=endpoint) as job:
        x = torch.ones(2, 4)
        assert torch.equal(job.step(x).result(), (x - data.mean(0)).sum())
        with pytest.raises(errors.CaptureError, match="a tensor that the job holds"):
            job.step(data[:2])
        assert torch.equal(data, torch.arange(24.0).view(6, 4))


def test_microbatches_refuse_a_changed_batch(endpoint: str) -> None:
    layer = nn.Linear(6, 3)

    def step(x: torch.Tensor) -> torch.Tensor:
        x.div_(2)
        loss = layer(x).pow(2).mean()
        loss.backward()
        return loss

    with pytest.raises(errors.NotSplittable, match="changes its batch") as caught:
        client.submit(step, example=(X.clone(),), model=layer, microbatches=2, endpoint=endpoint)
    assert "x.clone()" in caught.value.remedy


# ---- gradients


def penalty(model: nn.Module) -> Callable[..., Any]:
    def step(x: torch.Tensor) -> torch.Tensor:
        x.requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        loss = gradient.pow(2).mean() + model(x).mean()
        model.zero_grad()
        loss.backward(inputs=list(model.parameters()))
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.1 * p.grad)
        return loss.detach()

    return step


def test_a_batch_made_to_require_grad_requires_it_after_the_step(endpoint: str) -> None:
    def make() -> Work:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
        batches = [X.clone(), X * 2]

        def loop(run: Callable[..., Any]) -> list[Any]:
            return [(run(x), x.requires_grad, x.grad) for _ in range(3) for x in batches]

        return Work([model], [], [(penalty(model), (X.clone(),))], loop)

    check(make, endpoint)


def attack(x: torch.Tensor) -> torch.Tensor:
    x.requires_grad = True
    x.pow(3).sum().backward()
    return (x + 0.1 * x.grad.sign()).detach()  # type: ignore[union-attr]


def test_a_gradient_left_on_the_batch_says_that_it_is_in_the_daemon(endpoint: str) -> None:
    with client.submit(attack, example=(X.clone(),), endpoint=endpoint) as job:
        x = X.clone()
        assert torch.equal(job.step(x).result(), X + 0.1 * (3 * X.pow(2)).sign())
        assert x.requires_grad
        assert x.grad is not None
        assert x.grad.shape == x.shape
        with pytest.raises(errors.StaleState, match=r"x\.grad"):
            x.grad.sum()
        with pytest.raises(errors.CaptureError, match="has a gradient") as caught:  # the plain loop adds to it
            job.step(x)
        assert "x.grad = None" in caught.value.remedy
        x.grad = None
        assert torch.equal(job.step(x).result(), X.add(0.1 * (3 * X.pow(2)).sign()))


def test_a_gradient_of_the_scripts_own_is_refused(endpoint: str) -> None:
    with client.submit(attack, example=(X.clone(),), endpoint=endpoint) as job:
        x = X.clone()
        x.grad = torch.ones(4, 6)
        with pytest.raises(errors.CaptureError, match="has a gradient"):
            job.step(x)
        assert not x.requires_grad


def test_a_gradient_that_the_step_removes_again(endpoint: str) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        x.requires_grad_()
        x.pow(2).sum().backward()
        found = x.grad
        x.grad = None
        x.requires_grad_(False)
        assert found is not None
        return x.add_(found)

    check_loop(step, lambda: (X.clone(),), endpoint)


def test_a_leaf_that_requires_grad_may_be_a_batch(endpoint: str) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        (found,) = torch.autograd.grad(x.pow(3).sum(), x)
        return found

    check_loop(step, lambda: (X.clone().requires_grad_(),), endpoint)


def test_a_tensor_with_a_graph_is_refused(endpoint: str) -> None:
    made = X.clone().requires_grad_() * 2
    with pytest.raises(errors.CaptureError, match="computed from others") as caught:
        client.submit(lambda x: x * 1, example=(made,), endpoint=endpoint)
    assert "detach()" in caught.value.remedy


def test_what_a_step_puts_into_the_objects_of_its_batch_is_warned_of(
    endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "gpumux.client")

    def step(batch: dict[str, torch.Tensor], note: SimpleNamespace) -> torch.Tensor:
        batch["x"] = batch["x"] / 2
        note.logits = batch["x"] * 3
        return batch.pop("y") + note.logits.sum()

    def unchanged(batch: dict[str, torch.Tensor], note: SimpleNamespace) -> torch.Tensor:
        return batch.pop("y") + batch["x"].sum()

    given = ({"x": torch.ones(2), "y": torch.ones(())}, SimpleNamespace(kept=1))
    with client.submit(unchanged, example=given, endpoint=endpoint) as job:
        assert float(job.step(*given)) == 3.0
    assert not caplog.records
    with client.submit(step, example=given, endpoint=endpoint) as job:
        assert float(job.step(*given)) == 4.0
    assert ["step puts something into an object of its batch" in r.getMessage() for r in caplog.records] == [True]
    assert list(given[0]) == ["x", "y"]
