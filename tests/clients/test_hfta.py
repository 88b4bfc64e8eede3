"""HFTA's tuning tasks: tables 11 and 12 as printed, and configurations that train."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from types import ModuleType

import pytest
import torch

from clients.hfta import mobilenet, pointnet, tasks
from gpumux.tune import run
from gpumux.tune.space import Space

pytestmark = pytest.mark.usefixtures("one_thread")
MODULES = {"pointnet": pointnet, "mobilenet": mobilenet}


def space_of(module: ModuleType) -> Space:
    assert module.__file__ is not None
    return run.read_space(Path(module.__file__).with_suffix(".toml"))


@pytest.mark.parametrize("name", MODULES)
def test_the_space_is_table_12(name: str):
    fusible = ("lr", "beta1", "beta2", "weight_decay", "decay", "period")
    own = {"pointnet": "feature_transform", "mobilenet": "version"}[name]
    found = {p.name: p for p in space_of(MODULES[name]).parameters}
    assert set(found) == {*fusible, "batch_size", own}
    assert {each for each, p in found.items() if p.fusible} == set(fusible)


@pytest.mark.parametrize(("name", "first", "random_epochs"), [("pointnet", 125, 60 * 25), ("mobilenet", 81, 50 * 20)])
def test_the_settings_are_table_11s(name: str, first: int, random_epochs: int):
    settings = tasks.SETTINGS[name]
    rungs = run.Budget(**settings.budget("hyperband")).make()
    rung = next(rungs)
    assert (len(rung.trials), rung.steps) == (first, 2 * tasks.STEPS_PER_EPOCH if name == "pointnet" else 4)
    random = settings.budget("random")
    assert random["trials"] * random["steps"] == random_epochs * tasks.STEPS_PER_EPOCH


@pytest.mark.parametrize("name", MODULES)
def test_every_kind_of_configuration_trains_and_is_scored(name: str):
    module, seen = MODULES[name], set()
    for number in range(40):
        config = space_of(module).sample(0, number)
        kind = tuple(v for k, v in config.items() if k in ("batch_size", "feature_transform", "version"))
        if kind in seen:
            continue
        seen.add(kind)
        step, model, _ = module.factory(config)
        for batch in islice(module.batches(config, 3), 2):
            assert len(batch[0]) == config["batch_size"]
            assert torch.isfinite(step(*batch))
        assert 0 <= module.score(model.eval(), config) <= 1
    assert len(seen) == {"pointnet": 6, "mobilenet": 4}[name]


def test_batches_go_on_where_they_are_asked_to():
    config = {"batch_size": 64}
    whole = list(islice(mobilenet.batches(config, 0), 9))
    later = list(islice(mobilenet.batches(config, 6), 3))
    assert all(torch.equal(a, b) for x, y in zip(whole[6:], later, strict=True) for a, b in zip(x, y, strict=True))
    assert len({tuple(y.tolist()) for _, y in whole}) == 9


def test_the_learning_rate_falls_by_epochs():
    config = {"lr": 1.0, "decay": 0.5, "period": 5}
    last = 5 * tasks.STEPS_PER_EPOCH - 1
    assert [tasks.learning_rate(config, k)["lr"] for k in (0, last, last + 1, 2 * last + 2)] == [1, 1, 0.5, 0.25]
