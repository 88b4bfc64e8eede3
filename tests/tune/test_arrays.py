"""The fused scheduler's arrays for any rung, with arrays that only record calls."""

from __future__ import annotations

from itertools import repeat
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpumux.errors import NotFusible
from gpumux.tune import fused
from gpumux.tune.checkpoints import MemoryCheckpoints, read_state
from gpumux.tune.fused import FusedTrainer
from gpumux.tune.probe import MemoryModel
from gpumux.tune.task import Task, make
from gpumux.tune.trainer import TrialWork
from tests.tune.fakes import SPACE

QUIET = [HealthCheck.function_scoped_fixture]


class Notes:
    """Replaces an array: records its models, its steps, and whether it was closed."""

    made: list[Notes]

    def __init__(self, build: Any, works: Any, example: Any) -> None:
        self.works, self.steps, self.open = list(works), 0, True
        for work in works:
            build(work)
        self.made.append(self)

    def __enter__(self) -> Notes:
        return self

    def __exit__(self, *_: object) -> None:
        self.open = False

    def step(self, batch: Any, *, per_model: bool) -> None:
        self.steps += 1

    def programs(self) -> tuple[()]:
        return ()

    def finish(self) -> float:
        return 6.0


def factory(config: Any) -> Any:
    model = torch.nn.Linear(1, 1)
    return (lambda x: None), model, torch.optim.SGD(model.parameters(), lr=config["lr"])


TASK: Task = make(
    "t", factory, lambda config, start: repeat((torch.zeros(1),)), lambda model, config: config["lr"], "maximize"
)


@pytest.fixture
def arrays(monkeypatch: pytest.MonkeyPatch) -> list[Notes]:
    Notes.made = []
    monkeypatch.setattr(fused, "LocalArrayRun", Notes)
    monkeypatch.setattr(fused, "capture", lambda *_: "captured")
    monkeypatch.setattr(fused, "check", lambda *_: None)
    monkeypatch.setattr(fused, "guess", lambda _: MemoryModel(0, 0, 2000))
    monkeypatch.setattr(fused, "predict", lambda _: MemoryModel(3000, 400, 0))
    return Notes.made


@settings(suppress_health_check=QUIET, max_examples=25)
@given(
    trials=st.lists(st.integers(0, 60), unique=True, min_size=1, max_size=14), seed=st.integers(0, 9),
    most=st.none() | st.integers(1, 5), models=st.integers(1, 6), start=st.sampled_from([0, 2]),
)  # fmt: skip
def test_any_rung(arrays: list[Notes], trials: list[int], seed: int, most: int | None, models: int, start: int):
    arrays.clear()
    checkpoints = MemoryCheckpoints()
    works = [TrialWork(t, SPACE.sample(seed, t), start, 4, t, t) for t in trials]
    for work in works if start else []:
        _, model, optimizer = factory(work.config)
        checkpoints.save(work.trial, start, read_state(model, optimizer))
    trainer = FusedTrainer(TASK, SPACE, checkpoints, most=most, memory=MemoryModel(3000, 400, 0).of(models))
    found = {o.trial: o for o in trainer.train(works, lambda _: None)}
    assert sorted(found) == sorted(trials), "every trial once"
    assert all(found[w.trial].score == w.config["lr"] for w in works), "each its own score"
    assert all(checkpoints.has(t, 4) for t in trials)
    for array in arrays:
        assert 2 <= len(array.works) <= min(models, most or models)
        assert len({SPACE.infusible(w.config) for w in array.works}) == 1
        assert (array.steps, array.open) == (4 - start, False)
        assert all(found[w.trial].device_s == 6.0 / len(array.works) for w in array.works)
    assert sum(trainer.notes()["array_sizes"]) == len(trials)


def test_an_interrupted_array_is_ended(arrays: list[Notes]):
    def watch(event: Any) -> None:
        raise KeyboardInterrupt

    works = [TrialWork(t, {**SPACE.sample(0, 0), "lr": 0.1 * (t + 1)}, 0, 4, t, t) for t in range(3)]
    with pytest.raises(KeyboardInterrupt):
        list(FusedTrainer(TASK, SPACE, MemoryCheckpoints()).train(works, watch))
    assert [(a.steps, a.open) for a in arrays] == [(1, False)]


def test_a_step_that_can_not_be_fused_names_what_to_do(arrays: list[Notes], monkeypatch: pytest.MonkeyPatch):
    def refuses(*_: object) -> None:
        raise NotFusible("aten.x can't run for all models at once", "allow it")

    monkeypatch.setattr(fused, "LocalArrayRun", refuses)
    works = [TrialWork(t, {**SPACE.sample(0, 0), "lr": 0.1 * (t + 1)}, 0, 4, t, t) for t in range(2)]
    with pytest.raises(NotFusible, match=r"aten.x can't run .* scheduler serial or concurrent"):
        list(FusedTrainer(TASK, SPACE, MemoryCheckpoints()).train(works, lambda _: None))
