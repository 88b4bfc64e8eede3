"""What torch.distributions checks in a step is checked in each step that runs, and its result says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Normal

from gpumux import client, errors
from tests.threads import one_thread

X = torch.randn(6, 8)
GOOD, BAD = torch.full((6,), 0.5), torch.tensor([0.5, 0.5, -1.0, 0.5, 0.5, 0.5])


@pytest.fixture(autouse=True)
def checks(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch.compile turns them off for the whole process, and another test may have called it.
    monkeypatch.setattr(Distribution, "_validate_args", True)


def opened(endpoint: str, model: nn.Module, **options: Any) -> client.Job:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, scale: Tensor) -> Tensor:
        scale = scale * (1 + 0 * model.bias[0])  # so that the check is the daemon's
        loss: Tensor = -Normal(model(x)[:, 0], scale).log_prob(x[:, 0]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return client.submit(
        step, example=(X, GOOD), model=model, optimizer=optimizer, endpoint=endpoint, rng="own", **options
    )


def test_a_value_out_of_range_fails_its_step_as_in_the_plain_loop(endpoint: str) -> None:
    with opened(endpoint, nn.Linear(8, 4)) as job:
        assert torch.isfinite(job.step(X, GOOD).result())
        with pytest.raises(ValueError, match="parameter scale of a Normal distribution is outside of GreaterThan") as e:
            job.step(X, BAD).result()
        assert isinstance(e.value, errors.BadValue)
        assert f"{__file__}:" in e.value.message
        assert isinstance(job.step(X, GOOD).result(), Tensor), "an error that was raised is not raised again"


def test_a_value_of_the_batch_is_checked_before_the_step(endpoint: str) -> None:
    model = nn.Linear(8, 4)

    def step(x: Tensor, scale: Tensor) -> Tensor:
        with torch.no_grad():
            model.bias.add_(1)
        return Normal(model(x)[:, 0], scale.clamp(max=1)).log_prob(x[:, 0]).mean()

    with client.submit(step, example=(X, GOOD), model=model, endpoint=endpoint) as job:
        before = model.bias.clone()
        with pytest.raises(errors.BadValue, match="the step was not run"):
            job.step(X, BAD)
        job.step(X, GOOD).result()
        assert torch.equal(model.bias, before + 1)


def test_a_negative_variance_fails_its_step_as_in_the_plain_loop(endpoint: str) -> None:
    model, loss = nn.Linear(8, 1), nn.GaussianNLLLoss()

    def step(x: Tensor, variance: Tensor) -> Tensor:
        return loss(model(x), x[:, :1], variance)

    with one_thread(), client.submit(step, example=(X, GOOD[:, None]), model=model, endpoint=endpoint) as job:
        assert torch.equal(job.step(X, GOOD[:, None]).result(), step(X, GOOD[:, None]))
        with pytest.raises(ValueError, match="gaussian_nll_loss was given a negative variance"):
            job.step(X, BAD[:, None])
        assert torch.equal(job.step(X, GOOD[:, None]).result(), step(X, GOOD[:, None]))


def test_the_covariance_of_a_multivariate_normal_is_checked(endpoint: str) -> None:
    good, bad = torch.eye(3), -torch.eye(3)

    def step(covariance: Tensor) -> Tensor:
        return torch.distributions.MultivariateNormal(torch.zeros(3), covariance).log_prob(torch.ones(3))

    with client.submit(step, example=(good,), endpoint=endpoint) as job:
        assert torch.equal(job.step(good).result(), step(good))
        with pytest.raises(errors.BadValue, match="outside of PositiveDefinite"):
            job.step(bad)


def test_one_that_the_script_does_not_look_at_is_raised_by_a_later_step(endpoint: str) -> None:
    with opened(endpoint, nn.Linear(8, 4)) as job:
        job.step(X, BAD)
        job.sync()
        with pytest.raises(errors.BadValue):
            job.step(X, GOOD)
        job.step(X, GOOD).result()


def test_one_in_constants_is_raised_at_capture(endpoint: str) -> None:
    model = nn.Linear(8, 4)

    def step(x: Tensor) -> Any:
        return Normal(0.0, torch.arange(3.0)).log_prob(model(x)[:, :3]).sum()

    with pytest.raises(errors.CaptureError, match="Expected parameter scale"):
        client.submit(step, example=(X,), model=model, endpoint=endpoint)


def test_checks_that_are_turned_off_are_not_made(endpoint: str) -> None:
    model = nn.Linear(8, 4)

    def step(x: Tensor, y: Tensor, check: bool) -> Any:
        return Categorical(logits=model(x), validate_args=check).log_prob(y)

    y = torch.tensor([0, 1, 2, 3, 0, 1])
    with client.submit(step, example=(X, y, False), model=model, endpoint=endpoint) as job:
        assert torch.equal(job.step(X, y, False).result(), step(X, y, False))
        assert torch.equal(job.step(X, y, True).result(), step(X, y, True))
        counts = [len(program.program.results) for program in job._remote.programs.values()]
        assert sorted(counts) == [1, 3], "the checks of the logits and of the sample"


def test_a_step_with_checks_is_not_split(endpoint: str) -> None:
    with pytest.raises(errors.NotSplittable, match="checks values") as caught:
        opened(endpoint, nn.Linear(8, 4), microbatches=2)
    assert "validate_args=False" in caught.value.remedy


def test_another_test_of_all_values_is_refused(endpoint: str) -> None:
    model = nn.Linear(8, 4)

    def step(x: Tensor) -> Any:
        torch._is_all_true(x > 0)
        return model(x)

    with pytest.raises(errors.DataDependent):
        client.submit(step, example=(X,), model=model, endpoint=endpoint)
