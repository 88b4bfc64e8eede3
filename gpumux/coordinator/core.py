"""What a coordinator does with messages of clients and news of daemons: happenings in, actions out; pure.

`Coordinator.handle(happening, now)` returns what is to be sent. Before any of it is sent, the state must be kept
(`journal.py`): what a client or a daemon was told is then never forgotten. Of a kept coordinator that is started again
(`Coordinator(..., placement=..., jobs=...)`) clients ask again, and get what was not sent.

A job is its client's: the client opens it at the daemons that it is told, leaves them when it is asked to, and says
when it has ended. So a job runs at one place at a time whatever becomes of the coordinator. A client that is not heard
of for `rejoin_s` is gone, and its job with it.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from math import inf
from typing import Any, Final, NamedTuple

from gpumux.access import Access, refuse_submit
from gpumux.cluster import events as ev
from gpumux.cluster.events import ClusterCommand, ClusterEvent, ClusterJob, DeviceFacts, PlacementConfig
from gpumux.cluster.explain import explain
from gpumux.cluster.jobs import JobPhase, PlacedJob
from gpumux.cluster.placement import ClusterPlacement
from gpumux.errors import (
    AccessDenied,
    AdmissionRefused,
    GpumuxError,
    NotOwner,
    ProtocolError,
    UnknownJob,
    from_code,
)
from gpumux.types import Fault, JobId, Peer, Priority, SessionId
from gpumux.wire import messages as msg
from gpumux.wire.messages import Message
from gpumux.wire.router import GOODBYE, Closed, Incoming, Opened

MOST_DEVICES: Final = 4096  # of a job
MOST_PROGRAMS: Final = 64  # of a job
MOST_NAMES: Final = 4096  # names whose programs are remembered, those used last
MOST_ANSWERS: Final = 4096  # jobs whose answers are remembered, the newest
SAME_MEMORY: Final = 0.2  # by how much the memory of one device may differ from one start of its daemon to the next
MOST_TEXT: Final = 400  # characters of a name or a reason
CLIENT_GONE: Final = "its client is gone"
MOST_REASONS: Final = 100  # waiting jobs of which a status says why; each takes about a millisecond
_JOB_ID: Final = re.compile(r"\b[0-9a-f]{32}\b")
_HEX: Final = frozenset("0123456789abcdef")


@dataclass(frozen=True, slots=True)
class CoordinatorConfig:
    """rejoin_s: how long a client may be away before its job is taken to have ended. lost_after_s: how long a daemon
    may be away before its jobs go elsewhere. max_jobs: jobs of one user that are not answered. page: the address of
    the status page; "" if there is none. uid: of the user as which the coordinator runs, an operator by that."""

    placement: PlacementConfig = field(default_factory=PlacementConfig)
    access: Access = field(default_factory=Access)
    rejoin_s: float = 30.0
    lost_after_s: float = 15.0
    max_jobs: int = 1000
    page: str = ""
    uid: int | None = None

    def may_operate(self, peer: Peer) -> bool:
        """Whether the peer may drain nodes, and govern all users' jobs."""
        return peer.uid == self.uid or self.access.may_operate(peer)


# ---- Happenings beside those of the router (Opened, Incoming, Closed) and answers of daemons, which are ClusterEvents.


@dataclass(frozen=True, slots=True)
class DaemonFound:
    """A daemon can be reached, at these endpoints, the one that it was given by first. It is a node of one device."""

    node: str
    host: str
    endpoints: tuple[str, ...]
    facts: DeviceFacts


@dataclass(frozen=True, slots=True)
class DaemonAway:
    """A daemon can't be reached, or no longer."""

    node: str
    reason: str
    host: str = ""


@dataclass(frozen=True, slots=True)
class PromiseSeen:
    """What a daemon says of its high job: whether its promise is kept (None: it has none, or nothing is known yet), and
    its verdict in a line (scheduler/verdict.py)."""

    node: str
    kept: bool | None
    verdict: str


@dataclass(frozen=True, slots=True)
class DaemonLeft:
    """A daemon is no longer one of the cluster's: its node is lost at once, and not shown any more."""

    node: str
    reason: str


Happening = Opened | Incoming | Closed | DaemonFound | DaemonAway | DaemonLeft | PromiseSeen | ClusterEvent


# ---- Actions.


class Tell(NamedTuple):
    """Send a client a message."""

    session: SessionId
    message: Message


