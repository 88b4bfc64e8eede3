"""The scheduler `auto`: each partition of a rung trains as arrays or one trial after another, whichever is expected
to end sooner.

An array has to be made: the step of each model is captured, operators are timed, and what is fused is verified. That
takes as long as hundreds of steps, so arrays pay for long rungs of several trials alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from gpumux.errors import CaptureError, NotFusible
from gpumux.tune.checkpoints import preserving_random_state
from gpumux.tune.fused import FusedTrainer, Key, Partition, partition
from gpumux.tune.space import Space
from gpumux.tune.task import Task
from gpumux.tune.trainer import Checkpoints, Outcome, SerialTrainer, TrialWork, Watch, timed_steps, wait_for_gpu

FEW_STEPS = 100  # of all trials together: timing a step would take a good part of them
SHORT_S = 2.0  # seconds of all steps, one trial after another: capturing one step may take as long
TIMED_STEPS, TIMED_S = 50, 1.0  # at most
# Assumed until an array of the partition has trained. Small models gained 1.9 to 6.8 (docs/fusion.md).
GAIN = 2.0
# Seconds of making an array by model, over those of one trial's capture: the first capture of a process and a
# partition takes longer than later ones, and operators are timed once.
MAKING = 1.5


@dataclass(slots=True)
class PartitionCosts:
    """What is known of a partition. step_s: seconds of a trial's plain step. making_s: seconds of an array's making,
    by model. gain: models' steps a second in an array over those one after another. None: not known yet."""

    step_s: float | None = None
    making_s: float | None = None
    gain: float = GAIN
    refused: str = ""  # why its trials make no arrays

    def arrays_pay(self, trials: int, steps: int) -> bool:
        """Whether so many trials are expected to reach so many more steps sooner in arrays. `step_s` and `making_s`
        are known."""
        assert self.step_s is not None
        assert self.making_s is not None
        serial_s = trials * steps * self.step_s
        return trials * self.making_s + serial_s / self.gain < serial_s


class AutoTrainer:
    """Trains arrays where they are expected to pay, and one trial after another elsewhere. A step that gpumux can't
    capture, or whose models can't be fused, trains one after another; `notes` says why. most, memory: see
    FusedTrainer."""

    name = "auto"

    def __init__(
        self, task: Task, space: Space, checkpoints: Checkpoints, *, most: int | None = None, memory: int | None = None
    ) -> None:
        self._task, self._space = task, space
        self._serial = SerialTrainer(task, checkpoints)
        self._fused = FusedTrainer(task, space, checkpoints, most=most, memory=memory)
        self._costs: dict[Key, PartitionCosts] = {}
        self._one_after_another = 0

    def train(self, works: Sequence[TrialWork], watch: Watch) -> Generator[Outcome, None, None]:
        by_trial = {work.trial: work for work in works}
        parts = partition({work.trial: work.config for work in works}, self._space)
        alone: list[TrialWork] = []
        for part in parts:
            group = [by_trial[trial] for trial in part.trials]
            if not self._arrays_pay(part, group):
                alone += group
                continue
            done: set[int] = set()
            try:
                for outcome in self._fused.train(group, watch):
                    done.add(outcome.trial)
                    yield outcome
            except NotFusible as error:
                self._costs[part.key].refused = error.message
                alone += [work for work in group if work.trial not in done]
            self._learn(part.key)
        self._one_after_another += len(alone)
        yield from self._serial.train(alone, watch)

    def _arrays_pay(self, part: Partition, works: Sequence[TrialWork]) -> bool:
        steps = works[0].steps - works[0].start
        costs = self._costs.setdefault(part.key, PartitionCosts())
        if len(works) < 2 or costs.refused or len(works) * steps < FEW_STEPS:
            return False
        if costs.step_s is None:
            costs.step_s = step_seconds(self._task, works[0], max(2, min(TIMED_STEPS, len(works) * steps // 20)))
        if len(works) * steps * costs.step_s < SHORT_S:
            return False
        try:
            self._fused.prepare(part, works)
        except (CaptureError, NotFusible) as error:
            costs.refused = error.message
            return False
        if costs.making_s is None:
            costs.making_s = MAKING * self._fused.capture_s[part.key]
        return costs.arrays_pay(len(works), steps)

    def _learn(self, key: Key) -> None:
        """Take over what the partition's last array took."""
        costs, took = self._costs[key], self._fused.took.get(key)
        if took is not None and costs.step_s is not None:
            costs.making_s = took.making_s / took.models
            costs.gain = took.models * costs.step_s / took.step_s

    def notes(self) -> dict[str, Any]:
        notes = self._fused.notes()
        notes["trained_alone"] += self._one_after_another
        refused = [costs.refused for costs in self._costs.values() if costs.refused]
        return notes | ({"no_arrays_because": "; ".join(dict.fromkeys(refused))} if refused else {})


def step_seconds(task: Task, work: TrialWork, steps: int) -> float:
    """Seconds of a plain step of a trial: the mean of at most so many of a model that is thrown away. Raises
    TrialFailed."""
    with preserving_random_state():
        step, model, optimizer = task.build(work.trial, work.config, work.seed)
        torch.manual_seed(work.draws)
        samples: list[float] = []
        for took in islice(timed_steps(task, work, step, optimizer), steps):
            samples.append(took + wait_for_gpu(model))
            if len(samples) > 1 and sum(samples) > TIMED_S:
                break
    return statistics.mean(samples[1:] or samples)  # the first step makes the optimizer's state
