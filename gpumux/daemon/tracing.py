"""Recording what runs, for one client at a time (RecordTrace): who asks, until when, how much, and sending it.

While nobody records, the loop calls the core itself; a recording puts a call in between that looks at what went in
and came out. Records leave in small parts as they are made, so the daemon keeps a few hundred at most, and a
recording that has reached MAX_RECORDS is over, with a reason that says so. A client that leaves ends its own.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from gpumux.core import events as ev
from gpumux.core.commands import Command
from gpumux.daemon.books import JobRecord, SessionRecord
from gpumux.daemon.desk import Desk, log
from gpumux.daemon.recording import Recording, cost
from gpumux.errors import AdmissionRefused, ProtocolError
from gpumux.model import SessionId
from gpumux.wire import messages as msg
from gpumux.wire import records

MAX_SECONDS = 600.0
MAX_RECORDS = 200_000  # of one recording; about 16 MiB on the wire
PART = 400  # records; packing them takes a few hundred microseconds

Handle = Callable[[ev.Event, float], list[Command]]


class Tracing:
    """`observe` gives the loop another way to hand events to the core; `due` is when to call `finish`."""

    def __init__(self, desk: Desk, clock: Callable[[], float], observe: Callable[[Handle], None]) -> None:
        self.due = inf
        self._desk = desk
        self._clock = clock
        self._observe = observe
        self._recording: Recording | None = None
        self._session: SessionRecord | None = None
        self._ref = 0
        self._asked_s = 0.0
        self._left = 0  # records that may still come

    def ask(self, session: SessionRecord, ref: int, seconds: float, may_know: Callable[[JobRecord], bool]) -> None:
        """Begin a recording; with 0 seconds, end the session's own. An operator takes over from somebody who is none.
        Raises ProtocolError or AdmissionRefused."""
        if seconds == 0.0:
            if self._session is session:
                self.finish("it was ended early")
            return
        if not 0.0 < seconds <= MAX_SECONDS:
            raise ProtocolError(f"a recording of {seconds:g} s", f"record up to {MAX_SECONDS:g} s")
        operates = self._desk.sight.operates
        if self._session is not None and operates(session) and not operates(self._session):
            self.finish("an operator records now")
        if self._recording is not None:
            raise AdmissionRefused("somebody is recording already", "wait for the end of that recording and ask again")
        begin = self._clock()
        self._recording = Recording(self._desk.core, self._desk.books, begin, may_know)
        self._session, self._ref, self._asked_s, self._left = session, ref, seconds, MAX_RECORDS
        self.due = begin + seconds
        self._observe(self._handle)
        log.info("session %s: records what runs for %g s", session.id, seconds)

    def _handle(self, event: ev.Event, now: float) -> list[Command]:
        commands = self._desk.core.handle(event, now)
        recording = self._recording
        if recording is not None:  # it may have ended in the same breath
            recording.saw(event, commands, now)
            if len(recording.records) >= PART:
                self._send(now)
        return commands

    def _send(self, now: float) -> None:
        """A part, and the end if it reaches the bound."""
        recording, session = self._recording, self._session
        assert recording is not None
        assert session is not None
        self._left -= cost(recording.records)
        if self._left <= 0:
            self.finish(f"it reached the bound of {MAX_RECORDS:,} records; record a shorter time")
            return
        made, recording.records = recording.records, []
        part = msg.TracePart(self._ref, False, max(0.0, now - recording.begin), "", 1)
        self._desk.reply(session, part, [records.pack(made)])

    def finish(self, reason: str = "") -> None:
        """The recording is over: because its time is, or for `reason`."""
        recording, session, ref = self._recording, self._session, self._ref
        if recording is None or session is None:
            return
        now = self._clock()
        recording.end(now)
        self._stop()
        seconds = max(0.0, now - recording.begin)
        said = f"{seconds:.3f} of {self._asked_s:g} s: {reason}" if reason else ""
        log.info("session %s: recorded %s", session.id, said or f"{seconds:.3f} s")
        part = msg.TracePart(ref, True, seconds, said, 1)
        self._desk.reply(session, part, [records.pack(recording.records)])

    def left(self, session: SessionId) -> None:
        """The session is over, and its recording with it."""
        if self._session is not None and self._session.id == session:
            self._stop()

    def _stop(self) -> None:
        self._recording = self._session = None
        self.due = inf
        self._observe(self._desk.core.handle)