class Order(NamedTuple):
    """Have a daemon carry out a command."""

    command: ev.ReserveDevice | ev.ConfirmDevice | ev.ReleaseDevice


class Note(NamedTuple):
    """Log a line."""

    text: str


Action = Tell | Order | Note


# ---- Records.


@dataclass(slots=True, eq=False)
class ClientJob:
    """A job that is not answered. `session`: its client's, None while that is away; then since `away_since`. `told`:
    the attempt whose devices the client knows of; 0: none."""

    id: JobId
    name: str
    uid: int
    session: SessionId | None = None
    away_since: float = inf
    told: int = 0

    @property
    def short(self) -> str:
        return self.id[:8]


@dataclass(slots=True, eq=False)
class DaemonRecord:
    """A daemon. `away_since`: when it was lost from sight; inf while it can be reached."""

    node: str
    host: str
    endpoints: tuple[str, ...]
    away_since: float = inf
    why_away: str = ""
    kept: bool | None = None  # its high job's promise, and what it says of it
    verdict: str = ""


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer of a job, for a client that asks again. `number`: in the order of answers; `uid`: its user's."""

    number: int
    uid: int
    outcome: str
    reason: str


class Coordinator:
    """`names(peer)`: the user and the group by which a peer's jobs are counted. `placement`, `jobs`, `answers` and
    `drained` (nodes, since when): of a coordinator that is started again; `now`: of its clock, by default as it was
    then. Daemons and clients have their whole time to be heard of again."""

    def __init__(
        self, config: CoordinatorConfig, names: Callable[[Peer], tuple[str, str]], *,
        placement: ClusterPlacement | None = None, jobs: Iterable[ClientJob] = (),
        answers: dict[JobId, Answered] | None = None, drained: Mapping[str, float | None] | None = None,
        now: float | None = None,
    ) -> None:  # fmt: skip
        self.config = config
        self.placement = placement or ClusterPlacement(config.placement)
        self.jobs = {job.id: job for job in jobs}
        self.answers: OrderedDict[JobId, Answered] = OrderedDict(answers or {})
        # Nodes, also those that are lost: they join again as they were. Since when; None: it was not kept.
        self.drained: dict[str, float | None] = dict(drained or {})
        self.daemons: dict[str, DaemonRecord] = {}
        self.counts = {"submitted": 0, "started": 0, "moved": 0, "done": 0, "failed": 0, "cancelled": 0, "refused": 0}
        self._names = names
        self._sessions: dict[SessionId, Peer] = {}
        self._programs: OrderedDict[tuple[int, str], tuple[str, ...]] = OrderedDict()  # of a user's jobs, by name
        self.programs_told = 0  # how often
        self._to_do: list[Action] = []
        self._asked: set[int] = set()  # attempts whose client was asked to leave, by this happening
        now = self._now = self.placement.now if now is None else now
        self._fed = False  # whether what happened was passed to the placement
        for job in self.jobs.values():
            job.session, job.away_since, job.told = None, now, 0
        for node in self.placement.nodes.values():
            self.daemons[node.name] = DaemonRecord(node.name, node.host, (), now, "it was not heard of since the start")
        self._handlers: dict[type[Any], Callable[[SessionId, Peer, Any], None]] = {
            msg.PlaceJob: self._place_job,
            msg.JobNotStarted: self._not_started,
            msg.ProgramsKnown: self._programs_known,
            msg.GangSizes: self._gang_sizes,
            msg.DevicesVacated: self._vacated,
            msg.PlacedJobEnded: self._ended,
            msg.CloseJob: self._cancel,
            msg.DrainNode: self._drain,
            msg.ExplainJob: self._explain,
            msg.GetStatus: self._status,
        }

    # ---- happenings

    def handle(self, happening: Happening | None, now: float) -> list[Action]:
        """Apply what happened, or None if only time passed, and return what is to be done, in this order."""
        self._asked.clear()
        self._now, self._fed = now, False
        match happening:
            case None:
                pass
            case Opened():
                self._sessions[happening.session] = happening.peer
            case Closed():
                self._left(happening)
            case Incoming():
                self._heard(happening)
            case DaemonFound():
                self._found(happening)
            case DaemonAway():
                self._lost_sight(happening)
            case PromiseSeen():
                daemon = self.daemons[happening.node]
                daemon.kept, daemon.verdict = happening.kept, happening.verdict
            case DaemonLeft():
                self._daemon_left(happening)
            case ev.DeviceRefused():
                self._device_refused(happening)
            case _:
                self._feed(happening)
        self._give_up()
        if not self._fed:
            self._feed(ev.TimePassed())
        actions, self._to_do = self._to_do, []
        return actions

    @property
    def due(self) -> float:
        """When `handle(None)` is to come at the latest."""
        times = [self.placement.due]
        times += [job.away_since + self.config.rejoin_s for job in self.jobs.values()]
        times += [
            daemon.away_since + self.config.lost_after_s
            for daemon in self.daemons.values()
            if daemon.node in self.placement.nodes
        ]
        return min(times)

    def _give_up(self) -> None:
        """Take clients and daemons for gone that were away for too long."""
        now = self._now
        for job in [job for job in self.jobs.values() if job.away_since + self.config.rejoin_s <= now]:
            self._over(job, CLIENT_GONE)
        for daemon in self.daemons.values():
            if daemon.away_since + self.config.lost_after_s <= now and daemon.node in self.placement.nodes:
                self._note(f"node {daemon.node} is lost: {daemon.why_away}")
                self._feed(ev.NodeLost(daemon.node))

    def _feed(self, event: ClusterEvent) -> None:
        """Pass an event to the placement, and turn its commands into actions."""
        self._fed = True
        for command in self.placement.handle(event, self._now):
            self._carry_out(command)

    def _carry_out(self, command: ClusterCommand) -> None:
        match command:
            case ev.ReserveDevice() | ev.ConfirmDevice() | ev.ReleaseDevice():
                self._to_do.append(Order(command))
            case ev.StartJob():
                self.counts["started"] += 1
                self._tell_place(self.jobs[command.job])
            case ev.StopRank():
                self._ask_to_leave(command)
            case ev.AnswerJob():
                self._answer(command)
            case ev.NodeEmpty():
                self._note(f"node {command.node} is drained: no job of the cluster runs there")

    def _note(self, text: str) -> None:
        self._to_do.append(Note(text))

    def _tell(self, session: SessionId | None, message: Message) -> None:
        if session is not None:
            self._to_do.append(Tell(session, message))

    # ---- daemons

    def _found(self, found: DaemonFound) -> None:
        known = self.daemons.get(found.node)
        self.daemons[found.node] = DaemonRecord(found.node, found.host, found.endpoints)
        node = self.placement.nodes.get(found.node)
        if node is not None and _alike(node.devices[0].facts, found.facts):
            if known is not None and known.away_since < inf:
                self._note(f"node {found.node} is back")
        else:
            self._note(f"node {found.node} joined: {found.facts.memory_bytes / 2**30:.1f} GiB at {found.endpoints[0]}")
            self._feed(ev.NodeJoined(found.node, (found.facts,), found.host, found.node in self.drained))
        for job in self.jobs.values():  # of a coordinator that was started again, and did not know the endpoint yet
            placed = self.placement.jobs[job.id]
            if placed.phase is JobPhase.RUNNING and job.told != placed.attempt:
                self._tell_place(job)

    def _lost_sight(self, away: DaemonAway) -> None:
        daemon = self.daemons.get(away.node)
        if daemon is None:
            daemon = self.daemons[away.node] = DaemonRecord(away.node, away.host, ())
        if daemon.away_since == inf:
            daemon.away_since = self._now
            self._note(f"node {away.node} can't be reached: {away.reason}")
        daemon.why_away = away.reason

    def _daemon_left(self, left: DaemonLeft) -> None:
        if self.daemons.pop(left.node, None) is None:
            return
        self.drained.pop(left.node, None)
        self._note(f"node {left.node} left: {left.reason}")
        self._feed(ev.NodeLost(left.node))

    def _device_refused(self, refused: ev.DeviceRefused) -> None:
        """The reason is for the log alone: it may tell of other users' jobs, and of those outside the cluster."""
        job = self.placement.attempts.get(refused.attempt)
        if job is not None:
            self._note(f"node {refused.device.node} refused job {job.id[:8]}: {refused.reason[:MOST_TEXT]}")
        self._feed(refused)

    def endpoint_of(self, node: str, remote: bool) -> str:
        """Where a client reaches the node's daemon. `remote`: one that reaches the coordinator by tcp, and so may be on
        another machine."""
        daemon = self.daemons[node]
        by_tcp = [each for each in daemon.endpoints if not each.startswith("ipc://")]
        if remote and by_tcp:
            return by_tcp[0]
        return daemon.endpoints[0] if daemon.endpoints else ""

    # ---- sessions and their messages

    def _heard(self, incoming: Incoming) -> None:
        message: Any = incoming.message
        handler = self._handlers.get(type(message))
        ref = getattr(message, "ref", 0)
        try:
            if handler is None:
                raise ProtocolError(
                    f"this is a coordinator, and has no use for {type(message).__name__}",
                    "name a daemon's endpoint; `gpumux cluster status` lists them",
                )
            handler(incoming.session, incoming.peer, message)
        except GpumuxError as error:
            if ref:
                self._tell(incoming.session, msg.Refusal(ref, error.code, error.message, error.remedy))

    def _left(self, closed: Closed) -> None:
        self._sessions.pop(closed.session, None)
        for job in [job for job in self.jobs.values() if job.session == closed.session]:
            job.session, job.away_since = None, self._now
            if closed.reason == GOODBYE:
                self._over(job, "its client left")

    def _over(self, job: ClientJob, fault: str) -> None:
        """The job has ended, or its client will not come back: its daemons then end what is left of it by
        themselves."""
        placed = self.placement.jobs[job.id]
        if placed.phase in (JobPhase.RUNNING, JobPhase.STOPPING):
            self._feed(ev.JobFinished(job.id, placed.attempt, fault))
        else:
            self._feed(ev.JobCancelled(job.id))

    def _mine(self, session: SessionId, peer: Peer, job: str) -> ClientJob | None:
        """The session's job of this id; None if it is answered, or another's."""
        record = self.jobs.get(JobId(job))
        return record if record is not None and record.session == session and record.uid == peer.uid else None

    def _place_job(self, session: SessionId, peer: Peer, m: msg.PlaceJob) -> None:
        job = JobId(m.job)
        known = self.jobs.get(job)
        before = self.answers.get(job)
        uid = known.uid if known is not None else before.uid if before is not None else peer.uid
        if uid != peer.uid:
            raise NotOwner("another user has a job with this id", "choose a fresh random id")
        if known is not None:
            self._rejoin(session, known, m)
            return
        if before is not None and not (m.attempt and before.reason == CLIENT_GONE):
            self._tell(session, msg.Done(m.ref))
            self._tell(session, msg.JobAnswered(job, before.outcome, before.reason))
            return
        if m.attempt:
            raise UnknownJob(
                "this coordinator does not know the job: its client was away for so long that it was taken to have"
                " ended, or what was kept of it is lost",
                "it goes on where it runs, and is not moved; submit it again to have it placed",
            )
        request = self._request(peer, m)
        self.jobs[job] = ClientJob(job, m.name[:MOST_TEXT], peer.uid, session)
        self.counts["submitted"] += 1
        self._tell(session, msg.Done(m.ref))
        self._feed(ev.JobSubmitted(request))

    def _request(self, peer: Peer, m: msg.PlaceJob) -> ClusterJob:
        """What is asked for. Raises ProtocolError, AccessDenied, AdmissionRefused and ConfigError."""
        if len(m.job) != 32 or not _HEX.issuperset(m.job):
            raise ProtocolError(f"job {m.job[:40]!r}", "choose 32 hexadecimal digits in lower case")
        if m.priority not in (Priority.LOW, Priority.HIGH):
            raise ProtocolError(f"priority {m.priority}", "use 0 (low) or 1 (high)")
        if not 1 <= m.devices <= MOST_DEVICES or not 1 <= m.nbytes < 2**62 or abs(m.urgency) > 1000:
            raise ProtocolError(
                f"{m.devices} devices with {m.nbytes} bytes, urgency {m.urgency}",
                f"ask for 1 to {MOST_DEVICES} devices, and an urgency of -1000 to 1000",
            )
        fault = refuse_submit(self.config.access.rule_for(peer), Priority(m.priority), 1.0)
        if fault is not None:
            raise _error(fault)
        count = sum(job.uid == peer.uid for job in self.jobs.values())
        if count >= self.config.max_jobs:
            raise AdmissionRefused(f"{count} jobs of this user are open already", "wait until one has ended")
        user, group = self._names(peer)
        programs = _programs(m.programs) or self._programs.get((peer.uid, m.name), ())
        return ClusterJob(
            JobId(m.job), user, group, Priority(m.priority), m.devices, m.nbytes, programs, m.urgency, m.movable
        )

    def _rejoin(self, session: SessionId, job: ClientJob, m: msg.PlaceJob) -> None:
        """The client of a known job is back, or asks again: it may not have got what it was last told."""
        placed = self.placement.jobs[job.id]
        job.session, job.away_since, job.told = session, inf, m.attempt
        self._tell(session, msg.Done(m.ref))
        if m.movable is not placed.request.movable:
            self._feed(ev.JobDescribed(job.id, placed.request.programs, m.movable))
        if placed.phase is JobPhase.RUNNING and m.attempt != placed.attempt:
            self._tell_place(job)
        elif placed.phase is JobPhase.STOPPING and m.attempt != placed.attempt:
            self._has_left(placed)
        elif placed.phase is JobPhase.STOPPING:
            self._leave(job, placed)

    def _tell_place(self, job: ClientJob) -> None:
        placed = self.placement.jobs[job.id]
        if job.session is None:
            return  # it is told when it is back
        peer = self._sessions[job.session]
        endpoints = [self.endpoint_of(device.node, peer.pid < 0) for device in placed.devices]
        if not all(endpoints):
            return  # a daemon that was not heard of since the start: it is, or is lost, soon
        job.told = placed.attempt
        nodes = [device.node for device in placed.devices]
        self._tell(job.session, msg.JobPlaced(job.id, placed.attempt, endpoints, nodes, placed.began))

    def _not_started(self, session: SessionId, peer: Peer, m: msg.JobNotStarted) -> None:
        job = self._mine(session, peer, m.job)
        if job is None or self.placement.jobs[job.id].attempt != m.attempt:
            return
        self._note(f"job {job.short} did not start: {m.why[:MOST_TEXT]}")
        job.told = 0
        self._feed(ev.StartFailed(job.id, m.attempt, min(max(0, m.nbytes), 2**62)))

    def _programs_known(self, session: SessionId, peer: Peer, m: msg.ProgramsKnown) -> None:
        job = self._mine(session, peer, m.job)
        programs = _programs(m.programs)
        if job is None or not programs:
            return
        self.learn_programs(peer.uid, job.name, programs)
        self._feed(ev.JobDescribed(job.id, programs, self.placement.jobs[job.id].request.movable))

    def learn_programs(self, uid: int, name: str, programs: tuple[str, ...]) -> None:
        """Jobs of the user with this name run these."""
        self._programs[uid, name] = programs
        self._programs.move_to_end((uid, name))
        self.programs_told += 1
        if len(self._programs) > MOST_NAMES:
            self._programs.popitem(last=False)

    def newest_programs(self, count: int) -> list[tuple[int, str, tuple[str, ...]]]:
        """User, name and programs of the last `count` that were learned, at least, oldest first."""
        found = list(islice(reversed(self._programs.items()), count))
        return [(uid, name, programs) for (uid, name), programs in reversed(found)]

    def _gang_sizes(self, session: SessionId, peer: Peer, m: msg.GangSizes) -> None:
        job = self._mine(session, peer, m.job)
        if job is not None:
            self._feed(ev.SizesKnown(job.id, tuple(m.sizes[:MOST_DEVICES])))

    def _ask_to_leave(self, command: ev.StopRank) -> None:
        """One message for all ranks, since the client leaves with the whole job."""
        if command.attempt not in self._asked:
            self._asked.add(command.attempt)
            self._leave(self.jobs[command.job], self.placement.jobs[command.job])

    def _leave(self, job: ClientJob, placed: PlacedJob) -> None:
        reason = self._for_client(job, placed.stopped_for)
        self._tell(job.session, msg.VacateDevices(job.id, placed.attempt, placed.keep, reason))

    def _vacated(self, session: SessionId, peer: Peer, m: msg.DevicesVacated) -> None:
        job = self._mine(session, peer, m.job)
        placed = None if job is None else self.placement.jobs[job.id]
        if placed is not None and placed.attempt == m.attempt and placed.phase is JobPhase.STOPPING:
            self._has_left(placed)

    def _has_left(self, placed: PlacedJob) -> None:
        self.counts["moved"] += placed.outcome is None
        attempt = placed.attempt
        for device in sorted(placed.waits_on):
            self._feed(ev.RankStopped(attempt, device))

    def _ended(self, session: SessionId, peer: Peer, m: msg.PlacedJobEnded) -> None:
        self._tell(session, msg.Done(m.ref))
        job = self._mine(session, peer, m.job)
        if job is not None:
            self._over(job, m.fault[:MOST_TEXT])

    def _answer(self, command: ev.AnswerJob) -> None:
        job = self.jobs.pop(command.job)
        outcome = command.outcome.value
        self.counts[outcome] += 1
        number = next(reversed(self.answers.values())).number + 1 if self.answers else 1
        self.answers[job.id] = Answered(number, job.uid, outcome, command.reason)
        while len(self.answers) > MOST_ANSWERS:
            self.answers.popitem(last=False)
        self._note(f"job {job.short} {job.name!r}: {outcome}" + (f", {command.reason}" if command.reason else ""))
        if command.outcome is not ev.JobOutcome.DONE:
            self._tell(job.session, msg.JobAnswered(job.id, outcome, self._for_client(job, command.reason)))

    # ---- what operators and owners ask for

    def _governed(self, peer: Peer, job: str) -> ClientJob:
        """A job that the peer may change, by its id. Raises UnknownJob and NotOwner."""
        record = self.jobs.get(JobId(job))
        if record is None:
            raise UnknownJob(f"the cluster has no job {job[:40]!r}", "`gpumux cluster jobs` lists them")
        if record.uid != peer.uid and not self.config.may_operate(peer):
            raise NotOwner(f"job {record.short} is another user's", "ask its owner, or an operator")
        return record

    def _cancel(self, session: SessionId, peer: Peer, m: msg.CloseJob) -> None:
        job = self._governed(peer, m.job)
        self._tell(session, msg.Done(m.ref))
        self._feed(ev.JobCancelled(job.id))

    def _drain(self, session: SessionId, peer: Peer, m: msg.DrainNode) -> None:
        if not self.config.may_operate(peer):
            raise AccessDenied(
                "only an operator may drain nodes, or the user as which the coordinator runs",
                "ask one: operator in [access.rules]",
            )
        names = [daemon.node for daemon in self.daemons.values() if m.node in (daemon.node, daemon.host)]
        if not names:
            raise AdmissionRefused(f"the cluster has no node {m.node[:80]!r}", "`gpumux cluster status` lists them")
        self._tell(session, msg.Done(m.ref))
        for name in names:
            if m.drain:
                self.drained.setdefault(name, self._now)
                self._feed(ev.NodeDraining(name))
            else:
                self.drained.pop(name, None)
                if (node := self.placement.nodes.get(name)) is not None:
                    facts = tuple(device.facts for device in node.devices)
                    self._feed(ev.NodeJoined(name, facts, node.host))

    def _explain(self, session: SessionId, peer: Peer, m: msg.ExplainJob) -> None:
        job = self._governed(peer, m.job)
        lines = explain(self.placement, self.placement.jobs[job.id])
        body = {"job": job.id, "short": job.short, "sentences": [self._redacted(peer, line) for line in lines]}
        self._tell(session, msg.Report(m.ref, body))

    def _for_client(self, job: ClientJob, text: str) -> str:
        """The text as the job's client may have it."""
        peer = None if job.session is None else self._sessions.get(job.session)
        return text if peer is None else self._redacted(peer, text)

    def _redacted(self, peer: Peer, text: str) -> str:
        """The text with short ids of jobs, and without those of other users' where the peer may not know them."""
        operates = self.config.may_operate(peer)
        return self.shortened(text, lambda job: operates or job.uid == peer.uid)

    def shortened(self, text: str, may_know: Callable[[ClientJob], bool]) -> str:
        """The text with short ids of jobs, where those may be known."""

        def name(found: re.Match[str]) -> str:
            job = self.jobs.get(JobId(found[0]))
            if job is None:
                return found[0]
            return job.short if may_know(job) else "of another user"

        return _JOB_ID.sub(name, text)

    def _status(self, session: SessionId, peer: Peer, m: msg.GetStatus) -> None:
        self._tell(session, msg.Report(m.ref, self.status(peer)))

    def status(self, peer: Peer) -> dict[str, Any]:
        """The body of GetStatus. Scripts read it (`gpumux cluster status --json`): fields may be added, not changed.

        nodes  [{name, host, endpoint (where the asker reaches it), state ("up", "away", "draining", "lost"),
               memory_bytes, used_bytes (by the cluster's jobs), max_jobs, jobs (how many), high (whether one of them
               is), kept (its promise; None: not known), verdict (the daemon's line about it)}]
        jobs   [{job, short, name, user, priority, devices, asked (the devices that it was submitted for),
               memory_bytes, state (gpumux/cluster/jobs.py, JobPhase), nodes, since_s (in that place, or in the queue),
               moves, why (it waits, or is where it is; of the first MOST_REASONS that the asker may know), mine}]; of
               others' jobs, job, name and why are ""
        cluster  {nodes (how many), now (of the coordinator's clock), page (the status page's address; "": none)}
        counts of jobs since the start; pairs: of programs whose cost is known
        """
        now = self._now
        jobs: list[dict[str, Any]] = []
        reasons = MOST_REASONS
        for record in self.jobs.values():
            placed = self.placement.jobs[record.id]
            mine = record.uid == peer.uid or self.config.may_operate(peer)
            why = ""
            if mine and reasons:
                why, reasons = self._redacted(peer, explain(self.placement, placed)[0]), reasons - 1
            since = placed.held_since if placed.holds else placed.submitted_at
            jobs.append(
                {
                    "job": record.id if mine else "",
                    "short": record.short,
                    "name": record.name if mine else "",
                    "user": placed.request.user,
                    "priority": placed.request.priority.name.lower(),
                    "devices": placed.request.devices,
                    "asked": placed.asked,
                    "memory_bytes": placed.request.memory_bytes,
                    "state": placed.phase.value,
                    "nodes": [device.node for device in placed.devices],
                    "since_s": max(0.0, now - since),
                    "moves": placed.moves,
                    "why": why,
                    "mine": mine,
                }
            )
        return {
            "cluster": {"nodes": len(self.placement.nodes), "now": now, "page": self.config.page},
            "nodes": self.node_reports(remote=peer.pid < 0),
            "jobs": jobs,
            "counts": dict(self.counts),
            "pairs": len(self.placement.costs),
        }

    def waited(self) -> dict[Priority, float]:
        """For how long the job of each class that waits longest has waited, in seconds; 0 where none waits."""
        found = dict.fromkeys(Priority, 0.0)
        for job in self.placement.jobs.values():
            if not job.holds:
                waited = self._now - job.submitted_at
                found[job.request.priority] = max(found[job.request.priority], waited)
        return found

    def node_reports(self, *, remote: bool = False) -> list[dict[str, Any]]:
        """The `nodes` of a status, for an asker that is `remote` as in `endpoint_of`."""
        return [self._node(self.daemons[name], remote) for name in sorted(self.daemons)]

    def _node(self, daemon: DaemonRecord, remote: bool) -> dict[str, Any]:
        node = self.placement.nodes.get(daemon.node)
        devices = [] if node is None else node.devices
        away = daemon.away_since < inf
        return {
            "name": daemon.node,
            "host": daemon.host,
            "endpoint": self.endpoint_of(daemon.node, remote),
            "state": "lost" if node is None else "away" if away else "draining" if node.draining else "up",
            "why": daemon.why_away if away else "",
            "memory_bytes": sum(device.facts.memory_bytes for device in devices),
            "used_bytes": sum(device.used_bytes for device in devices),
            "max_jobs": sum(device.facts.max_jobs for device in devices),
            "jobs": sum(len(device.jobs) for device in devices),
            "high": any(device.high is not None for device in devices),
            "kept": None if away else daemon.kept,
            "verdict": "" if away else daemon.verdict,
        }


def _alike(before: DeviceFacts, after: DeviceFacts) -> bool:
    """Whether a daemon that was started again has the device that it had. What is free of a machine's memory, which is
    what a daemon without a GPU offers, is never quite the same."""
    ratio = after.memory_bytes / before.memory_bytes
    return abs(ratio - 1.0) <= SAME_MEMORY and replace(after, memory_bytes=before.memory_bytes) == before


def _programs(hashes: list[str]) -> tuple[str, ...]:
    """Content hashes, each once. Raises ProtocolError for anything else."""
    if len(hashes) > MOST_PROGRAMS or not all(len(each) <= 128 for each in hashes):
        raise ProtocolError(f"{len(hashes)} programs", f"name {MOST_PROGRAMS} at most, by their content hashes")
    return tuple(dict.fromkeys(hashes))


def _error(fault: Fault) -> GpumuxError:
    return from_code(fault.code, fault.message, fault.remedy)
