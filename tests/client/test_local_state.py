"""The local model while the daemon holds newer state: sync(), load_state(), state_dict(), and writes that are
noticed."""

from __future__ import annotations

import copy
import functools
import io
import logging
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpumux import client, errors
from gpumux.client.job import Job

X, Y = torch.randn(4, 6), torch.tensor([0, 1, 2, 0])


class Case:
    def __init__(self, endpoint: str) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.reference = copy.deepcopy(self.model)
        self.reference_optimizer = torch.optim.Adam(self.reference.parameters(), lr=0.1)
        self.job: Job = client.submit(
            lambda x, y: self._train(self.model, self.optimizer, x, y),
            example=(X, Y), model=self.model, optimizer=self.optimizer, endpoint=endpoint, name="case",
        )  # fmt: skip

    @staticmethod
    def _train(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    def both(self, steps: int) -> None:
        for _ in range(steps):
            self.job.step(X, Y)
            self._train(self.reference, self.reference_optimizer, X, Y)

    def same(self) -> bool:
        ours, theirs = self.model.state_dict(), self.reference.state_dict()
        return all(torch.equal(ours[k], theirs[k]) for k in ours)


@pytest.fixture
def case(endpoint: str) -> Iterator[Case]:
    made = Case(endpoint)
    yield made
    made.job.close()


@pytest.mark.parametrize(
    "use",
    [
        lambda model, optimizer: model(X),
        lambda model, optimizer: model[0](X),
        lambda model, optimizer: model.state_dict()["0.weight"],
        lambda model, optimizer: optimizer.state_dict()["state"][0]["exp_avg"],
    ],
    ids=["call", "submodule", "state_dict", "optimizer state_dict"],
)
def test_what_uses_it_gets_what_the_daemon_holds(use: Any, case: Case) -> None:
    case.both(2)
    assert torch.equal(use(case.model, case.optimizer), use(case.reference, case.reference_optimizer))
    case.both(1)
    assert torch.equal(use(case.model, case.optimizer), use(case.reference, case.reference_optimizer))


def test_sync_brings_back_model_and_optimizer_and_training_goes_on_either_side(case: Case) -> None:
    case.both(5)
    case.job.sync()
    assert case.same()
    mine, theirs = case.optimizer.state_dict(), case.reference_optimizer.state_dict()
    for index, entry in theirs["state"].items():
        for key, value in entry.items():
            assert torch.equal(mine["state"][index][key], value), key
    case.both(3)
    case.job.sync()
    assert case.same()
    for _ in range(2):  # locally, then push and go on in the daemon
        case._train(case.model, case.optimizer, X, Y)
        case._train(case.reference, case.reference_optimizer, X, Y)
    case.job.load_state()
    case.both(3)
    case.job.sync()
    assert case.same()


def test_a_local_write_is_detected_and_load_state_answers_it(case: Case) -> None:
    case.both(2)
    case.job.sync()
    with torch.no_grad():
        case.model[0].weight.mul_(0.5)
        case.reference[0].weight.mul_(0.5)
    with pytest.raises(errors.LocalWrite, match=r"job\.load_state\(\)"):
        case.job.step(X, Y)
    case.job.load_state()
    case.both(2)
    case.job.sync()
    assert case.same()


def test_loading_a_state_dict_locally_is_a_write(case: Case) -> None:
    start = copy.deepcopy(case.reference.state_dict())
    case.both(1)
    case.model.load_state_dict(start)
    with pytest.raises(errors.LocalWrite):
        case.job.step(X, Y)
    case.job.load_state()
    assert case.job.step(X, Y).result().isfinite()


def test_state_dict_leaves_the_local_model_alone_and_load_state_takes_it_back(case: Case) -> None:
    before = {k: v.clone() for k, v in case.model.state_dict().items()}
    case.both(3)
    state = case.job.state_dict()
    want = case.reference.state_dict()
    assert all(torch.equal(state["model"][k], want[k]) for k in want)
    assert state["optimizer"]["state"][0]["step"] == 3.0
    with torch._C.DisableTorchFunctionSubclass():  # else looking would fetch
        assert all(torch.equal(v, before[k]) for k, v in case.model.named_parameters())
    case.both(2)
    case.job.load_state(state)  # back to after three steps
    case.job.sync()
    assert all(torch.equal(v, want[k]) for k, v in case.model.state_dict().items()) is False
    case.job.load_state(state)
    case.job.step(X, Y)
    case.job.step(X, Y)
    case.job.sync()
    assert case.same()


def test_copies_and_pickles_of_the_model_carry_no_tripwire(case: Case) -> None:
    case.both(1)
    case.job.sync()
    twin, thawed = copy.deepcopy(case.model), pickle.loads(pickle.dumps(case.model))  # noqa: S301 - our own bytes
    case.both(1)
    twin(X)
    thawed(X)


@pytest.mark.parametrize(
    "use",
    [copy.deepcopy, pickle.dumps, lambda model: torch.save(model, io.BytesIO())],
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_a_model_that_is_copied_or_saved_is_up_to_date(use: Any, case: Case) -> None:
    case.both(1)
    use(case.model)
    assert case.same()


def _entry(case: Case) -> dict[str, Any]:
    return dict.__getitem__(case.optimizer.state, case.model[0].weight)


@pytest.mark.parametrize(
    "write",
    [
        lambda c: _entry(c)["exp_avg"].zero_(),
        lambda c: _entry(c).__setitem__("exp_avg", torch.zeros(8, 6)),
        lambda c: _entry(c).__setitem__("step", torch.tensor(100.0)),
        lambda c: _entry(c).__setitem__("mine", 1),
        lambda c: c.optimizer.state.__setitem__(c.model[0].weight, []),
        lambda c: c.optimizer.state.clear(),
        lambda c: setattr(c.model[0].weight, "data", torch.zeros(8, 6)),
        lambda c: setattr(_entry(c)["exp_avg"], "data", torch.zeros(8, 6)),
    ],
    ids=["in place", "replaced", "step counter", "entry added", "other kind", "cleared", "p.data =", "exp_avg.data ="],
)
def test_every_way_of_changing_optimizer_state_or_weights_is_noticed(write: Any, case: Case) -> None:
    case.both(1)
    case.job.sync()
    case.both(1)  # sync itself is no write
    case.job.sync()
    write(case)
    with pytest.raises(errors.LocalWrite, match=r"job\.load_state\(\)"):
        case.job.step(X, Y)


def test_gradients_of_the_users_own_are_their_business(case: Case) -> None:
    case.both(1)
    case.job.sync()
    F.cross_entropy(case.model(X), Y).backward()  # a look at the gradient, between two steps
    case.both(1)
    case.job.sync()
    assert case.same()


def test_sync_is_a_write_that_autograd_notices(case: Case) -> None:
    loss = F.cross_entropy(case.model(X), Y)
    case.both(1)
    case.job.sync()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_schedulers_know_that_the_optimizer_stepped(endpoint: str) -> None:
    model = nn.Linear(6, 3)
    groups = [{"params": list(model.parameters()), "initial_lr": 0.1}]  # so that a scheduler adds nothing to them
    optimizer = torch.optim.SGD(groups, lr=0.1)
    step = functools.partial(Case._train, model, optimizer)
    with client.submit(step, example=(X, Y), model=model, optimizer=optimizer, endpoint=endpoint, name="s") as job:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        job.step(X, Y)
        scheduler.step()  # warns, which is an error here, when it believes that step() never ran
        job.sync()


def test_closing_brings_home_what_was_trained_and_frees_the_local_model(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    case.both(2)
    with caplog.at_level(logging.INFO, "gpumux.client"):
        case.job.close()
    assert "what its last 2 steps trained is in the local model" in caplog.text
    assert case.same()
    case.model(X)
    with pytest.raises(errors.JobClosed):
        case.job.step(X, Y)


def test_gradients_another_step_reads_come_back_with_sync(endpoint: str) -> None:
    model = nn.Linear(6, 3)
    reference = copy.deepcopy(model)

    def accumulate(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    with client.submit(accumulate, example=(X, Y), model=model, endpoint=endpoint) as job:
        job.step(X, Y)
        job.step(X, Y)
        job.sync()
    for _ in range(2):
        F.cross_entropy(reference(X), Y).backward()
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, reference.weight.grad)


def test_a_step_that_reads_gradients_added_too_late_says_so(endpoint: str) -> None:
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def backward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    def apply() -> None:
        optimizer.step()

    with client.submit(backward, example=(X, Y), model=model, optimizer=optimizer, endpoint=endpoint) as job:
        job.step(X, Y)
        update = job.add(apply, example=())
        with pytest.raises(errors.CaptureError, match="did not keep"):
            update()
        job.step(X, Y)  # keeps them from now on
        update().result()
        job.sync()
