"""The ledger in Optuna: the same sweep as in memory, resumable, and refused if it is of another sweep."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest

from gpumux.errors import ConfigError
from gpumux.tune.algorithms import hyperband, random_search
from gpumux.tune.checkpoints import MemoryCheckpoints
from gpumux.tune.space import Space
from gpumux.tune.study import StudyLedger
from gpumux.tune.sweep import MemoryLedger, sweep
from tests.tune.fakes import SPACE, FakeTrainer, Killed, quiet

STATES = optuna.trial.TrialState


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database without studies: making its tables takes a second."""
    path = tmp_path_factory.mktemp("optuna") / "empty.db"
    storage = optuna.storages.RDBStorage(f"sqlite:///{path}")
    storage.remove_session()
    storage.engine.dispose()
    return path


@pytest.fixture
def url(tmp_path: Path, tables: Path) -> str:
    return copied(tables, tmp_path / "study.db")


def copied(tables: Path, path: Path) -> str:
    shutil.copy(tables, path)
    return f"sqlite:///{path}"


@pytest.fixture
def open_study(url: str) -> Iterator:
    opened = []

    def make(
        space: Space = SPACE,
        *,
        sampler: str = "random",
        seed: int = 5,
        maximize: bool = True,
        startup: int = 10,
        **settings,
    ):
        made = StudyLedger(url, "s", space, settings, maximize=maximize, sampler=sampler, seed=seed, startup=startup)
        opened.append(made)
        return made

    yield make
    for each in opened:
        each.close()


def climb(ledger, trainer: FakeTrainer) -> list:
    algorithm = hyperband(4, min_steps=1, eta=2)
    sweep(algorithm, ledger, trainer, trainer.checkpoints, quiet(), maximize=True, seed=5)
    return ledger.entries()


def test_a_stored_sweep_is_the_same(open_study, url: str):
    bad = frozenset({2})
    stored = climb(open_study(), FakeTrainer(MemoryCheckpoints(), bad=bad))
    memory = climb(MemoryLedger(SPACE, 5), FakeTrainer(MemoryCheckpoints(), bad=bad))
    assert str(stored) == str(memory)  # nan is not equal to itself
    study = optuna.load_study(storage=url, study_name="s")
    states = {t.number: t.state for t in study.trials}
    assert states[2] == STATES.FAIL
    assert set(states.values()) == {STATES.FAIL, STATES.PRUNED, STATES.COMPLETE}
    assert study.best_trial.value == max(e.score for e in stored if e.state == "complete")
    pruned = next(t for t in study.trials if t.state == STATES.PRUNED)
    assert pruned.intermediate_values == stored[pruned.number].scores
    assert study.trials[0].distributions["lr"].log
    study._storage.remove_session()
    study._storage._backend.engine.dispose()


@pytest.mark.parametrize("die_after", [0, 8])
def test_a_killed_sweep_goes_on_from_its_storage(open_study, die_after: int):
    expected = climb(MemoryLedger(SPACE, 5), FakeTrainer(MemoryCheckpoints()))
    first = FakeTrainer(MemoryCheckpoints(), die_after=die_after)
    with pytest.raises(Killed):
        climb(open_study(), first)
    second = FakeTrainer(first.checkpoints)
    assert climb(open_study(), second) == expected
    assert len(first.trained) == die_after
    assert not set(first.trained) & set(second.trained)


@pytest.mark.extended
def test_tpe_proposes_what_it_would_have_proposed(open_study, tmp_path: Path, tables: Path):
    """With few trials drawn at random first, so that the later ones depend on scores."""
    whole = StudyLedger(
        copied(tables, tmp_path / "o.db"), "s", SPACE, {}, maximize=True, sampler="tpe", seed=5, startup=4
    )
    expected = climb(whole, FakeTrainer(MemoryCheckpoints()))
    whole.close()
    assert [e.config for e in expected] != [SPACE.sample(5, e.number) for e in expected]
    first = FakeTrainer(MemoryCheckpoints(), die_after=9)
    with pytest.raises(Killed):
        climb(open_study(sampler="tpe", startup=4), first)
    assert climb(open_study(sampler="tpe", startup=4), FakeTrainer(first.checkpoints)) == expected


def test_a_configuration_half_asked_for_is_completed(open_study, url: str):
    """Killed between the parameters of one trial, or between proposing and asking."""
    first = open_study()
    first.config(0)
    first._study.ask({"lr": optuna.distributions.FloatDistribution(1e-3, 1.0, log=True)})
    first._study.enqueue_trial(SPACE.sample(5, 2))
    second = open_study()
    config = second.config(1)
    assert config.keys() - {"momentum"} == {"lr", "batch", "optimizer"}
    assert ("momentum" in config) == (config["optimizer"] == "sgd")
    assert second.config(2) == SPACE.sample(5, 2)


def test_more_trials_of_random_search(open_study):
    def search(trials: int) -> list[tuple[int, int, int]]:
        trainer = FakeTrainer(MemoryCheckpoints())
        sweep(random_search(trials, 5), open_study(), trainer, trainer.checkpoints, quiet(), maximize=True, seed=5)
        return trainer.trained

    assert len(search(3)) == 3
    assert [trial for trial, _, _ in search(5)] == [3, 4]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seed": 6}, "its seed is 5, not 6"),
        ({"steps": 9}, "its steps is null, not 9"),
        ({"maximize": False}, 'its direction is "maximize"'),
        ({"space": Space.read({"lr": {"low": 0.1, "high": 1.0}})}, "its space is"),
        ({"sampler": "tpe"}, "its sampler is"),
    ],
)
def test_another_sweep_of_that_name_is_refused(open_study, change, says: str):
    open_study()
    with pytest.raises(ConfigError, match=says):
        open_study(**change)


def test_a_study_that_gpumux_did_not_make_is_refused(open_study, url: str):
    study = optuna.create_study(storage=url, study_name="s", direction="maximize")
    study.enqueue_trial({"x": 1})
    study._storage.remove_session()
    study._storage._backend.engine.dispose()
    with pytest.raises(ConfigError, match="was not made by gpumux tune"):
        open_study()


@pytest.mark.parametrize("url", ["sqlite:////absent/x.db", "nonsense"])
def test_a_storage_that_can_not_be_opened(url: str):
    with pytest.raises(ConfigError, match="can't open storage"):
        StudyLedger(url, "s", SPACE, {}, maximize=True, sampler="random", seed=0)


def test_without_optuna_the_command_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match="pip install optuna"):
        StudyLedger("sqlite:///x.db", "s", SPACE, {}, maximize=True, sampler="random", seed=0)


def test_seconds_add_up(open_study):
    first = open_study()
    first.add_wall(2.0)
    second = open_study()
    second.add_wall(1.5)
    assert second.wall_s == 3.5
