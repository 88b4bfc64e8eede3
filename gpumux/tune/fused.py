"""The scheduler `fused`: trials that differ in fusible parameters only train as one array (HFTA, appendix E).

A rung's trials are partitioned by their infusible values, and each partition is cut into arrays that fit into memory.
Afterwards the trials' states and scores are separated again, so that the next rung's arrays are full, however its
trials are spread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from gpumux.errors import ConfigError, NotFusible
from gpumux.tune.checkpoints import preserving_random_state, read_state, write_state
from gpumux.tune.concurrent import ConcurrentTrainer
from gpumux.tune.probe import (
    CapturedStep,
    MemoryMeasurement,
    MemoryMeter,
    MemoryModel,
    array_bytes,
    capture,
    check,
    default_limit,
    guess,
    predict,
)
from gpumux.tune.running import ArrayRun, DaemonArrayRun, LocalArrayRun
from gpumux.tune.space import Config, Space, Value
from gpumux.tune.task import Batch, Task, naming_trial
from gpumux.tune.trainer import Checkpoints, Outcome, SerialTrainer, Trainer, TrainingProgress, TrialWork, Watch

# ---- The trials of each array: partitions by infusible values, cut to capacity, and put back in order (HFTA,
# appendix E). Pure.


T = TypeVar("T")
Key: TypeAlias = tuple[tuple[str, Value], ...]


@dataclass(frozen=True, slots=True)
class Partition:
    """Trials with equal infusible values. `key`: those values."""

    key: Key
    trials: tuple[int, ...]

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.key) or "all alike"


def partition(configs: Mapping[int, Config], space: Space) -> list[Partition]:
    """The trials by their infusible values, in order of first occurrence."""
    found: dict[tuple[object, ...], tuple[Key, list[int]]] = {}
    for trial, config in configs.items():
        key = space.infusible(config)
        # With types, since 1, 1.0 and True are equal, but different values.
        typed = tuple((name, type(value), value) for name, value in key)
        found.setdefault(typed, (key, []))[1].append(trial)
    return [Partition(key, tuple(trials)) for key, trials in found.values()]


def arrays(
    partitions: Iterable[Partition], capacity: Callable[[Partition], int]
) -> list[tuple[Partition, tuple[int, ...]]]:
    """The arrays of each partition, full ones first. Raises ConfigError if not one model of a partition fits."""
    made = []
    for each in partitions:
        most = capacity(each)
        if most < 1:
            raise ConfigError(
                f"not one model of the partition {each} fits into the memory allowed", "allow more memory"
            )
        made += [(each, each.trials[at : at + most]) for at in range(0, len(each.trials), most)]
    return made


def reorder(results: Mapping[int, T], trials: Sequence[int]) -> dict[int, T]:
    """Results in the algorithm's order. Each trial must occur exactly once."""
    if results.keys() != set(trials) or len(set(trials)) != len(trials):
        raise AssertionError(f"asked for trials {sorted(trials)}, got {sorted(results)}")
    return {trial: results[trial] for trial in trials}


# ---- The scheduler.


SETTLED = 2  # steps after which an array's Programs are made and their memory is touched


@dataclass(frozen=True, slots=True)
class ArrayCosts:
    """What an array took: seconds until it could train, and of a step of all its models."""

    models: int
    making_s: float
    step_s: float


