"""What happened to each job, in sentences: why a step waited, and what made room for it.

Records are tuples in one bounded ring, appended as things happen and put into words only when they are read. Each
carries the event that led to it. The ring outlives jobs, since a job that failed is the one to explain, and forgets the
oldest records first.
"""

from __future__ import annotations

from collections import deque
from typing import TypeAlias

from gpumux.scheduler.events import Event, PieceDone
from gpumux.scheduler.guard.decisions import REASONS
from gpumux.types import JobId, StepId

Detail: TypeAlias = tuple[object, ...]
Record: TypeAlias = "tuple[float, JobId, StepId | None, str, Detail, Event]"

TEMPLATES: dict[str, str] = {
    "opened": "job opened: priority {0}, weight {1}",
    "refused": "refused: {0}",
    "queued": "queued behind {0} unanswered steps, program {1}",
    "awaited": "its client waits for it, and gives a step to {0} only then: it is not held for that step's sake",
    "waits:paused": "waits: the job is paused",
    "waits:changing": "waits: the job is about to change its priority",
    "waits:program": "waits: program {0} is not ready",
    "waits:transfer": "waits: a transfer of state comes first",
    "waits:window": (
        "waits: the {0} window is full ({1} of {2} launches, {3:.3f} of {4:.3f} ms); its oldest launch is "
        "{5}, piece {6} of step {7} of job {8}"
    ),
    "waits:turn": "waits: job {0} comes first in the {1} class",
    **{f"waits:held:{reason}": f"held ({reason}): {{0}}" for reason in REASONS},
    "launched": "piece {0} of {1} launched as {2} on stream {3}, cut {4}",
    "done": "piece {0} done on the device after {1:.3f} ms",
    "finished": "finished: {0:.3f} ms queued, {1:.3f} ms on the device, {2:.3f} ms in all",
    "failed": "failed ({0}): {1}",
    "program": "program {0} ready, cut {1} of {2} pieces",
    "cut": (
        "the device is asked to cut program {0} into pieces of about {1:.3f} ms: a step of a high job could hardly bear"
        " longer ones"
    ),
    "uncut": "the device is asked to cut program {0} as it does by itself",
    "transfer": "transfer {0} started",
    "transferred": "transfer {0} ended: {1}",
    "paused": "job paused",
    "resumed": "job resumed",
    "weighs": "weight is {0:g} from now on",
    "changes": "priority is {0} from now on",
    "draining": "job takes no more work and closes when all is answered: {0}",
    "closing": "job closing: {0}",
    "forgotten": "job gone from the device",
}


class History:
    """A bounded number of records about all jobs."""

    def __init__(self, records: int) -> None:
        self._ring: deque[Record] = deque(maxlen=records)

    def add(self, record: Record) -> None:
        self._ring.append(record)

    def __len__(self) -> int:
        return len(self._ring)

    def lines(self, job: JobId, step: StepId | None = None, newest: int | None = None) -> list[str]:
        """Lines about the job, oldest first, the `newest` so many at most; with `step`, those of that step and of what
        happened to its job while it was unanswered. Times are seconds on the scheduler's clock."""
        records = [r for r in self._ring if r[1] == job]
        if step is not None:
            own = [i for i, r in enumerate(records) if r[2] == step]
            between = range(own[0], own[-1] + 1) if own else range(0)
            records = [records[i] for i in between if records[i][2] in (step, None)]
        if newest is not None:
            records = records[-newest:]
        return [self._line(r, step is None) for r in records]

    def _line(self, record: Record, name_step: bool) -> str:
        now, _, step, kind, detail, cause = record
        who = f"step {step}: " if name_step and step is not None else ""
        return f"{now:.6f} {who}{TEMPLATES[kind].format(*detail)} [{_cause(cause)}]"


def _cause(event: Event) -> str:
    """The event in a few words: its name and the ids it carries."""
    name = type(event).__name__
    if isinstance(event, PieceDone):
        return f"{name} {event.launch}"
    ids = [f"{k} {getattr(event, k)}" for k in ("launch", "step", "program", "transfer") if hasattr(event, k)]
    return " ".join([name, *ids])
