"""State and services that the daemon's parts share: records, permissions, queues, events for the scheduler, replies.

`feed` queues an event. The loop passes it to the scheduler after the caller has returned, so no call is re-entered.
Replies are sent at once: ZeroMQ batches them on its own thread.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any

from gpumux.access import BUILT_IN, Access, Rule
from gpumux.config import Config
from gpumux.daemon.records import JobRecord, ProgramRecord, Records, SessionRecord
from gpumux.daemon.round_robin import RoundRobin
from gpumux.daemon.segments import Segments, SharedSegment
from gpumux.device.base import Device
from gpumux.errors import AdmissionRefused, GpumuxError, NotOwner, UnknownJob
from gpumux.metrics.series import Metrics
from gpumux.scheduler.events import Event
from gpumux.scheduler.scheduler import Scheduler
from gpumux.types import Fault, JobId, ProgramId
from gpumux.wire.listen import TRUSTED
from gpumux.wire.messages import Message, Refusal
from gpumux.wire.router import Meter, Router, UserMeters

log = logging.getLogger("gpumux.daemon")


# ---- Which jobs a session may change, and what it may know of other jobs.
#
# A job's own session, its user, root, and peers that an access rule makes operators may change the job and see all of
# it. Every session sees the facts about other users' jobs that sharing a device requires: a short id, the user id,
# priority, weight, state, counts, device time and memory, the state of a high job's promise, and the high job that a
# low one is held for. Names, job ids, process ids, operators and messages are hidden. A job id is hidden although it
# opens nothing: after a restart, another user that knows it could open a job under it first.


UNKNOWN_UID = -1
ENDED_JOB = "another job"  # name shown for a job that has ended: its owner is unknown
_JOB_ID = re.compile(r"\b[0-9a-f]{32}\b")


class Permissions:
    """Decides which jobs a session may change and see. `access` is called for each decision, since the configuration
    may be reloaded."""

    def __init__(self, records: Records, access: Callable[[], Access]) -> None:
        self._records = records
        self._access = access

    def operates(self, session: SessionRecord) -> bool:
        """Whether the session is root's, or an operator's by an access rule."""
        return self._access().may_operate(session.peer)

    def rule(self, session: SessionRecord) -> Rule:
        """The rule for the priorities and weights that the session may give a job; an operator may give any."""
        access = self._access()
        return BUILT_IN if access.may_operate(session.peer) else access.rule_for(session.peer)

    def governs(self, session: SessionRecord, job: JobRecord) -> bool:
        """Whether the session may change the job, and know all of it."""
        uid = session.peer.uid
        own = job.session is session or (uid != UNKNOWN_UID and uid == job.session.peer.uid)
        return own or self.operates(session)

    def governed(self, session: SessionRecord, job: str) -> JobRecord:
        """Find a job that the session may change. Raises UnknownJob and NotOwner."""
        record = self._records.jobs.get(JobId(job))
        if record is None:
            raise UnknownJob(f"there is no job {job[:40]!r}", "`gpumux jobs` lists them")
        if self.governs(session, record):
            return record
        raise NotOwner(f"job {record.short} belongs to user {record.session.peer.uid}", "ask its owner, or an operator")

    def hidden(self, session: SessionRecord) -> Callable[[JobId], str | None]:
        """Return a function from a job's id to the name to show the session instead, None if it may know the job."""

        def name(job_id: JobId) -> str | None:
            job = self._records.jobs.get(job_id)
            if job is None:
                return ENDED_JOB
            return None if self.governs(session, job) else job.short

        return name

    def redact(self, session: SessionRecord, text: str) -> str:
        """Replace the ids of jobs that the session may not know in `text`."""
        name = self.hidden(session)
        return _JOB_ID.sub(lambda found: name(JobId(found[0])) or found[0], text)

    def shown(self, session: SessionRecord, body: dict[str, Any]) -> dict[str, Any]:
        """Hide in a body of GetStatus what the session may not see. `mine` tells whether it may change the job."""
        jobs = []
        for entry in body["jobs"]:
            record = self._records.jobs.get(JobId(entry["job"]))
            mine = record is not None and self.governs(session, record)
            jobs.append({**entry, **({} if mine else _hidden(entry)), "mine": mine})
        return {**body, "jobs": jobs}


def _hidden(entry: Mapping[str, Any]) -> dict[str, Any]:
    """What is shown in place of some fields of a job's entry in GetStatus."""
    fusion = entry.get("fusion")
    return {"job": "", "name": "", "pid": 0, "fusion": None if fusion is None else {**fusion, "why": ""}}


