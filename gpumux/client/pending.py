"""Unanswered steps of a job, and the handling of the daemon's messages about them.

Messages are handled in the thread that receives them. A message may be handled twice (if an interrupt comes right after
a handler), so all handling is idempotent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from gpumux.capture.step import Choice
from gpumux.client.future import StepFuture
from gpumux.client.remote import Remote
from gpumux.errors import GpumuxError, JobClosed, UnknownJob, from_code
from gpumux.types import StepTimes
from gpumux.wire import messages as m
from gpumux.wire.messages import SnapshotSaved, SnapshotWanted


class _Step:
    __slots__ = ("future", "host", "lowered", "program", "slot")

    def __init__(self, future: StepFuture, program: int, slot: int, choice: Choice) -> None:
        self.lowered = choice.made.lowered
        self.future = future
        self.program = program
        self.slot = slot
        self.host = choice.values[sum(self.lowered.counts) :]

    def value(self, tensors: list[torch.Tensor]) -> Any:
        """Rebuild the step function's return value from its tensors."""
        return self.lowered.value(tensors, self.host)


class _Rerun:
    """A step that was answered before, and runs again for its effect on the state."""

    __slots__ = ("program", "slot")

    def __init__(self, program: int, slot: int) -> None:
        self.program = program
        self.slot = slot


class Pending:
    """The unanswered steps of one job. `news` holds the daemon's messages about snapshots."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self.steps: dict[int, _Step | _Rerun] = {}  # by number
        self.held: dict[int, _Step] = {}  # unanswered when the daemon or the job ended, and not submitted again yet
        self._survives: frozenset[str] = frozenset()
        self._no_answer: frozenset[str] = frozenset()
        self.news: deque[SnapshotSaved | SnapshotWanted] = deque()
        self.newest = -1  # number of the newest answered step

    def __len__(self) -> int:
        return len(self.steps)

    def may_come_back(self, ends: frozenset[str]) -> None:
        """Keep steps unanswered if the job ends with one of these codes, because it may be recovered then. A refusal
        because there is no such job answers no step either: the message with the job's end is under way, or here
        already."""
        self._survives = ends
        self._no_answer = ends | {UnknownJob.code, JobClosed.code} if ends else ends

    def add(self, step: int, future: StepFuture, program: int, slot: int, choice: Choice) -> None:
        self.steps[step] = _Step(future, program, slot, choice)

    def forget(self, step: int) -> None:
        """Drop a step that was never sent."""
        self.steps.pop(step, None)

    def hold(self) -> None:
        """Hold all unanswered steps until they are sent again: they will get no answer before. Idempotent."""
        self.held |= {number: step for number, step in self.steps.items() if isinstance(step, _Step)}
        self.steps.clear()

    def again(self, step: int, program: int, slot: int) -> None:
        """Note that a step is sent again."""
        held = self.held.pop(step, None)
        if held is not None:
            held.slot = slot
        self.steps[step] = held or _Rerun(program, slot)

    def on_message(self, message: Any, frames: Sequence[Any]) -> None:
        """Handle the session's messages for this job."""
        if type(message) is m.StepDone:
            step = self.steps.get(message.step)
            if step is None:
                return
            program = self._remote.programs[step.program]
            if type(step) is _Step:
                tensors = program.take(step.slot, frames)
                times = StepTimes(message.queue_s, message.device_s, message.total_s)
                drew = program.program.generator is not None
                step.future._finish(step.value(tensors), times, tensors[-1] if drew else None)
                program.device_s = message.device_s
            program.free.add(step.slot)
            self.newest = max(self.newest, message.step)
            del self.steps[message.step]
        elif type(message) is m.StepFailed:
            step = self.steps.get(message.step)
            if step is None or message.code in self._no_answer:
                return
            del self.steps[message.step]
            self._remote.programs[step.program].free.add(step.slot)
            if type(step) is _Step:
                step.future._fail(from_code(message.code, message.message, message.remedy))
        elif isinstance(message, m.TransferDone):
            self._remote.on_transfer(message, frames)
        elif isinstance(message, m.JobEnded):
            self._remote.ended = message
            if message.code not in self._survives:
                self.fail(self._remote.end_error())
        elif isinstance(message, (SnapshotSaved, SnapshotWanted)):
            self.news.append(message)

    def fail(self, error: GpumuxError) -> None:
        """Answer all remaining steps with an error."""
        self.hold()
        for number in list(self.held):
            self.held.pop(number).future._fail(error)
