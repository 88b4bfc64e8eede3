"""What stands between an algorithm and a scheduler: the trials of a rung in, scores out, state kept in checkpoints."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch

from gpumux.tune.checkpoints import preserving_random_state, read_state, write_state
from gpumux.tune.space import Config
from gpumux.tune.task import Task, naming_trial


@dataclass(frozen=True, slots=True)
class TrialWork:
    """One trial's part of a rung: train from `start` to `steps` steps. If `start` is above 0, there is a checkpoint.
    seed: of the weights; draws: seed of the steps' random draws (dropout)."""

    trial: int
    config: Config
    start: int
    steps: int
    seed: int
    draws: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """A trial that reached its steps: its score (nan if it has none) and its device seconds (its share, if several
    trained as one)."""

    trial: int
    score: float
    device_s: float


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """Progress of a group of trials that train together: `steps` of `of` steps are done."""

    trials: tuple[int, ...]
    steps: int
    of: int


Watch: TypeAlias = Callable[[TrainingProgress], None]


class Trainer(Protocol):
    """A scheduler: `auto`, `serial`, `concurrent`, `daemon` or `fused`."""

    name: str

    def train(self, works: Sequence[TrialWork], watch: Watch) -> Generator[Outcome, None, None]:
        """Train each trial, save its checkpoint for the next rung, and yield it when it is scored, in any order.
        Closing the generator, or an error in it, leaves nothing running; yielded trials are complete."""
        ...

    def notes(self) -> dict[str, Any]:
        """Facts about the training, as plain data for the report."""
        ...


class Checkpoints(Protocol):
    """The states of trials between rungs: {"model": ..., "optimizer": ...} as state_dict() gives them."""

    def save(self, trial: int, steps: int, state: dict[str, Any]) -> None: ...

    def load(self, trial: int, steps: int) -> dict[str, Any]:
        """Raises KeyError if there is none."""
        ...

    def has(self, trial: int, steps: int) -> bool: ...

    def drop(self, trial: int) -> None: ...


def seed_of(sweep: int, trial: int, config: Config, start: int | None = None) -> int:
    """The seed of a trial's weights or, with `start`, of its steps' random draws from there on. It does not depend on
    the scheduler, and is the same in a resumed sweep. A parameter called `seed` replaces sweep and trial."""
    own = f"seed {config['seed']}" if "seed" in config else f"{sweep} {trial}"
    text = own if start is None else f"{own} from {start}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


# ---- The scheduler `serial`: one trial after another, in this process. The reference for the others.


class SerialTrainer:
    """Trains as a plain loop would. Device seconds are those of the steps."""

    name = "serial"

    def __init__(self, task: Task, checkpoints: Checkpoints) -> None:
        self._task, self._checkpoints = task, checkpoints

    def train(self, works: Sequence[TrialWork], watch: Watch) -> Generator[Outcome, None, None]:
        for work in works:
            with preserving_random_state():
                outcome = self._one(work, watch)
            yield outcome

    def _one(self, work: TrialWork, watch: Watch) -> Outcome:
        task = self._task
        step, model, optimizer = task.build(work.trial, work.config, work.seed)
        if work.start:
            write_state(model, optimizer, self._checkpoints.load(work.trial, work.start))
        torch.manual_seed(work.draws)
        seconds = 0.0
        for done, took in enumerate(timed_steps(task, work, step, optimizer), work.start + 1):
            seconds += took
            watch(TrainingProgress((work.trial,), done, work.steps))
        seconds += wait_for_gpu(model)
        self._checkpoints.save(work.trial, work.steps, read_state(model, optimizer))
        return Outcome(work.trial, task.rate(work.trial, model, work.config), seconds)

    def notes(self) -> dict[str, Any]:
        return {}


def timed_steps(task: Task, work: TrialWork, step: Callable[..., Any], optimizer: Any) -> Iterator[float]:
    """Run the steps of a trial's part of a rung, one at each turn, and yield the seconds that each took to call. Raises
    TrialFailed."""
    for k, batch in enumerate(task.data(work.trial, work.config, work.start, work.steps), work.start):
        task.schedule(work.config, k, optimizer)
        began = time.perf_counter()
        with naming_trial(work.trial, work.config, "the step"):
            step(*batch)
        yield time.perf_counter() - began


def wait_for_gpu(model: Any) -> float:
    """Wait until GPUs have finished and return the seconds of that: steps on a GPU return before they are done."""
    models = [model] if isinstance(model, torch.nn.Module) else list(model)
    devices = {p.device for each in models for p in each.parameters() if p.device.type == "cuda"}
    began = time.perf_counter()
    for device in devices:
        torch.cuda.synchronize(device)
    return time.perf_counter() - began if devices else 0.0
