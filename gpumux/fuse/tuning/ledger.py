"""What a sweep remembers: configurations proposed, scores at rungs, how trials ended. In memory here, in Optuna in `study`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

from gpumux.fuse.tuning.space import Config, Space, Value

State: TypeAlias = Literal["running", "complete", "pruned", "failed"]


@dataclass(frozen=True, slots=True)
class Entry:
    """A trial as it stands. `scores`: by steps behind it when it was scored. `device_s`: seconds of the device it took."""

    number: int
    config: Config
    state: State
    scores: dict[int, float]
    device_s: float

    @property
    def steps(self) -> int:
        return max(self.scores, default=0)

    @property
    def score(self) -> float:
        """The latest one, nan before the first."""
        return self.scores[self.steps] if self.scores else float("nan")


class Ledger(Protocol):
    """What is written here outlives a killed sweep, if the ledger is stored. Trials are numbered from 0."""

    def config(self, number: int) -> Config:
        """The configuration of a trial, proposed if it is new. Numbers are asked for in rising order."""
        ...

    def score(self, number: int, steps: int) -> float | None:
        """What the trial scored when it had `steps` behind it, None if it was not trained so far."""
        ...

    def steps(self, number: int) -> list[int]:
        """When the trial was scored."""
        ...

    def report(self, number: int, steps: int, score: float, device_s: float) -> None:
        """A trial was trained so far. Said again of one that was trained again: its seconds count, its score stands."""
        ...

    def finish(self, number: int, state: State) -> None:
        """The trial ends with its latest score. Said again of an ended trial: nothing happens."""
        ...

    def entries(self) -> list[Entry]: ...


@dataclass
class Kept:
    """A trial as ledgers hold it."""

    config: dict[str, Value]
    state: State = "running"
    scores: dict[int, float] = field(default_factory=dict)
    device_s: float = 0.0

    def entry(self, number: int) -> Entry:
        return Entry(number, self.config, self.state, dict(self.scores), self.device_s)


class MemoryLedger:
    """Lasts as long as the process; configurations are drawn at random."""

    def __init__(self, space: Space, seed: int) -> None:
        self._space, self._seed = space, seed
        self._trials: dict[int, Kept] = {}

    def config(self, number: int) -> Config:
        if number not in self._trials:
            self._trials[number] = Kept(self._space.sample(self._seed, number))
        return self._trials[number].config

    def score(self, number: int, steps: int) -> float | None:
        return self._trials[number].scores.get(steps)

    def steps(self, number: int) -> list[int]:
        return list(self._trials[number].scores)

    def report(self, number: int, steps: int, score: float, device_s: float) -> None:
        trial = self._trials[number]
        trial.scores.setdefault(steps, score)
        trial.device_s += device_s

    def finish(self, number: int, state: State) -> None:
        if self._trials[number].state == "running":
            self._trials[number].state = state

    def entries(self) -> list[Entry]:
        return [kept.entry(number) for number, kept in sorted(self._trials.items())]
