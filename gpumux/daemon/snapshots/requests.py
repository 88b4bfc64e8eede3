"""Snapshots of jobs' state: taken when their clients ask, written by another process, read again for who comes back.

    PrepareSnapshot   memory to copy to (segments.py)
    TakeSnapshot      a transfer among the job's steps, into that memory, with the generator
    (the transfer)    the memory and the client's notes go to the writer (daemon/snapshots/writer.py)
    (it is written)   SnapshotSaved; the memory is free again

One of a job at a time. The clients decide when: they know what they can run again. Snapshots belong to the user and the
job's id; a client that returns opens the job under the id it had (docs/architecture.md, "Nothing is lost").
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from gpumux.daemon.context import Desk, log
from gpumux.daemon.records import JobRecord, SessionRecord, TransferRecord
from gpumux.daemon.segments import SharedSegment
from gpumux.daemon.snapshots.store import staged_bytes
from gpumux.daemon.snapshots.writer import Link
from gpumux.device.base import GENERATOR
from gpumux.errors import (
    AdmissionRefused,
    ConfigError,
    GpumuxError,
    ProtocolError,
    SnapshotFailed,
    UnknownJob,
    from_code,
)
from gpumux.hostmemory import memory_file
from gpumux.scheduler import events as ev
from gpumux.types import GENERATOR_BYTES, Fault, JobId, TransferId
from gpumux.wire import messages as k
from gpumux.wire import messages as msg

# ---- Snapshots read again, for a client that comes back, and its job's generator put back.


MAX_READS = 64  # that wait for the disk


def there(link: Link | None) -> Link:
    """Raises ConfigError where no snapshots are kept."""
    if link is None:
        raise ConfigError("this daemon keeps no snapshots", "start it with --state-dir")
    return link


class OwnTransfers:
    """The daemon's own, among the job's steps as those of its client are. Their numbers are negative."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._count = 0

    def start(
        self,
        job: JobRecord,
        segment: SharedSegment,
        buffers: tuple[int, ...],
        push: bool,
        then: Callable[[Fault | None], None],
    ) -> None:
        """`then` closes the segment, whatever becomes of it."""
        self._count += 1
        number = TransferId(-self._count)
        job.transfers[number] = TransferRecord(0, buffers, push, segment.nbytes, segment=segment, asked=True, then=then)
        self._desk.feed(ev.TransferRequested(job.id, number, push))


