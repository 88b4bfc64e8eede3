"""Tensors of no model, in jobs that lose their executor, or go on from a snapshot in another program."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from gpumux.client.recovery import Recovery
from gpumux.errors import ConfigError
from microbench.killed import Trial, plain
from microbench.kills import Phoenix, Run, differences, submit

SEED = 11

pytestmark = pytest.mark.usefixtures("one_thread")  # as the daemon here has


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Phoenix]:
    made = Phoenix(tmp_path_factory.mktemp("d"))
    try:
        made.wait_until_ready()
        yield made
        made.stop()
    finally:
        made.close()


@dataclass
class Script:
    """Tensors that a step reads and writes beside its model."""

    weights: Tensor
    teacher: nn.Module
    average: AveragedModel
    mean: Tensor


class Averaging(Trial):
    script: Script

    def state(self) -> list[Tensor]:
        found = [*super().state(), self.script.mean.clone(), self.script.weights.clone()]
        return found + [t.clone() for t in self.script.average.state_dict().values()]


class Counting(torch.optim.SGD):
    """Counts in its groups, in a number and in a tensor that its first step makes, and decays weights by both."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
            if "count" not in group:
                group["count"] = torch.tensor(0.0)
            group["count"].add_(2)
            for p in group["params"]:
                p.mul_(1 - 0.01 / (group["calls"] + group["count"].item()))
        return found


def averaging(seed: int) -> Averaging:
    """Class weights that the script changes in place and by new ones, a teacher that it replaces now and then, an
    average that the step updates, and a running mean that the step binds anew."""
    torch.manual_seed(seed)
    norm = nn.BatchNorm1d(8, momentum=None)  # which divides by num_batches_tracked in Python
    model = nn.Sequential(norm, nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = Counting(model.parameters(), lr=0.1, momentum=0.9)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # its Python decides by a count
    held = Script(torch.rand(4), copy.deepcopy(model), average, torch.zeros(4))

    def step(x: Tensor, y: Tensor) -> Any:
        logits = model(x)
        with torch.no_grad():
            wanted = held.teacher(x).softmax(-1)
        loss = F.cross_entropy(logits, y, weight=held.weights) + F.kl_div(
            logits.log_softmax(-1), wanted, reduction="batchmean"
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        held.mean = 0.9 * held.mean + 0.1 * logits.detach().mean(0)
        held.average.update_parameters(model)
        with torch.no_grad():
            return loss + held.mean.sum() + held.average(x).sum()

    def turn(i: int) -> list[tuple[str, tuple[Any, ...]]]:
        draws = torch.Generator().manual_seed(i)
        return [("step", (torch.randn(6, 8, generator=draws), torch.randint(0, 4, (6,), generator=draws)))]

    def between(i: int) -> None:
        if i % 4 == 1:
            held.weights.data[i % 3] += 0.5
        if i % 4 == 3:
            held.weights = held.weights * 0.5 + 0.1
        if i % 6 == 5:
            held.teacher.load_state_dict(model.state_dict())
        if i % 10 == 9:
            held.mean.zero_()

    made = Averaging("averaging", seed, [model], [optimizer], {"step": step}, turn, between)
    made.script = held
    return made


def turns(run: Run, count: int) -> None:
    for _ in range(count):
        run.turn()


def test_an_executor_that_is_killed_costs_no_value(daemon: Phoenix, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before there is a snapshot, and after one."""
    run = submit(averaging(SEED), daemon.endpoint)
    again: list[int] = []
    rerun = Recovery._run_again

    def counted(self: Recovery, step: int, ran: Any) -> None:
        again.append(step)
        rerun(self, step, ran)

    monkeypatch.setattr(Recovery, "_run_again", counted)
    with run.job:
        for saved in (False, True):
            turns(run, 7)
            if saved:
                assert run.job._recovery.save()
                turns(run, 3)
            daemon.kill_executors()
            turns(run, 4)
        run.finish()
        alone = averaging(SEED)
        assert differences(run.results, plain(alone, run.turns)) == 0
        assert differences(run.trial.state(), alone.state()) == 0
        assert alone.script.average.n_averaged == run.turns
    assert again
    assert max(again) > 18


def test_a_job_that_was_kept_goes_on_with_what_its_steps_wrote(daemon: Phoenix) -> None:
    """What steps only read is the other program's own."""
    run = submit(averaging(SEED), daemon.endpoint)
    turns(run, 9)
    run.results += [future.result() for future in run.futures]
    run.job.close(keep=True)
    fresh = averaging(SEED + 1)
    fresh.script.weights = run.trial.script.weights.clone()  # type: ignore[attr-defined]
    fresh.script.teacher.load_state_dict(run.trial.script.teacher.state_dict())  # type: ignore[attr-defined]
    again = submit(fresh, daemon.endpoint, resume=fresh.name)
    again.turns = 9
    turns(again, 8)
    again.finish()
    again.job.close()
    alone = averaging(SEED)
    assert differences(run.results + again.results, plain(alone, 17)) == 0
    assert differences(fresh.state(), alone.state()) == 0


def test_a_tensor_that_had_another_shape_when_the_job_was_kept_is_refused(daemon: Phoenix) -> None:
    run = submit(averaging(SEED), daemon.endpoint)
    turns(run, 1)
    run.job.close(keep=True)
    fresh = averaging(SEED)
    fresh.script.mean = torch.zeros(1, 4)
    with pytest.raises(ConfigError, match=r"held\.mean was torch\.float32 \(4,\)"):
        submit(fresh, daemon.endpoint, resume=fresh.name)


class Scaled(Trial):
    scaler: torch.amp.GradScaler

    def state(self) -> list[Tensor]:
        return [*super().state(), *(torch.tensor(float(v)) for v in self.scaler.state_dict().values())]


def scaled(seed: int) -> Scaled:
    """A GradScaler whose gradients overflow in every third turn, over an optimizer that counts its steps in Python."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2)

    def step(x: Tensor, y: Tensor, factor: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x) * factor, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    def turn(i: int) -> list[tuple[str, tuple[Any, ...]]]:
        draws = torch.Generator().manual_seed(i)
        x, y = torch.randn(6, 8, generator=draws), torch.randint(0, 4, (6,), generator=draws)
        return [("step", (x, y, torch.tensor(1e38 if i % 3 == 0 else 1.0)))]

    made = Scaled("scaled", seed, [model], [optimizer], {"step": step}, turn)
    made.scaler = scaler
    return made


def test_steps_that_a_scaler_left_out_stay_left_out_after_an_executor_is_killed(daemon: Phoenix) -> None:
    run = submit(scaled(SEED), daemon.endpoint)
    with run.job:
        for saved in (False, True, False):
            turns(run, 5)
            if saved:
                assert run.job._recovery.save()
                turns(run, 2)
            daemon.kill_executors()
        turns(run, 3)
        run.finish()
        alone = scaled(SEED)
        assert differences(run.results, plain(alone, run.turns)) == 0
        assert differences(run.trial.state(), alone.state()) == 0


def test_a_scaled_job_that_was_kept_goes_on(daemon: Phoenix) -> None:
    run = submit(scaled(SEED), daemon.endpoint)
    turns(run, 7)  # the last one is left out
    run.results += [future.result() for future in run.futures]
    run.job.close(keep=True)
    fresh = scaled(SEED + 1)
    again = submit(fresh, daemon.endpoint, resume=fresh.name)
    again.turns = 7
    turns(again, 5)
    again.finish()
    again.job.close()
    alone = scaled(SEED)
    assert differences(run.results + again.results, plain(alone, 12)) == 0
    assert differences(fresh.state(), alone.state()) == 0
