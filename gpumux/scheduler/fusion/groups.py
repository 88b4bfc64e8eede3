"""Groups of jobs whose equal Programs run as one fused Program over stacked state (HFTA, MLSys'21, section 3).

The problem: many processes train the same model, and each launch of a small one leaves most of a device idle. Jobs with
the same Program can run as one launch, if their state lies in one place while they do.

The decision, in its simplest form that is right. The members of a group are fixed from the moment when their state is
stacked until it is unstacked: a member that leaves, is to be in its own place or runs another Program ends the group,
at the next border of all members' steps, and the others may form a new one. There is at most one group of a kind at a
time. A kind is a Program, a priority and the users that allow it (`FusionRules.circle`).

1. *Charging*, then *building*: memory for the stacked state is charged before the fused Program is made and proven.
   The jobs run alone meanwhile.
2. *Gathering*: each job is held at its next border until all are there. They give up `gather_s` after the first was
   held.
3. *Running*: a fused step is launched when all members have one, and the next one while it runs, so that the device
   need not wait for the members' answers. When none runs, `wait_s` after the first of them had a step, those that have
   one run alone, each on its own part of the stacked state.
4. *Ending*: no step is launched; when none runs, the state is unstacked and the memory given back.

A group is kept while the median of its fused steps is not above the sum of its members' own medians by more than the
noise. Otherwise the Program is not fused for as many jobs for 10 times `retry_s`, and each further time for twice as
long as before: what was measured may have been other work on the machine. A group also ends when its members have
waited in vain for longer than its fused steps save, which a member that stops, or is much slower than the others,
brings about; they may form another one later, without a member that makes no steps.

`gpumux/daemon/fusion/jobs.py` gives it events and carries its commands out.

Every command is carried out in order with those before it. The sequence of Stack, RunFused, RunAlone and Unstack is
what a log has to hold: carried out again from the same state and batches it gives the same bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import inf, sqrt
from statistics import median
from typing import NamedTuple, TypeAlias

from gpumux.errors import ConfigError
from gpumux.types import JobId, Priority, StepId
from gpumux.wording import age

GroupId: TypeAlias = int

MEASURED_ALONE = 3  # steps that a job has run by itself before it joins a group: what the fused ones are judged by
COLD = 3  # first fused steps of a group, by which it is not judged: their memory is touched for the first time
AHEAD = 2  # fused steps of a group that are launched and have not ended
SLOWER_RETRIES = 10  # times `retry_s`: how long a group that was slower is not tried again
MOST_DOUBLINGS = 10  # of that time, if it is slower again

# ---- Settings


@dataclass(frozen=True, slots=True)
class FusionRules:
    """When jobs are fused. `wait_s`: seconds that a ready step waits for the other members'; `gather_s`: that it waits
    for them once, before their group begins. `settle_s`: seconds from the first two jobs of a kind to its first group,
    in which further ones may come. `retry_s`: seconds from a group's
    beginning until it may end for a larger one, and from its end to the next. `least`, `most`: members of a group.
    `samples`: fused steps that it is judged by. `agreed`: sets of user ids that allow their jobs to be fused with each
    other's; a user that is in none of them shares with no other. Raises ConfigError for values that can't be."""

    wait_s: float = 0.02
    gather_s: float = 0.1
    settle_s: float = 1.0
    retry_s: float = 10.0
    least: int = 2
    most: int = 32
    samples: int = 9
    agreed: tuple[frozenset[int], ...] = ()

    def __post_init__(self) -> None:
        for name in ("wait_s", "gather_s", "settle_s", "retry_s"):
            if not 0 <= getattr(self, name) < inf:
                raise ConfigError(f"{name} is {getattr(self, name)}", "give seconds that are not negative")
        if not 2 <= self.least <= self.most:
            raise ConfigError(
                f"groups of {self.least} to {self.most} jobs", "let the least be 2 or more, and the most no less"
            )
        if self.samples < 1:
            raise ConfigError(f"samples is {self.samples}", "give the number of fused steps to judge by, 1 or more")
        users = [user for circle in self.agreed for user in circle]
        twice = sorted({user for user in users if users.count(user) > 1})
        if twice:
            raise ConfigError(
                f"user {twice[0]} is in two sets of users that share", "write all that share with one in a single set"
            )

    def circle(self, user: int) -> frozenset[int]:
        """The users whose jobs may be fused with this one's, itself included."""
        return next((circle for circle in self.agreed if user in circle), frozenset((user,)))


