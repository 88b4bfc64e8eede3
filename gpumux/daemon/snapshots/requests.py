"""Requests about snapshots of jobs' state: taking one, finding one, reading one for a job that is resumed.

    PrepareSnapshot   make memory to copy to (segments.py)
    TakeSnapshot      start a transfer among the job's steps, into that memory, with the generator
    (transfer ends)   send the memory and the client's notes to the writer (daemon/snapshots/writer.py)
    (it is written)   answer SnapshotSaved, and free the memory

A job has at most one snapshot under way. Clients decide when to take one: they know which steps they can run again.
Snapshots belong to the user and the job's id. A client that resumes a job opens it under the same id
(docs/architecture.md, "Nothing is lost").
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from gpumux.daemon.context import DaemonContext, log
from gpumux.daemon.records import JobRecord, SessionRecord, TransferRecord
from gpumux.daemon.round_robin import RoundRobin
from gpumux.daemon.segments import SharedSegment
from gpumux.daemon.snapshots.store import staged_bytes
from gpumux.daemon.snapshots.writer import WriterClient
from gpumux.device.base import GENERATOR
from gpumux.errors import (
    AdmissionRefused,
    ConfigError,
    DaemonGone,
    GpumuxError,
    ProtocolError,
    SnapshotFailed,
    UnknownJob,
    from_code,
)
from gpumux.hostmemory import memory_file
from gpumux.scheduler import events as ev
from gpumux.types import GENERATOR_BYTES, Fault, JobId, TransferId
from gpumux.wire import messages as msg

# ---- Reading snapshots, and restoring a job's generator, for a client that resumes a job.


MAX_READS = 16  # reads of one user's sessions that wait for the disk; one of each session


def require_writer(writer: WriterClient | None) -> WriterClient:
    """Return the writer. Raises ConfigError if this daemon keeps no snapshots."""
    if writer is None:
        raise ConfigError("this daemon keeps no snapshots", "start it with --state-dir")
    return writer


class DaemonTransfers:
    """Transfers that the daemon starts. They are ordered with the job's steps like a client's, and have negative
    ids."""

    def __init__(self, context: DaemonContext) -> None:
        self._context = context
        self._count = 0

    def start(
        self,
        job: JobRecord,
        segment: SharedSegment,
        buffers: tuple[int, ...],
        push: bool,
        then: Callable[[Fault | None], None],
    ) -> None:
        """Start a transfer between `segment` and the job's buffers; `push`: into the device. `then` gets the fault,
        None on success, and closes the segment in either case."""
        self._count += 1
        number = TransferId(-self._count)
        job.transfers[number] = TransferRecord(0, buffers, push, segment.nbytes, segment=segment, asked=True, then=then)
        self._context.feed(ev.TransferRequested(job.id, number, push))


class SnapshotRestorer:
    """Handles ReadSnapshot and Replay. `writer` is None if this daemon keeps no snapshots."""

    def __init__(self, context: DaemonContext, writer: WriterClient | None, transfers: DaemonTransfers) -> None:
        self._context = context
        self._writer = writer
        self._transfers = transfers
        self._reads: RoundRobin[tuple[SessionRecord, msg.ReadSnapshot]] = RoundRobin()
        self._reading = False

    def read(self, session: SessionRecord, m: msg.ReadSnapshot, frames: Sequence[bytes]) -> None:
        require_writer(self._writer)
        if not 0 < len(m.snapshots) <= msg.MAX_ASKED:
            raise ProtocolError(f"{len(m.snapshots)} snapshots", f"name 1 to {msg.MAX_ASKED}")
        uid = session.peer.uid
        if self._reads.count(uid, session.id) or self._reads.count_of(uid) >= MAX_READS:
            raise AdmissionRefused("this session's or many of your snapshots wait to be read", "try again in a second")
        self._reads.add(uid, session.id, (session, m))
        self._next_read()

    def left(self, session: SessionRecord) -> None:
        """Forget the reads of a session that has ended."""
        self._reads.forget(session.peer.uid, session.id)

    def _next_read(self) -> None:
        """Start the next read; users take turns. Reads run one at a time: the writer holds one snapshot in memory
        until its segment is made."""
        if self._reading or (found := self._reads.next()) is None:
            return
        uid, (session, m) = found
        self._reading = True
        require_writer(self._writer).ask(
            "read", {"uid": uid, "job": m.job, "numbers": m.snapshots}, [],
            lambda answer: self._was_read(session, m, answer), uid=uid, owner=session.id,
        )  # fmt: skip

    def _was_read(self, session: SessionRecord, m: msg.ReadSnapshot, answer: Any) -> None:
        if isinstance(answer, GpumuxError):
            if isinstance(answer, UnknownJob) and "damaged" in answer.message:
                self._context.metrics.damaged_snapshots.inc()
            self._give_up(session, m, answer)
            return
        self._context.metrics.damaged_snapshots.inc(len(answer["bad"]))
        for number in answer["bad"]:
            log.error("snapshot %d of job %s of uid %d is damaged", number, m.job, session.peer.uid)
        nbytes = answer["nbytes"]

        def made(segment: SharedSegment | GpumuxError) -> None:
            if isinstance(segment, GpumuxError):
                self._drop(session, m, segment)
                return
            require_writer(self._writer).ask(
                "fill", {}, [segment.fd], lambda filled: self._hand_over(session, m, answer, segment, filled),
                uid=session.peer.uid, owner=session.id,
            )  # fmt: skip

        try:
            if session.inline and nbytes > self._context.config.max_message_bytes:
                raise AdmissionRefused(
                    f"{nbytes} bytes of state don't fit one message ({self._context.config.max_message_bytes})",
                    "raise max_message_bytes, or resume over the ipc endpoint",
                )
            if session.id not in self._context.records.sessions:
                raise DaemonGone("its session has ended", "connect again")
            self._context.segments.create(session.peer.uid, session.id, nbytes, "restore", made)
        except GpumuxError as error:
            self._drop(session, m, error)

    def _hand_over(
        self, session: SessionRecord, m: msg.ReadSnapshot, answer: Any, segment: SharedSegment, filled: Any
    ) -> None:
        if isinstance(filled, GpumuxError):
            segment.close()
            self._give_up(session, m, filled)
            return
        frames = (segment.read(0, segment.nbytes),) if session.inline else ()
        number = 0
        if not session.inline and session.id in self._context.records.sessions:
            number = self._context.hand_over(session, segment)
        self._context.metrics.snapshots_read.inc()
        self._context.reply(
            session,
            msg.SnapshotRead(
                m.ref, m.job, answer["number"], number, segment.nbytes, answer["notes"], answer["bad"], len(frames)
            ),
            frames,
        )
        segment.close()
        self._reading = False
        self._next_read()

    def _drop(self, session: SessionRecord, m: msg.ReadSnapshot, error: GpumuxError) -> None:
        """Give up a read whose snapshot the writer holds in memory."""
        require_writer(self._writer).ask("drop", {}, [], _expected, uid=session.peer.uid)
        self._give_up(session, m, error)

    def _give_up(self, session: SessionRecord, m: msg.ReadSnapshot, error: GpumuxError) -> None:
        self._context.refuse(session, m.ref, error)
        self._reading = False
        self._next_read()

    def replay(self, session: SessionRecord, job: JobRecord, m: msg.Replay, frames: Sequence[bytes]) -> None:
        require_writer(self._writer)
        if len(frames) != 1 or len(frames[0]) not in (0, GENERATOR_BYTES):
            raise ProtocolError("Replay without a generator", f"send one frame, empty or of {GENERATOR_BYTES} bytes")
        log.info("job %s: its client came back, and %d steps run again", job.short, m.replays)
        self._context.metrics.restores.inc()
        self._context.metrics.replayed_steps.inc(m.replays)
        job.replays = m.replays
        if not frames[0]:
            self._context.reply(session, msg.Done(m.ref))
            return
        data = bytes(frames[0])

        def ended(segment: SharedSegment, fault: Fault | None) -> None:
            segment.close()
            if fault is None:
                self._context.reply(session, msg.Done(m.ref))
            else:
                self._context.refuse(session, m.ref, from_code(fault.code, fault.message, fault.remedy))

        def made(segment: SharedSegment | GpumuxError) -> None:
            if isinstance(segment, GpumuxError):
                self._context.refuse(session, m.ref, segment)
                return
            segment.write(0, data)
            self._transfers.start(job, segment, (GENERATOR,), True, lambda fault: ended(segment, fault))

        self._context.segments.create(session.peer.uid, session.id, GENERATOR_BYTES, f"generator-{job.short}", made)


# ---- Taking and finding snapshots, and what the end of a job or of the daemon does to them.


EXPIRE_EVERY_S = 600.0
# A request that the writer has been at for so long is logged, and questions for kept jobs are refused.
STALL_S = 60.0
# Bytes of notes of snapshots that are not written yet, of one user, and of all. A user who has none is not refused for
# what others have.
MAX_NOTES_BYTES_PER_USER = 4 * msg.MAX_NOTES
MAX_NOTES_BYTES = 16 * msg.MAX_NOTES
MAX_FINDS = 8  # FindKept requests of one session that have no answer
REACT_S = 1.0  # seconds a leaving daemon waits for a client's answer to SnapshotWanted
_LOOK_S = 0.05

Handler = Callable[[SessionRecord, Any, Sequence[bytes]], None]


@dataclass(slots=True, eq=False)
class _Snapshots:
    """The snapshots of one open job."""

    last: int = -1  # number of the newest snapshot requested
    staging: SharedSegment | None = None
    preparing: bool = False
    taking: bool = False  # from TakeSnapshot to SnapshotSaved
    taken_at: int = -1  # last step before the newest saved snapshot
    saved: float = 0.0  # Unix time of the newest saved snapshot
    nbytes: int = 0  # bytes of the newest saved snapshot


class SnapshotRequests:
    """Handles every request about snapshots. `writer` is None if this daemon keeps none. `now` is seconds since 1970,
    `clock` the loop's clock."""

    def __init__(
        self,
        context: DaemonContext,
        writer: WriterClient | None,
        clock: Callable[[], float],
        now: Callable[[], float] = time.time,
    ) -> None:
        self._context = context
        self._writer = writer
        self._clock = clock
        self._now = now
        self._jobs: dict[JobId, _Snapshots] = {}
        self._transfers = DaemonTransfers(context)
        self._restoring = SnapshotRestorer(context, writer, self._transfers)
        self._finds: list[tuple[JobId, SessionRecord, msg.FindKept]] = []  # requests that wait for the end of a job
        # For each job that was sent SnapshotWanted: the number of its newest snapshot at that time.
        self._wanted: dict[JobId, int] = {}
        self._wanted_at = inf
        # Not when the daemon starts: after a kill, clients reconnect and still need their snapshots.
        self._expire_at = clock() + EXPIRE_EVERY_S if writer is not None else inf
        self._started = now(), clock()
        self._look_at = inf
        self._stall_at = clock() + STALL_S if writer is not None else inf  # time of the next look at the writer
        self._stalled = False  # whether the log says that the writer does not answer
        # Time of the next call of `run_timers` or `may_leave`, on the loop's clock.
        self.due = min(self._expire_at, self._stall_at)
        self._notes_bytes: Counter[int] = Counter()  # by uid

    def handlers(self, working: Callable[[SessionRecord, str], JobRecord]) -> dict[type, Handler]:
        """Handlers by class of message. `working` returns the session's own job, and raises if it no longer accepts
        transfers."""

        def of_job(handler: Callable[[SessionRecord, JobRecord, Any, Sequence[bytes]], None]) -> Handler:
            return lambda session, m, frames: handler(session, working(session, m.job), m, frames)

        return {
            msg.PrepareSnapshot: of_job(self._prepare),
            msg.TakeSnapshot: of_job(self._take),
            msg.Replay: of_job(self._restoring.replay),
            msg.FindKept: self._find,
            msg.ReadSnapshot: self._restoring.read,
        }

    # ---- taking a snapshot

    def _prepare(self, session: SessionRecord, job: JobRecord, m: msg.PrepareSnapshot, frames: Sequence[bytes]) -> None:
        require_writer(self._writer)
        state = self._jobs.setdefault(job.id, _Snapshots())
        if state.preparing or state.taking:
            raise AdmissionRefused("a snapshot of this job is under way", "wait for SnapshotSaved")
        nbytes = staged_bytes(job.buffers)
        if state.staging is not None:
            if state.staging.nbytes == nbytes:
                self._context.reply(session, msg.Done(m.ref))
                return
            state.staging.close()
            state.staging = None

        def made(segment: SharedSegment | GpumuxError) -> None:
            state.preparing = False
            if isinstance(segment, GpumuxError):
                self._failed(segment.code)
                self._context.refuse(session, m.ref, segment)
            elif self._jobs.get(job.id) is not state or job.over:
                segment.close()
            else:
                state.staging = segment
                self._context.reply(session, msg.Done(m.ref))

        state.preparing = True
        try:
            self._context.segments.create(session.peer.uid, session.id, nbytes, f"snapshot-{job.short}", made)
        except GpumuxError as error:
            state.preparing = False
            self._failed(error.code)
            raise

    def _take(self, session: SessionRecord, job: JobRecord, m: msg.TakeSnapshot, frames: Sequence[bytes]) -> None:
        writer, state, started = require_writer(self._writer), self._jobs.get(job.id), self._clock()
        if len(frames) != 1 or len(frames[0]) > msg.MAX_NOTES:
            raise ProtocolError(
                f"TakeSnapshot without notes, or with too long ones ({msg.MAX_NOTES} bytes)", "send one frame"
            )
        if state is None or state.staging is None or state.staging.nbytes != staged_bytes(job.buffers):
            raise AdmissionRefused("there is no memory to copy the job's state to", "prepare a snapshot first")
        if m.snapshot <= state.last:
            raise ProtocolError(f"snapshot {m.snapshot} after {state.last}", "number snapshots upwards")
        self._charge_notes(session.peer.uid, len(frames[0]))
        staging, notes, sizes = state.staging, bytes(frames[0]), tuple(job.buffers)
        state.staging, state.taking, state.last = None, True, m.snapshot
        behind = job.last_step

        def ended(nbytes: int, error: GpumuxError | Fault | None) -> None:
            staging.close()
            state.taking = False
            self._notes_bytes[session.peer.uid] -= len(notes)
            seconds = self._clock() - started
            if error is None:
                state.saved, state.nbytes, state.taken_at = self._now(), nbytes, behind
                self._context.metrics.snapshot_saved(nbytes, seconds)
                log.debug("job %s: snapshot %d, %d bytes in %.2f s", job.short, m.snapshot, nbytes, seconds)
                self._context.reply(session, msg.SnapshotSaved(job.id, m.snapshot, nbytes, seconds, "", "", ""))
                return
            if not job.over:
                self._failed(error.code)
                log.warning("job %s: snapshot %d failed: %s", job.short, m.snapshot, error.message)
            said = error.code, error.message, error.remedy
            self._context.reply(session, msg.SnapshotSaved(job.id, m.snapshot, 0, seconds, *said))

        def copied(fault: Fault | None) -> None:
            if fault is not None:
                ended(0, fault)
                return
            uid = session.peer.uid
            facts = {"uid": uid, "job": job.id, "number": m.snapshot, "name": job.spec.name, "steps": m.steps}
            room = {"limit": self._context.config.max_snapshot_bytes_per_user or 1 << 62, "living": self._living(uid)}
            try:
                beside = memory_file("gpumux-notes", [b"".join(n.to_bytes(8, "little") for n in sizes), notes])
            except OSError as error:
                ended(0, SnapshotFailed(f"no memory for the snapshot's notes: {error.strerror}", "free some"))
                return
            try:
                lengths = {"buffers": len(sizes), "notes": len(notes)}
                writer.ask(
                    "save", {**facts, **room, **lengths}, [staging.fd, beside],
                    lambda answer: ended(0, answer) if isinstance(answer, GpumuxError) else ended(answer, None),
                    uid=uid, owner=job.id,
                )  # fmt: skip
            finally:
                os.close(beside)

        self._transfers.start(job, staging, (*range(len(sizes)), GENERATOR), False, copied)
        self._context.reply(session, msg.Done(m.ref))

    def _charge_notes(self, uid: int, nbytes: int) -> None:
        """Count the notes of a snapshot that begins. Raises AdmissionRefused if too many wait for the disk."""
        mine, held = self._notes_bytes[uid], self._notes_bytes.total()
        if mine + nbytes > MAX_NOTES_BYTES_PER_USER or (mine and held + nbytes > MAX_NOTES_BYTES):
            raise AdmissionRefused(f"{mine} bytes of notes of your jobs wait for the disk", "try again later")
        self._notes_bytes[uid] += nbytes

    def _failed(self, code: str) -> None:
        self._context.metrics.snapshot_failed(code)

    def _living(self, uid: int | None = None) -> list[tuple[int, str]]:
        jobs = self._context.records.jobs.values()
        return [(j.session.peer.uid, j.id) for j in jobs if uid is None or j.session.peer.uid == uid]

    def _find(self, session: SessionRecord, m: msg.FindKept, frames: Sequence[bytes]) -> None:
        writer, mine = require_writer(self._writer), session.peer.uid
        if writer.count(mine, session.id) + sum(waits is session for _, waits, _ in self._finds) >= MAX_FINDS:
            raise AdmissionRefused("this session's other questions for kept jobs wait still", "try again in a second")
        for job in self._context.records.jobs.values():
            if job.session.peer.uid == mine and job.spec.name == m.name and job.id in self._jobs:
                self._still_open(job, session, m)
                return

        waited = writer.waited(self._clock())
        if waited >= STALL_S:
            raise SnapshotFailed(*_stall(waited))

        def found(answer: Any) -> None:
            if isinstance(answer, GpumuxError):
                self._context.refuse(session, m.ref, answer)
                return
            job = self._context.records.jobs.get(answer["job"])
            if job is None or job.session.peer.uid != mine:
                self._context.reply(session, msg.KeptFound(m.ref, answer["job"], answer["numbers"]))
                return
            try:  # the job was resumed, and has taken no snapshot since
                self._still_open(job, session, m)
            except GpumuxError as error:
                self._context.refuse(session, m.ref, error)

        writer.ask("find", {"uid": mine, "name": m.name}, [], found, uid=mine, owner=session.id)

    def _still_open(self, job: JobRecord, session: SessionRecord, m: msg.FindKept) -> None:
        """Delay the answer until the job, which is ending, is forgotten: only then is it known whether its snapshots
        are kept. Raises AdmissionRefused for a job that isn't ending."""
        if not job.ending and job.session.id in self._context.records.sessions:
            raise AdmissionRefused(
                f"job {m.name!r} is still open (process {job.session.peer.pid})",
                "wait until it has ended, or stop it (gpumux jobs stop)",
            )
        self._finds.append((job.id, session, m))

    def _ask_again(self, gone: JobId) -> None:
        """Answer the FindKept requests that waited for the end of this job."""
        waited = [(session, m) for job, session, m in self._finds if job == gone]
        self._finds = [entry for entry in self._finds if entry[0] != gone]
        for session, m in waited:
            try:
                self._find(session, m, ())
            except GpumuxError as error:
                self._context.refuse(session, m.ref, error)

    # ---- the end of sessions, of jobs, and of the daemon

    def left(self, session: SessionRecord) -> None:
        """Forget the questions of a session that has ended. What its jobs have begun to save is saved."""
        self._finds = [entry for entry in self._finds if entry[1] is not session]
        self._restoring.left(session)
        if self._writer is not None:
            self._writer.forget(session.peer.uid, session.id)

    def forgotten(self, job: JobRecord) -> None:
        """Drop the records of a job that the daemon has forgotten. Snapshots of a finished job are deleted, including
        those from before it was resumed."""
        state = self._jobs.pop(job.id, None)
        if state is not None and state.staging is not None:
            state.staging.close()
        if job.finished and self._writer is not None:
            uid = job.session.peer.uid
            self._writer.ask("forget", {"uid": uid, "job": job.id}, [], _expected, uid=uid, owner=job.id)
        self._ask_again(job.id)

    def close(self) -> None:
        """Free staging memory that no snapshot was copied to."""
        for state in self._jobs.values():
            if state.staging is not None:
                state.staging.close()

    def hear(self) -> None:
        """Handle the writer's answer; called when its descriptor is readable."""
        if self._writer is not None:
            self._writer.hear()

    @property
    def heard(self) -> str:
        """The session or job whose request `hear` was about."""
        return self._writer.owner if self._writer is not None else ""

    def run_timers(self, now: float) -> None:
        """Have the writer delete expired snapshots, and look at whether it still answers, when that is due."""
        if self._writer is None:
            return
        expire, look = now >= self._expire_at, now >= self._stall_at
        if expire:
            self._expire_at = now + EXPIRE_EVERY_S
        if look:
            self._stall_at = now + STALL_S
        self.due = min(self._expire_at, self._look_at, self._stall_at)  # before what follows, which may fail
        if expire:
            before = self._age_clock(now) - self._context.config.keep_s
            self._writer.ask("expire", {"before": before, "living": self._living()}, [], _expected)
        if look:
            self._look_for_stall(self._writer.waited(now))

    def _age_clock(self, now: float) -> float:
        """Unix time by which snapshots age. If the system's clock is set forward by more than `keep_s`, every snapshot
        would be too old at once; so the time since the daemon started counts if it is less."""
        wall, clock = self._started
        return min(self._now(), wall + now - clock)

    def _look_for_stall(self, waited: float) -> None:
        if self._stalled and waited < STALL_S:
            log.info("snapshots: their process answers again")
        elif not self._stalled and waited >= STALL_S:
            log.warning("snapshots: %s; %s", *_stall(waited))
        self._stalled = waited >= STALL_S

    def may_leave(self, now: float) -> bool:
        """Whether the daemon may leave: every job that ran steps has a new snapshot, or its client doesn't answer. The
        first call sends SnapshotWanted."""
        if self._writer is None:
            return True
        if self._wanted_at == inf:
            self._wanted_at = now
            for job_id, state in self._jobs.items():
                job = self._context.records.jobs.get(job_id)
                if job is not None and not job.unloading and job.last_step > state.taken_at:
                    self._wanted[job_id] = state.last
                    self._context.reply(job.session, msg.SnapshotWanted(job_id))
        waited = now - self._wanted_at
        waits = any(self._waits_for(job, last, waited) for job, last in self._wanted.items())
        waits = waits and waited < self._context.config.drain_s
        self._look_at = now + _LOOK_S if waits else inf
        self.due = min(self._expire_at, self._look_at, self._stall_at)
        return not waits

    def _waits_for(self, job: JobId, last: int, waited: float) -> bool:
        state = self._jobs.get(job)
        if state is None:
            return False
        if state.last > last:
            return state.taking
        return waited < REACT_S or state.taking or state.preparing

    # ---- figures

    def newest_snapshot(self, job: JobId) -> tuple[float, int]:
        """Unix time and bytes of the job's newest snapshot, zeros if there is none."""
        state = self._jobs.get(job)
        return (state.saved, state.nbytes) if state is not None else (0.0, 0)


def _stall(waited: float) -> tuple[str, str]:
    """Message and remedy for a writer that has been at one request for so long. It is not killed: on a slow disk its
    successor would be as slow, and what it has written would be lost."""
    return (
        f"the process that keeps snapshots has been at one request for {waited:.0f} s",
        "see whether the state directory's disk hangs, or the process is stopped (kill -CONT)",
    )


def _expected(answer: Any) -> None:
    if isinstance(answer, GpumuxError):
        log.warning("snapshots: %s", answer)
