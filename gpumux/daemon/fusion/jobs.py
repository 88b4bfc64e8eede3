"""Runs the steps of jobs that may be fused as `gpumux/scheduler/fusion/groups.py` decides.

It stands between what comes in and the scheduler, and sees the events and commands of jobs that may be fused alone.
To the scheduler a group is one more low job of its members' user, in a session of its own: its memory is charged, its
steps are paced and guarded as any job's are. To the device it is a job as well (`FusesJobs` in gpumux/device/base.py).
No client knows of it, but each is told which of its steps ran in a group, so that a recovery can run them so again.

    a member's step     is held until it is to run: in the member's own place it goes on to the scheduler as it came, in
                        a group it becomes a step of the group's, alone or with those of the other members
    a member's state    lies in the group from Stack to Unstack. Both are transfers, which the scheduler keeps in order
                        with the steps of the group and of the member, through a segment for each member that is made
                        before the group is
    a member is read    (by its client, or for a snapshot): once what was submitted before has run, the group copies the
                        member's part of the state to the member's own place, as of the border between two of its steps,
                        and there it is read. The group goes on meanwhile
    a member's state is written, or it closes: what was submitted before it runs first, then the group ends, and then
                        the write or the end goes on to the scheduler
    a member dies       the group ends when the step under way has ended; nothing is lost for the others
    the group dies      before any of its steps was answered, its members go on from their own state, which is still
                        there; later, they end with its fault, and their clients recover them as they do otherwise
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from secrets import token_hex
from typing import Any

from gpumux.daemon.context import DaemonContext, log
from gpumux.daemon.records import JobRecord, ProgramRecord, TransferRecord, aligned_total
from gpumux.daemon.requests import move
from gpumux.daemon.segments import SharedSegment
from gpumux.device import base as dev
from gpumux.device.base import FusesJobs, Launch, SegmentHandle
from gpumux.errors import GpumuxError, JobFailed, NotFusible
from gpumux.program.ir import ALIGN
from gpumux.scheduler import events as ev
from gpumux.scheduler.events import Command, Event
from gpumux.scheduler.fusion import groups as fg
from gpumux.types import (
    Fault,
    Footprint,
    GroupPlace,
    JobDied,
    JobId,
    JobSpec,
    Peer,
    Priority,
    ProgramId,
    SessionId,
    StepId,
    StepTimes,
    TransferEnded,
    TransferId,
)

FUSED = ProgramId(1)  # of a group; its members' own Programs follow
# Transfers of a group, as the scheduler knows them; the device's are one a member. Copies of one member's state follow.
_IN, _OUT = TransferId(1), TransferId(2)
KEPT_BYTES = 64 << 20  # of fused Programs that were proven, for groups that come again
_MEMBER = 1 << 40  # and below its negative: numbers of transfers of members, which neither clients nor snapshots use
Carry = Callable[[Command], None]


@dataclass(frozen=True, slots=True)
class _Program:
    """A Program of jobs that may be fused. `buffers`: bytes of each state slot."""

    content_hash: str
    encoded: bytes
    transient: int
    operators: tuple[str, ...]
    buffers: tuple[int, ...]


@dataclass(slots=True, eq=False)
class _Member:
    """A job that may be fused. `keys`: of its programs, equal ones where they may be fused. `held`: transfers, or its
    end, that wait for the steps before them, and events after those. `transfer`: the one that is under way. `wants`:
    what its state is kept in its own place for."""

    record: JobRecord
    keys: dict[ProgramId, str] = field(default_factory=dict)
    steps: dict[StepId, tuple[ev.StepSubmitted, float]] = field(default_factory=dict)  # with the time they came
    held: deque[Event] = field(default_factory=deque)
    transfer: TransferId | None = None
    wants: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _GroupStep:
    """A step of a group's: of all members, or of one."""

    program: ProgramId
    members: tuple[tuple[JobId, StepId], ...]
    slot: int
    scalars: tuple[float | int, ...]
    submitted: float


