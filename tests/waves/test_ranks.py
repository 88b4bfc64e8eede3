"""Two waves over several ranks compute what figure 9 of Wavelet computes with as many: each wave sums its gradients."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpumux import client, errors
from gpumux.burst.placement import RankPlacement
from microbench.daemon import RunningDaemon, running_daemon
from microbench.kills import Phoenix
from tests.waves.reference import WaveReference
from tests.waves.test_training import Batch, Tied, loss_of, momentum, sgd, training
from tests.waves.test_training import batches as float_batches
from tests.waves.test_training import submit as submit_waves

pytestmark = pytest.mark.usefixtures("in_float64")


@pytest.fixture(scope="module")
def daemons() -> Iterator[list[RunningDaemon]]:
    with ExitStack() as stack:
        yield [stack.enter_context(running_daemon(threads=1)) for _ in range(3)]


def batches(count: int) -> list[Batch]:
    return float_batches(count, 12, torch.float64)


def of_ranks(batch: Batch, ranks: int) -> list[Batch]:
    return list(zip(*(tensor.chunk(ranks) for tensor in batch), strict=True))


def normed() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10)
    )


def submit(
    daemons: Sequence[RunningDaemon | Phoenix], make: Callable[[], nn.Module], optimizer: Callable[..., Any],
    clip: float | None = None, example: Batch | None = None, **given: Any,
) -> tuple[nn.Module, Any, client.Job]:  # fmt: skip
    endpoints = [daemon.endpoint for daemon in daemons]
    return submit_waves(None, make, optimizer, clip, example=example or batches(1)[0], endpoints=endpoints, **given)


def assert_like(model: nn.Module, opt: Any, reference: WaveReference) -> None:
    """The local model and optimizer have the numbers of the reference's newest replica."""
    for (name, ours), theirs in zip(model.state_dict().items(), reference.model.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12, msg=name)
    states = opt.state_dict()["state"], reference.optimizer.state_dict()["state"]
    for mine, its in zip(states[0].values(), states[1].values(), strict=True):
        for key, value in mine.items():
            torch.testing.assert_close(value, its[key], rtol=1e-12, atol=1e-12)