# ---- Events


@dataclass(frozen=True, slots=True)
class FusibleJobOpened:
    """A job that may be fused was opened, by user `user`."""

    job: JobId
    priority: Priority
    user: int


@dataclass(frozen=True, slots=True)
class StepReady:
    """A job submitted a step. `program`: the hash of its Program, equal for equal Programs."""

    job: JobId
    step: StepId
    program: str


@dataclass(frozen=True, slots=True)
class AloneEnded:
    """A step launched by RunAlone ended. `seconds`: its time on the device."""

    job: JobId
    seconds: float


@dataclass(frozen=True, slots=True)
class FusedEnded:
    """A step launched by RunFused ended, for all members. `seconds`: its time on the device."""

    group: GroupId
    seconds: float


@dataclass(frozen=True, slots=True)
class StateWanted:
    """The job's state is needed in its own place: it is to be written, or the job is paused. It is there once the job's
    `group_id` is None, and stays there until StateReturned."""

    job: JobId
    reason: str


@dataclass(frozen=True, slots=True)
class StateReturned:
    """What StateWanted was for is done: the job may be fused again."""

    job: JobId


@dataclass(frozen=True, slots=True)
class PriorityChanged:
    """The job has another priority from now on."""

    job: JobId
    priority: Priority


@dataclass(frozen=True, slots=True)
class FusibleJobClosed:
    """The job ended, died or was cancelled. Its own launch, if it had one, is over; a fused one goes on."""

    job: JobId


@dataclass(frozen=True, slots=True)
class MemoryCharged:
    """The answer to ChargeMemory. `reason`: why there is no memory for it; empty: it is charged."""

    group: GroupId
    reason: str = ""


@dataclass(frozen=True, slots=True)
class FusedProgramBuilt:
    """The answer to BuildProgram, or already to ChargeMemory, which takes the fused Program's size. `reason`: why the
    Program can't be fused; empty: it is built and proven."""

    group: GroupId
    reason: str = ""


@dataclass(frozen=True, slots=True)
class GroupFailed:
    """The group is lost, and what its members had there. Those that are still there have their state in their own
    places, and steps under way run there: their ends are reported as ever."""

    group: GroupId
    reason: str


@dataclass(frozen=True, slots=True)
class WaitOver:
    """Nothing happened until `due()`."""


Event: TypeAlias = (
    FusibleJobOpened | StepReady | AloneEnded | FusedEnded | StateWanted | StateReturned | PriorityChanged
    | FusibleJobClosed | MemoryCharged | FusedProgramBuilt | GroupFailed | WaitOver
)  # fmt: skip

# ---- Commands


@dataclass(frozen=True, slots=True)
class ChargeMemory:
    """Charge the stacked state and the fused step of `models` jobs of these users -> MemoryCharged."""

    group: GroupId
    program: str
    models: int
    users: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class BuildProgram:
    """Make and prove the fused Program -> FusedProgramBuilt."""

    group: GroupId
    program: str
    models: int


@dataclass(frozen=True, slots=True)
class Stack:
    """Copy the state of `jobs` from their own places into the group's, in this order."""

    group: GroupId
    jobs: tuple[JobId, ...]


@dataclass(frozen=True, slots=True)
class RunFused:
    """Run one step of each member as one launch, in the order of Stack -> FusedEnded."""

    group: GroupId
    steps: tuple[tuple[JobId, StepId], ...]


@dataclass(frozen=True, slots=True)
class RunAlone:
    """Run a step by the job's own Program -> AloneEnded. `group`: where its state is stacked; None: in its own
    place."""

    job: JobId
    step: StepId
    group: GroupId | None = None


