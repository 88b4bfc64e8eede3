"""Batches that a data loader puts straight into the job's shared memory: one copy in all, and the same bits."""

from __future__ import annotations

import gc
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from gpumux import client
from microbench.copies import Writes

pytestmark = pytest.mark.usefixtures("one_thread")

SIZE, ROWS = 4096, 16


class Samples(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 10 * ROWS + 3  # the last batch is a smaller one

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return torch.randn(SIZE, generator=torch.Generator().manual_seed(i)), i % 10


class Trained:
    def __init__(self) -> None:
        torch.manual_seed(5)
        self.model = nn.Linear(SIZE, 10)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return loss


def submit(trained: Trained, endpoint: str, **options: Any) -> client.Job:
    example = default_collate([Samples()[i] for i in range(ROWS)])
    return client.submit(
        trained.step, example=tuple(example), model=trained.model, optimizer=trained.optimizer, endpoint=endpoint,
        **options,
    )  # fmt: skip


def written(job: client.Job) -> tuple[list[float], list[float], list[int]]:
    """The losses of an epoch. For each step, the copies of its batch made in all, and those made by step()."""
    futures, ways, ours = [], [], []
    seen = Writes()
    loader = iter(DataLoader(Samples(), batch_size=ROWS, collate_fn=job.collate))
    while True:
        before = seen.nbytes
        with seen:
            batch = next(loader, None)
        if batch is None:
            break
        nbytes, copied = sum(t.nbytes for t in batch), job.bytes_copied_in
        with seen:
            futures.append(job.step(*batch))
        samples = len(batch[0]) * SIZE * 4  # made by the data set itself, one by one
        ways.append((seen.nbytes - before - samples) / nbytes)
        ours.append(job.bytes_copied_in - copied)
    return [f.item() for f in futures], ways, ours


def test_a_data_loader_writes_into_the_slots(endpoint: str):
    plain, ours = Trained(), Trained()
    expected = [plain.step(*batch).item() for _ in range(2) for batch in DataLoader(Samples(), batch_size=ROWS)]
    with submit(ours, endpoint) as job:
        first, _, _ = written(job)
        second, ways, copied = written(job)
        job.sync()
    assert first + second == expected
    assert all(torch.equal(a, b) for a, b in zip(plain.model.parameters(), ours.model.parameters(), strict=True))
    assert copied == [0] * 11, "step() copied nothing, not even of the last, smaller batch"
    assert max(ways) < 1.1, "the samples were written once, where the device reads them"


def test_batches_that_are_kept_or_dropped(endpoint: str):
    """More batches at once than there are slots, steps with others in between, and some that no step uses."""
    plain, ours = Trained(), Trained()
    samples = [[Samples()[i] for i in range(at, at + ROWS)] for at in range(0, 5 * ROWS, ROWS)]
    with submit(ours, endpoint) as job:
        results = [job.step(*default_collate(samples[0])).item() for _ in range(3)]
        job.collate(samples[0])  # the first call only learns that slots are asked for
        results.append(job.step(*job.collate(samples[0])).item())
        batches = [job.collate(s) for s in samples]
        results.append(job.step(*default_collate(samples[0])).item())
        results += [f.item() for f in [job.step(*batch) for batch in batches]]
        del batches
        for _ in range(5):
            job.collate(samples[1])
            gc.collect()
        copied = job.bytes_copied_in
        results.append(job.step(*job.collate(samples[1])).item())
        assert job.bytes_copied_in == copied, "dropped slots came back"
    order = [0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 1]
    assert len(order) == len(results)
    assert results == [plain.step(*default_collate(samples[i])).item() for i in order]


def test_one_slot_is_never_lent(endpoint: str):
    with submit(Trained(), endpoint, max_inflight=1) as job:
        samples = [Samples()[i] for i in range(ROWS)]
        for _ in range(4):
            held = job.collate(samples)
            job.step(*default_collate(samples)).result()
        assert torch.equal(held[0], default_collate(samples)[0])


@pytest.mark.parametrize(
    "samples",
    [
        [(1.5, True), (2.5, False)],
        [(numpy.ones(3, numpy.float32), numpy.int64(4)), (numpy.zeros(3, numpy.float32), numpy.int64(5))],
        [{"a": torch.ones(2), "b": 3}, {"a": torch.zeros(2), "b": 4}],
        [torch.ones(2, 2), torch.zeros(2, 2)],
    ],
    ids=["numbers", "arrays", "a dictionary", "a tensor"],
)
def test_batches_are_as_torch_makes_them(samples: list[Any], endpoint: str):
    def total(*given: Any, **named: Any) -> Tensor:
        leaves = [*given, *named.values()]
        return sum(t.double().sum() for t in leaves)

    expected = default_collate(samples)
    expected = [expected] if isinstance(expected, Tensor) else expected
    call = dict if isinstance(expected, dict) else tuple
    with client.submit(total, example=call(expected), endpoint=endpoint) as job:
        for _ in range(3):
            made = job.collate(samples)
            made = [made] if isinstance(made, Tensor) else made
            pairs = zip(*(b.values() if isinstance(b, dict) else b for b in (made, expected)), strict=True)
            assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)
            copied = job.bytes_copied_in
            value = (job.step(**made) if isinstance(made, dict) else job.step(*made)).item()
            assert value == total(*expected.values() if isinstance(expected, dict) else expected).item()
        assert job.bytes_copied_in == copied


def test_samples_that_differ_are_refused_as_torch_does(endpoint: str):
    with submit(Trained(), endpoint) as job:
        with pytest.raises(RuntimeError, match="equal size"):
            job.collate([(torch.ones(2), 1), (torch.ones(3), 1)])
        with pytest.raises(TypeError):
            job.collate([(object(), 1), (object(), 1)])


def test_worker_processes_make_ordinary_batches(endpoint: str):
    plain, ours = Trained(), Trained()
    expected = [plain.step(*batch).item() for batch in DataLoader(Samples(), batch_size=ROWS)]
    with submit(ours, endpoint) as job:
        loader = DataLoader(Samples(), batch_size=ROWS, collate_fn=job.collate, num_workers=1)
        assert [job.step(*batch).item() for batch in loader] == expected
