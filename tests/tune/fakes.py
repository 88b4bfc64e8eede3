"""A trainer whose scores are a formula, that checks what it is asked to do, and can be killed at any outcome."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import Any

from gpumux.tune.checkpoints import MemoryCheckpoints
from gpumux.tune.space import Space
from gpumux.tune.sweep import Listener
from gpumux.tune.trainer import Outcome, TrainingProgress, TrialWork, Watch

SPACE = Space.read(
    {
        "lr": {"low": 1e-3, "high": 1.0, "log": True, "fusible": True},
        "batch": {"choices": [16, 32, 64]},
        "optimizer": {"choices": ["sgd", "adam"]},
        "momentum": {"low": 0.0, "high": 0.9, "fusible": True, "when": {"optimizer": "sgd"}},
    }
)


class Killed(Exception):
    pass


def quality(work: TrialWork) -> float:
    """The better the nearer lr is to 0.1, and a little better with steps; rises with noise of the trial's seed."""
    return -abs(math.log10(work.config["lr"]) + 1) + work.steps / 1e4 + (work.seed % 997) / 1e5


class FakeTrainer:
    """Trains `group` trials at a time, in any `order`. State is the list of stretches a trial has behind it."""

    name = "fake"

    def __init__(self, checkpoints: MemoryCheckpoints, *, group: int = 1, reverse: bool = False,
                 die_after: int | None = None,
                 bad: frozenset[int] = frozenset()) -> None:  # fmt: skip
        self.checkpoints, self.group, self.reverse, self.die_after, self.bad = (
            checkpoints,
            group,
            reverse,
            die_after,
            bad,
        )
        self.trained: list[tuple[int, int, int]] = []  # (trial, start, steps)

    def train(self, works: Sequence[TrialWork], watch: Watch) -> Generator[Outcome, None, None]:
        assert len({work.trial for work in works}) == len(works)
        ordered = list(reversed(works)) if self.reverse else list(works)
        for at in range(0, len(ordered), self.group):
            for work in ordered[at : at + self.group]:
                if self.die_after is not None and len(self.trained) >= self.die_after:
                    raise Killed
                behind: list[Any] = self.checkpoints.load(work.trial, work.start)["behind"] if work.start else []
                assert (behind[-1][1] if behind else 0) == work.start < work.steps
                self.trained.append((work.trial, work.start, work.steps))
                stretch = (work.start, work.steps, work.seed, work.draws)
                self.checkpoints.save(work.trial, work.steps, {"behind": [*behind, stretch]})
                watch(TrainingProgress((work.trial,), work.steps, work.steps))
                yield Outcome(work.trial, math.nan if work.trial in self.bad else quality(work), 0.5)

    def notes(self) -> dict[str, Any]:
        return {}


def quiet() -> Listener:
    return Listener(*[lambda *_: None] * 4)