@dataclass(frozen=True, slots=True)
class Unstack:
    """Copy the job's part of the stacked state back into its own place."""

    group: GroupId
    job: JobId


@dataclass(frozen=True, slots=True)
class ReleaseMemory:
    """The group is gone: give back what ChargeMemory charged for it."""

    group: GroupId


Command: TypeAlias = ChargeMemory | BuildProgram | Stack | RunFused | RunAlone | Unstack | ReleaseMemory

# ---- The machine


class _Kind(NamedTuple):
    """Jobs of one kind may be fused."""

    program: str
    priority: Priority
    circle: frozenset[int]


class _Phase(Enum):
    CHARGING = "memory for it is being charged"
    BUILDING = "its Program is being made and proven"
    GATHERING = "its members are being gathered"
    RUNNING = "running"
    ENDING = "ending"


class _Running(Enum):
    """What runs of a job."""

    NOTHING = 0
    ALONE = 1
    FUSED = 2


@dataclass(slots=True)
class _Step:
    step: StepId
    program: str
    ready: float  # when it became the first of its job with none running


@dataclass(slots=True)
class _FusibleJob:
    job: JobId
    priority: Priority
    user: int
    pending: deque[_Step] = field(default_factory=deque)
    running: _Running = _Running.NOTHING
    wanted: bool = False  # its state, in its own place
    program: str = ""  # of the last step that was launched
    active: float = -inf  # when it last had a step that was ready or ended
    group: _Group | None = None  # where its state is stacked
    alone_s: deque[float] = field(default_factory=deque)  # seconds of the last steps of `program` by itself

    @property
    def ready(self) -> bool:
        return bool(self.pending) and self.running is _Running.NOTHING


@dataclass(slots=True)
class _Group:
    group: GroupId
    kind: _Kind
    models: int
    phase: _Phase = _Phase.CHARGING
    members: list[_FusibleJob] = field(default_factory=list)  # while gathering: those held so far
    fused_s: deque[float] = field(default_factory=deque)
    running: int = 0  # fused steps
    cold: int = COLD  # fused steps that are not counted yet
    patience: float = 0.0  # seconds that members may still wait in vain; fused steps that save some restore it
    until: float = inf  # when gathering is given up


