"""The schedulers `concurrent` and `daemon`: every trial is a job of its own of a running daemon, several at a time.

One thread feeds all jobs: a job with room for a step gets its next batch. With `concurrent` the daemon runs each in a
process of its own; with `daemon` it may run equal ones as one (docs/fusion.md, "Equal jobs of separate processes").
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from typing import Any, Literal

from gpumux.client import StepFuture, submit
from gpumux.errors import AdmissionRefused
from gpumux.tune.checkpoints import preserving_random_state, read_state, write_state
from gpumux.tune.task import Batch, Task, naming_trial
from gpumux.tune.trainer import Checkpoints, Outcome, TrainingProgress, TrialWork, Watch

INFLIGHT = 2  # unanswered steps of a job at a time


class ConcurrentTrainer:
    """Device seconds are those the daemon measured. If pieces of several jobs run side by side, they add up to more
    than the elapsed time.

    fusible: the daemon may run the steps of equal jobs as one; each has its part of their device seconds."""

    def __init__(
        self,
        task: Task,
        checkpoints: Checkpoints,
        *,
        most: int,
        endpoint: str | None,
        priority: Literal["high", "low"] = "low",
        fusible: bool = False,
    ) -> None:
        self.name = "daemon" if fusible else "concurrent"
        self._task, self._checkpoints = task, checkpoints
        self._most, self._endpoint, self._priority = most, endpoint, priority
        self._fusible = fusible
        self._peak = self._steps = self._fused_steps = 0
        self._why_alone = ""  # of the last trial of which no step ran as one with others'

    def train(self, works: Sequence[TrialWork], watch: Watch) -> Generator[Outcome, None, None]:
        waiting, running = deque(works), list[_Trial]()
        full = False
        try:
            while waiting or running:
                while waiting and len(running) < self._most and not full:
                    try:
                        running.append(self._open(waiting[0]))
                    except AdmissionRefused:
                        if not running:
                            raise
                        full = True  # until a running trial is done
                    else:
                        waiting.popleft()
                self._peak = max(self._peak, len(running))
                moved = [trial for trial in running if trial.advance()]
                for trial in moved:
                    watch(TrainingProgress((trial.work.trial,), trial.answered, trial.work.steps))
                for trial in [each for each in running if each.finished]:
                    outcome = self._close(trial)
                    running.remove(trial)
                    full = False
                    yield outcome
                if not moved and running:
                    running[0].wait()
                    running.append(running.pop(0))  # so that the next wait is for another trial
        finally:
            for trial in running:
                trial.abandon()

    def _open(self, work: TrialWork) -> _Trial:
        task = self._task
        with preserving_random_state():
            step, model, optimizer = task.build(work.trial, work.config, work.seed)
        if work.start:
            write_state(model, optimizer, self._checkpoints.load(work.trial, work.start))
        batches = task.data(work.trial, work.config, work.start, work.steps)
        task.schedule(work.config, work.start, optimizer)
        first = next(batches)
        with naming_trial(work.trial, work.config, "the step"):
            job = submit(
                step, example=first, model=model, optimizer=optimizer, priority=self._priority, seed=work.draws,
                name=f"trial-{work.trial}", endpoint=self._endpoint, max_inflight=INFLIGHT, fusible=self._fusible,
            )  # fmt: skip
        return _Trial(task, work, job, model=model, optimizer=optimizer, first=first, batches=batches)

    def _close(self, trial: _Trial) -> Outcome:
        work = trial.work
        trial.job.sync()
        device_s = self._fused_device_s(trial) if self._fusible else trial.device_s
        trial.job.close()
        self._checkpoints.save(work.trial, work.steps, read_state(trial.model, trial.optimizer))
        return Outcome(work.trial, self._task.rate(work.trial, trial.model, work.config), device_s)

    def _fused_device_s(self, trial: _Trial) -> float:
        """The trial's device seconds: its part of those of the steps that ran as one with others' (the times of such a
        step are those of all)."""
        stats = trial.job.stats()
        fusion = stats["fusion"]
        self._steps += stats["steps_done"]
        self._fused_steps += fusion["steps"]
        if not fusion["steps"]:
            self._why_alone = fusion["why"]
        return float(stats["device_busy_s"])

    def notes(self) -> dict[str, Any]:
        notes: dict[str, Any] = {"jobs_at_once": self._peak}
        if self._fusible:
            notes |= {"steps": self._steps, "steps_as_one": self._fused_steps}
            if self._steps and not self._fused_steps:
                notes["none_as_one_because"] = self._why_alone
        return notes


class _Trial:
    """The job of a trial and its progress."""

    def __init__(
        self, task: Task, work: TrialWork, job: Any, *, model: Any, optimizer: Any, first: Batch,
        batches: Iterator[Batch],
    ) -> None:  # fmt: skip
        self.work, self.job, self.model, self.optimizer = work, job, model, optimizer
        self._task, self._first, self._batches = task, [first], batches
        self._pending: deque[StepFuture] = deque()
        self._sent = self.answered = work.start
        self.device_s = 0.0

    @property
    def finished(self) -> bool:
        return self.answered == self.work.steps

    def advance(self) -> bool:
        """Take available answers and send steps while there is room. Returns whether it did anything."""
        before = (self._sent, self.answered)
        while self._pending and self._pending[0].done():
            self._take()
        while self._sent < self.work.steps and len(self._pending) < INFLIGHT:
            batch = self._first.pop() if self._first else next(self._batches)
            self._task.schedule(self.work.config, self._sent, self.optimizer)
            with naming_trial(self.work.trial, self.work.config, "the step"):
                self._pending.append(self.job.step(*batch))
            self._sent += 1
        return (self._sent, self.answered) != before

    def abandon(self) -> None:
        """End the job. Its training since the last checkpoint is discarded."""
        self.job.close(drain=False)

    def wait(self) -> None:
        """Wait until its oldest step is answered."""
        if self._pending:
            self._take()

    def _take(self) -> None:
        future = self._pending.popleft()
        future.result()
        self.device_s += future.times.device_s
        self.answered += 1
