"""A batch with an index out of range costs its step: the error is of the plain loop's kinds, and the job goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpumux import client
from gpumux.errors import BadBatch, BadValue, JobFailed
from tests.threads import one_thread

Made = tuple[nn.Module, Callable[..., Tensor], tuple[Tensor, ...], tuple[Tensor, ...]]


def labels() -> Made:
    model = nn.Linear(4, 3)
    x = torch.randn(5, 4)
    return (
        model,
        lambda x, y: nn.functional.cross_entropy(model(x), y),
        (x, torch.tensor([0, 1, 2, 2, -100])),
        (
            x,
            torch.tensor([0, 1, 3, 2, -100]),
        ),
    )


def tokens() -> Made:
    model = nn.Embedding(10, 4)
    good, bad = torch.tensor([[1, 9]]), torch.tensor([[1, 10]])
    return model, lambda t: model(t).square().mean(), (good,), (bad,)


def shifted() -> Made:
    """Labels as a causal language model shifts them: the first one is not used."""
    model = nn.Linear(4, 3)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        shifted = nn.functional.pad(y, (0, 1), value=-100)[..., 1:].contiguous()
        return nn.functional.cross_entropy(model(x).view(-1, 3), shifted.view(-1))

    x = torch.randn(1, 4, 4)
    return model, loss, (x, torch.tensor([[77, 0, 1, 2]])), (x, torch.tensor([[0, 0, 3, 2]]))


def converted() -> Made:
    model = nn.Linear(4, 3)
    x = torch.randn(2, 4)
    narrow = {"dtype": torch.int32}
    return (
        model,
        lambda x, y: nn.functional.cross_entropy(model(x), y.long()),
        (x, torch.tensor([0, 2], **narrow)),
        (
            x,
            torch.tensor([0, -1], **narrow),
        ),
    )


def gathered() -> Made:
    model = nn.Linear(4, 3)
    x = torch.randn(2, 4)
    return (
        model,
        lambda x, i: model(x).gather(1, i[:, ::2]).sum(),
        (x, torch.tensor([[0, 9, 2], [1, 9, 1]])),
        (
            x,
            torch.tensor([[0, 1, 3], [1, 1, 1]]),
        ),
    )


def indexed() -> Made:
    model = nn.Linear(4, 3)
    x = torch.randn(2, 4)
    return model, lambda x, i: model(x)[i].sum(), (x, torch.tensor([-2, 1])), (x, torch.tensor([-3, 1]))


def probabilities() -> Made:
    model = nn.Linear(4, 1)
    x = torch.randn(4, 4)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.binary_cross_entropy(model(x).sigmoid(), y.float().unsqueeze(1) / 2)

    return model, loss, (x, torch.tensor([0, 1, 2, 1])), (x, torch.tensor([0, 1, 3, 1]))


def shifted_right() -> Made:
    """A decoder's inputs, as encoder-decoder models make them from the labels."""
    model = nn.Embedding(10, 4)

    def loss(y: Tensor) -> Tensor:
        inputs = y.new_zeros(y.shape)
        inputs[:, 1:] = y[:, :-1].clone()
        inputs[:, 0] = 1
        return model(inputs.masked_fill(inputs == -100, 0)).square().mean()

    return model, loss, (torch.tensor([[3, -100, 9]]),), (torch.tensor([[3, 10, 9]]),)


def margins() -> Made:
    model = nn.Linear(4, 3)
    x = torch.randn(2, 4)
    return (
        model,
        lambda x, y: nn.functional.multi_margin_loss(model(x), y - 1),
        (x, torch.tensor([1, 3])),
        (x, torch.tensor([0, 3])),
    )


def factored() -> Made:
    model = nn.Linear(2, 2)
    good, bad = torch.tensor([[2.0, 1.0], [1.0, 2.0]]), torch.tensor([[1.0, 2.0], [2.0, 1.0]])
    return model, lambda a: model(torch.linalg.cholesky(a)).sum(), (good,), (bad,)


def eigenvalues() -> Made:
    model = nn.Linear(4, 2)
    good, bad = torch.diag(torch.arange(1.0, 5.0)), torch.full((4, 4), float("nan"))
    return model, lambda a: model(torch.linalg.eigvalsh(a).unsqueeze(0)).sum(), (good,), (bad,)


def sampled() -> Made:
    model = nn.Linear(4, 3)
    good, bad = torch.rand(2, 4), torch.full((2, 4), -0.5)
    return model, lambda p: model(torch.bernoulli(p)).sum(), (good,), (bad,)