@dataclass(slots=True, eq=False)
class _Group:
    """A group, from ChargeMemory until its job is forgotten. `charging`, `building`: FusionGroups waits for the answer.
    `segments`: of each member's state, by place; `data`: of the fused Program. `lost`: its state never left its
    members' own places, or lies there again, and why."""

    number: fg.GroupId
    job: JobId
    session: SessionId
    peer: Peer
    known: _Program
    key: str
    models: int
    charging: bool = True
    building: bool = False
    opened: bool = False  # the scheduler was asked to open its job
    closing: bool = False  # the scheduler was asked to close it, or there is nothing to close
    gone: bool = False  # nothing of it is left on the device
    released: bool = False  # FusionGroups has forgotten it
    made: dev.FusedProgramMade | None = None
    proven: bool = False  # it was, for an earlier group
    offer: ev.ProgramOffered | None = None
    data: SharedSegment | None = None
    segments: list[SharedSegment] = field(default_factory=list)
    missing: int = 0  # segments in the making
    members: tuple[JobId, ...] = ()
    loaded: set[ProgramId] = field(default_factory=set)
    coming: set[JobId] = field(default_factory=set)  # members whose state is not in their segments yet
    stacking: bool = False  # the scheduler has begun with the transfer into the group
    filled: bool = False  # all state is in the group
    moving: set[int] = field(default_factory=set)  # places whose transfers the device carries out
    order: list[int] = field(default_factory=list)  # places, as the device numbers their parts of the state
    ending: bool = False  # its state is being brought back
    leaving: dict[int, TransferRecord] = field(default_factory=dict)  # by place, until its state is in its segment
    # By place, while its state is copied to the member's own place: the transfer there, through the place's segment.
    copies: dict[int, TransferRecord] = field(default_factory=dict)
    copying: int | None = None  # the place whose state the device copies to its segment
    transfers: dict[tuple[JobId, TransferId], TransferRecord] = field(default_factory=dict)  # of its members
    steps: dict[StepId, _GroupStep] = field(default_factory=dict)
    last_step: int = 0
    answered: int = 0
    lost: str = ""
    at_home: dict[StepId, set[JobId]] = field(default_factory=dict)  # of fused steps that run in their members' places
    home_s: dict[StepId, float] = field(default_factory=dict)

    @property
    def kept(self) -> tuple[int, str, int]:
        """What its fused Program is kept by."""
        return self.peer.uid, self.key, self.models

    def close_segments(self) -> None:
        """Idempotent."""
        for segment in [*self.segments, *([self.data] if self.data is not None else [])]:
            segment.close()


