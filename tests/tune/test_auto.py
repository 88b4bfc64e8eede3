"""The scheduler `auto`: arrays where they pay, one trial after another elsewhere, and the same results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from gpumux.tune import auto, tune
from gpumux.tune.auto import PartitionCosts, step_seconds
from gpumux.tune.task import find
from gpumux.tune.trainer import TrialWork
from tests.tune.test_fused import ONE, TOLERANCE

TASK = find("tests.tune.toy:factory")


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp()))


@pytest.fixture
def step_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What a plain step is said to take."""
    said = [1.0]
    monkeypatch.setattr(auto, "step_seconds", lambda *_: said[0])
    monkeypatch.setattr(auto, "FEW_STEPS", 80)
    return said


@pytest.mark.parametrize(
    ("trials", "steps", "pay"),
    [(8, 100, False), (8, 1000, False), (8, 1001, True), (2, 1001, True), (8, 100_000, True)],
)
def test_arrays_pay_when_half_of_the_steps_take_longer_than_making_them(trials: int, steps: int, pay: bool):
    assert PartitionCosts(step_s=1e-3, making_s=0.5, gain=2.0).arrays_pay(trials, steps) is pay


def test_an_array_that_was_slower_than_its_models_never_pays():
    assert not PartitionCosts(step_s=1e-3, making_s=0.0, gain=0.9).arrays_pay(100, 100_000)


@pytest.mark.every(2)
@pytest.mark.parametrize("seconds", [1e-9, 1.0])
def test_it_finds_what_serial_finds(step_s: list[float], seconds: float):
    step_s[0] = seconds
    space = {**ONE, "batch_size": {"choices": [8, 16, 32]}}
    found = tune(TASK, space, trials=4, steps=40)
    serial = tune(TASK, space, trials=4, steps=40, scheduler="serial")
    assert found.scheduler == "auto"
    assert found.best is not None
    assert serial.best is not None
    assert found.best.number == serial.best.number
    scores = [(entry.config, entry.scores) for entry in serial.entries]
    if seconds < 1.0:  # no arrays: the same bits
        assert (found.notes["arrays"], found.notes["trained_alone"]) == (0, 4)
        assert [(entry.config, entry.scores) for entry in found.entries] == scores
    else:  # trials of 40 steps that have no other of their partition's train alone
        assert found.notes["arrays"] == 1
        assert found.notes["array_sizes"] == [4 - found.notes["trained_alone"]]
        assert [(e.config, e.scores) for e in found.entries] == [
            (config, pytest.approx(score, rel=TOLERANCE)) for config, score in scores
        ]


@pytest.mark.extended
def test_what_the_first_rung_took_decides_about_the_next(step_s: list[float], monkeypatch: pytest.MonkeyPatch):
    asked: list[tuple[int, float | None, float]] = []
    usual = PartitionCosts.arrays_pay

    def pay(costs: PartitionCosts, trials: int, steps: int) -> bool:
        asked.append((trials, costs.making_s, costs.gain))
        return usual(costs, trials, steps) if len(asked) == 1 else False

    monkeypatch.setattr(PartitionCosts, "arrays_pay", pay)
    found = tune(TASK, ONE, algorithm="hyperband", steps=120, min_steps=40, eta=3, skip_last=0)
    assert found.notes["array_sizes"][0] == asked[0][0] > 2
    assert found.notes["arrays"] == 1
    (_, guessed, assumed), (_, took, gain), *_ = asked
    assert (assumed, gain > 100, took != guessed) == (auto.GAIN, True, True)  # a step was said to take a second


@pytest.mark.usefixtures("step_s")
def test_a_step_that_can_not_be_captured_trains_one_after_another_and_that_is_said():
    def factory(config: Any) -> Any:
        step, model, optimizer = TASK.factory(config)

        def reads(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = step(x, y)
            return loss if float(loss.detach()) > -1.0 else -loss

        return reads, model, optimizer

    found = tune(replace(TASK, factory=factory), ONE, trials=3, steps=40)
    assert {entry.state for entry in found.entries} == {"complete"}
    assert (found.notes["arrays"], found.notes["trained_alone"]) == (0, 3)
    assert found.notes["no_arrays_because"]


def test_timing_a_step_leaves_the_random_generators_as_they_were():
    calls: list[int] = []

    def batches(config: Any, start: int) -> Iterator[Any]:
        for k, batch in enumerate(TASK.batches(config, start)):
            calls.append(k)
            yield batch

    before = torch.get_rng_state()
    work = TrialWork(0, {"lr": 0.1, "batch_size": 8, "optimizer": "adam"}, 0, 40, 1, 2)
    assert step_seconds(replace(TASK, batches=batches), work, 5) > 0.0
    assert torch.equal(torch.get_rng_state(), before)
    assert len(calls) <= 5
