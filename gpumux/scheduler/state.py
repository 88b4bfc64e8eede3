"""Everything the scheduler knows.

Handlers (`scheduler.py`) are functions over a SchedulerState. They append to `commands` what is to be done, and to
`history` what happened; both belong to the event that is being handled.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from itertools import count
from typing import TypeAlias

from gpumux.scheduler.admission import AdmissionLedger
from gpumux.scheduler.config import SchedulerConfig
from gpumux.scheduler.events import (
    Command,
    Event,
    Tick,
)
from gpumux.scheduler.guard.guard import SlowdownGuard
from gpumux.scheduler.jobs import OpenSession, ScheduledJob
from gpumux.scheduler.policy import Policy, policy_named
from gpumux.scheduler.windows import Windows
from gpumux.types import DeviceInfo, JobId, SessionId, StepId

# What happened to a job: when, the job, its step, what (one of explain.TEMPLATES) with its details, and the event that
# led to it. Appended as things happen, and put into words only when they are read (explain.story). Records outlive
# jobs, since a job that failed is the one to explain.
Record: TypeAlias = "tuple[float, JobId, StepId | None, str, tuple[object, ...], Event]"
Hidden = Callable[[JobId], str | None]  # what to call a job whose name the reader may not know; None: it may


def nothing_hidden(job: JobId) -> str | None:
    """The reader may know every name."""
    return None  # explicit, since mypyc takes the end of a function with a result for unreachable


class SchedulerState:
    """Raises ConfigError when the configuration names no policy."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.policy_class = policy_named(config.policy)
        self.policy: Policy | None = None  # from DeviceOpened on
        self.guard: SlowdownGuard | None = None  # the policy's, if it has one
        self.info: DeviceInfo | None = None
        self.leaving: str | None = None  # why, once the daemon is about to leave
        self.sessions: dict[SessionId, OpenSession] = {}
        self.jobs: dict[JobId, ScheduledJob] = {}
        self.windows = Windows(self.policy_class.order)
        self.ledger = AdmissionLedger(config)
        self.history: deque[Record] = deque(maxlen=config.story_records)  # the oldest records are forgotten first
        self.departed: dict[JobId, str] = {}  # names of the newest jobs that are gone, since the history names them
        self.events = 0
        self.ignored: Counter[str] = Counter()  # by event: it was late, or came twice
        self.refusals: Counter[str] = Counter()  # by fault code
        self.arrivals = count()
        self.launch_ids = count(1)
        self.hidden: Hidden = nothing_hidden  # while something is put into words
        self.wake_at = 0.0  # the newest time that a Tick was asked for and that has not come
        # Of the event that is being handled:
        self.now = 0.0
        self.cause: Event = Tick()
        self.at: JobId | None = None  # the job whose launch is being handled, or made
        self.commands: list[Command] = []
        self.changed_jobs: list[ScheduledJob] = []  # jobs that may wait for another reason now