class JobFusion:
    """All of it in one daemon. The loop passes it every event and command while it is `active`, and sends the
    scheduler what is in `released`, in order. `rules`: None if no jobs run as one; `carry_out` carries out a command as
    usual. `failed` is called with the job, or the job of the group, about which a decision raised: that is a bug."""

    def __init__(
        self, context: DaemonContext, rules: fg.FusionRules | None, *, carry_out: Carry, clock: Callable[[], float],
        failed: Callable[[JobId | None, Exception], None],
    ) -> None:  # fmt: skip
        self._context = context
        self._failed = failed
        self._clock = clock
        self._carry = carry_out
        self._device = context.device
        self._fuses = context.device if rules is not None and isinstance(context.device, FusesJobs) else None
        self._never = (
            "fuse_most is 1 in this daemon's configuration" if rules is None
            else "" if self._fuses is not None
            else "this daemon's device does not fuse jobs"
        )  # fmt: skip
        self._groups = fg.FusionGroups(rules or fg.FusionRules())
        self._inbox: deque[fg.Event] = deque()
        self._deciding = False
        self._asked: set[tuple[SessionId, JobId]] = set()
        self._members: dict[JobId, _Member] = {}
        self._programs: dict[str, _Program] = {}
        self._by_number: dict[fg.GroupId, _Group] = {}
        self._by_job: dict[JobId, _Group] = {}
        # Fused Programs that were proven, newest last: by user, key and number of members. A process made them of that
        # user's Program, which may have taken it over, so that no other user is given them.
        self._proven: dict[tuple[int, str, int], dev.FusedProgramMade] = {}
        self._transfers = _MEMBER
        self._needless: set[tuple[JobId, TransferId]] = set()  # members' transfers that are over when they begin
        self._now = -inf  # the newest time that FusionGroups was given
        self._over = False  # the daemon is leaving: all jobs end
        self.released: deque[Event] = deque()
        # Whether there is, or was a moment ago, a job that may be fused, or a group. The loop reads it for each event.
        self.active = False

    @property
    def due(self) -> float:
        """When `tick` is to be called."""
        return self._groups.due() if self._members else inf

    def tick(self) -> None:
        self._decide(fg.WaitOver())

    def explain(self, job: JobId) -> str:
        """One sentence: whether the job runs fused, and if not, why; "" if it may not."""
        record = self._context.records.jobs.get(job)
        if record is None or not record.spec.fusible:
            return ""
        if self._never:
            return f"runs by itself: {self._never}"
        return self._groups.explain(job) if job in self._members else "runs by itself: it ends"

    def report(self, job: JobId) -> dict[str, Any] | None:
        """The entry `fusion` of a job in GetStatus (gpumux/daemon/report.py); None if the job may not be fused."""
        why = self.explain(job)
        if not why:
            return None
        jobs = len(self._groups.group_of(job)) if job in self._members else 0
        steps = self._context.records.jobs[job].group_steps
        return {"possible": not self._never, "jobs": max(1, jobs), "steps": steps, "why": why}

    def close(self) -> None:
        """Close the shared memory of groups that are left."""
        for group in self._by_number.values():
            group.close_segments()

    # ---- Events

    def take(self, event: Event) -> None:
        """Take an event that is for the scheduler. It is in `released` when the scheduler may have it. Called while
        `active`, and for requests of jobs that may be fused."""
        match event:
            case ev.JobRequested(session, job, spec) if spec.fusible and not self._never:
                self._asked.add((session, job))
            case ev.SessionClosed(session):
                for job in [job for job, member in self._members.items() if member.record.session.id == session]:
                    self._forget(job)
                self._asked = {each for each in self._asked if each[0] != session}
            case ev.DrainRequested():
                self._over = True
                for job in list(self._members):
                    self._forget(job)
            case TransferEnded(job) if (group := self._by_job.get(job)) is not None:
                self._moved(group, event)
                return
            case _:
                asked_of = getattr(event, "job", None)
                member = self._members.get(asked_of) if asked_of is not None else None
                if member is not None and not self._passes(member, event):
                    return
        self.released.append(event)
        self.active = bool(self._members or self._by_job or self._asked)

    def _passes(self, member: _Member, event: Event) -> bool:
        """Take a member's event. Returns whether the scheduler may have it now."""
        job = member.record.id
        match event:
            case ev.StepSubmitted():
                if member.record.replays:
                    self._want(member, _REPLAYED)
                if member.held:
                    member.held.append(event)
                else:
                    self._submit(member, event)
                return False
            case ev.TransferRequested() | ev.CloseRequested(drain=True):
                self._hold(member, event)
                return False
            case JobDied(fault=fault):
                self._fail_steps(member, fault)
                self._forget(job)
            case ev.CloseRequested():
                self._forget(job)
            case ev.PauseRequested():
                self._want(member, "it is paused")
            case ev.ResumeRequested():
                self._unwant(member, "it is paused")
            case ev.ChangeRequested(priority=Priority.HIGH):
                self._decide(fg.PriorityChanged(job, Priority.HIGH))
                self._want(member, _HIGH)
            case ev.ChangeRequested(priority=Priority.LOW):
                self._decide(fg.PriorityChanged(job, Priority.LOW))
                self._unwant(member, _HIGH)
            case ev.ProgramOffered():
                self._offered(member, event)
        return True

    def _offered(self, member: _Member, event: ev.ProgramOffered) -> None:
        """Keep a Program of a member. It may be fused if its buffers hold its state slots and nothing else."""
        record = member.record.programs[event.program]
        known = [*member.record.buffers, *record.new_buffers]
        buffers = tuple(known[index] for index in record.binding)
        fits = bool(event.content_hash) and len(set(record.binding)) == len(buffers)
        key = f"{event.content_hash}/{','.join(map(str, buffers))}" if fits else f"{member.record.id}/{event.program}"
        member.keys[event.program] = key
        if fits and key not in self._programs:
            self._programs[key] = _Program(
                event.content_hash, record.encoded, event.footprint.transient_bytes, event.operators, buffers
            )

    def _submit(self, member: _Member, event: ev.StepSubmitted) -> None:
        member.steps[event.step] = (event, self._clock())
        self._decide(fg.StepReady(member.record.id, event.step, member.keys.get(event.program, "")))

    def _hold(self, member: _Member, event: Event) -> None:
        member.held.append(event)
        if not _is_read(event):
            self._want(member, _WRITTEN)
        self._advance(member)

    def _advance(self, member: _Member) -> None:
        """Let held events go on as far as they may. The scheduler keeps steps in order with a transfer that has gone
        on; a further transfer waits for its end."""
        job = member.record.id
        while member.held and job in self._members:
            event = member.held[0]
            if isinstance(event, ev.StepSubmitted):
                member.held.popleft()
                self._submit(member, event)
                continue
            if member.transfer is not None or not self._groups.settled(job):
                return
            number = self._groups.group_id(job)
            group = None if number is None or self._by_number[number].lost else self._by_number[number]
            if group is not None and not _is_read(event):
                return
            member.held.popleft()
            if group is not None:
                self._copy_home(group, job)
            if isinstance(event, ev.TransferRequested):
                member.transfer = event.transfer
            else:
                self._forget(job)
            self.released.append(event)
        if not member.held and member.transfer is None:
            self._unwant(member, _WRITTEN)

    def _want(self, member: _Member, reason: str) -> None:
        first = not member.wants
        member.wants.add(reason)
        if first:
            self._decide(fg.StateWanted(member.record.id, reason))

    def _unwant(self, member: _Member, reason: str) -> None:
        if reason in member.wants and member.record.id in self._members:
            member.wants.discard(reason)
            if not member.wants:
                self._decide(fg.StateReturned(member.record.id))

    def _forget(self, job: JobId) -> None:
        """The job ends. What it has in a group is dropped when the group ends."""
        member = self._members.pop(job, None)
        if member is None:
            return
        if not self._over:
            self._decide(fg.FusibleJobClosed(job))
        self.released.extend(event for event in member.held if not isinstance(event, ev.StepSubmitted))
        member.held.clear()
        for group in list(self._by_number.values()):
            for step in [step for step, jobs in group.at_home.items() if job in jobs]:
                self._ran_at_home(group, step, job, 0.0)
            if job in group.coming:
                group.coming.discard(job)
                self._lose(group, "a member left while its state was moved")
        used = {key for each in self._members.values() for key in each.keys.values()}
        self._programs = {key: known for key, known in self._programs.items() if key in used}
        self._proven = {name: made for name, made in self._proven.items() if name[1] in used}

    # ---- Decisions

    def _decide(self, event: fg.Event) -> None:
        """Give FusionGroups an event, and carry out its commands."""
        self._inbox.append(event)
        if self._deciding or self._over:
            return
        self._deciding = True
        try:
            while self._inbox:
                self._now = max(self._now, self._clock())
                event = self._inbox.popleft()
                for command in self._try(self._subject(event), self._groups.handle, event, self._now) or ():
                    self._try(self._subject(command), self._do, command)
        finally:
            self._deciding = False
        for member in [each for each in self._members.values() if each.held]:
            self._try(member.record.id, self._advance, member)

    def _try(self, job: JobId | None, do: Callable[..., Any], *arguments: Any) -> Any:
        """What `do` returns. A bug in it ends this job, and no other that a decision is about."""
        try:
            return do(*arguments)
        except Exception as error:  # noqa: BLE001
            return self._failed(job, error)

    def _subject(self, of: fg.Event | fg.Command) -> JobId | None:
        """The job that an event or a command is about: a member, else the group's."""
        group = self._by_number.get(getattr(of, "group", None) or fg.GroupId(-1))
        found: JobId | None = getattr(of, "job", None) or (group.job if group is not None else None)
        return found

    def _do(self, command: fg.Command) -> None:
        match command:
            case fg.ChargeMemory(group, program, models):
                self._make(group, program, models, command.users)
            case fg.BuildProgram(group):
                found = self._by_number[group]
                found.building = True
                assert self._fuses is not None
                if found.proven:
                    self._load(found)
                else:
                    self._fuses.prove_fused(group)
            case fg.Stack(group, jobs):
                self._stack(self._by_number[group], jobs)
            case fg.RunFused(group, steps):
                self._run_fused(self._by_number[group], steps)
            case fg.RunAlone(job, step, None):
                self.released.append(self._members[job].steps[step][0])
            case fg.RunAlone(job, step, group) if group is not None:
                self._run_alone(self._by_number[group], job, step)
            case fg.Unstack(group, job):
                self._unstack(self._by_number[group], job)
            case fg.ReleaseMemory(group):
                found = self._by_number[group]
                found.released = True
                self._close(found, drain=True)
                self._tidy(found)

    # ---- Making a group

    def _make(self, number: fg.GroupId, key: str, models: int, users: frozenset[int]) -> None:
        assert self._fuses is not None
        peer = next(
            m.record.session.peer
            for m in self._members.values()
            if key in m.keys.values() and m.record.session.peer.uid in users
        )
        job = JobId(token_hex(16))
        known = self._programs[key]
        group = self._by_number[number] = _Group(number, job, SessionId(f"group-{job}"), peer, known, key, models)
        made = self._proven.get(group.kept)
        if made is None:
            self._fuses.make_fused(number, known.encoded, models)
        else:
            group.proven = True
            self.made(replace(made, request=number, proof_bytes=0))

    def made(self, event: dev.FusedProgramMade) -> None:
        """The fused Program of a group is there: open its job."""
        group = self._by_number.get(event.request)
        if group is None or group.closing:
            return
        group.made = event
        buffers = tuple(group.models * nbytes for nbytes in group.known.buffers)
        if buffers not in (event.state, event.state[:-1]):  # the last may be for the members' random generators
            self._refuse(group, "its members' buffers are not laid out as its state is")
            return
        self._by_job[group.job] = group
        self.active = group.opened = True
        self.released.append(ev.SessionOpened(group.session, group.peer))
        self.released.append(ev.JobRequested(group.session, group.job, _spec(group)))

    def proven(self, event: dev.FusedProgramProven) -> None:
        """The fused Program of a group was proven: load it."""
        group = self._by_number.get(event.request)
        if group is None or group.closing or group.made is None:
            return
        self._proven[group.kept] = group.made
        while sum(len(made.encoded) for made in self._proven.values()) > KEPT_BYTES:
            del self._proven[next(iter(self._proven))]
        self._load(group)

    def _load(self, group: _Group) -> None:
        """Load a group's fused Program."""
        if group.data is None or group.made is None or self._fuses is None:
            return
        data = SegmentHandle(group.data.fd, group.data.nbytes)
        self._fuses.load_fused(group.job, FUSED, group.made.encoded, group.made.fusion, group.made.state, data)

    def refused(self, event: dev.FusedProgramRefused) -> None:
        """The Program can't be fused."""
        group = self._by_number.get(event.request)
        if group is not None and not group.closing:
            self._refuse(group, event.fault.message, ever=event.fault.code != NotFusible.code)

    def checked(self, event: dev.ProgramChecked) -> None:
        """A Program of a group was checked: offer the fused one to the scheduler, load a member's own."""
        group = self._by_job.get(event.job)
        if group is None or group.lost:
            return
        if event.program != FUSED:
            self._load_member(group, event.program)  # even if the group is to end: its state is under way
            return
        if group.closing:
            return
        assert group.made is not None
        each = max(aligned_total(group.known.buffers), ALIGN)
        shared = event.footprint.slot_bytes + group.models * each
        # The proof ends before the first step begins.
        transient = max(event.footprint.transient_bytes, group.made.proof_bytes)
        footprint = Footprint(event.footprint.state_bytes, transient, shared)
        group.offer = ev.ProgramOffered(group.job, FUSED, footprint, event.content_hash, event.operators)
        group.missing = 1 + group.models
        for place, nbytes in enumerate([event.footprint.slot_bytes, *[each] * group.models]):
            try:
                self._context.segments.create(
                    group.peer.uid, group.session, nbytes, f"group-{group.number}-{place}",
                    partial(self._segment, group, place),
                )  # fmt: skip
            except GpumuxError as error:
                self._refuse(group, error.message)
                return

    def _segment(self, group: _Group, place: int, made: SharedSegment | GpumuxError) -> None:
        if isinstance(made, GpumuxError) or group.closing:
            if isinstance(made, GpumuxError):
                self._refuse(group, made.message)
            else:
                made.close()
            return
        if place == 0:
            group.data = made
        else:
            group.segments.append(made)
        group.missing -= 1
        if group.missing == 0 and group.offer is not None:
            self.released.append(group.offer)

    def not_loaded(self, event: dev.ProgramRefused) -> None:
        """The device refused a Program of a group."""
        group = self._by_job.get(event.job)
        if group is None:
            return
        if event.program == FUSED:
            if not group.closing:
                self._refuse(group, event.fault.message)
        else:
            self._lose(group, event.fault.message)

    def _refuse(self, group: _Group, why: str, *, ever: bool = True) -> None:
        """There will be no such group; `ever`: but perhaps at another time."""
        if not (group.charging or group.building):
            self._lose(group, why)
            return
        log.info("group %d of %d jobs is given up: %s", group.number, group.models, why)
        if group.charging:
            group.charging, group.released = False, True
            self._close(group, drain=False)
            self._tidy(group)
            self._decide((fg.MemoryCharged if ever else fg.FusedProgramBuilt)(group.number, why))
        else:
            group.building = False
            self._decide(fg.FusedProgramBuilt(group.number, why))

    # ---- State in and out

    def _stack(self, group: _Group, jobs: tuple[JobId, ...]) -> None:
        group.members = jobs
        known = group.known
        weight = sum(self._members[job].record.spec.weight for job in jobs)
        self.released.append(ev.ChangeRequested(group.job, None, min(weight, 1e3)))
        for place, job in enumerate(jobs):
            footprint = Footprint(0, known.transient, 0)
            self.released.append(
                ev.ProgramOffered(group.job, _own(place), footprint, known.content_hash, known.operators)
            )
            group.coming.add(job)
            record = self._members[job].record

            def arrived(fault: Fault | None, job: JobId = job) -> None:
                self._arrived(group, job, fault)

            self._transfer(record, group, place, push=False, then=arrived).segment = group.segments[place]
        self.released.append(ev.TransferRequested(group.job, _IN, True))
        log.info("group %d: %d jobs run as one from now on", group.number, group.models)

    def _transfer(
        self, record: JobRecord, group: _Group, place: int, *, push: bool, then: Callable[[Fault | None], None]
    ) -> TransferRecord:
        """Begin a transfer of a member's, in order with its steps."""
        self._transfers += 1
        number = TransferId(-self._transfers)
        binding = self._program_of(self._members[record.id], group).binding

        def ended(fault: Fault | None) -> None:
            del group.transfers[record.id, number]
            self._needless.discard((record.id, number))
            then(fault)
            self._tidy(group)

        made = TransferRecord(0, tuple(binding), push, group.segments[place].nbytes, asked=True, then=ended)
        record.transfers[number] = group.transfers[record.id, number] = made
        self.released.append(ev.TransferRequested(record.id, number, push))
        return made

    def _arrived(self, group: _Group, job: JobId, fault: Fault | None) -> None:
        """A member's state is in its segment, or could not be read."""
        if job not in group.coming:
            return
        group.coming.discard(job)
        if fault is not None:
            self._lose(group, fault.message)
        else:
            self._fill(group)

    def _fill(self, group: _Group) -> None:
        """Copy the members' state into the group, once all of it is there, and so is the memory it goes to."""
        if group.lost or not group.stacking or group.coming or group.moving or len(group.loaded) < group.models:
            return
        group.moving = set(range(group.models))
        for place in range(group.models):
            self._move(group, place, push=True)

    def _move(self, group: _Group, place: int, *, push: bool) -> None:
        assert group.made is not None
        segment, count = group.segments[place], len(group.known.buffers)
        first = len(group.made.state) + group.order.index(place) * count
        parts = range(first, first + count)
        self._device.transfer(group.job, TransferId(place), parts, SegmentHandle(segment.fd, segment.nbytes), push)

    def _program_of(self, member: _Member, group: _Group) -> ProgramRecord:
        """The member's own Program that its group runs."""
        number = next(number for number, key in member.keys.items() if key == group.key)
        return member.record.programs[number]

    def _unstack(self, group: _Group, job: JobId) -> None:
        if group.lost:
            return
        place = group.members.index(job)
        if not group.ending:
            group.ending = True
            self.released.append(ev.TransferRequested(group.job, _OUT, False))

        def home(fault: Fault | None) -> None:
            if fault is not None:
                self._end(job, fault)

        group.leaving[place] = self._transfer(self._members[job].record, group, place, push=True, then=home)

    def _copy_home(self, group: _Group, job: JobId) -> None:
        """Have the member's own place hold its state of now, which a read that is requested next is to find there. Its
        state in the group stays the newest."""
        place = group.members.index(job)

        def home(fault: Fault | None) -> None:
            del group.copies[place]
            if fault is not None:
                self._end(job, fault)
            if place in group.moving and not (group.lost or self._over):  # it ends, and waited for the segment
                self._move(group, place, push=False)

        self.released.append(ev.TransferRequested(group.job, _copy(place), False))
        group.copies[place] = self._transfer(self._members[job].record, group, place, push=True, then=home)

    def _moved(self, group: _Group, event: TransferEnded) -> None:
        """The device has moved the state of one member."""
        place = int(event.transfer)
        if place == group.copying:
            group.copying = None
            self.released.append(TransferEnded(group.job, _copy(place)))
            self._at_hand(group, place, group.copies.get(place), event.fault)
            return
        if place not in group.moving:
            return
        group.moving.discard(place)
        entering = not group.filled  # its end may have been decided already
        if event.fault is not None and entering:
            group.moving.clear()
            self._lose(group, event.fault.message)
            return
        if not entering:
            self._at_hand(group, place, group.leaving.pop(place), event.fault)
        if not group.moving:
            group.filled = True
            self.released.append(TransferEnded(group.job, _IN if entering else _OUT))

    def _at_hand(self, group: _Group, place: int, record: TransferRecord | None, fault: Fault | None) -> None:
        """The state of a member is in its segment, or lost. `record`: the transfer to its own place."""
        job = group.members[place]
        member = self._members.get(job)
        if member is None or record is None:
            return
        if fault is not None:
            self._end(job, fault)
            return
        record.segment = group.segments[place]
        if record.due:
            number = next(n for n, each in member.record.transfers.items() if each is record)
            move(self._context, member.record, number, record)

    def _end(self, job: JobId, fault: Fault) -> None:
        """End a job whose state is lost."""
        member = self._members.get(job)
        if member is not None:
            self._fail_steps(member, fault)
            self._forget(job)
            self.released.append(JobDied(job, fault))

    def _fail_steps(self, member: _Member, fault: Fault) -> None:
        """Answer the steps of a job that ends, those included of which the scheduler does not know."""
        held = [event.step for event in member.held if isinstance(event, ev.StepSubmitted)]
        for step in [*member.steps, *held]:
            self._carry(ev.FailStep(member.record.id, step, fault))
        member.steps.clear()

    # ---- Steps

    def _run_fused(self, group: _Group, steps: tuple[tuple[JobId, StepId], ...]) -> None:
        scalars: list[float | int] = []
        for job, step in steps:
            record = self._members[job].record.steps[step]
            scalars += [record.slot, *record.scalars]
        self._run(group, FUSED, steps, 0, tuple(scalars))

    def _run_alone(self, group: _Group, job: JobId, step: StepId) -> None:
        record = self._members[job].record.steps[step]
        self._run(group, _own(group.members.index(job)), ((job, step),), record.slot, record.scalars)

    def _run(
        self,
        group: _Group,
        program: ProgramId,
        members: tuple[tuple[JobId, StepId], ...],
        slot: int,
        scalars: tuple[float | int, ...],
    ) -> None:
        group.last_step += 1
        number = StepId(group.last_step)
        group.steps[number] = _GroupStep(program, members, slot, scalars, self._now)
        if group.lost:
            self._run_at_home(group, number)
        else:
            self.released.append(ev.StepSubmitted(group.job, number, program))

    def _run_at_home(self, group: _Group, number: StepId) -> None:
        """Run a step of a group that lost its state in its members' own places."""
        step = group.steps[number]
        there = [(job, each) for job, each in step.members if job in self._members]
        if not there:
            self._step_over(group, number, 0.0)
            return
        group.at_home[number] = {job for job, _ in there}
        group.home_s[number] = 0.0
        self.released.extend(self._members[job].steps[each][0] for job, each in there)

    def _ran_at_home(self, group: _Group, number: StepId, job: JobId, seconds: float) -> None:
        group.at_home[number].discard(job)
        group.home_s[number] += seconds
        if not group.at_home[number]:
            del group.at_home[number]
            self._step_over(group, number, group.home_s.pop(number))

    def _step_over(self, group: _Group, number: StepId, seconds: float) -> None:
        step = group.steps.pop(number)
        if step.program == FUSED:
            self._decide(fg.FusedEnded(group.number, seconds))
        elif step.members[0][0] in self._members:
            self._decide(fg.AloneEnded(step.members[0][0], seconds))

    def _finished(self, group: _Group, c: ev.FinishStep) -> None:
        """A step of a group is done: answer its members."""
        group.answered += 1
        step, times = group.steps[c.step], c.times
        for job, number in step.members:
            member = self._members.get(job)
            if member is None or number not in member.record.steps:
                continue
            _, submitted = member.steps.pop(number)
            assert group.offer is not None
            member.record.steps[number].group = GroupPlace(
                group.models, group.members.index(job), step.program == FUSED, group.offer.content_hash
            )
            member.record.group_steps += 1
            member.record.group_s += times.device_s / len(step.members)
            waited = max(0.0, step.submitted - submitted)
            own = StepTimes(waited + times.queue_s, times.device_s, waited + times.total_s)
            self._carry(ev.FinishStep(job, number, own))
        self._step_over(group, c.step, times.device_s)

    # ---- A group that is lost, and its end

    def _lose(self, group: _Group, why: str) -> None:
        """The group is gone, with what it held. Its members go on from their own state if that is still the newest."""
        if group.lost or group.gone:
            return
        self._end_group(group, Fault(JobFailed.code, f"jobs that ran as one: {why}", "submit it again"))
        if group.closing:  # what it was to do before it closes is of no use now
            self.released.append(ev.CloseRequested(group.job, False, "its group is lost"))
        self._close(group, drain=False)

    def _end_group(self, group: _Group, fault: Fault) -> None:
        group.lost = fault.message
        log.warning("group %d of %d jobs is lost: %s", group.number, len(group.members), fault.message)
        if group.answered:
            for place, job in enumerate(group.members):
                if not group.ending or place in group.leaving:  # else its state is back, or on its way from its segment
                    self._end(job, fault)
        else:
            self._stay(group)
        self._decide(fg.GroupFailed(group.number, fault.message))
        for step in sorted(group.steps):
            if step not in group.at_home:
                self._run_at_home(group, step)

    def _stay(self, group: _Group) -> None:
        """The members' state is in their own places: transfers that have not begun have nothing to move."""
        for (job, number), record in group.transfers.items():
            if not record.due:
                self._needless.add((job, number))
            elif record.segment is None:
                self.released.append(TransferEnded(job, number))

    def _close(self, group: _Group, *, drain: bool) -> None:
        """Close the group's job, once what is under way has ended (`drain`)."""
        if group.closing:
            return
        group.closing = True
        if self._fuses is not None:
            self._fuses.drop_fused(group.number)
        if group.opened:
            self.released.append(ev.CloseRequested(group.job, drain, "its group ended"))
        else:
            self._gone(group)

    def _gone(self, group: _Group) -> None:
        """Nothing of the group is left on the device."""
        group.gone = True
        if self._by_job.pop(group.job, None) is not None:
            self.released.append(ev.SessionClosed(group.session, "its group ended"))
        self._tidy(group)

    def _tidy(self, group: _Group) -> None:
        """Drop what is of no use any more. A paused member's state lies in its segment until the member goes on."""
        if group.gone and not group.transfers:
            group.close_segments()
            if group.released:
                self._by_number.pop(group.number, None)

    # ---- Commands

    def carry_out(self, command: Command) -> None:
        """Carry out a command of the scheduler's."""
        job = getattr(command, "job", None)
        group = self._by_job.get(job) if job is not None else None
        if group is not None:
            self._for_group(group, command)
            return
        if isinstance(command, ev.StartTransfer) and (command.job, command.transfer) in self._needless:
            self.released.append(TransferEnded(command.job, command.transfer))
            return
        self._carry(command)
        match command:
            case ev.AcceptJob(session, accepted) if (session, accepted) in self._asked:
                self._asked.discard((session, accepted))
                record = self._context.records.jobs.get(accepted)
                if record is not None and not self._over and accepted not in self._members:
                    self._members[accepted] = _Member(record)
                    self._decide(fg.FusibleJobOpened(accepted, record.spec.priority, record.session.peer.uid))
                    if record.spec.priority is Priority.HIGH:
                        self._want(self._members[accepted], _HIGH)
            case ev.RefuseJob(session, refused):
                self._asked.discard((session, refused))
            case ev.FinishStep(member, step, times):
                self._ran(member, step, times.device_s)
            case ev.FailStep(member, step):
                self._ran(member, step, 0.0)
            case ev.FinishTransfer(member, transfer):
                found = self._members.get(member)
                if found is not None and found.transfer == transfer:
                    found.transfer = None
                    self._advance(found)
            case ev.EndJob(member):
                self._forget(member)

    def _ran(self, job: JobId, step: StepId, seconds: float) -> None:
        """A step ended that the scheduler knew by its own name."""
        member = self._members.get(job)
        if member is None or member.steps.pop(step, None) is None:
            return
        if member.record.replays:
            member.record.replays -= 1
            if not member.record.replays:
                self._unwant(member, _REPLAYED)
        for group in list(self._by_number.values()):
            for number, jobs in group.at_home.items():
                if job in jobs:
                    self._ran_at_home(group, number, job, seconds)
                    return
        self._decide(fg.AloneEnded(job, seconds))

    def _for_group(self, group: _Group, c: Command) -> None:
        """Carry out a command about a group's job."""
        match c:
            case ev.LaunchPiece():
                self._context.metrics.launched(Priority.LOW)
                step = group.steps[c.step]
                self._device.launch(
                    Launch(*c[:6], step.slot, step.scalars, c.stream, c.share, submitted=None, pieces=c.pieces)
                )
            case ev.FinishStep():
                self._finished(group, c)
            case ev.AcceptJob(fresh=True):
                self._device.open_job(group.job, _spec(group))
                assert group.made is not None
                self._device.check(group.job, FUSED, group.made.encoded, group.peer.uid)
            case ev.RefuseJob():
                group.opened = False
                self._refuse(group, c.fault.message)
            case ev.AcceptProgram(program=program):
                if program == FUSED:
                    group.charging = False
                    self._decide(fg.MemoryCharged(group.number))
                else:
                    self._device.check(group.job, program, group.known.encoded, group.peer.uid)
            case ev.RefuseProgram():
                if not group.lost:
                    self.not_loaded(dev.ProgramRefused(group.job, c.program, c.fault))
            case ev.AnnounceProgram(program=program):
                if program == FUSED:
                    group.building = False
                    self._decide(fg.FusedProgramBuilt(group.number))
                else:
                    group.loaded.add(program)
                    self._fill(group)
            case ev.CutProgram():
                self._device.cut(c.job, c.program, c.target_s)
            case ev.StartTransfer(transfer=transfer):
                if transfer == _IN:
                    group.stacking = True
                    self._fill(group)
                elif transfer == _OUT:
                    self._empty(group)
                else:
                    group.copying = transfer - _copy(0)
                    self._move(group, group.copying, push=False)
            case ev.UnloadJob():
                self._device.unload(group.job)
            case ev.EndJob(fault=fault) if fault is not None and not self._over and not group.lost:
                if group.charging or group.building:
                    self._refuse(group, fault.message)
                else:
                    self._end_group(group, fault)
            case ev.ForgetJob():
                self._gone(group)

    def _load_member(self, group: _Group, program: ProgramId) -> None:
        """Load a member's own Program, in the order of their places: their parts of the state are numbered so."""
        place = program - _own(0)
        member = self._members.get(group.members[place])
        if member is None or self._fuses is None:
            self._lose(group, "a member left while its state was moved")
            return
        own = self._program_of(member, group)
        assert own.segment is not None
        group.order.append(place)
        self._fuses.load_member(
            group.job, program, group.known.encoded, FUSED, place,
            SegmentHandle(own.segment.fd, own.segment.nbytes), own.slots,
        )  # fmt: skip

    def _empty(self, group: _Group) -> None:
        """Copy the state of all that are to have it back out of the group. A place whose segment holds an earlier copy
        follows when that was taken from there."""
        group.moving = set(group.leaving)
        for place in sorted(group.moving - group.copies.keys()):
            self._move(group, place, push=False)


_HIGH = "it is high, and only low jobs are fused"
_REPLAYED = "its steps run again, after it was recovered"
_WRITTEN = "its state is written, or it closes"


def _is_read(event: Event) -> bool:
    return isinstance(event, ev.TransferRequested) and not event.into_device


def _copy(place: int) -> TransferId:
    """Of a group, as the scheduler knows it: one member's state is copied to its segment."""
    return TransferId(_OUT + 1 + place)


def _own(place: int) -> ProgramId:
    """The own Program of a member, in its group."""
    return ProgramId(FUSED + 1 + place)


def _spec(group: _Group) -> JobSpec:
    """The group as a job. One step of each member may be under way."""
    uid = group.peer.uid
    inflight = max(2, group.models)
    return JobSpec(
        f"{group.models} jobs as one", max_inflight=inflight, models=group.models, user=uid if uid >= 0 else None
    )