def adamw_of_large_gradients(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW makes nothing of a gradient that is a rounding error (of a key's bias in attention)."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("ranks", "make", "optimizer", "clip"),
    [(2, normed, momentum, None), (3, Tied, sgd, None), (2, Tied, adamw_of_large_gradients, 0.5)],
    ids=["two, batch norm by rank, momentum", "three, SGD", "two, AdamW, clipped"],
)
def test_sixteen_steps_have_the_numbers_of_the_reference(daemons, ranks, make, optimizer, clip):
    data = batches(16)
    reference = WaveReference(make, optimizer, loss_of, clip, ranks=ranks)
    expected = [reference.step(of_ranks(batch, ranks)) for batch in data]
    norm = {"batch_norm": "rank"} if make is normed else {}
    model, opt, job = submit(daemons[:ranks], make, optimizer, clip, max_inflight=3, **norm)
    with job:
        losses = [job.step(*batch) for batch in data]
        for loss, theirs in zip(losses, expected, strict=True):
            torch.testing.assert_close(loss.result(), theirs, rtol=1e-12, atol=1e-12)
        assert job.stats()["waves"] == 2
        job.sync()
    assert_like(model, opt, reference)


class Words(nn.Module):
    """The backward pass ends with the gradients of learned positions, which are summed over the samples before, and of
    an embedding whose weights are also those of the head, as in GPT-2. A bias is a product of two parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words, self.positions = nn.Embedding(20, 16), nn.Embedding(8, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.words.weight
        self.more, self.left = nn.Parameter(torch.randn(9, 16)), nn.Parameter(torch.randn(1, 3))
        self.right = nn.Parameter(torch.randn(3, 16))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        length = ids.shape[1]
        positions = self.positions(torch.arange(length)[None]) + self.more[:length] + self.more[8]
        hidden = self.words(ids) + positions + self.left @ self.right
        return self.head(self.layer(hidden)).transpose(1, 2)


def sentences(count: int) -> list[Batch]:
    """Words, and those that follow. Nothing follows the last one, which is no label."""
    draw = torch.Generator().manual_seed(8)
    drawn = [torch.randint(0, 20, (8, 6), generator=draw) for _ in range(count)]
    return [(ids, F.pad(ids[:, 1:], (0, 1), value=-100)) for ids in drawn]


@pytest.mark.extended
def test_learned_positions_and_tied_embeddings_are_summed_behind_the_backward_pass(daemons):
    data = sentences(7)
    reference = WaveReference(Words, adamw_of_large_gradients, loss_of, 0.5, ranks=2)
    expected = [reference.step(of_ranks(batch, 2)) for batch in data]
    model, opt, job = submit(daemons[:2], Words, adamw_of_large_gradients, 0.5, data[0])
    with job:
        losses = [job.step(*batch) for batch in data]
        for loss, theirs in zip(losses, expected, strict=True):
            torch.testing.assert_close(loss.result(), theirs, rtol=1e-12, atol=1e-12)
        job.sync()
    assert_like(model, opt, reference)


@pytest.mark.extended
def test_a_state_in_the_middle_of_a_pair_and_an_evaluation(daemons):
    """state_dict() after an odd number of steps, loaded into a new job; an evaluation sees the newest replica."""
    data = batches(9)
    reference = WaveReference(Tied, momentum, loss_of, ranks=2)
    for batch in data[:5]:
        reference.step(of_ranks(batch, 2))
    model, _, job = submit(daemons[:2], Tied, momentum)
    with job:
        evaluate = job.add(lambda x, y: F.cross_entropy(model(x), y), example=data[0])
        for batch in data[:5]:
            job.step(*batch)
        with torch.no_grad():
            theirs = loss_of(reference.model, data[8])
        torch.testing.assert_close(evaluate(*data[8]).result(), theirs, rtol=1e-12, atol=1e-12)
        state = job.state_dict()
    assert state["waves"]["step"] == 5
    model, opt, job = submit(daemons[:2], Tied, momentum)
    with job:
        job.step(*data[7])
        job.load_state(state)
        for batch in data[5:]:
            reference.step(of_ranks(batch, 2))
            job.step(*batch)
        job.sync()
    assert_like(model, opt, reference)


def test_every_rank_evaluates_with_the_running_statistics_of_the_newest_step(daemons):
    """Those of rank 0, as in DistributedDataParallel."""
    data = batches(4)
    reference = WaveReference(normed, momentum, loss_of, ranks=2)
    model, _, job = submit(daemons[:2], normed, momentum, batch_norm="rank")

    def evaluate(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        model.eval()
        with torch.no_grad():
            scores = model(x)
        model.train()
        return scores

    with job:
        look = job.add(lambda x: evaluate(model, x), example=data[0][:1])
        for batch in data:
            reference.step(of_ranks(batch, 2))
            job.step(*batch)
            theirs = evaluate(reference.model, batch[0])
            torch.testing.assert_close(look(batch[0]).result(), theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.extended
def test_kills_change_no_bit(tmp_path):
    """An executor of one rank, then the daemon of the other, in the middle of pairs."""
    data = batches(12)
    with ExitStack() as stack:
        for rank in range(2):
            (tmp_path / str(rank)).mkdir()
        both = [Phoenix(tmp_path / str(rank)) for rank in range(2)]
        for daemon in both:
            stack.callback(daemon.close)
        for daemon in both:
            daemon.wait_until_ready()
        found = []
        for disturbed in (False, True):
            _, _, job = submit(both, Tied, momentum)
            with job:
                losses = []
                for m, batch in enumerate(data):
                    losses.append(job.step(*batch))
                    if disturbed and m in (4, 7):
                        losses[-2].result()
                        both[0].kill_executors() if m == 4 else both[1].kill()
                found.append([*(loss.result() for loss in losses), *job.state_dict()["model"].values()])
    assert all(map(torch.equal, *found))


def test_what_ranks_exchange_before_the_backward_pass_has_ended_is_refused_by_name(daemons):
    model = normed()
    opt = sgd(model)
    endpoints = [daemon.endpoint for daemon in daemons[:2]]
    given: dict[str, Any] = {"example": batches(1)[0], "model": model, "optimizer": opt, "endpoints": endpoints}
    with pytest.raises(errors.NotSplittable, match="may only sum their gradients"):
        client.submit(training(model, opt), waves=2, batch_norm="sync", **given)

    def step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        opt.zero_grad()
        scores = model(x)
        size = scores.detach().square().mean().sqrt()  # of the whole batch
        loss = F.cross_entropy(scores, y)
        loss.backward()
        opt.step()
        return loss, size

    sqrt = r"test_ranks.py:\d+: sqrt needs what all ranks have together.* may only sum their gradients"
    with pytest.raises(errors.NotSplittable, match=sqrt):
        client.submit(step, waves=2, batch_norm="rank", **given)
    one_each = RankPlacement(2, {"0": (0,), "1": (0,), "5": (1,)}, (0,))
    with pytest.raises(errors.NotSplittable, match="give every layer all ranks"):
        client.submit(training(model, opt), waves=2, plan=one_each, batch_norm="rank", **given)


def test_a_function_that_computes_gradients_and_keeps_nothing_sees_the_newest_replica(daemons):
    def sensitivity(model: nn.Module, opt: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        size = torch.stack([p.grad.abs().sum() for p in model.parameters()]).sum()
        opt.zero_grad()
        return size

    data = batches(4)
    reference = WaveReference(Tied, sgd, loss_of, ranks=2)
    model, opt, job = submit(daemons[:2], Tied, sgd)
    with job:
        look = job.add(lambda x, y: sensitivity(model, opt, x, y), example=data[0])
        for batch in data[:3]:
            reference.step(of_ranks(batch, 2))
            job.step(*batch)
            seen = look(*data[3]).result()
            theirs = sensitivity(reference.model, reference.optimizer, *data[3])
            torch.testing.assert_close(seen, theirs, rtol=1e-12, atol=1e-12)
        job.step(*data[3])
        job.sync()
    reference.step(of_ranks(data[3], 2))
    assert_like(model, opt, reference)


def test_a_job_over_ranks_is_not_kept(daemons):
    _, _, job = submit(daemons[:2], Tied, sgd)
    with pytest.raises(errors.ConfigError, match="can't be resumed"):
        job.close(keep=True)
    job.close()


@pytest.mark.extended
def test_a_submit_says_what_the_waves_take_of_each_device_with_what_is_exchanged(daemons, caplog):
    def large() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 5_000), nn.Linear(5_000, 10))

    with caplog.at_level(logging.WARNING, "gpumux.client"):
        _, _, job = submit(daemons[:2], large, momentum)
    with job:
        charged = job.stats()["memory_bytes"] / 2**20
    (line,) = [record.message for record in caplog.records if "two waves take" in record.message]
    assert "microbatches" not in line, "which are not taken over several daemons"
    assert float(re.findall(r"about (\d+) MiB", line)[0]) == pytest.approx(charged, rel=0.05)
