"""Between the algorithm and whatever trains: a set of configurations in, scores out, state kept in checkpoints."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch

from gpumux.tune.checkpoints import forked, read, write
from gpumux.tune.space import Config
from gpumux.tune.task import Task, blame


@dataclass(frozen=True, slots=True)
class Work:
    """One trial's part of a rung: from `start` steps, whose checkpoint is there if it is above 0, to `steps`. `seed` is
    of the weights, `draws` of what the steps draw (dropout)."""

    trial: int
    config: Config
    start: int
    steps: int
    seed: int
    draws: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """A trial that reached its steps: its score (nan if it has none) and the device seconds it took, its share
    where several trained as one."""

    trial: int
    score: float
    device_s: float


@dataclass(frozen=True, slots=True)
class Event:
    """Something to tell who watches: `steps` of `of` behind a group of trials that train together."""

    trials: tuple[int, ...]
    steps: int
    of: int


Watch: TypeAlias = Callable[[Event], None]


class Trainer(Protocol):
    """Also called a scheduler: `serial`, `concurrent`, `fused`."""

    name: str

    def train(self, works: Sequence[Work], watch: Watch) -> Generator[Outcome, None, None]:
        """Train each, put its checkpoint where the next rung finds it, and yield as each is scored. Outcomes come in
        any order. Closing the generator, or an error in it, leaves nothing running; what was yielded is done."""
        ...

    def notes(self) -> dict[str, Any]:
        """What the trainer found out, as plain data for the report."""
        ...


class Checkpoints(Protocol):
    """The state of trials between rungs: {"model": ..., "optimizer": ...} as state_dict() gives them."""

    def save(self, trial: int, steps: int, state: dict[str, Any]) -> None: ...

    def load(self, trial: int, steps: int) -> dict[str, Any]:
        """Raises KeyError where there is none."""
        ...

    def has(self, trial: int, steps: int) -> bool: ...

    def drop(self, trial: int) -> None: ...


def seed_of(sweep: int, trial: int, config: Config, start: int | None = None) -> int:
    """The seed of a trial's weights, or, with `start`, of what its steps from there on draw. It is no scheduler's
    business and the same in a resumed sweep. A parameter called `seed` takes the place of sweep and trial."""
    own = f"seed {config['seed']}" if "seed" in config else f"{sweep} {trial}"
    text = own if start is None else f"{own} from {start}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


# ---- The scheduler `serial`: one trial after another, in this process. What the others are compared with.


class Serial:
    """Trains as a plain loop would. Device seconds are those that steps took."""

    name = "serial"

    def __init__(self, task: Task, checkpoints: Checkpoints) -> None:
        self._task, self._checkpoints = task, checkpoints

    def train(self, works: Sequence[Work], watch: Watch) -> Generator[Outcome, None, None]:
        for work in works:
            with forked():
                outcome = self._one(work, watch)
            yield outcome

    def _one(self, work: Work, watch: Watch) -> Outcome:
        task = self._task
        step, model, optimizer = task.build(work.trial, work.config, work.seed)
        if work.start:
            write(model, optimizer, self._checkpoints.load(work.trial, work.start))
        torch.manual_seed(work.draws)
        seconds = 0.0
        for k, batch in enumerate(task.data(work.trial, work.config, work.start, work.steps), work.start):
            task.schedule(work.config, k, optimizer)
            began = time.perf_counter()
            with blame(work.trial, work.config, "the step"):
                step(*batch)
            seconds += time.perf_counter() - began
            watch(Event((work.trial,), k + 1, work.steps))
        seconds += settle(model)
        self._checkpoints.save(work.trial, work.steps, read(model, optimizer))
        return Outcome(work.trial, task.rate(work.trial, model, work.config), seconds)

    def notes(self) -> dict[str, Any]:
        return {}


def settle(model: Any) -> float:
    """Wait for what a GPU still has to do; -> seconds of that. Steps on a GPU return before they are done."""
    models = [model] if isinstance(model, torch.nn.Module) else list(model)
    devices = {p.device for each in models for p in each.parameters() if p.device.type == "cuda"}
    began = time.perf_counter()
    for device in devices:
        torch.cuda.synchronize(device)
    return time.perf_counter() - began if devices else 0.0