def with_short_ids(text: str, shorts: Mapping[JobId, str], unknown: str | None = None) -> str:
    """`text` with the short id of each job that is known in place of its whole id, and `unknown`, if given, in place of
    others."""
    return _JOB_ID.sub(lambda found: shorts.get(JobId(found[0]), found[0] if unknown is None else unknown), text)


# ---- Queues for checks of Programs, for questions and for jobs to open.


CHECKED_PER_S = 20.0  # Programs of one user in the long run; those of TRUSTED users never wait
CHECKED_AT_ONCE = 256  # Programs of one user


class CheckQueue:
    """Passes checks of Programs to the device, at most `at_once` at a time.

    A check runs for seconds, and for minutes if a client means harm. So no user gets all places: a place is free, or
    soon free, for the next user. A Program that is refused at once still costs a fork, which holds a core for
    milliseconds, so each user has so many checked in a while; those that are too early wait. `failed` is called with
    the job for whose Program the device raised: that is a bug.
    """

    def __init__(self, device: Device, at_once: int, clock: Callable[[], float]) -> None:
        self.failed: Callable[[JobId, Exception], None] = _raise
        self._device = device
        self._clock = clock
        self._meters = UserMeters(lambda uid, now: Meter(CHECKED_PER_S, CHECKED_AT_ONCE, now))
        self.due = inf  # when `start` is to be called again
        self._at_once = max(1, at_once)
        self._share = max(1, at_once - max(1, at_once // 4))  # the most places of one user
        self._waiting: RoundRobin[tuple[JobId, ProgramRecord]] = RoundRobin()
        self._running: dict[tuple[JobId, ProgramId], int] = {}  # uid, by job and program

    def submit(self, job: JobRecord, program: ProgramRecord) -> None:
        """Queue a Program for its check."""
        self._waiting.add(job.session.peer.uid, job.session.id, (job.id, program))
        self.start()

    def ended(self, job: JobId, program: ProgramId) -> None:
        """Free the place of a check that the device has answered. Does nothing for other checks."""
        if self._running.pop((job, program), None) is not None:
            self.start()

    def forget(self, job: JobId) -> None:
        """Drop the checks of a job that the device is about to unload."""
        self._waiting.drop(lambda item: item[0] == job)
        for key in [key for key in self._running if key[0] == job]:
            del self._running[key]
        self.start()

    def start(self) -> None:
        """Start what may be checked by now."""
        now = self._clock()
        while len(self._running) < self._at_once:
            found = self._waiting.next(
                lambda uid: self._has_place(uid) and (uid in TRUSTED or self._meters.spend(uid, now))
            )
            if found is None:
                break
            uid, (job, program) = found
            self._running[job, program.id] = uid
            try:
                self._device.check(job, program.id, program.encoded, uid)
            except Exception as error:  # noqa: BLE001 - what called this may be about another job
                self.failed(job, error)
        self.due = now + 0.5 / CHECKED_PER_S if self._waiting.items else inf  # often enough for any user's next
        self._meters.tidy(now)

    def _has_place(self, uid: int) -> bool:
        return sum(other == uid for other in self._running.values()) < self._share


def _raise(job: JobId, error: Exception) -> None:
    """The default of `CheckQueue.failed`."""
    raise error


MAX_WAITING = 16  # unanswered questions of one session
QUESTIONS_SHARE = 0.2  # of the loop's time, at most

Answer = Callable[[], None]


class QuestionQueue:
    """A queue of questions of clients; the loop answers at most one in each turn, when it is `due`.

    An answer to GetStatus or ExplainJob reads all jobs, or the whole history, which takes longer than any other
    message: milliseconds with a hundred jobs. If the loop answered them as they come, a hundred of them in one turn
    would delay every job's steps, and if it answered one in every turn, a client that never stops asking would delay
    each step by one. So answers take a fixed part of the time.
    """

    def __init__(self) -> None:
        self.waiting: RoundRobin[Answer] = RoundRobin()
        self.due = -inf  # when the next question may be answered

    def add(self, session: SessionRecord, answer: Answer) -> None:
        """Queue a question. Raises AdmissionRefused if the session has MAX_WAITING in the queue."""
        count = self.waiting.count(session.peer.uid, session.id)
        if count >= MAX_WAITING:
            raise AdmissionRefused(f"{count} questions of this session wait for an answer", "wait for answers")
        self.waiting.add(session.peer.uid, session.id, answer)

    def answer_next(self, clock: Callable[[], float]) -> None:
        """Answer the next question."""
        found = self.waiting.next()
        if found is not None:
            began = clock()
            found[1]()
            ended = clock()
            self.due = ended + (ended - began) * (1 / QUESTIONS_SHARE - 1)


OPENED_PER_S = 2.0  # jobs of one user in the long run
TRUSTED_OPENED_PER_S = 10.0  # of root, and of the daemon's user
OPENED_AT_ONCE = 64  # jobs of one user, or as many as one may have open, if that is more


class OpeningQueue:
    """Lets each user open so many jobs in a while; those that are too early wait.

    Each opening costs a process, which takes tens of milliseconds. Without this, a client that opens and closes one job
    after another takes a core, and all other forks wait for its own. The fork itself holds a core for some of them, in
    which the steps of an important job wait there, so that few are allowed in the long run.
    """

    def __init__(self, at_once: Callable[[], int]) -> None:
        self.waiting: RoundRobin[Answer] = RoundRobin()
        self.due = inf
        self._at_once = at_once
        self._meters = UserMeters(self._meter)

    def add(self, session: SessionRecord, opening: Answer) -> None:
        """Queue an opening. Raises AdmissionRefused if the session has MAX_WAITING in the queue."""
        count = self.waiting.count(session.peer.uid, session.id)
        if count >= MAX_WAITING:
            raise AdmissionRefused(
                f"{count} jobs of this session wait to be opened: {OPENED_PER_S:g} a second are, in the long run",
                "wait for JobOpened, and keep jobs open instead of opening new ones",
            )
        self.waiting.add(session.peer.uid, session.id, opening)
        self.due = -inf

    def open_next(self, now: float) -> None:
        """Open what may be opened by now."""
        while (found := self.waiting.next(lambda uid: self._meters.spend(uid, now))) is not None:
            found[1]()
        self.due = now + 0.5 / OPENED_PER_S if self.waiting.items else inf  # often enough for any user's next
        self._meters.tidy(now)

    def _meter(self, uid: int, now: float) -> Meter:
        rate = TRUSTED_OPENED_PER_S if uid in TRUSTED else OPENED_PER_S
        return Meter(rate, max(OPENED_AT_ONCE, self._at_once()), now)


# ---- The context.


class DaemonContext:
    """The shared state of one daemon, used on the loop's thread only. `catch_up` handles the device's events for a job
    so far."""

    def __init__(
        self,
        *,
        config: Config,
        router: Router,
        device: Device,
        segments: Segments,
        metrics: Metrics,
        scheduler: Scheduler,
        device_checks: int,
        catch_up: Callable[[JobRecord], None],
        clock: Callable[[], float],
    ) -> None:
        self.config = config
        self.router = router
        self.device = device
        self.segments = segments
        self.metrics = metrics
        self.scheduler = scheduler
        self.catch_up = catch_up
        self.records = Records()
        self.permissions = Permissions(self.records, lambda: Access(self.config.rules))
        self.questions = QuestionQueue()
        self.openings = OpeningQueue(lambda: self.config.max_jobs_per_user)
        self.checks = CheckQueue(device, device_checks, clock)
        self.unexpected = 0  # messages that were well formed, but invalid, and have no answer
        self.events: deque[Event] = deque()
        self.feed = self.events.append
        # Mean seconds between the arrival of this turn's messages and the moment when the loop looked for them.
        self.waited = 0.0

    def reply(self, session: SessionRecord, message: Message, frames: Sequence[bytes] = ()) -> None:
        """Send a message to a client. A client that does not read loses the reply, which is counted, and its
        session."""
        if session.id in self.records.sessions and not self.router.send(session.id, message, frames):
            self.metrics.dropped_replies.inc()

    def hand_over(self, session: SessionRecord, segment: SharedSegment) -> int:
        """Pass a segment's descriptor to the client. Returns the segment's number, for the message about it."""
        self.router.send_segment(session.id, segment.number, segment.fd, segment.nbytes)
        return segment.number

    def refuse(self, session: SessionRecord, ref: int, error: GpumuxError | Fault) -> None:
        """Answer request `ref` with a typed error, and count it. Does nothing if the session is over: what it asked for
        was not refused, its client has gone."""
        if session.id not in self.records.sessions:
            return
        self.metrics.rejected(error.code)
        log.info("session %s: request %d refused (%s): %s", session.id, ref, error.code, error.message)
        self.reply(session, Refusal(ref, error.code, error.message, error.remedy))


def as_fault(error: GpumuxError) -> Fault:
    return Fault(error.code, error.message, error.remedy)