class Restoring:
    """`link` None: this daemon keeps nothing."""

    def __init__(self, desk: Desk, link: Link | None, transfers: OwnTransfers) -> None:
        self._desk = desk
        self._link = link
        self._transfers = transfers
        self._reads: deque[tuple[SessionRecord, k.ReadSnapshot]] = deque()
        self._reading = False

    def read(self, session: SessionRecord, m: k.ReadSnapshot, frames: Sequence[bytes]) -> None:
        there(self._link)
        if not 0 < len(m.snapshots) <= k.MAX_ASKED:
            raise ProtocolError(f"{len(m.snapshots)} snapshots", f"name 1 to {k.MAX_ASKED}")
        if len(self._reads) >= MAX_READS or any(waits is session for waits, _ in self._reads):
            raise AdmissionRefused("snapshots wait to be read, this session's or many others'", "try again in a second")
        self._reads.append((session, m))
        self._next_read()

    def _next_read(self) -> None:
        """One after the other: the writer holds one in memory, until it knows where to put it."""
        if self._reading or not self._reads:
            return
        session, m = self._reads.popleft()
        if session.id not in self._desk.books.sessions:
            self._next_read()
            return
        self._reading = True
        asked = {"uid": session.peer.uid, "job": m.job, "numbers": m.snapshots}
        there(self._link).ask("read", asked, [], lambda answer: self._was_read(session, m, answer))

    def _was_read(self, session: SessionRecord, m: k.ReadSnapshot, answer: Any) -> None:
        if isinstance(answer, GpumuxError):
            if isinstance(answer, UnknownJob) and "damaged" in answer.message:
                self._desk.metrics.damaged_snapshots.inc()
            self._give_up(session, m, answer)
            return
        self._desk.metrics.damaged_snapshots.inc(len(answer["bad"]))
        for number in answer["bad"]:
            log.error("snapshot %d of job %s of uid %d is damaged", number, m.job, session.peer.uid)
        nbytes = answer["nbytes"]

        def made(segment: SharedSegment | GpumuxError) -> None:
            if isinstance(segment, GpumuxError):
                self._give_up(session, m, segment)
                return
            there(self._link).ask(
                "fill", {}, [segment.fd], lambda filled: self._hand_over(session, m, answer, segment, filled)
            )

        try:
            if session.inline and nbytes > self._desk.config.max_message_bytes:
                raise AdmissionRefused(
                    f"{nbytes} bytes of state don't fit one message ({self._desk.config.max_message_bytes})",
                    "raise max_message_bytes, or resume over the ipc endpoint",
                )
            self._desk.segments.create(session.peer.uid, nbytes, "restore", made)
        except GpumuxError as error:
            self._give_up(session, m, error)

    def _hand_over(
        self, session: SessionRecord, m: k.ReadSnapshot, answer: Any, segment: SharedSegment, filled: Any
    ) -> None:
        if isinstance(filled, GpumuxError):
            segment.close()
            self._give_up(session, m, filled)
            return
        frames = (segment.read(0, segment.nbytes),) if session.inline else ()
        number = 0
        if not session.inline and session.id in self._desk.books.sessions:
            number = self._desk.hand_over(session, segment)
        self._desk.metrics.snapshots_read.inc()
        self._desk.reply(
            session,
            k.SnapshotRead(
                m.ref, m.job, answer["number"], number, segment.nbytes, answer["notes"], answer["bad"], len(frames)
            ),
            frames,
        )
        segment.close()
        self._reading = False
        self._next_read()

    def _give_up(self, session: SessionRecord, m: k.ReadSnapshot, error: GpumuxError) -> None:
        self._desk.refuse(session, m.ref, error)
        self._reading = False
        self._next_read()

    def replay(self, session: SessionRecord, job: JobRecord, m: k.Replay, frames: Sequence[bytes]) -> None:
        there(self._link)
        if len(frames) != 1 or len(frames[0]) not in (0, GENERATOR_BYTES):
            raise ProtocolError("Replay without a generator", f"send one frame, empty or of {GENERATOR_BYTES} bytes")
        log.info("job %s: its client came back, and %d steps run again", job.short, m.replays)
        self._desk.metrics.restores.inc()
        self._desk.metrics.replayed_steps.inc(m.replays)
        if not frames[0]:
            self._desk.reply(session, msg.Done(m.ref))
            return
        data = bytes(frames[0])

        def ended(segment: SharedSegment, fault: Fault | None) -> None:
            segment.close()
            if fault is None:
                self._desk.reply(session, msg.Done(m.ref))
            else:
                self._desk.refuse(session, m.ref, from_code(fault.code, fault.message, fault.remedy))

        def made(segment: SharedSegment | GpumuxError) -> None:
            if isinstance(segment, GpumuxError):
                self._desk.refuse(session, m.ref, segment)
                return
            segment.write(0, data)
            self._transfers.start(job, segment, (GENERATOR,), True, lambda fault: ended(segment, fault))

        self._desk.segments.create(session.peer.uid, GENERATOR_BYTES, f"generator-{job.short}", made)


# ----


EXPIRE_EVERY_S = 600.0
MAX_NOTES_BYTES = 16 * k.MAX_NOTES  # of all snapshots that are not written yet
MAX_FINDS = 8  # of one session, that wait for a job to end
REACT_S = 1.0  # for a client to answer SnapshotWanted, before a leaving daemon gives up on it
_LOOK_S = 0.05

Handler = Callable[[SessionRecord, Any, Sequence[bytes]], None]


@dataclass(slots=True, eq=False)
class _Snapshots:
    """What is known of one open job's."""

    last: int = -1  # number of the newest asked for
    staging: SharedSegment | None = None
    preparing: bool = False
    taking: bool = False  # from TakeSnapshot to SnapshotSaved
    taken_at: int = -1  # last step of the job behind which the newest saved one was taken
    saved: float = 0.0  # Unix time
    nbytes: int = 0


