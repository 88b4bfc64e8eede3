"""What the daemon's parts share: the books, the way to the core, and the way back to a client.

`feed` queues an event; the loop hands it to the core when the part that fed it has returned, so
nothing here re-enters anything. Replies leave at once: ZeroMQ batches them on its own thread.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from gpumux.access import BUILT_IN, Access, Rule
from gpumux.config import Config
from gpumux.daemon.records import Books, JobRecord, ProgramRecord, SessionRecord
from gpumux.daemon.segments import Segments, SharedSegment
from gpumux.device.base import Device
from gpumux.errors import AdmissionRefused, GpumuxError, NotOwner, UnknownJob
from gpumux.metrics.series import Metrics
from gpumux.scheduler.events import Event
from gpumux.scheduler.scheduler import Core
from gpumux.types import Fault, JobId, ProgramId, SessionId
from gpumux.wire.messages import Message, Refusal
from gpumux.wire.router import Router

# ---- Whose jobs a session may change, and what it may know of the others'.
#
# A job may be changed, and seen whole, by its own session, its user, root, and whom an access rule makes an operator.
# Of other users' jobs everybody sees what sharing a device takes: a short id, the user id, priority, weight, state,
# counts, device time and memory, how a high job's promise stands and for whom a low one is held. Not seen are names,
# job ids, process ids, operators and messages. A job id is worth hiding although it opens nothing: whoever knew it
# could take it first, after a restart.


UNKNOWN_UID = -1
NOBODYS = "another job"  # one that has ended: nobody knows any more whose it was
_JOB_ID = re.compile(r"\b[0-9a-f]{32}\b")
_HIDDEN = {"job": "", "name": "", "pid": 0}  # of an entry of GetStatus


class Sight:
    """`access` is asked anew each time, since it may be reloaded."""

    def __init__(self, books: Books, access: Callable[[], Access]) -> None:
        self._books = books
        self._access = access

    def operates(self, session: SessionRecord) -> bool:
        """Root, or somebody whom a rule makes an operator."""
        return self._access().may_operate(session.peer)

    def rule(self, session: SessionRecord) -> Rule:
        """What the session may give a job; an operator may give anything."""
        access = self._access()
        return BUILT_IN if access.may_operate(session.peer) else access.rule_for(session.peer)

    def governs(self, session: SessionRecord, job: JobRecord) -> bool:
        """Whether the session may change the job, and know all of it."""
        uid = session.peer.uid
        own = job.session is session or (uid != UNKNOWN_UID and uid == job.session.peer.uid)
        return own or self.operates(session)

    def governed(self, session: SessionRecord, job: str) -> JobRecord:
        """The job, for a session that may change it. Raises UnknownJob and NotOwner."""
        record = self._books.jobs.get(JobId(job))
        if record is None:
            raise UnknownJob(f"there is no job {job[:40]!r}", "`gpumux jobs` lists them")
        if self.governs(session, record):
            return record
        raise NotOwner(f"job {record.short} belongs to user {record.session.peer.uid}", "ask its owner, or an operator")

    def hidden(self, session: SessionRecord) -> Callable[[JobId], str | None]:
        """What to call a job towards the session: None where it may know its name."""

        def name(job_id: JobId) -> str | None:
            job = self._books.jobs.get(job_id)
            if job is None:
                return NOBODYS
            return None if self.governs(session, job) else job.short

        return name

    def redact(self, session: SessionRecord, text: str) -> str:
        """`text` without the ids of jobs the session may not know."""
        name = self.hidden(session)
        return _JOB_ID.sub(lambda found: name(JobId(found[0])) or found[0], text)

    def shown(self, session: SessionRecord, body: dict[str, Any]) -> dict[str, Any]:
        """A body of GetStatus as the session may see it; `mine` says of each job whether it may change it."""
        jobs = []
        for entry in body["jobs"]:
            record = self._books.jobs.get(JobId(entry["job"]))
            mine = record is not None and self.governs(session, record)
            jobs.append({**entry, **({} if mine else _HIDDEN), "mine": mine})
        return {**body, "jobs": jobs}


# ---- Whose Program is checked next: users in turn, and each user's sessions in turn.
#
# A check runs for seconds, minutes if somebody means harm, and a device runs few at once. So users take
# turns, and no user has all places: whoever comes next finds one free, or soon free.


_Line = deque[tuple[JobId, ProgramRecord]]


class CheckQueue:
    """Hands checks to the device, `at_once` at a time at most."""

    def __init__(self, device: Device, at_once: int) -> None:
        self._device = device
        self._at_once = max(1, at_once)
        self._share = max(1, at_once - max(1, at_once // 4))  # of one user
        self._waiting: dict[int, dict[SessionId, _Line]] = {}  # by uid; in both, whose turn is next comes first
        self._running: dict[tuple[JobId, ProgramId], int] = {}  # whose they are

    def submit(self, job: JobRecord, program: ProgramRecord) -> None:
        """Have a Program checked when it is its turn."""
        lines = self._waiting.setdefault(job.session.peer.uid, {})
        lines.setdefault(job.session.id, deque()).append((job.id, program))
        self._start()

    def ended(self, job: JobId, program: ProgramId) -> None:
        """The device has said what it found. Nothing happens when it was not asked."""
        if self._running.pop((job, program), None) is not None:
            self._start()

    def forget(self, job: JobId) -> None:
        """The device is told to unload this job, and its checks go with it."""
        for uid, lines in list(self._waiting.items()):
            left = {name: deque(item for item in line if item[0] != job) for name, line in lines.items()}
            self._waiting[uid] = {name: line for name, line in left.items() if line}
            if not self._waiting[uid]:
                del self._waiting[uid]
        for key in [key for key in self._running if key[0] == job]:
            del self._running[key]
        self._start()

    def _start(self) -> None:
        while len(self._running) < self._at_once and (uid := self._next()) is not None:
            lines = self._waiting.pop(uid)
            session = next(iter(lines))
            line = lines.pop(session)
            job, program = line.popleft()
            if line:
                lines[session] = line  # behind all others
            if lines:
                self._waiting[uid] = lines
            self._running[job, program.id] = uid
            self._device.check(job, program.id, program.encoded)

    def _next(self) -> int | None:
        busy = list(self._running.values())
        return next((uid for uid in self._waiting if busy.count(uid) < self._share), None)


# ---- Questions wait here for their turn: one is answered in each turn of the loop, users in turn and their sessions in
# turn.
#
# An answer to GetStatus or ExplainJob looks at all jobs, or at all that is remembered, which takes longer than anything
# else a message makes the loop do. Answered as they come, a hundred of them in one pass would hold up everybody's
# steps.


MOST_WAITING = 16  # questions of one session

Answer = Callable[[], None]


class Turns:
    def __init__(self) -> None:
        self._waiting: dict[int, dict[SessionId, deque[Answer]]] = {}  # by uid; in both, whose turn is next comes first

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, session: SessionRecord, answer: Answer) -> None:
        """Have a question answered when it is its turn. Raises AdmissionRefused when the session has asked too many."""
        lines = self._waiting.setdefault(session.peer.uid, {})
        line = lines.setdefault(session.id, deque())
        if len(line) >= MOST_WAITING:
            raise AdmissionRefused(f"{len(line)} questions of this session wait for an answer", "wait for answers")
        line.append(answer)

    def next(self) -> None:
        """Answer the question whose turn it is."""
        if not self._waiting:
            return
        uid = next(iter(self._waiting))
        lines = self._waiting.pop(uid)
        session = next(iter(lines))
        line = lines.pop(session)
        answer = line.popleft()
        if line:
            lines[session] = line  # behind all others
        if lines:
            self._waiting[uid] = lines
        answer()

    def forget(self, session: SessionRecord) -> None:
        """The session is over, and wants no answers."""
        lines = self._waiting.get(session.peer.uid, {})
        lines.pop(session.id, None)
        if not lines:
            self._waiting.pop(session.peer.uid, None)


# ----


log = logging.getLogger("gpumux.daemon")

AT_ONCE_S: Final = 20e-6  # a wait that is over so soon found something that had come before it


class Desk:
    """One a daemon. Used on the loop's thread only."""

    def __init__(
        self,
        config: Config,
        router: Router,
        device: Device,
        segments: Segments,
        metrics: Metrics,
        core: Core,
        device_checks: int,
    ) -> None:
        self.config = config
        self.router = router
        self.device = device
        self.segments = segments
        self.metrics = metrics
        self.core = core
        self.books = Books()
        self.sight = Sight(self.books, lambda: Access(self.config.rules))
        self.turns = Turns()
        self.checks = CheckQueue(device, device_checks)
        self.unexpected = 0  # well-formed messages that made no sense and could not be answered
        self.events: deque[Event] = deque()
        self.feed = self.events.append
        self.waited = 0.0  # seconds for which what is heard of in this turn of the loop was there before, on average
        self._looked = 0.0
        self.catch_up: Callable[[JobRecord], None] = _nothing_new  # hear what the device has answered; set by the loop
        self.recall: Callable[[], None] = _nothing_lent  # before the device is asked for what is no core event

    def looks(self, now: float, busy_until: float) -> None:
        """The loop looks who has something for it, having been busy until then with what it found when it last did."""
        self.waited = 0.5 * (now - self._looked) if now - busy_until < AT_ONCE_S else 0.0
        self._looked = now

    def reply(self, session: SessionRecord, message: Message, frames: Sequence[bytes] = ()) -> None:
        """Send to a client. One that takes nothing loses the reply, which is counted, and its session."""
        if session.id in self.books.sessions and not self.router.send(session.id, message, frames):
            self.metrics.dropped_replies.inc()

    def hand_over(self, session: SessionRecord, segment: SharedSegment) -> int:
        """Pass a segment's descriptor to the client; the number the message about it names."""
        self.router.send_segment(session.id, segment.number, segment.fd, segment.nbytes)
        return segment.number

    def refuse(self, session: SessionRecord, ref: int, error: GpumuxError | Fault) -> None:
        """Answer request `ref` with a typed error, and count it."""
        self.metrics.rejected(error.code)
        log.info("session %s: request %d refused (%s): %s", session.id, ref, error.code, error.message)
        self.reply(session, Refusal(ref, error.code, error.message, error.remedy))


def as_fault(error: GpumuxError) -> Fault:
    return Fault(error.code, error.message, error.remedy)


def _nothing_new(job: JobRecord) -> None:
    """Of a device that leaves all answers to us."""


def _nothing_lent() -> None:
    """To a device that reads no lanes."""