def divided() -> Made:
    model = nn.Linear(4, 3)
    x = torch.randn(2, 4)
    return (
        model,
        lambda x, n: (model(x) * (7 // n).unsqueeze(1)).sum(),
        (x, torch.tensor([1, 2])),
        (x, torch.tensor([1, 0])),
    )


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "make",
    [labels, tokens, shifted, converted, gathered, indexed, probabilities, shifted_right, margins, factored,
     eigenvalues, sampled, divided],
)  # fmt: skip
def test_a_bad_batch_costs_its_step_alone(make: Callable[[], Made], endpoint: str) -> None:
    def run(submit: bool) -> Any:
        torch.manual_seed(0)
        model, loss, good, bad = make()
        optimizer = torch.optim.Adam(model.parameters())

        def step(*batch: Tensor) -> Tensor:
            optimizer.zero_grad()
            found = loss(*batch)
            found.backward()
            optimizer.step()
            return found

        found: list[float] = []
        with one_thread():
            job = (
                client.submit(step, example=good, model=model, optimizer=optimizer, endpoint=endpoint)
                if submit
                else None
            )
            for batch in (good, bad, good, good):
                try:
                    found.append((job.step if job is not None else step)(*batch).item())
                except (IndexError, RuntimeError) as error:
                    found.append(-1.0)
                    kinds.append(type(error))
            if job is not None:
                job.close()
        return found, [p.tolist() for p in model.parameters()]

    kinds: list[type[Exception]] = []
    assert run(True) == run(False)
    assert len(kinds) == 2
    assert kinds[0] is (BadValue if make is factored else BadBatch)
    assert issubclass(kinds[0], kinds[1]) or kinds[1] is torch.linalg.LinAlgError


def test_what_the_plain_step_would_have_drawn_before_is_said(endpoint: str, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(4, 3)

    def step(x: Tensor, y: Tensor) -> Tensor:
        first = nn.functional.cross_entropy(model(x), y)
        return first + nn.functional.cross_entropy(nn.functional.dropout(model(x)), y - 1)

    x, y = torch.randn(2, 4), torch.tensor([1, 2])
    with client.submit(step, example=(x, y), model=model, endpoint=endpoint) as job:
        with pytest.raises(BadBatch):
            job.step(x, y + 1)
        assert not caplog.records, "the first loss takes no 3"
        with pytest.raises(BadBatch):
            job.step(x, y - 1)
        assert "where the plain step first drew random numbers" in caplog.text


def test_a_check_may_not_compute_more_than_the_batch_is_large(endpoint: str) -> None:
    """Labels that are computed at such a cost are left to the daemon."""
    x = torch.tensor([0, 1])

    def step(x: Tensor) -> Tensor:
        return nn.functional.embedding(x.repeat(1 << 20)[:2], torch.ones(2, 3)).sum()

    with (
        client.submit(step, example=(x,), endpoint=endpoint) as job,
        pytest.raises(JobFailed, match="out of range"),
    ):
        job.step(x + 1).result(timeout=60)


def test_a_matrix_of_the_weights_that_has_no_factor_is_reported(endpoint: str) -> None:
    model = nn.Linear(2, 2)
    nn.init.eye_(model.weight)

    def step(x: Tensor) -> Tensor:
        return torch.linalg.cholesky(model.weight * x).sum()

    with client.submit(step, example=(torch.ones(1),), model=model, endpoint=endpoint) as job:
        assert job.step(torch.ones(1)).item() == 2.0
        with pytest.raises(RuntimeError, match=r"linalg\.cholesky: the matrix has no such result") as caught:
            job.step(-torch.ones(1)).item()
        assert isinstance(caught.value, BadValue)


def test_values_of_the_model_that_an_operator_refuses_cost_their_step_alone(endpoint: str) -> None:
    """In the first step, which runs operator by operator, and in later ones, which run as graphs."""

    def train(run_with: Callable[..., Any]) -> tuple[list[Any], list[Tensor], Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1), nn.Sigmoid())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        batches = [torch.rand(6, 4) for _ in range(16)]
        for i in (0, 5, 6, 13):
            batches[i] = batches[i] / 0 * 0

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.binary_cross_entropy(model(x), torch.full((6, 1), 0.3))
            (loss + 0.1 * nn.functional.dropout(model(x)).sum()).backward()
            optimizer.step()
            return loss

        losses: list[Any] = []
        with run_with(step, model, optimizer, batches[1]) as run:
            for x in batches:
                try:
                    losses.append(run(x).item())
                except RuntimeError as error:
                    losses.append("all elements of input should be between 0 and 1" in str(error))
        return losses, [*model.parameters(), *optimizer.state[model[0].weight].values()], torch.get_rng_state()

    @contextmanager
    def plainly(step: Callable[..., Any], *_: Any) -> Iterator[Callable[..., Any]]:
        yield step

    @contextmanager
    def in_a_daemon(step: Callable[..., Any], model: Any, optimizer: Any, x: Tensor) -> Iterator[Callable[..., Any]]:
        with client.submit(step, example=(x,), model=model, optimizer=optimizer, endpoint=endpoint) as job:
            yield job.step
            assert job.stats()["steps_failed"] == 4

    with one_thread():
        losses, state, generator = train(in_a_daemon)
        expected_losses, expected_state, expected_generator = train(plainly)
    assert losses == expected_losses
    assert losses.count(True) == 4
    assert all(map(torch.equal, state, expected_state))
    assert torch.equal(generator, expected_generator)


def test_state_that_the_failed_step_wrote_is_put_back_and_its_line_is_named(
    endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Embedding(3, 2))

    def step(x: Tensor) -> Tensor:
        places = (model[2](model[1](model[0](x))).sum() + model[0](x).sum(1)).detach().abs() * 1e-3
        return model[3](places.long()).sum()

    with (
        one_thread(),
        client.submit(step, example=(torch.rand(6, 4),), model=model, rng="own", endpoint=endpoint) as job,
    ):
        for _ in range(4):
            job.step(torch.rand(6, 4)).item()
        before = job.state_dict()["model"]
        with pytest.raises(IndexError, match=r"test_bad_batch\.py:\d+.*: operator \d+ \(aten\.embedding") as caught:
            job.step(torch.eye(6, 4) * 1e7)
        assert isinstance(caught.value, BadBatch)
        after = job.state_dict()["model"]
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert "where the plain step first drew random numbers and changed state" in caplog.text
        job.step(torch.rand(6, 4)).item()


def test_a_step_that_is_interrupted_and_fails_ends_the_job(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script goes on as if the step had been run, which can't be taken back."""
    model = nn.Linear(4, 1)
    step = lambda x: nn.functional.binary_cross_entropy(model(x).sigmoid(), torch.zeros(2, 1))  # noqa: E731
    with client.submit(step, example=(torch.rand(2, 4),), model=model, endpoint=endpoint) as job:

        def interrupted(future: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr("gpumux.client.job.wait_answered", interrupted)
            with pytest.raises(KeyboardInterrupt):
                job.step(torch.full((2, 4), float("nan")))

        def go_on() -> None:
            for _ in range(1000):  # steps may be sent before the failure of the first one is read
                job.step(torch.rand(2, 4)).item()

        with pytest.raises(JobFailed, match="between 0 and 1"):
            go_on()


@pytest.mark.parametrize(
    ("step", "waits"),
    [
        (lambda model, x: nn.functional.binary_cross_entropy(model(x).sigmoid(), x), True),
        (lambda model, x: nn.functional.binary_cross_entropy_with_logits(model(x), x), False),
        (lambda model, x: model(x).gather(1, model(x).argmax(1, keepdim=True)).sum(), False),
        (lambda model, x: model(x).gather(1, model(x).topk(2)[1]).sum(), False),
        (lambda model, x: x[:, :2].gather(1, model(x).argmax(1, keepdim=True)).sum(), True),
        (lambda model, x: x.gather(1, model(x).long()).sum(), True),
        (lambda model, x: x[torch.arange(3), x.argmax(1)].sum() + model(x).sum(), False),
        (lambda model, x: torch.multinomial(model(x).softmax(1), 1), True),
        (lambda model, x: nn.functional.dropout(model(x)), False),
    ],
)
def test_only_steps_that_may_fail_by_values_of_the_model_are_waited_for(
    step: Callable[..., Tensor], waits: bool, endpoint: str
) -> None:
    model = nn.Linear(3, 3)
    with client.submit(lambda x: step(model, x), example=(torch.rand(3, 3),), model=model, endpoint=endpoint) as job:
        assert [program.fails_alone for program in job._remote.programs.values()] == [waits]


def test_steps_on_their_way_are_not_disturbed(endpoint: str) -> None:
    model, loss, good, bad = labels()
    with one_thread(), client.submit(loss, example=good, model=model, endpoint=endpoint) as job:
        before = job.step(*good)
        with pytest.raises(BadBatch, match=r"holds the index 3 where .*nll_loss_forward.* takes 0 to 2"):
            job.step(*bad)
        assert job.step(*good).item() == before.item()
