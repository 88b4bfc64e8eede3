"""Tune hyper-parameters: HFHT (HFTA, appendix E) as one function, which `gpumux tune` runs.

    from gpumux.tune import tune
    result = tune("clients.digits_sweep:factory", "clients/digits_sweep.toml", trials=16, steps=400)
    result.best.config, result.best.score, result.state()

docs/tuning.md explains algorithms, schedulers and resuming.
"""

from __future__ import annotations

import json
import time
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpumux.errors import ConfigError
from gpumux.tune.algorithms import Algorithm, brackets, hyperband, random_search
from gpumux.tune.checkpoints import DiskCheckpoints, MemoryCheckpoints
from gpumux.tune.space import Space
from gpumux.tune.study import SAMPLERS, StudyLedger
from gpumux.tune.sweep import Listener, MemoryLedger, SweepLedger, TrialRecord, best_of, sweep
from gpumux.tune.task import Task, find
from gpumux.tune.trainer import Checkpoints, Trainer

ALGORITHMS = ("random", "hyperband")
SCHEDULERS = ("auto", "serial", "concurrent", "daemon", "fused")
DEPTH = 3  # rungs below the last one in Hyperband's largest bracket, if min_steps is not given


@dataclass(frozen=True, slots=True)
class Budget:
    """The budget of an algorithm; see `tune`. Raises ConfigError (from `make`) for invalid values."""

    algorithm: str
    steps: int
    trials: int | None = None
    min_steps: int | None = None
    eta: int = 3
    skip_last: int = 0

    def make(self) -> Algorithm:
        if self.algorithm == "random":
            if self.min_steps is not None:
                raise ConfigError("min_steps with random search", "every trial gets all steps: leave it out")
            if self.trials is None:
                raise ConfigError("random search needs a number of trials", "give trials (--trials N)")
            return random_search(self.trials, self.steps)
        if self.algorithm == "hyperband":
            return hyperband(
                self.steps, min_steps=self.least(), eta=self.eta, skip_last=self.skip_last, trials=self.trials
            )
        raise ConfigError(f"no algorithm is called {self.algorithm!r}", f"choose from {', '.join(ALGORITHMS)}")

    def least(self) -> int:
        return self.min_steps if self.min_steps is not None else max(1, self.steps // max(2, self.eta) ** DEPTH)

    def total(self) -> int:
        """Number of trials."""
        if self.trials is not None:
            return self.trials
        return sum(n for _, n in brackets(self.steps, self.least(), self.eta))

    def describe(self) -> dict[str, Any]:
        """The settings that all runs of a study share. The number of random trials may differ: more extend a study."""
        if self.algorithm == "random":
            return {"algorithm": "random", "steps": self.steps}
        return {
            "algorithm": self.algorithm, "steps": self.steps, "min_steps": self.least(), "eta": self.eta,
            "skip_last": self.skip_last, "trials": self.trials,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class SweepResult:
    """The result of a sweep. wall_s: seconds from begin to end; device_s: seconds the device worked for it (device_s /
    3600 are GPU hours). Both include earlier runs of a stored sweep. notes: facts that the scheduler reports."""

    task: str
    algorithm: str
    scheduler: str
    direction: str
    entries: tuple[TrialRecord, ...]
    best: TrialRecord | None
    wall_s: float
    notes: Mapping[str, Any]
    checkpoints: Checkpoints

    @property
    def device_s(self) -> float:
        return sum(entry.device_s for entry in self.entries)

    def state(self) -> dict[str, Any]:
        """The best trial's {"model": state_dict, "optimizer": state_dict}. Raises ConfigError if there is none."""
        if self.best is not None:
            with suppress(KeyError):
                return self.checkpoints.load(self.best.number, self.best.steps)
        raise ConfigError("there is no state of a best trial", "no trial was completed, or its checkpoint was removed")


def read_space(path: Path) -> Space:
    """The space in a TOML or JSON file. Raises ConfigError."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read {path}: {error}", "give a TOML or JSON file (docs/tuning.md)") from None
    try:
        body = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path} is no {'JSON' if path.suffix == '.json' else 'TOML'}: {error}", "mend it") from None
    if not isinstance(body, dict):
        raise ConfigError(f"{path} holds no table", "give a table for each parameter")
    return Space.read(body)


def tune(
    task: Task | str, space: Space | Mapping[str, Any] | str | Path, *, steps: int, trials: int | None = None,
    algorithm: str = "random", scheduler: str = "auto", min_steps: int | None = None, eta: int = 3, skip_last: int = 0,
    sampler: str = "random", seed: int = 0, storage: str | None = None, study: str | None = None,
    checkpoints: str | Path | None = None, concurrent: int = 4, endpoint: str | None = None,
    max_array: int | None = None, memory: int | None = None, listener: Listener | None = None,
) -> SweepResult:  # fmt: skip
    """Search `space` for the configuration whose model scores best.

    task: "module:factory", or a Task (gpumux.tune.task says what the module provides).
    steps: training steps of a configuration (at most, with Hyperband). trials: number of configurations.
    algorithm: "random", or "hyperband" (min_steps, eta, skip_last: see gpumux.tune.algorithms.hyperband).
    scheduler: "auto", "fused" for trials that are expected to end sooner so, and "serial" for others (with an
        `endpoint`, "fused"); "serial", one trial after another in this process; "concurrent", up to `concurrent` jobs
        at a time of the daemon at `endpoint`; "daemon", the same with fusible=True, so that the daemon may run equal
        ones as one; "fused", arrays of trials that train as one, of at most `max_array` models and `memory` bytes; with
        an `endpoint` each array is a job of that daemon.
    sampler: "random", or "tpe" (Optuna's; needs storage). seed: of configurations, weights and random draws.
    storage: URL of an Optuna storage, such as sqlite:///sweep.db. A sweep of the same name (`study`) in it is resumed:
        finished trials are not trained again.
    checkpoints: folder for the states of trials (default beside a sqlite storage, else ./gpumux-tune/STUDY). Without
        storage they are kept in memory.

    Raises ConfigError, TrialFailed, and what submit() or an array raises. KeyboardInterrupt passes through; scores
    reported before are stored.
    """
    if sampler not in SAMPLERS:
        raise ConfigError(f"no sampler is called {sampler!r}", f"choose from {', '.join(SAMPLERS)}")
    if sampler != "random" and storage is None:
        raise ConfigError(f"sampler {sampler} learns from a study", "give a storage, such as sqlite:///sweep.db")
    task = find(task) if isinstance(task, str) else task
    space = read_space(Path(space)) if isinstance(space, str | Path) else space
    space = space if isinstance(space, Space) else Space.read(space)
    budget = Budget(algorithm, steps, trials, min_steps, eta, skip_last)
    asked = budget.make()
    name = study or task.name
    ledger: SweepLedger
    stored: StudyLedger | None = None
    if storage is None:
        ledger = MemoryLedger(space, seed)
    else:
        settings = {"task": task.name, **budget.describe()}
        ledger = stored = StudyLedger(
            storage, name, space, settings, maximize=task.maximize, sampler=sampler, seed=seed
        )
    try:
        kept = _checkpoints(storage, name, checkpoints)
        trainer = _trainer(scheduler, task, space, kept, concurrent, endpoint, max_array, memory)
        began = time.monotonic()
        try:
            sweep(asked, ledger, trainer, kept, listener or _QUIET, maximize=task.maximize, seed=seed)
        finally:
            wall_s = time.monotonic() - began
            if stored is not None:
                stored.add_wall(wall_s)
                wall_s = stored.wall_s
        entries = tuple(ledger.entries())
    finally:
        if stored is not None:
            stored.close()
    best = best_of(entries, maximize=task.maximize)
    return SweepResult(task.name, algorithm, scheduler, task.direction, entries, best, wall_s, trainer.notes(), kept)


def _quiet(*_: Any) -> None:
    pass


_QUIET = Listener(_quiet, _quiet, _quiet, _quiet)


def _checkpoints(storage: str | None, study: str, folder: str | Path | None) -> Checkpoints:
    if folder is None and storage is None:
        return MemoryCheckpoints()
    safe = "".join(c if c.isalnum() or c in "-_." else "-" for c in study)
    if folder is not None:
        return DiskCheckpoints(Path(folder))
    assert storage is not None
    path = storage.partition(":///")[2] if storage.startswith("sqlite") else ""
    return DiskCheckpoints(Path(f"{path}.checkpoints") / safe if path else Path("gpumux-tune") / safe)


def _trainer(
    scheduler: str, task: Task, space: Space, kept: Checkpoints, concurrent: int, endpoint: str | None,
    max_array: int | None, memory: int | None,
) -> Trainer:  # fmt: skip
    for name, value in (("concurrent", concurrent), ("max_array", max_array), ("memory", memory)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}", "give a whole number from 1 up")
    if scheduler == "serial":
        from gpumux.tune.trainer import SerialTrainer

        return SerialTrainer(task, kept)
    if scheduler in ("concurrent", "daemon"):
        from gpumux.tune.concurrent import ConcurrentTrainer

        return ConcurrentTrainer(task, kept, most=concurrent, endpoint=endpoint, fusible=scheduler == "daemon")
    if scheduler == "fused" or (scheduler == "auto" and endpoint is not None):  # a job is captured in any case
        from gpumux.tune.fused import FusedTrainer

        return FusedTrainer(task, space, kept, most=max_array, memory=memory, endpoint=endpoint)
    if scheduler == "auto":
        from gpumux.tune.auto import AutoTrainer

        return AutoTrainer(task, space, kept, most=max_array, memory=memory)
    raise ConfigError(f"no scheduler is called {scheduler!r}", f"choose from {', '.join(SCHEDULERS)}")
