"""Steps on their way: what is unanswered, and what the daemon's messages do to it.

Messages come in whichever thread pumps the session, and one may come twice (an interrupt between a
handler and its note that it ran), so everything here can be done again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from gpumux.client.future import StepFuture
from gpumux.client.remote import Remote
from gpumux.client.variants import Choice
from gpumux.errors import GpumuxError, from_code
from gpumux.model import StepTimes
from gpumux.wire import messages as m


class _Step:
    __slots__ = ("future", "host", "leaf", "program", "results", "slot", "spec")

    def __init__(self, future: StepFuture, program: int, slot: int, choice: Choice) -> None:
        lowered = choice.made.lowered
        self.future = future
        self.program = program
        self.slot = slot
        self.results = lowered.results
        self.spec = lowered.result_spec
        self.leaf = lowered.returns_leaf
        self.host = choice.values[sum(lowered.counts) :]

    def value(self, tensors: list[torch.Tensor]) -> Any:
        """What the step function returned, put together again."""
        leaves = []
        for kind, what in self.results:
            leaves.append(tensors[what] if kind == "tensor" else self.host[what] if kind == "host" else what)
        return leaves[0] if self.leaf else pytree.tree_unflatten(leaves, self.spec)


class Pending:
    """The unanswered steps of one job."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self.steps: dict[int, _Step] = {}  # by number

    def __len__(self) -> int:
        return len(self.steps)

    def add(self, step: int, future: StepFuture, program: int, slot: int, choice: Choice) -> None:
        self.steps[step] = _Step(future, program, slot, choice)

    def forget(self, step: int) -> None:
        """The step was never sent."""
        self.steps.pop(step, None)

    def on_message(self, message: Any, frames: Sequence[Any]) -> None:
        """The session's handler for this job."""
        if type(message) is m.StepDone:
            step = self.steps.get(message.step)
            if step is None:
                return
            program = self._remote.programs[step.program]
            tensors = program.take(step.slot, frames)
            step.future._finish(step.value(tensors), StepTimes(message.queue_s, message.device_s, message.total_s))
            program.free.add(step.slot)
            del self.steps[message.step]
        elif type(message) is m.StepFailed:
            step = self.steps.pop(message.step, None)
            if step is not None:
                self._remote.programs[step.program].free.add(step.slot)
                step.future._fail(from_code(message.code, message.message, message.remedy))
        elif isinstance(message, m.TransferDone):
            self._remote.on_transfer(message, frames)
        elif isinstance(message, m.JobEnded):
            self._remote.ended = message
            self.fail(self._remote.end_error())

    def fail(self, error: GpumuxError) -> None:
        """Answer everything that is left with an error."""
        for number in list(self.steps):
            self.steps.pop(number).future._fail(error)
