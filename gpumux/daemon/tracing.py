"""Recordings: the scheduler's events and commands as records for a client (wire/messages.py).

It decides nothing. `saw` is called after each event that the scheduler handled, with the time the scheduler was given.
Only what is under way is kept: outstanding pieces, holds and bans that have not ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf

from gpumux.daemon.context import DaemonContext, log
from gpumux.daemon.records import JobRecord, Records, SessionRecord
from gpumux.errors import AdmissionRefused, InternalError, ProtocolError
from gpumux.scheduler import events as cmd
from gpumux.scheduler import events as ev
from gpumux.scheduler.events import Command
from gpumux.scheduler.report import BannedRange, HeldJob, JobLoad, LaunchInfo
from gpumux.scheduler.scheduler import Scheduler
from gpumux.types import CollectiveEnded, JobId, LaunchId, PieceDone, PieceFailed, ProgramId, SessionId, StepId
from gpumux.wire import messages
from gpumux.wire import messages as msg

UNKNOWN_STREAM = -1  # stream of a piece that was launched before the recording began


class Recording:
    """One recording from `begin` on (seconds, the scheduler's clock). `own(job)`: whether the client that asked may
    know the job's operators."""

    def __init__(self, scheduler: Scheduler, records: Records, begin: float, own: Callable[[JobRecord], bool]) -> None:
        self.begin = begin
        self.records: list[messages.Record] = []  # the caller removes them
        self._scheduler = scheduler
        self._records = records
        self._own = own
        self._shorts: dict[JobId, tuple[str, bool]] = {}  # short id, and `own(job)`
        self._programs: set[tuple[JobId, ProgramId]] = set()
        self._out: dict[LaunchId, tuple[LaunchInfo, int, float]] = {}  # with stream and time of launch
        self._ended: dict[JobId, float] = {}  # end of each job's newest piece
        self._held: dict[JobId, tuple[HeldJob, float]] = {}  # held jobs, each with the time since when for this reason
        self._bans: dict[BannedRange, None] = {}
        self._loads: dict[JobId, JobLoad] = {}
        for piece in scheduler.all_out():
            self._out[piece.launch] = piece, UNKNOWN_STREAM, begin
        self._look(begin)
        for job in list(records.jobs):
            self._load(job, begin)

    # ---- looking on

    def saw(self, event: ev.Event, commands: Sequence[cmd.Command], now: float) -> None:
        """Record an event that the scheduler has handled. `commands` have not been carried out yet."""
        kind = type(event)
        if kind is PieceDone:
            self._done(event)  # type: ignore[arg-type]
        elif isinstance(event, PieceFailed):
            self._over(event.launch, now, "failed")
        elif isinstance(event, CollectiveEnded):
            waited = 1e3 * (event.ended - event.started)
            self._happened(event.job, event.ended, f"its peers came, {waited:.3f} ms after its piece had ended")
        elif isinstance(event, ev.PauseRequested):
            self._happened(event.job, now, "paused")
        elif isinstance(event, ev.ResumeRequested):
            self._happened(event.job, now, "resumed")
        for command in commands:
            if type(command) is cmd.LaunchPiece:
                piece = self._scheduler.out(command.launch)
                if piece is not None:
                    self._out[command.launch] = piece, command.stream, now
            elif type(command) is cmd.FinishStep:
                self._step(command, event, now)
            elif type(command) is cmd.FailStep:
                self._happened(command.job, now, f"step {command.step} failed", command.fault.message)
            elif type(command) is cmd.EndJob:
                fault = command.fault
                self._happened(command.job, now, "job ended", fault.message if fault is not None else "")
            elif type(command) is cmd.ForgetJob:
                for launch in [launch for launch, (piece, _, _) in self._out.items() if piece.job == command.job]:
                    self._over(launch, now, "dropped")
        self._look(now)
        for each in (event, *commands):
            job: JobId | None = getattr(each, "job", None)
            if job is not None and job in self._records.jobs:
                self._load(job, now)

    def end(self, now: float) -> None:
        """End the recording. Spans that are open end at the same time."""
        for launch in list(self._out):
            self._over(launch, now, "running")
        for held, since in self._held.values():
            self._was_held(held, since, now)
        for ban in self._bans:
            self._was_banned(ban, now)
        self._held.clear()
        self._bans.clear()

    # ---- jobs

    def _job(self, job_id: JobId) -> tuple[str, bool]:
        """The job's short id ("" if it is unknown), and `own(job)`."""
        known = self._shorts.get(job_id)
        if known is None:
            job = self._records.jobs.get(job_id)
            if job is None:
                return "", False
            known = self._shorts[job_id] = job.short, self._own(job)
            self.records.append(
                messages.JobSeen(job.short, job.spec.name if known[1] else "", job.spec.priority.name.lower(), known[1])
            )
        return known

    def _at(self, when: float) -> float:
        """A time on the recording's own clock; times before its beginning become 0."""
        return max(0.0, when - self.begin)

    # ---- pieces and steps

    def _done(self, event: PieceDone) -> None:
        found = self._out.pop(event.launch, None)
        if found is None:
            return
        piece, stream, launched = found
        self._ended[piece.job] = event.ended
        if event.ended > self.begin:
            self._piece(piece, stream, launched, event.started, event.ended, "done")

    def _over(self, launch: LaunchId, now: float, how: str) -> None:
        """Record a piece whose start and end are not known. A piece begins when the one before it in its stream has
        ended, and the pieces behind it have not begun."""
        found = self._out.pop(launch, None)
        if found is None:
            return
        piece, stream, launched = found
        started = max(launched, self._ended.get(piece.job, self.begin))
        if started < now:
            self._ended[piece.job] = now
            self._piece(piece, stream, launched, started, now, how)

    def _piece(self, piece: LaunchInfo, stream: int, launched: float, started: float, ended: float, how: str) -> None:
        short, own = self._job(piece.job)
        first, end = (piece.first, piece.end) if own else (0, 0)
        if own and (piece.job, piece.program) not in self._programs:
            self._programs.add((piece.job, piece.program))
            names = list(self._scheduler.operators(piece.job, piece.program))
            self.records.append(messages.ProgramSeen(short, piece.program, names))
        self.records.append(
            messages.PieceRan(
                short, stream, piece.step, piece.program, piece.piece, first, end, piece.share,
                self._at(launched), self._at(started), self._at(ended), how,
            )
        )  # fmt: skip

    def _step(self, command: cmd.FinishStep, event: ev.Event, now: float) -> None:
        times = command.times
        answered = event.ended if isinstance(event, PieceDone) and command.answered else now
        if answered > self.begin:
            short, _ = self._job(command.job)
            submitted = self._at(answered - times.total_s)
            step: StepId = command.step
            self.records.append(
                messages.StepRan(short, step, submitted, self._at(answered), times.queue_s, times.device_s)
            )  # fmt: skip

    def _happened(self, job_id: JobId, now: float, what: str, message: str = "") -> None:
        short, own = self._job(job_id)
        if short:
            self.records.append(messages.Happened(short, self._at(now), what, message if own else ""))

    def _load(self, job: JobId, now: float) -> None:
        """Record the job's load if it has changed."""
        load = self._scheduler.load(job)
        if self._loads.get(job) != load:
            short, _ = self._job(job)
            self._loads[job] = load
            self.records.append(messages.LoadSeen(short, self._at(now), *load))

    # ---- holds and bans

    def _look(self, now: float) -> None:
        """Record the guard's holds and bans after the event at `now`."""
        held = self._scheduler.held()
        if held or self._held:
            self._hold({entry.job: entry for entry in held}, now)
        bans = self._scheduler.banned()
        if len(bans) != len(self._bans) or not all(ban in self._bans for ban in bans):
            for ban in [ban for ban in self._bans if ban not in bans]:
                self._was_banned(ban, now)
            self._bans = dict.fromkeys(bans)

    def _hold(self, held: dict[JobId, HeldJob], now: float) -> None:
        """Record a span for each reason: a new reason for the same job begins a new span."""
        for job, (was, since) in list(self._held.items()):
            if held.get(job) != was:
                self._was_held(was, since, now)
                del self._held[job]
                if job in held and held[job].since == was.since:
                    self._held[job] = held[job], now
        for job, entry in held.items():
            self._held.setdefault(job, (entry, entry.since))

    def _was_held(self, held: HeldJob, since: float, now: float) -> None:
        if now > since and now > self.begin:
            job, high = self._job(held.job)[0], self._job(held.high)[0]
            if job:
                self.records.append(messages.WasHeld(job, high, held.reason, self._at(since), self._at(now)))

    def _was_banned(self, ban: BannedRange, now: float) -> None:
        (high, own), (low, _) = self._job(ban.high), self._job(ban.low)
        first, end = (ban.first, ban.end) if own else (0, 0)
        if high and low and now > self.begin:
            since, until = self._at(ban.since), self._at(now)
            self.records.append(messages.WasBanned(high, low, first, end, ban.share, ban.ratio, ban.why, since, until))


def cost(records: Iterable[messages.Record]) -> int:
    """Size of records for a recording's bound; a list of operators counts by its length."""
    return sum(1 + (len(record.operators) // 8 if type(record) is messages.ProgramSeen else 0) for record in records)


# ---- A recording for one client at a time (RecordTrace): its session, end, bounds, and sending it.
#
# Without a recording, the loop calls the scheduler itself. A recording wraps that call, and reads the event and the
# commands. Records are sent in small parts as they are made, so the daemon holds a few hundred at most. A recording
# ends when it reaches MAX_RECORDS, with a reason that says so, or when its client leaves.


MAX_SECONDS = 600.0
MAX_RECORDS = 200_000  # in one recording; about 16 MiB on the wire
PART = 400  # records; packing them takes a few hundred microseconds

Handle = Callable[[ev.Event, float], list[Command]]


class Tracing:
    """Runs at most one recording. `observe` sets the function by which the loop passes events to the scheduler; `due`
    is when to call `finish`. `failed` reports an exception of the recording, which ends it."""

    def __init__(
        self,
        context: DaemonContext,
        clock: Callable[[], float],
        observe: Callable[[Handle], None],
        failed: Callable[[str, Exception], None],
    ) -> None:
        self.due = inf
        self._context = context
        self._clock = clock
        self._observe = observe
        self._failed = failed
        self._recording: Recording | None = None
        self._session: SessionRecord | None = None
        self._ref = 0
        self._asked_s = 0.0
        self._left = 0  # records until the bound

    def ask(self, session: SessionRecord, ref: int, seconds: float, may_know: Callable[[JobRecord], bool]) -> None:
        """Begin a recording; with 0 seconds, end the session's own. An operator replaces the recording of a session
        that is not an operator's. Raises ProtocolError or AdmissionRefused."""
        if seconds == 0.0:
            if self._session is session:
                self.finish("it was ended early")
            return
        if not 0.0 < seconds <= MAX_SECONDS:
            raise ProtocolError(f"a recording of {seconds:g} s", f"record up to {MAX_SECONDS:g} s")
        operates = self._context.permissions.operates
        if self._session is not None and operates(session) and not operates(self._session):
            self.finish("an operator records now")
        if self._recording is not None:
            raise AdmissionRefused("somebody is recording already", "wait for the end of that recording and ask again")
        begin = self._clock()
        self._recording = Recording(self._context.scheduler, self._context.records, begin, may_know)
        self._session, self._ref, self._asked_s, self._left = session, ref, seconds, MAX_RECORDS
        self.due = begin + seconds
        self._observe(self._handle)
        log.info("session %s: records what runs for %g s", session.id, seconds)

    def _handle(self, event: ev.Event, now: float) -> list[Command]:
        commands = self._context.scheduler.handle(event, now)
        recording = self._recording
        if recording is not None:  # this event may have ended it
            try:
                recording.saw(event, commands, now)
                if len(recording.records) >= PART:
                    self._send(now)
            except Exception as error:  # noqa: BLE001 - the jobs that it looks at go on
                self._abort(error)
        return commands

    def _abort(self, error: Exception) -> None:
        session, ref = self._session, self._ref
        self._stop()
        self._failed("the rest of a recording", error)
        if session is not None:
            self._context.refuse(session, ref, InternalError("the recording failed", "look at the daemon's log"))

    def _send(self, now: float) -> None:
        """Send a part, and end the recording if it reaches the bound."""
        recording, session = self._recording, self._session
        assert recording is not None
        assert session is not None
        self._left -= cost(recording.records)
        if self._left <= 0:
            self.finish(f"it reached the bound of {MAX_RECORDS:,} records; record a shorter time")
            return
        made, recording.records = recording.records, []
        part = msg.TracePart(self._ref, False, max(0.0, now - recording.begin), "", 1)
        self._context.reply(session, part, [messages.pack(made)])

    def finish(self, reason: str = "") -> None:
        """End the recording, because its time is over or for `reason`."""
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
        self._context.reply(session, part, [messages.pack(recording.records)])

    def left(self, session: SessionId) -> None:
        """End the recording of a session that has ended."""
        if self._session is not None and self._session.id == session:
            self._stop()

    def _stop(self) -> None:
        self._recording = self._session = None
        self.due = inf
        self._observe(self._context.scheduler.handle)
