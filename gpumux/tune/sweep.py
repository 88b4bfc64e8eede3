"""The loop of a sweep (HFTA, algorithm 1): the algorithm yields a rung, a trainer runs the trials without a score, and
the best continue. All decisions depend on the ledger alone, so that a sweep that is run again resumes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from math import isnan
from typing import Literal, Protocol, TypeAlias

from gpumux.tune.algorithms import Algorithm, Rung, ranked
from gpumux.tune.fused import reorder
from gpumux.tune.space import Config, Space, Value
from gpumux.tune.trainer import Checkpoints, Outcome, Trainer, TrialWork, Watch, seed_of

# ---- The record of a sweep: configurations, scores at rungs, how trials ended. In memory here, in Optuna in `study`.


State: TypeAlias = Literal["running", "complete", "pruned", "failed"]


@dataclass(frozen=True, slots=True)
class TrialRecord:
    """The state of a trial. scores: by the number of steps at which it was scored. device_s: device seconds it took."""

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
        """The latest score, nan before the first."""
        return self.scores[self.steps] if self.scores else float("nan")


class SweepLedger(Protocol):
    """The record of a sweep. A stored one survives a killed process. Trials are numbered from 0."""

    def config(self, number: int) -> Config:
        """The configuration of a trial, proposed if it is new. Numbers must be asked for in rising order."""
        ...

    def score(self, number: int, steps: int) -> float | None:
        """The trial's score at `steps` steps, None if it was not trained that far."""
        ...

    def steps(self, number: int) -> list[int]:
        """The numbers of steps at which the trial was scored."""
        ...

    def report(self, number: int, steps: int, score: float, device_s: float) -> None:
        """Record a score. If the trial was trained again, its seconds are added and its first score stays."""
        ...

    def finish(self, number: int, state: State) -> None:
        """End the trial with its latest score. Has no effect on an ended trial."""
        ...

    def entries(self) -> list[TrialRecord]: ...


@dataclass
class LedgerTrial:
    """A trial as ledgers hold it."""

    config: dict[str, Value]
    state: State = "running"
    scores: dict[int, float] = field(default_factory=dict)
    device_s: float = 0.0

    def entry(self, number: int) -> TrialRecord:
        return TrialRecord(number, self.config, self.state, dict(self.scores), self.device_s)


class MemoryLedger:
    """A ledger in memory; configurations are drawn at random."""

    def __init__(self, space: Space, seed: int) -> None:
        self._space, self._seed = space, seed
        self._trials: dict[int, LedgerTrial] = {}

    def config(self, number: int) -> Config:
        if number not in self._trials:
            self._trials[number] = LedgerTrial(self._space.sample(self._seed, number))
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

    def entries(self) -> list[TrialRecord]:
        return [kept.entry(number) for number, kept in sorted(self._trials.items())]


# ---- The loop.


@dataclass(frozen=True, slots=True)
class Listener:
    """Callbacks for the progress of a sweep. rung: a rung begins, and these scores are known. scored: a trial has
    reached the rung. lost: the checkpoints of these trials at so many steps are missing, and they are trained again."""

    rung: Callable[[Rung, Mapping[int, float]], None]
    scored: Callable[[Rung, Outcome], None]
    lost: Callable[[Sequence[int], int], None]
    watch: Watch


def sweep(
    algorithm: Algorithm, ledger: SweepLedger, trainer: Trainer, checkpoints: Checkpoints, listener: Listener, *,
    maximize: bool, seed: int,
) -> None:  # fmt: skip
    """Run the algorithm to its end. KeyboardInterrupt and errors pass through; scores reported before are in the
    ledger."""
    best: TrialRecord | None = None
    try:
        rung = next(algorithm)
        while True:
            scores = _run_rung(rung, ledger, trainer, checkpoints, listener, seed)
            order = [t for t in ranked(scores, maximize=maximize) if not isnan(scores[t])]
            kept = sorted(order[: rung.keep])
            for trial in rung.trials:
                if trial in kept:
                    continue
                failed = isnan(scores[trial])
                ledger.finish(trial, "failed" if failed else "pruned" if rung.keep else "complete")
                checkpoints.drop(trial) if failed or rung.keep else None
            if not rung.keep:
                best = _keep_best(ledger, checkpoints, rung, best, maximize)
            rung = _send(algorithm, kept)
    except StopIteration:
        return


def _send(algorithm: Algorithm, kept: Sequence[int]) -> Rung:
    """The next rung with a trial in it: if all trials of a rung diverged, none is left for the next."""
    rung = algorithm.send(kept)
    while not rung.trials:
        rung = algorithm.send(())
    return rung


def _run_rung(
    rung: Rung, ledger: SweepLedger, trainer: Trainer, checkpoints: Checkpoints, listener: Listener, seed: int
) -> dict[int, float]:
    """Scores of all trials of a rung, in its order: known ones and those trained now."""
    configs = {trial: ledger.config(trial) for trial in rung.trials}
    scores = {t: s for t in rung.trials if (s := ledger.score(t, rung.steps)) is not None}
    listener.rung(rung, dict(scores))

    def train(trials: Sequence[int], start: int, steps: int) -> Iterator[Outcome]:
        works = [
            TrialWork(t, configs[t], start, steps, seed_of(seed, t, configs[t]), seed_of(seed, t, configs[t], start))
            for t in trials
        ]
        if works:
            with closing(trainer.train(works, listener.watch)) as running:
                for outcome in running:
                    ledger.report(outcome.trial, steps, outcome.score, outcome.device_s)
                    yield outcome

    todo = [t for t in rung.trials if t not in scores]
    lost = [t for t in todo if rung.start and not checkpoints.has(t, rung.start)]
    if lost:  # again, from rung to rung as before: each stretch has a seed of its own for its draws
        listener.lost(lost, rung.start)
        reached = sorted(steps for steps in ledger.steps(lost[0]) if steps <= rung.start)
        for start, steps in pairwise((0, *reached)):
            for _ in train(lost, start, steps):
                pass
    for outcome in train(todo, rung.start, rung.steps):
        scores[outcome.trial] = outcome.score
        listener.scored(rung, outcome)
    return reorder(scores, rung.trials)


def _keep_best(
    ledger: SweepLedger, checkpoints: Checkpoints, rung: Rung, best: TrialRecord | None, maximize: bool
) -> TrialRecord | None:
    """Drop the checkpoints of all finished trials but the best one."""
    entries = {e.number: e for e in ledger.entries() if e.number in rung.trials or e == best}
    first = best_of([*entries.values()], maximize=maximize)
    for number in entries:
        if first is None or number != first.number:
            checkpoints.drop(number)
    return first


def best_of(entries: Sequence[TrialRecord], *, maximize: bool) -> TrialRecord | None:
    """The best of the complete trials, None if there is none."""
    done = {e.number: e for e in entries if e.state == "complete" and not isnan(e.score)}
    order = ranked({number: e.score for number, e in done.items()}, maximize=maximize)
    return done[order[0]] if order else None
