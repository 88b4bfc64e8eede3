"""The scheduler `serial`: one trial after another, in this process. What the others are compared with."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from typing import Any

import torch

from gpumux.fuse.tuning.states import forked, read, write
from gpumux.fuse.tuning.task import Task, blame
from gpumux.fuse.tuning.trainer import Checkpoints, Event, Outcome, Watch, Work


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
