"""Jobs that ran as one, and lose their daemon: what they come back with is what they had, bit by bit."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from gpumux import client
from gpumux.fuse import replay
from microbench.kills import Phoenix
from microbench.soaking import watch

MOST_STEPS = 20_000
SEED = 11
SOON = {"GPUMUX_FUSE_SETTLE_S": "0.5", "GPUMUX_FUSE_RETRY_S": "0", "GPUMUX_SNAPSHOT_S": "3600"}
ALONE = "run again by themselves"

pytestmark = pytest.mark.usefixtures("one_thread")
nn = torch.nn


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Phoenix]:
    made = Phoenix(tmp_path, settings=SOON)
    try:
        made.wait_until_ready()
        yield made
        made.stop()
    finally:
        made.close()


def factory(seed: int) -> tuple[Callable[..., torch.Tensor], nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(64, 37), nn.Softplus(), nn.Dropout(0.2), nn.Linear(37, 65), nn.ELU(), nn.Linear(65, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * (seed + 1), momentum=0.9)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, model, optimizer


class Pair:
    """Two equal jobs of one script, and what each of them trains."""

    def __init__(self, endpoint: str) -> None:
        draw = torch.Generator().manual_seed(7)
        self.data = [(torch.randn(5, 64, generator=draw), torch.randint(0, 10, (5,), generator=draw)) for _ in range(9)]
        self.jobs = []
        for seed in range(2):
            step, model, optimizer = factory(seed)
            made = client.submit(
                step, example=self.data[0], model=model, optimizer=optimizer, endpoint=endpoint, fusible=True
            )
            self.jobs.append(made)
        self.taken = [0, 0]
        self.order: list[tuple[int, int]] = []  # of the steps, each of which draws from the script's generator
        torch.manual_seed(SEED)

    def batch(self, job: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.data[(job + step) % len(self.data)]

    def turn(self, *jobs: int) -> None:
        """A step of each of these jobs, by default of both."""
        these = jobs or (0, 1)
        for future in [self.jobs[job].step(*self.batch(job, self.taken[job])) for job in these]:
            future.result()
        for job in these:
            self.order.append((job, self.taken[job]))
            self.taken[job] += 1

    def fused(self) -> int:
        """Steps of the first job that ran in a group."""
        return self.jobs[0].stats()["fusion"]["steps"]  # type: ignore[index]

    def until_fused(self) -> None:
        while not (self.taken[0] % 20 == 0 and self.fused()):
            assert self.taken[0] < MOST_STEPS, self.jobs[0].stats()["fusion"]
            self.turn()
            threading.Event().wait(0.01)  # the process that makes the fused Program has a low priority

    def state(self) -> list[dict[str, torch.Tensor]]:
        return [job.state_dict()["model"] for job in self.jobs]

    def plain_state(self) -> list[dict[str, torch.Tensor]]:
        """What the plain loops have after as many steps, which leave the generator where the jobs' do."""
        after = torch.get_rng_state()
        with torch.random.fork_rng():
            made = [factory(number) for number in range(2)]
            torch.manual_seed(SEED)
            for job, number in self.order:
                made[job][0](*self.batch(job, number))
            assert torch.equal(after, torch.get_rng_state())
        return [model.state_dict() for _, model, _ in made]

    def close(self) -> None:
        for job in self.jobs:
            job.close()


def same(one: list[dict[str, torch.Tensor]], other: list[dict[str, torch.Tensor]]) -> bool:
    return all(torch.equal(a[key], b[key]) for a, b in zip(one, other, strict=True) for key in a)


@pytest.mark.slow
def test_a_recovered_job_has_the_bits_of_the_steps_that_ran_as_one(
    victim: Phoenix, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(victim.endpoint)
    try:
        pair.until_fused()
        for stragglers in ((), (0,), (), (1,), (1,), (), ()):  # the other's step waits, and runs in the group alone
            pair.turn(*stragglers)
        had = pair.state()
        pair.turn()
        then = pair.state()
        plain = pair.plain_state()
        assert not same(then, plain), "or it can't be seen here how they run again"
        for mine, theirs in zip(then, plain, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)  # with other masks they are far apart
        victim.kill()
        assert same(pair.state(), then)
        assert not [line for line in caplog.messages if ALONE in line]
        assert not same(had, then)

        monkeypatch.setattr(replay, "content_hash", lambda encoded: "of another version")
        victim.kill()
        found = pair.state()
        assert len([line for line in caplog.messages if ALONE in line]) == 2
        assert same(found, plain), "each by itself"
    finally:
        pair.close()


@pytest.mark.extended
@pytest.mark.slow
def test_snapshots_at_different_borders_end_no_group_and_its_executor_may_die_after_them(
    victim: Phoenix, caplog: pytest.LogCaptureFixture
) -> None:
    pair = Pair(victim.endpoint)
    try:
        pair.until_fused()
        counted, before = pair.fused(), pair.taken[0]
        for saved in (0, 1, 0):
            for _ in range(3):
                pair.turn()
            assert pair.jobs[saved]._recovery.save()
            pair.turn()
        pair.turn()
        assert pair.fused() - counted == pair.taken[0] - before, "every step ran in the group"
        then, plain = pair.state(), pair.plain_state()
        assert not same(then, plain), "or it can't be seen here how they run again"
        os.kill(watch.executors(victim.process.pid)[-1], signal.SIGKILL)  # the newest is the group's
        assert same(pair.state(), then)
        fusion = [job.stats()["fusion"]["steps"] for job in pair.jobs]  # type: ignore[index]
        assert fusion == [0, 0], "both jobs were opened again"
        assert not [line for line in caplog.messages if ALONE in line]
    finally:
        pair.close()
