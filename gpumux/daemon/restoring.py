"""Snapshots read again, for a client that comes back, and its job's generator put back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from gpumux.core import events as ev
from gpumux.daemon.books import JobRecord, SessionRecord, TransferRecord
from gpumux.daemon.desk import Desk, log
from gpumux.daemon.segments import SharedSegment
from gpumux.device.contract import GENERATOR
from gpumux.errors import AdmissionRefused, ConfigError, GpumuxError, ProtocolError, UnknownJob, from_code
from gpumux.model import GENERATOR_BYTES, Fault, TransferId
from gpumux.recovery.link import Link
from gpumux.wire import keeping as k
from gpumux.wire import messages as msg

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