class FusionGroups:
    """All groups. Call `handle` with each event, and with WaitOver at `due()`; carry its commands out in order."""

    def __init__(self, rules: FusionRules) -> None:
        self._rules = rules
        self._patience = rules.samples * rules.wait_s
        self._jobs: dict[JobId, _FusibleJob] = {}  # in the order in which they were opened
        self._groups: dict[_Kind, _Group] = {}
        self._next: GroupId = 1
        self._retry: dict[_Kind, float] = {}  # when a kind may be tried again
        # Of Programs and numbers of models that were slower fused: how often, and until when they are not tried again.
        self._slower: dict[tuple[str, int], tuple[int, float]] = {}
        self._refused: dict[str, str] = {}  # Programs that can't be fused, and why
        self._why: dict[_Kind, str] = {}  # why the last group of a kind ended
        self._commands: list[Command] = []
        self._now = -inf

    # ---- What is asked of it

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take an event at `now` (seconds, never less than before); returns what is to be done. Raises KeyError for a
        job or group that is not there, AssertionError for an end without its launch: both are faults of the caller."""
        self._now = now
        match event:
            case FusibleJobOpened(job, priority, user):
                assert job not in self._jobs
                self._jobs[job] = _FusibleJob(job, priority, user)
            case StepReady(job, step, program):
                self._jobs[job].pending.append(_Step(step, program, now))
                self._jobs[job].active = now
            case AloneEnded(job, seconds):
                self._alone_ended(self._jobs[job], seconds, now)
            case FusedEnded(group, seconds):
                self._fused_ended(self._found(group), seconds, now)
            case StateWanted(job, reason):
                self._jobs[job].wanted = True
                self._leave(self._jobs[job], reason)
            case StateReturned(job):
                self._jobs[job].wanted = False
            case PriorityChanged(job, priority):
                self._jobs[job].priority = priority
                self._leave(self._jobs[job], "a member has another priority")
            case FusibleJobClosed(job):
                self._close(job)
            case MemoryCharged(group, reason):
                self._charged(self._found(group), reason, now)
            case FusedProgramBuilt(group, reason):
                self._built(self._found(group), reason, now)
            case GroupFailed(group, reason):
                self._failed(group, reason, now)
        self._decide(now)
        commands, self._commands = self._commands, []
        return commands

    def due(self) -> float:
        """When a held step stops waiting; inf: none does."""
        return min((self._until(group) for group in self._groups.values()), default=inf)

    def group_id(self, job: JobId) -> GroupId | None:
        """The group that the job's state lies in, all commands so far carried out; None: in its own place."""
        group = self._jobs[job].group
        return None if group is None else group.group

    def settled(self, job: JobId) -> bool:
        """Whether no step of the job runs or waits: its state is that between two steps, wherever it lies."""
        found = self._jobs[job]
        return not found.pending and found.running is _Running.NOTHING

    def group_of(self, job: JobId) -> tuple[JobId, ...]:
        """The jobs that run as one with this one, itself included; empty: it runs by itself."""
        group = self._jobs[job].group
        return () if group is None else tuple(member.job for member in group.members)

    def explain(self, job: JobId) -> str:
        """One sentence: whether the job runs fused, and if it does not, why."""
        found = self._jobs[job]
        if found.group is not None:
            others = len(found.group.members) - 1
            return f"runs fused with {others} other job{'s' if others != 1 else ''}: results are equivalent, not equal"
        kind = self._kind(found)
        if not kind.program:
            return "runs by itself: it has made no step"
        if kind.program in self._refused:
            return f"runs by itself: its Program can't be fused: {self._refused[kind.program]}"
        if kind in self._groups:
            return f"runs by itself: a group of its kind is there, {self._groups[kind].phase.value}"
        alike = self._alike(kind)
        if len(alike) < self._rules.least:
            return "runs by itself: no other job that may be fused with it has the same Program and steps to run"
        if self._known_slower(kind):
            slower = f"{len(alike)} of its kind were slower fused than one after another"
            return f"runs by itself: {slower}, and are tried again in {age(self._slower_until(kind) - self._now)}"
        return f"runs by itself: {self._why.get(kind, 'its steps are being measured')}"

    # ---- Events

    def _alone_ended(self, job: _FusibleJob, seconds: float, now: float) -> None:
        assert job.running is _Running.ALONE
        job.alone_s.append(seconds)
        self._over(job, now)

    def _fused_ended(self, group: _Group, seconds: float, now: float) -> None:
        assert group.running
        group.running -= 1
        for member in group.members:
            if group.running:
                member.active = now
            else:
                self._over(member, now)
        if group.cold:
            group.cold -= 1
            return
        group.fused_s.append(seconds)
        saved = sum(median(member.alone_s) for member in group.members if member.alone_s) - seconds
        group.patience = min(self._patience, group.patience + max(0.0, saved))
        if group.phase is _Phase.RUNNING and len(group.fused_s) == self._rules.samples and self._is_slower(group):
            key = group.kind.program, group.models
            times, _ = self._slower.get(key, (0, -inf))
            self._slower[key] = times + 1, now + SLOWER_RETRIES * self._rules.retry_s * 2 ** min(times, MOST_DOUBLINGS)
            self._end(group, "it was slower fused")

    def _over(self, job: _FusibleJob, now: float) -> None:
        job.running, job.active = _Running.NOTHING, now
        if job.pending:
            job.pending[0].ready = now

    def _is_slower(self, group: _Group) -> bool:
        """Whether fused steps take longer than their members' own, by more than the noise of both."""
        alone = [list(member.alone_s) for member in group.members]
        noise = _spread(group.fused_s) + sqrt(sum(_spread(times) ** 2 for times in alone))
        return median(group.fused_s) > sum(map(median, alone)) + noise

    def _leave(self, job: _FusibleJob, reason: str) -> None:
        """End the job's group, or have it gathered no longer."""
        if job.group is not None:
            self._end(job.group, reason)
        for group in self._groups.values():
            if group.phase is _Phase.GATHERING and job in group.members:
                group.members.remove(job)

    def _close(self, name: JobId) -> None:
        job = self._jobs.pop(name)
        self._leave(job, "a member left")
        if job.group is not None:
            job.group.members.remove(job)

    def _charged(self, group: _Group, reason: str, now: float) -> None:
        assert group.phase is _Phase.CHARGING
        if reason:
            self._forget(group, f"there is no memory for a group: {reason}", now)
            return
        group.phase = _Phase.BUILDING
        self._commands.append(BuildProgram(group.group, group.kind.program, group.models))

    def _built(self, group: _Group, reason: str, now: float) -> None:
        if reason:
            self._refused[group.kind.program] = reason
            if group.phase is _Phase.BUILDING:
                self._commands.append(ReleaseMemory(group.group))
            self._forget(group, reason, now)
            return
        assert group.phase is _Phase.BUILDING
        group.phase = _Phase.GATHERING
        group.until = now + self._rules.settle_s  # its jobs may be gone: memory is not kept for none

    def _failed(self, number: GroupId, reason: str, now: float) -> None:
        for group in self._groups.values():
            if group.group != number:
                continue
            if group.phase is _Phase.GATHERING:
                self._commands.append(ReleaseMemory(number))
                self._forget(group, f"its group failed: {reason}", now)
            else:
                self._end(group, f"it failed: {reason}")
            return

    # ---- Decisions

    def _decide(self, now: float) -> None:
        """Launch all that may be launched, and begin and end groups."""
        for job in list(self._jobs.values()):
            if job.ready and job.group is None:
                self._decide_ungrouped(job, now)
        for group in list(self._groups.values()):
            if group.phase is _Phase.GATHERING:
                self._gather(group, now)
            if group.phase is _Phase.RUNNING:
                self._run(group, now)
            if group.phase is _Phase.ENDING:
                self._finish(group, now)

    def _decide_ungrouped(self, job: _FusibleJob, now: float) -> None:
        kind = self._kind(job)
        self._prepare(kind, now)
        group = self._groups.get(kind)
        if group is not None and group.phase is _Phase.GATHERING and self._may_join(job, kind):
            if job in group.members:
                return
            if len(group.members) < group.models:
                if not group.members:
                    group.until = now + self._rules.gather_s
                group.members.append(job)
                return
        self._run_alone(job)

    def _prepare(self, kind: _Kind, now: float) -> None:
        """Begin with a group of a kind, if there are jobs for one."""
        if kind in self._groups or kind.program in self._refused or now < self._retry.get(kind, -inf):
            return
        size = self._size(kind)
        if size < self._rules.least or self._known_slower(kind):
            return
        if self._retry.setdefault(kind, now + self._rules.settle_s) > now:
            return
        group = self._groups[kind] = _Group(self._next, kind, size)
        group.fused_s = deque(maxlen=self._rules.samples)
        group.patience = self._patience
        self._next += 1
        self._commands.append(ChargeMemory(group.group, kind.program, size, kind.circle))

    def _gather(self, group: _Group, now: float) -> None:
        if len(group.members) == group.models:
            group.phase, group.until = _Phase.RUNNING, inf
            self._retry[group.kind] = now + self._rules.retry_s
            for member in group.members:
                member.group = group
            self._commands.append(Stack(group.group, tuple(member.job for member in group.members)))
            return
        if now >= group.until:
            held = group.members
            self._commands.append(ReleaseMemory(group.group))
            self._forget(group, "its members had no steps at the same time", now)
            for job in held:
                self._run_alone(job)

    def _run(self, group: _Group, now: float) -> None:
        ready = [member for member in group.members if member.pending and member.running is not _Running.ALONE]
        if any(member.pending[0].program != group.kind.program for member in ready):
            self._end(group, "a member runs another Program")
            return
        newcomers = self._size(group.kind) > group.models
        if newcomers and now >= self._retry[group.kind] and not self._known_slower(group.kind):
            self._end(group, "more jobs of its kind came")
            return
        if len(ready) == len(group.members) and group.running < AHEAD:
            steps = [(member.job, member.pending.popleft().step) for member in ready]
            for member in ready:
                member.running = _Running.FUSED
            group.running += 1
            self._commands.append(RunFused(group.group, tuple(steps)))
            self._run(group, now)
        elif ready and not group.running and now >= self._until(group):
            for member in ready:
                self._run_alone(member)
            group.patience -= self._rules.wait_s
            if group.patience < 0:
                self._end(group, "its members waited for each other for longer than fusing saves")

    def _finish(self, group: _Group, now: float) -> None:
        if group.running or any(member.running is not _Running.NOTHING for member in group.members):
            return
        members = group.members
        self._commands += [Unstack(group.group, member.job) for member in members]
        self._commands.append(ReleaseMemory(group.group))
        self._forget(group, self._why[group.kind], now)
        for member in members:
            member.group = None
        for member in members:
            if member.ready:
                self._run_alone(member)

    def _run_alone(self, job: _FusibleJob) -> None:
        step = job.pending.popleft()
        if step.program != job.program:
            job.alone_s = deque(maxlen=self._rules.samples)  # seconds of another Program say nothing of this one
        job.program, job.running = step.program, _Running.ALONE
        self._commands.append(RunAlone(job.job, step.step, None if job.group is None else job.group.group))

    def _end(self, group: _Group, why: str) -> None:
        if group.phase is _Phase.RUNNING:
            group.phase = _Phase.ENDING
            self._why[group.kind] = f"its group ended: {why}"

    def _forget(self, group: _Group, why: str, now: float) -> None:
        del self._groups[group.kind]
        self._why[group.kind] = why
        self._retry[group.kind] = now + self._rules.retry_s

    # ---- What they rest on

    def _found(self, number: GroupId) -> _Group:
        for group in self._groups.values():
            if group.group == number:
                return group
        raise KeyError(number)

    def _kind(self, job: _FusibleJob) -> _Kind:
        program = job.pending[0].program if job.pending else job.program
        return _Kind(program, job.priority, self._rules.circle(job.user))

    def _may_join(self, job: _FusibleJob, kind: _Kind) -> bool:
        """Whether its state is wanted nowhere else, and its own time is known."""
        return (
            not job.wanted
            and job.program == kind.program
            and len(job.alone_s) >= min(MEASURED_ALONE, self._rules.samples)
        )

    def _alike(self, kind: _Kind) -> list[_FusibleJob]:
        """The jobs of a kind that have steps to run, or had some lately, and that may join a group."""
        since = self._now - self._rules.settle_s
        active = [
            job
            for job in self._jobs.values()
            if job.pending or job.running is not _Running.NOTHING or job.active >= since
        ]
        return [job for job in active if self._kind(job) == kind and self._may_join(job, kind)]

    def _size(self, kind: _Kind) -> int:
        return min(len(self._alike(kind)), self._rules.most)

    def _known_slower(self, kind: _Kind) -> bool:
        return self._now < self._slower_until(kind)

    def _slower_until(self, kind: _Kind) -> float:
        """When a kind that was slower fused may be tried again; -inf: it was not."""
        return self._slower.get((kind.program, self._size(kind)), (0, -inf))[1]

    def _until(self, group: _Group) -> float:
        if group.phase is _Phase.GATHERING:
            return group.until
        if group.phase is not _Phase.RUNNING:
            return inf
        since = _first_ready(group.members)
        return inf if since is None else since + self._rules.wait_s


def _first_ready(jobs: Iterable[_FusibleJob]) -> float | None:
    return min((job.pending[0].ready for job in jobs if job.ready), default=None)


def _spread(times: Sequence[float]) -> float:
    """The median distance from the median."""
    middle = median(times)
    return median(abs(t - middle) for t in times)