class FusedTrainer:
    """Trains arrays of trials. most: models of an array at most. memory: bytes of an array at most; default: see
    `default_limit`. endpoint: arrays are jobs of the daemon there, else they train in this process. An array's device
    seconds are shared evenly by its trials. A trial that is alone in its array trains as `serial` (with an endpoint
    `concurrent`) trains it.

    capture_s: seconds that capturing one trial of a partition took. took: what the partition's last array took."""

    name = "fused"

    def __init__(
        self, task: Task, space: Space, checkpoints: Checkpoints, *, most: int | None = None, memory: int | None = None,
        endpoint: str | None = None,
    ) -> None:  # fmt: skip
        self._task, self._space, self._checkpoints = task, space, checkpoints
        self._most, self._limit = most, memory
        self._endpoint, self._daemon = endpoint, endpoint is not None
        self._alone: Trainer = (
            ConcurrentTrainer(task, checkpoints, most=1, endpoint=endpoint)
            if self._daemon
            else SerialTrainer(task, checkpoints)
        )
        self.capture_s: dict[Key, float] = {}
        self.took: dict[Key, ArrayCosts] = {}
        self._captured: dict[Key, CapturedStep] = {}
        self._memory: dict[Key, MemoryModel] = {}
        self._measured: MemoryMeasurement | None = None
        self._sizes: list[int] = []

    def train(self, works: Sequence[TrialWork], watch: Watch) -> Generator[Outcome, None, None]:
        by_trial = {work.trial: work for work in works}
        parts = partition({work.trial: work.config for work in works}, self._space)
        for part in parts:
            self.prepare(part, [by_trial[trial] for trial in part.trials])
        for part, members in arrays(parts, self._capacity):
            group = [by_trial[trial] for trial in members]
            self._sizes.append(len(group))
            if len(group) == 1:
                yield from self._alone.train(group, watch)
            else:
                yield from self._train_as_one(part.key, group, watch)

    # ---- before training ---------------------------------------------------------------------------

    def prepare(self, part: Partition, works: Sequence[TrialWork]) -> None:
        """Capture and check a partition of several trials, unless that was done, before any trial of the rung trains,
        so that errors show early. Raises what `capture` and `check` raise."""
        if part.key in self._captured or len(works) < 2:
            return
        first = works[0]
        batch = next(self._task.data(first.trial, first.config, first.start, first.start + 1))
        began = time.perf_counter()
        captured = capture(self._task, first, first.config, batch)
        self.capture_s[part.key] = time.perf_counter() - began
        check(self._task, self._space, works, captured, batch)
        self._captured[part.key] = captured

    def _capacity(self, part: Partition) -> int:
        """The number of models that an array of this partition may have. Fused Programs are made for it only if a
        generous estimate says that memory may not suffice."""
        wanted = min(len(part.trials), self._most or len(part.trials))
        captured = self._captured.get(part.key)
        if captured is None:  # a single trial, which makes no array
            return wanted
        if self._limit is None:
            self._limit = default_limit()
        limit = int(self._limit / (self._measured.scale if self._measured is not None else 1.0))
        if guess(captured).most(limit) >= wanted:
            return wanted
        return min(wanted, self._predicted(part).most(limit))

    def _predicted(self, part: Partition) -> MemoryModel:
        if part.key not in self._memory:
            self._memory[part.key] = predict(self._captured[part.key])
        return self._memory[part.key]

    # ---- an array ----------------------------------------------------------------------------------

    def _train_as_one(self, key: Key, works: Sequence[TrialWork], watch: Watch) -> Iterator[Outcome]:
        task, start, steps = self._task, works[0].start, works[0].steps
        meter = MemoryMeter() if self._measured is None and not self._daemon else None
        feed = BatchFeed(task, works, set(self._space.fusible(works[0].config)))
        made: list[Any] = []
        trials = tuple(work.trial for work in works)
        began = time.perf_counter()
        with self._open(works, made, feed.example) as running:
            making_s = time.perf_counter() - began
            for k in range(start, steps):
                batch = feed.next()
                for work, (_, _, optimizer) in zip(works, made, strict=True):
                    task.schedule(work.config, k, optimizer)
                with naming_trial(trials[0], works[0].config, "the step"):
                    running.step(batch, per_model=feed.per_model)
                if meter is not None and k >= start + SETTLED:
                    self._measured, meter = meter.read(array_bytes(running.programs(), len(works))), None
                watch(TrainingProgress(trials, k + 1, steps))
            seconds = running.finish()
        self.took[key] = ArrayCosts(len(works), making_s, seconds / (steps - start))
        for work, (_, model, optimizer) in zip(works, made, strict=True):
            self._checkpoints.save(work.trial, work.steps, read_state(model, optimizer))
            yield Outcome(work.trial, task.rate(work.trial, model, work.config), seconds / len(works))

    def _open(self, works: Sequence[TrialWork], made: list[Any], example: Batch) -> ArrayRun:
        def make(work: TrialWork) -> Any:
            return self._build(work, made)

        try:
            with preserving_random_state():
                return (
                    DaemonArrayRun(make, works, example, self._endpoint)
                    if self._daemon
                    else LocalArrayRun(make, works, example)
                )
        except NotFusible as error:
            raise NotFusible(error.message, "train it with the scheduler serial or concurrent") from error

    def _build(self, work: TrialWork, made: list[Any]) -> Any:
        built = self._task.build(work.trial, work.config, work.seed)
        if work.start:
            write_state(built[1], built[2], self._checkpoints.load(work.trial, work.start))
        self._task.schedule(work.config, work.start, built[2])
        made.append(built)
        return built

    def notes(self) -> dict[str, Any]:
        many = [size for size in self._sizes if size > 1]
        notes: dict[str, Any] = {
            "arrays": len(many),
            "trained_alone": len(self._sizes) - len(many),
            "models_an_array": sum(many) / len(many) if many else 0.0,
            "array_sizes": self._sizes,
        }
        if self._measured is not None:
            notes |= {"predicted_bytes": self._measured.predicted, "measured_bytes": self._measured.measured}
        return notes


class BatchFeed:
    """Batches for an array: one for all models if `batches` reads no fusible parameter, else one a model."""

    def __init__(self, task: Task, works: Sequence[TrialWork], fusible: set[str]) -> None:
        first = works[0]
        self._read = TrackedConfig(first.config, fusible)
        shared = task.data(first.trial, self._read, first.start, first.steps)
        self._first: list[Batch] = [next(shared)]
        self._feeds = [shared]
        self.per_model = bool(self._read.touched)
        if self.per_model:
            self._feeds += [task.data(w.trial, w.config, w.start, w.steps) for w in works[1:]]
            self._first += [next(feed) for feed in self._feeds[1:]]
        self._waiting = True

    @property
    def example(self) -> Batch:
        return self._first[0]

    def next(self) -> tuple[Any, ...]:
        """The arguments of the array's next step. If models have batches of their own, each argument is a list."""
        batches = self._first if self._waiting else [next(feed) for feed in self._feeds]
        self._waiting = False
        if self._read.touched and not self.per_model:
            raise ConfigError(
                f"batches looks at {min(self._read.touched)!r}, which is fusible, only after its first batch",
                "look at it before the first one, so that each model of an array gets its own batches",
            )
        return batches[0] if not self.per_model else tuple([list(each) for each in zip(*batches, strict=True)])


class TrackedConfig(dict[str, Any]):
    """A configuration that records which fusible parameters are read. Iterating over it reads all of them."""

    def __init__(self, config: Mapping[str, Any], fusible: set[str]) -> None:
        super().__init__(config)
        self._fusible = fusible
        self.touched: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.touched |= {name} & self._fusible
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.touched |= {name} & self._fusible
        return super().get(name, default)

    def _all(self) -> None:
        self.touched |= self._fusible

    def __iter__(self) -> Iterator[str]:
        self._all()
        return super().__iter__()

    def keys(self) -> Any:
        self._all()
        return super().keys()

    def values(self) -> Any:
        self._all()
        return super().values()

    def items(self) -> Any:
        self._all()
        return super().items()

    def copy(self) -> dict[str, Any]:
        self._all()
        return super().copy()