class Keeping:
    """`link` None: this daemon keeps nothing. `now` is seconds since 1970, `clock` the loop's."""

    def __init__(
        self, desk: Desk, link: Link | None, clock: Callable[[], float], now: Callable[[], float] = time.time
    ) -> None:
        self._desk = desk
        self._link = link
        self._clock = clock
        self._now = now
        self._jobs: dict[JobId, _Snapshots] = {}
        self._transfers = OwnTransfers(desk)
        self._restoring = Restoring(desk, link, self._transfers)
        self._finds: list[tuple[JobId, SessionRecord, k.FindKept]] = []  # what waits for the end of a job
        self._wanted: dict[JobId, int] = {}  # asked for before leaving: the last number there was
        self._wanted_at = inf
        # Not at once: after a kill, clients whose snapshots these are have still to come back.
        self._expire_at = clock() + EXPIRE_EVERY_S if link is not None else inf
        self._look_at = inf
        self._notes_bytes = 0

    def handlers(self, working: Callable[[SessionRecord, str], JobRecord]) -> dict[type, Handler]:
        """By class of message. `working` is the session's own job, if it takes transfers still."""

        def of_job(handler: Callable[[SessionRecord, JobRecord, Any, Sequence[bytes]], None]) -> Handler:
            return lambda session, m, frames: handler(session, working(session, m.job), m, frames)

        return {
            k.PrepareSnapshot: of_job(self._prepare),
            k.TakeSnapshot: of_job(self._take),
            k.Replay: of_job(self._restoring.replay),
            k.FindKept: self._find,
            k.ReadSnapshot: self._restoring.read,
        }

    @property
    def due(self) -> float:
        """When `seldom` or `may_leave` has something to do, on the loop's clock."""
        return min(self._expire_at, self._look_at)

    @property
    def _writer(self) -> Link:
        return there(self._link)

    # ---- taking one

    def _prepare(self, session: SessionRecord, job: JobRecord, m: k.PrepareSnapshot, frames: Sequence[bytes]) -> None:
        there(self._link)
        state = self._jobs.setdefault(job.id, _Snapshots())
        if state.preparing or state.taking:
            raise AdmissionRefused("a snapshot of this job is under way", "wait for SnapshotSaved")
        nbytes = staged_bytes(job.buffers)
        if state.staging is not None:
            if state.staging.nbytes == nbytes:
                self._desk.reply(session, msg.Done(m.ref))
                return
            state.staging.close()
            state.staging = None

        def made(segment: SharedSegment | GpumuxError) -> None:
            state.preparing = False
            if isinstance(segment, GpumuxError):
                self._failed(segment.code)
                self._desk.refuse(session, m.ref, segment)
            elif self._jobs.get(job.id) is not state or job.over:
                segment.close()
            else:
                state.staging = segment
                self._desk.reply(session, msg.Done(m.ref))

        state.preparing = True
        try:
            self._desk.segments.create(session.peer.uid, nbytes, f"snapshot-{job.short}", made)
        except GpumuxError as error:
            state.preparing = False
            self._failed(error.code)
            raise

    def _take(self, session: SessionRecord, job: JobRecord, m: k.TakeSnapshot, frames: Sequence[bytes]) -> None:
        writer, state, started = self._writer, self._jobs.get(job.id), self._clock()
        if len(frames) != 1 or len(frames[0]) > k.MAX_NOTES:
            raise ProtocolError(
                f"TakeSnapshot without notes, or with too long ones ({k.MAX_NOTES} bytes)", "send one frame"
            )
        if state is None or state.staging is None or state.staging.nbytes != staged_bytes(job.buffers):
            raise AdmissionRefused("there is no memory to copy the job's state to", "prepare a snapshot first")
        if m.snapshot <= state.last:
            raise ProtocolError(f"snapshot {m.snapshot} after {state.last}", "number snapshots upwards")
        if self._notes_bytes + len(frames[0]) > MAX_NOTES_BYTES:
            raise AdmissionRefused(f"{self._notes_bytes} bytes of notes wait for the disk", "try again later")
        self._notes_bytes += len(frames[0])
        staging, notes, sizes = state.staging, bytes(frames[0]), tuple(job.buffers)
        state.staging, state.taking, state.last = None, True, m.snapshot
        behind = job.last_step

        def ended(nbytes: int, error: GpumuxError | Fault | None) -> None:
            staging.close()
            state.taking = False
            self._notes_bytes -= len(notes)
            seconds = self._clock() - started
            if error is None:
                state.saved, state.nbytes, state.taken_at = self._now(), nbytes, behind
                self._desk.metrics.snapshot_saved(nbytes, seconds)
                log.debug("job %s: snapshot %d, %d bytes in %.2f s", job.short, m.snapshot, nbytes, seconds)
                self._desk.reply(session, k.SnapshotSaved(job.id, m.snapshot, nbytes, seconds, "", "", ""))
                return
            if not job.over:
                self._failed(error.code)
                log.warning("job %s: snapshot %d failed: %s", job.short, m.snapshot, error.message)
            said = error.code, error.message, error.remedy
            self._desk.reply(session, k.SnapshotSaved(job.id, m.snapshot, 0, seconds, *said))

        def copied(fault: Fault | None) -> None:
            if fault is not None:
                ended(0, fault)
                return
            uid = session.peer.uid
            facts = {"uid": uid, "job": job.id, "number": m.snapshot, "name": job.spec.name, "steps": m.steps}
            room = {"limit": self._desk.config.max_snapshot_bytes_per_user or 1 << 62, "living": self._living(uid)}
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
                )  # fmt: skip
            finally:
                os.close(beside)

        self._transfers.start(job, staging, (*range(len(sizes)), GENERATOR), False, copied)
        self._desk.reply(session, msg.Done(m.ref))

    def _failed(self, code: str) -> None:
        self._desk.metrics.snapshot_failed(code)

    def _living(self, uid: int | None = None) -> list[tuple[int, str]]:
        jobs = self._desk.books.jobs.values()
        return [(j.session.peer.uid, j.id) for j in jobs if uid is None or j.session.peer.uid == uid]

    def _find(self, session: SessionRecord, m: k.FindKept, frames: Sequence[bytes]) -> None:
        writer, mine = self._writer, session.peer.uid
        for job in self._desk.books.jobs.values():
            if job.session.peer.uid == mine and job.spec.name == m.name and job.id in self._jobs:
                self._still_open(job, session, m)
                return

        def found(answer: Any) -> None:
            if isinstance(answer, GpumuxError):
                self._desk.refuse(session, m.ref, answer)
                return
            job = self._desk.books.jobs.get(answer["job"])
            if job is None or job.session.peer.uid != mine:
                self._desk.reply(session, k.KeptFound(m.ref, answer["job"], answer["numbers"]))
                return
            try:  # resumed, and without a snapshot of its own until now
                self._still_open(job, session, m)
            except GpumuxError as error:
                self._desk.refuse(session, m.ref, error)

        writer.ask("find", {"uid": mine, "name": m.name}, [], found)

    def _still_open(self, job: JobRecord, session: SessionRecord, m: k.FindKept) -> None:
        """What becomes of a job that is ending is known when nothing of it is left: the answer waits for that. Raises
        AdmissionRefused for one that isn't."""
        if not job.ending and job.session.id in self._desk.books.sessions:
            raise AdmissionRefused(
                f"job {m.name!r} is still open (process {job.session.peer.pid})",
                "wait until it has ended, or stop it (gpumux jobs stop)",
            )
        if sum(waits is session for _, waits, _ in self._finds) >= MAX_FINDS:
            raise AdmissionRefused("this session's other questions for kept jobs wait still", "try again in a second")
        self._finds.append((job.id, session, m))

    def _ask_again(self, gone: JobId) -> None:
        """Those who waited for the end of this job."""
        there_still = [entry for entry in self._finds if entry[1].id in self._desk.books.sessions]
        self._finds = [entry for entry in there_still if entry[0] != gone]
        for session, m in [(session, m) for job, session, m in there_still if job == gone]:
            try:
                self._find(session, m, ())
            except GpumuxError as error:
                self._desk.refuse(session, m.ref, error)

    # ---- the end of jobs, and of the daemon

    def forgotten(self, job: JobRecord) -> None:
        """Nothing of the job is left. One that was finished is not kept, and neither are snapshots it had before it was
        resumed."""
        state = self._jobs.pop(job.id, None)
        if state is not None and state.staging is not None:
            state.staging.close()
        if job.finished and self._link is not None:
            self._link.ask("forget", {"uid": job.session.peer.uid, "job": job.id}, [], _expected)
        self._ask_again(job.id)

    def close(self) -> None:
        """Let go of memory that no snapshot was taken to."""
        for state in self._jobs.values():
            if state.staging is not None:
                state.staging.close()

    def hear(self) -> None:
        """The writer said something."""
        if self._link is not None:
            self._link.hear()

    def seldom(self, now: float) -> None:
        """What is due."""
        if self._link is not None and now >= self._expire_at:
            before = self._now() - self._desk.config.keep_s
            self._link.ask("expire", {"before": before, "living": self._living()}, [], _expected)
            self._expire_at = now + EXPIRE_EVERY_S

    def may_leave(self, now: float) -> bool:
        """Whether nothing is gained by staying: every client that works has saved what it has, or doesn't answer."""
        if self._link is None:
            return True
        if self._wanted_at == inf:
            self._wanted_at = now
            for job_id, state in self._jobs.items():
                job = self._desk.books.jobs.get(job_id)
                if job is not None and not job.unloading and job.last_step > state.taken_at:
                    self._wanted[job_id] = state.last
                    self._desk.reply(job.session, k.SnapshotWanted(job_id))
        waited = now - self._wanted_at
        waits = any(self._waits_for(job, last, waited) for job, last in self._wanted.items())
        if waits and waited < self._desk.config.drain_s:
            self._look_at = now + _LOOK_S
            return False
        return True

    def _waits_for(self, job: JobId, last: int, waited: float) -> bool:
        state = self._jobs.get(job)
        if state is None:
            return False
        if state.last > last:
            return state.taking
        return waited < REACT_S or state.taking or state.preparing

    # ---- what it says of itself

    def of(self, job: JobId) -> tuple[float, int]:
        """Unix time and bytes of the job's newest snapshot, 0 where there is none."""
        state = self._jobs.get(job)
        return (state.saved, state.nbytes) if state is not None else (0.0, 0)


def _expected(answer: Any) -> None:
    if isinstance(answer, GpumuxError):
        log.warning("snapshots: %s", answer)
